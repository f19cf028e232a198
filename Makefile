# Everything runs in .venv, which these targets make. The tests cache compiled kernels in the user's cache folder.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test gpu-test thorough check goldens clean

demo: .venv/demo
	$(BIN)/cudal2gen run --mnk 64_256_256

test: .venv/dev check
	$(BIN)/python -m pytest

# On a machine with a GPU: every path of the templates right on it, adversaries caught, streams, graphs, the launcher's
# refusals, compute-sanitizer, and the emulator bit for bit. A few minutes, most of it compiling; nothing is stored.
# Where torch and the compiler are installed already, without .venv: python -m pytest -m gpu -q
# Verdicts that are stored: cudal2gen validate --all --set gpu=h200 --on gpu --compare-emulator
gpu-test: .venv/dev
	$(BIN)/python -m pytest -m gpu -q

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Hundreds of drawn records, compiled and executed, other ones each time.
thorough: .venv/dev
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest tests/test_validator.py tests/test_kernel.py tests/test_renderer.py

# Accepts changed templates: rewrites the golden texts.
goldens: .venv/dev
	$(BIN)/python -m tests.test_renderer
	$(BIN)/python -m tests.test_validator

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[nvcc]'
	touch $@

.venv/dev: .venv/demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[nvcc,gpu,dev]'
	touch $@

clean:
	rm -rf .venv build dist
