"""Judges a solution of a benchmark: compares the answers of two rooms, which run the reference and the solution.

A solution is *wrong* in three cases: its values are wrong; the emulator finds an error in a kernel that ran; or it does
not do the work itself, because no kernel of its own has a part in an output, or because torch does all of the work that
the reference does. A solution that cannot be compiled or executed here is *not checked*, with the reason, even if it
caught the exception.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelproof.checking import devices
from kernelproof.grading import branches, inputs
from kernelproof.grading import source as source_grading
from kernelproof.grading.benchmarks import planting, wire
from kernelproof.grading.benchmarks.absent import PACKAGES
from kernelproof.grading.benchmarks.planting import Draw
from kernelproof.grading.benchmarks.rooms import NoTorch, Room, RoomLost, room
from kernelproof.grading.benchmarks.task import BenchmarkTask
from kernelproof.grading.benchmarks.task import task as read_task
from kernelproof.grading.device import read
from kernelproof.grading.formats import Array
from kernelproof.grading.verdict import CountedKernel, Finding, Verdict
from kernelproof.ground.errors import WrongInput

BUDGET = 3_000_000  # operations of a case: KernelBench's sizes are halved until it takes fewer
STATED_BUDGET = 8 * BUDGET  # most operations of a stated shape on which a solution is called after a smaller one
# Torch counts as doing all of the work if it does this share of each kind of work that the reference does.
ALL_WORK_SHARE = 0.9
LEAST_DATA = 64  # elements of an input with which host code may not compute; fewer may be sizes or factors
# The error of an output may always be this many times that of the reference in its own type.
MOST_REFERENCE_ERRORS = 4.0
# How many constants of kernels are planted in inputs, and their largest magnitude: a right kernel may fail for values
# that are larger than those of the benchmark's inputs.
MOST_PLANTED, LARGEST_PLANTED = 3, 16.0
MOST_PLANTED_DRAWS = 24  # of one case

# Rules that a solution breaks whatever the sizes are. A finding by another rule may not occur on the stated sizes.
SIZE_INDEPENDENT_RULES = {
    "no-kernel", "library-call", "timer-patch", "lazy-output", "extra-stream", "stale-result", "state-kept",
    "does-not-compile", "environment-dependent",
}  # fmt: skip
# Messages of failures that torch has only because it runs on a CPU here.
_CPU_FAILURE = re.compile(r"not implemented for|Could not run|CUDA|cuda|ATen_cuda|no kernel image|Unsupported:")


class NotJudgeable(Exception):
    """A solution cannot be judged, for a reason that is no fault of the solution."""


def check_solution(
    solution: str | Path, reference: Path, *, limits: source_grading.Limits | None = None,
    relative: float | None = None, absolute: float | None = None,
) -> Verdict:  # fmt: skip
    """Grade a solution by a reference of KernelBench, GPU MODE, robust-kbench or FlashInfer-Bench.

    ``solution``: its text, or a path. ``relative`` and ``absolute``: the tolerance of outputs, by default that of the
    benchmark. No content of a solution raises an exception. Raises WrongInput if the reference is of no known format or
    cannot be executed.
    """
    start, limits = time.perf_counter(), limits or source_grading.Limits()
    text = read(solution)
    verdict = Verdict(right=False, outcome="not checked", device=devices.device(limits.device).name)
    judge = _Judge(read_task(reference, text, limits.seed), text, limits, verdict, (relative, absolute))
    try:
        text.encode()
        judge.run()
    except (NotJudgeable, NoTorch, UnicodeEncodeError) as error:
        verdict.not_checked.append(str(error))
    verdict.seconds = round(time.perf_counter() - start, 3)
    verdict.remarks += judge.remarks
    return source_grading.with_outcome(verdict)


def _lost_reference(error: RoomLost) -> Exception:
    """The exception for a reference whose room was lost. If the reference exceeds a limit, the solution cannot be
    judged; otherwise the reference is wrong input."""
    text = f"the reference {error}"
    return NotJudgeable(text) if error.limit else WrongInput(text)


class _Judge:
    """Judges one solution on all cases of a task, and adds to the verdict."""

    def __init__(
        self, task: BenchmarkTask, text: str, limits: source_grading.Limits, verdict: Verdict,
        tolerances: tuple[float | None, float | None],
    ) -> None:  # fmt: skip
        self.task, self.text, self.limits, self.verdict = task, text, limits, verdict
        relative, absolute = tolerances
        self.relative = task.relative if relative is None else relative
        self.absolute = task.absolute if absolute is None else absolute
        self.remarks: list[str] = []
        self.case: dict[str, int] = {}
        self.draws: list[Draw] = []
        self.planted: set[tuple[float, str]] = set()  # constants, with the kind of draws in which they come first
        self.stated = True  # whether the case is one that the benchmark states

    def run(self) -> None:
        """Judge all cases. Raises NotJudgeable."""
        judged = 0
        for case in self.task.cases:
            opened = self._judge_in_rooms(case)
            if opened is None:
                continue
            judged += 1
            if not self.stated:
                self._withdraw_findings(opened)
            if self.verdict.findings:
                return
            if not self.stated and opened["stated_cost"] <= STATED_BUDGET:
                self._judge_as_stated(opened)
            elif not self.stated:
                self.remarks.append("judged on a smaller shape than the stated one, which takes too long to emulate")
            if self.verdict.findings or self.verdict.not_checked:
                return
        if not judged:
            raise NotJudgeable("all of its shapes are too large to be emulated")

    def _judge_in_rooms(self, case: dict[str, Any] | None, most_draws: int | None = None) -> wire.Message | None:
        """Judge one case in new rooms, on all draws or the first ones; returns the opened reference, or None if the
        case is too large. Raises NotJudgeable."""
        with self._room() as reference_room, self._room() as solution_room:
            opened = self._open_reference(reference_room, case)
            if opened is None:
                return None
            self.draws = self.draws[:most_draws]
            self.case = {k: v for k, v in (opened["case"] or {}).items() if isinstance(v, int)}
            self.stated = opened["stated"] == opened["case"]
            self.verdict.shapes.append(self.case)
            try:
                self._judge_case(reference_room, solution_room, opened)
            finally:
                self.remarks += solution_room.remarks
        return opened

    def _judge_as_stated(self, opened: wire.Message) -> None:
        """Judge a solution also on the stated shape, on normal inputs only: its launches may not fit that shape, or fit
        no other one. Raises NotJudgeable."""
        excused, self.verdict.not_checked = self.verdict.not_checked, []
        try:
            self._judge_in_rooms(opened["stated"], 2)
        except (NotJudgeable, WrongInput) as error:
            self.remarks.append(f"judged on a smaller shape than the stated one: {error}")
            self.verdict.not_checked += excused
            return
        self.remarks += excused
        self.remarks.append("on the stated shape it was called with normal inputs only, on a smaller one with all")

    def _withdraw_findings(self, opened: wire.Message) -> None:
        """Withdraw findings on a smaller shape if the solution's text contains a size of the stated shape. The solution
        may be made for that shape alone, which the benchmark allows."""
        shrunk = {size for name, size in opened["stated"].items() if size != opened["case"][name]}
        products = {a * b for a in opened["stated"].values() for b in shrunk}
        written = {int(digits) for digits in re.findall(r"(?<![\w.])\d{1,18}(?![\w.])", self.text)}
        named = sorted((shrunk | products) & written)
        excused = [finding for finding in self.verdict.findings if finding.rule not in SIZE_INDEPENDENT_RULES]
        if named and excused:
            self.verdict.findings = [
                finding for finding in self.verdict.findings if finding.rule in SIZE_INDEPENDENT_RULES
            ]
            self.verdict.not_checked.append(
                f"the text has {named[0]}, a size of the stated shape, for which alone it may be made; on the smaller "
                f"shape {self.case}: {excused[0].message}"
            )

    def _room(self) -> Any:
        """A context with a new room within the limits."""
        limits = self.limits
        return room(limits.device, limits.seconds, limits.gib, limits.compile_s)

    def _open_reference(self, reference_room: Room, case: dict[str, Any] | None) -> wire.Message | None:
        """Open the reference for a case; None if the case is too large. Raises WrongInput."""
        task = self.task
        try:
            opened, initial = reference_room.ask(
                "reference",
                format=task.format,
                text=task.text,
                modules=task.modules,
                case=case,
                budget=BUDGET,
                seed=self.limits.seed,
            )
            self._require_success(opened)
            self.draws = []
            self.planted.clear()
            # The numbers in seeds are arbitrary: they keep the draws of different seeds, and of one seed, apart.
            for number in range(2):
                seed = self.limits.seed * 1000 + 17 + number
                drawn, arrays = reference_room.ask("draw", seed=seed)
                self._require_success(drawn)
                if sum(item.bits.size for item in arrays) > self.task.most_elements:
                    return None
                self.draws.append(Draw("normal", seed, drawn["inputs"], arrays, drawn["plain"]))
            pairs = zip(*(draw.arrays for draw in self.draws), strict=True)
            if arrays and all(np.array_equal(one.bits, other.bits) for one, other in pairs):
                self.remarks.append("the reference makes the same inputs in every call, whose results can be known")
            rng = np.random.default_rng([self.limits.seed, 7])
            self.draws += list(planting.planted_draws(self.draws[1], rng))
            self.draws = [draw for draw in self.draws if self._expect(reference_room, draw)]
        except RoomLost as error:
            raise _lost_reference(error) from None
        return {**opened, "arrays": initial}

    def _require_success(self, answer: wire.Message) -> None:
        """Raise WrongInput if the reference failed, and NotJudgeable if it needs what is not emulated."""
        if "failed" in answer:
            error = answer["failed"]
            raise WrongInput(f"the reference fails, line {error['line']}: {error['type']}: {error['text']}")
        if answer.get("obstacles"):
            raise NotJudgeable(f"the reference: {answer['obstacles'][0]}")

    def _expect(self, reference_room: Room, draw: Draw) -> bool:
        """Get the reference's outputs for a draw. Returns False if the reference is not defined for planted values."""
        answer, arrays = reference_room.ask("expect", draw.arrays, inputs=draw.inputs, seed=draw.seed)
        if draw.kind == "normal":
            self._require_success(answer)
        elif "failed" in answer or answer.get("obstacles"):
            return False
        own, exact = _numbers(answer["own"]), _numbers(answer["exact"]) if answer["exact"] else []
        draw.own, draw.tree, draw.work = [arrays[n] for n in own], answer["own"], answer["work"]
        draw.depends = answer["depends"]
        draw.exact = [arrays[n] for n in exact] if len(exact) == len(own) else None
        return draw.kind == "normal" or all(np.isfinite(item.values()).all() for item in draw.own if item.is_float)

    # --- the solution ---

    def _judge_case(self, reference_room: Room, solution_room: Room, opened: wire.Message) -> None:
        """Judge the solution on one case: call it on all draws, and on the first one again. Raises NotJudgeable."""
        task = self.task
        try:
            answer, _ = solution_room.ask(
                "solution",
                opened["arrays"],
                format=task.format,
                text=self.text,
                reference=task.text,
                initial=opened["initial"],
                stated=opened["stated"],
                case=opened["case"],
                seed=self.limits.seed,
                modules=dict(task.modules),
            )
            if not self._add_execution(answer):
                return
            seen: list[tuple[Draw, list[wire.Tensor]]] = []
            pending: list[Draw] = [*self.draws]
            is_last = False
            while not is_last:
                if not pending:
                    pending = self._with_unmet_constant(reference_room, answer.get("unmet"))
                if is_last := not pending:
                    pending = self.draws[:1]
                draw = pending.pop(0)
                answer, outputs = solution_room.ask("call", draw.arrays, inputs=draw.inputs, seed=draw.seed)
                if not self._add_execution(answer):
                    return
                self.verdict.calls += 1
                wrong = self._compare(draw, answer, outputs)
                if not seen:
                    self._judge_what_ran(draw, answer)
                    pending[:0] = self._with_constants(reference_room, answer.get("constants"))
                elif wrong:
                    self._explain(draw, outputs, seen)
                seen.append((draw, outputs))
                if wrong:
                    return
            if remark := answer.get("remark"):
                self.remarks.append(str(remark))
        except RoomLost as error:
            if error.limit in ("time", "memory"):
                raise NotJudgeable(f"the solution {error}") from None
            self._add("host-failure", str(error), error="ended")

    def _with_constants(self, reference_room: Room, constants: Any) -> list[Draw]:
        """Draws in which the constants are planted with which the kernels that ran compare. Raises WrongInput."""
        turns = branches.rotations(_plantable(constants), MOST_PLANTED)
        kinds = (*inputs.HALVES, *([inputs.IN_TURN] if len(turns) > 1 else ()))
        draws = [self._with_planted(reference_room, kind, turn) for turn in turns for kind in kinds]
        return [draw for draw in draws if draw is not None]

    def _with_unmet_constant(self, reference_room: Room, constants: Any) -> list[Draw]:
        """A draw with the constant of a comparison that had the same result in all calls, in a way in which it was not
        planted before; none if there is no other way. Raises WrongInput."""
        ways = [(number, kind) for number in _plantable(constants)[:MOST_PLANTED] for kind in inputs.DIRECTED]
        for number, kind in ways:
            if (number, kind) in self.planted or len(self.planted) >= MOST_PLANTED_DRAWS:
                continue
            if draw := self._with_planted(reference_room, kind, (number,)):
                return [draw]
        return []

    def _with_planted(self, reference_room: Room, kind: str, constants: Sequence[float]) -> Draw | None:
        """The first draw with these constants planted in it, as ``kind`` says; None if the reference is not defined for
        it. Raises WrongInput."""
        self.planted.add((constants[0], kind))
        draw = planting.with_constants(self.draws[0], kind, constants, np.random.default_rng(len(self.planted)))
        try:
            return draw if self._expect(reference_room, draw) else None
        except RoomLost as error:
            raise _lost_reference(error) from None

    def _add_execution(self, answer: wire.Message) -> bool:
        """Add the findings in an answer of the solution. Returns whether it was executed without any. Raises
        NotJudgeable."""
        if answer.get("obstacles"):
            raise NotJudgeable(str(answer["obstacles"][0]))
        for item in answer.get("reports", ()):
            self._add(str(item["kind"]), str(item["message"]), kernel=str(item["kernel"] or ""), line=int(item["line"]))
        if answer.get("patched"):
            self._add("timer-patch", f"{answer['patched'][0]} was replaced", text=str(answer["patched"][0]))
        if "failed" in answer:
            error = answer["failed"]
            self._excuse_absence(answer)
            text = f"line {error['line']}: {error['type']}: {error['text']}"
            if "Error building extension" in error["text"]:
                self._add("does-not-compile", text, error=error["type"])
            elif error["type"] in ("ImportError", "ModuleNotFoundError"):
                raise NotJudgeable(f"the solution imports what is not installed here: {error['text']}")
            elif not error["refused"] and error["of_torch"] and _CPU_FAILURE.search(error["text"]):
                raise NotJudgeable(f"the solution needs torch on a GPU: {text}")
            else:
                rule = "launch-refused" if error["refused"] else "host-failure"
                self._add(rule, text, error=error["type"])
            return False
        return not self.verdict.findings

    def _excuse_absence(self, answer: wire.Message) -> None:
        """Raise NotJudgeable if the solution imports a package of kernels that is not installed here.

        This excuses only a solution that fails, or of which no kernel has a part in the outputs.
        """
        for name in answer.get("absent") or ():
            if name in PACKAGES and re.search(rf"\b(?:import|from)\s[^#\n]*\b{name}\b", self.text):
                raise NotJudgeable(f"the solution imports {name}, which is not installed here")

    def _judge_what_ran(self, draw: Draw, answer: wire.Message) -> None:
        """Add findings on the origin of the outputs: which kernels and which operators of torch have a part in them."""
        if answer["lazy"]:
            self._add("lazy-output", f"the result is a {answer['lazy'][0]}, no plain tensor", text=answer["lazy"][0])
            return
        for message in answer["windows"]:
            self._add("environment-dependent", str(message))
        if answer["unjoined"]:
            self._add("extra-stream", "a stream of its own has work that nobody waits for", text="unjoined")
        if answer["changed"] and any(answer["changed"]) and self.task.format == "KernelBench":
            self.remarks.append("it changes its inputs")
        operators = answer["operators"]
        operator_counts = ", ".join(f"{name} {count}x" for name, count in operators.items()) or "none"
        if all(answer["bare"]):
            self._excuse_absence(answer)
            launched = f"; launched: {', '.join(answer['launched'])}" if answer["launched"] else ""
            self._add(
                "no-kernel",
                f"no kernel of the source has a part in the outputs; operators of torch: {operator_counts}{launched}",
                launches=len(answer["launched"]),
            )
            if operators:
                self._add("library-call", f"torch computes the outputs: {operator_counts}", text=operator_counts)
            return
        if any(answer["bare"]):
            self.remarks.append("no kernel of the source has a part in some of the outputs")
        large = {number for number, item in enumerate(draw.arrays) if item.is_float and item.bits.size >= LEAST_DATA}
        if hosted := large & {*draw.depends} & {*answer["host_only"]}:
            names = ", ".join(map(str, sorted(hosted)))
            self._add("library-call", f"host code computes with input {names}, which no kernel reads", text="host")
        work = answer["work"]
        if draw.work and all(
            work.get(kind, 0) >= ALL_WORK_SHARE * amount for kind, amount in draw.work.items() if amount
        ):
            self._add(
                "library-call", f"torch does all of the reference's work: {operator_counts}", text=operator_counts
            )
        elif operators:
            self.remarks.append(f"operators of torch have a part in the outputs: {operator_counts}")
        self.verdict.kernels = [CountedKernel(name=str(name)) for name in answer["kernels"]]

    # --- values ---

    def _compare(self, draw: Draw, answer: wire.Message, outputs: list[wire.Tensor]) -> bool:
        """Compare the outputs of a call with the reference's. Returns True if they are wrong."""
        if answer["lazy"]:
            return True
        got = [outputs[n] for n in _numbers(answer["outputs"])]
        if len(got) != len(draw.own):
            self._add("host-failure", f"{len(got)} results, the reference has {len(draw.own)}", error="results")
            return True
        for number, (output, own) in enumerate(zip(got, draw.own, strict=True)):
            exact = draw.exact[number] if draw.exact is not None else own
            name = f"output {number}" if len(got) > 1 else "the output"
            if output.bits.shape != own.bits.shape:
                self._add("host-failure", f"{name} has shape {output.bits.shape}, not {own.bits.shape}", error="shape")
                return True
            wrong, error = self._wrong_elements(output, own, exact)
            if wrong.any():
                first = tuple(int(n) for n in np.argwhere(wrong)[0]) if wrong.ndim else ()
                value, right = float(output.values()[first]), float(exact.values()[first])
                self._add(
                    "wrong-value",
                    f"{int(wrong.sum())} of {wrong.size} elements of {name} differ from the reference on {draw.kind} "
                    f"inputs, first {list(first)}: {value:.6g} instead of {right:.6g}",
                    output=name, inputs=draw.kind, count=int(wrong.sum()), size=int(wrong.size), first=list(first),
                    value=value, expected=right, largest_error=error,
                )  # fmt: skip
                return True
        return False

    def _wrong_elements(self, output: wire.Tensor, own: wire.Tensor, exact: wire.Tensor) -> tuple[Array, float]:
        """A mask of the wrong elements of an output, and its largest error.

        ``output``: the solution's. ``own`` and ``exact``: the reference's in its own type and in fp64. An element may
        be near either.
        """
        values, ideal, usual = output.values(), exact.values(), own.values()
        if not own.is_float and not output.is_float:
            differ = np.asarray(values != usual)
            return differ, float(np.abs(values - usual).max(initial=0))
        with np.errstate(invalid="ignore", over="ignore"):
            # Near the fp64 result, as far as the tolerance or the reference's own error goes, or near its own result.
            error = np.abs(values - ideal)
            allowed = self.absolute + self.relative * np.abs(ideal)
            allowed = np.maximum(allowed, MOST_REFERENCE_ERRORS * np.abs(usual - ideal))
            near = error <= allowed
            near |= np.abs(values - usual) <= self.absolute + self.relative * np.abs(usual)
        same = (values == ideal) | (values == usual) | (np.isnan(values) & np.isnan(usual))
        finite = error[np.isfinite(error)]
        return np.asarray(~(near | same)), float(finite.max(initial=0.0))

    def _explain(self, draw: Draw, outputs: list[wire.Tensor], seen: list[tuple[Draw, list[wire.Tensor]]]) -> None:
        """Add a finding that explains why a later call is wrong although the first was right: it returned results of
        the call before, or the solution kept state."""
        last, before = seen[-1]
        if before and outputs and before[0].bits.shape == outputs[0].bits.shape:
            # Only elements count in which the two expected results differ; half of them equal to the old ones suffice.
            same = before[0].bits == outputs[0].bits
            differ = last.own[0].values() != draw.own[0].values()
            if differ.any() and (same & differ).sum() >= 0.5 * differ.sum():
                self._add(
                    "stale-result", "the results are those of the call before, on other inputs", output="0",
                    stale=int((same & differ).sum()), wrong=int(differ.sum()), size=int(differ.size),
                )  # fmt: skip
        if seen[0][0] is draw:
            self._add("state-kept", f"the same inputs give wrong results after {len(seen)} calls", calls=len(seen))

    def _add(self, rule: str, message: str, kernel: str = "", **evidence: Any) -> None:
        """Add a finding on the present case."""
        self.verdict.findings.append(Finding.of(rule, message, kernel, self.case, **evidence))


def _plantable(constants: Any) -> list[float]:
    """The constants of kernels, as a room reports them, that are planted in inputs."""
    return [number for number in constants or () if isinstance(number, float) and abs(number) <= LARGEST_PLANTED]


def _numbers(tree: Any) -> list[int]:
    """The numbers of the tensors in a packed value, in order."""
    match tree:
        case {"tensor": int() as number}:
            return [number]
        case {"tuple": items} | {"list": items}:
            return [number for item in items for number in _numbers(item)]
        case {"dict": items}:
            return [number for pair in items for number in _numbers(pair[1])]
    return []
