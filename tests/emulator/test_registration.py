"""A new asynchronous instruction is one decorated function: it is parsed, translated, executed and mutated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cudal2gen import emulator
from cudal2gen.emulator.frontend.emitter import Emitter
from cudal2gen.emulator.frontend.instruction import Writes, instruction, registered, unregister
from cudal2gen.emulator.frontend.mutations import drop, shift
from cudal2gen.emulator.frontend.ptx import Instr
from cudal2gen.emulator.machine.batch import Batch
from cudal2gen.emulator.memory.late_copies import LateCopy
from cudal2gen.emulator.state.arrays import Array, Mask

TEXT = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 s[];
.visible .entry k(.param .u64 x, .param .u64 y) {
  .reg .b32 %t, %s, %v; .reg .b64 %p, %q, %g;
  ld.param.u64 %p, [x];
  ld.param.u64 %q, [y];
  mov.u32 %t, %tid.x;
  mov.u32 %s, s;
  mad.lo.u32 %s, %t, 4, %s;
  mad.wide.u32 %g, %t, 4, %p;
  toy.copy.b32 [%s], [%g];
  toy.wait;
  ld.shared.u32 %v, [%s];
  mad.wide.u32 %g, %t, 4, %q;
  st.global.u32 [%g], %v;
  ret;
}
"""
X = np.arange(32, dtype=np.uint32)


class Flights:
    """What toy.copy has under way in each batch: it lands with toy.wait."""

    def __init__(self) -> None:
        self.copies: dict[Batch, list[tuple[LateCopy, Array]]] = {}

    def issue(self, batch: Batch, to: Array, source: Array, m: Mask, site: int) -> None:
        data = batch.memory.load(source, 4, m, site)
        access = batch.shared.locate(to, 4, m, site)
        assert access is not None
        lanes, at, offset = access
        self.copies.setdefault(batch, []).append((batch.shared.write_pending(lanes, at, 4, site, offset), data))

    def land(self, batch: Batch) -> None:
        for copy, data in self.copies.pop(batch, ()):
            batch.shared.land_own(copy, data)


@pytest.fixture
def _toy() -> Iterator[None]:
    flights = Flights()

    @instruction(
        "toy.copy",
        types=frozenset(("b32",)),
        writes=Writes.MEMORY,
        completed_by=("toy.wait",),
        access=lambda _ins, _space: 4,
        mutations=(drop, shift(0, "shift", 4)),
    )
    def copy(e: Emitter, ins: Instr) -> None:
        to, source = ins.operands
        issue = e.bind("issue", flights.issue)
        e.line(f"{issue}(M, {e.shared(to, 'shared')}, {e.address(source, 'global')}, {e.lanes()})")

    @instruction("toy.wait", writes=Writes.MEMORY, mutations=(drop,))
    def wait(e: Emitter, ins: Instr) -> None:
        e.line(f"{e.bind('land', flights.land)}(M)")

    yield
    unregister("toy.copy", "toy.wait")


def run(text: str) -> tuple[Array, list[str]]:
    """What the kernel writes, and the kinds of its findings."""
    memory = emulator.Memory()
    x, y = memory.upload(X), memory.upload(np.empty(32, np.uint32), "output")
    result = emulator.load(text).launch("k", 1, 32, [x, y], memory=memory, shared_bytes=256)
    return y.download(), [report.kind for report in result.reports]


@pytest.mark.usefixtures("_toy")
def test_a_toy_instruction_runs_and_is_mutated() -> None:
    values, kinds = run(TEXT)
    assert kinds == []
    assert np.array_equal(values, X)
    mutants = {mutant.name: mutant for mutant in emulator.mutants(TEXT) if "toy" in mutant.name}
    assert list(mutants) == ["drop toy.copy.b32 at 14", "shift toy.copy.b32 at 14", "drop toy.wait at 15"]
    # Without the wait the data is under way; shifted, it lands beside; without the copy nothing was written.
    assert run(mutants["drop toy.wait at 15"].text)[1] == ["in-flight"]
    assert "uninitialised-shared" in run(mutants["drop toy.copy.b32 at 14"].text)[1]
    shifted, kinds = run(mutants["shift toy.copy.b32 at 14"].text)
    assert np.array_equal(shifted[1:], X[:-1])
    assert kinds != []


def test_other_types_and_forgotten_instructions_are_unknown() -> None:
    with pytest.raises(emulator.UnknownInstruction, match=r"PTX line 14: unknown instruction: toy\.copy\.b32"):
        run(TEXT)


@pytest.mark.usefixtures("_toy")
def test_a_form_serves_its_types_only() -> None:
    with pytest.raises(emulator.UnknownInstruction, match=r"toy\.copy\.b64"):
        run(TEXT.replace("toy.copy.b32", "toy.copy.b64"))


def test_what_completes_an_asynchronous_instruction_is_known_and_can_be_mutated() -> None:
    forms = {form.opcode: form for form in registered()}
    asynchronous = [form for form in forms.values() if form.asynchronous]
    assert {"cp.async", "cp.async.bulk", "cp.async.bulk.tensor", "st.async", "wgmma.mma_async"} <= {
        form.opcode for form in asynchronous
    }
    for form in asynchronous:
        assert form.mutations, form.opcode
        assert all(opcode in forms for opcode in form.completed_by), form.opcode


def test_what_writes_memory_cannot_be_uniform() -> None:
    with pytest.raises(ValueError, match="not uniform"):
        instruction("toy.store", writes=Writes.MEMORY, uniform=True)
