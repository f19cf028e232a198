"""Translates ldmatrix, stmatrix, movmatrix, mma.sync and wmma, on matrices in a warp's registers, to Python text.

In this text, ``T`` is the batch's unit that multiplies (``machine.matrices``), and ``H`` is the one that accesses
matrices in shared memory.

There are two ways to execute an mma.sync. The tensor unit collects those with m16n8 and 16-bit, tf32 or 8-bit integer
operands (``_shape``), and multiplies many of them together. All others (``_dense_form``) are multiplied one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from kernelproof.emulator.arithmetic.operands import ELEMENT_BITS
from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.instructions.memory import space_of
from kernelproof.emulator.frontend.mutation_operators import retype, shift
from kernelproof.emulator.frontend.product_grids import ProductLine
from kernelproof.emulator.frontend.ptx import Instr, Mem, Operand, Reg, Sym, Vec
from kernelproof.emulator.frontend.registers import registers
from kernelproof.emulator.machine.matrices import DenseForm, WmmaForm, WmmaTile
from kernelproof.emulator.machine.tensor import Shape

_shapes: dict[str, Shape | None] = {}


def _matrix_form(e: Emitter, ins: Instr, fragment: Operand, mem: Operand) -> tuple[tuple[Operand, ...], bool]:
    """The registers of a ldmatrix or stmatrix, one per matrix, and whether it transposes."""
    parts = ins.parts
    count = next(int(p[1:]) for p in parts if p in ("x1", "x2", "x4"))
    items = fragment.items if isinstance(fragment, Vec) else (fragment,)
    if "b16" not in parts or "m8n8" not in parts or len(items) != count:
        raise e.fail()
    if isinstance(mem, Mem) and space_of(ins) == "generic":
        raise e.fail(f"{ins.base} with a generic address")
    return items, "trans" in parts


@instruction("ldmatrix", mutations=(shift(),))
def ldmatrix(e: Emitter, ins: Instr) -> None:
    """ldmatrix of 16-bit elements."""
    d, mem = ins.operands
    targets, transpose = _matrix_form(e, ins, d, mem)
    text = f"H.load({e.shared(mem)}, {len(targets)}, {e.lanes()}, {transpose})"
    if e.guard is None and all(isinstance(t, Reg) and t.name not in e.lazy for t in targets):
        e.line(f"{', '.join(_variables(e, targets))}{',' if len(targets) == 1 else ''} = {text}")
        return
    loaded = e.temp(text)
    for i, target in enumerate(targets):
        e.assign(target, Value(f"{loaded}[{i}]", "u4", False))


@instruction("stmatrix", writes=Writes.MEMORY, mutations=(shift(),))
def stmatrix(e: Emitter, ins: Instr) -> None:
    """stmatrix of 16-bit elements."""
    mem, s = ins.operands
    sources, transpose = _matrix_form(e, ins, s, mem)
    values = e.arrays(sources, "u4")
    e.line(f"H.store({e.shared(mem)}, {values}, {e.lanes()}, {transpose})")


@instruction("movmatrix")
def movmatrix(e: Emitter, ins: Instr) -> None:
    """movmatrix.trans."""
    d, a = ins.operands
    e.assign(d, Value(f"T.movmatrix({e.array(a, 'u4')}, {e.lanes()})", "u4", False))


def _variables(e: Emitter, targets: tuple[Operand, ...]) -> list[str]:
    """The local variables of registers."""
    return [e.variable(t.name) for t in targets if isinstance(t, Reg)]


def _shape(ins: Instr) -> Shape | None:
    """The shape of an mma.sync; None for shapes that the tensor unit does not collect. The same opcode always gives the
    same object."""
    if ins.op not in _shapes:
        _shapes[ins.op] = _make_shape(ins)
    return _shapes[ins.op]


def _make_shape(ins: Instr) -> Shape | None:
    """The shape in an opcode such as mma.sync.m16n8k16.row.col.f32.f16.f16.f32, in which the types of D, A, B and C
    follow the layouts."""
    parts = ins.parts
    size = next((p for p in parts if p.startswith("m16n8k")), "")
    if not size or "row" not in parts or "col" not in parts or {"sp", "satfinite"} & set(parts):
        return None
    types = parts[parts.index("col") + 1 :]
    if len(types) != 4:
        return None
    acc, kind_a, kind_b, kind_c = types
    k = int(size[6:])
    shape = None
    if kind_a in ("f16", "bf16", "tf32") and kind_a == kind_b and acc == kind_c and acc in ("f32", "f16"):
        if acc == "f32" or kind_a == "f16":
            shape = Shape(ins.op, k, kind_a, acc)
    elif kind_a in ("s8", "u8") and kind_b in ("s8", "u8") and acc == kind_c == "s32":
        shape = Shape(ins.op, k, "s8", "s32", kind_a == "s8", kind_b == "s8")
    return shape if shape is not None and k % (4 * shape.per_register) == 0 else None


def _destination(ins: Instr) -> Iterator[Operand]:
    """The operand of mma.sync whose registers may stand for sums that are not computed yet: D."""
    yield ins.operands[0]


# Type of A and B -> types of accumulators, for mma.sync that are computed immediately, one by one.
_DENSE = {
    "f64": ("f64",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",), "s4": ("s32",),
    "u4": ("s32",), "b1": ("s32",),
}  # fmt: skip
_DENSE_SIZES = re.compile(r"m(8|16)n8k(\d+)$")


def _dense_form(e: Emitter, ins: Instr) -> DenseForm:
    """The form of an mma.sync that the tensor unit does not collect."""
    parts = ins.parts
    size = next((match for part in parts if (match := _DENSE_SIZES.match(part))), None)
    types = [part for part in parts if part in ELEMENT_BITS]
    if size is None or len(types) != 4 or {"sp", "block_scale"} & set(parts) or "col" not in parts:
        raise e.fail()
    acc, kind_a, kind_b, kind_c = types
    form = DenseForm(
        int(size[1]), int(size[2]), kind_a, kind_b, acc, "satfinite" in parts, "xor" in parts and "popc" in parts
    )
    types_match = ELEMENT_BITS[kind_a] == ELEMENT_BITS.get(kind_b) and acc == kind_c
    if not types_match or acc not in _DENSE.get(kind_a, ()) or form.k % (4 * form.per_register):
        raise e.fail()
    return form


def _write_dense(e: Emitter, ins: Instr) -> None:
    """Write an mma.sync that the tensor unit does not collect."""
    form = _dense_form(e, ins)
    d, *operands = ins.operands
    # A register of A or B holds ``per_register`` elements along k, and four lanes share a row. So a step has 4 *
    # per_register elements along k.
    steps, halves = form.k // (4 * form.per_register), form.rows // 8
    expected = [steps * halves, steps, halves * (1 if form.acc == "f16" else 2)]
    if [len(v.items) for v in operands if isinstance(v, Vec)] != expected:
        raise e.fail("wrong number of registers")
    word = _register_type(form.acc)
    texts = ", ".join(e.arrays(v.items, word) for v in operands if isinstance(v, Vec))
    _assign_all(e, d, f"T.dense({e.bind('dense', form)}, {texts}, {e.lanes()})", word)


def _register_type(kind: str) -> str:
    """The type of a register with elements of this type."""
    return "u8" if kind == "f64" else "u4"


@instruction("mma", accumulates=_destination, mutations=(retype,))
def mma(e: Emitter, ins: Instr) -> None:
    """mma.sync of dense f16, bf16, tf32, f64, e4m3, e5m2, s8, u8, s4, u4 and b1."""
    shape = _shape(ins)
    if shape is None:
        _write_dense(e, ins)
        return
    d, a, b, c = ins.operands
    if not (isinstance(d, Vec) and isinstance(a, Vec) and isinstance(b, Vec) and isinstance(c, Vec)):
        raise e.fail()
    steps = shape.k // (4 * shape.per_register)
    if len(a.items) != 2 * steps or len(b.items) != steps or len(c.items) != (2 if shape.acc == "f16" else 4):
        raise e.fail("wrong number of registers")

    def register_text(op: Operand) -> str:
        """The text of a register. An accumulator that is not computed yet stays so."""
        return e.variable(op.name) if isinstance(op, Reg) and op.name in e.lazy else e.array(op, "u4")

    left, right, addend = (tuple(map(register_text, v.items)) for v in (a, b, c))
    name, targets = e.bind("shape", shape), tuple(_variables(e, d.items))
    reads, writes = frozenset(chain(*map(registers, (a, b, c)))), frozenset(registers(d))
    line = ProductLine(len(e.lines), shape, name, left, right, addend, targets, reads, writes, e.site())
    if e.guard is None:
        if not e.indent:
            e.products.append(line)
        e.line(line.text)
        return
    operands = ", ".join(f"({', '.join(texts)},)" for texts in (left, right, addend))
    out = e.temp(f"T.mma({name}, {operands}, {e.lanes()})")
    for i, target in enumerate(d.items):
        e.assign(target, Value(f"FORCE({out}[{i}])", "u4", False))


# Size of wmma -> types of A and B that exist for it.
_WMMA = {
    **dict.fromkeys(("m16n16k16", "m32n8k16", "m8n32k16"), ("f16", "bf16", "s8", "u8")),
    "m16n16k8": ("tf32",),
    "m8n8k4": ("f64",),
    "m8n8k32": ("s4", "u4"),
    "m8n8k128": ("b1",),
}


def _wmma_size(e: Emitter, ins: Instr) -> str:
    """The size of a wmma, such as m16n16k16."""
    size = next((p for p in ins.parts if p in _WMMA), None)
    if size is None:
        raise e.fail()
    return size


def _access_bytes(ins: Instr, space: str) -> int:  # noqa: ARG001
    """The bytes of the smallest access of a wmma: those of an element (1 for less than a byte), at most 2."""
    return min(2, max(8, ELEMENT_BITS.get(ins.parts[-1], 8)) // 8)


@instruction("wmma.mma", access=_access_bytes)
def wmma(e: Emitter, ins: Instr) -> None:
    """wmma.mma of f16, bf16, tf32, f64, s8, u8, s4, u4 and b1 (the fragment layout is the machine's own)."""
    parts, size = ins.parts, _wmma_size(e, ins)
    i = parts.index(size)
    types = [part for part in parts[i + 1 :] if part in ELEMENT_BITS]
    # The types of D, A, B and C; if A and B are f16, the opcode does not name their types.
    acc, *kinds, kind_c = types
    kind_a, kind_b = kinds or ("f16", "f16")
    if not {kind_a, kind_b} <= set(_WMMA[size]):
        raise e.fail()
    form = WmmaForm(size, parts[i - 2], parts[i - 1], acc, kind_a, kind_b, kind_c, "satfinite" in parts, "xor" in parts)
    word = _register_type(acc)
    d, *operands = ins.operands
    texts = ", ".join(e.arrays(v.items, word) for v in operands if isinstance(v, Vec))
    _assign_all(e, d, f"T.wmma({e.bind('wmma', form)}, {texts}, {e.lanes()})", word)


def _assign_all(e: Emitter, d: Operand, call: str, word: str = "u4") -> None:
    """Write the results of a call to the registers of a vector."""
    assert isinstance(d, Vec)
    out = e.temp(call)
    for i, target in enumerate(d.items):
        e.assign(target, Value(f"{out}[{i}]", word, False))


def _wmma_tile(e: Emitter, ins: Instr, mem: Operand) -> tuple[str, str, str]:
    """The texts of tile, address and stride of a wmma.load or wmma.store."""
    parts = ins.parts
    kind, space = parts[-1], space_of(ins)
    size = _wmma_size(e, ins)
    if kind not in (*_WMMA[size], "f16", "f32", "s32", "f64"):
        raise e.fail()
    if isinstance(mem, Mem) and space == "generic" and isinstance(mem.base, Sym):
        space = e.symbols[mem.base.name][0]
    layout = next(p for p in parts if p in ("row", "col"))
    tile = e.bind("tile", WmmaTile(parts[2], layout, size, space, kind))
    stride = e.array(ins.operands[2], "u4") if len(ins.operands) > 2 else "None"
    return tile, e.shared(mem) if space == "shared" else e.address(mem, space), stride


@instruction("wmma.load", access=_access_bytes)
def wmma_load(e: Emitter, ins: Instr) -> None:
    """wmma.load."""
    d, mem = ins.operands[:2]
    assert isinstance(d, Vec)
    tile, address, stride = _wmma_tile(e, ins, mem)
    call = f"T.wmma_load({tile}, {address}, {stride}, {len(d.items)}, {e.lanes()})"
    _assign_all(e, d, call, _register_type(ins.parts[-1]))


@instruction("wmma.store", writes=Writes.MEMORY, access=_access_bytes)
def wmma_store(e: Emitter, ins: Instr) -> None:
    """wmma.store."""
    mem, s = ins.operands[:2]
    assert isinstance(s, Vec)
    tile, address, stride = _wmma_tile(e, ins, mem)
    values = e.arrays(s.items, _register_type(ins.parts[-1]))
    e.line(f"T.wmma_store({tile}, {address}, {stride}, {values}, {e.lanes()})")
