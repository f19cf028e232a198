"""Concurrent searches: while records of one search are measured, other searches propose, compile, or wait for a GPU.

Searches begin in order, and an earlier search's evaluation goes first. So they end roughly in order, and no straggler
keeps the last ones waiting. Lessons of search i are learnt exactly before search i + ``lag`` begins, even if they are
known earlier: what a search begins with then does not depend on the speed of workers.
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
    """A search that has begun. ``rank``: its place in the order, from 0."""

    rank: int
    search: Search
    steps: Steps


Waiting = Future[list[Trial]]  # trials of an evaluation; a proposer's step has none


class StepRunner(Protocol):
    """Carries out the steps of searches."""

    def start(self, step: ProposerStep | Evaluation, rank: int) -> Waiting:
        """Begins a step, or puts it into a queue in which lesser ranks go first."""
        ...

    def first(self, waiting: Collection[Waiting]) -> Collection[Waiting]:
        """Waits until at least one step has ended, and returns steps that have. ``waiting`` is in the order of their
        beginning."""
        ...


class ThreadedHost:
    """A ``StepRunner`` with an executor, and threads for proposers. With one search at a time proposers run on the
    caller's thread."""

    def __init__(self, executor: Executor, in_flight: int) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(min(in_flight, THREADS), "proposer") if in_flight > 1 else None
        self._awaited: set[Waiting] = set()

    def start(self, step: ProposerStep | Evaluation, rank: int) -> Waiting:
        """See ``StepRunner``."""
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
        """See ``StepRunner``. If the executor's jobs end in order, steps are taken in the order of their beginning too.

        Stored trials then follow the problems' order, and not the speed of compilers. Only proposers that wait for a
        server are taken as they end.
        """
        if self._executor.in_order:
            self._awaited &= set(waiting)
            own = itertools.islice((future for future in waiting if future not in self._awaited), 1)
            waiting = [*own, *self._awaited]
        return wait(waiting, return_when=FIRST_COMPLETED).done

    def _propose(self, step: ProposerStep) -> list[Trial]:
        """Runs the step, and begins to compile its proposals at once although its turn may come later."""
        step.run()
        self._executor.prepare([proposal.record for proposal in step.affordable if proposal.record])
        return []

    def close(self) -> None:
        """Drops steps of proposers that have not begun."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def lag(in_flight: int) -> int:
    """By how many searches lessons lag behind. There is slack, so that a long search does not delay the next ones."""
    return 1 if in_flight == 1 else 2 * in_flight


def run_searches(
    begin: Callable[[int], RankedSearch | None],
    host: StepRunner,
    in_flight: int,
    end: Callable[[RankedSearch], None],
    learn: Callable[[RankedSearch], None],
) -> None:
    """Runs searches, ``in_flight`` at a time. ``begin`` is called with ranks 0, 1, .. until it returns None.

    ``end`` receives each search when it ends; ``learn`` receives each in order, as late as ``lag`` allows. Both run on
    this thread, like everything of a search except its steps, so a single thread stores trials.
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
