"""Proves that lost workers and nodes of a Ray cluster change no result."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.generation import compiler
from cudal2gen.kernel import FAMILIES, Problem, Record, parse, space
from cudal2gen.results import Trial
from cudal2gen.tuner import campaign, ray_executor, search
from cudal2gen.tuner.executor import EvaluationJob, Executor, InProcess
from cudal2gen.tuner.proposers import Random
from cudal2gen.tuner.ray_executor import RayExecutor, Unreachable
from kernelproof.ground import toolchain
from tests.cudal2gen import simulated_gpu
from tests.cudal2gen.simulated_gpu import (
    HANGS,
    KILLS,
    RAISES,
    FakeCompiler,
    SimulatedGpu,
    allow,
    count_ended,
    unended_evaluations,
)
from tests.cudal2gen.test_cli import error, own_catalog, run
from tests.packages import require

__all__ = ["own_catalog"]  # a fixture

# The checkout, the problem of all searches, and the settings of small nodes.
ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(gpu="h200", acc="f32", layout="tn", m=4096, n=4096, k=4096)
SMALL = {"object_store_memory": 80 << 20}
PATIENCE = 900.0  # seconds; a busy machine needs minutes to start a worker
CARD = "simulated_gpu"  # the resource of which a measurement needs one


def record(group: int) -> Record:
    """A record with ``group`` as its band of tiles, by which tests identify it."""
    fields = space.base(PROBLEM, "sm90_wgmma") | FAMILIES["sm90_wgmma"].plain(PROBLEM)
    return parse(fields | {"raster_group": group})


def job(*groups: int) -> EvaluationJob:
    """An evaluation of one record for each of these bands of tiles."""
    return EvaluationJob(PROBLEM, tuple(map(record, groups)), "short")


def groups(trial: Trial) -> int:
    """The band of a trial's record."""
    return int(trial.record["raster_group"])


def ended_jobs(executor: Executor, jobs: Sequence[EvaluationJob]) -> Iterator[list[Trial]]:
    """The trials of each job, as the jobs end."""
    for future in as_completed([executor.submit(job, rank) for rank, job in enumerate(jobs)]):
        yield future.result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray cluster on this machine's loopback whose head has no card. Tests add nodes with one."""
    require("ray")
    before, on_end = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    # A killed node refuses connections, which is noticed within seconds; one that only waits for a CPU has a minute to
    # answer, so that it is not lost on a busy machine.
    watch = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 300,
        "health_check_timeout_ms": 60_000,
        "health_check_failure_threshold": 3,
    }
    ray_cluster = Cluster(
        initialize_head=True,
        head_node_args=SMALL | {"num_cpus": 2, "include_dashboard": False, "_system_config": watch},
    )
    variables = {
        "PYTHONPATH": str(ROOT),
        "CUDAL2GEN_BUILD_DIR": str(tmp_path_factory.mktemp("built")),
        "OMP_NUM_THREADS": "1",
    }
    ray.init(
        address=ray_cluster.address, runtime_env={"env_vars": variables}, log_to_driver=False, logging_level="error"
    )
    try:
        yield ray_cluster
    finally:
        ray.shutdown()
        ray_cluster.shutdown()
        # Ray leaves variables and a handler behind, which other tests' processes would inherit.
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, on_end)


@pytest.fixture
def node(cluster: Any) -> Iterator[Callable[[], Any]]:
    """A function that adds a node with a card. Nodes that a test leaves are removed."""
    added = []

    def add() -> Any:
        added.append(cluster.add_node(num_cpus=0, resources={CARD: 1}, **SMALL))
        return added[-1]

    yield add
    for node_added in added:
        if node_added in cluster.list_all_nodes():
            cluster.remove_node(node_added, allow_graceful=False)
    wait_for(lambda: CARD not in __import__("ray").cluster_resources())


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Waits until a condition holds. Fails after this time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def overlapping_pairs(log: Path) -> list[tuple[Any, Any]]:
    """Pairs of evaluations that ran at the same time on one node. One without an end lasts until its process's last
    line."""
    spans: dict[str, list[tuple[float, float]]] = {}
    starts: dict[int, Any] = {}
    for line in simulated_gpu.read_log(log):
        if "begin" in line:
            starts[line["pid"]] = line
        elif "end" in line:
            start = starts.pop(line["pid"])
            spans.setdefault(line["node"], []).append((start["at"], line["at"]))
    pairs = []
    for group_spans in spans.values():
        group_spans.sort()
        pairs += [(first, second) for first, second in pairwise(group_spans) if second[0] < first[1]]
    return pairs


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_node_lose_nothing_and_nothing_is_stored_twice(
    cluster: Any, node: Callable[[], Any], tmp_path: Path
) -> None:
    """Sixteen jobs run on two cards. A worker is killed during an evaluation, then a whole node, and then a node is
    added."""
    log, store = tmp_path / "log", tmp_path / "trials.jsonl"
    nodes = [node(), node()]
    executor: Executor = RayExecutor(
        partial(SimulatedGpu, log, 0.05), resource=CARD, prepare=FakeCompiler(log), patience=PATIENCE, losses=3
    )
    jobs = [job(2 * index + 1, 2 * index + 2) for index in range(16)]
    finished_before: dict[str, Counter[int]] = {}

    def work() -> None:
        for trials in ended_jobs(executor, jobs):
            results.append(trials, store)

    thread = threading.Thread(target=work)

    killed = 0

    def working_nodes() -> set[str]:
        return {line["node"] for line in unended_evaluations(log) if line["pid"] != killed}

    allow(log, 4)
    thread.start()
    wait_for(lambda: len(count_ended(log)) >= 4 and len(working_nodes()) == 2)
    finished_before["worker"] = count_ended(log)
    killed = unended_evaluations(log)[0]["pid"]
    os.kill(killed, signal.SIGKILL)
    allow(log, 12)
    wait_for(lambda: len(count_ended(log)) >= 12 and nodes[0].node_id in working_nodes())
    finished_before["node"] = count_ended(log)
    cluster.remove_node(nodes[0], allow_graceful=False)
    added = node()
    wait_for(lambda: added.node_id in working_nodes())
    allow(log, 100)
    thread.join(timeout=PATIENCE)
    assert not thread.is_alive()
    executor.close()

    stored = results.trials(store)
    assert Counter(map(groups, stored)) == Counter(range(1, 33)), "each job once"
    expected = {
        groups(trial): trial.median_us
        for alone in jobs
        for trial in InProcess(SimulatedGpu(tmp_path / "other", 0.0)).submit(alone).result()
    }
    assert {groups(trial): trial.median_us for trial in stored} == expected
    assert {trial.outcome for trial in stored} == {"measured"}
    after = count_ended(log)
    for before in finished_before.values():
        assert len(before) >= 4
        assert all(after[group] == 1 for group in before), "what was finished is not evaluated again"
    assert len({line["node"] for line in simulated_gpu.read_log(log) if "end" in line}) == 3
    starts = Counter(group for line in simulated_gpu.read_log(log) for group in line.get("begin", ()))
    lost = [line["begin"] for line in unended_evaluations(log)]  # a single record, if two cards shared a job
    assert len(lost) == 2, "the worker and the node were each in mid-evaluation"
    assert starts == Counter(range(1, 33)) + Counter(itertools.chain(*lost)), "only what was lost is evaluated again"
    assert overlapping_pairs(log) == []


@pytest.mark.slow
def test_a_campaign_takes_turns_and_a_killed_node_changes_no_trial(
    cluster: Any, node: Callable[[], Any], tmp_path: Path
) -> None:
    """Five problems are in flight on two cards. The node of one card is killed during an evaluation."""
    log, problems = tmp_path / "log", [PROBLEM.model_copy(update={"m": 64 * m}) for m in range(1, 6)]
    nodes = [node(), node()]
    executor = RayExecutor(partial(SimulatedGpu, log, 0.02), resource=CARD, patience=PATIENCE)
    wait_for(lambda: executor.workers() == 2)
    assert executor.in_flight() == 8

    def run(place: Executor, store: Path) -> list[Trial]:
        plan = campaign.CampaignPlan(
            problems, lambda _: None, lambda problem: Random(problem.m), store, "r",
            search.SearchLimits(8, 4, prune=None), find_candidates=lambda problem: space.candidates(problem, 60),
        )  # fmt: skip
        campaign.run(plan, place)
        return results.trials(store)

    stored: list[Trial] = []
    thread = threading.Thread(target=lambda: stored.extend(run(executor, tmp_path / "trials.jsonl")))
    allow(log, 24)
    thread.start()
    wait_for(
        lambda: (
            count_ended(log).total() >= 24 and nodes[0].node_id in {line["node"] for line in unended_evaluations(log)}
        )
    )
    cluster.remove_node(nodes[0], allow_graceful=False)
    node()
    allow(log, 10_000)
    thread.join(timeout=PATIENCE)
    assert not thread.is_alive()
    executor.close()

    def by_problem(trials: list[Trial]) -> dict[Problem, list[Trial]]:
        return {problem: [trial for trial in trials if trial.problem == problem] for problem in problems}

    expected = run(InProcess(SimulatedGpu(tmp_path / "other", 0.0)), tmp_path / "others.jsonl")
    assert by_problem(stored) == by_problem(expected)
    order = [trial.problem for trial in stored]
    assert order != [trial.problem for trial in expected], "one problem does not wait for the end of another"
    assert overlapping_pairs(log) == []


def test_the_next_worker_goes_to_the_earliest_problem() -> None:
    idle = ray_executor.IdleWorkers()
    answers: list[int] = []

    def take(rank: int) -> None:
        assert idle.get(rank, 30.0) == rank
        answers.append(rank)

    threads = [threading.Thread(target=take, args=(rank,)) for rank in (3, 1, 2)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_for(lambda number=number: len(idle._waiting) == number + 1)  # type: ignore[misc]
    assert idle.get(0, 0.001) is None, "it waits no longer than it may"
    for worker in (1, 2, 3):
        idle.put(worker)
        wait_for(lambda worker=worker: worker in answers)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    idle.put(7)
    assert (answers, idle.get(9, 0.0)) == ([1, 2, 3], 7)


@pytest.mark.slow
def test_records_that_kill_hang_or_raise_cost_themselves_only(node: Callable[[], Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    node()
    executor = RayExecutor(partial(SimulatedGpu, log, 0.01), resource=CARD, seconds=5.0, patience=PATIENCE)
    jobs = [job(1, KILLS, 2), job(HANGS), job(4, RAISES), job(5)]
    trials = {groups(trial): trial for trials_of_job in ended_jobs(executor, jobs) for trial in trials_of_job}
    executor.close()
    outcomes = {group: (trial.outcome, trial.reason) for group, trial in trials.items()}
    assert {group for group, outcome in outcomes.items() if outcome == ("measured", "")} == {1, 2, 4, 5}
    assert outcomes[HANGS] == ("time-out", "no answer within 5 s")
    assert outcomes[RAISES] == ("wrong result", "ArithmeticError: the device is in a bad mood")
    assert outcomes[KILLS][0] == "wrong result"
    assert outcomes[KILLS][1].startswith("the worker that ran it was lost: ")
    starts = Counter(group for line in simulated_gpu.read_log(log) for group in line.get("begin", ()))
    assert starts[KILLS] == 4, "twice with others, twice alone"
    assert (starts[HANGS], starts[RAISES]) == (1, 2)
    assert trials[5].on == executor.on == "analytic model with hidden terms, seed 7"


@pytest.mark.slow
def test_kernels_are_packed_on_cpu_nodes_and_unpacked_at_the_card(node: Callable[[], Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    node()
    node()
    digests: list[list[str]] = []
    executor = RayExecutor(
        partial(SimulatedGpu, log, 0.3),
        resource=CARD,
        prepare=FakeCompiler(log),
        keep=lambda verdicts: digests.append([verdict.digest for verdict in verdicts]),
        patience=PATIENCE,
    )
    wait_for(lambda: executor.workers() == 2)
    trials = executor.submit(job(7, 8, 9)).result()
    assert digests == [[record(7).name]] * 2, "one kernel: each card that judged it says so once"
    executor.submit(job(7)).result()
    assert digests[2:] == [[]]
    executor.close()
    assert [groups(trial) for trial in trials] == [7, 8, 9], "in order, though two cards shared a brief job"
    lines = simulated_gpu.read_log(log)
    assert sorted(line["packed"] for line in lines if "packed" in line) == [[7], [7, 8], [9]]
    starts = {tuple(line["begin"]): line for line in lines if "begin" in line}
    assert starts[7, 8]["node"] != starts[9,]["node"]
    assert not {line["node"] for line in lines if "packed" in line} & {line["node"] for line in starts.values()}
    assert record(7).name in starts[7, 8]["built"]


def test_a_verdict_is_kept_where_it_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    for digests in (["a"], ["a", "b"], []):
        ray_executor.keep_verdicts([simulated_gpu.verdict(digest) for digest in digests])
    assert [json.loads(line)["digest"] for line in results.store().read_text().splitlines()] == ["a", "b"]


def test_only_brief_jobs_are_shared_out() -> None:
    short_job = job(1, 2, 3, 4, 5)
    parts = ray_executor.parts(short_job, 3)
    assert [[record.raster_group for record in part.records] for part in parts] == [[1, 2], [3, 4], [5]]  # type: ignore[union-attr]
    assert ray_executor.parts(short_job._replace(effort="long"), 3) == [short_job._replace(effort="long")]
    assert ray_executor.parts(job(1), 3) == [job(1)]
    assert ray_executor.parts(short_job, 0) == [short_job]


@pytest.mark.slow
def test_without_a_card_it_says_so(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="the cluster has 0 of simulated_gpu; none became free"):
        RayExecutor(partial(SimulatedGpu, tmp_path / "log"), resource=CARD, patience=0.5)


@pytest.mark.slow
def test_an_environment_that_does_not_start_is_not_started_for_ever(node: Callable[[], Any], tmp_path: Path) -> None:
    node()
    with pytest.raises(Unreachable, match="3 workers in a row failed at their start: OSError: no CUDA device"):
        RayExecutor(partial(simulated_gpu.MissingGpu, tmp_path / "log"), resource=CARD, patience=PATIENCE)


def test_nobody_at_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = require("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(Unreachable, match=r"^no Ray cluster at 127\.0\.0\.1:1: .*refused"):
        RayExecutor(partial(SimulatedGpu, tmp_path / "log"), address="127.0.0.1:1")


@pytest.mark.slow
def test_packed_kernels_are_kernels_where_they_arrive(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    small = Problem(gpu="a100", acc="f16", layout="tn", m=64, n=64, k=64)
    record = space.candidates(small, most=20).records[0]
    artifact = compiler.build([record], build_dir=first)[0]
    parcel = {artifact.digest: {path.name: path.read_bytes() for path in artifact.directory.iterdir()}}
    ray_executor.unpack(parcel, second)
    ray_executor.unpack(parcel, second)
    assert [path.name for path in second.iterdir()] == [artifact.digest]
    (artifact_there,) = compiler.build([record], build_dir=second, tools=toolchain.discover())
    assert artifact_there.ptxas == artifact.ptxas
    assert artifact_there.cubin.read_bytes() == artifact.cubin.read_bytes()
    assert not (second / ".lock").exists(), "nothing was compiled"


@pytest.mark.thorough
def test_a_parcel_leaves_its_folder_for_nobody(tmp_path: Path) -> None:
    ray_executor.unpack({"../../elsewhere": {"../../kernel.cubin": b"x"}}, tmp_path / "a" / "b")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "a/b/elsewhere/kernel.cubin"
    ]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_line_tunes_on_a_cluster_of_its_own(tmp_path: Path, own_catalog: dict[str, str]) -> None:
    require("ray")
    env = own_catalog | {"CUDAL2GEN_BUILD_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}

    def cluster_at(address: str) -> str:
        (tmp_path / "settings.toml").write_text(f'[search]\nray = "{address}"\n')
        return str(tmp_path / "settings.toml")

    options = ("--gpu", "h200", "--acc", "f32", "--environment", "model", "--proposers", "random", "--settings")
    process = run("tune", "--mnk", "256_2048_64", "--evaluations", "8", *options, cluster_at("local"), env=env)
    assert process.returncode == 0, process
    assert "1 of 1 problems, 8 evaluations" in process.stdout
    stored = results.trials(tmp_path / "tuner" / "modelled-trials.jsonl")
    assert Counter(trial.effort for trial in stored) == {"short": 8, "medium": 8, "long": 3, "final": 1}
    assert {trial.outcome for trial in stored} == {"measured"}
    message = error("tune", "--mnk", "256_2048_64", *options, cluster_at("127.0.0.1:1"), code=3, env=env)
    assert "no Ray cluster at 127.0.0.1:1" in message
