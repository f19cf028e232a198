"""Reads and checks the contract of a kernel, a TOML file that states its sizes, operands, launch and result.

``kernelproof prove`` proves a kernel by such a contract (``by_contract``). docs/kernelproof/prove.md explains the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationError

from kernelproof.certificates.formulas import names, polynomial
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.ground.chips import WARP
from kernelproof.ground.errors import WrongInput, brief, printable, reading
from kernelproof.ground.schema import Schema, explain

OPERANDS = ("A", "B", "D")
UNUSED = "unused"  # stands for a parameter that the kernel must not read
MOST_THREADS = 1024  # of a CTA
Formula = str | int  # a number, or an expression of sizes such as "m / 128"
Positive = Annotated[int, Field(ge=1, le=1 << 40)]

# A reference such as ``A(i,k)``, and a result such as ``D(i,j) = sum over k of A(i,k) B(j,k)``, both without spaces.
# The groups are D and its two indices, the summed index, then A and B with theirs; what is left out is None.
_INDEX = r"(\w+)\((\w+)(?:,(\w+))?\)"
_RESULT = re.compile(rf"{_INDEX}=sumover(\w+)of{_INDEX}(?:\*?{_INDEX})?")


class Size(Schema):
    """A size takes the multiples of ``multiple`` from ``least`` (by default ``multiple`` itself) to ``most``."""

    multiple: Positive = 1
    least: Positive | None = None
    most: Positive = 1 << 24

    @property
    def first(self) -> int:
        """The smallest value of the size."""
        return -(-(self.least or 1) // self.multiple) * self.multiple

    @property
    def last(self) -> int:
        """The largest value of the size."""
        return self.most // self.multiple * self.multiple


class Operand(Schema):
    """A matrix or vector in global memory, at a multiple of ``alignment`` bytes (a power of two).

    ``shape``: the names of the sizes that are its number of rows and the length of a row; for a vector, its length.
    ``ld``: the name of the size that is the number of elements from one row to the next; empty for a row's length.
    """

    type: Literal["f16", "bf16", "f32"]
    shape: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]
    ld: str = ""
    alignment: Annotated[int, Field(ge=1, le=1 << 20)] = 16


class Launch(Schema):
    """How the kernel is launched.

    ``grid``: the CTAs along x, y and z, as formulas of sizes. ``block``: the threads along x, y and z. ``shared``:
    bytes of dynamic shared memory. ``tile``: the rows and columns of D that a CTA writes. ``order``: the order in which
    the CTAs of a grid of one dimension take the tiles of D: "rows" along rows of tiles, "columns" down columns of
    tiles, "grouped 8" down the columns of one group of 8 rows of tiles after the other. Empty for other grids.
    """

    grid: Annotated[tuple[Formula, ...], Field(min_length=1, max_length=3)]
    block: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=3)]
    shared: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    tile: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=2)]
    order: str = ""

    @property
    def threads(self) -> tuple[int, int, int]:
        """Threads of a CTA along x, y and z."""
        x, y, z = (*self.block, 1, 1)[:3]
        return x, y, z


class Result(NamedTuple):
    """What D is: ``D(i,j) = sum over k of A(i,k) B(j,k)``, or without B ``D(i) = sum over k of A(i,k)``.

    ``indices``: operand -> its indices in the order in which it is stored. ``summed``: the index of the sum.
    """

    indices: dict[str, tuple[str, ...]]
    summed: str

    @property
    def is_product(self) -> bool:
        """Whether D is a product of A and B, and not sums of A's rows."""
        return "B" in self.indices


class KernelContract(Schema):
    """The contract of one kernel.

    ``kernel``: its name; empty for the only one of the PTX. ``parameters``: for each of its parameters an operand (for
    its address), a formula of sizes, or ``unused``. ``sizes``, ``operands``: each by its name. ``result``: what D is.
    ``limits``: inequalities such as ``m * k <= 2147483647``, which callers promise to keep.
    """

    kernel: str
    parameters: tuple[Formula, ...]
    sizes: dict[str, Size]
    operands: dict[str, Operand]
    launch: Launch
    result: str
    limits: tuple[str, ...] = ()

    @property
    def meaning(self) -> Result:
        """The parsed ``result``. Raises WrongInput if it does not have one of the two forms of ``Result``."""
        match = _RESULT.fullmatch(re.sub(r"\s", "", self.result))
        if match is None:
            raise WrongInput(
                f"result={brief(printable(self.result))!r}: write 'D(i,j) = sum over k of A(i,k) B(j,k)', "
                "or 'D(i) = sum over k of A(i,k)'"
            )
        d, d0, d1, summed, a, a0, a1, b, b0, b1 = match.groups()
        operands = ((d, (d0, d1)), (a, (a0, a1)), (b, (b0, b1)))
        indices = {name: tuple(filter(None, pair)) for name, pair in operands if name}
        return Result(indices, summed)

    def extents(self) -> dict[str, str]:
        """Index of ``result`` -> the name of its size. Raises WrongInput where operands disagree."""
        found: dict[str, str] = {}
        for name, indices in self.meaning.indices.items():
            for index, size in zip(indices, self.operands[name].shape, strict=True):
                if found.setdefault(index, size) != size:
                    raise WrongInput(
                        f"operands.{name}.shape: index {index} has size {size} here and {found[index]} in another "
                        "operand; give both the same size, or change result"
                    )
        return found


def load(path: Path) -> KernelContract:
    """Read a contract from a file. Raises WrongInput, whose message names the file and the field."""
    with reading(path):
        text = path.read_text(encoding="utf-8")
    try:
        contract = KernelContract.model_validate_json(json.dumps(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise WrongInput(f"{path}: {error}; write TOML, such as docs/kernelproof/prove.md shows") from None
    except ValidationError as error:
        raise WrongInput(f"{path}: {explain(error, 'docs/kernelproof/prove.md has all fields')}") from None
    try:
        check(contract)
    except WrongInput as error:
        raise WrongInput(f"{path}: {error}") from None
    return contract


def check(contract: KernelContract) -> None:
    """Check the rules that concern several fields. Raises WrongInput, whose message names the field."""
    meaning = contract.meaning
    operand_names = OPERANDS if meaning.is_product else ("A", "D")
    if set(meaning.indices) != set(operand_names) or ("B" in meaning.indices and len(meaning.indices) != 3):
        raise WrongInput(f"result: it names {', '.join(meaning.indices)}; it must give D from A and B, or from A alone")
    if set(contract.operands) != set(operand_names):
        raise WrongInput(
            f"operands: this result has {' and '.join(operand_names)}, not {', '.join(contract.operands) or 'none'}"
        )
    types = [contract.operands[name].type for name in operand_names[:-1]]
    if types[0] != types[-1] or (meaning.is_product and types[0] == "f32"):
        raise WrongInput("operands: A and B of a product have one type, f16 or bf16; others are not covered")
    if {types[0], contract.operands["D"].type} == {"f16", "bf16"}:
        raise WrongInput("operands: f16 and bf16 in one kernel are not covered; give D the type of A, or f32")
    for name, operand in contract.operands.items():
        unknown = [size for size in operand.shape if size not in contract.sizes]
        if unknown:
            raise WrongInput(
                f"operands.{name}.shape: there is no size {brief(printable(unknown[0]))}; define it in [sizes]"
            )
        if operand.ld and operand.ld not in contract.sizes:
            raise WrongInput(f"operands.{name}.ld: give a size of [sizes], or leave it out for rows without gaps")
        if operand.alignment & (operand.alignment - 1):
            raise WrongInput(f"operands.{name}.alignment={operand.alignment}: give a power of two")
    _check_indices(contract, meaning)
    for name, size in contract.sizes.items():
        if not name.isidentifier() or name in (*OPERANDS, UNUSED):
            raise WrongInput(f"sizes.{printable(brief(name))}: choose another name, of letters and digits")
        if size.first > size.last:
            raise WrongInput(f"sizes.{name}: no multiple of {size.multiple} is from {size.first} to {size.most}")
    for where, formula in _formulas(contract):
        _check_names(where, formula, contract.sizes)
    if prod(contract.launch.block) > MOST_THREADS or prod(contract.launch.block) % WARP:
        raise WrongInput(
            f"launch.block: {prod(contract.launch.block)} threads; give a multiple of {WARP} up to {MOST_THREADS}"
        )
    for limit in contract.limits:
        sides(limit)


def _check_indices(contract: KernelContract, meaning: Result) -> None:
    """Check that the indices are those of a product, or of sums of rows: A and B have only the summed index in common,
    and D has all others. Raises WrongInput."""
    for name, indices in meaning.indices.items():
        if len(indices) != len(contract.operands[name].shape):
            raise WrongInput(
                f"operands.{name}.shape: result gives {name} {len(indices)} indices; give it as many sizes"
            )
    contract.extents()
    k, index_sets = meaning.summed, {name: set(indices) for name, indices in meaning.indices.items()}
    if any(len(index_sets[name]) != len(indices) for name, indices in meaning.indices.items()):
        raise WrongInput("result: an operand has one index twice, which is not covered")
    a, b = index_sets["A"], index_sets.get("B", {k})
    if a & b != {k} or a ^ b != index_sets["D"]:
        raise WrongInput(f"result: sum over the index that A and B share, and give D the others; {k} is summed here")


def _formulas(contract: KernelContract) -> list[tuple[str, Formula]]:
    """Every formula of a contract, each with the field in which it stands."""
    launch = [(f"launch.grid value {i + 1}", x) for i, x in enumerate(contract.launch.grid)]
    values = [
        (f"parameters value {i + 1}", x)
        for i, x in enumerate(contract.parameters)
        if x != UNUSED and x not in contract.operands
    ]
    limits = [(f"limits value {i + 1}", side) for i, limit in enumerate(contract.limits) for side in sides(limit)]
    return [*launch, *values, *limits]


def _check_names(where: str, formula: Formula, sizes: dict[str, Size]) -> None:
    """Check that a formula is covered and names defined sizes only. ``where``: the field in which it stands. Raises
    WrongInput."""
    try:
        unknown = sorted(names(formula) - set(sizes))
        if not unknown:
            polynomial(formula, {name: Polynomial.named(name, size.multiple) for name, size in sizes.items()})
    except WrongInput as error:
        raise WrongInput(f"{where}: {error}") from None
    if unknown:
        raise WrongInput(f"{where}: there is no size {brief(printable(unknown[0]))}; define it in [sizes]")


def sides(limit: str) -> tuple[str, str]:
    """The formulas left and right of the ``<=`` of a limit. Raises WrongInput if it has no ``<=``, or several."""
    parts = limit.split("<=")
    if len(parts) != 2:
        raise WrongInput(f"limits: {brief(printable(limit))!r} is no inequality such as 'm * k <= 2147483647'")
    return parts[0].strip(), parts[1].strip()
