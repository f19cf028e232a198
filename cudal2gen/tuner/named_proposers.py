"""Makes proposers from the names that ``tune --proposers`` takes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from cudal2gen.kernel import Problem
from cudal2gen.tuner.climbing import CostModelProposer
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.proposers import Heuristics, Mixture, Nearest, Random
from cudal2gen.tuner.training import Learning

NAMES = ("cost-model", "llm", "nearest", "heuristics", "random")


class ProposerFactory:
    """Makes a proposer for each search; if there are several ``names``, a mixture of their proposers.

    A proposer starts from the current state of ``learning``. ``llm`` makes the proposer of that name; it is called at
    most once, and only if ``names`` has it. Random draws depend on ``seed`` and the problem alone. Raises ValueError
    for a name that is not in ``NAMES`` and for "llm" without ``llm``, and MissingLibrary.
    """

    def __init__(
        self, names: Sequence[str], learning: Learning, seed: int = 0, llm: Callable[[], Proposer] | None = None
    ) -> None:
        if unknown := [name for name in names if name not in NAMES]:
            raise ValueError(f"no proposer {', '.join(unknown)}: must be of {', '.join(NAMES)}")
        self._names = tuple(dict.fromkeys(names))
        self._learning, self._seed = learning, seed
        if "llm" in names and llm is None:
            raise ValueError("proposer llm needs a server: --llm NAME@URL")
        self._llm = llm() if llm and "llm" in names else None
        for name in self._names:
            self._make(name, seed)  # raises MissingLibrary at the start, not in the first search

    def proposer(self, problem: Problem) -> Proposer:
        """The proposer of one search. All searches share the language model and its limits."""
        seed = zlib.crc32(f"{self._seed} {problem.key}".encode())
        proposers = [self._make(name, seed) for name in self._names]
        return proposers[0] if len(proposers) == 1 else Mixture(proposers)

    def _make(self, name: str, seed: int) -> Proposer:
        """The proposer of this name, which is known."""
        if name == "llm" and self._llm is not None:
            return self._llm
        if name == "cost-model":
            return CostModelProposer(self._learning.model, self._learning.pool, name)
        if name == "nearest":
            return Nearest(self._learning.pool)
        return Heuristics() if name == "heuristics" else Random(seed)
