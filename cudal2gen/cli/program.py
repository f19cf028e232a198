"""Defines the program ``cudal2gen``: the options that all verbs share, and the entry point."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kernelproof.ground.command_line import program
from kernelproof.ground.command_line.groups import expanded
from kernelproof.ground.command_line.program import OwnOptions

JOBS = "CUDAL2GEN_JOBS"

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
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            envvar=JOBS,
            min=1,
            help="Processes at a time that compile or emulate; by default one per core.",
        ),
    ] = None,
) -> None:
    """Options of every verb, which may stand before or after it.

    The values are stored in environment variables, where the modules that need them look them up. Child processes
    inherit them.
    """
    if catalog is not None:
        os.environ["CUDAL2GEN_CATALOG"] = str(catalog)
    if build_dir is not None:
        os.environ["CUDAL2GEN_BUILD_DIR"] = str(build_dir)
    if jobs is not None:
        os.environ[JOBS] = str(jobs)


def main() -> None:
    """Entry point of the ``cudal2gen`` command."""
    program.run(app, "cudal2gen")
