"""Computes the occupancy of a record's launch: CTAs of an SM, tiles of the busiest SM, and idle time at the end."""

from __future__ import annotations

from cudal2gen.kernel import Record, ceil_div
from cudal2gen.timing.model import memory
from kernelproof.profile import Occupancy, occupancy


def of_record(record: Record, registers: int) -> Occupancy:
    """The occupancy of a record's CTAs. ``registers``: per thread, by ptxas."""
    smem = record.smem_bytes + record.smem_static_bytes
    return occupancy(record.target.capability, record.threads, registers, smem)


def busiest_sm(record: Record) -> int:
    """CTA tiles that the SM with the most of them computes."""
    return ceil_div(record.ctas, memory.usable_sms(record))


def tail_share(record: Record) -> float:
    """The share of all SMs' time that passes idle while the busiest SM computes its last tile."""
    if record.shares_last_wave:
        return 0.0
    return 1 - record.ctas / (busiest_sm(record) * memory.usable_sms(record))
