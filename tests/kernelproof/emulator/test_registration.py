"""Proves that one decorated function adds an asynchronous instruction, which is then parsed, translated, executed and
mutated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator.frontend.emitter import Emitter
from kernelproof.emulator.frontend.instruction import Writes, instruction, registered, unregister
from kernelproof.emulator.frontend.mutation_operators import drop, shift
from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Instr
from kernelproof.emulator.frontend.translate import translate
from kernelproof.emulator.machine.ampere_batch import AmpereBatch
from kernelproof.emulator.memory.late_copies import LateCopy
from kernelproof.emulator.state.arrays import Array, Mask

# A kernel that copies x to y through shared memory by two invented instructions.
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
    """The copies of toy.copy in flight in each batch. toy.wait completes them."""

    def __init__(self) -> None:
        self.copies: dict[AmpereBatch, list[tuple[LateCopy, Array]]] = {}

    def issue(self, batch: AmpereBatch, to: Array, source: Array, m: Mask, site: int) -> None:
        """Begins copies of 4 bytes from global to shared memory, in the lanes of ``m``, at the instruction ``site``."""
        data = batch.memory.load(source, 4, m, site)
        access = batch.shared.locate(to, 4, m, site)
        assert access is not None
        lanes, at, offset = access
        self.copies.setdefault(batch, []).append((batch.shared.write_pending(lanes, at, 4, site, offset), data))

    def land(self, batch: AmpereBatch) -> None:
        """Completes all copies of a batch."""
        for copy, data in self.copies.pop(batch, ()):
            batch.shared.land_own(copy, data)


@pytest.fixture
def _toy() -> Iterator[None]:
    """Registers toy.copy and toy.wait for the test."""
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


def launch_text(text: str) -> tuple[Array, list[str]]:
    """The words that the kernel writes, and the kinds of its findings."""
    memory = emulator.Memory()
    x, y = memory.upload(X), memory.upload(np.empty(32, np.uint32), "output")
    result = emulator.load(text).launch("k", 1, 32, [x, y], memory=memory, shared_bytes=256)
    return y.download(), [report.kind for report in result.reports]


@pytest.mark.usefixtures("_toy")
def test_a_toy_instruction_runs_and_is_mutated() -> None:
    values, kinds = launch_text(TEXT)
    assert kinds == []
    assert np.array_equal(values, X)
    mutants = {mutant.name: mutant for mutant in emulator.mutants(TEXT) if "toy" in mutant.name}
    assert list(mutants) == ["drop toy.copy.b32 at 14", "shift toy.copy.b32 at 14", "drop toy.wait at 15"]
    # Without the wait the data is in flight. A shifted copy writes to the next word. Without the copy nothing was
    # written.
    assert launch_text(mutants["drop toy.wait at 15"].text)[1] == ["in-flight"]
    assert "uninitialised-shared" in launch_text(mutants["drop toy.copy.b32 at 14"].text)[1]
    shifted, kinds = launch_text(mutants["shift toy.copy.b32 at 14"].text)
    assert np.array_equal(shifted[1:], X[:-1])
    assert kinds != []


def test_other_types_and_forgotten_instructions_are_unknown() -> None:
    with pytest.raises(emulator.UnknownInstruction, match=r"PTX line 14: unknown instruction: toy\.copy\.b32"):
        launch_text(TEXT)


@pytest.mark.usefixtures("_toy")
def test_a_form_serves_its_types_only() -> None:
    with pytest.raises(emulator.UnknownInstruction, match=r"toy\.copy\.b64"):
        launch_text(TEXT.replace("toy.copy.b32", "toy.copy.b64"))


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


# A kernel with room for one statement.
BODY = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k() {{
  .reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<16>; .reg .f32 %f<16>; .reg .b64 %rd<8>;
  {}
  ret;
}}
"""
# The operands of a sparse mma, and the forms of mbarrier that are modelled.
SPARSE_OPERANDS = "{%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, {%r4,%r5,%r6,%r7}, {%f0,%f1,%f2,%f3}, %r8, 0;"
OF_MBARRIER = "arrive, arrive_drop, complete_tx, expect_tx, init, inval, test_wait, try_wait"
# By the statement: why it is refused, and what the message calls modelled.
REFUSED = {
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%f0,%f1,%f2,%f3}, %rd0, %rd1, %r0, 0, 1, 1, 1, 0, 0;": (
        "unknown instruction",
        "wgmma.mma_async of dense f16, bf16, tf32, e4m3, e5m2, s8 and u8",
    ),
    f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {SPARSE_OPERANDS}": (
        "form not modelled",
        "mma.sync of dense f16, bf16, tf32, f64, e4m3, e5m2, s8, u8, s4, u4 and b1",
    ),
    "multimem.st.relaxed.sys.global.f32 [%rd0], %f0;": ("unknown instruction", ""),
    "mbarrier.pending_count.b64 %r0, %rd0;": (
        "unknown instruction",
        ", ".join(f"mbarrier.{name}" for name in OF_MBARRIER.split(", ")),
    ),
    "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd0], [%r0], 16, %rs0;": (
        ".cp_mask is not modelled",
        "cp.async.bulk of consecutive bytes to or from shared memory",
    ),
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd0, {%r2,%r3,%r4,%r5,%r6}], [%r1];": (
        ".tile::scatter4 is not modelled",
        "cp.async.bulk.tensor and its reductions: a box of a tiled tensor map to or from shared memory",
    ),
    "tcgen05.mma.cta_group::1.kind::tf32 [%r0], %rd0, %rd1, %r1, %p0;": (
        ".kind::tf32 is not modelled",
        "tcgen05.mma of kind::f16, A in shared or tensor memory",
    ),
}


@pytest.mark.parametrize("statement", REFUSED)
def test_a_refusal_has_the_line_and_what_is_modelled(statement: str) -> None:
    why, modelled = REFUSED[statement]
    with pytest.raises(emulator.UnknownInstruction) as caught:
        translate(parse(BODY.format(statement)), "k")
    opcode, words = statement.split(maxsplit=1)[0], statement.removesuffix(";")
    end = f"; modelled: {modelled}" if modelled else f"; nothing of {opcode.split('.')[0]} is modelled"
    assert str(caught.value) == f"PTX line 6: {why}: {opcode} in `{words}`{end}"


# Forms of tensor memory, and by form texts that lack a part of it or have a wrong number of registers.
MASKED = "tcgen05.mma.cta_group::{}.kind::f16 [%r0], %rd0, %rd1, %r1, {{{}}}, %p0;"
OF_TENSOR_MEMORY = {
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r2, %r3}, [%r0];": (
        "tcgen05.ld.sync.aligned.x2.b32 {%r2, %r3}, [%r0];", "tcgen05.ld.sync.aligned.32x32b.b32 {%r2, %r3}, [%r0];",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r2, %r3}, %r4, [%r0];",
    ),
    "tcgen05.st.sync.aligned.16x64b.x1.b32 [%r0], {%r2};": (
        "tcgen05.st.sync.aligned.x1.b32 [%r0], {%r2};", "tcgen05.st.sync.aligned.16x64b.b32 [%r0], {%r2};",
    ),
    **{
        MASKED.format(group, ",".join(["0"] * 4 * group)): tuple(
            MASKED.format(group, ",".join(["0"] * count)) for count in (1, 3, 5, 4 * (3 - group))
        )
        for group in (1, 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("legal", OF_TENSOR_MEMORY)
def test_a_form_of_tensor_memory_without_one_of_its_parts_is_refused(legal: str) -> None:
    translate(parse(BODY.format(legal)), "k")
    for text in OF_TENSOR_MEMORY[legal]:
        with pytest.raises(emulator.UnknownInstruction):
            translate(parse(BODY.format(text)), "k")


def test_an_old_name_of_a_fence_between_proxies_is_one() -> None:
    new, old = (
        translate(parse(BODY.format(f"{name}.proxy.async.global;")), "k").source for name in ("fence", "membar")
    )
    assert new == old
