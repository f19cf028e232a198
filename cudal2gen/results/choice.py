"""Which kernel, or the vendor's library, answers a problem, and why: a table made from measurements, and its reading.

A kernel is chosen where it was measured faster than the vendor's library by more than noise: in each L2 state, and by
the lower end of the interval. Off the measured problems it must have won on all neighbours, and win after what its
tiles waste and what copying to padded matrices costs. Where nothing was measured, the vendor's library answers.

A fused, batched or grouped problem is measured by itself. Where it was not, the measurement of its plain product says
which kernel would take it, and that nothing is known of its speed: the vendor's library answers unless the caller
prefers ``inferred``. Times are in microseconds; nothing here needs torch or a GPU.
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
from cudal2gen.kernel.launch import Operands, Sizes
from cudal2gen.kernel.problem import MAX_EXTENT, Batch
from cudal2gen.results import NEUTRAL, Extent, Measurement, Measurements, Products
from kernelproof.ground.chips import CardFacts
from kernelproof.ground.element import ElementName, OutputName
from kernelproof.ground.errors import WrongInput

# ``inferred``: as ``measured``, and where a fusion or batch was not measured, by the measurement of its plain product.
Prefer = Literal["measured", "inferred", "kernel", "vendor"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

MARGIN = 0.01  # least gain over the vendor's library on a measured problem
STRETCH = 0.05  # further gain required of a problem that was not measured
OCTAVE = 1.0  # a neighbour is at most twice or half as large in each direction
NEIGHBOURS = 3
# Cost of copying to padded matrices; estimates, rather too high than too low.
COPY_US = 3.0  # of a copy beside its bytes
COPY_SHARE = 0.5  # share of the peak bandwidth that a copy reaches
BANDWIDTH = 500_000.0  # bytes per microsecond (0.5 TB/s) assumed of an unknown card


@dataclass(frozen=True)
class Kernel:
    """One record of a table, and the binary that it stands for. ``fields``: the record's JSON values.

    ``place``: where these come from, for messages. ``card``: that it is to run on, where that is not its own model.
    """

    digest: str
    fields: Mapping[str, Any]
    place: str = field(default="table", compare=False)
    card: CardFacts | None = field(default=None, compare=False)

    @cached_property
    def record(self) -> Record:
        """Parsed at first use, since a table has thousands. Raises IllegalRecord."""
        try:
            return parse(dict(self.fields))
        except IllegalRecord as error:
            raise IllegalRecord(f"{self.place}: {error}") from None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.fields["m"], self.fields["n"], self.fields["k"])

    def distance(self, problem: Problem) -> float:
        """How far its record is from serving a problem, see ``kernel.serving``; the record is not parsed for it."""
        fields = self.fields if {"bm", "bn"} <= self.fields.keys() else dict(self.record)
        extents = {name: fields[name] for name in ("gpu", "layout", "m", "n", "k")}
        return serving.distance(problem, Problem.model_construct(**extents), (fields["bm"], fields["bn"]))

    def computes(self, problem: Problem) -> bool:
        """Whether types and layout are the problem's."""
        return Problem.kind_of(self.fields) == problem.kind

    def use(self, sizes: Sizes, operands: Operands) -> Use | None:
        """How this binary computes the product, with as few copies as it can; None where it does not.

        Other sizes than the record's own are computed where they are legal and leave the binary as it is.
        """
        return serving.use(self.record, sizes, operands) if self.runs else None

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA, all of it."""
        return self.record.smem_bytes + self.record.smem_static_bytes

    @cached_property
    def runs(self) -> bool:
        """Whether its card takes it; its own model does."""
        return self.card is None or self.card.takes(self.record.arch, self.smem_bytes)


class Row(NamedTuple):
    """One measured problem: its best kernel by number, None where that is not in the table; what it won or lost.

    ``us`` and ``vendor_us`` are medians in the worst L2 state; ``speedup``: value, low and high there. ``products``: of
    the launch that was measured, more than one of a batch only.
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
        """The fields that are not neutral, a fusion by its text."""
        fields = self._asdict()
        spelled = {name: value for name, value in fields.items() if name not in NEUTRAL or value != NEUTRAL[name]}
        return spelled | ({"fusion": self.fusion.text} if self.fusion else {})

    @property
    def kind(self) -> tuple[Any, ...]:
        """The problem's."""
        return Problem.kind_of(self._asdict())

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.m, self.n, self.k)

    @property
    def text(self) -> str:
        """Sizes, fusion and batch in words."""
        fusion = f" {self.fusion}" if self.fusion else ""
        return f"{self.sizes.text}{fusion}{f' x{self.products}' if self.batch != 'none' else ''}"

    @property
    def wins(self) -> bool:
        return self.kernel is not None and self.speedup[1] >= 1 + MARGIN


class Choice(NamedTuple):
    """What answers a problem. ``kernel``: its number in the table, None for the vendor's library. ``reason``: why, with
    the numbers; ``short``: the same without, equal for all problems alike, so that it can be counted. ``inferred``:
    whether only the plain product was measured, so that nothing says that the kernel is faster. ``rows``: measurements
    that stand for the problem, where they are not its own."""

    kernel: int | None
    use: Use | None
    reason: str
    short: str
    inferred: bool = False
    rows: tuple[Row, ...] = ()


@dataclass
class Table:
    """Kernels for one GPU model and what was measured of them. ``bandwidth``: the card's, bytes per microsecond.
    ``card``: that the table serves, where that is of another model."""

    gpu: str
    kernels: list[Kernel]
    rows: list[Row]
    bandwidth: float = BANDWIDTH
    notes: list[str] = field(default_factory=list)
    card: CardFacts | None = None

    def on(self, card: CardFacts) -> Table:
        """The table for a card: as it is for one of its model; for another one the kernels whose code runs there, and
        no row, since a measurement says nothing of another card."""
        if card.model == self.gpu:
            return self
        # An architecture follows from the family, so one record of each is parsed.
        families = {kernel.fields["family"]: kernel for kernel in self.kernels}
        able = {family for family, kernel in families.items() if card.takes(kernel.record.arch, 0)}
        kernels = [replace(kernel, card=card) for kernel in self.kernels if kernel.fields["family"] in able]
        return Table(self.gpu, kernels, [], card=card)

    @cached_property
    def _by_problem(self) -> dict[tuple[tuple[Any, ...], Sizes, int], Row]:
        return {(row.kind, row.sizes, row.products): row for row in self.rows}

    @cached_property
    def kinds(self) -> frozenset[tuple[Any, ...]]:
        """Of the problems that kernels are here for."""
        return frozenset(Problem.kind_of(kernel.fields) for kernel in self.kernels)

    def choose(
        self,
        problem: Problem,
        operands: Operands,
        prefer: Prefer = "measured",
        extra_us: float = 0.0,
        products: int = 1,
    ) -> Choice:
        """What answers the problem, fused, batched or grouped as it says.

        ``operands``: how A, B and D lie, of a batch each product's. ``products``: how many a launch of a batch
        computes, or the groups of a grouped one, whose ``m`` counts the rows of all. ``extra_us``: what a kernel's
        caller must do besides and the vendor's need not. A kernel that answers a fused problem does all of its fusion.
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
        row = self.measured(problem, products)
        if row is not None:
            return self.by_row(row, row.sizes, operands, extra_us)
        near = self._near(problem, sizes, products)
        if near or not problem.suffix:
            return self._estimated(near, sizes, products, operands, extra_us)
        return self._inferred(problem, sizes, operands, prefer, extra_us)

    def measured(self, problem: Problem, products: int = 1) -> Row | None:
        """What was measured of this very problem."""
        return self._by_problem.get((problem.kind, Sizes(problem.m, problem.n, problem.k), products))

    def by_row(self, row: Row, sizes: Sizes, operands: Operands, extra_us: float = 0.0) -> Choice:
        """What the measurement of a problem says of it, or of other ``sizes`` for which it stands."""
        measured = f"{row.text} was measured: {_speedup(row)}"
        if row.kernel is None or not row.wins:
            return Choice(None, None, f"{measured}, which is not faster beyond noise", "measured, not faster")
        kernel = self.kernels[row.kernel]
        use = kernel.use(sizes, operands)
        packed = kernel.use(row.sizes, Operands.packed(row.layout, row.n, row.k, row.fusion))
        if use is None or packed is None:
            return Choice(None, None, f"{measured}, but its kernel does not take these operands", "operands not taken")
        more = max(0.0, self._copied_us(kernel, use, sizes) - self._copied_us(kernel, packed, row.sizes))
        low = row.speedup[1] * row.us / (row.us + more + extra_us)
        price = f", {more + extra_us:.1f} us of copies added" if more + extra_us else ""
        if low < 1 + MARGIN:
            return Choice(None, None, f"{measured}{price}: not faster then", "copies too dear")
        return Choice(row.kernel, use, f"{measured}{price}", "measured")

    def _inferred(self, problem: Problem, sizes: Sizes, operands: Operands, prefer: Prefer, extra_us: float) -> Choice:
        """A fused or batched problem of which nothing was measured: the kernel of its plain product, with its fusion
        or batch, where that was measured faster and the caller takes such a kernel."""
        unmeasured = f"{sizes.text}{problem.suffix} was not measured"
        plain = self.choose(problem.revised(fusion=PLAIN, batch="none"), operands, "measured", extra_us)
        if plain.kernel is None:
            reason = f"{unmeasured}; the plain product: {plain.reason}"
            return Choice(None, None, reason, "fusion or batch not measured, plain not faster")
        source = self.kernels[plain.kernel].record
        # The record of the plain product with this fusion or batch: the same decisions for the same sizes.
        same = (
            number
            for number, kernel in enumerate(self.kernels)
            if kernel.computes(problem)
            and kernel.sizes == self.kernels[plain.kernel].sizes
            and kernel.record.decisions() == source.decisions()
        )
        number = next(same, None)
        use = None if number is None else self.kernels[number].use(sizes, operands)
        if number is None or use is None:
            reason = f"{unmeasured}, and {source.name}, which the plain product takes, is not here{problem.suffix}"
            return Choice(None, None, reason, "no kernel with this fusion or batch")
        reason = f"{unmeasured}; the plain product: {plain.reason}"
        if prefer != "inferred":
            return Choice(None, None, f"{reason}; prefer=inferred takes its kernel", "fusion or batch not measured")
        return Choice(number, use, reason, "inferred from the plain product", inferred=True)

    def _estimated(
        self, near: Sequence[Row], sizes: Sizes, products: int, operands: Operands, extra_us: float
    ) -> Choice:
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
        """Measured neighbours, the nearest first; of a batch also in the number of products."""
        alike = [row for row in self.rows if row.kind == problem.kind]
        extents = (*sizes, products)
        measured = [
            (steps, row) for row in alike if max(steps := _octaves(extents, (*row.sizes, row.products))) <= OCTAVE
        ]
        return [row for _, row in sorted(measured, key=lambda pair: (sum(pair[0]), pair[1].sizes))[:NEIGHBOURS]]

    def _predicted(
        self, row: Row, sizes: Sizes, products: int, operands: Operands, extra_us: float
    ) -> tuple[float, Use | None]:
        """The low end of a speedup at other sizes: the neighbour's, less what the tiles waste and what is copied.

        The vendor's library is taken to waste nothing, and both to take time in proportion to their work.
        """
        assert row.kernel is not None
        kernel = self.kernels[row.kernel]
        use = kernel.use(sizes, operands)
        packed = kernel.use(row.sizes, Operands.packed(row.layout, row.n, row.k, row.fusion))
        if use is None or packed is None:
            return 0.0, None
        # The m of a grouped launch counts the rows of all groups.
        grouped = kernel.record.problem.grouped
        groups, its_groups = (products, row.products) if grouped else (1, 1)
        more_products = 1.0 if grouped else products / row.products
        useful = more_products * math.prod(sizes) / math.prod(row.sizes)
        tiled = _work(kernel.record, use.launched, groups) / _work(kernel.record, packed.launched, its_groups)
        tiled *= more_products
        kernel_us = row.us * tiled
        more = max(0.0, self._copied_us(kernel, use, sizes) - self._copied_us(kernel, packed, row.sizes) * tiled)
        return row.speedup[1] * row.us * useful / (kernel_us + more + extra_us), use

    def _nearest(self, problem: Problem, sizes: Sizes, operands: Operands) -> Choice:
        """The nearest kernel that computes the product, copies counted; for tests and curiosity."""

        def serve(number: int) -> tuple[int, Use] | None:
            use = self.kernels[number].use(sizes, operands)
            return None if use is None else (number, use)

        alike = [number for number, kernel in enumerate(self.kernels) if kernel.computes(problem)]
        ranked = sorted((self.kernels[number].distance(problem), number) for number in alike)
        if (nearest := serving.nearest(ranked, serve)) is None:
            reason = "no kernel serves these operands"
            return Choice(None, None, f"{sizes.text}: {reason}", reason)
        number, _, use = nearest
        why = f"the kernel of {self.kernels[number].sizes.text} was asked for, nothing measured says that it is faster"
        return Choice(number, use, why, "asked for")

    def _copied_us(self, kernel: Kernel, use: Use, sizes: Sizes) -> float:
        """The price of a kernel's copies."""
        if not any(use.copied):
            return 0.0
        moved = use.copied_bytes(sizes, kernel.record.problem.widths)
        return COPY_US * sum(use.copied) + moved / (self.bandwidth * COPY_SHARE)

    def chosen(self) -> Table:
        """The same with only those kernels that a measurement chooses, and those with their decisions for fused and
        batched problems; the other rows stay, as reasons."""
        won = {row.kernel for row in self.rows if row.wins and row.kernel is not None}
        alike = {(kernel.sizes, str(kernel.record.decisions())) for kernel in map(self.kernels.__getitem__, won)}
        winners = [
            number
            for number, kernel in enumerate(self.kernels)
            if number in won
            or (kernel.record.problem.suffix and (kernel.sizes, str(kernel.record.decisions())) in alike)
        ]
        numbers = {old: new for new, old in enumerate(winners)}
        rows = [row._replace(kernel=None if row.kernel is None else numbers.get(row.kernel)) for row in self.rows]
        return Table(self.gpu, [self.kernels[old] for old in winners], rows, self.bandwidth, self.notes)

    def dump(self) -> dict[str, Any]:
        """As JSON values."""
        kernels = [{"digest": kernel.digest, "record": dict(kernel.fields)} for kernel in self.kernels]
        rows = [row.spelled for row in self.rows]
        return {"gpu": self.gpu, "bandwidth_bytes_us": self.bandwidth, "kernels": kernels, "rows": rows}

    @classmethod
    def load(cls, values: Any, place: str = "table") -> Table:
        """From ``dump``; ``place``: the file, for messages. Raises WrongInput for what is no table of this version.

        Of a kernel only the problem is checked: its record is parsed when it is used.
        """
        try:
            spelled = _Table.model_validate(values)
        except ValidationError as error:
            raise WrongInput(f"{place}: {explain(error)}") from None
        strangers = [
            row.kernel for row in spelled.rows if row.kernel is not None and row.kernel >= len(spelled.kernels)
        ]
        if strangers:
            raise WrongInput(f"{place}: a row names kernel {strangers[0]} of {len(spelled.kernels)}")
        kernels = []
        for number, kernel in enumerate(spelled.kernels):
            where = f"{place}: kernel {number}"
            try:
                fields = {name: kernel.record[name] for name in Problem.model_fields if name in kernel.record}
                Problem.model_validate(fields)
            except ValidationError as error:
                raise WrongInput(f"{where}: {explain(error)}") from None
            kernels.append(Kernel(kernel.digest, kernel.record, where))
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


def variants(records: Iterable[Record], fusions: Iterable[str], batches: Iterable[Batch]) -> tuple[list[Record], int]:
    """Plain records with each of the fusions, and with each of the batches, where rules allow it; how many they do not.

    Raises IllegalRecord for what is no fusion.
    """
    changes: list[dict[str, Any]] = [{"fusion": fusion} for fusion in dict.fromkeys(fusions)]
    changes += [{"batch": batch} for batch in dict.fromkeys(batches)]
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
    """The table of a GPU model's records and their measurements under the ``device`` protocol. ``digest``: of a
    record's present binary. Measurements of another binary, or of a record that is not among ``records``, are left out,
    and noted. If several binaries of a problem were measured, the one with the best worst state counts."""
    identify = digest or (lambda record: record.name)
    kernels = [Kernel(identify(record), record.model_dump(mode="json")) for record in records]
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
    strangers = 0
    for (problem, products, name), states in latest.items():
        number = numbers.get((problem, name))
        binaries = {measurement.digest for measurement in states.values()}
        if number is None or (digest and binaries != {kernels[number].digest}):
            strangers += 1
        elif (row := row_of(problem, products, number, states)) and (
            (problem, products) not in rows or row.speedup[1] > rows[problem, products].speedup[1]
        ):
            rows[problem, products] = row
    bandwidth = min((card.bandwidth_bytes_us for card in cards.values()), default=BANDWIDTH)
    notes = [f"{strangers} measured kernels are not among these, or were compiled otherwise"] if strangers else []
    ordered = sorted(rows.values(), key=lambda row: (row[:5], row.kind, row.products))
    return Table(gpu, kernels, ordered, bandwidth, notes)


def row_of(problem: Problem, products: int, number: int, states: Mapping[str, Measurement]) -> Row | None:
    """The row of kernel ``number`` by its measurements in L2 ``states``: that in which it does worst against its
    rivals; None where the first of them was not measured."""
    rivals = results.rivals(problem)
    contests = []
    for state, measurement in sorted(states.items()):
        kernel = measurement.timing(results.KERNEL)
        for baseline in rivals:
            vendor, ratio = measurement.timing(baseline), results.speedup(measurement, baseline)
            if kernel is not None and vendor is not None and ratio is not None:
                contests.append((ratio, kernel.median_us, vendor.median_us, f"{state} L2, {baseline}"))
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
    value, low, high = row.speedup
    return f"{value:.3f}x [{low:.3f}, {high:.3f}] ({row.state})"


def _octaves(extents: Sequence[int], others: Sequence[int]) -> tuple[float, ...]:
    return tuple(abs(math.log2(a / b)) for a, b in zip(extents, others, strict=True))


def _work(record: Record, sizes: Sizes, groups: int = 1) -> int:
    """What the tiles compute, padding included. ``groups``: that share out the rows, taken to be of one size."""
    filled = min(groups, sizes.m)
    rows = filled * ceil_div(ceil_div(sizes.m, filled), record.bm) * record.bm
    return rows * ceil_div(sizes.n, record.bn) * record.bn * sizes.k
