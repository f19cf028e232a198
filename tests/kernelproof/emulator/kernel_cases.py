"""Cases of small CUDA kernels, right and wrong, with the results or findings that their launches must have."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from kernelproof import emulator
from kernelproof.emulator import Memory, Options, Program, Report
from tests.kernelproof.emulator.build import FIXTURES, compile_file

Array = Any


@cache
def program(name: str) -> Program:
    """A compiled program without its host code."""
    return emulator.load(compile_file(name, ".ptx"))


@dataclass
class Case:
    """A launch of a kernel of ``file``.

    ``args``: the kernel's arguments in order. An array is an input; ``Out``, ``InOut`` and ``Scratch`` are buffers with
    another role; all else is passed by value. ``kinds``: the rules that the launch breaks.
    """

    file: str
    kernel: str
    grid: Any
    block: Any
    args: Sequence[Any]
    kinds: set[str] = field(default_factory=set)
    source: str = ""
    shared_bytes: int = 0
    options: Options = field(default_factory=Options)


@dataclass
class Out:
    """An output with the shape and type of ``like``, and its expected content; None: any content."""

    like: Array
    want: Array | None = None


@dataclass
class InOut:
    """A buffer that a kernel reads and writes; ``want`` is its content afterwards, None if it does not matter."""

    start: Array
    want: Array | None = None


@dataclass
class Scratch:
    """A buffer whose content does not matter before and after, of the size of ``like``."""

    like: Array


def run_case(case: Case) -> list[Report]:
    """Launches a case, checks its outputs, and returns the findings."""
    memory = Memory()
    args: list[Any] = []
    checks: list[tuple[Any, Array]] = []
    for arg in case.args:
        if isinstance(arg, Out | InOut):
            role = "output" if isinstance(arg, Out) else "inout"
            buffer = memory.upload(arg.like if isinstance(arg, Out) else arg.start, role)
            args.append(buffer)
            if arg.want is not None:
                checks.append((buffer, arg.want))
        elif isinstance(arg, Scratch):
            args.append(memory.upload(arg.like, "scratch"))
        elif isinstance(arg, np.ndarray):
            args.append(memory.upload(arg, "input"))
        else:
            args.append(arg)
    result = program(case.file).launch(
        case.kernel, case.grid, case.block, args, memory=memory, shared_bytes=case.shared_bytes, options=case.options
    )
    for buffer, want in checks:
        np.testing.assert_array_equal(buffer.download(), want)
    return result.reports


def source_line(file: str, text: str) -> int:
    """The only line of a fixture that contains ``text``."""
    lines = (FIXTURES / f"{file}.cu").read_text().splitlines()
    hits = [i + 1 for i, line in enumerate(lines) if text in line]
    assert len(hits) == 1, f"{text!r} is on lines {hits}"
    return hits[0]


# Inputs, and outputs of which only the shape and the type count (those made by ``np.empty``, with names in E or
# I). T has the number of each of 128 threads. Constants below a function of the expected result are results, too.
rng = np.random.default_rng(7)
A = rng.integers(0, 3, (20, 40)).astype(np.float16)
B = rng.integers(0, 3, (24, 40)).astype(np.float16)
AB = A.astype(np.float32) @ B.astype(np.float32).T
E2024 = np.empty((20, 24), np.float32)
SA, SB = (rng.integers(0, 3, (64, 64)).astype(np.float32) for _ in range(2))
E64 = np.empty((64, 64), np.float32)
R = rng.integers(0, 9, (4, 256)).astype(np.float32)
X128 = rng.integers(0, 99, 128).astype(np.int32)
I128 = np.empty(128, np.int32)
T = np.arange(128)
BYTES = rng.integers(0, 255, 128).astype(np.uint8)
ROUNDS = rng.integers(0, 99, (5, 64)).astype(np.int32)
X256 = rng.integers(0, 99, 256).astype(np.int32)
HALVES = rng.integers(0, 50, 1024).astype(np.float16)
E1024 = np.empty(1024, np.float16)
MATRIX = rng.integers(0, 50, (16, 16)).astype(np.float16)


def zero_filled(n: int) -> Array:
    """The result of ``zero_fill`` with n elements: vectors of 8 in reverse order, with zeros from element n on."""
    out = np.zeros(1024, np.float16)
    out[:n] = HALVES[:n]
    return out.reshape(128, 8)[::-1].reshape(-1)


def expected_update(v: Array) -> Array:
    """The result of ``private_update``."""
    for i in range(4):
        v = v + i * v
    return v


def expected_ignored() -> Array:
    """The result of ``ignore_source``, whose copies ignore some of their sources."""
    rows = HALVES.reshape(128, 8)
    out = rows.copy()
    out[:, 4:6], out[:, 6:8] = rows[:, 0:2], rows[:, 2:4]
    out[64:, 0:4] = 0
    return out


def odd_even(x: Array) -> Array:
    """The result of lanes that exchange numbers in two branches."""
    t = np.arange(64)
    s = np.where(t & 1, x * 2, x * 3)
    return np.where(t & 1, s[t ^ 3], s[t ^ 3] + 1)


def nested_loops(v: int, t: int, n: int) -> int:
    """The result of nested loops with ``continue`` and ``break``."""
    s = 0
    for i in range(v % 7):
        for j in range(i + 1):
            if (i + j + t) % 3 == 0:
                continue
            if (i * j + t) % 11 == 5:
                break
            s += i * j + 1
        if s > n:
            s -= n
            continue
        s += 2
    return s


BROADCAST = X128[5] + X128[:32] + (np.arange(32) == 5)
ODD = rng.integers(0, 9, (3, 100)).astype(np.int32)
NESTED = np.array([nested_loops(int(v), i, 10) for i, v in enumerate(X128)])
# The CUDA file of kernels with shared memory, and the right cases of its kernels.
SHARED = "shared_memory"
CORRECT_SHARED = [
    Case(SHARED, "naive_gemm", (2, 2), (16, 16), [A, B, Out(E2024, AB), 20, 24, 40]),
    Case(SHARED, "tiled_gemm", (4, 4), (16, 16), [SA, SB, Out(E64, SA @ SB), 64]),
    Case(SHARED, "warp_reduce", 4, 256, [R, Out(np.empty(4, np.float32), R.sum(1))]),
    Case(SHARED, "warp_exchange", 1, 128, [X128, Out(I128, X128[T ^ 5])]),
    Case(SHARED, "private_update", 1, 128, [X128, Out(I128, expected_update(X128))]),
    Case(SHARED, "byte_writers", 1, 128, [BYTES, Out(np.empty(128, np.uint8), BYTES[::-1])]),
    Case(SHARED, "same_value_writers", 1, 64, [Out(np.empty(64, np.int32), np.full(64, 7))]),
    Case(SHARED, "named_barriers", 1, 128, [ROUNDS, Out(np.empty_like(ROUNDS), ROUNDS[:, ::-1]), 5]),
    Case(
        SHARED,
        "half_barriers",
        1,
        128,
        [X128, Out(np.empty((3, 128), np.int32), np.stack([X128[T ^ 63] + i for i in range(3)]))],
    ),
    Case(
        SHARED,
        "early_return_of_blocks",
        6,
        64,
        [Out(np.empty((4, 64), np.int32), np.arange(4)[:, None] + np.full(64, 0) + T[:64]), 4],
    ),
    Case(SHARED, "shared_atomics", 1, 256, [X256, Out(np.empty(16, np.int32), np.bincount(X256 & 15, minlength=16))]),
    Case(SHARED, "zero_fill", 1, 128, [HALVES[:1000], Out(E1024, zero_filled(1000)), 1000]),
    Case(SHARED, "zero_fill", 1, 128, [HALVES[:997], Out(E1024, zero_filled(997)), 997]),
    Case(SHARED, "ignore_source", 1, 128, [HALVES, Out(np.empty((128, 8), np.float16), expected_ignored()), 512]),
    Case(SHARED, "transposed_matrix", 1, 32, [MATRIX, Out(np.empty((16, 16), np.float16), MATRIX.T)]),
    Case(SHARED, "odd_block", 3, (10, 10), [ODD, Out(np.empty(3, np.int32), ODD.sum(1))]),
    Case(SHARED, "warp_barrier_on_both_sides", 1, 64, [X128[:64], Out(np.empty(64, np.int32), odd_even(X128[:64]))]),
    Case(SHARED, "broadcast_then_write", 1, 32, [X128[:32], Out(np.empty(32, np.int32), BROADCAST)]),
    Case(SHARED, "volatile_reduce", 1, 64, [X128[:64], Out(np.empty(1, np.int32), np.array([X128[:64].sum()]))]),
    Case(SHARED, "shared_flag", 1, 64, [X128[:32], Out(np.empty(32, np.int32), X128[:32][::-1])]),
    # An undefined value that is read but never used is not an error.
    Case(SHARED, "garbage_dropped", 1, 128, [X128, Out(I128, np.where(T >= 28, X128[::-1], 5)), 100]),
    Case(SHARED, "nested_loops", 1, 128, [X128, Out(I128, NESTED), 10]),
]
# Each with a part of the only source line that a finding must name; "" for no particular line.
WRONG_SHARED = [
    (
        Case(
            SHARED,
            "naive_gemm_no_bounds",
            (2, 2),
            (16, 16),
            [A, B, Out(E2024, AB), 20, 24, 40],
            {"global-out-of-bounds"},
        ),
        "",
    ),
    (
        Case(SHARED, "tiled_gemm_no_first_barrier", (4, 4), (16, 16), [SA, SB, Out(E64), 64], {"shared-race"}),
        "sum += sa[y][i]",
    ),
    (
        Case(SHARED, "tiled_gemm_no_second_barrier", (4, 4), (16, 16), [SA, SB, Out(E64), 64], {"shared-race"}),
        "sa[y][x] = a[",
    ),
    (Case(SHARED, "warp_exchange_no_sync", 1, 128, [X128, Out(I128)], {"shared-race"}), "out[t] = s[t ^ 5];"),
    (Case(SHARED, "warp_exchange_other_warp", 1, 128, [X128, Out(I128)], {"shared-race"}), "out[t] = s[t ^ 37];"),
    (
        Case(SHARED, "reads_uninitialised", 1, 64, [Out(np.empty(64, np.int32))], {"uninitialised-shared"}),
        "= s[threadIdx.x];",
    ),
    (
        Case(
            SHARED,
            "shared_out_of_bounds",
            1,
            64,
            [Out(np.empty(64, np.int32))],
            {"shared-out-of-bounds"},
            shared_bytes=256,
        ),
        "dyn[threadIdx.x * 2] =",
    ),
    (
        Case(SHARED, "shared_misaligned", 1, 64, [Out(np.empty(64, np.int32))], {"shared-misaligned"}),
        "s + threadIdx.x * 5",
    ),
    (
        Case(SHARED, "atomic_and_same_store", 1, 64, [Out(np.empty(64, np.int32))], {"shared-race"}),
        "*word = 1;",
    ),
    (
        Case(SHARED, "atomic_and_same_store_global", 1, 64, [InOut(np.zeros(1, np.int32))], {"global-race"}),
        "*word = 1;",
    ),
    (
        Case(SHARED, "different_value_writers", 1, 64, [Out(np.empty(64, np.int32))], {"shared-race"}),
        "flag = threadIdx.x;",
    ),
    (Case(SHARED, "half_barriers_cross", 1, 128, [X128, Out(I128)], {"shared-race"}), "out[t] = s[t ^ 127];"),
    (Case(SHARED, "divergent_barrier", 1, 128, [Out(I128), 3], {"barrier-divergence", "unwritten-output"}), ""),
    (
        Case(
            SHARED,
            "endless",
            1,
            32,
            [Out(np.empty(32, np.int32)), 3],
            {"runaway", "unwritten-output"},
            options=Options(loop_limit=500),
        ),
        "",
    ),
    (
        Case(SHARED, "shared_atomics_no_barrier", 1, 256, [X256, Out(np.empty(16, np.int32))], {"shared-race"}),
        "threadIdx.x < 144",
    ),
    (Case(SHARED, "zero_fill_no_wait", 1, 128, [HALVES[:1000], Out(E1024), 1000], {"in-flight"}), "uint4*>(s + from)"),
    (
        Case(SHARED, "zero_fill_no_barrier", 1, 128, [HALVES[:1000], Out(E1024), 1000], {"shared-race"}),
        "uint4*>(s + from)",
    ),
    (
        Case(SHARED, "zero_fill_no_clamp", 1, 128, [HALVES[:1000], Out(E1024), 1000], {"global-out-of-bounds"}),
        "bytes ? x + at : x",
    ),
    (
        Case(SHARED, "garbage_used", 1, 128, [X128, Out(I128), 100], {"uninitialised-shared"}),
        "= *reinterpret_cast<volatile",
    ),
    (
        Case(SHARED, "shared_flag_no_fence", 1, 64, [X128[:32], Out(np.empty(32, np.int32))], {"shared-race"}),
        "= s[63 - t];",
    ),
    (
        Case(SHARED, "broadcast_then_write_no_sync", 1, 32, [X128[:32], Out(np.empty(32, np.int32))], {"shared-race"}),
        "if (t == 31) s[5] = v + 1;",
    ),
    (
        Case(SHARED, "readers_in_turn_no_sync", 1, 32, [X128[:32], Out(np.empty(32, np.int32))], {"shared-race"}),
        "if (t == 31) s[5] = v + 2;",
    ),
]


# The CUDA file of kernels that work on device memory, and the inputs of its kernels.
DEVICE = "device_memory"
FA, FB = (rng.integers(0, 3, (16, 32)).astype(np.float32) for _ in range(2))
PARTS = rng.integers(0, 9, (8, 64)).astype(np.float32)
TILES = rng.integers(0, 99, (10, 64)).astype(np.int32)
TILES_WANT = TILES[:, np.arange(64) ^ 63] + np.arange(10)[:, None]
STARTS = rng.integers(1, 99, 256).astype(np.int32)
WA, WB = (rng.integers(0, 3, (16, 64)).astype(np.float16) for _ in range(2))
ZERO = np.zeros(1, np.int32)
F64 = np.empty(64, np.float32)


def collatz(v: int) -> int:
    """The number of Collatz steps down to 1."""
    steps = 0
    while v != 1:
        v, steps = (3 * v + 1 if v & 1 else v // 2), steps + 1
    return steps


def divergent(v: int, t: int, n: int) -> int:
    """The result of lanes that leave a loop at different iterations and then branch five ways."""
    steps = 0
    while v != 1 and steps < n:
        v, steps = (3 * v + 1 if v & 1 else v >> 1), steps + 1
        if steps == 50:
            break
    return [steps + 100, steps * 2, steps - v, steps ^ 0x55, ~steps][t % 5]


def local_array(x: int, n: int) -> int:
    """The result of updates of an array in local memory."""
    a = [x * i for i in range(16)]
    for i in range(n):
        a[(x + i) & 15] += a[i & 15]
    s = 0
    for i in range(16):
        s = s * 3 + a[(i * 5) & 15]
    return int(np.uint32(s & 0xFFFFFFFF).astype(np.int32))


def collectives(values: Array) -> Array:
    """The results of votes, shuffles, reductions, matches and bit counts in a warp."""
    v, out = [int(x) for x in values], []
    for t in range(32):
        r = sum(1 << i for i in range(32) if v[i] > 3)
        r ^= (7 in v) << 1
        r ^= 1 << 2
        up = v[t - 2] if t % 8 >= 2 else v[t]
        r += v[(t + 3) & 31] * 3 + up * 5 + v[(t & ~3) + (t & 1)] * 7
        r += sum(v) + max(v) * 11
        r ^= sum(1 << i for i in range(32) if v[i] & 3 == v[t] & 3)
        r += 32 + (32 - (v[t] + 1).bit_length()) + (v[t] & -v[t]).bit_length() + int(f"{t:032b}"[::-1], 2)
        r += v[t ^ 2] if t & 1 else 0
        out.append(r & 0xFFFFFFFF)
    return np.array(out, np.uint32).view(np.int32)


def last(name: str, kinds: set[str] | None = None, lanes: int = 2048) -> Case:
    """A case in which the CTA that arrives last adds the partial sums."""
    args = [PARTS, Scratch(PARTS), InOut(np.zeros(1, np.uint32)), Out(F64, 2 * PARTS.sum(0)), 8]
    return Case(DEVICE, name, 8, 64, args, kinds or set(), options=Options(lanes=lanes))


def serial(name: str, kinds: set[str] | None = None, lanes: int = 2048) -> Case:
    """A case in which CTAs add their sums one after the other."""
    return Case(
        DEVICE, name, 8, 64, [PARTS, Out(F64, PARTS.sum(0)), InOut(ZERO)], kinds or set(), options=Options(lanes=lanes)
    )


SMALL = rng.integers(0, 9, 32).astype(np.int32)
CORRECT_DEVICE = [
    Case(DEVICE, "split_atomic", (2, 1, 4), 128, [FA, FB, InOut(np.zeros((16, 16), np.float32), FA @ FB.T), 16, 32, 8]),
    *(last("last_arriver_ok", lanes=n) for n in (2048, 64)),
    *(last("last_arriver_fence_by_one", lanes=n) for n in (2048, 64)),
    # One, two and eight blocks at a time: pollers must yield to the batches that they wait for.
    *(serial("serial_split", lanes=n) for n in (2048, 64, 128)),
    Case(DEVICE, "spin_lock", 20, 32, [InOut(ZERO, ZERO), InOut(ZERO, np.array([190]))], options=Options(lanes=128)),
    Case(DEVICE, "persistent", 3, 64, [TILES, Out(np.empty_like(TILES), TILES_WANT), 10, InOut(ZERO)]),
    Case(DEVICE, "grid_stride", 3, 64, [TILES, Out(np.empty_like(TILES), TILES_WANT), 10]),
    Case(
        DEVICE,
        "divergent",
        2,
        128,
        [STARTS, Out(np.empty(256, np.int32), np.array([divergent(int(v), i, 60) for i, v in enumerate(STARTS)])), 60],
    ),
    Case(
        DEVICE,
        "calls",
        1,
        64,
        [
            STARTS[:64],
            Out(
                np.empty(64, np.int32),
                np.array(
                    [
                        (collatz(int(v)) + (collatz(int(v) + 1) if i & 1 else 0)) * 10 + 1 + (i & 1)
                        for i, v in enumerate(STARTS[:64])
                    ]
                ),
            ),
        ],
    ),
    Case(
        DEVICE,
        "local_array",
        1,
        64,
        [STARTS[:64], Out(np.empty(64, np.int32), np.array([local_array(int(v), 20) for v in STARTS[:64]])), 20],
    ),
    Case(DEVICE, "constants", 1, 32, [Out(np.empty(32, np.int32), np.tile([3, 1, 4, 1, 5, 9, 2, 6], 4) + 5)]),
    Case(DEVICE, "by_value", 1, 32, [struct.pack("<ifq", 3, 4.5, 10), Out(np.empty(32, np.int32), np.arange(32) + 17)]),
    Case(
        DEVICE,
        "wmma_gemm",
        1,
        32,
        [WA, WB, Out(np.empty((16, 16), np.float32), 2 * (WA.astype(np.float32) @ WB.astype(np.float32).T))],
    ),
    Case(
        DEVICE,
        "wmma_half",
        1,
        32,
        [
            MATRIX % 3,
            MATRIX.T.copy() % 4,
            Out(
                np.empty((16, 16), np.float16),
                ((MATRIX % 3).astype(np.float32).T @ (MATRIX.T % 4).astype(np.float32) + 1).T.astype(np.float16),
            ),
        ],
    ),
    Case(DEVICE, "collectives", 1, 32, [SMALL, Out(np.empty(32, np.int32), collectives(SMALL))]),
    Case(
        DEVICE,
        "block_exchange",
        1,
        64,
        [Scratch(np.empty(64, np.int32)), Out(np.empty(64, np.int32), np.arange(64) ^ 40)],
    ),
]
WRONG_DEVICE = [
    (
        Case(
            DEVICE,
            "split_plain",
            (2, 1, 4),
            128,
            [FA, FB, InOut(np.zeros((16, 16), np.float32)), 16, 32, 8],
            {"global-race"},
        ),
        "+= sum;",
    ),
    *(
        (last(name, {"global-race"}, lanes), "sum += partial")
        for name in ("last_arriver_no_fence", "last_arriver_no_barrier", "last_arriver_no_acquire")
        for lanes in (2048, 64)
    ),
    *(
        (serial(name, {"global-race"}, lanes), "d[t] = z ?")
        for name in ("serial_split_no_release", "serial_split_no_acquire")
        for lanes in (2048, 64)
    ),
    (
        Case(
            DEVICE,
            "waits_for_nobody",
            4,
            64,
            [InOut(ZERO), Out(np.empty(64, np.int32))],
            {"barrier-divergence", "unwritten-output"},
        ),
        "",
    ),
    (
        Case(
            DEVICE, "writes_too_far", 2, 64, [STARTS[:64], Out(np.empty(100, np.int32)), 64], {"global-out-of-bounds"}
        ),
        "x[t < n ? t : 0]",
    ),
    (
        Case(DEVICE, "misaligned_global", 1, 4, [STARTS, Out(np.empty((4, 4), np.int32))], {"global-misaligned"}),
        "const int4*>(x + ",
    ),
    (
        Case(DEVICE, "modifies_input", 1, 32, [STARTS, Out(np.empty(32, np.int32))], {"input-modified"}),
        "x[threadIdx.x] = 0;",
    ),
    (Case(DEVICE, "misses_outputs", 1, 32, [Out(np.empty(32, np.int32)), 20], {"unwritten-output"}), ""),
    (
        Case(
            DEVICE,
            "reads_scratch",
            1,
            32,
            [Scratch(np.empty(32, np.int32)), Out(np.empty(32, np.int32))],
            {"uninitialised-global"},
        ),
        "const int* scratch",
    ),
    (
        Case(
            DEVICE, "block_race", 1, 64, [Scratch(np.empty(64, np.int32)), Out(np.empty(64, np.int32))], {"global-race"}
        ),
        "",
    ),
    (Case(DEVICE, "same_cell", 4, 32, [Out(np.empty(1, np.int32))], {"global-race"}), "out[0] = blockIdx.x;"),
    (Case(DEVICE, "traps", 1, 32, [Out(np.empty(32, np.int32))], {"trap"}), "__trap();"),
]
