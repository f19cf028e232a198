"""Defines ``Record``: the fields, rules and derived facts that records of all families share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator
from pydantic.fields import FieldInfo

from cudal2gen.kernel.fusion import Fusion
from cudal2gen.kernel.launch import Launch, Sizes
from cudal2gen.kernel.problem import BATCH_TITLES, Acc, AlongK, Batch, Layout, Problem
from cudal2gen.kernel.schema import IllegalRecord, explain
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.chips import GPUS, Chip, Residency
from kernelproof.ground.element import Element, ElementName, OutputName
from kernelproof.ground.integers import ceil_div
from kernelproof.ground.schema import Schema

Fields = dict[str, Any]  # names of record fields and their values, as JSON has them
Structure = Literal["exact", "nearest", "tuned", "modelled", "edited"]
STRUCTURES: tuple[Structure, ...] = get_args(Structure)
FAMILY = Field(description="kernel family, which determines the template and the meaning of the other fields")


class Origin(Schema):
    """Where a record's decisions come from, and which of its fields differ from that source."""

    source: Annotated[str, Field(description="publication, tuner or model that the decisions come from")]
    structure: Annotated[
        Structure,
        Field(
            description="exact or nearest: published; tuned: by measurement; modelled: by the model; edited: by hand"
        ),
    ]
    changed: Annotated[tuple[str, ...], Field(description="fields that differ from the source")]


class Record(Schema):
    """A kernel for a problem: the decisions that all families share, and facts derived from them.

    A line of the catalog is flat: it has the problem's fields, then the decisions.
    """

    problem: Annotated[Problem, Field(description="the product that the kernel computes")]
    family: Annotated[str, FAMILY]
    origin: Annotated[Origin, Field(description="where the decisions come from")]
    bm: Annotated[int, Field(ge=16, le=512, description="rows of D that a CTA computes at a time, elements")]
    bn: Annotated[int, Field(ge=16, le=512, description="columns of D that a CTA computes at a time, elements")]

    # Fields on which the rendered text does not depend.
    DATA_FIELDS: ClassVar[frozenset[str]] = frozenset({"gpu", "m", "n", "k", "origin"})
    TEMPLATES: ClassVar[Path | None] = None  # folder of the family's template, None for the project's own
    OPERAND_BYTES: ClassVar[tuple[int, ...]] = (2,)  # widths of elements of A and B that the family's text multiplies
    TEXTUAL: ClassVar[bool] = False  # whether records name untrusted texts, which are compiled within limits
    CONVENTION: ClassVar[type[Launch]] = Launch  # how the launcher calls kernels of the family
    # Decisions with which a tile serves sizes that it does not divide, fastest first.
    SIZE_VARIANTS: ClassVar[tuple[Fields, ...]] = ({},)

    if TYPE_CHECKING:  # Every family declares this field itself, with its own bounds and its own place in the line.
        split_k: int

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:  # noqa: ARG003
        """Sensible untuned decisions for a problem, as JSON values. They replace the decisions of a record of another
        family, which do not apply in this one."""
        return {}

    def at(self, problem: Problem, **decisions: Any) -> Self:
        """The record's decisions for another problem, validated against it; ``decisions`` replace the record's own.

        Raises IllegalRecord with every rule that is broken there.
        """
        try:
            return type(self).model_validate(dict(self) | decisions | {"problem": problem})
        except ValidationError as error:
            raise IllegalRecord(explain(error)) from None

    @model_serializer(mode="wrap")
    def _spell(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The flat line: the problem's fields come first, and fields with their neutral value are left out."""
        spelled = self._without_neutral(handler(self))
        problem: dict[str, Any] = spelled.pop("problem", {})
        return problem | spelled

    @property
    def gpu(self) -> str:
        return self.problem.gpu

    @property
    def acc(self) -> Acc:
        return self.problem.acc

    @property
    def ab(self) -> ElementName:
        return self.problem.ab

    @property
    def d(self) -> OutputName:
        return self.problem.d

    @property
    def element(self) -> Element:
        return self.problem.element

    @property
    def output(self) -> Element:
        return self.problem.output

    @property
    def fusion(self) -> Fusion:
        return self.problem.fusion

    @property
    def batch(self) -> Batch:
        return self.problem.batch

    @property
    def batched(self) -> bool:
        return self.problem.batched

    @property
    def grouped(self) -> bool:
        return self.problem.grouped

    @property
    def layout(self) -> Layout:
        return self.problem.layout

    @property
    def along_k(self) -> AlongK:
        return self.problem.along_k

    @property
    def m(self) -> int:
        return self.problem.m

    @property
    def n(self) -> int:
        return self.problem.n

    @property
    def k(self) -> int:
        return self.problem.k

    @property
    def mnk(self) -> str:
        return self.problem.mnk

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key of the problem, by which catalogs are sorted."""
        return self.problem.key

    @model_validator(mode="after")
    def _legal(self) -> Record:
        """Refuses a record that breaks a rule."""
        if broken := self.broken_rules():
            raise ValueError("; ".join(broken))
        return self

    def broken_rules(self) -> list[str]:
        """Every broken rule as ``field=value: rule``; none for a validated record.

        The fields must have the right types, but need not have been validated.
        """
        # Shared rules first: a family's own rules divide by fields that these keep positive.
        return list(self.shared_violations()) or list(self.violations())

    def shared_violations(self) -> Iterator[str]:
        """Broken rules that all families share, as ``field=value: rule``. A family's own rules rely on these."""
        if self.gpu not in GPUS:
            yield f"gpu={self.gpu}: must be one of {', '.join(GPUS)}"
        if (width := self.element.bytes) not in self.OPERAND_BYTES:
            widths = " or ".join(map(str, self.OPERAND_BYTES))
            yield f"ab={self.ab}: {self.family} multiplies elements of {widths} bytes, these have {width}"

    def violations(self) -> Iterator[str]:
        """Broken rules of this family, as ``field=value: rule``. ``shared_violations`` found none before."""
        raise NotImplementedError

    def count_violations(self) -> Iterator[str]:
        """Rules for the number of slices of k and the number of CTA tiles."""
        if self.split_k > (steps := ceil_div(self.k, self.k_step)):
            yield f"split_k={self.split_k}: exceeds the {steps} k-steps of {self.k_step}"
        if self.ctas > 2**30:
            yield f"bm={self.bm}: {self.ctas} CTA tiles exceed the {2**30} that are counted"

    def group_violations(self) -> Iterator[str]:
        """Rules for a grouped batch, whose tiles are counted on the device: one CTA must compute all k of a tile."""
        if self.grouped and self.split_k > 1:
            yield f"split_k={self.split_k}: must be 1 for batch=grouped, whose tiles are counted on the device"

    def vector_violations(self, *extents: str) -> Iterator[str]:
        """The rule that rows along these extents are whole 16-byte vectors, as cp.async and tensor maps require."""
        for name in extents:
            if (extent := getattr(self, name)) % (vector := self.element.vector):
                yield f"{name}={extent}: must be a multiple of {vector}, rows along {name} start on 16 bytes"

    def smem_violations(self, cause: str) -> Iterator[str]:
        """The rule that a CTA's shared memory fits the GPU. ``cause``: the field that the message blames."""
        if (needed := self.smem_bytes + self.smem_static_bytes) > (most := self.target.capability.smem_block_bytes):
            yield f"{cause}: {needed} bytes of shared memory exceed the {most} of {self.gpu}"

    @property
    def arch(self) -> str:
        """The architecture for which nvcc and ptxas compile."""
        return self.target.capability.sm

    @property
    def k_step(self) -> int:
        """Elements of k that one step of the main loop takes."""
        raise NotImplementedError

    @property
    def ring_steps(self) -> int:
        """k-steps that shared memory holds at a time, 1 without a ring. Tests use k just below, at and above these."""
        return 1

    @property
    def steps_in_flight(self) -> int:
        """k-steps that are loaded while another is multiplied. A stage becomes free when its step is multiplied."""
        return max(1, self.ring_steps - 1)

    def k_order(self, k: int) -> list[list[list[int]]]:
        """The order in which MMAs add up products: for each slice of k, its indices in groups of up to 8.

        A group is half of an MMA's k for 2-byte elements, the smallest step after which an accumulator may be rounded.
        """
        total = ceil_div(k, self.k_step)
        ends = [min(k, total * part // self.split_k * self.k_step) for part in range(self.split_k + 1)]
        return [[list(range(at, min(at + 8, end))) for at in range(start, end, 8)] for start, end in pairwise(ends)]

    @property
    def launch(self) -> Launch:
        """The facts about the compiled kernel that the launcher needs. Data fields are passed when it opens the
        kernel."""
        raise NotImplementedError

    @property
    def launch_facts(self) -> Fields:
        """The facts that every launch has."""
        return {
            "entry": self.name,
            "layout": self.layout,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "bm": self.bm,
            "bn": self.bn,
            "bk": self.k_step,
            "split_k": self.split_k,
            "element": self.ab,
            "output": self.problem.d,
            "fusion": self.fusion,
            "batch": self.batch,
        }

    def output_fields(self, problem: Problem) -> Fields:  # noqa: ARG002
        """Decisions that must change with the type of D if the record serves this problem."""
        return {}

    @property
    def launch_options(self) -> dict[str, int]:
        """The data fields that are set, as the numbers that the launcher takes when it opens the kernel."""
        fields = {option: getattr(self, option.name, None) for option in self.CONVENTION.options}
        return {option.name: option.number(value) for option, value in fields.items() if value is not None}

    def launched_with(self, options: dict[str, int]) -> Self:
        """The record with these launch options in place of its own. They are data fields, so the binary stays the
        same."""
        declared = {option.name: option for option in self.CONVENTION.options}
        return self.model_copy(update={name: declared[name].value(number) for name, number in options.items()})

    @property
    def other_options(self) -> list[dict[str, int]]:
        """Values of the launch options that tests try besides the record's own."""
        return []

    def other_strides(self, n: int) -> list[int]:  # noqa: ARG002
        """Values of the launch option ``swizzle_stride`` that tests of n columns try besides the record's own."""
        return []

    @property
    def waits_by_mbarriers(self) -> bool:
        """Whether warpgroups wait for each other at mbarriers; then tests also execute them in an adverse order."""
        return False

    @property
    def shares_last_wave(self) -> bool:
        """Whether all CTAs share the tiles of the last wave; then tests have a last wave after a whole one."""
        return False

    @property
    def tiles_at_once(self) -> int:
        """Tiles whose accumulators a CTA holds at once. If there are several, tests run tiles that reuse each of
        them."""
        return 1

    @property
    def grid_is_tiles(self) -> bool:
        """Whether a CTA's index in the grid is its tile's index in D, so that executing a part of the grid gives a part
        of D."""
        return False

    @property
    def most_k(self) -> int:
        """The largest k that the kernel takes, 0 for any."""
        return 0

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster, 1 without clusters."""
        return 1

    @property
    def facts(self) -> dict[str, int | str]:
        """Facts for readers of the record, besides those that all families have."""
        return {}

    @property
    def target(self) -> Chip:
        """The GPU model of the problem."""
        return GPUS[self.gpu]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        raise NotImplementedError

    @property
    def tiles_m(self) -> int:
        """CTA tiles along m; the last one may reach beyond D. ``tiles_n``: the same along n."""
        return ceil_div(self.m, self.bm)

    @property
    def tiles_n(self) -> int:
        return ceil_div(self.n, self.bn)

    @property
    def ctas(self) -> int:
        """CTA tiles of the problem, slices of k included."""
        return self.tiles_m * self.tiles_n * self.split_k

    @property
    def padding_waste(self) -> float:
        """Wasted work on padding, as a fraction of the useful work."""
        return self.tiles_m * self.bm * self.tiles_n * self.bn / (self.m * self.n) - 1

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory of a CTA."""
        return 0

    @property
    def smem_static_bytes(self) -> int:
        """Bytes of shared memory that the compiler allocates statically, besides the dynamic ``smem_bytes``."""
        return 0

    @property
    def step_bytes(self) -> int:
        """Bytes of one k-step of A and B in shared memory."""
        return (self.bm + self.bn) * self.k_step * self.element.bytes

    @property
    def ctas_by_smem(self) -> int:
        """How many CTAs fit in the shared memory of an SM."""
        return self.target.capability.ctas_by_smem(self.smem_bytes + self.smem_static_bytes)

    def residency(self, registers: int) -> Residency:
        """How many CTAs fit on an SM at ``registers`` per thread, by each limit."""
        smem = self.smem_bytes + self.smem_static_bytes
        return self.target.capability.residency(self.threads, registers, smem)

    def ctas_per_sm(self, registers: int) -> int:
        """CTAs that one SM holds at ``registers`` per thread."""
        return self.residency(registers).ctas

    def waves(self, registers: int) -> float:
        """How many times the CTAs fill the GPU; infinite if no CTA fits."""
        resident = self.ctas_per_sm(registers) * self.target.sms
        return self.ctas / resident if resident else float("inf")

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold its part of the tile."""
        raise NotImplementedError

    @property
    def estimated_registers(self) -> int:
        """A rough estimate of a thread's registers, for pruning; ptxas decides."""
        raise NotImplementedError

    @property
    def spill_remarks(self) -> list[str]:
        """Why ptxas is likely to spill registers, from estimates."""
        return []

    @property
    def warnings(self) -> list[str]:
        """Why a legal record may be slow or fail its build: spilled registers, idle SMs."""
        ctas, sms = self.ctas, self.target.sms
        # The problem is large enough that tiles of 64 x 64 would give every SM one.
        if 4 * ctas <= sms and self.m * self.n >= 64 * 64 * sms:
            return [*self.spill_remarks, f"{ctas} CTAs leave {sms - ctas} of {sms} SMs idle"]
        return self.spill_remarks

    @property
    def remarks(self) -> list[str]:
        """Notes for the author of a legal record: warnings, and settings without effect."""
        return self.warnings

    @property
    def predicated(self) -> bool:
        """Whether the tile may reach beyond the problem."""
        return True

    @property
    def caller_pads(self) -> bool:
        """Whether the caller passes wider matrices, padded with zeros; False for families without a field
        ``padding``."""
        return getattr(self, "padding", "none") == "pad"

    def padded(self, sizes: Sizes) -> Sizes:
        """The extents with which the kernel is launched: these, or the ones to which the caller pads."""
        return self.wider(sizes) if self.caller_pads else sizes

    def wider(self, sizes: Sizes) -> Sizes:
        """The least extents to which a caller must pad these."""
        return sizes

    @classmethod
    def line_fields(cls) -> dict[str, FieldInfo]:
        """All fields of a catalog line: the problem's, then the record's own."""
        own = {name: field for name, field in cls.model_fields.items() if name != "problem"}
        return Problem.model_fields | own

    def decisions(self) -> dict[str, Any]:
        """The fields without problem and origin, as JSON values. They determine kernel and launch for the problem."""
        return self.model_dump(mode="json", exclude={"problem", "origin"})

    @property
    def texts(self) -> Mapping[str, str]:
        """Texts that the record names by digest, which lie beside the catalog. Most families have none."""
        return {}

    def code(self) -> dict[str, Any]:
        """The fields on which the rendered text depends, as JSON values. Records with equal code share one text."""
        fields = self.model_dump(mode="json", exclude={"origin"})
        return {name: value for name, value in fields.items() if name not in self.DATA_FIELDS}

    @property
    def tile(self) -> str:
        """The tile as the kernel's name spells it."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The kernel's name: family, types, layout, fusion, batch, tile and a digest of the fields of its text."""
        digest = hashlib.sha256(json.dumps(self.code(), sort_keys=True).encode()).hexdigest()
        types = self.problem.types.replace(" d=", "_d").replace(" ", "_")
        fusion = f"_{self.fusion.text.replace('+', '_')}" if self.fusion else ""
        batch = f"_{BATCH_TITLES[self.batch]}" if self.batched else ""
        return f"hgemm_{self.family}_{types}_{self.layout}{fusion}{batch}_{self.tile}_{digest[:10]}"

    @property
    def kernel_key(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """The binary and its launch options: together with the problem, they determine a run.

        Records with the same key are the same kernel in every respect.
        """
        return self.name, tuple(sorted(self.launch_options.items()))

    @property
    def baked_k(self) -> int:
        """The k that is compiled in, 0 for none."""
        return 0

    # For the tuner and the cost model.

    # Decisions that no rule ties to others; see ``free_fields``.
    FREE_FIELDS: ClassVar[frozenset[str]] = frozenset()
    # Decisions that follow from others: a fit moves them first. A part of a field is ``field.part``.
    FOLLOWING: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def serves(cls, chip: Chip) -> bool:  # noqa: ARG003
        """Whether the tuner proposes this family on a GPU: it is legal there, and no other family is always faster."""
        return True

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Decisions that are worth trying, as JSON values. Some may break a rule; ``parse`` refuses those."""
        if fields := cls.plain(problem):
            yield fields

    @classmethod
    def free_fields(cls, problem: Problem) -> Mapping[str, Sequence[Fields]]:  # noqa: ARG003
        """Alternatives for decisions that no rule ties to others, by name; any combination of them is legal.

        All alternatives of a name set the same fields, and all names together set ``FREE_FIELDS``. The tuner chooses
        them independently of the candidate, so that they do not multiply the candidates.
        """
        return {}

    @property
    def work(self) -> CtaWork:
        """The work of a CTA, for the cost model; by default mma.sync on operands that are loaded from the L2 once."""
        return CtaWork("mma.sync", self.step_bytes)


class Ring(Record):
    """A record that loads k in tiles of ``bk``, of which shared memory holds up to ``stages`` at a time."""

    if TYPE_CHECKING:
        bk: int
        stages: int

    @property
    def k_step(self) -> int:
        """``bk``: one k-tile."""
        return self.bk

    @property
    def ring_steps(self) -> int:
        return self.stages
