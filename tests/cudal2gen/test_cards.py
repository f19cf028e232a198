"""Proves which kernels and measurements count on a card that has no records of its own, and what users are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.generation import compiler
from cudal2gen.kernel import Problem, Record
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import Gpu, GpuError
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.launch.operands import draw
from cudal2gen.results.choice import Table, TableKernel
from kernelproof import emulator
from kernelproof.emulator.host import launch_limits
from kernelproof.emulator.host.cuda import NO_IMAGE, LaunchRefused
from kernelproof.emulator.state.options import Device
from kernelproof.ground import chips
from kernelproof.ground.chips import GPUS, CardFacts
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, card_of
from tests.cudal2gen.paths import PATHS, small
from tests.cudal2gen.strategies import tcgen05, warp_mma, wgmma
from tests.packages import require

torch = require("torch")

from tests.cudal2gen.emulated_operators import device  # noqa: E402
from tests.cudal2gen.racing import (  # noqa: E402
    A100,
    NAMES,
    Clock,
    ClockedDevice,
    draw_product,
    measurements,
    simulated_process,
    store,
)
from tests.cudal2gen.test_gpu import h200  # noqa: E402

__all__ = ["device", "h200", "store"]  # fixtures
pytestmark = pytest.mark.torch
# Records with code for a family of chips, and the capability of a later chip of the family.
OF_FAMILIES = [(PATHS["tensor"], (10, 3)), (PATHS["warps"], (12, 1))]
BUILT_AHEAD = [record for record, _ in OF_FAMILIES]

# From NVIDIA's data sheets: the driver's name, the compute capability and the SMs; then the model whose records the
# card takes.
CARDS = [
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, "h100"),
    ("NVIDIA H100 PCIe", (9, 0), 114, "h100"),
    ("NVIDIA H100 NVL", (9, 0), 132, "h100"),
    ("NVIDIA H800", (9, 0), 132, "h100"),
    ("NVIDIA GH200 480GB", (9, 0), 132, "h100"),
    ("NVIDIA H20", (9, 0), 78, "h20"),
    ("NVIDIA H200 MIG 1g.18gb", (9, 0), 16, "h20"),
    ("NVIDIA A800-SXM4-80GB", (8, 0), 108, "a100"),
    ("NVIDIA A40", (8, 6), 84, "rtx3090"),
    ("NVIDIA A10", (8, 6), 72, "rtx3090"),
    ("NVIDIA RTX A6000", (8, 6), 84, "rtx3090"),
    ("Orin", (8, 7), 16, "rtx3090"),
    ("NVIDIA L4", (8, 9), 58, "rtx4090"),
    ("NVIDIA L40", (8, 9), 142, "l40s"),
    ("NVIDIA GeForce RTX 4080", (8, 9), 76, "rtx4090"),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, "l40s"),
    ("NVIDIA GB200", (10, 0), 148, "b200"),
    ("NVIDIA B300 SXM6 AC", (10, 3), 148, "b200"),
    ("NVIDIA GB10", (12, 1), 48, "rtx5090"),
    ("NVIDIA GeForce RTX 5080", (12, 0), 84, "rtx5090"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), 188, "rtxpro6000"),
    ("NVIDIA Thor", (11, 0), 20, None),
    ("Tesla V100-SXM2-16GB", (7, 0), 80, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "capability", "sms", "nearest"), CARDS)
def test_a_card_takes_the_records_of_the_nearest_model_whose_code_it_runs(
    name: str, capability: tuple[int, int], sms: int, nearest: str | None
) -> None:
    card = CardFacts.of(name, capability, sms)
    models = card.stand_ins(GPUS)
    assert models[:1] == ([nearest] if nearest else [])
    assert all(chips.runs(GPUS[model].capability.sm, capability) for model in models)
    assert card.text == f"{name} (sm_{capability[0]}{capability[1]}, {sms} SMs)"


def test_a_cubin_runs_where_its_suffix_says() -> None:
    capabilities = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (10, 9), (11, 0), (12, 0), (12, 1)]
    expected = {
        "sm_80": capabilities[:4], "sm_86": capabilities[1:4], "sm_89": capabilities[3:4], "sm_90a": [(9, 0)],
        "sm_100": [(10, 0), (10, 3), (10, 9)], "sm_100a": [(10, 0)], "sm_103a": [(10, 3)], "sm_120a": [(12, 0)],
        # A family has only its known members; unknown capabilities are not guessed to belong to it.
        "sm_100f": [(10, 0), (10, 3)], "sm_103f": [(10, 3)], "sm_110f": [(11, 0)], "sm_120f": [(12, 0), (12, 1)],
    }  # fmt: skip
    for arch, able in expected.items():
        assert [each for each in capabilities if chips.runs(arch, each)] == able, arch
        # PTX for a target with a suffix runs on the emulator's devices that run its cubin; other PTX runs on all later
        # devices.
        of_ptx = able if arch[-1] in "af" else [each for each in capabilities if each >= able[0]]
        assert [each for each in capabilities if launch_limits.runs(arch, Device(capability=each))] == of_ptx, arch
    with pytest.raises(LaunchRefused, match=r"sm_100f.*sm_110") as caught:
        launch_limits.check_target("sm_100f", Device(capability=(11, 0)))
    assert caught.value.code == NO_IMAGE


def test_a_part_of_a_card_is_another_card() -> None:
    assert card_of("h200").model == "h200"
    assert CardFacts.of("NVIDIA H200", (9, 0), 66).model is None, "as MPS can limit it"
    assert CardFacts.of("NVIDIA A40", (8, 6), 84).smem_block_bytes == 99 << 10
    assert CardFacts.of("Orin", (8, 7), 16, 163 << 10).smem_block_bytes == 163 << 10


def table(*kernels: TableKernel) -> Table:
    """A pack's table of these kernels, each measured as twice as fast as torch."""
    rows = [packed.row(kernel.record, number, 2.0) for number, kernel in enumerate(kernels)]
    return Table(str(kernels[0].fields["gpu"]), list(kernels), rows)


def kernel(record: object) -> TableKernel:
    """A record's kernel in a table, with its name for a digest."""
    return TableKernel(record.name, record.model_dump(mode="json"))  # type: ignore[attr-defined]


def test_a_table_serves_another_card_without_its_measurements() -> None:
    own = table(kernel(wgmma()), kernel(small(gpu="h200", acc="f32", m=96, n=96, k=64)))
    assert own.on(card_of("h200")) is own
    on_h100 = own.on(CardFacts.of("NVIDIA H100 PCIe", (9, 0), 114))
    assert ([each.digest for each in on_h100.kernels], on_h100.rows) == ([each.digest for each in own.kernels], [])
    problem = own.kernels[1].record.problem
    operands = LaunchOperands.packed("tn", own.kernels[1].sizes)
    assert own.choose(problem, operands).kernel == 1
    choice = on_h100.choose(problem, operands)
    assert (choice.kernel, choice.short) == (None, "nothing was measured on this card; the kernels are h200's")
    assert on_h100.choose(problem, operands, "kernel").kernel == 1
    for capability, families in (((10, 0), []), ((8, 0), []), ((9, 0), ["sm90_wgmma", "sm80_multistage"])):
        card = CardFacts.of("NVIDIA Alien", capability, 100)
        assert [each.fields["family"] for each in own.on(card).kernels] == families, capability
    # Plain code runs on later capabilities with the same major number, and code for a family on those of the family.
    for name, capability, sms, records, able in (
        ("NVIDIA B300 SXM6 AC", (10, 3), 148, [small(gpu="b200", acc="f32"), tcgen05()], ["sm_100", "sm_100f"]),
        ("NVIDIA GB10", (12, 1), 48, [small(gpu="rtx5090", acc="f32"), warp_mma()], ["sm_120", "sm_120f"]),
        ("NVIDIA Thor", (11, 0), 20, [small(gpu="b200", acc="f32"), tcgen05()], []),
    ):
        served = table(*map(kernel, records)).on(CardFacts.of(name, capability, sms))
        assert [each.record.arch for each in served.kernels] == able, name


@pytest.mark.parametrize(("record", "capability"), OF_FAMILIES, ids=["B300", "GB10"])
def test_code_for_a_family_computes_on_its_later_card(record: Record, capability: tuple[int, int]) -> None:
    (artifact,) = compiler.build([record])
    device = replace(Device.of(record.target), capability=capability, sm_count=2, threads_per_sm=record.threads)
    rng, memory, sizes = np.random.default_rng(1), emulator.Memory(), (record.m, record.n, record.k)
    a, b = (rng.integers(-2, 3, (extent, record.k)).astype(np.float16) for extent in (record.m, record.n))
    with emulator.session(memory, device) as session:
        d = memory.upload(np.zeros((record.m, record.n), np.float16), "output")
        kernel = OpenKernel(compiler.launcher(), artifact.directory, record.launch_options, emulator.runtime_path())
        workspace = memory.allocate(max(1, kernel.workspace_bytes(*sizes)))
        operands = (memory.upload(a).address, record.k, memory.upload(b).address, record.k, d.address, record.n)
        kernel.launch(*operands, *sizes, workspace.address)
        kernel.close()
    assert session.errors == []
    np.testing.assert_array_equal(d.download(), (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16))


def test_a_kernel_needs_the_shared_memory_that_the_card_has() -> None:
    large, little = small(acc="f32", m=128, n=128, k=256, bm=128, bn=128, bk=64, stages=4), packed.RECORDS["whole"]
    assert large.smem_bytes > 99 << 10 > little.smem_bytes
    a40 = table(kernel(large), kernel(little)).on(CardFacts.of("NVIDIA A40", (8, 6), 84))
    assert [each.runs for each in a40.kernels] == [False, True]
    sizes = a40.kernels[0].sizes
    packed_operands = LaunchOperands.packed("tn", sizes)
    assert a40.kernels[0].use(sizes, packed_operands) is None
    assert a40.choose(large.problem, packed_operands, "kernel").kernel != 0


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack whose first kernel was measured as faster on an A100."""
    measured = packed.table([packed.RECORDS["predicated"], packed.RECORDS["whole"]], {0: 2.0})
    return pack.open_pack(packed.folder(measured, tmp_path_factory.mktemp("packs") / "a100"))


# A card of no model, and the environment of measurements on it.
A40 = CardFacts.of("NVIDIA A40", (8, 6), 84)
ITS_ENVIRONMENT = A100.model_copy(
    update={"id": "a40", "gpu": "", "name": A40.name, "capability": "8.6", "sms": 84, "max_sm_mhz": 1740}
)


def test_another_card_computes_by_torch_and_says_why(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    a, b, expected = draw_product(device, (64, 64, 128))
    with simulated_process(opened_pack, ClockedDevice(device, None), "off") as own:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert own.stats()["kernel"] == {NAMES["predicated"]: 1}, "measured as faster on this model"
    with simulated_process(opened_pack, ClockedDevice(device, None, A40), "off") as other:
        with pytest.warns(UserWarning, match=r"NVIDIA A40 \(sm_86, 84 SMs\) has no pack of its own; kernels of a100's"):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        reason = "nothing was measured on this card; the kernels are a100's"
        assert other.stats() == {"kernel": {}, "torch": {reason: 1}}
        assert cudal2gen.operators.explain(a, b.t()) == f"torch: 64_64_128: {reason}"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with cudal2gen.operators.prefer("kernel"):
                assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert other.stats()["kernel"] == {NAMES["predicated"]: 1}


@pytest.mark.slow
def test_another_card_races_the_kernels_under_its_own_name(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    a, b, expected = draw_product(device)
    clock = Clock(device, {NAMES["predicated"]: 200.0}, 300.0)
    clock.environment = ITS_ENVIRONMENT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with simulated_process(opened_pack, ClockedDevice(device, clock, A40)) as dispatcher:
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            assert dispatcher.stats()["kernel"] == {NAMES["predicated"]: 1}
    assert {row.environment for row in measurements()} == {"a40"}
    # Measurements of the A40 must not count for the A100.
    with simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 300.0)), "off") as own:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert own.stats()["kernel"] == {}


def test_a_pack_of_its_own_comes_first_and_the_nearest_next(opened_pack: pack.Pack) -> None:
    facts = {
        model: replace(opened_pack, facts=opened_pack.facts | {"gpu": model}) for model in ("a100", "rtx3090", "h200")
    }
    a100 = pack.serving(facts, card_of("a100"))
    assert a100 is facts["a100"], "as it is, its measurements with it"
    for card, model in ((A40, "rtx3090"), (CardFacts.of("NVIDIA A800", (8, 0), 108), "a100")):
        served = pack.serving(facts, card)
        assert served is not None
        assert (served.gpu, served.card) == (model, card)
        assert served.table.rows == []
    # A pack for the right capability serves nothing without a kernel for it. These kernels are for sm_80.
    assert pack.serving(facts, CardFacts.of("NVIDIA H100 PCIe", (9, 0), 114)) is None


# A driver library with two cards. The numbers after ``case`` stand for attributes of a device: 75 and 76 for the two
# parts of its compute capability, 16 for the number of its SMs, 97 for the most bytes of shared memory of a block.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device ? "NVIDIA A40" : "NVIDIA A100-SXM4-80GB", size);
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = 8; return 0;
    case 76: *value = device ? 6 : 0; return 0;
    case 16: *value = device ? 84 : 108; return 0;
    case 97: *value = device ? 99 << 10 : 163 << 10; return 0;
  }
  return 1;
}
"""


@pytest.mark.slow
def test_doctor_says_which_records_and_which_pack_serve_each_card(opened_pack: pack.Pack, tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True, timeout=300
    )
    done = subprocess.run(
        [sys.executable, "-m", "cudal2gen", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "CUDAL2GEN_PACK": str(opened_pack.directory)},
    )
    assert json.loads(done.stdout)["gpu"] == {
        "ok": True,
        "detail": "NVIDIA A100-SXM4-80GB (sm_80, 108 SMs): records of a100, the pack of a100; "
        "NVIDIA A40 (sm_86, 84 SMs): an unknown card, records of rtx3090, kernels of a100's pack, of which nothing was "
        "measured on this card; the driver supports CUDA up to 13.0",
        "needed": False,
    }


@pytest.mark.parametrize(("fusion", "batch"), [
    *product(("none", "residual", "silu+gate"), ("none", "strided", "grouped")), ("aux+relu", "none"),
])  # fmt: skip
def test_operands_are_refused_if_their_matrices_exceed_free_memory(
    fusion: str, batch: str, h200: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups share one A and one D. What torch has reserved is free for them, and 2 GiB are left for libraries."""
    plain = Problem(gpu="h200", acc="f32", layout="tn", m=48, n=32, k=72)
    problem = plain.revised(fusion=fusion, batch=batch)
    products, count, reserved = (1 if batch == "none" else 3), 2, 1 << 20
    sets = draw(problem, count, torch.Generator().manual_seed(0), "cpu", products)
    matrices = [(one.a, one.b, one.b_nn, one.d, one.c, one.aux) for one in sets]
    held = sum(part.numel() * part.element_size() for one in matrices for part in one if part is not None)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: seed))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(gpu, "draw", lambda *arguments: arguments)
    h200.device = "card"
    for missing in (0, 1):
        free = held + (2 << 30) - reserved - missing
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 141 << 30))
        if missing:
            with pytest.raises(GpuError, match="2 sets of operands need"):
                h200.operands(problem, count, 7, products)
        else:
            drawn: Any = h200.operands(problem, count, 7, products)
            assert drawn == (problem, count, 7, "card", products)
