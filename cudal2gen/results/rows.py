"""Defines the kinds of rows in the project's stores, and the speedup of one contender over another.

A ``Verdict`` says whether a binary computes right results. A ``Measurement`` holds the times of all contenders (our
kernel and the baselines) on one problem under one protocol; an ``Environment`` row before it describes the card. A
``Trial`` is a kernel that the tuner tried, an ``Algorithm`` the cuBLASLt algorithm that was fastest for a problem, and
a ``Rounding`` compares the emulator's results with a GPU's bit by bit.

The contenders of a measurement take turns on the same data, so the i-th samples of any two of them make a pair. Times
are in microseconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from cudal2gen.kernel import Acc, Layout, Problem
from cudal2gen.kernel.fusion import PLAIN, Fusion
from cudal2gen.kernel.problem import MAX_EXTENT, Batch
from cudal2gen.results.ratios import Pair, Ratio, least_ratios, paired
from kernelproof.ground.chips import model_of, tensor_flops
from kernelproof.ground.element import Element, ElementName, OutputName

ProtocolName = Literal["device", "offline", "server"]
L2 = Literal["cold", "hot", "exceeded"]
# How a tuner's trial ended. All outcomes but "measured" are failures with a reason.
Outcome = Literal["measured", "illegal", "compile error", "wrong result", "spill", "time-out", "too good"]
Effort = Literal["short", "medium", "long", "final"]  # how long a trial is timed; "final" decides between the best
Source = Literal["gpu", "replay", "model"]  # where a trial's times come from: a GPU, an earlier measurement, or a model

KERNEL, INCUMBENT = "cudal2gen", "incumbent"
# A timing's ``detail`` begins with this if a user's call measured it; ", " and a bucket's number of rows may follow.
ON_OPERANDS = "on a call's own operands"
EXCEEDED = 3  # operands of this many times the L2's size cannot stay in it, so hot and cold are the same
MIN_US = 0.5  # no sample can be shorter: an empty kernel takes about a microsecond in a CUDA graph
# A vendor interface is measured with B stored both ways; "-max" is the faster of the two, problem by problem.
DERIVED = {
    f"{name}-max": (f"{name}-nn", f"{name}-tn") for name in ("cublas", "cublaslt-heuristic", "cublaslt-autotuning")
}

# The baselines of fused, batched and grouped products. A plain product is compared with torch.matmul.
UNFUSED, EPILOGUE, BATCHED, GROUPED = "torch.unfused", "torch.epilogue", "torch.bmm", "torch.grouped_mm"

# Counters of instructions that only some kernel families have. A zero means that the kernel does not use them.
INSTRUCTIONS = frozenset({
    "mma_per_k_tile", "wgmma_per_k_tile", "tcgen05_per_k_tile", "ldmatrix_per_k_tile", "mbarrier_waits_per_k_tile",
    "bytes tma load", "bytes tma delivered", "bytes tma store",
})  # fmt: skip

# ``Verdict.on`` of the emulator, which executed PTX or machine code. If its tensor cores did not round as they do by
# default, the rounding follows after a comma (``validator.verdict_origin``).
IN_PTX, IN_MACHINE_CODE = "emulator", "emulator, machine code"

_SMS = " SMs"  # ends the name of a card that is not in ``GPUS``; see ``Environment.card``

# One sample. A time that is not positive and finite is a fault of the clock or of the file, so it is refused.
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Extent = Annotated[int, Field(ge=1, le=MAX_EXTENT)]
Products = Annotated[int, Field(ge=1, lt=2**31)]
NEUTRAL = Problem.NEUTRAL | {"products": 1, "offer": ""}  # a field with this value is not written to the file


def rivals(problem: Problem) -> tuple[str, ...]:
    """The baselines that a kernel must beat before it is chosen. The first one must have been measured; each other one
    counts only if it was measured."""
    if problem.batched:
        return (GROUPED if problem.grouped else BATCHED,)
    return (UNFUSED, EPILOGUE) if problem.fusion else ("torch.matmul", f"cublas-{stored_b(problem)}")


def stored_b(problem: Problem) -> Literal["tn", "nn"]:
    """How B is stored: the ending of the names of the vendor's baselines. They read A as the problem stores it."""
    return "tn" if problem.along_k.b else "nn"


class Line(BaseModel):
    """A row of a store, written as one line of JSON. An infinite error (the result contains NaN) is written as
    ``Infinity``."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)


class TypedRow(Line):
    """A row that names a problem's types. Fields with their ``NEUTRAL`` value, such as fp16, are not written."""

    ab: ElementName = "f16"
    d: OutputName = "same"
    batch: Batch = "none"

    @model_serializer(mode="wrap")
    def _spell(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        spelled: dict[str, Any] = handler(self)
        for name, neutral in NEUTRAL.items():
            if getattr(self, name, None) == neutral:
                spelled.pop(name, None)
        return spelled


class ProblemRow(TypedRow):
    """A row with all fields of a problem. ``products`` is the number of products (or groups) in one launch; it is 1
    unless the problem is batched."""

    fusion: Fusion = PLAIN
    products: Products = 1

    @property
    def problem(self) -> Problem:
        fields = self.__dict__
        return _problem(tuple((name, fields[name]) for name in Problem.model_fields if name in fields))


@lru_cache(maxsize=1 << 14)
def _problem(fields: tuple[tuple[str, Any], ...]) -> Problem:
    """The problem with these fields. It is cached, because many rows have the same problem and read it repeatedly."""
    return Problem.model_validate(dict(fields))


class Case(Line):
    """One execution of a verdict: the problem, the kind of inputs, what was compared and what is wrong.

    ``swizzle_stride``: the launch option in place of the record's; None for the record's own. ``max_error`` and
    ``allowed``: the absolute error of D that is nearest to its bound, and the bound; None if the criterion is no bound.
    ``ctas``: how many CTAs were executed. ``findings`` are faults; a case without findings passed.
    """

    m: Extent
    n: Extent
    k: Extent
    swizzle_stride: int | None
    inputs: str
    compared: str
    max_error: float
    allowed: float | None
    ctas: int
    findings: tuple[str, ...]
    options: dict[str, int] = {}  # launch options that replace the record's; for a batch also the number of products
    remarks: tuple[str, ...] = ()  # observations that are not faults, such as benign races

    @property
    def passed(self) -> bool:
        return not self.findings


class MachineCode(Line):
    """The machine code that a verdict executed.

    ``cubin``: SHA-256 of the cubin without source lines, which is that of the file in a pack. ``ptxas``: the version
    that assembled it, as the cubin says.
    """

    cubin: str
    ptxas: str

    @classmethod
    def of(cls, cubin: bytes) -> MachineCode:
        """The machine code of a cubin. The cubin may have its source lines or not."""
        from kernelproof.sass import assembler, without_lines  # imported late: reading results does not need it

        return cls(cubin=hashlib.sha256(without_lines(cubin)).hexdigest(), ptxas=assembler(cubin))


class Verdict(Line):
    """Whether one binary computes right results: the executed cases, and counters of its execution.

    ``on``: where it was executed: ``IN_PTX`` or ``IN_MACHINE_CODE`` in the emulator, or a GPU model. ``machine_code``:
    the cubin that the emulator executed in place of PTX; None if it executed PTX, and on GPUs. ``deterministic``:
    whether repeated runs of one problem gave the same bits; None if nothing was repeated. ``tools``: the output of
    other programs, such as compute-sanitizer, or why they did not run.
    """

    record: str
    digest: str
    on: str
    cases: tuple[Case, ...]
    counters: dict[str, float]
    machine_code: MachineCode | None = None
    deterministic: bool | None = None
    tools: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def findings(self) -> list[str]:
        """All faults, each once, with the first problem that shows it."""
        return _with_problems((case, finding) for case in self.cases for finding in case.findings)

    @property
    def remarks(self) -> list[str]:
        """All remarks, each once, with the first problem that shows it."""
        return _with_problems((case, remark) for case in self.cases for remark in case.remarks)


class _CaseFindings(BaseModel):
    """The part of a case that decides whether it passed."""

    findings: tuple[str, ...]


class Ruling(BaseModel):
    """A verdict's outcome without the details of its cases.

    It ignores the other fields of the row, so a file of verdicts is read in a third of the time.
    """

    digest: str
    on: str
    cases: tuple[_CaseFindings, ...]

    @property
    def passed(self) -> bool:
        return bool(self.cases) and not any(case.findings for case in self.cases)


def executed_in(on: str) -> str:
    """How a verdict's kernel was executed, in words: in PTX, in machine code, or on a GPU. ``on``: see ``Verdict``."""
    for place, words in ((IN_MACHINE_CODE, "in machine code"), (IN_PTX, "in PTX")):
        if on == place or on.startswith(f"{place},"):
            return words + on.removeprefix(place)
    return f"on {on}"


def executed(counters: Mapping[str, float]) -> dict[str, float]:
    """The counters of a verdict or run, without those of instructions that the kernel does not use."""
    return {name: value for name, value in counters.items() if value or name not in INSTRUCTIONS}


def _with_problems(findings: Iterable[tuple[Case, str]]) -> list[str]:
    """Each distinct finding once, after the problem and the inputs of the first case that has it."""
    lines: dict[str, str] = {}
    for case, finding in findings:
        lines.setdefault(finding, f"{case.m}_{case.n}_{case.k} {case.inputs}: {finding}")
    return list(lines.values())


class Environment(Line):
    """The card and software of a measurement. It is stored once per run, before the measurements that name its ``id``.

    ``gpu``: the card's model if it is in ``GPUS``, otherwise empty.
    """

    kind: Literal["environment"] = "environment"
    id: str
    gpu: str
    name: str
    capability: str
    sms: int
    l2_bytes: int
    memory_bytes: int
    max_sm_mhz: int
    max_memory_mhz: int
    memory_bus_bits: int
    power_limit_w: float
    ecc: bool | None
    driver: str
    versions: dict[str, str]

    @property
    def model(self) -> str:
        """The model that the card's name and number of SMs identify, empty if there is none. ``gpu`` must equal it."""
        return model_of(self.name, self.sms) or ""

    @property
    def card(self) -> str:
        """The card as trials name it: its name, followed by its number of SMs if the card is not in ``GPUS``."""
        return self.name if self.gpu else f"{self.name}, {self.sms}{_SMS}"

    @property
    def bandwidth_bytes_us(self) -> float:
        """Peak bandwidth of device memory in bytes per microsecond; 0 if the card does not report its clock or bus.

        The memory transfers twice per clock (double data rate).
        """
        return 2.0 * self.max_memory_mhz * self.memory_bus_bits / 8

    def peak_flops_us(self, acc: Acc, element: Element) -> float:
        """Dense peak of the tensor cores in FLOP per microsecond, at the card's highest clock; 0 if not known."""
        return tensor_flops(self.capability, self.name, acc == "f32", element.bytes) * self.sms * self.max_sm_mhz

    def floor_us(self, problem: Problem, cold: bool, products: int = 1) -> float:
        """A lower bound of any kernel's time in microseconds for this number of ``products``.

        It is the time of the multiply-adds at the tensor cores' peak or, with a cold L2, the time to read A and B of
        each product once from device memory, whichever is longer. Writing D does not count, since D may still be in
        the L2 when the kernel ends. The other operands of a fusion do not count either.
        """
        peak = self.peak_flops_us(problem.acc, problem.element)
        floor = problem.flops_of(products) / peak if peak else 0.0
        read = problem.element.bytes * problem.elements_of(products)
        return max(floor, read / self.bandwidth_bytes_us) if cold and self.bandwidth_bytes_us else floor


class Conditions(Line):
    """The card's clocks, power and temperature, read between the rounds of a measurement.

    ``throttle``: every reason for limited clocks that NVML reported in any of these readings.
    """

    sm_mhz: tuple[int, ...]
    memory_mhz: tuple[int, ...]
    power_w: tuple[float, ...]
    temperature_c: tuple[int, ...]
    throttle: tuple[str, ...]


class Timing(Line):
    """One contender's samples.

    ``event_us``: time per call between device events. ``wall_us``: time per call on the host's clock, for protocols
    that include the host's launch. ``padding_us``: median time of copies to and from padded matrices, which is
    included in the samples. ``calls``: number of calls in one sample. ``error``: largest |D - fp64 product| among the
    elements that are compared after the timing. ``record`` and ``digest`` identify our kernel; ``detail`` says which
    algorithm a baseline ran.
    """

    contender: str
    record: str | None = None
    digest: str | None = None
    detail: str = ""
    calls: int
    event_us: Annotated[tuple[Microseconds, ...], Field(min_length=1)]
    wall_us: tuple[Microseconds, ...] = ()
    padding_us: float | None = None
    error: float

    @property
    def samples_us(self) -> tuple[float, ...]:
        """The samples on the protocol's own clock: the host's if there are any, otherwise the device's."""
        return self.wall_us or self.event_us

    @property
    def median_us(self) -> float:
        """The median of the samples."""
        return median(self.samples_us)


def _check_sample_counts(timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
    """Returns the timings. Raises ValueError if their numbers of samples differ."""
    counts = {len(timing.samples_us): timing.contender for timing in timings}
    if len(counts) > 1:
        (few, one_contender), *_, (many, other) = sorted(counts.items())
        raise ValueError(f"{many} samples of {other} and {few} of {one_contender} make no pairs")
    return timings


# All contenders of a measurement have equally many samples: they took turns, and the i-th samples make a pair.
Timings = Annotated[tuple[Timing, ...], AfterValidator(_check_sample_counts)]


def exceeds(problem: Problem, l2_bytes: int, products: int = 1) -> bool:
    """Whether the operands are so much larger than the L2 that a hot and a cold L2 give the same times."""
    return products * problem.traffic_bytes >= EXCEEDED * l2_bytes


class Measurement(ProblemRow):
    """The times of all contenders on one problem under one protocol and in one L2 state.

    ``absent``: the contenders that have no times, each with the reason. ``l2`` is "exceeded" if one set of operands is
    larger than three times the L2, since hot and cold are then the same. ``digest``: our binary's, even if our kernel
    is absent. ``options``: the launch options of our kernel. ``offer``: if a user's call took the measurement, a digest
    of the kernels that it could choose from. ``target_qps``: mean calls per second of the protocol ``server``, else
    None. ``seed``: that of the inputs and of the contenders' order.
    """

    kind: Literal["measurement"] = "measurement"
    environment: str
    when: str
    gpu: str
    acc: Acc
    layout: Layout
    m: Extent
    n: Extent
    k: Extent
    protocol: ProtocolName
    l2: L2
    target_qps: float | None = None
    seed: int
    digest: str = ""
    options: dict[str, int] = {}
    offer: str = ""
    timings: Timings
    absent: dict[str, str] = {}
    conditions: Conditions

    @property
    def mnk(self) -> str:
        return self.problem.mnk

    @property
    def types(self) -> str:
        """Types, fusion and batch as messages show them."""
        of_batch = f" x{self.products}" if self.problem.batched else ""
        return f"{self.problem.types}{self.problem.suffix}{of_batch}"

    @property
    def flops(self) -> int:
        """Floating-point operations of all products. The operations of a fusion are not counted."""
        return self.problem.flops_of(self.products)

    @property
    def traffic_bytes(self) -> int:
        """Bytes between device memory and the chip if every operand of every product moves once."""
        return self.problem.traffic_of(self.products)

    def timing(self, contender: str) -> Timing | None:
        """A contender's timing; None if it is absent.

        A derived contender such as ``cublas-max`` has the timing of the faster of its two parts, and is absent unless
        both were timed.
        """
        names = DERIVED.get(contender, (contender,))
        timings = [timing for timing in self.timings if timing.contender in names]
        return min(timings, key=lambda timing: timing.median_us) if len(timings) == len(names) else None

    @property
    def contenders(self) -> list[str]:
        """The names of all measured contenders, our kernel first, followed by the derived ones."""
        measured = [timing.contender for timing in self.timings]
        derived = [name for name, parts in DERIVED.items() if set(parts) <= set(measured)]
        return [*sorted(measured, key=lambda name: name != KERNEL), *derived]


class Trial(ProblemRow):
    """A record that a tuner proposed, and how its trial ended.

    ``timings``: samples of the kernel, of the incumbent (the best kernel so far) and of the baselines, taken in turns;
    empty if the trial failed, in which case ``reason`` names the fault. ``on``: the GPU that timed it
    (``Environment.card``) or the name of the timing model that estimated it. ``gpu``: the model that the record is
    made for, which need not be that of the card. ``run``: the tuner's run. ``max_diff``: the largest error of D.
    """

    kind: Literal["trial"] = "trial"
    environment: Source
    on: str
    run: str
    gpu: str
    acc: Acc
    layout: Layout
    m: Extent
    n: Extent
    k: Extent
    proposer: str
    name: str
    record: dict[str, Any]
    digest: str = ""
    effort: Effort = "short"
    outcome: Outcome
    reason: str = ""
    max_diff: float = 0.0
    timings: Timings = ()

    @property
    def measured(self) -> bool:
        return self.outcome == "measured"

    @property
    def on_its_gpu(self) -> bool:
        """Whether a GPU of the model that the record is made for measured it."""
        unknown_model = self.on.endswith(_SMS)
        return self.environment == "gpu" and not unknown_model and model_of(self.on) == self.gpu

    def timing(self, contender: str = KERNEL) -> Timing | None:
        """A contender's samples; None if it was not timed."""
        return next((timing for timing in self.timings if timing.contender == contender), None)

    @property
    def median_us(self) -> float:
        """The kernel's median time; infinite for a failure, so a failure compares as the slowest."""
        kernel = self.timing()
        return kernel.median_us if kernel else math.inf

    @property
    def cost(self) -> float:
        """What a search minimises: the kernel's time divided by the incumbent's, or its own time without an incumbent.

        The two took turns, so drift of clocks and temperature cancels in the quotient.
        """
        incumbent = self.timing(INCUMBENT)
        return self.median_us / incumbent.median_us if incumbent else self.median_us

    @property
    def baseline(self) -> str | None:
        """The name of the fastest baseline; None if none was timed."""
        others = [timing for timing in self.timings if timing.contender not in (KERNEL, INCUMBENT)]
        return min(others, key=lambda timing: timing.median_us).contender if others else None

    def faster_than(self, contender: str) -> Ratio | None:
        """The kernel's speedup over a contender, with its interval; None if one of them has no samples."""
        kernel, other = self.timing(), self.timing(contender)
        return paired(other.samples_us, kernel.samples_us) if kernel and other else None


class Algorithm(TypedRow):
    """The fastest cuBLASLt algorithm of one problem on one card.

    ``name``: the card's. ``library``: the version of cuBLASLt. ``blob``: the library's opaque description of the
    algorithm, in hexadecimal. ``candidates``: how many algorithms were timed. ``rank``: the winner's place (from 0) in
    the order of the library's heuristic.
    """

    kind: Literal["algorithm"] = "algorithm"
    name: str
    library: str
    acc: Acc
    layout: Layout
    m: Extent
    n: Extent
    k: Extent
    blob: str
    workspace_bytes: int
    candidates: int
    rank: int
    median_us: float

    @property
    def key(self) -> tuple[str | int, ...]:
        """The card, the library's version, and the kind and sizes of the problem."""
        return self.key_of(dict(self))

    @staticmethod
    def key_of(fields: Mapping[str, Any]) -> tuple[str | int, ...]:
        """The key of an algorithm with these fields."""
        return tuple(fields[name] for name in ("name", "library", *Problem.KIND, "m", "n", "k"))


class Rounding(TypedRow):
    """One binary's results on a GPU (``on``) compared bit by bit with the emulator's, for the same inputs.

    ``differing``: share of elements that differ. ``max_ulp``: largest difference in units of D's last place.
    ``models``: for each candidate model of the tensor cores' rounding, the share of ``compared`` elements that it
    predicts; empty for inputs on which no rounding occurs.
    """

    kind: Literal["rounding"] = "rounding"
    on: str
    record: str
    digest: str
    family: str
    acc: Acc
    m: Extent
    n: Extent
    k: Extent
    inputs: str
    differing: float
    max_ulp: int
    compared: int = 0
    models: dict[str, float] = {}

    @property
    def best(self) -> list[str]:
        """The models that predict the most elements. There are several if the inputs do not distinguish them."""
        most = max(self.models.values(), default=0.0)
        return [name for name, share in self.models.items() if share == most]


def speedup(measurement: Measurement, baseline: str, contender: str = KERNEL) -> Ratio | None:
    """A contender's speedup: the baseline's time over the contender's. None if one of them is absent."""
    return speedups([measurement], baseline, contender)[0]


def speedups(rows: Iterable[Measurement], baseline: str, contender: str = KERNEL) -> list[Ratio | None]:
    """The ``speedup`` of each measurement. They are computed together, a thousand in a fraction of a second."""
    return least_ratios([_pairs(row, baseline, contender) for row in rows])


def _pairs(row: Measurement, baseline: str, contender: str) -> list[Pair] | None:
    """The samples of the baseline and the contender, one pair for each part of a derived baseline; None if one of them
    is absent."""
    fast, slow = row.timing(contender), [row.timing(name) for name in DERIVED.get(baseline, (baseline,))]
    if fast is None or None in slow:
        return None
    return [(timing.samples_us, fast.samples_us) for timing in slow if timing]
