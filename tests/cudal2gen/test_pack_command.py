"""Proves what the verb ``pack`` writes, what it refuses, and that candidates are raced where there is no compiler."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack, results
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog, compiler
from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Measurements
from kernelproof import emulator
from kernelproof.ground import toolchain
from tests.cudal2gen import measured, packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.test_choice import RATIOS, measurements_of
from tests.cudal2gen.test_cli import error, run
from tests.packages import require

GPU = "a100"


@pytest.fixture(autouse=True)
def _store_verdicts_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves the store: packing stores verdicts of kernels that it executes, and those of tests do not belong into the
    checkout."""
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path_factory.mktemp("results")))


@pytest.mark.slow
def test_the_command_writes_packs(tmp_path: Path) -> None:
    env = {"CUDAL2GEN_RESULTS": str(tmp_path)}
    out = tmp_path / "pack"
    done = run("pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", "--out", str(out), env=env)
    assert done.returncode == 0, done.stderr
    assert "1 kernel, 1 binary" in done.stdout
    assert "0 of 0 measured problems won" in done.stdout
    opened = pack.open_pack(out)
    assert opened.table.kernels[0].sizes.text == "64_64_64"
    (verdict,) = results.latest(tmp_path / "verdicts.jsonl").values()
    assert verdict.passed
    assert verdict.on == results.IN_MACHINE_CODE
    assert verdict.machine_code == results.MachineCode(
        cubin=opened.facts["files"][f"kernels/{verdict.digest}/kernel.cubin"], ptxas="13.0.88"
    )
    assert opened.facts["machine_code"] == {verdict.digest: f"right in {len(verdict.cases)} cases, ptxas 13.0.88"}
    variants = ("--also", "bias_n", "--also", "bias_n+silu", "--also", "strided", "--out", str(tmp_path / "more"))
    more = run("pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", *variants, env=env)
    assert "4 kernels, 4 binaries" in more.stdout, more.stderr
    kinds = [kernel.record.problem.suffix for kernel in pack.open_pack(tmp_path / "more").table.kernels]
    assert kinds == ["", " bias_n", " bias_n+silu", " batched"]
    assert "--also 'silly' is no part of a fusion" in error(
        "pack", "--mnk", "64_64_64", "--also", "silly", "--out", str(tmp_path / "x"), env=env
    )
    again = error("pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", "--out", str(out), env=env)
    assert "is there already" in again
    assert "no measurements for a100" in error("pack", "--out", str(tmp_path / "x"), env=env)
    assert "'--gpu': 'v100'" in error("pack", "--gpu", "v100", "--out", str(tmp_path / "x"))
    assert "give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE" in error(
        "pack", "--all", "--mnk", "1_1_1", "--out", str(tmp_path / "x")
    )
    wheel = run(
        "pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", "--out", str(tmp_path / "any.whl"), env=env
    )
    assert wheel.stdout.startswith(f"{tmp_path}/cudal2gen_a100-")
    hub = tmp_path / "hub"
    repository = run(
        "pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", "--format", "hf", "--out", str(hub), env=env
    )
    assert repository.returncode == 0, repository.stderr
    assert "1 kernel, 1 binary" in repository.stdout
    assert pack.open_pack(hub / "build" / "torch-cuda" / "pack").table.kernels[0].sizes.text == "64_64_64"
    assert "setup_float16_f16_tn_64_64_64" in (hub / "benchmarks" / "benchmark.py").read_text()


@pytest.mark.slow
def test_wrong_machine_code_is_not_packed(tmp_path: Path) -> None:
    """The cubin is not the one that ptxas made of the PTX, but that of the same kernel without its barriers."""
    env = {"CUDAL2GEN_RESULTS": str(tmp_path / "results")}
    chosen = ("--mnk", "64_64_256", "--acc", "f16", "--layout", "tn")
    (tmp_path / compiler.launcher().parent.name).symlink_to(compiler.launcher().parent)
    folder = Path(json.loads(run("--build-dir", str(tmp_path), "build", *chosen, "--json").stdout)["directory"])
    text = re.sub(r"bar\.sync[^;]*;|barrier\.sync[^;]*;", "", (folder / "kernel.ptx").read_text())
    (tmp_path / "faulty.ptx").write_text(text)
    command = [toolchain.discover().ptxas, "-arch=sm_80", tmp_path / "faulty.ptx", "-o", folder / "kernel.cubin"]
    subprocess.run(command, check=True)
    done = run("--build-dir", str(tmp_path), "pack", *chosen, "--out", str(tmp_path / "pack"), env=env)
    assert done.returncode == 1
    assert "its machine code is wrong" in done.stderr
    assert not (tmp_path / "pack").exists()


@pytest.mark.slow
def test_the_command_packs_what_was_measured_faster(tmp_path: Path) -> None:
    """Of two measured problems it packs the one that is won, and a problem off the grid by the record that bench made
    for it."""
    catalogued = catalog.load()
    problems = [Problem(gpu="a100", acc="f16", layout="tn", m=m, n=64, k=64) for m in (64, 61)]
    records = [catalog.nearest(problem, catalogued).record for problem in problems]
    digests = [artifact.digest for artifact in compiler.build(records)]
    environment = measured.H200.model_copy(update={"gpu": "a100"})
    measurements = []
    for record, digest, ratio in zip(records, digests, (0.9, 1.5), strict=True):
        measurements += measurements_of(record, dict.fromkeys(RATIOS, ratio), gpu="a100", digest=digest)
    file = measured.write(Measurements({environment.id: environment}, measurements), tmp_path / "m.jsonl")
    done = run("pack", "--gpu", "a100", str(file), "--out", str(tmp_path / "pack"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("1 of 2 measured problems won\n")
    table = pack.open_pack(tmp_path / "pack").table
    assert [(kernel.digest, kernel.sizes.text) for kernel in table.kernels] == [(digests[1], "61_64_64")]
    text = run("explain", "--mnk", "61_64_64", "--from", str(tmp_path / "pack")).stdout
    assert "61_64_64 was measured: 1.500x" in text
    lost = run("explain", "--mnk", "64_64_64", "--from", str(tmp_path / "pack")).stdout
    assert lost.startswith("runs     torch.matmul\nbecause  64_64_64 was measured: 0.900x")
    assert "which is not faster beyond noise" in lost
    other = error("explain", "--mnk", "64_64_64", "--gpu", "h200", "--from", str(tmp_path / "pack"))
    assert "is for a100, not h200" in other


WHOLE = packed.RECORDS["whole"]


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """A catalog of two records for the A100 and one of another GPU."""
    records = [packed.RECORDS["predicated"], packed.RECORDS["f16"], WHOLE.at(WHOLE.problem.revised(gpu="rtx3090"))]
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "few.jsonl"))
    catalog.save(records, tmp_path / "few.jsonl")
    return records


def test_candidates_are_all_records_and_stand_ins_for_what_torch_asks(few: list[Record]) -> None:
    every = Selection(gpu=GPU, ab="any", d="any", acc="any", layout="any")
    kinds = [(record.ab, record.d, record.acc, record.layout, record.mnk) for record in every.candidates()]
    assert sorted(kinds) == sorted(
        [("f16", "same", "f16", "tn", "64_64_128")]
        + [(ab, "same", "f32", layout, "64_64_128") for ab in ("f16", "bf16") for layout in ("tn", "nn")]
    )
    wide = Selection(gpu=GPU, ab="f16", d="f32", acc="any", layout="tn")
    assert {(record.d, record.acc) for record in wide.candidates()} == {("f32", "f32")}


@pytest.mark.slow
@pytest.mark.torch
def test_a_pack_of_candidates_claims_nothing_and_is_raced(
    few: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack is made with a compiler. On a machine without one, a call races its kernels."""
    torch = require("torch")
    from cudal2gen.operators import emulated as emulated_operators
    from tests.cudal2gen.racing import Clock, ClockedDevice

    out = tmp_path / "pack"
    env = {"CUDAL2GEN_CATALOG": str(tmp_path / "few.jsonl"), "CUDAL2GEN_RESULTS": str(tmp_path)}
    done = run(
        "pack", "--candidates", "--layout", "tn", "--where", "ab=f16", "--also", "ptx", "--out", str(out), env=env
    )
    assert done.returncode == 0, done.stderr
    assert "2 kernels, 2 binaries" in done.stdout
    assert "candidates, nothing claimed" in done.stdout
    opened = pack.open_pack(out)
    assert opened.facts["problems_measured"] == 0
    assert opened.table.rows == []
    emulator.runtime_path()
    for name in ("PATH", "KERNELPROOF_NVCC", "CUTLASS_PATH"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))

    def compute(mode: str, device: OperatorDevice) -> Any:
        monkeypatch.setenv("CUDAL2GEN_AUTOTUNE", mode)
        a, b = (device.empty(torch.empty(0, dtype=torch.float16), 64, 128).fill_(1) for _ in range(2))
        with emulated_operators(device, [opened]):
            return cudal2gen.matmul(a, b.t())[0, 0].item()

    with EmulatedDevice(packed.RECORDS["predicated"]) as emulated_device:
        times_us = {kernel.record.name: 200.0 for kernel in opened.table.kernels}
        device = ClockedDevice(emulated_device, Clock(emulated_device, times_us, 300.0))
        assert compute("off", device) == 128
        assert not emulated_device.session.launches
        assert compute("once", device) == 128
        launches = [launch.kernel for launch in emulated_device.session.launches]
        assert set(launches) == {packed.RECORDS["predicated"].name}
        rows = results.measurements(results.store("autotune")).measurements
        assert [row.problem.mnk for row in rows] == ["64_64_128", "33_64_128"]
        assert {row.digest for row in rows} == {opened.table.kernels[1].digest}
        assert compute("once", device) == 128
        assert len(emulated_device.session.launches) == len(launches) + 1, "the next process takes what was raced"
