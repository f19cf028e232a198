"""Proves for sums over slices of k how often a thread waits for the L2, and that every slice is added once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cudal2gen.generation import compiler
from cudal2gen.kernel import MmaSyncKernel, Record, Sm90Wgmma, Sm100Tcgen05, ceil_div
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.validator import stress_shapes
from kernelproof import emulator
from tests.cudal2gen.paths import SWAPPED, SWAPPED_TENSOR, TWO_CONSUMERS, ring, small, tensor
from tests.cudal2gen.strategies import STRAIGHT, TO_GLOBAL, direct, multistage, wgmma
from tests.cudal2gen.test_ptx import instructions
from tests.draws import draw_part

Array = NDArray[Any]
# A load past the L1, and its registers.
LOAD = re.compile(r"ld\.global\.cg\S*\s+(\{[^}]*\}|\S+),")


def trips(lines: list[str]) -> list[tuple[int, bool]]:
    """Groups of loads that bypass the L1, as (number, whether a loop repeats them). All loads of a group are issued
    before an instruction reads one of their results."""
    groups: list[tuple[int, bool]] = []
    pending: set[str] = set()
    loads = 0
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    jumps = [(labels[name], i) for i, line in enumerate(lines) for name in re.findall(r"bra\S*\s+(\$L\w+);", line)]
    for i, line in enumerate(lines):
        if load := LOAD.search(line):
            pending |= set(re.findall(r"%\w+", load.group(1)))
            loads += 1
        elif pending & set(re.findall(r"%\w+", line)):
            groups.append((loads, any(start < i < end for start, end in jumps)))
            pending, loads = set(), 0
    assert not pending
    return groups


def groups_of(record: Record) -> list[tuple[int, bool]]:
    """How a record's kernel loads partial sums: the groups that ``trips`` finds in its PTX. Fails if the kernel
    spills."""
    artifact = compiler.build([record])[0]
    assert artifact.ptxas.spill_store_bytes == artifact.ptxas.spill_load_bytes == 0
    return trips(instructions(artifact.ptx.read_text()))


SPLIT: list[dict[str, Any]] = [
    {"split_k": 2},
    {"split_k": 5, "acc": "f32"},
    {"split_k": 3, "acc": "f32", "bm": 32, "bn": 32, "mma_repeat": [1, 2, 1], "c_batch": 1, "bk": 64, "g2s_cols": 4},
    {"split_k": 4, "bm": 96, "bn": 96, "m": 96, "n": 96},
    {"split_k": 8, "acc": "f32", "bm": 256, "mma_repeat": [4, 2, 1], **STRAIGHT},
    {"split_k": 7, "layout": "nn", **TO_GLOBAL},
]
SPLIT_RECORDS: Sequence[MmaSyncKernel] = draw_part(
    [*(multistage(**changes) for changes in SPLIT), direct(split_k=3), direct(split_k=2, acc="f32")], 3
)


@pytest.mark.parametrize("record", SPLIT_RECORDS, ids=lambda record: record.name)
def test_the_last_ctas_trips_to_the_l2(record: MmaSyncKernel) -> None:
    groups = groups_of(record)
    pairs = record.bm * record.bn // record.threads // 2
    once = [loads for loads, repeated in groups if not repeated]
    repeated = [loads for loads, repeated in groups if repeated]
    rounds, rest = divmod(pairs * record.split_k - sum(once), sum(repeated)) if repeated else (0, 0)
    assert rest == 0, "all pairs of all slices are loaded once"
    in_flight = max(once + repeated)
    assert in_flight >= min(8, pairs * record.split_k)
    assert len(once) + rounds * len(repeated) <= ceil_div(pairs * record.split_k, in_flight)


WIDE: dict[str, Any] = {**TWO_CONSUMERS, "bn": 192, "atom_n": 192, "registers": [40, 232], "k": 4096}
# Kernels that add slices of a workspace, and one that also shares tiles of the last wave.
SHARED_RECORDS = [
    *(ring(**WIDE, reduce="workspace", split_k=slices) for slices in draw_part((2, 3, 4, 5, 8, 13, 16, 23, 64), 3)),
    wgmma(split_k=4, reduce="workspace", min_blocks=2, bm=64, bn=64, atom_n=64, consumers=1, registers=None, stages=2),
]
STREAMED_RECORD = ring(**WIDE, stream_k=True, cluster=[2, 1])


@pytest.mark.parametrize("record", SHARED_RECORDS, ids=lambda record: f"{record.bn} {record.split_k}")
def test_every_ctas_trips_to_the_l2(record: Sm90Wgmma) -> None:
    """A thread adds any number of vectors of a tile. Each vector has as many parts as there are slices."""
    ((loads, _),) = groups_of(record)
    slices = record.split_k
    at_once = min(slices, loads)
    vectors_at_once = loads // at_once
    assert loads >= 8
    assert loads == vectors_at_once * at_once
    for vectors in range(1, record.accumulator_registers // 4 + 1):
        needed = ceil_div(vectors, vectors_at_once) * ceil_div(slices, at_once)
        assert needed <= ceil_div(vectors * slices, 8)


def test_trips_to_the_l2_of_the_last_wave() -> None:
    """There are three forms of sixteen loads: for up to four, up to eight, and more parts of a tile."""
    assert [loads for loads, _ in groups_of(STREAMED_RECORD)] == [16, 16, 16]
    for parts in range(2, 100):
        vectors_at_once, at_once = (4, 4) if parts <= 4 else (2, 8) if parts <= 8 else (1, 16)
        for vectors in range(1, 65):
            needed = ceil_div(vectors, vectors_at_once) * ceil_div(parts, at_once)
            assert needed <= ceil_div(vectors * parts, 8)


class Run(NamedTuple):
    """The result of a launch: D, its findings, and the size of its workspace."""

    d: Array
    findings: list[str]
    workspace_bytes: int


def run_kernel(
    record: Record,
    directory: Path,
    library: Path,
    sms: int,
    a: Array,
    b: Array,
    *,
    clears: bool = True,
    launches: int = 1,
    **modes: Any,
) -> Run:
    """D of A (m,k) and B (n,k) after several launches on a device of ``sms`` SMs, NaN where nothing is stored.
    ``clears``: whether memsets take effect."""
    (m, k), n = a.shape, len(b)
    memory = emulator.Memory()
    device = replace(emulator.Device.of(record.target), sm_count=sms, threads_per_sm=record.threads)
    stored_b = b if record.layout == "tn" else np.ascontiguousarray(b.T)
    options = emulator.Options(loop_limit=100_000, **modes)
    with emulator.session(memory, device, options) as session:
        if not clears:
            session.calls["memset"] = lambda _: 0
        with OpenKernel(library, directory, record.launch_options, emulator.runtime_path()) as kernel:
            size = kernel.workspace_bytes(m, n, k)
            workspace = memory.allocate(size, "scratch").address if size else 0
            inputs = [memory.upload(matrix).address for matrix in (a, stored_b)]
            for _ in range(launches):
                d = memory.upload(np.full((m, n), np.nan, np.float16), "output")
                kernel.launch(inputs[0], k, inputs[1], stored_b.shape[1], d.address, n, m, n, k, workspace)
    findings = [str(report) for report in session.reports] + [str(error) for error in session.errors]
    return Run(d.bytes().view(np.float16).reshape(m, n).copy(), findings, size)


def ones_and_zeros(m: int, n: int, k: int) -> tuple[Array, Array]:
    """A and B (n,k) of 0 and 1 in fp16, so that sums are exact."""
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.integers(0, 2, size).astype(np.float16) for size in ((m, k), (n, k)))
    return a, b


# Tiles are 64 x 32 in stages of 64 of k, and each SM holds one CTA.
STREAMED = ring(stream_k=True)
LAST_WAVES: list[tuple[Sm90Wgmma | Sm100Tcgen05, int, tuple[int, int, int], int]] = [
    # record, SMs, m n k, and the number of tiles in the workspace
    (STREAMED, 5, (64, 32, 7 * 64 - 8), 1 + 5),
    (STREAMED, 18, (40, 24, 20 * 64), 1 + 18),
    (STREAMED, 7, (64, 32, 3 * 64), 1 + 3),
    (STREAMED, 4, (64, 32, 8), 0),
    (STREAMED, 4, (190, 32, 5 * 64 + 8), 3 + 4),
    (STREAMED, 4, (200, 136, 5 * 64), 0),
    (STREAMED, 6, (200, 136, 5 * 64), 2 + 6),
    (STREAMED, 3, (200, 136, 72), 2 + 3),
    # As a B200 computes a router's few columns: more parts of a tile than a thread loads at once.
    (tensor(**SWAPPED_TENSOR, stream_k=True, epilogue="direct", m=90), 18, (5, 128, 20 * 64), 1 + 18),
    (STREAMED, 19, (200, 136, 256), 1 + 19),
    # Three clusters of two CTAs, with tiles beyond the matrix.
    (ring(**TWO_CONSUMERS, stream_k=True, cluster=[2, 1], layout="nn"), 6, (300, 96, 328), 0),
    (ring(**TWO_CONSUMERS, stream_k=True, cluster=[2, 1], layout="nn"), 10, (300, 96, 328), 2 * (1 + 5)),
    (ring(stream_k=True, cluster=[1, 2]), 8, (64, 96, 9 * 64), 2 * (2 + 4)),
    (ring(stream_k=True, cluster=[2, 2], epilogue="direct"), 8, (64, 133, 9 * 64), 4 * (1 + 2)),
    (ring(**SWAPPED, stream_k=True), 5, (96, 128, 4 * 64), 1 + 5),
    (STREAMED, 1, (200, 136, 72), 0),
]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("record", "sms", "size", "parts"), LAST_WAVES)
def test_the_last_wave_is_covered_once(
    record: Sm90Wgmma | Sm100Tcgen05, sms: int, size: tuple[int, int, int], parts: int, library: Path
) -> None:
    """Cases are one tile, fewer tiles than SMs, a last wave of one and of several tiles, and ragged k, each in two
    orders of events."""
    directory = compiler.build([record])[0].directory
    a, b = ones_and_zeros(*size)
    counters = 256 if parts else 0
    for adverse in (False, True):
        result = run_kernel(record, directory, library, sms, a, b, adverse=adverse)
        assert result.findings == []
        assert result.workspace_bytes == counters + parts * record.bm * record.bn * 4
        np.testing.assert_array_equal(result.d, (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16))


def test_stress_shapes_have_a_last_wave_after_a_whole_one() -> None:
    """A verdict of the emulator has two clusters."""
    shapes = stress_shapes(STREAMED)
    tiles = [ceil_div(shape.m, STREAMED.bm) * ceil_div(shape.n, STREAMED.bn) for shape in shapes]
    assert any(number > 2 and number % 2 for number in tiles)


def in_order_only(k_starts: list[int], m: int, n: int, k: int) -> tuple[Array, Array, float]:
    """A (m,k) and B (n,k) whose partial sums, from these k on, are 2^24, 1, -2^24 and 1, and their fp32 sum in this
    order. Any other order of the first three has another sum."""
    a, b = np.zeros((m, k), np.float16), np.zeros((n, k), np.float16)
    for at, (x, y) in zip(k_starts, [(4096, 4096), (1, 1), (-4096, 4096), (1, 1)], strict=True):
        a[:, at], b[:, at] = x, y
    return a, b, 1.0


# A kernel that adds four slices of k; kernels whose parts are added in the order of k, and SMs.
SLICED = ring(split_k=4, reduce="workspace")
ORDERED: list[tuple[Sm90Wgmma, int]] = [(SLICED, 4), (SLICED, 1), (ring(**SWAPPED, stream_k=True), 4), (STREAMED, 4)]


@pytest.mark.parametrize(("record", "sms"), ORDERED)
@pytest.mark.parametrize("adverse", [False, True])
def test_parts_are_summed_in_the_order_of_k(record: Sm90Wgmma, sms: int, adverse: bool, library: Path) -> None:
    k = 8 * 64
    a, b, expected = in_order_only([0, 128, 256, 384], 64, 32, k)
    directory = compiler.build([record])[0].directory
    result = run_kernel(record, directory, library, sms, a, b, adverse=adverse)
    assert result.findings == []
    tile = result.d[: record.bm, : record.bn]
    assert (tile == expected).all()


def swap_loads(text: str) -> str:
    """Swaps the addresses of the first two loads of a group."""
    first, second = list(re.finditer(r"(@p ld\.global\.cg\S* \{[^}]*\}, )\[([^\]]*)\]", text))[:2]
    return (
        text[: first.start()] + f"{first[1]}[{second[2]}]" + text[first.end() : second.start()]
        + f"{second[1]}[{first[2]}]" + text[second.end() :]
    )  # fmt: skip


def replacement(pattern: str, new: str) -> Callable[[str], str]:
    """A function that replaces all matches of a pattern in a text, and fails if there is none."""

    def mutate(text: str) -> str:
        changed, count = re.subn(pattern, new, text)
        assert count > 0
        return changed

    return mutate


MUTANTS: dict[str, Callable[[str], str]] = {
    "without waiting": replacement(r"ld\.acquire\.gpu\.global\.u32 (%\w+), \[[^\]]*\];", r"mov.b32 \1, -1;"),
    "a wait that acquires nothing": replacement(r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
    "an arrival that releases nothing": replacement(r"red\.release\.gpu", "red.relaxed.gpu"),
    "an arrival too many": replacement(r"(red\.release\S* \[[^\]]*\]), 1;", r"\1, 2;"),
    "an arrival of another tile": replacement(r"(red\.release\S* \[%\w+)\]", r"\1+4]"),
    "another slice": replacement(r"(@p ld\.global\.cg\S* \{[^}]*\}, \[%\w+)\]", r"\1+8192]"),
    "another order": swap_loads,
    "a counter that is not returned": replacement(r"st\.relaxed\.gpu\.global\.u32 [^;]*;", ""),
    "a look at the counter that does not count": replacement(r"(atom\.relaxed\S* %\w+, \[[^\]]*\]), %\w+;", r"\1, 0;"),
}


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("record", [SLICED, STREAMED], ids=["workspace", "stream"])
def test_mutants_of_the_sum_are_noticed(name: str, record: Sm90Wgmma, library: Path, tmp_path: Path) -> None:
    artifact = compiler.build([record])[0]
    directory = tmp_path / "mutant"
    shutil.copytree(artifact.directory, directory)
    a, b, expected = in_order_only([0, 128, 256, 384], 64, 32, 8 * 64)
    right = run_kernel(record, directory, library, 4, a, b, launches=2)
    assert (right.d == expected).all()
    assert right.findings == []
    (directory / "kernel.ptx").write_text(MUTANTS[name](artifact.ptx.read_text()))
    outcomes = [
        run_kernel(record, directory, library, 4, a, b, launches=2, adverse=adverse) for adverse in (False, True)
    ]
    assert any(outcome.findings or not (outcome.d == expected).all() for outcome in outcomes)


# A kernel whose CTAs count in turns, and the instructions by which kernels return their counters to zero.
TICKETS = small(split_k=2, padding="predicate")
RETURNS = r"atom\.global\.inc\.u32\s+(%\w+, \[[^\]]*\]), 1;|st\.relaxed\.gpu\.global\.u32\s[^;]*;"


@pytest.mark.slow
@pytest.mark.parametrize("record", [TICKETS, SLICED, STREAMED], ids=["tickets", "workspace", "stream"])
def test_counters_that_are_not_returned_are_noticed_by_the_next_launch(
    record: Record, library: Path, tmp_path: Path
) -> None:
    artifact = compiler.build([record])[0]
    a, b = ones_and_zeros(64, 32, 8 * 64)
    expected = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16)
    right = run_kernel(record, artifact.directory, library, 4, a, b, launches=3)
    assert (right.findings, (right.d == expected).all()) == ([], True)
    directory = shutil.copytree(artifact.directory, tmp_path / "mutant")
    count = r"atom.global.add.u32 \1, 1;"
    text, changed = re.subn(RETURNS, lambda at: at.expand(count) if at[1] else "", artifact.ptx.read_text())
    assert changed == 1
    (directory / "kernel.ptx").write_text(text)
    once, twice = (run_kernel(record, directory, library, 4, a, b, launches=number) for number in (1, 2))
    assert (once.findings, (once.d == expected).all()) == ([], True)
    assert twice.findings or not (twice.d == expected).all()


@pytest.mark.slow
@pytest.mark.parametrize("record", [SLICED, STREAMED], ids=["workspace", "stream"])
def test_counters_that_are_not_cleared_are_noticed(record: Sm90Wgmma, library: Path) -> None:
    directory = compiler.build([record])[0].directory
    a, b = ones_and_zeros(64, 32, 8 * 64)
    assert run_kernel(record, directory, library, 4, a, b, launches=2).findings == []
    findings = run_kernel(record, directory, library, 4, a, b, launches=2, clears=False).findings
    assert any("race" in finding or "uninitialised" in finding for finding in findings)


BUILT_AHEAD = [
    *SPLIT_RECORDS,
    *SHARED_RECORDS,
    STREAMED_RECORD,
    *(record for record, *_ in LAST_WAVES),
    SLICED,
    TICKETS,
]
