"""Races on global memory in every part of a wide access."""

from __future__ import annotations

import numpy as np
import pytest

from cudal2gen import emulator

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
    """16 bytes of one thread, then 4 of them by a thread of another warp without a barrier, or by itself."""
    memory = emulator.Memory()
    y = memory.upload(np.empty(4, np.uint32), "output")
    text = TEXT.format(access=access.format(offset), other=other)
    result = emulator.load(text).launch("k", 1, 64, [y], memory=memory)
    assert [report.kind for report in result.reports] == kinds
    assert all(message in report.message for report in result.reports)
