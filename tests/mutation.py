"""Mutants of built kernels: which of them the validator notices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from cudal2gen import catalog, validator
from cudal2gen.compiler import Artifact
from cudal2gen.emulator.mutate import Mutant, mutants


def survivors(record: catalog.Record, artifact: Artifact, library: Path) -> Iterator[tuple[Mutant, bool]]:
    """Every mutant of a kernel, and whether it survived all problems that stress the record."""
    shapes = sorted(validator.stress_shapes(record), key=lambda shape: -(shape.m * shape.n * shape.k))
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / artifact.digest
        shutil.copytree(artifact.directory, directory)
        mutated = Artifact(directory, artifact.ptxas)
        for mutant in mutants(artifact.ptx.read_text()):
            mutated.ptx.write_text(mutant.text)
            yield mutant, all(_passes(record, mutated, library, shape) for shape in shapes)


def _passes(record: catalog.Record, artifact: Artifact, library: Path, shape: validator.Shape) -> bool:
    return all(
        validator.run_case(record, artifact, library, shape, inputs, hazards=inputs == "binary")[0].passed
        for inputs in ("binary", "integers")
    )
