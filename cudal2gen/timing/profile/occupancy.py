"""Occupancy: CTAs that an SM holds, the limit that decides, and what a CTA may use so that one more fits."""

from __future__ import annotations

from cudal2gen.kernel import Record, ceil_div
from cudal2gen.timing.model import memory
from cudal2gen.timing.profile.figures import Occupancy
from kernelproof.ground.chips import REGISTERS_THREAD, SUB_CORES, Capability

NAMES = {"by_registers": "registers", "by_smem": "shared memory", "by_threads": "threads", "by_blocks": "blocks"}
REGISTER_STEP = 8  # registers per thread that ptxas and the hardware count in


def occupancy(capability: Capability, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """The occupancy of CTAs of whole warps; ``registers`` per thread, ``smem_bytes`` static and dynamic together."""
    residency = capability.residency(threads, registers, smem_bytes)
    ctas = residency.ctas
    room = {NAMES[limit]: number for limit, number in residency._asdict().items()}
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


def of_record(record: Record, registers: int) -> Occupancy:
    """The occupancy of a record's CTAs."""
    smem = record.smem_bytes + record.smem_static_bytes
    return occupancy(record.target.capability, record.threads, registers, smem)


def busiest_sm(record: Record) -> int:
    """CTA tiles of the busiest SM."""
    return ceil_div(record.ctas, memory.usable_sms(record))


def tail_share(record: Record) -> float:
    """The share of the SMs' time without a tile, while the busiest works on its last."""
    if record.shares_last_wave:
        return 0.0
    return 1 - record.ctas / (busiest_sm(record) * memory.usable_sms(record))


def _most_registers(capability: Capability, threads: int, registers: int, ctas: int) -> int | None:
    """The most registers per thread at which this many CTAs fit by registers; None where that is none."""
    steps = range(min(registers, REGISTERS_THREAD) // REGISTER_STEP * REGISTER_STEP, 0, -REGISTER_STEP)
    fits = (count for count in steps if capability.residency(threads, count, 0).by_registers >= ctas)
    return registers if capability.residency(threads, registers, 0).by_registers >= ctas else next(fits, None)


def _most_smem(capability: Capability, smem_bytes: int, ctas: int) -> int | None:
    """The most bytes of shared memory at which this many CTAs fit by shared memory; None where that is none."""
    if capability.ctas_by_smem(smem_bytes) >= ctas:
        return smem_bytes
    most = (capability.smem_sm_bytes // ctas - 1024) // 128 * 128
    return most if most >= 0 else None
