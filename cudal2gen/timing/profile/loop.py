"""The steady main loop of a simulated scheduler: cycles of a turn by line and by pipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

from cudal2gen.timing.profile import figures
from kernelproof.ground.chips import SUB_CORES, Chip
from kernelproof.sass import Function, Graph, Instruction, Pipe, pipe_use
from kernelproof.sass.banks import conflict_cycles
from kernelproof.sass.pipes import MMA
from kernelproof.sass.registers import Liveness, unread
from kernelproof.sass.simulation import Issue, Stall

SHOWN_CYCLES, MAX_TURNS = 600, 4  # cycles and turns in the picture: as many turns as fit, at least one
BUSY = 0.85  # least busy share of a pipe that counts as the bound
ISSUE_PORT = "issue port"
SourceText = Callable[[str], Sequence[str]]  # the lines of a source file; none if it does not exist


class Window(NamedTuple):
    """Issues from cycle ``start`` to ``end``, in which each warp that multiplies makes ``turns`` turns of the main
    loop in the mean; ``warps``: how many share the scheduler."""

    issues: Sequence[Issue]
    start: float
    end: float
    turns: float
    warps: int

    @property
    def cycles(self) -> float:
        return self.end - self.start


def steady(issues: Sequence[Issue], turn: Sequence[Instruction]) -> Window:
    """From the middle of a run to where the first warp begins its last turn: where all are in the main loop.

    Where a warp makes one turn, that turn from its first instruction to its last; where there is no loop, from the
    first MMA to the last.
    """
    warps = len({issue.warp for issue in issues})
    starts: dict[int, list[float]] = defaultdict(list)
    for issue in issues:
        if turn and issue.instruction.address == turn[0].address:
            starts[issue.warp].append(issue.cycle)
    middles = [cycles[(len(cycles) - 1) // 2] for cycles in starts.values()]
    start, end = max(middles, default=0.0), min((cycles[-1] for cycles in starts.values()), default=0.0)
    if end <= start:
        inside = {code.address for code in turn}
        own = [issue.cycle for issue in issues if _counts(issue.instruction, inside)]
        start, end = min(own, default=0.0), max(own, default=0.0) + 1
    within = [issue for issue in issues if start <= issue.cycle < end]
    mmas = sum(code.name in MMA for code in turn) * len(starts)
    turns = sum(issue.instruction.name in MMA for issue in within) / mmas if mmas else 1.0
    return Window(within, start, end, turns, warps)


def _counts(instruction: Instruction, inside: Collection[int]) -> bool:
    return instruction.address in inside if inside else instruction.name in MMA


def source_text(own: Path | None) -> SourceText:
    """The lines of source files: of ``own`` for every file of its name, else of the file that a line names."""

    @cache
    def lines(file: str) -> Sequence[str]:
        path = own if own is not None and Path(file).name.endswith(".cu") else Path(file)
        try:
            return path.read_text(errors="replace").splitlines()
        except OSError:
            return ()

    return lines


class Listing:
    """The instructions of a window as lines, in the order of addresses; ``function``: what they are of."""

    def __init__(self, window: Window, function: Function, chip: Chip) -> None:
        self.window = window
        sm, code = function.sm, function.instructions
        liveness = Liveness(Graph(function))
        self.live = {item.address: count for item, count in zip(code, liveness.pressure, strict=True)}
        self.unread = {item.address for item in unread(code, liveness, sm)}
        instructions = {issue.instruction.address: issue.instruction for issue in window.issues}
        self.instructions = [instructions[address] for address in sorted(instructions)]
        self.uses = {instruction.address: pipe_use(instruction, sm, chip) for instruction in self.instructions}
        self.conflicts = dict(zip(self.uses, conflict_cycles(self.instructions, sm), strict=True))
        self.index = {instruction.address: at for at, instruction in enumerate(self.instructions)}

    def lines(self, source: SourceText) -> tuple[figures.Line, ...]:
        """The lines with their stalls, in the mean over the issues of each."""
        stalls: dict[int, Counter[str]] = defaultdict(Counter)
        times: Counter[int] = Counter()
        for issue in self.window.issues:
            times[issue.instruction.address] += 1
            stalls[issue.instruction.address].update(waited(issue))
        return tuple(
            self._line(instruction, stalls[instruction.address], times[instruction.address], source)
            for instruction in self.instructions
        )

    def _line(
        self, instruction: Instruction, stalls: Mapping[str, float], times: int, source: SourceText
    ) -> figures.Line:
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

    def issues(self) -> tuple[figures.Issue, ...]:
        """The issues of some turns; cycles count from the start of the window."""
        turn = self.window.cycles / self.window.turns
        span = turn * max(1, min(MAX_TURNS, int(SHOWN_CYCLES // turn)))
        return tuple(
            figures.Issue(
                warp=issue.warp,
                line=self.index[issue.instruction.address],
                cycle=issue.cycle - self.window.start,
                stalls=waited(issue),
            )
            for issue in self.window.issues
            if issue.cycle - self.window.start < span
        )

    def _idle(self) -> dict[str, float]:
        """Cycles that warps with MMAs spend while the tensor core idles, by reason; ``selected``: they issue others."""
        window, busy = self.window, set[int]()
        free = window.start
        for issue in window.issues:
            use = self.uses[issue.instruction.address]
            if use.pipe is Pipe.TENSOR:
                begin = max(free, issue.cycle)
                free = begin + use.busy_cycles
                busy.update(range(int(begin), ceil(free)))
        multiplying = {
            issue.warp for issue in window.issues if self.uses[issue.instruction.address].pipe is Pipe.TENSOR
        }
        total: defaultdict[str, float] = defaultdict(float)
        for issue in window.issues:
            if issue.warp in multiplying:
                for name, begin, end in figures.spans(issue.cycle, waited(issue)):
                    total[name] += sum(
                        cycle not in busy for cycle in range(max(int(begin), int(window.start)), int(end))
                    )
        return {name: cycles for name, cycles in total.items() if cycles}

    def loop(self, unit: Literal["k-tile", "turn"], tiles: float, rolled: bool) -> figures.Loop:
        """Figures of a unit; ``tiles``: how many of them a turn is."""
        window = self.window
        units = window.turns * tiles
        busy: defaultdict[str, float] = defaultdict(float)
        stalls: defaultdict[str, float] = defaultdict(float)
        for issue in window.issues:
            use = self.uses[issue.instruction.address]
            if use.pipe is not Pipe.NONE:
                busy[use.pipe.value] += use.busy_cycles * (SUB_CORES if use.shared_by_sm else 1)
            for stall, cycles in issue.stalls.items():
                stalls[stall] += cycles
        # Asynchronous MMAs of the window may keep the tensor core busy beyond it.
        lasting = max(window.cycles, busy[Pipe.TENSOR])
        pipes = {pipe: cycles / lasting for pipe, cycles in busy.items()}
        pipes[ISSUE_PORT] = len(window.issues) / lasting
        waits = {str(stall): cycles / max(1.0, sum(stalls.values())) for stall, cycles in stalls.items()}
        idle = self._idle()
        addresses = [issue.instruction.address for issue in window.issues]
        own = Counter(issue.instruction.name for issue in window.issues)
        return figures.Loop(
            unit=unit,
            rolled=rolled,
            warps=window.warps,
            cycles=lasting / units,
            tensor_cycles=busy[Pipe.TENSOR] / units,
            bound=bound(pipes, idle),
            issue_slots=len(window.issues) / units,
            opcodes={name: count / units for name, count in own.most_common()},
            pipes=pipes,
            live_registers=max((self.live[address] for address in addresses), default=0),
            bank_conflicts=sum(self.conflicts[address] for address in addresses) / units,
            unread=sum(address in self.unread for address in addresses) / units,
            stalls=waits,
            idle={name: cycles / max(1.0, sum(idle.values())) for name, cycles in idle.items()},
        )


def waited(issue: Issue) -> dict[str, float]:
    """The cycles before an issue by reason, without its own slot."""
    return {str(stall): cycles for stall, cycles in issue.stalls.items() if stall is not Stall.SELECTED and cycles > 0}


def bound(pipes: Mapping[str, float], idle: Mapping[str, float]) -> str:
    """A pipe that is busy nearly all the time, else what warps wait for the most while the tensor core idles."""
    pipe = max(pipes, key=lambda name: pipes[name])
    if pipes[pipe] >= BUSY:
        return f"{pipe} pipe" if pipe != ISSUE_PORT else pipe
    return f"latency: {max(idle, key=lambda name: idle[name])}" if idle else "latency"
