"""Defines the options that choose problems and records (--mnk, --gpu, --where, ...), and finds what they choose.

Most verbs take a ``Selection``. Each verb offers only some of its options; see the annotated types at the end.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, get_args

import typer
from pydantic import ValidationError

from cudal2gen.cli.changes import changed
from cudal2gen.generation import catalog, published
from cudal2gen.kernel import GPUS, Acc, Layout, Problem, Record, SizeClass, explain
from cudal2gen.kernel.fusion import NONE, PARTS, Fusion
from cudal2gen.kernel.problem import BATCH_TITLES, SIZE_CLASSES, Batch, rows_along_k, types_text
from kernelproof.ground.command_line.groups import Offer, OneOf, Shared
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.element import ELEMENTS, ElementName, OutputName

if TYPE_CHECKING:
    from cudal2gen.results import Measurement

ANY: Final = "any"
MAX_PRODUCTS = 65_535  # the most products in a launch: they are counted by a grid dimension of 16 bits
Kind = dict[str, Any]  # types, layout, fusion and batch, by the names of a problem's fields
AB_TYPES: tuple[ElementName, ...] = get_args(ElementName)
D_TYPES: tuple[OutputName, ...] = get_args(OutputName)
ACCS: tuple[Acc, ...] = get_args(Acc)
_FROM_TYPES: Any = None  # the accumulator if the user gives none: it follows from the types
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
BATCHES: tuple[Batch, ...] = get_args(Batch)


def _count(text: str) -> int:
    """The text as a number from 1 to ``MAX_PRODUCTS``. Raises ValueError for any other text."""
    if not text.isdecimal() or not 0 < int(text) <= MAX_PRODUCTS:
        raise ValueError(f"expected a number from 1 to {MAX_PRODUCTS}")
    return int(text)


class Filterable(Protocol):
    """The fields that problems, records and measurements have in common."""

    @property
    def gpu(self) -> str: ...
    @property
    def ab(self) -> str: ...
    @property
    def d(self) -> str: ...
    @property
    def acc(self) -> str: ...
    @property
    def layout(self) -> str: ...


class ForProblem(Filterable, Protocol):
    """Records and measurements, which belong to a problem."""

    @property
    def problem(self) -> Problem: ...


@dataclass(frozen=True)
class Selection:
    """The problems or records that a command is about.

    ``gpu``, ``ab``, ``d``, ``acc``, ``layout``, ``fusion`` and ``batch`` may be ``any`` in verbs that offer it. If a
    problem has no record of its own, the nearest one is used and a note on stderr names it. Methods end the command if
    the options contradict each other or select nothing.
    """

    mnk: Annotated[
        tuple[str, ...],
        typer.Option("--mnk", metavar="M_N_K", help="Problem size, e.g. 4096_4096_64. Repeatable."),
    ] = ()
    everything: Annotated[bool, typer.Option("--all", help="Every size of --gpu, --acc and --layout.")] = False
    gpu: Annotated[str, OneOf(tuple(GPUS), ANY), Shared("gpu", "the GPU model", short=True)] = "a100"
    acc: Annotated[
        Acc | Literal["any"],
        OneOf(ACCS, ANY),
        Shared("acc", "the type in which products are summed; f16, or f32 for ab=bf16 and d=f32", short=True),
    ] = _FROM_TYPES
    layout: Annotated[
        Layout | Literal["any"],
        OneOf(LAYOUTS, ANY),
        Shared(
            "layout",
            "how B is stored, t (N,K) or n (K,N), then A, n (M,K) or t (K,M)",
            short=True,
        ),
    ] = "tn"
    ab: Annotated[ElementName | Literal["any"], OneOf(AB_TYPES, ANY), Shared("ab", "the type of A and B")] = "f16"
    d: Annotated[
        OutputName | Literal["any"], OneOf(D_TYPES, ANY), Shared("d", "the type of D; same: that of A and B")
    ] = "same"
    fusion: Annotated[
        str, Shared("fusion", f"what is applied to the sums: none, or parts joined by +, of {', '.join(PARTS)}")
    ] = NONE
    batch: Annotated[
        Batch | Literal["any"],
        OneOf(BATCHES, ANY),
        Shared("batch", "products of a launch: one, several, or rows in groups"),
    ] = "none"
    products: Annotated[int, Shared("products", "how many products a launch computes, with batch=strided", _count)] = 1
    size_class: Annotated[
        SizeClass | None, OneOf(SIZE_CLASSES), Shared("class", "in place of --all: the sizes of this class", short=True)
    ] = None
    sample: Annotated[
        int | None, Shared("sample", "in place of --all: this many sizes, spread over the classes", _count, short=True)
    ] = None
    problem_file: Annotated[
        Path | None,
        Shared("problems", "in place of --all: the problems of a file that tune-model wrote", Path, short=True),
    ] = None
    origin: Annotated[
        Literal["published"] | None,
        OneOf(("published",)),
        Shared("origin", "published: the structure of the published kernel, also if the model tuned it", short=True),
    ] = None
    source: Annotated[
        str | None,
        OneOf(tuple(GPUS)),
        Shared("records", "measure the legal records of this other GPU; results go to a file of their own"),
    ] = None
    changes: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change a field of the record, e.g. bm=256, mma_repeat=2,4,1, prefetch=multi:3, c_batch=null. "
            "Repeatable.",
        ),
    ] = ()
    fit: Annotated[
        bool,
        typer.Option("--fit", help="If --set breaks a rule, change other fields as little as possible, and say which."),
    ] = False
    device: int = 0  # CUDA's index of the card, which follows the colon in --gpu h200:1

    def __post_init__(self) -> None:
        model, colon, index = self.gpu.partition(":")
        if colon:
            object.__setattr__(self, "gpu", model)
            object.__setattr__(self, "device", int(index))
        if self.acc is _FROM_TYPES:
            half = (self.ab == ANY or ELEMENTS[self.ab].half_sums) and self.d in ("same", ANY)
            object.__setattr__(self, "acc", "f16" if half else "f32")
        if self.origin and self.source:
            refuse("--origin published: has no meaning for --where records, which are another GPU's; give one of them")
        try:
            Fusion.model_validate(NONE if self.fusion == ANY else self.fusion)
        except ValidationError as error:
            refuse(f"--where fusion={explain(error)}")

    def on(self, gpu: str) -> Selection:
        """The selection with this GPU if it admits any GPU, else unchanged."""
        return replace(self, gpu=gpu) if self.gpu == ANY else self

    @property
    def names_sizes(self) -> bool:
        """Whether the user gave one of the options that choose sizes."""
        return self._size_option_count > 0

    @property
    def target(self) -> str:
        """GPU, types, layout, fusion and batch as messages name them."""
        fusion = f" {self.fusion}" if self.fusion != NONE else ""
        batch = f" {self.batch if self.batch == ANY else BATCH_TITLES[self.batch]}" if self.batch != NONE else ""
        return f"{self.gpu} {types_text(self.ab, self.acc, self.d)} {self.layout}{fusion}{batch}"

    def admits(self, item: Filterable) -> bool:
        """Whether a problem, record or measurement has the selected GPU, types and layout."""
        return all(getattr(self, name) in (ANY, getattr(item, name)) for name in FILTERS)

    def selects(self, item: ForProblem | Problem) -> bool:
        """Whether ``item`` is selected: ``admits`` it, and its size, class, fusion and batch agree too."""
        problem = item if isinstance(item, Problem) else item.problem
        of_size = not self.mnk or (problem.m, problem.n, problem.k) in map(parsed_sizes, self.mnk)
        return self.admits(item) and self._has_variant(problem) and self._is_of_class(problem) and of_size

    @property
    def _variant(self) -> dict[str, str]:
        """Fusion and batch by the names of a problem's fields. Ends the command if the fusion is the wildcard ``any``,
        because one fusion is needed here."""
        if self.fusion == ANY:
            refuse(f"--where fusion={ANY}: name its parts, or {NONE}")
        return {"fusion": self.fusion, "batch": self.batch}

    def _has_variant(self, problem: Problem) -> bool:
        """Whether the problem has the selected fusion and batch."""
        return self.fusion in (ANY, str(problem.fusion)) and self.batch in (ANY, problem.batch)

    def problem(self) -> Problem:
        """The one problem of ``--mnk``."""
        (mnk,) = self.mnk
        return problem_of(mnk, **self._variant, **{name: getattr(self, name) for name in FILTERS})

    @property
    def options(self) -> str:
        """The options that select the same record again, as a shell reads them. Defaults are left out."""
        options = [("--mnk", mnk) for mnk in self.mnk]
        for name in (*FILTERS, *VARIANT_FIELDS, "origin"):
            if (value := getattr(self, name)) != getattr(Selection(), name):
                options.append((f"--{name}", value) if name in SHORT else ("--where", f"{name}={value}"))
        options += [("--set", change) for change in self.changes]
        return shlex.join([*chain(*options), *(["--fit"] * self.fit)])

    def record(self) -> Record:
        """The record for the one problem of ``--mnk``, or the nearest one, after ``--set`` and ``--fit``."""
        return self._record_finder()(self.problem())

    def records(self, source: str | None = None, seed: int = 0) -> list[Record]:
        """The selected records after ``--set`` and ``--fit``.

        A problem without a record of its own gets the nearest one, adapted to the problem. ``source``: use only the
        records of this GPU. ``seed``: determines the draw of ``--sample``.
        """
        self._check_size_options()
        if self.problem_file is not None:
            return list(self._records_of_list(self.problem_file, source))
        if self.mnk:
            record_for = self._record_finder(source)
            return [record_for(item) for item in self._problems_of_mnk()]
        if self.gpu == ANY or self.origin:
            admitted = [record for record in self.stock() if self.admits(record) and self._has_variant(record.problem)]
            return self._changed(self._sampled(admitted, seed))
        layouts = {record.layout for record in catalog.load()} if self.layout == ANY else set(self.layouts)
        kinds = [kind for kind in self.kinds if kind["layout"] in layouts]
        return self._changed(self._sampled(chain(*(self._library(kind, source) for kind in kinds)), seed))

    def stock(self) -> list[Record]:
        """The records of the selected GPU from which the other options choose."""
        if self.origin is None:
            return catalog.load(gpus=None if self.gpu == ANY else [self.gpu])
        return [record for record in published.structures() if self.gpu in (ANY, record.gpu)]

    def _library(self, kind: Kind, source: str | None = None) -> list[Record]:
        """The GPU's records of a kind, including other GPUs' records that are used instead of missing ones; a note
        counts those."""
        records = catalog.library(self.gpu, source=source, **kind)
        own = {record.problem for record in catalog.load(gpus=[self.gpu])}
        if borrowed := sum(record.problem not in own for record in records):
            part = f"{borrowed} of" if borrowed < len(records) else "all"
            note(f"{part} {len(records)} records for {replace(self, **kind).target} stand in for absent ones")
        return records

    def records_to_pack(self, measurements: Sequence[Measurement]) -> list[Record]:
        """The records to pack: those of the chosen sizes, or without a choice those of measured problems.

        ``--all`` selects the catalog's records, and those of measured problems that are not in the catalog.
        """
        if self.names_sizes:
            self._check_size_options()
        if self.mnk or self.problem_file is not None:
            return self.records()
        records = catalog.load()
        chosen: list[Record] = []
        # With layout=any, a layout whose A is stored (k,m) is packed only for problems that were measured in it.
        measured_layouts = (measurement.layout for measurement in measurements if self.admits(measurement))
        for kind in self._kinds(dict.fromkeys((*self.layouts, *measured_layouts))):
            of_kind = replace(self, **kind)  # the same selection, limited to one combination of types and layout
            stored: list[Record] = []
            measured = {measurement.problem for measurement in measurements if of_kind.admits(measurement)}
            if not measured and not self.names_sizes:
                continue
            # With --where ab=any, --all packs only types that the catalog or the measurements have. For other types
            # every record would stand in for a missing one.
            has_types = any((record.ab, record.d) == (of_kind.ab, of_kind.d) for record in records)
            if measured or has_types or ANY not in (self.ab, self.d):
                try:
                    stored = self._library(kind) if self.names_sizes else catalog.library(self.gpu, **kind)
                except catalog.CatalogError:
                    continue
            library = {record.problem: record for record in stored}
            # Without a choice of sizes, and for layouts beyond the selected ones: only measured problems. Otherwise
            # what the user chose.
            if not self.names_sizes or of_kind.layout not in self.layouts:
                chosen += [record for problem, record in library.items() if problem in measured]
            elif stored:
                chosen += of_kind._sampled(library.values())
            # Measured problems that the catalog does not have.
            if self.everything or not self.names_sizes:
                # ``bench`` measured the nearest records, adapted to these problems; ``nearest`` gives them again.
                others = sorted(measured - set(library), key=lambda problem: problem.key)
                chosen += [catalog.nearest(problem, records).record for problem in others]
        return chosen

    def candidates(self) -> list[Record]:
        """The records to try on a GPU on which nothing was measured.

        These are its own records and, for types and layouts without any, the nearest ones that sum in fp32, as torch
        does by default. A D of another type than A is included only if ``--d`` names it.
        """
        if self.names_sizes:
            self._check_size_options()
        if self.mnk or self.problem_file is not None:
            return self.records()
        own = {(record.ab, record.d, record.acc, record.layout) for record in catalog.load(gpus=[self.gpu])}
        kinds = [
            kind
            for kind in self.kinds
            if (kind["ab"], kind["d"], kind["acc"], kind["layout"]) in own
            or (kind["acc"] == "f32" and kind["d"] in ("same", self.d))
        ]
        return list(chain(*(self._sampled(self._library(kind)) for kind in kinds)))

    def problems(self, seed: int = 0) -> list[Problem]:
        """The selected problems, whether or not they have records.

        Without ``--mnk`` or ``--where problems``, consecutive problems come from different size classes.
        """
        from cudal2gen.bench import stratified

        self._check_size_options()
        if self.problem_file is not None:
            return self._problems_of_list(self.problem_file)
        if self.mnk:
            return self._problems_of_mnk()
        kind = {name: getattr(self, name) for name in FILTERS} | self._variant
        problems = [problem_of(mnk, **kind) for mnk in dict.fromkeys(record.mnk for record in catalog.load())]
        return [problem for problem in stratified(problems, seed) if self._is_of_class(problem)][: self.sample]

    @property
    def _size_option_count(self) -> int:
        """How many of the options that choose sizes the user gave."""
        return (
            bool(self.mnk),
            self.everything,
            self.size_class is not None,
            self.sample is not None,
            self.problem_file is not None,
        ).count(True)

    def _check_size_options(self) -> None:
        """Ends the command unless exactly one option that chooses sizes was given."""
        if self._size_option_count != 1:
            refuse("give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE")

    @property
    def accs(self) -> tuple[Acc, ...]:
        """The selected accumulators; all of them for ``any``."""
        return ACCS if self.acc == ANY else (self.acc,)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The selected layouts; for ``any`` those with A (m,k). The others are selected only by name."""
        if self.layout == ANY:
            return tuple(layout for layout in LAYOUTS if rows_along_k(layout).a)
        return (self.layout,)

    @property
    def kinds(self) -> list[Kind]:
        """All selected combinations of types and layouts, see ``_kinds``."""
        return self._kinds(self.layouts)

    def _kinds(self, layouts: Iterable[Layout]) -> list[Kind]:
        """All selected combinations of types with these layouts.

        Illegal ones are left out, unless no legal one remains: then they are kept, so that a later check names the
        fault.
        """
        ab_types = AB_TYPES if self.ab == ANY else (self.ab,)
        d_types = D_TYPES if self.d == ANY else (self.d,)
        combinations = list(product(ab_types, d_types, self.accs, layouts))
        return [
            {"ab": ab, "d": d, "acc": acc, "layout": layout} | self._variant
            for ab, d, acc, layout in [kind for kind in combinations if Problem.exists(*kind[:3])] or combinations
        ]

    def _problems_of_mnk(self) -> list[Problem]:
        """The problems of ``--mnk``."""
        if self.gpu == ANY:
            refuse("--gpu any: --mnk needs one GPU")
        return [problem_of(mnk, gpu=self.gpu, **kind) for mnk in self.mnk for kind in self.kinds]

    def _problems_of_list(self, path: Path) -> list[Problem]:
        """The problems of a list that the selection admits; a note counts the others."""
        problems = catalog.load_problems(path)
        admitted = [problem for problem in problems if self.admits(problem) and self._has_variant(problem)]
        if not admitted:
            refuse(f"{path} has no problem for {self.target}")
        if others := len(problems) - len(admitted):
            note(f"{others} problems of {path} are not for {self.target}, and left out")
        return admitted

    def _record_finder(self, source: str | None = None) -> Callable[[Problem], Record]:
        """A function that gives the record for a problem, after changes; only records of ``source`` if it is given.

        The function prints a note if the record belongs to another problem, or if ``--set gpu`` moved it to another
        GPU.
        """
        from cudal2gen import results
        from cudal2gen.generation import answers

        if self.origin:
            match: Callable[[Problem], catalog.Match] = partial(catalog.nearest, records=published.structures())
        elif source is None:
            match = answers.Answers(results.measurements())
        else:
            match = partial(catalog.nearest, records=catalog.load(gpus=[source]))

        def record_for(problem: Problem) -> Record:
            matched = match(problem)
            if matched.note:
                note(matched.note)
            record = self.changed(matched.record)
            if record.gpu != self.gpu:
                own = f"for {record.gpu}'s own give --gpu {record.gpu}"
                note(f"this is {self.gpu}'s kernel within {record.gpu}'s limits; {own}")
            return record

        return record_for

    def _records_of_list(self, path: Path, source: str | None) -> Iterator[Record]:
        """The records for the problems of a list. A note names each problem that no record can serve."""
        record_for = self._record_finder(source)
        for problem in self._problems_of_list(path):
            try:
                yield record_for(problem)
            except catalog.CatalogError as error:
                note(f"{error}; left out")

    def _is_of_class(self, problem: Problem) -> bool:
        """Whether a problem has the selected size class, if one was selected."""
        return self.size_class in (None, problem.size_class)

    def _sampled(self, records: Iterable[Record], seed: int = 0) -> list[Record]:
        """The records that ``--class`` and ``--sample`` leave of these. Ends the command if none is left."""
        chosen = (
            [record for record in records if self._is_of_class(record.problem)] if self.size_class else list(records)
        )
        if not chosen:
            of_class = f" of class {self.size_class}" if self.size_class else ""
            refuse(f"no records for {self.target}{of_class}; see 'cudal2gen list'")
        if self.sample is None:
            return chosen
        from cudal2gen.bench import stratified

        by_problem = {record.problem: record for record in chosen}
        return [by_problem[problem] for problem in stratified(by_problem, seed)[: self.sample]]

    def _changed(self, records: Iterable[Record]) -> list[Record]:
        """The records after ``--set`` and ``--fit``."""
        return list(map(self.changed, records))

    def changed(self, record: Record) -> Record:
        """The record after ``--set`` and ``--fit``. If several records may be selected, each note begins with the size
        of the record that it is about. Raises IllegalRecord."""
        several = len(self.mnk) != 1 or ANY in (self.ab, self.d, self.acc, self.layout)
        title = record.mnk if several else ""
        return changed(record, self.changes, fit=self.fit, title=title)


def parsed_sizes(mnk: str) -> tuple[int, int, int]:
    """m, n and k of a text such as 4096_4096_64. Ends the command for any other text."""
    parts = mnk.split("_")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) <= 9 for part in parts):
        refuse(f"--mnk {mnk}: expected three sizes M_N_K, such as 4096_4096_64")
    m, n, k = (int(part) for part in parts)
    return m, n, k


def problem_of(mnk: str, **fields: str) -> Problem:
    """The problem of a size such as 4096_4096_64. Ends the command if there is no such problem."""
    m, n, k = parsed_sizes(mnk)
    try:
        return Problem.model_validate(fields | {"m": m, "n": n, "k": k})
    except ValidationError as error:
        refuse(explain(error))


FILTERS = ("gpu", "ab", "d", "acc", "layout")
SHORT = ("gpu", "acc", "layout")  # the ``FILTERS`` with an option of their own; the others are values of --where
# The fields that verbs offer if they take plain products only.
PLAIN = ("mnk", "everything", "size_class", "sample", "problem_file", *FILTERS, "origin", "changes", "fit")
GPU_HELP = "the GPU model; after a colon the CUDA index of the card, as in h200:1"
VARIANT_FIELDS = ("fusion", "batch")  # verbs that take fused and batched products have these too
SIZE_HELP = {"mnk": "Problem size, e.g. 4096_4096_64."}
ALL_HELP = {"everything": "All records of --gpu, --acc, --layout and --where; each may be any."}
# ``OneRecord``, ``OneProblem``, ``SeveralRecords``: for verbs on one record, on one problem, on several records.
# ``Filter``: for verbs that report.
OneRecord = Annotated[
    Selection,
    Offer(only=("mnk", *FILTERS, *VARIANT_FIELDS, "origin", "changes", "fit"), single=("mnk",), helps=SIZE_HELP),
]
OneProblem = Annotated[Selection, Offer(only=("mnk", *FILTERS, *VARIANT_FIELDS), single=("mnk",), helps=SIZE_HELP)]
SeveralRecords = Annotated[Selection, Offer(only=(*PLAIN, *VARIANT_FIELDS), wildcards=FILTERS, helps=ALL_HELP)]
FILTER_FIELDS = (*FILTERS, *VARIANT_FIELDS)
LIST_HELP = {
    "mnk": "only of this size, such as 4096_4096_64; several may be given",
    "gpu": "only of this GPU model",
    "size_class": "only sizes of this class",
}
FILTER = Offer(
    only=("mnk", "size_class", *FILTER_FIELDS),
    shared=("mnk",),
    wildcards=FILTER_FIELDS,
    defaults=dict.fromkeys(FILTER_FIELDS, ANY),
    helps=LIST_HELP,
)
Filter = Annotated[Selection, FILTER]
