"""Keeps what a campaign learns across problems: the best records, and a cost model that is retrained as trials come."""

from __future__ import annotations

from collections.abc import Iterable

from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Trial
from cudal2gen.tuner import cost_model
from cudal2gen.tuner.cost_model import CostModel, Described, TimedRecords
from cudal2gen.tuner.facts import facts

GROWTH = 1.25  # the model is retrained when the number of timed records has grown by this factor


class Learning:
    """What a campaign has learned so far. ``pool``: the records that it begins with, one of each problem.

    It is not thread-safe: campaigns learn and begin searches on one thread.
    """

    def __init__(self, pool: Iterable[Record] = (), seed: int = 0) -> None:
        self._best = {record.problem: record for record in pool}
        self._seed, self._trained_on = seed, 0
        self._timed: dict[Problem, dict[object, tuple[Record, float]]] = {}
        self._described: dict[Problem, Described] = {}
        self._model = CostModel()

    @property
    def pool(self) -> list[Record]:
        """The best record of each problem: the fastest that was timed; for a problem without trials, the one in the
        initial pool."""
        return list(self._best.values())

    @property
    def record_count(self) -> int:
        """The number of distinct records with a time."""
        return sum(map(len, self._timed.values()))

    def learn(self, trials: Iterable[Trial]) -> None:
        """Adds trials of any problems. A trial that was added before changes nothing."""
        for problem, new in cost_model.timed_records(trials).items():
            own = self._timed.setdefault(problem, {})
            own |= {record.kernel_key: (record, us) for record, us in zip(new.records, new.us, strict=True)}
            self._described.pop(problem, None)
            self._best[problem] = min(own.values(), key=lambda pair: pair[1])[0]

    @property
    def model(self) -> CostModel:
        """The cost model. It is untrained at first, and retrained here if the records have grown by ``GROWTH``."""
        if self.record_count >= GROWTH * self._trained_on:
            self._trained_on = self.record_count
            for problem in self._timed.keys() - self._described.keys():
                timed = TimedRecords(*zip(*self._timed[problem].values(), strict=True))
                self._described[problem] = facts(timed.records), timed
            self._model = cost_model.train_described([self._described[p] for p in self._timed], self._seed)
        return self._model
