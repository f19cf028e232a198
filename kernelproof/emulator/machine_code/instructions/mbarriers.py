"""Lowers instructions of mbarriers: SYNCS, and the arrival of asynchronous copies.

An mbarrier is a word of 64 bits. Its upper half has the parity of the phase in bit 31, and from bit 11 on the number of
missing arrivals, negated. The meanings of these instructions are those of the PTX from which ptxas generates them.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, is_zero, mnemonic
from kernelproof.emulator.machine_code.operands import Address, operand
from kernelproof.sass import Instruction

_FULL_COUNT = str(1 << 20)  # an mbarrier that expects n arrivals begins with this minus n
# Modifiers for the arrivals and bytes that are counted. A1: one arrival. AR: as many as a register says. T0: no bytes.
# TR and TX: as many bytes as a register says are expected, or have arrived.
_COUNTS = "A1T0 ART0 A0TR A0TX A0T1"


@mnemonic("SYNCS", f"EXCH ARRIVE PHASECHK CCTL TRANS64 64 TRYWAIT RED OPTOUT IV IVALL {_COUNTS}")
def synchronise(low: Lowering, ins: Instruction) -> None:
    """mbarrier.init, .arrive, .expect_tx, .complete_tx, .test_wait, .try_wait and .inval."""
    if "IVALL" in ins.modifiers:
        return  # it concerns a cache of mbarriers
    kind = next(part for part in ins.modifiers if part in ("EXCH", "ARRIVE", "PHASECHK", "CCTL"))
    {"EXCH": _initialise, "ARRIVE": _arrive, "PHASECHK": _wait, "CCTL": _invalidate}[kind](low, ins)


def _bracketed_address(low: Lowering, text: str) -> str:
    """The address of an mbarrier, in brackets."""
    assert isinstance(operand(text), Address)
    return low.near_address(text, 0)


def _initialise(low: Lowering, ins: Instruction) -> None:
    """mbarrier.init, by the word that it writes. Machine code has no trace of fence.mbarrier_init, so one is emitted
    after each initialisation."""
    result, address, word = ins.operands
    if not is_zero(result):
        raise low.refusal("an exchange that returns the old word is not modelled")
    low.once()
    # Both halves of the word have 2^20 - n for n arrivals: the lower one from bit 1 on, the upper one from bit 11 on.
    half = low.computed("shr.u32", low.word(word), "1")
    upper = low.computed("shl.b32", half, "11")
    low.branch("trap", "", low.computed("setp.ne.u32", upper, low.word(word, 1), kind="pred"))
    low.emit("mbarrier.init.shared.b64", _bracketed_address(low, address), low.computed("sub.s32", _FULL_COUNT, half))
    low.emit("fence.mbarrier_init.release.cluster")


def _arrive(low: Lowering, ins: Instruction) -> None:
    """mbarrier.arrive, .arrive_drop, .expect_tx and .complete_tx."""
    result, address, number = ins.operands
    count = next((part for part in ins.modifiers if part in _COUNTS.split()), "")
    place = _bracketed_address(low, address)
    if count == "A0T1" and "OPTOUT" not in ins.modifiers:
        return  # it expects a byte for the thread's copies, which the next instruction (ARRIVES) makes arrive
    if count in ("A0TR", "A0TX"):
        op = "expect_tx" if count == "A0TR" else "complete_tx"
        low.emit(f"mbarrier.{op}.relaxed.cta.shared::cluster.b64", place, low.word(number))
        return
    low.before_sync()
    # Without one of _COUNTS, the instruction expects as many bytes as a register says, and then arrives once.
    op = "arrive_drop" if "OPTOUT" in ins.modifiers else "arrive"
    operands = [low.word(number)] if count in ("", "ART0") else []
    name = f"mbarrier.{op}{'' if count else '.expect_tx'}{low.release()}"
    if is_zero(result):
        low.emit(f"{name}.shared::cluster.b64", "_", place, *operands)
        return
    if any(other.name == "LOP3" and "0xfffff" in other.operands for other in low.instructions):
        raise low.refusal("the arrivals that a state lacks are not modelled")
    # The emulator's state is the number of the phase. Machine code finds its parity in the highest bit.
    state = low.temp("b64")
    low.emit(f"{name}.shared::cta.b64", state, place, *operands)
    parity = low.computed("shl.b64", state, "63", kind="b64")
    low.set_pair(result, parity)


def _wait(low: Lowering, ins: Instruction) -> None:
    """A wait for the end of the phase whose parity is bit 31 of a register. If the L1 cache is invalidated afterwards,
    the wait acquires at cluster scope."""
    p, address, word = ins.operands
    op = "try_wait" if "TRYWAIT" in ins.modifiers else "test_wait"
    acquires = any(other.name == "CCTL" and other.guard == p for other in low.following(6))
    scope = ".acquire.cluster" if acquires else ""
    parity = low.computed("shr.u32", low.word(word), "31")
    done = low.target_predicate(p)
    low.emit(f"mbarrier.{op}.parity{scope}.shared::cta.b64", done, _bracketed_address(low, address), parity)
    low.after_sync()


def _invalidate(low: Lowering, ins: Instruction) -> None:
    """mbarrier.inval."""
    low.emit("mbarrier.inval.shared.b64", _bracketed_address(low, ins.operands[0]))


@mnemonic("ARRIVES", "LDGSTSBAR 64 TRANSCNT ARVCNT")
def copies_arrive(low: Lowering, ins: Instruction) -> None:
    """cp.async.mbarrier.arrive. With ``.ARVCNT`` it is one of the arrivals that the mbarrier expects (``.noinc``)."""
    noinc = ".noinc" if "ARVCNT" in ins.modifiers else ""
    low.emit(f"cp.async.mbarrier.arrive{noinc}.shared.b64", _bracketed_address(low, ins.operands[0]))
