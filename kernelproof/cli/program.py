"""Defines the program ``kernelproof``: the options that all verbs share, and the entry point."""

from __future__ import annotations

from kernelproof.ground.command_line import program
from kernelproof.ground.command_line.groups import expanded
from kernelproof.ground.command_line.program import OwnOptions

app = program.program(
    "Proves CUDA kernels without a GPU: executes them on the CPU and reports what is wrong with them. "
    "Exit codes: 0 nothing found, 1 something is wrong, 2 wrong input or not checked, 3 a tool is missing."
)


@app.callback()
@expanded
def settings(_own: OwnOptions) -> None:
    """Options that stand before the verb."""


def main() -> None:
    """Entry point of the ``kernelproof`` command."""
    program.run(app, "kernelproof")
