"""Simulates the warps of one sub-core cycle by cycle: which warp issues, and why the others wait.

One instruction issues per cycle. The scheduler issues from the same warp as long as it can, and then from the youngest
(Huerta et al., "Analyzing Modern NVIDIA GPU cores", MICRO 2025, arXiv 2503.20481). A warp can issue when the stall
count of its previous instruction has passed, the scoreboards of its wait mask are free, and the pipe accepts the
instruction. Fixed latencies need no model: ptxas wrote them into the stall counts.

Memory instructions go through a bounded queue to the SM's shared memory. Copies and loads from global memory also go
through a queue to the L2, which has one bandwidth and one latency; so latencies grow under load. MMAs of warpgroups are
asynchronous and execute in order. Warps of a CTA wait for each other at barriers and mbarriers, and for fills of a ring
by TMA.

Not modelled: bank conflicts, the register-file cache, instruction fetch, and differences between the four sub-cores.
All four run the same warps, so one of them gets a quarter of the bandwidth of shared memory and of the L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kernelproof.ground.chips import SUB_CORES, TMA_CYCLES
from kernelproof.ground.integers import ceil_div
from kernelproof.sass.decoding import SCOREBOARDS, Instruction
from kernelproof.sass.operations import Kind, Machine, Operation, Stall
from kernelproof.sass.pipes import Pipe
from kernelproof.sass.timeline import Issue, RawIssue, Timeline

__all__ = ["Issue", "Machine", "Stall", "Stream", "Timeline", "simulate", "steady_cycles"]

QUEUE_LENGTH = 5  # memory instructions that can wait for a sub-core's address unit: arXiv 2503.20481
# Cycles from the last arrival at a barrier of the CTA to the next issue: Zhang et al., arXiv 2004.05371, on a V100.
BARRIER_CYCLES = 22
# Cycles from the completion of an mbarrier to the issue of a warp that waits: Meta's Triton fork, LatencyModel, on a
# B200.
WAKE_CYCLES = 30


@dataclass(frozen=True)
class Stream:
    """The instructions of one warp: ``parts``, each with the number of its repetitions.

    ``cta``: the number of its CTA; warps of a CTA share barriers and a ring. ``fills``: the numbers of the ring's fills
    for which the warp waits at mbarriers, in order. ``produces``: whether the warp fills the ring. A producer waits
    until the stage of a fill is free; other warps wait until the fill has landed. ``start``: the first cycle in which
    the warp can issue.
    """

    parts: tuple[tuple[Sequence[Instruction], int], ...]
    cta: int = 0
    fills: Sequence[int] = ()
    produces: bool = False
    start: float = 0.0

    @property
    def instructions(self) -> list[Instruction]:
        """All instructions in the order of execution, with each repetition of a part."""
        return [instruction for part, times in self.parts for _ in range(times) for instruction in part]


class _Warp:
    """A warp's place in its stream, and what it waits for.

    ``operation``: the next one, which can issue from cycle ``ready`` on; ``ready`` is infinite while other warps must
    act first. It has index ``at`` in repetition ``iteration`` of part ``part``. ``previous_cycle``: the cycle of the
    previous issue; ``stall_end``: the cycle in which its stall count has passed. ``ends``: the cycle in which the last
    operation of each repetition was issued. ``scoreboards``: for each of the six, the cycles in which its holders free
    it, each with the reason of the stall of a warp that waits for it. ``group_ends``: the cycle in which each committed
    group of wgmma ends. ``copy_commits`` and ``copies_landed``: how many groups of cp.async were committed, and the
    cycle in which the last copy lands. ``waited_fills`` and ``released_fills``: how many of ``fills`` the warp has
    waited for, and how many it has released. ``lag``: by how many fills a release in a loop is late. ``rings``: for
    each part, ``_in_ring``.
    """

    __slots__ = (
        "at", "copies_landed", "copy_commits", "cta", "ends", "fills", "group_ends", "index", "iteration", "lag",
        "operation", "operations", "part", "parts", "previous_cycle", "produces", "ready", "reason", "released_fills",
        "rings", "scoreboards", "stall_end", "waited_fills",
    )  # fmt: skip

    def __init__(self, index: int, stream: Stream, parts: list[tuple[list[Operation], int]]) -> None:
        self.index, self.cta, self.produces = index, stream.cta, stream.produces
        self.fills = list(stream.fills)
        self.parts, self.part, self.iteration, self.at = parts, 0, 0, 0
        self.operations = parts[0][0]
        self.operation: Operation | None = self.operations[0]
        self.previous_cycle = stream.start - 1
        self.stall_end = self.ready = stream.start
        self.reason = Stall.WAIT
        self.scoreboards: list[list[tuple[float, Stall]]] = [[] for _ in range(SCOREBOARDS)]
        self.copies_landed, self.copy_commits = 0.0, 0
        self.group_ends = list[float]()
        self.waited_fills = 0
        self.ends = list[float]()
        self.rings = [_in_ring(code) for code, _ in parts]
        # In a loop with wgmma an iteration releases the fill of the iteration before, since its own is still being
        # read. The last fill is released after the loop.
        self.lag = int(any(op.open_groups for code, _ in parts for op in code if op.open_groups is not None))
        self.released_fills = 0

    def advance(self, cycle: float) -> None:
        """Goes to the next operation, and records the end of a repetition."""
        self.at += 1
        if self.at < len(self.operations):
            self.operation = self.operations[self.at]
            return
        self.ends.append(cycle)
        self.at, self.iteration = 0, self.iteration + 1
        while self.iteration >= self.parts[self.part][1] or not self.parts[self.part][0]:
            self.part, self.iteration = self.part + 1, 0
            if self.part == len(self.parts):
                self.operation = None
                return
        self.operations = self.parts[self.part][0]
        self.operation = self.operations[0]

    def update(self) -> None:
        """Sets ``ready``, the first cycle in which the next operation can issue (infinite if it is not known yet), and
        ``reason``, what it waits for until then."""
        operation, ready, reason = self.operation, self.stall_end, Stall.WAIT
        if operation is None:
            return
        for barrier in operation.waits:
            for release, cause in self.scoreboards[barrier]:
                if release > ready:
                    ready, reason = release, cause
        if operation.depbar is not None:
            barrier, most = operation.depbar
            pending = sorted(self.scoreboards[barrier])
            if len(pending) > most and pending[-1 - most][0] > ready:
                ready, reason = pending[-1 - most]
        if operation.open_groups is not None and len(self.group_ends) > operation.open_groups:
            end = self.group_ends[-1 - operation.open_groups]
            if end > ready:
                ready, reason = end, Stall.GMMA
        self.ready, self.reason = ready, reason

    def settle(self, cycle: float) -> None:
        """Frees in this cycle the scoreboards that had no known end."""
        for board in self.scoreboards:
            board[:] = [(cycle, cause) if release == inf else (release, cause) for release, cause in board]
        self.update()


class _Ring:
    """The ring of a CTA. A fill is what TMA loads into one stage; fills have consecutive numbers.

    ``loads``: TMA loads of one fill. ``loaded``: how many loads of each fill were issued. ``landed``: the cycle in
    which each fill landed. ``readers``: how many warps have not released a fill yet. ``released``: the cycle in which
    the last of them did.
    """

    def __init__(self, warps: Sequence[_Warp], loads: int) -> None:
        self.loads = loads
        self.landed: dict[int, float] = {}
        self.loaded: dict[int, int] = {}
        self.released: dict[int, float] = {}
        readers: dict[int, int] = {}
        for warp in warps:
            for fill in () if warp.produces else warp.fills:
                readers[fill] = readers.get(fill, 0) + 1
        self.readers = readers


class _SubCore:
    """The state that the warps of a sub-core share, and the loop over issues.

    ``pipes``: the cycle from which each pipe is free. ``addresses``, ``shared``, ``l2``, ``mma``: the same for the
    address unit, shared memory, the queue to the L2, and the queue of asynchronous MMAs. ``arrived``: the warps at each
    barrier of each CTA. ``waiting``: the warps of each CTA that wait for a fill. ``members``: how many warps of each
    CTA have not exited.
    """

    def __init__(self, machine: Machine, warps: Sequence[_Warp], timeline: Timeline, detail: bool) -> None:
        self.machine, self.warps, self.timeline, self.detail = machine, warps, timeline, detail
        self.pipes: dict[Pipe, float] = dict.fromkeys(Pipe, 0.0)
        self.queue: list[float] = []  # cycles in which the latest memory instructions leave the queue
        self.addresses = self.shared = self.l2 = self.mma = 0.0
        self.arrived: dict[tuple[int, str], list[tuple[_Warp, float]]] = {}
        self.waiting: dict[int, list[tuple[_Warp, int]]] = {}
        ctas = {warp.cta for warp in warps}
        self.members = {cta: sum(warp.cta == cta for warp in warps) for cta in ctas}
        self.rings = {
            cta: _Ring([warp for warp in warps if warp.cta == cta], _loads_per_fill(warps, cta)) for cta in ctas
        }

    def run(self) -> None:
        """Issues instructions until all warps have exited."""
        active = [warp for warp in self.warps if warp.operation is not None]
        last, cycle = None, 0.0
        while active:
            chosen, earliest, accepted = None, inf, 0.0
            for warp in active:
                # Skips warps that cannot be the earliest before looking at their pipes: this loop takes most of the
                # simulation's time.
                if warp.ready == inf or (warp.ready > earliest and warp.ready > cycle):
                    continue
                start = self._acceptance_cycle(warp)
                at = start if start > cycle else cycle
                # Ties: the warp that issued last, then the youngest, the last of the list.
                if at < earliest or (at == earliest and chosen is not last):
                    chosen, earliest, accepted = warp, at, start
            if chosen is None:
                self._break_deadlock(active)
                continue
            operation = chosen.operation
            assert operation is not None
            self._issue(chosen, operation, earliest, accepted)
            last = chosen
            cycle = earliest + 1
            if chosen.operation is None:
                active.remove(chosen)
                self._leave(chosen)

    def _acceptance_cycle(self, warp: _Warp) -> float:
        """The cycle from which the pipe accepts a warp's next instruction."""
        operation, ready = warp.operation, warp.ready
        assert operation is not None
        if operation.address_cycles:
            queue = self.queue
            return max(ready, queue[-QUEUE_LENGTH - 1]) if len(queue) > QUEUE_LENGTH else ready
        if operation.kind is Kind.WARPGROUP_MMA:
            return ready
        return max(ready, self.pipes[operation.pipe])

    def _issue(self, warp: _Warp, operation: Operation, cycle: float, accepted: float) -> None:
        """Issues a warp's operation in ``cycle``: takes its resources and scoreboards, and advances the warp."""
        if self.detail:
            self.timeline.raw_issues.append(
                RawIssue(
                    warp.index, operation.instruction, cycle, warp.previous_cycle, warp.stall_end, warp.ready,
                    warp.reason, accepted, operation.throttle,
                )
            )  # fmt: skip
        result, read = cycle + operation.result_cycles, cycle + operation.read_cycles
        kind = operation.kind
        if operation.address_cycles:
            result, read = self._access_memory(warp, operation, cycle)
        elif kind is Kind.WARPGROUP_MMA:
            self._warpgroup_mma(warp, operation, cycle)
        elif kind is Kind.FILL:
            self._fill(warp, cycle)
        elif operation.pipe is not Pipe.NONE:
            self.pipes[operation.pipe] = cycle + operation.busy_cycles
            self._add_busy(operation.pipe, operation.busy_cycles)
        for barrier, release in ((operation.write_barrier, result), (operation.read_barrier, read)):
            if barrier is not None:
                board = [entry for entry in warp.scoreboards[barrier] if entry[0] > cycle]
                board.append((release, operation.reason))
                warp.scoreboards[barrier] = board
        warp.previous_cycle, warp.stall_end = cycle, cycle + operation.stall
        in_ring = warp.rings[warp.part]
        warp.advance(cycle)
        if kind is Kind.BARRIER:
            self._arrive(warp, operation, cycle)
            return
        if kind is Kind.WAIT and in_ring:
            self._wait(warp, operation, cycle)
        elif kind is Kind.RELEASE and not warp.produces and warp.fills:
            self._release(warp, cycle, in_ring)
        warp.update()

    def _add_busy(self, pipe: Pipe, cycles: float) -> None:
        """Adds cycles to those for which a pipe is busy in the whole simulation."""
        self.timeline.busy[pipe] = self.timeline.busy.get(pipe, 0.0) + cycles

    def _access_memory(self, warp: _Warp, operation: Operation, cycle: float) -> tuple[float, float]:
        """Sends an instruction through the address unit, shared memory and perhaps the L2.

        Returns the cycles in which its result is available and in which its operands have been read.
        """
        machine = self.machine
        copies_nothing = machine.copy_groups is not None and warp.copy_commits >= machine.copy_groups
        empty = operation.kind is Kind.COPY and copies_nothing
        start = max(cycle, self.addresses)
        self.addresses = start + operation.address_cycles
        busy = operation.busy_cycles * machine.sub_cores
        finished = max(start, self.shared)
        self.shared = finished + (1 if empty else busy)
        self.queue.append(finished)
        del self.queue[: -QUEUE_LENGTH - 1]
        self._add_busy(operation.pipe, busy)
        # The other sub-cores issue the same instruction. On average half of theirs are served before this one.
        last = finished + (busy - operation.busy_cycles) / 2
        if operation.kind is Kind.COMMIT:
            warp.copy_commits += 1
            return max(warp.copies_landed, last + operation.result_cycles), start + operation.read_cycles
        result = last + operation.result_cycles
        if operation.bytes and not empty:
            duration = operation.bytes * machine.sub_cores / machine.l2_bytes
            self.l2 = max(last, self.l2) + duration
            if operation.kind is not Kind.STORE:
                arrived = max(self.l2, last + duration) + machine.l2_cycles
                result = arrived if operation.kind is Kind.COPY else max(arrived, result)
            if operation.kind is Kind.COPY:
                warp.copies_landed = max(warp.copies_landed, result)
        return result, start + operation.read_cycles

    def _warpgroup_mma(self, warp: _Warp, operation: Operation, cycle: float) -> None:
        """Appends an asynchronous MMA to the queue of the tensor core."""
        self.mma = max(cycle, self.mma) + operation.busy_cycles
        self._add_busy(Pipe.TENSOR, operation.busy_cycles)
        if operation.ends_group:
            warp.group_ends.append(self.mma)

    def _fill(self, warp: _Warp, cycle: float) -> None:
        """Sends one TMA load of a fill through the queue to the L2. A fill has landed when its last load has."""
        machine, ring = self.machine, self.rings[warp.cta]
        self.l2 = max(cycle, self.l2) + machine.fill_bytes / ring.loads / machine.l2_bytes
        self._add_busy(Pipe.TMA, 1)
        # A producer loads the fill for whose stage it has waited last.
        fill = warp.fills[min(warp.waited_fills, len(warp.fills)) - 1] if warp.fills else 0
        landed = max(ring.landed.get(fill, 0.0), self.l2 + machine.l2_cycles + TMA_CYCLES)
        ring.landed[fill], ring.loaded[fill] = landed, ring.loaded.get(fill, 0) + 1
        if ring.loaded[fill] == ring.loads:
            self._wake(warp.cta)

    def _wait(self, warp: _Warp, operation: Operation, cycle: float) -> None:
        """Starts a wait for an mbarrier. A producer waits for the stage of its next fill, a consumer for the fill."""
        fill = warp.fills[warp.waited_fills] if warp.waited_fills < len(warp.fills) else -1
        warp.waited_fills += 1
        satisfied = self._completion_cycle(warp, fill)
        # ``_issue`` has just added this instruction to the scoreboard; its entry is replaced by the end of the wait.
        board = warp.scoreboards[operation.write_barrier or 0]
        if satisfied is None:
            board[-1:] = [(inf, Stall.LONG_SCOREBOARD)]
            self.waiting.setdefault(warp.cta, []).append((warp, fill))
        else:
            woken = satisfied + WAKE_CYCLES if satisfied > cycle else 0.0
            board[-1:] = [(max(cycle + operation.result_cycles, woken), operation.reason)]

    def _completion_cycle(self, warp: _Warp, fill: int) -> float | None:
        """The cycle in which the mbarrier that a warp waits for completes; None if that is not known yet."""
        ring = self.rings[warp.cta]
        if warp.produces:
            before = fill - self.machine.stages
            if before < 0 or before not in ring.readers:
                return 0.0
            return ring.released.get(before) if ring.readers[before] == 0 else None
        if fill < 0:
            return 0.0
        return ring.landed[fill] if ring.loaded.get(fill, 0) >= ring.loads else None

    def _release(self, warp: _Warp, cycle: float, in_ring: bool) -> None:
        """Releases the stages of the fills that a consumer has read."""
        ring, last = self.rings[warp.cta], warp.waited_fills - (warp.lag if in_ring else 0)
        for fill in warp.fills[warp.released_fills : last]:
            ring.readers[fill] -= 1
            ring.released[fill] = max(cycle, ring.released.get(fill, 0.0))
        warp.released_fills = max(warp.released_fills, last)
        self._wake(warp.cta)

    def _wake(self, cta: int) -> None:
        """Lets the waiting warps of a CTA continue whose mbarriers have completed."""
        waiting = self.waiting.pop(cta, [])
        for warp, fill in waiting:
            satisfied = self._completion_cycle(warp, fill)
            if satisfied is None:
                self.waiting.setdefault(cta, []).append((warp, fill))
                continue
            warp.settle(satisfied + WAKE_CYCLES)

    def _arrive(self, warp: _Warp, operation: Operation, cycle: float) -> None:
        """Lets a warp arrive at a barrier of its CTA, which opens with the last arrival."""
        name = operation.instruction.operands[0] if operation.instruction.operands else "0x0"
        arrived = self.arrived.setdefault((warp.cta, name), [])
        arrived.append((warp, cycle))
        members = self.members[warp.cta]
        if operation.members:
            # The instruction counts warps of the CTA; a quarter of them are on this sub-core.
            members = min(members, ceil_div(operation.members, SUB_CORES))
        if len(arrived) >= members:
            self._open_barrier(warp.cta, name)
        else:
            warp.ready = inf

    def _open_barrier(self, cta: int, name: str) -> None:
        """Lets the warps continue that have arrived at a barrier of a CTA."""
        arrived = self.arrived.pop((cta, name), [])
        opened = max((cycle for _, cycle in arrived), default=0.0) + BARRIER_CYCLES
        for warp, _ in arrived:
            warp.update()
            if opened > warp.ready:
                warp.ready, warp.reason = opened, Stall.BARRIER

    def _leave(self, warp: _Warp) -> None:
        """Removes a warp that has exited from those that barriers wait for."""
        self.members[warp.cta] -= 1
        for (cta, name), arrived in list(self.arrived.items()):
            if cta == warp.cta and len(arrived) >= self.members[cta]:
                self._open_barrier(cta, name)

    def _break_deadlock(self, active: Sequence[_Warp]) -> None:
        """Lets all warps continue if all wait for events that never come; streams need not be complete programs."""
        cycle = max(warp.previous_cycle for warp in active) + 1
        self.arrived.clear()
        self.waiting.clear()
        for warp in active:
            warp.settle(cycle)
            warp.ready = max(warp.ready, cycle)


def _in_ring(code: Sequence[Operation]) -> bool:
    """Whether the waits in a part of a stream are for fills: the part fills the ring, or multiplies with wgmma."""
    kinds = {operation.kind for operation in code}
    return Kind.WAIT in kinds and bool(kinds & {Kind.FILL, Kind.WARPGROUP_MMA})


def _loads_per_fill(warps: Sequence[_Warp], cta: int) -> int:
    """How many TMA loads a fill of a CTA's ring consists of."""
    producers = [warp for warp in warps if warp.cta == cta and warp.produces]
    loads = sum(times * sum(op.kind is Kind.FILL for op in code) for warp in producers for code, times in warp.parts)
    fills = sum(len(warp.fills) for warp in producers)
    return max(1, loads // fills) if fills else 1


def simulate(streams: Sequence[Stream], machine: Machine, *, detail: bool = False) -> Timeline:
    """Runs the streams of a sub-core's warps to their ends.

    ``detail``: whether the timeline records every issue with its stalls.
    """
    timeline, operations = Timeline(), dict[int, list[Operation]]()
    warps = []
    for index, stream in enumerate(streams):
        parts = []
        for code, times in stream.parts:
            if id(code) not in operations:
                operations[id(code)] = [Operation(instruction, machine) for instruction in code]
            if code and times:
                parts.append((operations[id(code)], times))
        if parts:
            warps.append(_Warp(index, stream, parts))
    core = _SubCore(machine, warps, timeline, detail)
    core.run()
    timeline.ends = [warp.ends for warp in warps]
    timeline.cycles = max([0.0, *(warp.previous_cycle + 1 for warp in warps)])
    return timeline


def steady_cycles(instructions: Sequence[Instruction], sm: str = "sm_80", iterations: int = 12) -> float:
    """T1: the cycles of one iteration of a loop if one warp runs alone and loads from the L2 have no latency.

    This is a lower bound by which two kernels can be compared. It is the mean over the second half of ``iterations``
    iterations.
    """
    (ends,) = simulate([Stream(((instructions, iterations),))], Machine(sm, l2_cycles=0)).ends
    half = iterations // 2
    return (ends[-1] - ends[half - 1]) / (iterations - half)
