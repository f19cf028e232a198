"""Proves what a user of ``tune --proposers llm`` and ``export`` sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cudal2gen import cli, results
from cudal2gen.cli import tuner_settings
from cudal2gen.tuner.language_model import chat
from kernelproof.ground.errors import WrongInput
from tests.cudal2gen.asking import KEY
from tests.cudal2gen.chat_server import proposes, serve_script
from tests.cudal2gen.test_cli import error, own_catalog, run
from tests.packages import require

__all__ = ["own_catalog"]  # a fixture

require("openai")

# Arguments of a short search in the modelled environment.
MODELLED = ("--gpu", "h200", "--acc", "f32", "--environment", "model", "--evaluations", "6", "--mnk", "256_2048_64")


def settings_file(folder: Path, **llm: str | float) -> str:
    """Writes a settings file with these settings of the language model."""
    path = folder / "settings.toml"
    path.write_text("[llm]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in llm.items()))
    return str(path)


@pytest.mark.slow
def test_the_command_line_asks_and_replays(tmp_path: Path, own_catalog: dict[str, str]) -> None:
    build, transcript = tmp_path / "build", tmp_path / "said.jsonl"
    env = own_catalog | {"CUDAL2GEN_BUILD_DIR": str(build), "CUDAL2GEN_RESULTS": str(tmp_path), "OUR_KEY": KEY}
    base = ("tune", *MODELLED, "--proposers", "llm,random")
    ideas = [("incumbent", {"raster_group": group}) for group in (1, 2)]
    with serve_script(proposes(*ideas), forever=True) as server:
        settings = settings_file(
            tmp_path, key="OUR_KEY", price_in=1, price_out=2, temperature=0.3, max_tokens=99, token_budget=99999,
            transcript=str(transcript),
        )  # fmt: skip
        options = ("--llm", f"scripted@{server.url}", "--settings", settings, "--trials", str(tmp_path / "a.jsonl"))
        online = run(*base, *options, env=env)
        assert online.returncode == 0, online
        assert server.keys[0] == f"Bearer {KEY}"
        assert (server.requests[0]["temperature"], server.requests[0]["max_tokens"]) == (0.3, 99)
    exchanges = len(server.requests)
    assert f"llm: {exchanges} exchanges, {exchanges}000 tokens in, {exchanges * 200} out, cost " in online.stdout
    assert KEY not in transcript.read_text()
    first = results.trials(tmp_path / "a.jsonl")
    assert {trial.proposer for trial in first} == {"llm", "random"}
    settings = settings_file(tmp_path, replay=str(transcript))
    replayed = run(*base, "--settings", settings, "--trials", str(tmp_path / "b.jsonl"), env=env)
    assert replayed.returncode == 0, replayed
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    lessons = tmp_path / "a-lessons.md"
    assert lessons.exists() == ("times the incumbent's speed" in online.stdout)


@pytest.mark.slow
def test_a_server_that_never_answers_is_no_success(
    tmp_path: Path, own_catalog: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (own_catalog | {"CUDAL2GEN_BUILD_DIR": str(tmp_path / "build")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(chat, "PAUSES", ())
    trials = tmp_path / "a.jsonl"
    base = ["tune", *MODELLED, "--trials", str(trials), "--proposers", "llm,random"]
    ended = CliRunner().invoke(cli.app, [*base, "--llm", "nobody@http://127.0.0.1:9/v1"])
    assert ended.exit_code == 1
    assert "error: the model did not answer: " in ended.output
    assert {trial.proposer for trial in results.trials(trials)} == {"random"}, (
        "the other proposer did all of the search"
    )


@pytest.mark.slow
def test_a_spent_budget_ends_a_search_of_the_model_alone_and_its_answers_are_exported(
    tmp_path: Path, own_catalog: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (own_catalog | {"CUDAL2GEN_BUILD_DIR": str(tmp_path / "build")}).items():
        monkeypatch.setenv(name, value)
    trials, folder = tmp_path / "a.jsonl", tmp_path / "data"
    base = ["tune", *MODELLED, "--trials", str(trials)]
    ideas = [("incumbent", {"bm": 64}), ("incumbent", {"bm": 64, "pdl": False})]
    with serve_script(proposes(*ideas), forever=True) as server:
        settings = settings_file(tmp_path, token_budget=5000)
        options = ["--proposers", "llm", "--llm", f"scripted@{server.url}", "--settings", settings]
        search = CliRunner().invoke(cli.app, [*base, *options])
        assert search.exit_code == 0, search.output
        count = len(server.requests)
    assert "proposer llm: the budget of 5000 tokens is spent" in search.output
    assert "1 of 1 problems ended before 6 evaluations: nothing new was proposed" in search.output
    transcript = tmp_path / "a-llm.jsonl"
    assert f"llm: {count} exchanges, {count}000 tokens in, {count * 200} out; transcript: {transcript}" in search.output
    export = CliRunner().invoke(cli.app, ["export", "--out", str(folder), "--trials", str(trials)])
    assert export.exit_code == 0, export.output
    (answer, *_) = map(json.loads, (folder / "sft.jsonl").read_text().splitlines())
    assert json.loads(answer["completion"][0]["content"])["proposals"][0]["changes"] == {"bm": 64}
    assert answer["reward"] > 0


@pytest.mark.slow
def test_the_command_line_says_what_is_missing(tmp_path: Path, own_catalog: dict[str, str]) -> None:
    env = own_catalog | {"CUDAL2GEN_BUILD_DIR": str(tmp_path)}
    message = error("tune", *MODELLED, "--proposers", "llm", env=env)
    assert "a language model needs --llm NAME@URL" in message
    settings = settings_file(tmp_path, replay=str(tmp_path / "none"))
    message = error("tune", *MODELLED, "--proposers", "llm", "--settings", settings, env=env)
    assert "No such file or directory" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[llm]\nkeys = 1\n", "no settings llm.keys; there are search.patience, search.batch_seconds, "),
        ("[llm]\nseconds = 0\n", "llm.seconds=0: "),
        ("llm]", "write TOML"),
        (None, "No such file or directory"),
    ],
)
def test_a_settings_file_is_checked(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WrongInput) as raised:
        tuner_settings.load(path)
    assert message in str(raised.value)


def test_settings_that_are_not_written_have_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[search]\npatience = 16\n")
    assert tuner_settings.load(path).search.patience == 16
    assert tuner_settings.load(path).llm == tuner_settings.load(None).llm


@pytest.mark.slow
def test_nothing_learned_is_no_success(
    tmp_path: Path, own_catalog: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (own_catalog | {"CUDAL2GEN_BUILD_DIR": str(tmp_path / "build")}).items():
        monkeypatch.setenv(name, value)
    trials, more = tmp_path / "a.jsonl", ["--trials", str(tmp_path / "a.jsonl")]
    with serve_script(proposes(("incumbent", {"stages": 90})), forever=True) as server:
        search = ["tune", *MODELLED, *more, "--proposers", "llm", "--llm", f"scripted@{server.url}"]
        ended = CliRunner().invoke(cli.app, search)
    assert ended.exit_code == 1, ended.output
    assert "error: no record was tried" in ended.output
    transcript = trials.with_name("a-llm.jsonl")
    transcript.write_text("")
    export = CliRunner().invoke(cli.app, ["export", "--out", str(tmp_path), *more])
    assert export.exit_code == 1
    assert "error: " in export.output
