"""Grades an untrusted source text, given a reference and shapes (``check_source``).

The steps are: read the text (a Python module is parsed, never executed), refuse it if its includes could reveal files,
compile it in a sandbox, and run all shapes in a child process with limits. Host code runs in that child process too, if
the caller allows it; then the child is confined, and its answer is read as untrusted data.
"""

from __future__ import annotations

import faulthandler
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kernelproof.checking import assembly, devices, execution, includes
from kernelproof.checking.names import plain
from kernelproof.emulator import EmulatorError, LaunchRefused, PtxError, Report
from kernelproof.emulator.state.causes import grouped
from kernelproof.grading import floor, hostcode, inputs, launcher, modules
from kernelproof.grading.answers import Criteria, DeviceFactory
from kernelproof.grading.contract import Contract, ContractLaunch, HostCall, named_shapes, parse_contract
from kernelproof.grading.device import LaunchedCalls, WrongSignature, is_ptx, program, ptx, ptx_elsewhere, read
from kernelproof.grading.examination import Examination
from kernelproof.grading.expressions import Number, Shape
from kernelproof.grading.launcher import HostFailure
from kernelproof.grading.reference import Reference
from kernelproof.grading.shapes import drawn_shapes, unstated_shape
from kernelproof.grading.tolerance import Precision, Tolerance
from kernelproof.grading.verdict import Finding, Verdict
from kernelproof.ground import places, process_tree, sandbox
from kernelproof.ground.errors import Failure, WrongInput
from kernelproof.ground.workers import Worker

STEP_S = 0.05  # seconds between two checks of the limits while a child process runs
MAX_ANSWER_BYTES, READ_BYTES = 1 << 24, 1 << 16  # most bytes of an answer, and of one read
MAX_FINDINGS = 40  # most findings in a verdict
MAX_LINES, MAX_REFUSALS, MAX_THREADS = 5, 12, 8  # most lines, refusals of ptxas and threads in a finding
WRONG_INPUT, UNCONFINED = "!", "?"  # the first character of an answer of the child process that is an error
_PYTHON = re.compile(r"^[ \t]*(?:import|from)[ \t]+\w", re.M)  # matches every Python module with kernels
# The compiler's message about a missing header of a library with which kernels are written.
_ABSENT_HEADER = re.compile(
    r"fatal error: ((?:ATen|c10|cudnn|cute|cutlass|dlpack|flashinfer|kittens|nccl|nvshmem|pybind11|torch|tvm)[\w./+-]*)"
    r": No such file"
)


@dataclass(frozen=True)
class Limits:
    """How, and for how long, a source is checked.

    - ``device``: the emulated capability or GPU.
    - ``seconds``, ``gib``: limits of time and memory for the check, which runs in a process of its own unless
      ``isolated`` is False. ``compile_s``: the limit of nvcc in seconds; ``nvcc_arguments``: further arguments of nvcc.
    - ``places``: how many elements of each input are changed, one at a time, to see whether the outputs respond.
    - ``seed``: the seed of all random draws. Keep it secret if sources are optimised against this check.
    """

    device: str = devices.DEFAULT
    seconds: float = 120.0
    gib: float = 8.0
    compile_s: float = 60.0
    nvcc_arguments: tuple[str, ...] = ()
    isolated: bool = True
    places: int = 4
    seed: int = 0


def check_source(
    source: str | Path,
    reference: Callable[..., Any],
    shapes: Sequence[Shape | Sequence[int]],
    *,
    buffers: Mapping[str, str],
    launches: Sequence[ContractLaunch | Mapping[str, Any]] = (),
    call: HostCall | Mapping[str, Any] | None = None,
    run_host: bool = False,
    names: Sequence[str] = ("m", "n", "k"),
    draws: Mapping[str, tuple[int, int]] | None = None,
    tolerance: Tolerance | None = None,
    flops: Number | None = None,
    operands: str | None = None,
    accumulator: str | None = None,
    kinds: Sequence[str] = inputs.KINDS,
    claimed_us: float | Sequence[float] | None = None,
    gpu: str | None = None,
    arrays: Literal["numpy", "torch"] = "numpy",
    host_calls: Sequence[str] = (),
    limits: Limits | None = None,
) -> Verdict:
    """Grade device code (CUDA text or PTX) without a GPU: run it on an emulated one and compare it with ``reference``.

    Device code runs only on the emulator. C++ host code runs on this machine only if ``call`` and ``run_host`` are
    given. A Python module with ``load_inline`` is parsed rather than executed, and its host code is searched for
    anything that it does besides launching kernels.

    - ``shapes``: dictionaries, or tuples of values for ``names``. ``draws``: a range (both ends included) for each name
      that varies; two more shapes are drawn at random from these ranges. Other names keep the first shape's values.
      Without ``draws`` one shape is drawn near the stated ones, and what is wrong on it is a remark; ``{}`` draws none.
    - ``buffers``: name to ``in|out|inout|scratch:TYPE[EXTENTS]``, followed by ``=LOW..HIGH`` for inputs or ``=zeros``
      for scratch memory. ``launches``: see ``ContractLaunch``; one call consists of all of them, in order.
    - ``reference`` receives inputs and values of the shape by the names of its parameters. Inputs are arrays of NumPy
      or torch (``arrays``) with the rounded values in fp64, or integers in int64. It returns the outputs in the order
      of ``buffers``.
    - ``tolerance``: see ``Tolerance``. ``flops``: operations needed; by default 2 * (terms - 1) per output if the
      tolerance has terms and inputs are multiplied. ``host_calls``: operations of torch that host code may call.
    - ``operands``: the least precise type to multiply in (f32, tf32, f16, bf16, e4m3, ..., "any"), by default the
      narrowest of inputs and outputs; ``accumulator``: the same for sums, by default f32 if terms or flops are stated.
    - ``kinds``: the kinds of inputs that are drawn, out of ``inputs.KINDS``. ``limits``: see ``Limits``.
    - ``claimed_us``: a measured time, or one per shape, to compare with the least time that ``gpu`` needs.

    Raises WrongInput for a contradictory description or an unknown kind, and MissingTool without nvcc. Faults of the
    source are findings.
    """
    start, limits = time.perf_counter(), limits or Limits()
    contract, stated = parse_contract(buffers, launches, call), named_shapes(shapes, names)
    if claimed_us is not None and gpu is None:
        raise WrongInput("claimed_us: name the gpu that it was measured on")
    if call is not None and not (run_host and limits.isolated):
        raise WrongInput("call executes the source's host code: allow that by run_host=True, with limits.isolated True")
    verdict = Verdict(right=False, outcome="not checked", device=devices.device(limits.device).name)
    if (factory := _compiled_factory(read(source), contract, host_calls, limits, verdict)) is not None:
        precision = Precision.of(operands, accumulator, contract.narrowest, [item.format for item in contract.inputs])
        sums = accumulator is not None or flops is not None or (tolerance is not None and tolerance.terms is not None)
        criteria = Criteria(
            factory, contract, Reference(reference, contract, arrays), tolerance or Tolerance(), precision,
            operands != "any", sums and accumulator != "any", flops, _input_kinds(kinds), limits.places, limits.seed,
            unstated_shape(stated, limits.seed) if draws is None else None,
        )  # fmt: skip
        verdict.shapes = [*stated, *drawn_shapes(stated[0], draws or {}, limits.seed)]
        verdict = _grade_in_process(criteria, verdict, len(stated), limits)
        _compare_times(verdict, criteria, stated, claimed_us, gpu)
    verdict.seconds = round(time.perf_counter() - start, 3)
    return with_outcome(verdict)


def _input_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds of inputs, as a tuple. Raises WrongInput for an unknown kind."""
    if unknown := sorted(set(kinds) - set(inputs.KINDS)):
        raise WrongInput(f"kinds {', '.join(unknown)}: of {', '.join(inputs.KINDS)}")
    return tuple(kinds)


def _compiled_factory(
    text: str, contract: Contract, host_calls: Sequence[str], limits: Limits, verdict: Verdict
) -> DeviceFactory | None:
    """Compile a source and return the function that makes fresh memory for its calls.

    Returns None if the source is refused, does not compile, or cannot be judged; the verdict then says why. No content
    of a text raises an exception, because a training loop that grades many texts must not end with one of them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"{text[error.start]!a} in line {text.count(chr(10), 0, error.start) + 1}"
        verdict.findings.append(Finding.of("does-not-compile", f"{place} is no character", error="UnicodeEncodeError"))
        return None
    if (contract.call or not is_ptx(text)) and (reason := sandbox.namespace_obstacle()):
        verdict.remarks.append(f"{sandbox.NO_NAMESPACES}: {reason}")
    try:
        module = _parsed_module(text, limits) if _PYTHON.search(text) else None
    except Failure as error:
        verdict.not_checked.append(str(error))
        return None
    if isinstance(module, str):
        verdict.not_checked.append(module)
        return None
    # Operations of torch that the caller allows are no findings. The last word of a finding's text is the operation.
    for item in module.findings if module else ():
        last = re.split(r"\W+", str(item.evidence.get("text", "")).removesuffix("("))[-1]
        if item.rule != "library-call" or last not in host_calls:
            verdict.findings.append(item)
    to_compile = module.host_text if module else text
    # Includes are checked before any compiler sees the text, for systems whose compiler runs without a sandbox.
    if (contract.call or not is_ptx(text)) and (lines := includes.revealing_lines(to_compile)):
        verdict.findings.append(Finding.of("outside-file", f"refused: {lines[0]}", lines=lines[:MAX_LINES]))
        return None
    try:
        if contract.call is not None:
            path = launcher.library(
                to_compile, contract.call.function, limits.device, limits.nvcc_arguments, limits.compile_s
            )
            _assemble(assembly.embedded(path, limits.device), limits, verdict)
            return partial(launcher.HostCalls, path, contract, device=limits.device)
        if module:
            to_compile = module.device_text
        if not is_ptx(to_compile):
            to_compile = _with_templates(to_compile, [launch.entry for launch in contract.launches])
        code = _ptx(to_compile, module, limits)
        if is_ptx(to_compile):
            program(code)  # raises PtxError if the emulator cannot read it
        _assemble([code], limits, verdict)
    except launcher.MissingPart as error:
        verdict.not_checked.append(str(error))
        return None
    except (Failure, PtxError) as error:
        if missing := _ABSENT_HEADER.search(str(error)):
            verdict.not_checked.append(f"it includes {missing[1]}, which is not installed here")
            return None
        verdict.findings.append(Finding.of("does-not-compile", str(error), error=type(error).__name__))
        return None
    # Compiled again as if on another machine, to catch sources that adapt to this one.
    code_elsewhere = ptx_elsewhere(to_compile, limits.device, limits.nvcc_arguments, limits.compile_s)
    return partial(LaunchedCalls, code, code_elsewhere, contract, device=limits.device)


def _ptx(to_compile: str, module: modules.ExtensionModule | None, limits: Limits) -> str:
    """The PTX of device code. Raises Failure with the compiler's errors.

    Raises launcher.MissingPart if a module's kernels compile only with its host code, whose types they may take.
    """
    try:
        return ptx(to_compile, limits.device, limits.nvcc_arguments, limits.compile_s)
    except Failure:
        if module is None:
            raise
        launcher.check(module.host_text, limits.device, limits.nvcc_arguments, limits.compile_s)
    raise launcher.MissingPart("its kernels do not compile without its host code: grade it by call and run_host")


def _assemble(texts: Iterable[str], limits: Limits, verdict: Verdict) -> None:
    """Assemble PTX texts. Raises Failure if ptxas refuses one; adds a remark if ptxas cannot assemble here."""
    for text in texts:
        answer = assembly.answer_of(text, limits.device, foreign=True)
        if answer.refusals:
            raise Failure("ptxas failed:\n" + "\n".join(refusal.message for refusal in answer.refusals[:MAX_REFUSALS]))
        if answer.unable:
            verdict.remarks.append(f"ptxas did not assemble the PTX: {answer.unable}")


def _parsed_module(text: str, limits: Limits) -> modules.ExtensionModule | str | None:
    """Read a Python module by ``modules.read`` in a process of its own.

    The process has limits, because a hostile text can overflow the parser's stack or make a regular expression run for
    hours. Raises Failure if the process exceeds a limit or dies.
    """
    worker = Worker("fork", _serve_parser, text)
    watch = process_tree.Watch(worker.pid, limits.compile_s, limits.gib)
    try:
        while not worker.pipe.poll(STEP_S):
            if watch.passed():
                raise Failure(f"the text was not read within {limits.compile_s:g} s and {limits.gib:g} GiB")
        answer = worker.pipe.recv()
    except (EOFError, OSError):
        raise Failure(f"the process that read the text {worker.death()}") from None
    finally:
        worker.end()
    assert answer is None or isinstance(answer, (modules.ExtensionModule, str))
    return answer


def _serve_parser(pipe: Connection, text: str) -> None:
    """The main function of the process that reads a module: sends the result of ``modules.read``."""
    faulthandler.disable()  # If the text crashes this process, the parent reports it.
    try:
        pipe.send(modules.read(text))
    except (MemoryError, RecursionError):
        pipe.close()


def _with_templates(text: str, entries: Sequence[str]) -> str:
    """Device code that also instantiates the kernel templates in ``entries``, as host code that launches them would.

    An entry that names no template of the text is left out; it becomes a finding when it is launched.
    """
    templates = re.findall(r"\btemplate\b[^;{]*?__global__[^;{(]*?(\w+)\s*\(", hostcode.without_comments(text))
    wanted = [entry for entry in dict.fromkeys(entries) if re.split(r"::|<", entry.partition("<")[0])[-1] in templates]
    uses = "".join(f"    use((void*){entry});\n" for entry in wanted if "<" in entry)
    return text + (f"\nstatic void use(void*);\nvoid kernelproof_uses() {{\n{uses}}}\n" if uses else "")


def grade(criteria: Criteria, verdict: Verdict, stated_count: int) -> Verdict:
    """Examine all of ``verdict.shapes`` and add the findings. The first ``stated_count`` shapes are the user's; the
    others are drawn.

    If all stated shapes are right and a drawn one is wrong, the finding says that the source is specialised to the
    stated shapes.
    """
    reports: list[Report] = []
    largest = max(verdict.shapes[:stated_count], key=lambda shape: prod(shape.values()))
    stated_right = True
    for number, shape in enumerate(verdict.shapes):
        examination = None
        try:
            examination = Examination(criteria, shape, number >= stated_count and stated_right)
            examination.run()
        except (LaunchRefused, HostFailure, WrongSignature, PtxError, EmulatorError) as error:
            _record_error(error, shape, verdict)
            if examination is not None:
                reports += examination.device.unreturned
        if examination is None:
            break
        verdict.findings += examination.findings
        verdict.remarks += examination.remarks
        verdict.calls += examination.calls
        reports += examination.reports
        if shape == largest:
            verdict.kernels = examination.kernels
        stated_right = stated_right and not examination.findings
    if criteria.unstated is not None and not verdict.findings and not verdict.not_checked:
        _remark_on_unstated(criteria, criteria.unstated, verdict)
    for report in grouped(reports):
        if report.is_error:
            verdict.findings.append(_emulator_finding(report))
        else:
            verdict.remarks.append(f"{report.severity} {report.kind}: {report.message}")
    return verdict


def _remark_on_unstated(criteria: Criteria, shape: Shape, verdict: Verdict) -> None:
    """Examine a shape that the user has not stated, and add a remark if the source is not right on it."""
    try:
        examination = Examination(criteria, shape, drawn=True)
        examination.run()
    except WrongInput:  # The reference, or a launch, allows no such shape.
        return
    except (LaunchRefused, HostFailure, WrongSignature, PtxError, EmulatorError) as error:
        faults = [str(error)]
    else:
        verdict.calls += examination.calls
        faults = [item.message for item in examination.findings]
        faults += [report.message for report in grouped(examination.reports) if report.is_error]
    if faults:
        verdict.remarks.append(
            f"not right on {dict(shape)}, which was drawn in addition to the stated shapes: {faults[0]}"
        )


def _record_error(error: Exception, shape: Shape, verdict: Verdict) -> None:
    """Record why a shape could not be executed: as a finding if CUDA would refuse it too, else as not checked."""
    rules = {LaunchRefused: "launch-refused", HostFailure: "host-failure", WrongSignature: "wrong-signature"}
    if (rule := rules.get(type(error))) is not None:
        verdict.findings.append(Finding.of(rule, str(error), shape=shape, error=type(error).__name__))
    else:
        verdict.not_checked.append(f"{type(error).__name__}: {error}")


def _emulator_finding(report: Report) -> Finding:
    """The finding for a report of the emulator."""
    site = report.access.site
    place = report.place
    return Finding.of(
        report.kind, report.message, plain(report.kernel) if report.kernel else "",
        count=report.count, line=site.home.line if site.home else 0, ptx_line=site.line,
        cta=list(report.access.cta or ()), threads=list(report.access.threads[:MAX_THREADS]),
        buffer=place.buffer if place else "", index=list(place.index) if place else [],
    )  # fmt: skip


def _compare_times(
    verdict: Verdict,
    criteria: Criteria,
    shapes: Sequence[Shape],
    claimed: float | Sequence[float] | None,
    gpu: str | None,
) -> None:
    """Compare claimed times with the least time that the GPU needs, and add the latter to the verdict.

    Raises WrongInput for an unknown GPU, or if the number of claimed times is not that of the shapes.
    """
    if gpu is None:
        return
    target = floor.chip(gpu)
    times = [claimed] * len(shapes) if isinstance(claimed, int | float) else list(claimed or ())
    if times and len(times) != len(shapes):
        raise WrongInput(f"claimed_us: {len(times)} times for {len(shapes)} shapes")
    for number, shape in enumerate(shapes):
        flops, traffic = criteria.flops_of(shape), criteria.contract.traffic(shape)
        least = floor.floor(target, flops, traffic, criteria.precision.operands)
        verdict.floor_us.append(round(least.us, 4))
        if times and times[number] < least.us:
            verdict.findings.append(
                Finding.of(
                    "below-floor",
                    f"claimed {times[number]:g} us, {target.title} needs {least.us:.3g} us at least ({least.bound})",
                    shape=shape, claimed_us=float(times[number]), floor_us=least.us, bound=least.bound,
                    flops=flops, bytes=traffic,
                )
            )  # fmt: skip


def with_outcome(verdict: Verdict) -> Verdict:
    """Set the outcome of a verdict, and keep one finding per rule, kernel and shape."""
    distinct: dict[tuple[str, str, str], Finding] = {}
    for item in verdict.findings:
        distinct.setdefault((item.rule, item.kernel, str(item.shape)), item)
    verdict.findings = list(distinct.values())[:MAX_FINDINGS]
    verdict.not_checked = list(dict.fromkeys(verdict.not_checked))
    verdict.outcome = "wrong" if verdict.findings else "not checked" if verdict.not_checked else "right"
    verdict.right = verdict.outcome == "right"
    verdict.remarks = list(dict.fromkeys(verdict.remarks))
    return verdict


def _serve_grade(
    pipe: Connection, criteria: Criteria, verdict: Verdict, stated_count: int, box: sandbox.Sandbox | None
) -> None:
    """Grade in a child process and write the verdict to the pipe as JSON, or an error after ``WRONG_INPUT`` or
    ``UNCONFINED``."""
    os.setsid()  # The parent ends this process with all that host code starts, by killing the session.
    faulthandler.disable()  # If host code crashes, Python's traceback would only confuse.
    try:
        cache = str(places.user_cache())
        if box:
            sandbox.confine(box, (pipe.fileno(),), KERNELPROOF_CACHE_DIR=cache)
        else:
            sandbox.erase_variables(HOME=os.environ.get("HOME", ""), KERNELPROOF_CACHE_DIR=cache)
        answer = grade(criteria, verdict, stated_count).model_dump_json()
    except WrongInput as error:
        answer = f"{WRONG_INPUT}{error}"
    except sandbox.ConfinementError as error:
        answer = f"{UNCONFINED}{error}"
    data = answer.encode()
    while data:
        data = data[os.write(pipe.fileno(), data) :]


def _grade_in_process(criteria: Criteria, verdict: Verdict, stated_count: int, limits: Limits) -> Verdict:
    """Call ``grade`` in a child process with limits, and in a sandbox if host code runs. Raises WrongInput."""
    if not limits.isolated:
        return grade(criteria, verdict, stated_count)
    host_code = isinstance(criteria.factory, partial) and criteria.factory.func is launcher.HostCalls
    box = (
        execution.program_sandbox([criteria.factory.args[0]], limits.seconds)
        if isinstance(criteria.factory, partial) and host_code
        else None
    )
    worker = Worker("fork", _serve_grade, criteria, verdict, stated_count, box)
    watch = process_tree.Watch(worker.pid, limits.seconds, limits.gib, box.processes if box else 0)
    answer = b""
    try:
        # The answer ends where the pipe is closed. Host code may write to the pipe too, so nothing that comes from it
        # is unpickled, its length is limited, and the limits are checked however slowly bytes arrive. Host code can
        # still forge a whole verdict; docs/kernelproof/threat-model.md says so.
        while True:
            part = os.read(worker.pipe.fileno(), READ_BYTES) if worker.pipe.poll(STEP_S) else None
            answer += part or b""
            if part == b"" or len(answer) > MAX_ANSWER_BYTES:
                break
            if limit := watch.passed():
                excess = f"the check did not end within {limits.seconds:g} s"
                if limit == "memory":
                    excess = f"the check needs more than {limits.gib:g} GiB"
                if limit == "processes":
                    excess = "the check starts too many processes"
                if host_code:
                    verdict.findings.append(Finding.of("time-limit", excess, seconds=limits.seconds, gib=limits.gib))
                else:  # The emulator is slow and needs memory; a GPU may execute these kernels in no time.
                    verdict.not_checked.append(f"{excess}; choose smaller shapes or a longer limit")
                return verdict
        return _read_answer(answer)
    except sandbox.ConfinementError as error:
        verdict.not_checked.append(f"its host code was not run, because the sandbox fails: {error}")
        return verdict
    except (OSError, ValidationError):
        death = f"the process of the check {worker.death()}"
        if host_code:
            verdict.findings.append(Finding.of("host-failure", death, error="ended"))
        else:
            verdict.not_checked.append(death)
        return verdict
    finally:
        with suppress(ProcessLookupError):
            process_tree.kill_session(worker.pid)
        worker.end()


def _read_answer(answer: bytes) -> Verdict:
    """Parse the answer of the child process.

    Raises WrongInput or ConfinementError if the answer is such an error, and ValidationError if it is no verdict.
    """
    text = answer.decode(errors="replace")
    if text.startswith(WRONG_INPUT):
        raise WrongInput(text[1:])
    if text.startswith(UNCONFINED):
        raise sandbox.ConfinementError(text[1:])
    return Verdict.model_validate_json(text)
