"""Proves under a virtual clock that concurrent searches keep GPUs busy, and that workers' speed changes no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cudal2gen.kernel import Problem, space
from cudal2gen.results import Trial
from cudal2gen.tuner import concurrent_searches, ray_executor, search
from cudal2gen.tuner.climbing import HillClimbing
from cudal2gen.tuner.concurrent_searches import RankedSearch, ThreadedHost
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.executor import Executor, InProcess, Worker
from cudal2gen.tuner.proposers import Random
from cudal2gen.tuner.search import Evaluation, Search, SearchLimits
from scripts import campaign_time
from scripts.campaign_time import Cluster, SearchPlan, Times

EVALUATIONS, COUNT = 16, 1536  # of each search, and searches of a simulated campaign


def problem(number: int) -> Problem:
    """A small problem of its own for each number."""
    return Problem(gpu="h200", acc="f32", layout="tn", m=64 * (1 + number), n=256, k=64)


@pytest.fixture(scope="module")
def plans() -> list[SearchPlan]:
    """``COUNT`` searches that differ in the times of their kernels. Sixteen are run, the others repeat their jobs."""
    run = [campaign_time.plan(problem(number), EVALUATIONS) for number in range(16)]
    return [run[number % 16] for number in range(COUNT)]


@pytest.mark.thorough
@pytest.mark.slow
def test_64_gpus_are_busy_in_all_stages(plans: list[SearchPlan]) -> None:
    """Of the campaign's tenths, the first and the last two are left out, in which searches begin and end; of a stage,
    what comes after 95 % of its measurements."""
    cluster = campaign_time.simulate(plans, 64, Times(), 64 * ray_executor.AHEAD)
    assert cluster.utilisation() >= 0.9
    tenths = [cluster.utilisation(cluster.now * tenth / 10, cluster.now * (tenth + 1) / 10) for tenth in range(1, 8)]
    assert min(tenths) >= 0.97
    for effort in ("short", "medium", "long"):
        spans = [(begin, end) for begin, end, kind in cluster.measured if kind == effort]
        first, last = min(begin for begin, _ in spans), sorted(end for _, end in spans)[int(0.95 * len(spans))]
        assert cluster.utilisation(first, last) >= 0.9, effort
    # A GPU measures only one job at a time.
    changes = sorted([(begin, 1) for begin, _, _ in cluster.measured] + [(end, -1) for _, end, _ in cluster.measured])
    busy = 0
    for _, change in changes:
        busy += change
        assert 0 <= busy <= 64


@pytest.mark.slow
def test_campaign_time_falls_with_the_number_of_gpus(plans: list[SearchPlan]) -> None:
    hours = [campaign_time.simulate(plans[:384], workers, Times(), 4 * workers).now for workers in (1, 16)]
    assert 0.9 * 16 < hours[0] / hours[1] < 16
    assert campaign_time.simulate(plans[:64], 64, Times(), 1).utilisation() < 0.05, "one problem at a time"


def searches(count: int, store: list[Trial]) -> Callable[[int], RankedSearch | None]:
    """Searches of proposers that learn from their trials and draw by a seed of their own."""

    def begin(rank: int) -> RankedSearch | None:
        if rank == count:
            return None
        contest = Search(space.candidates(problem(rank), 60), None)
        proposer = HillClimbing(Random(rank), "climbing", rank)
        place = ModelEnvironment(seed=3)
        return RankedSearch(
            rank, contest, search.steps(contest, proposer, place, store.extend, SearchLimits(12, 4, prune=None))
        )

    return begin


def by_problem(trials: list[Trial]) -> dict[Problem, list[Trial]]:
    """Trials in groups of one problem, each in the order of the trials."""
    groups: dict[Problem, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.problem, []).append(trial)
    return groups


@pytest.mark.slow
def test_a_races_trials_do_not_depend_on_the_cluster() -> None:
    runs: list[tuple[list[Trial], list[int]]] = []

    def run(workers: int, in_flight: int) -> None:
        store, learnt = list[Trial](), list[int]()
        cluster = Cluster(workers, Times(), ModelEnvironment(seed=3))
        concurrent_searches.run_searches(
            searches(6, store), cluster, in_flight, lambda _: None, lambda ended: learnt.append(ended.rank)
        )
        runs.append((store, learnt))

    for workers, in_flight in ((1, 1), (2, 8), (5, 3), (16, 64)):
        run(workers, in_flight)
    first, *others = (store for store, _ in runs)
    assert [learnt for _, learnt in runs] == [list(range(6))] * 4, "lessons are learnt in the problems' order"
    assert [trial.problem for trial in first] != [trial.problem for trial in others[0]], "searches take turns"
    assert all(by_problem(store) == by_problem(first) for store in others)
    # Each of 6 searches makes 12 short trials, and times the 8 best again for longer, and 3 of them for longer still.
    assert len(first) == 6 * (12 + 8 + 3)


@pytest.mark.slow
def test_threads_and_a_process_of_its_own_give_the_same_trials() -> None:
    stores: list[list[Trial]] = [[], [], []]
    worker = Worker(partial(ModelEnvironment, seed=3))
    assert worker.in_flight() == 2, "one problem is thought about while another is measured"
    executors: list[Executor] = [InProcess(ModelEnvironment(seed=3)), InProcess(ModelEnvironment(seed=3)), worker]
    for store, in_flight, executor in zip(stores, (1, 3, 2), executors, strict=True):
        host = ThreadedHost(executor, in_flight)
        concurrent_searches.run_searches(searches(4, store), host, in_flight, lambda _: None, lambda _: None)
        host.close()
        executor.close()
    assert by_problem(stores[0]) == by_problem(stores[1]) == by_problem(stores[2])


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_search_begins_after_the_lessons_that_it_is_promised_and_no_others(
    in_flight: int, plans: list[SearchPlan]
) -> None:
    events: list[tuple[str, int]] = []

    def begin(rank: int) -> RankedSearch | None:
        if rank == 24:
            return None
        events.append(("begin", rank))
        steps: Iterator[Evaluation] = (Evaluation(job, []) for job in plans[rank % 16].jobs if job)
        return RankedSearch(rank, plans[0].search, steps)

    under_way: list[int] = []
    cluster = Cluster(3, Times())
    concurrent_searches.run_searches(
        begin,
        cluster,
        in_flight,
        lambda ended: under_way.append(ended.rank),
        lambda ended: events.append(("learn", ended.rank)),
    )
    expected: list[tuple[str, int]] = []
    for rank in range(24):
        if rank >= concurrent_searches.lag(in_flight):
            expected.append(("learn", rank - concurrent_searches.lag(in_flight)))
        expected.append(("begin", rank))
    expected += [("learn", rank) for rank in range(24 - concurrent_searches.lag(in_flight), 24)]
    assert events == expected
    assert sorted(under_way) == list(range(24))
    assert concurrent_searches.lag(1) == 1, "alone, every search has the lessons of all before it"
