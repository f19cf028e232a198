"""Defines the schema of a profile and of ``profile --json``. All figures are modelled, none is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from kernelproof.ground.errors import WrongInput, parse_json, reading
from kernelproof.ground.schema import Schema, explain

VERSION: Literal[1] = 1
ISSUED = "selected"  # the state of a warp in the cycle in which it issues
Kind = TypeVar("Kind", bound=Schema)
Cycles = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]  # a fraction; 1 is all
Count = Annotated[int, Field(ge=0)]
Microseconds = Annotated[float, Field(ge=0)]


class Line(Schema):
    """One instruction of the main loop. Lines are in the order of addresses."""

    address: Annotated[Count, Field(description="Offset in its function, bytes")]
    sass: Annotated[str, Field(description="Guard, opcode and operands")]
    pipe: Annotated[str, Field(description="The unit that executes it")]
    busy: Annotated[Cycles, Field(description="Cycles for which it occupies the unit")]
    stalls: Annotated[
        dict[str, Cycles],
        Field(description="Cycles that a warp waits before it, by Nsight Compute's reasons; the mean over its issues"),
    ]
    live: Annotated[Count, Field(description="Registers per thread that are in use")]
    conflicts: Annotated[
        Cycles, Field(description="Cycles that it waits for register banks because its operands share one")
    ]
    unread: Annotated[bool, Field(description="Whether it only writes registers that no instruction reads")]
    file: Annotated[str | None, Field(description="File of its CUDA line; null without -lineinfo")]
    line: Annotated[int | None, Field(description="Number of its CUDA line in the file, from 1")]
    cuda: Annotated[str | None, Field(description="Text of its CUDA line; null if the file is not there")]


class Issue(Schema):
    """A warp issues an instruction."""

    warp: Annotated[Count, Field(description="Number of the scheduler's warp, from 0")]
    line: Annotated[Count, Field(description="Index of the instruction in lines")]
    cycle: Annotated[Cycles, Field(description="Cycle, counted from the first of the iterations")]
    stalls: Annotated[
        dict[str, Cycles], Field(description="Cycles that the warp waits before it, by reason, in the order of time")
    ]


def spans(cycle: float, stalls: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yields the spans in which a warp waits before it issues in ``cycle``, and that of the issue.

    Each span is a reason (``ISSUED`` for the issue), a first cycle and an end. ``stalls``: cycles by reason, in the
    order of time.
    """
    at = cycle - sum(stalls.values())
    for reason, cycles in stalls.items():
        yield reason, at, at + cycles
        at += cycles
    yield ISSUED, cycle, cycle + 1


class MainLoop(Schema):
    """The main loop in its steady state, for the warps that share a scheduler (a quarter of an SM)."""

    unit: Annotated[
        Literal["k-tile", "iteration"],
        Field(description="The unit that figures are per: a k-tile, or an iteration of the loop"),
    ]
    rolled: Annotated[bool, Field(description="Whether the main loop is a loop; false if k is unrolled")]
    warps: Annotated[Count, Field(description="Warps that share the scheduler")]
    cycles: Annotated[Cycles, Field(description="Cycles in which all these warps compute one unit each")]
    tensor_cycles: Annotated[
        Cycles, Field(description="Cycles of a unit in which the tensor core is busy, which bound it from below")
    ]
    bound: Annotated[
        str, Field(description="A pipe that is busy 85 % of the time or more, else latency and the largest of idle")
    ]
    issue_slots: Annotated[float, Field(ge=0, description="Instructions that all these warps issue per unit")]
    opcodes: Annotated[
        dict[str, float], Field(description="Instructions that all these warps issue per unit, by opcode")
    ]
    pipes: Annotated[dict[str, Share], Field(description="Share of the time that each pipe is busy")]
    live_registers: Annotated[Count, Field(description="Registers per thread that are in use at most")]
    bank_conflicts: Annotated[Cycles, Field(description="Cycles per unit that instructions wait for register banks")]
    unread: Annotated[
        float, Field(ge=0, description="Instructions per unit that only write registers that no instruction reads")
    ]
    stalls: Annotated[dict[str, Share], Field(description="Share of all warps' cycles, by Nsight Compute's reasons")]
    idle: Annotated[
        dict[str, Share],
        Field(description="Share of the cycles of warps with MMAs while the tensor core idles, by the same reasons"),
    ]


class Occupancy(Schema):
    """How many CTAs an SM holds."""

    threads: Annotated[Count, Field(description="Threads of a CTA")]
    registers: Annotated[Count, Field(description="Registers of a thread")]
    smem_bytes: Annotated[Count, Field(description="Bytes of shared memory of a CTA, static and dynamic")]
    ctas: Annotated[Count, Field(description="CTAs resident on an SM at most")]
    room: Annotated[dict[str, int], Field(description="CTAs that fit by registers, shared memory, threads and blocks")]
    limits: Annotated[tuple[str, ...], Field(description="Resources that allow the fewest CTAs")]
    warps: Annotated[float, Field(ge=0, description="Warps resident on a scheduler at most")]
    most_registers: Annotated[
        int | None, Field(description="Most registers per thread with which one more CTA fits; null if none does")
    ]
    most_smem_bytes: Annotated[
        int | None, Field(description="Most bytes per CTA with which one more CTA fits; null if none does")
    ]


class Time(Schema):
    """The modelled time of a launch."""

    us: Annotated[Microseconds, Field(description="Microseconds, the sum of parts")]
    parts: Annotated[
        dict[str, Microseconds],
        Field(description="Microseconds of each part: launch, prologue, main loop, epilogue and others"),
    ]
    bounds: Annotated[
        dict[str, Microseconds], Field(description="Microseconds that the main loop needs of each resource alone")
    ]
    bound: Annotated[str, Field(description="What bounds the launch: device memory, or the main loop's bound")]
    ctas: Annotated[Count, Field(description="CTAs of the grid")]
    waves: Annotated[float, Field(ge=0, description="CTAs divided by those that the GPU holds at a time")]
    tail_share: Annotated[Share, Field(description="Share of the SMs' time that is idle at the end")]
    floor_us: Annotated[Microseconds, Field(description="Microseconds that FLOP or bytes, and a launch, take at least")]


class Advice(Schema):
    """A change of one input of the model, with a figure before and after it."""

    change: Annotated[str, Field(description="The change of the input")]
    figure: Annotated[Literal["time", "main loop"], Field(description="What changes: microseconds, or cycles")]
    form: Annotated[
        Literal["machine code", "cheap form"],
        Field(description="Form of the model: simulated machine code, or formulas (cheap form). Their figures differ"),
    ]
    before: Annotated[float, Field(description="The figure without the change")]
    after: Annotated[float, Field(description="The figure with the change")]

    @property
    def gain(self) -> float:
        """The share by which the figure falls."""
        return 1 - self.after / self.before


class WarpRole(Schema):
    """What the warps of one role issue, counted in the machine code."""

    name: Annotated[str, Field(description="What the role does: loads, multiplies or stores")]
    warps: Annotated[Count, Field(description="Warps of a CTA that have the role")]
    unit: Annotated[str, Field(description="What the counts are of: a k-tile, or columns of an accumulator")]
    instructions: Annotated[float, Field(ge=0, description="Instructions of one such warp")]
    pipes: Annotated[
        dict[str, float], Field(description="Instructions of one such warp by the unit that executes them")
    ]
    opcodes: Annotated[dict[str, float], Field(description="Instructions of one such warp by opcode")]


class Ring(Schema):
    """The ring in shared memory, the instructions that fill and read it, and tensor memory."""

    stages: Annotated[Count, Field(description="K-tiles in shared memory")]
    tile_bytes: Annotated[Count, Field(description="Bytes of a k-tile, as TMA brings it into a CTA's shared memory")]
    l2_bytes: Annotated[
        float,
        Field(
            ge=0, description="Bytes of a k-tile that a CTA loads from the L2; multicast of other CTAs brings the rest"
        ),
    ]
    copies: Annotated[Count, Field(description="TMA instructions per k-tile")]
    products: Annotated[Count, Field(description="MMAs per k-tile")]
    tensor_columns: Annotated[Count, Field(description="Columns of tensor memory that a CTA allocates, of 512")]
    accumulators: Annotated[Count, Field(description="Tiles of D that the columns of tensor memory hold")]


class Hazard(Schema):
    """An instruction that uses registers of an earlier one too early, which the hardware does not detect."""

    earlier: Annotated[str, Field(description="Address and text of the instruction whose registers are not ready")]
    later: Annotated[str, Field(description="Address and text of the instruction that does not wait for it")]
    why: Annotated[str, Field(description="The registers, and the wait that is missing, in words")]


class Profile(Schema):
    """A kernel's profile."""

    kind: Annotated[Literal["profile"], Field(description="Kind of the document")]
    version: Annotated[Literal[1], Field(description="Version of this schema")]
    modelled: Annotated[Literal[True], Field(description="Always true: figures are modelled, never measured")]
    kernel: Annotated[str, Field(description="The function's name")]
    arch: Annotated[str, Field(description="Architecture that the machine code is for")]
    gpu: Annotated[str, Field(description="GPU whose rates the model uses")]
    problem: Annotated[str | None, Field(description="M_N_K, types and layout of a record; null for a cubin")]
    registers: Annotated[Count, Field(description="Registers per thread, by ptxas")]
    spill_bytes: Annotated[
        Count,
        Field(description="Bytes that a thread loads from and stores to local memory, each instruction counted once"),
    ]
    instructions: Annotated[Count, Field(description="Instructions of the function")]
    loop: Annotated[MainLoop, Field(description="The main loop")]
    occupancy: Annotated[Occupancy | None, Field(description="How many CTAs an SM holds; null without a launch")]
    time: Annotated[Time | None, Field(description="The modelled time; null without a launch")]
    advice: Annotated[tuple[Advice, ...], Field(description="Changes that would help, the most helpful first")]
    lines: Annotated[tuple[Line, ...], Field(description="The main loop's machine code")]
    issues: Annotated[tuple[Issue, ...], Field(description="Issues of some iterations, in the order of time")]
    roles: Annotated[
        tuple[WarpRole, ...], Field(description="Roles of warps in a kernel with tensor memory; else none")
    ] = ()
    ring: Annotated[
        Ring | None, Field(description="Stages and tensor memory of a kernel that has tensor memory; else null")
    ] = None
    hazards: Annotated[
        tuple[Hazard, ...], Field(description="Instructions that do not wait for registers, on any path of the kernel")
    ] = ()
    limits: Annotated[tuple[str, ...], Field(description="Sentences that say what of this kernel is not modelled")] = ()
    busy: Annotated[
        dict[str, tuple[tuple[Cycles, Cycles], ...]],
        Field(description="Spans in which pipes are busy during the iterations of issues: first cycle and end"),
    ] = {}

    @property
    def title(self) -> str:
        """A heading: the problem, or else the kernel, and the GPU."""
        return f"{self.problem or self.kernel} on {self.gpu}"


def load(path: Path) -> Profile:
    """Reads a profile that ``profile --json`` saved. Raises WrongInput."""
    content = read_object(path, "'profile --json' saves one")
    if content.get("kind") != "profile":
        raise WrongInput(f"{path}: is no profile; 'profile --json' saves one")
    if content.get("version") != VERSION:
        raise WrongInput(f"{path}: is a profile of version {content.get('version')}, this program reads {VERSION}")
    return validated(Profile, path, content)


def read_object(path: Path, hint: str) -> dict[str, object]:
    """Reads the JSON object in a file. ``hint``: what the file should have, for the message. Raises WrongInput."""
    with reading(path):
        text = path.read_bytes()
    try:
        content = parse_json(text)
    except WrongInput as error:
        raise WrongInput(f"{path}: {error}; {hint}") from None
    if not isinstance(content, dict):
        raise WrongInput(f"{path}: is no object; {hint}")
    return content


def validated(schema: type[Kind], path: Path, content: dict[str, object], hint: str = "") -> Kind:
    """Checks the content of a file by a schema. Raises WrongInput, which names the file and the field. ``hint``: what
    to do, for the message."""
    try:
        return schema.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise WrongInput(f"{path}: {explain(error)}{f'; {hint}' if hint else ''}") from None
