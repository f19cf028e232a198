"""Proves mma.sync of all supported kinds, element by element, against the fragment layouts of the PTX manual."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory

# Type of an operand -> its elements in a register of 32 bits.
ELEMENTS_PER_WORD = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4}


@cache
def kernel(shape: str, acc: str, kind: str, a: int, b: int, c: int) -> emulator.Program:
    """A kernel of one mma with a, b and c registers of its operands, which each thread loads and stores in a row."""

    def names(prefix: str, n: int) -> str:
        return ", ".join(f"%{prefix}{i}" for i in range(n))

    def loads(prefix: str, n: int, base: int) -> str:
        return "\n".join(f"  ld.global.b32 %{prefix}{i}, [%p+{4 * (base + i)}];" for i in range(n))

    stores = "\n".join(f"  st.global.b32 [%q+{4 * i}], %d{i};" for i in range(c))
    total = a + b + c
    return emulator.load(f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {{
  .reg .b32 %a<8>, %b<8>, %c<8>, %d<8>, %t; .reg .b64 %p, %q;
  ld.param.u64 %p, [x]; ld.param.u64 %q, [y];
  mov.u32 %t, %tid.x;
  mad.wide.u32 %p, %t, {4 * total}, %p;
  mad.wide.u32 %q, %t, {4 * c}, %q;
{loads("a", a, 0)}
{loads("b", b, a)}
{loads("c", c, a + b)}
  mma.sync.aligned.{shape}.row.col.{acc}.{kind}.{kind}.{acc}
    {{{names("d", c)}}}, {{{names("a", a)}}}, {{{names("b", b)}}}, {{{names("c", c)}}};
{stores}
  ret;
}}
""")


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """The bits of numbers in a type, as unsigned integers."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind == "tf32":
        return x.astype(np.float32).view(np.uint32)
    return x.astype(np.int8 if kind == "s8" else np.uint8).view(np.uint8)


def pack(elements: list[int], per: int) -> int:
    """The word with these elements, the first one lowest."""
    return sum(int(e) << (32 // per * i) for i, e in enumerate(elements))


# Shape, and types of sums and operands.
CASES = [
    ("m16n8k16", "f32", "f16"), ("m16n8k16", "f16", "f16"), ("m16n8k8", "f32", "f16"), ("m16n8k8", "f16", "f16"),
    ("m16n8k16", "f32", "bf16"), ("m16n8k8", "f32", "bf16"), ("m16n8k8", "f32", "tf32"), ("m16n8k4", "f32", "tf32"),
    ("m16n8k32", "s32", "s8"), ("m16n8k16", "s32", "s8"), ("m16n8k32", "s32", "u8"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "acc", "kind"), CASES)
def test_fragments(shape: str, acc: str, kind: str) -> None:
    """mma.sync is exact for each shape and type, with registers filled by the layouts of the PTX manual."""
    k, per = int(shape[6:]), ELEMENTS_PER_WORD[kind]
    rng = np.random.default_rng(k)
    # The numbers are as large as the operands represent exactly and the accumulator can sum.
    high = {"f16": 9, "bf16": 200, "tf32": 1000, "s8": 127, "u8": 255}[kind]
    low = 0 if kind == "u8" else -high
    a, b, c = rng.integers(low, high, (16, k)), rng.integers(low, high, (k, 8)), rng.integers(-9, 9, (16, 8))
    ea, eb = encode(a, kind), encode(b, kind)
    steps = k // (4 * per)
    counts = (2 * steps, steps, 2 if acc == "f16" else 4)
    rows = []
    for lane in range(32):
        group, member = lane // 4, lane % 4
        words = []
        # Registers of A: rows group and group + 8 of each block of 4 * per columns.
        for i in range(2 * steps):
            row, first = group + 8 * (i % 2), (i // 2) * 4 * per + member * per
            words.append(pack([int(ea[row, first + j]) for j in range(per)], per))
        for i in range(steps):
            first = i * 4 * per + member * per
            words.append(pack([int(eb[first + j, group]) for j in range(per)], per))
        cells = [(group + 8 * (i // 2), member * 2 + i % 2) for i in range(4)]
        values = [c[cell] for cell in cells]
        if acc == "f16":
            raw = [int(np.float16(v).view(np.uint16)) for v in values]
            words += [raw[0] | raw[1] << 16, raw[2] | raw[3] << 16]
        elif acc == "f32":
            words += [int(np.float32(v).view(np.uint32)) for v in values]
        else:
            words += [int(v) & 0xFFFFFFFF for v in values]
        rows.append(words)
    memory = Memory()
    x = memory.upload(np.array(rows, np.uint32))
    y = memory.upload(np.empty((32, counts[2]), np.uint32), "output")
    result = kernel(shape, acc, kind, *counts).launch("k", 1, 32, [x, y], memory=memory)
    assert result.reports == []
    got = y.download()
    want = a @ b + c
    for lane in range(32):
        group, member = lane // 4, lane % 4
        words = got[lane]
        values = words.view({"f16": np.float16, "f32": np.float32, "s32": np.int32}[acc])
        for i in range(4):
            assert values[i] == want[group + 8 * (i // 2), member * 2 + i % 2]


def test_a_partial_warp_is_reported() -> None:
    memory = Memory()
    x, y = memory.upload(np.zeros((32, 10), np.uint32)), memory.upload(np.empty((32, 4), np.uint32), "output")
    result = kernel("m16n8k16", "f32", "f16", 4, 2, 4).launch("k", 1, 20, [x, y], memory=memory, check_outputs=False)
    assert [r.kind for r in result.reports] == ["warp-divergence"]
