"""Proves that a small kernel with wgmma is certified, alone and in a cluster, and is refused with any planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kernelproof.certificates import Claim, NotCertified, Pipeline, recheck
from tests.kernelproof.certificates import warpgroup_rings as rings
from tests.kernelproof.certificates.rings import proven
from tests.kernelproof.certificates.stated_rings import named

MMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %q5, %q6, %p15, 1, 1, 0, 0;"
FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT_1 = "wgmma.wait_group.sync.aligned 1;"
WAIT_0 = "wgmma.wait_group.sync.aligned 0;"
HIGH = "mov.u32 %r49, 3221225488;"  # of a descriptor: a swizzle of 32 bytes, and 256 bytes from 8 rows to the next
LAST = "LAST:\n"

# By fault: a part of the text, and its replacement.
FAULTS: dict[str, tuple[str, str]] = {
    # Registers in flight.
    "no fence of registers": (FENCE, ""),
    "the fence is after the products": (f"{FENCE}\n  {MMA}", f"{MMA}\n  {FENCE}"),
    "sums are set to zero after the fence": (MMA, f"mov.f32 %f1, 0f00000000; {MMA}"),
    "sums are read while they are added": (COMMIT, f"{COMMIT} add.f32 %f5, %f3, %f3;"),
    "sums are written while they are added": (COMMIT, f"{COMMIT} mov.f32 %f4, 0f00000000;"),
    "sums are read before they are complete": (WAIT_0, "wgmma.wait_group.sync.aligned 1;"),
    "the last products are not waited for": (WAIT_0, ""),
    "the last products are waited for on one path": (WAIT_0, f"@%p17 bra NOW; {WAIT_0} NOW:"),
    "products are in no group": (COMMIT, ""),
    "an empty group follows": (COMMIT, COMMIT + COMMIT),
    "one register is two accumulators": ("{%f1, %f2, %f3, %f4}, %q5", "{%f1, %f2, %f3, %f3}, %q5"),
    "accumulators overlap": (
        MMA, MMA + MMA.replace("{%f1, %f2, %f3, %f4}", "{%f2, %f3, %f4, %f5}"),
    ),
    "accumulators of two forms": (MMA, MMA + MMA.replace("f32.f16.f16", "f32.bf16.bf16")),
    "A is read from registers": (MMA, MMA.replace("%q5", "{%r1, %r1, %r1, %r1}").replace("1, 1, 0, 0", "1, 1, 0")),
    "a fence under a predicate": (FENCE, f"@%p15 {FENCE}"),
    # Which stage is read, and for how long.
    "a stage is handed back while it is read": (WAIT_1, ""),
    "all groups but two are waited for": (WAIT_1, "wgmma.wait_group.sync.aligned 2;"),
    "the stage of the k-tile is handed back": (
        "and.pred %p16, %p15, %p17;", "and.pred %p16, %p15, %p17; mov.u32 %r56, %r10;",
    ),
    "two warps hand back the other stage": (
        "shl.b32 %r50, %r56, 4;", "and.b32 %r50, %r41, 1; xor.b32 %r50, %r50, %r56; shl.b32 %r50, %r50, 4;",
    ),
    "no stage is handed back after the loop": ("@!%p17 bra LAST;", "bra.uni LAST;"),
    "a stage is handed back twice": (
        LAST, "LAST: @!%p17 bra TWICE; shl.b32 %r50, %r56, 4; add.s32 %r50, %r50, %r64;"
        "mbarrier.arrive.shared::cta.b64 _, [%r50]; TWICE:\n",
    ),
    "the stage before is multiplied": ("mul.lo.s32 %r46, %r10, 2304;", "mul.lo.s32 %r46, %r56, 2304;"),
    "the stage after is multiplied": (
        "mul.lo.s32 %r46, %r10, 2304;", "xor.b32 %r46, %r10, 1; mul.lo.s32 %r46, %r46, 2304;",
    ),
    "a k-tile is multiplied before the wait": (
        "TRY_C:", f"mul.lo.s32 %r46, %r10, 2304; add.s32 %r46, %r46, %r1; shr.u32 %r47, %r46, 4; {HIGH}"
        f"mov.b64 %q5, {{%r47, %r49}}; setp.ne.s32 %p15, %r44, 0; {FENCE} {MMA.replace('%q6', '%q5')}\nTRY_C:",
    ),
    # What a descriptor names.
    "descriptors differ between lanes": ("shr.u32 %r47, %r46, 4;", "shr.u32 %r47, %r46, 4; add.s32 %r47, %r47, %r33;"),
    "a descriptor depends on the problem": (MMA, f"cvt.u64.u32 %q7, %r7; add.s64 %q5, %q5, %q7; {MMA}"),
    "a descriptor has a bit beside its fields": ("add.s32 %r47, %r47, 65536;", "add.s32 %r47, %r47, 81920;"),
    "no swizzle": (HIGH, "mov.u32 %r49, 16;"),
    "a swizzle of 64 bytes": (HIGH, "mov.u32 %r49, 2147483664;"),
    "8 rows further on are other rows": (HIGH, "mov.u32 %r49, 3221225480;"),
    "A from its second row on": ("shr.u32 %r47, %r46, 4;", "add.s32 %r46, %r46, 32; shr.u32 %r47, %r46, 4;"),
    "A from its ninth row on": ("shr.u32 %r47, %r46, 4;", "add.s32 %r46, %r46, 256; shr.u32 %r47, %r46, 4;"),
    "A from the mbarriers on": ("shr.u32 %r47, %r46, 4;", "add.s32 %r46, %r1, 5632; shr.u32 %r47, %r46, 4;"),
    "A from the buffers of D": ("shr.u32 %r47, %r46, 4;", "add.s32 %r46, %r1, 4608; shr.u32 %r47, %r46, 4;"),
    "A is multiplied by itself": ("%q5, %q6", "%q5, %q5"),
    "A and B are exchanged": ("%q5, %q6", "%q6, %q5"),
    "columns of A": ("1, 1, 0, 0;", "1, 1, 1, 0;"),
    "columns of B": ("1, 1, 0, 0;", "1, 1, 0, 1;"),
    # Which sums.
    "products are subtracted": ("1, 1, 0, 0;", "-1, 1, 0, 0;"),
    "products of bf16": ("f32.f16.f16 {%f1", "f32.bf16.bf16 {%f1"),
    "sums in f16": (MMA, MMA.replace("f32.f16.f16 {%f1, %f2, %f3, %f4}", "f16.f16.f16 {%r65, %r66}")),
    "sums of the last k-tile": ("%q5, %q6, %p15", "%q5, %q6, 0"),
    "sums of the item before": ("%q5, %q6, %p15", "%q5, %q6, 1"),
    "one lane adds to the sums of the item before": (
        MMA, f"setp.eq.s32 %p18, %r32, 5; or.pred %p19, %p15, %p18; {MMA.replace('%p15', '%p19')}",
    ),
    "lanes differ in whether they add": ("%q5, %q6, %p15", "%q5, %q6, %p8"),
    "whether products are added depends on the problem": (MMA, f"setp.gt.s32 %p15, %r9, 5; {MMA}"),
    "a product is added twice": (MMA, f"{MMA} {MMA.replace('%p15', '1')}"),
    "a half of k twice": (HIGH, f"{HIGH} add.s32 %r48, %r48, 1;"),
    "one warp multiplies": (MMA, f"setp.eq.s32 %p18, %r41, 0; @!%p18 bra ONE; {MMA} ONE:"),
    "rows of warps are exchanged": ("shl.b32 %r61, %r41, 4;", "xor.b32 %r61, %r41, 1; shl.b32 %r61, %r61, 4;"),
    "warps store to one buffer": ("shl.b32 %r42, %r41, 8;", "mov.u32 %r42, 0;"),
    "warps store over each other": ("shl.b32 %r42, %r41, 8;", "shl.b32 %r42, %r41, 7;"),
    # Who multiplies.
    "the producer multiplies": ("mov.u32 %r11, 1;", f"mov.u64 %q5, 0; {COMMIT} mov.u32 %r11, 1;"),
    "the producer's warpgroup waits for products": ("setp.ne.u32 %p3, %r2, 0;", f"{WAIT_0} setp.ne.u32 %p3, %r2, 0;"),
}  # fmt: skip
DEC, INC = "setmaxnreg.dec.sync.aligned.u32 40;", "setmaxnreg.inc.sync.aligned.u32 216;"
REGISTERS: dict[str, tuple[str, str]] = {
    "more registers are wanted than there are": (DEC, ""),
    "fewer registers are given than taken": ("u32 40;", "u32 48;"),
    "registers that are no multiple of 8": ("u32 40;", "u32 44;"),
    "more registers than a thread may have": ("u32 216;", "u32 264;"),
    "fewer registers than a thread must have": ("u32 40;", "u32 16;"),
    "a decrease to more registers": (DEC, DEC.replace("40", "240")),
    "an increase to fewer registers": ("u32 40;", "u32 40; setmaxnreg.inc.sync.aligned.u32 32;"),
    "registers are given twice": (DEC, f"{DEC} setmaxnreg.dec.sync.aligned.u32 32;"),
    "registers are given by a warp": ("setp.ge.u32 %p2, %r2, 128;", f"setp.ge.u32 %p2, %r2, 32; @!%p2 {DEC}"),
    "registers are taken in the middle of an item": ("MULTIPLY:", f"MULTIPLY: {INC}"),
    "registers are given before the CTA's barrier": ("bar.sync 0;", f"{DEC} bar.sync 0;"),
}  # fmt: skip
MULTICAST = ".multicast::cluster [%r18], [%q2, {%r19, %r20}], [%r16], %h1;"
DRAIN_1 = "TRY_1:\n  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r73+5640], %r11;\n  @!%p4 bra TRY_1;"
DRAIN_2 = DRAIN_1.replace("TRY_1", "TRY_2")
CLUSTER: dict[str, tuple[str, str]] = {
    "CTAs do not meet": (
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;", "bar.sync 0;",
    ),
    "a CTA does not arrive": ("barrier.cluster.arrive.relaxed.aligned;", ""),
    "a CTA does not wait": ("barrier.cluster.wait.acquire.aligned;", "bar.sync 0;"),
    "a CTA arrives twice": ("barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.arrive.relaxed.aligned;" * 2),
    "a CTA arrives before it publishes mbarriers": (
        "fence.mbarrier_init.release.cluster;\n  barrier.cluster.arrive.relaxed.aligned;",
        "barrier.cluster.arrive.relaxed.aligned; fence.mbarrier_init.release.cluster;",
    ),
    "an mbarrier is initialised after the arrival": (
        "barrier.cluster.wait.acquire.aligned;",
        "@%p1 bra X; mov.u32 %r4, 1; mbarrier.init.shared::cta.b64 [%r1+5664], %r4; X:"
        "barrier.cluster.wait.acquire.aligned;",
    ),
    "a CTA arrives again where threads have roles": (
        "mov.u32 %r31, 0;", "barrier.cluster.arrive.relaxed.aligned; mov.u32 %r31, 0;",
    ),
    "both CTAs load the same half of B": ("shl.b32 %r20, %r70, 2;", "mov.u32 %r20, 0;"),
    "both CTAs load to the same half": ("shl.b32 %r72, %r70, 7;", "mov.u32 %r72, 0;"),
    "halves of B are exchanged": ("shl.b32 %r20, %r70, 2;", "xor.b32 %r20, %r70, 1; shl.b32 %r20, %r20, 2;"),
    "B goes to one CTA": ("mov.u16 %h1, 3;", "mov.u16 %h1, 1;"),
    "B goes to a third CTA": ("mov.u16 %h1, 3;", "mov.u16 %h1, 7;"),
    "B goes to no CTA": ("mov.u16 %h1, 3;", "mov.u16 %h1, 0;"),
    "B is not sent to the other CTA": (MULTICAST, MULTICAST.replace(".multicast::cluster", "").replace(", %h1", "")),
    "fewer bytes are expected than come": ("mov.u32 %r21, 2304;", "mov.u32 %r21, 2176;"),
    "more bytes are expected than come": ("mov.u32 %r21, 2304;", "mov.u32 %r21, 2432;"),
    "bytes are announced in the other CTA": (
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r16], %r21;",
        "mov.u32 %r74, 1; mapa.shared::cluster.u32 %r74, %r16, %r74;"
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r74], %r21;",
    ),
    "bytes count in the other CTA": (
        "mov.u16 %h1, 3;", "mov.u32 %r74, 1; sub.s32 %r74, %r74, %r70; mapa.shared::cluster.u32 %r16, %r16, %r74;"
        "mov.u16 %h1, 3;",
    ),
    "A is that of the other CTA": (
        "shl.b32 %r71, %r70, 6; add.s32 %r12", "xor.b32 %r71, %r70, 1; shl.b32 %r71, %r71, 6; add.s32 %r12",
    ),
    "D is that of the other CTA": (
        "shl.b32 %r71, %r70, 6; add.s32 %r60", "xor.b32 %r71, %r70, 1; shl.b32 %r71, %r71, 6; add.s32 %r60",
    ),
    "a stage is handed back to the own CTA only": ("setp.lt.s32 %p17, %r32, 2;", "setp.eq.s32 %p17, %r32, %r70;"),
    "a stage is handed back to the own CTA twice": ("and.b32 %r65, %r32, 1;", "mov.u32 %r65, %r70;"),
    "a stage is handed back to a third CTA": (
        "and.b32 %r65, %r32, 1;", "and.b32 %r65, %r32, 1; shl.b32 %r65, %r65, 1;",
    ),
    "empty expects the own CTA's arrivals only": ("mov.u32 %r5, 8;", "mov.u32 %r5, 4;"),
    "the CTA ends before the last stages come back": (DRAIN_1, "TRY_1:"),
    "the CTA ends before the very last stage comes back": (DRAIN_2, "TRY_2:"),
    "the last stages are waited for in another order": (
        "shl.b32 %r73, %r10, 4; add.s32", "xor.b32 %r73, %r10, 1; shl.b32 %r73, %r73, 4; add.s32",
    ),
    "the last stages' parities are those of one round": ("xor.b32 %r11, %r11, %r10;", ""),
    "the wait for the last stage is tried once": ("@!%p4 bra TRY_2;", ""),
    "an instruction on the own CTA has an address of the other": (
        "TRY_C:", "xor.b32 %r74, %r70, 1; mapa.shared::cluster.u32 %r45, %r45, %r74;\nTRY_C:",
    ),
    "every CTA takes the other's items": ("shr.u32 %r8, %r8, 1;", "add.s32 %r8, %r8, 1; shr.u32 %r8, %r8, 1;"),
}  # fmt: skip


def of_peer(**fields: object) -> Callable[[Claim], Claim]:
    """A change of what a claim states of the second CTA."""

    def applied(claim: Claim) -> Claim:
        assert isinstance(claim.ring, Pipeline)
        ((contract, pipeline),) = claim.ring.peers
        peer = contract, replace(pipeline, **fields)  # type: ignore[arg-type]
        return claim._replace(ring=replace(claim.ring, peers=(peer,)))

    return applied


LAUNCHES: dict[str, Callable[[Claim], Claim]] = {
    "the other CTA hands back to itself": of_peer(returns=frozenset((1,))),
    "the other CTA loads all of B": of_peer(share=2304),
    "the other CTA has the same rank": of_peer(rank=0),
    "the other CTA takes items of a later cluster": of_peer(first=named("cta_x") + 1),
    "the other CTA has the same tile": lambda claim: claim._replace(
        ring=replace(claim.ring, peers=((claim.contract, claim.ring.peers[0][1]),))  # type: ignore[type-var, union-attr]
    ),
}


def changed(before: str, after: str, ranks: int = 1, moved: bool = False) -> str:
    """The kernel's text with a fault. Fails if the right text has no place for it."""
    text = rings.text(ranks, moved)
    assert before in text
    return text.replace(before, after)


@pytest.mark.parametrize(("ranks", "moved"), [(1, False), (1, True), (2, False), (2, True)])
def test_the_kernel_without_a_fault_is_certified_and_its_certificate_holds(ranks: int, moved: bool) -> None:
    text = rings.text(ranks, moved)
    recheck(proven(text, rings.claim(ranks)), text, lambda _program: [rings.claim(ranks)])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_products_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven(changed(*FAULTS[fault]), rings.claim())


@pytest.mark.parametrize("fault", REGISTERS)
def test_a_fault_of_registers_that_warpgroups_move_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven(changed(*REGISTERS[fault], moved=True), rings.claim())


@pytest.mark.parametrize("fault", CLUSTER)
def test_a_fault_of_a_cluster_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven(changed(*CLUSTER[fault], ranks=2), rings.claim(2))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_for_which_a_cluster_is_wrong_is_refused(launch: str) -> None:
    with pytest.raises(NotCertified):
        proven(rings.text(2), LAUNCHES[launch](rings.claim(2)))
