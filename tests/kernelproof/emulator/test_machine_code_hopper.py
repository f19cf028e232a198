"""Proves that machine code of sm_90 and later computes what its PTX computes.

The tests of mbarriers, bulk copies, clusters, wgmma and tensor memory are repeated on the cubins of their kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Device, EmulatorError, Memory
from kernelproof.ground.chips import GPUS
from kernelproof.sass import disassemble
from tests.kernelproof.cubin_edits import edit_cubin, rescheduled_code
from tests.kernelproof.emulator import test_hopper_clusters as clusters
from tests.kernelproof.emulator import test_hopper_copies as copies
from tests.kernelproof.emulator import test_hopper_matrices as matrices
from tests.kernelproof.emulator import test_hopper_mbarriers as mbarriers
from tests.kernelproof.emulator import test_tensor_memory as tensors
from tests.kernelproof.emulator.build import assemble

# Special registers whose value a kernel stores.
WORDS = (
    *("%ntid.x", "%ntid.y", "%ntid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%dynamic_smem_size", "%nsmid"),
    *("%clusterid.x", "%clusterid.y", "%nclusterid.x", "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_nctaid.x"),
    *("%cluster_nctaid.y", "%cluster_ctarank", "%cluster_nctarank", "%warpid", "%nwarpid", "%total_smem_size"),
)


@pytest.mark.parametrize(("target", "gpu"), [("sm_90a", "h200"), ("sm_100f", "b200"), ("sm_120", "rtx5090")])
def test_words_of_the_launch_are_where_they_are_read(target: str, gpu: str) -> None:
    stores = "\n".join(f"mov.u32 %r, {name}; st.global.u32 [%a+{4 * i}], %r;" for i, name in enumerate(WORDS))
    text = f""".version 8.8
.target {target}
.address_size 64
.visible .entry k(.param .u8 first, .param .align 64 .b8 wide[64], .param .u64 out)
{{ .reg .b32 %r; .reg .b64 %a, %b; ld.param.u64 %a, [out]; {stores}
ld.param.u8 %r, [first]; st.global.u32 [%a+{4 * len(WORDS)}], %r;
mov.b64 %b, wide; cvta.param.u64 %b, %b; ld.u32 %r, [%b+60]; st.global.u32 [%a+{4 * len(WORDS) + 4}], %r; ret; }}
"""
    results = []
    for program in (text, assemble(text, target=target)):
        memory = Memory()
        out = memory.upload(np.zeros(len(WORDS) + 2, np.uint32), "inout")
        wide = np.arange(16, dtype=np.uint32).tobytes()
        emulator.load(program).launch(
            "k", (4, 6, 1), (5, 6, 1), [np.uint8(200), wide, out], memory=memory, device=Device.of(GPUS[gpu]),
            cluster=(2, 2, 1), shared_bytes=1024, ctas=[14, 15, 18, 19],
        )  # fmt: skip
        results.append(out.bytes().view(np.uint32).tolist())
    assert results[0] == results[1]
    assert results[0][-2:] == [200, 15]


# A test of another module.
Case = Callable[..., None]
AGAIN: list[tuple[Case, tuple[Any, ...]]] = [
    (mbarriers.test_mbarrier_states_and_phases, ()),
    (mbarriers.test_try_wait_gives_up_where_nothing_else_can_run, ()),
    (mbarriers.test_deadlock_names_barrier_phase_and_threads, ()),
    (mbarriers.test_uninitialised_and_overfull_mbarriers, ()),
    (mbarriers.test_cp_async_mbarrier_arrive, ()),
    (mbarriers.test_a_dropped_arrival_is_not_expected_in_the_next_phase, ()),
    *((matrices.test_stmatrix, (count, trans)) for count, trans in ((1, ".trans"), (2, ""), (4, ".trans"))),
    *((matrices.test_wgmma, (case, keep)) for keep, case in enumerate(matrices.CASES[:2])),
    (matrices.test_wgmma_from_registers, ("f16", "-1, 1")),
    (matrices.test_wgmma_from_registers, ("bf16", "1, -1")),
    (clusters.test_distributed_shared_memory, ()),
    (clusters.test_generic_addresses_and_atomics_of_peers, ()),
    (clusters.test_async_stores_to_a_peer, ()),
    (clusters.test_remote_arrivals_and_copies, ()),
    (clusters.test_elect, ()),
    (clusters.test_register_pool, (384, 40, 232, [])),
    (copies.test_tensor_load, copies.LOADS[0]),
    (copies.test_tensor_load, copies.LOADS[-1]),
    (copies.test_tensor_store, (False,)),
    (copies.test_tensor_store, (True,)),
    *((tensors.test_what_is_stored_is_loaded_by_another_shape, case) for case in (
        ("32x32b", 4), ("16x64b", 1), ("16x128b", 4), ("16x256b", 1),
    )),
    (tensors.test_a_warp_that_names_lanes_of_another_reaches_the_same_half_of_its_own, ()),
    (tensors.test_lanes_outside_of_a_guard_keep_what_was_loaded, ()),
    (tensors.test_halves_are_packed_and_unpacked, ()),
    (tensors.test_a_tile_is_exact_and_clean, (64, 2, "f16", "f32", False)),
    (tensors.test_a_pair_is_exact_and_clean, (256, 48, True)),
    (tensors.test_products_of_a_pair_are_counted, ()),
    (tensors.test_operands_lie_as_their_descriptors_say, (32, 64, True, False)),
    (tensors.test_running_ctas_do_the_work_of_those_that_have_not_started, ()),
    (tensors.test_work_is_done_once_though_requests_fail_at_random, ()),
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(("case", "arguments"), AGAIN)
def test_machine_code_passes_the_test_of_its_ptx(
    case: Case, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = emulator.load

    def in_machine_code(text: str) -> emulator.Program:
        """The debug sections to which these names lead may have been left out."""
        target = "sm_100a" if ".target sm_100a" in text else "sm_90a"
        return load(assemble(re.sub(r", function_name .*", "", text), target=target))

    monkeypatch.setattr(emulator, "load", in_machine_code)
    case(*arguments)


def test_products_of_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction of kind::f16 is that of kind::tf32 too; the descriptor tells them apart."""
    text = tensors.tile_text().replace("kind::f16", "kind::tf32")
    program = emulator.load(assemble(text, target="sm_100a"))
    monkeypatch.setattr(emulator, "load", lambda _text: program)
    form = tensors.form
    monkeypatch.setattr(tensors, "form", lambda *shape: form(*shape) | 2 << 7 | 2 << 10)
    with pytest.raises(EmulatorError, match="tf32"):
        tensors.tile(text)


READ_THEN_OVERWRITTEN = (
    tensors.HEAD
    + """
  .reg .pred %early; setp.lt.u32 %early, %t, 128; mov.u32 %b0, 0;
  @!%early bra met; tcgen05.st.sync.aligned.32x32b.x1.b32 [%own], {%t}; tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%b0}, [%own]; tcgen05.wait::ld.sync.aligned;
  tcgen05.fence::before_thread_sync;
met:
  bar.sync 1, 256; tcgen05.fence::after_thread_sync; @%early bra done;
  tcgen05.st.sync.aligned.32x32b.x1.b32 [%own], {%t}; tcgen05.wait::st.sync.aligned;
done:
  mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %b0; tcgen05.fence::before_thread_sync;
"""
    + tensors.TAIL
)


@pytest.mark.parametrize(("dropped", "rules"), [(False, []), (True, ["tensor-memory-race"])])
def test_a_load_of_tensor_memory_is_complete_where_its_scoreboard_is_waited_for(
    dropped: bool, rules: list[str], tmp_path: Path
) -> None:
    """Warps load, and other warps overwrite the same cells after a barrier."""
    cubin = assemble(READ_THEN_OVERWRITTEN, target="sm_100a")
    (function,) = disassemble(cubin)
    load = next(ins for ins in function.instructions if ins.name == "LDTM")
    after = [ins for ins in function.instructions if ins.address > load.address]
    waiting = next(ins for ins in after if load.control.write_barrier in ins.control.waits)
    assert waiting.address < next(ins for ins in after if ins.name == "BAR").address
    path = tmp_path / "edited.cubin"
    codes = {waiting.address: rescheduled_code(waiting, waits=())} if dropped else {}
    path.write_bytes(edit_cubin(cubin.read_bytes(), function.name, codes))
    memory = Memory()
    out = memory.upload(np.zeros(256, np.uint32), "output")
    result = emulator.load(path).launch(
        "k", grid=1, block=256, args=[out, out], memory=memory, shared_bytes=1024, device=tensors.B200
    )
    assert sorted({report.kind for report in result.reports if report.kind != "register-hazard"}) == rules
