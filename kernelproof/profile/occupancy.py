"""Computes occupancy: how many CTAs an SM holds, by which limit, and what a CTA may use so that one more fits."""

from __future__ import annotations

from kernelproof.ground.chips import REGISTERS_THREAD, SMEM_UNIT, SUB_CORES, SYSTEM_SMEM, Capability
from kernelproof.profile.figures import Occupancy

LIMIT_NAMES = {"by_registers": "registers", "by_smem": "shared memory", "by_threads": "threads", "by_blocks": "blocks"}
REGISTER_STEP = 8  # ptxas and the hardware allocate the registers of a thread in multiples of this


def occupancy(capability: Capability, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """The occupancy of an SM by CTAs of ``threads`` threads, a multiple of 32.

    ``registers``: per thread. ``smem_bytes``: per CTA, static and dynamic together.
    """
    residency = capability.residency(threads, registers, smem_bytes)
    ctas = residency.ctas
    room = {LIMIT_NAMES[limit]: number for limit, number in residency._asdict().items()}
    return Occupancy(
        threads=threads,
        registers=registers,
        smem_bytes=smem_bytes,
        ctas=ctas,
        room=room,
        limits=tuple(limit for limit, number in room.items() if number == ctas),
        warps=ctas * threads / 32 / SUB_CORES,
        most_registers=_most_registers(capability, threads, registers, ctas + 1),
        most_smem_bytes=_most_smem(capability, smem_bytes, ctas + 1),
    )


def _most_registers(capability: Capability, threads: int, registers: int, ctas: int) -> int | None:
    """The most registers per thread with which ``ctas`` CTAs fit into the register files; None if no number does."""
    steps = range(min(registers, REGISTERS_THREAD) // REGISTER_STEP * REGISTER_STEP, 0, -REGISTER_STEP)
    fits = (count for count in steps if capability.residency(threads, count, 0).by_registers >= ctas)
    return registers if capability.residency(threads, registers, 0).by_registers >= ctas else next(fits, None)


def _most_smem(capability: Capability, smem_bytes: int, ctas: int) -> int | None:
    """The most bytes of shared memory per CTA with which ``ctas`` CTAs fit into an SM's; None if no number does."""
    if capability.ctas_by_smem(smem_bytes) >= ctas:
        return smem_bytes
    # The inverse of Capability.ctas_by_smem.
    most = (capability.smem_sm_bytes // ctas - SYSTEM_SMEM) // SMEM_UNIT * SMEM_UNIT
    return most if most >= 0 else None
