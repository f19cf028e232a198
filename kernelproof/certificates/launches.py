"""Turns a kernel's contract from a file into claims to be proven, which cover every launch that the contract allows.

A claim is about one CTA whose numbers and sizes are named integers. They are named so that its tile lies in D by
construction: (tile_m, tile_n) is the CTA's own tile, and ``below`` and ``right`` are the tiles below it and to its
right. So D has tile_m + below + 1 rows of tiles and tile_n + right + 1 columns of tiles, for any values of the names
from 0 on. Each order of tiles gives every CTA of the grid exactly one tile, and every tile to one CTA.

``by_contract`` passes the claims to ``certificate``, which proves each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from kernelproof.certificates.certificate import Claim
from kernelproof.certificates.contract import Bounds, Contract, Matrix, Tile
from kernelproof.certificates.contract_file import UNUSED, KernelContract, sides
from kernelproof.certificates.facts import Facts
from kernelproof.certificates.formulas import polynomial
from kernelproof.certificates.loops import TILES, Ring
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.ground.errors import WrongInput, brief, printable

OLDEST = 80  # the oldest architecture that is covered, sm_80
MOST_ADDRESS = 1 << 60  # limit on an operand's address, in units of its alignment
MOST_CTAS = ((1 << 31) - 1, 65535, 65535)  # CUDA's limits on a grid along x, y and z
MOST_GROUPED = 1 << 16  # limit on the rows of tiles of a group; kernels use far fewer
_AXES = ("x", "y", "z")
_ONE = Polynomial.of(1)
named = Polynomial.named


class Tiles(NamedTuple):
    """Any one of some CTAs of a grid, which ``title`` describes.

    ``cta``: its number along x, y and z. (``row``, ``col``): its tile among the ``rows`` x ``cols`` tiles of D,
    counted from 0. ``bounds``: the least and largest value of each name in these polynomials. ``assumed``: polynomials
    that are at least 0 for these CTAs.
    """

    title: str
    cta: tuple[Polynomial, ...]
    row: Polynomial
    col: Polynomial
    rows: Polynomial
    cols: Polynomial
    bounds: dict[str, tuple[int, int]]
    assumed: tuple[Polynomial, ...] = ()


def claims(contract: KernelContract, program: Program) -> Iterator[Claim]:
    """The claims that together cover every launch of a contract. Raises WrongInput for a contract that is not covered
    or does not fit the PTX, and NotCertified if no launch by it succeeds."""
    _check_target(program.target)
    program.check_launch(contract.launch.threads, contract.launch.shared)
    extents = contract.extents()
    k = contract.sizes[extents[contract.meaning.summed]]
    ring = Ring(0, 0, k.last // k.multiple, least=k.first // k.multiple)
    if k.first == k.last:
        ring = Ring(0, 0, ring.most, only=ring.most)
    for tiles in orders(contract):
        yield Claim(tiles.title, _contract(contract, tiles, program), ring)


def _check_target(target: str) -> None:
    """Raise WrongInput for PTX of architectures before sm_80, which the emulator does not model."""
    number = re.match(r"sm_(\d+)", target)
    if number is None or int(number[1]) < OLDEST:
        raise WrongInput(
            f".target {printable(brief(target))}: proofs are for sm_{OLDEST} and later; compile for one of these, for "
            f"example by nvcc -ptx -arch=sm_{OLDEST}"
        )


def problems(contract: KernelContract) -> tuple[str, ...]:
    """The launches that the claims cover, in words: one text for each condition on sizes, strides and the grid."""
    sizes = [
        f"{name} = {size.first}" if size.first == size.last
        else f"{name} from {size.first} to {size.last}" if size.multiple == 1
        else f"{name} a multiple of {size.multiple} from {size.first} to {size.last}"
        for name, size in contract.sizes.items()
    ]  # fmt: skip
    operands = [x for x in contract.operands.values() if x.ld in contract.sizes and x.ld != x.shape[-1]]
    strides = [f"{x.ld} at least {x.shape[-1]}" for x in operands]
    return (*sizes, *dict.fromkeys(strides), *contract.limits, "grids that CUDA accepts")


def orders(contract: KernelContract) -> Iterator[Tiles]:
    """All CTAs of the grid, each with the tile that it takes by the contract's order: as one ``Tiles``, or several that
    together have every CTA. Raises WrongInput if grid and order do not fit each other."""
    launch = contract.launch
    rows_of_tile, cols_of_tile = (*launch.tile, 1)[:2]
    m, n = _most_tiles(contract, 0, rows_of_tile), _most_tiles(contract, 1, cols_of_tile)
    row, col = named("tile_m"), named("tile_n")
    bounds = {"tile_m": (0, m - 1), "below": (0, m - 1), "tile_n": (0, n - 1), "right": (0, n - 1)}
    rows, cols = row + named("below") + 1, col + named("right") + 1
    if n == 1:
        del bounds["tile_n"], bounds["right"]
        col, cols = ZERO, _ONE
    tiles = Tiles("every CTA has a tile", (), row, col, rows, cols, bounds)
    grid = _grid(contract, tiles)
    # A grid of two dimensions has as many CTAs along x and y as D has columns and rows of tiles, in either order.
    planes: dict[tuple[object, ...], tuple[Polynomial, ...]] = {
        (cols.key, rows.key, _ONE.key): (col, row, ZERO),
        (rows.key, cols.key, _ONE.key): (row, col, ZERO),
    }
    # The number of a CTA in a grid of one dimension whose tiles follow each other along rows, or along columns.
    lines = {"rows": row * cols + col, "columns": col * rows + row}
    plane = planes.get(tuple(each.key for each in grid))
    order, _, number = launch.order.partition(" ")
    if not launch.order and plane is not None:
        yield tiles._replace(cta=plane)
    elif order in lines and not number and [each.key for each in grid] == [(rows * cols).key, _ONE.key, _ONE.key]:
        yield tiles._replace(cta=(lines[order], ZERO, ZERO))
    elif order == "grouped" and number.isdecimal() and 1 < int(number) <= MOST_GROUPED:
        if [each.key for each in grid] != [(rows * cols).key, _ONE.key, _ONE.key]:
            raise WrongInput("launch.grid: an order needs a grid of one dimension, with a CTA for each tile of D")
        yield from _grouped(tiles, int(number), m)
    else:
        raise WrongInput(
            f"launch.grid and launch.order={printable(brief(launch.order))!r}: give the tiles along n and along m as "
            "two values, or their product with order = 'rows', 'columns' or 'grouped 8'"
        )


def _grouped(tiles: Tiles, group: int, most: int) -> Iterator[Tiles]:
    """The CTAs of an order by groups of ``group`` rows of tiles, where D has at most ``most`` rows of tiles.

    Within a group, tiles follow each other down a column first, then along n. If the rows are no multiple of ``group``,
    the last group has fewer. A CTA's number is the number of tiles in the groups before its own, plus that in the
    columns of its group before its own, plus its row in the group. Each number comes from one tile only.

    For example, with groups of 2 and D of 3 x 2 tiles, CTAs 0 to 3 take the tiles (0,0), (1,0), (0,1), (1,1), and CTAs
    4 and 5, in a last group of one row, (2,0) and (2,1).

    Names: ``group`` counts the groups before the CTA's own, and ``local`` is its row in the group. ``more`` are the
    rows of tiles after a full group, and ``over`` the rows below the CTA's own in a last group of fewer rows.
    """
    before, local, col, cols = named("group"), named("local"), tiles.col, tiles.cols
    bounds = tiles.bounds | {"group": (0, most // group), "local": (0, group - 1)}
    row = before * group + local
    full = before * group * cols + col * group + local
    yield tiles._replace(
        title=f"CTAs of a group of {group} rows of tiles", cta=(full, ZERO, ZERO), row=row,
        rows=before * group + group + named("more"), bounds=bounds | {"more": (0, most)},
    )  # fmt: skip
    height = local + named("over") + 1  # rows of the last group: at most group - 1, which ``assumed`` says
    last = before * group * cols + col * height + local
    yield tiles._replace(
        title=f"CTAs of a last group of fewer than {group} rows of tiles", cta=(last, ZERO, ZERO), row=row,
        rows=before * group + height, bounds=bounds | {"local": (0, group - 2), "over": (0, group - 2)},
        assumed=(Polynomial.of(group - 2) - local - named("over"),),
    )  # fmt: skip


def _most_tiles(contract: KernelContract, axis: int, tile: int) -> int:
    """How many tiles D has at most along an axis (0: rows, 1: columns). ``tile``: a tile's rows or columns. Raises
    WrongInput if the size is not always a multiple of that."""
    shape = _shape_of_d(contract)
    if axis >= len(shape):
        return 1
    size = contract.sizes[shape[axis]]
    if size.multiple % tile:
        raise WrongInput(
            f"sizes.{shape[axis]}.multiple={size.multiple}: give a multiple of launch.tile's {tile}; tiles that reach "
            "beyond D are not covered"
        )
    return max(1, size.last // tile)


def _shape_of_d(contract: KernelContract) -> tuple[str, ...]:
    """The names of the sizes that are D's rows and columns: those of A's index that is not summed, and of B's if there
    is a B."""
    meaning, extents = contract.meaning, contract.extents()
    rows = next(index for index in meaning.indices["A"] if index != meaning.summed)
    cols = [index for index in meaning.indices.get("B", ()) if index != meaning.summed]
    return tuple(extents[index] for index in (rows, *cols))


def _sizes(contract: KernelContract, tiles: Tiles) -> dict[str, Polynomial]:
    """The polynomial of every size, by its name in the contract: for D's sizes tiles times the tile's extent, for k a
    multiple of the name TILES, for a fixed size its value, and for others a multiple of ``<size>_units``."""
    shape = _shape_of_d(contract)
    k = contract.extents()[contract.meaning.summed]
    sizes = {name: named(f"{name}_units", size.multiple) for name, size in contract.sizes.items()}
    for name, size in contract.sizes.items():
        if size.first == size.last:
            sizes[name] = Polynomial.of(size.first)
    sizes[k] = named(TILES, contract.sizes[k].multiple)
    # D's sizes and k get polynomials of their own, so no two of them may be one size.
    if len({k, *shape}) <= len(shape):
        raise WrongInput("result: two of its indices have one size; name a size for each, with equal bounds")
    for name, count, tile in zip(shape, (tiles.rows, tiles.cols), contract.launch.tile, strict=False):
        sizes[name] = count * tile
    return sizes


def _grid(contract: KernelContract, tiles: Tiles) -> tuple[Polynomial, ...]:
    """The number of CTAs along x, y and z."""
    sizes = _sizes(contract, tiles)
    return tuple(polynomial(each, sizes) for each in (*contract.launch.grid, 1, 1)[:3])


def _contract(contract: KernelContract, tiles: Tiles, program: Program) -> Contract:
    """The contract of a claim about one of some CTAs: its operands, parameters and special registers as polynomials,
    and as facts the bounds of sizes, the limits of the contract and those of CUDA's grids."""
    sizes = _sizes(contract, tiles)
    meaning, extents = contract.meaning, contract.extents()
    k = meaning.summed
    matrices = []
    assumed = [*tiles.assumed]  # polynomials that are at least 0
    for name, operand in contract.operands.items():
        shape = [sizes[each] for each in operand.shape]
        ld = sizes[operand.ld] if operand.ld else shape[-1]
        assumed.append(ld - shape[-1])
        indices = meaning.indices[name]
        # Proofs name elements A(i,k), B(j,k) and D(i,j). An operand that is stored with its indices in the other order
        # is stored by columns: ``across``.
        across = len(indices) == 2 and (indices[0] == k or (name == "D" and indices[0] not in meaning.indices["A"]))
        rows, cols = (shape[1], shape[0]) if across else (shape[0], shape[1] if len(shape) > 1 else _ONE)
        ld = ld if len(shape) > 1 else _ONE
        matrices.append(
            Matrix(name, name.lower(), operand.alignment, ld, rows, cols, operand.type, name == "D", across=across)
        )
    bounds: Bounds = {(name,): limits for name, limits in tiles.bounds.items()}
    bounds |= {(matrix.base,): (1, MOST_ADDRESS) for matrix in matrices}
    for name, size in contract.sizes.items():
        bounds[(f"{name}_units",)] = (size.first // size.multiple, size.last // size.multiple)
    summed = contract.sizes[extents[k]]
    bounds[(TILES,)] = (summed.first // summed.multiple, summed.last // summed.multiple)
    for name in _shape_of_d(contract):
        assumed += [Polynomial.of(contract.sizes[name].last) - sizes[name]]
    for limit in contract.limits:
        left, right = (polynomial(side, sizes) for side in sides(limit))
        assumed.append(right - left)
    grid = _grid(contract, tiles)
    assumed += [most - each for most, each in zip(MOST_CTAS, grid, strict=True)]
    special = {f"%ctaid.{axis}": x for axis, x in zip(_AXES, tiles.cta, strict=True)}
    special |= {f"%nctaid.{axis}": x for axis, x in zip(_AXES, grid, strict=True)}
    special |= {f"%ntid.{axis}": Polynomial.of(x) for axis, x in zip(_AXES, contract.launch.threads, strict=True)}
    used = [each for each in assumed if not each.is_constant]
    high, wide = (*contract.launch.tile, 1)[:2]
    return Contract(
        lanes=prod(contract.launch.threads), shared_bytes=contract.launch.shared,
        parameters=_parameters(contract, sizes, {matrix.name: matrix for matrix in matrices}, program),
        special=special, matrices=tuple(matrices), sum_end=sizes[extents[k]],
        tile=Tile(tiles.row * high, tiles.col * wide, high, wide), facts=Facts(bounds, used),
        block=contract.launch.threads, step=0 if meaning.is_product else summed.multiple,
    )  # fmt: skip


def _parameters(
    contract: KernelContract, sizes: dict[str, Polynomial], matrices: dict[str, Matrix], program: Program
) -> dict[int, tuple[Polynomial, int]]:
    """Byte offset -> value and bits of each parameter that the kernel may read. Raises WrongInput if the contract has
    another number of parameters than the kernel, or an address where the kernel has no 8 bytes."""
    if len(contract.parameters) != len(program.offsets):
        raise WrongInput(
            f"parameters: the kernel has {len(program.offsets)}, and the contract {len(contract.parameters)}"
        )
    out = {}
    for offset, width, value in zip(program.offsets, program.widths, contract.parameters, strict=True):
        if value == UNUSED:
            continue
        if value in matrices:
            if width != 8:
                raise WrongInput(f"parameters: {value} is an address, and the kernel's parameter has {width} bytes")
            out[offset] = matrices[str(value)].address, 64
        else:
            out[offset] = polynomial(value, sizes), 8 * width
    return out
