"""Environments evaluate records. A record that fails gives a trial with a reason, and no exception.

- ``Replay`` returns recorded trials, and raises Unrecorded for a record that has none.
- ``ModelEnvironment`` multiplies the times of the frozen model of ``cudal2gen.timing.model`` by hidden terms that no
  proposer can read, and adds noise. It represents no GPU: it serves to compare and test ways of searching, and its
  trials are stored separately.
- ``tuner.on_gpu`` builds and checks records on a GPU, and times them alternately with the incumbent and a baseline.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import IllegalRecord, Problem, Record, parse, space
from cudal2gen.results import INCUMBENT, KERNEL, Effort, Outcome, Source, Timing, Trial
from cudal2gen.results.ratios import spearman
from cudal2gen.timing import model
from kernelproof.ground.errors import WrongInput

Array = NDArray[np.float64]
Incumbent = Callable[[Problem], Record | None]

# Samples of each contender. The cost of an effort is proportional to them.
SAMPLES: dict[Effort, int] = {"short": 5, "medium": 20, "long": 60, "final": 60}


class EvaluationPlace(Protocol):
    """Where evaluations run, as trials state it. ``name``: gpu, replay or model. ``on``: the GPU or its substitute."""

    @property
    def name(self) -> Source: ...

    @property
    def on(self) -> str: ...


class Environment(EvaluationPlace, Protocol):
    """Evaluates records of a problem."""

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """One trial for each record, in their order. A record's failure is the outcome of its trial."""
        ...


class Unrecorded(WrongInput):
    """The replay has no trial of the record."""


def trial_of(
    environment: EvaluationPlace, problem: Problem, record: Record, effort: Effort, outcome: Outcome, **details: Any
) -> Trial:
    """A trial of an environment; the search fills in ``run`` and ``proposer``."""
    return Trial(
        environment=environment.name,
        on=environment.on,
        run="",
        **problem.model_dump(),
        proposer="",
        name=record.name,
        record=record.model_dump(mode="json"),
        effort=effort,
        outcome=outcome,
        **details,
    )


def refusal_trial(environment: EvaluationPlace, problem: Problem, fields: Mapping[str, Any], reason: str) -> Trial:
    """The trial of an illegal proposal: its fields, and the rule that they violate."""
    return Trial(
        environment=environment.name,
        on=environment.on,
        run="",
        **problem.model_dump(),
        proposer="",
        name="",
        record=dict(fields),
        outcome="illegal",
        reason=reason,
    )


class Replay:
    """Returns recorded trials: a record's last trial of the requested effort or a greater one, else its last trial.

    ``candidates`` are the records with trials, so a search among them never proposes any other record.
    """

    name: Source = "replay"
    order: tuple[Effort, ...] = ("short", "medium", "long", "final")  # ascending

    def __init__(self, recorded: Iterable[Trial]) -> None:
        self._trials: dict[tuple[object, ...], Trial] = {}
        self._records: dict[Problem, list[Record]] = {}
        places = set()
        for trial in recorded:
            places.add(trial.on)
            try:
                self._records.setdefault(trial.problem, []).append(parse(trial.record))
            except IllegalRecord:  # an illegal proposal, or a record that today's rules refuse
                continue
            for effort in self.order[: self.order.index(trial.effort) + 1]:
                self._trials[self._key(trial.problem, trial.name, trial.record, effort)] = trial
        self.on = ", ".join(sorted(places)) or "nothing recorded"

    @staticmethod
    def _key(problem: Problem, name: str, fields: Mapping[str, Any], effort: Effort) -> tuple[object, ...]:
        """By what a recorded trial is found."""
        # Compares all decisions. Record.kernel_key would need a Record, and so the recorded fields' validation.
        decisions = tuple(
            (field, repr(value)) for field, value in sorted(fields.items()) if field not in space.NO_DECISION
        )
        return (*problem.key, name, decisions, effort)

    @property
    def problems(self) -> list[Problem]:
        """The problems that have trials, in the order of the recording."""
        return list(self._records)

    def candidates(self, problem: Problem) -> space.Recorded:
        """The records that have trials. Raises IllegalRecord for a problem without any."""
        records = self._records.get(problem)
        if records is None:
            raise IllegalRecord(
                f"{problem.title}: no trial is recorded on {self.on}; choose one of --trials or --recordings"
            )
        return space.recorded(records)

    def least_us(self, problem: Problem) -> float:
        """The best recorded time of a problem in microseconds."""
        return float(self.true_us(self.candidates(problem).records).min())

    def true_us(self, records: Sequence[Record]) -> Array:
        """The recorded medians in microseconds."""
        return np.array([self.evaluate(record.problem, [record])[0].median_us for record in records])

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """The recorded trials. Raises Unrecorded for the first record that has none."""
        trials = []
        for record in records:
            fields = record.model_dump(mode="json")
            keys = (self._key(problem, record.name, fields, item) for item in dict.fromkeys((effort, "short")))
            trial = next((self._trials[key] for key in keys if key in self._trials), None)
            if trial is None:
                raise Unrecorded(
                    f"{problem.mnk}: no trial of {record.name} is recorded on {self.on}; "
                    "propose records that have trials, or measure with --environment gpu"
                )
            trials.append(trial.model_copy(update={"environment": "replay", "effort": effort}))
        return trials


class ModelEnvironment:
    """``model.frozen_us`` multiplied by hidden terms, with noise.

    All times follow from ``seed``. Even the noise of a record's samples does not depend on when and with which other
    records it is evaluated.

    The hidden terms multiply a time by exp(f + g), where f and g are smooth random functions of the record's decisions.
    f is common to all problems and varies slowly with their sizes; g differs for each problem. Their standard
    deviations are ``shared`` and ``individual``. ``noise`` is the standard deviation of a sample's logarithm. The
    incumbent is the only reference; there is no vendor's baseline.
    """

    name: Source = "model"

    def __init__(
        self, incumbent: Incumbent = lambda _: None, seed: int = 0, shared: float = 0.08, individual: float = 0.04,
        noise: float = 0.01,
    ) -> None:  # fmt: skip
        self.seed, self.shared, self.individual, self.noise = seed, shared, individual, noise
        self.on = f"analytic model with hidden terms, seed {seed}"
        self._incumbent = incumbent

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """A modelled time with noise for each record. A record of another problem is illegal."""
        applicable = [record for record in records if record.problem == problem]
        times = dict(zip(map(id, applicable), self.true_us(applicable).tolist(), strict=True))
        incumbent = self._incumbent(problem)
        reference = float(self.true_us([incumbent])[0]) if incumbent else None
        reference_timing = self._timing(INCUMBENT, incumbent, reference, effort) if incumbent and reference else None
        trials = []
        for record in records:
            if id(record) not in times:
                reason = f"m={record.m}, n={record.n}, k={record.k}: is a record for {record.mnk}, not {problem.mnk}"
                trials.append(trial_of(self, problem, record, effort, "illegal", reason=reason))
                continue
            timing = self._timing(KERNEL, record, times[id(record)], effort)
            timings = (timing, reference_timing) if reference_timing else (timing,)
            trials.append(trial_of(self, problem, record, effort, "measured", digest=record.name, timings=timings))
        return trials

    def _timing(self, contender: str, record: Record, us: float, effort: Effort) -> Timing:
        """Samples around ``us``. Their noise follows from the seed and the arguments, so it repeats."""
        text = json.dumps([contender, effort, record.problem.model_dump(), record.decisions()], sort_keys=True)
        rng = np.random.default_rng([self.seed, zlib.crc32(text.encode())])
        samples = us * np.exp(rng.normal(0, self.noise, SAMPLES[effort]))
        return Timing(contender=contender, calls=1, event_us=tuple(samples.round(4).tolist()), error=0.0)

    def true_us(self, records: Sequence[Record]) -> Array:
        """Times without noise in µs. The search tries to find the least of them; proposers cannot see them."""
        if not records:
            return np.zeros(0)
        estimates = np.array([model.frozen_us(record) for record in records])
        return estimates * np.exp(self.hidden(records))

    def hidden(self, records: Sequence[Record]) -> Array:
        """The logarithm of the factor on the model's estimate, for each record."""
        traits = np.array([_traits(record) for record in records])
        sizes = np.array([[math.log2(extent) for extent in (record.m, record.n, record.k)] for record in records])
        shared_rng, total = np.random.default_rng([self.seed, 1]), np.zeros(len(records))
        total += self.shared * _waves(shared_rng, traits, sizes)
        problems = [record.problem for record in records]
        for problem in dict.fromkeys(problems):
            mask = np.array([record_problem == problem for record_problem in problems])
            text = f"{problem.gpu}{problem.types}{problem.layout}"
            own_rng = np.random.default_rng([self.seed, 2, *map(ord, text), problem.m, problem.n, problem.k])
            total[mask] += self.individual * _waves(own_rng, traits[mask], np.zeros((int(mask.sum()), 3)))
        return total


WAVES = 16  # cosines whose sum is a hidden function


def _waves(rng: np.random.Generator, traits: Array, sizes: Array) -> Array:
    """The values at each row of a smooth random function with unit variance: a sum of cosines in random directions."""
    # The smaller coefficients of the sizes make the function vary slowly from problem to problem.
    trait_coefficients = rng.normal(0, 0.9, (traits.shape[1], WAVES))
    size_coefficients = rng.normal(0, 0.25, (sizes.shape[1], WAVES))
    phases = rng.uniform(0, 2 * math.pi, WAVES)
    values: Array = np.cos(traits @ trait_coefficients + sizes @ size_coefficients + phases).sum(axis=1)
    values *= math.sqrt(2 / WAVES)  # so that the variance is 1
    return values


def _traits(record: Record) -> list[float]:
    """A record's decisions as numbers: logarithms of extents, and a fixed random number for each other choice.

    The factors 0.6 and 0.3 set how much a doubling of an extent, or of the raster group, changes the hidden functions.
    """
    stages = record.ring_steps
    extents = [record.bm, record.bn, record.k_step, stages, record.split_k, record.threads, record.cluster_ctas]
    choices = [_number(name, str(getattr(record, name, None))) for name in CATEGORIES]
    group = getattr(record, "raster_group", None) or getattr(record, "swizzle_stride", None) or 1
    return [*(0.6 * math.log2(extent) for extent in extents), 0.3 * math.log2(group), *choices]


# Fields whose values have no order. A record without such a field has None.
CATEGORIES = ("family", "swap_ab", "schedule", "prefetch", "raster_axis", "hint_a", "hint_b", "reduce", "raster")


@cache
def _number(name: str, value: str) -> float:
    """A normally distributed number that depends on the field's name and value alone."""
    return random.Random(f"{name}={value}").gauss(0, 0.5)


def agreement(trials: Iterable[Trial]) -> float:
    """Spearman's rank correlation of the analytic model with measured times, over records of the same problem.

    It is the mean over problems with at least three measured records, weighted by the number of their records; NaN
    without such a problem.
    """
    by_problem: dict[Problem, dict[str, tuple[float, float]]] = {}
    for trial in trials:
        if trial.measured and trial.on_its_gpu:
            try:
                estimate = model.estimate(parse(trial.record)).us
            except IllegalRecord:
                continue
            by_problem.setdefault(trial.problem, {})[str(trial.record)] = (estimate, trial.median_us)
    pairs = [np.array(list(times.values())) for times in by_problem.values() if len(times) >= 3]
    weighted = [(spearman(rows[:, 0].tolist(), rows[:, 1].tolist()), len(rows)) for rows in pairs]
    total = sum(count for value, count in weighted if not math.isnan(value))
    return sum(value * count for value, count in weighted if not math.isnan(value)) / total if total else math.nan
