"""Proves that running clusters compute the tiles that they claim, and that faults of the claims are found.

A kernel with ``scheduler=clc`` has a cluster for each tile. A running cluster claims the tile of one that has not
started, by clusterlaunchcontrol.try_cancel. Its CTAs learn of the claimed tile, an item, from slots in shared memory.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Problem, Sm100Tcgen05, ceil_div
from cudal2gen.kernel.launch import Batches
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.results import Case
from cudal2gen.timing.model import estimate
from cudal2gen.validator import Shape, emulated, own_shape, run_case
from kernelproof import emulator
from kernelproof.emulator.blackwell.cluster_launch import ClusterLaunches
from kernelproof.emulator.hopper.mbarrier import MBarrier, MBarriers
from kernelproof.emulator.machine.scheduler import Scheduler
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.queue import CtaQueue
from tests.cudal2gen.paths import PATHS, tensor

PAIR = PATHS["tensor claimed pair"]
ALWAYS = "setp.eq.u32 p, 0, 0;"  # sets the predicate of a wait or a query in place of the instruction
BEGUN = PAIR.smem_bytes - 16  # the mbarrier on which the first CTA's loading thread arrives with each item
# An arrival that expects the bytes of an item, and the same arrival without them.
EXPECTED = r"mbarrier\.arrive\.expect_tx\.relaxed\.cluster\.shared::cluster\.b64 _, (\[%r\d+\]), 4;"
RELAXED = r"mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, \1;"
ARRIVAL = r"mbarrier\.arrive\.shared::cta\.b64 _, [^;]*;"  # matches only this form of an arrival
BUILT_AHEAD = [PAIR]


def execute_pair(artifact: Artifact, library: Path, adverse: bool = False, shape: Shape | None = None) -> Case:
    """The result of executing the pair's kernel on drawn 0 and 1. ``adverse``: in the adverse order, in which every
    third request fails without a reason."""
    return run_case(PAIR, artifact, library, shape or own_shape(PAIR), "binary", adverse=adverse)[0]


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    """The compiled kernel of ``PAIR``."""
    return compiler.build([PAIR])[0]


@pytest.mark.slow
def test_running_clusters_compute_all_tiles(artifact: Artifact, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device holds two pairs, which claim all tiles but their own. Other pairs start only if a request has
    failed without a reason."""
    answers: list[int | None] = []
    cancel = CtaQueue.cancel

    def counted(queue: CtaQueue) -> int | None:
        answers.append(cancel(queue))
        return answers[-1]

    monkeypatch.setattr(CtaQueue, "cancel", counted)
    shape = Shape(600, 320, 64)
    clusters = ceil_div(shape.m, 2 * PAIR.bm) * ceil_div(shape.n, PAIR.bn)
    assert execute_pair(artifact, library, shape=shape).findings == ()
    # An answer is the first of the two CTAs of the claimed cluster. The first two clusters are CTAs 0 to 3; each gets
    # None when no cluster is left.
    assert answers == [*range(4, 2 * clusters, 2), None, None]
    answers.clear()
    assert execute_pair(artifact, library, adverse=True, shape=shape).findings == ()
    assert 0 < sum(answer is not None for answer in answers) < clusters - 2


def _near_request(text: str, pattern: str, by: str, after: bool) -> str:
    """A PTX text in which ``by`` replaces the first match after the request for another cluster's tile, or the last
    match before it."""
    at = text.index("clusterlaunchcontrol.try_cancel")
    if after:
        return text[:at] + re.sub(pattern, by, text[at:], count=1)
    *_, last = re.finditer(pattern, text[:at])
    return text[: last.start()] + by + text[last.end() :]


def _request(text: str) -> str:
    """The first instruction that requests another cluster's tile."""
    begin = text.index("clusterlaunchcontrol.try_cancel")
    return text[begin : text.index(";", begin) + 1]


def _count_to_two(text: str) -> str:
    """Makes the mbarrier of items that are begun expect two arrivals."""
    address = re.findall(rf"add\.s32\s+(%r\d+), %r\d+, {BEGUN};", text)[0]
    return re.sub(rf"(mbarrier\.init\S+\s+\[{address}\], )%r\d+;", r"\g<1>2;", text)


def _remove_throttle(text: str) -> str:
    """Removes the claiming thread's wait until the previous item is begun."""
    before, request, rest = text.partition("clusterlaunchcontrol.try_cancel")
    # the last one waits for the slot
    *_, wait, _ = re.finditer(r"mbarrier\.try_wait\.parity\.shared::cta[^;]*;", before)
    return before[: wait.start()] + ALWAYS + before[wait.end() :] + request + rest


# By fault: the edit of the PTX, and the rule that reports it. A slot has 11 readers.
FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "the response is not awaited": (
        lambda text: _near_request(text, r"mbarrier\.try_wait\.parity\.shared::cta[^;]*;", ALWAYS, after=True),
        "in-flight",
    ),
    "the slot is not awaited": (
        lambda text: _near_request(text, r"mbarrier\.try_wait\.parity\.shared::cta[^;]*;", ALWAYS, after=False),
        "shared-race",
    ),
    "an item is not awaited": (
        lambda text: re.sub(
            r"mbarrier\.try_wait[^;]*;((?:(?!try_wait)[\s\S])*?ld\.shared\.u32)", rf"{ALWAYS}\1", text, count=1
        ),
        "uninitialised-shared",
    ),
    "no proxy fence after the response": (
        lambda text: _near_request(text, r"fence\.proxy\.async\.shared::cta;", "", after=True),
        "proxy-fence",
    ),
    "an item's bytes are not expected": (lambda text: re.sub(EXPECTED, RELAXED, text), "in-flight"),
    "an item's bytes are expected twice": (lambda text: text.replace("], 4;\n", "], 8;\n"), "deadlock"),
    "an item is stored without its mbarrier": (
        lambda text: re.sub(
            r"st\.async\.\S+ (\[%r\d+\], %r\d+), \[%r\d+\];",
            r"st.shared::cluster.u32 \1;",
            re.sub(EXPECTED, RELAXED, text),
        ),
        "shared-race",
    ),
    "slots are handed back without an order": (
        lambda text: text.replace("mbarrier.arrive.shared::cluster", "mbarrier.arrive.relaxed.cluster.shared::cluster"),
        "shared-race",
    ),
    "one reader is not counted": (lambda text: re.sub(r"(mov\.b32\s+%r\d+, )11;", r"\g<1>10;", text), "shared-race"),
    "one reader too many": (lambda text: re.sub(r"(mov\.b32\s+%r\d+, )11;", r"\g<1>12;", text), "deadlock"),
    "no arrival when an item is begun": (lambda text: re.sub(ARRIVAL, "", text), "deadlock"),
    "two arrivals when an item is begun": (lambda text: re.sub(f"({ARRIVAL})", r"\1 \1", text), "deadlock"),
    "an item counts as begun with the second arrival": (_count_to_two, "deadlock"),
    "every response counts as a claim": (
        lambda text: re.sub(r"clusterlaunchcontrol\.query_cancel\.is_canceled[^;]*;", ALWAYS, text),
        "cluster-launch-control",
    ),
    "the CTA of a failed claim is read": (
        lambda text: text.replace("@p clusterlaunchcontrol", "clusterlaunchcontrol"),
        "cluster-launch-control",
    ),
    "more is asked after a failure": (
        lambda text: _near_request(
            _remove_throttle(text), r"(setp\.gt\.s32\s+%p\d+, %r\d+, )-1;", r"\g<1>-2;", after=True
        ),
        "cluster-launch-control",
    ),
    "an exit while a request is pending": (
        lambda text: _near_request(
            text, r"(setp\.gt\.s32\s+%p\d+, %r\d+, -1;\s+@%p\d+ bra\s+\S+;)", rf"\1 {_request(text)}", True
        ),
        "in-flight",
    ),
}


def edited_kernel(artifact: Artifact, edit: Callable[[str], str], directory: Path) -> Artifact:
    """A copy of a kernel with another PTX text."""
    shutil.copytree(artifact.directory, directory / artifact.digest)
    faulty = Artifact(directory / artifact.digest, artifact.ptxas)
    text = artifact.ptx.read_text()
    assert edit(text) != text
    faulty.ptx.write_text(edit(text))
    return faulty


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_protocol_are_reported(fault: str, artifact: Artifact, library: Path, tmp_path: Path) -> None:
    edit, rule = FAULTS[fault]
    faulty = edited_kernel(artifact, edit, tmp_path)
    findings = [finding for adverse in (False, True) for finding in execute_pair(faulty, library, adverse).findings]
    assert any(finding.startswith(rule) for finding in findings), findings


def _claims_first(scheduler: Scheduler) -> tuple[int, Array]:
    """Chooses the next thread of a scheduler: claiming threads run whenever they can, that of the first cluster first,
    as if loads were slow."""
    # A mask of all lanes: warp 3 of a cluster's first CTA claims.
    claiming = np.arange(scheduler.batch.size) % (PAIR.cluster_ctas * PAIR.threads) // 32 == 3
    for head, mask in list(scheduler.deferred.items()):  # clusters that poll in a loop would wait for all others
        if (mask & claiming).any():
            del scheduler.deferred[head]
            scheduler.runnable[head] = scheduler.runnable.get(head, np.zeros_like(mask)) | (mask & claiming)
            if (mask & ~claiming).any():
                scheduler.deferred[head] = mask & ~claiming
    able = {block: np.flatnonzero(mask & claiming) for block, mask in scheduler.runnable.items()}
    lane, block = min(((int(lanes[0]), block) for block, lanes in able.items() if lanes.size), default=(-1, min(able)))
    mask = scheduler.runnable.pop(block)
    if lane < 0:
        return block, mask
    chosen = mask & (np.arange(scheduler.batch.size) // 32 == lane // 32)
    if (mask & ~chosen).any():
        scheduler.runnable[block] = mask & ~chosen
    return block, chosen


def test_a_cluster_holds_one_tile_that_it_has_not_begun(
    artifact: Artifact, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four tiles, two waves of the device's two clusters, and the first cluster claims as early as it can.
    Without its wait, on which no result depends, it claims both tiles of the second wave before it has begun its
    own."""
    # For each cluster: +1 when it claims a tile, -1 when it begins one.
    changes: tuple[list[int], list[int]] = [], []
    cancel, respond, count_down = CtaQueue.cancel, ClusterLaunches._respond, MBarriers._count_down
    granted: list[bool] = []

    def note_cancel(queue: CtaQueue) -> int | None:
        first = cancel(queue)
        granted.append(first is not None)
        return first

    def note_response(launches: ClusterLaunches, row: int, *rest: Any) -> None:
        if granted[-1]:
            changes[row // PAIR.cluster_ctas].append(1)
        respond(launches, row, *rest)

    def note_arrival(barriers: MBarriers, bar: MBarrier, *rest: Any) -> None:
        if bar.offset == BEGUN:
            changes[bar.row // PAIR.cluster_ctas].append(-1)
        count_down(barriers, bar, *rest)

    monkeypatch.setattr(CtaQueue, "cancel", note_cancel)
    monkeypatch.setattr(ClusterLaunches, "_respond", note_response)
    monkeypatch.setattr(MBarriers, "_count_down", note_arrival)
    monkeypatch.setattr(Scheduler, "_first_block", _claims_first)
    shape = Shape(4 * 2 * PAIR.bm, PAIR.bn, 512)
    unthrottled = edited_kernel(artifact, _remove_throttle, tmp_path)
    for kernel, tiles, not_begun in ((artifact, [2, 2], [1, 1]), (unthrottled, [3, 1], [3, 1])):
        for each in changes:
            each.clear()
        assert execute_pair(kernel, library, shape=shape).findings == ()
        assert [each.count(-1) for each in changes] == tiles
        assert [max(accumulate(each, initial=1)) for each in changes] == not_begun


def test_a_grid_of_more_ctas_than_fit_along_x_is_refused(artifact: Artifact, library: Path, tmp_path: Path) -> None:
    """The grid has a cluster for each tile, and CTAs beyond the matrix count too. The launcher decides by the facts of
    a launch: those of the pair are edited to accept batches."""
    directory = tmp_path / artifact.digest
    shutil.copytree(artifact.directory, directory)
    with (directory / "kernel.launch").open("a") as facts:
        facts.write("\nbatch=strided\n")
    with (
        emulator.session(device=emulated.device_of(PAIR)) as session,
        OpenKernel(library, directory, PAIR.launch_options, emulator.runtime_path()) as kernel,
        pytest.raises(LaunchError, match="2147483648 CTAs in clusters of 2"),
    ):
        kernel.launch(1 << 20, 64, 1 << 21, 64, 1 << 22, 64, 32, 32, 64, batches=Batches(2**30, 0, 0, 64 * 32))
    assert session.launches == []


def test_claims_are_proposed_where_tiles_wait() -> None:
    """Claims are proposed if not all tiles run at once. The model prefers neither scheduler."""

    def schedulers(m: int, n: int) -> set[Any]:
        problem = Problem(gpu="b200", acc="f32", layout="tn", m=m, n=n, k=4096)
        return {fields.get("scheduler", "static") for fields in Sm100Tcgen05.candidates(problem)}

    assert schedulers(8192, 8192) == {"static", "clc"}
    assert schedulers(128, 32) == {"static"}
    sizes: dict[str, Any] = {"m": 8192, "n": 8192, "k": 4096, "bn": 256, "stages": 4}
    assert estimate(tensor(**sizes)) == estimate(tensor(**sizes, scheduler="clc"))


@pytest.mark.parametrize(
    ("changes", "remarks"),
    [
        ({"m": 600}, ["scheduler=clc: 25 tiles run at once on b200, so none is claimed"]),
        ({"m": 8192, "n": 8192}, []),
        ({"m": 600, "batch": "strided"}, []),
    ],
)
def test_claims_that_find_nothing_are_remarked(changes: dict[str, Any], remarks: list[str]) -> None:
    """For batches the number of tiles is unknown, so there is no remark."""
    assert tensor(**changes, scheduler="clc").remarks == remarks
    assert tensor(**changes).remarks == []
