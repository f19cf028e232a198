"""Writes a profile as sections of sentences and tables, which both the terminal and the HTML page print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kernelproof.ground.pages import Section, Table, counted, microseconds, percent
from kernelproof.profile.figures import Advice, Hazard, Line, MainLoop, Occupancy, Profile, Ring, Time

MODELLED = "All figures are modelled from the machine code; nothing is measured."
NO_ADVICE = "No change of an input that the model knows saves 1 % of the time or more."
MIN_SHARE = 0.0005  # rows of smaller shares are left out
MIN_CYCLES = 0.05  # a stall of an instruction with fewer cycles is left out
LISTING_COLUMNS = ("SASS", "pipe", "stall cycles", "stall reasons", "CUDA")
# How advice names each form of the model.
FORMS = {"machine code": "by simulated machine code", "cheap form": "by the model's formulas"}


def sections(profile: Profile, lines: int | None = None) -> tuple[Section, ...]:
    """The profile's sections without the picture.

    ``lines``: how many lines of the listing are kept, those with the most stall cycles; None keeps all.
    """
    return (
        Section("overview", "In short", (MODELLED, *profile.limits), tables=(_overview(profile),)),
        *((_hazards(profile.hazards),) if profile.hazards else ()),
        _advice(profile),
        *((_time(profile.time),) if profile.time else ()),
        _loop(profile.loop),
        *((_roles(profile, profile.ring),) if profile.ring else ()),
        *((_occupancy(profile.occupancy),) if profile.occupancy else ()),
        _listing(profile, lines),
    )


def _overview(profile: Profile) -> Table:
    """One row each for kernel, problem, time, main loop, bound, occupancy, waves, registers and spills, if known."""
    loop, time = profile.loop, profile.time
    rows = [("kernel", profile.kernel), ("built for", f"{profile.arch}, timed with the rates of {profile.gpu}")]
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
        rows.append(("waves", f"{time.waves:.2f}; {percent(time.tail_share)} of the SMs' time is idle at the end"))
    rows.append(
        (
            "registers",
            f"{profile.registers} per thread; the main loop has at most {loop.live_registers} in use",
        )
    )
    if profile.spill_bytes:
        rows.append(("spills", f"{profile.spill_bytes} bytes per thread"))
    return Table("The kernel", ("what", "value"), tuple(rows))


def _hazards(hazards: Iterable[Hazard]) -> Section:
    """The register hazards. A kernel that has any computes with old values, so its other figures mean nothing."""
    rows = tuple((hazard.later, hazard.earlier, hazard.why) for hazard in hazards)
    words = "These instructions do not wait for registers that an earlier one still uses. The GPU does not notice it."
    table = Table(
        "Hazards, as explained in docs/kernelproof/rules/register-hazard.md",
        ("instruction", "does not wait for", "why"),
        rows,
    )
    return Section("hazards", "Register hazards", (words,), tables=(table,))


def loop_words(loop: MainLoop) -> str:
    """Cycles of a unit, and for how many of them the tensor core is busy."""
    text = f"{loop.cycles:.0f} cycles per {loop.unit} with {counted(loop.warps, 'warp')} per scheduler"
    if not loop.tensor_cycles:
        return text
    return f"{text}, tensor core busy for {loop.tensor_cycles:.0f} ({percent(loop.tensor_cycles / loop.cycles)})"


def occupancy_words(occupancy: Occupancy) -> str:
    """How many CTAs and warps are resident, and what limits them."""
    resident = f"{counted(occupancy.ctas, 'CTA')} per SM, {counted(occupancy.warps, 'warp')} per scheduler"
    return f"{resident}, limited by {' and '.join(occupancy.limits)}"


def _time(time: Time) -> Section:
    """The parts of the time of a launch, and the bounds of its main loop."""
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
            Table(
                "Bounds of the main loop, µs",
                ("resource", "µs"),
                tuple(bounds),
            ),
        ),
    )


def _loop(loop: MainLoop) -> Section:
    """The figures of the main loop: sentences on its length and its waste, then tables."""
    words = f"{loop_words(loop).capitalize()}. Meanwhile the scheduler issues {loop.issue_slots:.0f} instructions."
    conflicts = round(loop.bank_conflicts, 1)
    notes = (
        (f"Conflicts of register banks cost {conflicts:g} issue cycles." if conflicts else ""),
        (f"{round(loop.unread, 1):g} of them only write registers that no instruction reads." if loop.unread else ""),
        (
            ""
            if loop.rolled
            else "The main loop is fully unrolled, so the figures include its first and last iterations."
        ),
    )
    tables = (
        Table("Busy share of each pipe", ("pipe", "busy"), shares(loop.pipes)),
        Table("What warps wait for, as a share of their cycles", ("stall", "share"), shares(loop.stalls)),
        Table(
            "What warps with MMAs do while the tensor core idles, as a share of their cycles",
            ("stall", "share"),
            shares(loop.idle),
        ),
        Table(
            f"Instructions that all warps of a scheduler issue per {loop.unit}",
            ("opcode", "count"),
            tuple((name, f"{count:.4g}") for name, count in by_size(loop.opcodes)),
        ),
    )
    return Section(
        "loop",
        "The main loop",
        (words, *filter(None, notes)),
        tables=tuple(table for table in tables if table.rows),
    )


def _roles(profile: Profile, ring: Ring) -> Section:
    """The ring in shared memory, and what the warps of each role issue."""
    words = (
        f"The ring holds {ring.stages} k-tiles of {ring.tile_bytes} bytes. "
        f"{counted(ring.copies, 'TMA instruction')} of a CTA bring {ring.l2_bytes:g} bytes of a k-tile from the L2. "
        f"One thread multiplies a k-tile by {counted(ring.products, 'MMA')}. The accumulators of "
        f"{counted(ring.accumulators, 'tile')} take {ring.tensor_columns} of the 512 columns of tensor memory."
    )
    rows = tuple(
        (role.name, counted(role.warps, "warp"), role.unit, f"{role.instructions:g}", counts(role.pipes))
        for role in profile.roles
    )
    return Section(
        "roles",
        "Roles and ring",
        (words,),
        tables=(
            Table(
                "Instructions of a warp of each role",
                ("role", "warps of a CTA", "per", "instructions", "instructions by pipe"),
                rows,
            ),
            Table(
                "Instructions for tensor memory and TMA",
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
    """Names with their numbers, the largest first."""
    return ", ".join(f"{name} {number:g}" for name, number in by_size(values))


def shares(values: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    """Rows of shares, the largest first. Shares below ``MIN_SHARE`` are left out."""
    return tuple((name, percent(share)) for name, share in by_size(values) if share >= MIN_SHARE)


def by_size(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """The items of a mapping, the largest value first."""
    return sorted(values.items(), key=lambda item: -item[1])


def _occupancy(occupancy: Occupancy) -> Section:
    """How many CTAs fit by each limit, and what a CTA may use at most so that one more fits."""
    uses = {
        "registers": f"{occupancy.registers} per thread",
        "shared memory": f"{occupancy.smem_bytes} bytes",
        "threads": f"{occupancy.threads}",
        "blocks": "1",
    }
    more = {
        "registers": occupancy.most_registers and f"{occupancy.most_registers} per thread",
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
                f"CTAs that fit on an SM by each limit: the least, {occupancy.ctas}, counts",
                ("limit", "a CTA uses", "CTAs that fit", "a CTA may use at most so that one more fits"),
                rows,
            ),
        ),
    )


def _advice(profile: Profile) -> Section:
    """The advice, or a sentence that there is none."""
    lines = tuple(advice_words(advice) for advice in profile.advice)
    return Section("advice", "What would help", lines or (NO_ADVICE,))


def advice_words(advice: Advice) -> str:
    """One line: the change, and the time that it saves by the model."""
    share = percent(advice.gain)
    if advice.figure == "main loop":
        return f"{advice.change}: the main loop takes at most {share} less time"
    return f"{advice.change}: {share} less time {FORMS[advice.form]}"


def _listing(profile: Profile, most: int | None) -> Section:
    """The listing, or its ``most`` instructions with the most stall cycles, in the order of addresses."""
    listed = set(range(len(profile.lines)))
    caption = "The main loop's machine code"
    if most is not None and most < len(profile.lines):
        ranked = sorted(listed, key=lambda index: -sum(profile.lines[index].stalls.values()))
        listed = set(ranked[:most])
        caption += f": the {most} of its {len(profile.lines)} instructions before which warps wait the most"
    rows = [_row(line) for index, line in enumerate(profile.lines) if index in listed]
    return Section(
        "listing",
        "Line by line",
        tables=(Table(caption, LISTING_COLUMNS, tuple(rows)),),
    )


def _row(line: Line) -> tuple[str, ...]:
    """The row of an instruction in the listing, with the two reasons for which warps wait the longest before it."""
    waits = [(name, cycles) for name, cycles in by_size(line.stalls) if cycles >= MIN_CYCLES]
    return (
        f"{line.address:04x} {line.sass}",
        line.pipe,
        f"{sum(line.stalls.values()):.1f}",
        stall_words(waits[:2]),
        place(line),
    )


def stall_words(waits: Iterable[tuple[str, float]]) -> str:
    """Stall reasons with their cycles."""
    return ", ".join(f"{name} {cycles:.0f}" for name, cycles in waits)


def place(line: Line) -> str:
    """The CUDA line that an instruction comes from: file, number and text; a dash if the cubin does not say."""
    if line.file is None:
        return "—"
    name = f"{line.file.rsplit('/', 1)[-1]}:{line.line}"
    return f"{name} {line.cuda}" if line.cuda else name
