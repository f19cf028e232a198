"""Proves that ``--set`` changes fields, ``--fit`` makes the record legal, and ``edit`` writes it to the catalog."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

from cudal2gen import cli
from tests.commands import run
from tests.cudal2gen.test_cli import error, own_catalog

__all__ = ["own_catalog"]  # a fixture


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "new"),
    [
        ("--mnk 4096_4096_64 --set bn=128", False),
        (
            "--mnk 4000_4000_64 --gpu h200 --acc f32 --where ab=bf16 --where fusion=bias_n --set 'cluster=[1,2]' --fit",
            True,
        ),
    ],
)
def test_the_next_steps_of_show_are_about_the_same_record(options: str, new: bool, own_catalog: dict[str, str]) -> None:
    shown = run("show", *shlex.split(options), env=own_catalog).stdout
    steps = [shlex.split(line, comments=True)[1:] for line in shown.partition("\nnext\n")[2].splitlines()]
    assert [verb for verb, *_ in steps] == ["validate", "edit"]
    assert ("--new" in steps[1]) == new
    words = [word for word in steps[1][1:] if word != "--new"]
    assert words == steps[0][1:]
    assert run("show", *words, env=own_catalog).stdout == shown
    assert run(*steps[1], env=own_catalog).returncode == 0


def test_a_fit_moves_other_fields_and_says_why() -> None:
    target = ("--gpu", "h200", "--mnk", "4096_4096_4096")
    done = run("show", *target, "--set", "bm=48", "--fit", "--json")
    record = json.loads(done.stdout)["record"]
    assert (record["bm"], record["swap_ab"], record["atom_n"]) == (48, True, 48)
    assert record["origin"]["changed"] == ["atom_n", "bm", "swap_ab"]
    assert "note: atom_n 256 -> 48: must divide bm=48\n" in done.stderr
    assert done.stderr.count("note: ") == 2, "a line for each field"
    assert run("render", *target, "--set", "stages=2", "--fit").stderr == "", "legal already"


def test_the_kernel_of_one_gpu_on_another_is_noted() -> None:
    target = ("show", "--mnk", "4096_4096_4096", "--json")
    noted, own = run(*target, "--set", "gpu=h200"), run(*target, "--gpu", "h200")
    assert (json.loads(noted.stdout)["record"]["family"], noted.stderr.count("note: ")) == ("sm80_multistage", 1)
    assert (json.loads(own.stdout)["record"]["family"], own.stderr) == ("sm90_wgmma", "")


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


@pytest.mark.slow
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


def test_edit_writes_a_checked_change(own_catalog: dict[str, str]) -> None:
    done = run("edit", "--mnk", "4096_4096_64", "--set", "min_blocks=1", "--set", "prefetch=none", env=own_catalog)
    assert done.returncode == 0, done.stderr
    record = json.loads(run("show", "--mnk", "4096_4096_64", "--json", env=own_catalog).stdout)["record"]
    assert record["prefetch"] == {"kind": "none", "distance": None}
    assert record["origin"]["structure"] == "edited"
    assert "prefetch" in record["origin"]["changed"]
    assert len(Path(own_catalog["CUDAL2GEN_CATALOG"]).read_text().splitlines()) == 11114  # as before


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_refused_edit_leaves_the_catalog_as_it_was(own_catalog: dict[str, str]) -> None:
    before = Path(own_catalog["CUDAL2GEN_CATALOG"]).read_bytes()
    message = error("edit", "--mnk", "4096_4096_64", "--set", "stages=13", "--set", "bk=64", env=own_catalog)
    assert "stages=13" in message
    assert Path(own_catalog["CUDAL2GEN_CATALOG"]).read_bytes() == before
