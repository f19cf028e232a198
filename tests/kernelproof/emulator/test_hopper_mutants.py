"""Proves that mutants of asynchronous code in TMA and wgmma kernels are noticed, or are known to change nothing."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import product

import pytest

from kernelproof.emulator import EmulatorError, Mutant, Options, PtxError, Severity, mutants
from tests.draws import THOROUGH, draw_part_by_key
from tests.kernelproof.emulator.hopper import gemm, load, text

# Sizes m, n, k, each with the number of launched clusters. They have fewer and more k-tiles than stages, several tiles
# per CTA, and tiles that exceed the matrix.
PROBLEMS = [((256, 256, 448), 1), ((136, 136, 256), 0)]
# Names of instructions that are new with Hopper, or that order its asynchronous copies.
ASYNCHRONOUS = re.compile(r"narrow|mbarrier|wgmma|bulk|cluster|fence|setmaxnreg|griddep|bar\.|mapa")


@cache
def text_of_kernel(name: str, which: int) -> str:
    """The PTX of kernel number ``which`` of the file ``name``, counted from 0, without the file's other kernels."""
    whole = text(name)
    at = [m.start() for m in re.finditer(r"(?:\.visible\s+)?\.entry", whole)] + [len(whole)]
    return whole[: at[0]] + whole[at[which] : at[which + 1]]


def first_finding(source: str, name: str, entry: str) -> str:
    """What is first noticed about a PTX text: a finding, a refused launch, wrong values or an error; empty if nothing
    is. ``name``: the file whose host code launches it; ``entry``: the host's function."""
    try:
        program = load(source, name)
        for (mnk, clusters), adverse in product(PROBLEMS, (False, True)):
            options = Options(loop_limit=4000, adverse=adverse)
            run = gemm(entry, mnk, clusters, pdl=True, options=options, source=program)
            reports = [report for report in run.session.reports if report.severity is not Severity.BENIGN]
            if reports or run.code:
                return str((reports or run.session.refusals)[0])
            if not run.exact:
                return "wrong values"
    except (EmulatorError, PtxError) as error:
        return str(error)
    return ""


def survivors(name: str, which: int, entry: str) -> tuple[Counter[str], list[Mutant]]:
    """The number of executed mutants of each kind, and those that nothing notices. Only changes of asynchronous
    instructions are taken: a sixth of each kind, and in ``make thorough`` all."""
    total, left = Counter[str](), []
    asynchronous = [
        mutant
        for mutant in mutants(text_of_kernel(name, which))
        if mutant.kind not in ("swap", "shift", "compare", "negate", "unguard", "never")
        and ASYNCHRONOUS.search(mutant.name)
    ]
    for mutant in draw_part_by_key(lambda mutant: mutant.kind, asynchronous, 6):
        total[mutant.kind] += 1
        if not first_finding(mutant.text, name, entry):
            left.append(mutant)
    return total, left


# For each (kind, instruction): the reason why a survivor changes nothing.
EQUIVALENT = {
    ("count", "mbarrier.init.shared::cta.b64"): "the barriers that order pingpong consumers are not used here",
    ("discount", "mbarrier.init.shared::cta.b64"): "as for count",
    ("drop", "bar.sync"): "the cluster barrier before it orders the same accesses",
}


@pytest.mark.slow
def test_mutants_of_a_cluster_with_multicast() -> None:
    assert first_finding(text_of_kernel("tma_gemm", 2), "tma_gemm", "tn_f16_2x1") == ""
    total, left = survivors("tma_gemm", 2, "tn_f16_2x1")
    assert set(total) >= {
        "drop", "weaken", "skip", "once", "parity", "bytes", "count", "discount", "step", "swizzle", "own", "raise",
        "warp", "mask",
    }  # fmt: skip
    assert [m.name for m in left if (m.kind, m.name.split()[1]) not in EQUIVALENT] == []
    if THOROUGH:
        assert Counter((m.kind, m.name.split()[1]) for m in left) == {
            ("count", "mbarrier.init.shared::cta.b64"): 2,
            ("discount", "mbarrier.init.shared::cta.b64"): 2,
            ("drop", "bar.sync"): 1,
        }


# Changes that must be noticed: the file, the kernel's number and the host's function (see ``first_finding``), a pattern
# and its replacement, and a pattern of the finding.
NOTICED = [
    ("tma_gemm", 2, "tn_f16_2x1", r"fence\.proxy\.async\.shared::cta;", "", "without a fence.proxy.async"),
    ("tma_gemm", 2, "tn_f16_2x1", r"(wgmma\.wait_group\S*) 1;", r"\1 2;", "a wgmma of"),
    ("tma_split", 1, "split_4", r"(wgmma\.wait_group\S*) 0;", r"\1 1;", "accumulator"),
    ("tma_gemm", 2, "tn_f16_2x1", r"mapa\.shared::cluster\.u32 r, (%\w+), %\w+;", r"mov.u32 r, \1;", "race|arrivals"),
    ("tma_gemm", 2, "tn_f16_2x1", r"bar\.warp\.sync\s+-1;", "", "race"),
    ("tma_gemm", 2, "tn_f16_2x1", r"cp\.async\.bulk\.wait_group\.read 1;", "", "a bulk store of warp"),
    ("tma_gemm", 2, "tn_f16_2x1", r"cp\.async\.bulk\.wait_group\.read 0;", "", "wait_group.read is missing"),
    ("tma_gemm", 2, "tn_f16_2x1", r"barrier\.cluster\.\w+\.\w+\.aligned;", "", "has started"),
    ("tma_gemm", 2, "tn_f16_2x1", r"fence\.mbarrier_init\.release\.cluster;", "", "initialisation"),
    ("tma_gemm", 2, "tn_f16_2x1", r"wgmma\.fence\.sync\.aligned;", "", "wgmma.fence"),
    ("tma_gemm", 2, "tn_f16_2x1", r"(setmaxnreg\.inc\S*) 232", r"\1 240", "504"),
    ("tma_gemm", 2, "tn_f16_2x1", r"griddepcontrol\.wait;", "", "before griddepcontrol.wait"),
    ("tma_gemm", 7, "nn_f32_pingpong_2x1", r"fence\.proxy\.async\.shared::cta;", "", "without a fence.proxy.async"),
    ("tma_gemm", 7, "nn_f32_pingpong_2x1", r"(mbarrier\.try_wait\S* p, .*;)", r"\1 setp.eq.u32 p, 0, 0;", "mbarrier"),
    ("tma_gemm", 5, "nn_f16_2x2", r"barrier\.cluster\.\w+\.\w+\.aligned;", "", "has started"),
    ("tma_split", 1, "split_4", r"barrier\.cluster\.arrive\.release", "barrier.cluster.arrive.relaxed", "race"),
    ("tma_gemm", 5, "nn_f16_2x2", r"and\.b32 (\s*%r\d+), (%r\d+), 261\d\d\d;", r"mov.b32 \1, \2;",
     "wrong|in-flight|shared-race"),
    ("tma_split", 1, "split_4", r"griddepcontrol\.wait;", "", "before griddepcontrol.wait"),
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(NOTICED)))
def test_noticed(case: int) -> None:
    name, which, entry, pattern, new, words = NOTICED[case]
    changed, times = re.subn(pattern, new, text_of_kernel(name, which))
    assert times
    assert re.search(words, first_finding(changed, name, entry))


def test_drain_of_the_producer() -> None:
    # These are waits for empty stages after the producer's last copy. Without them a CTA may exit before its peers
    # arrive.
    source = text_of_kernel("tma_gemm", 2)
    waits = list(re.finditer(r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, [^;]*;", source))
    first_release = source.index("setmaxnreg.inc")
    last_copy = source.rindex("multicast::cluster [", 0, first_release)
    drain = [m for m in waits if last_copy < m.start() < first_release]
    assert len(drain) == 1
    for m in reversed(drain):
        source = source[: m.start()] + "setp.eq.u32 p, 0, 0;" + source[m.end() :]
    assert "this CTA may exit before" in first_finding(source, "tma_gemm", "tn_f16_2x1")


def test_end_of_a_split_over_a_cluster() -> None:
    # Without the last cluster barrier a peer may still read the memory of a CTA that has exited.
    source = text_of_kernel("tma_split", 1)
    for part in ("arrive.release.aligned;", "wait.acquire.aligned;"):
        at = source.rindex(f"barrier.cluster.{part}")
        source = source[:at] + source[at + len(f"barrier.cluster.{part}") :]
    assert re.search("may exit before|has exited", first_finding(source, "tma_split", "split_4"))
