"""Executes a kernel whose proof has failed on some problems of its contract, to find out whether it is really wrong.

It is wrong if the emulator reports an error such as a race, or if an element of D differs from NumPy's result. Inputs
are -1, 0 and 1, so that sums are exact in any order. ``by_contract`` calls this after a failed proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kernelproof import emulator
from kernelproof.certificates.contract_file import UNUSED, KernelContract, sides
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.formulas import number
from kernelproof.ground.errors import WrongInput

# Limits of what is executed: products (or terms) of a problem, elements of an operand with its gaps, and problems.
MOST_PRODUCTS = 1 << 25
MOST_ELEMENTS = 1 << 26
MOST_PROBLEMS = 12
TYPES = {"f16": np.float16, "f32": np.float32}  # NumPy's types; it has none for bf16
EXACT = {"f16": 2048, "bf16": 256, "f32": 1 << 24}  # a type represents all integers up to here exactly
Sizes = dict[str, int]  # name of a size in the contract -> its value
Array = np.ndarray[Any, np.dtype[Any]]


class Execution(NamedTuple):
    """How many problems were executed, and what was wrong with the last one; ``fault`` is empty if nothing was."""

    executed: int
    fault: str


def confirm(contract: KernelContract, ptx: str, error: NotCertified) -> Execution:
    """Execute a kernel for which a proof has failed: on the sizes for which ``error`` says that it fails, if they are
    small, and on small sizes of the contract. Ends with the first problem that is wrong. Raises EmulatorError,
    PtxError or UnknownInstruction if the emulator cannot execute the kernel."""
    program, done = emulator.load(ptx), 0
    for sizes in _problems(contract, error):
        done += 1
        if fault := _fault(contract, program, sizes):
            return Execution(done, f"{', '.join(f'{name}={x}' for name, x in sizes.items())}: {fault}")
    return Execution(done, "")


def smallest(contract: KernelContract) -> Sizes:
    """The smallest sizes, with leading dimensions that are at least as long as a row. Raises WrongInput if the
    contract's limits, or the bounds of a leading dimension, exclude them."""
    sizes = _fitting_sizes(contract, {name: size.first for name, size in contract.sizes.items()})
    if sizes is None:
        raise WrongInput("limits: the smallest sizes do not keep them; give larger limits, or other sizes")
    return sizes


def _problems(contract: KernelContract, error: NotCertified) -> Iterator[Sizes]:
    """At most MOST_PROBLEMS different problems: first the one for which the proof fails, if it is known, then ones with
    few tiles and various lengths of the sum. Problems that are too large are left out."""
    meaning, extents, seen = contract.meaning, contract.extents(), []
    k = extents[meaning.summed]
    candidates = []
    if error.extents:
        refuting: Sizes = {}
        for name, (rows, cols) in error.extents.items():
            if name in contract.operands:
                indices = _proof_indices(contract, name)
                refuting |= {extents[index]: x for index, x in zip(indices, (rows, cols), strict=False)}
        candidates.append(refuting)
    step = {name: size.multiple for name, size in contract.sizes.items()}
    first = {name: size.first for name, size in contract.sizes.items()}
    others = [extents[index] for index in meaning.indices["D"]]  # the sizes of D
    # Further k-tiles: fewer than a ring's stages, as many, and more, so that the main loop ends at various stages.
    for count in (0, 1, 2, 3, 4, 5, 7, 9):
        more = {name: first[name] + step[name] * (count % 2) for name in others}
        candidates.append(more | {k: first[k] + step[k] * count})
    for index, candidate in enumerate(candidates):
        sizes = _fitting_sizes(contract, first | candidate, index % 2)
        if sizes is None or sizes in seen:
            continue
        layouts = [_layout_of(contract, name, sizes) for name in contract.operands]
        fits = all(each.rows * each.ld <= MOST_ELEMENTS for each in layouts)
        if fits and prod(sizes[x] for x in {k, *others}) <= MOST_PRODUCTS:
            seen.append(sizes)
            yield sizes
        if len(seen) == MOST_PROBLEMS:
            return


def _proof_indices(contract: KernelContract, name: str) -> tuple[str, ...]:
    """The indices of an operand in the order of the proof, A(i,k), B(j,k) and D(i,j), however it is stored."""
    meaning = contract.meaning
    indices = meaning.indices[name]
    is_reversed = len(indices) == 2 and (
        indices[0] == meaning.summed or (name == "D" and indices[0] not in meaning.indices["A"])
    )
    return indices[::-1] if is_reversed else indices


def _fitting_sizes(contract: KernelContract, sizes: Sizes, gap: int = 0) -> Sizes | None:
    """The sizes with leading dimensions at least as long as a row plus ``gap`` multiples of their step; None if the
    contract has no such problem."""
    out = dict(sizes)
    for operand in contract.operands.values():
        if operand.ld:
            size = contract.sizes[operand.ld]
            out[operand.ld] = max(out[operand.ld], (-(-out[operand.shape[-1]] // size.multiple) + gap) * size.multiple)
    for name, size in contract.sizes.items():
        if not size.first <= out[name] <= size.last or out[name] % size.multiple:
            return None
    for limit in contract.limits:
        low, high = (number(side, out) for side in sides(limit))
        if low > high:
            return None
    return out


class _Layout(NamedTuple):
    """An operand in memory: rows of ``cols`` elements that begin ``ld`` elements apart. Its buffer ends with the last
    row, without a gap, so that the emulator reports every access after it. A vector is one row."""

    rows: int
    cols: int
    ld: int
    type: str

    @property
    def inside(self) -> Array:
        """A mask over the elements of the buffer: true for those of the operand, false in gaps."""
        mask = np.zeros((self.rows, self.ld), bool)
        mask[:, : self.cols] = True
        return self.flat(mask)

    def flat(self, padded: Array) -> Array:
        """The buffer, of shape ((rows - 1) * ld + cols,), for an array of shape (rows, ld)."""
        return padded.reshape(-1)[: (self.rows - 1) * self.ld + self.cols]

    def elements(self, flat: Array) -> Array:
        """The operand's elements, of shape (rows, cols), for a buffer as ``flat`` returns it."""
        padded = np.zeros(self.rows * self.ld, flat.dtype)
        padded[: len(flat)] = flat
        return padded.reshape(self.rows, self.ld)[:, : self.cols]


def _layout_of(contract: KernelContract, name: str, sizes: Sizes) -> _Layout:
    """How an operand is stored in a problem of these sizes."""
    operand = contract.operands[name]
    cols = sizes[operand.shape[-1]]
    rows = sizes[operand.shape[0]] if len(operand.shape) == 2 else 1
    return _Layout(rows, cols, sizes[operand.ld] if operand.ld else cols, operand.type)


def _fault(contract: KernelContract, program: emulator.Program, sizes: Sizes) -> str:
    """Launch the kernel on random integers from -1 to 1, and say what is wrong; empty if nothing is."""
    memory, inputs = emulator.Memory(), dict[str, Array]()
    layouts = {name: _layout_of(contract, name, sizes) for name in contract.operands}
    buffers = {}
    random = np.random.default_rng(0)
    for name, layout in layouts.items():
        numbers = layout.flat(random.integers(-1, 2, (layout.rows, layout.ld)).astype(np.float32))
        inputs[name] = layout.elements(numbers)
        bits = _encoded(numbers, layout.type)
        if name == "D":
            # With ``region`` the emulator reports stores to the gaps between rows.
            buffers[name] = memory.upload(bits, "output", name=name, region=layout.inside)
        else:
            buffers[name] = memory.upload(bits, "input", name=name)
    arguments: list[emulator.Buffer | int] = []
    for value in contract.parameters:
        is_size = value != UNUSED and value not in buffers
        arguments.append(number(value, sizes) if is_size else buffers.get(str(value), 0))
    x, y, z = (number(each, sizes) for each in (*contract.launch.grid, 1, 1)[:3])
    try:
        result = program.launch(
            contract.kernel or next(iter(program.module.kernels)), (x, y, z), contract.launch.threads, arguments,
            memory=memory, shared_bytes=contract.launch.shared,
        )  # fmt: skip
    except emulator.LaunchRefused as error:
        return str(error)
    errors = [str(report) for report in result.reports if report.is_error]
    if errors:
        return errors[0]
    return _wrong_value(contract, inputs, layouts["D"].elements(_decoded(buffers["D"].download(), layouts["D"].type)))


def _wrong_value(contract: KernelContract, inputs: Mapping[str, Array], found: Array) -> str:
    """The first wrong element of D, in words; empty if there is none, or if D's type may not hold the sums exactly.
    ``inputs``: A and B as they are stored, of shape (rows, cols). ``found``: D likewise."""
    indices = contract.meaning.indices
    # ``einsum`` takes arrays, each followed by the numbers of its indices. Vectors lose their axis of length 1.
    numbers = {index: i for i, index in enumerate(dict.fromkeys(index for each in indices.values() for index in each))}
    terms: list[Any] = []
    for name in ("A", "B"):
        if name in indices:
            terms += [
                inputs[name].reshape(inputs[name].shape[-len(indices[name]) :]),
                [numbers[x] for x in indices[name]],
            ]
    expected = np.einsum(*terms, [numbers[x] for x in indices["D"]])
    if np.abs(expected).max() > EXACT[contract.operands["D"].type]:
        return ""
    found = found.reshape(expected.shape)
    wrong = np.argwhere(~(found == expected))
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"D{at} is {found[at]:g}, not {expected[at]:g}; {len(wrong)} of {expected.size} elements are wrong"


def _encoded(numbers: Array, kind: str) -> Array:
    """Numbers as elements of a type, which must represent them exactly. bf16 is the upper half of fp32, as uint16."""
    if kind == "bf16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(TYPES[kind])


def _decoded(bits: Array, kind: str) -> Array:
    """Elements of a type as fp32 numbers."""
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)
