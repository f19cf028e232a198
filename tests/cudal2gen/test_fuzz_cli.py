"""Proves on drawn command lines that every verb ends by a documented exit code and a short message.

Verbs run in this process on a small catalog. What would compile, execute, train or reach a GPU is replaced.
"""

from __future__ import annotations

import inspect
import shutil
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.models import ArgumentInfo, OptionInfo

from cudal2gen import cli, places, validator
from cudal2gen.cli import learning
from cudal2gen.generation import compiler
from cudal2gen.kernel import FAMILIES
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import GpuError
from cudal2gen.operators import shapes
from cudal2gen.tuner import campaign, ray_executor
from kernelproof.ground import toolchain
from kernelproof.ground.toolchain import ToolchainError
from tests.cudal2gen.fuzzed import TEXTS, check_outcome, examples, run_in_process

# The verbs with their functions, and all fields of records.
VERBS = {command.name: command.callback for command in cli.app.registered_commands}
FIELDS = sorted({name for family in FAMILIES.values() for name in family.line_fields()})
# Names in the folder in which an example runs.
PATHS = (
    "kernels.jsonl", "list.jsonl", "junk", "empty", "folder", "folder/new", "none/deep/x", "/proc/none/x", "/dev/null",
    "out.whl", "out", "m.py", "\udcff", "a\nb", "", ".", "n" * 300, "junk/x", "locked.jsonl", "bom.jsonl",
)  # fmt: skip
# Values of options, right and wrong.
SIZES = ("64_64_64", "64_64_256", "4096_4096_64", "100_100_100", "1_1_1", "16777216_8_8", "0_1_1", "64_64", "9" * 30)
MODELS = ("", ".", "..x", "a b", "m.py", "m.py:model", "m.py:none", "m.py:exits", "none.py", "json", "json:dumps", ":")
NUMBERS = ("0", "1", "2", "-1", "1e9", "nan", "inf", "-inf", "x", "", "9" * 25, "9" * 5000, "0.5", "1_0", "٣")
SETTINGS = (
    "bm=64", "bm=96", "bn=160", "stages=2", "split_k=2", "prefetch=multi", "prefetch=multi:x", "prefetch.kind=none",
    "epilogue=direct", "gpu=h200", "family=sm90_wgmma", "family=sm80_direct", "family=x", "m=8", "mma_repeat=2,4,1",
    "bake=k", "bk=[[", "bm==", "=", "x", "origin=1", "problem=1", "mma_repeat=" + "[" * 3000, "bm=" + "9" * 5000,
)  # fmt: skip


def values(kind: Any, option: OptionInfo | ArgumentInfo) -> st.SearchStrategy[str]:
    """Draws what may be typed for an option of this type: mostly legal values."""
    if get_origin(kind) is Literal:
        return st.one_of(st.sampled_from(get_args(kind)), TEXTS)
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [str(member.value) for member in kind]
        return st.one_of(st.sampled_from([*names, *map(str.upper, names)]), TEXTS)
    if kind in (int, float):
        return st.sampled_from(NUMBERS)
    if kind is Path:
        return st.sampled_from(PATHS)
    pool = {"M_N_K": SIZES, "FIELD=VALUE": SETTINGS, "MODEL": MODELS, "DURATION": ("1s", "0", "1h", "x", "1e400")}
    words = pool.get(
        str(option.metavar), ("normal", "random", "nearest,random", "device", "none", "http://h/v1", "a,b")
    )
    if words is SETTINGS:
        return st.one_of(st.sampled_from(SETTINGS), st.builds("{}={}".format, st.sampled_from(FIELDS), TEXTS))
    return st.one_of(st.sampled_from(words), st.sampled_from(words), st.sampled_from(NUMBERS), TEXTS)


def words(name: str, annotation: Any) -> st.SearchStrategy[list[str]]:
    """Draws the words of an option or argument of a verb."""
    kind, option = annotation.__origin__, annotation.__metadata__[0]
    kinds = (
        [part for part in get_args(kind) if part is not type(None)]
        if get_origin(kind) not in (list, tuple, Literal)
        else []
    )
    kind = kinds[0] if kinds else kind
    parts = (
        list(get_args(kind)) if get_origin(kind) is tuple else [get_args(kind)[0] if get_origin(kind) is list else kind]
    )
    flags = [word for flag in option.param_decls or (f"--{name.replace('_', '-')}",) for word in flag.split("/")]
    if isinstance(option, ArgumentInfo):
        return values(kind, option).map(lambda value: [value])
    if kind is bool:
        return st.sampled_from(flags).map(lambda flag: [flag])
    return st.tuples(st.sampled_from(flags), *(values(part, option) for part in parts)).map(list)


# By verb: what draws the words of each of its options.
OPTIONS = {
    verb: [
        words(name, parameter.annotation)
        for name, parameter in inspect.signature(callback).parameters.items()
        if parameter.annotation is not typer.Context
    ]
    for verb, callback in VERBS.items()
    if verb is not None and callback is not None and verb != "mcp"  # this verb serves a pipe
}  # fmt: skip


@st.composite
def vectors(draw: st.DrawFn) -> list[str]:
    """Draws a verb with some of its options, mostly one that chooses sizes. Sometimes a word is lost or doubled."""
    verb = draw(st.sampled_from(sorted(OPTIONS)))
    size = draw(st.sampled_from([["--mnk", "64_64_64"], ["--mnk", "64_64_256"], ["--all"], []]))
    vector = [verb, *size]
    if verb == "tune-model" and draw(st.booleans()):
        vector = [verb, draw(st.sampled_from(MODELS))]
    if verb == "pack" and draw(st.booleans()):
        vector += ["--out", draw(st.sampled_from(PATHS))]
    for option in draw(st.lists(st.sampled_from(OPTIONS[verb]), max_size=4)):
        vector += draw(option)
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(vector) - 1))
        vector[at : at + 1] = draw(st.sampled_from([[], [vector[at]] * 2, [draw(TEXTS)], ["--", vector[at]]]))
    if draw(st.integers(0, 9)) == 0:
        vector = ["--catalog", draw(st.sampled_from(PATHS)), *vector]
    # A shell passes no NUL, and completion would write to the user's files.
    return [word.replace("\0", "") for word in vector if "completion" not in word]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small catalog, files of every kind, and a model."""
    desk = tmp_path_factory.mktemp("desk")
    lines = (places.shipped("configs") / "kernels.jsonl").read_text().splitlines(keepends=True)
    small = [line for line in lines if '"n":64,' in line and ('"k":64,' in line or '"k":256,' in line)]
    (desk / "kernels.jsonl").write_text("".join(small))
    (desk / "list.jsonl").write_text('{"gpu":"a100","acc":"f16","layout":"tn","m":100,"n":64,"k":64,"count":1}\n')
    (desk / "bom.jsonl").write_text("\ufeff" + small[0])
    (desk / "locked.jsonl").write_text(small[0][:-20] + "\n{")
    (desk / "junk").write_bytes(b"\xff\x00 junk\n{[\n" + b"9" * 5000)
    (desk / "empty").write_bytes(b"")
    (desk / "folder").mkdir()
    (desk / "m.py").write_text(
        "import sys\n\ndef main():\n    return None\n\ndef model():\n    raise KeyError('a\\nb')\n\n"
        "def exits():\n    sys.exit(7)\n"
    )
    shapes.collect(lambda: None)  # the first call imports torch
    return desk


@pytest.fixture
def workplace(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder ``desk``, with slow parts of the program replaced."""
    shutil.copytree(desk, tmp_path / "desk")
    built = tmp_path / "0123456789abcdef"
    built.mkdir()
    for name in (*compiler.FILES, "launcher.so"):
        (built / name).write_text("stand-in")
    tools = toolchain.Toolchain(built, built, built, built, "13.0.1", "4.2.0")
    ptxas = compiler.Ptxas("sm_80", 32, 0, 0, 0, 0, 1)

    def discover(nvcc: Path | None = None) -> toolchain.Toolchain:
        if nvcc is not None:
            raise ToolchainError(f"{nvcc} does not run")
        return tools

    def connect(device: int) -> gpu.Gpu:
        raise GpuError(f"--gpu NAME:{device}: no CUDA device")

    def unreachable(*arguments: Any, **options: Any) -> None:
        raise ray_executor.Unreachable("no cluster")

    def campaign_run(plan: campaign.CampaignPlan, *arguments: Any) -> campaign.CampaignState:
        return campaign.CampaignState(len(plan.problems), 0.0)

    monkeypatch.setattr(toolchain, "discover", discover)
    monkeypatch.setattr(compiler, "discover", discover)
    monkeypatch.setattr(compiler, "build", lambda records, **_: [compiler.Artifact(built, ptxas)] * len(records))
    monkeypatch.setattr(compiler, "launcher", lambda **_: built / "launcher.so")
    monkeypatch.setattr(validator, "validate_all", lambda *_: [])
    monkeypatch.setattr(
        validator,
        "run_case",
        lambda record, artifact, library, shape, inputs, **_: (shape.case(inputs, 1, "equal", []), 0),
    )
    monkeypatch.setattr(validator, "summary", lambda *_: {})
    monkeypatch.setattr(gpu, "connect", connect)
    monkeypatch.setattr(ray_executor, "RayExecutor", unreachable)
    monkeypatch.setattr(campaign, "run", campaign_run)
    monkeypatch.setattr(learning, "compared_on_recordings", lambda *_: "")
    monkeypatch.setattr(learning, "compared_in_the_model", lambda *_: "")
    monkeypatch.chdir(tmp_path / "desk")
    for name, value in {
        "CATALOG": "kernels.jsonl", "RESULTS": "results", "BUILD_DIR": "build", "CACHE_DIR": "cache", "PACK": "folder"
    }.items():  # fmt: skip
        monkeypatch.setenv(f"CUDAL2GEN_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "desk"


@pytest.mark.slow
@given(vector=vectors())
@examples(150)
def test_whatever_is_typed_ends_in_a_documented_way(vector: list[str], workplace: Path, desk: Path) -> None:
    shutil.copy(desk / "kernels.jsonl", "kernels.jsonl")
    check_outcome(run_in_process(*vector))
