"""The schema of a profile, and so of ``profile --json``. Every figure is modelled; nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from cudal2gen.errors import WrongInput, parse_json, reading
from cudal2gen.kernel import explain
from cudal2gen.kernel.schema import Schema

VERSION: Literal[1] = 1
ISSUED = "selected"  # the reason of an issue slot
Kind = TypeVar("Kind", bound=Schema)
Cycles = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]  # a fraction: 1 is all
Count = Annotated[int, Field(ge=0)]
Microseconds = Annotated[float, Field(ge=0)]


class Line(Schema):
    """One instruction of the main loop, in the order of addresses."""

    address: Annotated[Count, Field(description="in its function, bytes")]
    sass: Annotated[str, Field(description="guard, opcode and operands")]
    pipe: Annotated[str, Field(description="the unit that executes it")]
    busy: Annotated[Cycles, Field(description="cycles that it takes the pipe")]
    stalls: Annotated[
        dict[str, Cycles],
        Field(description="cycles that a warp waits before it in a turn, by Nsight Compute's reasons, in the mean"),
    ]
    live: Annotated[Count, Field(description="registers of a thread that are in use")]
    conflicts: Annotated[Cycles, Field(description="by which its operands' register bank outlasts its pipe")]
    unread: Annotated[bool, Field(description="whether it does nothing but write registers that nobody reads")]
    file: Annotated[str | None, Field(description="of its CUDA; null without -lineinfo")]
    line: Annotated[int | None, Field(description="of that file, from 1")]
    cuda: Annotated[str | None, Field(description="that line's text, where the file is there")]


class Issue(Schema):
    """A warp issues an instruction."""

    warp: Annotated[Count, Field(description="of the scheduler, from 0")]
    line: Annotated[Count, Field(description="index in lines")]
    cycle: Annotated[Cycles, Field(description="from the first of the turns")]
    stalls: Annotated[dict[str, Cycles], Field(description="cycles that the warp waits before, in the order of time")]


def spans(cycle: float, stalls: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """What a warp waits for before it issues in ``cycle``, in the order of time, and its slot: reason, first, end."""
    at = cycle - sum(stalls.values())
    for reason, cycles in stalls.items():
        yield reason, at, at + cycles
        at += cycles
    yield ISSUED, cycle, cycle + 1


class Loop(Schema):
    """The main loop in its steady state, of the warps that share a scheduler (a quarter of an SM)."""

    unit: Annotated[Literal["k-tile", "turn"], Field(description="what the figures are of; turn: of the loop")]
    rolled: Annotated[bool, Field(description="false where the main loop is straight code")]
    warps: Annotated[Count, Field(description="that share the scheduler")]
    cycles: Annotated[Cycles, Field(description="from one unit to the next, of all these warps")]
    tensor_cycles: Annotated[Cycles, Field(description="of them with a busy tensor core: the bound")]
    bound: Annotated[str, Field(description="a pipe that is busy 85 % of the time or more, else the largest of idle")]
    issue_slots: Annotated[float, Field(ge=0, description="instructions of all these warps")]
    opcodes: Annotated[dict[str, float], Field(description="the same by opcode")]
    pipes: Annotated[dict[str, Share], Field(description="share of the time that each is busy")]
    live_registers: Annotated[Count, Field(description="of a thread, in use at most")]
    bank_conflicts: Annotated[Cycles, Field(description="that instructions wait for register banks")]
    unread: Annotated[float, Field(ge=0, description="instructions that only write what nobody reads")]
    stalls: Annotated[dict[str, Share], Field(description="share of all warps' cycles by Nsight Compute's reasons")]
    idle: Annotated[
        dict[str, Share], Field(description="the same, of warps that multiply, while the tensor core idles")
    ]


class Occupancy(Schema):
    """How many CTAs an SM holds."""

    threads: Annotated[Count, Field(description="of a CTA")]
    registers: Annotated[Count, Field(description="of a thread")]
    smem_bytes: Annotated[Count, Field(description="of a CTA, static and dynamic")]
    ctas: Annotated[Count, Field(description="resident on an SM at most")]
    room: Annotated[dict[str, int], Field(description="CTAs that registers, shared memory, threads, blocks allow")]
    limits: Annotated[tuple[str, ...], Field(description="those that allow the fewest")]
    warps: Annotated[float, Field(ge=0, description="resident on a scheduler at most")]
    most_registers: Annotated[int | None, Field(description="registers of a thread at which one CTA more has room")]
    most_smem_bytes: Annotated[int | None, Field(description="bytes of a CTA at which one CTA more has room")]


class Time(Schema):
    """The modelled time of a launch."""

    us: Annotated[Microseconds, Field(description="microseconds, the sum of parts")]
    parts: Annotated[dict[str, Microseconds], Field(description="launch, prologue, main loop, epilogue, ..")]
    bounds: Annotated[dict[str, Microseconds], Field(description="what each resource takes for the main loop alone")]
    bound: Annotated[str, Field(description="device memory, or what bounds the main loop")]
    ctas: Annotated[Count, Field(description="of the grid")]
    waves: Annotated[float, Field(ge=0, description="CTAs over those that the GPU holds at a time")]
    tail_share: Annotated[Share, Field(description="of the SMs' time that passes without a CTA at the end")]
    floor_us: Annotated[Microseconds, Field(description="what FLOP or bytes, and the launch, take at the least")]


class Advice(Schema):
    """The model with one input changed."""

    change: Annotated[str, Field(description="of the input")]
    figure: Annotated[Literal["time", "main loop"], Field(description="what changes: microseconds, or cycles")]
    form: Annotated[
        Literal["machine code", "cheap form"],
        Field(description="of the model: simulated instructions, or formulas; their figures differ"),
    ]
    before: Annotated[float, Field(description="the figure as it is")]
    after: Annotated[float, Field(description="the figure after the change")]

    @property
    def gain(self) -> float:
        """The share by which the figure falls."""
        return 1 - self.after / self.before


class Role(Schema):
    """What warps of one role issue, counted in the machine code."""

    name: Annotated[str, Field(description="loads, multiplies or stores")]
    warps: Annotated[Count, Field(description="of a CTA that have the role")]
    unit: Annotated[str, Field(description="what the counts are of: a k-tile, or columns of an accumulator")]
    instructions: Annotated[float, Field(ge=0, description="of one such warp")]
    pipes: Annotated[dict[str, float], Field(description="the same by the unit that executes them")]
    opcodes: Annotated[dict[str, float], Field(description="the same by opcode")]


class Ring(Schema):
    """Stages of shared memory, what fills and reads them, and tensor memory."""

    stages: Annotated[Count, Field(description="k-tiles in shared memory")]
    tile_bytes: Annotated[Count, Field(description="of a k-tile, as TMA brings it into a CTA's shared memory")]
    l2_bytes: Annotated[float, Field(ge=0, description="of a k-tile that a CTA asks of the L2; others bring the rest")]
    copies: Annotated[Count, Field(description="instructions of TMA for a k-tile")]
    products: Annotated[Count, Field(description="instructions that multiply a k-tile")]
    tensor_columns: Annotated[Count, Field(description="of tensor memory that a CTA allocates, of 512")]
    accumulators: Annotated[Count, Field(description="tiles of D that these hold")]


class Profile(Schema):
    """A kernel's profile."""

    kind: Annotated[Literal["profile"], Field(description="of document")]
    version: Annotated[Literal[1], Field(description="of this schema")]
    modelled: Annotated[Literal[True], Field(description="every figure is modelled, none is measured")]
    kernel: Annotated[str, Field(description="the function's name")]
    arch: Annotated[str, Field(description="that its machine code is for")]
    gpu: Annotated[str, Field(description="whose rates the model uses")]
    problem: Annotated[str | None, Field(description="M_N_K, acc and layout of a record")]
    registers: Annotated[Count, Field(description="of a thread, by ptxas")]
    spill_bytes: Annotated[Count, Field(description="of a thread's loads and stores to local memory")]
    instructions: Annotated[Count, Field(description="of the function")]
    loop: Annotated[Loop, Field(description="the main loop")]
    occupancy: Annotated[Occupancy | None, Field(description="null without a launch")]
    time: Annotated[Time | None, Field(description="null without a launch")]
    advice: Annotated[tuple[Advice, ...], Field(description="what would help, what helps most first")]
    lines: Annotated[tuple[Line, ...], Field(description="the main loop's machine code")]
    issues: Annotated[tuple[Issue, ...], Field(description="of some turns, in the order of time")]
    roles: Annotated[tuple[Role, ...], Field(description="of a kernel with tensor memory; else none")] = ()
    ring: Annotated[Ring | None, Field(description="of a kernel with tensor memory; else null")] = None
    limits: Annotated[tuple[str, ...], Field(description="what is not modelled of this kernel, in words")] = ()

    @property
    def title(self) -> str:
        """The problem and the GPU, for headings."""
        return f"{self.problem or self.kernel} on {self.gpu}"


def load(path: Path) -> Profile:
    """A profile that ``--json`` wrote. Raises WrongInput."""
    content = read_object(path, "'cudal2gen profile --json' writes a profile")
    if content.get("kind") != "profile":
        raise WrongInput(f"{path}: is no profile; 'cudal2gen profile --json' writes one")
    if content.get("version") != VERSION:
        raise WrongInput(f"{path}: is a profile of version {content.get('version')}, this program reads {VERSION}")
    return validated(Profile, path, content)


def read_object(path: Path, hint: str) -> dict[str, object]:
    """The JSON object in a file; ``hint``: what makes such a file. Raises WrongInput."""
    with reading(path):
        text = path.read_bytes()
    try:
        content = parse_json(text)
    except WrongInput as error:
        raise WrongInput(f"{path}: {error}; {hint}") from None
    if not isinstance(content, dict):
        raise WrongInput(f"{path}: is no object; {hint}")
    return content


def validated(schema: type[Kind], path: Path, content: dict[str, object]) -> Kind:
    """What a file's object spells. Raises WrongInput that names the file and the field."""
    try:
        return schema.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise WrongInput(f"{path}: {explain(error)}") from None
