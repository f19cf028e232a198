"""Packs: what is in them, the same bytes again, what is refused, wheels in a fresh environment, and the C face."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import cudal2gen
from cudal2gen import pack, results
from cudal2gen.cli import machine
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog, compiler
from cudal2gen.kernel import Problem, Record
from cudal2gen.kernel.launch import Operands
from cudal2gen.launch import launcher
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.pack import PackError
from cudal2gen.pack.abi import ABI, SINCE
from cudal2gen.pack.facts import as_json
from cudal2gen.results import Measurements
from cudal2gen.results.choice import Row, Table
from kernelproof import emulator
from kernelproof.emulator.host.kernel_calls import KernelCalls
from kernelproof.ground import toolchain
from kernelproof.ground.chips import CardFacts
from kernelproof.sass.stripping import without_lines
from tests.cudal2gen import measured, packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.test_choice import EVEN, campaign
from tests.cudal2gen.test_cli import error, run
from tests.packages import require

GPU = "a100"


@pytest.fixture(scope="module")
def table() -> Table:
    return packed.table(list(packed.RECORDS.values()), {0: 2.0, 1: 0.5})


@pytest.fixture(scope="module")
def files(table: Table) -> dict[str, bytes]:
    return packed.files(table)


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path) -> Path:
    return pack.write_folder(files, tmp_path / "pack")


# --- what is in one ---


def test_a_pack_says_what_it_is_for(table: Table, folder: Path) -> None:
    opened = pack.open_pack(folder)
    facts = opened.facts
    assert (facts["gpu"], facts["sku"], facts["sm"]) == ("a100", ["NVIDIA A100"], "sm_80")
    assert (facts["cuda_range"], facts["driver_minimum"]) == (">=13.0,<14", "580")
    assert facts["cuda"].startswith("13.")
    assert (facts["kernels"], facts["problems_measured"], facts["problems_won"], facts["ptx"]) == (6, 2, 1, True)
    assert opened.table.dump() == table.dump()
    assert "MIT License" in (folder / "LICENSE").read_text()
    assert "Redistributions in binary form must reproduce" in (folder / "LICENSE-CUTLASS").read_text()
    assert opened.library.is_file()


def test_binaries_are_there_once(files: dict[str, bytes]) -> None:
    twice = packed.table([packed.RECORDS["predicated"], packed.RECORDS["predicated"].model_copy(update={"m": 96})])
    assert len(twice.kernels) == 2
    names = [name for name in packed.files(twice, with_ptx=False) if name.endswith(".cubin")]
    assert len(names) == 1
    assert not any(name.endswith(".ptx") for name in packed.files(twice, with_ptx=False))
    assert sum(name.endswith(".ptx") for name in files) == 6


def test_cubins_lack_the_lines_of_those_that_were_built(table: Table, files: dict[str, bytes]) -> None:
    for artifact in compiler.build([kernel.record for kernel in table.kernels]):
        built, packed_cubin = artifact.cubin.read_bytes(), files[f"kernels/{artifact.digest}/kernel.cubin"]
        assert packed_cubin == without_lines(built)
        assert len(packed_cubin) < len(built) / 2


def test_the_same_again_has_the_same_bytes(table: Table, files: dict[str, bytes], tmp_path: Path) -> None:
    assert packed.files(Table.load(table.dump())) == files
    first, second = (pack.write_wheel(files, tmp_path / name / "x.whl") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert first.name == second.name


def test_only_what_wins_is_chosen(table: Table) -> None:
    chosen = table.chosen()
    assert [kernel.sizes.text for kernel in chosen.kernels] == ["64_64_128"]
    assert [row.kernel for row in chosen.rows] == [0, None], "the lost problem stays as a reason"
    with pytest.raises(PackError, match="no kernel of a100 was measured faster"):
        pack.contents(packed.table([packed.RECORDS["whole"]]).chosen(), {}, Path("/nowhere"), "13.0")


def test_what_is_there_is_not_overwritten(folder: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(PackError, match="is there already"):
        pack.write_folder(files, folder)


# --- what is refused ---


def changed(folder: Path, name: str) -> Path:
    path = folder / name if (folder / name).exists() else next(folder.glob(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


NAMES = [
    "table.json",
    "libcudal2gen.so",
    "libcudal2gen_torch.so",
    "pack.txt",
    "cudal2gen.h",
    "kernels/*/kernel.cubin",
    "kernels/*/kernel.launch",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_was_altered_is_named(folder: Path, name: str) -> None:
    path = changed(folder, name)
    with pytest.raises(PackError, match=f"{path} is truncated or was altered: its digest is not the pack's"):
        pack.open_pack(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_off_or_missing_is_named(folder: Path, name: str) -> None:
    path = next(folder.glob(name))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PackError, match=f"{path} is truncated"):
        pack.open_pack(folder)
    path.unlink()
    with pytest.raises(PackError, match=f"{path}: no such file; the pack is incomplete"):
        pack.open_pack(folder)


def test_the_list_of_files_itself_is_checked(folder: Path) -> None:
    path = folder / "pack.json"
    whole = path.read_text()
    path.write_text(whole.replace('"gpu": "a100"', '"gpu": "h200"'))
    with pytest.raises(PackError, match="was altered: its digest is not its own"):
        pack.open_pack(folder)
    path.write_text(whole[:-20])
    with pytest.raises(PackError, match="truncated or was altered: not JSON: "):
        pack.open_pack(folder)
    path.write_text("[]")
    with pytest.raises(PackError, match="no JSON object"):
        pack.open_pack(folder)
    path.unlink()
    with pytest.raises(PackError, match="the pack is incomplete"):
        pack.open_pack(folder)
    with pytest.raises(PackError, match="no pack at"):
        pack.open_pack(folder / "elsewhere")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 2, "has format 2, this cudal2gen .* reads 1: pip install --upgrade cudal2gen"),
        ("machine", "sparc", "on sparc"),
        (
            "abi",
            {"table": 2, "library": 1},
            "needs table ABI 2 of .*, this .* reads up to 1: pip install --upgrade",
        ),
        ("abi", {"table": 1, "library": 9}, "needs library ABI 9 of .* or make the pack anew with this version"),
        ("abi", {"table": 0, "library": 1}, "needs table ABI 0 of .*, this .* reads from 1 on: make it anew"),
        ("abi", {"table": 1}, "is no number for each of table and library"),
        ("abi", 7, "abi=7: is no number for each"),
        ("fields", {"sm99_new": []}, 'needs the family "sm99_new" of .*, unknown to this .*: pip install --upgrade'),
        ("fields", {"rows": ["m", "watts"]}, 'needs the field "watts" of rows of .*: pip install --upgrade'),
        ("fields", {"sm80_direct": ["m", "bm", "hints"]}, 'needs the field "hints" of sm80_direct'),
        ("fields", {"rows": "m"}, "are no lists of names"),
    ],
)
def test_a_pack_of_another_kind_is_refused(
    folder: Path, files: dict[str, bytes], field: str, value: object, message: str
) -> None:
    restate(folder, json.loads(files["pack.json"]) | {field: value})
    with pytest.raises(PackError, match=message):
        pack.open_pack(folder)


def restate(folder: Path, facts: dict[str, object]) -> None:
    """Gives a pack other facts, with their digest."""
    facts = {name: value for name, value in facts.items() if name != "sha256"}
    digest = hashlib.sha256(as_json(facts)).hexdigest()
    (folder / "pack.json").write_bytes(as_json(facts | {"sha256": digest}))


# --- of other versions ---

RUN = """
import sys
from pathlib import Path
import numpy as np
from kernelproof.ground import version
reader, place = sys.argv[1:]
version.__version__ = reader
from kernelproof import emulator; from cudal2gen import pack
from cudal2gen.kernel.launch import Operands
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.kernel.launch import Operands
opened_pack = pack.open_pack(Path(place))
assert opened_pack.facts["version"] != reader
row = opened_pack.table.rows[0]
problem = opened_pack.table.kernels[0].record.problem
choice = opened_pack.table.choose(problem, Operands.packed(problem.layout, problem.n, problem.k))
assert choice.kernel == 0 and "was measured: 2.010x" in choice.reason, choice
memory = emulator.Memory()
with emulator.session(memory, emulator.Device(capability=(8, 0))) as session:
    a, b = (memory.upload(np.ones((64, 128), np.float16)) for _ in range(2))
    d = memory.upload(np.empty((64, 64), np.float16), role="output")
    kernel = opened_pack.kernel(opened_pack.table.kernels[choice.kernel].digest)
    OpenKernel(opened_pack.library, kernel, {}, emulator.runtime_path()).launch(
        a.address, 128, b.address, 128, d.address, 64, 64, 64, 128
    )
assert (d.download() == 128).all() and not session.reports
"""


@pytest.mark.parametrize("facts_of", ["this version", "0.1.0"])
def test_a_pack_is_used_by_the_next_version(folder: Path, files: dict[str, bytes], facts_of: str) -> None:
    """Also one of 0.1.0, whose facts had neither ABI nor fields."""
    facts = json.loads(files["pack.json"])
    assert facts["abi"] == {"table": 1, "library": 1}
    assert {"m", "bm", "family", "padding"} <= set(facts["fields"]["sm80_multistage"])
    assert set(facts["fields"]["rows"]) >= {"m", "kernel", "speedup"}
    if facts_of == "0.1.0":
        restate(folder, {name: value for name, value in facts.items() if name not in ("abi", "fields")})
    done = subprocess.run(
        [sys.executable, "-c", RUN, "0.1.1", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def contract() -> dict[str, object]:
    """What a pack's reader relies on: the table's names, and what ``launcher`` calls in the pack's library."""
    source = (Path(cudal2gen.__file__).parent / "launch" / "launcher.cpp").read_text()
    called = sorted(set(re.findall(r"_api\.(cudal2gen_\w+)", inspect.getsource(launcher))))
    functions = {name: re.search(rf"^[\w *]+ \*?{name}\([^)]*\)", source, re.MULTILINE) for name in called}
    structures = [launcher._Batches, launcher._Groups, launcher._Sized, launcher.Fused]
    return {
        "table": {"names": sorted(Table("a100", [], []).dump()), "row": list(Row._fields)},
        "library": {name: " ".join(text.group().split()) for name, text in functions.items() if text}
        | {kind.__name__: [f"{name} {of.__name__}" for name, of, *_ in kind._fields_] for kind in structures},
    }


def test_what_the_abi_stands_for_is_as_it_was() -> None:
    """Where something was added that old packs do without, write the new contract into abi.json; else raise the number
    in pack/abi.py as well, and say there which old ones are read."""
    stored = json.loads((Path(__file__).parent / "abi.json").read_text())
    assert stored == {"abi": ABI, **contract()}


def test_a_wheel_is_told_from_a_folder_of_such_a_name(folder: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "cudal2gen_a100.whl"
    with pytest.raises(PackError, match="no pack at "):
        pack.open_pack(wheel)
    wheel.write_bytes(b"")
    with pytest.raises(PackError, match="is a wheel: install it with pip, or unpack it"):
        pack.open_pack(wheel)
    wheel.unlink()
    assert pack.open_pack(folder.rename(wheel)).directory == wheel.resolve()


def test_good_packs_are_found_beside_broken_ones(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAL2GEN_PACK", f"{tmp_path / 'nothing'}{os.pathsep}{folder}")
    packs, refused, _ = pack.search(pack.installed())
    assert list(packs) == [GPU]
    assert refused == [f"no pack at {tmp_path / 'nothing'}"]


def test_a_second_pack_of_a_gpu_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    second = shutil.copytree(folder, tmp_path / "second")
    reason = f"{second} is not used: for a100 the first pack counts, {folder}; "
    reason += "those in CUDAL2GEN_PACK come before installed ones"
    variable = os.pathsep.join(map(str, (folder, second, folder)))
    monkeypatch.setenv("CUDAL2GEN_PACK", variable)
    search = pack.search(pack.installed())
    assert search.packs[GPU].directory == folder
    assert search.shadowed == {GPU: [reason]}, "the same folder again is no other pack"
    assert search.notes == [reason]
    assert search.refused == []
    assert machine._packs(search) == (True, f"a100 in {folder}; {reason}")
    done = run("explain", "--mnk", "64_64_128", "--gpu", "a100", env={"CUDAL2GEN_PACK": variable})
    assert f"the pack in {folder}" in done.stdout
    assert reason in done.stderr
    assert reason not in run("explain", "--mnk", "64_64_128", "--gpu", "h200", env={"CUDAL2GEN_PACK": variable}).stderr


def test_a_folder_that_may_not_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", forbidden)
    packs, refused, _ = pack.search([folder])
    assert packs == {}
    assert "Permission denied" in refused[0]


# --- without a compiler, and in a fresh environment ---


def test_a_pack_runs_where_there_is_no_compiler(folder: Path) -> None:
    """With neither nvcc, nor CUTLASS, nor g++, nor a folder that may be written to."""
    program = """
import importlib.util, shutil, sys
from pathlib import Path
import numpy as np
from kernelproof import emulator; from cudal2gen import pack
from cudal2gen.kernel.launch import Operands
from cudal2gen.launch.launcher import OpenKernel
assert not any(map(shutil.which, ("nvcc", "g++", "ptxas")))
opened_pack = pack.open_pack(Path(sys.argv[1]))
kernel = opened_pack.table.kernels[0]
memory = emulator.Memory()
with emulator.session(memory, emulator.Device(capability=(8, 0))) as session:
    a, b = (memory.upload(np.ones((64, 128), np.float16)) for _ in range(2))
    d = memory.upload(np.empty((64, 64), np.float16), role="output")
    opened = OpenKernel(opened_pack.library, opened_pack.kernel(kernel.digest), {}, emulator.runtime_path())
    opened.launch(a.address, 128, b.address, 128, d.address, 64, 64, 64, 128)
assert (d.download() == 128).all() and not session.reports
assert "jinja2" not in sys.modules and "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith(("cudal2gen.generation.compiler", "cutlass", "nvidia"))]
"""
    done = subprocess_alone(program, folder)
    assert all(process.returncode == 0 for process in done), done[0].stderr


class Done(NamedTuple):
    """How a process ended."""

    returncode: int
    stderr: str


def subprocess_alone(program: str, folder: Path) -> list[Done]:
    """Two processes at once, in an environment with nothing in it, on a pack that may not be written to."""
    runtime = emulator.runtime_path()  # what stands in for CUDA needs a compiler, once
    env = {
        "PATH": "/nowhere",
        "KERNELPROOF_NVCC": "/nowhere/nvcc",
        "CUTLASS_PATH": "/nowhere",
        "HOME": os.environ["HOME"],
    }
    env |= dict.fromkeys(("CUDAL2GEN_BUILD_DIR", "CUDAL2GEN_RESULTS"), "/proc/nowhere")
    # The emulator's stand-in for CUDA is in the cache; a GPU's own runtime would be found without one.
    env["CUDAL2GEN_CACHE_DIR"] = str(runtime.parents[1])
    folder.chmod(0o555)
    command = [sys.executable, "-c", program, str(folder)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    errors = [process.communicate()[1] for process in started]
    return [Done(process.returncode, text) for process, text in zip(started, errors, strict=True)]


@pytest.mark.slow
def test_a_wheel_is_what_pip_installs(files: dict[str, bytes], tmp_path: Path) -> None:
    wheel = pack.write_wheel(files, tmp_path / "cudal2gen-a100.whl")
    assert wheel.name.startswith("cudal2gen_a100-")
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    with pytest.raises(PackError, match="is a wheel: install it with pip"):
        pack.open_pack(wheel)
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*command, str(wheel)], check=True)
    program = "import cudal2gen_a100; print(cudal2gen_a100.folder())"
    folder = Path(
        subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    )
    assert pack.open_pack(folder).gpu == GPU
    # The package of this checkout finds it by its entry point.
    program = "from cudal2gen import pack; print(*pack.search(pack.installed()))"
    paths = os.pathsep.join([str(Path(cudal2gen.__file__).parents[1]), str(folder.parent)])
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.startswith("{'a100': Pack(directory=")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert [name for name in archive.namelist() if name.endswith(".ptx")]
    listed = subprocess.run([str(python), "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert "cudal2gen" in listed.stdout, "it asks for the package that reads it"


def test_a_wheel_of_candidates_has_a_version_of_its_own(files: dict[str, bytes], tmp_path: Path) -> None:
    """Else pip keeps the one that is installed."""
    facts = json.loads(files["pack.json"])
    unmeasured = files | {"pack.json": json.dumps(facts | {"problems_measured": 0}).encode()}
    measured, candidates = (pack.write_wheel(content, tmp_path / "x.whl") for content in (files, unmeasured))
    assert measured.name.split("-")[1] == facts["version"]
    assert candidates.name.split("-")[1] == f"{facts['version']}+candidates"
    with zipfile.ZipFile(candidates) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("+candidates.dist-info/METADATA"))
        assert f"\nVersion: {facts['version']}+candidates\n" in archive.read(metadata).decode()


def test_a_wheel_lists_what_is_in_it(files: dict[str, bytes], tmp_path: Path) -> None:
    """As the wheel format asks: every file but the list itself with its digest and size."""
    with zipfile.ZipFile(pack.write_wheel(files, tmp_path / "x.whl")) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        rows = [line.split(",") for line in archive.read(record).decode().splitlines()]
        assert [row[0] for row in rows] == names
        for name, digest, size in rows:
            content = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (("", "") if name == record else (f"sha256={expected}", str(len(content))))
        about = archive.read(record.replace("RECORD", "METADATA")).decode()
    assert "CUDA >=13.0,<14, driver 580 or newer" in about
    assert f"Requires-Dist: cudal2gen>={SINCE}\n" in about, "not the version that made it"


@pytest.mark.slow
def test_the_command_writes_packs(tmp_path: Path) -> None:
    env = {"CUDAL2GEN_RESULTS": str(tmp_path)}
    out = tmp_path / "pack"
    done = run("pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", "--out", str(out), env=env)
    assert done.returncode == 0, done.stderr
    assert "1 kernel, 1 binary" in done.stdout
    assert "0 of 0 measured problems won" in done.stdout
    assert pack.open_pack(out).table.kernels[0].sizes.text == "64_64_64"
    variants = ("--fusion", "bias_n", "--fusion", "bias_n+silu", "--batch", "strided", "--out", str(tmp_path / "more"))
    more = run("pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", *variants, env=env)
    assert "4 kernels, 4 binaries" in more.stdout, more.stderr
    kinds = [kernel.record.problem.suffix for kernel in pack.open_pack(tmp_path / "more").table.kernels]
    assert kinds == ["", " bias_n", " bias_n+silu", " batched"]
    assert "--fusion 'silly' is no part of a fusion" in error(
        "pack", "--mnk", "64_64_64", "--fusion", "silly", "--out", str(tmp_path / "x"), env=env
    )
    again = error("pack", "--mnk", "64_64_64", "--acc", "f16", "--layout", "tn", "--out", str(out), env=env)
    assert "is there already" in again
    assert "no measurements for a100" in error("pack", "--out", str(tmp_path / "x"), env=env)
    assert "invalid value for '--gpu': 'v100' is not one of" in error(
        "pack", "--gpu", "v100", "--out", str(tmp_path / "x")
    )
    assert "give one of --mnk M_N_K, --all" in error("pack", "--all", "--mnk", "1_1_1", "--out", str(tmp_path / "x"))
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
def test_the_command_packs_what_was_measured_faster(tmp_path: Path) -> None:
    """Of two measured problems the one that is won; a problem off the grid by the record that bench made for it."""
    catalogued = catalog.load()
    problems = [Problem(gpu="a100", acc="f16", layout="tn", m=m, n=64, k=64) for m in (64, 61)]
    records = [catalog.nearest(problem, catalogued).record for problem in problems]
    digests = [artifact.digest for artifact in compiler.build(records)]
    environment = measured.H200.model_copy(update={"gpu": "a100"})
    measurements = []
    for record, digest, ratio in zip(records, digests, (0.9, 1.5), strict=True):
        measurements += campaign(record, dict.fromkeys(EVEN, ratio), gpu="a100", digest=digest)
    file = measured.write(Measurements({environment.id: environment}, measurements), tmp_path / "m.jsonl")
    done = run("pack", "--gpu", "a100", "--results", str(file), "--out", str(tmp_path / "pack"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("1 of 2 measured problems won\n")
    table = pack.open_pack(tmp_path / "pack").table
    assert [(kernel.digest, kernel.sizes.text) for kernel in table.kernels] == [(digests[1], "61_64_64")]
    text = run("explain", "--mnk", "61_64_64", "--pack", str(tmp_path / "pack")).stdout
    assert "61_64_64 was measured: 1.500x" in text
    lost = run("explain", "--mnk", "64_64_64", "--pack", str(tmp_path / "pack")).stdout
    assert lost.startswith("runs     torch.matmul\nbecause  64_64_64 was measured: 0.900x")
    assert "which is not faster beyond noise" in lost
    other = error("explain", "--mnk", "64_64_64", "--gpu", "h200", "--pack", str(tmp_path / "pack"))
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


@pytest.mark.torch
def test_a_pack_of_candidates_claims_nothing_and_is_raced(
    few: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written with a compiler; where there is none, a call races what is in it."""
    torch = require("torch")
    from cudal2gen.operators import emulated as emulated_operators
    from tests.cudal2gen.racing import Clock, Timed

    out = tmp_path / "pack"
    env = {"CUDAL2GEN_CATALOG": str(tmp_path / "few.jsonl"), "CUDAL2GEN_RESULTS": str(tmp_path)}
    done = run("pack", "--candidates", "--layout", "tn", "--ab", "f16", "--with-ptx", "--out", str(out), env=env)
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

    def computed(mode: str, device: OperatorDevice) -> Any:
        monkeypatch.setenv("CUDAL2GEN_AUTOTUNE", mode)
        a, b = (device.empty(torch.empty(0, dtype=torch.float16), 64, 128).fill_(1) for _ in range(2))
        with emulated_operators(device, [opened]):
            return cudal2gen.matmul(a, b.t())[0, 0].item()

    with EmulatedDevice(packed.RECORDS["predicated"]) as emulated_device:
        times_us = {kernel.record.name: 200.0 for kernel in opened.table.kernels}
        device = Timed(emulated_device, Clock(emulated_device, times_us, 300.0))
        assert computed("off", device) == 128
        assert not emulated_device.session.launches
        assert computed("once", device) == 128
        launches = [launch.kernel for launch in emulated_device.session.launches]
        assert set(launches) == {packed.RECORDS["predicated"].name}
        rows = results.measurements(results.store("autotune")).measurements
        assert [row.problem.mnk for row in rows] == ["64_64_128", "33_64_128"]
        assert {row.digest for row in rows} == {opened.table.kernels[1].digest}
        assert computed("once", device) == 128
        assert len(emulated_device.session.launches) == len(launches) + 1, "the next process takes what was raced"


# --- from C ---


def compiled(source: Path, files: dict[str, bytes], folder: Path) -> Path:
    """An example against the emulator's runtime, as a program and, beside it, as a library for this process."""
    pack.write_folder(files, folder / "pack")
    for flags, name in (((), source.stem), (("-shared", "-fPIC"), f"{source.stem}.so")):
        command = ["g++", "-Wall", "-Wextra", "-Werror", *flags, str(source)]
        command += ["-o", str(folder / name), f"-I{folder / 'pack'}", f"-I{toolchain.discover().cuda_include}"]
        command += [str(folder / "pack" / "libcudal2gen.so"), str(emulator.runtime_path())]
        command += [f"-Wl,-rpath,{folder / 'pack'}", f"-Wl,-rpath,{emulator.runtime_path().parent}"]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], checkout_root: Path) -> Path:
    return compiled(checkout_root / "examples" / "gemm.c", files, tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def checkout_root() -> Path:
    return Path(__file__).parents[2]


Main = Callable[[Path], int]


@pytest.fixture
def main(example: Path) -> Main:
    return main_of(example / "gemm.so")


def main_of(path: Path) -> Main:
    library = ctypes.CDLL(str(path))

    def call(folder: Path) -> int:
        words = [b"gemm", os.fsencode(folder), os.fsencode(emulator.runtime_path())]
        return int(library.main(3, (ctypes.c_char_p * 3)(*words)))

    return call


def device(name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] = (8, 0), **facts: int) -> emulator.Session:
    return emulator.session(emulator.Memory(), emulator.Device(capability=capability, name=name, **facts))


def test_the_example_in_c_computes(main: Main, example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with device() as session:
        code = main(example / "pack")
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert "D[0][0] = 0x5800" in printed.out
    assert len(session.launches) == 1
    assert not session.errors
    assert len((Path(__file__).parents[2] / "examples" / "gemm.c").read_text().splitlines()) <= 40


def test_the_example_without_a_device_says_so(example: Path) -> None:
    done = subprocess.run(
        [str(example / "gemm"), str(example / "pack"), str(emulator.runtime_path())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "no CUDA device answers\n")


def test_c_refuses_what_python_refuses(
    main: Main, example: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refusal(folder: Path, name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] = (8, 0)) -> str:
        with device(name, capability):
            assert main(folder) == 1
        return capfd.readouterr().err

    assert "holds no pack.txt" in refusal(tmp_path)
    alien = "no kernels for NVIDIA H200 (sm_90): this pack is for a100; see 'cudal2gen pack --help'"
    assert alien in refusal(example / "pack", "NVIDIA H200", (9, 0))
    for name in ("kernels/*/kernel.cubin", "table.json"):
        copy = tmp_path / name.replace("/", "-").replace("*", "x")
        shutil.copytree(example / "pack", copy)
        path = changed(copy, name)
        assert f"{path} is truncated or was altered" in refusal(copy)
        path.unlink()
        assert f"{path} is missing" in refusal(copy)
        changed(copy, "pack.txt")
        assert "pack.txt is truncated or was altered" in refusal(copy)
    for number, (before, after) in enumerate(((" layout=tn", ""), (" low=2.0", ""), (" kernel=0 ", " kernel=99 "))):
        copy = shutil.copytree(example / "pack", tmp_path / str(number))
        text = (copy / "pack.txt").read_text().replace(before, after).rsplit("sha256=", 1)[0]
        (copy / "pack.txt").write_text(f"{text}sha256={hashlib.sha256(text.encode()).hexdigest()}\n")
        assert "pack.txt is not one that this library understands" in refusal(copy), before


# --- fused and batched kernels ---

PREDICATED = packed.RECORDS["predicated"]
LATER = [
    PREDICATED,
    PREDICATED.at(PREDICATED.problem.revised(fusion="bias_n+relu")),
    PREDICATED.at(PREDICATED.problem.revised(batch="strided")),
    PREDICATED.at(PREDICATED.problem.revised(batch="grouped")),
]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory, checkout_root: Path) -> Path:
    """The example of fused and batched products, beside a pack whose plain kernel alone was measured."""
    files = packed.files(packed.table(LATER, {0: 2.0}))
    return compiled(checkout_root / "examples" / "fused.c", files, tmp_path_factory.mktemp("later"))


def test_the_example_computes_a_fused_and_a_batched_product(later: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with device() as session:
        code = main_of(later / "fused.so")(later / "pack")
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    assert "D[0][0] = 0x3C00, 0x3C00 is 1.0; D[0][1] = 0x0000" in printed.out
    assert "D[1] = 0x5800, D[2] = 0x5C00" in printed.out
    assert len(session.launches) == 2
    assert not session.errors
    assert not session.reports


def test_packs_say_what_their_kernels_fuse(later: Path) -> None:
    lines = (later / "pack" / "pack.txt").read_text().splitlines()
    kernels = [line for line in lines if line.startswith("kernel ")]
    assert ["fusion=bias_n+relu" in line for line in kernels] == [False, True, False, False]
    assert [line.split("batch=")[1].split()[0] for line in kernels[2:]] == ["strided", "grouped"]
    assert ["plain=0" in line for line in kernels] == [False, True, True, True]
    table = pack.open_pack(later / "pack").table
    assert [kernel.record for kernel in table.kernels] == LATER
    assert table.chosen().dump() == table.dump()


def test_a_pack_of_plain_kernels_is_as_it_was(files: dict[str, bytes]) -> None:
    for name in ("table.json", "pack.txt"):
        for word in ("fusion", " batch", '"batch', "products", " plain="):
            assert word not in files[name].decode(), (name, word)


class PosedFusion(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("alpha", "bias", "residual", "aux", "activation", "gate")]


class PosedProblem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("acc", "layout", "m", "n", "k", "prefer", "ab", "d")),
        ("fusion", PosedFusion),
        *((name, ctypes.c_int) for name in ("batch", "products")),
    ]


class PosedOperands(ctypes.Structure):
    _fields_ = [
        *(("bias", ctypes.c_void_p), ("c", ctypes.c_void_p), ("ldc", ctypes.c_int)),
        *(("alpha", ctypes.c_float), ("beta", ctypes.c_float)),
        *(("aux", ctypes.c_void_p), ("ldaux", ctypes.c_int)),
        *((f"stride_{name}", ctypes.c_int64) for name in ("a", "b", "d", "bias", "c", "aux")),
        ("ends", ctypes.c_void_p),
    ]


class Answer(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_char_p), ("speedup", ctypes.c_double), ("workspace_bytes", ctypes.c_int64)]


def test_c_answers_from_the_same_table(example: Path) -> None:
    library = ctypes.CDLL(str(example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_void_p(), Answer()
    table = pack.open_pack(example / "pack").table
    by_name = {record.name: number for number, record in enumerate(packed.RECORDS.values())}

    def query(*fields: int) -> int:
        return int(library.cudal2gen_query(handle, ctypes.byref(PosedProblem(*fields)), ctypes.byref(answer)))

    def digest(name: str) -> bytes:
        return table.kernels[by_name[packed.RECORDS[name].name]].digest.encode()

    with device():
        opened = library.cudal2gen_pack_open(
            os.fsencode(example / "pack"), os.fsencode(emulator.runtime_path()), ctypes.byref(handle)
        )
        assert opened == 0, library.cudal2gen_last_error()
        assert query(1, 0, 64, 64, 128, 0) == 0
        assert (answer.kernel, answer.speedup) == (digest("predicated"), 2.0)
        assert query(1, 0, 96, 96, 64, 0) == -1, "measured, and slower"
        assert b"96_96_64: no kernel was measured faster" in library.cudal2gen_last_error()
        assert query(1, 0, 96, 96, 64, 1) == 0
        assert (answer.kernel, answer.speedup, answer.workspace_bytes) == (digest("whole"), 0.0, 0)
        assert query(1, 0, 32, 32, 256, 1) == 0
        assert answer.kernel == digest("split")
        assert answer.workspace_bytes == 256 + 4 * 2 * 32 * 32
        assert query(0, 1, 64, 96, 128, 1) == 0
        assert answer.kernel == digest("zsplit"), "its option came with it"
        assert query(1, 0, 33, 33, 65, 1) == -1
        assert b"33_33_65: no kernel of this pack computes it" in library.cudal2gen_last_error()
        assert query(1, 0, 0, 33, 64, 1) == 1
        assert library.cudal2gen_pack_close(handle) == 0


SERVED = [
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10),
    ("NVIDIA A100 MIG 1g.5gb", (8, 0), 14, 163 << 10),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 54, 163 << 10),  # a half of one, as MPS can limit it
    ("NVIDIA H200", (8, 0), 108, 163 << 10),
    ("NVIDIA A40", (8, 6), 84, 99 << 10),
    ("NVIDIA A40", (8, 6), 84, 20 << 10),
    ("NVIDIA L4", (8, 9), 58, 99 << 10),
    ("Tesla V100-SXM2-16GB", (7, 0), 80, 96 << 10),
    ("NVIDIA H100 PCIe", (9, 0), 114, 227 << 10),
]


@pytest.mark.parametrize(("name", "capability", "sms", "smem"), SERVED)
def test_c_serves_the_cards_that_python_serves(
    example: Path, name: str, capability: tuple[int, int], sms: int, smem: int
) -> None:
    """Whether the pack opens, what counts as measured, and which kernels there are."""
    library = ctypes.CDLL(str(example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_void_p(), Answer()
    card = CardFacts.of(name, capability, sms, smem)
    served = pack.serving({"a100": pack.open_pack(example / "pack")}, card)
    with device(name, capability, sm_count=sms, smem_optin_bytes=smem):
        runtime = os.fsencode(emulator.runtime_path())
        code = library.cudal2gen_pack_open(os.fsencode(example / "pack"), runtime, ctypes.byref(handle))
        assert (code == 0) == (served is not None), library.cudal2gen_last_error()
        if served is None:
            return
        for record in packed.RECORDS.values():
            for prefer, word in ((0, "measured"), (1, "kernel")):
                operands = Operands.packed(record.layout, record.n, record.k)
                choice = served.table.choose(record.problem, operands, word)  # type: ignore[arg-type]
                if choice.short == "estimated":  # by what was measured of neighbours, which C does not ask
                    continue
                posed = PosedProblem(record.acc == "f32", record.layout == "nn", record.m, record.n, record.k, prefer)
                code = library.cudal2gen_query(handle, ctypes.byref(posed), ctypes.byref(answer))
                assert code == (-1 if choice.kernel is None else 0), library.cudal2gen_last_error()
                if choice.kernel is not None:
                    assert answer.kernel == served.table.kernels[choice.kernel].digest.encode()
                if code and "this card" in choice.short:
                    assert choice.short.encode() in library.cudal2gen_last_error()
        assert library.cudal2gen_pack_close(handle) == 0


def test_c_asks_a_driver_that_refuses_an_image_once(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer, problem = ctypes.c_void_p(), Answer(), PosedProblem(1, 0, 64, 64, 128, 0)
    loads: list[int] = []
    monkeypatch.setattr(KernelCalls, "load_file", lambda *_: loads.append(222) or 222)
    with device():
        runtime = os.fsencode(emulator.runtime_path())
        assert library.cudal2gen_pack_open(os.fsencode(example / "pack"), runtime, ctypes.byref(handle)) == 0
        for _ in range(3):
            assert library.cudal2gen_query(handle, ctypes.byref(problem), ctypes.byref(answer)) == -3
            assert b"kernel.cubin: " in library.cudal2gen_last_error()
            assert b"; update the driver, or make the pack anew" in library.cudal2gen_last_error()
            words = (ctypes.byref(problem), *[ctypes.c_void_p(256), 128] * 2, ctypes.c_void_p(256), 64, None, None)
            assert library.cudal2gen_matmul(handle, *words) == -3
        assert loads == [222]
        assert library.cudal2gen_pack_close(handle) == 0


MEASURED, NEAREST, INFERRED = 0, 1, 2
RELU_WITH_BIAS = PosedFusion(bias=1, activation=1)


def test_c_infers_a_fused_kernel_on_request_only(later: Path) -> None:
    library = ctypes.CDLL(str(later / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_void_p(), Answer()
    digests = [kernel.digest.encode() for kernel in pack.open_pack(later / "pack").table.kernels]

    def query(prefer: int, fusion: PosedFusion | None = None, **more: int) -> int:
        posed = PosedProblem(acc=1, m=64, n=64, k=128, prefer=prefer, fusion=fusion or PosedFusion(), **more)
        return int(library.cudal2gen_query(handle, ctypes.byref(posed), ctypes.byref(answer)))

    with device():
        assert not library.cudal2gen_pack_open(
            os.fsencode(later / "pack"), os.fsencode(emulator.runtime_path()), ctypes.byref(handle)
        )
        assert query(MEASURED) == 0
        assert (answer.kernel, answer.speedup) == (digests[0], 2.0)
        assert query(MEASURED, RELU_WITH_BIAS) == -1
        assert b"64_64_128 bias_n+relu: no kernel was measured faster" in library.cudal2gen_last_error()
        for number, fusion, more in (
            (1, RELU_WITH_BIAS, {}),
            (2, None, {"batch": 1, "products": 3}),
            (3, None, {"batch": 2, "products": 3}),
        ):
            for prefer in (INFERRED, NEAREST):
                assert query(prefer, fusion, **more) == 0
                assert (answer.kernel, answer.speedup) == (digests[number], 0.0)
        assert query(INFERRED, PosedFusion(bias=1)) == -1, "not in the pack"
        assert query(NEAREST, PosedFusion(bias=7)) == 1
        assert b"bias or activation is none of the header's" in library.cudal2gen_last_error()
        assert query(NEAREST, batch=1) == 1
        assert b"a batch has at least one product" in library.cudal2gen_last_error()
        assert library.cudal2gen_pack_close(handle) == 0


def test_c_computes_groups_of_rows(later: Path) -> None:
    library = ctypes.CDLL(str(later / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    library.cudal2gen_gemm.argtypes = [
        *(ctypes.c_void_p,) * 3, *(ctypes.c_int, ctypes.c_void_p) * 2, ctypes.c_int, *(ctypes.c_void_p,) * 3
    ]  # fmt: skip
    rng, handle, memory = np.random.default_rng(1), ctypes.c_void_p(), emulator.Memory()
    a, b = rng.integers(-2, 3, (64, 128)).astype(np.float16), rng.integers(-2, 3, (3, 64, 128)).astype(np.float16)
    ends = np.array([10, 10, 64], np.int32)
    with emulator.session(memory, emulator.Device(capability=(8, 0), name="NVIDIA A100-SXM4-80GB")) as session:
        assert not library.cudal2gen_pack_open(
            os.fsencode(later / "pack"), os.fsencode(emulator.runtime_path()), ctypes.byref(handle)
        )
        on_device = [memory.upload(each).address for each in (a, b, ends)]
        d = memory.upload(np.empty((64, 64), np.float16), role="output")
        operands = PosedOperands(stride_b=64 * 128, ends=on_device[2])
        problem = PosedProblem(acc=1, m=64, n=64, k=128, prefer=NEAREST, batch=2, products=3)
        arguments = (handle, ctypes.addressof(problem), on_device[0], 128, on_device[1], 128, d.address, 64)
        code = library.cudal2gen_gemm(*arguments, None, None, None)
        assert code == 1
        assert b"needs operands" in library.cudal2gen_last_error()
        code = library.cudal2gen_gemm(*arguments, ctypes.addressof(operands), None, None)
        assert code == 0, library.cudal2gen_last_error()
        assert library.cudal2gen_pack_close(handle) == 0
    assert not session.errors
    groups = [a[:10] @ b[0].T, a[10:] @ b[2].T]
    np.testing.assert_array_equal(d.download(), np.concatenate(groups))


def test_kernels_of_a_pack_open_as_built_ones_do(folder: Path) -> None:
    opened_pack = pack.open_pack(folder)
    kernel = opened_pack.table.kernels[0]
    memory = emulator.Memory()
    with emulator.session(memory, emulator.Device(capability=(8, 0))):
        opened = OpenKernel(opened_pack.library, opened_pack.kernel(kernel.digest), {}, emulator.runtime_path())
        ones = memory.upload(np.ones((8, 64), np.float16))
        d = memory.upload(np.empty((8, 8), np.float16), role="output")
        opened.launch(ones.address, 64, ones.address, 64, d.address, 8, 8, 8, 64)
        opened.close()
    assert (d.download() == 64).all()
