"""Draws PTX programs, so that tests can compare two ways to execute them.

They have integers, floats, halves, predicates, divergence, shuffles and shared memory. Each thread reads 32 bytes and
writes 88.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

THREADS, WORDS_IN, WORDS_OUT = 64, 8, 22  # the words that each thread reads and writes
FLOATS, HALVES = slice(8, 12), slice(20, 22)  # columns that may hold NaN, whose payload is not compared
# Words that are edges of a type or of a shift.
EDGES = np.array(
    [
        *(0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF),
        *(0x3F800000, 0x7F800000, 0x42280000, 0x3C003C00, 0xBC003800),  # as f32: 1, infinity, 42; as halves: 1 and -0.5
    ],
    np.uint32,
)
# Loads eight words into %r, and makes the other registers of them: f32 %f, 64-bit %d, predicates %p and pairs of halves
# %h. A drawn body changes these. %x0 is the thread's number, and %x4 the address of its word in shared memory.
HEAD = """.version {version}
.target {target}
.address_size 64
.visible .entry k(.param .u64 pa, .param .u64 pb)
{{
.reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %d<3>; .reg .pred %p<3>; .reg .b32 %h<2>; .reg .b32 %x<6>; .reg .b64 %a<3>;
.shared .align 16 .b8 buf[256];
ld.param.u64 %a0, [pa]; ld.param.u64 %a1, [pb]; mov.u32 %x0, %tid.x; mul.wide.u32 %a2, %x0, 32; add.s64 %a0, %a0, %a2;
mul.wide.u32 %a2, %x0, 88; add.s64 %a1, %a1, %a2;
ld.global.v4.b32 {{%r0,%r1,%r2,%r3}}, [%a0]; ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%a0+16];
mov.b32 %f0, %r0; mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r7; mov.b32 %h0, %r3; mov.b32 %h1, %r4;
mov.b64 %d0, {{%r0,%r3}}; mov.b64 %d1, {{%r4,%r5}}; mov.b64 %d2, {{%r6,%r1}};
setp.lt.s32 %p0, %r0, %r1; setp.ne.u32 %p1, %r2, %r3; setp.gt.u32 %p2, %r4, %r5;
mov.u32 %x4, buf; shl.b32 %x1, %x0, 2; add.s32 %x4, %x4, %x1;
"""
# Stores a thread's registers: the eight words, the floats, the 64-bit numbers, the predicates as bits of a word, its
# number, and the pairs of halves.
TAIL = """
st.global.v2.b32 [%a1], {%r0,%r1}; st.global.v2.b32 [%a1+8], {%r2,%r3};
st.global.v2.b32 [%a1+16], {%r4,%r5}; st.global.v2.b32 [%a1+24], {%r6,%r7};
st.global.v2.f32 [%a1+32], {%f0,%f1}; st.global.v2.f32 [%a1+40], {%f2,%f3};
st.global.b64 [%a1+48], %d0; st.global.b64 [%a1+56], %d1; st.global.b64 [%a1+64], %d2;
selp.b32 %x2, 1, 0, %p0; selp.b32 %x3, 2, 0, %p1; or.b32 %x2, %x2, %x3; selp.b32 %x3, 4, 0, %p2; or.b32 %x2, %x2, %x3;
st.global.v2.b32 [%a1+72], {%x2,%x0}; st.global.v2.b32 [%a1+80], {%h0,%h1}; ret;
}
"""
# Comparisons of integers.
ORDERS = ("lt", "le", "gt", "ge", "eq", "ne")


class Writer:
    """Draws the lines of a program's body from a seed.

    ``register`` and the properties return the name of a drawn register, by the type of its contents. ``integer``,
    ``comparison`` and ``float_instruction`` return a drawn instruction.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lines: list[str] = []
        self.labels = 0

    def register(self, file: str, count: int) -> str:
        """One of the registers %``file``0, %``file``1 and so on, of which there are ``count``."""
        return f"%{file}{self.draw.randrange(count)}"

    @property
    def word(self) -> str:
        """A 32-bit word."""
        return self.register("r", 8)

    @property
    def number(self) -> str:
        """An f32."""
        return self.register("f", 4)

    @property
    def wide(self) -> str:
        """A 64-bit integer."""
        return self.register("d", 3)

    @property
    def half(self) -> str:
        """A pair of halves."""
        return self.register("h", 2)

    @property
    def predicate(self) -> str:
        """A predicate."""
        return self.register("p", 3)

    @property
    def source(self) -> str:
        """A word or a literal."""
        literals = (0, 1, 2, 5, 31, 32, 255, 65535, 0x80000000, 0xFFFFFFFF, self.draw.randrange(1 << 32))
        return self.word if self.draw.random() < 0.7 else str(self.draw.choice(literals))

    def pick(self, *choices: str) -> str:
        """One of the choices."""
        return self.draw.choice(choices)

    def integer(self) -> str:
        """An instruction on integers."""
        w = self
        return w.pick(
            f"{w.pick('add', 'sub', 'mul.lo')}.s32 {w.word}, {w.word}, {w.source}",
            f"mad.lo.s32 {w.word}, {w.word}, {w.source}, {w.word}",
            f"{w.pick('and', 'or', 'xor')}.b32 {w.word}, {w.word}, {w.source}",
            f"not.b32 {w.word}, {w.word}",
            f"{w.pick('shl.b32', 'shr.u32', 'shr.s32')} {w.word}, {w.word}, {w.source}",
            f"lop3.b32 {w.word}, {w.word}, {w.word}, {w.word}, {w.draw.randrange(256)}",
            f"shf.{w.pick('l', 'r')}.{w.pick('wrap', 'clamp')}.b32 {w.word}, {w.word}, {w.word}, {w.source}",
            f"prmt.b32 {w.word}, {w.word}, {w.word}, {w.source}",
            f"{w.pick('min', 'max')}.{w.pick('u32', 's32')} {w.word}, {w.word}, {w.source}",
            f"{w.pick('abs.s32', 'neg.s32', 'popc.b32', 'brev.b32', 'clz.b32', 'bfind.u32')} {w.word}, {w.word}",
            f"mul.hi.{w.pick('u32', 's32')} {w.word}, {w.word}, {w.source}",
            f"mad.wide.{w.pick('u32', 's32')} {w.wide}, {w.word}, {w.word}, {w.wide}",
            f"{w.pick('add', 'sub', 'mul.lo')}.s64 {w.wide}, {w.wide}, {w.wide}",
            f"{w.pick('shl.b64', 'shr.u64', 'shr.s64')} {w.wide}, {w.wide}, {w.source}",
            f"mov.b64 {w.wide}, {{{w.word}, {w.word}}}",
            f"mov.b64 {{%r{w.draw.randrange(4)}, %r{4 + w.draw.randrange(4)}}}, {w.wide}",
        )

    def comparison(self) -> str:
        """A comparison, or an instruction on predicates."""
        w = self
        return w.pick(
            f"setp.{w.pick(*ORDERS)}.{w.pick('u32', 's32')} {w.predicate}, {w.word}, {w.source}",
            f"setp.{w.pick(*ORDERS)}.{w.pick('u64', 's64')} {w.predicate}, {w.wide}, {w.wide}",
            f"setp.{w.pick(*ORDERS, 'ltu', 'geu', 'neu', 'num', 'nan')}.f32 {w.predicate}, {w.number}, {w.number}",
            f"{w.pick('and', 'or', 'xor')}.pred {w.predicate}, {w.predicate}, {w.predicate}",
            f"selp.b32 {w.word}, {w.word}, {w.source}, {w.predicate}",
        )

    def float_instruction(self) -> str:
        """An instruction on floats or halves."""
        w = self
        rounding = w.pick("rn", "rz", "rm", "rp", "rn.ftz")
        return w.pick(
            f"{w.pick('add', 'sub', 'mul')}.{rounding}.f32 {w.number}, {w.number}, {w.number}",
            f"fma.{rounding}.f32 {w.number}, {w.number}, {w.number}, {w.number}",
            f"{w.pick('min', 'max')}.{w.pick('', 'ftz.')}f32 {w.number}, {w.number}, {w.number}",
            f"{w.pick('abs', 'neg')}.f32 {w.number}, {w.number}",
            f"cvt.rn.f32.{w.pick('s32', 'u32')} {w.number}, {w.word}",
            f"cvt.{w.pick('rzi', 'rni', 'rmi', 'rpi')}.{w.pick('s32', 'u32')}.f32 {w.word}, {w.number}",
            f"cvt.{w.pick('rzi', 'rni', 'rmi', 'rpi')}.f32.f32 {w.number}, {w.number}",
            f"mov.b32 {w.number}, {w.word}",
            f"{w.pick('add', 'mul')}.rn.f16x2 {w.half}, {w.half}, {w.half}",
            f"fma.rn.f16x2 {w.half}, {w.half}, {w.half}, {w.half}",
            f"cvt.rn.{w.pick('f16x2', 'bf16x2')}.f32 {w.half}, {w.number}, {w.number}",
        )

    def instruction(self) -> None:
        """Draws a line that may be executed by a part of a warp."""
        kind = self.draw.random()
        text = self.integer() if kind < 0.55 else self.comparison() if kind < 0.7 else self.float_instruction()
        guarded = self.draw.random() < 0.15 and "{" not in text
        guard = f"@{self.pick('', '!')}{self.predicate} " if guarded else ""
        self.lines.append(f"{guard}{text};")

    def branch(self) -> None:
        """Draws a branch over two to five instructions, which a part of a warp may take."""
        label = f"L{self.labels}"
        self.labels += 1
        self.lines.append(f"@{self.pick('', '!')}{self.predicate} bra {label};")
        for _ in range(self.draw.randrange(2, 6)):
            self.instruction()
        self.lines.append(f"{label}:")

    def exchange(self) -> None:
        """Draws a shuffle, or an exchange through shared memory between two barriers."""
        if self.draw.random() < 0.5:
            mode, bounds = self.pick("idx", "up", "down", "bfly"), self.pick("31", "0", "0x1c1f", "0x181f")
            target = f"{self.word}|{self.predicate}"
            self.lines.append(f"shfl.sync.{mode}.b32 {target}, {self.word}, {self.source}, {bounds}, -1;")
            return
        self.lines += [
            f"st.shared.b32 [%x4], {self.word};",
            "bar.sync 0;",
            f"xor.b32 %x5, %x4, {4 * self.draw.randrange(1, 32)};",
            f"ld.shared.b32 {self.word}, [%x5];",
            "bar.sync 0;",
        ]


def text(seed: int, target: str = "sm_80") -> str:
    """The PTX of the program that this seed draws."""
    writer = Writer(seed)
    for _ in range(writer.draw.randrange(10, 60)):
        kind = writer.draw.random()
        (writer.branch if kind < 0.06 else writer.exchange if kind < 0.16 else writer.instruction)()
    version = "8.8" if target.startswith("sm_1") else "8.0"
    return HEAD.format(target=target, version=version) + "\n".join(writer.lines) + TAIL


def operands(seed: int) -> NDArray[np.uint32]:
    """The words that the threads read, of shape (THREADS, WORDS_IN): drawn ones, small ones, and ``EDGES``."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, (THREADS, WORDS_IN), np.uint32)
    edge = rng.random(words.shape) < 0.5
    words[edge] = rng.choice(EDGES, int(edge.sum()))
    words[rng.random(words.shape) < 0.1] &= 63
    return words


def differs(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Where two results of shape (threads, WORDS_OUT) differ, as a mask. NaN with different payloads are equal."""
    out: NDArray[np.bool_] = a != b
    out[:, FLOATS] &= ~(np.isnan(a[:, FLOATS].view(np.float32)) & np.isnan(b[:, FLOATS].view(np.float32)))
    x, y = (np.ascontiguousarray(part[:, HALVES]).view(np.float16) for part in (a, b))
    unequal = (x.view(np.uint16) != y.view(np.uint16)) & ~(_is_nan(x) & _is_nan(y))
    out[:, HALVES] = unequal.reshape(len(a), 2, 2).any(axis=2)
    return out


def _is_nan(halves: NDArray[np.float16]) -> NDArray[np.bool_]:
    """A mask of the halves that are NaN as fp16, or as bf16 numbers with the same bits."""
    return np.isnan(halves) | (halves.view(np.uint16) & 0x7FFF > 0x7F80)
