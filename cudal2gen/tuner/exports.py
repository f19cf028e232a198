"""Training data for TRL: a language model's questions and answers with the rewards that they earned.

``examples`` joins a transcript with the trials of its campaign. ``write`` makes three files of JSON lines, in the order
of the curriculum's stages:

- ``answers.jsonl``: every answer with a reward: ``prompt`` and ``completion`` as messages, ``reward``, ``stage`` and
  ``problem``.
- ``sft.jsonl``: the answers that earned more than a failure, for ``SFTTrainer`` (conversational prompt-completion).
- ``grpo.jsonl``: every question once, ``prompt`` as messages, with the ``rewards`` of its answers, for ``GRPOTrainer``.

``Scorer`` rewards new answers to such prompts, for ``GRPOTrainer(reward_funcs=...)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudal2gen.kernel import Fields, Problem, space
from cudal2gen.results import Effort, Trial
from cudal2gen.tuner import record_answers, record_prompt, reward
from cudal2gen.tuner.curriculum import STAGES, Stage
from cudal2gen.tuner.environment import Environment
from cudal2gen.tuner.language_model import completions, transcript
from cudal2gen.tuner.language_model.transcript import Exchange, Outcome, Reply
from kernelproof.ground import files

EFFORTS: tuple[Effort, ...] = ("final", "long", "medium", "short")


@dataclass(frozen=True)
class Example:
    """An answer and its reward. ``digest``: the question's. ``prompt``: its messages; ``completion``: the answer, after
    its reasoning in a <think> block."""

    digest: str
    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    reward: float
    stage: Stage
    problem: str


class Rewards:
    """The rewards of records by their trials. If a record has trials of several efforts, the longest counts."""

    def __init__(self, trials: Iterable[Trial], weights: reward.RewardWeights) -> None:
        self.weights = weights
        self._trials: dict[str, list[Trial]] = {}
        for trial in trials:
            self._trials.setdefault(_key(trial.problem, trial.record), []).append(trial)

    def of_answer(self, outcome: Outcome) -> float | None:
        """The outcome's own reward, else the mean over its proposals. An illegal proposal is a failure; proposals
        without a trial do not count. None if no proposal counts."""
        if outcome.reward is not None:
            return outcome.reward
        if not outcome.proposals:
            return self.weights.failed
        problem = Problem.model_validate(outcome.problem)
        rewards = [value for fields in outcome.proposals if (value := self._of(problem, fields)) is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def _of(self, problem: Problem, fields: Fields) -> float | None:
        if "violation" in fields:
            return self.weights.failed
        trials = self._trials.get(_key(problem, fields), [])
        for effort in EFFORTS:
            if cases := [trial for trial in trials if trial.effort == effort]:
                try:
                    return reward.of_trials(cases, self.weights)
                except ValueError:  # no reference was timed beside it
                    return None
        return None


def _key(problem: Problem, fields: Mapping[str, Any]) -> str:
    """Equal for equal decisions on one problem."""
    decisions = {name: value for name, value in fields.items() if name not in space.NO_DECISION}
    return json.dumps([problem.key, decisions], sort_keys=True)


def examples(file: Path, rewards: Rewards) -> Iterator[Example]:
    """The rewarded answers of a transcript, in its order. Raises WrongInput."""
    exchanges: dict[str, Exchange] = {}
    for line in transcript.read(file):
        if isinstance(line, Exchange):
            if line.messages and not line.error:
                exchanges[line.key] = line
        elif not isinstance(line, Outcome):
            continue
        elif (exchange := exchanges.get(line.exchange)) and (value := rewards.of_answer(line)) is not None:
            thoughts = f"<think>\n{exchange.reasoning}\n</think>\n\n" if exchange.reasoning else ""
            yield Example(
                exchange.digest,
                [{"role": message.role, "content": message.content} for message in exchange.messages],
                [{"role": "assistant", "content": f"{thoughts}{exchange.text}"}],
                value,
                line.stage,
                exchange.problem,
            )


def write(folder: Path, rewarded: Iterable[Example], failed: float = 0.0) -> dict[str, int]:
    """Writes the three files, and returns their numbers of lines. ``failed``: a failure's reward. Raises Failure."""
    ordered = sorted(rewarded, key=lambda example: STAGES.index(example.stage))
    rows = [
        {name: getattr(example, name) for name in ("prompt", "completion", "reward", "stage", "problem")}
        for example in ordered
    ]
    questions: dict[str, dict[str, Any]] = {}
    for example in ordered:
        question = {"prompt": example.prompt, "stage": example.stage, "problem": example.problem, "rewards": []}
        questions.setdefault(example.digest, question)["rewards"].append(example.reward)
    lines = {
        "answers.jsonl": rows,
        "sft.jsonl": [row for row in rows if row["reward"] > failed],
        "grpo.jsonl": list(questions.values()),
    }
    for name, content in lines.items():
        files.write(folder / name, "".join(json.dumps(row) + "\n" for row in content))
    return {name: len(content) for name, content in lines.items()}


class Scorer:
    """A reward function of TRL, which evaluates the proposed records in any environment.

    A call takes conversational ``prompts`` and their ``completions``. A reward is the mean over an answer's proposals;
    illegal and repeated ones earn what a failure does. The reward is None, so that GRPOTrainer ignores the answer, if
    the prompt is not one of ``tuner.record_prompt``.
    """

    __name__ = "cudal2gen_reward"  # GRPOTrainer names its metrics by it

    def __init__(
        self, environment: Environment, weights: reward.RewardWeights | None = None, effort: Effort = "short"
    ) -> None:
        self._environment, self._weights, self._effort = environment, weights or reward.RewardWeights(), effort

    def __call__(
        self, prompts: Sequence[Sequence[Mapping[str, str]]], completions: Sequence[Sequence[Mapping[str, str]]],
        **_: object,
    ) -> list[float | None]:  # fmt: skip
        return [self._reward(messages, answer) for messages, answer in zip(prompts, completions, strict=True)]

    def _reward(self, messages: Sequence[Mapping[str, str]], completion: Sequence[Mapping[str, str]]) -> float | None:
        question = next(
            (record_prompt.bases_in(message["content"]) for message in messages if message["role"] == "user"), None
        )
        if question is None:
            return None
        problem, bases = question
        reasoning, text = completions.split_reasoning(completion[-1]["content"])
        ideas, faults = record_answers.ideas_of(Reply(text=text, reasoning=reasoning), record_answers.MAX_FAULTS)
        failures, records = len(faults), {}
        for idea in ideas:
            proposal = record_answers.revised(idea, bases)
            if (
                isinstance(proposal, record_answers.Fault)
                or proposal.record is None
                or proposal.record.kernel_key in records
            ):
                failures += 1
            else:
                records[proposal.record.kernel_key] = proposal.record
        trials = self._environment.evaluate(problem, list(records.values()), self._effort) if records else []
        rewards = [reward.of_trials([trial], self._weights) for trial in trials]
        rewards += [self._weights.failed] * failures
        return sum(rewards) / len(rewards) if rewards else self._weights.failed
