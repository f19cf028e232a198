"""The ``gpu`` environment builds records, checks them on a GPU, and times them against the incumbent and a baseline.

Cheap steps come first: a record that spills registers fails when it is compiled, a wrong kernel fails when it is
checked, and only correct kernels are timed. One measurement alternates between all records of a job, the incumbent and
the best baseline, on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

from cudal2gen import bench, results
from cudal2gen.bench import Turns
from cudal2gen.generation.compiler import Artifact, BuildError
from cudal2gen.kernel import Problem, Record
from cudal2gen.launch.gpu import Contender, Gpu, KernelContender, MeasuringDevice
from cudal2gen.results import INCUMBENT, KERNEL, Effort, Source, Timing, Trial, Verdict
from cudal2gen.tuner.environment import trial_of

# Seconds of timing for each contender. ``bench`` also limits the number of rounds.
SECONDS: dict[Effort, float] = {"short": 0.02, "medium": 0.08, "long": 0.3, "final": 0.3}


class Workshop(Protocol):
    """The operations of compiler and validator that the environment uses. Tests substitute them."""

    def attempt(self, records: Sequence[Record]) -> list[Artifact | BuildError]:
        """Compiles the records. Returns for each record the kernel, or the error of its compilation."""
        ...

    def judge(self, record: Record, artifact: Artifact) -> Verdict:
        """The verdict on the kernel on this device."""
        ...

    def open(self, record: Record, artifact: Artifact) -> KernelContender:
        """The kernel, ready to launch. Raises LaunchError."""
        ...


class GpuEnvironment:
    """``Environment`` on one device. A problem's records are timed against its ``incumbent`` and its ``baseline``."""

    name: Source = "gpu"

    def __init__(
        self,
        device: MeasuringDevice,
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
        self.on = device.environment.card
        self._verdicts: dict[str, Verdict] = {}

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdicts of all binaries that this environment checked, by digest."""
        return dict(self._verdicts)

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """See ``Environment``. Records with the same binary and launch are timed once and share the samples."""
        trials: dict[int, Trial] = {}
        correct: dict[int, Artifact] = {}
        built = self._build([record for record in records if record.problem == problem])
        for index, record in enumerate(records):
            if record.problem != problem:
                fault = f"m={record.m}, n={record.n}, k={record.k}: is a record for {record.mnk}, not {problem.mnk}"
                trials[index] = trial_of(self, problem, record, effort, "illegal", reason=fault)
                continue
            artifact = built[record.name]
            if isinstance(artifact, str):
                trials[index] = trial_of(self, problem, record, effort, "compile error", reason=artifact)
            elif artifact.ptxas.findings:
                reason = "; ".join(artifact.ptxas.findings)
                trials[index] = trial_of(self, problem, record, effort, "spill", reason=reason, digest=artifact.digest)
            elif fault := self._fault(record, artifact):
                trials[index] = trial_of(
                    self, problem, record, effort, "wrong result", reason=fault, digest=artifact.digest
                )
            else:
                correct[index] = artifact
        trials |= self._time(
            problem, {index: (records[index], artifact) for index, artifact in correct.items()}, effort
        )
        return [trials[index] for index in range(len(records))]

    def _build(self, records: Sequence[Record]) -> dict[str, Artifact | str]:
        """For each record's name the kernel, or the first line of the compiler's error."""
        by_name = {record.name: record for record in records}
        outcomes = self._workshop.attempt(list(by_name.values()))
        return {
            name: str(outcome).splitlines()[0] if isinstance(outcome, BuildError) else outcome
            for name, outcome in zip(by_name, outcomes, strict=True)
        }

    def _fault(self, record: Record, artifact: Artifact) -> str:
        """The findings of a kernel's verdict; empty for a correct one. Each binary is checked once."""
        verdict = self._verdicts.get(artifact.digest)
        if verdict is None:
            verdict = self._verdicts[artifact.digest] = self._workshop.judge(record, artifact)
        return "" if verdict.passed else "; ".join(verdict.findings[:2]) or "its trial had no case"

    def _time(self, problem: Problem, correct: dict[int, tuple[Record, Artifact]], effort: Effort) -> dict[int, Trial]:
        """Times all kernels alternately with the baseline, and with the incumbent if it builds."""
        if not correct:
            return {}
        groups: dict[object, list[int]] = {}
        for index, (record, _) in correct.items():
            groups.setdefault(record.kernel_key, []).append(index)
        by_name = {f"candidate {group[0]}": group for group in groups.values()}
        kernels = {name: partial(self._workshop.open, *correct[group[0]]) for name, group in by_name.items()}
        with ExitStack() as stack:
            others: list[Contender] = []
            incumbent = self._incumbent(problem)
            if incumbent is not None and isinstance(built := self._build([incumbent])[incumbent.name], Artifact):
                kernel = self._workshop.open(incumbent, built)
                stack.callback(kernel.close)
                kernel.name = INCUMBENT
                others.append(kernel)
            if (vendor := self._baseline(problem)) is not None:
                others.append(vendor)
            turns = bench.in_turns(
                self._device, problem, kernels, others,
                seconds=SECONDS[effort], warmup_seconds=0.0 if self._warm else self._warmup_seconds, seed=self._seed,
            )  # fmt: skip
            self._warm = True
        names = {index: name for name, group in by_name.items() for index in group}
        return {index: self._trial(problem, *correct[index], name, turns, effort) for index, name in names.items()}

    def _trial(
        self, problem: Problem, record: Record, artifact: Artifact, name: str, turns: Turns, effort: Effort
    ) -> Trial:
        """The trial of a record that was timed in ``turns`` under the contender's ``name``."""
        if reason := turns.too_good.get(name):
            return trial_of(self, problem, record, effort, "too good", reason=reason)
        timing = turns.timings.get(name)
        if timing is None:
            reason = turns.absent.get(name, "it gave no samples")
            return trial_of(self, problem, record, effort, "wrong result", reason=reason, digest=artifact.digest)
        timings: list[Timing] = [timing.model_copy(update={"contender": KERNEL})]
        timings += [timing for timing in turns.timings.values() if not timing.contender.startswith("candidate ")]
        return trial_of(
            self, problem, record, effort, "measured",
            digest=artifact.digest, max_diff=timing.error, timings=tuple(timings),
        )  # fmt: skip


class DeviceWorkshop:
    """``Workshop`` on a real device. It stores every new verdict and reuses stored ones."""

    def __init__(self, card: Gpu, store: Path | None = None) -> None:
        from cudal2gen.generation import compiler
        from kernelproof.ground import toolchain

        self._card, self._store = card, store
        self._tools = toolchain.discover()
        self._library = compiler.launcher(tools=self._tools)
        self._verdicts = results.latest(store)

    def attempt(self, records: Sequence[Record]) -> list[Artifact | BuildError]:
        """Compiles on all cores. See ``Workshop``."""
        from cudal2gen.generation import compiler

        return compiler.attempt(records, tools=self._tools)

    def judge(self, record: Record, artifact: Artifact) -> Verdict:
        """The verdict of this device on the problems that the emulator checks, and on the record's own problem."""
        from cudal2gen.validator.device import BuiltKernel
        from cudal2gen.validator.judgement import judge

        verdict = self._verdicts.get((artifact.digest, self._card.model))
        if verdict is None:
            verdict, _ = judge(self._card, BuiltKernel(record, artifact, self._library))
            self._verdicts[artifact.digest, self._card.model] = verdict
            results.append([verdict], self._store)
        return verdict

    def open(self, record: Record, artifact: Artifact) -> KernelContender:
        """The kernel on the device's stream."""
        from cudal2gen.validator.device import BuiltKernel

        return BuiltKernel(record, artifact, self._library).open(self._card)


def build(records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> None:
    """Compiles records without a GPU: a ``background_builds.Build``."""
    from cudal2gen.generation import compiler

    compiler.attempt(records, jobs=cores, progress=report)


def connect(
    index: int, incumbent: Callable[[Problem], Record | None], seed: int = 0, measurements: Path | None = None
) -> GpuEnvironment:
    """The environment of CUDA device ``index``. Raises GpuError, ToolchainError."""
    from cudal2gen.bench import baselines
    from cudal2gen.launch import gpu

    card = gpu.connect(index)
    stored = results.measurements(measurements)
    tuning_store = results.store("cublaslt")

    contenders: dict[tuple[str, str], Contender] = {}

    def baseline(problem: Problem) -> Contender:
        # The tuning store has cuBLASLt's choices. If a baseline cannot run, results list it as absent, with the reason.
        name = best_baseline(problem, stored) or f"cublaslt-autotuning-{results.stored_b(problem)}"
        if (name, problem.acc) not in contenders:
            (contenders[name, problem.acc],) = baselines.contenders([name], problem.acc, card, tuning_store)
        return contenders[name, problem.acc]

    return GpuEnvironment(card, DeviceWorkshop(card), incumbent, baseline, seed=seed)


def best_baseline(problem: Problem, stored: results.Measurements) -> str | None:
    """The name of the fastest baseline in a problem's device measurements with a cold L2; None without any."""
    measurements = [
        measurement
        for measurement in stored.latest()
        if measurement.problem == problem and measurement.protocol == "device" and measurement.l2 != "hot"
    ]
    timings = [timing for measurement in measurements for timing in measurement.timings if timing.contender != KERNEL]
    return min(timings, key=lambda timing: timing.median_us).contender if timings else None
