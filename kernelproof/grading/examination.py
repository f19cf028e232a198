"""A source on one shape: calls on many inputs at the same addresses, each compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kernelproof.emulator import Report
from kernelproof.grading import arithmetic, inputs, tolerance
from kernelproof.grading.contract import Contract
from kernelproof.grading.device import Call, MemoryCalls
from kernelproof.grading.expressions import Number, Shape, value
from kernelproof.grading.formats import Array
from kernelproof.grading.reference import Reference
from kernelproof.grading.tolerance import Expected, Precision, Tolerance
from kernelproof.grading.verdict import Evidence, Finding, Kernel

# Least share of the instructions for normal numbers that another kind of inputs takes; fewer show a shortcut for it.
MIN_WORK = 0.5
# Least share of the stated operations that a kernel executes; below 1 because stated formulas round.
MIN_FLOPS = 0.98
# Share of wrong elements equal to those of an earlier call from which a result counts as stale.
STALE_SHARE = 0.5
# Least share of an output's largest change that is looked for: less may vanish in sums or scales that elements share.
VISIBLE_SHARE = 0.1
# Least share of the reference's change that an output has to show.
MIN_RESPONSE = 0.1
# A change of the reference is looked for where it exceeds so many allowed errors.
VISIBLE_ERRORS = 20.0


# Makes fresh memory for calls of a shape.
DeviceFactory = Callable[[Shape], MemoryCalls]


@dataclass(frozen=True)
class Task:
    """What a source is graded by, apart from its shapes."""

    factory: DeviceFactory
    contract: Contract
    reference: Reference
    tolerance: Tolerance
    precision: Precision
    checks_operands: bool = True
    checks_accumulator: bool = True
    flops: Number | None = None
    kinds: tuple[str, ...] = inputs.KINDS
    places: int = 4
    seed: int = 0

    def flops_of(self, shape: Shape) -> float:
        """The operations that the problem needs; 0 where nothing is stated."""
        if self.flops is not None:
            return float(value(self.flops, shape))
        if self.tolerance.terms is None:
            return 0.0
        terms = float(value(self.tolerance.terms, shape)) - 1  # one of them may be a bias
        return 2 * terms * float(np.prod(self.contract.outputs[0].shape(shape))) if self._multiplies(shape) else 0.0

    def _multiplies(self, shape: Shape) -> bool:
        """Are terms products of inputs? If so, doubling all inputs more than doubles the reference."""
        bits = inputs.draw(self.contract, "normal", shape, np.random.default_rng(self.seed))
        arrays = [(item, item.format.values(bits[item.name])) for item in self.contract.inputs]
        simple = self.reference({item.name: array for item, array in arrays}, shape)
        double = self.reference({item.name: array if item.low else 2 * array for item, array in arrays}, shape)
        return not all(np.allclose(2 * sums, doubled) for sums, doubled in zip(simple, double, strict=True))

    @property
    def counts_integers(self) -> bool:
        """Does integer arithmetic count as the problem's? It may with 8-bit inputs, even beside scales in floats."""
        formats = [item.format for item in self.contract.inputs]
        return not any(item.is_float for item in formats) or any(item.dtype.itemsize == 1 for item in formats)


@dataclass
class Answer:
    """A call with its inputs, the expected outputs, and a mask of the wrong elements of each output."""

    kind: str
    bits: dict[str, Array]
    call: Call
    expected: dict[str, Expected]
    wrong: dict[str, Array] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not any(mask.any() for mask in self.wrong.values())


class Examination:
    """All calls of one shape, and their findings. ``remarks``: notes that are no errors."""

    def __init__(self, task: Task, shape: Shape, drawn: bool) -> None:
        self.task, self.shape, self.drawn = task, shape, drawn
        self.rng = np.random.default_rng([task.seed, *shape.values()])
        self.device = task.factory(shape)
        self.findings: list[Finding] = []
        self.machine: list[Report] = []
        self.remarks: list[str] = []
        self.answers: list[Answer] = []
        self.kernels: list[Kernel] = []

    @property
    def calls(self) -> int:
        return self.device.count

    def run(self) -> None:
        """Execute and judge. Raises LaunchRefused, EmulatorError, and WrongInput for a reference that does not fit."""
        first = self._answer("normal", counters=True, hazards=True)
        if not first.call.launches:
            self._add("no-kernel", "the call launches no kernel", launches=0)
        self._account(first)
        if self.drawn:
            self._compare(self._answer("integers"))
            return
        self._later_calls(first)
        self._dependence(first)

    def _add(self, rule: str, message: str, kernel: str = "", **evidence: Evidence) -> None:
        self.findings.append(Finding.of(rule, message, kernel, self.shape, **evidence))

    # One call.

    def _answer(self, kind: str, counters: bool = False, hazards: bool = False) -> Answer:
        bits = inputs.draw(self.task.contract, kind, self.shape, self.rng)
        call = self.device.call(bits, counters, hazards)
        answer = self._judged(kind, bits, call)
        self.machine += call.reports
        self.answers.append(answer)
        return answer

    def _judged(self, kind: str, bits: dict[str, Array], call: Call) -> Answer:
        answer = Answer(kind, bits, call, self.expected(kind, bits))
        for name, item in answer.expected.items():
            wrong = item.wrong(call.outputs[name])
            answer.wrong[name] = wrong & self.device.places_written(name)
        return answer

    def expected(self, kind: str, bits: Mapping[str, Array]) -> dict[str, Expected]:
        """What the reference says of some inputs."""
        task, agreement = self.task, self.task.contract
        values = {item.name: item.format.values(bits[item.name]) for item in agreement.inputs}
        results = task.reference(values, self.shape)
        magnitudes: list[Array] | None = None
        if task.tolerance.terms is not None:
            magnitudes = task.reference({name: np.abs(array) for name, array in values.items()}, self.shape)
        out = {}
        for number, item in enumerate(agreement.outputs):
            magnitude = magnitudes[number] if magnitudes is not None else None
            item_expected = tolerance.expected(
                results[number], magnitude, item.format, task.tolerance, task.precision, self.shape
            )
            if magnitude is not None and kind in inputs.EXACT:
                exact = tolerance.is_exact(values, magnitude, task.precision, item.format)
                item_expected = replace(item_expected, exact=exact or item_expected.exact)
            out[item.name] = replace(item_expected, open=kind in inputs.SPECIAL)
        return out

    # Wrong values.

    def _compare(self, answer: Answer) -> None:
        """Findings of a call whose outputs differ from the reference."""
        for name, wrong in answer.wrong.items():
            if wrong.any():
                self._wrong(answer, name, wrong)

    def _wrong(self, answer: Answer, name: str, wrong: Array) -> None:
        item, expected = self.task.contract.buffers[name], answer.expected[name]
        values = item.format.values(answer.call.outputs[name])
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        errors = np.abs(values - expected.values)[wrong]
        rule = "shape-special-case" if self.drawn else "wrong-value"
        self._add(
            rule,
            f"{int(wrong.sum())} of {wrong.size} elements of {name} differ from the reference on {answer.kind} inputs, "
            f"first {list(index)}: {float(values[index]):.6g} instead of {float(expected.values[index]):.6g}"
            + ("" if expected.exact else f" +- {float(expected.allowed[index]):.2g}"),
            output=name, inputs=answer.kind, count=int(wrong.sum()), size=int(wrong.size), first=list(index),
            value=float(values[index]), expected=float(expected.values[index]),
            allowed=0.0 if expected.exact else float(expected.allowed[index]),
            largest_error=float(np.nanmax(errors)) if np.isfinite(errors).any() else None,
        )  # fmt: skip

    # Later calls.

    def _later_calls(self, first: Answer) -> None:
        """New data at the same addresses, every kind of values, and the first data again."""
        self._compare(first)
        second = self._answer("normal")
        self._follow(first, second)
        for kind in self.task.kinds:
            if kind == "normal":
                continue
            answer = self._answer(kind, counters=kind in ("zeros", "ones"))
            if kind in ("zeros", "ones"):
                self._special(first, answer)
            self._follow(self.answers[-2], answer)
        self._constant()
        third = self.device.call(first.bits)
        repeated = self._judged("normal", first.bits, third)
        if first.is_right and not repeated.is_right:
            self._kept(first, repeated)
        for call in (first.call, second.call, third):
            if call.globals_changed:
                names = ", ".join(f"{name} ({count} bytes)" for name, count in call.globals_changed.items())
                self._add(
                    "state-kept", f"device variables differ behind a call from before it: {names}",
                    variables=dict(call.globals_changed),
                )  # fmt: skip
                break

    def _follow(self, before: Answer, answer: Answer) -> None:
        """Compare a call behind another one; a wrong answer that is the earlier one's is stale."""
        if answer.is_right:
            return
        for name, wrong in answer.wrong.items():
            if not wrong.any():
                continue
            stale = wrong & self._same(before, answer, name) & ~before.wrong[name]
            if stale.sum() >= STALE_SHARE * wrong.sum():
                self._add(
                    "stale-result",
                    f"{int(stale.sum())} of {int(wrong.sum())} wrong elements of {name} are those of the call before, "
                    "on other inputs at the same addresses",
                    output=name, stale=int(stale.sum()), wrong=int(wrong.sum()), size=int(wrong.size),
                )  # fmt: skip
        if before.is_right and not self._right_afresh(answer):
            before = answer
        elif before.is_right:
            self._kept(before, answer)
        self._compare(answer)

    @staticmethod
    def _same(before: Answer, answer: Answer, name: str) -> Array:
        """Where an output is that of a call before, though the reference is another."""
        old, new = before.call.outputs[name], answer.call.outputs[name]
        differs = before.expected[name].values != answer.expected[name].values
        return np.asarray((old.view(f"u{old.itemsize}") == new.view(f"u{new.itemsize}")) & differs)

    def _right_afresh(self, answer: Answer) -> bool:
        """Are the same inputs answered rightly as the first call in fresh memory?"""
        fresh = self.task.factory(self.shape)
        call = fresh.call(answer.bits)
        return not any(item.wrong(call.outputs[name]).any() for name, item in answer.expected.items())

    def _kept(self, before: Answer, answer: Answer) -> None:
        counts = {name: int(wrong.sum()) for name, wrong in answer.wrong.items()}
        self._add(
            "state-kept",
            f"the same {answer.kind} inputs are answered rightly as the first call and wrongly behind "
            f"{len(self.answers)} others: {sum(counts.values())} elements",
            wrong=counts, calls=len(self.answers), inputs=before.kind,
        )  # fmt: skip

    def _constant(self) -> None:
        """Outputs that no input moves."""
        for item in self.task.contract.outputs:
            outputs = [answer.call.outputs[item.name] for answer in self.answers]
            results = [answer.expected[item.name].values for answer in self.answers]
            differ = any(not np.array_equal(results[0], other, equal_nan=True) for other in results[1:])
            if differ and len(outputs) > 1 and all(np.array_equal(outputs[0], other) for other in outputs[1:]):
                self._add(
                    "constant-output",
                    f"{item.name} holds the same bytes behind {len(outputs)} calls on different inputs",
                    output=item.name, calls=len(outputs),
                )  # fmt: skip

    # Work and types.

    def _account(self, first: Answer) -> None:
        """Operations and types of the first call against what the problem needs."""
        task, call = self.task, first.call
        integers = not any(item.format.is_float for item in task.contract.inputs)
        needed, total = task.flops_of(self.shape), 0
        for name, opcodes in call.opcodes.items():
            flops, by_matrix = arithmetic.flops(opcodes, call.wgmma_flops[name], task.counts_integers)
            total += flops
            self.kernels.append(
                Kernel(
                    name=name, launches=call.launches[name], ctas=call.ctas[name], instructions=opcodes.total(),
                    flops=flops, mma_flops=by_matrix,
                )
            )  # fmt: skip
            for item in [] if integers else self._downgrades(opcodes, needed):
                self._add(
                    "lower-precision",
                    f"{name}: {item.what} are {item.type}, {item.required} is required: {item.opcode}, {item.runs}x",
                    name, what=item.what, type=item.type, required=item.required, opcode=item.opcode,
                    executed=item.runs,
                )  # fmt: skip
        if call.opcodes and total < MIN_FLOPS * needed:
            self._add(
                "less-work",
                f"at most {total} operations are executed, the problem needs {needed:.0f}",
                executed=total, needed=int(needed), share=round(total / needed, 4),
            )  # fmt: skip

    def _downgrades(self, opcodes: Mapping[str, int], needed: float) -> list[arithmetic.Downgrade]:
        """Instructions of lower precision than required; an operation with 8-bit buffers may quantise."""
        task = self.task
        operands = task.precision.operands if task.checks_operands else None
        accumulator = task.precision.accumulator if task.checks_accumulator else None
        quantises = any(item.format.dtype.itemsize == 1 for item in task.contract.buffers.values())
        unpacks = any(not item.format.is_float for item in task.contract.inputs)
        items = arithmetic.downgrades(opcodes, operands, accumulator, needed, products=not unpacks)
        return [item for item in items if arithmetic.rank(item.type) or not quantises]

    def _special(self, first: Answer, answer: Answer) -> None:
        """Less work for special values."""
        executed, usual = answer.call.instructions, first.call.instructions
        if executed < MIN_WORK * usual:
            self._add(
                "value-special-case",
                f"{executed} instructions on {answer.kind}, {usual} on normal inputs",
                inputs=answer.kind, instructions=executed, normal=usual, share=round(executed / usual, 4),
            )  # fmt: skip

    # Dependence.

    def _dependence(self, first: Answer) -> None:
        """Change single elements and see whether the output follows the reference."""
        if not first.is_right:
            return
        changes = inputs.changes(self.task.contract, first.bits, self.shape, self.rng, self.task.places)
        for change in changes:
            for factor in inputs.FACTORS:
                bits = inputs.changed(self.task.contract, first.bits, change, factor)
                results = self.expected("normal", bits)
                if moved := self._moved(first, results):
                    self._watch(first, bits, results, moved, change)
                    break

    def _moved(self, first: Answer, results: Mapping[str, Expected]) -> dict[str, Array]:
        """Where the reference moves most and visibly, by output: beyond the stated tolerance of the first inputs, and
        beyond rounding of the changed ones, whose scale may be another."""
        moved = {}
        for name, item in results.items():
            rounding = tolerance.noise(item)
            with np.errstate(invalid="ignore"):
                difference = np.abs(item.values - first.expected[name].values)
            difference[~np.isfinite(difference)] = 0
            visible = difference > VISIBLE_ERRORS * (first.expected[name].allowed + rounding)
            visible &= difference >= VISIBLE_SHARE * difference.max(initial=0.0)
            if visible.any():
                moved[name] = visible
        return moved

    def _watch(
        self,
        first: Answer,
        bits: dict[str, Array],
        results: Mapping[str, Expected],
        moved: Mapping[str, Array],
        change: inputs.Change,
    ) -> None:
        call = self.device.call(bits)
        for name, places in moved.items():
            item = self.task.contract.buffers[name].format
            old, new = item.values(first.call.outputs[name]), item.values(call.outputs[name])
            by = np.abs(results[name].values - first.expected[name].values)
            with np.errstate(invalid="ignore"):
                deaf = places & (np.abs(new - old) < MIN_RESPONSE * by)
            if deaf.any():
                index = tuple(int(i) for i in np.argwhere(deaf)[0])
                self._add(
                    "input-ignored",
                    f"{change.buffer}{list(change.place)} changes and {int(deaf.sum())} of {int(places.sum())} "
                    f"elements of {name} that depend on it do not follow, first {list(index)}: the reference moves by "
                    f"{float(by[index]):.4g}, the output by {float(np.abs(new - old)[index]):.4g}",
                    input=change.buffer, index=list(change.place), output=name, count=int(deaf.sum()),
                    dependent=int(places.sum()), first=list(index), reference_change=float(by[index]),
                    output_change=float(np.abs(new - old)[index]),
                )  # fmt: skip
