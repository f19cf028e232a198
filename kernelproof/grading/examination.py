"""Examines a source on one shape: calls it on many inputs, and compares every output with the reference.

All calls of a shape use the same memory at the same addresses, as in a program that reuses its buffers. That exposes
kernels that remember results by pointer or keep other state. Outputs are poisoned before each call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kernelproof.emulator import Report
from kernelproof.grading import arithmetic, branches, inputs, relations, tolerance
from kernelproof.grading.answers import CheckedCall, Criteria
from kernelproof.grading.constants import compared_constants
from kernelproof.grading.device import DISTANCES, Call
from kernelproof.grading.expressions import Shape
from kernelproof.grading.formats import Array
from kernelproof.grading.tolerance import Expected
from kernelproof.grading.verdict import CountedKernel, Evidence, Finding

# If a call on inputs of some kind executes less than this share of the instructions of a call on normal numbers, the
# source has a shortcut for such values.
MIN_WORK = 0.5
# A source has to execute at least this share of the stated operations. It is below 1 because stated formulas round.
MIN_FLOPS = 0.98
# A wrong result counts as stale if at least this share of its wrong elements equals those of the call before.
STALE_SHARE = 0.5
# Elements whose reference changes by less than this share of the largest change are ignored, since so small a change
# may vanish in sums or scales that elements share.
VISIBLE_SHARE = 0.1
# An output has to change by at least this share of the reference's change.
MIN_RESPONSE = 0.1
# Largest measured error in units of the usual one, which ``tolerance.Precision`` estimates. Honest sums have about 0.5.
MOST_USUAL_ERRORS = 2.0
# At most this many constants of a kernel's comparisons are planted in inputs.
MOST_CONSTANTS = 4
# A change of the reference counts as visible if it is larger than this many allowed errors.
VISIBLE_ERRORS = 20.0
# Instructions whose results PTX does not define to the last bit.
_INEXACT = re.compile(r"\.(?:approx|full)\b")


class Examination:
    """All calls of one shape, and their findings.

    - ``drawn``: whether the shape is a random one; it then gets fewer calls.
    - ``device``: the memory in which all calls run, except for those in another environment or in fresh memory.
    - ``findings``: the broken rules. ``remarks``: sentences for the user about what is no fault. ``reports``: the
      emulator's reports.
    - ``answers``: the calls whose outputs were compared, in order. ``outcomes``: the results of comparisons in them.
    - ``kernels``: the kernels of the first call, with their counts.
    """

    def __init__(self, criteria: Criteria, shape: Shape, drawn: bool) -> None:
        self.criteria, self.shape, self.drawn = criteria, shape, drawn
        self.rng = np.random.default_rng([criteria.seed, *shape.values()])
        # The environment (what a kernel can read of its machine) is drawn anew for every seed and shape.
        draws = np.random.default_rng([criteria.seed, 3, *shape.values()])
        # Buffers lie 1 + environment % DISTANCES pages apart, so a multiple of DISTANCES gives the smallest distance.
        # An access beyond a buffer then hits the next one.
        environment = DISTANCES * int(draws.integers(1, 1 << 20))
        self.environments = environment, environment + int(draws.integers(1, DISTANCES))
        self.device = criteria.factory(shape, environment=self.environments[0])
        self.findings: list[Finding] = []
        self.reports: list[Report] = []
        self.remarks: list[str] = []
        self.answers: list[CheckedCall] = []
        self.kernels: list[CountedKernel] = []
        self.outcomes = branches.Outcomes()
        # Kernels with products of narrower operands than allowed. These become findings, unless the measured error
        # shows that the kernel compensates for the bits that they lose.
        self.suspects: list[tuple[str, arithmetic.Downgrade]] = []

    @property
    def calls(self) -> int:
        """How many calls were made in the memory of this shape."""
        return self.device.count

    def run(self) -> None:
        """Execute all calls and compare them. Drawn shapes get only two calls.

        Raises LaunchRefused, EmulatorError, and WrongInput if the reference does not fit the contract.
        """
        first = self._call("normal", counters=True, hazards=True)
        if not first.call.launches:
            self._add("no-kernel", "the call launches no kernel", launches=0)
        self._check_work_and_types(first)
        if self.drawn:
            self._compare(self._call("integers"))
            self._check_precision()
            return
        self._check_environment(first)
        self._check_later_calls(first)
        self._check_precision()
        self._check_relations()
        self._check_dependence(first)
        if remark := self.outcomes.remark():
            self.remarks.append(remark)

    def _add(self, rule: str, message: str, kernel: str = "", **evidence: Evidence) -> None:
        """Add a finding on this shape."""
        self.findings.append(Finding.of(rule, message, kernel, self.shape, **evidence))

    # One call.

    def _call(
        self, kind: str, counters: bool = False, hazards: bool = False, constants: Sequence[float] = ()
    ) -> CheckedCall:
        """Call with newly drawn inputs of a kind, in which ``constants`` are planted."""
        bits = inputs.draw(self.criteria.contract, kind, self.shape, self.rng, constants)
        return self._answer(kind, bits, counters, hazards)

    def _answer(self, kind: str, bits: dict[str, Array], counters: bool = False, hazards: bool = False) -> CheckedCall:
        """Call with inputs of a kind, compare the outputs, and keep the answer."""
        call = self.device.call(bits, counters, hazards)
        answer = self._judge(kind, bits, call)
        self.reports += call.reports
        self.outcomes.add(call.comparisons)
        self.answers.append(answer)
        return answer

    def _judge(self, kind: str, bits: dict[str, Array], call: Call) -> CheckedCall:
        """Compare the outputs of a call with those expected for its inputs."""
        answer = CheckedCall(kind, bits, call, self.expected(kind, bits))
        for name, item in answer.expected.items():
            wrong = item.wrong(call.outputs[name])
            answer.wrong[name] = wrong & self.device.written_elements(name)
        return answer

    def expected(self, kind: str, bits: Mapping[str, Array]) -> dict[str, Expected]:
        """The outputs that the reference computes for inputs of a kind, given as bits, with the errors that the
        tolerance allows."""
        criteria, contract = self.criteria, self.criteria.contract
        values = {item.name: item.format.values(bits[item.name]) for item in contract.inputs}
        results = criteria.reference(values, self.shape)
        magnitudes: list[Array] | None = None
        if criteria.tolerance.terms is not None:
            magnitudes = criteria.reference({name: np.abs(array) for name, array in values.items()}, self.shape)
        out = {}
        for number, item in enumerate(contract.outputs):
            magnitude = magnitudes[number] if magnitudes is not None else None
            item_expected = tolerance.expected(
                results[number], magnitude, item.format, criteria.tolerance, criteria.precision, self.shape
            )
            if magnitude is not None and kind in inputs.EXACT:
                exact = tolerance.is_exact(values, magnitude, criteria.precision, item.format)
                item_expected = replace(item_expected, exact=exact or item_expected.exact)
            out[item.name] = replace(item_expected, allows_undefined=kind in inputs.SPECIAL)
        return out

    # Wrong values.

    def _compare(self, answer: CheckedCall) -> None:
        """Report each output of a call that differs from the reference."""
        for name, wrong in answer.wrong.items():
            if wrong.any():
                self._report_wrong_values(answer, name, wrong)

    def _report_wrong_values(self, answer: CheckedCall, name: str, wrong: Array) -> None:
        """Report an output of a call with its wrong elements, given as a mask."""
        item, expected = self.criteria.contract.buffers[name], answer.expected[name]
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

    # The machine.

    def _check_environment(self, first: CheckedCall) -> None:
        """Call with the same inputs in another environment, and report differing results or work.

        The results must have the same bits. If approximate functions were executed, it is enough that the results are
        right.
        """
        # No computation needs the upper bits of generic addresses, which differ between machines. So an instruction
        # that reads them is a finding, whatever the results are.
        for name, site in [*first.call.window_readings][:1]:
            self._add("environment-dependent", branches.window_message(site), name, opcode=site.text)
        if self.device.runs_host_code:
            return
        device = self.criteria.factory(self.shape, environment=self.environments[1], is_elsewhere=True)
        call = device.call(first.bits, counters=True)
        inexact = sorted({opcode for opcodes in call.opcodes.values() for opcode in opcodes if _INEXACT.search(opcode)})
        other = self._judge(first.kind, first.bits, call)
        differ = {}
        for name, bits in first.call.outputs.items():
            unequal = bits.view(f"u{bits.itemsize}") != call.outputs[name].view(f"u{bits.itemsize}")
            differ[name] = int(np.sum(unequal & other.wrong[name] & ~first.wrong[name] if inexact else unequal))
        share = call.instructions / max(1, first.call.instructions)
        if sum(differ.values()) or not MIN_WORK <= share <= 1 / MIN_WORK:
            errors = f", and other errors of {', '.join(inexact)}" if inexact else ""
            self._add(
                "environment-dependent",
                f"compiled elsewhere, with other clocks, SMs, grid numbers and addresses{errors}, "
                f"{sum(differ.values())} elements differ on the same inputs, and {share:.3g} times as many "
                "instructions are executed",
                outputs=differ, instructions=call.instructions, normal=first.call.instructions, inexact=inexact,
            )  # fmt: skip

    # Later calls.

    def _check_later_calls(self, first: CheckedCall) -> None:
        """Call with new data at the same addresses, with every kind of values, and with the first data again."""
        self._compare(first)
        second = self._call("normal")
        self._compare_with_previous(first, second)
        for kind in self.criteria.kinds:
            if kind == "normal":
                continue
            for constants in self._planted_constants(kind):
                answer = self._call(kind, counters=True, constants=constants)
                if kind in inputs.SHORTCUTS:
                    self._check_shortcut(first, answer)
                self._compare_with_previous(self.answers[-2], answer)
        if "constants" in self.criteria.kinds:
            self._plant_several()
            self._plant_unmet()
        self._check_constant_outputs()
        third = self.device.call(first.bits)
        repeated = self._judge("normal", first.bits, third)
        if first.is_right and not repeated.is_right:
            self._report_kept_state(repeated)
        for call in (first.call, second.call, third):
            if call.globals_changed:
                names = ", ".join(f"{name} ({count} bytes)" for name, count in call.globals_changed.items())
                self._add(
                    "state-kept", f"a call changes device variables: {names}",
                    variables=dict(call.globals_changed),
                )  # fmt: skip
                break

    def _plant_several(self) -> None:
        """Call with inputs whose consecutive elements are the constants in rotation, for conditions that neighbouring
        elements have to fulfil together."""
        turns = branches.rotations(compared_constants(self.device.ptx), MOST_CONSTANTS)
        for constants in turns if len(turns) > 1 else ():
            answer = self._call(inputs.IN_TURN, counters=True, constants=constants)
            self._compare_with_previous(self.answers[-2], answer)

    def _plant_unmet(self) -> None:
        """For each comparison that gave only one result so far, plant its constants until it gives the other too."""
        for constants in branches.rotations(self.outcomes.unmet_constants(), MOST_CONSTANTS):
            # ``MOST`` is called twice (``DIRECTED`` has it too), since conditions at two places seldom hold in one
            # draw.
            for kind in (*inputs.DIRECTED, inputs.MOST):
                if constants[0] not in self.outcomes.unmet_constants():
                    break
                answer = self._call(kind, counters=True, constants=constants)
                self._compare_with_previous(self.answers[-2], answer)

    def _planted_constants(self, kind: str) -> list[tuple[float, ...]]:
        """The constants to plant in each call of a kind.

        For the kind "constants", there is one call for each of the first ``MOST_CONSTANTS`` constants of the kernels.
        Each call plants all of these, starting with another one. For other kinds there is one call, without constants.
        """
        if kind != "constants":
            return [()]
        return branches.rotations(compared_constants(self.device.ptx), MOST_CONSTANTS)

    def _compare_with_previous(self, before: CheckedCall, answer: CheckedCall) -> None:
        """If a call is wrong, report it, and also why: its result is that of the call before, or the source kept state.

        A call that is wrong here but right as the first call in fresh memory shows that state was kept.
        """
        if answer.is_right:
            return
        for name, wrong in answer.wrong.items():
            if not wrong.any():
                continue
            stale = wrong & self._unchanged_elements(before, answer, name) & ~before.wrong[name]
            if stale.sum() >= STALE_SHARE * wrong.sum():
                self._add(
                    "stale-result",
                    f"{int(stale.sum())} of {int(wrong.sum())} wrong elements of {name} are those of the call before, "
                    "on other inputs at the same addresses",
                    output=name, stale=int(stale.sum()), wrong=int(wrong.sum()), size=int(wrong.size),
                )  # fmt: skip
        if before.is_right and self._is_right_in_fresh_memory(answer):
            self._report_kept_state(answer)
        self._compare(answer)

    @staticmethod
    def _unchanged_elements(before: CheckedCall, answer: CheckedCall, name: str) -> Array:
        """A mask of the elements that have the bits of the call before although the reference has changed."""
        old, new = before.call.outputs[name], answer.call.outputs[name]
        differs = before.expected[name].values != answer.expected[name].values
        return np.asarray((old.view(f"u{old.itemsize}") == new.view(f"u{new.itemsize}")) & differs)

    def _is_right_in_fresh_memory(self, answer: CheckedCall) -> bool:
        """Whether the outputs for the same inputs are right if it is the first call in fresh memory."""
        fresh = self.criteria.factory(self.shape, environment=self.environments[0])
        call = fresh.call(answer.bits)
        return not any(item.wrong(call.outputs[name]).any() for name, item in answer.expected.items())

    def _report_kept_state(self, answer: CheckedCall) -> None:
        """Report a wrong call on inputs that give right results in a first call."""
        counts = {name: int(wrong.sum()) for name, wrong in answer.wrong.items()}
        self._add(
            "state-kept",
            f"the same {answer.kind} inputs give right results in the first call and wrong ones after "
            f"{len(self.answers)} others: {sum(counts.values())} elements",
            wrong=counts, calls=len(self.answers), inputs=answer.kind,
        )  # fmt: skip

    def _check_constant_outputs(self) -> None:
        """Report outputs that were the same in all calls although the reference was not."""
        for item in self.criteria.contract.outputs:
            outputs = [answer.call.outputs[item.name] for answer in self.answers]
            results = [answer.expected[item.name].values for answer in self.answers]
            differ = any(not np.array_equal(results[0], other, equal_nan=True) for other in results[1:])
            if differ and len(outputs) > 1 and all(np.array_equal(outputs[0], other) for other in outputs[1:]):
                self._add(
                    "constant-output",
                    f"{item.name} holds the same bytes after {len(outputs)} calls on different inputs",
                    output=item.name, calls=len(outputs),
                )  # fmt: skip

    def _check_relations(self) -> None:
        """Change inputs in ways that the reference follows exactly, and report outputs that do not follow."""
        bases: dict[str, CheckedCall] = {}
        for answer in self.answers:
            bases.setdefault(answer.kind, answer)
        for base in bases.values():
            if not base.is_right:
                continue
            for relation in relations.valid_relations(self.criteria, base, self.shape, self.rng):
                answer = self._answer(base.kind, relation.bits)
                self._compare_with_previous(self.answers[-2], answer)
                for item in relations.broken_relations(base, answer, relation, self.criteria.contract.buffers):
                    self._add(
                        "broken-relation",
                        f"{relation.name}, {item.elements} elements of {item.output} do not follow as the reference's "
                        f"do, first {list(item.first)}: they differ by {item.difference:.3g}, usual errors explain "
                        f"{item.allowed:.3g}",
                        output=item.output, inputs=relation.name, count=item.elements, first=list(item.first),
                        difference=item.difference, allowed=item.allowed,
                    )  # fmt: skip

    # Work and types.

    def _check_work_and_types(self, first: CheckedCall) -> None:
        """Report a first call that executes fewer operations, or computes in narrower types, than the problem needs."""
        criteria, call = self.criteria, first.call
        integers = not any(item.format.is_float for item in criteria.contract.inputs)
        needed, total = criteria.flops_of(self.shape), 0
        for name, opcodes in call.opcodes.items():
            flops, by_matrix = arithmetic.flops(opcodes, call.wgmma_flops[name], criteria.counts_integers)
            total += flops
            self.kernels.append(
                CountedKernel(
                    name=name, launches=call.launches[name], ctas=call.ctas[name], instructions=opcodes.total(),
                    flops=flops, mma_flops=by_matrix,
                )
            )  # fmt: skip
            for item in [] if integers else self._downgrades(opcodes, needed):
                if needed and item.part in ("operands", "conversion") and item.required in ("f32", "f64"):
                    self.suspects.append((name, item))
                else:
                    self._add_downgrade(name, item)
        if call.opcodes and total < MIN_FLOPS * needed:
            self._add(
                "less-work",
                f"at most {total} operations are executed, the problem needs {needed:.0f}",
                executed=total, needed=int(needed), share=round(total / needed, 4),
            )  # fmt: skip

    def _add_downgrade(self, name: str, item: arithmetic.Downgrade) -> None:
        """Add a finding on an instruction of kernel ``name`` that computes in a too narrow type."""
        amount = f"{item.runs} operations" if item.part == "sums" else f"{item.runs}x"
        verb = "are" if item.part in ("operands", "sums") else "is"
        self._add(
            "lower-precision",
            f"{name}: {item.part} {verb} {item.type}, {item.required} is required: {item.opcode}, {amount}",
            name, what=item.part, type=item.type, required=item.required, opcode=item.opcode, executed=item.runs,
        )  # fmt: skip

    def _check_precision(self) -> None:
        """Judge the precision of sums by their errors on all draws of normal numbers.

        The bound of a single element is far above honest errors, so it detects little. The root mean square of honest
        errors is known much better: narrower sums, or products of narrower operands, exceed it many times. Products
        that are computed in several narrow parts, which together keep all bits, do not exceed it.
        """
        ratio = self._measured_error()
        if ratio is None or ratio > MOST_USUAL_ERRORS:
            for name, item in self.suspects:
                self._add_downgrade(name, item)
        if ratio is not None and ratio > MOST_USUAL_ERRORS and not self.suspects and self.criteria.checks_accumulator:
            required = self.criteria.precision.accumulator
            self._add(
                "lower-precision",
                f"the error is {ratio:.3g} times what {required} sums have, as a root mean square",
                what="error", type="unknown", required=required, opcode="", executed=0, ratio=round(ratio, 3),
            )  # fmt: skip

    def _measured_error(self) -> float | None:
        """The root mean square of the errors of float outputs on normal inputs, in units of the usual error. None if
        the usual error is not known, or if no such call is right."""
        squares: list[Array] = []
        for answer in self.answers:
            if answer.kind != "normal" or not answer.is_right:
                continue
            for name, item in answer.expected.items():
                if item.usual is None or not item.format.is_float:
                    return None
                error = item.format.values(answer.call.outputs[name]) - item.values
                squares.append((np.where(np.isfinite(error), error, 0) / item.usual).reshape(-1) ** 2)
        return float(np.sqrt(np.mean(np.concatenate(squares)))) if squares else None

    def _downgrades(self, opcodes: Mapping[str, int], needed: float) -> list[arithmetic.Downgrade]:
        """The instructions of lower precision than required, among ``opcodes`` with their counts. ``needed``: the
        operations that the problem needs. Conversions to integers are allowed if a buffer has 8-bit elements, since the
        kernel may quantise."""
        criteria = self.criteria
        operands = criteria.precision.operands if criteria.checks_operands else None
        accumulator = criteria.precision.accumulator if criteria.checks_accumulator else None
        quantises = any(item.format.dtype.itemsize == 1 for item in criteria.contract.buffers.values())
        unpacks = any(not item.format.is_float for item in criteria.contract.inputs)
        items = arithmetic.downgrades(opcodes, operands, accumulator, needed, products=not unpacks)
        return [item for item in items if arithmetic.rank(item.type) or not quantises]

    def _check_shortcut(self, first: CheckedCall, answer: CheckedCall) -> None:
        """Report a call on special values that executes far fewer instructions than the first call."""
        executed, usual = answer.call.instructions, first.call.instructions
        if executed < MIN_WORK * usual:
            self._add(
                "value-special-case",
                f"{executed} instructions on {answer.kind}, {usual} on normal inputs",
                inputs=answer.kind, instructions=executed, normal=usual, share=round(executed / usual, 4),
            )  # fmt: skip

    # Dependence.

    def _check_dependence(self, first: CheckedCall) -> None:
        """Change single elements of the inputs and check that the outputs change as the reference does.

        The factor of a change grows until the reference changes visibly, because only then is an unchanged output
        wrong.
        """
        if not first.is_right:
            return
        changes = inputs.changes(self.criteria.contract, first.bits, self.shape, self.rng, self.criteria.places)
        for change in changes:
            for factor in inputs.FACTORS:
                bits = inputs.changed(self.criteria.contract, first.bits, change, factor)
                results = self.expected("normal", bits)
                if visible_changes := self._visible_changes(first, results):
                    self._check_response(first, bits, results, visible_changes, change)
                    break

    def _visible_changes(self, first: CheckedCall, results: Mapping[str, Expected]) -> dict[str, Array]:
        """For each output, the elements whose reference changes visibly; outputs without any are left out.

        A change is visible if it far exceeds the tolerance for the first inputs plus the rounding for the changed
        inputs, whose scale may differ.
        """
        visible_changes = {}
        for name, item in results.items():
            rounding = tolerance.noise(item)
            with np.errstate(invalid="ignore"):
                difference = np.abs(item.values - first.expected[name].values)
            difference[~np.isfinite(difference)] = 0
            visible = difference > VISIBLE_ERRORS * (first.expected[name].allowed + rounding)
            visible &= difference >= VISIBLE_SHARE * difference.max(initial=0.0)
            if visible.any():
                visible_changes[name] = visible
        return visible_changes

    def _check_response(
        self,
        first: CheckedCall,
        bits: dict[str, Array],
        results: Mapping[str, Expected],
        visible_changes: Mapping[str, Array],
        change: inputs.InputChange,
    ) -> None:
        """Call with one changed element, and report outputs that do not change although the reference does.

        ``results``: the reference's outputs for the changed inputs. ``visible_changes``: the elements that change
        visibly.
        """
        call = self.device.call(bits)
        for name, places in visible_changes.items():
            item = self.criteria.contract.buffers[name].format
            old, new = item.values(first.call.outputs[name]), item.values(call.outputs[name])
            reference_change = np.abs(results[name].values - first.expected[name].values)
            with np.errstate(invalid="ignore"):
                unresponsive = places & (np.abs(new - old) < MIN_RESPONSE * reference_change)
            if unresponsive.any():
                index = tuple(int(i) for i in np.argwhere(unresponsive)[0])
                self._add(
                    "input-ignored",
                    f"{change.buffer}{list(change.place)} changes and {int(unresponsive.sum())} of {int(places.sum())} "
                    f"elements of {name} that depend on it do not follow, first {list(index)}: the reference moves by "
                    f"{float(reference_change[index]):.4g}, the output by {float(np.abs(new - old)[index]):.4g}",
                    input=change.buffer, index=list(change.place), output=name, count=int(unresponsive.sum()),
                    dependent=int(places.sum()), first=list(index),
                    reference_change=float(reference_change[index]),
                    output_change=float(np.abs(new - old)[index]),
                )  # fmt: skip
