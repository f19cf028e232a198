"""Simulation of the warps of one sub-core, cycle by cycle: which warp issues, and why the others wait.

One instruction issues per cycle. The scheduler stays with the warp that issued last while it can, then takes the
youngest (Huerta et al., "Analyzing Modern NVIDIA GPU cores", MICRO 2025, arXiv 2503.20481). A warp can issue when the
stall count of its instruction before has passed, the scoreboards of its wait mask are free, and the pipe accepts:
fixed latencies are in the stall counts already, ptxas wrote them there. Memory instructions pass a bounded queue to the
SM's shared memory; copies and loads from global memory pass a queue to the L2, of one bandwidth and one latency, so
that a loaded latency emerges. MMAs of warpgroups are asynchronous and in order. Barriers, mbarriers and fills of a
ring by TMA bind the warps of a CTA together.

Not modelled: bank conflicts, the register-file cache, instruction fetch, and differences between the four sub-cores.
All four run the same warps, so one of them gets a quarter of shared memory's and of the L2's bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kernelproof.ground.chips import SUB_CORES, TMA_CYCLES
from kernelproof.sass.decoding import Instruction
from kernelproof.sass.operations import Kind, Machine, Operation, Stall
from kernelproof.sass.pipes import Pipe
from kernelproof.sass.timeline import Issue, Row, Timeline

__all__ = ["Issue", "Machine", "Stall", "Stream", "Timeline", "simulate", "steady_cycles"]

QUEUE = 5  # memory instructions that a sub-core holds beside the one in the address unit: arXiv 2503.20481
# Cycles from the last arrival at a barrier of the CTA to the next issue: Zhang et al., arXiv 2004.05371, of a V100.
BARRIER_CYCLES = 22
WAKE_CYCLES = 30  # from the completion of an mbarrier to the waiting warp: Meta's Triton fork, LatencyModel, of a B200


@dataclass(frozen=True)
class Stream:
    """What one warp executes: parts, each repeated. Warps of one ``cta`` share barriers.

    ``fills``: the fills of the CTA's ring that its waits for mbarriers are for, in order; a producer's waits are for
    their places to be free.
    """

    parts: tuple[tuple[Sequence[Instruction], int], ...]
    cta: int = 0
    fills: Sequence[int] = ()
    produces: bool = False
    start: float = 0.0

    @property
    def instructions(self) -> list[Instruction]:
        return [instruction for part, times in self.parts for _ in range(times) for instruction in part]


class _Warp:
    """A warp's place in its stream and what it waits for. ``ready`` is infinite while others must act first."""

    __slots__ = (
        "at", "before", "copies_landed", "cta", "ends", "fills", "fixed", "group_ends", "groups", "index", "lag",
        "operation", "operations", "part", "parts", "produces", "ready", "reason", "returned", "rings", "scoreboards",
        "turn", "waited",
    )  # fmt: skip

    def __init__(self, index: int, stream: Stream, parts: list[tuple[list[Operation], int]]) -> None:
        self.index, self.cta, self.produces = index, stream.cta, stream.produces
        self.fills = list(stream.fills)
        self.parts, self.part, self.turn, self.at = parts, 0, 0, 0
        self.operations = parts[0][0]
        self.operation: Operation | None = self.operations[0]
        self.before = stream.start - 1
        self.fixed = self.ready = stream.start
        self.reason = Stall.WAIT
        self.scoreboards: list[list[tuple[float, Stall]]] = [[] for _ in range(6)]
        self.copies_landed, self.groups = 0.0, 0
        self.group_ends = list[float]()
        self.waited = 0
        self.ends = list[float]()
        self.rings = [_in_ring(code) for code, _ in parts]
        # A turn that multiplies on hands back what the turn before has read; the last one is handed back behind.
        self.lag = int(any(op.warpgroups for code, _ in parts for op in code if op.warpgroups is not None))
        self.returned = 0

    def advance(self, cycle: float) -> None:
        """To the next operation; notes the end of a repetition."""
        self.at += 1
        if self.at < len(self.operations):
            self.operation = self.operations[self.at]
            return
        self.ends.append(cycle)
        self.at, self.turn = 0, self.turn + 1
        while self.turn >= self.parts[self.part][1] or not self.parts[self.part][0]:
            self.part, self.turn = self.part + 1, 0
            if self.part == len(self.parts):
                self.operation = None
                return
        self.operations = self.parts[self.part][0]
        self.operation = self.operations[0]

    def update(self) -> None:
        """``ready``: when the next operation's dependencies are over, as far as that is settled."""
        operation, ready, reason = self.operation, self.fixed, Stall.WAIT
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
        if operation.warpgroups is not None and len(self.group_ends) > operation.warpgroups:
            end = self.group_ends[-1 - operation.warpgroups]
            if end > ready:
                ready, reason = end, Stall.GMMA
        self.ready, self.reason = ready, reason

    def settle(self, cycle: float) -> None:
        """What was awaited without an end is over in this cycle."""
        for board in self.scoreboards:
            board[:] = [(cycle, cause) if release == inf else (release, cause) for release, cause in board]
        self.update()


class _Ring:
    """A CTA's fills by TMA: when each landed, and when its place was free again."""

    def __init__(self, warps: Sequence[_Warp], loads: int) -> None:
        self.loads = loads  # TMA loads of one fill
        self.landed: dict[int, float] = {}
        self.loaded: dict[int, int] = {}
        self.released: dict[int, float] = {}
        readers: dict[int, int] = {}
        for warp in warps:
            for fill in () if warp.produces else warp.fills:
                readers[fill] = readers.get(fill, 0) + 1
        self.readers = readers


class _SubCore:
    """The state that warps share, and the loop over issues."""

    def __init__(self, machine: Machine, warps: Sequence[_Warp], timeline: Timeline, detail: bool) -> None:
        self.machine, self.warps, self.timeline, self.detail = machine, warps, timeline, detail
        self.pipes: dict[Pipe, float] = dict.fromkeys(Pipe, 0.0)
        self.queue: list[float] = []  # cycles at which its memory instructions leave the queue
        self.addresses = self.shared = self.l2 = self.mma = 0.0
        self.arrived: dict[tuple[int, str], list[tuple[_Warp, float]]] = {}
        self.waiting: dict[int, list[tuple[_Warp, int]]] = {}
        ctas = {warp.cta for warp in warps}
        self.members = {cta: sum(warp.cta == cta for warp in warps) for cta in ctas}
        self.rings = {
            cta: _Ring([warp for warp in warps if warp.cta == cta], _loads_per_fill(warps, cta)) for cta in ctas
        }

    def run(self) -> None:
        active = [warp for warp in self.warps if warp.operation is not None]
        last, cycle = None, 0.0
        while active:
            chosen, earliest, accepted = None, inf, 0.0
            for warp in active:
                if warp.ready == inf or (warp.ready > earliest and warp.ready > cycle):
                    continue
                start = self._accepted(warp)
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

    def _accepted(self, warp: _Warp) -> float:
        """The cycle from which a warp's next instruction finds its pipe free."""
        operation, ready = warp.operation, warp.ready
        assert operation is not None
        if operation.address:
            queue = self.queue
            return max(ready, queue[-QUEUE - 1]) if len(queue) > QUEUE else ready
        if operation.kind is Kind.WARPGROUP_MMA:
            return ready
        return max(ready, self.pipes[operation.pipe])

    def _issue(self, warp: _Warp, operation: Operation, cycle: float, accepted: float) -> None:
        if self.detail:
            self.timeline.rows.append(
                Row(
                    warp.index, operation.instruction, cycle, warp.before, warp.fixed, warp.ready, warp.reason,
                    accepted, operation.throttle,
                )
            )  # fmt: skip
        result, read = cycle + operation.result, cycle + operation.read
        kind = operation.kind
        if operation.address:
            result, read = self._memory(warp, operation, cycle)
        elif kind is Kind.WARPGROUP_MMA:
            self._warpgroup_mma(warp, operation, cycle)
        elif kind is Kind.FILL:
            self._fill(warp, cycle)
        elif operation.pipe is not Pipe.NONE:
            self.pipes[operation.pipe] = cycle + operation.busy
            self._busy(operation.pipe, operation.busy)
        for barrier, release in ((operation.write_barrier, result), (operation.read_barrier, read)):
            if barrier is not None:
                board = [entry for entry in warp.scoreboards[barrier] if entry[0] > cycle]
                board.append((release, operation.reason))
                warp.scoreboards[barrier] = board
        warp.before, warp.fixed = cycle, cycle + operation.stall
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

    def _busy(self, pipe: Pipe, cycles: float) -> None:
        self.timeline.busy[pipe] = self.timeline.busy.get(pipe, 0.0) + cycles

    def _memory(self, warp: _Warp, operation: Operation, cycle: float) -> tuple[float, float]:
        """Through the address unit and shared memory's, from there perhaps to the L2: cycles in which the result is
        there and the operands are read."""
        machine = self.machine
        empty = operation.kind is Kind.COPY and machine.copy_groups is not None and warp.groups >= machine.copy_groups
        start = max(cycle, self.addresses)
        self.addresses = start + operation.address
        busy = operation.busy * machine.sub_cores
        finished = max(start, self.shared)
        self.shared = finished + (1 if empty else busy)
        self.queue.append(finished)
        del self.queue[: -QUEUE - 1]
        self._busy(operation.pipe, busy)
        last = finished + (busy - operation.busy) / 2  # the other sub-cores' come before or after, alike
        if operation.kind is Kind.COMMIT:
            warp.groups += 1
            return max(warp.copies_landed, last + operation.result), start + operation.read
        result = last + operation.result
        if operation.bytes and not empty:
            duration = operation.bytes * machine.sub_cores / machine.l2_bytes
            self.l2 = max(last, self.l2) + duration
            if operation.kind is not Kind.STORE:
                arrived = max(self.l2, last + duration) + machine.l2_cycles
                result = arrived if operation.kind is Kind.COPY else max(arrived, result)
            if operation.kind is Kind.COPY:
                warp.copies_landed = max(warp.copies_landed, result)
        return result, start + operation.read

    def _warpgroup_mma(self, warp: _Warp, operation: Operation, cycle: float) -> None:
        self.mma = max(cycle, self.mma) + operation.busy
        self._busy(Pipe.TENSOR, operation.busy)
        if operation.groups:
            warp.group_ends.append(self.mma)

    def _fill(self, warp: _Warp, cycle: float) -> None:
        machine, ring = self.machine, self.rings[warp.cta]
        self.l2 = max(cycle, self.l2) + machine.fill_bytes / ring.loads / machine.l2_bytes
        self._busy(Pipe.TMA, 1)
        fill = warp.fills[min(warp.waited, len(warp.fills)) - 1] if warp.fills else 0
        landed = max(ring.landed.get(fill, 0.0), self.l2 + machine.l2_cycles + TMA_CYCLES)
        ring.landed[fill], ring.loaded[fill] = landed, ring.loaded.get(fill, 0) + 1
        if ring.loaded[fill] == ring.loads:
            self._wake(warp.cta)

    def _wait(self, warp: _Warp, operation: Operation, cycle: float) -> None:
        """A producer for the place of its next fill, a consumer for the next fill."""
        fill = warp.fills[warp.waited] if warp.waited < len(warp.fills) else -1
        warp.waited += 1
        satisfied = self._done(warp, fill)
        board = warp.scoreboards[operation.write_barrier or 0]
        if satisfied is None:
            board[-1:] = [(inf, Stall.LONG_SCOREBOARD)]
            self.waiting.setdefault(warp.cta, []).append((warp, fill))
        else:
            woken = satisfied + WAKE_CYCLES if satisfied > cycle else 0.0
            board[-1:] = [(max(cycle + operation.result, woken), operation.reason)]

    def _done(self, warp: _Warp, fill: int) -> float | None:
        """When the mbarrier's phase is over; None where that is not settled."""
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
        """A consumer hands back the places of the fills that it has read."""
        ring, last = self.rings[warp.cta], warp.waited - (warp.lag if in_ring else 0)
        for fill in warp.fills[warp.returned : last]:
            ring.readers[fill] -= 1
            ring.released[fill] = max(cycle, ring.released.get(fill, 0.0))
        warp.returned = max(warp.returned, last)
        self._wake(warp.cta)

    def _wake(self, cta: int) -> None:
        waiting = self.waiting.pop(cta, [])
        for warp, fill in waiting:
            satisfied = self._done(warp, fill)
            if satisfied is None:
                self.waiting.setdefault(cta, []).append((warp, fill))
                continue
            warp.settle(satisfied + WAKE_CYCLES)

    def _arrive(self, warp: _Warp, operation: Operation, cycle: float) -> None:
        name = operation.instruction.operands[0] if operation.instruction.operands else "0x0"
        arrived = self.arrived.setdefault((warp.cta, name), [])
        arrived.append((warp, cycle))
        members = self.members[warp.cta]
        if operation.members:
            members = min(members, -(-operation.members // SUB_CORES))
        if len(arrived) >= members:
            self._open(warp.cta, name)
        else:
            warp.ready = inf

    def _open(self, cta: int, name: str) -> None:
        arrived = self.arrived.pop((cta, name), [])
        opened = max((cycle for _, cycle in arrived), default=0.0) + BARRIER_CYCLES
        for warp, _ in arrived:
            warp.update()
            if opened > warp.ready:
                warp.ready, warp.reason = opened, Stall.BARRIER

    def _leave(self, warp: _Warp) -> None:
        """A warp that exited is no longer awaited at barriers."""
        self.members[warp.cta] -= 1
        for (cta, name), arrived in list(self.arrived.items()):
            if cta == warp.cta and len(arrived) >= self.members[cta]:
                self._open(cta, name)

    def _break_deadlock(self, active: Sequence[_Warp]) -> None:
        """Lets all warps go on when all wait for events that never come, because streams need not be a whole
        program."""
        cycle = max(warp.before for warp in active) + 1
        self.arrived.clear()
        self.waiting.clear()
        for warp in active:
            warp.settle(cycle)
            warp.ready = max(warp.ready, cycle)


def _in_ring(code: Sequence[Operation]) -> bool:
    """Whether a part's waits are for fills: it fills, or multiplies what was filled."""
    kinds = {operation.kind for operation in code}
    return Kind.WAIT in kinds and bool(kinds & {Kind.FILL, Kind.WARPGROUP_MMA})


def _loads_per_fill(warps: Sequence[_Warp], cta: int) -> int:
    """TMA loads of one fill."""
    producers = [warp for warp in warps if warp.cta == cta and warp.produces]
    loads = sum(times * sum(op.kind is Kind.FILL for op in code) for warp in producers for code, times in warp.parts)
    fills = sum(len(warp.fills) for warp in producers)
    return max(1, loads // fills) if fills else 1


def simulate(streams: Sequence[Stream], machine: Machine, *, detail: bool = False) -> Timeline:
    """Runs the streams of a sub-core's warps to their ends. ``detail``: keeps every issue with its stalls."""
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
    timeline.cycles = max([0.0, *(warp.before + 1 for warp in warps)])
    return timeline


def steady_cycles(instructions: Sequence[Instruction], sm: str = "sm_80", turns: int = 12) -> float:
    """Cycles of one turn of a loop for one warp alone, whose copies have landed when it waits for them: T1, a lower
    bound by which to compare two kernels. The mean over the later half of so many turns."""
    (ends,) = simulate([Stream(((instructions, turns),))], Machine(sm, l2_cycles=0)).ends
    half = turns // 2
    return (ends[-1] - ends[half - 1]) / (turns - half)
