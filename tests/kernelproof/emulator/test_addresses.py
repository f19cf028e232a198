"""Proves that addresses are as on hardware: a CTA's rank in shared addresses, windows, and what an operand accepts."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import Memory, mutants
from tests.kernelproof.emulator.hopper_ptx import (
    EXCHANGE,
    descriptor,
    entry,
    exchange,
    launch,
    run_body,
    wgmma_kernel,
)
from tests.kernelproof.emulator.test_hopper_mutants import first_finding, text_of_kernel

# A launch of one cluster of two CTAs.
CLUSTER_OF_TWO = {"grid": 2, "cluster": 2}


def test_own_addresses_hold_the_rank() -> None:
    """The address of a shared variable has the CTA's rank in its upper bits, also after conversions, mapa and
    getctarank."""
    body = """
      mov.u32 %n, %cluster_ctarank; xor.b32 %x0, %n, 1; mad.lo.u32 %u, %n, 32, %t;
      cvt.u64.u32 %d0, %s; cvta.shared.u64 %d0, %d0; cvta.to.shared.u64 %d1, %d0; cvt.u32.u64 %x1, %d1;
      mapa.shared::cluster.u32 %x2, %s, %x0; mapa.shared::cluster.u32 %x3, %s, %n; mapa.u64 %d2, %d0, %x0;
      cvt.u32.u64 %x4, %d2; getctarank.shared::cluster.u32 %x5, %x2; getctarank.u64 %x6, %d0;
      mad.wide.u32 %g, %u, 32, %q;
      st.global.v4.u32 [%g], {%s, %x1, %x2, %x3}; st.global.v4.u32 [%g+16], {%x4, %x5, %x6, %x0};"""
    got, result = run_body(body, np.zeros(1), np.empty((64, 8), np.uint32), **CLUSTER_OF_TWO)
    assert result.reports == []
    for rank in (0, 1):
        own, other = 1024 | rank << 24, 1024 | (1 - rank) << 24
        assert got[32 * rank].tolist() == [own, own, other, own, other, 1 - rank, rank, 1 - rank]


# Every way to address a CTA's own shared memory. The address of the variable contains the rank.
WAYS = {
    "by name": "st.shared.u32 [s], %u; bar.warp.sync -1; ld.shared.u32 %w, [s];",
    "shared": "st.shared.u32 [%v], %u; ld.shared::cta.u32 %w, [%v];",
    "cluster": "st.shared::cluster.u32 [%v], %u; ld.shared::cluster.u32 %w, [%v];",
    "generic": "st.u32 [%d0], %u; ld.u32 %w, [%d0];",
    "atomic": "st.shared.u32 [%v], 0; atom.shared.add.u32 %x0, [%v], %u; ld.shared.u32 %w, [%v];",
    "generic atomic": "st.shared.u32 [%v], 0; atom.add.u32 %x0, [%d0], %u; ld.shared.u32 %w, [%v];",
    "mapa": "st.shared.u32 [%v], %u; mapa.shared::cluster.u32 %x0, %v, %n; ld.shared::cluster.u32 %w, [%x0];",
    "masked": "st.shared.u32 [%v], %u; and.b32 %x0, %v, 0xffffff; shl.b32 %x1, %n, 24; or.b32 %x0, %x0, %x1;"
    " ld.shared.u32 %w, [%x0];",
}


@pytest.mark.parametrize("way", WAYS)
def test_own_shared_memory(way: str) -> None:
    """Every way to address a CTA's own shared memory reaches the same word."""
    by_name = way == "by name"
    body = f"""
      mov.u32 %n, %cluster_ctarank; mad.lo.u32 %u, %n, 32, %t; mad.lo.u32 %v, %t, 4, %s; mad.wide.u32 %g, %u, 4, %q;
      {"mul.lo.u32 %u, %n, 32;" if by_name else ""} cvt.u64.u32 %d0, %v; cvta.shared.u64 %d0, %d0;
      {WAYS[way]} st.global.u32 [%g], %w;"""
    got, result = run_body(body, np.zeros(1), np.empty(64, np.uint32), **CLUSTER_OF_TWO)
    assert result.reports == []
    assert (got == (np.repeat([0, 32], 32) if by_name else np.arange(64))).all()


@pytest.mark.parametrize(
    "access",
    [
        "ld.shared.u32 %w, [%x1];",
        "st.shared::cta.u32 [%x1], 0;",
        "atom.shared.add.u32 %w, [%x1], 1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%w}, [%x1];",
    ],
)
def test_instructions_on_shared_cta_take_no_address_of_another_cta(access: str) -> None:
    # An earlier emulator accessed the other CTA by such an address.
    _, reports = exchange(EXCHANGE.replace("ld.shared::cluster.u32 %w, [%x1];", f"{access} mov.u32 %w, 0;"))
    assert any("an instruction on shared::cta of CTA 0 of the cluster has an address of CTA 1" in r for r in reports)


def test_isspacep_tells_the_own_cta_from_the_cluster() -> None:
    """An address of another CTA is in shared::cluster and not in shared::cta, and a kernel parameter is in global
    memory."""
    body = """
      mov.u32 %n, %cluster_ctarank; xor.b32 %x0, %n, 1; mad.lo.u32 %u, %n, 32, %t;
      cvt.u64.u32 %d0, %s; cvta.shared.u64 %d0, %d0; mapa.u64 %d1, %d0, %x0; mov.u32 %v, 0;
      isspacep.shared %P, %d0; @%P or.b32 %v, %v, 1; isspacep.shared::cta %P, %d1; @%P or.b32 %v, %v, 2;
      isspacep.shared::cluster %P, %d1; @%P or.b32 %v, %v, 4; isspacep.global %P, %q; @%P or.b32 %v, %v, 8;
      isspacep.global %P, %d0; @%P or.b32 %v, %v, 16; mov.b64 %d2, x; cvta.param.u64 %d2, %d2;
      isspacep.global %P, %d2; @%P or.b32 %v, %v, 32;
      mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %v;"""
    got, result = run_body(body, np.zeros(1), np.empty(64, np.uint32), **CLUSTER_OF_TWO)
    assert result.reports == []
    assert (got == 1 | 4 | 8 | 32).all()


@pytest.mark.parametrize(("address", "words"), [("%p", "is not of shared memory"), ("%d0", "")])
def test_generic_operands_lie_in_shared_memory(address: str, words: str) -> None:
    """A generic address of an mbarrier must be one of shared memory."""
    body = f"""setp.ne.u32 %P, %t, 0; @%P bra out; cvt.u64.u32 %d0, %s; cvta.shared.u64 %d0, %d0;
      mbarrier.init.b64 [{address}], 1; out:"""
    _, result = run_body(body, np.zeros(1), np.zeros(1, np.uint32), check_outputs=False)
    assert any(words in r.message for r in result.reports) == bool(words)


def test_a_signal_to_another_cta_than_the_data() -> None:
    """A copy to another CTA whose bytes count on this CTA's mbarrier is reported."""
    text = """
      add.u32 %bar, %s, 1024; mov.u32 %n, %cluster_ctarank; xor.b32 %x0, %n, 1;
      setp.ne.u32 %P, %t, 0; @%P bra ready;
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
    ready:
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%P bra done;
      mapa.shared::cluster.u32 %x1, %s, %x0; mapa.shared::cluster.u32 %x2, %bar, %x0;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%x1], [%p], 16, [BAR];
    done:
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"""
    for bar, wrong in (("%x2", False), ("%bar", True)):
        memory = Memory()
        source = memory.upload(np.zeros(16, np.uint8))
        result = launch(entry(text.replace("BAR", bar)), [source, source], memory, **CLUSTER_OF_TWO)
        assert ("cluster" in {report.kind for report in result.reports}) == wrong


def test_the_threads_of_a_warpgroup_have_one_descriptor() -> None:
    """A wgmma is reported if its threads have different descriptors."""
    a, b = descriptor(0, 128, 256, "none"), descriptor(16384, 128, 256, "none")
    text = wgmma_kernel(8, "f32", "f16", a, b, False, False, "1, 1", False)
    text = text.replace("wgmma.fence", "cvt.u64.u32 %g, %t; shr.u64 %g, %g, 6; add.u64 %B, %B, %g; wgmma.fence")
    memory = Memory()
    x, c = memory.upload(np.zeros(32768, np.uint8)), memory.upload(np.zeros((128, 4), np.float32))
    y = memory.upload(np.empty((128, 4), np.float32), "output")
    result = launch(text, [x, c, y, c, 0], memory, block=128, check_outputs=False)
    assert {r.kind for r in result.reports} == {"wgmma-descriptor"}


@pytest.mark.parametrize(("offset", "kinds"), [(0, []), (16, ["global-misaligned"])])
def test_accesses_of_32_bytes_are_aligned_as_a_whole(offset: int, kinds: list[str]) -> None:
    body = f"""setp.ne.u32 %P, %t, 0; @%P bra out; add.u64 %p, %p, {offset};
      ld.global.v4.u64 {{%d0, %d1, %d2, %d3}}, [%p]; st.global.u64 [%q], %d1; out:"""
    got, result = run_body(body, np.arange(8, dtype=np.uint64), np.zeros(1, np.uint64), check_outputs=False)
    assert [report.kind for report in result.reports] == kinds
    assert got == offset // 8 + 1


def test_a_generic_atomic_on_both_memories() -> None:
    """One generic atomic may access shared memory in some lanes and global memory in others."""
    body = """
      st.shared.u32 [s], 0; bar.warp.sync -1; mov.u32 %u, s; cvt.u64.u32 %d0, %u; cvta.shared.u64 %d0, %d0;
      and.b32 %v, %t, 1; setp.eq.u32 %P, %v, 0; selp.b64 %d1, %d0, %q, %P; atom.add.u32 %w, [%d1], 1;
      bar.warp.sync -1; setp.ne.u32 %P, %t, 0; @%P bra out; ld.shared.u32 %w, [s]; st.global.u32 [%q+4], %w; out:"""
    memory = Memory()
    out = memory.upload(np.zeros(2, np.uint32), "inout")
    result = launch(entry(body), [out, out], memory)
    assert result.reports == []
    assert out.download().tolist() == [16, 16]


def test_bytes_that_a_phase_can_wait_for() -> None:
    """An mbarrier counts at most 2^20 - 1 bytes, and one more is reported."""
    body = """add.u32 %bar, %s, 1024; setp.ne.u32 %P, %t, 0; @%P bra out;
      mbarrier.init.shared::cta.b64 [%bar], 1; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 1048575;
      mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 1048575;
      mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 1048576; out:"""
    _, result = run_body(body, np.zeros(1), np.zeros(1, np.uint32), check_outputs=False)
    assert [(r.kind, r.message.split()[0]) for r in result.reports] == [("mbarrier", "1048576")]


@pytest.mark.slow
def test_descriptors_that_keep_the_rank_are_noticed() -> None:
    """A descriptor whose address keeps the rank's bits is reported if they reach a field that is used."""
    # The first of each pair is for A, whose rows are along k. Its field that gets the rank is not used.
    source = text_of_kernel("tma_gemm", 5)
    unmasked = [m for m in mutants(source) if m.kind == "unmask"]
    noticed = [bool(first_finding(m.text, "tma_gemm", "nn_f16_2x2")) for m in unmasked]
    assert noticed == [False, True] * 4
