"""Compares two profiles: shows every figure of both, and the ratio of the second to the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernelproof.ground.pages import Section, Table, microseconds, percent
from kernelproof.profile.figures import Profile
from kernelproof.profile.sections import MODELLED

COLUMNS = ("A", "B", "B over A")
Cell = Callable[[float], str]


def compare(a: Profile, b: Profile) -> tuple[Section, ...]:
    """Tables of the figures that both profiles have. A ratio below 1 means that B's figure is smaller."""
    names = Table("What is compared", ("", "A", "B"), tuple(_names(a, b)))
    tables = [_table("The main loop", _loop(a), _loop(b), "{:.4g}".format)]
    tables += _shares(a, b)
    timed = a.time is not None and b.time is not None
    if a.time and b.time:
        tables.insert(0, _table("Modelled time, µs", _times(a.time.us, a.time.parts), _times(b.time.us, b.time.parts),
                                microseconds))  # fmt: skip
    if a.occupancy and b.occupancy:
        tables.append(_table("Occupancy", _occupancy(a), _occupancy(b), "{:g}".format))
    words = (MODELLED, _verdict(a, b, timed))
    return (Section("comparison", "B compared with A", words, tables=(names, *tables)),)


def _names(a: Profile, b: Profile) -> list[tuple[str, str, str]]:
    """The rows that say what each of the two profiles is of."""
    rows = [("kernel", a.kernel, b.kernel), ("problem", a.problem or "—", b.problem or "—")]
    return [*rows, ("built for, rates of", f"{a.arch}, {a.gpu}", f"{b.arch}, {b.gpu}"), ("bound", _bound(a), _bound(b))]


def _bound(profile: Profile) -> str:
    """What bounds the time of a launch, if that is modelled, and that of the main loop."""
    loop = f"main loop: {profile.loop.bound}"
    return f"{profile.time.bound}; {loop}" if profile.time else loop


def _verdict(a: Profile, b: Profile, timed: bool) -> str:
    """A sentence that says which profile is faster, and by how much. ``timed``: whether both have a time."""
    if timed and a.time and b.time:
        figure, before, after = "time", a.time.us, b.time.us
    else:
        figure, before, after = f"time per {a.loop.unit}", a.loop.cycles, b.loop.cycles
        if a.loop.unit != b.loop.unit or a.loop.tensor_cycles != b.loop.tensor_cycles:
            return (
                "The loops do different work per iteration: compare shares, and cycles over those of the tensor core."
            )
    if before == after:
        return f"By the model both take the same {figure}."
    more, less = ("B", "A") if after > before else ("A", "B")
    share = percent(abs(after - before) / max(after, before))
    return f"By the model {less} takes {share} less {figure} than {more}."


def _times(us: float, parts: Mapping[str, float]) -> dict[str, float]:
    """The microseconds of each part of a launch, and last their sum ``us``."""
    return {**parts, "sum": us}


def _loop(profile: Profile) -> dict[str, float]:
    """The figures of the main loop, by the names that the table shows."""
    loop = profile.loop
    figures = {
        f"cycles per {loop.unit}": loop.cycles,
        "tensor core busy, cycles": loop.tensor_cycles,
        "instructions issued": loop.issue_slots,
        "warps per scheduler": loop.warps,
        "registers": profile.registers,
        "registers in use": loop.live_registers,
        "register bank conflicts, cycles": loop.bank_conflicts,
    }
    return figures | (
        {"cycles over those of the tensor core": loop.cycles / loop.tensor_cycles} if loop.tensor_cycles else {}
    )


def _shares(a: Profile, b: Profile) -> list[Table]:
    """The tables of pipes, stalls and opcodes."""
    return [
        _table("Busy share of each pipe", a.loop.pipes, b.loop.pipes, percent),
        _table("What warps wait for, as a share of their cycles", a.loop.stalls, b.loop.stalls, percent),
        _table(
            "What warps with MMAs do while the tensor core idles, as a share of their cycles",
            a.loop.idle,
            b.loop.idle,
            percent,
        ),
        _table("Instructions that all warps of a scheduler issue", a.loop.opcodes, b.loop.opcodes, "{:g}".format),
    ]


def _occupancy(profile: Profile) -> dict[str, float]:
    """The figures of occupancy, by the names that the table shows."""
    occupancy = profile.occupancy
    if occupancy is None:
        return {}
    return {
        "CTAs per SM": occupancy.ctas,
        "warps per scheduler": occupancy.warps,
        "threads": occupancy.threads,
        "shared memory, bytes": occupancy.smem_bytes,
    }


def _table(caption: str, a: Mapping[str, float], b: Mapping[str, float], cell: Cell) -> Table:
    """A table with the figures of A and B by name, and B over A. A figure that one of them lacks is 0 there."""
    rows = []
    for name in dict.fromkeys((*a, *b)):
        before, after = a.get(name, 0.0), b.get(name, 0.0)
        rows.append((name, cell(before), cell(after), f"{after / before:.3f}" if before else "—"))
    return Table(caption, ("", *COLUMNS), tuple(rows))
