"""The verb build, and the options of every verb that compiles."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen import places
from cudal2gen.cli import progress
from cudal2gen.cli.groups import verb
from cudal2gen.cli.messages import EXIT_FAILED
from cudal2gen.cli.options import Json, Nvcc
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import SeveralRecords
from cudal2gen.kernel import Problem, Record

if TYPE_CHECKING:
    from cudal2gen.compiler import Artifact
    from cudal2gen.toolchain import Toolchain
    from cudal2gen.validator.device import BuiltKernel


@dataclass(frozen=True)
class Compilation:
    """How to compile."""

    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Compiler processes at a time; by default one for each core."),
    ] = None
    nvcc: Nvcc = None

    def toolchain(self) -> Toolchain:
        """The compiler and its headers. Raises ToolchainError."""
        from cudal2gen import toolchain

        return toolchain.discover(self.nvcc)

    def build(self, records: Sequence[Record]) -> list[Artifact]:
        """One artifact per record, under a progress bar. Raises ToolchainError and BuildError."""
        from cudal2gen import compiler

        with progress.bar("compiling") as report:
            return compiler.build(records, tools=self.toolchain(), jobs=self.jobs, progress=report)

    def kernels(self, records: Sequence[Record]) -> dict[Problem, BuiltKernel]:
        """Built kernels by problem, ready to be opened on a device. Raises ToolchainError and BuildError."""
        from cudal2gen.validator.device import BuiltKernel

        pairs, library = zip(records, self.build(records), strict=True), self.launcher()
        return {record.problem: BuiltKernel(record, artifact, library) for record, artifact in pairs}

    def launcher(self) -> Path:
        """The shared library that launches any of our kernels. Raises ToolchainError and BuildError."""
        from cudal2gen import compiler

        return compiler.launcher(tools=self.toolchain())


@verb(app, "build")
def build(selection: SeveralRecords, compilation: Compilation, as_json: Json = False) -> None:
    """Compile the kernels of records. A kernel that spills or has a stack frame fails."""
    from cudal2gen import compiler

    records = selection.records()
    artifacts = compilation.build(records)
    distinct = {artifact.digest: (record, artifact) for record, artifact in zip(records, artifacts, strict=True)}
    for record, artifact in distinct.values():
        for finding in artifact.ptxas.findings:
            print(f"error: {record.name} {finding}", file=sys.stderr)
        if as_json:
            row = {"name": record.name, "directory": str(artifact.directory), "registers": artifact.ptxas.registers}
            print(json.dumps(row | {"findings": artifact.ptxas.findings}))
        elif selection.mnk:
            print(
                f"{artifact.directory}: {artifact.ptxas.registers} registers, "
                f"{record.smem_bytes} bytes of shared memory"
            )
    if not selection.mnk and not as_json:
        rss = compiler.peak_rss_bytes() >> 20
        print(
            f"{len(records)} records, {len(distinct)} distinct kernels in {places.build_dir()}; "
            f"peak {rss} MiB a process"
        )
    if any(artifact.ptxas.findings for _, artifact in distinct.values()):
        raise typer.Exit(EXIT_FAILED)
