"""Proves that a copy follows a tensor map which a kernel makes or changes, and that a missing fence is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof.emulator import LaunchResult, Memory
from tests.kernelproof.emulator.hopper_ptx import entry, launch, run_body


def test_fences_of_tensor_maps_are_accepted() -> None:
    body = """
      fence.proxy.tensormap::generic.release.gpu; fence.proxy.tensormap::generic.acquire.gpu [%p], 128;
      fence.proxy.async.global; fence.proxy.alias; fence.acq_rel.cluster; nanosleep.u32 20; mov.u64 %g, %globaltimer;
      createpolicy.fractional.L2::evict_first.b64 %d0, 1.0; prefetch.global.L2 [%p];
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %t;"""
    got, result = run_body(body, np.zeros(64, np.uint32), np.empty(32, np.uint32))
    assert result.reports == []
    assert got.tolist() == list(range(32))


# Makes a map of 24 rows of 64 fp16, in boxes of 8 rows, in shared memory at 2048, and publishes it at %q. Then a TMA
# copy loads the box from row 8 on, and its data goes to %q + 128. hopper_ptx.py says what %p, %q, %s and %t are.
EDITS = """
      add.u32 %v, %s, 2048; shl.b32 %u, %t, 2; add.u32 %u, %u, %v; st.shared.u32 [%u], 0; bar.warp.sync -1;
      setp.ne.u32 %P, %t, 0; @%P bra edited;
      tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%v], %p;
      tensormap.replace.tile.rank.shared::cta.b1024.b32 [%v], 1;
      tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%v], 0, 64;
      tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%v], 1, 8;
      tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%v], 0, 64;
      tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%v], 1, 24;
      STRIDE
      tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%v], 0, 1;
      tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%v], 1, 1;
      tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%v], TYPE;
      tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%v], 0;
    edited: bar.warp.sync -1;
      tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%q], [%v], 128;
      fence.proxy.tensormap::generic.acquire.gpu [%q], 128;
      add.u32 %bar, %s, 4096; @%P bra over;
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;
      cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%q, {0, 8}], [%bar];
    over: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      mov.u32 %u, %t;
    more: mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v]; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g+128], %w;
      add.u32 %u, %u, 32; setp.lt.u32 %P, %u, 256; @%P bra more;"""
# Sets the stride of the tensor map to 128 bytes.
STRIDE = "mov.b64 %d0, 128; tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%v], 0, %d0;"


def run_edits(
    stride: str = STRIDE, elemtype: int = 6, text: str = EDITS, **settings: Any
) -> tuple[np.ndarray, LaunchResult]:
    """Runs EDITS. Returns y, whose first 64 elements are the map and the rest the copied rows, and the launch's result.

    ``stride``: the text that sets the map's stride. ``elemtype``: PTX's number of the element type. ``text``: a variant
    of EDITS.
    """
    x = np.arange(24 * 64, dtype=np.uint16).reshape(24, 64)
    body = text.replace("STRIDE", stride).replace("TYPE", str(elemtype))
    return run_body(body, x, np.empty(64 + 512, np.uint16), check_outputs=False, **settings)


@pytest.mark.parametrize("elemtype", [6, 10])  # fp16, and bf16, whose number for the host is 9
def test_tensor_maps_made_by_a_kernel(elemtype: int) -> None:
    written, result = run_edits(elemtype=elemtype)
    assert result.reports == []
    assert (written[64:] == np.arange(8 * 64, 16 * 64)).all()


def test_tensor_maps_that_a_kernel_makes_wrongly() -> None:
    _, result = run_edits(stride=STRIDE.replace("128;", "120;"))
    (report, *_) = [report for report in result.reports if report.kind == "tensor-map"]
    assert "stride of 120 bytes" in report.message
    _, result = run_edits(elemtype=13)  # no such type
    assert "tensor-map" in {report.kind for report in result.reports}


# PUBLISH and ACQUIRE are the fences of EDITS. COPY takes the place of PUBLISH: threads write the 128 bytes of the map
# by ordinary stores. Its {} takes RELEASE or nothing.
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%q], 128;"
PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%q], [%v], 128;"
COPY = "ld.shared.u32 %w, [%u]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w; {} bar.warp.sync -1;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (ACQUIRE, "", "generic.acquire"),
        (ACQUIRE, ACQUIRE.replace("[%q]", "[%q+128]"), "generic.acquire"),
        # An acquire before the map is written does not cover the write.
        (f"{PUBLISH}\n      {ACQUIRE}", f"{ACQUIRE} {PUBLISH}", "generic.acquire"),
        (ACQUIRE, "fence.proxy.async.global; fence.acq_rel.gpu;", "generic.acquire"),
        # Within one CTA the smallest scope suffices.
        (ACQUIRE, ACQUIRE.replace("gpu", "cta"), ""),
        # Ordinary stores do not release the map.
        (PUBLISH, COPY.format(""), "release of its writer"),
        (PUBLISH, COPY.format(RELEASE), ""),
    ],
)
def test_fences_of_tensor_maps_that_a_kernel_makes(old: str, new: str, words: str) -> None:
    text = EDITS.replace(old, new)
    assert text != EDITS
    _, result = run_edits(text=text)
    assert [r.kind for r in result.reports] == ["tensor-map-fence"] * bool(words)
    assert all(words in r.message for r in result.reports)


# Two warps: warp 0 makes the map and executes FIRST, both execute BETWEEN, and warp 1 executes SECOND and copies
# through the map. Warp 0 writes the copied rows to y.
TWO_WARPS = (
    EDITS.replace("shl.b32 %u, %t, 2;", "setp.gt.u32 %Q, %t, 31; @%Q bra made; shl.b32 %u, %t, 2;")
    .replace(ACQUIRE, "FIRST made: BETWEEN setp.ne.u32 %P, %t, 32;")
    .replace("add.u32 %bar, %s, 4096; @%P bra over;", "add.u32 %bar, %s, 4096; @%P bra over; SECOND")
    .replace("over: bar.warp.sync -1;", "over: bar.sync 0; @%Q bra out;")
    + " out:"
)


@pytest.mark.parametrize(
    ("first", "between", "second", "kinds"),
    [
        ("", "bar.sync 0;", ACQUIRE, set()),
        # A fence of another warp counts if a barrier orders it before the use.
        (ACQUIRE, "bar.sync 0;", "", set()),
        ("", "bar.sync 0;", "", {"tensor-map-fence"}),
    ],
)
def test_a_tensor_map_that_another_warp_makes(first: str, between: str, second: str, kinds: set[str]) -> None:
    text = TWO_WARPS.replace("FIRST", first).replace("BETWEEN", between).replace("SECOND", second)
    written, result = run_edits(text=text, block=64)
    assert {r.kind for r in result.reports} == kinds
    assert (written[64:] == np.arange(8 * 64, 16 * 64)).all()


def test_a_tensor_map_that_another_cta_makes() -> None:
    """CTA 0 makes the map and raises a flag at %q + 2000. CTA 1 waits for the flag and copies through the map."""
    memory = Memory()
    x = memory.upload(np.arange(24 * 64, dtype=np.uint16).reshape(24, 64))
    for acquire, kinds in ((ACQUIRE, set()), (ACQUIRE.replace("gpu", "cluster"), {"tensor-map-fence"})):
        y = memory.upload(np.zeros(1024, np.uint16), "inout")
        make = EDITS[: EDITS.index(ACQUIRE)].replace("STRIDE", STRIDE).replace("TYPE", "6")
        use = EDITS[EDITS.index("add.u32 %bar") :]
        body = f"""
          mov.u32 %n, %ctaid.x; setp.ne.u32 %Q, %n, 0; @%Q bra wait; {make}
          setp.eq.u32 %P, %t, 0; @%P st.release.gpu.global.u32 [%q+2000], 1; bra out;
        wait: ld.acquire.gpu.global.u32 %w, [%q+2000]; setp.eq.u32 %P, %w, 0; @%P bra wait;
          {acquire} setp.ne.u32 %P, %t, 0; {use} out:"""
        result = launch(entry(body), [x, y], memory, grid=2)
        assert {r.kind for r in result.reports} == kinds
        assert (y.download()[64:576] == np.arange(8 * 64, 16 * 64)).all()
