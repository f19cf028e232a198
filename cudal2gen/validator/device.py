"""Judges a kernel on a device: whether its results are right, and whether it writes only to its outputs.

Every problem runs three times: on new matrices, on other new matrices with the same numbers, and on the first matrices
with new numbers in them. D and aux are poisoned before each run, with another value in the second. ``matrices`` finds
writes outside of them. Results are compared by ``correctness.compare``, on the device, in chunks. For inputs of 0 and 1
this is also the test of the CUDA-L2 paper, since their fp32 product equals the fp64 one.

Two checks are made once per kernel. It must work on the given stream, in order. If there is a baseline, it must meet
the published criterion: its largest error against an fp32 product of normal inputs may exceed the baseline's by no more
than chance explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Problem, Record
from cudal2gen.launch.gpu import Absent, Contender, GpuError, KernelContender
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import typed
from cudal2gen.results import Case, Verdict
from cudal2gen.validator.correctness import Comparison, errors_of_single
from cudal2gen.validator.matrices import Matrices
from cudal2gen.validator.problems import Shape, kinds, stress_shapes, thorough_shape

if TYPE_CHECKING:
    import torch

OpenFunction = Callable[[Record], Contender]  # opens a record's kernel on the device; raises LaunchError
Baseline = Callable[[Problem], Contender]  # makes a library's product that is ready for a problem; raises Absent

DRAWS = 3  # draws of normal inputs for the published criterion
# Relative margins by which the largest error and the root mean square error may exceed the baseline's. Two orders of
# summation differ in the largest error by chance: by a sixth on 64x64, while the root mean square differs by 2 %.
SLACK, SLACK_RMS = 2.0**-6, 2.0**-4
DEVICE_ERROR = "device-error"  # a finding that begins with this word means that the device no longer works


class VerdictDevice(Protocol):
    """The interface of a device that verdicts need; ``gpu.Gpu`` implements it."""

    @property
    def model(self) -> str: ...

    @property
    def runtime_library(self) -> Path:
        """The CUDA runtime library that launches on the device."""
        ...

    def stream(self) -> int: ...

    def empty(self, *shape: int) -> torch.Tensor:
        """New memory for elements of 16 bits, filled with NaN or the like, so that stale results cannot pass."""
        ...

    def hold(self) -> None:
        """Delays the work that is enqueued on the stream after this call."""
        ...

    def wait(self) -> None:
        """Waits for this stream only. Raises RuntimeError for an error of the device."""
        ...


@dataclass(frozen=True)
class BuiltKernel:
    """A record, its binary, and the launcher's ``library``."""

    record: Record
    artifact: Artifact
    library: Path

    def open(self, device: VerdictDevice, record: Record | None = None) -> KernelContender:
        """The kernel on a device. ``record``: a record with the same binary (``Record.DATA_FIELDS`` may differ), by
        default the kernel's own. Raises LaunchError."""
        record = record or self.record
        return KernelContender(
            record, self.artifact.directory, self.library, device.stream, device.runtime_library, device.empty
        )


def run_case(
    device: VerdictDevice, record: Record, contender: Contender, shape: Shape, inputs: str, seed: int = 0
) -> tuple[Case, bool]:
    """Runs one problem with one kind of inputs three times. Also returns whether the same numbers gave the same
    bits."""
    comparison, findings, same_bits = Comparison("nothing", 0), list[str](), True
    nan, number = record.output.poisons
    with _refusals(findings):
        first, second = (matrices_of(device, record, shape) for _ in range(2))
        first.draw(inputs, seed, nan)
        second.draw(inputs, seed, number)
        call = contender.bind(first.operands)
        _finish(device, call)
        comparison = first.compare(inputs)
        findings += first.findings(nan) + comparison.findings
        bits = [stored.clone() for stored in first.computed_bits]

        _finish(device, contender.bind(second.operands))
        same_bits = second.holds(bits)
        # The second poison is an ordinary number, so the comparison finds elements where it remains.
        second_findings = [finding for finding in second.findings(number) if not finding.startswith("unwritten")]
        second_findings += [] if same_bits else second.compare(inputs).findings
        findings += [f"in other memory: {finding}" for finding in second_findings]

        first.draw(inputs, seed + 1, nan)
        _finish(device, call)
        repeated = first.findings(nan)
        if wrong := first.compare(inputs).findings:
            repeated += ["stale-result: new numbers in A and B gave the earlier D"] if first.holds(bits) else wrong
        findings += [f"launched again: {finding}" for finding in repeated]
    return _case(record, shape, inputs, comparison, findings), same_bits


def matrices_of(device: VerdictDevice, record: Record, shape: Shape) -> Matrices:
    """The matrices of all products of a shape, in the device's memory."""
    return Matrices(device.empty, record, shape.problem(record), shape.batch, shape.shared_b, shape.groups)


@contextmanager
def _refusals(findings: list[str]) -> Iterator[None]:
    """Turns a refused launch and an error of the device into findings."""
    try:
        yield
    except (Absent, ValueError, LaunchError, GpuError) as error:
        findings.append(f"launch-refused: {error}")
    except RuntimeError as error:
        findings.append(f"{DEVICE_ERROR}: {str(error).splitlines()[0]}")


def _finish(device: VerdictDevice, call: Callable[[], None]) -> None:
    """Makes a call and waits for the device."""
    call()
    device.wait()


def _case(record: Record, shape: Shape, inputs: str, comparison: Comparison, findings: list[str]) -> Case:
    """The case of a verdict, from the comparison of a result and the findings."""
    ctas = shape.ctas(record)
    return shape.case(inputs, ctas, comparison.compared, findings, comparison.max_error, comparison.allowed)


def stream_case(device: VerdictDevice, record: Record, contender: Contender, shape: Shape) -> Case:
    """Whether a kernel works on its stream, in order.

    The stream is held. After the delay A and B are written, the kernel is called, and D and aux are read. A kernel on
    another stream reads too early or writes too late.
    """
    findings: list[str] = []
    comparison = Comparison("nothing", 0)
    with _refusals(findings):
        matrices = matrices_of(device, record, shape)
        matrices.draw("normal", 0, record.output.poisons[0])
        operands = matrices.operands
        call = contender.bind(operands)
        _finish(device, call)  # so that work of the first call only, such as loading, is done
        matrices.draw("normal", 1, record.output.poisons[0])
        inputs = list(operands.inputs.values())
        copies = [matrix.clone() for matrix in inputs]
        outputs = [typed(device.empty, matrix.dtype)(*matrix.shape) for matrix in matrices.stored]
        for matrix in inputs:
            matrix.fill_(float("nan") if matrix.is_floating_point() else 0)
        device.wait()
        device.hold()
        for matrix, values in zip(inputs, copies, strict=True):
            matrix.copy_(values)
        call()
        for output, matrix in zip(outputs, matrices.stored, strict=True):
            output.copy_(matrix)
        device.wait()
        comparison = matrices.compare("normal", outputs)
        findings += [
            f"stream-order: not between its neighbours on the stream: {finding}" for finding in comparison.findings
        ]
    return _case(record, shape, "normal", replace(comparison, compared="order on its stream"), findings)


def accuracy_case(
    device: VerdictDevice, record: Record, contender: Contender, baseline: Contender, shape: Shape
) -> Case:
    """Checks the published criterion: the error against fp32 must not exceed the baseline's.

    If the largest error exceeds it, the root mean square error decides whether that was chance. Raises Absent if the
    baseline cannot compute the problem.
    """
    largest, squares = {contender: 0.0, baseline: 0.0}, {contender: 0.0, baseline: 0.0}
    for seed in range(DRAWS):
        matrices = matrices_of(device, record, shape)
        operands = matrices.operands
        for side in (baseline, contender):
            matrices.draw("normal", seed, record.output.poisons[0])
            _finish(device, side.bind(operands))
            error, rms = errors_of_single(operands.a, operands.b, operands.d)
            largest[side], squares[side] = max(largest[side], error), squares[side] + rms**2 / DRAWS
    error, allowed = largest[contender], largest[baseline] * (1 + SLACK)
    similar_rms = squares[contender] <= squares[baseline] * (1 + SLACK_RMS) ** 2
    by_chance = similar_rms and allowed < error < float("inf")
    comparison = Comparison(f"largest error against fp32, at most that of {baseline.name}", 0, error, allowed)
    comparison.compared += ", larger by chance: the root mean square is not" if by_chance else ""
    findings = []
    if not (error <= allowed or by_chance):
        findings.append(f"less-accurate: {error:.4g} against {baseline.name}'s {largest[baseline]:.4g}")
    return _case(record, shape, "normal", comparison, findings)


class _OpenContenders:
    """The contenders of one binary, one for each set of launch options."""

    def __init__(self, record: Record, open_kernel: OpenFunction) -> None:
        self._record, self._open = record, open_kernel
        self._contenders: dict[tuple[tuple[str, int], ...], Contender] = {}

    def contender(self, shape: Shape) -> Contender:
        """The contender with the shape's launch options, opened at its first use. Raises LaunchError."""
        options = shape.launch_options
        key = tuple(options.items())
        if key not in self._contenders:
            self._contenders[key] = self._open(self._record.launched_with(options) if options else self._record)
        return self._contenders[key]

    def close(self) -> None:
        for contender in self._contenders.values():
            close = getattr(contender, "close", None)
            if close is not None:
                close()


def validate(
    device: VerdictDevice, record: Record, digest: str, open_kernel: OpenFunction, baseline: Baseline | None = None
) -> Verdict:
    """A device's verdict on one built kernel: it runs the emulator's problems and all of the record's own problem.

    ``open_kernel`` returns the contender of a record; it is called with records that differ only in launch options.
    ``baseline`` returns a contender that is ready for the record's own problem, or raises Absent. After an error of the
    device nothing else is run on it.
    """
    own = Shape(record.m, record.n, record.k, record.launch_options.get("swizzle_stride"))
    contenders = _OpenContenders(record, open_kernel)
    cases: list[Case] = []
    tools: dict[str, str] = {}
    deterministic = True

    def device_works() -> bool:
        return not (cases and any(finding.startswith(DEVICE_ERROR) for finding in cases[-1].findings))

    refusals: list[str] = []
    try:
        with _refusals(refusals):  # a contender may fail to open
            for shape, inputs in _plan(record, own):
                if device_works():
                    seed = 2 * len(cases)
                    case, same_bits = run_case(device, record, contenders.contender(shape), shape, inputs, seed)
                    cases.append(case)
                    deterministic &= same_bits
            if device_works():
                cases.append(stream_case(device, record, contenders.contender(own), own))
            if baseline is not None and all(case.passed for case in cases):
                try:
                    contender = contenders.contender(own)
                    cases.append(accuracy_case(device, record, contender, baseline(record.problem), own))
                except (Absent, RuntimeError) as error:
                    tools["baseline"] = f"not run: {error}"
        if refusals:
            cases.append(_case(record, own, "none", Comparison("nothing", 0), refusals))
    finally:
        if device_works():
            contenders.close()
    return Verdict(
        record=record.name,
        digest=digest,
        on=device.model,
        cases=tuple(cases),
        counters={},
        deterministic=deterministic,
        tools=tools,
    )


def _plan(record: Record, own: Shape) -> Iterator[tuple[Shape, str]]:
    """The distinct shapes, each with its kinds of inputs."""
    stress = stress_shapes(record)
    thorough = (thorough_shape(record, stress).mnk, own.mnk)
    for shape in dict.fromkeys([*stress, own]):
        for inputs in kinds(shape, shape.mnk in thorough, record.output.exact):
            yield shape, inputs
