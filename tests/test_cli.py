"""The command line as a user meets it: output, notes, one-line errors, exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cudal2gen import catalog, places
from cudal2gen.kernel import Problem
from cudal2gen.renderer import render


def run(*arguments: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", "cudal2gen", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (env or {}), **options)  # type: ignore[call-overload,no-any-return]


def error(*arguments: str, code: int = 2, env: dict[str, str] | None = None) -> str:
    done = run(*arguments, env=env)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr.removeprefix("error: ").strip()


@pytest.fixture
def own_catalog(tmp_path: Path) -> dict[str, str]:
    shutil.copy(places.shipped("configs") / "kernels.jsonl", tmp_path / "kernels.jsonl")
    return {"CUDAL2GEN_CATALOG": str(tmp_path / "kernels.jsonl")}


def test_render_prints_the_records_text() -> None:
    done = run("render", "--mnk", "4096_4096_64")
    record = catalog.find(Problem(gpu="a100", acc="f16", layout="tn", m=4096, n=4096, k=64)).record
    assert done.returncode == 0
    assert done.stdout == render(record)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "plain in a pipe"


def test_render_takes_changes_and_writes_files(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "k.cu"
    done = run(
        "render", "--mnk", "4096_4096_4096", "--set", "mma_repeat=4,2,1", "--set", "min_blocks=1", "--out", str(out)
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "constexpr int kWarpsM = 4, kWarpsN = 2;" in out.read_text()


def test_render_all_writes_one_file_per_text(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run("render", "--all", "--out", str(tmp_path))
    seconds = time.monotonic() - started
    files = list(tmp_path.iterdir())
    assert done.returncode == 0
    assert done.stderr == f"{len(files)} distinct texts in {tmp_path}\n"
    assert 500 < len(files) < 1000
    assert seconds < 20


def test_off_the_grid_a_note_says_what_is_taken() -> None:
    done = run("render", "--mnk", "4000_4000_60")
    assert done.returncode == 0
    assert (
        done.stderr == "note: no record for a100 f16 tn 4000_4000_60; "
        "taking that of a100 f16 tn 4096_4096_64, the nearest larger one\n"
    )
    assert done.stdout == run("render", "--mnk", "4096_4096_64").stdout


def test_show_gives_the_record_and_what_follows() -> None:
    done = run("show", "--mnk", "4096_4096_64", "--json")
    answer = json.loads(done.stdout)
    assert answer["record"]["m"] == 4096
    assert answer["record"]["family"] == "sm80_multistage"
    assert answer["derived"]["threads"] == 32 * answer["record"]["mma_repeat"][0] * answer["record"]["mma_repeat"][1]
    assert answer["derived"]["smem_limit_bytes"] == 163 * 1024
    text = run("show", "--mnk", "4096_4096_64").stdout
    for word in ("smem_bytes", "waves", "padding_waste", "registers_estimated", "ctas_per_sm"):
        assert word in text


def test_show_says_when_min_blocks_is_out_of_reach() -> None:
    done = run("show", "--mnk", "4096_4096_4096", "--set", "min_blocks=32")
    assert "min_blocks=32 only bounds registers" in done.stdout.replace("\n", " ")


def test_list_filters(own_catalog: dict[str, str]) -> None:
    assert len(run("list", "--gpu", "a100", "--acc", "f16").stdout.splitlines()) == 1000
    direct = run("list", "--family", "sm80_direct", "--json").stdout.splitlines()
    assert direct
    assert all(json.loads(line)["family"] == "sm80_direct" for line in direct)
    nothing = run("list", "--gpu", "h200", env=own_catalog)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "no record matches\n")


def test_edit_writes_a_checked_change(own_catalog: dict[str, str]) -> None:
    done = run("edit", "--mnk", "4096_4096_64", "--set", "min_blocks=1", "--set", "prefetch=none", env=own_catalog)
    assert done.returncode == 0, done.stderr
    shown = json.loads(run("show", "--mnk", "4096_4096_64", "--json", env=own_catalog).stdout)["record"]
    assert shown["prefetch"] == {"kind": "none", "distance": None}
    assert shown["origin"]["structure"] == "modelled"
    assert "prefetch" in shown["origin"]["changed"]
    assert len(Path(own_catalog["CUDAL2GEN_CATALOG"]).read_text().splitlines()) == 3000


def test_a_refused_edit_leaves_the_catalog_as_it_was(own_catalog: dict[str, str]) -> None:
    before = Path(own_catalog["CUDAL2GEN_CATALOG"]).read_bytes()
    message = error("edit", "--mnk", "4096_4096_64", "--set", "stages=13", "--set", "bk=64", env=own_catalog)
    assert "stages=13" in message
    assert Path(own_catalog["CUDAL2GEN_CATALOG"]).read_bytes() == before


def test_build_compiles_and_reports(tmp_path: Path) -> None:
    done = run("--build-dir", str(tmp_path), "build", "--mnk", "64_64_64", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["findings"] == []
    assert (Path(row["directory"]) / "kernel.cubin").is_file()
    shown = json.loads(run("--build-dir", str(tmp_path), "show", "--mnk", "64_64_64", "--json").stdout)["derived"]
    assert shown["registers"] == row["registers"]


def test_a_build_that_spills_fails(tmp_path: Path) -> None:
    changes = [
        f"--set={change}" for change in ("bm=256", "bn=256", "mma_repeat=2,2,1", "stages=1", "bk=32", "g2s_slot=0")
    ]
    message = error("--build-dir", str(tmp_path), "build", "--mnk", "4096_4096_4096", *changes, code=1)
    assert "spills" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["render"], "give either --mnk M_N_K or --all"),
        (["render", "--mnk", "64_64"], "--mnk 64_64: expected three sizes M_N_K, such as 4096_4096_64"),
        (["render", "--mnk", "0_64_64"], "m=0: input should be greater than or equal to 1"),
        (["render", "--mnk", "64_64_64", "--gpu", "v100"], "--gpu v100: must be one of a100"),
        (["render", "--mnk", "64_64_64", "--acc", "bf16"], "acc=\"bf16\": input should be 'f16' or 'f32'"),
        (["render", "--mnk", "4096_4096_64", "--set", "bm"], "--set bm: expected FIELD=VALUE"),
        (["render", "--mnk", "4096_4096_64", "--set", "bmm=3"], "bmm: extra inputs are not permitted"),
        (["render", "--mnk", "4096_4096_64", "--set", "bm=wide"], 'bm="wide": input should be a valid integer'),
        (["render", "--mnk", "4096_4096_64", "--set", "prefetch=multi:9"], "prefetch.distance=9"),
        (["render", "--all"], "--all needs --out DIR"),
        (["--catalog", "/nowhere/k.jsonl", "list"], "no catalog at /nowhere/k.jsonl"),
        (["edit", "--mnk", "64_64_64"], "nothing to change"),
        (["build", "--all", "--gpu", "h200"], "no records for h200 f16 tn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in error(*arguments)


def test_a_truncated_catalog_is_named_by_line(own_catalog: dict[str, str]) -> None:
    path = Path(own_catalog["CUDAL2GEN_CATALOG"])
    path.write_text(path.read_text()[:-100])
    assert f"{path}:3000: " in error("list", env=own_catalog)


def test_no_compiler_is_exit_code_3() -> None:
    message = error("build", "--mnk", "64_64_64", code=3, env={"CUDAL2GEN_NVCC": "/nowhere/nvcc"})
    assert "/nowhere/nvcc does not run" in message
    assert "pip install 'cudal2gen[nvcc]'" in message


def test_doctor_tells_what_there_is() -> None:
    done = run("doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["catalog"]["detail"].startswith("3000 records")
    assert answer["compile"]["ok"]
    broken = run("doctor", env={"CUDAL2GEN_NVCC": "/nowhere/nvcc"})
    assert broken.returncode == 3
    assert "missing  compile" in broken.stdout


@pytest.mark.parametrize("command", ["list", "show", "render", "build", "edit", "doctor"])
def test_every_command_has_help_that_explains_its_options(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 4
    options = [line for line in done.stdout.splitlines() if line.strip().startswith("--")]
    assert options
    assert all(len(line.split()) > 3 for line in options)
