"""The rules behind findings: every id is registered, and how severe it is decides."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cudal2gen import emulator
from cudal2gen.emulator import RULES, Memory, Severity
from tests.emulator.test_hopper_instructions import run


def test_every_rule_is_used_and_registered(checkout: Path) -> None:
    rooms = [path for path in (checkout / "cudal2gen" / "emulator").rglob("*.py") if path.name != "rules.py"]
    mentioned = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', "".join(path.read_text() for path in rooms)))
    assert RULES.keys() <= mentioned
    assert {rule.severity for rule in RULES.values()} == set(Severity)
    with pytest.raises(KeyError):
        emulator.Report("no-such-rule", "what")


def test_a_phase_at_exit_is_lint() -> None:
    body = "mbarrier.init.shared::cta.b64 [%s], 2; bar.warp.sync -1; mbarrier.arrive.shared::cta.b64 _, [%s];"
    _, result = run(body, np.zeros(1), np.empty(0), block=1, check_outputs=False)
    (report,) = result.reports
    assert (report.kind, report.severity, report.is_error) == ("phase-at-exit", Severity.LINT, False)
    assert str(report).startswith("lint, phase-at-exit: the CTA exits in the middle of a phase")


# Every thread adds 1 by compare and swap; the first value is a plain load.
LOOP = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y) {
  .reg .b32 %v, %n, %o; .reg .b64 %q; .reg .pred %P;
  ld.param.u64 %q, [y];
  LOAD
again:
  add.u32 %n, %v, 1;
  atom.global.cas.b32 %o, [%q], %v, %n;
  setp.ne.u32 %P, %o, %v;
  mov.u32 %v, %o;
  @%P bra again;
  ret;
}
"""


@pytest.mark.parametrize(
    ("load", "kinds"),
    [
        ("ld.global.u32 %v, [%q];", {"plain-first-load"}),
        ("ld.relaxed.gpu.global.u32 %v, [%q];", set()),
        # Not checked by the swap: it is another value that races.
        ("ld.global.u32 %v, [%q]; add.u32 %v, %v, 0;", {"global-race"}),
    ],
)
def test_the_first_load_of_a_loop_of_swaps_is_benign(load: str, kinds: set[str]) -> None:
    memory = Memory()
    y = memory.upload(np.zeros(1, np.uint32), "inout")
    options = emulator.Options(lanes=64)
    result = emulator.load(LOOP.replace("LOAD", load)).launch("k", 4, 64, [y], memory=memory, options=options)
    assert y.download() == 256
    assert {report.kind for report in result.reports} == kinds
    assert all(report.is_error == (report.kind == "global-race") for report in result.reports)
