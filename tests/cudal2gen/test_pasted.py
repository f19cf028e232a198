"""Proves that a kernel's text compiles next to a user's main without a warning, by the command line in its head."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record
from kernelproof.ground import toolchain
from tests.cudal2gen.paths import PATHS
from tests.cudal2gen.test_renderer import GOLDENS
from tests.draws import draw_part

pytestmark = pytest.mark.slow

# The command line in the comment at the head of a text.
LINE = re.compile(r"^// Compile (nvcc [^,\n]*(?:,code=[^,\n]*)?)", re.MULTILINE)
# Makes a program of a text that has only a kernel and its launcher.
MAIN = "\nint main() { return 0; }\n"
# A text of each family, of each way to sum that has its own constants and arguments, and others that define less.
SUMMING = ("split_k", "wgmma stream", "wgmma cluster split 2", "tensor workspace pair f16", "once split 2")
TEXTS: dict[str, Record] = {**GOLDENS, **{name: PATHS[name] for name in (*SUMMING, "once", "nt", "baked k")}}


def test_every_family_has_a_text() -> None:
    assert {record.family for record in TEXTS.values()} == {record.family for record in PATHS.values()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", draw_part(list(TEXTS), 6))
def test_a_text_compiles_as_pasted(name: str, tmp_path: Path) -> None:
    text, tools = render(TEXTS[name]), toolchain.discover()
    line = LINE.search(text)
    assert line is not None
    assert not re.search(r"^//\n//$", text, re.MULTILINE), "no two empty lines"
    (tmp_path / "kernel.cu").write_text(text + MAIN)
    command = line[1].replace("CUTLASS/include", str(tools.cutlass_include)).split()
    command[0] = str(tools.nvcc)
    done = subprocess.run(
        [*command, "-c", "kernel.cu"], cwd=tmp_path, env=toolchain.environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
