"""The store of verdicts: appended whole, read back, forgiving to what a crash left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudal2gen import results
from cudal2gen.results import Case, Verdict


def verdict(digest: str, *findings: str) -> Verdict:
    case = Case(
        m=1, n=2, k=3, swizzle_stride=None, inputs="binary", compared="equality", max_error=0.0, allowed=None, ctas=1,
        findings=findings,
    )  # fmt: skip
    return Verdict(record="r", digest=digest, on="emulator", cases=(case,), counters={"mma": 1.0})


def test_the_latest_verdict_of_a_binary_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "verdicts.jsonl"
    results.append([verdict("a", "race"), verdict("b")], path)
    results.append([verdict("a")], path)
    found = results.latest(path)
    assert set(found) == {("a", "emulator"), ("b", "emulator")}
    assert found["a", "emulator"].passed
    assert not verdict("a", "race").passed
    assert verdict("a", "race").findings == ["1_2_3 binary: race"]
    assert not Verdict(record="r", digest="c", on="emulator", cases=(), counters={}).passed, (
        "nothing run, nothing shown"
    )


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    results.append([verdict("a")], path)
    path.write_bytes(path.read_bytes() + b'{"record": "r", "dig\n\xff\n')
    results.append([verdict("b")], path)
    assert {digest for digest, _ in results.latest(path)} == {"a", "b"}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A limit on the file's size stands for the full disk."""
    path = tmp_path / "verdicts.jsonl"
    results.append([verdict("a")], path)
    before = path.read_bytes()
    program = (
        "import resource, signal, sys; from pathlib import Path; from cudal2gen import results;"
        "from tests.test_results import verdict;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 100}, -1));"
        "results.append([verdict('b')], Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert path.read_bytes() == before


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    program = (
        "import sys; from pathlib import Path; from cudal2gen import results; from tests.test_results import verdict;"
        "[results.append([verdict(f'{sys.argv[2]}-{i}')], Path(sys.argv[1])) for i in range(20)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), str(who)]) for who in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert len(results.latest(path)) == 80


def test_the_store_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    assert results.store() == tmp_path / "verdicts.jsonl"
    monkeypatch.delenv("CUDAL2GEN_RESULTS")
    assert results.store().parts[-2:] == ("results", "verdicts.jsonl")
    assert os.fspath(results.store()).startswith(os.fspath(Path(results.__file__).parents[1]))
