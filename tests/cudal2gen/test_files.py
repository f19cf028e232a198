"""Proves that a file is written completely or keeps its old content, whatever ends the writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudal2gen import places
from cudal2gen.generation import catalog, compiler
from kernelproof.ground import files
from kernelproof.ground.errors import Failure
from tests.cudal2gen.paths import small

BUILT_AHEAD = [small(m=64, n=64, k=64)]
LIMIT = 1 << 12  # the size limit of a process's files, which has the effect of a full disk
NVCC_LIMIT = 40_000  # the limit where nvcc reports its own version; the launcher is larger than this


def run_with_limit(*arguments: str, env: dict[str, str], limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    """A command that cannot write more than ``limit`` bytes into a file."""
    program = (
        "import resource, runpy, sys; sys.dont_write_bytecode = True; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        "sys.argv[0] = 'cudal2gen'; runpy.run_module('cudal2gen', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | env,
    )


def names(folder: Path) -> set[str]:
    """The names of a folder's files."""
    return {path.name for path in folder.iterdir()}


def test_a_write_replaces_a_file_and_keeps_its_mode_and_links(tmp_path: Path) -> None:
    target, link = tmp_path / "deep" / "file", tmp_path / "link"
    files.write(target, "first")
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    target.chmod(0o640)
    link.symlink_to(target)
    files.write(link, b"second")
    assert link.is_symlink()
    assert target.read_text() == "second"
    assert target.stat().st_mode & 0o777 == 0o640
    assert names(target.parent) == {"file"}
    files.write(Path(os.devnull), "nothing")


def fill(target: Path, interruption: BaseException) -> None:
    """Begins to fill a folder and is interrupted."""
    with files.folder(target) as scratch:
        (scratch / "file").write_text("new")
        raise interruption


def _umask() -> int:
    """This process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("interruption", [OSError(28, "No space left on device"), SystemExit(143)])
def test_what_fails_or_is_interrupted_leaves_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def interrupt(descriptor: int) -> None:
        raise interruption

    monkeypatch.setattr("os.fsync", interrupt)
    expected = Failure if isinstance(interruption, OSError) else SystemExit
    with pytest.raises(expected) as caught:
        files.write(target, "new")
    if expected is Failure:
        assert str(caught.value) == f"cannot write {target}: No space left on device; it is as it was"
    with pytest.raises(expected):
        fill(tmp_path / "folder", interruption)
    assert (names(tmp_path), target.read_text()) == ({"file"}, "old")


def test_a_folder_appears_whole_or_replaces_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with files.folder(tmp_path / name) as scratch:
            (scratch / "file").write_text("content")
        assert names(tmp_path / name) == {"file"}
    with pytest.raises(Failure, match="Directory not empty; it is as it was"), files.folder(tmp_path / "new"):
        pass
    assert names(tmp_path) == {"empty", "new"}


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_page_and_the_old_catalog(tmp_path: Path) -> None:
    page, own = tmp_path / "page.html", tmp_path / "kernels.jsonl"
    page.write_text("old")
    own.write_text("".join(f"{line}\n" for line in _lines()))
    before, env = own.read_bytes(), {"CUDAL2GEN_CATALOG": str(own), "CUDAL2GEN_RESULTS": str(tmp_path / "results")}
    for target, *arguments in (
        (page, "report", "--out", str(page)),
        (own, "edit", "--mnk", "64_64_64", "--set", "padding=predicate"),
    ):
        done = run_with_limit(*arguments, env=env)
        assert done.returncode == 1, done
        assert done.stderr == f"error: cannot write {target}: File too large; it is as it was\n"
    assert (page.read_text(), own.read_bytes()) == ("old", before)
    assert names(tmp_path) == {"page.html", "kernels.jsonl", ".kernels.jsonl.lock"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack", "cudal2gen_a100-0-py3-none-any.whl"])
def test_a_full_disk_leaves_nothing_of_a_pack(tmp_path: Path, name: str) -> None:
    (record,) = BUILT_AHEAD
    catalog.save([record], tmp_path / "kernels.jsonl")
    compiler.build([record])
    assert compiler.launcher().stat().st_size > NVCC_LIMIT
    env = {
        "CUDAL2GEN_CATALOG": str(tmp_path / "kernels.jsonl"), "CUDAL2GEN_RESULTS": str(tmp_path / "results"),
    }  # fmt: skip
    judged = run_with_limit(
        "validate", *("--mnk", "64_64_64", "--acc", "f16", "--layout", "tn"), "--on", "emulator:machine-code",
        env=env, limit=1 << 30,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stderr
    before = names(tmp_path)
    done = run_with_limit(
        "pack", *("--mnk", "64_64_64", "--acc", "f16", "--layout", "tn"), "--out", str(tmp_path / name),
        env=env, limit=NVCC_LIMIT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"error: cannot write {tmp_path / name}: File too large\n")
    assert names(tmp_path) == before


def _lines() -> list[str]:
    """A catalog's lines, of more bytes than ``LIMIT``."""
    lines = (places.shipped("configs") / "kernels.jsonl").read_text().splitlines()[:200]
    assert sum(map(len, lines)) > LIMIT
    return lines


def test_rows_that_do_not_fit_are_not_stored_and_the_file_is_named(tmp_path: Path) -> None:
    store = tmp_path / "verdicts.jsonl"
    store.write_text("{}\n" * (LIMIT // 3))
    before = store.read_bytes()
    program = (
        "import resource, sys; sys.dont_write_bytecode = True\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))\n"
        "from pathlib import Path; from cudal2gen import results\n"
        "row = results.Verdict(record='r', digest='d', on='emulator', cases=(), counters={})\n"
        "try: results.append([row], Path(sys.argv[1]))\n"
        "except OSError as error: print(error.filename, error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{store} File too large\n"
    assert store.read_bytes() == before
