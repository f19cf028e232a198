"""The verb ``build`` compiles the kernels of records. ``Compilation`` does this for the other verbs too."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cudal2gen import places
from cudal2gen.cli.program import JOBS, app
from cudal2gen.cli.selection import SeveralRecords
from cudal2gen.kernel import Problem, Record
from kernelproof.ground.command_line import progress
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import EXIT_FAILED, error, report
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.pages import counted

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact
    from cudal2gen.validator.device import BuiltKernel
    from kernelproof.ground.toolchain import Toolchain


@dataclass(frozen=True)
class Compilation:
    """Compiles kernels under a progress bar, as the program's options --jobs and --nvcc say.

    It is a group of options without fields: every verb that compiles takes one.
    """

    @property
    def jobs(self) -> int | None:
        """How many processes compile at a time; None means one for each core."""
        text = os.environ.get(JOBS)
        return int(text) if text else None

    def toolchain(self) -> Toolchain:
        """The compiler and its headers. Raises ToolchainError."""
        from kernelproof.ground import toolchain

        return toolchain.discover()

    def build(self, records: Sequence[Record]) -> list[Artifact]:
        """One artifact per record, under a progress bar. Raises ToolchainError and BuildError."""
        from cudal2gen.generation import compiler

        with progress.bar("compiling") as show:
            return compiler.build(records, tools=self.toolchain(), jobs=self.jobs, progress=show)

    def attempt(self, records: Sequence[Record]) -> list[tuple[Record, Artifact]]:
        """The records that compile, each with its artifact. An error line names each kernel that does not compile.

        Raises ToolchainError, and BuildError where the build directory cannot be written.
        """
        from cudal2gen.generation import compiler

        with progress.bar("compiling") as show:
            outcomes = compiler.attempt(records, tools=self.toolchain(), jobs=self.jobs, progress=show)
        for failure in dict.fromkeys(str(outcome) for outcome in outcomes if isinstance(outcome, compiler.BuildError)):
            report(compiler.BuildError(failure))
        pairs = zip(records, outcomes, strict=True)
        return [(record, outcome) for record, outcome in pairs if isinstance(outcome, compiler.Artifact)]

    def distinct(self, records: Sequence[Record]) -> dict[str, Record]:
        """One record for each distinct kernel, by the digest that the kernel will have when it is built."""
        from cudal2gen.generation import compiler

        tools = self.toolchain()
        return {compiler.job(record, tools).digest: record for record in records}

    def kernels(self, records: Sequence[Record]) -> dict[Problem, BuiltKernel]:
        """Built kernels by problem, ready to be opened on a device; see ``attempt``."""
        from cudal2gen.validator.device import BuiltKernel

        pairs, library = self.attempt(records), self.launcher()
        return {record.problem: BuiltKernel(record, artifact, library) for record, artifact in pairs}

    def launcher(self) -> Path:
        """The shared library that launches any of our kernels. Raises ToolchainError and BuildError."""
        from cudal2gen.generation import compiler

        return compiler.launcher(tools=self.toolchain())


@verb(app, "build")
def build(selection: SeveralRecords, compilation: Compilation, as_json: Json = False) -> None:
    """Compile the kernels of records. A kernel that does not compile, spills or has a stack frame fails."""
    from cudal2gen.generation import compiler

    records = selection.records()
    pairs = compilation.attempt(records)
    distinct = {artifact.digest: (record, artifact) for record, artifact in pairs}
    for record, artifact in distinct.values():
        for finding in artifact.ptxas.findings:
            error(f"{record.name} {finding}")
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
            f"{counted(len(records), 'record')}, {counted(len(distinct), 'distinct kernel')} in {places.build_dir()}; "
            f"peak {rss} MiB a process"
        )
    if len(pairs) < len(records) or any(artifact.ptxas.findings for _, artifact in distinct.values()):
        raise typer.Exit(EXIT_FAILED)
