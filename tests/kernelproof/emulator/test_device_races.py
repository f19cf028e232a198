"""Proves that races on global memory are found in every part of a wide access."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof import emulator

# Thread 0 stores 16 bytes, and then thread ``other`` executes ``access``.
TEXT = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y) {{
  .reg .b32 %t, %v; .reg .b64 %q; .reg .pred %P, %Q;
  ld.param.u64 %q, [y];
  mov.u32 %t, %tid.x;
  setp.eq.u32 %P, %t, 0;
  setp.eq.u32 %Q, %t, {other};
  add.u32 %v, %t, 7;
  @%P st.global.v4.u32 [%q], {{%v, %v, %v, %v}};
  @%Q {access};
  ret;
}}
"""


@pytest.mark.parametrize("offset", [0, 4, 8, 12])
@pytest.mark.parametrize(
    ("access", "message"),
    [("st.global.u32 [%q+{}], %v", "write after write"), ("ld.global.u32 %v, [%q+{}]", "read after write")],
)
@pytest.mark.parametrize(("other", "kinds"), [(32, ["global-race"]), (0, [])])
def test_every_part_of_a_wide_store_races(access: str, message: str, offset: int, other: int, kinds: list[str]) -> None:
    """A thread stores 16 bytes. Then a thread of another warp, without a barrier, or the same thread stores 4 of
    them."""
    memory = emulator.Memory()
    y = memory.upload(np.empty(4, np.uint32), "output")
    text = TEXT.format(access=access.format(offset), other=other)
    result = emulator.load(text).launch("k", 1, 64, [y], memory=memory)
    assert [report.kind for report in result.reports] == kinds
    assert all(message in report.message for report in result.reports)


# Thread 0 of CTA 0 executes the first access (8 bytes at %p). Then thread 0 of CTA 1 executes the second.
TWO_CTAS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {{
  .reg .b32 %t, %c, %a, %b; .reg .b64 %p, %x; .reg .pred %P, %Q;
  ld.param.u64 %p, [p];
  mov.u32 %t, %tid.x;
  mov.u32 %c, %ctaid.x;
  setp.ne.u32 %P, %t, 0;
  @%P bra done;
  setp.ne.u32 %Q, %c, 0;
  @%Q bra second;
  {first}
  bra done;
second:
  {second}
done: ret;
}}
"""
# Atomics of one word and of two words, and a plain store of the word.
WORD, WORDS = "red.global.add.u32 [%p+4], 1;", "red.global.add.u64 [%p], 1;"
PLAIN = "st.global.u32 [%p+4], 5;"
# Strong accesses that overlap in a part. At least one of them is not a read-modify-write.
MIXED = [
    ("st.relaxed.gpu.global.u64 [%p], 5;", "atom.global.add.u32 %a, [%p+4], 1;"),
    (WORDS, "ld.relaxed.gpu.global.u32 %a, [%p+4];"),
    ("st.volatile.global.u32 [%p], 5;", "ld.volatile.global.u64 %x, [%p];"),
    (WORDS, "st.relaxed.gpu.global.v2.u32 [%p], {%a, %a};"),
]
# Atomics, and plain accesses of the same bytes.
WITHOUT_ORDER = [
    (PLAIN, WORD),
    (PLAIN, "atom.global.cas.b32 %a, [%p+4], 5, 1;"),
    (PLAIN, WORDS),
    ("ld.global.u32 %a, [%p+4]; st.global.u32 [%p+64], %a;", WORD),
]
# Accesses that need no order.
RIGHT = [
    (WORD, WORDS),  # read-modify-writes of any sizes are atomic for each other
    (WORD, "ld.relaxed.gpu.global.v2.u32 {%a, %b}, [%p];"),  # atomic for each element
    (WORD, "ld.volatile.global.u32 %a, [%p+4];"),
    (WORD, "st.relaxed.gpu.global.u64 [%p+8], 5;"),  # the next word
    ("st.relaxed.gpu.global.u16 [%p+4], 5;", WORD),  # narrow atomics are made of words
    ("ld.relaxed.gpu.global.u32 %a, [%p];", "ld.relaxed.gpu.global.u64 %x, [%p];"),
]


def races_of_two_ctas(first: str, second: str) -> list[str]:
    """The messages of races between two CTAs that each execute one of the texts."""
    memory = emulator.Memory()
    p = memory.upload(np.zeros(64, np.uint32), "inout")
    text = TWO_CTAS.format(first="mov.u32 %a, 3; " + first, second="mov.u32 %a, 3; " + second)
    result = emulator.load(text).launch("k", 2, 32, [p], memory=memory)
    assert {report.kind for report in result.reports} <= {"global-race"}
    return [report.message for report in result.reports]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("first", "second"), MIXED)
def test_strong_accesses_of_different_sizes_race(first: str, second: str, swapped: bool) -> None:
    (message,) = races_of_two_ctas(second, first) if swapped else races_of_two_ctas(first, second)
    assert message.endswith("both are strong, but of different sizes")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("first", "second"), WITHOUT_ORDER)
def test_atomics_race_with_plain_accesses_of_another_cta(first: str, second: str, swapped: bool) -> None:
    (message,) = races_of_two_ctas(second, first) if swapped else races_of_two_ctas(first, second)
    assert message.endswith("between")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("first", "second"), RIGHT)
def test_atomics_of_two_ctas_that_need_no_order(first: str, second: str, swapped: bool) -> None:
    assert (races_of_two_ctas(second, first) if swapped else races_of_two_ctas(first, second)) == []
