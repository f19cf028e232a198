"""Finds the steady state of the main loop in a simulation, and the cycles of an iteration by line, pipe and stall."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

from kernelproof.ground.chips import SUB_CORES, Chip
from kernelproof.profile import figures
from kernelproof.sass import Function, Graph, Instruction, Pipe, pipe_use
from kernelproof.sass.banks import conflict_cycles
from kernelproof.sass.pipes import MMA, PipeUse
from kernelproof.sass.registers import RegisterLiveness, unread_instructions
from kernelproof.sass.simulation import Issue, Stall

SHOWN_CYCLES, MAX_ITERATIONS = 600, 4  # most cycles and iterations in the picture, which has at least one iteration
SHOWN_PIPES = (Pipe.TENSOR, Pipe.SHARED, Pipe.GLOBAL, Pipe.TMA)  # pipes that have a lane in the picture
BOUND_SHARE = 0.85  # a pipe that is busy for this share of the time or more bounds the loop
ISSUE_PORT = "issue port"
SourceText = Callable[[str], Sequence[str]]  # the lines of a source file; none if it does not exist


class LoopWindow(NamedTuple):
    """The part of a simulation that represents the main loop: the issues from cycle ``start`` to ``end``.

    ``iterations``: the mean number of iterations of the main loop that a warp with MMAs makes in the window. ``warps``:
    how many warps share the scheduler. ``earlier``: the issues before ``start``; pipes may still be busy with them.
    """

    issues: Sequence[Issue]
    start: float
    end: float
    iterations: float
    warps: int
    earlier: Sequence[Issue] = ()

    @property
    def cycles(self) -> float:
        """How long the window lasts."""
        return self.end - self.start


def steady_window(issues: Sequence[Issue], iteration: Sequence[Instruction]) -> LoopWindow:
    """The window of a simulation in which its warps are in the steady state of the main loop.

    The window starts when every warp has made half of its iterations, and ends when the first warp begins its last one.

    There are three exceptions. Warps may alternate, so that one begins its main loop after another has left it; the
    window then lasts from the middle of the first warp's iterations to the middle of the last warp's, which is the time
    of one tile. If a warp makes only one iteration, the window is that iteration. Without a loop it lasts from the
    first MMA to the last.
    """
    warps = len({issue.warp for issue in issues})
    starts: dict[int, list[float]] = defaultdict(list)
    for issue in issues:
        if iteration and issue.instruction.address == iteration[0].address:
            starts[issue.warp].append(issue.cycle)
    middles = [cycles[(len(cycles) - 1) // 2] for cycles in starts.values()]
    start, end = max(middles, default=0.0), min((cycles[-1] for cycles in starts.values()), default=0.0)
    if end <= start and all(len(cycles) > 1 for cycles in starts.values()):
        start, end = min(middles, default=0.0), max(middles, default=0.0)
    if end <= start:
        inside = {code.address for code in iteration}
        cycles_inside = [
            issue.cycle
            for issue in issues
            if (issue.instruction.address in inside if inside else issue.instruction.name in MMA)
        ]
        start, end = min(cycles_inside, default=0.0), max(cycles_inside, default=0.0) + 1
    within = [issue for issue in issues if start <= issue.cycle < end]
    mmas = sum(code.name in MMA for code in iteration) * len(starts)
    iterations = sum(issue.instruction.name in MMA for issue in within) / mmas if mmas else 1.0
    return LoopWindow(within, start, end, iterations, warps, [issue for issue in issues if issue.cycle < start])


def source_text(own: Path | None) -> SourceText:
    """Returns a function that reads the lines of a source file.

    ``own``: the CUDA text to read in place of every .cu file, since the path in a cubin is where it was compiled.
    """

    @cache
    def lines(file: str) -> Sequence[str]:
        path = own if own is not None and Path(file).name.endswith(".cu") else Path(file)
        try:
            return path.read_text(errors="replace").splitlines()
        except OSError:
            return ()

    return lines


class Listing:
    """The instructions of a function that a window issues, in the order of addresses, with their figures."""

    def __init__(self, window: LoopWindow, function: Function, chip: Chip) -> None:
        self.window = window
        # The following mappings and sets are by address: registers in use, instructions whose results nobody reads,
        # pipes, cycles of bank conflicts, and the place in ``instructions``.
        sm, code = function.sm, function.instructions
        liveness = RegisterLiveness(Graph(function))
        self.live = {item.address: count for item, count in zip(code, liveness.pressure, strict=True)}
        self.unread = {item.address for item in unread_instructions(code, liveness, sm)}
        instructions = {issue.instruction.address: issue.instruction for issue in window.issues}
        self.instructions = [instructions[address] for address in sorted(instructions)]
        self.uses = {instruction.address: pipe_use(instruction, sm, chip) for instruction in code}
        conflicts = conflict_cycles(self.instructions, sm)
        self.conflicts = dict(zip((item.address for item in self.instructions), conflicts, strict=True))
        self.index = {instruction.address: at for at, instruction in enumerate(self.instructions)}

    def lines(self, source: SourceText) -> tuple[figures.Line, ...]:
        """The lines, each with its stalls, as a mean over its issues. ``source`` reads source files."""
        stalls: dict[int, Counter[str]] = defaultdict(Counter)
        times: Counter[int] = Counter()
        for issue in self.window.issues:
            times[issue.instruction.address] += 1
            stalls[issue.instruction.address].update(wait_cycles(issue))
        return tuple(
            self._line(instruction, stalls[instruction.address], times[instruction.address], source)
            for instruction in self.instructions
        )

    def _line(
        self, instruction: Instruction, stalls: Mapping[str, float], times: int, source: SourceText
    ) -> figures.Line:
        """The line of an instruction. ``stalls``: cycles by reason, summed over its ``times`` issues."""
        use = self.uses[instruction.address]
        guard = f"@{instruction.guard} " if instruction.guard else ""
        innermost = instruction.source[0] if instruction.source else None
        text = source(innermost.file) if innermost else ()
        return figures.Line(
            address=instruction.address,
            sass=f"{guard}{instruction.opcode} {', '.join(instruction.operands)}".rstrip(),
            pipe=use.pipe.value,
            busy=use.busy_cycles,
            stalls={name: cycles / times for name, cycles in stalls.items()},
            live=self.live[instruction.address],
            conflicts=self.conflicts[instruction.address],
            unread=instruction.address in self.unread,
            file=innermost.file if innermost else None,
            line=innermost.line if innermost else None,
            cuda=text[innermost.line - 1].strip() if innermost and innermost.line <= len(text) else None,
        )

    @property
    def _shown_cycles(self) -> float:
        """Cycles of the iterations that the picture shows, from the start of the window."""
        iteration = self.window.cycles / self.window.iterations
        return iteration * max(1, min(MAX_ITERATIONS, int(SHOWN_CYCLES // iteration)))

    def issues(self) -> tuple[figures.Issue, ...]:
        """The issues of the shown iterations. Cycles count from the start of the window."""
        return tuple(
            figures.Issue(
                warp=issue.warp,
                line=self.index[issue.instruction.address],
                cycle=issue.cycle - self.window.start,
                stalls=wait_cycles(issue),
            )
            for issue in self.window.issues
            if issue.cycle - self.window.start < self._shown_cycles
        )

    def busy(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """The spans of the shown iterations in which each pipe of ``SHOWN_PIPES`` is busy: first cycles and ends.

        Cycles count from the start of the window.
        """
        start, shown = self.window.start, self._shown_cycles
        spans: dict[str, tuple[tuple[float, float], ...]] = {}
        for pipe in SHOWN_PIPES:
            clipped = ((max(0.0, begin - start), min(end - start, shown)) for begin, end in self._busy_spans(pipe))
            if spans_of_pipe := tuple((begin, end) for begin, end in clipped if begin < end):
                spans[pipe.value] = spans_of_pipe
        return spans

    def _busy_spans(self, pipe: Pipe) -> Iterator[tuple[float, float]]:
        """The spans in which a pipe is busy. A pipe executes its instructions one after the other, in the order of
        issue.

        Issues before the window count too: a pipe may be busy with asynchronous MMAs long after they were issued.
        """
        begin = free = 0.0  # the start and the end of the current span
        for issue in (*self.window.earlier, *self.window.issues):
            use = self.uses[issue.instruction.address]
            if use.pipe is pipe:
                if issue.cycle > free:
                    yield begin, free
                    begin = free = issue.cycle
                free += self._busy_cycles(use)
        yield begin, free

    def _busy_cycles(self, use: PipeUse) -> float:
        """Cycles for which an instruction occupies its pipe. All sub-cores of an SM run the same warps, so a pipe that
        they share is busy with the instruction of each."""
        return use.busy_cycles * (SUB_CORES if use.shared_by_sm else 1)

    def _idle(self) -> dict[str, float]:
        """Cycles that warps with MMAs spend while the tensor core idles, by the reason for which they wait; under
        ``selected``, the cycles in which they issue other instructions."""
        window, busy = self.window, set[int]()  # the cycles of the window in which the tensor core is busy
        for begin, end in self._busy_spans(Pipe.TENSOR):
            busy.update(range(int(max(begin, window.start)), ceil(min(end, window.end))))
        multiplying = {
            issue.warp for issue in window.issues if self.uses[issue.instruction.address].pipe is Pipe.TENSOR
        }
        total: defaultdict[str, float] = defaultdict(float)
        for issue in window.issues:
            if issue.warp in multiplying:
                for name, begin, end in figures.spans(issue.cycle, wait_cycles(issue)):
                    total[name] += sum(
                        cycle not in busy for cycle in range(max(int(begin), int(window.start)), int(end))
                    )
        return {name: cycles for name, cycles in total.items() if cycles}

    def loop(self, unit: Literal["k-tile", "iteration"], tiles: float, rolled: bool) -> figures.MainLoop:
        """The figures of the main loop per ``unit``. ``tiles``: how many units an iteration has. ``rolled``: whether
        the main loop is a loop (false if k is unrolled)."""
        window = self.window
        units = window.iterations * tiles
        busy: defaultdict[str, float] = defaultdict(float)
        stalls: defaultdict[str, float] = defaultdict(float)
        for issue in window.issues:
            use = self.uses[issue.instruction.address]
            if use.pipe is not Pipe.NONE:
                busy[use.pipe.value] += self._busy_cycles(use)
            for stall, cycles in issue.stalls.items():
                stalls[stall] += cycles
        # Asynchronous MMAs of the window may keep the tensor core busy beyond it.
        duration = max(window.cycles, busy[Pipe.TENSOR])
        pipes = {pipe: cycles / duration for pipe, cycles in busy.items()}
        pipes[ISSUE_PORT] = len(window.issues) / duration
        waits = {str(stall): cycles / max(1.0, sum(stalls.values())) for stall, cycles in stalls.items()}
        idle = self._idle()
        addresses = [issue.instruction.address for issue in window.issues]
        opcodes = Counter(issue.instruction.name for issue in window.issues)
        return figures.MainLoop(
            unit=unit,
            rolled=rolled,
            warps=window.warps,
            cycles=duration / units,
            tensor_cycles=busy[Pipe.TENSOR] / units,
            bound=bound(pipes, idle),
            issue_slots=len(window.issues) / units,
            opcodes={name: count / units for name, count in opcodes.most_common()},
            pipes=pipes,
            live_registers=max((self.live[address] for address in addresses), default=0),
            bank_conflicts=sum(self.conflicts[address] for address in addresses) / units,
            unread=sum(address in self.unread for address in addresses) / units,
            stalls=waits,
            idle={name: cycles / max(1.0, sum(idle.values())) for name, cycles in idle.items()},
        )


def wait_cycles(issue: Issue) -> dict[str, float]:
    """The cycles that a warp waits before an issue, by reason. The issue slot itself is left out."""
    return {str(stall): cycles for stall, cycles in issue.stalls.items() if stall is not Stall.SELECTED and cycles > 0}


def bound(pipes: Mapping[str, float], idle: Mapping[str, float]) -> str:
    """The bound of the main loop: a pipe that is busy for a share of ``BOUND_SHARE`` or more, or else ``latency`` with
    the reason for which warps wait longest while the tensor core idles."""
    pipe = max(pipes, key=lambda name: pipes[name])
    if pipes[pipe] >= BOUND_SHARE:
        return f"{pipe} pipe" if pipe != ISSUE_PORT else pipe
    return f"latency: {max(idle, key=lambda name: idle[name])}" if idle else "latency"
