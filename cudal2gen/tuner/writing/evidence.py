"""Writes the evidence on a kernel's speed that prompts show: registers, main loop, stalls, bank conflicts, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cudal2gen.kernel import Record
from kernelproof.profile import Profile

MAX_LINES, MAX_ADVICE, MAX_PARTS = 14, 5, 6  # most instructions, pieces of advice, and entries of a line
SHORTEST_WAIT = 1.0  # least stall cycles before an instruction that is listed


def lines(record: Record, profile: Profile | str, counters: Mapping[str, float]) -> list[str]:
    """The evidence on a built kernel as lines.

    ``profile``: its profile, or the reason why there is none. ``counters``: the counters of its verdict in the
    emulator, empty without a verdict.
    """
    if isinstance(profile, str):
        return [profile, *_counter_line(counters)]
    return [*_time(profile), *_resources(record, profile), *_loop(profile), *_counter_line(counters), *_advice(profile)]


def listing(profile: Profile | str) -> list[str]:
    """The instructions of the main loop before which warps wait longest, with their lines of CUDA, by address."""
    if isinstance(profile, str):
        return []
    waits = sorted(profile.lines, key=lambda line: -sum(line.stalls.values()))[:MAX_LINES]
    slowest = sorted(
        (line for line in waits if sum(line.stalls.values()) >= SHORTEST_WAIT), key=lambda line: line.address
    )
    return [
        f"{sum(line.stalls.values()):6.1f} cycles {max(line.stalls, key=lambda name: line.stalls[name])}: {line.sass}"
        + (f"   // {line.cuda.strip()}" if line.cuda else "")
        for line in slowest
    ]


def _time(profile: Profile) -> Iterator[str]:
    """Lines on the modelled time."""
    time = profile.time
    if time is None:
        return
    parts = ", ".join(f"{name} {us:.2f}" for name, us in _largest(time.parts))
    yield f"time by the model {time.us:.2f} us ({parts}); none can take less than {time.floor_us:.2f}"
    yield f"bound: {time.bound}; for the main loop alone: " + ", ".join(
        f"{name} {us:.2f} us" for name, us in _largest(time.bounds)
    )
    yield f"{time.ctas} CTAs, {time.waves:.2f} waves, {time.tail_share:.0%} of the SMs' time idle in the last one"


def _resources(record: Record, profile: Profile) -> Iterator[str]:
    """Lines on registers, shared memory and occupancy."""
    yield (
        f"ptxas: {profile.registers} registers a thread, {profile.spill_bytes} bytes spilled, "
        f"{record.smem_bytes} bytes of dynamic shared memory, {profile.instructions} instructions"
    )
    if (occupancy := profile.occupancy) is not None:
        yield (
            f"{occupancy.ctas} CTAs an SM, {occupancy.warps:g} warps a scheduler, "
            f"limited by {', '.join(occupancy.limits)}"
        )


def _loop(profile: Profile) -> Iterator[str]:
    """Lines on the main loop; the profile must have one."""
    loop = profile.loop
    yield (
        f"main loop: {loop.cycles:.0f} cycles a {loop.unit} and scheduler, of which tensor cores need "
        f"{loop.tensor_cycles:.0f}; {loop.issue_slots:.0f} issue slots; bound: {loop.bound}"
    )
    yield "busy: " + ", ".join(f"{name} {share:.0%}" for name, share in _largest(loop.pipes))
    yield "warps wait for: " + ", ".join(f"{name} {share:.0%}" for name, share in _largest(loop.stalls))
    yield "opcodes: " + ", ".join(f"{name} {count:g}" for name, count in _largest(loop.opcodes, 10))
    if loop.bank_conflicts >= 1:
        yield f"register bank conflicts: {loop.bank_conflicts:.0f} cycles a {loop.unit}"


def _counter_line(counters: Mapping[str, float]) -> Iterator[str]:
    """A line with the emulator's counters, which are exact, unlike the figures of the profile."""
    kept = ("bank_conflicts", "sectors_over_ideal", "bytes", "unique_bytes", "mma_", "wgmma_", "ldmatrix_", "mbarrier_")
    counted = [f"{name} {value:g}" for name, value in counters.items() if name.startswith(kept)]
    if counted:
        yield "counted in the emulator: " + ", ".join(counted)


def _advice(profile: Profile) -> Iterator[str]:
    """The first items of advice of a profile, as lines."""
    for item in profile.advice[:MAX_ADVICE]:
        if not item.change.startswith("--set"):  # advice to change a record's field, which a written text does not have
            yield f"would help: {item.change}: {item.figure} {item.before:.4g} -> {item.after:.4g}"


def _largest(values: Mapping[str, float], most: int = MAX_PARTS) -> list[tuple[str, float]]:
    """The largest values with their names, in descending order, without zeros."""
    return sorted(((name, value) for name, value in values.items() if value), key=lambda pair: -pair[1])[:most]
