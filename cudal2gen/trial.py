"""A contender on trial on a device: is what it computes right, and does it keep to what it was given?

Every problem runs three times: on fresh matrices, on other fresh ones with the same numbers, and once more on the first
ones with new numbers in them. D is poisoned before each run, differently in the second. All matrices lie inside larger
allocations, and their rows are longer than what is computed unless sizes are baked in: what lies around A and B is
NaN, what lies around D must stay as it was, A and B too. What is compared is what ``validator`` compares, here in fp64
on the device, in chunks; for the 0/1 inputs that is the published test as well: their fp32 product is the fp64 one.

Two checks are made once per kernel: that it works on the given stream, in order, and, where a baseline is handed in,
the published criterion: its largest error against an fp32 product of normal inputs exceeds the baseline's by chance at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cudal2gen import sanitizer
from cudal2gen.compiler import Artifact
from cudal2gen.gpu import Absent, Contender, GpuError, Kernel, Operands
from cudal2gen.kernel import Acc, Problem, Record, aligned, ceil_div
from cudal2gen.launcher import LaunchError
from cudal2gen.results import Case, Rounding, Verdict
from cudal2gen.rounding import SAMPLE, agreement, ulps
from cudal2gen.validator import EXACT, Shape, execute, kinds, stress_shapes

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]
Order = list[list[list[int]]]
Open = Callable[[Record], Contender]
Baseline = Callable[[Problem], Contender]

GUARD = 4096  # elements before and after each matrix
# Bits of fp16. The poisons are a NaN that no arithmetic makes, and a number; what lies around D is a third pattern.
NAN, POISONS, CANARY = 0x7E01, (0x7D5A, 0xBADA - 0x10000), 0x5A5A
CHUNK = 1 << 27  # elements of D that are compared at a time, in fp64
# m n k up to which an fp16 accumulator's bound is computed for every element: each 8 of k pass over all of D, in fp64.
SAMPLED = 1 << 33
LENGTHS = (32, 256, 2048)  # of k, at which device and emulator are compared
DRAWS = 3  # of normal inputs, for the published criterion
# By which, relatively, the largest error and the root mean square of all may exceed the baseline's. Which of two orders
# of sums has the larger largest error is chance: it varies by a sixth on 64x64, the root mean square by two percent.
SLACK, SLACK_RMS = 2.0**-6, 2.0**-4


class Bed(Protocol):
    """What a trial needs of a device; ``gpu.Gpu`` is one."""

    @property
    def model(self) -> str: ...

    @property
    def runtime_library(self) -> Path:
        """The CUDA runtime that launches there."""
        ...

    def stream(self) -> int: ...

    def empty(self, *shape: int) -> torch.Tensor:
        """fp16 memory of its own, in which nothing useful is."""
        ...

    def hold(self) -> None:
        """Delays what is enqueued on the stream from now on."""
        ...

    def wait(self) -> None:
        """Until the stream, and no other, is done. Raises RuntimeError for what went wrong on the device."""
        ...


@dataclass(frozen=True)
class Subject:
    """A built kernel; ``library``: the launcher."""

    record: Record
    artifact: Artifact
    library: Path

    def open(self, bed: Bed, record: Record | None = None) -> Kernel:
        """The kernel on a device; a ``record`` in place of its own differs in data fields only. Raises LaunchError."""
        record = record or self.record
        return Kernel(record, self.artifact.directory, self.library, bed.stream, bed.runtime_library, bed.empty)


class Guarded:
    """A matrix of ``rows`` by ``cols`` fp16 elements inside a larger allocation, which has one bit pattern."""

    def __init__(self, bed: Bed, name: str, rows: int, cols: int, stride: int, around: int) -> None:
        import torch

        self.name, self._around = name, around
        self._whole = bed.empty(2 * GUARD + rows * stride)
        self._bits = self._whole.view(torch.int16)
        self._bits.fill_(around)
        inside = self._whole[GUARD : GUARD + rows * stride].unflatten(0, (rows, stride))
        self.matrix = inside[:, :cols]
        self.bits = self.matrix.view(torch.int16)
        self._between = inside[:, cols:].view(torch.int16)
        self._kept: torch.Tensor | None = None

    def keep(self) -> None:
        """Remembers the matrix: from now on it must not change."""
        self._kept = self.bits.clone()

    def changes(self) -> Iterator[str]:
        """What was written that must not be."""
        if self._kept is not None and (found := _places(self.bits != self._kept)):
            yield f"input-changed: {found} of {self.name}"
        for where, bits in (
            (f"before {self.name}", self._bits[None, :GUARD]),
            (f"behind {self.name}", self._bits[None, -GUARD:]),
            (f"between rows of {self.name}", self._between),
        ):
            if found := _places(bits != self._around):
                yield f"written-outside: {found} {where}"


class Stage:
    """One problem's matrices, and the numbers in them."""

    def __init__(self, bed: Bed, record: Record, problem: Problem) -> None:
        m, n, k = problem.m, problem.n, problem.k
        # A baked k must be packed. Only kernels that store no vectors take any stride of D.
        wide_k, wide_n = aligned(k) + (0 if record.baked_k else 8), aligned(n) + 8
        self.a, self.b = Guarded(bed, "A", m, k, wide_k, NAN), Guarded(bed, "B", n, k, wide_k, NAN)
        self.b_nn = Guarded(bed, "B", k, n, wide_n, NAN)
        self.d = Guarded(bed, "D", m, n, wide_n if record.stores_vectors else n + 8, CANARY)
        self.operands = Operands(self.a.matrix, self.b.matrix, self.b_nn.matrix, self.d.matrix)

    def fill(self, inputs: str, seed: int, poison: int) -> None:
        """Draws A and B, and poisons D."""
        draw(inputs, self.a.matrix, self.b.matrix, seed)
        self.b_nn.matrix.copy_(self.b.matrix.T)
        self.d.bits.fill_(poison)
        for matrix in (self.a, self.b, self.b_nn):
            matrix.keep()

    def findings(self, poison: int) -> list[str]:
        """What a run did beside computing."""
        found = list(chain.from_iterable(matrix.changes() for matrix in (self.a, self.b, self.b_nn, self.d)))
        if left := _places(self.d.bits == poison):
            found.append(f"unwritten-output: {left} of D")
        return found

    def compared(self, acc: Acc, inputs: str, order: Order) -> Compared:
        return compare(acc, inputs, self.a.matrix, self.b.matrix, self.d.matrix, order)


def _places(wrong: torch.Tensor) -> str:
    """How many elements, and the first; empty for none. ``wrong``: bool, two dimensions."""
    count = int(wrong.sum()) if wrong.numel() else 0
    if not count:
        return ""
    row, column = divmod(int(wrong.reshape(-1).byte().argmax()), wrong.shape[1])
    return f"{count} of {wrong.numel()} elements, first at row {row}, column {column}"


def draw(inputs: str, a: torch.Tensor, b: torch.Tensor, seed: int) -> None:
    """Fills A (m,k) and B (n,k) with one kind of inputs, as ``validator.operands`` does."""
    import torch

    (m, k), n = a.shape, b.shape[0]
    generator = torch.Generator(a.device).manual_seed(seed)
    for matrix in (a, b):
        if inputs in ("binary", "sparse"):
            density = 0.5 if inputs == "binary" else min(0.5, (EXACT / 4 / k) ** 0.5)
            matrix.copy_(torch.rand(matrix.shape, generator=generator, device=a.device) < density)
        elif inputs == "integers":
            drawn = torch.randint(-2, 3, matrix.shape, generator=generator, device=a.device, dtype=torch.int8)
            matrix.copy_(drawn)
        else:
            matrix.copy_(torch.randn(matrix.shape, generator=generator, device=a.device))
    if inputs == "special":
        a[0, k // 2], a[m - 1, k - 1] = float("inf"), float("nan")
        b[n - 1, 0], b[n // 2, k // 3] = float("-inf"), float("nan")


@dataclass
class Compared:
    """What was compared, the largest error, the error allowed there (None for equality), and what was found wrong."""

    said: str
    worst: float = 0.0
    allowed: float | None = None
    wrong: int = 0
    first: str = ""
    size: int = 0
    _ratio: float = field(default=-1.0, repr=False)

    @property
    def findings(self) -> list[str]:
        return [f"wrong-value: {self.wrong} of {self.size} elements, first at {self.first}"] if self.wrong else []

    def add(self, rows: range, wrong: torch.Tensor, reference: torch.Tensor, d: torch.Tensor) -> None:
        """Takes note of the wrong elements of some rows of D."""
        if (count := int(wrong.sum())) and not self.wrong:
            row, column = divmod(int(wrong.reshape(-1).byte().argmax()), wrong.shape[1])
            got, wanted = float(d[row, column]), float(reference[row, column])
            self.first = f"row {rows[row]}, column {column}: {got} instead of {wanted:.6g}"
        self.wrong += count

    def add_error(self, error: torch.Tensor, allowed: torch.Tensor | None) -> None:
        """Keeps the largest error, or the one nearest to what is allowed. Elements of any shape, at least one."""
        measure = error if allowed is None else error / allowed
        at = int(measure.reshape(-1).argmax())
        if (ratio := float(measure.reshape(-1)[at])) > self._ratio:
            self._ratio, self.worst = ratio, float(error.reshape(-1)[at])
            self.allowed = None if allowed is None else float(allowed.reshape(-1)[at])


def compare(acc: Acc, inputs: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, order: Order) -> Compared:
    """What ``validator.compare`` says, of tensors on any device: A (m,k), B (n,k), D (m,n), fp16.

    The bound of an fp16 accumulator on a large problem is computed for some rows; elsewhere twice its largest holds.
    """
    (m, k), n = a.shape, b.shape[0]
    wide_b, step = b.double(), max(1, CHUNK // n)
    compared, ceiling = Compared("equality", size=m * n), None
    if inputs == "special":
        compared.said = "NaN and infinities in their places"
    if inputs in ("normal", "cancelling"):
        compared.said = "error bound of the accumulator"
        if acc == "f16" and m * n * k > SAMPLED:
            every = max(1, m * n * k // SAMPLED)
            wide_a, part = a[::every].double(), d[::every]
            reference = wide_a @ wide_b.T
            allowed = error_bound(acc, wide_a, wide_b, reference, order)
            error = _error(part, reference)
            compared.add_error(error, allowed)
            compared.add(range(0, m, every), error > allowed, reference, part)
            compared.said += f" in {len(part)} rows, twice its largest in all"
            ceiling = 2 * allowed.max()
    for top in range(0, m, step):
        wide_a, part = a[top : top + step].double(), d[top : top + step]
        reference = wide_a @ wide_b.T
        error = _error(part, reference)
        if inputs == "special":
            wrong = _misplaced(part, reference)
            compared.worst += float(wrong.sum())
        elif inputs in ("normal", "cancelling"):
            if ceiling is None:
                allowed = error_bound(acc, wide_a, wide_b, reference, order)
                compared.add_error(error, allowed)
            else:
                allowed = ceiling.expand_as(error)
            wrong = error > allowed
        else:
            exact = reference.abs() <= EXACT
            wrong = part != reference.half()
            if acc == "f16":
                wrong = wrong.where(exact, ~(part >= EXACT))
            if not exact.all():
                compared.said = "equality up to 2048"
            if exact.any():
                compared.add_error(error[exact], None)
        compared.add(range(top, m), wrong, reference, part)
    return compared


def _error(d: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|D - reference| in fp64; infinite where it is NaN."""
    return (d.double() - reference).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))


def _misplaced(d: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    same_nan = reference.isnan() == d.isnan()
    same_inf = ~(reference.isinf() | d.isinf()) | (reference == d) | reference.isnan()
    return ~(same_nan & same_inf)


def error_bound(acc: Acc, a: torch.Tensor, b: torch.Tensor, reference: torch.Tensor, order: Order) -> torch.Tensor:
    """``validator.error_bound`` of tensors."""
    within = a.shape[1] * 2.0**-24 * (a.abs() @ b.abs().T)
    if acc == "f32":
        return within + 2.0**-11 * (reference.abs() + within) + 2.0**-25
    error = within
    for part in order:
        partial_sum, carried = reference.new_zeros(reference.shape), reference.new_zeros(reference.shape)
        for step in part:
            at = _run(step)
            partial_sum += a[:, at] @ b[:, at].T
            carried += 2.0**-11 * (partial_sum.abs() + carried) + 2.0**-25
        error = error + carried
    return error if len(order) == 1 else error + 2.0**-11 * (reference.abs() + error) + 2.0**-25


def _run(step: list[int]) -> slice | list[int]:
    """Neighbouring numbers as a slice: a list would be copied to the device each time."""
    whole = bool(step) and step[-1] - step[0] + 1 == len(step)
    return slice(step[0], step[-1] + 1) if whole else step


def errors(operands: Operands) -> tuple[float, float]:
    """|D - fp32 product|, infinite for a NaN: the largest, and the root mean square."""
    a, b, d = operands.a, operands.b, operands.d
    step, wide_b = max(1, CHUNK // d.shape[1]), b.float()
    worst = total = 0.0
    for part in (slice(at, at + step) for at in range(0, len(a), step)):
        error = _error(d[part], a[part].float() @ wide_b.T)
        worst, total = max(worst, float(error.max())), total + float(error.square().sum())
    return worst, (total / d.numel()) ** 0.5


def run_case(
    bed: Bed, record: Record, contender: Contender, shape: Shape, inputs: str, seed: int = 0
) -> tuple[Case, bool]:
    """One problem with one kind of inputs, three times; and whether the same numbers gave the same bits."""
    order = record.k_order(shape.k)
    compared, findings, same = Compared("nothing"), [], True
    try:
        first, other = (Stage(bed, record, _problem(record, shape)) for _ in range(2))
        first.fill(inputs, seed, POISONS[0])
        other.fill(inputs, seed, POISONS[1])
        call = contender.bind(first.operands)
        _enqueue(bed, call)
        compared, findings = first.compared(record.acc, inputs, order), first.findings(POISONS[0])
        findings += compared.findings
        before = first.d.bits.clone()

        _enqueue(bed, contender.bind(other.operands))
        same = bool((other.d.bits == before).all())
        # The second poison is a number that a product may be: what it stays on is seen by comparing.
        second = [found for found in other.findings(POISONS[1]) if not found.startswith("unwritten")]
        second += [] if same else other.compared(record.acc, inputs, order).findings
        findings += [f"in other memory: {found}" for found in second]

        first.fill(inputs, seed + 1, POISONS[0])
        _enqueue(bed, call)
        third = first.findings(POISONS[0])
        if wrong := first.compared(record.acc, inputs, order).findings:
            stale = bool((first.d.bits == before).all())
            third += ["stale-result: new numbers in A and B gave the earlier D"] if stale else wrong
        findings += [f"launched again: {found}" for found in third]
    except (Absent, ValueError, LaunchError, GpuError) as error:
        findings.append(f"launch-refused: {error}")
    except RuntimeError as error:
        findings.append(f"device-error: {str(error).splitlines()[0]}")
    case = _case(record, shape, inputs, compared.said, compared.worst, compared.allowed, findings)
    return case, same


def _enqueue(bed: Bed, call: Callable[[], None]) -> None:
    call()
    bed.wait()


def _problem(record: Record, shape: Shape) -> Problem:
    return record.problem.model_copy(update={"m": shape.m, "n": shape.n, "k": shape.k})


def _case(
    record: Record, shape: Shape, inputs: str, compared: str, worst: float, allowed: float | None, findings: list[str]
) -> Case:
    return Case(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        swizzle_stride=shape.swizzle_stride,
        inputs=inputs,
        compared=compared,
        max_error=worst,
        allowed=allowed,
        ctas=ceil_div(shape.m, record.bm) * ceil_div(shape.n, record.bn) * record.split_k,
        findings=tuple(findings),
        options=dict(shape.options),
    )


def stream_case(bed: Bed, record: Record, contender: Contender, shape: Shape, seed: int = 0) -> Case:
    """Whether a kernel works on its stream, in order.

    The stream is held; behind that A and B are written, the kernel is called, D is read. A kernel elsewhere reads too
    early or writes too late.
    """
    findings: list[str] = []
    compared = Compared("nothing")
    try:
        stage = Stage(bed, record, _problem(record, shape))
        stage.fill("normal", seed, POISONS[0])
        operands = stage.operands
        call = contender.bind(operands)
        _enqueue(bed, call)  # what is done once is not to be waited for below
        stage.fill("normal", seed + 1, POISONS[0])
        inputs = (operands.a, operands.b, operands.b_nn)
        later = [matrix.clone() for matrix in inputs]
        read = bed.empty(*operands.d.shape)
        for matrix in inputs:
            matrix.fill_(float("nan"))
        bed.wait()
        bed.hold()
        for matrix, values in zip(inputs, later, strict=True):
            matrix.copy_(values)
        call()
        read.copy_(operands.d)
        bed.wait()
        compared = compare(record.acc, "normal", operands.a, operands.b, read, record.k_order(shape.k))
        findings += [f"stream-order: not between its neighbours on the stream: {it}" for it in compared.findings]
    except (Absent, ValueError, LaunchError, GpuError) as error:
        findings.append(f"launch-refused: {error}")
    except RuntimeError as error:
        findings.append(f"device-error: {str(error).splitlines()[0]}")
    said = "order on its stream"
    return _case(record, shape, "normal", said, compared.worst, compared.allowed, findings)


def accuracy_case(bed: Bed, record: Record, contender: Contender, baseline: Contender, shape: Shape) -> Case:
    """The published criterion: no larger error than the baseline, against fp32. Raises Absent as the baseline does.

    Where the largest is larger, the root mean square decides whether that was chance.
    """
    largest, squares = {contender: 0.0, baseline: 0.0}, {contender: 0.0, baseline: 0.0}
    for seed in range(DRAWS):
        stage = Stage(bed, record, _problem(record, shape))
        for one in (baseline, contender):
            stage.fill("normal", seed, POISONS[0])
            _enqueue(bed, one.bind(stage.operands))
            worst, rms = errors(stage.operands)
            largest[one], squares[one] = max(largest[one], worst), squares[one] + rms**2 / DRAWS
    ours, theirs = largest[contender], largest[baseline]
    likely = squares[contender] <= squares[baseline] * (1 + SLACK_RMS) ** 2
    allowed = theirs * (1 + SLACK)
    said = f"largest error against fp32, at most that of {baseline.name}"
    chance = likely and allowed < ours < float("inf")
    said += ", larger by chance: the root mean square is not" if chance else ""
    less = not (ours <= allowed or chance)
    findings = [f"less-accurate: {ours:.4g} against {baseline.name}'s {theirs:.4g}"] if less else []
    return _case(record, shape, "normal", said, ours, allowed, findings)


def validate(bed: Bed, record: Record, digest: str, open_kernel: Open, baseline: Baseline | None = None) -> Verdict:
    """The verdict on one built kernel, from a device: the emulator's problems, and the record's own in full.

    ``open_kernel`` gives the contender of a record; records differ in launch options only. ``baseline`` gives one that
    is ready for the record's own problem, or raises Absent. After an error of the device nothing else is tried on it.
    """
    own = Shape(record.m, record.n, record.k, record.launch_options.get("swizzle_stride"))
    stress = stress_shapes(record)
    largest = max(stress, key=lambda shape: (shape.k, shape.m * shape.n))
    opened: dict[tuple[tuple[str, int], ...], Contender] = {}
    cases: list[Case] = []
    tools: dict[str, str] = {}
    deterministic = True

    def contender(shape: Shape) -> Contender:
        stride = (("swizzle_stride", shape.swizzle_stride),) if shape.swizzle_stride else ()
        options = (*stride, *shape.options)
        if options not in opened:
            opened[options] = open_kernel(record.launched_with(dict(options)) if options else record)
        return opened[options]

    def alive() -> bool:
        return not (cases and any(found.startswith("device-error") for found in cases[-1].findings))

    try:
        for shape in dict.fromkeys([*(replace(it, corners=False) for it in stress), own]):
            for inputs in kinds(shape, thorough=_sizes(shape) in (_sizes(largest), _sizes(own))):
                if alive():
                    case, same = run_case(bed, record, contender(shape), shape, inputs, seed=2 * len(cases))
                    cases.append(case)
                    deterministic &= same
        if alive():
            cases.append(stream_case(bed, record, contender(own), own))
        if baseline is not None and all(case.passed for case in cases):
            try:
                cases.append(accuracy_case(bed, record, contender(own), baseline(record.problem), own))
            except (Absent, RuntimeError) as error:
                tools["baseline"] = f"not run: {error}"
    except LaunchError as error:  # from opening it
        cases.append(_case(record, own, "none", "nothing", 0.0, None, [f"launch-refused: {error}"]))
    except RuntimeError as error:
        cases.append(_case(record, own, "none", "nothing", 0.0, None, [f"device-error: {str(error).splitlines()[0]}"]))
    finally:
        for one in opened.values():
            close = getattr(one, "close", None)
            if close is not None and alive():
                close()
    return Verdict(
        record=record.name,
        digest=digest,
        on=bed.model,
        cases=tuple(cases),
        counters={},
        deterministic=deterministic,
        tools=tools,
    )


def _sizes(shape: Shape) -> tuple[int, int, int]:
    return shape.m, shape.n, shape.k


def product(bed: Bed, record: Record, contender: Contender, a: Array, b: Array) -> Array:
    """D (m,n) of NumPy's A (m,k) and B (n,k), computed on the device."""
    import torch

    stage = Stage(bed, record, _problem(record, Shape(len(a), len(b), a.shape[1])))
    stage.fill("binary", 0, POISONS[0])
    operands = stage.operands
    for matrix, values in ((operands.a, a), (operands.b, b), (operands.b_nn, b.T)):
        matrix.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    _enqueue(bed, contender.bind(operands))
    return np.ascontiguousarray(operands.d.cpu().numpy())


def sanitized(bed: Bed, subject: Subject, device: int, timeout_s: float = 120) -> tuple[list[Case], dict[str, str]]:
    """compute-sanitizer over one small launch on CUDA device number ``device``: a case for each tool that ran, and what
    each said."""
    record = subject.record
    shapes = stress_shapes(record)
    ragged = [shape for shape in shapes if shape.m % record.bm] or shapes
    shape = max(ragged, key=lambda shape: shape.m * shape.n * shape.k)
    launch = sanitizer.Launch(
        library=str(subject.library),
        directory=str(subject.artifact.directory),
        runtime=str(bed.runtime_library),
        options=record.launch_options,
        layout=record.layout,
        m=shape.m,
        n=shape.n,
        k=shape.k,
    )
    cases, tools = [], {}
    for tool in sanitizer.TOOLS:
        tools[tool], found = sanitizer.check(launch, tool, device, timeout_s)
        if not tools[tool].startswith(sanitizer.NOT_RUN):
            findings = [f"{tool}: {finding}" for finding in found]
            cases.append(_case(record, shape, "ones", f"compute-sanitizer {tool}", 0.0, None, findings))
    return cases, tools


def against_emulator(bed: Bed, subject: Subject) -> tuple[list[Case], list[Rounding]]:
    """The same binary on the device and in the emulator, bit for bit, for several k.

    Inputs whose sums are exact in any order must agree: cases. Others show how the device rounds: one line each.
    """
    record, artifact, library = subject.record, subject.artifact, subject.library
    contender = subject.open(bed)
    cases, lines = [], []
    for k in _lengths(record):
        shape = Shape(record.bm, record.bn, k)
        for inputs in ("binary", "integers", "normal", "cancelling"):
            emulated = execute(record, artifact, library, shape, inputs, hazards=False, seed=k)
            d = product(bed, record, contender, emulated.a, emulated.b)
            apart = ulps(d, emulated.d)
            differing, exact = float((apart != 0).mean()), inputs in ("binary", "integers")
            if exact:
                wrong = [f"differs-from-emulator: {int((apart != 0).sum())} of {d.size} elements"] if differing else []
                said = "equality with the emulator"
                cases.append(_case(record, shape, inputs, said, float(apart.max()), None, [*emulated.findings, *wrong]))
            order = record.k_order(k)
            lines.append(
                Rounding(
                    on=bed.model,
                    record=record.name,
                    digest=artifact.digest,
                    family=record.family,
                    acc=record.acc,
                    m=shape.m,
                    n=shape.n,
                    k=k,
                    inputs=inputs,
                    differing=differing,
                    max_ulp=int(apart.max()),
                    compared=0 if exact else min(SAMPLE, shape.m) * min(SAMPLE, shape.n),
                    models={} if exact else agreement(record.acc, emulated.a, emulated.b, d, order),
                )
            )
    return cases, lines


def _lengths(record: Record) -> list[int]:
    """k to compare at: of few and of many steps. 0/1 sums stay exact up to 2048 also in fp16."""
    if record.baked_k:
        return [record.baked_k]
    step, least = record.k_step, record.k_step * record.split_k
    return sorted({max(least, ceil_div(k, step) * step) for k in LENGTHS})


def judge(
    bed: Bed,
    subject: Subject,
    *,
    baseline: Baseline | None = None,
    sanitize: int | None = None,
    emulator: bool = False,
) -> tuple[Verdict, list[Rounding]]:
    """``validate``, and what is asked for beside it. ``sanitize``: the CUDA device's number, for compute-sanitizer."""
    record, artifact = subject.record, subject.artifact
    verdict = validate(bed, record, artifact.digest, lambda it: subject.open(bed, it), baseline)
    cases, tools = list(verdict.cases), dict(verdict.tools)
    lines: list[Rounding] = []
    if sanitize is not None:
        more, said = sanitized(bed, subject, sanitize)
        cases, tools = cases + more, tools | said
    if emulator and verdict.passed:
        more, lines = against_emulator(bed, subject)
        cases += more
    return verdict.model_copy(update={"cases": tuple(cases), "tools": tools}), lines
