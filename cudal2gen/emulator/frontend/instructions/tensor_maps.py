"""tensormap.replace and tensormap.cp_fenceproxy: tensor maps that a kernel makes itself."""

from __future__ import annotations

from cudal2gen.emulator.frontend.emitter import Emitter
from cudal2gen.emulator.frontend.instruction import Writes, instruction
from cudal2gen.emulator.frontend.ptx import Instr
from cudal2gen.emulator.hopper.tensor_map import FIELDS, MAP_BYTES

_ACCESS = 16  # bytes of shared and global memory that a field's change reads and writes


def _access(ins: Instr, space: str) -> int:  # noqa: ARG001
    return _ACCESS


@instruction("tensormap.replace", writes=Writes.MEMORY, hopper=True, access=_access)
def replace(e: Emitter, ins: Instr) -> None:
    """One field of a map in shared memory; operands are its address, the dimension where there are several, a value."""
    field = next((part for part in ins.parts if part in FIELDS), "")
    if not field or not any(part.startswith("shared") for part in ins.parts):
        raise e.fail("fields of tensor maps in shared memory are modelled")
    at, value = e.shared(ins.operands[0], "shared:cta"), e.array(ins.operands[-1], "u8" if "b64" in ins.parts else "u4")
    ordinal = e.literal(ins.operands[1]) if len(ins.operands) > 2 else 0
    e.line(f"V.replace({field!r}, {at}, {ordinal}, {value}, {e.lanes()})")


@instruction("tensormap.cp_fenceproxy", writes=Writes.MEMORY, hopper=True, access=_access)
def publish(e: Emitter, ins: Instr) -> None:
    """The map in shared memory becomes one in global memory, for whoever fences the proxy of tensor maps."""
    to, source, size = ins.operands
    if e.literal(size) != MAP_BYTES:
        raise e.fail(f"{MAP_BYTES} bytes are modelled")
    e.line(f"V.publish({e.address(to, 'global')}, {e.shared(source, 'shared:cta')}, {e.lanes()})")
