"""Proves that the options of the command line that choose problems select exactly the records that they name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, parse
from tests.commands import run
from tests.cudal2gen.test_cli import error, own_catalog

__all__ = ["own_catalog"]  # a fixture


@pytest.mark.slow
def test_list_filters(own_catalog: dict[str, str]) -> None:
    assert len(run("list", "--gpu", "a100", "--acc", "f16").stdout.splitlines()) == 1000
    direct = run("list", "--where", "family=sm80_direct", "--json").stdout.splitlines()
    assert direct
    assert all(json.loads(line)["family"] == "sm80_direct" for line in direct)
    assert run("list", "--gpu", "a100", "--acc", "f16", "--where", "batch=strided").stdout == ""
    of_size = [line.split()[:4] for line in run("list", "--mnk", "64_64_64", "--mnk", "64_64_128").stdout.splitlines()]
    assert {(gpu, size) for gpu, *_, size in of_size} >= {("a100", "64_64_64"), ("b200", "64_64_128")}
    assert {size for *_, size in of_size} == {"64_64_64", "64_64_128"}
    tiny = run("list", "--gpu", "h200", "--acc", "f16", "--where", "class=tiny", "--json").stdout.splitlines()
    assert 0 < len(tiny) < 1000
    assert {parse(json.loads(line)).problem.size_class for line in tiny} == {"tiny"}
    assert "--mnk 64x64: expected three sizes M_N_K" in run("list", "--mnk", "64x64").stderr
    assert run("list", "--where", "fusion=bias_n").stdout == ""
    assert "fusion=any: name its parts" in run("build", "--mnk", "64_64_64", "--where", "fusion=any").stderr
    nothing = run("list", "--gpu", "l40s", env=own_catalog)
    advice = "l40s has none of its own; those of rtx4090 stand in, see 'cudal2gen list --gpu rtx4090'"
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", f"note: no record matches: {advice}\n")
    nothing = run("list", "--gpu", "h200", "--where", "family=sm80_direct", env=own_catalog)
    have = "h200 has 2057, f16 tn, f32 tn, of sm90_small, sm90_wgmma, sm80_multistage"
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", f"note: no record matches: {have}\n")


@pytest.mark.slow
def test_any_selects_all(own_catalog: dict[str, str], tmp_path: Path) -> None:
    """The catalog has one size on two GPUs with two accumulators each."""
    kinds = [("a100", "f16"), ("a100", "f32"), ("h200", "f16"), ("h200", "f32")]
    kept = [record for record in catalog.load() if record.mnk == "64_64_64" and (record.gpu, record.acc) in kinds]
    catalog.save(kept, Path(own_catalog["CUDAL2GEN_CATALOG"]))
    build = ("--build-dir", str(tmp_path / "b"), "build", "--all", "--json")
    names = {
        key: [json.loads(line)["name"] for line in run(*build, *options, env=own_catalog).stdout.splitlines()]
        for key, options in {
            "all": ("--gpu", "any", "--acc", "any"), "h200": ("--gpu", "h200", "--acc", "any"),
            "f32": ("--gpu", "any", "--acc", "f32"),
        }.items()
    }  # fmt: skip
    assert {key: len(values) for key, values in names.items()} == {"all": 4, "h200": 2, "f32": 2}
    assert names["h200"] == [
        record.name for record in sorted(kept, key=lambda record: record.key) if record.gpu == "h200"
    ]
    assert "no records for any f16 nn" in error("build", "--all", "--gpu", "any", "--layout", "nn", env=own_catalog)


@pytest.mark.slow
def test_choices_are_taken_in_any_case(own_catalog: dict[str, str]) -> None:
    lower, upper = (
        run("list", "--gpu", gpu, "--acc", acc, env=own_catalog) for gpu, acc in (("a100", "f16"), ("A100", "F16"))
    )
    assert upper.stdout == lower.stdout != ""


@pytest.fixture
def catalog_of_six_sizes(own_catalog: dict[str, str]) -> dict[str, str]:
    """Environment variables that name a catalog with six sizes, one or more of each size class, on all GPUs."""
    mnks = {"64_64_64", "64_4096_64", "256_256_4096", "128_128_128", "4096_4096_64", "16384_16384_16384"}
    records = [record for record in catalog.load() if record.mnk in mnks]
    catalog.save(records, Path(own_catalog["CUDAL2GEN_CATALOG"]))
    return own_catalog


@pytest.mark.parametrize(
    ("selection", "mnks"),
    [
        (Selection(size_class="small-m"), ["64_64_64", "64_4096_64"]),
        (Selection(mnk=("64_64_64", "128_128_128")), ["64_64_64", "128_128_128"]),
        (Selection(size_class="tiny", gpu="any", acc="f32"), ["128_128_128"] * 6),
        (Selection(mnk=("64_64_64",), acc="any"), ["64_64_64"] * 2),
    ],
)
def test_a_selection_resolves_to_records(
    selection: Selection, mnks: list[str], catalog_of_six_sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAL2GEN_CATALOG", catalog_of_six_sizes["CUDAL2GEN_CATALOG"])
    records = selection.records()
    assert [record.mnk for record in records] == mnks
    assert all(selection.admits(record) for record in records)
    sampled = Selection(sample=4).records()
    assert len({record.problem.size_class for record in sampled}) == len(sampled) == 4
    assert [record.mnk for record in Selection(size_class="tiny", gpu="h100", acc="f32").records()] == [
        "128_128_128"
    ], "taken over from h200"


def test_listed_problems_get_records_of_their_own_sizes(
    catalog_of_six_sizes: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDAL2GEN_CATALOG", catalog_of_six_sizes["CUDAL2GEN_CATALOG"])
    problems = [{"gpu": gpu, "acc": "f16", "layout": "tn", "m": 120, "n": 120, "k": 72} for gpu in ("a100", "h200")]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    assert [record.mnk for record in Selection(problem_file=path).records()] == ["120_120_72"]
    assert "note: 1 problems of" in capsys.readouterr().err
    assert [(item.gpu, item.mnk) for item in Selection(problem_file=path, gpu="any").records()] == [
        ("a100", "120_120_72"),
        ("h200", "120_120_72"),
    ]


@given(
    st.integers(65, 1 << 14), st.integers(1, 1 << 14), st.sampled_from((1, 64, 2047, 2048, 1 << 14)), st.integers(0, 2)
)
def test_size_classes_begin_where_they_are_said_to(m: int, n: int, k: int, more: int) -> None:
    """The bounds belong to the smaller class."""

    def class_of(m: int, n: int, k: int) -> str:
        return Problem(gpu="a100", acc="f32", layout="tn", m=m, n=n, k=k).size_class

    assert class_of(min(m, 64), n, k) == "small-m"
    is_split = m * n <= 1024 * 1024 and k >= 2048
    flops = ("tiny", 1e8), ("medium", 1e10), ("large", 1e12), ("huge", math.inf)
    assert class_of(m, n, k) == ("split-k" if is_split else next(name for name, most in flops if 2 * m * n * k <= most))
    # At the bounds themselves, and one element beyond.
    assert class_of(1024, 1024 + more, 2048) == ("split-k" if not more else "medium")
    assert class_of(100, 500 + more, 1000) == ("tiny" if not more else "medium")
    assert class_of(5000, 1000 + more, 1000) == ("medium" if not more else "large")
    assert class_of(5000, 10000 + more, 10000) == ("large" if not more else "huge")
