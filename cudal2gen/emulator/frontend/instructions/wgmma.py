"""wgmma: fences, groups and products of warpgroups."""

from __future__ import annotations

from collections.abc import Iterator

from cudal2gen.emulator.frontend.emitter import Emitter
from cudal2gen.emulator.frontend.instruction import Writes, instruction
from cudal2gen.emulator.frontend.mutations import Change, Mutation, Statement, adjust, drop, swap, weaken
from cudal2gen.emulator.frontend.ptx import Instr, Operand, Reg, Vec
from cudal2gen.emulator.hopper.warpgroup import Form


@instruction("wgmma.fence", writes=Writes.NOTHING, meets="warps", hopper=True, mutations=(drop,))
def fence(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """wgmma.fence."""
    e.line(f"X.fence({e.mask()})")


@instruction("wgmma.commit_group", writes=Writes.NOTHING, hopper=True, mutations=(drop,))
def commit(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """wgmma.commit_group."""
    e.line(f"X.commit({e.lanes()})")


@instruction("wgmma.wait_group", writes=Writes.NOTHING, hopper=True, mutations=(drop, weaken, swap))
def wait(e: Emitter, ins: Instr) -> None:
    """wgmma.wait_group."""
    e.line(f"X.wait({e.literal(ins.operands[0])}, {e.mask()})")


def _descriptor(kind: str, op: str, by: str) -> Mutation:
    """A change of the first operand that is a descriptor: A, or B where A comes from registers."""

    def mutation(s: Statement) -> Iterator[Change]:
        which = 3 if isinstance(s.ins.operands[1], Vec) else 2
        yield from adjust(kind, which, "b64", op, by)(s)

    return mutation


def _registers_in_use(ins: Instr) -> Iterator[Operand]:
    """The accumulators, and A: while the instruction is under way, it may not be written either."""
    yield ins.operands[0]
    if isinstance(ins.operands[1], Vec):
        yield ins.operands[1]


def _form(e: Emitter, ins: Instr) -> Form:
    """The kind of product. After the predicate come the signs of A and B and, for operands in shared memory, whether
    they are M- or N-major; all may be missing."""
    parts = ins.parts
    size = next((p for p in parts if p.startswith("m64n")), "")
    acc, kind, other = parts[-3:]
    columns = int(size[4:-3]) if size.endswith("k16") else 0
    halves = kind == other and kind in ("f16", "bf16") and (acc == "f32" or acc == kind == "f16")
    if columns % 8 or not 8 <= columns <= 256 or "sp" in parts or not halves or e.guard is not None:
        raise e.fail()
    _, a, _, *rest = ins.operands
    numbers = [e.literal(op) for op in rest[1:]]
    registers = isinstance(a, Vec)
    sign_a, sign_b, *along = [*numbers, 0, 0, 0, 0] if numbers else [1, 1, 0, 0]
    along_a, along_b = (False, bool(along[0])) if registers else (bool(along[0]), bool(along[1]))
    return Form(columns, kind, acc, registers, along_a, along_b, float(sign_a * sign_b))


@instruction(
    "wgmma.mma_async",
    updates=True,
    meets="warps",
    completed_by=("wgmma.wait_group",),
    accumulates=_registers_in_use,
    hopper=True,
    mutations=(_descriptor("step", "add.u64", "2"), _descriptor("swizzle", "xor.b64", "0xC000000000000000")),
)
def mma(e: Emitter, ins: Instr) -> None:
    """wgmma.mma_async on f16 and bf16."""
    form = _form(e, ins)
    d, a, b, *rest = ins.operands
    if not isinstance(d, Vec) or len(d.items) != form.n // (2 if form.acc == "f32" else 4):
        raise e.fail("wrong number of registers")
    keep = e.predicate(rest[0]).text
    name = e.bind("form", form)
    left = _tuple(_variables(e, a)) if isinstance(a, Vec) else e.array(a, "u8")
    names = _variables(e, d)
    call = f"X.mma({name}, {_tuple(names)}, {left}, {e.array(b, 'u8')}, {keep}, m, {e.site()})"
    e.line(f"{', '.join(names)} = {call}")
    if isinstance(a, Vec):
        names = _variables(e, a)
        e.line(f"{', '.join(names)} = X.lend({_tuple(names)}, m)")


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)},)"


def _variables(e: Emitter, operand: Vec) -> list[str]:
    """The local variables of registers, as they are: they may hold accumulators under way."""
    names = [e.variable(item.name) for item in operand.items if isinstance(item, Reg)]
    if len(names) != len(operand.items):
        raise e.fail("register expected")
    return names
