"""Proves that background builds compile each record once, in bounded batches, and that their speed changes no order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from cudal2gen.kernel import Problem, Record, space
from cudal2gen.results import Trial
from cudal2gen.tuner import campaign, concurrent_searches, search
from cudal2gen.tuner.background_builds import MOST_EACH, BackgroundBuilds
from cudal2gen.tuner.climbing import HillClimbing
from cudal2gen.tuner.concurrent_searches import RankedSearch, ThreadedHost
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.executor import Worker
from cudal2gen.tuner.proposers import Mixture, Random
from cudal2gen.tuner.search import Search, SearchLimits
from scripts import campaign_time
from tests.cudal2gen.test_concurrent_searches import problem

# A problem, and 60 records that are compiled ahead for it.
SMALL = problem(3)
RECORDS = space.candidates(SMALL, 200).records[:60]


class Builder:
    """A ``background_builds.Build`` that compiles nothing and keeps the batches that it was given.

    ``pause``: returns the seconds that a batch takes. ``gate``: while it is cleared, no batch ends. ``cores``: those
    that the last batch was given.
    """

    def __init__(self, pause: Callable[[], float] = lambda: 0.0) -> None:
        self.pause, self.batches, self.cores = pause, list[list[Record]](), 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> None:
        self.batches.append(list(records))
        self.cores = cores
        self.gate.wait(60)
        time.sleep(self.pause())
        report(1, len(records))

    @property
    def built(self) -> list[Record]:
        """The records of all batches, in the order in which they came."""
        return [record for batch in self.batches for record in batch]


class LocalWorker(Worker):
    """A worker that evaluates in a thread of this process, and logs what it evaluates."""

    def __init__(self, build: Any) -> None:
        self.log: list[tuple[str, ...]] = []
        super().__init__(lambda: ModelEnvironment(seed=3), build=build, cores=2)

    def _connection(self) -> Any:
        """Connects to no process: makes the environment here."""
        self.environment = ModelEnvironment(seed=3)
        self.name, self.on = self.environment.name, self.environment.on

    def _ask(self, question: Any) -> Any:
        """Evaluates records in the calling thread."""
        self.log.append(tuple(record.name for record in question[1]))
        return self.environment.evaluate(*question)


def test_each_record_is_compiled_once_in_batches_that_the_cores_bound() -> None:
    build = Builder()
    build.gate.clear()
    ahead = BackgroundBuilds(build, cores=2)
    ahead.add(RECORDS[:1])
    ahead.add(RECORDS[:40])
    ahead.add(RECORDS[20:60])
    waiting = threading.Thread(target=ahead.wait, args=(RECORDS[:1],), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive(), "nothing is compiled yet"
    build.gate.set()
    ahead.wait(RECORDS)
    assert build.built == list(RECORDS)
    assert max(map(len, build.batches)) == 2 * MOST_EACH
    assert build.cores == 2
    # Records of another problem were never added, so there is nothing to wait for.
    ahead.wait(space.candidates(SMALL.model_copy(update={"k": 128}), 50).records[:1])
    ahead.close()


def test_a_builder_that_raises_goes_on_and_holds_nobody_up() -> None:
    calls: list[int] = []

    def build(records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> None:
        calls.append(len(records))
        raise OSError("the disk is full")

    ahead = BackgroundBuilds(build, cores=1)
    for record in RECORDS[:3]:
        ahead.add([record])
        ahead.wait([record])
    assert calls == [1, 1, 1]
    ahead.close()


def test_the_end_drops_what_waits_and_ends_compilers_at_their_next_kernel() -> None:
    ends: list[str] = []
    begun, gate = threading.Event(), threading.Event()

    def build(records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> None:
        begun.set()
        gate.wait(60)
        try:
            report(1, 2)
        except Exception as error:
            ends.append(type(error).__name__)
            raise

    ahead = BackgroundBuilds(build, cores=1)
    ahead.add(RECORDS)
    assert begun.wait(60)
    ahead.close()
    gate.set()
    ahead.wait(RECORDS)  # returns at once
    deadline = time.monotonic() + 60
    while not ends and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert ends == ["_Closed"], "and no second batch begins"


def searches(store: list[Trial], place: Worker) -> Callable[[int], RankedSearch | None]:
    """Eight searches by hill climbing of different problems, by rank, all evaluated at ``place``. Their trials are
    appended to ``store``."""

    def begin(rank: int) -> RankedSearch | None:
        if rank == 8:
            return None
        contest = Search(space.candidates(problem(rank), 60), None)
        climbing = HillClimbing(Random(rank), "climbing", rank)
        steps = search.steps(contest, climbing, place, store.extend, SearchLimits(12, 4, prune=None))
        return RankedSearch(rank, contest, steps)

    return begin


@pytest.mark.slow
def test_the_order_of_stored_trials_does_not_depend_on_the_speed_of_compilers() -> None:
    stores: list[list[Trial]] = [[], []]
    pauses = iter([0.03, 0.0, 0.0, 0.02] * 100)
    for store, pause in zip(stores, (lambda: 0.0, lambda: next(pauses)), strict=True):
        build = Builder(pause)
        worker = LocalWorker(build)
        assert worker.in_flight() == 12
        host = ThreadedHost(worker, 5)
        concurrent_searches.run_searches(searches(store, worker), host, 5, lambda _: None, lambda _: None)
        host.close()
        worker.close()
        short = {trial.name for trial in store if trial.effort == "short"}
        assert short == {record.name for record in build.built}, "all of it was compiled ahead, and nothing else"
    assert stores[0] == stores[1]
    # Short, medium and long trials of each of the eight problems; without an incumbent there is no final one.
    assert len(stores[0]) == 8 * (12 + 8 + 3)
    # The first 20 trials are five batches of four.
    assert len({trial.problem for trial in stores[0][:20]}) == 5, "five problems take turns"


class WaitingProposer(Random):
    """A proposer that waits for a server, for which ``event`` stands, before it answers. ``late``: whether the event
    did not come within 60 s."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(0)
        self.event, self.late = event, False

    def propose(self, question: Any, count: int) -> Any:
        """Proposes after the event, or after 60 s."""
        self.late |= not self.event.wait(60)
        return super().propose(question, count)

    def wait(self, problem: Problem) -> bool:
        """Says that there is nothing to wait for."""
        return False

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:
        """Says that there is no server to wait for."""
        return False


def test_an_answer_of_a_server_holds_up_its_own_problem_alone() -> None:
    event, worker = threading.Event(), LocalWorker(Builder())
    waiting = Mixture([WaitingProposer(event)])

    def begin(rank: int) -> RankedSearch | None:
        if rank == 2:
            return None
        contest = Search(space.candidates(problem(rank), 60), None)
        steps = search.steps(
            contest, Random(1) if rank else waiting, worker, lambda _: None, SearchLimits(8, 4, prune=None)
        )
        return RankedSearch(rank, contest, steps)

    ended: list[int] = []

    def end(ranked: RankedSearch) -> None:
        ended.append(ranked.rank)
        event.set()

    concurrent_searches.run_searches(begin, ThreadedHost(worker, 2), 2, end, lambda _: None)
    worker.close()
    assert ended == [1, 0]


def test_turns_find_a_problems_candidates_once_and_compile_its_incumbent_first(tmp_path: Any) -> None:
    problems, looks = [problem(number) for number in range(3)], list[Problem]()

    def candidates(sized: Problem) -> space.Candidates:
        looks.append(sized)
        return space.candidates(sized, 100)

    incumbents = {sized: space.candidates(sized, 100, 1).records[-1] for sized in problems}
    build = Builder()
    worker = LocalWorker(build)
    plan = campaign.CampaignPlan(
        problems, incumbents.get, lambda _: Random(7), tmp_path / "trials.jsonl", "r", SearchLimits(16, prune=None),
        budget_seconds=60, find_candidates=candidates,
    )  # fmt: skip
    standing = campaign.run_in_turns(plan, worker)
    worker.close()
    assert looks == problems
    assert build.built[0] == incumbents[problems[0]]
    assert {len(contest.evaluations) for contest in standing.searches} == {16}


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "busy", "in_turn"), [(2, 0.75, 0.6), (16, 0.95, 0.6)])
def test_a_gpu_is_busy_while_others_compile(cores: int, busy: float, in_turn: float) -> None:
    """In a replay, a GPU measures for more than ``busy`` of the time if records are compiled ahead. If they are
    compiled when they are needed, it measures for less than ``in_turn``, however many cores there are."""
    plans = [campaign_time.plan(problem(number), 8, campaign_time.SmallBatches(number)) for number in range(16)]
    machine = campaign_time.on_one_machine(plans, cores, ahead=True)
    before = campaign_time.on_one_machine(plans, cores, ahead=False)
    assert machine.utilisation() > busy
    assert before.utilisation() < in_turn
    work = [sum(end - begin for begin, end, _ in run.measured) for run in (machine, before)]
    assert work[0] == pytest.approx(work[1]), "the same measurements"
    spans = sorted((begin, end) for begin, end, _ in machine.measured)
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(spans)), "one at a time"
