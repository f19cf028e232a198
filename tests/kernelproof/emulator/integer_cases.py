"""Cases of integer instructions, with the results that the PTX ISA defines, computed by Python's integers."""

from __future__ import annotations

from collections.abc import Callable

from tests.kernelproof.emulator.lane_arithmetic import M32, Case, Group, signed
from tests.kernelproof.emulator.operand_draws import integers

# From the three operands: the expected bits of the result.
Function = Callable[[int, int, int], int]
# By width in bits: the registers of the result and of three operands, and one for a value between.
REGISTERS = {16: "%m, %h, %k, %l", 32: "%D, %A, %B, %C", 64: "%d, %a, %b, %c"}
SCRATCH = {16: "%n", 32: "%E", 64: "%e"}


def number(x: int, kind: str) -> int:
    """The lower bits of x as a number of an integer type."""
    bits = int(kind[1:])
    return signed(x, bits) if kind[0] == "s" else x & ((1 << bits) - 1)


def case(opcode: str, kind: str, count: int, function: Callable[..., int]) -> Case:
    """An instruction on ``count`` operands of one type, as a function of their numbers."""
    bits = int(kind[1:])
    names = ", ".join(REGISTERS[bits].split(", ")[: 1 + count])
    return Case(
        f"{opcode}.{kind} {names};", bits, lambda a, b, c: function(*(number(x, kind) for x in (a, b, c)[:count]))
    )


def _clamp(x: int, kind: str) -> int:
    """The number nearest to x in an integer type."""
    bits = int(kind[1:])
    low = -(1 << bits - 1) if kind[0] == "s" else 0
    return max(low, min(low + (1 << bits) - 1, x))


# --- sums and products


def _sums(kind: str) -> list[Case]:
    """Sums, products and extrema of an integer type, also with immediate operands."""
    bits = int(kind[1:])
    d, a, b, c = REGISTERS[bits].split(", ")
    out = [
        case("add", kind, 2, lambda a, b: a + b),
        case("sub", kind, 2, lambda a, b: a - b),
        case("mul.lo", kind, 2, lambda a, b: a * b),
        case("mul.hi", kind, 2, lambda a, b: a * b >> bits),
        case("mad.lo", kind, 3, lambda a, b, c: a * b + c),
        case("mad.hi", kind, 3, lambda a, b, c: (a * b >> bits) + c),
        case("min", kind, 2, min),
        case("max", kind, 2, max),
        Case(f"add.{kind} {d}, {a}, -5;", bits, lambda a, b, c: a - 5),
        Case(f"sub.{kind} {d}, 7, {a};", bits, lambda a, b, c: 7 - a),
        Case(f"mad.lo.{kind} {d}, {a}, 3, {c};", bits, lambda a, b, c: a * 3 + c),
        Case(f"max.{kind} {d}, {a}, 77;", bits, lambda a, b, c: max(number(a, kind), 77)),
    ]
    if kind[0] == "s":
        out += [case("abs", kind, 1, abs), case("neg", kind, 1, lambda a: -a)]
    if bits < 64:
        wide, third = ("%D", "%C") if bits == 16 else ("%d", "%c")
        out += [
            Case(f"mul.wide.{kind} {wide}, {a}, {b};", 2 * bits, lambda a, b, c: number(a, kind) * number(b, kind)),
            Case(f"mul.wide.{kind} {wide}, {a}, -3;", 2 * bits,
                 lambda a, b, c: number(a, kind) * number(-3, kind)),
            Case(f"mad.wide.{kind} {wide}, {a}, {b}, {third};", 2 * bits,
                 lambda a, b, c: number(a, kind) * number(b, kind) + c),
        ]  # fmt: skip
    return out


def _bitwise(bits: int) -> list[Case]:
    """Bitwise operations and shifts. Shifts by more than the width give zero or the sign."""
    d, a, b, c = REGISTERS[bits].split(", ")
    n = SCRATCH[bits]
    mask = (1 << bits) - 1
    kind = f"b{bits}"
    return [
        case("and", kind, 2, lambda a, b: a & b),
        case("or", kind, 2, lambda a, b: a | b),
        case("xor", kind, 2, lambda a, b: a ^ b),
        case("not", kind, 1, lambda a: ~a),
        case("cnot", kind, 1, lambda a: int(a == 0)),
        Case(f"or.{kind} {d}, {a}, 0x55;", bits, lambda a, b, c: a | 0x55),
        Case(f"shl.{kind} {d}, {a}, %B;", bits, lambda a, b, c: a << min(b & M32, bits)),
        Case(f"shr.u{bits} {d}, {a}, %B;", bits, lambda a, b, c: (a & mask) >> min(b & M32, bits)),
        Case(f"shr.s{bits} {d}, {a}, %B;", bits, lambda a, b, c: signed(a, bits) >> min(b & M32, bits)),
        *(Case(f"shl.{kind} {d}, {a}, {n};", bits, lambda a, b, c, n=n: a << n) for n in (13, bits, 99)),
        *(Case(f"shr.s{bits} {d}, {a}, {n};", bits, lambda a, b, c, n=n: signed(a, bits) >> n) for n in (9, bits, 99)),
        *(Case(f"shr.u{bits} {d}, {a}, {n};", bits, lambda a, b, c, n=n: (a & mask) >> n) for n in (9, bits, 99)),
        Case(f"setp.lt.s{bits} %P, {a}, {b}; selp.{kind} {d}, {a}, {b}, %P;", bits,
             lambda a, b, c: min(signed(a, bits), signed(b, bits))),
        Case(f"mov.{kind} {n}, {a}; setp.lt.s{bits} %P, {a}, {b}; @%P mov.{kind} {n}, {c}; mov.{kind} {d}, {n};", bits,
             lambda a, b, c: c if signed(a, bits) < signed(b, bits) else a),
        Case(f"slct.{kind}.s32 {d}, {a}, {b}, %C;", bits, lambda a, b, c: a if signed(c, 32) >= 0 else b),
        *(Case(f"sad.{s}{bits} {d}, {a}, {b}, {c};", bits,
               lambda a, b, c, s=s: abs(number(a, f"{s}{bits}") - number(b, f"{s}{bits}")) + c) for s in "us"),
    ]  # fmt: skip


def _quotients(kind: str, by_zero: bool) -> list[Case]:
    """Quotients and remainders of an integer type."""

    def divide(a: int, b: int, rest: bool) -> int:
        if b == 0:
            # The results of today's hardware. The ISA does not define them, and a finding says so.
            return a if rest else -1
        q = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return a - q * b if rest else q

    out = [
        case("div", kind, 2, lambda a, b: divide(a, b, False)),
        case("rem", kind, 2, lambda a, b: divide(a, b, True)),
    ]
    if by_zero:
        return out
    bits = int(kind[1:])
    d, a = REGISTERS[bits].split(", ")[:2]
    return [
        *(Case(f"{name}.{kind} {d}, {a}, {n};", bits,
               lambda a, b, c, n=n, name=name: divide(number(a, kind), number(n, kind), name == "rem"))
          for name in ("div", "rem") for n in (7, -3, 1)),
    ]  # fmt: skip


# --- bits


def _lop3(table: int) -> Function:
    """Any function of three bits, by its table."""

    def f(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    return f


# The bytes that prmt's modes select, the lowest first, for each value of the selector's two lower bits.
_CHOICES = {
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


def _prmt(mode: str) -> Function:
    """Selects four bytes of two words, with or without the copies of sign bits."""

    def f(a: int, b: int, c: int) -> int:
        pool, out = (b & M32) << 32 | a & M32, 0
        for i in range(4):
            s = _CHOICES[mode][c & 3][i] if mode else c >> 4 * i & 15
            byte = pool >> 8 * (s & 7) & 255
            out |= (byte if not s & 8 else 255 if byte & 128 else 0) << 8 * i
        return out

    return f


def _bfe(kind: str) -> Function:
    """Extracts a bit field; bits beyond the operand are its sign or zero."""
    bits = int(kind[1:])

    def f(a: int, b: int, c: int) -> int:
        pos, size = b & 255, c & 255
        fill = a >> min(pos + size - 1, bits - 1) & 1 if kind[0] == "s" and size else 0
        return sum((a >> (pos + i) & 1 if i < size and pos + i < bits else fill) << i for i in range(bits))

    return f


def _bfi(bits: int) -> Function:
    """Inserts a bit field."""

    def f(a: int, b: int, c: int) -> int:
        pos, size, out = c & 255, c >> 8 & 255, b & ((1 << bits) - 1)
        for i in range(size):
            if pos + i < bits:
                out = out & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
        return out

    return f


def _funnel(left: bool, wrap: bool) -> Function:
    """Shifts two words and keeps one."""

    def f(a: int, b: int, c: int) -> int:
        n = c & 31 if wrap else min(c & M32, 32)
        pair = (b & M32) << 32 | a & M32
        return (pair << n) >> 32 if left else pair >> n

    return f


def _bfind(kind: str, amount: bool) -> Function:
    """The place of the highest bit that differs from the sign, or its distance from the top."""

    def f(a: int, b: int, c: int) -> int:
        x = number(a, kind)
        at = (~x if x < 0 else x).bit_length() - 1
        return int(kind[1:]) - 1 - at if amount and at >= 0 else at

    return f


def _bmsk(clamp: bool) -> Function:
    """A mask of b bits from bit a on."""

    def f(a: int, b: int, c: int) -> int:
        a, b = (a & M32, b & M32) if clamp else (a & 31, b & 31)
        return sum(1 << i for i in range(32) if a <= i < a + b)

    return f


def _szext(kind: str, clamp: bool) -> Function:
    """Extends a field of b bits by its sign or by zeros."""

    def f(a: int, b: int, c: int) -> int:
        n = min(b & M32, 32) if clamp else b & 31
        return number(a, f"{kind[0]}{n}") if n else 0

    return f


def _fns(a: int, b: int, c: int) -> int:
    """The place of the n-th set bit, counted up or down from a start."""
    base, offset = b & 31, signed(c, 32)
    if offset == 0:
        return base if a >> base & 1 else M32
    order = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [i for i in order if a >> i & 1]
    return found[abs(offset) - 1] if abs(offset) <= len(found) else M32


def _fields(bits: int) -> list[Case]:
    """Operations on bits and bit fields of a width."""
    d, a, b = REGISTERS[bits].split(", ")[:3]
    mask = (1 << bits) - 1
    return [
        Case(f"popc.b{bits} %D, {a};", 32, lambda a, b, c: (a & mask).bit_count()),
        Case(f"clz.b{bits} %D, {a};", 32, lambda a, b, c: bits - (a & mask).bit_length()),
        Case(f"brev.b{bits} {d}, {a};", bits, lambda a, b, c: int(f"{a & mask:0{bits}b}"[::-1], 2)),
        *(Case(f"bfind{how}.{s}{bits} %D, {a};", 32, _bfind(f"{s}{bits}", bool(how)))
          for s in "us" for how in ("", ".shiftamt")),
        *(Case(f"bfe.{s}{bits} {d}, {a}, %B, %C;", bits, _bfe(f"{s}{bits}")) for s in "us"),
        Case(f"shr.u32 %E, %C, 8; bfi.b{bits} {d}, {a}, {b}, %C, %E;", bits, _bfi(bits)),
    ]  # fmt: skip


def _words() -> list[Case]:
    """Instructions that exist for words of 32 bits only."""
    return [
        *(Case(f"lop3.b32 %D, %A, %B, %C, {table};", 32, _lop3(table)) for table in (0, 0x2D, 0x96, 0xE8, 0xFF)),
        *(Case(f"prmt.b32{'.' if mode else ''}{mode} %D, %A, %B, %C;", 32, _prmt(mode)) for mode in ("", *_CHOICES)),
        Case("prmt.b32 %D, %A, %B, 0x7531;", 32, lambda a, b, c: _prmt("")(a, b, 0x7531)),
        *(Case(f"shf.{side}.{mode}.b32 %D, %A, %B, %C;", 32, _funnel(side == "l", mode == "wrap"))
          for side in "lr" for mode in ("wrap", "clamp")),
        *(Case(f"bmsk.{mode}.b32 %D, %A, %B;", 32, _bmsk(mode == "clamp")) for mode in ("clamp", "wrap")),
        *(Case(f"szext.{mode}.{kind} %D, %A, %B;", 32, _szext(kind, mode == "clamp"))
          for mode in ("clamp", "wrap") for kind in ("u32", "s32")),
        Case("and.b32 %E, %B, 31; fns.b32 %D, %A, %E, %C;", 32, _fns),
        Case("and.b32 %E, %B, 31; and.b32 %D, %C, 7; sub.s32 %D, %D, 4; fns.b32 %D, %A, %E, %D;", 32,
             lambda a, b, c: _fns(a, b, (c & 7) - 4)),
        *(Case(f"dp4a.{s}32.{t}32 %D, %A, %B, %C;", 32, _dp4a(s, t)) for s in "us" for t in "us"),
        *(Case(f"dp2a.{half}.{s}32.{t}32 %D, %A, %B, %C;", 32, _dp2a(s, t, half)) for s in "us" for t in "us"
          for half in ("lo", "hi")),
        Case("add.sat.s32 %D, %A, %B;", 32, lambda a, b, c: _clamp(signed(a, 32) + signed(b, 32), "s32")),
        Case("sub.sat.s32 %D, %A, %B;", 32, lambda a, b, c: _clamp(signed(a, 32) - signed(b, 32), "s32")),
        Case("mad.hi.sat.s32 %D, %A, %B, %C;", 32,
             lambda a, b, c: _clamp((signed(a, 32) * signed(b, 32) >> 32) + signed(c, 32), "s32")),
        Case("min.relu.s32 %D, %A, %B;", 32, lambda a, b, c: max(0, min(signed(a, 32), signed(b, 32)))),
        Case("max.relu.s32 %D, %A, %B;", 32, lambda a, b, c: max(0, signed(a, 32), signed(b, 32))),
        *(Case(f"mul24.{half}.{s}32 %D, %A, %B;", 32, lambda a, b, c, s=s, half=half: _mul24(a, b, s, half))
          for half in ("lo", "hi") for s in "us"),
        *(Case(f"mad24.{half}.{s}32 %D, %A, %B, %C;", 32, lambda a, b, c, s=s, half=half: _mul24(a, b, s, half) + c)
          for half in ("lo", "hi") for s in "us"),
        Case("mad24.hi.sat.s32 %D, %A, %B, %C;", 32,
             lambda a, b, c: _clamp(signed(_mul24(a, b, "s", "hi"), 32) + signed(c, 32), "s32")),
    ]  # fmt: skip


def _dp4a(s: str, t: str) -> Function:
    """The sum of four products of bytes and a word."""
    return lambda a, b, c: c + sum(number(a >> 8 * i, f"{s}8") * number(b >> 8 * i, f"{t}8") for i in range(4))


def _dp2a(s: str, t: str, half: str) -> Function:
    """The sum of two products of 16-bit numbers with bytes and a word."""
    first = 2 if half == "hi" else 0
    return lambda a, b, c: (
        c + sum(number(a >> 16 * i, f"{s}16") * number(b >> 8 * (first + i), f"{t}8") for i in range(2))
    )


def _mul24(a: int, b: int, s: str, half: str) -> int:
    """The low or high 32 bits of a product of 24-bit numbers."""
    wide = number(a, f"{s}24") * number(b, f"{s}24")
    return wide >> 16 if half == "hi" else wide


# --- carries, moves, comparisons, conversions


def _carries(bits: int) -> list[Case]:
    """Chains of additions and subtractions that pass the carry."""
    d, a, b, c = REGISTERS[bits].split(", ")
    u, n, mask = f"u{bits}", SCRATCH[bits], (1 << bits) - 1

    def sum3(a: int, b: int, c: int) -> int:
        return a + ((c & mask) + ((a & mask) + (b & mask) >> bits) >> bits)

    return [
        Case(f"add.cc.{u} {n}, {a}, {b}; addc.{u} {d}, {c}, 0;", bits,
             lambda a, b, c: c + ((a & mask) + (b & mask) >> bits)),
        Case(f"sub.cc.{u} {n}, {a}, {b}; subc.{u} {d}, {c}, 0;", bits, lambda a, b, c: c - (a & mask < b & mask)),
        Case(f"add.cc.{u} {n}, {a}, {b}; addc.cc.{u} {n}, {c}, 0; addc.{u} {d}, {a}, 0;", bits, sum3),
        Case(f"sub.cc.{u} {n}, {a}, {b}; subc.cc.{u} {n}, {c}, 0; subc.{u} {d}, {a}, 0;", bits,
             lambda a, b, c: a - (c & mask < (a & mask < b & mask))),
        Case(f"sub.cc.{u} {n}, {a}, {b}; subc.{u} {d}, {c}, {b};", bits,
             lambda a, b, c: c - b - (a & mask < b & mask)),
        Case(f"mad.lo.cc.{u} {n}, {a}, {b}, {c}; madc.hi.{u} {d}, {a}, {b}, {c};", bits,
             lambda a, b, c: c + ((a & mask) * (b & mask) >> bits) + (((a * b) & mask) + (c & mask) >> bits)),
        Case(f"mad.hi.cc.s{bits} {n}, {a}, {b}, {c}; addc.{u} {d}, 0, 0;", bits,
             lambda a, b, c: ((signed(a, bits) * signed(b, bits) >> bits) & mask) + (c & mask) >> bits),
        Case(f"add.cc.{u} {n}, {a}, {b}; madc.lo.cc.{u} {n}, {a}, {b}, {c}; addc.{u} {d}, 0, 0;", bits,
             lambda a, b, c: (a * b & mask) + (c & mask) + ((a & mask) + (b & mask) >> bits) >> bits),
    ]  # fmt: skip


_ORDERS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
}  # fmt: skip
# Comparisons of unsigned numbers, and the ones that compute the same.
_ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparisons(kind: str) -> list[Case]:
    """All comparisons of an integer type, also combined with another predicate."""
    bits = int(kind[1:])
    a, b, c = REGISTERS[bits].split(", ")[1:]
    tests = ("eq", "ne") if kind[0] == "b" else (*_ORDERS, *(_ALIASES if kind[0] == "u" else ()))
    out = []
    for test in tests:
        order = _ORDERS[_ALIASES.get(test, test)]

        def holds(a: int, b: int, _: int, order: Callable[[int, int], bool] = order) -> bool:
            return order(number(a, kind), number(b, kind))

        out += [
            Case(f"setp.{test}.{kind} %P, {a}, {b};", 1, holds),
            Case(f"setp.{test}.{kind} %P, {a}, 33;", 1, lambda a, b, c, holds=holds: holds(a, 33, 0)),
            Case(f"setp.eq.b{bits} %Q, {b}, {c}; setp.{test}.and.{kind} %P|%R, {a}, {b}, !%Q;", 1,
                 lambda a, b, c, holds=holds: holds(a, b, c) and (b - c) % (1 << bits) != 0),
            Case(f"setp.eq.b{bits} %Q, {b}, {c}; setp.{test}.xor.{kind} %R|%P, {a}, {b}, %Q;", 1,
                 lambda a, b, c, holds=holds: (not holds(a, b, c)) ^ ((b - c) % (1 << bits) == 0)),
            Case(f"set.{test}.u32.{kind} %D, {a}, {b};", 32, lambda a, b, c, holds=holds: -holds(a, b, c)),
            Case(f"setp.eq.b{bits} %Q, {b}, {c}; set.{test}.or.f32.{kind} %D, {a}, {b}, %Q;", 32,
                 lambda a, b, c, holds=holds: 0x3F800000 * (holds(a, b, c) or (b - c) % (1 << bits) == 0)),
        ]  # fmt: skip
    return out


def _moves() -> list[Case]:
    """Moves that pack and unpack registers and combine predicates."""
    return [
        Case("mov.b64 {%D, %E}, %a; sub.u32 %D, %E, %D;", 32, lambda a, b, c: (a >> 32) - a),
        Case("mov.b64 %d, {%B, %A};", 64, lambda a, b, c: (a & M32) << 32 | b & M32),
        Case("mov.b32 %D, {%h, %k};", 32, lambda a, b, c: (b & 0xFFFF) << 16 | a & 0xFFFF),
        Case("mov.b32 {%m, %n}, %A; xor.b16 %m, %m, %n;", 16, lambda a, b, c: a ^ a >> 16),
        Case("setp.lt.s32 %P, %A, %B; setp.gt.s32 %Q, %B, %C; and.pred %P, %P, %Q; not.pred %P, %P;", 1,
             lambda a, b, c: not (signed(a, 32) < signed(b, 32) > signed(c, 32))),
    ]  # fmt: skip


# --- parts of words


def _pairs() -> list[Case]:
    """Operations on pairs of 16-bit integers."""
    out = []
    for kind in ("u16", "s16"):
        for name, function in (("add", lambda x, y: x + y), ("min", min), ("max", max)):
            for relu in ("", ".relu") if kind == "s16" and name != "add" else ("",):

                def want(
                    a: int, b: int, c: int, f: Callable[[int, int], int] = function, kind: str = kind, relu: str = relu
                ) -> int:
                    halves = [f(number(a >> i, kind), number(b >> i, kind)) for i in (0, 16)]
                    halves = [max(0, x) for x in halves] if relu else halves
                    return sum((x & 0xFFFF) << 16 * i for i, x in enumerate(halves))

                out.append(Case(f"{name}{relu}.{kind}x2 %D, %A, %B;", 32, want))
                if relu:
                    out.append(Case(f"{name}.{kind}x2{relu} %D, %A, %B;", 32, want))
    return out


_PARTS: dict[str, Callable[[int, int], int]] = {
    "vadd": lambda x, y: x + y,
    "vsub": lambda x, y: x - y,
    "vavrg": lambda x, y: (x + y + (x + y >= 0)) >> 1,
    "vabsdiff": lambda x, y: abs(x - y),
    "vmin": min,
    "vmax": max,
}


def _video(count: int) -> list[Case]:
    """SIMD operations on the bytes or halves of a word."""
    bits = 32 // count

    def want(f: Callable[[int, int], int], signs: str, how: str) -> Function:
        def result(a: int, b: int, c: int) -> int:
            parts = [
                f(number(a >> i, f"{signs[1]}{bits}"), number(b >> i, f"{signs[2]}{bits}")) for i in range(0, 32, bits)
            ]
            if how == ".add":
                return c + sum(parts)
            if how == ".sat":
                parts = [_clamp(x, f"{signs[0]}{bits}") for x in parts]
            return sum((x & ((1 << bits) - 1)) << bits * i for i, x in enumerate(parts))

        return result

    out = []
    for signs in ("uuu", "sss", "suu", "uss", "sus"):
        types = ".".join(f"{s}32" for s in signs)
        for name, f in _PARTS.items():
            for how in ("", ".sat", ".add"):
                out.append(Case(f"{name}{count}.{types}{how} %D, %A, %B, %C;", 32, want(f, signs, how)))
        for test, order in _ORDERS.items():
            for how in ("", ".add"):
                name = f"vset{count}.{types[4:]}.{test}{how}"
                out.append(Case(f"{name} %D, %A, %B, %C;", 32, want(order, signs, how)))
    return out


# Integer types of arithmetic, and operands whose divisor is not 0 in any width.
_TYPES = [f"{s}{bits}" for bits in (16, 32, 64) for s in "us"]
_NONZERO = [t for t in integers(2) if all(t[1] % (1 << bits) for bits in (16, 32, 64))]
# The cases by name of their group, each with the operands that they are executed on.
GROUPS = {
    **{f"{kind} sums": Group(_sums(kind), integers(1), uniform=True) for kind in _TYPES},
    **{f"b{bits} logic": Group(_bitwise(bits), integers(2), uniform=True) for bits in (16, 32, 64)},
    **{f"{kind} quotients": Group(_quotients(kind, False), integers(3), uniform=True) for kind in _TYPES},
    **{f"{kind} variable quotients": Group(_quotients(kind, True), _NONZERO, uniform=True) for kind in _TYPES},
    **{
        f"{kind} quotients by zero": Group(
            _quotients(kind, True), [(a, 0, c) for a, _, c in integers(4)[::9]], ("division-by-zero",), uniform=True
        )
        for kind in _TYPES
    },
    **{f"b{bits} fields": Group(_fields(bits), integers(5), uniform=True) for bits in (32, 64)},
    "words": Group(_words(), integers(6), uniform=True),
    **{f"u{bits} carries": Group(_carries(bits), integers(7), uniform=True) for bits in (32, 64)},
    **{
        f"{kind} comparisons": Group(_comparisons(kind), integers(8), uniform=True)
        for kind in (*_TYPES, "b16", "b32", "b64")
    },
    "moves": Group(_moves(), integers(9), uniform=True),
    "pairs": Group(_pairs(), integers(10), uniform=True),
    **{f"video {count}": Group(_video(count), integers(11), uniform=True) for count in (2, 4)},
}
