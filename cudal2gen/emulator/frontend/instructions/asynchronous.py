"""Handlers of clusters, mbarriers, bulk copies, wgmma and what belongs to them (sm_90)."""

from __future__ import annotations

from cudal2gen.emulator.frontend.instructions.movement import space_of
from cudal2gen.emulator.frontend.ptx import TYPE_BYTES, Imm, Instr, Mem, Operand, Pair, Reg, Sym, Tensor, Vec
from cudal2gen.emulator.frontend.translate import Emitter, Value, instruction
from cudal2gen.emulator.hopper.warpgroup import Form


def _discarded(op: Operand) -> bool:
    return (isinstance(op, Sym | Reg)) and op.name == "_"


def _shared(e: Emitter, op: Operand) -> str:
    """A shared-memory address as uint32; generic ones (mapa.u64) lose their window."""
    return e.address(op, "shared")


@instruction("mbarrier")
def mbarrier(e: Emitter, ins: Instr) -> None:
    """mbarrier.*; try_wait has been split into a wait and its result."""
    what, parts, operands = ins.parts[1], ins.parts, list(ins.operands)
    if what in ("arrive", "arrive_drop"):
        state = operands.pop(0) if not isinstance(operands[0], Mem) else None
        expects = "expect_tx" in parts
        at = _shared(e, operands[0])
        extra = e.array(operands[1], "u4") if len(operands) > 1 else None
        count = "1" if expects or extra is None else extra
        expected = extra if expects and extra is not None else "None"
        order = f"{'relaxed' not in parts}, {what == 'arrive_drop'}"
        text = f"B.arrive({at}, {count}, {expected}, {e.mask()}, {e.site()}, {order})"
        if state is None or _discarded(state):
            e.line(text)
        else:
            e.assign(state, Value(text, "u8", False))
        return
    if what == "test_wait":
        parity = "parity" in parts
        token = e.array(operands[2], "u4" if parity else "u8")
        text = f"B.test_wait({_shared(e, operands[1])}, {token}, {parity}, {e.mask()}, {e.site()})"
        e.assign(operands[0], Value(text, "p", False))
        return
    at = _shared(e, operands[0])
    if what == "init":
        e.line(f"B.init({at}, {e.array(operands[1], 'u4')}, {e.mask()}, {e.site()})")
    elif what == "inval":
        e.line(f"B.invalidate({at}, {e.mask()}, {e.site()})")
    elif what == "expect_tx":
        e.line(f"B.expect({at}, {e.array(operands[1], 'u4')}, {e.mask()}, {e.site()})")
    elif what == "complete_tx":
        e.line(f"B.complete({at}, {e.array(operands[1], 'u4')}, {e.mask()}, {e.site()})")
    else:
        raise e.fail()


@instruction("emu_waited")
def waited(e: Emitter, ins: Instr) -> None:
    """The result of the try_wait before."""
    e.assign(ins.operands[0], Value("B.waited()", "p", False))


@instruction("mapa")
def mapa(e: Emitter, ins: Instr) -> None:
    """mapa: the address of the same variable in another CTA of the cluster."""
    d, a, rank = ins.operands
    bits = 64 if ins.parts[-1] == "u64" else 32
    source = e.array(a, f"u{bits // 8}")
    e.assign(d, Value(f"B.mapa({source}, {e.array(rank, 'u4')})", f"u{bits // 8}", False))


@instruction("getctarank")
def getctarank(e: Emitter, ins: Instr) -> None:
    """getctarank: the rank of the CTA that an address belongs to."""
    d, a = ins.operands
    bits = 64 if ins.parts[-1] == "u64" else 32
    e.assign(d, Value(f"B.rank_of({e.array(a, f'u{bits // 8}')})", "u4", False))


@instruction("elect")
def elect(e: Emitter, ins: Instr) -> None:
    """elect.sync: the lowest lane of the members."""
    d, members = ins.operands
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    got = e.temp(f"W.elect({e.raw(members, 32).text}, {e.mask()}, {e.site()})")
    if not _discarded(first):
        e.assign(first, Value(f"{got}[0]", "u4", False))
    if second is not None and not _discarded(second):
        e.assign(second, Value(f"{got}[1]", "p", False))


@instruction("setmaxnreg")
def setmaxnreg(e: Emitter, ins: Instr) -> None:
    """setmaxnreg.inc and .dec."""
    count = ins.operands[0]
    if not isinstance(count, Imm):
        raise e.fail()
    e.line(f"X.set_registers({count.value}, {'inc' in ins.parts}, {e.mask()}, {e.site()})")


@instruction("griddepcontrol")
def griddepcontrol(e: Emitter, ins: Instr) -> None:
    """griddepcontrol.wait; launch_dependents has no effect on values."""
    if "wait" in ins.parts:
        e.line(f"M.grid_wait({e.mask()})")


@instruction("stmatrix")
def stmatrix(e: Emitter, ins: Instr) -> None:
    """stmatrix of 16-bit elements."""
    parts = ins.parts
    if "b16" not in parts or "m8n8" not in parts:
        raise e.fail()
    n = next(int(p[1:]) for p in parts if p in ("x1", "x2", "x4"))
    at, s = ins.operands
    sources = s.items if isinstance(s, Vec) else (s,)
    if len(sources) != n or (isinstance(at, Mem) and space_of(ins) == "generic"):
        raise e.fail()
    values = ", ".join(e.array(x, "u4") for x in sources)
    e.line(f"S.stmatrix({e.address(at, 'shared')}, ({values},), {e.mask()}, {e.site()}, {'trans' in parts})")


def store_async(e: Emitter, ins: Instr) -> None:
    """st.async: a store that completes on an mbarrier of the destination's CTA."""
    width = TYPE_BYTES[ins.parts[-1]]
    at, value, bar = ins.operands
    items = value.items if isinstance(value, Vec) else (value,)
    parts = [e.array(x, f"u{width}") for x in items]
    joined = parts[0] if len(parts) == 1 else f"JOIN(({', '.join(parts)}), {width})"
    total = width * len(parts)
    e.line(f"C.store_async({_shared(e, at)}, {joined}, {total}, {_shared(e, bar)}, {e.mask()}, {e.site()})")


def bulk(e: Emitter, ins: Instr) -> None:
    """cp.async.bulk and cp.reduce.async.bulk: tensors, runs of bytes, groups."""
    parts, operands = ins.parts, list(ins.operands)
    heads = [p.split(":") for p in parts]
    if "commit_group" in parts:
        e.line(f"C.commit({e.mask()})")
        return
    if "wait_group" in parts:
        n = operands[0]
        if not isinstance(n, Imm):
            raise e.fail()
        e.line(f"C.wait({n.value}, {e.mask()})")
        return
    if "prefetch" in parts:
        return
    spaces = [h[0] for h in heads if h[0] in ("shared", "global")]
    if "im2col" in parts or "gather4" in " ".join(parts) or len(spaces) != 2:
        raise e.fail()
    reduction = next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
    reduction = reduction if parts[1] == "reduce" else ""
    if "tensor" in parts:
        tensor = next(op for op in operands if isinstance(op, Tensor))
        where = e.address(Mem(tensor.base, tensor.offset), "generic")
        coordinates = "[" + ", ".join(e.array(c, "u4") for c in tensor.coordinates) + "]"
        if spaces == ["shared", "global"]:
            to, _, bar = operands[:3]
            ranks = e.array(operands[3], "u2") if any(h[0] == "multicast" for h in heads) else "None"
            ends = f"{_shared(e, to)}, {_shared(e, bar)}"
            e.line(f"C.load_tensor({where}, {coordinates}, {ends}, {ranks}, {e.mask()}, {e.site()})")
            return
        e.line(
            f"C.store_tensor({where}, {coordinates}, {_shared(e, operands[1])}, {reduction!r}, {e.mask()}, {e.site()})"
        )
        return
    to, source, size = operands[:3]
    if spaces[0] == "shared":
        if reduction:
            raise e.fail()
        inside = spaces[1] == "shared"
        origin = _shared(e, source) if inside else e.address(source, "global")
        ranks = e.array(operands[4], "u2") if any(h[0] == "multicast" for h in heads) else "None"
        ends = f"{_shared(e, to)}, {_shared(e, operands[3])}"
        e.line(f"C.load({origin}, {e.array(size, 'u4')}, {ends}, {ranks}, {e.mask()}, {e.site()}, {inside})")
        return
    if reduction:
        raise e.fail()
    e.line(f"C.store({e.address(to, 'global')}, {_shared(e, source)}, {e.array(size, 'u4')}, {e.mask()}, {e.site()})")


@instruction("wgmma")
def wgmma(e: Emitter, ins: Instr) -> None:
    """wgmma.fence, commit_group, wait_group, mma_async on f16 and bf16."""
    parts, what = ins.parts, ins.parts[1]
    if what == "fence":
        e.line(f"X.fence({e.mask()})")
        return
    if what == "commit_group":
        e.line(f"X.commit({e.mask()}, {e.site()})")
        return
    if what == "wait_group":
        n = ins.operands[0]
        if not isinstance(n, Imm):
            raise e.fail()
        e.line(f"X.wait({n.value}, {e.mask()})")
        return
    size = next((p for p in parts if p.startswith("m64n")), "")
    if not size.endswith("k16") or "sp" in parts or e.guard is not None:
        raise e.fail()
    columns = int(size[4:-3])
    acc, kind, other = parts[-3:]
    if kind != other or kind not in ("f16", "bf16") or acc not in ("f32", "f16") or (acc == "f16" and kind != "f16"):
        raise e.fail()
    if columns % 8 or not 8 <= columns <= 256:
        raise e.fail()
    d, a, b, *rest = ins.operands
    assert isinstance(d, Vec)
    if len(d.items) != columns // (2 if acc == "f32" else 4):
        raise e.fail("wrong number of registers")
    registers = isinstance(a, Vec)
    numbers = [x.value for x in rest[1:] if isinstance(x, Imm)]
    if len(numbers) != len(rest) - 1:
        raise e.fail()
    sign_a, sign_b, *along = [*numbers, *([0] * 4)][: 2 + (1 if registers else 2)]
    if not numbers:
        sign_a = sign_b = 1
    along_a, along_b = (False, bool(along[0])) if registers else (bool(along[0]), bool(along[1]))
    form = e.bind("form", Form(columns, kind, acc, registers, along_a, along_b, float(sign_a * sign_b)))
    keep = e.predicate(rest[0]).text if rest else "True"
    left = f"({', '.join(_register(e, x) for x in a.items)},)" if isinstance(a, Vec) else e.array(a, "u8")
    names = [_register(e, x) for x in d.items]
    e.line(
        f"{', '.join(names)} = X.mma({form}, ({', '.join(names)},), {left}, {e.array(b, 'u8')}, {keep}, m, {e.site()})"
    )
    if isinstance(a, Vec):
        names = [_register(e, x) for x in a.items]
        e.line(f"{', '.join(names)} = X.lend(({', '.join(names)},), m)")


def _register(e: Emitter, op: Operand) -> str:
    if not isinstance(op, Reg):
        raise e.fail("register expected")
    return e.variable(op.name)
