"""Defines a small family of kernels for tests, in two files: this one and ``toy_templates/toy.cu.j2``.

Each thread computes elements of D by FMAs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel import Fields, Problem, Record
from cudal2gen.kernel.launch import Tiles

# Numbers of warps that a record may have.
WARPS = (1, 2, 4)


class Toy(Record):
    """Each warp computes rows of 32 elements of D, with a thread for each column. It uses no shared memory, and its
    caller need not pad."""

    family: Literal["toy"]
    warps: Annotated[int, Field(ge=1, le=32, description="warps of a CTA")]
    split_k: Annotated[Literal[1], Field(description="slices of k, which this family does not make")]

    TEMPLATES: ClassVar[Path | None] = Path(__file__).parent / "toy_templates"

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        return {"bm": 16, "bn": 32, "warps": 4, "split_k": 1}

    def violations(self) -> Iterator[str]:
        if self.acc != "f32":
            yield f"acc={self.acc}: must be f32, FMAs sum in fp32"
        if self.bn != 32:
            yield f"bn={self.bn}: must be 32, a warp has a thread per column"
        if self.bm % self.warps:
            yield f"bm={self.bm}: must be a multiple of warps={self.warps}"
        yield from self.vector_violations("k", *(["n"] if self.layout == "nn" else []))

    @property
    def k_step(self) -> int:
        """The launcher accepts only rows of whole vectors."""
        return self.element.vector

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stores_vectors(self) -> bool:
        return False

    @property
    def grid_is_tiles(self) -> bool:
        return True

    @property
    def accumulator_registers(self) -> int:
        return self.bm // self.warps

    @property
    def estimated_registers(self) -> int:
        return self.accumulator_registers + 24

    @property
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}_w{self.warps}"

    @property
    def launch(self) -> Tiles:
        return Tiles(**self.launch_facts, raster="plain", predicated=1, baked_n=0, baked_k=0)

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Candidates for small problems only."""
        if problem.m * problem.n <= 1 << 14:
            yield from (cls.plain(problem) | {"warps": warps} for warps in WARPS)
