"""Proves that every id of a finding is a registered rule, and that the rule's severity decides."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import RULES, Memory, Severity
from kernelproof.emulator.frontend.flow.dependence import memory_dependence
from kernelproof.emulator.frontend.flow.graph import build
from tests.kernelproof.emulator.hopper_ptx import run_body


def test_every_rule_is_used_and_registered(checkout: Path) -> None:
    rooms = [
        path
        for folder in ("emulator", "checking")
        for path in (checkout / "kernelproof" / folder).rglob("*.py")
        if path.name != "rules.py"
    ]
    mentioned = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)*)"', "".join(path.read_text() for path in rooms)))
    assert RULES.keys() <= mentioned
    assert {rule.severity for rule in RULES.values()} == set(Severity)
    with pytest.raises(KeyError):
        emulator.Report("no-such-rule", "what")


def test_a_phase_at_exit_is_lint() -> None:
    body = "mbarrier.init.shared::cta.b64 [%s], 2; bar.warp.sync -1; mbarrier.arrive.shared::cta.b64 _, [%s];"
    _, result = run_body(body, np.zeros(1), np.empty(0), block=1, check_outputs=False)
    (report,) = result.reports
    assert (report.kind, report.severity, report.is_error) == ("phase-at-exit", Severity.LINT, False)
    assert str(report).startswith("lint, phase-at-exit: the CTA exits in the middle of a phase")


# Every thread adds 1 by compare-and-swap, and gets the first value by a plain load.
LOOP = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y) {
  .reg .b32 %v, %n, %o, %w; .reg .b64 %q, %p; .reg .pred %P; .shared .b32 s; .local .b32 own;
  ld.param.u64 %q, [y];
  LOAD
again:
  add.u32 %n, %v, 1;
  atom.global.cas.b32 %o, [%q], %v, %n;
  setp.ne.u32 %P, %o, %v;
  mov.u32 %v, %o;
  @%P bra again;
  AFTER
  ret;
}
"""


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "kinds"),
    [
        ("ld.global.u32 %v, [%q];", {"plain-first-load"}),
        ("ld.relaxed.gpu.global.u32 %v, [%q];", set()),
        # The loop uses the same address in another register.
        ("cvta.to.global.u64 %p, %q; ld.global.u32 %v, [%p];", {"plain-first-load"}),
        ("add.s64 %p, %q, 0; ld.global.u32 %v, [%p];", {"global-race"}),
        # The value that races is another one than the swap checks.
        ("ld.global.u32 %v, [%q]; add.u32 %v, %v, 0;", {"global-race"}),
        # The value decides a branch around the loop, and is copied and changed without effect.
        ("ld.global.u32 %v, [%q]; setp.gt.u32 %P, %v, 999; @%P bra again; add.u32 %n, %v, 5;", {"plain-first-load"}),
        # The value is used elsewhere: stored, as an address, as a guard, under a branch, in local memory.
        ("ld.global.u32 %v, [%q]; st.shared.u32 [s], %v;", {"global-race"}),
        ("ld.global.u32 %v, [%q]; mad.wide.u32 %p, %v, 0, %q; st.global.u32 [%p+4], 1;", {"global-race"}),
        ("ld.global.u32 %v, [%q]; setp.gt.u32 %P, %v, 999; @%P st.global.u32 [%q+4], 1;", {"global-race"}),
        ("ld.global.u32 %v, [%q]; setp.gt.u32 %P, %v, 999; @%P bra again; st.global.u32 [%q+4], 1;", {"global-race"}),
        ("ld.global.u32 %v, [%q]; st.local.u32 [own], %v;", {"global-race"}),
        # After the loop the register holds the swap's result, or a value made from what the swap has checked, or
        # neither.
        ("ld.global.u32 %v, [%q]; | st.local.u32 [own], %v;", {"plain-first-load"}),
        ("ld.global.u32 %v, [%q]; | st.local.u32 [own], %n;", {"plain-first-load"}),
        ("ld.global.u32 %v, [%q]; sub.u32 %w, %v, 1; | st.local.u32 [own], %w;", {"global-race"}),
    ],
)
def test_the_first_load_of_a_loop_of_swaps_is_benign(load: str, kinds: set[str]) -> None:
    memory = Memory()
    y = memory.upload(np.zeros(2, np.uint32), "inout")
    options = emulator.Options(lanes=64)
    before, _, after = load.partition("|")
    text = LOOP.replace("LOAD", before).replace("AFTER", after)
    result = emulator.load(text).launch("k", 4, 64, [y], memory=memory, options=options)
    assert y.download()[0] == 256
    assert {report.kind for report in result.reports} == kinds
    assert all(report.is_error == (report.kind == "global-race") for report in result.reports)


# There are two counters. The first swap of each precedes the loops, which continue with its result.
TWO_COUNTERS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y) {
  .reg .b32 %v, %w, %n, %o, %u; .reg .b64 %q, %p; .reg .pred %P, %Q;
  ld.param.u64 %q, [y];
  add.s64 %p, %q, 64;
  ld.global.cg.u32 %v, [%q];
  ld.global.cg.u32 %w, [%p];
  add.u32 %n, %v, 1;
  atom.global.cas.b32 %o, [%q], %v, %n;
  setp.eq.u32 %P, %o, %v;
  add.u32 %n, %w, 1;
  atom.global.cas.b32 %u, [%p], %w, %n;
  setp.eq.u32 %Q, %u, %w;
  @%P bra second;
first:
  add.u32 %n, %o, 1;
  atom.global.cas.b32 %v, [%q], %o, %n;
  setp.ne.u32 %P, %v, %o;
  mov.u32 %o, %v;
  @%P bra first;
second:
  @%Q bra done;
again:
  add.u32 %n, %u, 1;
  atom.global.cas.b32 %w, [LAST], %u, %n;
  setp.ne.u32 %Q, %w, %u;
  mov.u32 %u, %w;
  @%Q bra again;
done: ret;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("last", "kinds"), [("%p", {"plain-first-load"}), ("%q", {"plain-first-load", "global-race"})])
def test_a_first_load_is_benign_though_its_first_swap_stands_before_the_loop(last: str, kinds: set[str]) -> None:
    memory = Memory()
    y = memory.upload(np.zeros(32, np.uint32), "inout")
    text = TWO_COUNTERS.replace("LAST", last)
    result = emulator.load(text).launch("k", 4, 64, [y], memory=memory, options=emulator.Options(lanes=64))
    assert y.download()[0] + y.download()[16] == 512
    assert {report.kind for report in result.reports} == kinds


# Lines are counted from the header's line. %v is loaded, and %t is the thread's number.
AFTER_A_LOAD = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y) { .reg .b32 %t, %v, %w; .reg .b64 %p, %q; .reg .pred %P; .shared .b32 s[64];
ld.param.u64 %p, [y]; mov.u32 %t, %tid.x; ld.global.u32 %v, [%p];
"""


@pytest.mark.parametrize(
    ("body", "dependent", "writes"),
    [
        ("st.global.u32 [%p], %v;", set(), False),  # a value that is only stored decides nothing
        ("mul.wide.u32 %q, %v, 4;\nadd.s64 %q, %q, %p;\nst.global.u32 [%q], %t;", {6, 7, 8}, True),
        ("mul.wide.u32 %q, %v, 4;\nadd.s64 %q, %q, %p;\nld.global.u32 %w, [%q];", {6, 7, 8}, False),
        ("setp.eq.u32 %P, %v, 0;\n@%P st.global.u32 [%p], %t;", {6, 7}, True),
        ("setp.eq.u32 %P, %t, 0;\n@%P st.global.u32 [%p], %t;", set(), False),
        (
            "setp.eq.u32 %P, %v, 0;\n@%P bra over;\nst.global.u32 [%p], %t;\nover: st.global.u32 [%p+4], %t;",
            {6, 8},
            True,
        ),
        ("setp.eq.u32 %P, %v, 0;\n@%P ret;\nst.global.u32 [%p], %t;", {6, 8}, True),
        # A register is written under such a branch, or a value passes through shared memory.
        (
            "mov.u64 %q, %p;\nsetp.eq.u32 %P, %v, 0;\n@%P bra over;\nmov.u64 %q, 0;\nover:\nst.global.u32 [%q], %t;",
            {7, 9, 11},
            True,
        ),
        (
            "st.shared.u32 [s], %t;\nld.shared.u32 %w, [s];\nmul.wide.u32 %q, %w, 4;\nst.global.u32 [%q], %t;",
            {8, 9},
            True,
        ),
        (
            "mov.u32 %w, 0;\nagain: add.u32 %w, %w, 1;\nsetp.lt.u32 %P, %w, %v;\n@%P bra again;\nbar.sync 0;",
            {7, 8},
            False,
        ),
    ],
)
def test_what_depends_on_loaded_values(body: str, dependent: set[int], writes: bool) -> None:
    module = emulator.load(f"{AFTER_A_LOAD}{body}\nret; }}\n").module
    dependence = memory_dependence(build(module, module.kernels["k"]).blocks)
    assert {line for line in dependence.lines if line < 6 + body.count("\n") + 1} == dependent
    assert dependence.writes == writes


# Each of 64 threads in two warps writes its own word, and reads a word of the other warp.
READ = "xor.b32 %u, %t, 32; mad.lo.u32 %u, %u, 4, %s; ld.shared.u32 %w, [%u];"
# By kind of race: instructions of both warps.
RACES = {
    "read after write": f"st.shared.u32 [%v], %t; {READ}",
    "write after read": f"st.shared.u32 [%v], %t; bar.sync 0; {READ} st.shared.u32 [%v], 5;",
    "read twice": f"st.shared.u32 [%v], %t; bar.sync 0; {READ} mov.u32 %n, %w; {READ} st.shared.u32 [%v], 5;",
    "copied": f"st.shared.u32 [%v], %t; bar.sync 0; {READ} cp.async.ca.shared.global [%v], [%p], 4; cp.async.wait_all;",
    "ldmatrix": "st.shared.u32 [%v], %t; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%w}, [%s];",
}
# By what is used of the racing reads: instructions.
USES = {
    "nothing": "mov.u32 %x0, %t;",
    "all": "mov.u32 %x0, %w;",
    "the first read": "mov.u32 %x0, %n;",
    "the larger": "max.f32 %x0, %w, 0f00000000;",
    "the smaller": "min.f32 %x0, %w, 0f00000000;",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("race", RACES)
def test_a_race_is_benign_if_no_value_of_its_reads_matters(race: str, use: str) -> None:
    body = f"""mov.u32 %n, 0; mad.lo.u32 %v, %t, 4, %s; {RACES[race]} {USES[use]}
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %x0;"""
    x = np.zeros(64, np.uint32)
    _, result = run_body(body, x, np.empty(64, np.uint32), block=64)
    (report,) = result.reports
    assert report.kind == "shared-race"
    matters = use not in ("nothing", "the first read") or (use == "the first read" and race == "read twice")
    assert report.is_error == matters
