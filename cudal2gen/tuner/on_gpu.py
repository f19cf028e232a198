"""The ``gpu`` environment: what is proposed is built, checked on the device, and timed in turns with what it must beat.

The order is that of cost: compile (a spill ends it), check (a wrong result ends it), and only then time. All records of
one question are timed in the same turns, beside the incumbent and the best baseline, on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from cudal2gen import bench, results
from cudal2gen.bench import Settings, TooGood, Work
from cudal2gen.compiler import Artifact, BuildError
from cudal2gen.gpu import Contender, Device, Gpu, GpuError, Kernel
from cudal2gen.kernel import Problem, Record
from cudal2gen.launcher import LaunchError
from cudal2gen.results import INCUMBENT, KERNEL, Effort, Measurement, Timing, Trial, Verdict
from cudal2gen.tuner.environment import trial_of

# Seconds of timing for each contender; the rounds' own bounds hold as well.
SECONDS: dict[Effort, float] = {"short": 0.02, "medium": 0.08, "long": 0.3}


class Workshop(Protocol):
    """What the environment needs of compiler and trial, so that a test can stand in for both."""

    def build(self, records: Sequence[Record]) -> list[Artifact]:
        """Raises BuildError where one of them does not compile."""
        ...

    def judge(self, record: Record, artifact: Artifact) -> Verdict:
        """Whether the kernel is right on this device."""
        ...

    def open(self, record: Record, artifact: Artifact) -> Kernel:
        """Raises LaunchError."""
        ...


class OnGpu:
    """``Environment`` on one device. ``baseline`` gives the best stored baseline of a problem, or None."""

    name = "gpu"

    def __init__(
        self,
        device: Device,
        workshop: Workshop,
        incumbent: Callable[[Problem], Record | None],
        baseline: Callable[[Problem], Contender | None] = lambda _: None,
        warmup_seconds: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._device, self._workshop = device, workshop
        self._incumbent, self._baseline = incumbent, baseline
        self._warmup_seconds, self._seed = warmup_seconds, seed
        self._warm = False
        self.on = device.environment.name
        self._verdicts: dict[str, Verdict] = {}

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By digest: of every binary that came to be tried here."""
        return dict(self._verdicts)

    def prepare(self, records: Sequence[Record]) -> None:
        """Compiles, and no more: what a machine without a GPU can do beforehand. What fails is found again later."""
        self._built(records)

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """See ``Environment``. Records of one binary and launch are timed once, and share the samples."""
        found: dict[int, Trial] = {}
        right: dict[int, Artifact] = {}
        built = self._built([record for record in records if record.problem == problem])
        for at, record in enumerate(records):
            if record.problem != problem:
                wrong = f"m={record.m}, n={record.n}, k={record.k}: is a record for {record.mnk}, not {problem.mnk}"
                found[at] = trial_of(self, problem, record, effort, "illegal", reason=wrong)
                continue
            artifact = built[record.name]
            if isinstance(artifact, str):
                found[at] = trial_of(self, problem, record, effort, "compile error", reason=artifact)
            elif artifact.ptxas.findings:
                reason = "; ".join(artifact.ptxas.findings)
                found[at] = trial_of(self, problem, record, effort, "spill", reason=reason, digest=artifact.digest)
            elif wrong := self._wrong(record, artifact):
                found[at] = trial_of(
                    self, problem, record, effort, "wrong result", reason=wrong, digest=artifact.digest
                )
            else:
                right[at] = artifact
        found |= self._timed(problem, {at: (records[at], artifact) for at, artifact in right.items()}, effort)
        return [found[at] for at in range(len(records))]

    def _built(self, records: Sequence[Record]) -> dict[str, Artifact | str]:
        """By name: the kernel, or why it did not compile."""
        by_name = {record.name: record for record in records}
        if not by_name:
            return {}
        try:
            return dict(zip(by_name, self._workshop.build(list(by_name.values())), strict=True))
        except BuildError:
            found: dict[str, Artifact | str] = {}
            for name, record in by_name.items():
                try:
                    found[name] = self._workshop.build([record])[0]
                except BuildError as error:
                    found[name] = str(error).splitlines()[0]
            return found

    def _wrong(self, record: Record, artifact: Artifact) -> str:
        """What is wrong with a kernel; each binary is tried once."""
        verdict = self._verdicts.get(artifact.digest)
        if verdict is None:
            verdict = self._verdicts[artifact.digest] = self._workshop.judge(record, artifact)
        return "" if verdict.passed else "; ".join(verdict.findings[:2]) or "its trial had no case"

    def _timed(self, problem: Problem, right: dict[int, tuple[Record, Artifact]], effort: Effort) -> dict[int, Trial]:
        found: dict[int, Trial] = {}
        while waiting := {at: one for at, one in right.items() if at not in found}:
            places: dict[object, list[int]] = {}
            for at, (record, artifact) in waiting.items():
                places.setdefault((artifact.digest, *sorted(record.launch_options.items())), []).append(at)
            first = {f"candidate {group[0]}": group for group in places.values()}
            try:
                measured = self._measure(problem, {name: right[group[0]] for name, group in first.items()}, effort)
            except TooGood as error:
                refused = first.get(error.contender)
                if refused is None:
                    raise  # the incumbent's or the baseline's clock: nothing can be said here
                found |= {
                    at: trial_of(self, problem, right[at][0], effort, "too good", reason=str(error)) for at in refused
                }
                continue
            for name, group in first.items():
                for at in group:
                    found[at] = self._trial(problem, *right[at], name, measured, effort)
        return found

    def _measure(self, problem: Problem, right: dict[str, tuple[Record, Artifact]], effort: Effort) -> Measurement:
        """One measurement of all, in turns. An incumbent that cannot be built or opened does not take part."""
        with ExitStack() as opened:
            contenders: list[Contender] = []
            failed: dict[str, str] = {}
            for name, (record, artifact) in right.items():
                try:
                    contenders.append(self._opened(opened, name, record, artifact))
                except (LaunchError, GpuError) as error:
                    failed[name] = str(error)
            incumbent = self._incumbent(problem)
            if incumbent is not None and isinstance(built := self._built([incumbent])[incumbent.name], Artifact):
                contenders.append(self._opened(opened, INCUMBENT, incumbent, built))
            if (vendor := self._baseline(problem)) is not None:
                contenders.append(vendor)
            l2 = bench.states(problem, "device", self._device.environment.l2_bytes)[0]
            settings = Settings(
                warmup_seconds=self._warmup_seconds,
                benchmark_seconds=SECONDS[effort] * len(contenders),
                seed=self._seed,
            )
            taken = bench.measure(self._device, problem, contenders, [Work("device", l2)], settings, warm=self._warm)
            (measured,) = list(taken)
            self._warm = True
            return measured.model_copy(update={"absent": measured.absent | failed})

    def _opened(self, stack: ExitStack, name: str, record: Record, artifact: Artifact) -> Kernel:
        kernel = self._workshop.open(record, artifact)
        stack.callback(kernel.close)
        kernel.name = name
        return kernel

    def _trial(
        self, problem: Problem, record: Record, artifact: Artifact, name: str, measured: Measurement, effort: Effort
    ) -> Trial:
        ours = measured.timing(name)
        if ours is None:
            reason = measured.absent.get(name, "it gave no samples")
            return trial_of(self, problem, record, effort, "wrong result", reason=reason, digest=artifact.digest)
        named: list[Timing] = [ours.model_copy(update={"contender": KERNEL})]
        named += [one for one in measured.timings if not one.contender.startswith("candidate ")]
        return trial_of(
            self, problem, record, effort, "measured",
            digest=artifact.digest, max_diff=ours.error, timings=tuple(named),
        )  # fmt: skip


class Bench:
    """``Workshop`` on the real device: verdicts are stored as they are made, and not made twice."""

    def __init__(self, card: Gpu, store: Path | None = None) -> None:
        from cudal2gen import compiler, toolchain

        self._card, self._store = card, store
        self._tools = toolchain.discover()
        self._library = compiler.launcher(tools=self._tools)
        self._known = results.latest(store)

    def build(self, records: Sequence[Record]) -> list[Artifact]:
        """In parallel, on all cores."""
        from cudal2gen import compiler

        return compiler.build(records, tools=self._tools)

    def judge(self, record: Record, artifact: Artifact) -> Verdict:
        """The device's verdict, on what the emulator would execute and on the record's own problem."""
        from cudal2gen.validator.device import BuiltKernel
        from cudal2gen.validator.judgement import judge

        known = self._known.get((artifact.digest, self._card.model))
        if known is None:
            known, _ = judge(self._card, BuiltKernel(record, artifact, self._library))
            self._known[artifact.digest, self._card.model] = known
            results.append([known], self._store)
        return known

    def open(self, record: Record, artifact: Artifact) -> Kernel:
        """Bound to the device's stream."""
        return Kernel(record, artifact.directory, self._library, self._card.stream)


def connect(
    index: int, incumbent: Callable[[Problem], Record | None], seed: int = 0, measurements: Path | None = None
) -> OnGpu:
    """The environment of CUDA device ``index``. Raises GpuError, ToolchainError."""
    from cudal2gen import baselines
    from cudal2gen.gpu import Gpu

    card = Gpu(index)
    stored = results.measurements(measurements)
    tuned = results.store("cublaslt")

    made: dict[tuple[str, str], Contender] = {}

    def baseline(problem: Problem) -> Contender:
        # What it chooses for a problem is kept in its own store; one that cannot run is absent, with the reason.
        name = best_baseline(problem, stored) or f"cublaslt-autotuning-{problem.layout}"
        if (name, problem.acc) not in made:
            (made[name, problem.acc],) = baselines.contenders([name], problem.acc, card, tuned)
        return made[name, problem.acc]

    return OnGpu(card, Bench(card), incumbent, baseline, seed=seed)


def best_baseline(problem: Problem, stored: results.Measurements) -> str | None:
    """The fastest baseline that was measured for a problem, on the device alone; None where none was."""
    own = [one for one in stored.latest() if one.problem == problem and one.protocol == "device" and one.l2 != "hot"]
    timings = [timing for one in own for timing in one.timings if timing.contender != KERNEL]
    return min(timings, key=lambda timing: timing.median_us).contender if timings else None
