"""Decides whether one of our kernels or the vendor's library should compute a problem, from a table of measurements.

For a measured problem, the kernel is chosen if it beat the vendor's library by more than noise: the lower end of its
speedup's 95 % interval must be at least 1 + ``MARGIN`` in every measured L2 state.

For other sizes, the table looks at the nearest measured problems (at most a factor of two away in each size). The
kernel must have won on all of them, and must still be faster after the estimated cost of partly filled tiles and of
copies to padded matrices. If there is no such neighbour, the vendor's library computes the problem.

Fused, batched and grouped problems need measurements of their own. If there are none, the measurement of the plain
product (the same sizes without fusion or batch) suggests a kernel, but says nothing about its speed with the fusion or
batch. The vendor's library then computes the problem unless the caller passes ``prefer="inferred"``.

Times are in microseconds. This module needs neither torch nor a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from cudal2gen import results
from cudal2gen.kernel import Acc, IllegalRecord, Layout, Problem, Record, Use, ceil_div, explain, parse, serving
from cudal2gen.kernel.fusion import PLAIN, Fusion
from cudal2gen.kernel.launch import LaunchOperands, Sizes
from cudal2gen.kernel.problem import MAX_EXTENT, Batch
from cudal2gen.results import NEUTRAL, Extent, Measurement, Measurements, Products
from kernelproof.ground.chips import CardFacts
from kernelproof.ground.element import ElementName, OutputName
from kernelproof.ground.errors import WrongInput

# What the caller prefers. "measured": the kernel only if measurements say that it is faster. "inferred": the same, but
# an unmeasured fusion or batch takes the kernel of its plain product. "kernel", "vendor": always ours, always theirs.
Prefer = Literal["measured", "inferred", "kernel", "vendor"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

MARGIN = 0.01  # smallest gain over the vendor's library that counts as a win on a measured problem
STRETCH = 0.05  # additional gain that is required if the speedup is estimated from neighbours
OCTAVE = 1.0  # largest distance of a neighbour: each of its sizes is within a factor of 2**OCTAVE
NEIGHBOURS = 3  # how many of the nearest neighbours are consulted
# The estimated cost of copies to padded matrices. Too high an estimate only costs a missed win; too low an estimate
# would choose a slower kernel, so these err on the high side.
COPY_US = 3.0  # fixed time of one copy, in microseconds
COPY_SHARE = 0.5  # share of the peak bandwidth that a copy reaches
BANDWIDTH = 500_000.0  # bytes per microsecond (0.5 TB/s), assumed if the card's bandwidth is unknown


@dataclass(frozen=True)
class TableKernel:
    """One kernel of a table: its record's JSON values (``fields``) and the ``digest`` of its compiled binary.

    ``place`` says in error messages where the record was read. ``card`` is set only if the kernel is to run on another
    GPU model than the one that its record was made for.
    """

    digest: str
    fields: Mapping[str, Any]
    place: str = field(default="table", compare=False)
    card: CardFacts | None = field(default=None, compare=False)

    @cached_property
    def record(self) -> Record:
        """The parsed record. A table has thousands of kernels, so each is parsed at its first use. Raises
        IllegalRecord."""
        try:
            return parse(dict(self.fields))
        except IllegalRecord as error:
            raise IllegalRecord(f"{self.place}: {error}") from None

    @property
    def sizes(self) -> Sizes:
        """The sizes m, n, k for which the kernel's record was made."""
        return Sizes(self.fields["m"], self.fields["n"], self.fields["k"])

    def distance(self, problem: Problem) -> float:
        """How far this kernel's sizes are from a problem's, as ``kernel.serving`` defines it.

        The distance is needed for every kernel of a table, so it is computed without parsing the record.
        """
        fields = self.fields if {"bm", "bn"} <= self.fields.keys() else dict(self.record)
        extents = {name: fields[name] for name in ("gpu", "layout", "m", "n", "k")}
        return serving.distance(problem, Problem.model_construct(**extents), (fields["bm"], fields["bn"]))

    def computes(self, problem: Problem) -> bool:
        """Whether the kernel has the problem's types and layout."""
        return Problem.kind_of(self.fields) == problem.kind

    def use(self, sizes: Sizes, operands: LaunchOperands) -> Use | None:
        """How this binary computes a product of these sizes with as few copies as possible; None if it cannot.

        A binary can compute other sizes than its record's own if the same compiled code is legal for them.
        """
        return serving.use(self.record, sizes, operands) if self.runs else None

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA in bytes, static and dynamic."""
        return self.record.smem_bytes + self.record.smem_static_bytes

    @cached_property
    def runs(self) -> bool:
        """Whether the card can launch this kernel. A card of the kernel's own model always can."""
        return self.card is None or self.card.takes(self.record.arch, self.smem_bytes)


class Row(NamedTuple):
    """One measured problem, the number of its best kernel in the table, and how that kernel compares with the vendor.

    ``kernel`` is None if the table does not contain that kernel. ``state`` names the L2 state and the baseline against
    which the kernel did worst; ``us``, ``vendor_us`` (median times in microseconds) and ``speedup`` (value, low and
    high end of the 95 % interval) are those of this worst case. ``products`` is the number of products in the measured
    launch, which is 1 unless the problem is batched.
    """

    acc: Acc
    layout: Layout
    m: Extent
    n: Extent
    k: Extent
    kernel: Annotated[int, Field(ge=0)] | None
    us: Positive
    vendor_us: Positive
    speedup: tuple[Positive, Positive, Positive]
    state: str
    ab: ElementName = "f16"
    d: OutputName = "same"
    batch: Batch = "none"
    fusion: Fusion = PLAIN
    products: Products = 1

    @property
    def spelled(self) -> dict[str, Any]:
        """The row as it is stored: fields with their default value are left out, and the fusion is its text."""
        fields = self._asdict()
        spelled = {name: value for name, value in fields.items() if name not in NEUTRAL or value != NEUTRAL[name]}
        return spelled | ({"fusion": self.fusion.text} if self.fusion else {})

    @property
    def kind(self) -> tuple[Any, ...]:
        """The problem's types, layout, fusion and batch; see ``Problem.kind_of``."""
        return Problem.kind_of(self._asdict())

    @property
    def sizes(self) -> Sizes:
        """The sizes m, n, k."""
        return Sizes(self.m, self.n, self.k)

    @property
    def text(self) -> str:
        """Sizes, fusion and batch as messages show them."""
        fusion = f" {self.fusion}" if self.fusion else ""
        return f"{self.sizes.text}{fusion}{f' x{self.products}' if self.batch != 'none' else ''}"

    @property
    def wins(self) -> bool:
        """Whether a kernel was measured faster than the vendor beyond noise, by at least ``MARGIN``."""
        return self.kernel is not None and self.speedup[1] >= 1 + MARGIN


class Choice(NamedTuple):
    """The decision for one problem: which kernel computes it, how, and why.

    ``kernel``: the kernel's number in the table, or None for the vendor's library. ``use``: how that kernel is
    launched. ``reason``: why, with the numbers of this problem. ``short``: the same reason without numbers, so that
    equal reasons can be counted. ``inferred``: True if only the plain product was measured, so the kernel may be slower
    than the vendor's. ``rows``: the measurements of other problems that the decision relies on, if there are any.
    """

    kernel: int | None
    use: Use | None
    reason: str
    short: str
    inferred: bool = False
    rows: tuple[Row, ...] = ()


@dataclass
class Table:
    """Kernels for one GPU model and what was measured of them.

    ``bandwidth``: device memory bandwidth of the card in bytes per microsecond. ``notes``: what a caller should know
    about how the table was made. ``card``: set only if the table is used on a card of another model than ``gpu``.
    """

    gpu: str
    kernels: list[TableKernel]
    rows: list[Row]
    bandwidth: float = BANDWIDTH
    notes: list[str] = field(default_factory=list)
    card: CardFacts | None = None

    def on(self, card: CardFacts) -> Table:
        """This table as a given card can use it.

        A card of the table's own model uses the table as it is. Another model gets the kernels whose code it can run
        and no rows, because a measurement on one card says nothing about another.
        """
        if card.model == self.gpu:
            return self
        # An architecture follows from the family, so only one record of each family is parsed.
        examples = {kernel.fields["family"]: kernel for kernel in self.kernels}
        families = {family for family, kernel in examples.items() if card.takes(kernel.record.arch, 0)}
        kernels = [replace(kernel, card=card) for kernel in self.kernels if kernel.fields["family"] in families]
        return Table(self.gpu, kernels, [], card=card)

    @cached_property
    def _by_problem(self) -> dict[tuple[tuple[Any, ...], Sizes, int], Row]:
        return {(row.kind, row.sizes, row.products): row for row in self.rows}

    @cached_property
    def kinds(self) -> frozenset[tuple[Any, ...]]:
        """The kinds of problems for which the table has kernels; see ``Problem.kind_of``."""
        return frozenset(Problem.kind_of(kernel.fields) for kernel in self.kernels)

    def choose(
        self,
        problem: Problem,
        operands: LaunchOperands,
        prefer: Prefer = "measured",
        extra_us: float = 0.0,
        products: int = 1,
    ) -> Choice:
        """Chooses what computes a problem, which may be fused, batched or grouped.

        ``operands``: the memory layout of A, B and D; in a batch, that of each product. ``products``: the number of
        products in a batched launch, or of groups in a grouped one (where the problem's ``m`` counts the rows of all
        groups). ``extra_us``: time in microseconds that the caller spends only if our kernel is used; it counts
        against the kernel. A kernel chosen for a fused problem computes the whole fusion.
        """
        sizes = Sizes(problem.m, problem.n, problem.k)
        if prefer == "vendor":
            return Choice(None, None, "the vendor's library was asked for", "asked for")
        if max(*sizes, operands.a.ld, operands.b.ld, operands.d.ld) > MAX_EXTENT:
            reason = f"an extent or leading dimension exceeds {MAX_EXTENT}"
            return Choice(None, None, f"{problem.mnk}: {reason}", reason)
        if problem.kind not in self.kinds:
            reason = f"no kernels for {self.gpu} {problem.types} {problem.layout}{problem.suffix}"
            return Choice(None, None, reason, reason)
        if prefer == "kernel":
            return self._nearest(problem, sizes, operands)
        # The order matters: a measurement of this very problem outweighs its neighbours, and those outweigh the plain
        # product, which knows nothing about the cost of a fusion or batch.
        row = self.measured(problem, products)
        if row is not None:
            return self.by_row(row, row.sizes, operands, extra_us)
        near = self._near(problem, sizes, products)
        if near or not problem.suffix:
            return self._estimated(near, sizes, products, operands, extra_us)
        return self._inferred(problem, sizes, operands, prefer, extra_us)

    def measured(self, problem: Problem, products: int = 1) -> Row | None:
        """The row of exactly this problem, or None."""
        return self._by_problem.get((problem.kind, Sizes(problem.m, problem.n, problem.k), products))

    def by_row(self, row: Row, sizes: Sizes, operands: LaunchOperands, extra_us: float = 0.0) -> Choice:
        """The choice that one measured row gives, for its own sizes or for other ``sizes`` that it represents.

        The row was measured on packed operands. If these operands need more copies than packed ones, the additional
        time is added to the kernel's before it is compared with the vendor's.
        """
        measured = f"{row.text} was measured: {_speedup(row)}"
        if row.kernel is None or not row.wins:
            return Choice(None, None, f"{measured}, which is not faster beyond noise", "measured, not faster")
        kernel = self.kernels[row.kernel]
        use = kernel.use(sizes, operands)
        packed = kernel.use(row.sizes, LaunchOperands.packed(row.layout, row.sizes, row.fusion))
        if use is None or packed is None:
            return Choice(None, None, f"{measured}, but its kernel does not take these operands", "operands not taken")
        more = max(0.0, self._copied_us(kernel, use, sizes) - self._copied_us(kernel, packed, row.sizes))
        low = row.speedup[1] * row.us / (row.us + more + extra_us)
        price = f", {more + extra_us:.1f} us of copies added" if more + extra_us else ""
        if low < 1 + MARGIN:
            return Choice(None, None, f"{measured}{price}: not faster then", "copies too dear")
        return Choice(row.kernel, use, f"{measured}{price}", "measured")

    def _inferred(
        self, problem: Problem, sizes: Sizes, operands: LaunchOperands, prefer: Prefer, extra_us: float
    ) -> Choice:
        """The choice for a fused or batched problem if only its plain product was measured.

        It is the plain product's kernel with this fusion or batch added, if that kernel was measured faster and the
        caller prefers ``inferred``; otherwise it is the vendor's library.
        """
        unmeasured = f"{sizes.text}{problem.suffix} was not measured"
        plain = self.choose(problem.revised(fusion=PLAIN, batch="none"), operands, "measured", extra_us)
        if plain.kernel is None:
            reason = f"{unmeasured}; the plain product: {plain.reason}"
            return Choice(None, None, reason, "fusion or batch not measured, plain not faster")
        number, source = self.counterpart(plain.kernel, problem), self.kernels[plain.kernel].record
        use = None if number is None else self.kernels[number].use(sizes, operands)
        if number is None or use is None:
            reason = f"{unmeasured}, and the plain product's kernel {source.name} is not in the table{problem.suffix}"
            return Choice(None, None, reason, "no kernel with this fusion or batch")
        reason = f"{unmeasured}; the plain product: {plain.reason}"
        if prefer != "inferred":
            return Choice(None, None, f"{reason}; prefer=inferred takes its kernel", "fusion or batch not measured")
        return Choice(number, use, reason, "inferred from the plain product", inferred=True)

    def counterpart(self, number: int, problem: Problem) -> int | None:
        """The number of a kernel's counterpart for a problem with a fusion or batch: of the same sizes and decisions
        (tile, stages, ...), so that it adds up a row in the same order. None if the table has none."""
        source = self.kernels[number]
        decisions = source.record.decisions()
        return next(
            (
                other
                for other, kernel in enumerate(self.kernels)
                if kernel.computes(problem) and kernel.sizes == source.sizes and kernel.record.decisions() == decisions
            ),
            None,
        )

    def _estimated(
        self, near: Sequence[Row], sizes: Sizes, products: int, operands: LaunchOperands, extra_us: float
    ) -> Choice:
        """The choice for unmeasured sizes, estimated from the measured neighbours ``near``."""
        # With m or n = 1 the vendor's library switches to matrix-vector kernels, so a neighbour with a larger m or n
        # says nothing about its time.
        if min(sizes.m, sizes.n) == 1:
            reason = "a product with a vector, which the vendor's library computes in other ways, was not measured"
            return Choice(None, None, f"{sizes.text}: {reason}", "vector, not measured")
        if not near:
            reason = "nothing was measured within a factor of two"
            if self.card is not None and not self.rows:
                reason = f"nothing was measured on this card; the kernels are {self.gpu}'s"
            return Choice(None, None, f"{sizes.text}: {reason}", reason)
        neighbours = "; ".join(f"{row.text} {_speedup(row)}" for row in near)
        if not all(row.wins for row in near):
            return Choice(None, None, f"not every measured neighbour is won: {neighbours}", "neighbours not all won")
        predicted = [(*self._predicted(row, sizes, products, operands, extra_us), row) for row in near]
        usable = [(low, use, row) for low, use, row in predicted if use is not None]
        if not usable:
            return Choice(None, None, f"no neighbour's kernel serves {sizes.text}: {neighbours}", "operands not taken")
        low, use, row = max(usable, key=lambda candidate: candidate[0])
        estimate = f"{low:.3f}x expected with the kernel of {row.sizes.text}, waste and copies priced in ({neighbours})"
        if low < 1 + MARGIN + STRETCH:
            return Choice(None, None, f"only {estimate}", "estimated, not faster")
        return Choice(row.kernel, use, estimate, "estimated")

    def _near(self, problem: Problem, sizes: Sizes, products: int) -> list[Row]:
        """The measured neighbours, nearest first. The number of products counts as a fourth size."""
        of_kind = [row for row in self.rows if row.kind == problem.kind]
        extents = (*sizes, products)
        measured = [
            (steps, row) for row in of_kind if max(steps := _octaves(extents, (*row.sizes, row.products))) <= OCTAVE
        ]
        return [row for _, row in sorted(measured, key=lambda pair: (sum(pair[0]), pair[1].sizes))[:NEIGHBOURS]]

    def _predicted(
        self, row: Row, sizes: Sizes, products: int, operands: LaunchOperands, extra_us: float
    ) -> tuple[float, Use | None]:
        """The low end of the speedup at other sizes, estimated from one neighbour's row; and how its kernel is used.

        The estimate assumes that time is proportional to work. The vendor's work is the useful multiply-adds alone (it
        is assumed to waste nothing); our work includes the padding of partly filled tiles, plus copies. Both
        assumptions are to our kernel's disadvantage.
        """
        assert row.kernel is not None
        kernel = self.kernels[row.kernel]
        use = kernel.use(sizes, operands)
        packed = kernel.use(row.sizes, LaunchOperands.packed(row.layout, row.sizes, row.fusion))
        if use is None or packed is None:
            return 0.0, None
        # In a grouped launch m already counts the rows of all groups, so its work must not be multiplied by their
        # number; in a batch every product has all m rows.
        grouped = kernel.record.problem.grouped
        groups, row_groups = (products, row.products) if grouped else (1, 1)
        more_products = 1.0 if grouped else products / row.products
        useful = more_products * math.prod(sizes) / math.prod(row.sizes)
        tiled = _work(kernel.record, use.launched, groups) / _work(kernel.record, packed.launched, row_groups)
        tiled *= more_products
        kernel_us = row.us * tiled
        more = max(0.0, self._copied_us(kernel, use, sizes) - self._copied_us(kernel, packed, row.sizes) * tiled)
        return row.speedup[1] * row.us * useful / (kernel_us + more + extra_us), use

    def _nearest(self, problem: Problem, sizes: Sizes, operands: LaunchOperands) -> Choice:
        """The nearest kernel that computes the product, whether or not it was measured."""

        def serve(number: int) -> tuple[int, Use] | None:
            use = self.kernels[number].use(sizes, operands)
            return None if use is None else (number, use)

        numbers = [number for number, kernel in enumerate(self.kernels) if kernel.computes(problem)]
        ranked = sorted((self.kernels[number].distance(problem), number) for number in numbers)
        if (nearest := serving.nearest(ranked, serve)) is None:
            reason = "no kernel serves these operands"
            return Choice(None, None, f"{sizes.text}: {reason}", reason)
        number, _, use = nearest
        why = f"the kernel of {self.kernels[number].sizes.text} was asked for, nothing measured says that it is faster"
        return Choice(number, use, why, "asked for")

    def _copied_us(self, kernel: TableKernel, use: Use, sizes: Sizes) -> float:
        """The estimated time of a kernel's copies to and from padded matrices, in microseconds."""
        if not any(use.copied):
            return 0.0
        moved = use.copied_bytes(sizes, kernel.record.problem.widths)
        return COPY_US * sum(use.copied) + moved / (self.bandwidth * COPY_SHARE)

    def chosen(self) -> Table:
        """A smaller table with only the kernels that won on some measured problem.

        Fused and batched kernels with the same sizes and decisions as a winner are kept as well, since ``inferred``
        choices need them. All rows are kept, because lost rows are the reasons for choosing the vendor's library; rows
        whose kernel was dropped have ``kernel`` None.
        """
        won = {row.kernel for row in self.rows if row.wins and row.kernel is not None}
        designs = {(kernel.sizes, str(kernel.record.decisions())) for kernel in map(self.kernels.__getitem__, won)}
        winners = [
            number
            for number, kernel in enumerate(self.kernels)
            if number in won
            or (kernel.record.problem.suffix and (kernel.sizes, str(kernel.record.decisions())) in designs)
        ]
        numbers = {old: new for new, old in enumerate(winners)}
        rows = [row._replace(kernel=None if row.kernel is None else numbers.get(row.kernel)) for row in self.rows]
        return Table(self.gpu, [self.kernels[old] for old in winners], rows, self.bandwidth, self.notes)

    def dump(self) -> dict[str, Any]:
        """The table as JSON values, for ``load``."""
        kernels = [{"digest": kernel.digest, "record": dict(kernel.fields)} for kernel in self.kernels]
        rows = [row.spelled for row in self.rows]
        return {"gpu": self.gpu, "bandwidth_bytes_us": self.bandwidth, "kernels": kernels, "rows": rows}

    @classmethod
    def load(cls, values: Any, place: str = "table") -> Table:
        """The table that ``dump`` wrote. ``place`` names the file in error messages.

        Raises WrongInput if the values are not a table of this version. Only the problem of each kernel is checked
        here; its record is parsed at its first use, which raises IllegalRecord.
        """
        try:
            spelled = _Table.model_validate(values)
        except ValidationError as error:
            raise WrongInput(f"{place}: {explain(error)}") from None
        absent = [row.kernel for row in spelled.rows if row.kernel is not None and row.kernel >= len(spelled.kernels)]
        if absent:
            raise WrongInput(f"{place}: a row names kernel {absent[0]} of {len(spelled.kernels)}")
        kernels = []
        for number, kernel in enumerate(spelled.kernels):
            where = f"{place}: kernel {number}"
            try:
                fields = {name: kernel.record[name] for name in Problem.model_fields if name in kernel.record}
                Problem.model_validate(fields)
            except ValidationError as error:
                raise WrongInput(f"{where}: {explain(error)}") from None
            kernels.append(TableKernel(kernel.digest, kernel.record, where))
        return cls(spelled.gpu, kernels, list(spelled.rows), spelled.bandwidth_bytes_us)


class _Kernel(BaseModel):
    """A kernel as ``Table.dump`` spells it."""

    digest: str
    record: dict[str, Any]


class _Table(BaseModel):
    """A table as ``Table.dump`` spells it."""

    gpu: str
    bandwidth_bytes_us: Positive
    kernels: tuple[_Kernel, ...]
    rows: tuple[Row, ...]


def variants(
    records: Iterable[Record], fusions: Iterable[str], batches: Iterable[Batch], layouts: Iterable[Layout] = ()
) -> tuple[list[Record], int]:
    """Every plain record with each of the fusions, each of the batches and each of the layouts; and the number of
    combinations that the rules forbid.

    Raises IllegalRecord if a text in ``fusions`` is not a fusion.
    """
    changes: list[dict[str, Any]] = [{"fusion": fusion} for fusion in dict.fromkeys(fusions)]
    changes += [{"batch": batch} for batch in dict.fromkeys(batches)]
    changes += [{"layout": layout} for layout in dict.fromkeys(layouts)]
    legal, illegal = [], 0
    for record, change in product(records, changes):
        try:
            legal.append(record.at(record.problem.revised(**change)))
        except IllegalRecord:
            illegal += 1
    return legal, illegal


def tabulate(
    gpu: str, records: Sequence[Record], measured: Measurements, digest: Callable[[Record], str] | None = None
) -> Table:
    """Makes the table of a GPU model from its records and their measurements under the ``device`` protocol.

    ``digest`` gives the digest of a record's present binary. Measurements of another binary, or of a record that is not
    among ``records``, are left out, and ``notes`` says how many. If several kernels were measured on one problem, its
    row is that of the kernel whose worst case (over L2 states and baselines) is best.
    """
    identify = digest or (lambda record: record.name)
    kernels = [TableKernel(identify(record), record.model_dump(mode="json")) for record in records]
    numbers = {(record.problem, record.name): number for number, record in enumerate(records)}
    cards = {name: environment for name, environment in measured.environments.items() if environment.gpu == gpu}
    latest: dict[tuple[Problem, int, str], dict[str, Measurement]] = {}
    for measurement in measured.measurements:
        timing = measurement.timing(results.KERNEL)
        counts = measurement.environment in cards and measurement.protocol == "device"
        if counts and timing is not None and timing.record:
            key = (measurement.problem, measurement.products, timing.record)
            latest.setdefault(key, {})[measurement.l2] = measurement
    rows: dict[tuple[Problem, int], Row] = {}
    unlisted = 0
    for (problem, products, name), states in latest.items():
        number = numbers.get((problem, name))
        binaries = {measurement.digest for measurement in states.values()}
        if number is None or (digest and binaries != {kernels[number].digest}):
            unlisted += 1
        elif (row := row_of(problem, products, number, states)) and (
            (problem, products) not in rows or row.speedup[1] > rows[problem, products].speedup[1]
        ):
            rows[problem, products] = row
    bandwidth = min((card.bandwidth_bytes_us for card in cards.values()), default=BANDWIDTH)
    notes = [f"{unlisted} measured kernels are not among these, or were compiled otherwise"] if unlisted else []
    ordered = sorted(rows.values(), key=lambda row: (row[:5], row.kind, row.products))
    return Table(gpu, kernels, ordered, bandwidth, notes)


def row_of(problem: Problem, products: int, number: int, states: Mapping[str, Measurement]) -> Row | None:
    """The row of kernel ``number`` from its measurements, one for each L2 state.

    It holds the L2 state and the rival against which the kernel did worst, so a row that wins there wins everywhere.
    It is None if the first rival (see ``results.rivals``) was not measured.
    """
    rivals = results.rivals(problem)
    contests = []
    for state, measurement in sorted(states.items()):
        kernel = measurement.timing(results.KERNEL)
        for baseline in rivals:
            vendor, ratio = measurement.timing(baseline), results.speedup(measurement, baseline)
            if kernel is not None and vendor is not None and ratio is not None:
                host = ", host time in" if kernel.wall_us else ""
                contests.append((ratio, kernel.median_us, vendor.median_us, f"{state} L2{host}, {baseline}"))
    if not any(state.endswith(rivals[0]) for *_, state in contests):
        return None
    ratio, us, vendor_us, state = min(contests, key=lambda contest: contest[0].low)
    speedup = (round(ratio.value, 5), round(ratio.low, 5), round(ratio.high, 5))
    sizes = (problem.m, problem.n, problem.k)
    times = (round(us, 4), round(vendor_us, 4))
    return Row(
        problem.acc, problem.layout, *sizes, number, *times, speedup, state,
        problem.ab, problem.d, problem.batch, problem.fusion, products,
    )  # fmt: skip


def _speedup(row: Row) -> str:
    """A speedup as text, with its interval and the state of the measurement."""
    value, low, high = row.speedup
    return f"{value:.3f}x [{low:.3f}, {high:.3f}] ({row.state})"


def _octaves(extents: Sequence[int], others: Sequence[int]) -> tuple[float, ...]:
    """The distance of each extent from its counterpart: 1 for a factor of two."""
    return tuple(abs(math.log2(a / b)) for a, b in zip(extents, others, strict=True))


def _work(record: Record, sizes: Sizes, groups: int = 1) -> int:
    """The multiply-adds that a launch's tiles compute, padding included. The rows are assumed to be shared equally
    among ``groups``, each of which is padded to whole tiles."""
    filled = min(groups, sizes.m)
    rows = filled * ceil_div(ceil_div(sizes.m, filled), record.bm) * record.bm
    return rows * ceil_div(sizes.n, record.bn) * record.bn * sizes.k
