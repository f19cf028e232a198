"""Defines when a product is right: kinds of inputs, the comparison with the fp64 product, and the error bound.

All functions take NumPy arrays or torch tensors; ``Array`` stands for either, but a call must not mix them. D (m,n) is
the product of A (m,k) and B (n,k), in their ``Element`` or in fp32. The kind of inputs decides the comparison:

- ``binary``, 0 and 1: equality up to ``Element.exact``. Above it, an fp32 accumulator must give the reference rounded
  to D's type, and an fp16 accumulator at least its last exact integer. ``sparse``: the same with so few ones that the
  reference stays exact.
- ``integers``, -2 to 2: equality. All partial sums stay below 2048, where an fp16 accumulator is exact.
- ``normal``: an error bound that depends on the accumulator, see ``error_bound``. ``cancelling``: the same with sums
  that are zero, so that D shows only the errors of rounding.
- ``special``: NaN and infinities in A and B must appear in exactly those elements of D where the reference has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Acc
from kernelproof.ground.element import F16, SINGLE_ERROR, Element, output_of

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")
Drawn_co = TypeVar("Drawn_co", NDArray[Any], "torch.Tensor", covariant=True)
# The k of every partial sum in the order in which a kernel adds them: a list of groups for each slice of k.
Order = Sequence[Sequence[Sequence[int]]]

INPUTS = ("binary", "sparse", "integers", "normal", "cancelling", "special")
BOUNDED = ("normal", "cancelling")  # kinds of inputs that are compared by an error bound
BOUND = "error bound of the accumulator"  # this criterion in words
CHUNK = 1 << 27  # elements of D that are compared at a time, in fp64
# The largest m * n * k for which the bound of an fp16 accumulator is computed for every element of D; above, it is
# computed for some rows only. The bound takes a pass over all of D in fp64 for every 8 of k.
MAX_FULL_BOUND = 1 << 33


class Library(Protocol[Array]):
    """The operations of this module that NumPy and torch spell differently."""

    def wide(self, values: Array) -> Array:
        """The values in fp64."""
        ...

    def single(self, values: Array) -> Array:
        """The values in fp32."""
        ...

    def rounded(self, values: Array, element: Element) -> Array:
        """The values rounded to the nearest numbers of the element, in its type."""
        ...

    def product(self, a: Array, b: Array) -> Array:
        """A B^T in the type of A and B, without warnings for NaN and infinities."""
        ...

    def where(self, condition: Array, values: Array, others: Array) -> Array: ...

    def nan(self, values: Array) -> Array:
        """Which values are NaN."""
        ...

    def zeros(self, like: Array) -> Array: ...

    def exp(self, values: Array) -> Array: ...

    def erf(self, values: Array) -> Array:
        """The error function, in the type of the values."""
        ...


class Draws(Protocol[Drawn_co]):
    """Random matrices of one library, each of ``rows`` by ``cols`` elements."""

    def bits(self, share: float, rows: int, cols: int) -> Drawn_co:
        """Zeros and ones, where ``share`` is the probability of a one."""
        ...

    def integers(self, low: int, high: int, rows: int, cols: int) -> Drawn_co:
        """Integers from ``low`` to ``high``, both included."""
        ...

    def normal(self, rows: int, cols: int) -> Drawn_co:
        """Standard normal numbers."""
        ...


class _NumPy:
    """The operations in NumPy."""

    def wide(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.astype(np.float64, copy=False)

    def single(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.astype(np.float32, copy=False)

    def rounded(self, values: NDArray[Any], element: Element) -> NDArray[Any]:
        return values.astype(element.numpy_dtype, copy=False)

    def product(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(invalid="ignore"):
            product: NDArray[Any] = a @ b.T
        return product

    def where(self, condition: NDArray[Any], values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        chosen: NDArray[Any] = np.where(condition, values, others)
        return chosen

    def nan(self, values: NDArray[Any]) -> NDArray[Any]:
        nan: NDArray[Any] = np.isnan(values)
        return nan

    def zeros(self, like: NDArray[Any]) -> NDArray[Any]:
        return np.zeros_like(like)

    def exp(self, values: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(all="ignore"):
            powers: NDArray[Any] = np.exp(values)
        return powers

    def erf(self, values: NDArray[Any]) -> NDArray[Any]:
        erf: NDArray[Any] = np.vectorize(math.erf, otypes=[float])(values)
        return erf


class _Torch:
    """The operations in torch, on the tensors' device."""

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        return values.double()

    def single(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()

    def rounded(self, values: torch.Tensor, element: Element) -> torch.Tensor:
        return values.to(element.torch_dtype)

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b.T

    def where(self, condition: torch.Tensor, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return values.where(condition, others)

    def nan(self, values: torch.Tensor) -> torch.Tensor:
        return values.isnan()

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(like.shape)

    def exp(self, values: torch.Tensor) -> torch.Tensor:
        return values.exp()

    def erf(self, values: torch.Tensor) -> torch.Tensor:
        return values.erf()


@overload
def library(values: NDArray[Any]) -> Library[NDArray[Any]]: ...
@overload
def library(values: torch.Tensor) -> Library[torch.Tensor]: ...
def library(values: NDArray[Any] | torch.Tensor) -> Library[NDArray[Any]] | Library[torch.Tensor]:
    """The library of an array."""
    return _NumPy() if isinstance(values, np.ndarray) else _Torch()


class _NumPyDraws:
    """``Draws`` from NumPy's generator."""

    def __init__(self, rng: np.random.Generator, element: Element) -> None:
        self._rng, self._type = rng, element.numpy_dtype

    def bits(self, share: float, rows: int, cols: int) -> NDArray[Any]:
        return (self._rng.random((rows, cols), np.float32) < share).astype(self._type)

    def integers(self, low: int, high: int, rows: int, cols: int) -> NDArray[Any]:
        return self._rng.integers(low, high + 1, (rows, cols), np.int8).astype(self._type)

    def normal(self, rows: int, cols: int) -> NDArray[Any]:
        return self._rng.standard_normal((rows, cols), np.float32).astype(self._type)


class _TorchDraws:
    """``Draws`` from torch's generator, on its device."""

    def __init__(self, generator: torch.Generator, element: Element) -> None:
        import torch

        self._torch, self._generator, self._device = torch, generator, generator.device
        self._type = element.torch_dtype

    def bits(self, share: float, rows: int, cols: int) -> torch.Tensor:
        return (self._torch.rand((rows, cols), generator=self._generator, device=self._device) < share).to(self._type)

    def integers(self, low: int, high: int, rows: int, cols: int) -> torch.Tensor:
        size, kind = (rows, cols), self._torch.int8
        return self._torch.randint(low, high + 1, size, generator=self._generator, device=self._device, dtype=kind).to(
            self._type
        )

    def normal(self, rows: int, cols: int) -> torch.Tensor:
        return self._torch.randn((rows, cols), generator=self._generator, device=self._device).to(self._type)


@overload
def operands(
    inputs: str, m: int, n: int, k: int, rng: np.random.Generator, element: Element = F16
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def operands(
    inputs: str, m: int, n: int, k: int, rng: torch.Generator, element: Element = F16
) -> tuple[torch.Tensor, torch.Tensor]: ...
def operands(
    inputs: str, m: int, n: int, k: int, rng: np.random.Generator | torch.Generator, element: Element = F16
) -> tuple[NDArray[Any], NDArray[Any]] | tuple[torch.Tensor, torch.Tensor]:
    """A (m,k) and B (n,k) of one kind of ``INPUTS``, drawn from NumPy's or torch's generator."""
    if isinstance(rng, np.random.Generator):
        return _draw_operands(inputs, m, n, k, _NumPyDraws(rng, element), element)
    return _draw_operands(inputs, m, n, k, _TorchDraws(rng, element), element)


def _draw_operands(inputs: str, m: int, n: int, k: int, draws: Draws[Array], element: Element) -> tuple[Array, Array]:
    """Draws A (m,k) and B (n,k) of a kind of inputs."""
    if inputs in ("binary", "sparse"):
        # The mean of the reference is k times the square of the density. For sparse inputs it is a quarter of the
        # largest exact integer, so that practically no element reaches that integer.
        density = 0.5 if inputs == "binary" else min(0.5, (element.exact / 4 / k) ** 0.5)
        return draws.bits(density, m, k), draws.bits(density, n, k)
    if inputs == "integers":
        return draws.integers(-2, 2, m, k), draws.integers(-2, 2, n, k)
    a, b = draws.normal(m, k), draws.normal(n, k)
    if inputs == "cancelling":
        # The second half of k is the mirrored first half with A negated, so every sum is zero. The halves are computed
        # in fp32, because torch has no 8-bit arithmetic.
        arrays, half = library(a), k // 2
        a, b = arrays.single(a), arrays.single(b)
        mirrored = list(reversed(range(half)))
        a[:, half : 2 * half], b[:, half : 2 * half] = -a[:, mirrored], b[:, mirrored]
        a[:, 2 * half :] = 0
        a, b = arrays.rounded(a * 8, element), arrays.rounded(b * 8, element)
    if inputs == "special":
        a[0, k // 2], a[m - 1, k - 1] = float("inf"), float("nan")
        b[n - 1, 0], b[n // 2, k // 3] = float("-inf"), float("nan")
        # NaN in every seventh row and column of D. Lanes hold rows and columns with period 8, and 7 and 8 have no
        # common factor, so each of a lane's sums is NaN in some part of a large D.
        a[3::7, k // 2] = b[5::7, k // 3] = float("nan")
    return a, b


@dataclass
class Comparison:
    """D compared with its reference.

    ``compared``: the criterion, in words. ``max_error``: if the criterion is equality, the largest |D - reference|; if
    it is an error bound, the error of the element that is nearest to its bound, which is ``allowed``; for ``special``,
    the number of misplaced NaN and infinities. ``wrong``: how many of ``size`` elements break the criterion; ``first``
    describes the first of them.
    """

    compared: str
    size: int
    max_error: float = 0.0
    allowed: float | None = None
    wrong: int = 0
    first: str = ""
    largest_error: float = 0.0  # the largest error of all elements, if there is an error bound
    _nearest: float = field(default=-1.0, repr=False)  # the largest error in units of what is allowed

    @property
    def findings(self) -> list[str]:
        return [f"wrong-value: {self.wrong} of {self.size} elements, first at {self.first}"] if self.wrong else []

    def count(self, rows: range, wrong: Array, reference: Array, d: Array) -> None:
        """Counts the wrong elements of these rows of D and remembers the first one."""
        if (count := int(wrong.sum())) and not self.wrong:
            row, column = first_place(wrong)
            value, expected = float(d[row, column]), float(reference[row, column])
            self.first = f"row {rows[row]}, column {column}: {value:.6g} instead of {expected:.6g}"
        self.wrong += count

    def add_errors(self, errors: Array, allowed: Array) -> None:
        """Adds errors and their bounds: remembers the element nearest to its bound, among these and earlier ones."""
        self.largest_error = max(self.largest_error, float(errors.max()))
        ratios = (errors / allowed).reshape(-1)
        nearest = int(ratios.argmax())
        if (ratio := float(ratios[nearest])) > self._nearest:
            self._nearest = ratio
            self.max_error, self.allowed = float(errors.reshape(-1)[nearest]), float(allowed.reshape(-1)[nearest])


def first_place(wrong: Array) -> tuple[int, int]:
    """Row and column of the first true element of a matrix that has one."""
    row, column = divmod(int((wrong * 1).reshape(-1).argmax()), wrong.shape[1])
    return row, column


class Bounds(Generic[Array]):
    """The fp64 product of A (m,k) and B (n,k), and the error allowed for each element.

    They are computed once, to compare any number of D (m,n) of type ``output`` with them.
    """

    def __init__(self, acc: Acc, a: Array, b: Array, order: Order, output: Element) -> None:
        arrays = library(a)
        wide_a, wide_b = arrays.wide(a), arrays.wide(b)
        self.reference: Array = arrays.product(wide_a, wide_b)
        self.allowed: Array = error_bound(acc, wide_a, wide_b, self.reference, order, output)

    @property
    def result(self) -> Array:
        """The reference, by the name that fused products use."""
        return self.reference

    def compare(self, d: Array) -> Comparison:
        """D (m,n) against the bounds."""
        m, n = self.reference.shape
        comparison = Comparison(BOUND, m * n)
        self.add(comparison, range(m), d)
        return comparison

    def add(self, comparison: Comparison, rows: range, d: Array) -> None:
        """Adds the comparison of these rows of D to another comparison; they must be all rows of the bounds."""
        errors = _errors(d, self.reference)
        comparison.add_errors(errors, self.allowed)
        comparison.count(rows, errors > self.allowed, self.reference, d)


def in_order(k: int) -> Order:
    """The plain order of k, in groups of 8: half an MMA, the smallest step after which an accumulator is rounded."""
    return [[range(start, min(start + 8, k)) for start in range(0, k, 8)]]


def compare(acc: Acc, inputs: str, a: Array, b: Array, d: Array, order: Order) -> Comparison:
    """Compares D (m,n) with the product of A (m,k) and B (n,k), by the criterion for the inputs.

    ``order``: a record's ``k_order``.
    """
    wide_b = library(b).wide(b)
    if inputs == "special":
        return _compare_places(a, wide_b, d)
    if inputs in BOUNDED:
        return _compare_bounded(acc, a, wide_b, d, order)
    return _compare_exact(acc, a, wide_b, d)


def _blocks(a: Array, wide_b: Array, d: Array) -> Iterator[tuple[range, Array, Array, Array]]:
    """Yields blocks of rows: their numbers, and these rows of A in fp64, of D, and of the fp64 product."""
    arrays = library(a)
    m, n = d.shape
    step = max(1, CHUNK // n)
    for top in range(0, m, step):
        rows = range(top, min(m, top + step))
        wide_a = arrays.wide(a[rows.start : rows.stop])
        yield rows, wide_a, d[rows.start : rows.stop], arrays.product(wide_a, wide_b)


def _compare_places(a: Array, wide_b: Array, d: Array) -> Comparison:
    """Compares where D and the reference have NaN and infinities; finite values are not compared."""
    arrays = library(a)
    comparison = Comparison("NaN and infinities in their places", d.shape[0] * d.shape[1])
    for rows, _, part, reference in _blocks(a, wide_b, d):
        finite = ~(_infinite(reference) | _infinite(part))
        same_nan = arrays.nan(reference) == arrays.nan(part)
        same_infinity = finite | (reference == part) | arrays.nan(reference)
        comparison.count(rows, ~(same_nan & same_infinity), reference, part)
    comparison.max_error = float(comparison.wrong)
    return comparison


def _compare_exact(acc: Acc, a: Array, wide_b: Array, d: Array) -> Comparison:
    """Compares for equality, for inputs whose sums are integers."""
    arrays = library(a)
    comparison, element = Comparison("equality", d.shape[0] * d.shape[1]), output_of(d)
    # The largest sum that must be exact. A sum in fp16 may stop growing at the last integer that fp16 counts up to.
    last = min(element.exact, F16.exact) if acc == "f16" else element.exact
    # The largest error of the elements that must be exact, or of all elements if none must be.
    largest, largest_exact = 0.0, -1.0
    for rows, _, part, reference in _blocks(a, wide_b, d):
        exact = abs(reference) <= last
        differs = part != arrays.rounded(reference, element)
        wrong = differs if acc == "f32" else arrays.where(exact, differs, ~(part >= last))
        comparison.count(rows, wrong, reference, part)
        if not bool(exact.all()):
            comparison.compared = f"equality up to {last}"
        errors = _errors(part, reference)
        largest = max(largest, float(errors.max()))
        if bool(exact.any()):
            largest_exact = max(largest_exact, float(errors[exact].max()))
    comparison.max_error = largest if largest_exact < 0 else largest_exact
    return comparison


def _compare_bounded(acc: Acc, a: Array, wide_b: Array, d: Array, order: Order) -> Comparison:
    """Compares with an error bound.

    For an fp16 accumulator on a large problem the bound is computed for some rows. Twice the largest of these bounds is
    allowed elsewhere: bounds vary by less among elements that are sums of equally many products.
    """
    (m, k), n = a.shape, wide_b.shape[0]
    comparison = Comparison(BOUND, m * n)
    ceiling: float | None = None
    if acc == "f16" and m * n * k > MAX_FULL_BOUND:
        stride = m * n * k // MAX_FULL_BOUND
        rows, bounds = range(0, m, stride), Bounds(acc, a[::stride], wide_b, order, output_of(d))
        bounds.add(comparison, rows, d[::stride])
        comparison.compared += f" in {len(rows)} rows, twice its largest in all"
        ceiling = 2 * float(bounds.allowed.max())
    for rows, wide_a, part, reference in _blocks(a, wide_b, d):
        errors = _errors(part, reference)
        if ceiling is None:
            allowed = error_bound(acc, wide_a, wide_b, reference, order, output_of(d))
            comparison.add_errors(errors, allowed)
            comparison.count(rows, errors > allowed, reference, part)
        else:
            comparison.count(rows, errors > ceiling, reference, part)
    return comparison


def _infinite(values: Array) -> Array:
    """Where values are infinite."""
    infinite: Array = abs(values) == float("inf")
    return infinite


def _errors(d: Array, reference: Array) -> Array:
    """|D - reference| in fp64, with infinity in place of NaN."""
    arrays = library(d)
    errors: Array = abs(arrays.wide(d) - reference)
    errors[arrays.nan(errors)] = float("inf")
    return errors


def error_bound(acc: Acc, a: Array, b: Array, reference: Array, order: Order, element: Element = F16) -> Array:
    """The largest |D - reference| that rounding explains, elementwise. a (m,k), b (n,k), reference (m,n), all fp64.

    ``element``: the type of D. ``order``: the k of each partial sum, a record's ``k_order``. An fp32 accumulator makes
    k additions, each with an error of 2^-24 of the sum of magnitudes, and the result is rounded once to the element. An
    fp16 accumulator is rounded to fp16 after every 8 of k at most (mma.sync may add its 16 in two steps), which costs
    2^-11 of the sum so far and of the error that it carries. Sums between two roundings, and sums of slices, have at
    least the precision of fp32.
    """
    error: Array = sum_error(acc, a, b, reference, order)
    if acc == "f32" or len(order) > 1:
        error = error + rounding_error(reference, error, element)
    return error


def sum_error(acc: Acc, a: Array, b: Array, reference: Array, order: Order) -> Array:
    """The part of ``error_bound`` for the sum, before it is rounded to the type of D."""
    arrays = library(a)
    error: Array = a.shape[1] * SINGLE_ERROR * arrays.product(abs(a), abs(b))
    if acc == "f32":
        return error
    for groups in order:
        partial_sum, carried = arrays.zeros(reference), arrays.zeros(reference)
        for group in groups:
            columns = _columns(group)
            partial_sum += a[:, columns] @ b[:, columns].T
            carried += rounding_error(partial_sum, carried, F16)
        error = error + carried
    return error


def rounding_error(value: Array, error: Array, element: Element) -> Array:
    """The largest error of rounding to ``element`` a value that is known up to ``error``, elementwise."""
    rounding: Array = element.unit_roundoff * (abs(value) + error) + element.least_error
    return rounding


def _columns(group: Sequence[int]) -> slice | list[int]:
    """Columns as a slice if they are neighbours, because a list would be copied to the device each time."""
    neighbours = bool(group) and group[-1] - group[0] + 1 == len(group)
    return slice(group[0], group[-1] + 1) if neighbours else list(group)


def errors_of_single(a: Array, b: Array, d: Array) -> tuple[float, float]:
    """The largest |D - fp32 product| and its root mean square; NaN counts as an infinite error."""
    arrays = library(a)
    m, n = d.shape
    single_b, step = arrays.single(b), max(1, CHUNK // n)
    largest = squares = 0.0
    for top in range(0, m, step):
        rows = slice(top, top + step)
        errors = _errors(d[rows], arrays.product(arrays.single(a[rows]), single_b))
        largest, squares = max(largest, float(errors.max())), squares + float((errors * errors).sum())
    return largest, float((squares / (m * n)) ** 0.5)
