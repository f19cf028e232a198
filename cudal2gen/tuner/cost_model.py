"""The pooled cost model: a record's time, with its uncertainty, from trials and recordings of many problems.

The logarithm of a time is the sum of three parts: the timing model's estimate; a correction that an ensemble of
networks has learned from many problems; and a correction from the trials of the problem at hand. The last part is a
Gaussian process over decisions, whose prior variance is the ensemble's spread plus the ``spread`` that the networks
leave unexplained on training problems.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import IllegalRecord, Problem, Record, parse
from cudal2gen.results import Trial
from cudal2gen.tuner import regression
from cudal2gen.tuner.facts import Facts, Floats, Tokens, coordinates, facts
from cudal2gen.tuner.regression import Ensemble, Samples
from kernelproof.ground import files
from kernelproof.ground.element import F16
from kernelproof.ground.errors import WrongInput

SHIPPED = Path(__file__).with_name("cost_model.npz")
FORMAT = 1
NEAR_BEST = 0.15  # distance from a problem's best, in log time, at which a record's weight has fallen by e
SCALE = 1.0  # standard deviation of a problem's own constant factor, in log time
SPREAD = 0.08  # spread of a model without training problems, in log time
LENGTHS = (0.8, 1.2, 1.8, 2.7, 4.0)  # length scales of the process that are tried, in octaves and differing fields
NOISE = 0.006  # standard deviation of a measurement, in log time


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
    """A trained ``ensemble`` with its ``tokens``, and the process's standard deviation ``spread`` and ``length``."""

    def __init__(self, tokens: Tokens, ensemble: Ensemble, spread: float = SPREAD, length: float = 1.8) -> None:
        self.tokens, self.ensemble, self.spread, self.length = tokens, ensemble, spread, length

    def inputs(self, described: Facts) -> Inputs:
        """Facts as columns and coordinates."""
        one_hot = self.tokens.one_hot(described.tokens)
        columns = np.concatenate([described.numbers, one_hot], 1)
        return Inputs(columns, coordinates(described.numbers, one_hot), described.log_us)

    def prior(self, inputs: Inputs) -> Floats:
        """Each member's logarithm of time, of shape (members, records)."""
        return self.ensemble.predict(inputs.columns) + inputs.log_us

    def times(self, records: Sequence[Record]) -> list[float]:
        """Modelled times of one problem's records, up to a common factor, from training alone."""
        return self.times_of(facts(records))

    def times_of(self, described: Facts) -> list[float]:
        """``times`` of records by their facts."""
        times: list[float] = np.exp(self.prior(self.inputs(described)).mean(0)).tolist()
        return times

    def posterior(self, observed: Inputs, log_us: NDArray[np.float64], noise: float = NOISE) -> Posterior:
        """The model after trials of the problem at hand."""
        return Posterior(self, observed, log_us, noise)

    def save(self, path: Path) -> None:
        """Writes the model in half precision, by a single rename."""
        buffer = io.BytesIO()
        header = {"format": FORMAT, "tokens": self.tokens.names, "spread": self.spread, "length": self.length}
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        arrays = {name: array.astype(F16.numpy_dtype) for name, array in self.ensemble.arrays.items()}
        np.savez_compressed(buffer, header=text, **arrays)  # type: ignore[arg-type]
        files.write(path, buffer.getvalue())


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


def train(timed: Sequence[TimedRecords], seed: int = 0, members: int = 8, epochs: int = 40) -> CostModel:
    """A model of these problems. A tenth of them is kept apart, and says what the networks do not explain.

    Raises ValueError if no problem has two records.
    """
    return train_described([(facts(problem.records), problem) for problem in timed], seed, members, epochs)


Described = tuple[Facts, TimedRecords]


def train_described(problems: Sequence[Described], seed: int = 0, members: int = 8, epochs: int = 40) -> CostModel:
    """``train`` for problems by their facts."""
    described = [(described_facts, problem) for described_facts, problem in problems if len(problem.records) > 1]
    if not described:
        raise ValueError("a cost model needs a problem with two timed records at least")
    names = dict.fromkeys(name for described_facts, _ in described for row in described_facts.tokens for name in row)
    tokens = Tokens(names)
    rng = np.random.default_rng(seed)
    apart = set(rng.permutation(len(described))[: len(described) // 10].tolist()) if len(described) >= 20 else set()
    kept = [item for place, item in enumerate(described) if place not in apart]
    ensemble = regression.fit(_samples(tokens, kept), members=members, epochs=epochs, seed=seed)
    model = CostModel(tokens, ensemble)
    if apart:
        model.spread, model.length = _unexplained(model, [described[place] for place in sorted(apart)])
    return model


def _samples(tokens: Tokens, described: Sequence[Described]) -> Samples:
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
    return Samples(inputs, target, weights, places)


def _unexplained(model: CostModel, described: Sequence[Described]) -> tuple[float, float]:
    """The standard deviation and length of the process for which the residuals of these problems are likeliest."""
    residuals = []
    for record_facts, problem in described[:24]:
        inputs = model.inputs(record_facts)
        log_us = np.log(np.array(problem.us))
        near = np.argsort(log_us)[:64]
        rest = (log_us - model.prior(inputs).mean(0))[near]
        residuals.append((inputs.places[near], rest - rest.mean()))
    spread = float(np.sqrt(np.mean(np.concatenate([rest for _, rest in residuals]) ** 2)))
    best = (-math.inf, spread, LENGTHS[0])
    for length in LENGTHS:
        for factor in (0.5, 0.75, 1.0, 1.5):
            fit = sum(_likelihood(places, rest, factor * spread, length) for places, rest in residuals)
            best = max(best, (fit, factor * spread, length))
    return best[1:]


def _likelihood(places: Floats, rest: NDArray[np.float64], spread: float, length: float) -> float:
    covariance = spread**2 * _kernel(places, places, length) + SCALE**2
    covariance[np.diag_indices(len(rest))] += NOISE**2
    factor = np.linalg.cholesky(covariance)
    solved = np.linalg.solve(factor, rest)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())


def load(path: Path = SHIPPED) -> CostModel:
    """A stored model. Raises WrongInput for a file that holds none of this version."""
    try:
        with np.load(path) as stored:
            header = json.loads(bytes(stored["header"]).decode())
            if header["format"] != FORMAT:
                raise WrongInput(f"{path} is of format {header['format']}, not {FORMAT}; run cudal2gen train again")
            arrays = {name: stored[name].astype(np.float32) for name in stored.files if name != "header"}
    except WrongInput:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise WrongInput(f"{path} holds no cost model ({type(error).__name__}); run cudal2gen train again") from None
    return CostModel(Tokens(header["tokens"]), Ensemble(arrays), header["spread"], header["length"])


def timed(trials: Iterable[Trial]) -> list[TimedRecords]:
    """Measured trials by problem. The last trial of a record counts; records that are illegal today are left out."""
    problems: dict[Problem, dict[object, tuple[Record, float]]] = {}
    for trial in trials:
        if trial.measured:
            try:
                record = parse(trial.record)
            except IllegalRecord:
                continue
            problems.setdefault(trial.problem, {})[record.kernel_key] = (record, trial.median_us)
    return [
        TimedRecords([record for record, _ in by_kernel.values()], [us for _, us in by_kernel.values()])
        for by_kernel in problems.values()
    ]
