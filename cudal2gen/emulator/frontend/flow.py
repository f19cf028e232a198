"""Control flow of one kernel: calls inlined, basic blocks, an order that reconverges, liveness, uniformity.

The machine runs a batch of CTAs in lockstep and, after a divergent branch, always the group of lanes whose block comes
first in ``Graph.blocks``. That order lists every loop contiguously and its inside topologically, so lanes meet again at
the immediate post-dominator of the branch. On that rests ``uniform``: a register in it holds the same value in every
lane that can still read it, and is one Python int. What static reasoning promises here is checked at run time
(``Graph.clobbers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cudal2gen.emulator.frontend.ptx import (
    TYPE_BYTES,
    Function,
    Imm,
    Instr,
    Label,
    Mem,
    Module,
    Operand,
    Pair,
    PtxError,
    Reg,
    Sym,
    Tensor,
    Variable,
    Vec,
)

# Opcodes that write no register.
NO_RESULT = frozenset(
    [
        "st",
        "red",
        "bra",
        "brx",
        "cp",
        "membar",
        "fence",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "prefetch",
        "prefetchu",
        "nanosleep",
        "pmevent",
        "discard",
        "applypriority",
        "griddepcontrol",
        "stmatrix",
        "setmaxnreg",
        "call",
        "mbarrier",
        "multimem",
        "emu_converge",
        "emu_try_wait",
        "emu_vprintf",
        "emu_assertfail",
    ]
)
# Opcodes at which a lane may have to wait for others: they end a block.
_BLOCKING = frozenset(("bar", "barrier", "emu_converge", "emu_try_wait"))
# Special registers with one value per launch.
LAUNCH_CONSTANTS = frozenset(
    f"%{base}{axis}" for base in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for axis in (".x", ".y", ".z")
) | frozenset(
    [
        "%nsmid",
        "%nwarpid",
        "%gridid",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%aggr_smem_size",
        "WARP_SZ",
        "%is_explicit_cluster",
        "%cluster_nctarank",
    ]
)


@dataclass(slots=True)
class Block:
    """Straight-line code and how it ends.

    ``end`` is one of ``jump`` (targets[0]), ``cond`` (``cond`` true: targets[0], else targets[1]), ``switch`` (``cond``
    indexes targets), ``wait`` (blocking ``last``, then targets[0]), ``exit``.
    """

    index: int
    instrs: list[Instr]
    end: str = "jump"
    targets: list[int] = field(default_factory=list)
    cond: Reg | None = None
    last: Instr | None = None
    line: int = 0


@dataclass(slots=True)
class Graph:
    """The control-flow graph of a kernel, blocks in scheduling order (``blocks[i].index == i``, entry 0)."""

    function: Function
    blocks: list[Block]
    kinds: dict[str, str]
    variables: list[Variable]
    live_in: list[set[str]]
    uniform: set[str]
    shared_across: set[str]
    clobbers: list[set[str]]
    spin_heads: set[int]
    back_edges: set[tuple[int, int]]
    conservative: bool
    asynchronous: bool


def has_result(ins: Instr) -> bool:
    """Whether the first operand is a destination."""
    base = ins.base
    if base in NO_RESULT:
        return base == "mbarrier" and ins.parts[1] in (
            "arrive",
            "arrive_drop",
            "test_wait",
            "try_wait",
            "pending_count",
        )
    if base in _BLOCKING:
        return "red" in ins.parts
    if base == "wgmma":
        return ins.parts[1] == "mma_async"
    return not (base == "wmma" and ins.parts[1] == "store")


def registers(operand: Operand) -> Iterator[str]:
    """Names of all registers in an operand, special registers included."""
    if isinstance(operand, Reg):
        yield operand.name
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Mem):
        if isinstance(operand.base, Reg):
            yield operand.base.name
    elif isinstance(operand, Tensor):
        if isinstance(operand.base, Reg):
            yield operand.base.name
        for item in operand.coordinates:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield operand.first.name
        yield operand.second.name


def defs_uses(ins: Instr) -> tuple[list[str], list[str]]:
    """(registers written, registers read). A guarded write reads its old value too."""
    ops = ins.operands
    defs: list[str] = []
    if ops and has_result(ins):
        defs = [n for n in registers(ops[0]) if n != "_"]
        ops = ops[1:]
    uses = [n for op in ops for n in registers(op) if n != "_"]
    if ins.guard is not None:
        uses.append(ins.guard.name)
        uses += defs
    elif ins.base == "wgmma":
        uses += defs
    return defs, uses


def is_asynchronous(ins: Instr) -> bool:
    """Does the instruction concern clusters, mbarriers, bulk copies or wgmma?"""
    if ins.base in ("mbarrier", "wgmma", "mapa", "getctarank", "setmaxnreg", "tensormap", "emu_try_wait"):
        return True
    if ins.base == "cp":
        return "bulk" in ins.parts or "mbarrier" in ins.parts
    return any("cluster" in p or p == "proxy" for p in ins.parts[1:])


# --- calls
# -------------------------------------------------------------------------------------------------------------


def _rename_operand(op: Operand, reg: Callable[[str], str], sym: Callable[[str], str]) -> Operand:
    if isinstance(op, Reg):
        return Reg(reg(op.name), op.negated)
    if isinstance(op, Sym):
        return Sym(sym(op.name), op.offset)
    if isinstance(op, Mem):
        base = op.base
        if isinstance(base, Reg):
            return Mem(Reg(reg(base.name)), op.offset)
        return Mem(Sym(sym(base.name), base.offset), op.offset) if isinstance(base, Sym) else op
    if isinstance(op, Tensor):
        at = _rename_operand(Mem(op.base, op.offset), reg, sym)
        assert isinstance(at, Mem)
        return Tensor(at.base, at.offset, tuple(_rename_operand(x, reg, sym) for x in op.coordinates))
    if isinstance(op, Vec):
        return Vec(tuple(_rename_operand(x, reg, sym) for x in op.items))
    if isinstance(op, Pair):
        return Pair(Reg(reg(op.first.name)), Reg(reg(op.second.name)))
    return op


def _overlap(parts: set[tuple[int, int]]) -> bool:
    ordered = sorted(parts)
    return any(a + width > b for (a, width), (b, _) in pairwise(ordered))


class _Inliner:
    """Replaces calls by bodies; parameters passed through ``.param`` become moves between registers."""

    def __init__(self, module: Module, kernel: Function) -> None:
        self.module, self.kernel = module, kernel
        self.kinds: dict[str, str] = {}
        self.variables: list[Variable] = []
        self.clones = 0
        self.passed: set[str] = set()

    def run(self) -> list[Instr | Label]:
        items = list(self.expand(self.kernel, "", {}, (), None))
        # How each call parameter is accessed: name -> {(offset, bytes)}, and which of those are written.
        accesses: dict[str, set[tuple[int, int]]] = {}
        written: dict[str, set[tuple[int, int]]] = {}
        for item in items:
            if isinstance(item, Instr):
                for name, offset, width, store in self.param_access(item):
                    accesses.setdefault(name, set()).add((offset, width))
                    if store:
                        written.setdefault(name, set()).add((offset, width))
        in_memory = {name for name, parts in accesses.items() if parts != written.get(name) or _overlap(parts)}
        for name in in_memory:
            size = max(offset + width for offset, width in accesses[name])
            self.variables.append(Variable(name, "local", size, 16))
        out: list[Instr | Label] = []
        for item in items:
            found = self.param_access(item) if isinstance(item, Instr) else []
            if not found or isinstance(item, Label):
                out.append(item)
            elif found[0][0] in in_memory:
                parts = tuple("local" if p.split(":")[0] == "param" else p for p in item.parts)
                out.append(Instr(".".join(parts), parts, item.operands, item.guard, item.line, item.loc, item.text))
            else:
                store = item.base == "st"
                mem, value = item.operands[0 if store else 1], item.operands[1 if store else 0]
                assert isinstance(mem, Mem)
                out += self.move(item, mem, value, item.guard)
        return out

    def param_access(self, item: Instr) -> list[tuple[str, int, int, bool]]:
        """(parameter, offset, bytes, stored) of each element that a ld.param or st.param of a call touches."""
        if item.base not in ("ld", "st") or not any(p.split(":")[0] == "param" for p in item.parts):
            return []
        mem = item.operands[1 if item.base == "ld" else 0]
        value = item.operands[0 if item.base == "ld" else 1]
        if not isinstance(mem, Mem) or not isinstance(mem.base, Sym) or mem.base.name not in self.passed:
            return []
        width = TYPE_BYTES[item.parts[-1]]
        count = len(value.items) if isinstance(value, Vec) else 1
        at = mem.offset + mem.base.offset
        return [(mem.base.name, at + i * width, width, item.base == "st") for i in range(count)]

    def expand(
        self, fn: Function, prefix: str, symbols: dict[str, str], stack: tuple[str, ...], after: str | None
    ) -> Iterator[Instr | Label]:
        if fn.name in stack:
            raise PtxError(fn.line, f"recursive call of {fn.name} is not modelled")
        stack += (fn.name,)
        self.passed.update(symbols.values())
        mapping = dict(symbols)
        for variable in fn.variables:
            mapping[variable.name] = prefix + variable.name
            if variable.space == "param":
                self.passed.add(prefix + variable.name)
            else:
                # Static shared memory of a function exists once, its stack once per inlined copy.
                name = variable.name if variable.space == "shared" else prefix + variable.name
                mapping[variable.name] = name
                if all(v.name != name for v in self.variables):
                    self.variables.append(
                        Variable(
                            name,
                            variable.space,
                            variable.size,
                            variable.align,
                            variable.init,
                            variable.pointers,
                            variable.line,
                        )
                    )
        labels = {item.name for item in fn.body if isinstance(item, Label)} | set(fn.branch_targets)

        def reg(name: str) -> str:
            if name == "_" or (name[0] == "%" and name in SPECIALS) or name.startswith("%envreg"):
                return name
            unique = prefix + name
            if unique not in self.kinds and name != "WARP_SZ":
                self.kinds[unique] = fn.register_type(name, line)
            return unique

        def sym(name: str) -> str:
            if name in labels:
                return prefix + name
            return mapping.get(name, name)

        line = fn.line
        for item in fn.body:
            line = item.line
            if isinstance(item, Label):
                yield Label(prefix + item.name, item.line)
                continue
            if item.base == "call":
                yield from self.call(item, reg, sym, stack)
                continue
            guard = Reg(reg(item.guard.name), item.guard.negated) if item.guard is not None else None
            if after is not None and item.base == "ret":
                yield Instr("bra", ("bra",), (Sym(after),), guard, item.line, item.loc, item.text)
                continue
            if item.base == "brx":
                targets = item.operands[1]
                names = (
                    fn.branch_targets.get(targets.name)
                    if isinstance(targets, Sym)
                    else tuple(t.name for t in targets.items if isinstance(t, Sym))
                    if isinstance(targets, Vec)
                    else None
                )
                if names is None:
                    raise PtxError(item.line, "brx.idx without .branchtargets")
                yield Instr(
                    item.op,
                    item.parts,
                    (_rename_operand(item.operands[0], reg, sym), Vec(tuple(Sym(prefix + n) for n in names))),
                    guard,
                    item.line,
                    item.loc,
                    item.text,
                )
                continue
            operands = tuple(_rename_operand(op, reg, sym) for op in item.operands)
            yield Instr(item.op, item.parts, operands, guard, item.line, item.loc, item.text)

    def move(self, item: Instr, mem: Mem, value: Operand, guard: Reg | None) -> Iterator[Instr]:
        assert isinstance(mem.base, Sym)
        kind = item.parts[-1]
        width = {"8": 1, "16": 2, "32": 4, "64": 8}.get(kind.lstrip("busf"), 0)
        if not width:
            raise PtxError(item.line, f"{item.op}: parameter type is not modelled")
        values = value.items if isinstance(value, Vec) else (value,)
        at = mem.offset + mem.base.offset
        bits = max(16, 8 * width)
        for i, one in enumerate(values):
            slot = f"{mem.base.name}+{at + i * width}:{width}"
            self.kinds.setdefault(slot, f"b{bits}")
            if item.base == "st":
                dst, src = Reg(slot), one
            else:
                assert isinstance(one, Reg)
                dst, src = one, Reg(slot)
            op = f"mov.b{bits}" if item.base == "st" or kind[0] in "bf" else f"cvt.{kind[0]}{bits}.{kind}"
            if width == 1 and item.base == "ld":
                op = f"cvt.{'s' if kind[0] == 's' else 'u'}16.{'s' if kind[0] == 's' else 'u'}8"
            if (
                isinstance(one, Reg)
                and item.base == "ld"
                and bits != int(self.kinds.get(one.name, "b32").lstrip("busf") or 0)
            ):
                wide = self.kinds.get(one.name, "b32").lstrip("busf")
                op = f"cvt.{'s' if kind[0] == 's' else 'u'}{wide}.{'s' if kind[0] == 's' else 'u'}{8 * width}"
            if (
                isinstance(one, Reg)
                and item.base == "st"
                and bits < int(self.kinds.get(one.name, "b16").lstrip("busf") or 0)
            ):
                op = f"cvt.u{bits}.u{self.kinds[one.name].lstrip('busf')}"
            yield Instr(op, tuple(op.split(".")), (dst, src), guard, item.line, item.loc, item.text)

    def call(
        self,
        item: Instr,
        reg: Callable[[str], str],
        sym: Callable[[str], str],
        stack: tuple[str, ...],
    ) -> Iterator[Instr | Label]:
        groups = list(item.operands)
        results: tuple[Operand, ...] = ()
        if groups and isinstance(groups[0], Vec):
            results = groups.pop(0).items  # type: ignore[union-attr]
        callee = groups.pop(0) if groups else None
        arguments = groups[0].items if groups and isinstance(groups[0], Vec) else ()
        guard = Reg(reg(item.guard.name), item.guard.negated) if item.guard is not None else None
        if not isinstance(callee, Sym):
            raise PtxError(item.line, "indirect call is not modelled")
        target = self.module.functions.get(callee.name)
        if target is None:
            if callee.name in ("vprintf", "__assertfail"):
                slots = [Reg(sym(a.name)) for a in arguments if isinstance(a, Sym)]
                op = ("emu_" + callee.name.strip("_"),)
                yield Instr(op[0], op, tuple(Imm(0) for _ in slots), guard, item.line, item.loc, item.text)
                for result in results:
                    if isinstance(result, Sym):
                        slot = f"{sym(result.name)}+0:4"
                        self.kinds[slot] = "b32"
                        yield Instr(
                            "mov.b32", ("mov", "b32"), (Reg(slot), Imm(0)), guard, item.line, item.loc, item.text
                        )
                return
            raise PtxError(item.line, f"call of {callee.name}: no body in this file")
        self.clones += 1
        inner = f"{target.name}#{self.clones}:"
        symbols = {}
        for formal, actual in zip(target.params + target.results, arguments + results, strict=False):
            if not isinstance(actual, Sym):
                raise PtxError(item.line, "register arguments of a call are not modelled")
            symbols[formal.name] = sym(actual.name)
        after = f"{inner}return"
        if guard is not None:
            yield Instr(
                "bra", ("bra",), (Sym(after),), Reg(guard.name, not guard.negated), item.line, item.loc, item.text
            )
        yield from self.expand(target, inner, symbols, stack, after)
        yield Label(after, item.line)


SPECIALS = frozenset(
    f"%{base}{axis}"
    for base in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
    for axis in (".x", ".y", ".z", ".w")
) | frozenset(
    [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%nsmid",
        "%gridid",
        "%lanemask_eq",
        "%lanemask_le",
        "%lanemask_lt",
        "%lanemask_ge",
        "%lanemask_gt",
        "%clock",
        "%clock_hi",
        "%clock64",
        "%globaltimer",
        "%globaltimer_lo",
        "%globaltimer_hi",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%aggr_smem_size",
        "%cluster_ctarank",
        "%cluster_nctarank",
        "%is_explicit_cluster",
        "%reserved_smem_offset_begin",
        "%reserved_smem_offset_end",
        "%reserved_smem_offset_cap",
        "%reserved_smem_offset_0",
        "%reserved_smem_offset_1",
        "WARP_SZ",
    ]
)


# --- blocks
# ------------------------------------------------------------------------------------------------------------


def _with_waits(items: list[Instr | Label]) -> Iterator[Instr | Label]:
    """Split what waits from what then happens: mbarrier.try_wait into the wait and its result; before elect.sync the
    lanes of a warp meet, and before a run of wgmma the warps of a warpgroup."""
    met = False
    for item in items:
        if isinstance(item, Label):
            met = False
            yield item
            continue
        if item.base == "mbarrier" and item.parts[1] == "try_wait":
            yield replace(item, op="emu_try_wait", parts=("emu_try_wait", *item.parts[2:]), operands=item.operands[1:])
            yield replace(item, op="emu_waited", parts=("emu_waited",), operands=item.operands[:1])
            met = False
            continue
        if item.base == "elect":
            yield replace(item, op="emu_converge", parts=("emu_converge", "lanes"), operands=item.operands[1:])
        elif item.base == "wgmma" and item.parts[1] in ("fence", "mma_async") and not met:
            yield replace(item, op="emu_converge", parts=("emu_converge", "warps"), operands=())
            met = True
        elif item.base in _BLOCKING or item.base in ("bra", "brx"):
            met = False
        yield item


def _split(items: Iterable[Instr | Label]) -> tuple[list[Block], int]:  # noqa: PLR0915
    """Basic blocks in text order; the last one is the common exit."""
    blocks: list[Block] = [Block(0, [])]
    at: dict[str, int] = {}
    wanted: list[tuple[Block, list[str | None]]] = []

    def fresh(line: int) -> Block:
        block = Block(len(blocks), [], line=line)
        blocks.append(block)
        return block

    current, ended = blocks[0], False
    for item in items:
        if isinstance(item, Label):
            if current.instrs or ended or current.index == 0:
                previous, was_open = current, not ended
                current = fresh(item.line)
                if was_open:
                    previous.targets = [current.index]
            at[item.name] = current.index
            ended = False
            continue
        if ended:
            current, ended = fresh(item.line), False
        base = item.base
        if not current.instrs:
            current.line = item.line
        if base == "bra":
            target = item.operands[0]
            if not isinstance(target, Sym):
                raise PtxError(item.line, "branch without a label")
            if item.guard is None:
                wanted.append((current, [target.name]))
            else:
                current.end, current.cond = "cond", item.guard
                wanted.append((current, [target.name, None]))
            current.last, ended = item, True
        elif base == "brx":
            index, targets = item.operands
            if item.guard is not None or not isinstance(index, Reg) or not isinstance(targets, Vec):
                raise PtxError(item.line, "this form of brx.idx is not modelled")
            current.end, current.cond, current.last = "switch", index, item
            wanted.append((current, [t.name for t in targets.items if isinstance(t, Sym)]))
            ended = True
        elif base in ("ret", "exit"):
            if item.guard is None:
                current.end = "exit"
            else:
                current.end, current.cond = "cond", item.guard
                wanted.append((current, ["", None]))
            current.last, ended = item, True
        elif base in _BLOCKING and "arrive" not in item.parts:
            if item.guard is not None:
                head = current
                head.end, head.cond = "cond", item.guard
                current = fresh(item.line)
                item = Instr(item.op, item.parts, item.operands, None, item.line, item.loc, item.text)
                head.targets = [current.index, current.index + 1]
            current.end, current.last, current.targets = "wait", item, [len(blocks)]
            current, ended = fresh(item.line), False
        else:
            current.instrs.append(item)
    if not ended:
        current.end = "exit"
    final = fresh(current.line)
    final.end = "exit"
    for block in blocks:
        if block.end == "exit" and block is not final:
            block.end, block.targets = "jump", [final.index]
    for block, names in wanted:
        block.targets = []
        for name in names:
            if name is None:
                block.targets.append(block.index + 1)
            elif name == "":
                block.targets.append(final.index)
            elif name in at:
                block.targets.append(at[name])
            else:
                raise PtxError(block.line, f"label {name} does not exist")
    return blocks, final.index


def _dominators(successors: list[list[int]], root: int) -> list[int]:
    """Dominator sets as bit masks; unreachable nodes get 0."""
    n = len(successors)
    predecessors: list[list[int]] = [[] for _ in range(n)]
    seen, stack, order = {root}, [(root, iter(successors[root]))], []
    while stack:
        node, it = stack[-1]
        for nxt in it:
            predecessors[nxt].append(node)
            if nxt not in seen:
                seen.add(nxt)
                stack.append((nxt, iter(successors[nxt])))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    everything = (1 << n) - 1
    dom = [0] * n
    for node in order:
        dom[node] = everything
    dom[root] = 1 << root
    changed = True
    while changed:
        changed = False
        for node in order:
            if node == root:
                continue
            mask = everything
            for p in predecessors[node]:
                mask &= dom[p]
            mask |= 1 << node
            if mask != dom[node]:
                dom[node], changed = mask, True
    return dom


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _loops(blocks: list[Block]) -> tuple[dict[int, int], set[tuple[int, int]], bool]:
    """Natural loops: head -> body mask, the back edges, and whether the graph is reducible."""
    successors = [b.targets for b in blocks]
    dom = _dominators(successors, 0)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for b in blocks:
        if dom[b.index]:
            for t in b.targets:
                predecessors[t].append(b.index)
    back = {(b.index, t) for b in blocks if dom[b.index] for t in b.targets if dom[b.index] >> t & 1}
    loops: dict[int, int] = {}
    for tail, head in back:
        body, stack = loops.get(head, 1 << head), [tail]
        while stack:
            node = stack.pop()
            if not body >> node & 1:
                body |= 1 << node
                stack += predecessors[node]
        loops[head] = body
    # Reducible iff the graph without back edges is acyclic.
    indegree = [0] * len(blocks)
    for b in blocks:
        if dom[b.index]:
            for t in b.targets:
                indegree[t] += (b.index, t) not in back
    ready, seen = [0], 0
    total = sum(1 for d in dom if d)
    while ready:
        node = ready.pop()
        seen += 1
        for t in blocks[node].targets:
            if (node, t) not in back:
                indegree[t] -= 1
                if indegree[t] == 0:
                    ready.append(t)
    return loops, back, seen == total


def _add_latches(blocks: list[Block]) -> None:
    """Give each loop one back edge, so that a branch to the next iteration reconverges before the head."""
    _, back, _ = _loops(blocks)
    tails: dict[int, list[int]] = {}
    for tail, head in sorted(back):
        tails.setdefault(head, []).append(tail)
    for head, sources in tails.items():
        if len(sources) < 2:
            continue
        latch = Block(len(blocks), [], targets=[head], line=blocks[head].line)
        blocks.append(latch)
        for source in sources:
            blocks[source].targets = [latch.index if t == head else t for t in blocks[source].targets]


def _order(blocks: list[Block]) -> tuple[list[int], bool]:
    """Topological order with every loop contiguous; False if the graph is irreducible."""
    loops, _, reducible = _loops(blocks)
    dom = _dominators([b.targets for b in blocks], 0)
    reachable = sum(1 << i for i, d in enumerate(dom) if d)

    def arrange(nodes: int, head: int) -> list[int]:
        inner = {h: m & nodes for h, m in loops.items() if h != head and nodes >> h & 1 and m & ~nodes == 0}
        outermost = {
            h: m for h, m in inner.items() if not any(o != h and om & m == m and om != m for o, om in inner.items())
        }
        owner = {}
        for h, m in outermost.items():
            for node in _bits(m):
                owner[node] = h
        items = {owner.get(n, n) for n in _bits(nodes)}
        indegree = dict.fromkeys(items, 0)
        edges: dict[int, set[int]] = {i: set() for i in items}
        for n in _bits(nodes):
            source = owner.get(n, n)
            for t in blocks[n].targets:
                if nodes >> t & 1 and t != head:
                    target = owner.get(t, t)
                    if target != source and target not in edges[source]:
                        edges[source].add(target)
                        indegree[target] += 1
        out: list[int] = []
        left = set(items)
        while left:
            ready = [i for i in left if indegree[i] == 0]
            pick = min(ready) if ready else min(left)
            left.discard(pick)
            for t in edges[pick]:
                indegree[t] -= 1
            out += arrange(outermost[pick], pick) if pick in outermost else [pick]
        return out

    return arrange(reachable, 0), reducible


# --- data flow
# ---------------------------------------------------------------------------------------------------------


def _liveness(
    blocks: list[Block],
) -> tuple[list[set[str]], list[set[str]], list[set[str]], dict[str, list[tuple[int, Instr]]]]:
    uses: list[set[str]] = []
    defs: list[set[str]] = []
    sites: dict[str, list[tuple[int, Instr]]] = {}
    for block in blocks:
        used: set[str] = set()
        defined: set[str] = set()
        for ins in block.instrs + ([block.last] if block.end == "wait" and block.last is not None else []):
            d, u = defs_uses(ins)
            used.update(x for x in u if x not in defined)
            defined.update(d)
            for x in d:
                sites.setdefault(x, []).append((block.index, ins))
        if block.cond is not None and block.cond.name not in defined:
            used.add(block.cond.name)
        uses.append(used)
        defs.append(defined)
    live: list[set[str]] = [set(u) for u in uses]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            i = block.index
            size = len(live[i])
            for t in block.targets:
                live[i] |= live[t] - defs[i]
            changed |= len(live[i]) != size
    return live, defs, uses, sites


def build(  # noqa: PLR0915
    module: Module, kernel: Function, uniform_ops: Callable[[Instr], bool], conservative: bool = False
) -> Graph:
    """The control-flow graph of ``kernel``.

    ``uniform_ops`` tells whether an instruction gives equal results for equal operands and can be computed on Python
    ints. ``conservative`` keeps only launch constants and block-local values uniform: for kernels whose lanes may
    overtake each other (spinning, barriers on both sides of a divergent branch).
    """
    inliner = _Inliner(module, kernel)
    items = inliner.run()
    asynchronous = any(isinstance(item, Instr) and is_asynchronous(item) for item in items)
    blocks, _ = _split(_with_waits(items) if asynchronous else items)
    _add_latches(blocks)
    order, reducible = _order(blocks)
    position = {old: new for new, old in enumerate(order)}
    blocks = [blocks[old] for old in order]
    for block in blocks:
        block.index = position[block.index]
        block.targets = [position[t] for t in block.targets]
    # Lanes that sleep at an mbarrier are overtaken as a matter of course.
    conservative = conservative or not reducible or asynchronous
    loops, back, _ = _loops(blocks)
    live, defs, uses, sites = _liveness(blocks)
    specials = SPECIALS

    shared_across = set()
    for i, block in enumerate(blocks):
        shared_across |= live[i]
        for t in block.targets:
            shared_across |= live[t]

    # Launch constants: one definition, from launch constants only. Equal in all lanes at any time.
    constant: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, where in sites.items():
            if name in constant or len(where) != 1:
                continue
            ins = where[0][1]
            _, used = defs_uses(ins)
            if (
                ins.guard is None
                and uniform_ops(ins)
                and all(u in constant or u in LAUNCH_CONSTANTS for u in used)
                and (ins.base != "ld" or "param" in ins.parts or any(p.startswith("param") for p in ins.parts))
            ):
                constant.add(name)
                changed = True

    spin_heads = _spin_heads(blocks, loops, sites)
    conservative = conservative or bool(spin_heads)
    ipdom = _immediate_postdominators(blocks)
    varying: set[str] = set()
    if conservative:
        varying |= {r for r in sites if r in shared_across and r not in constant}
    # Registers with no definition at all are read as zero by every lane.
    done_branches: set[int] = set()
    changed = True
    while changed:
        changed = False
        for name, where in sites.items():
            if name in varying or name in constant:
                continue
            for _, ins in where:
                _, used = defs_uses(ins)
                if not uniform_ops(ins) or any(
                    u in varying or (u in specials and u not in LAUNCH_CONSTANTS) for u in used
                ):
                    varying.add(name)
                    changed = True
                    break
        if conservative:
            continue
        for block in blocks:
            if block.index in done_branches or block.cond is None or block.cond.name not in varying:
                continue
            done_branches.add(block.index)
            marked = _diverge(blocks, block, ipdom[block.index], live, defs, constant)
            if marked is None:
                return build(module, kernel, uniform_ops, conservative=True)
            if marked - varying:
                varying |= marked
                changed = True
    uniform = set(sites) - varying
    everyone = set().union(*live, *uses) if blocks else set()
    uniform |= {r for r in everyone if r not in sites and r not in specials}
    clobbers = [
        {r for r in defs[i] if r in uniform and r in shared_across and r not in constant} for i in range(len(blocks))
    ]
    return Graph(
        kernel,
        blocks,
        inliner.kinds,
        inliner.variables,
        live,
        uniform,
        shared_across,
        clobbers,
        spin_heads,
        back,
        conservative,
        asynchronous,
    )


def _reach(blocks: list[Block], start: int, stop: int | None = None) -> set[int]:
    seen: set[int] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node != stop and node not in seen:
            seen.add(node)
            stack += blocks[node].targets
    return seen


def _immediate_postdominators(blocks: list[Block]) -> list[int | None]:
    n = len(blocks)
    reverse: list[list[int]] = [[] for _ in range(n + 1)]
    for b in blocks:
        for t in b.targets:
            reverse[t].append(b.index)
        if not b.targets:
            reverse[n].append(b.index)
    dom = _dominators(reverse, n)
    out: list[int | None] = []
    for b in blocks:
        candidates = [c for c in _bits(dom[b.index]) if c not in (b.index, n)]
        # The immediate one is dominated (in reverse) by all the others.
        best = max(candidates, key=lambda c: dom[c].bit_count(), default=None)
        out.append(best)
    return out


def _diverge(
    blocks: list[Block],
    branch: Block,
    join: int | None,
    live: list[set[str]],
    defs: list[set[str]],
    constant: set[str],
) -> set[str] | None:
    """Registers that a divergent ``branch`` makes varying; None where lanes could overtake each other."""
    sides = [(t, _reach(blocks, t, join)) for t in dict.fromkeys(branch.targets)]
    at_join = live[join] if join is not None else set()
    out: set[str] = set()
    real = [s for s in sides if s[1]]
    # Sides that leave without meeting the others (an early return) have no one to overtake.
    waits = any(blocks[i].end == "wait" for _, side in real for i in side)
    if len(real) > 1 and waits and not _leaves(blocks, real):
        return None
    for k, (_, side) in enumerate(sides):
        elsewhere = set(at_join)
        for j, (_, other) in enumerate(sides):
            if j != k:
                for i in other:
                    elsewhere |= live[i]
        for i in side:
            out |= defs[i] & elsewhere
    return out - constant


def _leaves(blocks: list[Block], sides: list[tuple[int, set[int]]]) -> bool:
    """True if at most one side contains a blocking instruction and the sides share no block."""
    waiting = [side for _, side in sides if any(blocks[i].end == "wait" for i in side)]
    if len(waiting) > 1:
        return False
    union: set[int] = set()
    for _, side in sides:
        if union & side:
            return False
        union |= side
    return True


_STRONG = frozenset(("volatile", "relaxed", "acquire", "cv", "cg", "mmio"))


def _spin_heads(blocks: list[Block], loops: dict[int, int], sites: dict[str, list[tuple[int, Instr]]]) -> set[int]:
    """Heads of loops whose exit depends on memory that another thread may write."""
    out = set()
    for head, mask in loops.items():
        inside = set(_bits(mask))
        todo = [
            blocks[i].cond.name  # type: ignore[union-attr]
            for i in inside
            if blocks[i].cond is not None and any(t not in inside for t in blocks[i].targets)
        ]
        seen = set(todo)
        while todo:
            for where, ins in sites.get(todo.pop(), ()):
                if where not in inside:
                    continue
                polls = ins.base == "mbarrier" and ins.parts[1] == "test_wait"
                if ins.base == "atom" or polls or (ins.base == "ld" and _STRONG & set(ins.parts)):
                    out.add(head)
                for used in defs_uses(ins)[1]:
                    if used not in seen:
                        seen.add(used)
                        todo.append(used)
    return out


def all_instructions(graph: Graph) -> Iterable[Instr]:
    """Every instruction of the graph, blocking ones included."""
    for block in graph.blocks:
        yield from block.instrs
        if block.end == "wait" and block.last is not None:
            yield block.last
