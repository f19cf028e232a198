"""Concurrent searches: while one search's records are measured, others propose, compile, or wait for a free GPU.

Searches begin in their order, and of two waiting evaluations the one of the earlier search is first, so searches end about in
their order and the last ones do not wait for stragglers. What ends a search, such as lessons, is learnt in order as well:
of search i exactly before search i + ``lag`` begins. So what a search begins with does not depend on which workers are fast.
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

THREADS = 16  # most threads for proposers: those that compute share one core, the others wait for servers


class RankedSearch(NamedTuple):
    """A search that has begun. ``rank``: its place in the order, the least first."""

    rank: int
    search: Search
    steps: Steps


Waiting = Future[list[Trial]]  # trials of an evaluation; a proposer's step has none


class Host(Protocol):
    """Carries out the steps of searches."""

    def start(self, step: ProposerStep | Evaluation, rank: int) -> Waiting:
        """Begins a step, or puts it in a queue, those of lesser rank first."""
        ...

    def first(self, waiting: Collection[Waiting]) -> Collection[Waiting]:
        """Waits until at least one of them has ended, and returns such. ``waiting``: as they began."""
        ...


class ThreadedHost:
    """``Host``: an executor, and threads for proposers; a single search's proposer runs on the calling thread."""

    def __init__(self, executor: Executor, in_flight: int) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(min(in_flight, THREADS), "proposer") if in_flight > 1 else None
        self._awaited: set[Waiting] = set()

    def start(self, step: ProposerStep | Evaluation, rank: int) -> Waiting:
        """See ``Host``."""
        if isinstance(step, Evaluation):
            return self._executor.submit(step.job, rank)
        if self._threads is None:
            ended: Waiting = Future()
            ended.set_result(self._propose(step))
            return ended
        future = self._threads.submit(self._propose, step)
        if awaits(step.proposer):
            self._awaited.add(future)
        return future

    def first(self, waiting: Collection[Waiting]) -> Collection[Waiting]:
        """See ``Host``. Where jobs end in order, so do all steps, which makes the order of stored trials that of the
        problems and not that of the speed of compilers; only answers of servers are taken as they come."""
        if self._executor.in_order:
            self._awaited &= set(waiting)
            own = itertools.islice((future for future in waiting if future not in self._awaited), 1)
            waiting = [*own, *self._awaited]
        return wait(waiting, return_when=FIRST_COMPLETED).done

    def _propose(self, step: ProposerStep) -> list[Trial]:
        """Begins to compile what is proposed at once, although the step's turn may come later."""
        step.run()
        self._executor.prepare([proposal.record for proposal in step.affordable if proposal.record])
        return []

    def close(self) -> None:
        """Drops proposers' steps that have not begun."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def lag(in_flight: int) -> int:
    """By how many searches the lessons that a search begins with may lag, with slack, so that a long search delays no
    other."""
    return 1 if in_flight == 1 else 2 * in_flight


def run_searches(
    begin: Callable[[int], RankedSearch | None],
    host: Host,
    in_flight: int,
    end: Callable[[RankedSearch], None],
    learn: Callable[[RankedSearch], None],
) -> None:
    """Runs searches, ``in_flight`` of them at a time, until ``begin``, which gets one rank after the other, returns None.

    ``end`` receives each search as it ends; ``learn`` receives each in order, as late as possible. Both run on this
    thread, as do all parts of searches but their steps, so one thread stores trials.
    """
    waiting: dict[Waiting, tuple[RankedSearch, ProposerStep | Evaluation]] = {}
    ended: dict[int, RankedSearch] = {}
    begun = learnt = 0
    exhausted = False

    def advance(ranked: RankedSearch) -> None:
        step = next(ranked.steps, None)
        if step is None:
            ended[ranked.rank] = ranked
            end(ranked)
        else:
            waiting[host.start(step, ranked.rank)] = ranked, step

    while True:
        while not exhausted and len(waiting) < in_flight and (begun - lag(in_flight) < learnt or learnt in ended):
            if begun - lag(in_flight) >= learnt:
                learn(ended.pop(learnt))
                learnt += 1
            ranked = begin(begun)
            exhausted = ranked is None
            if ranked is not None:
                begun += 1
                advance(ranked)
        if not waiting:
            break
        for future in sorted(host.first(waiting), key=lambda future: waiting[future][0].rank):
            ranked, step = waiting.pop(future)
            answer = future.result()
            if isinstance(step, Evaluation):
                step.trials.extend(answer)
            advance(ranked)
    for rank in range(learnt, begun):
        learn(ended.pop(rank))
