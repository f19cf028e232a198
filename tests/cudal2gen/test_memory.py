"""Proves which notes a problem recalls, what a campaign learns, and that damaged files are read safely."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cudal2gen.kernel import FAMILIES, GPUS, Problem, Record, parse, space
from cudal2gen.results import INCUMBENT, KERNEL
from cudal2gen.results.ratios import Ratio
from cudal2gen.tuner import memory
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.memory import Memory, Note
from cudal2gen.tuner.search import Search

# Two problems of different classes, and a measured gain with its interval.
LARGE = Problem(gpu="h200", acc="f32", layout="tn", m=4096, n=4096, k=4096)
FLAT = Problem(gpu="h200", acc="f32", layout="tn", m=64, n=4096, k=4096)

GAIN = Ratio(1.08, 1.05, 1.11)


def record(problem: Problem = LARGE, **changes: Any) -> Record:
    """The plain wgmma record of a problem, with changes."""
    fields = space.base(problem, "sm90_wgmma") | FAMILIES["sm90_wgmma"].plain(problem)
    return parse(fields | changes)


def winning_search(new: Record, gain: Ratio = GAIN, environment: str = "gpu", improved: bool = True) -> Search:
    """A search whose winner is ``new``."""
    (trial,) = ModelEnvironment(lambda _: record()).evaluate(LARGE, [new])
    winner = trial.model_copy(update={"environment": environment, "on": "NVIDIA H200"})
    return SimpleNamespace(  # type: ignore[return-value]
        problem=LARGE, incumbent=record(), winner=winner, gain=gain, improved=improved
    )


def test_shipped_notes_say_where_they_are_from_and_whether_that_was_measured() -> None:
    notes = memory.load().notes
    assert len(notes) > 15
    assert len({note.title + "".join(note.gpus) for note in notes}) == len(notes)
    for note in notes:
        assert note.source, note.title
        assert note.measured, note.title
        assert set(note.gpus) <= GPUS.keys(), note.title
        assert set(note.classes) <= set(memory.CLASSES), note.title
        assert 60 < len(note.text) < 500, note.title


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("size", [(64, 64, 64), (32, 4096, 4096), (512, 512, 8192), (1024, 1024, 1024), (16384,) * 3])
def test_every_problem_is_told_something_within_its_budget(gpu: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    problem = Problem(gpu=gpu, acc="f16", layout="tn", m=m, n=n, k=k)
    for budget in (0, 200, 700, 1500):
        notes = memory.load().recall(problem, budget)
        assert sum(memory.tokens(json.dumps(note.visible)) for note in notes) <= budget
        assert bool(notes) == (budget > 100)
        assert all(note.holds_for(problem) for note in notes)


def test_a_note_survives_its_file() -> None:
    note = Note(
        "A title", "Some text\nin lines.", ("h200", "h100"), ("large",), "a source", "no", "p", '{"a": [1, 2]}', "1.1"
    )
    second = Note("Another", "Text: with a colon")
    assert list(memory.parse_notes("# Head\nprose\n\n" + note.markdown + "\n" + second.markdown)) == [note, second]


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("", []),
        ("no heading", []),
        ("## \n\ntext", []),
        ("## one\ngpus: h200\ngpus: a100\n\ntext", ["one"]),
        ("## one\n\n## two", ["one", "two"]),
        ("##", []),
        ("## one\r\ngpus: h200\r\n\r\ntext", ["one"]),
    ],
)
def test_what_is_no_note_is_left_out(text: str, titles: list[str]) -> None:
    assert [note.title for note in memory.parse_notes(text)] == titles


def test_a_second_line_of_a_key_is_text() -> None:
    (note,) = memory.parse_notes("## one\ngpus: h200\ngpus: a100\n\ntext")
    assert (note.gpus, note.text) == (("h200",), "gpus: a100\n\ntext")


def test_retrieval_prefers_this_gpu_then_this_architecture_then_everywhere() -> None:
    notes = (
        Note("everywhere", "x"),
        Note("architecture", "x", ("h100",)),
        Note("here, this class", "x", ("h200", "h100"), ("large",)),
        Note("here", "x", ("h200",)),
        Note("elsewhere", "x", ("a100",)),
        Note("another class", "x", ("h200",), ("tiny",)),
        Note("unheard of", "x", ("b300",)),
    )
    titles = [note.title for note in Memory(notes).recall(LARGE)]
    assert titles == ["here, this class", "here", "architecture", "everywhere"]


def test_among_lessons_the_nearest_problem_comes_first_and_small_ones_fill_the_budget() -> None:
    far = Note("far", "x" * 300, ("h200",), ("large",), problem="h200 f32 tn 8192_8192_8192")
    near = Note("near", "x" * 300, ("h200",), ("large",), problem="h200 f32 tn 4096_4096_2048")
    long = Note("long", "x" * 1900, ("h200",), ("large",), problem="h200 f32 tn 4096_4096_4096")
    malformed = Note("broken", "x", ("h200",), ("large",), problem="h200 f32 tn 0_x_99999999999999")
    lessons = Memory((far, near, long, malformed))
    assert [note.title for note in lessons.recall(LARGE)] == ["long", "near", "far", "broken"]
    assert [note.title for note in lessons.recall(LARGE, 130)] == ["near", "broken"]


def test_what_improved_becomes_a_lesson_that_is_told_next_time(tmp_path: Path) -> None:
    lessons = memory.load(tmp_path / "deep" / "lessons.md")
    note = lessons.learn(winning_search(record(stages=3, cluster=[2, 1])))
    assert note is not None
    assert note.gain == "1.080 (1.050 to 1.110)"
    assert json.loads(note.changes) == {"stages": [4, 3], "cluster": [[1, 1], [2, 1]]}
    assert (note.gpus, note.classes, note.measured) == (("h200",), ("large",), "yes, on NVIDIA H200")
    assert lessons.recall(LARGE)[0] == note
    assert "stages 4 -> 3, cluster [1, 1] -> [2, 1]" in note.visible["text"]
    assert note not in lessons.recall(FLAT)
    sister = Problem(gpu="h100", acc="f16", layout="nn", m=8192, n=4096, k=2048)
    assert note in lessons.recall(sister, 10_000), "its architecture and class are the same"


def test_a_lesson_is_learnt_once_and_only_where_something_improved(tmp_path: Path) -> None:
    path = tmp_path / "lessons.md"
    lessons = Memory((), path)
    assert lessons.learn(winning_search(record(stages=3))) is not None
    size = path.stat().st_size
    assert lessons.learn(winning_search(record(stages=3), Ratio(1.07, 1.04, 1.1))) is None
    assert lessons.learn(winning_search(record(stages=2), improved=False)) is None
    assert lessons.learn(winning_search(record(stages=2), environment="replay")) is None
    assert Memory(()).learn(winning_search(record(stages=2))) is None
    assert path.stat().st_size == size
    assert lessons.learn(winning_search(record(stages=2), environment="model")) is not None
    modelled = list(memory.parse_notes(path.read_text()))[1]
    assert modelled.measured == "no: model environment, NVIDIA H200"


def test_what_never_helped_becomes_a_lesson_too(tmp_path: Path) -> None:
    changes = [
        {"stages": 2, "raster_group": 4}, {"stages": 2, "raster_group": 2}, {"stages": 2},
        {"hint_b": "last"}, {"hint_b": "last", "raster_group": 4}, {"hint_b": "last", "raster_group": 2},
        {"raster_axis": "n"}, {"raster_axis": "n", "raster_group": 16},
    ]  # fmt: skip
    speeds = [0.8, 0.7, 0.85, 0.9, 0.9, 1.0, 0.5, 0.5]
    trials = []
    for change, speed in zip(changes, speeds, strict=True):
        (trial,) = ModelEnvironment(lambda _: record()).evaluate(LARGE, [record(**change)])
        base = trial.timing(INCUMBENT)
        assert base is not None
        timings = tuple(
            base.model_copy(update={"contender": contender, "event_us": tuple(us * scale for us in base.event_us)})
            for contender, scale in ((INCUMBENT, 1.0), (KERNEL, 1 / speed))
        )
        trials.append(trial.model_copy(update={"timings": timings}))
    place = Memory(file=tmp_path / "lessons.md")
    search = SimpleNamespace(problem=LARGE, incumbent=record(), evaluations=trials)
    note = place.learn_setbacks(search)  # type: ignore[arg-type]
    assert note is not None
    assert json.loads(note.changes) == {"stages": [4, 2]}, "a trial of hint_b was no slower; raster_axis has two"
    assert note.text.endswith("stages 4 -> 2: 3 trials, at best 0.850 times the incumbent's speed.")
    assert place.recall(LARGE)[0] == note
    assert place.learn_setbacks(search) is None, "once"  # type: ignore[arg-type]
    assert (
        memory.setbacks(LARGE, record(), [trial.model_copy(update={"environment": "replay"}) for trial in trials])
        is None
    )


def test_half_a_lesson_of_a_killed_process_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lessons.md"
    path.write_bytes(b"## half a les\xff\ngpus: h2")
    lessons = Memory((), path)
    note = lessons.learn(winning_search(record(stages=3)))
    assert note is not None
    assert note in lessons.recall(LARGE)


def test_lessons_are_shown_with_their_trials() -> None:
    assert memory.lessons_path(Path("/r/trials.jsonl")) == Path("/r/trials-lessons.md")
    assert memory.lessons_path(Path("/b/modelled-trials.jsonl")) == Path("/b/modelled-trials-lessons.md")


def test_what_is_shown_can_be_printed_and_ends() -> None:
    note = replace(Note("t", "a\x1b[2J\u202eb" + "x" * 5000), source="s\x00")
    assert note.visible == {"title": "t", "text": "a[2Jb" + "x" * 1995, "measured": "no", "source": "s"}
