"""Judges built kernels on a device for ``cudal2gen validate --on gpu``.

``device.validate`` gives the verdict. On request, compute-sanitizer also examines a launch (``--also sanitizer``), and
results are also compared bit by bit with the emulator's (``--also emulator``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cudal2gen.results import Case, Rounding, Verdict
from cudal2gen.validator import sanitizer
from cudal2gen.validator.agreement import against_emulator
from cudal2gen.validator.device import Baseline, BuiltKernel, VerdictDevice, validate
from cudal2gen.validator.problems import stress_shapes
from kernelproof.ground.errors import Failure


def judge(
    device: VerdictDevice,
    built: BuiltKernel,
    *,
    baseline: Baseline | None = None,
    sanitize: int | None = None,
    emulator: bool = False,
) -> tuple[Verdict, list[Rounding]]:
    """The verdict on one kernel, and how the device's rounding compares with the emulator's.

    ``baseline``: a library's product, whose largest error our kernel must not exceed. ``sanitize``: the number of the
    CUDA device on which compute-sanitizer runs; None to leave it out. ``emulator``: whether to compare a right kernel
    with the emulator; if not, the list of roundings is empty.
    """
    digest = built.artifact.digest
    verdict = validate(device, built.record, digest, lambda record: built.open(device, record), baseline)
    cases, tools = list(verdict.cases), dict(verdict.tools)
    roundings: list[Rounding] = []
    if sanitize is not None:
        sanitizer_cases, answers = run_sanitizer(device, built, sanitize)
        cases, tools = cases + sanitizer_cases, tools | answers
    if emulator and verdict.passed:
        agreement_cases, roundings = against_emulator(device, built)
        cases += agreement_cases
    return verdict.model_copy(update={"cases": tuple(cases), "tools": tools}), roundings


def judge_all(
    device: VerdictDevice,
    kernels: Iterable[BuiltKernel],
    *,
    baseline: Baseline | None = None,
    sanitize: int | None = None,
    emulator: bool = False,
) -> Iterator[tuple[Verdict, list[Rounding]]]:
    """Judges one kernel after the other, and yields what ``judge`` returns. If a kernel has stopped the device, its
    verdict is still yielded, and then Failure is raised, since the device can run no further kernel."""
    for kernel in kernels:
        yield judge(device, kernel, baseline=baseline, sanitize=sanitize, emulator=emulator)
        try:
            device.wait()
        except RuntimeError as error:
            raise Failure(f"the device has stopped over {kernel.record.name}: {str(error).splitlines()[0]}") from None


def run_sanitizer(
    device: VerdictDevice, built: BuiltKernel, number: int, timeout_s: float = 120
) -> tuple[list[Case], dict[str, str]]:
    """Runs compute-sanitizer on one small launch on CUDA device ``number``, each of its tools for at most ``timeout_s``
    seconds.

    Returns a case for each tool that ran, and the answer of each tool by the tool's name. Kernels that wait at
    mbarriers are not run under racecheck, which does not follow bulk copies.
    """
    record = built.record
    shapes = stress_shapes(record)
    ragged = [shape for shape in shapes if shape.m % record.bm] or shapes  # partial tiles find accesses out of bounds
    shape = max(ragged, key=lambda shape: shape.m * shape.n * shape.k)
    launch = sanitizer.launch_of(record, shape, built.artifact.directory, built.library, device.runtime_library)
    cases, answers = [], {}
    for tool in sanitizer.TOOLS[:1] if record.waits_by_mbarriers else sanitizer.TOOLS:
        answers[tool], errors = sanitizer.check(launch, tool, number, timeout_s)
        if not answers[tool].startswith(sanitizer.NOT_RUN):
            findings = [f"{tool}: {error}" for error in errors]
            cases.append(shape.case("ones", shape.ctas(record), f"compute-sanitizer {tool}", findings))
    return cases, answers
