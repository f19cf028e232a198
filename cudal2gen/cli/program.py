"""The command ``cudal2gen``: its own options, and its entry point."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kernelproof.ground.command_line import program
from kernelproof.ground.command_line.groups import expanded
from kernelproof.ground.command_line.program import OwnOptions

app = program.program(
    "Half-precision matrix-multiply kernels for NVIDIA GPUs, regenerated from records. "
    "Exit codes: 0 done, 1 a kernel or a write failed, 2 the input is wrong, 3 a tool is missing."
)


@app.callback()
@expanded
def settings(
    _own: OwnOptions,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", envvar="CUDAL2GEN_CATALOG", help="The catalog: a kernels.jsonl.")
    ] = None,
    build_dir: Annotated[
        Path | None, typer.Option("--build-dir", envvar="CUDAL2GEN_BUILD_DIR", help="Where compiled kernels are kept.")
    ] = None,
) -> None:
    """Options that stand before the verb. Rooms below read the environment, so they are put there."""
    if catalog is not None:
        os.environ["CUDAL2GEN_CATALOG"] = str(catalog)
    if build_dir is not None:
        os.environ["CUDAL2GEN_BUILD_DIR"] = str(build_dir)


def main() -> None:
    """Entry point of the ``cudal2gen`` command."""
    program.run(app, "cudal2gen")
