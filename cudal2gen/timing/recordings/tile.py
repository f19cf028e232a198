"""Turns recorded configurations of Triton's matrix product into records, so that the tuner can search among them.

These records form the family ``triton_tile``, which has no template and no rules and is not proposed for any GPU. Code
that reads recordings registers the family by ``register``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from cudal2gen.kernel import FAMILIES, CtaWork, Fields, Origin, Problem, Record, spelling
from cudal2gen.timing import model
from cudal2gen.timing.model import ModelledKernel
from cudal2gen.timing.recordings import triton
from cudal2gen.timing.recordings.autoheuristic import Tile
from kernelproof.ground.chips import REGISTERS_THREAD, Chip

SOURCE = "github.com/AlnisM/autoheuristic-datasets"


class TritonTile(Record):
    """Triton's kernel with one tile. ``stages`` is Triton's ``num_stages``, ``warps`` its ``num_warps``."""

    family: Literal["triton_tile"]
    bk: Annotated[int, Field(ge=16, description="k of one step, elements")]
    stages: Annotated[int, Field(ge=1, description="num_stages: steps of the software pipeline")]
    warps: Annotated[int, Field(ge=1, description="num_warps: warps of a CTA")]
    split_k: Annotated[Literal[1], Field(description="slices of k, which this kernel does not make")]

    def violations(self) -> Iterator[str]:
        """Yields nothing, because every tile that was timed is legal."""
        yield from ()

    @classmethod
    def serves(cls, chip: Chip) -> bool:  # noqa: ARG003
        """False, because the family is proposed for no GPU."""
        return False

    @property
    def configuration(self) -> Tile:
        """The record's fields as a recording has them."""
        return Tile(self.bm, self.bn, self.bk, self.stages, self.warps)

    @property
    def modelled(self) -> ModelledKernel:
        """The kernel as the timing model reads it."""
        return triton.kernel_of(self.problem, self.configuration)

    @property
    def k_step(self) -> int:
        """k of one step of the main loop, in elements."""
        return self.bk

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def ring_steps(self) -> int:
        """Steps of the software pipeline."""
        return self.stages

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA in bytes: ``stages - 1`` buffers, at least one, as kernels by mma.sync have."""
        return max(1, self.stages - 1) * self.step_bytes

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold sums."""
        return self.bm * self.bn // self.threads

    @property
    def estimated_registers(self) -> int:
        """Registers of a thread, at most ``REGISTERS_THREAD``."""
        return min(REGISTERS_THREAD, self.accumulator_registers + triton.LIVE_REGISTERS)

    @property
    def tile(self) -> str:
        """The configuration as a part of the kernel's name."""
        return f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}_w{self.warps}"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"triton_{self.layout}_{self.tile}"

    @property
    def work(self) -> CtaWork:
        """The work of a CTA, as the timing model reads it."""
        return self.modelled.work


def register() -> None:
    """Adds the family to those that ``cudal2gen.kernel.parse`` reads."""
    if "triton_tile" not in FAMILIES:
        spelling.register(TritonTile)


def record_of(problem: Problem, tile: Tile) -> TritonTile:
    """The record of a recorded tile."""
    fields: Fields = tile._asdict()
    origin = Origin(source=SOURCE, structure="exact", changed=())
    return TritonTile(problem=problem, family="triton_tile", origin=origin, split_k=1, **fields)


def kernel_of(record: Record) -> ModelledKernel:
    """The parameters of any record that the timing model reads, recorded tiles included."""
    return record.modelled if isinstance(record, TritonTile) else model.kernel_of(record)
