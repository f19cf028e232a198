"""Translates the instructions by which a kernel makes tensor maps (tensormap, fence.proxy.tensormap) to Python text.

In this text, ``V`` is the batch's unit ``hopper.map_edits``.
"""

from __future__ import annotations

from kernelproof.emulator.frontend.emitter import Emitter
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import drop, narrow, swap
from kernelproof.emulator.frontend.ptx import Instr, Operand
from kernelproof.emulator.hopper.tensor_map import FIELDS, MAP_BYTES
from kernelproof.emulator.state.scopes import Scope, scope_in

_ACCESS_BYTES = 16  # a field is changed by reading and writing this many bytes of shared or global memory


def _access_bytes(ins: Instr, space: str) -> int:  # noqa: ARG001
    return _ACCESS_BYTES


@instruction("tensormap.replace", writes=Writes.MEMORY, hopper=True, access=_access_bytes)
def replace(e: Emitter, ins: Instr) -> None:
    """tensormap.replace: one field of a map. Operands: its address, the dimension if there are several, the value."""
    field = next((part for part in ins.parts if part in FIELDS), "")
    shared = any(part.startswith("shared") for part in ins.parts)
    if not field or not (shared or "global" in ins.parts):
        raise e.fail("only fields of tensor maps in shared or global memory are modelled")
    address = e.shared(ins.operands[0], "shared:cta") if shared else e.address(ins.operands[0], "global")
    value = e.array(ins.operands[-1], "u8" if "b64" in ins.parts else "u4")
    ordinal = e.literal(ins.operands[1]) if len(ins.operands) > 2 else 0
    e.line(f"V.replace({field!r}, {address}, {ordinal}, {value}, {e.lanes()})")


@instruction("tensormap.cp_fenceproxy", writes=Writes.MEMORY, hopper=True, access=_access_bytes)
def publish(e: Emitter, ins: Instr) -> None:
    """tensormap.cp_fenceproxy: a map in shared memory is copied to global memory and released to the tensor map
    proxy."""
    destination, source, size = ins.operands
    _check_size(e, size)
    scope = e.bind("scope", scope_in(ins.parts, Scope.GPU))
    e.line(f"V.publish({e.address(destination, 'global')}, {e.shared(source, 'shared:cta')}, {scope}, {e.lanes()})")


def _check_size(e: Emitter, size: Operand) -> None:
    """Raise UnknownInstruction if the operand is not the size of a tensor map."""
    if e.literal(size) != MAP_BYTES:
        raise e.fail(f"only {MAP_BYTES} bytes are modelled")


@instruction("fence.proxy.tensormap:generic", writes=Writes.NOTHING, hopper=True, mutations=(drop, swap, narrow))
def fence(e: Emitter, ins: Instr) -> None:
    """fence.proxy.tensormap: writes of threads are released to the tensor map proxy, or acquired for the map at an
    address."""
    scope = e.bind("scope", scope_in(ins.parts, Scope.GPU))
    if "release" in ins.parts:
        e.line(f"V.proxy.release({e.mask()}, {scope})")
        return
    address, size = ins.operands
    _check_size(e, size)
    e.line(f"V.proxy.acquire({e.address(address, 'generic')}, {e.mask()}, {scope})")
