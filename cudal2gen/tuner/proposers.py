"""Proposers of records: at random, from the nearest problems, or by NVIDIA's heuristics.

``Mixture`` lets several of them share a search.
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
    """Any legal candidate, all equally likely."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Fewer than ``count`` proposals only if nearly all candidates were proposed before."""
        return _new_proposals(question, count, lambda: question.candidates.draw(self._rng, self.name))


class Nearest(FixedStrategy):
    """The records of the nearest problems, nearest first; if one is illegal here, the most similar legal candidate.

    ``pool``: the records to take from; a comparison of proposers removes its held-out problems from it. ``ordered``:
    they are taken in the pool's own order.
    """

    name = "nearest"

    def __init__(self, pool: Iterable[Record], neighbours: int = 32, ordered: bool = False) -> None:
        self._pool = list(pool)
        self._neighbours, self._ordered = neighbours, ordered

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """No proposals after ``neighbours`` records of the pool."""
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
    GPU and 10 more for another layout."""
    sizes = [(first.m, second.m), (first.n, second.n), (first.k, second.k)]
    penalty = 20.0 * (first.gpu != second.gpu) + 10.0 * (first.layout != second.layout)
    return penalty + sum(abs(math.log2(a / b)) for a, b in sizes)


class Heuristics(FixedStrategy):
    """The candidates most like the first choices of nvidia-matmul-heuristics. Needs the package, not a GPU."""

    name = "heuristics"

    def __init__(self) -> None:
        self._heuristics = MatmulHeuristics()
        self._finished: dict[Problem, int] = {}

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """The first sixteen choices of the package, in its order; then no more."""
        count_before = self._finished.get(question.problem, 0)
        if count_before >= 16:
            return []
        self._finished[question.problem] = 16
        keys, proposals = set(question.proposed_keys), []
        for answer in self._heuristics.answers(question.problem, 16):
            candidate = _most_similar(question.candidates, answer.configuration, self.name)
            if candidate.kernel_key not in keys:
                keys.add(candidate.kernel_key)
                proposals.append(legal_proposal(self.name, candidate))
        return proposals[:count]


def _most_similar(candidates: Candidates, config: Any, source: str) -> Record:
    """The candidate whose tile, ring, split and cluster differ least from a configuration's."""

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
    """Several proposers in turns: each answers for its share; the next ones fill what it leaves open."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self.members = list(proposers)
        self.name = "+".join(proposer.name for proposer in proposers)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Equal shares of legal proposals but for rounding; a proposer without any leaves its share to the rest."""
        proposals: list[Proposal] = []
        active, places = list(self.members), count
        while active and places:
            share = max(1, places // len(active))
            for proposer in list(active):
                answers = proposer.propose(question, min(share, places)) if places else []
                proposals += answers
                legal = sum(proposal.record is not None for proposal in answers)
                places -= legal
                question = replace(
                    question,
                    proposed_keys=question.proposed_keys
                    | {proposal.record.kernel_key for proposal in answers if proposal.record},
                )
                if not legal:
                    active.remove(proposer)
        return proposals

    def wait(self, problem: Problem) -> bool:
        """Waits for the first member with an answer under way: see ``SlowProposer``."""
        return any(proposer.wait(problem) for proposer in self.members if isinstance(proposer, SlowProposer))

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:  # noqa: ARG002
        """Returns False at once, because a search with other proposers does not wait for a server that rests."""
        return False

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Hands every trial to every proposer."""
        for proposer in self.members:
            proposer.observe(question, trials)


def awaits(proposer: Proposer) -> bool:
    """Whether a proposer, or a member of a mixture, may wait for a server."""
    if isinstance(proposer, Mixture):
        return any(map(awaits, proposer.members))
    return isinstance(proposer, SlowProposer)


TRIES = 20  # draws for each proposal before a proposer gives up


def _new_proposals(question: Question, count: int, draw: Callable[[], Record]) -> list[Proposal]:
    """Distinct draws that were not proposed before."""
    keys, proposals = set(question.proposed_keys), []
    for _ in range(TRIES * count):
        record = draw()
        if (key := record.kernel_key) not in keys:
            keys.add(key)
            proposals.append(legal_proposal(record.origin.source, record))
        if len(proposals) == count:
            break
    return proposals
