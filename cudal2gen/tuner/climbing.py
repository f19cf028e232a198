"""Proposers that improve on good records step by step, either by hill climbing or by the cost model's predictions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Fields, Problem, Record, parse
from cudal2gen.kernel.space import Candidates
from cudal2gen.tuner.cost_model import CostModel, Inputs, Posterior
from cudal2gen.tuner.facts import Facts, Tokens, facts, tokens
from cudal2gen.tuner.proposal import FixedStrategy, Proposal, Proposer, Question, legal_proposal, trial_key
from cudal2gen.tuner.proposers import Nearest

EARLY_ANSWER = 2  # proposals of an early answer; few, because their trials decide which ones come next
PARENTS = 12  # most of the best trials whose neighbours are proposed


def answer_size(question: Question, count: int) -> int:
    """How many records to propose, at most ``count``: few at first, because each early trial changes the next choice,
    and later a quarter of the number of trials."""
    return min(count, max(EARLY_ANSWER, len(question.trials) // 4))


class Choices(NamedTuple):
    """A candidate: a structure and a value for each of the structure's free fields.

    ``row``: the structure's index in ``Candidates.records``. ``free``: for each free field (each of the family's
    ``Candidates.heads``) the index of its value.
    """

    row: int
    free: tuple[int, ...]


class HillClimbing(FixedStrategy):
    """Proposes what the proposer ``starts`` says for ``first`` trials, and then neighbours of the best trials.

    Neighbours differ in one structural field or in one free field. Those of the best trial come first.
    """

    def __init__(self, starts: Proposer, name: str, seed: int = 0, first: int = 4) -> None:
        self.name = name
        self._starts, self._first = starts, first
        self._rng = random.Random(seed)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """No proposals if all neighbours of the best trials were proposed before, and ``starts`` has none."""
        if len(question.trials) < self._first:
            most = min(answer_size(question, count), self._first - len(question.trials))
            if proposals := self._starts.propose(question, most):
                return proposals
        keys, proposals = set(question.proposed_keys), []
        for trial in question.ranked[:PARENTS]:
            variants = neighbours(question.candidates, trial.record)
            self._rng.shuffle(variants)
            for choices in variants:
                record = compose(question.candidates, choices, self.name)
                if record.kernel_key not in keys:
                    keys.add(record.kernel_key)
                    proposals.append(legal_proposal(self.name, record))
                if len(proposals) == answer_size(question, count):
                    return proposals
        return proposals or self._starts.propose(question, count)


class ModelOrder(FixedStrategy):
    """Proposes structures in the order of a score, the lowest first, with the first value of each free field."""

    def __init__(self, name: str, score: Callable[[Sequence[Record]], Sequence[float]]) -> None:
        self.name = name
        self._score = score
        self._order: tuple[Problem, list[int]] | None = None

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """The next structures that were not proposed before."""
        candidates = question.candidates
        if self._order is None or self._order[0] != question.problem:
            self._order = question.problem, np.argsort(self._score(candidates.records), kind="stable").tolist()
        proposals: list[Proposal] = []
        for row in self._order[1]:
            if len(proposals) == count:
                break
            record = compose(candidates, first_choices(candidates, row), self.name)
            if record.kernel_key not in question.proposed_keys:
                proposals.append(legal_proposal(self.name, record))
        return proposals


class CandidateScores(NamedTuple):
    """Candidates (``choices``), the cost model's inputs for them, and its predictions.

    ``members``: the logarithm of time that each member of the ensemble predicts, of shape (members, candidates).
    """

    choices: list[Choices]
    inputs: Inputs
    members: NDArray[np.float32]


class Costs:
    """Predicts the times of one problem's candidates by the cost model, and caches the predictions.

    The predictions of the last answer are kept, because the next answer needs most of them again.
    """

    def __init__(self, model: CostModel, candidates: Candidates) -> None:
        self.model, self.candidates = model, candidates
        described = facts(candidates.records)
        self._numbers, self._modelled_us = described.numbers, described.modelled_us
        self._structure_tokens = [self._without_free(row, names) for row, names in enumerate(described.tokens)]
        self._tokens = {
            family: [[tokens(fields) for fields in alternatives] for alternatives in heads.values()]
            for family, heads in candidates.heads.items()
        }
        alternatives = (name for heads in self._tokens.values() for values in heads for row in values for name in row)
        self.own_tokens = Tokens(dict.fromkeys(itertools.chain(*self._structure_tokens, alternatives)))
        self._structures: tuple[dict[str, tuple[int, ...]], CandidateScores] | None = None
        self._variants: dict[int, CandidateScores] = {}

    def structures(self, start: Mapping[str, object]) -> CandidateScores:
        """Scores of all structures, each with the free fields of ``start``."""
        heads = self.candidates.heads.items()
        free = {family: choices_of(alternatives, start) for family, alternatives in heads}
        if self._structures is None or self._structures[0] != free:
            records = enumerate(self.candidates.records)
            self._structures = free, self._scores([Choices(row, free[record.family]) for row, record in records])
        return self._structures[1]

    def variants(self, rows: Iterable[int]) -> CandidateScores:
        """Scores of the structures in these rows, each with all combinations of values of its free fields."""
        self._variants = {row: self._variants.get(row) or self._scores(self._combinations(row)) for row in rows}
        parts = list(self._variants.values())
        choices = [item for part in parts for item in part.choices]
        inputs = Inputs(*(np.concatenate(columns) for columns in zip(*(part.inputs for part in parts), strict=True)))
        return CandidateScores(choices, inputs, np.concatenate([part.members for part in parts], 1))

    def _combinations(self, row: int) -> list[Choices]:
        """All choices of the free decisions of one row."""
        return [Choices(row, free) for free in itertools.product(*map(range, widths(self.candidates, row)))]

    def _scores(self, choices: list[Choices]) -> CandidateScores:
        """The inputs of these choices, and what the timing model says about each."""
        inputs = self.inputs(choices)
        return CandidateScores(choices, inputs, self.model.prior(inputs))

    def _without_free(self, row: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """A structure's tokens, without those of its free fields."""
        heads = self.candidates.heads[self.candidates.records[row].family]
        free = {name for alternatives in heads.values() for name in alternatives[0]}
        return tuple(name for name in names if name.split("=", 1)[0] not in free)

    def inputs(self, choices: Sequence[Choices]) -> Inputs:
        """The model's inputs for these candidates."""
        rows = np.array([item.row for item in choices], np.int64)
        names = [
            (*self._structure_tokens[item.row], *itertools.chain.from_iterable(self._free_tokens(item)))
            for item in choices
        ]
        return self.model.inputs(Facts(self._numbers[rows], names, self._modelled_us[rows]), self.own_tokens)

    def _free_tokens(self, choices: Choices) -> list[tuple[str, ...]]:
        """The tokens of the chosen value of each free field."""
        heads = self._tokens[self.candidates.records[choices.row].family]
        return [alternatives[index] for alternatives, index in zip(heads, choices.free, strict=True)]


class CostModelProposer(FixedStrategy):
    """Proposes the candidates of which the cost model expects the largest improvement on the best trial.

    Scoring all candidates would take too long. The proposer therefore starts from the best trial or the incumbent,
    scores all structures with the free fields of that start, and then only the best ``kept`` structures with all values
    of their free fields. ``pool``: records of other problems; the first answer contains the decisions of the nearest
    one. ``learning``: whether the model learns from trials of the problem at hand.
    """

    def __init__(
        self, model: CostModel, pool: Iterable[Record] = (), name: str = "model", learning: bool = True,
        kept: int = 24,
    ) -> None:  # fmt: skip
        self.name = name
        self._model, self._learning, self._kept = model, learning, kept
        self._nearest = Nearest(pool, 1)
        self._costs: tuple[Problem, Costs] | None = None
        self._inputs: dict[object, Inputs] = {}  # the model's inputs of each trial of the current problem, by trial_key

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """No proposals if all candidates on the shortlist were proposed before."""
        if self._costs is None or self._costs[0] != question.problem:
            self._costs = question.problem, Costs(self._model, question.candidates)
            self._inputs = {}
        costs = self._costs[1]
        observed, log_us = self._trials(costs, question)
        choices, inputs, members = self._shortlist(costs, question, self._model.posterior(observed, log_us))
        keys, proposals = set(question.proposed_keys), list[Proposal]()
        is_open = np.ones(len(choices), bool)
        while len(proposals) < answer_size(question, count) and is_open.any():
            posterior = self._model.posterior(observed, log_us)
            gain = improvement(posterior, inputs, members, log_us)
            best = int(np.where(is_open, gain, -np.inf).argmax())
            is_open[best] = False
            record = compose(question.candidates, choices[best], self.name)
            if record.kernel_key in keys:
                continue
            keys.add(record.kernel_key)
            proposals.append(legal_proposal(self.name, record))
            if not question.trials and len(proposals) == 1:
                proposals += self._nearest_record(question, keys)
            # The next record of the answer is chosen as if this one had taken its expected time.
            chosen = Inputs(*(part[best : best + 1] for part in inputs))
            mean, _ = posterior.predict(chosen, members[:, best : best + 1])
            observed = Inputs(*(np.concatenate(parts) for parts in zip(observed, chosen, strict=True)))
            log_us = np.append(log_us, mean)
        return proposals

    def _nearest_record(self, question: Question, keys: set[object]) -> list[Proposal]:
        """The decisions of the nearest record unless ``keys`` has them; adds them to ``keys``.

        They come second in the first answer, as another start in case the model is wrong.
        """
        proposals = [
            item for item in self._nearest.propose(question, 1) if item.record and item.record.kernel_key not in keys
        ]
        keys |= {item.record.kernel_key for item in proposals if item.record}
        return [item._replace(proposer=self.name) for item in proposals]

    def _trials(self, costs: Costs, question: Question) -> tuple[Inputs, NDArray[np.float64]]:
        """The model's inputs of the trials so far, and the logarithms of their costs; empty without ``learning``."""
        ranked = question.ranked if self._learning else []
        keys = [trial_key(trial) for trial in ranked]
        for key, trial in zip(keys, ranked, strict=True):
            if key not in self._inputs:
                self._inputs[key] = self._model.inputs(facts([parse(trial.record)]), costs.own_tokens)
        empty = self._model.inputs(facts([]), costs.own_tokens)
        rows = [empty, *(self._inputs[key] for key in keys)]
        observed = Inputs(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))
        return observed, np.log(np.array([trial.cost for trial in ranked], np.float64))

    def _shortlist(self, costs: Costs, question: Question, posterior: Posterior) -> CandidateScores:
        """The best structures of each start, with all values of their free fields."""
        rows: dict[int, None] = {}
        for start in self._starts(question):
            structures = costs.structures(start)
            mean, deviation = posterior.predict(structures.inputs, structures.members)
            # The lower confidence bound keeps structures of which the model is unsure.
            rows |= dict.fromkeys(np.argsort(mean - deviation)[: self._kept].tolist())
        return costs.variants(rows)

    def _starts(self, question: Question) -> list[Fields]:
        """The decisions whose free fields structures are first scored with: the best trial's, else the incumbent's."""
        records = [trial.record for trial in question.ranked[:1]]
        if not records and question.incumbent is not None:
            records.append(question.incumbent.decisions())
        return records or [{}]


def improvement(
    posterior: Posterior, inputs: Inputs, members: NDArray[np.float32], log_us: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The expected improvement of each candidate on the least of ``log_us``; without a trial, its negative mean."""
    mean, deviation = posterior.predict(inputs, members)
    if not len(log_us):
        return -mean
    # For a normally distributed log time with mean m and deviation s, the expected amount by which it falls below the
    # best so far is s * (density(z) + z * cumulative(z)), with z = (best - m) / s.
    z = (log_us.min() - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain: NDArray[np.float64] = deviation * (density + z * _cumulative(z))
    return gain


def _cumulative(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal distribution function, with an error below 1e-3 where it matters."""
    cumulative: NDArray[np.float64] = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return cumulative


def widths(candidates: Candidates, row: int) -> list[int]:
    """The number of values of each free field of a structure."""
    return [len(values) for values in candidates.heads[candidates.records[row].family].values()]


def first_choices(candidates: Candidates, row: int) -> Choices:
    """A structure with the first value of each free field."""
    return Choices(row, tuple(0 for _ in widths(candidates, row)))


def with_fields(candidates: Candidates, row: int, fields: Mapping[str, object]) -> Choices:
    """A structure whose free fields have the values in ``fields``; a field that is absent there has its first value."""
    return Choices(row, choices_of(candidates.heads[candidates.records[row].family], fields))


def choices_of(heads: Mapping[str, Sequence[Fields]], fields: Mapping[str, object]) -> tuple[int, ...]:
    """For each free field the index of its value in ``fields``, 0 if ``fields`` has none of its values."""
    return tuple(
        next((index for index, values in enumerate(alternatives) if values.items() <= fields.items()), 0)
        for alternatives in heads.values()
    )


def neighbours(candidates: Candidates, fields: Fields) -> list[Choices]:
    """Candidates that differ from a record in one free field, or in the least number of structural fields."""
    distances = candidates.distances(fields)  # for each structure the number of structural fields that differ
    found: list[Choices] = []
    for row in np.flatnonzero(distances == 0)[:1].tolist():
        own = with_fields(candidates, row, fields)
        for head, width in enumerate(widths(candidates, row)):
            for index in range(width):
                if index != own.free[head]:
                    found.append(Choices(row, (*own.free[:head], index, *own.free[head + 1 :])))
    positive = distances[distances > 0]
    nearest = int(positive.min()) if len(positive) else 0
    found += [with_fields(candidates, row, fields) for row in np.flatnonzero(distances == nearest).tolist() if nearest]
    return found


def compose(candidates: Candidates, choices: Choices, source: str) -> Record:
    """The record of a candidate. ``source``: the proposer that its origin names."""
    heads = candidates.heads[candidates.records[choices.row].family]
    return candidates.compose(choices.row, dict(zip(heads, choices.free, strict=True)), source)
