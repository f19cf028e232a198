"""The cost model: a record's time, with its uncertainty, from the timing model and from trials.

The logarithm of a time is the sum of three parts: the timing model's estimate; a correction that an ensemble of
networks has learned from trials of other problems, if there are any; and a correction from the trials of the problem at
hand. The last part is a Gaussian process over decisions, whose prior variance is the ensemble's spread plus the
``spread`` that is left unexplained in problems that a network has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import IllegalRecord, Problem, Record, parse
from cudal2gen.results import Trial
from cudal2gen.tuner import regression
from cudal2gen.tuner.facts import NUMBERS, Facts, Floats, Tokens, coordinates, facts
from cudal2gen.tuner.regression import Ensemble, TrainingRows, centred

NEAR_BEST = 0.15  # distance from a problem's best, in log time, at which a record's weight has fallen by e
SCALE = 1.0  # standard deviation of a problem's own constant factor, in log time
SPREAD, LENGTH = 0.12, 1.8  # of the process of a model without training
LENGTHS = (0.8, 1.2, 1.8, 2.7, 4.0)  # length scales of the process that are tried, in octaves and differing fields
NOISE = 0.006  # standard deviation of a measurement, in log time
FEWEST = 4  # problems from which networks learn; with fewer the timing model is not corrected
COMPARED, NEAREST = 24, 64  # problems, and records of each, by which the process is chosen


class TimedRecords(NamedTuple):
    """Records of one problem with their times in microseconds."""

    records: Sequence[Record]
    us: Sequence[float]


class Inputs(NamedTuple):
    """Records as the networks (``columns``) and the process (``places``) see them, with their estimates."""

    columns: Floats
    places: Floats
    log_us: Floats


class CostModel:
    """The timing model with the correction of an ``ensemble``, whose inputs have columns for ``tokens``.

    ``spread`` and ``length`` are the process's standard deviation and length scale. Without an ensemble it is the model
    that begins a campaign.
    """

    def __init__(
        self, tokens: Tokens | None = None, ensemble: Ensemble | None = None, spread: float = SPREAD,
        length: float = LENGTH,
    ) -> None:  # fmt: skip
        self.tokens, self.ensemble, self.spread, self.length = tokens or Tokens(()), ensemble, spread, length

    def inputs(self, described: Facts, own: Tokens) -> Inputs:
        """Facts as columns and coordinates. ``own``: the tokens among which the problem at hand has a choice."""
        columns = np.concatenate([described.numbers, self.tokens.one_hot(described.tokens)], 1)
        return Inputs(columns, coordinates(described.numbers, own.one_hot(described.tokens)), described.log_us)

    def prior(self, inputs: Inputs) -> Floats:
        """Each member's logarithm of time, of shape (members, records)."""
        if self.ensemble is None:
            return inputs.log_us[None]
        return self.ensemble.predict(inputs.columns) + inputs.log_us

    def times(self, records: Sequence[Record]) -> list[float]:
        """Modelled times of one problem's records, up to a common factor, from training alone."""
        return self.times_of(facts(records))

    def times_of(self, described: Facts) -> list[float]:
        """``times`` of records by their facts."""
        times: list[float] = np.exp(self.prior(self.inputs(described, self.tokens)).mean(0)).tolist()
        return times

    def posterior(self, observed: Inputs, log_us: NDArray[np.float64], noise: float = NOISE) -> Posterior:
        """The model after trials of the problem at hand."""
        return Posterior(self, observed, log_us, noise)


class Posterior:
    """Means and standard deviations of log times, given trials. Without trials the problem's constant is unknown."""

    def __init__(self, model: CostModel, observed: Inputs, log_us: NDArray[np.float64], noise: float) -> None:
        self._model, self._observed = model, observed
        members = model.prior(observed)
        self._centred = (members - members.mean(0)) / math.sqrt(len(members))
        covariance = self._covariance(observed, self._centred, observed, self._centred)
        covariance[np.diag_indices(len(log_us))] += noise**2
        self._factor = np.linalg.cholesky(covariance).astype(np.float64)
        residual: NDArray[np.float64] = log_us - members.mean(0).astype(np.float64)
        # Costs may be ratios, whose constant is far from the model's: the process must not pull it back.
        self._constant = float(residual.mean()) if len(residual) else 0.0
        self._answer = _solve(self._factor, residual - self._constant)

    def predict(self, inputs: Inputs, members: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``members``: the model's ``prior`` of the inputs."""
        mean = members.mean(0).astype(np.float64) + self._constant
        centred = (members - members.mean(0)) / math.sqrt(len(members))
        variance = SCALE**2 + self._model.spread**2 + (centred**2).sum(0)
        if len(self._answer):
            cross = self._covariance(inputs, centred, self._observed, self._centred)
            mean = mean + cross @ self._answer
            solved = np.linalg.solve(self._factor, cross.T)
            variance = variance - (solved**2).sum(0)
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def _covariance(self, first: Inputs, a: Floats, second: Inputs, b: Floats) -> NDArray[np.float64]:
        kernel = _kernel(first.places, second.places, self._model.length)
        covariance: NDArray[np.float64] = SCALE**2 + self._model.spread**2 * kernel + (a.T @ b)
        return covariance


def _kernel(first: Floats, second: Floats, length: float) -> NDArray[np.float64]:
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * first @ second.T
    kernel: NDArray[np.float64] = np.exp(-np.maximum(squares, 0).astype(np.float64) / (2 * length**2))
    return kernel


def _solve(factor: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    answer: NDArray[np.float64] = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
    return answer


Described = tuple[Facts, TimedRecords]


def train(timed: Iterable[TimedRecords], seed: int = 0, members: int = 8, epochs: int = 40) -> CostModel:
    """A model of these problems; the untrained one if fewer than ``FEWEST`` of them have two records."""
    return train_described([(facts(problem.records), problem) for problem in timed], seed, members, epochs)


def train_described(problems: Sequence[Described], seed: int = 0, members: int = 8, epochs: int = 40) -> CostModel:
    """``train`` for problems by their facts.

    What networks say of problems that they have not seen decides how much of their correction is believed (none, where
    it does not help), and how far the process deviates from it.
    """
    described = [(described_facts, problem) for described_facts, problem in problems if len(problem.records) > 1]
    if len(described) < FEWEST:
        return CostModel()
    names = dict.fromkeys(name for described_facts, _ in described for row in described_facts.tokens for name in row)
    tokens = Tokens(names)
    samples = _samples(tokens, described)
    ensemble = regression.fit(samples, members=members, epochs=epochs, seed=seed)
    lengths = np.array([len(problem.records) for _, problem in described])
    target = centred(samples.target[None], samples.weight[None], lengths)[0]
    unseen = centred(ensemble.left_out(samples)[None], samples.weight[None], lengths)[0]
    believed = float(np.clip((samples.weight * unseen) @ target / ((samples.weight * unseen) @ unseen + 1e-9), 0, 1))
    ensemble.arrays["w3"] *= np.float32(believed)
    return CostModel(tokens, ensemble, *_process(samples, target - believed * unseen))


def _samples(tokens: Tokens, described: Sequence[Described]) -> TrainingRows:
    blocks: list[tuple[Floats, Floats, Floats]] = []
    for record_facts, problem in described:
        log_us = np.log(np.array(problem.us, np.float32))
        weight = np.exp(-(log_us - log_us.min()) / NEAR_BEST) + 0.02
        blocks.append(
            (
                np.concatenate([record_facts.numbers, tokens.one_hot(record_facts.tokens)], 1),
                log_us - record_facts.log_us,
                weight,
            )
        )
    inputs, target, weights = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    places = np.concatenate([np.full(len(block[1]), place) for place, block in enumerate(blocks)])
    return TrainingRows(inputs, target, weights, places)


def _process(samples: TrainingRows, rest: Floats) -> tuple[float, float]:
    """The standard deviation and length of the process for which ``rest``, what is unexplained, is likeliest."""
    residuals = []
    numbers = np.unique(samples.problem)
    for number in numbers[:: math.ceil(len(numbers) / COMPARED)]:
        rows = np.flatnonzero(samples.problem == number)
        near = rows[np.argsort(-samples.weight[rows], kind="stable")[:NEAREST]]
        own = rest[near].astype(np.float64)
        places = coordinates(samples.inputs[near, :NUMBERS], samples.inputs[near, NUMBERS:])
        residuals.append((places, own - own.mean()))
    spread = float(np.sqrt(np.mean(np.concatenate([own for _, own in residuals]) ** 2)))
    best = (-math.inf, spread, LENGTH)
    for length in LENGTHS:
        for factor in (0.5, 0.75, 1.0, 1.5):
            fit = sum(_likelihood(places, own, factor * spread, length) for places, own in residuals)
            best = max(best, (fit, factor * spread, length))
    return best[1:]


def _likelihood(places: Floats, rest: NDArray[np.float64], spread: float, length: float) -> float:
    covariance = spread**2 * _kernel(places, places, length) + SCALE**2
    covariance[np.diag_indices(len(rest))] += NOISE**2
    factor = np.linalg.cholesky(covariance)
    solved = np.linalg.solve(factor, rest)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())


def timed(trials: Iterable[Trial]) -> dict[Problem, TimedRecords]:
    """Measured trials by problem. The last trial of a record counts; records that are illegal today are left out."""
    problems: dict[Problem, dict[object, tuple[Record, float]]] = {}
    for trial in trials:
        if trial.measured:
            try:
                record = parse(trial.record)
            except IllegalRecord:
                continue
            problems.setdefault(trial.problem, {})[record.kernel_key] = (record, trial.median_us)
    return {
        problem: TimedRecords([record for record, _ in by_kernel.values()], [us for _, us in by_kernel.values()])
        for problem, by_kernel in problems.items()
    }
