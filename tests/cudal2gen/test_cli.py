"""The command line as a user meets it: output, notes, one-line errors, exit codes."""

from __future__ import annotations

import inspect
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
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import FAMILIES, Problem, parse
from kernelproof.ground.command_line.tables import print_table
from tests.commands import run
from tests.cpu_times import cpu_seconds


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
    started = cpu_seconds()
    done = run("render", "--all", "--out", str(tmp_path))
    seconds = cpu_seconds() - started
    files = list(tmp_path.iterdir())
    assert done.returncode == 0
    assert done.stderr == f"{len(files)} distinct texts in {tmp_path}\n"
    assert 500 < len(files) < 1000
    assert seconds < 20


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mma_repeat=2,4", "mma_repeat=[2, 4]: value 3 of it is missing"),
        ("mma_repeat=2", "mma_repeat=[2]: value 2 of it is missing; mma_repeat=[2]: value 3 of it is missing"),
        ("mma_repeat=2,4,1,1", "mma_repeat=[2, 4, 1, 1]: takes at most 3 items, not 4"),
        ("bn=64,128", "bn=[64, 128]: input should be a valid integer; 'cudal2gen try' takes several values"),
        ("stages=2..4", "stages=\"2..4\": input should be a valid integer; 'cudal2gen try' takes several values"),
    ],
)
def test_a_list_of_another_length_is_refused_in_words(setting: str, message: str) -> None:
    for fit in ((), ("--fit",)):
        assert error("show", "--mnk", "4096_4096_64", "--set", setting, *fit) == message


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


def test_a_fit_moves_other_fields_and_says_why() -> None:
    target = ("--gpu", "h200", "--mnk", "4096_4096_4096")
    done = run("show", *target, "--set", "bm=48", "--fit", "--json")
    record = json.loads(done.stdout)["record"]
    assert (record["bm"], record["swap_ab"], record["atom_n"]) == (48, True, 48)
    assert record["origin"]["changed"] == ["atom_n", "bm", "swap_ab"]
    assert "note: atom_n 256 -> 48: must divide bm=48\n" in done.stderr
    assert done.stderr.count("note: ") == 2, "a line for each field"
    assert run("render", *target, "--set", "stages=2", "--fit").stderr == "", "legal already"


def test_notes_of_several_fits_name_their_problems() -> None:
    done = run("render", "--mnk", "512_512_512", "--mnk", "64_4096_64", "--set", "bn=48", "--fit", "--out", "/dev/null")
    assert {line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith("note: ")} == {
        "512_512_512",
        "64_4096_64",
    }


def test_the_settings_of_a_refusal_make_it_legal() -> None:
    edit = ("show", "--mnk", "4096_4096_4096", "--set", "prefetch=multi")
    message = error(*edit)
    assert message.endswith(", or with --fit")
    settings = re.findall(r"--set (\S+[^\s,])", message)
    assert settings
    assert run(*edit, *[f"--set={setting}" for setting in settings]).returncode == 0


def test_a_family_without_plain_decisions_is_fitted_from_its_candidates() -> None:
    edit = ("show", "--gpu", "h200", "--mnk", "4096_4096_4096", "--set", "family=sm80_multistage")
    assert error(*edit).endswith("; legal with --fit")
    done = run(*edit, "--set", "prefetch=multi", "--fit", "--json")
    assert json.loads(done.stdout)["record"]["prefetch"]["kind"] == "multi", done.stderr


def test_every_verb_that_sets_fields_fits_them() -> None:
    for command in cli.app.registered_commands:
        assert command.callback is not None
        options = inspect.signature(command.callback).parameters
        assert ("changes" in options) == ("fit" in options), command.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "stage=4"], "did you mean stages?"),
        (["--set", "BM=128"], "did you mean bm?"),
        (["--set", "pingpong=true"], "did you mean prefetch.kind=pingpong?"),
        (["--gpu", "h200", "--set", "pingpong=true"], "did you mean schedule=pingpong?"),
        (["--gpu", "h200", "--set", "prefetch=multi"], "add --set family=sm80_multistage"),
        (["--set", "zebra=1"], "which has gpu, acc, layout, m, n, k, ab, d, fusion, batch, family"),
    ],
)
def test_a_field_that_is_not_there_gets_a_suggestion(arguments: list[str], message: str) -> None:
    assert message in error("show", "--mnk", "4096_4096_4096", *arguments, "--fit")


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


def test_another_family_starts_from_a_plain_record() -> None:
    done = run("show", "--mnk", "4096_4096_4096", "--gpu", "h200", "--set", "family=sm90_wgmma", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["record"]["family"] == "sm90_wgmma"
    assert facts["record"]["origin"]["structure"] == "modelled"
    assert (facts["derived"]["arch"], facts["derived"]["entry_registers"]) == ("sm_90a", 168)
    assert facts["derived"]["cluster_ctas"] == 2, "large products share operands in pairs"
    changed = run(
        *("show", "--mnk", "4096_4096_4096", "--gpu", "h200", "--json", "--set", "cluster=1,1"),
        *("--set", "family=sm90_wgmma", "--set", "registers=null", "--set", "stages=3"),
    )
    record = json.loads(changed.stdout)["record"]
    assert (record["cluster"], record["registers"], record["stages"]) == ([1, 1], None, 3)
    message = error("show", "--mnk", "4096_4096_4096", "--set", "family=sm90_wgmma")
    assert message == "gpu=a100: sm90_wgmma needs one of h100, h200, h20"


@pytest.mark.parametrize("mnk", ["1_8_8", "16_4096_512", "64_64_64", "100_128_4096", "4096_4096_64", "64_32_4096"])
@pytest.mark.parametrize("family", ["sm90_wgmma", "sm90_small"])
@pytest.mark.parametrize("acc", ["f16", "f32"])
def test_a_plain_record_is_legal(mnk: str, family: str, acc: str) -> None:
    m, n, k = (int(part) for part in mnk.split("_"))
    problem = Problem.model_validate({"gpu": "h200", "acc": acc, "layout": "tn", "m": m, "n": n, "k": k})
    origin = {"source": "test", "structure": "modelled", "changed": []}
    fields = problem.model_dump() | {"family": family, "origin": origin} | FAMILIES[family].plain(problem)
    assert parse(fields).family == family


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


def test_tables_in_a_pipe_have_whole_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "reason", box=None)
    table.add_row("x" * 90, "y " * 100 + "end")
    print_table(table)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "reason"]
    assert row.split() == ["x" * 90, *["y"] * 100, "end"]


def test_edit_writes_a_checked_change(own_catalog: dict[str, str]) -> None:
    done = run("edit", "--mnk", "4096_4096_64", "--set", "min_blocks=1", "--set", "prefetch=none", env=own_catalog)
    assert done.returncode == 0, done.stderr
    record = json.loads(run("show", "--mnk", "4096_4096_64", "--json", env=own_catalog).stdout)["record"]
    assert record["prefetch"] == {"kind": "none", "distance": None}
    assert record["origin"]["structure"] == "modelled"
    assert "prefetch" in record["origin"]["changed"]
    assert len(Path(own_catalog["CUDAL2GEN_CATALOG"]).read_text().splitlines()) == 11057


def test_edit_changes_its_own_record_only(own_catalog: dict[str, str]) -> None:
    before = Path(own_catalog["CUDAL2GEN_CATALOG"]).read_bytes()
    assert "no record for a100 f16 tn 4000_4000_60; 'cudal2gen edit --new' adds one" in error(
        "edit", "--mnk", "4000_4000_60", "--set", "min_blocks=1", env=own_catalog
    )
    assert "--new: 4096_4096_64 has a record for a100 f16 tn" in error(
        "edit", "--mnk", "4096_4096_64", "--new", env=own_catalog
    )
    assert "a record's problem does not change" in error(
        "edit", "--mnk", "4096_4096_64", "--set", "m=8192", env=own_catalog
    )
    assert Path(own_catalog["CUDAL2GEN_CATALOG"]).read_bytes() == before


def test_edit_new_adds_a_size_which_then_is_its_own(own_catalog: dict[str, str]) -> None:
    size = ("--mnk", "4000_4000_60", "--gpu", "h100")
    done = run("edit", *size, "--new", "--set", "raster_group=4", env=own_catalog)
    assert done.returncode == 0, done.stderr
    assert "that of h200 4096_4096_64 stands in, padded to 4000_4000_64 by copies of A and B" in done.stderr
    record = json.loads(run("show", *size, "--json", env=own_catalog).stdout)["record"]
    assert (record["m"], record["padding"], record["raster_group"]) == (4000, "pad", 4)
    assert record["origin"]["changed"] == ["gpu", "k", "m", "n", "padding", "raster_group"]
    assert "has a record" in error("edit", *size, "--new", env=own_catalog)
    other = run("show", "--mnk", "1024_1024_1024", "--gpu", "h100", "--json", env=own_catalog)
    assert "that of h200 1024_1024_1024 stands in" in other.stderr, "one record of h100 hides none of h200"


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        (["r2s_bytes=16", "smem_swizzle_c=null"], "smem_swizzle_c", None),
        (["epilogue=global", "r2s_bytes=null", "smem_swizzle_c=null", "c_batch=null"], "epilogue", "global"),
        (["mma_repeat=4,2,1"], "mma_repeat", [4, 2, 1]),
        (["bake=[k]"], "bake", ["k"]),
        (['bake=["k"]'], "bake", ["k"]),
        (["bake=k", "bake="], "bake", []),
        (["mma_repeat=[4,2,1]"], "mma_repeat", [4, 2, 1]),
        (["prefetch=pingpong"], "prefetch", {"kind": "pingpong", "distance": None}),
        (['prefetch={"kind":"none","distance":null}'], "prefetch", {"kind": "none", "distance": None}),
        (["bk=64", "stages=2", "prefetch=multi:3"], "prefetch", {"kind": "multi", "distance": 3}),
        (
            ["bk=64", "stages=2", "prefetch=multi:3", "prefetch.distance=2"],
            "prefetch",
            {"kind": "multi", "distance": 2},
        ),
        (["family=sm80_direct", "bm=32", "bn=32"], "family", "sm80_direct"),
    ],
)
def test_fields_are_set_by_json_or_by_shorthand(changes: list[str], field: str, value: object) -> None:
    done = run("show", "--mnk", "4096_4096_4096", "--json", *[f"--set={change}" for change in changes])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["record"][field] == value


@pytest.mark.slow
def test_run_executes_and_reports(tmp_path: Path) -> None:
    done = run("run", "--mnk", "64_256_256")
    assert done.returncode == 0, done.stderr
    assert "ran      64_256_256 on the emulator, 16 CTAs, normal inputs" in done.stdout
    assert done.stdout.endswith("verdict  right, no hazards\n")
    answer = json.loads(run("run", "--mnk", "64_256_256", "--inputs", "binary", "--json").stdout)
    assert answer["case"]["max_error"] == 0
    assert answer["counters"]["mma_per_k_tile"] == 8


def test_any_selects_all(own_catalog: dict[str, str], tmp_path: Path) -> None:
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
    assert len((tmp_path / "results" / "verdicts.jsonl").read_text().splitlines()) == 3
    derived = json.loads(run("show", "--mnk", "64_64_64", "--json", env=env).stdout)["derived"]
    assert derived["verdict"] == "right"
    assert derived["mma_per_k_tile"] > 0


@pytest.mark.slow
def test_a_wrong_kernel_is_exit_code_1(tmp_path: Path) -> None:
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


def test_a_full_output_and_an_early_reader_are_no_tracebacks() -> None:
    script = f"{sys.executable} -m cudal2gen list"
    full = subprocess.run(f"{script} > /dev/full", shell=True, capture_output=True, text=True, check=False)
    assert (full.returncode, full.stderr) == (1, "error: output: No space left on device\n")
    early = subprocess.run(f"{script} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert early.stderr == ""


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
    before = os.times()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=os.environ | env)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.slow
def test_a_cold_start_renders_in_half_a_second(tmp_path: Path) -> None:
    """In units of importing the libraries, an eighth of a second on an idle machine: load lengthens both alike.

    Python's compiled files are there from the second round on, as they are for a user.
    """
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    rounds = [
        (processor_seconds(env, "-c", "import jinja2, pydantic, typer"),
         processor_seconds(env, "-m", "cudal2gen", "render", "--mnk", "4096_4096_64"))
        for _ in range(10)
    ]  # fmt: skip
    libraries, render_seconds = (min(column) for column in zip(*rounds, strict=True))
    assert 0 < render_seconds < 4 * libraries, rounds


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
    derived = json.loads(run("--build-dir", str(tmp_path), "show", "--mnk", "64_64_64", "--json").stdout)["derived"]
    assert derived["registers"] == row["registers"]


def test_a_build_that_spills_fails(tmp_path: Path) -> None:
    changes = [
        f"--set={change}" for change in ("bm=256", "bn=256", "mma_repeat=2,2,1", "stages=1", "bk=32", "g2s_slot=0")
    ]
    message = error("--build-dir", str(tmp_path), "build", "--mnk", "4096_4096_4096", *changes, code=1)
    assert "spills" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["render"], "give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE"),
        (["render", "--mnk", "64_64"], "--mnk 64_64: expected three sizes M_N_K, such as 4096_4096_64"),
        (["render", "--mnk", "0_64_64"], "m=0: input should be greater than or equal to 1"),
        (
            ["render", "--mnk", "64_64_64", "--gpu", "v100"],
            "invalid value for '--gpu': 'v100' is not one of 'a100', 'rtx3090'",
        ),
        (
            ["render", "--mnk", "64_64_64", "--acc", "bf16"],
            "invalid value for '--acc': 'bf16' is not one of 'f16', 'f32'",
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
        (["list", "--gpu", "A10"], "invalid value for '--gpu': 'A10' is not one of 'a100', 'rtx3090'"),
        (["tune", "--mnk", "64_64_64", "--environment", "mod"], "'mod' is not one of 'gpu', 'model'"),
        (["run", "--mnk", "64_64_64", "--inputs", "bin"], "'bin' is not one of 'binary', 'sparse'"),
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


def test_choices_are_taken_in_any_case(own_catalog: dict[str, str]) -> None:
    lower, upper = (
        run("list", "--gpu", gpu, "--acc", acc, env=own_catalog) for gpu, acc in (("a100", "f16"), ("A100", "F16"))
    )
    assert upper.stdout == lower.stdout != ""


def test_a_model_that_ends_the_program_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("import sys\nsys.exit('no\\nmore')\n")
    assert f"{model} cannot be imported: {model}:2: SystemExit: no" in error("tune-model", str(model))
    model.write_text("def main(:\n")
    assert "SyntaxError" in error("tune-model", str(model))


def test_a_truncated_catalog_is_named_by_line(own_catalog: dict[str, str]) -> None:
    path = Path(own_catalog["CUDAL2GEN_CATALOG"])
    path.write_text(path.read_text()[:-100])
    assert f"{path}:11057: " in error("list", env=own_catalog)


def test_no_compiler_is_exit_code_3() -> None:
    message = error("build", "--mnk", "64_64_64", code=3, env={"KERNELPROOF_NVCC": "/nowhere/nvcc"})
    assert "/nowhere/nvcc does not run" in message
    assert "pip install 'cudal2gen[nvcc]'" in message


def test_doctor_tells_what_there_is(tmp_path: Path) -> None:
    done = run("doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["catalog"]["detail"].startswith("11057 records")
    assert answer["compile"]["ok"]
    assert answer["disassemble"]["detail"].startswith("nvdisasm (")
    assert answer["emulate"]["detail"].startswith("kernels run on the CPU, by ")
    assert "libcudal2gen_torch.so" in answer["calls from C++"]["detail"] or "no torch" in str(answer["calls from C++"])
    assert answer["packs"] == {"ok": False, "detail": "none installed: cudal2gen.matmul is torch's"}
    broken = run("doctor", "--json", env={"CUDAL2GEN_PACK": "/nowhere"})
    assert json.loads(broken.stdout)["packs"] == {"ok": False, "detail": "no pack at /nowhere"}
    broken = run("doctor", env={"KERNELPROOF_NVCC": "/nowhere/nvcc"})
    assert broken.returncode == 3
    assert "missing  compile" in broken.stdout
    broken = run("doctor", env={"PATH": str(tmp_path), "KERNELPROOF_CACHE_DIR": str(tmp_path)})
    assert broken.returncode == 3
    assert "missing  emulate          no C compiler (gcc, cc or clang) on PATH" in broken.stdout
    broken = run("doctor", "--json", env={"KERNELPROOF_NVDISASM": "/nowhere/nvdisasm"})
    assert "KERNELPROOF_NVDISASM=/nowhere/nvdisasm is no program" in json.loads(broken.stdout)["disassemble"]["detail"]


@pytest.mark.parametrize("command", [command.name for command in cli.app.registered_commands])
def test_every_command_has_help_that_explains_its_options(command: str | None) -> None:
    assert command is not None
    done = run(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 4
    options = [option for option in re.split(r"\n  (?=-)", done.stdout)[1:] if not option.startswith("-h")]
    assert options
    assert all(len(option.split()) > 3 for option in options)


def test_completion_is_printed_for_a_shell_that_is_named() -> None:
    done = run("--show-completion", "bash")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "complete -o default -F _cudal2gen_completion cudal2gen"
    assert "_CUDAL2GEN_COMPLETE=complete_bash" in done.stdout
    assert "'tcsh' is not one of 'bash'" in error("--show-completion", "tcsh")


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("show --gpu ", ["a100", "rtx3090", "rtx4090", "l40s", "h100", "h200", "h20", "b200", "rtx5090", "rtxpro6000"]),
        ("build --gpu a", ["a100", "any"]),
        ("list --where st", ["structure=exact", "structure=nearest", "structure=tuned", "structure=modelled"]),
        ("run --inputs s", ["sparse", "special"]),
        ("tune --proposers policy,r", ["policy,random"]),
        ("tune --where class=s", ["class=small-m", "class=split-k"]),
        ("tune-m", ["tune-model"]),
    ],
)
def test_a_shell_completes_choices(words: str, completions: list[str]) -> None:
    """As the script of ``--show-completion bash`` asks, without the shell."""
    line = f"cudal2gen {words}"
    position = len(line.split()) - (not line.endswith(" "))
    env = {"_CUDAL2GEN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(position)}
    assert run(env=env).stdout.split() == completions


@pytest.fixture
def sizes(own_catalog: dict[str, str]) -> dict[str, str]:
    """A catalog with six sizes, of all classes."""
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
    selection: Selection, mnks: list[str], sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAL2GEN_CATALOG", sizes["CUDAL2GEN_CATALOG"])
    records = selection.records()
    assert [record.mnk for record in records] == mnks
    assert all(selection.admits(record) for record in records)
    sampled = Selection(sample=4).records()
    assert len({record.problem.size_class for record in sampled}) == len(sampled) == 4
    assert [record.mnk for record in Selection(size_class="tiny", gpu="h100", acc="f32").records()] == [
        "128_128_128"
    ], "taken over from h200"


def test_a_selection_of_a_list_is_fitted_to_its_sizes(
    sizes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDAL2GEN_CATALOG", sizes["CUDAL2GEN_CATALOG"])
    problems = [{"gpu": gpu, "acc": "f16", "layout": "tn", "m": 120, "n": 120, "k": 72} for gpu in ("a100", "h200")]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    assert [record.mnk for record in Selection(listed=path).records()] == ["120_120_72"]
    assert "note: 1 problems of" in capsys.readouterr().err
    assert [(item.gpu, item.mnk) for item in Selection(listed=path, gpu="any").records()] == [
        ("a100", "120_120_72"),
        ("h200", "120_120_72"),
    ]
