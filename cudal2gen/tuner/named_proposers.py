"""Proposers by name, as ``tune --proposers`` takes them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

from cudal2gen.kernel import Problem, Record
from cudal2gen.tuner import cost_model, reward
from cudal2gen.tuner.climbing import CostModelProposer
from cudal2gen.tuner.cost_model import CostModel
from cudal2gen.tuner.policy import Policy
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.proposers import Evolution, Heuristics, Mixture, Nearest, PolicyProposer, Random, Tpe

MOST_KEPT = 32  # problems whose view by the cost model is kept
NAMES = ("cost-model", "policy", "prior", "llm", "nearest", "heuristics", "tpe", "evolution", "random")


class ProposerFactory:
    """Makes a proposer for each search: a mixture if there are several names, which must be of ``NAMES``.

    ``policy``, ``llm`` and ``costs`` make the policy, the language model and the cost model; each is called at most
    once, and only if a name needs it. Random draws follow from ``seed`` and the problem. ``weights``: those of the
    policy's reward, which is the logarithm of speed if None. Raises ValueError for an unknown name, MissingLibrary.
    """

    def __init__(
        self,
        names: Sequence[str],
        policy: Callable[[], Policy],
        pool: Iterable[Record],
        seed: int = 0,
        weights: reward.RewardWeights | None = None,
        llm: Callable[[], Proposer] | None = None,
        costs: Callable[[], CostModel] = cost_model.load,
    ) -> None:
        if strangers := [name for name in names if name not in NAMES]:
            raise ValueError(f"no proposer {', '.join(strangers)}: must be of {', '.join(NAMES)}")
        self._names = tuple(dict.fromkeys(names))
        self._pool, self._seed, self._reward = list(pool), seed, weights
        self._policy = policy() if {"policy", "prior"} & set(names) else None
        self._costs = costs() if "cost-model" in names else None
        if "llm" in names and llm is None:
            raise ValueError("proposer llm needs a server: --llm NAME@URL")
        self._llm = llm() if llm and "llm" in names else None
        self._learning: dict[Problem, PolicyProposer] = {}
        # Kept although their answers follow from the question alone: they remember a problem's candidates.
        self._climbing: dict[Problem, Proposer] = {}
        for name in self._names:
            self._make(name, seed)  # raises MissingLibrary at the start, not in the first search

    def proposer(self, problem: Problem) -> Proposer:
        """The proposer of one search. All searches share the language model and its limits."""
        seed = zlib.crc32(f"{self._seed} {problem.key}".encode())
        proposers = [self._climber(problem) if name == "cost-model" else self._make(name, seed) for name in self._names]
        for proposer in proposers:
            if isinstance(proposer, PolicyProposer):
                self._learning[problem] = proposer
        return proposers[0] if len(proposers) == 1 else Mixture(proposers)

    def conclude(self, problem: Problem) -> None:
        """Ends a problem's search: the policy learns from it for later searches."""
        self._climbing.pop(problem, None)
        if proposer := self._learning.pop(problem, None):
            proposer.conclude()

    def _make(self, name: str, seed: int) -> Proposer:
        if name in ("policy", "prior") and self._policy is not None:
            frozen = name == "prior"
            return PolicyProposer(self._policy, name, seed, frozen, group=True, keep=True, reward=self._reward)
        if name == "llm" and self._llm is not None:
            return self._llm
        if name == "cost-model" and self._costs is not None:
            return CostModelProposer(self._costs, self._pool, name)
        if name == "nearest":
            return Nearest(self._pool)
        if name == "heuristics":
            return Heuristics()
        return Tpe(seed) if name == "tpe" else Evolution(seed) if name == "evolution" else Random(seed)

    def _climber(self, problem: Problem) -> Proposer:
        if problem not in self._climbing:
            if len(self._climbing) == MOST_KEPT:
                del self._climbing[next(iter(self._climbing))]
            self._climbing[problem] = self._make("cost-model", self._seed)
        return self._climbing[problem]
