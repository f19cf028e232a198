"""Proves what the stand-in runtime returns to launchers of kernels with clusters and TMA."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import HOPPER, Device, LaunchRefused, Memory
from kernelproof.emulator.hopper.bulk import decode
from kernelproof.emulator.host.cuda import (
    INVALID_CLUSTER,
    INVALID_CONFIGURATION,
    INVALID_VALUE,
    NO_IMAGE,
    NOT_SUPPORTED,
)
from kernelproof.emulator.host.standin import standin
from tests.kernelproof.emulator.hopper import gemm
from tests.kernelproof.emulator.test_host import Config, Runtime

# A kernel that does only what ``body`` says.
EMPTY = "\n.version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k() {{ {body} ret; }}\n"


class Encoder:
    """cuTensorMapEncodeTiled, looked up like a launcher does."""

    def __init__(self) -> None:
        self.map = np.zeros(256, np.uint8)
        self.at = -(-self.map.ctypes.data // 64) * 64
        function, status = ctypes.c_void_p(), ctypes.c_int(7)
        find = standin().cudaGetDriverEntryPointByVersion
        assert (
            find(b"cuTensorMapEncodeTiled", ctypes.byref(function), 12000, ctypes.c_uint64(0), ctypes.byref(status))
            == 0
        )
        assert status.value == 0
        kinds = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4]
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function.value or 0)

    def __call__(self, **changed: Any) -> int:
        """The code of a call whose arguments are right except for ``changed``. ``offset``: bytes by which the map is
        misaligned. The map is then at the address ``at``."""
        a: dict[str, Any] = {
            "kind": 6, "rank": 2, "address": 1 << 20, "dims": (64, 100), "strides": (128,), "box": (64, 8),
            "steps": (1, 1), "interleave": 0, "swizzle": 3, "promotion": 2, "fill": 0, "offset": 0, **changed,
        }  # fmt: skip
        arrays = [
            np.array(a["dims"], np.uint64), np.array(a["strides"], np.uint64), np.array(a["box"], np.uint32),
            np.array(a["steps"], np.uint32),
        ]  # fmt: skip
        return int(
            self.function(
                self.at + a["offset"], a["kind"], a["rank"], a["address"], *(x.ctypes.data for x in arrays),
                a["interleave"], a["swizzle"], a["promotion"], a["fill"],
            )
        )  # fmt: skip


# Arguments of ``Encoder`` that cuTensorMapEncodeTiled refuses.
REFUSED = [
    {"address": (1 << 20) + 8}, {"strides": (120,)}, {"strides": (1 << 40,)}, {"box": (64, 257)}, {"box": (0, 8)},
    {"box": (128, 8)}, {"box": (12, 8), "swizzle": 0}, {"steps": (1, 0)}, {"steps": (1, 9)}, {"rank": 0}, {"rank": 6},
    {"dims": (0, 100)}, {"kind": 99}, {"swizzle": 9}, {"offset": 32},
]  # fmt: skip


def test_tensor_maps_are_checked_and_kept() -> None:
    with emulator.session(device=HOPPER) as session:
        encode = Encoder()
        assert encode() == 0
        map_ = decode(ctypes.string_at(encode.at, 128))
        assert map_ is not None
        assert (map_.dims, map_.strides, map_.box, map_.swizzle, map_.address) == (
            (64, 100),
            (128,),
            (64, 8),
            3,
            1 << 20,
        )
        assert map_.nbytes == 1024
        for i, changed in enumerate(REFUSED):
            assert encode(**changed) == 1, changed
            assert len(session.refusals) == i + 1
        assert standin().cudaGetLastError() == 0
        unknown = ctypes.c_void_p()
        assert standin().cudaGetDriverEntryPointByVersion(b"cuNothing", ctypes.byref(unknown), 12000, 0, None) == 500


# Settings of launches that are refused, with the code of the refusal.
CLUSTERS = [
    ({"grid": 6, "cluster": 4}, INVALID_CONFIGURATION), ({"grid": (2, 3), "cluster": (1, 2)}, INVALID_CONFIGURATION),
    ({"grid": 32, "cluster": 32}, INVALID_CLUSTER), ({"grid": 1, "device": Device()}, NO_IMAGE),
    ({"grid": 1, "shared_bytes": 232449}, INVALID_VALUE),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CLUSTERS)))
def test_launches_that_are_refused(case: int) -> None:
    settings, code = CLUSTERS[case]
    settings = {"block": 32, "device": HOPPER, **settings}
    with pytest.raises(LaunchRefused) as caught:
        emulator.load(EMPTY.format(body="")).launch("k", args=[], memory=Memory(), **settings)
    assert caught.value.code == code


def test_clusters_need_compute_capability_9() -> None:
    text = EMPTY.format(body="").replace("sm_90a", "sm_80")
    with pytest.raises(LaunchRefused) as caught:
        emulator.load(text).launch("k", grid=4, cluster=2, block=32, args=[], memory=Memory())
    assert caught.value.code == NOT_SUPPORTED


def test_largest_shared_memory_and_clusters() -> None:
    program = emulator.load(EMPTY.format(body="barrier.cluster.arrive; barrier.cluster.wait;"))
    for cluster, shared in ((16, 0), (1, 232448)):
        result = program.launch(
            "k", grid=16, block=32, args=[], memory=Memory(), cluster=cluster, shared_bytes=shared, device=HOPPER
        )
        assert result.reports == []


def cluster_launch(x: int) -> tuple[Config, Any]:
    """The configuration of 16 CTAs in clusters of ``x`` along x, and its attributes, which must outlive it."""
    # Two cudaLaunchAttribute of 72 bytes, with the value from byte 8 on: 4 is the cluster's dimension, and 6
    # programmatic stream serialization.
    attributes = np.zeros(144, np.uint8)
    attributes[0] = 4
    attributes[8:20].view(np.uint32)[:] = x, 1, 1
    attributes[72] = 6
    attributes[80] = 1
    return Config((16, 1, 1), (32, 1, 1), 0, None, attributes.ctypes.data, 2), attributes


def test_clusters_above_eight_need_an_attribute(tmp_path: Path) -> None:
    (tmp_path / "kernel.ptx").write_text(EMPTY.format(body="barrier.cluster.arrive; barrier.cluster.wait;"))
    with emulator.session(device=HOPPER) as session:
        runtime = Runtime()
        code, kernel = runtime.kernel(tmp_path / "kernel.cubin", "k")
        assert code == 0
        number = ctypes.c_int()
        # CTAs of a cluster, and the codes without and with attribute 14, NonPortableClusterSizeAllowed.
        for size, before, after in ((4, 0, 0), (16, 912, 0), (32, 9, 9)):
            config, _buffers = cluster_launch(size)
            runtime.c.cudaKernelSetAttributeForDevice(kernel, 14, 0, 0)
            assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, None) == before
            runtime.c.cudaKernelSetAttributeForDevice(kernel, 14, 1, 0)
            assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, None) == after
            if after == 0:
                query = runtime.c.cudaOccupancyMaxActiveClusters
                assert query(ctypes.byref(number), kernel, ctypes.byref(config)) == 0
                # 32 CTAs fit on an SM.
                assert number.value == 132 * 32 // size
    assert session.reports == []
    assert any("NonPortableClusterSizeAllowed" in why for why in session.refusals)


def test_a_subset_of_ctas_is_widened_to_clusters() -> None:
    program = emulator.load(EMPTY.format(body="barrier.cluster.arrive; barrier.cluster.wait;"))
    result = program.launch(
        "k", grid=(4, 4), block=32, args=[], memory=Memory(), cluster=(2, 2), ctas=[5], device=HOPPER
    )
    assert result.reports == []
    assert result.ctas is not None
    assert sorted(result.ctas) == [0, 1, 4, 5]


@pytest.mark.slow
def test_misaligned_problem_is_refused_by_the_driver() -> None:
    run = gemm("tn_f32_1x1", (64, 64, 36))
    assert run.code == 1
    assert "stride of 72 bytes" in run.session.refusals[0]
    assert run.session.launches == []
