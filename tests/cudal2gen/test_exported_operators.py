"""Proves that programs with our operators can be exported, loaded in other processes, and scripted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from tests.packages import require

torch = require("torch")

pytestmark = pytest.mark.torch


class Model(torch.nn.Module):  # type: ignore[misc]
    """A model that calls each operator once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 16).bfloat16())
        self.gate = torch.nn.Parameter(torch.randn(32, 16).bfloat16())

    def forward(self, x: Any, offs: Any) -> Any:
        """All operators, one after the other. ``offs``: the ends of groups of rows."""
        d = cudal2gen.linear(x, self.weight, self.weight[0], activation="gelu")
        d = cudal2gen.swiglu(cudal2gen.linear(d, self.weight), self.gate)
        d = cudal2gen.grouped_mm(d, self.weight.expand(3, 16, 16), offs=offs)
        return cudal2gen.bmm(d[None], d.mT[None]) + cudal2gen.matmul(d, d.mT)


# A program that loads an exported model (first argument) and compares its result (second argument).
LOADING_PROGRAM = """
import sys
{imports}
assert "cudal2gen.operators" not in sys.modules
program = torch.export.load(sys.argv[1])
assert "cudal2gen.operators" in sys.modules
x, offs, expected = torch.load(sys.argv[2])
assert torch.equal(program.module()(x, offs), expected)
print(cudal2gen.stats()["torch"])
"""


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import cudal2gen\nimport torch", "import torch\nimport cudal2gen"])
def test_another_process_loads_an_exported_program(imports: str, tmp_path: Path) -> None:
    model, x, offs = Model(), torch.randn(8, 16).bfloat16(), torch.tensor([3, 3, 8], dtype=torch.int32)
    program = torch.export.export(model, (x, offs))
    names = {str(node.target) for node in program.graph.nodes if "cudal2gen" in str(node.target)}
    assert len(names) >= 4
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, offs, model(x, offs).detach()), tmp_path / "values.pt")
    command = [
        sys.executable,
        "-c",
        LOADING_PROGRAM.format(imports=imports),
        str(tmp_path / "model.pt2"),
        str(tmp_path / "values.pt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'on the CPU': 6" in done.stdout


@pytest.mark.slow
def test_looking_for_torch_does_not_import_it() -> None:
    """Libraries look for torch to see whether it is installed. A later import works as if nothing had looked."""
    program = """
import sys, importlib.util, cudal2gen
assert importlib.util.find_spec("torch") is not None
assert "torch" not in sys.modules
import torch
assert not any(type(finder).__module__ == "kernelproof.ground.late_import" for finder in sys.meta_path)
assert type(torch.__loader__).__module__ != "kernelproof.ground.late_import"
assert torch.__spec__.loader is torch.__loader__
assert torch.ops.cudal2gen.matmul(torch.ones(2, 2).half(), torch.ones(2, 2).half())[0, 0] == 2
assert type(torch.ops.cudal2gen) is torch._ops._OpNamespace
assert not hasattr(torch.ops.cudal2gen, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_torch_nothing_is_different() -> None:
    program = "import sys; sys.modules['torch'] = None\nimport cudal2gen\n"
    program += "try: import torch\nexcept ImportError: print('none')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("none\n", 0), done.stderr
    without = "import sys; sys.modules['torch'] = None\n"
    matmul, model = f"{without}import cudal2gen; cudal2gen.matmul", f"{without}from cudal2gen.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", matmul], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ModuleNotFoundError: cudal2gen.matmul needs torch: pip install torch\n")
    verb = [sys.executable, "-c", model, "tune-model", "x.py:f"]
    done = subprocess.run(verb, capture_output=True, text=True, check=False)
    message = "error: torch is missing, which runs the model: pip install '.[gpu]' in the checkout\n"
    assert (done.stderr, done.returncode) == (message, 3)


@pytest.mark.parametrize("name", ["matmul", "bmm", "linear", "swiglu", "grouped_mm"])
def test_torch_script_is_refused_in_words(name: str) -> None:
    function = getattr(cudal2gen, name)
    with pytest.raises(
        TypeError, match=rf"cudal2gen\.{name}: torch\.jit\.script cannot compile a function that chooses"
    ):
        torch.jit.script(function)
