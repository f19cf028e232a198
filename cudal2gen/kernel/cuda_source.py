"""Defines the family cuda_source, whose CUDA text is not rendered but was written, for example by a language model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError

from cudal2gen.kernel import device_text
from cudal2gen.kernel.launch import CONVENTIONS, Cluster, Launch, Sizes, Tiles, Tma
from cudal2gen.kernel.problem import Problem, aligned
from cudal2gen.kernel.record import FAMILY, Fields, Origin, Record, Ring
from cudal2gen.kernel.schema import IllegalRecord, explain
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.chips import GPUS
from kernelproof.ground.integers import ceil_div

# Facts of a launch that follow from other fields of the record, so that ``call`` must not state them.
DERIVED_FACTS = frozenset(Launch.model_fields) | {"predicated", "baked_k", "baked_n"}
# Fields whose values the text was written for. ``padding`` is not among them: a caller may pad for an unchanged text.
LAUNCH_FIELDS = ("bm", "bn", "bk", "stages", "split_k", "block", "dynamic_smem", "call", "baked")
SEALED_FIELDS = ("text", "entry", "operation", *LAUNCH_FIELDS)  # fields that the seal covers
ENTRY = "gemm"  # the kernel's name in a text that was made from another record


class CudaSource(Ring):
    """A CUDA text in place of a rendered one, named by its digest: ``sources/<digest>.cu`` beside the catalog.

    The text has one kernel, ``entry``, with the parameters of its launch convention. ``seal`` covers the text and all
    that its launch depends on: neither can change alone.
    """

    family: Annotated[Literal["cuda_source"], FAMILY]
    text: Annotated[str, Field(pattern=device_text.DIGEST, description="digest of the text, which names its file")]
    entry: Annotated[
        str, Field(pattern=r"^[a-z][a-z0-9_]{2,47}$", description="name of the kernel in the text, extern C or not")
    ]
    operation: Annotated[
        str, Field(max_length=60, description="architecture, types and layout that the text was written for")
    ]
    bk: Annotated[int, Field(ge=8, le=1024, multiple_of=8, description="k of a step of the main loop, elements")]
    stages: Annotated[
        int, Field(ge=1, le=16, description="k-steps in flight; tests use k just below, at and above them")
    ]
    split_k: Annotated[int, Field(ge=1, le=64, description="slices of k, each computed by its own CTAs")]
    block: Annotated[int, Field(ge=32, le=1024, multiple_of=32, description="threads of a CTA")]
    dynamic_smem: Annotated[int, Field(ge=0, le=232448, description="bytes of dynamic shared memory of a CTA")]
    call: Annotated[
        str, Field(max_length=400, description="launch convention and its own facts, as kernel.launch spells them")
    ]
    baked: Annotated[
        int, Field(ge=0, le=1 << 24, description="the k that is compiled in, after the caller's padding; 0 for none")
    ]
    padding: Annotated[
        Literal["none", "predicate", "pad"],
        Field(description="for sizes that are no multiple of the tile: predicate checks bounds, pad: the caller pads"),
    ]
    seal: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", description="digest of text and launch together")]
    options: Annotated[
        str, Field(max_length=200, description="options of the launch, such as raster_group=8 pdl=1")
    ] = ""

    TEXTUAL: ClassVar[bool] = True
    DATA_FIELDS: ClassVar[frozenset[str]] = Record.DATA_FIELDS | {"options"}
    SIZE_VARIANTS: ClassVar[tuple[Fields, ...]] = ({}, {"padding": "pad"})

    @classmethod
    def of_text(cls, problem: Problem, text: str, origin: Origin, launch: Mapping[str, Any]) -> Self:
        """The sealed record of a text in normal form. Raises IllegalRecord.

        ``launch``: all other fields that the record needs, without ``text``, ``operation`` and ``seal``.
        """
        own = {"text": device_text.digest(text), "family": "cuda_source", "operation": _operation(problem)}
        fields = {"problem": problem, "origin": origin, **launch, **own}
        try:
            return cls.model_validate(fields | {"seal": _seal(fields)})
        except ValidationError as error:
            raise IllegalRecord(explain(error)) from None

    def violations(self) -> Iterator[str]:
        if self.seal != _seal(dict(self)):
            yield f"seal={self.seal}: text or launch changed after it was sealed; write it again with 'cudal2gen write'"
            return
        if self.operation != (own := _operation(self.problem)):
            yield f"operation={self.operation}: the text is not for {own}"
        if self.fusion or self.batched:
            yield f"family={self.family}: must be a plain product, fusion and batch none"
        try:
            launch = self.launch
        except (ValidationError, KeyError, ValueError) as error:
            yield f"call={self.call}: {explain(error) if isinstance(error, ValidationError) else error}"
            return
        yield from self._launch_violations(launch)
        yield from self._size_violations(isinstance(launch, Tiles))
        yield from self.count_violations()
        yield from self.smem_violations(f"dynamic_smem={self.dynamic_smem}")

    def _launch_violations(self, launch: Launch) -> Iterator[str]:
        """Rules on the launch convention and its options."""
        if isinstance(launch, Tiles) and launch.raster == "zsplit" and "swizzle_stride=" not in self.options:
            yield f"call={self.call}: raster zsplit needs options swizzle_stride=COLUMNS"
        if not isinstance(launch, Tiles) and self.target.capability.number < (9, 0):
            yield f"call={self.call}: {self.gpu} has neither clusters nor TMA; must be tiles"
        if not isinstance(launch, Tiles) and self.padding == "predicate":
            yield f"padding={self.padding}: must be none or pad for call={launch.convention}"
        if isinstance(launch, Tma | Cluster) and self.baked:
            yield f"baked={self.baked}: must be 0 for call={launch.convention}"
        try:
            _ = self.launch_options
        except (KeyError, ValueError):
            names = ", ".join(f"{option.name}=NUMBER" for option in launch.options) or "none"
            yield f"options={self.options}: the convention {launch.convention} has {names}"

    def _size_violations(self, is_tiled: bool) -> Iterator[str]:
        """Rules on the problem's sizes. ``is_tiled``: whether the launch convention is ``Tiles``."""
        if self.padding == "none" and is_tiled:
            for field, extent, tile in (("bm", self.m, self.bm), ("bn", self.n, self.bn), ("bk", self.k, self.bk)):
                if extent % tile:
                    yield f"{field}={tile}: does not divide {field[1]}={extent}, as padding=none demands"
        elif not self.caller_pads:
            yield from self.vector_violations(*self.problem.row_extents)
        if self.baked and self.baked != self.padded(Sizes(self.m, self.n, self.k)).k:
            yield f"baked={self.baked}: is compiled in, the problem has k={self.k}"

    def code(self) -> dict[str, Any]:
        fields = super().code()
        # A caller who pads hands over a problem that the tile divides: the kernel is the same.
        fields["padding"] = "predicate" if self.padding == "predicate" else "none"
        return fields

    @property
    def source(self) -> str:
        """The text. Raises WrongInput if its file is absent or was changed, or contains a refused construct."""
        return device_text.load(self.text)

    @property
    def launch_comment(self) -> str:
        """The facts of the launch, as lines of a C++ comment."""
        return "".join(f"//   {line}\n" for line in self.launch.write().splitlines())

    @property
    def texts(self) -> Mapping[str, str]:
        return {self.text: self.source}

    @property
    def arch(self) -> str:
        return _arch(self.problem)

    @property
    def _stated_facts(self) -> tuple[str, dict[str, str]]:
        """The launch convention and the facts that ``call`` states, as text. Raises ValueError for an unknown
        convention."""
        convention, *facts = self.call.split() or [""]
        if convention not in CONVENTIONS:
            raise ValueError(f"must begin with one of {', '.join(CONVENTIONS)}")
        pairs = [fact.partition("=") for fact in facts]
        return convention, {name: value for name, _, value in pairs}

    @property
    def launch(self) -> Launch:
        """The facts that the launcher needs. Raises ValueError if the record is not validated."""
        convention, stated = self._stated_facts
        if derived := sorted(stated.keys() & DERIVED_FACTS):
            raise ValueError(f"{', '.join(derived)}: the record has fields for these")
        tiles = {"predicated": int(self.padding == "predicate"), "baked_n": 0, "baked_k": self.baked}
        facts = self.launch_facts | (tiles if convention == Tiles.convention else {})
        texts = {name: str(value) for name, value in facts.items()}
        return CONVENTIONS[convention].model_validate_strings(texts | stated)

    @property
    def launch_options(self) -> dict[str, int]:
        """The launch options that the record states; the launcher has defaults for the others. Raises KeyError for an
        option that the launcher does not have."""
        pairs = [option.partition("=") for option in self.options.split()]
        options = {name: int(value) for name, _, value in pairs}
        if unknown := options.keys() - {option.name for option in self.launch.options}:
            raise KeyError(*unknown)
        return options

    def launched_with(self, options: dict[str, int]) -> Self:
        spelled = " ".join(f"{name}={number}" for name, number in (self.launch_options | options).items())
        return self.model_copy(update={"options": spelled})

    @property
    def waits_by_mbarriers(self) -> bool:
        return isinstance(self.launch, Tma)

    @property
    def most_k(self) -> int:
        launch = self.launch
        return launch.steps * self.bk * self.split_k if isinstance(launch, Cluster) else 0

    @property
    def baked_k(self) -> int:
        return self.baked

    @property
    def cluster_ctas(self) -> int:
        launch = self.launch
        if isinstance(launch, Tma | Cluster) and launch.reduce == "cluster":
            return self.split_k
        return launch.cluster_m * launch.cluster_n if isinstance(launch, Tma) else 1

    @property
    def ctas(self) -> int:
        launch = self.launch
        along_m, along_n = (launch.cluster_m, launch.cluster_n) if isinstance(launch, Tma) else (1, 1)
        return aligned(self.tiles_m, along_m) * aligned(self.tiles_n, along_n) * self.split_k

    @property
    def facts(self) -> dict[str, int | str]:
        return {"text": f"{self.text}.cu", "arch": self.arch}

    @property
    def threads(self) -> int:
        return self.block

    @property
    def smem_bytes(self) -> int:
        return self.dynamic_smem

    @property
    def predicated(self) -> bool:
        """Whether the tile may reach beyond the problem. Kernels with TMA or clusters always check bounds."""
        return self.padding == "predicate" or not self.call.startswith(Tiles.convention)

    def wider(self, sizes: Sizes) -> Sizes:
        """The sizes rounded up: to whole tiles, or only to rows of whole vectors if TMA or a cluster checks bounds."""
        if self.call.startswith(Tiles.convention):
            return Sizes(aligned(sizes.m, self.bm), aligned(sizes.n, self.bn), aligned(sizes.k, self.bk))
        rows = self.problem.row_extents
        return sizes._replace(**{name: aligned(getattr(sizes, name), self.element.vector) for name in rows})

    @property
    def accumulator_registers(self) -> int:
        """An estimate: all threads multiply, except that with TMA one warpgroup only loads."""
        multiplying = self.threads - 128 if isinstance(self.launch, Tma) and self.threads > 128 else self.threads
        return ceil_div(self.bm * self.bn, multiplying) // (2 if self.acc == "f16" else 1)

    @property
    def estimated_registers(self) -> int:
        return self.accumulator_registers + 40  # for addresses and operands: a guess, since the text is not analysed

    @property
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}"

    @property
    def shares_last_wave(self) -> bool:
        launch = self.launch
        return isinstance(launch, Tma) and launch.stream_k > 0

    @property
    def work(self) -> CtaWork:
        """The usual work for the launch convention: kernels with TMA multiply by wgmma or tcgen05, others by
        mma.sync."""
        launch, options = self.launch, self.launch_options
        if not isinstance(launch, Tma):
            stride = options.get("swizzle_stride", 0)
            band = ceil_div(stride, self.bn) if stride else self.tiles_n
            summed_by: Literal["cluster", "last"] = "cluster" if isinstance(launch, Cluster) else "last"
            return super().work._replace(raster_band=band, raster_along="n", summed_by=summed_by)
        l2_bytes = (self.bm / launch.cluster_n + self.bn / launch.cluster_m) * self.bk * self.element.bytes
        return CtaWork(
            "tcgen05.mma" if self.target.capability.has_tcgen05 else "wgmma",
            l2_bytes,
            issuers=max(1, self.threads // 128 - 1),
            raster_band=options.get("raster_group", 1),
            store="tma" if launch.box_d_cols else "direct",
            tensor_maps=True,
            summed_by="cluster" if launch.reduce == "cluster" else "all",
        )


def as_text(record: Record, rendered: str) -> tuple[str, Fields]:
    """A record's kernel as a text whose kernel is named ``ENTRY``, and the fields of its launch, for ``of_text``.

    ``rendered``: the record's source. A record of this family keeps its text and its fields.
    """
    if isinstance(record, CudaSource):
        names = ("entry", *LAUNCH_FIELDS, "padding", "options")
        return record.source, {name: getattr(record, name) for name in names}
    launch = record.launch
    facts = {name: value for name, value in launch.model_dump().items() if name not in DERIVED_FACTS}
    options = {option.name for option in launch.options} & record.launch_options.keys()
    return device_text.normal(rendered.replace(record.name, ENTRY)), {
        "entry": ENTRY,
        "bm": record.bm,
        "bn": record.bn,
        "bk": record.k_step,
        "stages": min(16, record.ring_steps),  # the field allows at most 16
        "split_k": record.split_k,
        "block": record.threads,
        "dynamic_smem": record.smem_bytes,
        "call": " ".join([launch.convention, *(f"{name}={value}" for name, value in facts.items())]),
        "baked": record.baked_k,
        "padding": getattr(record, "padding", "predicate"),
        "options": " ".join(f"{name}={record.launch_options[name]}" for name in sorted(options)),
    }


def _seal(fields: Mapping[str, Any]) -> str:
    """The digest of a text's name and of all that its launch depends on."""
    covered = {name: fields.get(name) for name in SEALED_FIELDS} | {"predicated": fields.get("padding") == "predicate"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _arch(problem: Problem) -> str:
    """The architecture for which texts for a problem's GPU are compiled; ``a`` unlocks wgmma, tcgen05 and
    setmaxnreg."""
    capability = GPUS[problem.gpu].capability
    return f"{capability.sm}a" if capability.has_wgmma or capability.has_tcgen05 else capability.sm


def _operation(problem: Problem) -> str:
    """What a text for a problem is written for: architecture, types and layout."""
    return f"{_arch(problem)} {problem.types} {problem.layout}"
