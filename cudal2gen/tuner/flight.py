"""Concurrent races: while one race's records are measured, others propose, compile, or wait for a free GPU.

Races begin in their order, and of two waiting evaluations the one of the earlier race is first, so races end about in
their order and the last ones do not wait for stragglers. What ends a race, such as lessons, is learnt in order as well:
of race i exactly before race i + ``lag`` begins. So what a race begins with does not depend on which workers are fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from cudal2gen.results import Trial
from cudal2gen.tuner.executor import Executor
from cudal2gen.tuner.race import Evaluation, Race, Steps, Thought

THREADS = 16  # most threads for proposers: those that compute share one core, the others wait for servers


class Flight(NamedTuple):
    """A race that has begun. ``rank``: its place in the order, the least first."""

    rank: int
    race: Race
    steps: Steps


Waiting = Future[list[Trial]]  # trials of an evaluation; a thought has none


class Host(Protocol):
    """Carries out the steps of races."""

    def start(self, step: Thought | Evaluation, rank: int) -> Waiting:
        """Begins a step, or puts it in a queue, those of lesser rank first."""
        ...

    def first(self, waiting: Collection[Waiting]) -> Collection[Waiting]:
        """Waits until at least one of them has ended, and returns those that have."""
        ...


class ThreadedHost:
    """``Host``: an executor, and threads that think; a single race thinks on the calling thread."""

    def __init__(self, executor: Executor, in_flight: int) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(min(in_flight, THREADS), "thought") if in_flight > 1 else None

    def start(self, step: Thought | Evaluation, rank: int) -> Waiting:
        """See ``Host``."""
        if isinstance(step, Evaluation):
            return self._executor.submit(step.job, rank)
        if self._threads is not None:
            return self._threads.submit(_think, step)
        ended: Waiting = Future()
        ended.set_result(_think(step))
        return ended

    def first(self, waiting: Collection[Waiting]) -> Collection[Waiting]:
        """See ``Host``."""
        return wait(waiting, return_when=FIRST_COMPLETED).done

    def close(self) -> None:
        """Drops thoughts that have not begun."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _think(thought: Thought) -> list[Trial]:
    thought.run()
    return []


def lag(in_flight: int) -> int:
    """By how many races the lessons that a race begins with may lag, with slack, so that a long race delays no
    other."""
    return 1 if in_flight == 1 else 2 * in_flight


def run_races(
    begin: Callable[[int], Flight | None],
    host: Host,
    in_flight: int,
    end: Callable[[Flight], None],
    learn: Callable[[Flight], None],
) -> None:
    """Runs races, ``in_flight`` of them at a time, until ``begin``, which gets one rank after the other, returns None.

    ``end`` receives each race as it ends; ``learn`` receives each in order, as late as possible. Both run on this
    thread, as do all parts of races but thoughts and evaluations, so one thread stores trials.
    """
    waiting: dict[Waiting, tuple[Flight, Thought | Evaluation]] = {}
    ended: dict[int, Flight] = {}
    begun = learnt = 0
    more = True

    def advance(flight: Flight) -> None:
        step = next(flight.steps, None)
        if step is None:
            ended[flight.rank] = flight
            end(flight)
        else:
            waiting[host.start(step, flight.rank)] = flight, step

    while True:
        while more and len(waiting) < in_flight and (begun - lag(in_flight) < learnt or learnt in ended):
            if begun - lag(in_flight) >= learnt:
                learn(ended.pop(learnt))
                learnt += 1
            flight = begin(begun)
            more = flight is not None
            if flight is not None:
                begun += 1
                advance(flight)
        if not waiting:
            break
        for future in sorted(host.first(waiting), key=lambda future: waiting[future][0].rank):
            flight, step = waiting.pop(future)
            answer = future.result()
            if isinstance(step, Evaluation):
                step.trials.extend(answer)
            advance(flight)
    for rank in range(learnt, begun):
        learn(ended.pop(rank))
