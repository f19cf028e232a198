"""Runs several searches concurrently: while one is measured, others propose, compile, or wait for a GPU.

Searches begin in order, and evaluations of earlier searches have precedence. So searches end roughly in order, and no
straggler delays the end. Search i is learnt from just before search i + ``lag`` begins, even if it ends earlier.
Therefore what a search begins with does not depend on the speed of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from cudal2gen.results import Trial
from cudal2gen.tuner.executor import Executor
from cudal2gen.tuner.proposers import awaits
from cudal2gen.tuner.search import Evaluation, ProposerStep, Search, Steps

THREADS = 16  # most threads for proposers; those that compute share one core, the others wait for servers


class RankedSearch(NamedTuple):
    """A search that has begun. ``rank``: its number in the order of beginnings, from 0."""

    rank: int
    search: Search
    steps: Steps


StepFuture = Future[list[Trial]]  # a step's trials when it has ended; empty for a proposer's step


class StepRunner(Protocol):
    """Carries out the steps of searches."""

    def start(self, step: ProposerStep | Evaluation, rank: int) -> StepFuture:
        """Begins a step, or puts it into a queue in which lower ranks go first."""
        ...

    def first(self, pending: Collection[StepFuture]) -> Collection[StepFuture]:
        """Waits until at least one of the steps has ended, and returns steps that have. ``pending`` is in the order in
        which the steps began."""
        ...


class ThreadedHost:
    """A ``StepRunner`` that gives evaluations to an executor and proposers to threads. If only one search runs at a
    time, proposers run on the caller's thread."""

    def __init__(self, executor: Executor, in_flight: int) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(min(in_flight, THREADS), "proposer") if in_flight > 1 else None
        self._awaited: set[StepFuture] = set()

    def start(self, step: ProposerStep | Evaluation, rank: int) -> StepFuture:
        """See ``StepRunner``."""
        if isinstance(step, Evaluation):
            return self._executor.submit(step.job, rank)
        if self._threads is None:
            ended: StepFuture = Future()
            ended.set_result(self._propose(step))
            return ended
        future = self._threads.submit(self._propose, step)
        if awaits(step.proposer):
            self._awaited.add(future)
        return future

    def first(self, pending: Collection[StepFuture]) -> Collection[StepFuture]:
        """See ``StepRunner``. If the executor's jobs end in order, steps are also returned in the order of their start.

        Then the order of stored trials does not depend on the speed of compilers. Only steps of proposers that wait for
        a server are returned in the order in which they end.
        """
        if self._executor.in_order:
            # Of the steps that wait for no server, only the oldest may be returned next.
            self._awaited &= set(pending)
            own = itertools.islice((future for future in pending if future not in self._awaited), 1)
            pending = [*own, *self._awaited]
        return wait(pending, return_when=FIRST_COMPLETED).done

    def _propose(self, step: ProposerStep) -> list[Trial]:
        """Runs the step and starts to compile its proposals, although their evaluation may begin much later."""
        step.run()
        self._executor.prepare([proposal.record for proposal in step.affordable if proposal.record])
        return []

    def close(self) -> None:
        """Drops the steps of proposers that have not begun."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def lag(in_flight: int) -> int:
    """The number of ranks by which learning lags (see the module). If several searches run, it is twice their number,
    so that the next ones begin while one long search still runs."""
    return 1 if in_flight == 1 else 2 * in_flight


def run_searches(
    begin: Callable[[int], RankedSearch | None],
    host: StepRunner,
    in_flight: int,
    end: Callable[[RankedSearch], None],
    learn: Callable[[RankedSearch], None],
) -> None:
    """Runs searches, ``in_flight`` at a time. ``begin`` is called with ranks 0, 1, .. until it returns None.

    ``end`` receives each search when it ends. ``learn`` receives the searches in the order of their ranks, as late as
    ``lag`` allows. Only the steps of searches run on other threads; ``end``, ``learn`` and the storing of trials run on
    the caller's.
    """
    pending: dict[StepFuture, tuple[RankedSearch, ProposerStep | Evaluation]] = {}
    ended: dict[int, RankedSearch] = {}
    begun = learnt = 0
    exhausted = False

    def advance(ranked: RankedSearch) -> None:
        step = next(ranked.steps, None)
        if step is None:
            ended[ranked.rank] = ranked
            end(ranked)
        else:
            pending[host.start(step, ranked.rank)] = ranked, step

    while True:
        # The next search may begin if its rank is within the lag of the learnt ones, or if the search that must be
        # learnt from first has ended.
        while not exhausted and len(pending) < in_flight and (begun - lag(in_flight) < learnt or learnt in ended):
            if begun - lag(in_flight) >= learnt:
                learn(ended.pop(learnt))
                learnt += 1
            ranked = begin(begun)
            exhausted = ranked is None
            if ranked is not None:
                begun += 1
                advance(ranked)
        if not pending:
            break
        for future in sorted(host.first(pending), key=lambda future: pending[future][0].rank):
            ranked, step = pending.pop(future)
            answer = future.result()
            if isinstance(step, Evaluation):
                step.trials.extend(answer)
            advance(ranked)
    for rank in range(learnt, begun):
        learn(ended.pop(rank))
