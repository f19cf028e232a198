"""Proves that training data has the rewards of its trials, and that TRL reads it and trains on it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.kernel import space
from cudal2gen.results import INCUMBENT
from cudal2gen.tuner import curriculum, executor, exports, record_prompt, reward, search
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.language_model.chat import Chat
from cudal2gen.tuner.language_model.server import ServerWire
from cudal2gen.tuner.language_model.transcript import ChatRequest, Message
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory
from cudal2gen.tuner.proposal import Question
from tests.commands import run
from tests.cudal2gen.asking import PROBLEM, candidates, endpoint, incumbent, measure_trials, question
from tests.cudal2gen.chat_server import proposes, says, serve_script
from tests.packages import require

require("openai")

SETTINGS = reward.RewardWeights(reference=INCUMBENT)


def environment() -> ModelEnvironment:
    """The model environment in which proposals are timed."""
    return ModelEnvironment(lambda _: incumbent(), seed=5)


@cache
def run_search(folder: Path) -> tuple[Path, Path]:
    """The transcript and the trials of a search whose answers have two legal proposals, an illegal and a legal one, and
    nonsense."""
    transcript, store = folder / "trials-llm.jsonl", folder / "trials.jsonl"
    script = (
        proposes(("incumbent", {"stages": 3}), ("incumbent", {"raster_group": 4})),
        says(None, reasoning_content="Hm."),
        says("nonsense"),
        proposes(("best1", {"stages": 2})),
        proposes(("best1", {"raster_group": 2}), ("best1", {"stages": 90})),
        proposes(("best1", {"stages": 91})),
        says("no more"),
    )
    with serve_script(*script, forever=True) as server:
        proposer = LlmProposer(Chat(ServerWire(endpoint(server)), transcript), Memory(), warn=str)
        contest = search.Search(candidates(), incumbent())
        search.run(
            contest, proposer, executor.InProcess(environment()), lambda trials: results.append(trials, store),
            search.SearchLimits(evaluations=8, batch=2, prune=None),
        )  # fmt: skip
    return transcript, store


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The transcript and the trials of ``run_search``."""
    return run_search(tmp_path_factory.mktemp("campaign"))


@pytest.fixture(scope="module")
def exported_folder(files: tuple[Path, Path]) -> Path:
    """A folder with the training data of the campaign."""
    transcript, store = files
    folder = transcript.parent / "exported"
    exports.write(folder, exports.examples(transcript, exports.Rewards(results.trials(store), SETTINGS)))
    return folder


def rows(path: Path) -> list[Any]:
    """The lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rewards_are_those_of_the_trials(files: tuple[Path, Path]) -> None:
    transcript, store = files
    trials = results.trials(store)
    examples = list(exports.examples(transcript, exports.Rewards(trials, SETTINGS)))
    longest = {}
    for effort in ("short", "medium", "long", "final"):
        for trial in trials:
            if trial.effort == effort and trial.measured:
                longest[trial.record["stages"], trial.record["raster_group"]] = trial

    def expected_reward(stages: int, group: int) -> float:
        """The reward of a record: its speed over the incumbent's, less a hundredth of its largest error."""
        trial = longest[stages, group]
        base = trial.timing(INCUMBENT)
        assert base is not None
        return base.median_us / trial.median_us - 0.01 * trial.max_diff

    # The first answer proposes stages 3 with the incumbent's group 8, and group 4 with its stages 4.
    best = max(((3, 8), (4, 4)), key=lambda pair: expected_reward(*pair))
    second = (2, best[1])
    assert examples[0].reward == pytest.approx((expected_reward(3, 8) + expected_reward(4, 4)) / 2)
    assert [example.reward for example in examples[1:3]] == [0.0, 0.0], "nonsense earns what a failure does"
    assert examples[3].reward == pytest.approx(expected_reward(*second))
    following = json.loads(examples[4].prompt[1]["content"])
    assert examples[4].reward == pytest.approx(expected_reward(prompt_base(following)["stages"], 2) / 2), (
        "the illegal half of the answer earns nothing"
    )
    assert {(example.stage, example.problem) for example in examples} == {("hgemm", PROBLEM.title)}
    assert examples[1].completion[0]["content"].startswith("<think>\nHm.\n</think>")


def prompt_base(document: Any) -> Any:
    """The best record in a prompt, as the reader of answers finds it."""
    bases = record_prompt.bases_in(json.dumps(document))
    assert bases is not None
    return bases[1]["best1"].model_dump()


def test_an_outcome_may_state_its_reward_and_stage(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    request = ChatRequest((Message("system", "s"), Message("user", "write a kernel")), {})
    with serve_script(says("__global__ void f() {}"), says("no")) as server:
        talk = Chat(ServerWire(endpoint(server)), path)
        for value in (1.25, None):
            reply = talk.ask(request, PROBLEM)
            talk.conclude(request, reply, PROBLEM, stage="kernels", reward=value, fault="" if value else "refused")
    first, second = exports.examples(path, exports.Rewards([], SETTINGS))
    assert (first.reward, first.stage, first.completion[0]["content"]) == (1.25, "kernels", "__global__ void f() {}")
    assert second.reward == 0.0
    assert first.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "write a kernel"}]


def test_files_follow_the_curriculum(tmp_path: Path) -> None:
    example = exports.Example("d", [{"role": "user", "content": "q"}], [], 1.0, "hgemm", "p")
    shuffled = [
        example, replace(example, stage="kernels", digest="e", right=True), replace(example, reward=0.0),
        replace(example, stage="matmul", digest="f", reward=-1.0, right=True),
    ]  # fmt: skip
    assert exports.write(tmp_path, shuffled) == {"answers.jsonl": 4, "sft.jsonl": 2, "grpo.jsonl": 3}
    assert [row["stage"] for row in rows(tmp_path / "answers.jsonl")] == ["kernels", "matmul", "hgemm", "hgemm"]
    assert [row["rewards"] for row in rows(tmp_path / "grpo.jsonl")] == [[1.0], [-1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("fields", "stage"),
    [({}, "hgemm"), ({"acc": "f16"}, "hgemm"), ({"ab": "bf16"}, "matmul"), ({"d": "f32"}, "matmul"),
     ({"fusion": "bias_n"}, "matmul"), ({"batch": "strided"}, "matmul")],
)  # fmt: skip
def test_stages(fields: dict[str, str], stage: str) -> None:
    assert curriculum.stage_of(PROBLEM.revised(**fields)) == stage


def test_a_question_names_its_records_again() -> None:
    trials = measure_trials({"stages": 3}, {"stages": 2}, {"cluster": [2, 1]})
    for asked in (question(trials), Question(candidates(), trials)):
        bases = record_prompt.bases_of(asked)
        text = record_prompt.document(asked, bases, [], [], [], 1)
        problem, records = record_prompt.bases_in(text) or (None, {})
        assert problem == PROBLEM
        assert {label: space.decisions(record) for label, record in records.items()} == {
            label: space.decisions(record) for label, record in bases.items()
        }
    assert record_prompt.bases_in("no JSON") is None
    assert record_prompt.bases_in('{"problem": 3}') is None


def test_new_answers_are_scored() -> None:
    asked = question()
    text = record_prompt.document(asked, record_prompt.bases_of(asked), [], [], [], 1)
    messages = [{"role": "system", "content": record_prompt.SYSTEM}, {"role": "user", "content": text}]

    def answer(*changes: dict[str, Any]) -> list[dict[str, str]]:
        proposals = [{"base": "incumbent", "changes": change, "why": ""} for change in changes]
        content = f"<think>{{}}</think>{json.dumps({'reasoning': '', 'proposals': proposals})}"
        return [{"role": "assistant", "content": content}]

    scorer = exports.Scorer(environment(), SETTINGS)
    (trial,) = environment().evaluate(PROBLEM, [changed_incumbent({"stages": 3})])
    expected = reward.of_trials([trial], SETTINGS)
    completions = [
        answer({"stages": 3}), answer({"stages": 3}, {"stages": 90}), answer({"stages": 3}, {"stages": 3}),
        answer({"stages": 90}), [{"role": "assistant", "content": "no"}],
    ]  # fmt: skip
    assert expected > 0.5
    assert scorer(prompts=[messages] * 5, completions=completions, stage=["hgemm"] * 5) == pytest.approx(
        [expected, expected / 2, expected / 2, 0.0, 0.0], rel=0.03
    )
    other = [{"role": "user", "content": "write a kernel"}]
    assert scorer([other], [answer({"stages": 3})]) == [None]


def changed_incumbent(change: dict[str, Any]) -> Any:
    """The incumbent with other values of some fields."""
    from cudal2gen.kernel import parse

    return parse(incumbent().model_dump(mode="json") | change)


def tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, with a chat template. It is made here, so nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {word: number for number, word in enumerate(["<pad>", "<end>", *alphabet])}
    base = Tokenizer(models.BPE(numbers, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<end>")
    words.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return words


@pytest.mark.thorough
@pytest.mark.slow
def test_trl_reads_and_trains(exported_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, made from a configuration, is trained by a step of SFT and of GRPO on the unchanged files."""
    for name in ("trl", "datasets", "transformers"):
        require(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import torch
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
    from trl.data_utils import apply_chat_template, is_conversational

    torch.manual_seed(0)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=65536, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    common = {
        "output_dir": str(tmp_path / "out"), "max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip

    def load_examples(name: str) -> Any:
        cache_dir = str(tmp_path / "cache")
        return load_dataset("json", data_files=str(exported_folder / name), split="train", cache_dir=cache_dir)

    supervised = load_examples("sft.jsonl")
    assert is_conversational(supervised[0])
    texts = apply_chat_template(supervised[0], words)
    assert texts["completion"] == rows(exported_folder / "sft.jsonl")[0]["completion"][0]["content"] + "<end>"
    assert supervised[0]["prompt"] == rows(exported_folder / "sft.jsonl")[0]["prompt"]
    trainer = SFTTrainer(
        LlamaForCausalLM(config), args=SFTConfig(**common, per_device_train_batch_size=1, max_length=None),
        train_dataset=supervised, processing_class=words,
    )  # fmt: skip
    masked = trainer.train_dataset[0]
    completion = words(texts["completion"])["input_ids"]
    assert masked["input_ids"][-len(completion) :] == completion
    assert trainer.train().training_loss > 0

    questions = load_examples("grpo.jsonl")
    assert is_conversational(questions[0])
    scores: list[list[float | None]] = []
    scorer = exports.Scorer(environment(), SETTINGS)

    def collect_rewards(prompts: Any, completions: Any, stage: Any, rewards: Any, **columns: Any) -> list[float | None]:
        assert stage == ["hgemm"] * 2
        assert len(rewards) == 2
        scores.append(scorer(prompts, completions, **columns))
        return [0.25, 1.0]  # a model of random weights writes no records

    grpo = GRPOTrainer(
        LlamaForCausalLM(config), reward_funcs=collect_rewards, train_dataset=questions, processing_class=words,
        args=GRPOConfig(**common, per_device_train_batch_size=2, num_generations=2, max_completion_length=4),
    )  # fmt: skip
    assert grpo.train().global_step == 1
    assert scores == [[0.0, 0.0]]


def test_the_command_line_exports(files: tuple[Path, Path], tmp_path: Path) -> None:
    transcript, store = files
    folder = tmp_path / "data"
    options = ("--trials", str(store), "--out", str(folder))
    process = run("export", *options)
    assert process.returncode == 0, process
    count = len(list(exports.examples(transcript, exports.Rewards(results.trials(store), SETTINGS))))
    assert f"{count} lines in {folder / 'answers.jsonl'}" in process.stdout
    assert len(rows(folder / "answers.jsonl")) == count
    process = run("export", "--trials", str(tmp_path / "none.jsonl"), "--out", str(folder))
    assert process.returncode == 2
    assert f"no transcript {tmp_path / 'none-llm.jsonl'}" in process.stderr
