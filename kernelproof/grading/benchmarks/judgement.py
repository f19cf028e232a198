"""Judges a solution of a benchmark: two rooms run the reference and the solution, and their answers are compared here.

A solution is *wrong* if its values are, if the emulator finds an error in a kernel that ran, or if what ran is not what
was asked for: no kernel of its own has a part in an output, or torch does all of the work that the reference does. What
cannot be compiled or executed here is *not checked*, with the reason, even if the solution caught the exception.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from kernelproof.checking import devices
from kernelproof.grading import source as limits_of_source
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
# Torch does all of the work if it does this share of it, for each kind of work that the reference does.
ALL_OF_IT = 0.9
# An output may also be as far from the exact result as this many times the reference itself, in its own type.
AS_FAR_AS = 4.0
# So many constants of kernels are planted in inputs, up to this magnitude: others may be beyond what they are made for.
MOST_PLANTED, LARGEST_PLANTED = 3, 16.0


# What a solution does or leaves out, whatever the sizes are. Everything else may be right for the stated sizes alone.
ANY_SIZE = {
    "no-kernel", "library-call", "timer-patch", "lazy-output", "extra-stream", "stale-result", "state-kept",
    "does-not-compile",
}  # fmt: skip
# Failures of torch that show only that it runs on a CPU here.
_OF_THE_CPU = re.compile(r"not implemented for|Could not run|CUDA|cuda|ATen_cuda|no kernel image|Unsupported:")


class Unjudged(Exception):
    """Nothing can be said about a solution, for a reason that is not its own."""


def check_solution(
    solution: str | Path, reference: Path, *, limits: limits_of_source.Limits | None = None,
    relative: float | None = None, absolute: float | None = None,
) -> Verdict:  # fmt: skip
    """Grade a solution by a reference of KernelBench, GPU MODE, robust-kbench or FlashInfer-Bench.

    Nothing is raised for what a solution's text has in it. Raises WrongInput for a reference that is of no known format
    or cannot be executed.
    """
    start, limits = time.perf_counter(), limits or limits_of_source.Limits()
    text = read(solution)
    verdict = Verdict(right=False, outcome="not checked", device=devices.device(limits.device).name)
    judge = _Judge(read_task(reference, text, limits.seed), text, limits, verdict, (relative, absolute))
    try:
        text.encode()
        judge.run()
    except (Unjudged, NoTorch, UnicodeEncodeError) as error:
        verdict.not_checked.append(str(error))
    verdict.seconds = round(time.perf_counter() - start, 3)
    verdict.remarks += judge.remarks
    return limits_of_source.with_outcome(verdict)


def _lost_reference(error: RoomLost) -> Exception:
    """What to raise for a reference whose room was lost: that it needs more than the limits is no fault of anybody."""
    text = f"the reference {error}"
    return Unjudged(text) if error.limit else WrongInput(text)


class _Judge:
    def __init__(
        self, task: BenchmarkTask, text: str, limits: limits_of_source.Limits, verdict: Verdict,
        tolerances: tuple[float | None, float | None],
    ) -> None:  # fmt: skip
        self.task, self.text, self.limits, self.verdict = task, text, limits, verdict
        relative, absolute = tolerances
        self.relative = task.relative if relative is None else relative
        self.absolute = task.absolute if absolute is None else absolute
        self.remarks: list[str] = []
        self.case: dict[str, int] = {}
        self.draws: list[Draw] = []
        self.stated = True  # whether the case is one that the benchmark states

    def run(self) -> None:
        """Judge all cases. Raises Unjudged."""
        judged = 0
        for case in self.task.cases:
            with self._room() as asked, self._room() as solving:
                opened = self._open_reference(asked, case)
                if opened is None:
                    continue
                judged += 1
                self.case = {k: v for k, v in (opened["case"] or {}).items() if isinstance(v, int)}
                self.stated = opened["stated"] == opened["case"]
                self.verdict.shapes.append(self.case)
                try:
                    self._case(asked, solving, opened)
                finally:
                    self.remarks += solving.remarks
            if not self.stated:
                self._excuse(opened)
            if self.verdict.findings or self.verdict.not_checked:
                return
        if not judged:
            raise Unjudged("all of its shapes are too large to be emulated")
        if not self.stated:
            self.remarks.append("judged on a smaller shape than the stated one, which takes too long to emulate")

    def _excuse(self, opened: wire.Message) -> None:
        """Withdraw findings on a smaller shape if the solution's text has a size of the stated one: it may be made for
        that shape, as the benchmark allows."""
        shrunk = {size for name, size in opened["stated"].items() if size != opened["case"][name]}
        products = {a * b for a in opened["stated"].values() for b in shrunk}
        written = {int(digits) for digits in re.findall(r"(?<![\w.])\d{1,18}(?![\w.])", self.text)}
        named = sorted((shrunk | products) & written)
        excused = [finding for finding in self.verdict.findings if finding.rule not in ANY_SIZE]
        if named and excused:
            self.verdict.findings = [finding for finding in self.verdict.findings if finding.rule in ANY_SIZE]
            self.verdict.not_checked.append(
                f"the stated shape takes too long to emulate, and the text has {named[0]}, a size of it; "
                f"on the smaller shape {self.case}: {excused[0].message}"
            )

    def _room(self) -> Any:
        limits = self.limits
        return room(limits.device, limits.seconds, limits.gib, limits.compile_s)

    def _open_reference(self, asked: Room, case: dict[str, Any] | None) -> wire.Message | None:
        """Open the reference for a case; None if the case is too large. Raises WrongInput."""
        task = self.task
        try:
            opened, initial = asked.ask(
                "reference",
                format=task.format,
                text=task.text,
                modules=task.modules,
                case=case,
                budget=BUDGET,
                seed=self.limits.seed,
            )
            self._not_failed(opened)
            self.draws = []
            for number in range(2):
                seed = self.limits.seed * 1000 + 17 + number
                drawn, arrays = asked.ask("draw", seed=seed)
                self._not_failed(drawn)
                if sum(item.bits.size for item in arrays) > self.task.most_elements:
                    return None
                self.draws.append(Draw("normal", seed, drawn["inputs"], arrays, drawn["plain"]))
            rng = np.random.default_rng([self.limits.seed, 7])
            self.draws += list(planting.planted(self.draws[1], rng))
            self.draws = [draw for draw in self.draws if self._expected(asked, draw)]
        except RoomLost as error:
            raise _lost_reference(error) from None
        return {**opened, "arrays": initial}

    def _not_failed(self, answer: wire.Message) -> None:
        if "failed" in answer:
            error = answer["failed"]
            raise WrongInput(f"the reference fails, line {error['line']}: {error['type']}: {error['text']}")
        if answer.get("obstacles"):
            raise Unjudged(f"the reference: {answer['obstacles'][0]}")

    def _expected(self, asked: Room, draw: Draw) -> bool:
        """Ask for the outputs of a draw. False if planted values are none that the reference is defined for."""
        answer, arrays = asked.ask("expect", draw.arrays, inputs=draw.inputs, seed=draw.seed)
        if draw.kind == "normal":
            self._not_failed(answer)
        elif "failed" in answer or answer.get("obstacles"):
            return False
        own, exact = _numbers(answer["own"]), _numbers(answer["exact"]) if answer["exact"] else []
        draw.own, draw.tree, draw.work = [arrays[n] for n in own], answer["own"], answer["work"]
        draw.exact = [arrays[n] for n in exact] if len(exact) == len(own) else None
        return draw.kind == "normal" or all(np.isfinite(item.values()).all() for item in draw.own if item.is_float)

    # --- the solution ---

    def _case(self, asked: Room, solving: Room, opened: wire.Message) -> None:
        task = self.task
        try:
            answer, _ = solving.ask(
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
            if not self._executed(answer):
                return
            seen: list[tuple[Draw, list[wire.Tensor]]] = []
            left = [*self.draws, self.draws[0]]
            while left:
                draw = left.pop(0)
                answer, outputs = solving.ask("call", draw.arrays, inputs=draw.inputs, seed=draw.seed)
                if not self._executed(answer):
                    return
                self.verdict.calls += 1
                wrong = self._compare(draw, answer, outputs)
                if not seen:
                    self._judge_what_ran(draw, answer)
                    left[:0] = self._with_constants(asked, answer.get("constants"))
                elif wrong:
                    self._explain(draw, outputs, seen)
                seen.append((draw, outputs))
                if wrong:
                    return
        except RoomLost as error:
            if error.limit in ("time", "memory"):
                raise Unjudged(f"the solution {error}") from None
            self._add("host-failure", str(error), error="ended")

    def _with_constants(self, asked: Room, constants: Any) -> list[Draw]:
        """Draws with planted constants, with which the kernels that ran compare. Raises WrongInput."""
        known = [number for number in constants or () if isinstance(number, float) and abs(number) <= LARGEST_PLANTED]
        try:
            draws = planting.with_constants(self.draws[0], known[:MOST_PLANTED])
            return [draw for draw in draws if self._expected(asked, draw)]
        except RoomLost as error:
            raise _lost_reference(error) from None

    def _executed(self, answer: wire.Message) -> bool:
        """Whether a step of the solution was executed; what it shows becomes findings. Raises Unjudged."""
        if answer.get("obstacles"):
            raise Unjudged(str(answer["obstacles"][0]))
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
                raise Unjudged(f"the solution imports what is not installed here: {error['text']}")
            elif not error["refused"] and error["of_torch"] and _OF_THE_CPU.search(error["text"]):
                raise Unjudged(f"the solution needs torch on a GPU: {text}")
            else:
                rule = "launch-refused" if error["refused"] else "host-failure"
                self._add(rule, text, error=error["type"])
            return False
        return not self.verdict.findings

    def _excuse_absence(self, answer: wire.Message) -> None:
        """Raise Unjudged if the solution asked for a package of kernels that is not installed here. Only for solutions
        of which no kernel has a part in the outputs: the others have shown what they do."""
        for name in answer.get("absent") or ():
            if name in PACKAGES and re.search(rf"\b(?:import|from)\s[^#\n]*\b{name}\b", self.text):
                raise Unjudged(f"the solution imports {name}, which is not installed here")

    def _judge_what_ran(self, draw: Draw, answer: wire.Message) -> None:
        """Judge by which kernels and operators of torch the outputs come from."""
        if answer["lazy"]:
            self._add("lazy-output", f"the result is a {answer['lazy'][0]}, no plain tensor", text=answer["lazy"][0])
            return
        if answer["unjoined"]:
            self._add("extra-stream", "a stream of its own has work that nobody waits for", text="unjoined")
        if answer["changed"] and any(answer["changed"]) and self.task.format == "KernelBench":
            self.remarks.append("it changes its inputs")
        operators = answer["operators"]
        said = ", ".join(f"{name} {count}x" for name, count in operators.items()) or "none"
        if all(answer["bare"]):
            self._excuse_absence(answer)
            launched = f"; launched: {', '.join(answer['launched'])}" if answer["launched"] else ""
            self._add(
                "no-kernel",
                f"no kernel of the source has a part in the outputs; operators of torch: {said}{launched}",
                launches=len(answer["launched"]),
            )
            if operators:
                self._add("library-call", f"torch computes the outputs: {said}", text=said)
            return
        if any(answer["bare"]):
            self.remarks.append("no kernel of the source has a part in some of the outputs")
        work = answer["work"]
        if draw.work and all(work.get(kind, 0) >= ALL_OF_IT * amount for kind, amount in draw.work.items() if amount):
            self._add("library-call", f"torch does all of the reference's work: {said}", text=said)
        elif operators:
            self.remarks.append(f"operators of torch on the outputs' way: {said}")
        self.verdict.kernels = [CountedKernel(name=str(name)) for name in answer["kernels"]]

    # --- values ---

    def _compare(self, draw: Draw, answer: wire.Message, outputs: list[wire.Tensor]) -> bool:
        """Compare the outputs of a call with the reference's. True if they are wrong."""
        if answer["lazy"]:
            return True
        got = [outputs[n] for n in _numbers(answer["outputs"])]
        if len(got) != len(draw.own):
            self._add("host-failure", f"{len(got)} results, the reference has {len(draw.own)}", error="results")
            return True
        for number, (mine, own) in enumerate(zip(got, draw.own, strict=True)):
            exact = draw.exact[number] if draw.exact is not None else own
            name = f"output {number}" if len(got) > 1 else "the output"
            if mine.bits.shape != own.bits.shape:
                self._add("host-failure", f"{name} has shape {mine.bits.shape}, not {own.bits.shape}", error="shape")
                return True
            wrong, error = self._wrong(mine, own, exact)
            if wrong.any():
                first = tuple(int(n) for n in np.argwhere(wrong)[0]) if wrong.ndim else ()
                value, right = float(mine.values()[first]), float(exact.values()[first])
                self._add(
                    "wrong-value",
                    f"{int(wrong.sum())} of {wrong.size} elements of {name} differ from the reference on {draw.kind} "
                    f"inputs, first {list(first)}: {value:.6g} instead of {right:.6g}",
                    output=name, inputs=draw.kind, count=int(wrong.sum()), size=int(wrong.size), first=list(first),
                    value=value, expected=right, largest_error=error,
                )  # fmt: skip
                return True
        return False

    def _wrong(self, mine: wire.Tensor, own: wire.Tensor, exact: wire.Tensor) -> tuple[Array, float]:
        """The elements that are wrong, and the largest error."""
        values, ideal, usual = mine.values(), exact.values(), own.values()
        if not own.is_float and not mine.is_float:
            differ = np.asarray(values != usual)
            return differ, float(np.abs(values - usual).max(initial=0))
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(values - ideal)
            allowed = self.absolute + self.relative * np.abs(ideal)
            allowed = np.maximum(allowed, AS_FAR_AS * np.abs(usual - ideal))
            near = error <= allowed
            near |= np.abs(values - usual) <= self.absolute + self.relative * np.abs(usual)
        same = (values == ideal) | (values == usual) | (np.isnan(values) & np.isnan(usual))
        finite = error[np.isfinite(error)]
        return np.asarray(~(near | same)), float(finite.max(initial=0.0))

    def _explain(self, draw: Draw, outputs: list[wire.Tensor], seen: list[tuple[Draw, list[wire.Tensor]]]) -> None:
        """Say why a later call is wrong although the first was right: its results are old ones, or state was kept."""
        last, before = seen[-1]
        if before and outputs and before[0].bits.shape == outputs[0].bits.shape:
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
        self.verdict.findings.append(Finding.of(rule, message, kernel, self.case, **evidence))


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
