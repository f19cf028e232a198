"""Proves what a pack contains, that it is reproducible, and which packs are refused."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.cli import machine
from cudal2gen.generation import compiler
from cudal2gen.launch import launcher
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.pack import PackError
from cudal2gen.pack.abi import ABI, FIRST_READER
from cudal2gen.pack.contents import _table_for_c
from cudal2gen.pack.facts import as_json
from cudal2gen.results.choice import Row, Table
from kernelproof import emulator
from kernelproof.sass.stripping import without_lines
from tests.cudal2gen import packed
from tests.cudal2gen.test_cli import run

GPU = "a100"


@pytest.fixture(autouse=True)
def _store_verdicts_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves the store: packing stores verdicts of kernels that it executes, and those of tests do not belong into the
    checkout."""
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path_factory.mktemp("results")))


@pytest.fixture(scope="module")
def table() -> Table:
    """A table in which the first kernel was measured faster than torch and the second slower."""
    return packed.table(list(packed.RECORDS.values()), {0: 2.0, 1: 0.5})


@pytest.fixture(scope="module")
def files(table: Table) -> dict[str, bytes]:
    """The files of the table's pack, by path."""
    return packed.files(table)


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path) -> Path:
    """The table's pack, as a folder of the test's own."""
    return pack.write_folder(files, tmp_path / "pack")


# --- contents of a pack ---


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


def test_the_table_for_c_has_every_kernel_and_every_win(table: Table) -> None:
    """A line is a word and tokens name=value; the last one is the digest of those before it."""
    records = list(packed.RECORDS.values())
    wins = [packed.row(records[0], 0, 2.0), packed.row(records[1], 1, 1.5, products=2),
            packed.row(records[4], 4, 1.25, products=7)]  # fmt: skip
    rows = [wins[0], packed.row(records[2], 2, 0.5), wins[1], wins[2], packed.row(records[3], 3, 1.0, products=3)]
    text = _table_for_c(replace(table, rows=rows), {"b": b"content", "a": b""}).decode()
    *lines, digest = text.splitlines()
    assert digest == f"sha256={hashlib.sha256(text.removesuffix(digest + chr(10)).encode()).hexdigest()}"
    stated = [(line.partition(" ")[0], dict(token.split("=", 1) for token in line.split()[1:])) for line in lines]
    assert [word for word, _ in stated] == ["pack", "file", "file", *["kernel"] * len(records), *["choice"] * len(wins)]
    files = {fields["path"]: fields["sha256"] for word, fields in stated if word == "file"}
    assert files == {name: hashlib.sha256(data).hexdigest() for name, data in (("a", b""), ("b", b"content"))}
    kernels = [fields for word, fields in stated if word == "kernel"]
    for record, kernel, fields in zip(records, table.kernels, kernels, strict=True):
        assert (fields["digest"], int(fields["smem"])) == (kernel.digest, kernel.smem_bytes)
        assert [int(fields[x]) for x in "mnk"] == [record.m, record.n, record.k]
        assert (fields["layout"], fields["acc"]) == (record.layout, record.acc)
        options = dict(token.split("=") for token in fields.get("options", "").split(",") if token)
        assert options == {name: str(value) for name, value in record.launch_options.items()}
        assert "plain" not in fields
    choices = [fields for word, fields in stated if word == "choice"]
    for row, fields in zip(wins, choices, strict=True):
        assert (int(fields["kernel"]), float(fields["low"])) == (row.kernel, row.speedup[1])
        assert int(fields.get("products", 1)) == row.products
        assert [int(fields[x]) for x in "mnk"] == [row.m, row.n, row.k]


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
    assert [row.kernel for row in chosen.rows] == [0, None], "a problem that torch wins keeps its row, without a kernel"
    with pytest.raises(PackError, match="no kernel of a100 was measured faster"):
        pack.contents(packed.table([packed.RECORDS["whole"]]).chosen(), {}, Path("/nowhere"), "13.0")


def test_what_is_there_is_not_overwritten(folder: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(PackError, match="is there already"):
        pack.write_folder(files, folder)


# --- what is refused ---


def flip_bit(folder: Path, name: str) -> Path:
    """Flips a bit in the middle of a file, which is named by its path or by a pattern."""
    path = folder / name if (folder / name).exists() else next(folder.glob(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


# The files of a pack.
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
    path = flip_bit(folder, name)
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
        ("format", 2, "has format 2, this cudal2gen .* reads 1: install a newer cudal2gen"),
        ("machine", "sparc", "on sparc"),
        (
            "abi",
            {"table": 2, "library": 1},
            "needs table ABI 2 of .*, this .* reads up to 1: install a newer",
        ),
        ("abi", {"table": 1, "library": 9}, "needs library ABI 9 of .* or make the pack anew with this version"),
        ("abi", {"table": 0, "library": 1}, "needs table ABI 0 of .*, this .* reads from 1 on: make it anew"),
        ("abi", {"table": 1}, "is no number for each of table and library"),
        ("abi", 7, "abi=7: is no number for each"),
        ("fields", {"sm99_new": []}, 'needs the family "sm99_new" of .*, unknown to this .*: install a newer'),
        ("fields", {"rows": ["m", "watts"]}, 'needs the field "watts" of rows of .*: install a newer'),
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
    """Replaces a pack's facts, and their digest."""
    facts = {name: value for name, value in facts.items() if name != "sha256"}
    digest = hashlib.sha256(as_json(facts)).hexdigest()
    (folder / "pack.json").write_bytes(as_json(facts | {"sha256": digest}))


# --- packs of other versions ---

# Opens the pack at argv[2] with the package's version set to argv[1], and launches the kernel that the table chooses.
LAUNCHING_PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from kernelproof.ground import version
reader, place = sys.argv[1:]
version.__version__ = reader
from kernelproof import emulator; from cudal2gen import pack
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.kernel.serving import sizes_of
opened_pack = pack.open_pack(Path(place))
assert opened_pack.facts["version"] != reader
row = opened_pack.table.rows[0]
problem = opened_pack.table.kernels[0].record.problem
choice = opened_pack.table.choose(problem, LaunchOperands.packed(problem.layout, sizes_of(problem)))
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


@pytest.mark.slow
@pytest.mark.parametrize("facts_of", ["this version", "0.1.0"])
def test_a_pack_is_used_by_the_next_version(folder: Path, files: dict[str, bytes], facts_of: str) -> None:
    """This includes a pack of 0.1.0, whose facts had neither ABI nor fields."""
    facts = json.loads(files["pack.json"])
    assert facts["abi"] == {"table": 1, "library": 1}
    assert {"m", "bm", "family", "padding"} <= set(facts["fields"]["sm80_multistage"])
    assert set(facts["fields"]["rows"]) >= {"m", "kernel", "speedup"}
    if facts_of == "0.1.0":
        restate(folder, {name: value for name, value in facts.items() if name not in ("abi", "fields")})
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHING_PROGRAM, "0.1.1", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def contract() -> dict[str, object]:
    """The names on which a pack's reader relies: those of the table, and the functions of the pack's library that
    ``launcher`` calls."""
    source = (Path(cudal2gen.__file__).parent / "launch" / "launcher.cpp").read_text()
    called = sorted(set(re.findall(r"_api\.(cudal2gen_\w+)", inspect.getsource(launcher))))
    functions = {name: re.search(rf"^[\w *]+ \*?{name}\([^)]*\)", source, re.MULTILINE) for name in called}
    structures = [launcher._Batches, launcher._Groups, launcher.Sized, launcher.Fused]
    return {
        "table": {"names": sorted(Table("a100", [], []).dump()), "row": list(Row._fields)},
        "library": {name: " ".join(text.group().split()) for name, text in functions.items() if text}
        | {kind.__name__: [f"{name} {of.__name__}" for name, of, *_ in kind._fields_] for kind in structures},
    }


def test_what_the_abi_stands_for_is_as_it_was() -> None:
    """If this fails after an addition that old packs do not need, write the new contract into abi.json. After any other
    change also raise the number in pack/abi.py, and say there which old packs are read."""
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


def test_good_packs_are_found_among_broken_ones(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAL2GEN_PACK", f"{tmp_path / 'nothing'}{os.pathsep}{folder}")
    packs, refused, _ = pack.search(pack.installed())
    assert list(packs) == [GPU]
    assert refused == [f"no pack at {tmp_path / 'nothing'}"]


@pytest.mark.slow
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
    assert machine._packs(search) == (True, f"a100 of CUDA 13 in {folder}; {reason}")
    done = run("explain", "--mnk", "64_64_128", "--gpu", "a100", env={"CUDAL2GEN_PACK": variable})
    assert f"the pack in {folder}" in done.stdout
    assert reason in done.stderr
    assert reason not in run("explain", "--mnk", "64_64_128", "--gpu", "h200", env={"CUDAL2GEN_PACK": variable}).stderr


def test_a_folder_that_may_not_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_access(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse_access)
    packs, refused, _ = pack.search([folder])
    assert packs == {}
    assert "Permission denied" in refused[0]


# --- without a compiler, and in a fresh environment ---


@pytest.mark.slow
def test_a_pack_runs_where_there_is_no_compiler(folder: Path) -> None:
    """There is neither nvcc, nor CUTLASS, nor g++, nor a writable folder."""
    program = """
import importlib.util, shutil, sys
from pathlib import Path
import numpy as np
from kernelproof import emulator; from cudal2gen import pack
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
    done = run_without_compilers(program, folder)
    assert all(process.returncode == 0 for process in done), done[0].stderr


class Ended(NamedTuple):
    """The exit code and output of a process."""

    returncode: int
    stderr: str


def run_without_compilers(program: str, folder: Path) -> list[Ended]:
    """Runs a program in two concurrent processes, in an empty environment, on a read-only pack."""
    runtime = emulator.runtime_path()  # the stand-in for CUDA is compiled once
    env = {
        "PATH": "/nowhere",
        "KERNELPROOF_NVCC": "/nowhere/nvcc",
        "CUTLASS_PATH": "/nowhere",
        "HOME": os.environ["HOME"],
    }
    env |= dict.fromkeys(("CUDAL2GEN_BUILD_DIR", "CUDAL2GEN_RESULTS"), "/proc/nowhere")
    # The emulator's stand-in for CUDA is in the cache. Without a cache, a machine with a GPU would load the real CUDA
    # runtime.
    env["CUDAL2GEN_CACHE_DIR"] = str(runtime.parents[1])
    folder.chmod(0o555)
    command = [sys.executable, "-c", program, str(folder)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    errors = [process.communicate()[1] for process in started]
    return [Ended(process.returncode, text) for process, text in zip(started, errors, strict=True)]


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
    """Otherwise pip would keep an installed wheel."""
    facts = json.loads(files["pack.json"])
    unmeasured = files | {"pack.json": json.dumps(facts | {"problems_measured": 0}).encode()}
    measured, candidates = (pack.write_wheel(content, tmp_path / "x.whl") for content in (files, unmeasured))
    assert measured.name.split("-")[1] == facts["version"]
    assert candidates.name.split("-")[1] == f"{facts['version']}+candidates"
    with zipfile.ZipFile(candidates) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("+candidates.dist-info/METADATA"))
        assert f"\nVersion: {facts['version']}+candidates\n" in archive.read(metadata).decode()


def test_a_wheel_lists_what_is_in_it(files: dict[str, bytes], tmp_path: Path) -> None:
    """The wheel format demands a list of every file except the list itself, with digests and sizes."""
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
    assert f"Requires-Dist: cudal2gen>={FIRST_READER}\n" in about, "not the version that made it"


@pytest.mark.slow
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
