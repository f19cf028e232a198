"""Exports training data for TRL: a language model's questions and answers with the rewards that they earned.

``examples`` joins a transcript with the trials of its campaign. ``write`` makes three files of JSON lines, in the order
of the curriculum's stages:

- ``answers.jsonl`` has every answer with a reward: ``prompt`` and ``completion`` as messages, ``reward``, ``returned``
  (the reward plus discounted rewards of later turns), ``right``, ``stage`` and ``problem``.
- ``sft.jsonl`` has the answers whose proposals are all right by their verdicts, for ``SFTTrainer`` (conversational
  prompt-completion). It has no answer that contains an attack or an illegal or failed kernel, whatever its reward, and
  no answer to a correction that quotes such an answer.
- ``grpo.jsonl`` has every question once, for ``GRPOTrainer``: ``prompt`` as messages, and the ``rewards`` of its
  answers. For questions of ``writing``, ``kernels`` has as JSON the kernels that the question shows, which
  ``writing.rewarding`` needs to score new answers.

``Scorer`` rewards new answers to the questions about records, for ``GRPOTrainer(reward_funcs=...)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudal2gen.kernel import Fields, Problem, device_text, space
from cudal2gen.results import Effort, Trial
from cudal2gen.tuner import record_answers, record_prompt, reward
from cudal2gen.tuner.curriculum import STAGES, Stage
from cudal2gen.tuner.environment import Environment
from cudal2gen.tuner.language_model import completions, transcript
from cudal2gen.tuner.language_model.transcript import AnswerOutcome, Exchange, Reply, State
from kernelproof.ground import files
from kernelproof.ground.errors import WrongInput

COLUMNS = ("prompt", "completion", "reward", "returned", "right", "stage", "problem")  # the fields of answers.jsonl
BASES = "bases "  # prefix of a ``State.of``; the question's digest follows, and the content is the kernels it shows
EFFORTS: tuple[Effort, ...] = ("final", "long", "medium", "short")  # the longest first


@dataclass(frozen=True)
class Example:
    """An answer and its reward.

    - ``digest``: the question's digest; ``prompt``: the question's messages.
    - ``completion``: the answer, with its reasoning before it in a <think> block.
    - ``right``: whether all proposals of the answer are right by their verdicts.
    - ``returned``: the answer's value among the ``reward.returns`` of its conversation.
    - ``kernels``: the kernels that a question of ``writing`` shows, as JSON; ``product``: the problem's fields as JSON.
    - ``clean``: whether the prompt quotes no refused or failed written answer, which may be an attack.
    """

    digest: str
    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    reward: float
    stage: Stage
    problem: str
    right: bool = False
    returned: float = 0.0
    kernels: str = ""
    product: str = ""
    clean: bool = True


class Rewards:
    """Looks up the rewards of answers from trials. If a record has trials of several efforts, the longest counts."""

    def __init__(self, trials: Iterable[Trial], weights: reward.RewardWeights) -> None:
        self.weights = weights
        self._trials: dict[str, list[Trial]] = {}
        for trial in trials:
            self._trials.setdefault(_key(trial.problem, trial.record), []).append(trial)

    def of_answer(self, outcome: AnswerOutcome) -> float | None:
        """The outcome's own reward, else the mean reward of its proposals; None if no proposal has a reward.

        An illegal proposal counts as a failure. A proposal without a trial does not count.
        """
        if outcome.reward is not None:
            return outcome.reward
        if not outcome.proposals:
            return self.weights.failed
        problem = Problem.model_validate(outcome.problem)
        rewards = [value for fields in outcome.proposals if (value := self._of_proposal(problem, fields)) is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def right(self, outcome: AnswerOutcome) -> bool:
        """Whether an answer has proposals, all of them are right by their trials, and no other part is faulty."""
        if outcome.right is not None:
            return outcome.right
        problem = Problem.model_validate(outcome.problem)
        trials = [self._trials.get(_key(problem, fields), []) for fields in outcome.proposals]
        return (
            bool(trials) and not outcome.fault and all(own and all(trial.measured for trial in own) for own in trials)
        )

    def _of_proposal(self, problem: Problem, fields: Fields) -> float | None:
        """The reward of a proposal by its longest trials; None without a trial, or if no reference was timed with
        it."""
        if "violation" in fields:
            return self.weights.failed
        trials = self._trials.get(_key(problem, fields), [])
        for effort in EFFORTS:
            if cases := [trial for trial in trials if trial.effort == effort]:
                try:
                    return reward.of_trials(cases, self.weights)
                except ValueError:  # no reference was timed together with it
                    return None
        return None


def _key(problem: Problem, fields: Mapping[str, Any]) -> str:
    """A text that is equal for records with the same decisions on the same problem."""
    decisions = {name: value for name, value in fields.items() if name not in space.NO_DECISION}
    return json.dumps([problem.key, decisions], sort_keys=True)


def examples(file: Path, rewards: Rewards) -> Iterator[Example]:
    """The rewarded answers of a transcript, one conversation after the other. Raises WrongInput."""
    exchanges: dict[str, Exchange] = {}
    shown_kernels: dict[str, str] = {}  # by the digest of the question that shows them
    failed_texts = set[str]()  # written answers that were not right
    conversations: dict[tuple[str, str], list[Example]] = {}  # by run and problem
    for line in transcript.read(file):
        if isinstance(line, Exchange):
            if line.messages and not line.error:
                exchanges[line.key] = line
        elif isinstance(line, State):
            if line.of.startswith(BASES):
                shown_kernels[line.of.removeprefix(BASES)] = _with_texts(line.content)
        elif (exchange := exchanges.get(line.exchange)) and (value := rewards.of_answer(line)) is not None:
            if line.right is False:
                failed_texts.add(exchange.text)
            thoughts = f"<think>\n{exchange.reasoning}\n</think>\n\n" if exchange.reasoning else ""
            example = Example(
                exchange.digest,
                [{"role": message.role, "content": message.content} for message in exchange.messages],
                [{"role": "assistant", "content": f"{thoughts}{exchange.text}"}],
                value,
                line.stage,
                exchange.problem,
                rewards.right(line),
                kernels=shown_kernels.get(exchange.digest, ""),
                product=json.dumps(line.problem),
                clean=not any(message.content in failed_texts for message in exchange.messages),
            )
            conversations.setdefault((line.run, exchange.problem), []).append(example)
    for conversation in conversations.values():
        returned = reward.returns([example.reward for example in conversation])
        for example, value in zip(conversation, returned, strict=True):
            yield replace(example, returned=value)


def _with_texts(kernels: Fields) -> str:
    """The kernels of a question as JSON, with their texts in place of the digests; empty if a text is gone."""
    try:
        return json.dumps({label: item | {"text": device_text.load(item["text"])} for label, item in kernels.items()})
    except WrongInput:
        return ""


def write(folder: Path, rewarded: Iterable[Example]) -> dict[str, int]:
    """Writes the three files into ``folder``, and returns the number of lines of each. Raises Failure."""
    ordered = sorted(rewarded, key=lambda example: STAGES.index(example.stage))
    rows = [{name: getattr(example, name) for name in COLUMNS} for example in ordered]
    questions: dict[str, dict[str, Any]] = {}
    for example in (item for item in ordered if item.clean):
        question = {name: getattr(example, name) for name in ("prompt", "stage", "problem", "product", "kernels")} | {
            "rewards": []
        }
        questions.setdefault(example.digest, question)["rewards"].append(example.reward)
    lines = {
        "answers.jsonl": rows,
        "sft.jsonl": [row for row, example in zip(rows, ordered, strict=True) if example.right and example.clean],
        "grpo.jsonl": list(questions.values()),
    }
    for name, content in lines.items():
        files.write(folder / name, "".join(json.dumps(row) + "\n" for row in content))
    return {name: len(content) for name, content in lines.items()}


class Scorer:
    """A reward function for TRL that evaluates the proposed records in an environment.

    A call takes conversational ``prompts`` and their ``completions``. The reward of an answer is the mean over its
    proposals; illegal and repeated ones count as failures. If ``tuner.record_prompt`` did not write the prompt, the
    reward is None, and GRPOTrainer ignores the answer.
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
        """The reward of one answer, the last message of ``completion``. ``messages``: the prompt."""
        question = next(
            (record_prompt.bases_in(message["content"]) for message in messages if message["role"] == "user"), None
        )
        if question is None:
            return None
        problem, bases = question
        reasoning, text = completions.split_reasoning(completion[-1]["content"])
        ideas, faults = record_answers.parse_ideas(Reply(text=text, reasoning=reasoning), record_answers.MAX_FAULTS)
        failures, records = len(faults), {}  # records by the key of their kernel
        for idea in ideas:
            proposal = record_answers.proposal_of(idea, bases)
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
