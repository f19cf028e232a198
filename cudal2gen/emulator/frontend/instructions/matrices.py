"""ldmatrix, stmatrix, movmatrix, mma.sync and wmma."""

from __future__ import annotations

from collections.abc import Iterator

from cudal2gen.emulator.frontend.emitter import Emitter, Value
from cudal2gen.emulator.frontend.instruction import Writes, instruction
from cudal2gen.emulator.frontend.instructions.memory import space_of
from cudal2gen.emulator.frontend.mutations import shift
from cudal2gen.emulator.frontend.ptx import Instr, Mem, Operand, Reg, Sym, Vec
from cudal2gen.emulator.machine.matrices import WmmaForm, WmmaTile
from cudal2gen.emulator.machine.tensor import Shape

_shapes: dict[str, Shape | None] = {}


def _matrix_form(e: Emitter, ins: Instr, registers: Operand, at: Operand) -> tuple[tuple[Operand, ...], bool]:
    """What ldmatrix and stmatrix have in common: their registers, one per matrix, and whether they transpose."""
    parts = ins.parts
    count = next(int(p[1:]) for p in parts if p in ("x1", "x2", "x4"))
    items = registers.items if isinstance(registers, Vec) else (registers,)
    if "b16" not in parts or "m8n8" not in parts or len(items) != count:
        raise e.fail()
    if isinstance(at, Mem) and space_of(ins) == "generic":
        raise e.fail(f"{ins.base} with a generic address")
    return items, "trans" in parts


@instruction("ldmatrix", mutations=(shift(),))
def ldmatrix(e: Emitter, ins: Instr) -> None:
    """ldmatrix of 16-bit elements."""
    d, at = ins.operands
    targets, transpose = _matrix_form(e, ins, d, at)
    text = f"H.load({e.shared(at)}, {len(targets)}, {e.lanes()}, {transpose})"
    if e.guard is None and all(isinstance(t, Reg) and t.name not in e.lazy for t in targets):
        e.line(f"{', '.join(_variables(e, targets))}{',' if len(targets) == 1 else ''} = {text}")
        return
    loaded = e.temp(text)
    for i, target in enumerate(targets):
        e.assign(target, Value(f"{loaded}[{i}]", "u4", False))


@instruction("stmatrix", writes=Writes.MEMORY, mutations=(shift(),))
def stmatrix(e: Emitter, ins: Instr) -> None:
    """stmatrix of 16-bit elements."""
    at, s = ins.operands
    sources, transpose = _matrix_form(e, ins, s, at)
    values = e.arrays(sources, "u4")
    e.line(f"H.store({e.shared(at)}, {values}, {e.lanes()}, {transpose})")


@instruction("movmatrix")
def movmatrix(e: Emitter, ins: Instr) -> None:
    """movmatrix.trans."""
    d, a = ins.operands
    e.assign(d, Value(f"T.movmatrix({e.array(a, 'u4')})", "u4", False))


def _variables(e: Emitter, targets: tuple[Operand, ...]) -> list[str]:
    return [e.variable(t.name) for t in targets if isinstance(t, Reg)]


def _shape(ins: Instr) -> Shape | None:
    """The kind of mma.sync, None for those that are not modelled. The same opcode gives the same object."""
    if ins.op not in _shapes:
        _shapes[ins.op] = _make_shape(ins)
    return _shapes[ins.op]


def _make_shape(ins: Instr) -> Shape | None:
    parts = ins.parts
    size = next((p for p in parts if p.startswith("m16n8k")), "")
    if not size or "row" not in parts or "col" not in parts or "sp" in parts or "satfinite" in parts:
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
    return shape if shape is not None and k % (4 * shape.per) == 0 else None


def _destination(ins: Instr) -> Iterator[Operand]:
    yield ins.operands[0]


@instruction("mma", accumulates=_destination)
def mma(e: Emitter, ins: Instr) -> None:
    """mma.sync on f16, bf16, tf32 and 8-bit integers."""
    shape = _shape(ins)
    d, a, b, c = ins.operands
    if not (isinstance(d, Vec) and isinstance(a, Vec) and isinstance(b, Vec) and isinstance(c, Vec)) or shape is None:
        raise e.fail()
    steps = shape.k // (4 * shape.per)
    if len(a.items) != 2 * steps or len(b.items) != steps or len(c.items) != (2 if shape.acc == "f16" else 4):
        raise e.fail("wrong number of registers")

    def lazy(op: Operand) -> str:
        """Accumulators stay under way."""
        return e.variable(op.name) if isinstance(op, Reg) and op.name in e.lazy else e.array(op, "u4")

    texts = [f"({', '.join(map(lazy, v.items))},)" for v in (a, b, c)]
    call = f"T.mma({e.bind('shape', shape)}, {', '.join(texts)}, {e.lanes()})"
    if e.guard is None:
        e.line(f"{', '.join(_variables(e, d.items))} = {call}")
        return
    out = e.temp(call)
    for i, target in enumerate(d.items):
        e.assign(target, Value(f"FORCE({out}[{i}])", "u4", False))


def _wmma_size(e: Emitter, ins: Instr) -> str:
    size = next((p for p in ins.parts if p in ("m16n16k16", "m32n8k16", "m8n32k16")), None)
    if size is None:
        raise e.fail()
    return size


def _half(ins: Instr, space: str) -> int:  # noqa: ARG001
    return 2


@instruction("wmma.mma", access=_half)
def wmma(e: Emitter, ins: Instr) -> None:
    """wmma.mma for f16 (the fragment layout is the machine's own)."""
    parts, size = ins.parts, _wmma_size(e, ins)
    i = parts.index(size)
    types = parts[i + 1 :]
    if not set(types) <= {"f16", "f32"}:
        raise e.fail()
    form = e.bind("wmma", WmmaForm(size, parts[i - 2], parts[i - 1], types[0], types[-1]))
    d, *operands = ins.operands
    texts = ", ".join(e.arrays(v.items, "u4") for v in operands if isinstance(v, Vec))
    _assign_all(e, d, f"T.wmma({form}, {texts}, {e.lanes()})")


def _assign_all(e: Emitter, d: Operand, call: str) -> None:
    assert isinstance(d, Vec)
    out = e.temp(call)
    for i, target in enumerate(d.items):
        e.assign(target, Value(f"{out}[{i}]", "u4", False))


def _wmma_tile(e: Emitter, ins: Instr, at: Operand) -> tuple[str, str, str]:
    """(tile, address, stride) of wmma.load and wmma.store."""
    parts = ins.parts
    kind, space = parts[-1], space_of(ins)
    if kind not in ("f16", "f32"):
        raise e.fail()
    if isinstance(at, Mem) and space == "generic" and isinstance(at.base, Sym):
        space = e.symbols[at.base.name][0]
    layout = next(p for p in parts if p in ("row", "col"))
    tile = e.bind("tile", WmmaTile(parts[2], layout, _wmma_size(e, ins), space, kind))
    stride = e.array(ins.operands[2], "u4") if len(ins.operands) > 2 else "None"
    return tile, e.shared(at) if space == "shared" else e.address(at, space), stride


@instruction("wmma.load", access=_half)
def wmma_load(e: Emitter, ins: Instr) -> None:
    """wmma.load."""
    d, at = ins.operands[:2]
    assert isinstance(d, Vec)
    tile, where, stride = _wmma_tile(e, ins, at)
    _assign_all(e, d, f"T.wmma_load({tile}, {where}, {stride}, {len(d.items)}, {e.lanes()})")


@instruction("wmma.store", writes=Writes.MEMORY, access=_half)
def wmma_store(e: Emitter, ins: Instr) -> None:
    """wmma.store."""
    at, s = ins.operands[:2]
    assert isinstance(s, Vec)
    tile, where, stride = _wmma_tile(e, ins, at)
    e.line(f"T.wmma_store({tile}, {where}, {stride}, {e.arrays(s.items, 'u4')}, {e.lanes()})")
