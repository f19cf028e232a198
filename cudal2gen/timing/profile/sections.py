"""A profile as sections of words and tables, which text and page share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cudal2gen.timing.profile.figures import Advice, Line, Loop, Occupancy, Profile, Ring, Time
from kernelproof.ground.pages import Section, Table, counted, microseconds, percent

MODELLED = "All figures are modelled from the machine code; nothing is measured."
NO_ADVICE = "No change that the model can express makes it shorter by 1 % or more."
MIN_SHARE = 0.0005  # rows of smaller shares are left out


def sections(profile: Profile, lines: int | None = None) -> tuple[Section, ...]:
    """Everything but the picture. ``lines``: of the listing those with the most stall cycles; None for all."""
    return (
        Section("overview", "In short", (MODELLED, *profile.limits), tables=(_overview(profile),)),
        _advice(profile),
        *((_time(profile.time),) if profile.time else ()),
        _loop(profile.loop),
        *((_roles(profile, profile.ring),) if profile.ring else ()),
        *((_occupancy(profile.occupancy),) if profile.occupancy else ()),
        _listing(profile, lines),
    )


def _overview(profile: Profile) -> Table:
    loop, time = profile.loop, profile.time
    rows = [("kernel", profile.kernel), ("for", f"{profile.arch}, with the rates of {profile.gpu}")]
    if profile.problem:
        rows.append(("problem", profile.problem))
    if time:
        rows += [
            ("time", f"{microseconds(time.us)} µs, {time.us / time.floor_us:.2f} times the floor of "
             f"{microseconds(time.floor_us)} µs"),
        ]  # fmt: skip
    rows += [("main loop", loop_words(loop)), ("bound by", time.bound if time else loop.bound)]
    if profile.occupancy:
        rows.append(("occupancy", occupancy_words(profile.occupancy)))
    if time:
        rows.append(("waves", f"{time.waves:.2f}, {percent(time.tail_share)} of the SMs' time idle in the last"))
    rows.append(("registers", f"{profile.registers}, {loop.live_registers} in use in the main loop at most"))
    if profile.spill_bytes:
        rows.append(("spills", f"{profile.spill_bytes} bytes of a thread"))
    return Table("The kernel", ("what", "value"), tuple(rows))


def loop_words(loop: Loop) -> str:
    """Cycles of a turn beside the tensor bound."""
    text = f"{loop.cycles:.0f} cycles a {loop.unit} of {counted(loop.warps, 'warp')} a scheduler"
    if not loop.tensor_cycles:
        return text
    return f"{text}, tensor bound {loop.tensor_cycles:.0f} ({percent(loop.tensor_cycles / loop.cycles)})"


def occupancy_words(occupancy: Occupancy) -> str:
    """Resident CTAs and warps, and what limits them."""
    resident = f"{counted(occupancy.ctas, 'CTA')} an SM, {counted(occupancy.warps, 'warp')} a scheduler"
    return f"{resident}, limited by {' and '.join(occupancy.limits)}"


def _time(time: Time) -> Section:
    parts = [(name, microseconds(us), percent(us / time.us)) for name, us in time.parts.items()]
    bounds = [(name, microseconds(us)) for name, us in time.bounds.items()]
    return Section(
        "time",
        "Where the time goes",
        tables=(
            Table(
                "Parts of the modelled time",
                ("part", "µs", "share"),
                (*parts, ("sum", microseconds(time.us), percent(1.0))),
            ),
            Table("What bounds the main loop: the largest counts", ("bound", "µs"), tuple(bounds)),
        ),
    )


def _loop(loop: Loop) -> Section:
    words = f"{loop_words(loop).capitalize()}; {loop.issue_slots:.0f} issue slots used, one instruction each."
    wasted = (
        (f"{loop.bank_conflicts:g} cycles of issue wait for register banks." if loop.bank_conflicts else ""),
        (f"{loop.unread:g} instructions write registers that nobody reads." if loop.unread else ""),
        ("" if loop.rolled else "The main loop is straight code: its first and last turns are in the figures."),
    )
    tables = (
        Table("Busy share of each pipe", ("pipe", "busy"), shares(loop.pipes)),
        Table("What warps wait for, as a share of their cycles", ("stall", "share"), shares(loop.stalls)),
        Table("What warps that multiply do while the tensor core idles", ("stall", "share"), shares(loop.idle)),
        Table(
            f"Instructions of all warps of a scheduler in a {loop.unit}",
            ("opcode", "count"),
            tuple((name, f"{count:.4g}") for name, count in by_size(loop.opcodes)),
        ),
    )
    return Section(
        "loop",
        "The main loop",
        (words, *filter(None, wasted)),
        tables=tuple(table for table in tables if table.rows),
    )


def _roles(profile: Profile, ring: Ring) -> Section:
    filled = (
        f"A ring of {ring.stages} k-tiles, {ring.tile_bytes} bytes each, by {counted(ring.copies, 'instruction')} of "
        f"TMA; a CTA asks the L2 for {ring.l2_bytes:g} bytes of a k-tile. {counted(ring.products, 'instruction')} of "
        f"the thread that multiplies take a k-tile; accumulators of {counted(ring.accumulators, 'tile')} have "
        f"{ring.tensor_columns} of the 512 columns of tensor memory."
    )
    rows = tuple(
        (role.name, counted(role.warps, "warp"), role.unit, f"{role.instructions:g}", counts(role.pipes))
        for role in profile.roles
    )
    return Section(
        "roles",
        "Roles and ring",
        (filled,),
        tables=(
            Table("Instructions of a warp by role", ("role", "of a CTA", "in", "instructions", "by pipe"), rows),
            Table(
                "Instructions of tensor memory and TMA",
                ("role", "opcode", "count"),
                tuple(
                    (role.name, name, f"{number:g}")
                    for role in profile.roles
                    for name, number in by_size(role.opcodes)
                    if name.startswith(("UTC", "UTM", "LDTM", "STTM", "SYNCS", "STSM"))
                ),
            ),
        ),
    )


def counts(values: Mapping[str, float]) -> str:
    """Numbers by name, the largest first."""
    return ", ".join(f"{name} {number:g}" for name, number in by_size(values))


def shares(values: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    """Rows of shares, the largest first, without those that are next to nothing."""
    return tuple((name, percent(share)) for name, share in by_size(values) if share >= MIN_SHARE)


def by_size(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """The largest first."""
    return sorted(values.items(), key=lambda item: -item[1])


def _occupancy(occupancy: Occupancy) -> Section:
    uses = {
        "registers": f"{occupancy.registers} a thread",
        "shared memory": f"{occupancy.smem_bytes} bytes",
        "threads": f"{occupancy.threads}",
        "blocks": "1",
    }
    more = {
        "registers": occupancy.most_registers and f"{occupancy.most_registers} a thread",
        "shared memory": occupancy.most_smem_bytes and f"{occupancy.most_smem_bytes} bytes",
    }
    rows = tuple(
        (limit, uses[limit], str(room), (more.get(limit) or "none") if limit in occupancy.limits else "—")
        for limit, room in occupancy.room.items()
    )
    return Section(
        "occupancy",
        "Occupancy",
        tables=(
            Table(
                f"CTAs that an SM has room for, by limit; the least counts: {occupancy.ctas}",
                ("limit", "a CTA uses", "room for CTAs", "at most, for one CTA more"),
                rows,
            ),
        ),
    )


def _advice(profile: Profile) -> Section:
    lines = tuple(advice_words(advice) for advice in profile.advice)
    return Section("advice", "What would help", lines or (NO_ADVICE,))


def advice_words(advice: Advice) -> str:
    """One line: the change, and what it does by the model."""
    share = percent(advice.gain)
    if advice.figure == "main loop":
        return f"{advice.change}: main loop at most {share} shorter by the model"
    return f"{advice.change}: {share} shorter by the model's {advice.form}"


def _listing(profile: Profile, most: int | None) -> Section:
    listed = set(range(len(profile.lines)))
    caption = "The main loop's machine code"
    if most is not None and most < len(profile.lines):
        ranked = sorted(listed, key=lambda index: -sum(profile.lines[index].stalls.values()))
        listed = set(ranked[:most])
        caption += f": the {most} of {len(profile.lines)} instructions before which warps wait the most"
    rows = [_row(line) for index, line in enumerate(profile.lines) if index in listed]
    return Section(
        "listing",
        "Line by line",
        tables=(Table(caption, ("SASS", "pipe", "stall cycles", "for", "CUDA"), tuple(rows)),),
    )


def _row(line: Line) -> tuple[str, ...]:
    waits = [(name, cycles) for name, cycles in by_size(line.stalls) if cycles >= 0.05]
    return (
        f"{line.address:04x} {line.sass}",
        line.pipe,
        f"{sum(line.stalls.values()):.1f}",
        stall_words(waits[:2]),
        place(line),
    )


def stall_words(waits: Iterable[tuple[str, float]]) -> str:
    """Reasons with their cycles."""
    return ", ".join(f"{name} {cycles:.0f}" for name, cycles in waits)


def place(line: Line) -> str:
    """Where a line comes from in CUDA, and its text."""
    if line.file is None:
        return "—"
    name = f"{line.file.rsplit('/', 1)[-1]}:{line.line}"
    return f"{name} {line.cuda}" if line.cuda else name
