"""Proves mma.sync, wmma, wgmma and cvt of every operand type against references written from the PTX manual.

The references compute element by element. The rounding of fp8 is compared with a search for the nearest number in exact
fractions.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.emulator.arithmetic import operands

# The head of a text; the bits of an element of each type.
HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
BITS = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "s4": 4, "u4": 4}
BITS["b1"] = 1
# fp8: exponent bits, mantissa bits, bias, code of the largest finite number.
FLOAT8 = {"e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B)}
# Integers that a type holds, half open; NumPy's types of results.
DOMAIN = {
    "b1": (0, 2), "s4": (-8, 8), "u4": (0, 16), "s8": (-128, 128), "u8": (0, 256), "e4m3": (-16, 17), "e5m2": (-8, 9),
    "bf16": (-200, 200), "f16": (-30, 30), "tf32": (-900, 900), "f64": (-9999, 9999),
}  # fmt: skip
NUMBER: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}


@cache
def number8(code: int, kind: str) -> Fraction | None:
    """The number of an fp8 code; None for infinity and NaN."""
    _, mantissa, bias, last = FLOAT8[kind]
    if code & 0x7F > last:
        return None
    exponent, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    scale = Fraction(2) ** (max(exponent, 1) - bias)
    value = (Fraction(fraction, 1 << mantissa) + (exponent > 0)) * scale
    return -value if code & 0x80 else value


@cache
def magnitude8(x: float, kind: str) -> int:
    """The fp8 code of a positive number with .rn.satfinite."""
    last = FLOAT8[kind][3]
    if np.isinf(x):
        return last
    return min((abs((number8(code, kind) or 0) - Fraction(x)), code & 1, code) for code in range(last + 1))[2]


def nearest8(x: float, kind: str) -> int:
    """The fp8 code of a number with .rn.satfinite."""
    if np.isnan(x):
        return 0x7F
    return (0x80 if np.signbit(x) else 0) | magnitude8(abs(float(x)), kind)


@cache
def encode(value: int, kind: str) -> int:
    """A small integer as raw bits of an element."""
    if kind == "f64":
        return int(np.float64(value).view(np.uint64))
    if kind == "tf32":
        return int(np.float32(value).view(np.uint32))
    if kind == "bf16":
        return int(np.float32(value).view(np.uint32)) >> 16
    if kind == "f16":
        return int(np.float16(value).view(np.uint16))
    if kind in FLOAT8:
        return nearest8(float(value), kind)
    return value & ((1 << BITS[kind]) - 1)


def domain(kind: str) -> tuple[int, int]:
    """Integers that a type holds exactly, half open; few enough bits that sums are exact."""
    return DOMAIN[kind]


def pack(elements: list[int], bits: int) -> int:
    """The word with these elements, the first one lowest."""
    return sum(element << (bits * i) for i, element in enumerate(elements))


def product(a: np.ndarray, b: np.ndarray, xor: bool) -> np.ndarray:
    """The matrix product, or for single bits the number of differing ones."""
    if xor:
        return np.array([[int((row ^ column).sum()) for column in b.T] for row in a])
    return a @ b


def launch_text(
    text: str, image: np.ndarray, out: np.ndarray, threads: int = 32, extra: tuple[Any, ...] = ()
) -> np.ndarray:
    """Launches a text without a finding, and returns its output."""
    memory = Memory()
    x, y = memory.upload(image), memory.upload(out, "output")
    result = emulator.load(text).launch("k", 1, threads, [x, y, *extra], memory=memory)
    assert result.reports == []
    return y.download()


def mma_text(opcode: str, word: int, a: int, b: int, c: int) -> str:
    """A kernel of one mma with a, b and c registers of ``word`` bytes for its operands."""

    def names(prefix: str, n: int) -> str:
        return ", ".join(f"%{prefix}{i}" for i in range(n))

    loads = "".join(
        f"ld.global.b{8 * word} %{name}, [%p+{word * i}];"
        for i, name in enumerate(
            [f"a{i}" for i in range(a)] + [f"b{i}" for i in range(b)] + [f"c{i}" for i in range(c)]
        )
    )
    stores = "".join(f"st.global.b{8 * word} [%q+{word * i}], %d{i};" for i in range(c))
    return (
        f"{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{ .reg .b{8 * word} %a<8>, %b<8>, %c<8>, %d<8>;"
        f".reg .b32 %t; .reg .b64 %p, %q; ld.param.u64 %p, [x]; ld.param.u64 %q, [y]; mov.u32 %t, %tid.x;"
        f"mad.wide.u32 %p, %t, {word * (a + b + c)}, %p; mad.wide.u32 %q, %t, {word * c}, %q; {loads}"
        f"{opcode} {{{names('d', c)}}}, {{{names('a', a)}}}, {{{names('b', b)}}}, {{{names('c', c)}}}; {stores} ret; }}"
    )


# Rows of D, k, types of sums, of A and of B, and a modifier.
MMA = [
    (16, 32, "f32", "e4m3", "e4m3", ""), (16, 32, "f32", "e5m2", "e4m3", ""), (16, 16, "f32", "e5m2", "e5m2", ""),
    (16, 32, "f16", "e4m3", "e5m2", ""), (8, 4, "f64", "f64", "f64", ""), (16, 4, "f64", "f64", "f64", ""),
    (16, 8, "f64", "f64", "f64", ""), (16, 16, "f64", "f64", "f64", ""), (8, 16, "s32", "s8", "u8", ""),
    (8, 32, "s32", "s4", "u4", ""), (16, 32, "s32", "u4", "s4", ""), (16, 64, "s32", "s4", "s4", ""),
    (8, 128, "s32", "b1", "b1", "xor.popc."), (16, 128, "s32", "b1", "b1", "and.popc."),
    (16, 256, "s32", "b1", "b1", "xor.popc."), (16, 32, "s32", "s8", "s8", "satfinite"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "k", "acc", "kind_a", "kind_b", "how"), MMA)
def test_mma(rows: int, k: int, acc: str, kind_a: str, kind_b: str, how: str) -> None:
    """The result of mma.sync is exact for each shape and type. Each lane's registers are filled by the layouts of the
    PTX manual: lane 4 g + t has row g (and g + 8) of A, column g of B, and columns 2 t and 2 t + 1 of D."""
    rng = np.random.default_rng(k)
    a, b = rng.integers(*domain(kind_a), (rows, k)), rng.integers(*domain(kind_b), (k, 8))
    c = rng.integers(-9, 9, (rows, 8))
    if how == "satfinite":
        c[:, :4] = 2**31 - 5
    word = 8 if acc == "f64" else 4
    bits = BITS[kind_a]
    per = 8 * word // bits
    # A register has `per` consecutive k of A or B. The four lanes of a group hold 4 * per of k in a step. `halves`: 2
    # if D has 16 rows, else 1. `joined`: the elements of C in a register.
    steps, halves = k // (4 * per), rows // 8
    joined = 2 if acc == "f16" else 1
    image = np.zeros((32, steps * halves + steps + 2 * halves // joined), np.uint64)
    for lane in range(32):
        group, member = divmod(lane, 4)
        words = []
        for step in range(steps):
            for half in range(halves):
                columns = [step * 4 * per + member * per + i for i in range(per)]
                words.append(pack([encode(int(a[group + 8 * half, at]), kind_a) for at in columns], bits))
        for step in range(steps):
            places = [step * 4 * per + member * per + i for i in range(per)]
            words.append(pack([encode(int(b[at, group]), kind_b) for at in places], bits))
        cells = [NUMBER[acc](c[group + 8 * half, 2 * member + j]) for half in range(halves) for j in range(2)]
        words += np.array(cells, NUMBER[acc]).view(np.uint64 if word == 8 else np.uint32).tolist()
        image[lane] = words
    shape = f"m{rows}n8k{k}"
    if how.endswith("."):
        opcode = f"mma.sync.aligned.{shape}.row.col.{acc}.{kind_a}.{kind_b}.{acc}.{how[:-1]}"
    else:
        opcode = f"mma.sync.aligned.{shape}.row.col.{how + '.' if how else ''}{acc}.{kind_a}.{kind_b}.{acc}"
    counts = steps * halves, steps, 2 * halves // joined
    text = mma_text(opcode, word, *counts)
    raw = launch_text(
        text, image.astype(np.uint64 if word == 8 else np.uint32), np.zeros((32, 2 * halves), NUMBER[acc])
    )
    want = product(a, b, how.startswith("xor")) + c
    if how == "satfinite":
        want = np.clip(want, -(2**31), 2**31 - 1)
        assert (want == 2**31 - 1).any()
    for lane in range(32):
        group, member = divmod(lane, 4)
        assert raw[lane].tolist() == [
            want[group + 8 * half, 2 * member + j] for half in range(halves) for j in range(2)
        ]


# Shape, types of sums, A and B, 32-bit registers of A, B and C, orders of A and B, and a modifier.
WMMA = [
    ("m16n16k16", "f32", "bf16", "bf16", 4, 4, 8, "row", "col", ""),
    ("m8n32k16", "f32", "bf16", "bf16", 2, 8, 8, "col", "row", ""),
    ("m16n16k8", "f32", "tf32", "tf32", 4, 4, 8, "row", "row", ""),
    ("m8n8k4", "f64", "f64", "f64", 1, 1, 2, "row", "col", ""),
    ("m8n8k4", "f64", "f64", "f64", 1, 1, 2, "col", "row", ""),
    ("m16n16k16", "s32", "s8", "s8", 2, 2, 8, "row", "col", ""),
    ("m32n8k16", "s32", "u8", "u8", 4, 1, 8, "col", "row", ""),
    ("m8n8k32", "s32", "s4", "s4", 1, 1, 2, "row", "col", ""),
    ("m8n8k32", "s32", "u4", "u4", 1, 1, 2, "row", "col", ""),
    ("m8n8k128", "s32", "b1", "b1", 1, 1, 2, "row", "col", "xor.popc."),
    ("m8n8k128", "s32", "b1", "b1", 1, 1, 2, "row", "col", "and.popc."),
    ("m16n16k16", "f16", "f16", "f16", 8, 8, 4, "col", "col", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", WMMA, ids=lambda case: "-".join(map(str, case)))
def test_wmma(case: tuple[str, str, str, str, int, int, int, str, str, str]) -> None:
    """wmma loads, multiplies and stores matrices exactly in both storage orders, with gaps between rows."""
    size, acc, kind_a, kind_b, na, nb, nc, layout_a, layout_b, how = case
    m, n, k = (int(part) for part in size[1:].replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(m + n)
    low = domain(kind_a)
    a, b, c = rng.integers(*low, (m, k)), rng.integers(*low, (k, n)), rng.integers(-9, 9, (m, n))
    if acc == "f16":
        a, b = a % 3, b % 3

    def stride(length: int) -> int:
        """Elements from row to row: a multiple of 16 bytes, with a gap."""
        unit = 16 * 8 // BITS[kind_a]
        return (-(-length // unit) + 1) * unit

    def image(matrix: np.ndarray, kind: str) -> np.ndarray:
        """Rows as they lie in memory, at least 16 bytes apart."""
        bits = BITS[kind]
        rows = []
        for line in matrix.tolist():
            raw = pack([encode(value, kind) for value in line], bits).to_bytes(len(line) * bits // 8, "little")
            rows.append(np.frombuffer(raw.ljust(stride(len(line)) * bits // 8, b"\0"), np.uint8))
        return np.concatenate(rows)

    parts = [
        image(a if layout_a == "row" else a.T, kind_a),
        image(b if layout_b == "row" else b.T, kind_b),
        c.astype(NUMBER[acc]).reshape(-1).view(np.uint8),
    ]
    starts, data = [], np.zeros(0, np.uint8)
    for part in parts:
        starts.append(len(data))
        data = np.concatenate([data, part, np.zeros(-len(part) % 64, np.uint8)])
    word = 64 if acc == "f64" else 32
    stride_a, stride_b = stride(k if layout_a == "row" else m), stride(n if layout_b == "row" else k)

    def names(prefix: str, count: int) -> str:
        return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"

    types = f"{acc}.{acc}" if kind_a == "f16" else f"{acc}.{kind_a}.{kind_b}.{acc}"
    text = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
      .reg .b{word} %a<8>, %b<8>, %c<8>, %d<8>; .reg .b32 %s; .reg .b64 %p, %q, %r;
      ld.param.u64 %p, [x]; ld.param.u64 %q, [y]; mov.u32 %s, {stride_a};
      wmma.load.a.sync.aligned.{layout_a}.{size}.global.{kind_a} {names("a", na)}, [%p], %s;
      add.u64 %r, %p, {starts[1]}; mov.u32 %s, {stride_b};
      wmma.load.b.sync.aligned.{layout_b}.{size}.global.{kind_b} {names("b", nb)}, [%r], %s;
      add.u64 %r, %p, {starts[2]}; mov.u32 %s, {n};
      wmma.load.c.sync.aligned.row.{size}.global.{acc} {names("c", nc)}, [%r], %s;
      wmma.mma.{how}sync.aligned.{layout_a}.{layout_b}.{size}.{types}
        {names("d", nc)}, {names("a", na)}, {names("b", nb)}, {names("c", nc)};
      wmma.store.d.sync.aligned.row.{size}.global.{acc} [%q], {names("d", nc)}, %s;
      ret; }}"""
    got = launch_text(text, data, np.zeros((m, n), NUMBER[acc]))
    assert (got == product(a, b, how.startswith("xor")) + c).all()


# For each swizzle by name: the bytes of its rows, and its number in a descriptor.
SPAN = {"32": 32, "64": 64, "128": 128}
MODE = {"32": 3, "64": 2, "128": 1}
# n, types of sums, A and B, swizzles of A and B, modifiers, and whether A is in registers.
WGMMA = [
    (64, "f32", "e4m3", "e4m3", "128", "32", "", False), (16, "f32", "e5m2", "e4m3", "64", "128", ", 1, -1", False),
    (8, "f16", "e4m3", "e5m2", "32", "64", ", 1, 1", False),
    (32, "f32", "tf32", "tf32", "128", "128", ", -1, 1", False),
    (64, "s32", "s8", "u8", "128", "64", "", False), (32, "s32", "u8", "s8", "32", "32", ".satfinite", False),
    (32, "f32", "e4m3", "e5m2", "128", "128", ", 1, 1", True), (16, "f32", "tf32", "tf32", "128", "64", ", 1, 1", True),
    (24, "s32", "s8", "s8", "128", "64", "", True),
]  # fmt: skip


def swizzled_image(matrix: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """A K-major operand of 32 bytes along k in the canonical layout of a swizzle mode, 16 KiB."""
    image, width, span = np.full(16384, 0xFF, np.uint8), BITS[kind] // 8, SPAN[mode]
    for (row, k), value in np.ndenumerate(matrix):
        linear = row % 8 * span + row // 8 * 8 * span + k * width
        at = linear ^ ((linear >> 7) % (span // 16)) << 4
        image[at : at + width] = np.frombuffer(encode(int(value), kind).to_bytes(width, "little"), np.uint8)
    return image


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("case", WGMMA, ids=lambda case: "-".join(map(str, case)))
def test_wgmma(case: tuple[int, str, str, str, str, str, str, bool], keep: int) -> None:
    """The result of wgmma is exact for each type, with B in shared memory and A in either shared memory or
    registers."""
    n, acc, kind_a, kind_b, mode_a, mode_b, how, registers = case
    width = BITS[kind_a] // 8
    k, per = 32 // width, 4 // width
    rng = np.random.default_rng(n + keep)
    a, b, c = (
        rng.integers(*domain(kind_a), (64, k)),
        rng.integers(*domain(kind_b), (n, k)),
        rng.integers(-9, 9, (64, n)),
    )
    if how == ".satfinite":
        c[0] = 2**31 - 2
    shared = np.concatenate([swizzled_image(a, kind_a, mode_a), swizzled_image(b, kind_b, mode_b)])
    count = n // 4 if acc == "f16" else n // 2
    accumulators, fragments = np.zeros((128, n // 2), NUMBER[acc]), np.zeros((128, 4), np.uint32)
    # Thread 32 w + 4 g + t has rows 16 w + g and 16 w + g + 8. Of every 8 columns of D it has 2 t and 2 t + 1.
    for lane in range(128):
        row, member = lane // 32 * 16 + lane % 32 // 4, lane % 4
        for i in range(n // 2):
            accumulators[lane, i] = c[row + 8 * (i // 2 % 2), i // 4 * 8 + 2 * member + i % 2]
        for i in range(4):
            columns = [(i // 2 * 4 + member) * per + j for j in range(per)]
            fragments[lane, i] = pack([encode(int(a[row + 8 * (i % 2), at]), kind_a) for at in columns], BITS[kind_a])
    # Start address / 16, leading offset / 16 (1: unused with a swizzle), stride between 8 rows / 16, and the mode.
    descriptors = [
        (1024 + offset) >> 4 | 1 << 16 | 8 * SPAN[mode] >> 4 << 32 | MODE[mode] << 62
        for offset, mode in ((0, mode_a), (16384, mode_b))
    ]
    names = ", ".join(f"%c{i}" for i in range(count))
    operand = "{%a0, %a1, %a2, %a3}" if registers else "%A"
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{kind_a}.{kind_b}" + (how if how[:1] == "." else "")
    text = f"""{HEAD}.shared .align 1024 .b8 s[32768];
    .visible .entry k(.param .u64 x, .param .u64 y, .param .u64 c, .param .u64 f) {{
      .reg .b32 %t, %u, %v, %s, %x<4>, %a<4>, %c<{count}>; .reg .b64 %A, %B, %p, %q, %g, %d, %f; .reg .pred %P, %Q;
      ld.param.u64 %p, [x]; ld.param.u64 %q, [y]; ld.param.u64 %d, [c]; ld.param.u64 %f, [f];
      mov.u32 %t, %tid.x; mov.u32 %s, s; mov.u32 %u, 0; setp.ne.u32 %P, {keep}, 0;
    more:
      mad.lo.u32 %v, %t, 16, %u; cvt.u64.u32 %g, %v; add.u64 %g, %g, %p; add.u32 %v, %v, %s;
      ld.global.v4.u32 {{%x0, %x1, %x2, %x3}}, [%g]; st.shared.v4.u32 [%v], {{%x0, %x1, %x2, %x3}};
      add.u32 %u, %u, 2048; setp.lt.u32 %Q, %u, 32768; @%Q bra more;
      fence.proxy.async.shared::cta; bar.sync 0;
      mad.wide.u32 %d, %t, {4 * count}, %d; mad.wide.u32 %q, %t, {4 * count}, %q; mad.wide.u32 %f, %t, 16, %f;
      {"".join(f"ld.global.u32 %c{i}, [%d+{4 * i}];" for i in range(count))}
      {"".join(f"ld.global.u32 %a{i}, [%f+{4 * i}];" for i in range(4))}
      mov.b64 %A, {descriptors[0]}; mov.b64 %B, {descriptors[1]};
      wgmma.fence.sync.aligned; {opcode} {{{names}}}, {operand}, %B, %P{how if how[:1] == "," else ""};
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      {"".join(f"st.global.u32 [%q+{4 * i}], %c{i};" for i in range(count))} ret; }}"""
    memory = Memory()
    buffers = [memory.upload(shared), memory.upload(np.zeros((128, n // 2), NUMBER[acc]), "output")]
    buffers += [memory.upload(accumulators), memory.upload(fragments)]
    result = emulator.load(text).launch("k", 1, 128, buffers, memory=memory)
    assert result.reports == []
    want = (a @ b.T) * (-1 if "-1" in how else 1) + keep * c
    if how == ".satfinite":
        want = np.clip(want, -(2**31), 2**31 - 1)
    got = buffers[1].download()
    for lane in range(128):
        row, member = lane // 32 * 16 + lane % 32 // 4, lane % 4
        places = [(row + 8 * (i // 2 % 2), i // 4 * 8 + 2 * member + i % 2) for i in range(n // 2)]
        assert got[lane].tolist() == [want[place] for place in places]


# --- conversions ---


def convert(opcode: str, image: np.ndarray, out: Any, names: tuple[str, str]) -> np.ndarray:
    """One element of ``out`` per row of ``image``; names of the registers that are loaded and stored."""
    source, target = names
    loads = "".join(
        f"ld.global.b{8 * image.itemsize} %{source}{i}, [%p+{image.itemsize * i}];" for i in range(image.shape[1])
    )
    operands = ", ".join(f"%{source}{i}" for i in range(image.shape[1]))
    width = np.dtype(out).itemsize
    text = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
      .reg .b32 %t, %w<2>; .reg .b16 %h<2>; .reg .b64 %p, %q; ld.param.u64 %p, [x]; ld.param.u64 %q, [y];
      mov.u32 %t, %tid.x; mad.wide.u32 %p, %t, {image[0].nbytes}, %p; mad.wide.u32 %q, %t, {width}, %q;
      {loads} {opcode} %{target}0, {operands}; st.global.b{8 * width} [%q], %{target}0; ret; }}"""
    return launch_text(text, image, np.zeros(len(image), out), len(image))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_rounding_to_eight_bits(kind: str) -> None:
    """cvt to fp8 rounds each number to the nearest fp8 number, also halfway between two, beyond the range, and with
    ReLU."""
    finite = [float(number8(code, kind) or 0) for code in range(FLOAT8[kind][3] + 1)]
    middles = [(x + y) / 2 for x, y in pairwise(finite)]
    edges = [
        *finite,
        *middles,
        *np.nextafter(np.float32(middles), np.float32(0)),
        *np.nextafter(np.float32(middles), np.float32(9e9)),
    ]
    edges += [464.0, 465.0, 61440.0, 65000.0, 1e30, np.inf, np.nan, 1e-30, *np.random.default_rng(1).normal(0, 30, 80)]
    values = np.array([sign * x for x in edges for sign in (1, -1)], np.float32)[:1000]
    pairs = np.stack([values, values[::-1]], axis=1)
    got = convert(f"cvt.rn.satfinite.{kind}x2.f32", pairs, np.uint16, ("w", "h"))
    assert got.tolist() == [nearest8(float(x), kind) << 8 | nearest8(float(y), kind) for x, y in pairs]
    got = convert(f"cvt.rn.satfinite.relu.{kind}x2.f32", pairs[:64], np.uint16, ("w", "h"))
    positive = [[0.0 if x <= 0 else float(x) for x in pair] for pair in pairs[:64]]
    assert got.tolist() == [nearest8(x, kind) << 8 | nearest8(y, kind) for x, y in positive]
    with np.errstate(over="ignore"):
        halves = pairs.astype(np.float16)
    got = convert(f"cvt.rn.satfinite.{kind}x2.f16x2", halves[:, ::-1].copy().view(np.uint32), np.uint16, ("w", "h"))
    assert got.tolist() == [nearest8(float(x), kind) << 8 | nearest8(float(y), kind) for x, y in halves]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_halves_of_eight_bits(kind: str) -> None:
    """cvt from fp8 to fp16 keeps the number of each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint16)
    got = convert(f"cvt.rn.f16x2.{kind}x2", (codes | codes[::-1] << 8)[:, None], np.uint32, ("h", "w"))
    for code, word in zip(codes.tolist(), got.tolist(), strict=True):
        for half, which in ((word & 0xFFFF, code), (word >> 16, 255 - code)):
            number = number8(which, kind)
            value = float(np.uint16(half).view(np.float16))
            if number is not None:
                assert Fraction(value) == number
                assert np.signbit(value) == bool(which & 0x80)
            elif kind == "e5m2" and which & 0x7F == 0x7C:
                assert np.isinf(value)
            else:
                assert half == 0x7FFF


def test_rounding_to_bf16_and_tf32() -> None:
    """cvt to bf16 and tf32 rounds to the nearest number, with ties to even, or away from zero for .rna."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 1 << 32, 1000, np.uint32)
    raw[:200] = raw[:200] & 0xFFFF0000 | 0x8000
    raw[200:400] = raw[200:400] & 0xFFFFE000 | 0x1000
    values = raw.view(np.float32)
    raw = raw[np.isfinite(values) & (np.abs(values) < 1e38)]

    def nearest(bits: int, dropped: int, away: bool) -> int:
        """The magnitude's neighbours in exact integers: raw bits of one sign are ordered as their numbers are."""
        low = bits >> dropped << dropped
        rest, half = bits - low, 1 << dropped - 1
        up = rest > half or (rest == half and (away or low >> dropped & 1))
        return low + (up << dropped)

    for opcode, dropped, away in (
        ("cvt.rn.bf16.f32", 16, False),
        ("cvt.rna.tf32.f32", 13, True),
        ("cvt.rn.tf32.f32", 13, False),
    ):
        out = np.uint16 if dropped == 16 else np.uint32
        got = convert(opcode, raw[:, None], out, ("w", "h" if dropped == 16 else "w"))
        want = [nearest(int(bits), dropped, away) for bits in raw]
        assert [int(g) << 16 if dropped == 16 else int(g) for g in got] == want


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("finite", [True, False])
def test_halves_widen_bit_for_bit(kind: str, finite: bool) -> None:
    """The operands are every f16 and bf16 number, alone and in pairs, with and without infinities and NaN among
    them."""
    raw = np.arange(1 << 16, dtype=np.uint16)
    if finite:
        raw = raw[raw & 0x7C00 != 0x7C00]
    want = raw.view(np.float16).astype(np.float32) if kind == "f16" else (raw.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(operands.halves(raw, kind).view(np.uint32), want.view(np.uint32))
    words = raw.view(np.uint32).reshape(4, -1)
    pairs = want.reshape(*words.shape, 2).transpose(0, 2, 1)
    split = operands.split_halves(words, kind)
    assert np.array_equal(split.view(np.uint32), np.ascontiguousarray(pairs).view(np.uint32))
