"""The cost model predicts a record's time and its uncertainty from the timing model and from trials.

The logarithm of a time is the sum of three parts:

- the timing model's estimate;
- a correction that an ensemble of networks has learned from trials of other problems, if there are any;
- a correction from the trials of the problem at hand. This is a Gaussian process over the record's decisions. Its prior
  variance is that of the ensemble's members plus ``spread`` squared, the error that remains in problems that a network
  was not trained on.
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
FACTOR_SPREAD = 1.0  # standard deviation of a problem's own constant factor, in log time
SPREAD, LENGTH = 0.12, 1.8  # standard deviation (log time) and length scale of the process before any training
LENGTHS = (0.8, 1.2, 1.8, 2.7, 4.0)  # length scales that ``_fit_process`` tries, in the units of facts.coordinates
NOISE = 0.006  # standard deviation of a measurement, in log time
MIN_PROBLEMS = 4  # least number of problems for training; with fewer the timing model is not corrected
FITTED_PROBLEMS, FITTED_RECORDS = 24, 64  # most problems, and most records of each, to which the process is fitted
LEAST_WEIGHT = 0.02  # added to all weights, so that slow records count a little
SPREAD_FACTORS = (0.5, 0.75, 1.0, 1.5)  # spreads that ``_fit_process`` tries, over the residuals' standard deviation


class TimedRecords(NamedTuple):
    """Records of one problem with their times in microseconds."""

    records: Sequence[Record]
    us: Sequence[float]


class Inputs(NamedTuple):
    """Encoded records; each array has a row for each record.

    - ``columns``: inputs of the networks, of shape (records, columns).
    - ``coordinates``: inputs of the Gaussian process, of shape (records, coordinates).
    - ``log_us``: logarithms of the timing model's estimates in µs, of shape (records,).
    """

    columns: Floats
    coordinates: Floats
    log_us: Floats


class CostModel:
    """The timing model with the correction of an ``ensemble``, whose inputs have columns for ``tokens``.

    ``spread`` and ``length`` are the process's standard deviation and length scale. A campaign begins with a model
    without an ensemble.
    """

    def __init__(
        self, tokens: Tokens | None = None, ensemble: Ensemble | None = None, spread: float = SPREAD,
        length: float = LENGTH,
    ) -> None:  # fmt: skip
        self.tokens, self.ensemble, self.spread, self.length = tokens or Tokens(()), ensemble, spread, length

    def inputs(self, described: Facts, own: Tokens) -> Inputs:
        """The records' facts, encoded. ``own``: the tokens among which the problem at hand has a choice."""
        columns = np.concatenate([described.numbers, self.tokens.one_hot(described.tokens)], 1)
        return Inputs(columns, coordinates(described.numbers, own.one_hot(described.tokens)), described.log_us)

    def prior(self, inputs: Inputs) -> Floats:
        """The logarithm of time that each member predicts before trials of the problem; shape (members, records)."""
        if self.ensemble is None:
            return inputs.log_us[None]
        return self.ensemble.predict(inputs.columns) + inputs.log_us

    def times(self, records: Sequence[Record]) -> list[float]:
        """Modelled times of one problem's records, up to a common factor, without trials of that problem."""
        return self.times_of(facts(records))

    def times_of(self, described: Facts) -> list[float]:
        """``times`` of records that are given by their facts."""
        times: list[float] = np.exp(self.prior(self.inputs(described, self.tokens)).mean(0)).tolist()
        return times

    def posterior(self, observed: Inputs, log_us: NDArray[np.float64], noise: float = NOISE) -> Posterior:
        """The model after trials of the problem at hand: of the records ``observed``, whose times have the logarithms
        ``log_us`` of shape (records,). ``noise``: the standard deviation of a measurement, in log time."""
        return Posterior(self, observed, log_us, noise)


class Posterior:
    """Predicts means and standard deviations of log times, given trials of the problem.

    Without trials the problem's constant factor is unknown, so means are comparable only with one another.
    """

    def __init__(self, model: CostModel, observed: Inputs, log_us: NDArray[np.float64], noise: float) -> None:
        self._model, self._observed = model, observed
        members = model.prior(observed)
        # Scaled so that the inner product of two of its columns is the covariance of the members' predictions.
        self._deviations = (members - members.mean(0)) / math.sqrt(len(members))
        covariance = self._covariance(observed, self._deviations, observed, self._deviations)
        covariance[np.diag_indices(len(log_us))] += noise**2
        self._factor = np.linalg.cholesky(covariance).astype(np.float64)
        residual: NDArray[np.float64] = log_us - members.mean(0).astype(np.float64)
        # Costs may be ratios, whose constant is far from the model's: the process must not pull it back.
        self._constant = float(residual.mean()) if len(residual) else 0.0
        self._weights = _solve(self._factor, residual - self._constant)

    def predict(self, inputs: Inputs, members: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The means and the standard deviations, each of shape (records,). ``members``: the inputs' ``prior``."""
        mean = members.mean(0).astype(np.float64) + self._constant
        deviations = (members - members.mean(0)) / math.sqrt(len(members))
        variance = FACTOR_SPREAD**2 + self._model.spread**2 + (deviations**2).sum(0)
        if len(self._weights):
            cross = self._covariance(inputs, deviations, self._observed, self._deviations)
            mean = mean + cross @ self._weights
            # L is the Cholesky factor of the trials' covariance. The trials reduce the variance by |L^-1 cross|^2.
            solved = np.linalg.solve(self._factor, cross.T)
            variance = variance - (solved**2).sum(0)
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def _covariance(self, first: Inputs, a: Floats, second: Inputs, b: Floats) -> NDArray[np.float64]:
        """The prior covariance of log times; shape (records of first, records of second).

        It is the sum of three covariances: of the problem's constant factor, of the process, and of the ensemble.
        ``a`` and ``b`` are the members' deviations from their mean, of shape (members, records), over sqrt(members).
        """
        kernel = _kernel(first.coordinates, second.coordinates, self._model.length)
        covariance: NDArray[np.float64] = FACTOR_SPREAD**2 + self._model.spread**2 * kernel + (a.T @ b)
        return covariance


def _kernel(first: Floats, second: Floats, length: float) -> NDArray[np.float64]:
    """The squared-exponential kernel between rows of coordinates; shape (rows of first, rows of second)."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * first @ second.T
    kernel: NDArray[np.float64] = np.exp(-np.maximum(squares, 0).astype(np.float64) / (2 * length**2))
    return kernel


def _solve(factor: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The solution x of ``factor @ factor.T @ x = values``, where ``factor`` is a Cholesky factor."""
    solution: NDArray[np.float64] = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
    return solution


Described = tuple[Facts, TimedRecords]  # a problem's records and times, with the facts of these records


def train(problems: Iterable[TimedRecords], seed: int = 0, members: int = 8, epochs: int = 40) -> CostModel:
    """A model trained on these problems, by an ensemble of ``members`` networks.

    It is untrained if fewer than ``MIN_PROBLEMS`` of them have two records or more.
    """
    return train_described([(facts(problem.records), problem) for problem in problems], seed, members, epochs)


def train_described(problems: Sequence[Described], seed: int = 0, members: int = 8, epochs: int = 40) -> CostModel:
    """``train`` for problems whose facts are known.

    Each problem is predicted by the member that was not trained on it. The least-squares fit of these predictions to
    the truth gives the factor (0 to 1) by which all corrections are scaled. The process is fitted to the errors that
    remain.
    """
    described = [(described_facts, problem) for described_facts, problem in problems if len(problem.records) > 1]
    if len(described) < MIN_PROBLEMS:
        return CostModel()
    names = dict.fromkeys(name for described_facts, _ in described for row in described_facts.tokens for name in row)
    tokens = Tokens(names)
    samples = _samples(tokens, described)
    ensemble = regression.fit(samples, members=members, epochs=epochs, seed=seed)
    counts = np.array([len(problem.records) for _, problem in described])
    # Relative to the problem's mean, because a problem's own constant factor does not matter.
    target = centred(samples.target[None], samples.weight[None], counts)[0]
    predicted = centred(ensemble.left_out(samples)[None], samples.weight[None], counts)[0]
    weighted = samples.weight * predicted
    scale = float(np.clip(weighted @ target / (weighted @ predicted + 1e-9), 0, 1))
    ensemble.arrays["w3"] *= np.float32(scale)  # the output is linear in w3
    return CostModel(tokens, ensemble, *_fit_process(samples, target - scale * predicted))


def _samples(tokens: Tokens, described: Sequence[Described]) -> TrainingRows:
    """Training rows of all records. The target is the logarithm of the measured over the estimated time."""
    blocks: list[tuple[Floats, Floats, Floats]] = []
    for record_facts, problem in described:
        log_us = np.log(np.array(problem.us, np.float32))
        weight = np.exp(-(log_us - log_us.min()) / NEAR_BEST) + LEAST_WEIGHT
        blocks.append(
            (
                np.concatenate([record_facts.numbers, tokens.one_hot(record_facts.tokens)], 1),
                log_us - record_facts.log_us,
                weight,
            )
        )
    inputs, target, weights = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    numbers = np.concatenate([np.full(len(block[1]), number) for number, block in enumerate(blocks)])
    return TrainingRows(inputs, target, weights, numbers)


def _fit_process(samples: TrainingRows, residual: Floats) -> tuple[float, float]:
    """The standard deviation and length scale of the process with the highest likelihood of the residuals.

    ``residual``: for each row the log time that the networks leave unexplained.
    """
    residuals = []
    numbers = np.unique(samples.problem)
    for number in numbers[:: math.ceil(len(numbers) / FITTED_PROBLEMS)]:
        rows = np.flatnonzero(samples.problem == number)
        near = rows[np.argsort(-samples.weight[rows], kind="stable")[:FITTED_RECORDS]]
        own = residual[near].astype(np.float64)
        places = coordinates(samples.inputs[near, :NUMBERS], samples.inputs[near, NUMBERS:])
        residuals.append((places, own - own.mean()))
    spread = float(np.sqrt(np.mean(np.concatenate([own for _, own in residuals]) ** 2)))
    best = (-math.inf, spread, LENGTH)
    for length in LENGTHS:
        for factor in SPREAD_FACTORS:
            fit = sum(_likelihood(places, own, factor * spread, length) for places, own in residuals)
            best = max(best, (fit, factor * spread, length))
    return best[1:]


def _likelihood(places: Floats, residual: NDArray[np.float64], spread: float, length: float) -> float:
    """The logarithm of the likelihood of one problem's residuals, up to a constant. ``places``: the records'
    coordinates. With the covariance L L^T it is -|L^-1 residual|^2 / 2 - log det L."""
    covariance = spread**2 * _kernel(places, places, length) + FACTOR_SPREAD**2
    covariance[np.diag_indices(len(residual))] += NOISE**2
    factor = np.linalg.cholesky(covariance)
    solved = np.linalg.solve(factor, residual)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())


def timed_records(trials: Iterable[Trial]) -> dict[Problem, TimedRecords]:
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
