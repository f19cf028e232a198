"""Runs statements of PTX on triples of numbers, one lane each, and compares the results with exact ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from kernelproof import emulator
from kernelproof.emulator import Memory
from tests.kernelproof.emulator.exact import Want, agrees

M32, M64 = (1 << 32) - 1, (1 << 64) - 1  # masks
Triple = tuple[int, int, int]  # the operands a, b and c of a lane, 64 bits each


def signed(x: int, bits: int) -> int:
    """The lower bits as a signed number."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


@dataclass(frozen=True)
class Case:
    """An instruction and its expected result.

    ``text`` computes from %a %b %c (64 bits), their lower halves %A %B %C, and their lower 16 bits %h %k %l. The result
    is in %d, %D, %m or %P, by ``width``. It may use %e %E %n %Q %R. ``want``: the result for raw 64-bit operands; an
    int may have more bits than the register.
    """

    text: str
    width: int
    want: Callable[[int, int, int], Want]


@dataclass(frozen=True)
class Group:
    """Cases with the same operands. ``kinds``: their findings. ``uniform``: whether the instructions have a form for
    operands that are the same in all lanes."""

    cases: Sequence[Case]
    triples: Sequence[Triple]
    kinds: Sequence[str] = ()
    uniform: bool = False


# By width: how a result gets into %o.
_OUT = {64: "mov.b64 %o, %d;", 32: "cvt.u64.u32 %o, %D;", 16: "cvt.u64.u16 %o, %m;", 1: "selp.b64 %o, 1, 0, %P;"}
# Load the operands %a %b %c: each lane its own triple from x, or all lanes the launch's parameters.
_OF_LANE = "mad.wide.u32 %p, %t, 24, %p; " + " ".join(f"ld.global.u64 %{r}, [%p+{8 * i}];" for i, r in enumerate("abc"))
_OF_LAUNCH = " ".join(f"ld.param.u64 %{r}, [{r}];" for r in "abc")


def text_of(cases: Sequence[Case], load: str = _OF_LANE) -> str:
    """The PTX of a kernel that computes all cases in each lane. ``load``: how a lane gets its operands."""
    stores = "\n".join(
        f"{case.text} {_OUT[case.width]} st.global.u64 [%q+{8 * i}], %o;" for i, case in enumerate(cases)
    )
    return f"""
.version 8.6
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 a, .param .u64 b, .param .u64 c) {{
  .reg .b32 %t, %A, %B, %C, %D, %E; .reg .b64 %a, %b, %c, %d, %e, %p, %q, %o;
  .reg .b16 %h, %k, %l, %m, %n; .reg .pred %P, %Q, %R;
  ld.param.u64 %p, [x];
  ld.param.u64 %q, [y];
  mov.u32 %t, %tid.x;
  mad.wide.u32 %q, %t, {8 * len(cases)}, %q;
  {load}
  cvt.u32.u64 %A, %a; cvt.u32.u64 %B, %b; cvt.u32.u64 %C, %c;
  cvt.u16.u64 %h, %a; cvt.u16.u64 %k, %b; cvt.u16.u64 %l, %c;
  {stores}
  ret;
}}
"""


@cache
def _program(text: str) -> emulator.Program:
    """The program of a PTX text, loaded once."""
    return emulator.load(text)


def execute(
    cases: Sequence[Case], triples: Sequence[Triple], shared: bool = False
) -> tuple[list[list[int]], list[str]]:
    """The results, a row for each triple with a column for each case, and the kinds of findings. ``shared``: whether
    each triple has a launch of its own, with the same operands in all lanes."""
    program = _program(text_of(cases, _OF_LAUNCH if shared else _OF_LANE))
    rows, kinds = [], set()
    for launched in [[triple] for triple in triples] if shared else [list(triples)]:
        memory = Memory()
        x = memory.upload(np.array(launched, np.uint64))
        y = memory.upload(np.empty((len(launched), len(cases)), np.uint64), "output")
        result = program.launch("k", 1, len(launched), [x, y, *launched[0]], memory=memory)
        kinds |= {report.kind for report in result.reports}
        rows += y.download().tolist()
    return rows, sorted(kinds)


def mismatches(group: Group, triples: Sequence[Triple], shared: bool = False) -> list[str]:
    """The cases of a group with wrong results, each with the first operands for which it is wrong."""
    rows, kinds = execute(group.cases, triples, shared)
    out = [] if kinds == sorted(group.kinds) else [f"findings: {kinds}"]
    for i, case in enumerate(group.cases):
        for triple, row in zip(triples, rows, strict=True):
            want = case.want(*triple)
            if isinstance(want, int):
                want &= (1 << case.width) - 1
            if not agrees(row[i], want):
                operands = " ".join(f"{x:x}" for x in triple)
                wanted = f"{want:x}" if isinstance(want, int) else str(want)
                out.append(f"{case.text} of {operands}: {row[i]:x}, not {wanted}")
                break
    return out
