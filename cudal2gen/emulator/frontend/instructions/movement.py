"""Handlers of loads, stores, atomics, asynchronous copies, matrix and warp instructions, fences."""

from __future__ import annotations

from cudal2gen.emulator.frontend.ptx import TYPE_BYTES, Imm, Instr, Mem, Operand, Pair, Reg, Sym, Vec
from cudal2gen.emulator.frontend.translate import Emitter, Value, instruction
from cudal2gen.emulator.machine.tensor import Shape

_SPACES = ("global", "shared", "local", "param", "const")
_READ_STRONG = {"volatile": 1, "relaxed": 1, "mmio": 1, "cv": 1, "cg": 1, "acquire": 2}
_WRITE_STRONG = {"volatile": 1, "relaxed": 1, "mmio": 1, "release": 2}


def space_of(ins: Instr) -> str:
    """The state space of an access; ``generic`` if none is named."""
    for part in ins.parts[1:]:
        head = part.split(":")[0]
        if head in _SPACES:
            if part.startswith("shared:") and "cluster" in part:
                return "cluster"
            return head
    return "generic"


def _vector(ins: Instr) -> int:
    return 2 if "v2" in ins.parts else 4 if "v4" in ins.parts else 8 if "v8" in ins.parts else 1


def _from_param(ins: Instr) -> bool:
    return space_of(ins) == "param" and isinstance(ins.operands[1], Mem) and isinstance(ins.operands[1].base, Sym)


@instruction("ld", "ldu", uniform=_from_param)
def load(e: Emitter, ins: Instr) -> None:
    """ld from any space."""
    kind = ins.parts[-1]
    n, width = _vector(ins), TYPE_BYTES[kind]
    d, at = ins.operands[:2]
    assert isinstance(at, Mem)
    targets = d.items if isinstance(d, Vec) else (d,)
    k = f"{'i' if kind[0] == 's' else 'u'}{width}"
    space = space_of(ins)
    if space == "param" and isinstance(at.base, Sym):
        place = e.symbols.get(at.base.name)
        if place is None or place[0] != "param":
            raise e.fail(f"{at.base.name} is not a parameter")
        for i, target in enumerate(targets):
            text = f"M.param({place[1] + at.offset + i * width}, {width})"
            if kind[0] == "s":
                text = f"S{8 * width}({text})"
            e.assign(target, Value(text, k, True))
        return
    strong = max((_READ_STRONG.get(p, 0) for p in ins.parts), default=0)
    total = n * width
    pieces = [(0, total)] if total <= 16 else [(i, 16) for i in range(0, total, 16)]
    mask = e.mask()
    for start, size in pieces:
        got = e.temp(_load(e, space, at, start, size, mask, strong))
        count = size // width
        if count > 1:
            got = e.temp(f"SPLIT({got}, {count}, {width}, M.size)")
        for i in range(count):
            target = targets[start // width + i]
            text = got if count == 1 else f"{got}[{i}]"
            e.assign(target, Value(text if k[0] == "u" else f"{text}.view({k})", k, False))


def _load(e: Emitter, space: str, at: Mem, start: int, size: int, mask: str, strong: int) -> str:
    where = Mem(at.base, at.offset + start) if start else at
    if space in ("shared", "cluster"):
        flag = strong > 0 and bool(e.graph.spin_heads)
        return f"S.load({e.address(where, 'shared')}, {size}, {mask}, {e.site()}, {flag})"
    address = e.address(where, space)
    if space == "local":
        return f"G.local_load({address}, {size}, {mask}, {e.site()})"
    if space == "param":
        return f"M.param_at({address}, {size}, {mask}, {e.site()})"
    if space in ("global", "const"):
        return f"G.load({address}, {size}, {mask}, {e.site()}, {strong})"
    if space == "generic":
        if isinstance(at.base, Sym):
            return _load(e, e.symbols[at.base.name][0], at, start, size, mask, strong)
        return f"G.generic_load({address}, {size}, {mask}, {e.site()}, {strong})"
    raise e.fail(f"state space {space}")


@instruction("st")
def store(e: Emitter, ins: Instr) -> None:
    """st to any space."""
    if "async" in ins.parts:
        from cudal2gen.emulator.frontend.instructions import asynchronous

        asynchronous.store_async(e, ins)
        return
    kind = ins.parts[-1]
    n, width = _vector(ins), TYPE_BYTES[kind]
    at, s = ins.operands[:2]
    assert isinstance(at, Mem)
    space = space_of(ins)
    if space == "generic" and isinstance(at.base, Sym):
        space = e.symbols[at.base.name][0]
    sources = s.items if isinstance(s, Vec) else (s,)
    strong = max((_WRITE_STRONG.get(p, 0) for p in ins.parts), default=0)
    total = n * width
    pieces = [(0, total)] if total <= 16 else [(i, 16) for i in range(0, total, 16)]
    mask = e.mask()
    for start, size in pieces:
        chosen = sources[start // width : (start + size) // width]
        where = Mem(at.base, at.offset + start) if start else at
        if len(chosen) == 1:
            value = e.array(chosen[0], f"u{width}")
        else:
            value = f"JOIN(({', '.join(e.array(x, f'u{width}') for x in chosen)}), {width})"
        if space in ("shared", "cluster"):
            flag = strong > 0 and bool(e.graph.spin_heads)
            e.line(f"S.store({e.address(where, 'shared')}, {value}, {size}, {mask}, {e.site()}, {flag})")
        elif space == "local":
            e.line(f"G.local_store({e.address(where, 'local')}, {value}, {size}, {mask}, {e.site()})")
        elif space == "global":
            e.line(f"G.store({e.address(where, 'global')}, {value}, {size}, {mask}, {e.site()}, {strong})")
        elif space == "generic":
            e.line(f"G.generic_store({e.address(where, 'generic')}, {value}, {size}, {mask}, {e.site()}, {strong})")
        else:
            raise e.fail(f"store to state space {space}")


_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@instruction("atom", "red")
def atomic(e: Emitter, ins: Instr) -> None:
    """atom and red."""
    parts = ins.parts
    op = next((p for p in parts[1:] if p in _ATOMICS), None)
    kind = next((p for p in reversed(parts) if p in TYPE_BYTES), "")
    if op is None or kind in ("", "b128") or "async" in parts:
        raise e.fail()
    operands = list(ins.operands)
    d = operands.pop(0) if ins.base == "atom" else None
    at = operands.pop(0)
    assert isinstance(at, Mem)
    width = TYPE_BYTES[kind]
    space = space_of(ins)
    space = "shared" if space == "cluster" else space
    if space not in ("global", "shared", "generic"):
        raise e.fail(f"atomic on state space {space}")
    acquire, release = "acquire" in parts or "acq_rel" in parts, "release" in parts or "acq_rel" in parts
    mask = e.mask()
    values: tuple[Operand, ...] = operands[0].items if isinstance(operands[0], Vec) else (operands[0],)
    targets: tuple[Operand | None, ...] = d.items if isinstance(d, Vec) else (d,) * len(values)
    u = f"u{width}"
    compare = "None"
    if op == "cas":
        compare, values = e.array(operands[0], u), (operands[1],)
    for i, (value, target) in enumerate(zip(values, targets, strict=True)):
        where = Mem(at.base, at.offset + i * width) if i else at
        text = (
            f"G.atomic({op!r}, {kind!r}, {e.address(where, space)}, {e.array(value, u)}, {compare}, {space!r}, "
            f"{mask}, {e.site()}, {acquire}, {release})"
        )
        if target is None or (isinstance(target, Reg) and target.name == "_"):
            e.line(text)
        else:
            e.assign(target, Value(text, u, False))


@instruction("cp")
def copy(e: Emitter, ins: Instr) -> None:
    """cp.async, cp.async.bulk and cp.reduce."""
    from cudal2gen.emulator.frontend.instructions import asynchronous

    parts = ins.parts
    if "bulk" in parts:
        asynchronous.bulk(e, ins)
        return
    if "mbarrier" in parts:
        e.line(f"B.copies_arrive({e.address(ins.operands[0], 'shared')}, {'noinc' in parts}, {e.mask()}, {e.site()})")
        return
    if parts[1] != "async":
        raise e.fail()
    if "commit_group" in parts:
        e.line(f"S.commit({e.mask()})")
        return
    if "wait_group" in parts:
        n = ins.operands[0]
        if not isinstance(n, Imm):
            raise e.fail()
        e.line(f"S.wait({n.value}, {e.mask()})")
        return
    if "wait_all" in parts:
        e.line(f"S.wait_all({e.mask()})")
        return
    dst, src, size = ins.operands[:3]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise e.fail()
    count = "None"
    for extra in ins.operands[3:]:
        if isinstance(extra, Reg) and e.operand_bits(extra) == 64:
            continue
        if isinstance(extra, Reg) and e.operand_bits(extra) == 1:
            p = e.predicate(extra)
            count = f"(0 if {p.text} else {size.value})" if p.uniform else f"WHERE({p.text}, 0, {size.value})"
        else:
            count = e.raw(extra, 32).text
    to, source = e.address(dst, "shared"), e.address(src, "global")
    e.line(f"G.copy_async({to}, {source}, {size.value}, {count}, {e.mask()}, {e.site()})")


@instruction("ldmatrix")
def ldmatrix(e: Emitter, ins: Instr) -> None:
    """ldmatrix of 16-bit elements."""
    parts = ins.parts
    if "b16" not in parts or "m8n8" not in parts:
        raise e.fail()
    n = next(int(p[1:]) for p in parts if p in ("x1", "x2", "x4"))
    d, at = ins.operands
    targets = d.items if isinstance(d, Vec) else (d,)
    if len(targets) != n:
        raise e.fail()
    if isinstance(at, Mem) and space_of(ins) == "generic":
        raise e.fail("ldmatrix with a generic address")
    text = f"S.ldmatrix({e.address(at, 'shared')}, {n}, {e.mask()}, {e.site()}, {'trans' in parts})"
    plain = e.guard is None and all(isinstance(t, Reg) and t.name not in e.lazy for t in targets)
    if plain:
        e.line(
            ", ".join(e.variable(t.name) for t in targets if isinstance(t, Reg)) + (", = " if n == 1 else " = ") + text
        )
        return
    got = e.temp(text)
    for i, target in enumerate(targets):
        e.assign(target, Value(f"{got}[{i}]", "u4", False))


@instruction("movmatrix")
def movmatrix(e: Emitter, ins: Instr) -> None:
    """movmatrix.trans."""
    d, a = ins.operands
    e.assign(d, Value(f"T.movmatrix({e.array(a, 'u4')})", "u4", False))


_SHAPES: dict[str, Shape] = {}


@instruction("mma")
def mma(e: Emitter, ins: Instr) -> None:
    """mma.sync on f16, bf16, tf32 and 8-bit integers."""
    parts = ins.parts
    name = ins.op
    shape = _SHAPES.get(name)
    if shape is None:
        size = next((p for p in parts if p.startswith("m") and "n" in p and "k" in p), "")
        if (
            not size.startswith("m16n8k")
            or "row" not in parts
            or "col" not in parts
            or "sp" in parts
            or "satfinite" in parts
        ):
            raise e.fail()
        types = parts[parts.index("col") + 1 :]
        if len(types) != 4:
            raise e.fail()
        acc, ka, kb, kc = types
        k = int(size[6:])
        if (
            ka in ("f16", "bf16", "tf32")
            and ka == kb
            and acc == kc
            and acc in ("f32", "f16")
            and not (acc == "f16" and ka != "f16")
        ):
            shape = Shape(name, k, ka, acc)
        elif ka in ("s8", "u8") and kb in ("s8", "u8") and acc == kc == "s32":
            shape = Shape(name, k, "s8", "s32", ka == "s8", kb == "s8")
        else:
            raise e.fail()
        if k % (4 * shape.per):
            raise e.fail()
        _SHAPES[name] = shape
    d, a, b, c = ins.operands
    if not (isinstance(d, Vec) and isinstance(a, Vec) and isinstance(b, Vec) and isinstance(c, Vec)):
        raise e.fail()
    steps = shape.k // (4 * shape.per)
    if len(a.items) != 2 * steps or len(b.items) != steps or len(c.items) != (2 if shape.acc == "f16" else 4):
        raise e.fail("wrong number of registers")

    def lazy(op: Operand) -> str:
        if isinstance(op, Reg) and op.name in e.lazy:
            return e.variable(op.name)
        return e.array(op, "u4")

    texts = [f"({', '.join(map(lazy, v.items))},)" for v in (a, b, c)]
    call = f"T.mma({e.bind('shape', shape)}, {', '.join(texts)}, {e.mask()}, {e.site()})"
    if e.guard is None:
        e.line(", ".join(e.variable(t.name) for t in d.items if isinstance(t, Reg)) + " = " + call)
        return
    got = e.temp(call)
    for i, target in enumerate(d.items):
        e.assign(target, Value(f"FORCE({got}[{i}])", "u4", False))


@instruction("wmma")
def wmma(e: Emitter, ins: Instr) -> None:
    """wmma.load, wmma.mma, wmma.store for f16 (the fragment layout is the machine's own)."""
    parts = ins.parts
    what = parts[1]
    size = next((p for p in parts if p in ("m16n16k16", "m32n8k16", "m8n32k16")), None)
    if size is None:
        raise e.fail()
    if what == "mma":
        i = parts.index(size)
        la, lb = parts[i - 2], parts[i - 1]
        types = parts[i + 1 :]
        if not set(types) <= {"f16", "f32"}:
            raise e.fail()
        acc, add = types[0], types[-1]
        d, a, b, c = ins.operands
        texts = [f"({', '.join(e.array(x, 'u4') for x in v.items)},)" for v in (a, b, c) if isinstance(v, Vec)]
        got = e.temp(f"T.wmma({size!r}, {la!r}, {lb!r}, {acc!r}, {add!r}, {', '.join(texts)}, {e.mask()}, {e.site()})")
        assert isinstance(d, Vec)
        for j, target in enumerate(d.items):
            e.assign(target, Value(f"{got}[{j}]", "u4", False))
        return
    part = parts[2]
    layout = next(p for p in parts if p in ("row", "col"))
    kind = parts[-1]
    if kind not in ("f16", "f32"):
        raise e.fail()
    space = space_of(ins)
    if what == "load":
        d, at = ins.operands[:2]
        stride = ins.operands[2] if len(ins.operands) > 2 else None
    else:
        at, d = ins.operands[:2]
        stride = ins.operands[2] if len(ins.operands) > 2 else None
    assert isinstance(d, Vec)
    if isinstance(at, Mem) and space == "generic" and isinstance(at.base, Sym):
        space = e.symbols[at.base.name][0]
    step = e.array(stride, "u4") if stride is not None else "None"
    where = e.address(at, space)
    if what == "load":
        form = f"{part!r}, {layout!r}, {size!r}, {space!r}, {kind!r}"
        got = e.temp(f"T.wmma_load({form}, {where}, {step}, {len(d.items)}, {e.mask()}, {e.site()})")
        for j, target in enumerate(d.items):
            e.assign(target, Value(f"{got}[{j}]", "u4", False))
        return
    values = ", ".join(e.array(x, "u4") for x in d.items)
    e.line(
        f"T.wmma_store({layout!r}, {size!r}, {space!r}, {kind!r}, {where}, {step}, ({values},), {e.mask()}, {e.site()})"
    )


@instruction("shfl")
def shfl(e: Emitter, ins: Instr) -> None:
    """shfl.sync."""
    if ins.parts[1] != "sync":
        raise e.fail()
    mode = ins.parts[2]
    d, a, b, c, members = ins.operands
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)

    def either(op: Operand) -> str:
        return e.raw(op, 32).text

    got = e.temp(
        f"W.shfl({mode!r}, {e.array(a, 'u4')}, {either(b)}, {either(c)}, {either(members)}, {e.mask()}, {e.site()})"
    )
    e.assign(first, Value(f"{got}[0]", "u4", False))
    if second is not None and second.name != "_":
        e.assign(second, Value(f"{got}[1]", "p", False))


@instruction("vote")
def vote(e: Emitter, ins: Instr) -> None:
    """vote.sync."""
    if ins.parts[1] != "sync":
        raise e.fail()
    d, a, members = ins.operands
    mode = ins.parts[2]
    text = f"W.vote({mode!r}, {e.predicate_array(a)}, {e.raw(members, 32).text}, {e.mask()}, {e.site()})"
    e.assign(d, Value(text, "u4" if mode == "ballot" else "p", False))


@instruction("match")
def match(e: Emitter, ins: Instr) -> None:
    """match.sync."""
    mode = ins.parts[1]
    d, a, members = ins.operands
    width = TYPE_BYTES[ins.parts[-1]]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    got = e.temp(f"W.match({mode!r}, {e.array(a, f'u{width}')}, {e.raw(members, 32).text}, {e.mask()}, {e.site()})")
    e.assign(first, Value(f"{got}[0]", "u4", False))
    if second is not None and second.name != "_":
        e.assign(second, Value(f"{got}[1]", "p", False))


@instruction("redux")
def redux(e: Emitter, ins: Instr) -> None:
    """redux.sync on integers."""
    d, a, members = ins.operands
    mode, kind = ins.parts[2], ins.parts[-1]
    if kind not in ("u32", "s32", "b32"):
        raise e.fail()
    text = f"W.redux({mode!r}, {e.array(a, 'u4')}, {e.raw(members, 32).text}, {e.mask()}, {e.site()}, {kind == 's32'})"
    e.assign(d, Value(text, "u4", False))


@instruction("activemask")
def activemask(e: Emitter, ins: Instr) -> None:
    """activemask: the lanes that run together."""
    e.assign(ins.operands[0], Value(f"W.activemask({e.mask()})", "u4", False))


@instruction("bar", "barrier")
def arrive(e: Emitter, ins: Instr) -> None:
    """bar.arrive; the waiting forms end a block and are emitted by the translator."""
    if "cluster" in ins.parts:
        e.line(f"B.cluster_arrive({e.mask()}, {'relaxed' not in ins.parts}, {e.site()})")
        return
    number, count = ins.operands[:2]
    e.line(f"M.arrive({e.raw(number, 32).text}, {e.raw(count, 32).text}, {e.mask()}, {e.site()})")


@instruction("membar", "fence")
def fence(e: Emitter, ins: Instr) -> None:
    """membar and fence; those of CTA scope order shared memory only."""
    if "proxy" in ins.parts:
        if any(p.startswith("tensormap") for p in ins.parts) or "alias" in ins.parts:
            return
        mask = e.mask()
        if "global" not in ins.parts:
            e.line(f"S.fence_proxy({mask})")
        e.line(f"B.fence_init({mask})")
        return
    if "mbarrier_init" in ins.parts:
        e.line(f"B.fence_init({e.mask()})")
        return
    if "cta" in ins.parts:
        e.line(f"S.fence({e.mask()})")
        return
    e.line(f"G.fence({e.mask()})")


@instruction("trap", "brkpt", "emu_assertfail")
def trap(e: Emitter, ins: Instr) -> None:
    """trap and failing asserts."""
    if ins.base == "brkpt":
        return
    message = "a device assert failed" if ins.base == "emu_assertfail" else "trap executed"
    e.line(f"M.trap({e.site()}, {message!r}, {e.mask()})")


@instruction("prefetch", "prefetchu", "nanosleep", "pmevent", "discard", "applypriority", "emu_vprintf", "emu_converge")
def nothing(e: Emitter, ins: Instr) -> None:
    """Hints without an effect on values."""


@instruction("createpolicy")
def createpolicy(e: Emitter, ins: Instr) -> None:
    """createpolicy: cache hints have no effect."""
    e.assign(ins.operands[0], Value("0", "u8", True))
