"""Proves on damaged files that readers accept them or name file and line in one short message."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen import pack, places, report, results
from cudal2gen.cli.records import _facts
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, parse
from cudal2gen.kernel.launch import LaunchOperands, Sizes
from cudal2gen.pack.abi import FORMAT
from cudal2gen.pack.facts import as_json
from cudal2gen.results import Case, Trial, Verdict
from cudal2gen.tuner import memory
from cudal2gen.tuner.environment import Replay
from cudal2gen.tuner.language_model.chat import ReplayWire
from cudal2gen.tuner.language_model.transcript import Exchange
from kernelproof.ground.errors import SkippedLine, WrongInput
from kernelproof.ground.version import __version__
from tests.cudal2gen import measured
from tests.cudal2gen.fuzzed import ANYTHING, VALUES, damage, examples, limit_time, mutate_lines, refusal

# The lines of the shipped catalog, a few of them, and a line of a list of problems.
LINES = (places.shipped("configs") / "kernels.jsonl").read_text().splitlines()
RECORDS = LINES[::97]
PROBLEM = Problem(gpu="a100", acc="f16", layout="tn", m=64, n=64, k=64)
PROBLEMS = [json.dumps(PROBLEM.model_dump() | {"count": 3, "op": "aten.mm"})]


@pytest.mark.slow
@given(line=mutate_lines(RECORDS) | ANYTHING)
@examples(500)
def test_lines_of_a_catalog(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    path.write_bytes(LINES[0].encode() + b"\n" + line)
    if message := refusal(lambda: catalog.load(path)):
        assert message.startswith(f"{path}:")
        assert int(message.removeprefix(f"{path}:").split(":")[0]) >= 2
        return
    for record in catalog.load(path)[1:]:
        json.dumps(_facts(record, None))
        assert parse(catalog.dump(record)) == record


@pytest.mark.slow
@given(line=mutate_lines(PROBLEMS) | ANYTHING)
@examples(200)
def test_lists_of_problems(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_bytes(PROBLEMS[0].encode() + b"\n" + line)
    message = refusal(lambda: catalog.load_problems(path))
    assert not message or message.startswith(f"{path}:")


# A row of each kind that a store holds.
CASE = Case(
    m=1, n=2, k=3, swizzle_stride=None, inputs="binary", compared="equality", max_error=0.0, allowed=None, ctas=1,
    findings=("race",),
)  # fmt: skip
VERDICT = Verdict(record="r", digest="d", on="emulator", cases=(CASE,), counters={"mma": 1.0})
CAMPAIGN = measured.campaign(2)
TRIAL = Trial(
    environment="model", on="model", run="r", **PROBLEM.model_dump(), proposer="random", name="n",
    record=json.loads(LINES[0]), outcome="measured",
    timings=(measured.timing("cudal2gen", [1.0]), measured.timing("incumbent", [2.0])),
)  # fmt: skip
STORED = [
    row.model_dump_json() for row in (VERDICT, *CAMPAIGN.environments.values(), *CAMPAIGN.measurements[:2], TRIAL)
]


@pytest.mark.slow
@given(
    lines=st.lists(mutate_lines(STORED) | ANYTHING | st.sampled_from([line.encode() for line in STORED]), max_size=4)
)
@examples(300)
def test_stores(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with warnings.catch_warnings(record=True) as skipped, limit_time():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' garbage
        for verdict in results.latest(path).values():
            assert verdict.passed in (True, False)
        results.algorithms(path)
        results.roundings(path)
        Replay(results.trials(path))
        rows = results.measurements(path)
        report.report(rows, []).markdown()
    for warning in skipped:
        assert issubclass(warning.category, SkippedLine), warning
        assert str(warning.message).startswith(f"{path}:")


@pytest.mark.parametrize(("name", "value"), [("m", 0), ("k", 2**25), ("acc", "f64"), ("timings", [])])
def test_a_measurement_of_no_problem_is_left_out(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    environment, row, *_ = [line for line in STORED if "environment" in line]
    fields = json.loads(row) | {name: value}
    path.write_text(f"{environment}\n{json.dumps(fields)}\n")
    if name == "timings":
        assert results.measurements(path).measurements[0].contenders == []
        return
    with pytest.warns(SkippedLine, match=f"{path}:2: .*{name}="):
        assert results.measurements(path).measurements == []


# A line of a transcript, and a file of notes.
EXCHANGE = Exchange(
    digest="d", problem="p", form="schema", messages=(), text="{}", tokens_in=1, tokens_out=1
).model_dump_json()


@pytest.mark.slow
@given(line=mutate_lines([EXCHANGE]) | ANYTHING)
@examples(100)
def test_transcripts(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    path.write_bytes(EXCHANGE.encode() + b"\n" + line + b"\n")
    message = refusal(lambda: ReplayWire(path))
    assert not message or message.startswith(f"{path}:")


NOTES = (
    b"## a100 f16 tn 64_64_64: 1.2 times faster\ngpus: a100\nclasses: tiny\nmeasured: no\n"
    b'problem: a100 f16 tn 64_64_64\nchanges: {"bm": [64, 32]}\ngain: 1.2 (1.1 to 1.3)\n\ntext\n'
)


@given(content=damage(NOTES) | st.binary(max_size=60))
@examples(100)
def test_notes(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_bytes(content)
    memory.load(path).recall(PROBLEM)


# --- packs ---


def table() -> dict[str, Any]:
    """Three kernels, one of them measured faster and one slower; no binary is needed to read it."""
    kernels = [json.loads(line) for line in LINES[:3]]
    rows = [
        {name: fields[name] for name in ("acc", "layout", "m", "n", "k")}
        | {"kernel": number, "us": 9.0, "vendor_us": 10.0, "speedup": [1.1, low, 1.2], "state": "cold L2"}
        for number, (fields, low) in enumerate(zip(kernels, (1.08, 0.9), strict=False))
    ]
    spelled = [{"digest": f"{number:032x}", "record": fields} for number, fields in enumerate(kernels)]
    return {"gpu": "a100", "bandwidth_bytes_us": 1e6, "kernels": spelled, "rows": rows}


def write_signed_pack(folder: Path, table: bytes, facts: dict[str, Any]) -> Path:
    """Writes a pack's folder with these contents and right digests."""
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_bytes(table)
    facts = {"files": {"table.json": hashlib.sha256(table).hexdigest()}} | facts
    digest = hashlib.sha256(as_json(facts)).hexdigest()
    (folder / "pack.json").write_bytes(as_json(facts | {"sha256": digest}))
    return folder


def query_pack(folder: Path) -> None:
    """Opens a pack and queries a measured problem, a similar one, and one with ``prefer=kernel``."""
    table = pack.open_pack(folder).table
    for m, n, k in ((64, 64, 64), (64, 64, 128), (100, 72, 200)):
        problem = Problem(gpu="a100", acc="f16", layout="tn", m=m, n=n, k=k)
        operands = LaunchOperands.packed("tn", Sizes(m, n, k))
        table.choose(problem, operands)
        table.choose(problem, operands, "kernel")


def machine() -> dict[str, Any]:
    """The facts in a pack's head for this machine."""
    return {"format": FORMAT, "gpu": "a100", "version": __version__, "machine": platform.machine()}


def test_the_pack_that_is_damaged_below_is_whole(tmp_path: Path) -> None:
    query_pack(write_signed_pack(tmp_path / "pack", json.dumps(table()).encode(), machine()))


@pytest.mark.parametrize("name", [*machine(), "files"])
def test_a_signed_pack_without_a_fact_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_signed_pack(tmp_path / "pack", b"{}", machine())
    facts = json.loads((folder / "pack.json").read_text())
    for left_out in (name, "sha256"):
        del facts[left_out]
    facts["sha256"] = hashlib.sha256(as_json(facts)).hexdigest()
    (folder / "pack.json").write_bytes(as_json(facts))
    with pytest.raises(pack.PackError, match=f"pack.*{name}"):
        pack.open_pack(folder)


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ("row", "kernel", 3, "names kernel 3 of 3"),
        ("row", "kernel", -1, "rows.0.*kernel"),
        ("row", "m", 0, "rows.0.*m=0"),
        ("row", "us", 0, "rows.0.*us=0"),
        ("row", "speedup", [1.0], "rows.0.*speedup"),
        ("kernel", "m", "64", "kernel 0: m="),
        ("kernel", "bm", [[[]]], "kernel 0: bm="),
        ("table", "bandwidth_bytes_us", 0, "bandwidth_bytes_us=0"),
        ("table", "rows", None, "rows=null"),
    ],
)
def test_a_signed_table_is_checked(place: str, name: str, value: object, message: str, tmp_path: Path) -> None:
    values = table()
    {"kernel": values["kernels"][0]["record"], "row": values["rows"][0], "table": values}[place][name] = value
    folder = write_signed_pack(tmp_path / "pack", json.dumps(values).encode(), machine())
    with pytest.raises(WrongInput, match=f"{folder / 'table.json'}: .*{message}"):
        query_pack(folder)


@pytest.mark.parametrize("name", ["/dev/zero", "../pack/table.json", "a\0b", "", "kernels/../../x"])
def test_a_pack_reads_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    folder = write_signed_pack(tmp_path / "pack", b"{}", machine() | {"files": {name: "0" * 64}})
    with limit_time(), pytest.raises(pack.PackError, match="is no file of a pack"):
        pack.open_pack(folder)


@st.composite
def draw_alteration(draw: st.DrawFn) -> Callable[[Path], Path]:
    """Draws a function that writes a pack with replaced values in its table or facts and new digests, or with a flipped
    bit."""
    values, facts = table(), machine()
    where = draw(st.sampled_from(["table", "kernel", "row", "facts", "text", "bit"]))
    place: Any = {"kernel": values["kernels"][0]["record"], "row": values["rows"][0], "facts": facts}.get(where, values)
    for name in draw(st.lists(st.sampled_from(sorted(place)), min_size=1, max_size=2)):
        place[name] = draw(VALUES)
    text = json.dumps(values).encode()
    if where == "text":
        text = draw(damage(text) | ANYTHING)
    at, bit = draw(st.integers(0, 10**4)), draw(st.integers(0, 7))
    name = draw(st.sampled_from(["pack.json", "table.json"]))

    def write(folder: Path) -> Path:
        write_signed_pack(folder, text, facts)
        if where == "bit":
            content = bytearray((folder / name).read_bytes())
            content[at % len(content)] ^= 1 << bit
            (folder / name).write_bytes(content)
        return folder

    return write


@pytest.mark.slow
@given(write=draw_alteration())
@examples(300)
def test_packs(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    try:
        write(folder)
    except (RecursionError, ValueError):  # json.dumps raised it, so there is no pack
        return
    message = refusal(lambda: query_pack(folder))
    assert not message or str(folder) in message
