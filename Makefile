# Everything runs in .venv, which these targets make. The tests cache compiled kernels in the user's cache folder.
PYTHON ?= python3
BIN := .venv/bin
# Processes that share the tests, with 4 GiB each: one more than two cores, since a fifth of the time is waiting.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# The tests start hundreds of processes. Without bytecode on disk, as some containers ask, each compiles all modules: 2 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick pytest gpu-test gpu-day gpu-rehearsal thorough torch-matrix mutants check browser goldens release clean

demo: .venv/demo
	$(BIN)/cudal2gen run --mnk 64_256_256

# What waits for the network goes side by side, and so do the types, which one core checks, and the tests.
test:
	$(MAKE) --no-print-directory -j2 .venv/dev browser
	$(MAKE) --no-print-directory -j2 check pytest

# For daily work: what is not marked slow; every room has such tests.
quick: .venv/dev
	$(MAKE) --no-print-directory -j2 check pytest SELECTED='-m "not slow"'

pytest: .venv/dev
	$(PYTEST) $(SELECTED)

# On a machine with a GPU: every path of the templates right on it, adversaries caught, streams, graphs, the launcher's
# refusals, compute-sanitizer, and the emulator bit for bit. A few minutes, most of it compiling; nothing is stored.
# Where torch and the compiler are installed already, without .venv: python -m pytest -m gpu -q
# Verdicts that are stored: cudal2gen validate --all --gpu h200 --on gpu --also emulator
gpu-test: .venv/dev
	$(BIN)/python -m pytest -m gpu -q

# Before half an hour on a borrowed H100 or H200: compiles what the plan needs, fetches the wheels that a bare machine lacks, and
# prints the plan and its budget. On that machine, where only Python and PyTorch are: python3 scripts/gpu_day.py call 1
# (then 2 and 3). The rehearsal runs all of it against an emulated device.
gpu-day: .venv/dev
	$(BIN)/python scripts/gpu_day.py prepare

gpu-rehearsal: .venv/dev
	$(BIN)/python scripts/gpu_day.py rehearse

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The report is looked at in a real browser. One that is there is taken, else Debian's chromium is installed.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; \
	done; \
	test "$$(id -u)" = 0 && sudo= || sudo='sudo -n'; \
	export DEBIAN_FRONTEND=noninteractive; \
	{ $$sudo apt-get update -qq && $$sudo apt-get install -qq -y --no-install-recommends chromium; } || { \
	  echo "The tests open the report in a browser, and none could be installed: install chromium or google-chrome." >&2; \
	  exit 1; \
	}

# All that ``make test`` draws a part of: files that take draws, that Hypothesis draws for, or that have tests of minutes.
# Hundreds of drawn records, compiled and executed, other ones each time; all mutants; ten thousand damaged files and
# command lines; the day on a borrowed GPU in rehearsal; the whole library from nothing.
DRAWN = $(shell grep -lrE "draws import|import draws|fuzzed import|hypothesis import|mark\.(thorough|one_in)" tests --include="test_*.py")
LIBRARY := tests/cudal2gen/test_library.py
thorough: export HYPOTHESIS_PROFILE = thorough
thorough: .venv/dev
	$(PYTEST) $(filter-out $(LIBRARY),$(DRAWN))
	$(BIN)/python -m pytest -s $(LIBRARY)
	$(BIN)/python -m scripts.torch_matrix -n $(WORKERS)

# The tests of operators with the oldest torch that is supported, 2.11 and the newest on PyPI, each in a folder of the user's
# cache (1.5 GB); a part of thorough. Other ones: make torch-matrix TORCH="2.10.0 2.12.1"
torch-matrix: .venv/dev
	$(BIN)/python -m scripts.torch_matrix $(addprefix --torch ,$(TORCH)) -n $(WORKERS)

# Draws mutants of every room's Python code and tells which its own tests notice; a hundred take hours. Another draw, of
# some rooms: make mutants SEED=7 COUNT=5 ROOMS="kernelproof/grading kernelproof/ground"
mutants: .venv/dev
	$(BIN)/python scripts/mutants.py --seed $(or $(SEED),0) --count $(or $(COUNT),10) $(ROOMS)

# Accepts changed templates: rewrites the golden texts, and the list of paths that cover all branches.
goldens: .venv/dev
	$(BIN)/python -m tests.cudal2gen.test_renderer
	$(BIN)/python -c "from pathlib import Path; from tests.cudal2gen import covering; covering.renew(Path())"

# Rehearses a release: sdist and wheel in dist/, of one version that CHANGELOG.md has too, and alike. Publishes nothing.
release: .venv/dev
	$(BIN)/python scripts/release.py

# Python compiles the modules that it imports; pip would compile all, which takes longer than to install them.
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[nvcc]'
	touch $@

.venv/dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[nvcc,gpu,dev]'
	touch .venv/demo $@

clean:
	rm -rf .venv build dist
