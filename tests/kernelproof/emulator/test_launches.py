"""Proves what a launch refuses and reports: deadlocks, exits, regions, chosen CTAs, text that is no PTX."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.emulator.host.cuda import (
    COOPERATIVE_TOO_LARGE,
    INVALID_CLUSTER,
    INVALID_CONFIGURATION,
    INVALID_VALUE,
    NOT_SUPPORTED,
    LaunchRefused,
)
from kernelproof.emulator.host.launch_limits import check_launch
from kernelproof.emulator.state.launch_state import Geometry, LaunchState
from kernelproof.emulator.state.scopes import Scope
from tests.kernelproof.emulator.kernel_cases import (
    DEVICE,
    SHARED,
    TILES,
    TILES_WANT,
    WRONG_SHARED,
    program,
    run_case,
)


def test_a_wait_with_a_time_limit_is_no_deadlock() -> None:
    memory = Memory()
    buffers = [memory.upload(np.zeros(1, np.int32)), memory.upload(np.zeros(128, np.int32), "output")]
    assert program(DEVICE).launch("waits_for_a_while", 2, 64, buffers, memory=memory).reports == []


@pytest.mark.parametrize("first", [20, 32, 70])
def test_threads_that_exit_do_not_hold_up_a_barrier(first: int) -> None:
    memory = Memory()
    out = memory.upload(np.full(128, -1, np.int32), "inout")
    result = program(SHARED).launch("early_leavers", 1, 128, [out, first], memory=memory)
    assert {r.kind for r in result.reports} == {"exit-before-barrier"}
    assert not any(r.is_error for r in result.reports)
    assert f"{first} threads (0-{first - 1}) have exited before barrier 0, at which {128 - first} wait" in {
        r.message for r in result.reports
    }
    sums = [127 - t + (sum(range(t - 90)) if t >= 96 else 0) for t in range(first, 128)]
    assert out.download().tolist() == [-1] * first + sums


def test_deadlock_names_both_sides() -> None:
    (case,) = (case for case, _ in WRONG_SHARED if case.kernel == "divergent_barrier")
    (report,) = [r for r in run_case(case) if r.kind == "barrier-divergence"]
    assert "28 threads (100-127) wait at barrier 0" in report.message
    assert "100 threads (0-99) have exited" in report.message
    assert report.threads == tuple(range(100, 128))


def test_region_outside_is_reported() -> None:
    memory = Memory()
    x = memory.upload(np.arange(64, dtype=np.int32))
    out = memory.upload(np.empty((2, 64), np.int32), "output", region=(slice(None), slice(0, 48)))
    result = program(DEVICE).launch("grid_stride", 1, 64, [x, out, 1], memory=memory)
    assert {r.kind for r in result.reports} == {"outside-region", "unwritten-output"}
    (outside,) = [r for r in result.reports if r.kind == "outside-region"]
    assert outside.threads == tuple(range(48, 64))


def test_chosen_ctas_only() -> None:
    memory = Memory()
    x, out = memory.upload(TILES), memory.upload(np.empty_like(TILES), "output")
    result = program(DEVICE).launch("grid_stride", 10, 64, [x, out, 10], memory=memory, ctas=[0, 9])
    assert result.reports == []
    got = out.download()
    np.testing.assert_array_equal(got[[0, 9]], TILES_WANT[[0, 9]])
    assert (got[1:9].view(np.uint8) == 0xFF).all()


# What is wrong with a launch, and the code of its refusal.
REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"grid": (0, 1, 1)}, INVALID_CONFIGURATION),
    ({"grid": (1, 70000, 1)}, INVALID_CONFIGURATION),
    ({"block": 2048}, INVALID_CONFIGURATION),
    ({"shared_bytes": 1 << 20}, INVALID_VALUE),
]


@pytest.mark.parametrize(("change", "code"), REFUSED)
def test_refused_launches(change: dict[str, Any], code: int) -> None:
    memory = Memory()
    out = memory.upload(np.empty(32, np.int32), "output")
    launch: dict[str, Any] = {"grid": 1, "block": 32, "shared_bytes": 0, **change}
    with pytest.raises(emulator.LaunchRefused) as caught:
        program(DEVICE).launch("misses_outputs", args=[out, 20], memory=memory, **launch)
    assert caught.value.code == code


def test_unknown_instruction_names_line_and_opcode() -> None:
    text = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k() {
  .reg .b64 %rd<2>;
  unheard.of.sync.aligned;
  ret;
}
"""
    with pytest.raises(emulator.UnknownInstruction, match=r"PTX line 6.*unheard\.of\.sync\.aligned"):
        emulator.load(text).launch("k", 1, 32, [], memory=Memory())


def test_text_that_is_no_ptx_names_the_line() -> None:
    with pytest.raises(emulator.PtxError, match="line 2"):
        emulator.load(".version 8.0\nint main() {}\n")
    with pytest.raises(emulator.PtxError, match="line 5"):
        emulator.load(".version 8.0\n.target sm_80\n.visible .entry k()\n{\n  ;\n  ret;\n}\n")


def test_buffers_bring_their_memory() -> None:
    buffers = [Memory().upload(np.zeros(1, np.int32)) for _ in range(2)]
    memory = buffers[0].memory
    buffers.append(memory.upload(np.zeros(128, np.int32), "output"))
    assert program(DEVICE).launch("waits_for_a_while", 2, 64, [buffers[0], buffers[2]]).reports == []
    for wrong, other in (([buffers[0], buffers[1]], None), ([buffers[0], buffers[2]], Memory())):
        with pytest.raises(emulator.EmulatorError):
            program(DEVICE).launch("waits_for_a_while", 2, 64, wrong, memory=other)


SIZES = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x) {
  .shared .align 4 .b8 own[OWN];
  .reg .b32 %r<3>; .reg .b64 %p;
  ld.param.u64 %p, [x];
  st.shared.u8 [own], 0;
  mov.u32 %r0, %total_smem_size;
  mov.u32 %r1, %dynamic_smem_size;
  st.global.u32 [%p], %r0;
  st.global.u32 [%p+4], %r1;
  ret;
}
"""


@pytest.mark.parametrize("environment", [0, 12345])
@pytest.mark.parametrize("static", [4, 100, 128, 4000])
@pytest.mark.parametrize("dynamic", [0, 1, 28, 1024])
def test_sizes_of_shared_memory_are_those_of_the_launch(static: int, dynamic: int, environment: int) -> None:
    """A CTA gets whole units of 128 bytes (PTX ISA), whatever else is drawn of its machine."""
    memory = Memory()
    out = memory.upload(np.zeros(2, np.uint32), "output")
    emulator.load(SIZES.replace("OWN", str(static))).launch(
        "k", 1, 32, [out], memory=memory, shared_bytes=dynamic, options=emulator.Options(environment=environment)
    )
    assert out.download().tolist() == [-(-(static + dynamic) // 128) * 128, dynamic]


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (4, 3, 1), (2, 3, 2)])
def test_ctas_are_numbered_along_x_then_y_then_z_and_clusters_are_boxes(cluster: tuple[int, int, int]) -> None:
    grid = 4, 6, 4
    launch = object.__new__(LaunchState)
    launch.geometry = Geometry(grid, (8, 2, 3), cluster=cluster)
    assert (launch.geometry.ctas, launch.geometry.threads) == (4 * 6 * 4, 8 * 2 * 3)
    places = [(x, y, z) for z, y, x in product(*map(range, reversed(grid)))]
    assert [launch.cta_index(cta) for cta in range(len(places))] == places
    boxes: dict[tuple[int, ...], list[int]] = {}
    for cta, place in enumerate(places):
        boxes.setdefault(tuple(i // extent for i, extent in zip(place, cluster, strict=True)), []).append(cta)
    assert {len(members) for members in boxes.values()} == {launch.geometry.cluster_size}
    for members in boxes.values():
        assert {launch.cluster_of(cta) for cta in members} == {members[0]}
        assert launch.scope_of_both(members[0], members[0]) == Scope.CTA
        for cta in range(len(places)):
            if cta != members[0]:
                wanted = Scope.CLUSTER if cta in members else Scope.GPU
                assert launch.scope_of_both(members[0], cta) == launch.scope_of_both(cta, members[0]) == wanted


def answer(
    function: Any = None, limit: int = 48 << 10, static: int = 0, device: emulator.Device | None = None,
    large: bool = False, **geometry: Any,
) -> int:  # fmt: skip
    """The code with which a launch is refused; 0 if it is not."""
    chosen = Geometry(**{"grid": (1, 1, 1), "block": (1, 1, 1), **geometry})
    attributes: Any = SimpleNamespace(attributes=function or {})
    try:
        check_launch(attributes, chosen, static, limit, device or emulator.HOPPER, large)
    except LaunchRefused as refused:
        return refused.code
    return 0


# Launches at a limit, which are right, by what refuses the same launch with one number larger by 1: that number.
AT_LIMITS: list[tuple[dict[str, Any], str, int, int]] = [
    *((({"grid": (2**31 - 1, 65535, 65535)}, "grid", axis, INVALID_CONFIGURATION)) for axis in range(3)),
    ({"block": (1024, 1, 1)}, "block", 0, INVALID_CONFIGURATION),
    ({"block": (1, 1024, 1)}, "block", 1, INVALID_CONFIGURATION),
    ({"block": (1, 1, 64)}, "block", 2, INVALID_CONFIGURATION),
    *((({"block": (8, 8, 16)}, "block", axis, INVALID_CONFIGURATION)) for axis in range(3)),
    ({"function": {"maxntid": (8, 4)}, "block": (2, 16, 1)}, "block", 0, INVALID_CONFIGURATION),
    *(
        ({"function": {"reqntid": required}, "block": block}, "block", axis, INVALID_CONFIGURATION)
        for required, block in (((8,), (8, 1, 1)), ((8, 4), (8, 4, 1)), ((8, 4, 2), (8, 4, 2)))
        for axis in range(3)
    ),
    *(
        ({"function": {"reqnctapercluster": fixed}, "grid": (8, 4, 4), "cluster": cluster}, "cluster", axis,
         INVALID_CLUSTER)
        for fixed, cluster in (((2,), (2, 1, 1)), ((2, 2), (2, 2, 1)), ((2, 1, 2), (2, 1, 2)))
        for axis in range(3)
    ),
    # 1025 threads are refused though each extent is small.
    ({"block": (25, 40, 1)}, "block", 1, INVALID_CONFIGURATION),
    ({"shared_bytes": 48 << 10}, "shared_bytes", -1, INVALID_VALUE),
    ({"shared_bytes": 0}, "shared_bytes", -2, INVALID_VALUE),
    ({"shared_bytes": (227 << 10) - 512, "static": 512, "limit": 227 << 10}, "static", -1, INVALID_VALUE),
    ({"grid": (8, 4, 2), "cluster": (4, 1, 2)}, "cluster", 1, INVALID_CLUSTER),
    ({"grid": (8, 4, 4), "cluster": (2, 2, 4), "large": True}, "grid", 0, INVALID_CONFIGURATION),
    ({"grid": (4, 4, 4), "cluster": (2, 2, 1)}, "grid", 1, INVALID_CONFIGURATION),
    ({"grid": (132 * 2, 1, 1), "block": (1024, 1, 1), "cooperative": True}, "grid", 0, COOPERATIVE_TOO_LARGE),
    ({"grid": (132, 1, 1), "shared_bytes": 48 << 10, "static": 80 << 10, "cooperative": True}, "grid", 0,
     COOPERATIVE_TOO_LARGE),
]  # fmt: skip


@pytest.mark.parametrize(("launch", "name", "axis", "code"), AT_LIMITS)
def test_one_more_than_a_limit_is_refused(launch: dict[str, Any], name: str, axis: int, code: int) -> None:
    assert answer(**launch) == 0
    value = launch[name]
    larger = value + {-1: 1, -2: -1}[axis] if axis < 0 else tuple(x + (i == axis) for i, x in enumerate(value))
    assert answer(**{**launch, name: larger}) == code


def test_extents_are_positive_and_clusters_need_a_device_that_has_them() -> None:
    for name, axis in product(("grid", "block"), range(3)):
        assert answer(**{name: tuple(int(i != axis) for i in range(3))}) == INVALID_CONFIGURATION
    assert answer(cluster=(2, 0, 1), grid=(2, 1, 1)) == INVALID_CLUSTER
    clusters: dict[str, Any] = {"cluster": (2, 1, 1), "grid": (2, 1, 1)}
    assert (answer(**clusters), answer(**clusters, device=emulator.Device())) == (0, NOT_SUPPORTED)
    assert answer(grid=(4, 4, 4), cluster=(2, 2, 4), large=True) == 0
    assert answer(grid=(4, 4, 4), cluster=(2, 2, 4)) == INVALID_CLUSTER
    assert answer(grid=(4, 4, 8), cluster=(2, 2, 8), large=True) == INVALID_CLUSTER
    # Of 264 resident CTAs of 1024 threads, 256 are of complete clusters.
    most: dict[str, Any] = {"cluster": (16, 1, 1), "block": (1024, 1, 1), "large": True, "cooperative": True}
    assert (answer(grid=(256, 1, 1), **most), answer(grid=(272, 1, 1), **most)) == (0, COOPERATIVE_TOO_LARGE)
