"""Proves what a user of the command line sees: output, notes, errors of one line, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from cudal2gen import cli, places
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import FAMILIES, Problem, parse
from kernelproof.ground.command_line.tables import print_table
from tests.commands import run
from tests.cpu_times import cpu_seconds


def error(*arguments: str, code: int = 2, env: dict[str, str] | None = None) -> str:
    """Runs a command that must fail with this code and one line, and returns the line without ``error:``."""
    done = run(*arguments, env=env)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr.removeprefix("error: ").strip()


@pytest.fixture
def own_catalog(tmp_path: Path) -> dict[str, str]:
    """The variables of a command that uses a copy of the shipped catalog."""
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


@pytest.mark.slow
def test_render_all_writes_one_file_per_text(tmp_path: Path) -> None:
    started = cpu_seconds()
    done = run("render", "--all", "--out", str(tmp_path))
    seconds = cpu_seconds() - started
    files = list(tmp_path.iterdir())
    assert done.returncode == 0
    assert done.stderr == f"{len(files)} distinct texts in {tmp_path}\n"
    assert 500 < len(files) < 1000
    assert seconds < 20


@pytest.mark.slow
def test_off_the_grid_a_note_names_the_record() -> None:
    done = run("render", "--mnk", "4000_4000_60")
    assert done.returncode == 0
    whole = "no record for a100 f16 tn 4000_4000_60; taking that of 4096_4096_64, padded to 4096_4096_64"
    assert done.stderr == f"note: {whole} by copies of A, B and D\n"
    assert done.stdout == run("render", "--mnk", "4096_4096_64").stdout
    ragged = run("show", "--mnk", "4000_4000_64", "--json")
    assert "taking that of 4096_4096_64, predicated\n" in ragged.stderr
    record = json.loads(ragged.stdout)["record"]
    assert (record["m"], record["n"], record["padding"]) == (4000, 4000, "predicate")
    assert record["origin"]["changed"] == ["m", "n", "padding"]


@pytest.mark.slow
def test_show_gives_the_record_and_what_follows() -> None:
    done = run("show", "--mnk", "4096_4096_64", "--json")
    answer = json.loads(done.stdout)
    assert answer["record"]["m"] == 4096
    assert answer["record"]["family"] == "sm80_multistage"
    assert answer["derived"]["threads"] == 32 * answer["record"]["mma_repeat"][0] * answer["record"]["mma_repeat"][1]
    assert answer["derived"]["smem_limit_bytes"] == 163 * 1024
    text = run("show", "--mnk", "4096_4096_64").stdout
    assert re.search(r"^stages +\d+ +k-tiles in shared memory", text, re.MULTILINE), "fields say what they do"
    for word in ("smem_bytes", "waves", "padding_waste", "registers_estimated", "ctas_per_sm"):
        assert word in text
    assert "cudal2gen validate --mnk 4096_4096_64 " in text


@pytest.mark.slow
def test_an_empty_catalog_says_so(tmp_path: Path) -> None:
    (tmp_path / "kernels.jsonl").touch()
    empty = {"CUDAL2GEN_CATALOG": str(tmp_path / "kernels.jsonl")}
    message = f"{tmp_path}/kernels.jsonl has no records; set --catalog, or restore configs/kernels.jsonl"
    for arguments in (["show", "--mnk", "64_64_64"], ["build", "--all"], ["edit", "--mnk", "64_64_64", "--new"]):
        assert error(*arguments, env=empty) == message
    assert run("list", env=empty).stderr == f"note: no record matches: {message}\n"


def test_a_closed_standard_output_is_an_error() -> None:
    command = f"exec {sys.executable} -m cudal2gen show --mnk 64_64_64 >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: standard output is closed; send it to a file or to /dev/null\n"


def test_the_list_of_verbs_fits_a_terminal_in_whole_sentences() -> None:
    verbs = run("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert len(verbs) > 15
    assert all(line.endswith(".") and not line.endswith("...") for line in verbs), verbs


def test_show_says_when_min_blocks_is_out_of_reach() -> None:
    done = run("show", "--mnk", "4096_4096_4096", "--set", "min_blocks=16")
    assert "note: min_blocks=16 only bounds registers" in done.stderr


@pytest.mark.slow
def test_warnings_are_notes_of_render_and_show() -> None:
    arguments = ("--mnk", "4096_4096_64", "--set", "bm=256")
    spills = "note: 256 accumulator registers of the 255 there are: it is likely to spill\n"
    assert run("render", *arguments).stderr == spills
    assert run("show", *arguments).stderr.startswith(spills), "and other remarks"
    assert run("render", "--mnk", "4096_4096_64", "--set", "bn=128").stderr == "", "the README's example"
    reaches = run(
        "render", "--gpu", "h200", "--mnk", "1024_1024_1024", "--set", "bm=384", "--set", "cluster=2,1", "--fit"
    )
    assert "reaches beyond the 3 x" in reaches.stderr
    few = run("render", "--mnk", "1024_1024_1024", "--set", "bm=256", "--set", "bn=256", "--set", "split_k=1", "--fit")
    assert "16 CTAs leave 92 of 108 SMs idle" in few.stderr


@pytest.mark.parametrize("mnk", ["1_8_8", "16_4096_512", "64_64_64", "100_128_4096", "4096_4096_64", "64_32_4096"])
@pytest.mark.parametrize("family", ["sm90_wgmma", "sm90_small"])
@pytest.mark.parametrize("acc", ["f16", "f32"])
def test_a_plain_record_is_legal(mnk: str, family: str, acc: str) -> None:
    m, n, k = (int(part) for part in mnk.split("_"))
    problem = Problem.model_validate({"gpu": "h200", "acc": acc, "layout": "tn", "m": m, "n": n, "k": k})
    origin = {"source": "test", "structure": "modelled", "changed": []}
    fields = problem.model_dump() | {"family": family, "origin": origin} | FAMILIES[family].plain(problem)
    assert parse(fields).family == family


def test_tables_in_a_pipe_have_whole_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "reason", box=None)
    table.add_row("x" * 90, "y " * 100 + "end")
    print_table(table)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "reason"]
    assert row.split() == ["x" * 90, *["y"] * 100, "end"]


@pytest.mark.slow
def test_run_executes_and_reports(tmp_path: Path) -> None:
    done = run("run", "--mnk", "64_256_256")
    assert done.returncode == 0, done.stderr
    assert "ran      64_256_256 on the emulator, 16 CTAs, normal inputs" in done.stdout
    assert done.stdout.endswith("verdict  right, no hazards\n")
    answer = json.loads(run("run", "--mnk", "64_256_256", "--inputs", "binary", "--json").stdout)
    assert answer["case"]["max_error"] == 0
    assert answer["counters"]["mma_per_k_tile"] == 8


@pytest.mark.slow
def test_validate_stores_verdicts_and_changed_skips_them(tmp_path: Path) -> None:
    env = {"CUDAL2GEN_RESULTS": str(tmp_path / "results"), "CUDAL2GEN_CATALOG": str(tmp_path / "kernels.jsonl")}
    catalog.save(
        [catalog.find(Problem(gpu="a100", acc="f16", layout="tn", m=64, n=64, k=k)).record for k in (64, 256)],
        tmp_path / "kernels.jsonl",
    )
    first = run("validate", "--all", env=env)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("2 records, 2 kernels executed in ")
    assert first.stdout.endswith(": 2 right, 0 wrong\n")
    again = run("validate", "--changed", env=env)
    assert "0 kernels executed in 0 cases, 2 had a verdict" in again.stdout
    validated = run("validate", "--mnk", "64_64_64", "--json", env=env)
    assert json.loads(validated.stdout)["record"].startswith("hgemm_sm80_direct")
    # An equal verdict is not stored again.
    assert len((tmp_path / "results" / "verdicts.jsonl").read_text().splitlines()) == 2
    derived = json.loads(run("show", "--mnk", "64_64_64", "--json", env=env).stdout)["derived"]
    assert derived["verdict"] == "right"
    assert derived["mma_per_k_tile"] > 0
    run("validate", "--mnk", "64_64_64", "--on", "emulator:machine-code", env=env)
    derived = json.loads(run("show", "--mnk", "64_64_64", "--json", env=env).stdout)["derived"]
    assert (derived["verdict"], derived["executed"]) == ("right", "in PTX and in machine code of ptxas 13.0.88")
    assert derived["certified"].startswith("not tried")
    proven = run("prove", "--mnk", "64_64_64", env=env)
    assert proven.returncode == 0, proven.stderr
    derived = json.loads(run("show", "--mnk", "64_64_64", "--json", env=env).stdout)["derived"]
    assert derived["certified"] == "for every problem"
    assert "proof: for every problem" in run("validate", "--mnk", "64_64_64", env=env).stdout


@pytest.mark.slow
def test_a_wrong_kernel_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / compiler.launcher().parent.name).symlink_to(compiler.launcher().parent)
    build = run("--build-dir", str(tmp_path), "build", "--mnk", "64_64_256", "--json")
    ptx = Path(json.loads(build.stdout)["directory"]) / "kernel.ptx"
    lines = ptx.read_text().splitlines()
    barrier = next(i for i, line in enumerate(lines) if "bar.sync" in line)
    ptx.write_text("\n".join(lines[:barrier] + lines[barrier + 1 :]))
    done = run("--build-dir", str(tmp_path), "run", "--mnk", "64_64_256", "--inputs", "binary")
    assert done.returncode == 1
    assert "found    shared-race" in done.stdout
    assert done.stdout.endswith("verdict  WRONG\n")


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["run", "--mnk", "64_64_64"], {"CUDAL2GEN_BUILD_DIR": "/proc/x"}, "cannot write to /proc/x"),
        (["validate", "--mnk", "64_64_64"], {"CUDAL2GEN_RESULTS": "/dev/null"}, "/dev/null"),
    ],
)
def test_a_failed_write_is_one_line_and_exit_code_1(arguments: list[str], env: dict[str, str], message: str) -> None:
    assert message in error(*arguments, code=1, env=env)


@pytest.mark.slow
def test_a_full_output_and_an_early_reader_are_no_tracebacks() -> None:
    script = f"{sys.executable} -m cudal2gen list"
    full = subprocess.run(f"{script} > /dev/full", shell=True, capture_output=True, text=True, check=False)
    assert (full.returncode, full.stderr) == (1, "error: output: No space left on device\n")
    early = subprocess.run(f"{script} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert early.stderr == ""


@pytest.mark.slow
def test_damaged_verdicts_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.write_bytes(b"\xff\xfe rubbish\n{\n" + b"[" * 5000 + b"\n" + b"{}\n" * 5)
    done = run("show", "--mnk", "64_64_64", env={"CUDAL2GEN_RESULTS": str(tmp_path)})
    assert done.returncode == 0
    done = run("report", str(path))
    notes = done.stderr.splitlines()
    assert done.returncode == 0
    assert notes[0] == f"note: {path}:1: not a whole line of JSON, skipped (not JSON: byte 1 is not UTF-8)"
    assert notes[2] == f"note: {path}:3: not a whole line of JSON, skipped (not JSON: nested too deeply)"
    assert notes[5:] == [f"note: {path}: 3 more lines skipped"]


def processor_seconds(env: dict[str, str], *arguments: str) -> float:
    """The CPU seconds of a Python process with these arguments."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=os.environ | env)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.slow
def test_a_cold_start_renders_in_half_a_second(tmp_path: Path) -> None:
    """The limit is in units of the time to import the libraries, an eighth of a second on an idle machine, since load
    lengthens both.

    Python's compiled files exist from the second round on, as they do for a user.
    """
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    rounds = [
        (processor_seconds(env, "-c", "import jinja2, pydantic, typer"),
         processor_seconds(env, "-m", "cudal2gen", "render", "--mnk", "4096_4096_64"))
        for _ in range(5)
    ]  # fmt: skip
    assert 0 < min(render_seconds / libraries for libraries, render_seconds in rounds) < 4, rounds


@pytest.mark.slow
def test_build_compiles_and_reports(tmp_path: Path) -> None:
    done = run("--build-dir", str(tmp_path), "build", "--mnk", "64_64_64", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["findings"] == []
    assert (Path(row["directory"]) / "kernel.cubin").is_file()
    derived = json.loads(run("--build-dir", str(tmp_path), "show", "--mnk", "64_64_64", "--json").stdout)["derived"]
    assert derived["registers"] == row["registers"]


@pytest.mark.slow
def test_a_build_that_spills_fails(tmp_path: Path) -> None:
    changes = [
        f"--set={change}" for change in ("bm=256", "bn=256", "mma_repeat=2,2,1", "stages=1", "bk=32", "g2s_slot=0")
    ]
    message = error("--build-dir", str(tmp_path), "build", "--mnk", "4096_4096_4096", *changes, code=1)
    assert "spills" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["render"], "give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE"),
        (["render", "--mnk", "64_64"], "--mnk 64_64: expected three sizes M_N_K, such as 4096_4096_64"),
        (["render", "--mnk", "0_64_64"], "m=0: input should be greater than or equal to 1"),
        (
            ["render", "--mnk", "64_64_64", "--gpu", "v100"],
            "'--gpu': 'v100'",
        ),
        (
            ["render", "--mnk", "64_64_64", "--acc", "bf16"],
            "'--acc': 'bf16'",
        ),
        (["render", "--mnk", "4096_4096_64", "--set", "bm"], "--set bm: expected FIELD=VALUE"),
        (["render", "--mnk", "4096_4096_64", "--set", "bmm=3"], "bmm: no field of sm80_multistage; did you mean bm?"),
        (["render", "--mnk", "4096_4096_64", "--set", "bm=wide"], 'bm="wide": input should be a valid integer'),
        (["render", "--mnk", "4096_4096_64", "--set", "prefetch=multi:9"], "prefetch.distance=9"),
        (["render", "--all"], "several records need --out DIR"),
        (["--catalog", "/nowhere/k.jsonl", "list"], "no catalog at /nowhere/k.jsonl"),
        (["edit", "--mnk", "64_64_64"], "nothing to change"),
        (["shwo"], "no such command 'shwo'. Did you mean 'show'? See 'cudal2gen --help'"),
        (["build", "--all", "--gpu", "any", "--layout", "nn"], "no records for any f16 nn"),
        (["list", "--gpu", "A10"], "'--gpu': 'A10'"),
        (["tune", "--mnk", "64_64_64", "--environment", "mod"], "'--environment': 'mod'"),
        (["run", "--mnk", "64_64_64", "--inputs", "bin"], "'--inputs': 'bin'"),
        (["tune-model", ""], "'' names no model: give file.py:callable or module:callable"),
        (["tune-model", "none.py"], "no file none.py"),
        (["explain", "--mnk", "64_64_64", "--from", "/nowhere"], "no results file at /nowhere"),
        (["--catalog", "/dev", "list"], "cannot read /dev: Is a directory"),
        (["render", "--mnk", "64_64_64", "--set", f"bm={'9' * 5000}"], "bm="),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in error(*arguments)


@pytest.mark.slow
def test_a_model_that_ends_the_program_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("import sys\nsys.exit('no\\nmore')\n")
    assert f"{model} cannot be imported: {model}:2: SystemExit: no" in error("tune-model", str(model))
    model.write_text("def main(:\n")
    assert "SyntaxError" in error("tune-model", str(model))


@pytest.mark.slow
def test_a_truncated_catalog_is_named_by_line(own_catalog: dict[str, str]) -> None:
    path = Path(own_catalog["CUDAL2GEN_CATALOG"])
    path.write_text(path.read_text()[:-100])
    assert f"{path}:11114: " in error("list", env=own_catalog)


def test_no_compiler_is_exit_code_3() -> None:
    message = error("build", "--mnk", "64_64_64", code=3, env={"KERNELPROOF_NVCC": "/nowhere/nvcc"})
    assert "/nowhere/nvcc does not run" in message
    assert "pip install '.[nvcc]'" in message


@pytest.mark.slow
def test_doctor_tells_what_there_is(tmp_path: Path) -> None:
    done = run("doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["catalog"]["detail"].startswith("11114 records")
    assert answer["compile"]["ok"]
    assert answer["disassemble"]["detail"].startswith("nvdisasm (")
    assert answer["emulate"]["detail"].startswith("kernels run on the CPU, by ")
    assert "libcudal2gen_torch.so" in answer["calls from C++"]["detail"] or "no torch" in str(answer["calls from C++"])
    assert not answer["packs"]["ok"]
    missing = {"CUDAL2GEN_PACK": "/nowhere", "KERNELPROOF_NVDISASM": "/nowhere/nvdisasm"}
    broken = json.loads(run("doctor", "--json", env=missing).stdout)
    assert broken["packs"] == {"ok": False, "detail": "no pack at /nowhere", "needed": False}
    assert not re.search("^missing", run("doctor", env=missing).stdout, re.MULTILINE), "neither is needed"
    assert "KERNELPROOF_NVDISASM=/nowhere/nvdisasm is no program" in broken["disassemble"]["detail"]
    for variables, line in (
        ({"KERNELPROOF_NVCC": "/nowhere/nvcc"}, "missing   compile"),
        (
            {"PATH": str(tmp_path), "KERNELPROOF_CACHE_DIR": str(tmp_path)},
            "missing   emulate          no C compiler (gcc, cc or clang) on PATH",
        ),
    ):
        done = run("doctor", env=variables)
        assert done.returncode == 3
        assert line in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [command.name for command in cli.app.registered_commands])
def test_every_command_has_help_that_explains_its_options(command: str | None) -> None:
    assert command is not None
    done = run(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 4
    options = [option for option in re.split(r"\n  (?=-)", done.stdout)[1:] if not option.startswith("-h")]
    assert options or "Arguments:" in done.stdout
    assert all(len(option.split()) > 3 for option in options)


def test_completion_is_printed_for_a_shell_that_is_named() -> None:
    done = run("--show-completion", "bash")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "complete -o default -F _cudal2gen_completion cudal2gen"
    assert "_CUDAL2GEN_COMPLETE=complete_bash" in done.stdout
    assert "'tcsh'" in error("--show-completion", "tcsh")


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("show --gpu ", ["a100", "rtx3090", "rtx4090", "l40s", "h100", "h200", "h20", "b200", "rtx5090", "rtxpro6000"]),
        ("build --gpu a", ["a100", "any"]),
        ("list --where structure=n", ["structure=nearest"]),
        ("run --inputs s", ["sparse", "special"]),
        ("tune --proposers nearest,r", ["nearest,random"]),
        ("tune --where class=s", ["class=small-m", "class=split-k"]),
        ("tune-m", ["tune-model"]),
    ],
)
def test_a_shell_completes_choices(words: str, completions: list[str]) -> None:
    """The test makes the calls of the script of ``--show-completion bash``, without the shell."""
    line = f"cudal2gen {words}"
    position = len(line.split()) - (not line.endswith(" "))
    env = {"_CUDAL2GEN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(position)}
    assert run(env=env).stdout.split() == completions
