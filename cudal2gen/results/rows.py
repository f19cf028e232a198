"""Rows of a store: verdicts, measurements, tuned vendor algorithms, a tuner's trials, and speedups between contenders.

Times are in microseconds. A measurement is one problem under one protocol: every contender's samples, taken in turns on
the same data, so that the i-th samples of two contenders make a pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
from cudal2gen.results.ratios import Pair, Ratio, least_each, paired
from kernelproof.ground.chips import model_of, tensor_flops
from kernelproof.ground.element import Element, ElementName, OutputName

ProtocolName = Literal["device", "offline", "server"]
L2 = Literal["cold", "hot", "exceeded"]
# How a trial of a proposed record ended. All outcomes but "measured" are failures with a reason.
Outcome = Literal["measured", "illegal", "compile error", "wrong result", "spill", "time-out", "too good"]
Effort = Literal["short", "medium", "long", "final"]
Source = Literal["gpu", "replay", "model"]  # where a trial's times come from: a GPU, an earlier measurement, or a model

KERNEL, INCUMBENT = "cudal2gen", "incumbent"
ON_OPERANDS = "on a call's own operands"  # a timing's detail where a call measured it; for a bucket its rows follow
MIN_US = 0.5  # a kernel that does nothing takes a microsecond in a CUDA graph
# A vendor interface is measured with B stored both ways; "-max" is the faster of the two, problem by problem.
DERIVED = {
    f"{name}-max": (f"{name}-nn", f"{name}-tn") for name in ("cublas", "cublaslt-heuristic", "cublaslt-autotuning")
}

# Baselines of fused, batched and grouped products; of plain ones it is torch.matmul.
UNFUSED, EPILOGUE, BATCHED, GROUPED = "torch.unfused", "torch.epilogue", "torch.bmm", "torch.grouped_mm"

# Counters of instructions that a kernel may not have at all.
INSTRUCTIONS = frozenset({
    "mma_per_k_tile", "wgmma_per_k_tile", "tcgen05_per_k_tile", "ldmatrix_per_k_tile", "mbarrier_waits_per_k_tile",
    "bytes tma load", "bytes tma delivered", "bytes tma store",
})  # fmt: skip

_SMS = " SMs"  # ends the name of a card that is no model

# A sample; zeros, NaN and infinities are faults of the clock or of the file.
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Extent = Annotated[int, Field(ge=1, le=MAX_EXTENT)]
Products = Annotated[int, Field(ge=1, lt=2**31)]
NEUTRAL = Problem.NEUTRAL | {"products": 1, "offer": ""}  # fields with these values are left out of a row


def rivals(problem: Problem) -> tuple[str, ...]:
    """The contenders that a kernel must beat before it is chosen; the first of them must have been measured."""
    if problem.batched:
        return (GROUPED if problem.grouped else BATCHED,)
    return (UNFUSED, EPILOGUE) if problem.fusion else ("torch.matmul", f"cublas-{problem.layout}")


class Line(BaseModel):
    """A row of a store: one line of JSON. Infinite errors, which a NaN in D gives, stay infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)


class Typed(Line):
    """A row about a problem, whose types it spells where they are not fp16."""

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


class Posed(Typed):
    """A row with all fields of a problem. ``products``: how many a launch computed, more than one of a batch only."""

    fusion: Fusion = PLAIN
    products: Products = 1

    @property
    def problem(self) -> Problem:
        fields = dict(self)
        return Problem.model_validate({name: fields[name] for name in Problem.model_fields if name in fields})


class Case(Line):
    """One execution: problem, inputs, what was compared, what is wrong. Errors are absolute, in D's units."""

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
    options: dict[str, int] = {}  # launch options that replace the record's own; for a batch also its products
    remarks: tuple[str, ...] = ()  # findings that are no errors: benign, or lint

    @property
    def passed(self) -> bool:
        return not self.findings


class Verdict(Line):
    """Whether one binary is right: its cases, and the counters of its execution.

    ``on``: the emulator, or a GPU's model. ``deterministic``: whether runs of one problem gave the same bits; None
    where each ran once. ``tools``: the output of other programs, such as compute-sanitizer, or why they did not run.
    """

    record: str
    digest: str
    on: str
    cases: tuple[Case, ...]
    counters: dict[str, float]
    deterministic: bool | None = None
    tools: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def findings(self) -> list[str]:
        """All findings, each once, with the first problem that shows it."""
        return _with_problems((case, finding) for case in self.cases for finding in case.findings)

    @property
    def remarks(self) -> list[str]:
        """Benign and odd findings, each once, with the first problem that shows it."""
        return _with_problems((case, remark) for case in self.cases for remark in case.remarks)


class _Judged(BaseModel):
    findings: tuple[str, ...]


class Ruling(BaseModel):
    """What a verdict comes to, without its cases' details; read in a third of the time. Other fields of a row are not
    looked at."""

    digest: str
    on: str
    cases: tuple[_Judged, ...]

    @property
    def passed(self) -> bool:
        return bool(self.cases) and not any(case.findings for case in self.cases)


def executed(counters: Mapping[str, float]) -> dict[str, float]:
    """A verdict's or a run's counters without the instructions that the kernel does not have."""
    return {name: value for name, value in counters.items() if value or name not in INSTRUCTIONS}


def _with_problems(findings: Iterable[tuple[Case, str]]) -> list[str]:
    lines: dict[str, str] = {}
    for case, finding in findings:
        lines.setdefault(finding, f"{case.m}_{case.n}_{case.k} {case.inputs}: {finding}")
    return list(lines.values())


class Environment(Line):
    """What a measurement depends on besides the kernel. Stored once per run, before its measurements.

    ``gpu``: the card's model in ``GPUS``, empty for another card.
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
        """The model that a card of this name and with so many SMs is; what ``gpu`` must say."""
        return model_of(self.name, self.sms) or ""

    @property
    def card(self) -> str:
        """The card as trials name it: by its name, and where it is no model also by its SMs."""
        return self.name if self.gpu else f"{self.name}, {self.sms}{_SMS}"

    @property
    def bandwidth_bytes_us(self) -> float:
        """Peak bandwidth of device memory, two transfers a clock; 0 where the card does not report it."""
        return 2.0 * self.max_memory_mhz * self.memory_bus_bits / 8

    def peak_flops_us(self, acc: Acc, element: Element) -> float:
        """Dense peak of the tensor cores on such elements, at the highest clock the card allows; 0 if not known."""
        return tensor_flops(self.capability, self.name, acc == "f32", element.bytes) * self.sms * self.max_sm_mhz

    def floor_us(self, problem: Problem, cold: bool, products: int = 1) -> float:
        """A lower bound of any kernel's time in microseconds for so many ``products``: the MMAs at peak; from a cold
        L2, A and B of each once through device memory.

        D does not count, since it may stay in the L2 until after the kernel; nor does what a fused kernel reads beside.
        """
        peak = self.peak_flops_us(problem.acc, problem.element)
        floor = problem.flops_of(products) / peak if peak else 0.0
        read = problem.element.bytes * problem.elements_of(products)
        return max(floor, read / self.bandwidth_bytes_us) if cold and self.bandwidth_bytes_us else floor


class Conditions(Line):
    """The card while a measurement ran, read between rounds. ``throttle``: NVML's reasons seen in any of them."""

    sm_mhz: tuple[int, ...]
    memory_mhz: tuple[int, ...]
    power_w: tuple[float, ...]
    temperature_c: tuple[int, ...]
    throttle: tuple[str, ...]


class Timing(Line):
    """One contender's samples. ``event_us``: between device events, per call; ``wall_us``: the host's clock, where the
    protocol has the host's launch inside; ``padding_us``: what of it is copying to and from padded matrices (median).

    ``calls``: calls in a sample. ``error``: largest |D - fp64 product| of the rows and columns that are compared after
    the timing. ``record`` and ``digest`` are our kernel's; ``detail`` says what a baseline really ran.
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
        """Of the protocol's own clock: the host's where it was kept, else the device's."""
        return self.wall_us or self.event_us

    @property
    def median_us(self) -> float:
        """The median of the samples."""
        return median(self.samples_us)


def _in_turns(timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
    counts = {len(timing.samples_us): timing.contender for timing in timings}
    if len(counts) > 1:
        (few, one_contender), *_, (many, other) = sorted(counts.items())
        raise ValueError(f"{many} samples of {other} and {few} of {one_contender} make no pairs")
    return timings


# Contenders took turns, so the i-th samples of any two of them make a pair.
Timings = Annotated[tuple[Timing, ...], AfterValidator(_in_turns)]


class Measurement(Posed):
    """One problem under one protocol. ``absent``: contenders that could not run, and why.

    ``l2`` is ``exceeded`` where one set of operands is larger than three times the L2: hot and cold are then the same.
    ``digest``: our binary's, also where it is absent; ``options``: the data that it was launched with. ``offer``: of a
    race during calls, a digest of the kernels that there were to choose from.
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
        """Types, fusion and batch in words."""
        of_batch = f" x{self.products}" if self.problem.batched else ""
        return f"{self.problem.types}{self.problem.suffix}{of_batch}"

    @property
    def flops(self) -> int:
        """Operations of all products; fused parts count nothing."""
        return self.problem.flops_of(self.products)

    @property
    def traffic_bytes(self) -> int:
        """Each operand of each product once between device memory and the chip."""
        return self.problem.traffic_of(self.products)

    def timing(self, contender: str) -> Timing | None:
        """A contender's timing; of a derived one (``cublas-max``) the faster of its two. None where it is absent."""
        names = DERIVED.get(contender, (contender,))
        timings = [timing for timing in self.timings if timing.contender in names]
        return min(timings, key=lambda timing: timing.median_us) if len(timings) == len(names) else None

    @property
    def contenders(self) -> list[str]:
        """Measured and derived ones, our kernel first."""
        measured = [timing.contender for timing in self.timings]
        derived = [name for name, parts in DERIVED.items() if set(parts) <= set(measured)]
        return [*sorted(measured, key=lambda name: name != KERNEL), *derived]


class Trial(Posed):
    """A record that a tuner proposed, and how its trial ended. ``timings``: the kernel's, the incumbent's and the
    baselines' samples, taken in turns; empty for a failure, whose ``reason`` names the fault.

    ``on``: the GPU (``Environment.card``), or the name of an analytic model, whose times are computed. ``gpu``: the
    model that the record is for, which on another card stands in. ``run``: the run of the tuner that proposed it.
    ``max_diff``: the timing's ``error``, in D's units.
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
        """Whether a GPU of the record's own model measured it."""
        stranger = self.on.endswith(_SMS)
        return self.environment == "gpu" and not stranger and model_of(self.on) == self.gpu

    def timing(self, contender: str = KERNEL) -> Timing | None:
        """A contender's samples; None where it was not timed."""
        return next((timing for timing in self.timings if timing.contender == contender), None)

    @property
    def median_us(self) -> float:
        """The kernel's median time; infinite for a failure, so a failure compares as the slowest."""
        kernel = self.timing()
        return kernel.median_us if kernel else math.inf

    @property
    def cost(self) -> float:
        """What a search minimises: the kernel's time over the incumbent's, which cancels drift; alone, its own time."""
        incumbent = self.timing(INCUMBENT)
        return self.median_us / incumbent.median_us if incumbent else self.median_us

    @property
    def baseline(self) -> str | None:
        """The fastest contender beside the kernel and the incumbent; None where there is none."""
        others = [timing for timing in self.timings if timing.contender not in (KERNEL, INCUMBENT)]
        return min(others, key=lambda timing: timing.median_us).contender if others else None

    def faster_than(self, contender: str) -> Ratio | None:
        """The contender's time over the kernel's, with its interval; None where one of them has no samples."""
        kernel, other = self.timing(), self.timing(contender)
        return paired(other.samples_us, kernel.samples_us) if kernel and other else None


class Algorithm(Typed):
    """The cuBLASLt algorithm that won for one problem. ``blob``: the library's opaque description, in hex."""

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
        """The card, library, and kind and sizes of the problem that it was tuned for."""
        return self.key_of(dict(self))

    @staticmethod
    def key_of(fields: Mapping[str, Any]) -> tuple[str | int, ...]:
        """The key of an algorithm with these fields."""
        return tuple(fields[name] for name in ("name", "library", *Problem.KIND, "m", "n", "k"))


class Rounding(Typed):
    """Two executions of one binary on the same inputs compared bit by bit: by ``on`` and by the emulator.

    ``differing``: share of elements; ``max_ulp``: in units of D's last place. ``models``: for each way in which tensor
    cores might round, the share of ``compared`` elements that it predicts; empty for inputs that are exact in all.
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
        """The models that predict most elements; several where the inputs do not distinguish them."""
        most = max(self.models.values(), default=0.0)
        return [name for name, share in self.models.items() if share == most]


def speedup(measurement: Measurement, baseline: str, contender: str = KERNEL) -> Ratio | None:
    """The baseline's time over the contender's. None where one of them is absent."""
    return speedups([measurement], baseline, contender)[0]


def speedups(rows: Iterable[Measurement], baseline: str, contender: str = KERNEL) -> list[Ratio | None]:
    """``speedup`` of each measurement; a thousand of them in a fraction of a second."""
    return least_each([_pairs(row, baseline, contender) for row in rows])


def _pairs(row: Measurement, baseline: str, contender: str) -> list[Pair] | None:
    """The protocol's samples of two contenders, a pair for each part of a derived baseline; None where one lacks."""
    fast, slow = row.timing(contender), [row.timing(name) for name in DERIVED.get(baseline, (baseline,))]
    if fast is None or None in slow:
        return None
    return [(timing.samples_us, fast.samples_us) for timing in slow if timing]
