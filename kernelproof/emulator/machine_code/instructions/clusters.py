"""Lowers barriers of clusters, fences of the asynchronous proxy, setmaxnreg, dependent launches and cancelled ones."""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.sass import Instruction


@mnemonic("UCGABAR_ARV")
def arrive(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """barrier.cluster.arrive, which is relaxed unless a fence comes before it."""
    low.before_sync()
    low.emit(f"barrier.cluster.arrive{'' if low.release() else '.relaxed'}")


@mnemonic("UCGABAR_WAIT")
def wait(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """barrier.cluster.wait."""
    low.emit("barrier.cluster.wait")
    low.after_sync()


@mnemonic("FENCE", "VIEW ASYNC S G T")
def fence_proxy(low: Lowering, ins: Instruction) -> None:
    """fence.proxy.async for shared or global memory; tcgen05.wait::st for tensor memory."""
    space = ins.modifiers[-1]
    if space == "T":
        low.emit("tcgen05.wait::st.sync.aligned")
        return
    low.emit(f"fence.proxy.async.{'shared::cta' if space == 'S' else 'global'}")


@mnemonic("USETMAXREG", "DEALLOC TRY_ALLOC CTAPOOL")
def set_registers(low: Lowering, ins: Instruction) -> None:
    """setmaxnreg. On hardware ``.TRY_ALLOC`` may fail, and the code repeats it until it succeeds. Here it succeeds."""
    more = "TRY_ALLOC" in ins.modifiers
    low.emit(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32", str(int(ins.operands[-1], 0)))
    if more:
        low.set_predicate(ins.operands[0], "1")


@mnemonic("ACQBULK")
def grid_wait(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """griddepcontrol.wait."""
    low.emit("griddepcontrol.wait")


@mnemonic("PREEXIT")
def launch_dependents(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """griddepcontrol.launch_dependents."""
    low.emit("griddepcontrol.launch_dependents")


@mnemonic("UGETNEXTWORKID", "SELFCAST BROADCAST")
def cancel_launch(low: Lowering, ins: Instruction) -> None:
    """clusterlaunchcontrol.try_cancel, with ``.BROADCAST`` for all CTAs of the cluster."""
    low.once()
    everyone = ".multicast::cluster::all" if "BROADCAST" in ins.modifiers else ""
    response, bar = (low.near_address(text, 0) for text in ins.operands)
    op = f"clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{everyone}.b128"
    low.emit(op, response, bar)
