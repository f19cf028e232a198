"""Proposers that take records at random, from the nearest problems, or from NVIDIA's heuristics.

``Mixture`` combines several proposers for one search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cudal2gen.kernel import Problem, Record, space
from cudal2gen.kernel.space import Candidates
from cudal2gen.results import Trial
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.tuner.proposal import FixedStrategy, Proposal, Proposer, Question, SlowProposer, legal_proposal


class Random(FixedStrategy):
    """Proposes legal candidates at random, all equally likely."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Fewer than ``count`` proposals only if nearly all candidates were proposed before."""
        return _new_proposals(question, count, lambda: question.candidates.draw(self._rng, self.name))


class Nearest(FixedStrategy):
    """Proposes the records of the nearest problems, nearest first. For a record that is illegal for this problem it
    proposes the most similar legal candidate.

    ``pool``: the records to choose from; a comparison of proposers removes its held-out problems from it.
    ``neighbours``: how many records are used at most. ``ordered``: records are proposed in the order of the pool, and
    not by distance.
    """

    name = "nearest"

    def __init__(self, pool: Iterable[Record], neighbours: int = 32, ordered: bool = False) -> None:
        self._pool = list(pool)
        self._neighbours, self._ordered = neighbours, ordered

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """No proposals after the first ``neighbours`` records of the pool."""
        problem, proposals, keys = question.problem, [], set(question.proposed_keys)
        pool = [record for record in self._pool if record.acc == problem.acc and record.problem != problem]
        if not self._ordered:
            pool.sort(key=lambda record: distance(problem, record.problem))
        for record in pool[: self._neighbours]:
            adopted = space.adopt(record, question.candidates, self.name)
            if adopted.kernel_key not in keys:
                keys.add(adopted.kernel_key)
                proposals.append(legal_proposal(self.name, adopted))
            if len(proposals) == count:
                break
        return proposals


def distance(first: Problem, second: Problem) -> float:
    """The distance of two problems, in doublings: the sum of |log2| of their extents' ratios, with 20 more for another
    GPU and 10 more for another layout. So a problem of the same GPU and layout is nearly always nearer than another."""
    sizes = [(first.m, second.m), (first.n, second.n), (first.k, second.k)]
    penalty = 20.0 * (first.gpu != second.gpu) + 10.0 * (first.layout != second.layout)
    return penalty + sum(abs(math.log2(a / b)) for a, b in sizes)


CHOICES = 16  # choices of nvidia-matmul-heuristics for a problem


class Heuristics(FixedStrategy):
    """Proposes the candidates most similar to the first choices of the package nvidia-matmul-heuristics. Needs no GPU.

    Raises MissingLibrary without the package.
    """

    name = "heuristics"

    def __init__(self) -> None:
        self._heuristics = MatmulHeuristics()
        self._finished: set[Problem] = set()

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Proposals from the package's first ``CHOICES`` choices. Only the first call for a problem returns any."""
        if question.problem in self._finished:
            return []
        self._finished.add(question.problem)
        keys, proposals = set(question.proposed_keys), []
        for answer in self._heuristics.answers(question.problem, CHOICES):
            candidate = _most_similar(question.candidates, answer.configuration, self.name)
            if candidate.kernel_key not in keys:
                keys.add(candidate.kernel_key)
                proposals.append(legal_proposal(self.name, candidate))
        return proposals[:count]


def _most_similar(candidates: Candidates, config: Any, source: str) -> Record:
    """The candidate whose tile, split-k, cluster and number of stages differ least from a configuration of
    nvidia-matmul-heuristics. Factors differ by |log2| of their ratio. Stages matter less than tiles, so one more or
    less counts a tenth of a doubling."""

    def difference(record: Record) -> float:
        cluster = getattr(record, "cluster", (1, 1))
        pairs = [
            (record.bm, config.cta_tile_m), (record.bn, config.cta_tile_n), (record.k_step, config.cta_tile_k),
            (record.split_k, config.split_k), (cluster[0], config.cluster_m), (cluster[1], config.cluster_n),
        ]  # fmt: skip
        return float(sum(abs(math.log2(a / b)) for a, b in pairs)) + 0.1 * abs(record.ring_steps - int(config.stages))

    row = min(range(len(candidates.records)), key=lambda row: difference(candidates.records[row]))
    return candidates.compose(row, {}, source)


class Mixture:
    """Asks several proposers for equal parts of an answer. If one proposes fewer, the others fill the rest."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self.members = list(proposers)
        self.name = "+".join(proposer.name for proposer in proposers)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Up to ``count`` legal proposals, and the illegal ones among them. A proposer that returned no legal proposal
        is not asked again for this answer."""
        proposals: list[Proposal] = []
        active, missing = list(self.members), count
        while active and missing:
            part = max(1, missing // len(active))
            for proposer in list(active):
                answers = proposer.propose(question, min(part, missing)) if missing else []
                proposals += answers
                legal = sum(proposal.record is not None for proposal in answers)
                missing -= legal
                question = replace(
                    question,
                    proposed_keys=question.proposed_keys
                    | {proposal.record.kernel_key for proposal in answers if proposal.record},
                )
                if not legal:
                    active.remove(proposer)
        return proposals

    def wait(self, problem: Problem) -> bool:
        """Waits for the first member that has an answer under way. See ``SlowProposer``."""
        return any(proposer.wait(problem) for proposer in self.members if isinstance(proposer, SlowProposer))

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:  # noqa: ARG002
        """Returns False without waiting, because a search with other proposers does not wait for a server."""
        return False

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Hands every trial to every proposer."""
        for proposer in self.members:
            proposer.observe(question, trials)


def awaits(proposer: Proposer) -> bool:
    """Whether a proposer, or a member of a mixture, may have to wait for a language model's server."""
    if isinstance(proposer, Mixture):
        return any(map(awaits, proposer.members))
    return isinstance(proposer, SlowProposer)


TRIES = 20  # draws for each proposal before a proposer gives up


def _new_proposals(question: Question, count: int, draw: Callable[[], Record]) -> list[Proposal]:
    """Up to ``count`` distinct draws that were not proposed before. ``draw`` returns a random legal record."""
    keys, proposals = set(question.proposed_keys), []
    for _ in range(TRIES * count):
        record = draw()
        if (key := record.kernel_key) not in keys:
            keys.add(key)
            proposals.append(legal_proposal(record.origin.source, record))
        if len(proposals) == count:
            break
    return proposals
