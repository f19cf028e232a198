"""Translates barriers, fences, traps, printf, and hints without an effect to Python text.

In this text, ``J`` and ``D`` are the batch's barriers of CTAs and of clusters, ``Y`` lets lanes meet, and ``S``, ``G``
and ``B`` are the units of shared memory, global memory and mbarriers, which know what a fence orders. ``M`` is the
batch, and ``U`` its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import drop, drop_with, narrow, swap
from kernelproof.emulator.frontend.ptx import Instr, Operand
from kernelproof.emulator.state.scopes import Scope, restricted, scope_in

# --- barriers


def _number_and_count(e: Emitter, operands: tuple[Operand, ...]) -> list[str]:
    """The barrier's number, and the number of threads that it expects; 0 for one that the instruction does not name."""
    return [*(e.scalar(op) for op in operands[:2]), "0", "0"][:2]


@instruction("bar", "barrier", writes=Writes.NOTHING, waits=True, mutations=(drop, swap))
def sync(e: Emitter, ins: Instr) -> None:
    """bar.sync."""
    e.wait("J.sync", *_number_and_count(e, ins.operands))


def _vote_and_result(ins: Instr) -> Iterator[Instr]:
    """Expand a bar.red to a barrier with a predicate, which ends a block, and an instruction that reads the result. The
    latter also has the predicate as an operand, because its result depends on it."""
    result, *_, value = ins.operands
    yield replace(ins, op="emu_vote", parts=("emu_vote",), operands=ins.operands[1:])
    yield replace(ins, op="emu_reduced", parts=("emu_reduced", *ins.parts[1:]), operands=(result, value))


@instruction("bar.red", "barrier.red", expands=_vote_and_result)
def reduce(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """bar.red: a barrier and a reduction; its expansion is written instead."""
    raise e.fail()


@instruction("emu_vote", writes=Writes.NOTHING, waits=True)
def vote(e: Emitter, ins: Instr) -> None:
    """The waiting part of a bar.red, whose last operand is a predicate."""
    *numbers, value = ins.operands
    e.wait("J.sync_voting", e.predicate_array(value), *_number_and_count(e, tuple(numbers)))


@instruction("emu_reduced")
def vote_result(e: Emitter, ins: Instr) -> None:
    """The result of the preceding bar.red."""
    mode = next(p for p in ins.parts if p in ("popc", "and", "or"))
    e.assign(ins.operands[0], Value(f"J.reduced({mode!r})", "u4" if mode == "popc" else "p", False))


@instruction("bar.arrive", "barrier.arrive", writes=Writes.NOTHING, mutations=(drop, swap))
def arrive(e: Emitter, ins: Instr) -> None:
    """bar.arrive: the lanes arrive but do not wait."""
    e.line(f"J.arrive({', '.join(_number_and_count(e, ins.operands))}, {e.lanes()})")


@instruction("bar.warp.sync", writes=Writes.NOTHING, waits=True, mutations=(drop, swap))
def sync_warp(e: Emitter, ins: Instr) -> None:
    """bar.warp.sync."""
    e.wait("J.sync_warp", e.scalar(ins.operands[0]))


@instruction(
    "barrier.cluster.arrive", writes=Writes.NOTHING, hopper=True, mutations=(drop_with("barrier.cluster.wait"),)
)
def cluster_arrive(e: Emitter, ins: Instr) -> None:
    """barrier.cluster.arrive."""
    mask = e.mask()
    e.line(f"D.arrive({mask}, {'relaxed' not in ins.parts}, {e.site()})")


@instruction("barrier.cluster.wait", writes=Writes.NOTHING, waits=True, hopper=True, mutations=(drop, swap))
def cluster_wait(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """barrier.cluster.wait."""
    e.wait("D.wait")


@instruction("emu_meet", writes=Writes.NOTHING, waits=True)
def meet(e: Emitter, ins: Instr) -> None:
    """Lanes of a warp (the mask in the operand), or the warps of a warpgroup, wait for each other. This orders no
    memory accesses."""
    e.wait("Y.converge", e.scalar(ins.operands[0]) if ins.operands else "None")


# --- fences


@instruction("membar", "fence", writes=Writes.NOTHING, mutations=(drop, swap, narrow))
def fence(e: Emitter, ins: Instr) -> None:
    """membar and fence; .acquire and .release limit a fence to one direction, .sync_restrict to shared memory."""
    scope, sides = e.bind("scope", scope_in(ins.parts, Scope.GPU)), {"acquire", "release"}
    sides = sides.intersection(ins.parts) or sides
    # membar is another name of fence.sc.
    sequential = ins.base == "membar" or "sc" in ins.parts
    unit = "S" if restricted(ins.parts) else "G"
    directions = f"{'acquire' in sides}, {'release' in sides}, {sequential}"
    e.line(f"{unit}.fence({e.mask()}, {scope}, {directions}, {unit == 'S'})")


@instruction("fence.mbarrier_init", writes=Writes.NOTHING, hopper=True, mutations=(drop, swap))
def fence_init(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """fence.mbarrier_init."""
    e.line(f"B.fence_init({e.mask()})")


@instruction("fence.proxy", "membar.proxy", writes=Writes.NOTHING, hopper=True, mutations=(drop, swap))
def fence_proxy(e: Emitter, ins: Instr) -> None:
    """fence.proxy.async; a fence of the alias proxy has no effect here."""
    if "alias" in ins.parts:
        return
    mask = e.mask()
    if "global" not in ins.parts:
        e.line(f"S.fence_proxy({mask})")
    if not any("shared" in part for part in ins.parts):
        e.line(f"G.fence_proxy({mask})")
    e.line(f"B.fence_init({mask})")


@instruction("griddepcontrol.wait", writes=Writes.NOTHING, mutations=(drop,))
def grid_wait(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """griddepcontrol.wait."""
    e.line(f"G.grid_wait({e.mask()})")


# --- traps and hints


@instruction("trap", writes=Writes.NOTHING)
def trap(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """trap."""
    e.line(f"M.trap({e.site()}, 'trap executed', {e.mask()})")


@instruction("emu_nofunction", writes=Writes.NOTHING)
def no_function(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """An indirect call of an address that no function has."""
    text = "an indirect call of an address that is no function of this file with such parameters, or a recursive one"
    e.line(f"M.trap({e.site()}, {text!r}, {e.mask()})")


# The types of the first four arguments of __assertfail: message, file, line, function. The fifth, the size of a
# character, is not needed.
ASSERT_KINDS = ("u8", "u8", "u4", "u8")


@instruction("emu_assertfail", writes=Writes.NOTHING)
def assert_fail(e: Emitter, ins: Instr) -> None:
    """A failed assert. Operands: its text, file, line and function, and the size of a character."""
    text, file, line, function = (e.array(op, kind) for op, kind in zip(ins.operands, ASSERT_KINDS, strict=False))
    e.line(f"U.assert_failed({text}, {file}, {line}, {function}, {e.mask()}, {e.site()})")


@instruction("emu_vprintf", writes=Writes.NOTHING)
def print_formatted(e: Emitter, ins: Instr) -> None:
    """printf. Operands: the addresses of the format and of its arguments."""
    form, values = (e.array(op, "u8") for op in ins.operands)
    e.line(f"U.print({form}, {values}, {e.mask()}, {e.site()})")


@instruction(
    "prefetch", "prefetchu", "nanosleep", "pmevent", "applypriority", "brkpt", "griddepcontrol",
    writes=Writes.NOTHING,
)  # fmt: skip
def nothing(e: Emitter, ins: Instr) -> None:
    """Hints without an effect on values."""


@instruction("discard", writes=Writes.MEMORY)
def discard(e: Emitter, ins: Instr) -> None:
    """discard.L2 of 128 bytes, which are undefined until they are written again."""
    mem = ins.operands[0]
    e.trace(mem)
    e.line(f"G.discard({e.address(mem, 'global')}, {e.lanes()})")


@instruction("createpolicy")
def createpolicy(e: Emitter, ins: Instr) -> None:
    """createpolicy: cache hints have no effect."""
    e.assign(ins.operands[0], Value("0", "u8", True))
