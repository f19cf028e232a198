"""A reward function for TRL that scores answers with written kernels.

Each kernel is compiled, proven and timed. Its reward grows with its speed over that of the fastest kernel that the
question showed (``reward.of_written``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from cudal2gen import kernel
from cudal2gen.kernel import Fields, Problem
from cudal2gen.tuner.executor import Executor, InProcess
from cudal2gen.tuner.language_model import completions as answers
from cudal2gen.tuner.language_model.transcript import Reply
from cudal2gen.tuner.reward import RewardWeights
from cudal2gen.tuner.writing import kernel_answers
from cudal2gen.tuner.writing.judging import ORIGIN, Judge
from cudal2gen.tuner.writing.kernel_answers import Base, Draft
from cudal2gen.tuner.writing.modelled import ModelledTimes, Profiler
from cudal2gen.tuner.writing.proof import CheckLimits

INCUMBENT_LABEL = "incumbent"


def modelled(problem: Problem, incumbent: Draft) -> Executor:
    """An executor without a GPU, whose times are those of the timing model."""
    record = kernel.of_text(problem, incumbent.text, ORIGIN, incumbent.launch)
    return InProcess(ModelledTimes(lambda _: record, Profiler()))


class KernelScorer:
    """Rewards answers to questions of ``writing``, whose rows of ``grpo.jsonl`` have ``kernels`` and ``product``.

    The reward of an answer is the mean over its kernels. An idea that is no kernel counts as a failure, and a copy has
    the reward of its original. For a row without kernels the reward is None, and GRPOTrainer ignores the answer.

    - ``executor`` makes an executor from a problem and its incumbent (``Draft``).
    - ``most``: the number of kernels of an answer that count.
    """

    __name__ = "cudal2gen_written"  # GRPOTrainer names its metrics by it

    def __init__(
        self, executor: Callable[[Problem, Draft], Executor] = modelled, bounds: CheckLimits | None = None,
        weights: RewardWeights | None = None, most: int = 3,
    ) -> None:  # fmt: skip
        self._executor, self._bounds, self._most = executor, bounds or CheckLimits(), most
        self._weights = weights or RewardWeights()
        self._rewards: dict[tuple[str, str], float] = {}  # by the question's kernels and the answer
        self._judges: dict[str, tuple[Judge, dict[str, Base], float]] = {}

    def __call__(
        self, prompts: Sequence[object], completions: Sequence[Sequence[Mapping[str, str]]],
        kernels: Sequence[str] = (), product: Sequence[str] = (), **_: object,
    ) -> list[float | None]:  # fmt: skip
        rows = zip(kernels or [""] * len(prompts), product or [""] * len(prompts), completions, strict=True)
        return [
            self._reward(shown, problem, answer[-1]["content"]) if shown else None for shown, problem, answer in rows
        ]

    def _reward(self, shown: str, problem: str, answer: str) -> float:
        """The reward of an answer, computed once. See ``_computed_reward``."""
        key = (f"{problem}\n{shown}", answer)
        if key not in self._rewards:
            self._rewards[key] = self._computed_reward(shown, problem, answer)
        return self._rewards[key]

    def _computed_reward(self, shown: str, problem: str, answer: str) -> float:
        """The mean reward of the kernels in an answer, faulty ones included. ``shown``, ``problem``: JSON texts of what
        the question showed."""
        judge, bases, best = self._judge(shown, problem)
        reasoning, text = answers.split_reasoning(answer)
        drafts, faults = kernel_answers.drafts(Reply(text=text, reasoning=reasoning), bases, self._most)
        rewards = [self._weights.failed] * len(faults)
        rewards += [judge.judge(draft, best).reward for draft in drafts]
        return sum(rewards) / len(rewards)

    def _judge(self, shown: str, problem: str) -> tuple[Judge, dict[str, Base], float]:
        """The judge of a question, the kernels that the question shows by label, and the speed of the fastest one."""
        key = f"{problem}\n{shown}"
        if key not in self._judges:
            kernels: dict[str, Fields] = json.loads(shown)
            bases = {label: Base(str(item["text"]), dict(item["launch"])) for label, item in kernels.items()}
            own = Problem.model_validate_json(problem)
            incumbent = Draft(INCUMBENT_LABEL, "", *bases[INCUMBENT_LABEL])
            judge = Judge(own, self._executor(own, incumbent), self._bounds, self._weights)
            judge.add_known(incumbent, None)
            best = max(float(item["speed"]) for item in kernels.values())
            self._judges[key] = judge, bases, best
        return self._judges[key]
