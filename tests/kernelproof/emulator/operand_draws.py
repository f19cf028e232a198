"""Draws operands of arithmetic, and lists those at which it tends to go wrong. They are the same in every run.

Floats are integers with their bits. A triple has the operands a, b and c of one lane.
"""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

from tests.kernelproof.emulator.exact import FORMATS, SPARE, Number, bits_of, decode, encode, one, top
from tests.kernelproof.emulator.lane_arithmetic import M64, Triple

MAX_TRIPLES = 1024  # triples of one list
# Limits of types of 8 to 64 bits, and numbers near limits of shifts.
INTEGER_EDGES = [
    *(0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256),
    *(0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x80FF7F01),
    *(1 << 32, 0xFFFFFFFF00000000, M64 >> 1, 1 << 63, M64, M64 - 1),
]


def float_edges(kind: str) -> list[int]:
    """Edge cases with both signs: zero, the limits of the subnormal, normal and finite numbers, infinity, NaN with
    payloads, and 1 with its neighbours."""
    mantissa = FORMATS[kind][0]
    codes = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one(kind) - 1, one(kind), one(kind) + 1]
    codes += [one(kind) + (1 << mantissa - 1), top(kind) - 1, top(kind), top(kind) + 1, (1 << bits_of(kind) - 1) - 1]
    sign = 1 << bits_of(kind) - 1
    return [code | s for code in codes for s in (0, sign)]


def draw_bits(kind: str, rng: random.Random) -> int:
    """The bits of a number of any size, or of one near 1 with few bits, whose sums and products are often halfway
    between two numbers of its type."""
    mantissa = FORMATS[kind][0]
    sign = rng.getrandbits(1) << bits_of(kind) - 1
    if rng.random() < 0.3:
        return rng.getrandbits(bits_of(kind))
    code = one(kind) + (rng.randrange(-3, 4) << mantissa)
    for _ in range(rng.randrange(3)):
        code |= 1 << rng.randrange(mantissa)
    return code + rng.randrange(-1, 2) | sign


def floats(kind: str, seed: int = 0, fused: bool = False, count: int = 300) -> list[Triple]:
    """Triples of floats. ``fused``: also products at or near halfway between two floats, with a third operand that is
    tiny or cancels them."""
    rng = random.Random(f"{kind} {seed}")
    edges = float_edges(kind)
    out = [(a, b, edges[(i + j) % len(edges)]) for (i, a), (j, b) in product(enumerate(edges), enumerate(edges))]
    out += [(draw_bits(kind, rng), draw_bits(kind, rng), draw_bits(kind, rng)) for _ in range(count)]
    # a b + c: c is the product rounded, which the sum nearly cancels, or an edge, most of which are tiny or huge.
    for _ in range(120 if fused else 0):
        a, b = draw_bits(kind, rng), draw_bits(kind, rng)
        x, y = decode(a, kind), decode(b, kind)
        if x is None or y is None or x.magnitude is None or y.magnitude is None:
            continue
        near = encode(Number(x.negative == y.negative, x.magnitude * y.magnitude), kind)
        assert isinstance(near, int)
        out += [(a, b, near), (a, b, rng.choice(edges))]
    return out[:MAX_TRIPLES]


def pairs(kind: str, seed: int = 0, fused: bool = False) -> list[Triple]:
    """Triples of 32-bit words, each with two numbers of 16 bits."""
    low = floats(kind, seed, fused)
    order = list(range(len(low)))  # the triple whose numbers are the upper halves
    random.Random(seed).shuffle(order)
    return [tuple(x | y << 16 for x, y in zip(low[i], low[j], strict=True)) for i, j in enumerate(order)]  # type: ignore[misc]


def sources(src: str, targets: tuple[str, ...]) -> list[Triple]:
    """Floats of type ``src`` to convert: edges, numbers halfway between neighbours of each target type, and the floats
    next to these. Each triple has two of them, and 0."""
    rng = random.Random(src)
    raws = float_edges(src) + [draw_bits(src, rng) for _ in range(120)]
    for dst in targets:
        for code in float_edges(dst) + [rng.getrandbits(bits_of(dst)) for _ in range(40)]:
            low, high = (decode((code + i) << SPARE.get(dst, 0), dst) for i in (0, 1))
            if low is None or high is None or low.magnitude is None or high.magnitude is None:
                continue
            halfway = encode(Number(low.negative, (low.magnitude + high.magnitude) / 2), src)
            assert isinstance(halfway, int)
            raws += [halfway - 1, halfway, halfway + 1]
    # Halves of integers, which are halfway between integers, and their neighbours; then the limits of integer types.
    for value in (*range(0, 12), 127, 128, 255, 256, 32767, 32768, 65535, 65536):
        near = encode(Number(False, Fraction(value, 2)), src)
        assert isinstance(near, int)
        raws += [near, near + 1, max(near - 1, 0), near | 1 << bits_of(src) - 1]
    for power in (24, 31, 32, 53, 63, 64):
        near = encode(Number(False, Fraction(1 << power)), src)
        assert isinstance(near, int)
        raws += [near, near - 1, near | 1 << bits_of(src) - 1, (near | 1 << bits_of(src) - 1) - 1]
    step = max(1, -(-len(raws) // MAX_TRIPLES))  # of all numbers, evenly
    mask = (1 << bits_of(src)) - 1
    return [(raw & mask, raws[-1 - i] & mask, 0) for i, raw in enumerate(raws)][::step]


def integers(seed: int = 0, count: int = 250) -> list[Triple]:
    """Triples of 64-bit integers: pairs of edges, and numbers with few or many bits set."""
    rng = random.Random(seed)
    edges = INTEGER_EDGES

    def number() -> int:
        width = rng.choice((3, 6, 8, 16, 32, 64))
        return rng.getrandbits(width) << rng.choice((0, 0, 0, 8, 16)) & M64

    out = [(a, b, edges[(i * 7 + j) % len(edges)]) for (i, a), (j, b) in product(enumerate(edges), enumerate(edges))]
    rng.shuffle(out)
    return out[: MAX_TRIPLES - count] + [(number(), number(), number()) for _ in range(count)]
