"""Proves that certificates state the bank conflicts and sectors that executions count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof import emulator
from kernelproof.certificates import Certificate, NotCertified, by_contract
from kernelproof.certificates.traffic import Traffic
from kernelproof.emulator import Counters
from kernelproof.emulator.state.sites import Site
from tests.kernelproof.certificates.subjects import PRODUCT, Subject, product, row_sum
from tests.kernelproof.emulator.build import ptx_of_text

SWIZZLE = "chunk ^ ((row >> 1) & 3)"  # where multistage.cu stores a chunk of 16 bytes of a row
# The CUDA files of the emulator's tests.
KERNELS = Path(__file__).parents[1] / "emulator" / "kernels"


def product_without_swizzle() -> Subject:
    """The product kernel without its swizzle of shared memory, so that it has bank conflicts."""
    text = (KERNELS / "multistage.cu").read_text()
    assert SWIZZLE in text
    return Subject(ptx_of_text(text.replace(SWIZZLE, "chunk"), "sm_80"), PRODUCT)


def certify(subject: Subject) -> Certificate:
    """The certificate of a subject, which must be proven."""
    attempt = by_contract.prove(subject.ptx, subject.contract)
    assert attempt.certificate is not None, attempt.why
    return attempt.certificate


def count_traffic(subject: Subject, m: int, n: int, k: int, ctas: int) -> Counters:
    """The counters of a launch of the product on zeros: A is (m, k), B is (n, k), and D is (m, n)."""
    memory = emulator.Memory()
    a, b = (memory.upload(np.zeros((rows, k), np.float16), "input") for rows in (m, n))
    d = memory.upload(np.zeros((m, n), np.float16), "output")
    program = emulator.load(subject.ptx)
    options = emulator.Options(counters=True)
    arguments = [a, b, d, m, n, k]
    result = program.launch("gemm_f16", ctas, 128, arguments, memory=memory, shared_bytes=65536, options=options)
    assert not [each for each in result.reports if each.is_error]
    assert result.counters is not None
    return result.counters


def kind_of(opcode: str) -> str:
    """The kind under which counters count the accesses of an opcode to shared memory, such as ``st.shared``."""
    base, *parts = opcode.split(".")
    return "cp.async" if base == "cp" else base if base == "ldmatrix" else f"{base}.{parts[0]}"


# An access: the bytes of each lane, the numbers of the lanes, and where each lane accesses, as a multiple of the bytes.
ACCESSES = st.tuples(
    st.sampled_from((1, 2, 4, 8, 16)),
    st.lists(st.integers(0, 95), min_size=2, max_size=64, unique=True).map(sorted),
    st.lists(st.integers(0, 260), min_size=64, max_size=64),
)
SITE = Site(text="st.shared.u32 [%r1], %r2;")


def wavefronts(size: int, lanes: list[int], places: list[int]) -> tuple[int, int, int]:
    """Warps, wavefronts and wavefronts without conflicts of an access to 32 banks of 4 bytes, counted word by word."""
    group = min(32, 128 // max(4, size))  # lanes that are served at a time
    needed = ideal = 0
    for first in range(0, 96, group):
        words = {
            place * size // 4 + part
            for lane, place in zip(lanes, places, strict=True) if first <= lane < first + group
            for part in range(max(1, size // 4))
        }  # fmt: skip
        banks = Counter(word % 32 for word in words)
        needed, ideal = needed + max(banks.values(), default=0), ideal + bool(banks)
    return len({lane // 32 for lane in lanes}), needed, ideal


@given(st.lists(ACCESSES, min_size=1, max_size=3))
def test_the_worst_access_to_shared_memory_is_stated(accesses: list[tuple[int, list[int], list[int]]]) -> None:
    traffic = Traffic([SITE])
    expected = []
    for size, lanes, places in accesses:
        traffic.shared(0, np.array(places[: len(lanes)]) * size, np.array(lanes), size)
        expected.append(wavefronts(size, lanes, places[: len(lanes)]))
    traffic.shared(0, np.array([0]), np.array([5]), 4)  # a single lane
    (stated,) = traffic.shared_accesses()
    worst = max((needed - ideal, needed) for _, needed, ideal in expected)
    assert (stated.warps, stated.wavefronts, stated.without_conflicts) in expected
    assert (stated.wavefronts - stated.without_conflicts, stated.wavefronts) == worst
    assert stated.opcode == "st.shared.u32"


@given(ACCESSES, st.lists(st.integers(0, 3), min_size=64, max_size=64))
def test_runs_and_sectors_of_an_access_to_an_operand(access: tuple[int, list[int], list[int]], rows: list[int]) -> None:
    size, lanes, places = access
    traffic = Traffic([SITE])
    starts = np.array(places[: len(lanes)]) * size
    traffic.of_operand(0, "A", np.array(rows[: len(lanes)]), starts, np.array(lanes), size)
    (stated,) = traffic.global_accesses()
    touched = {
        (lane // 32, row, start + byte)
        for lane, row, start in zip(lanes, rows, starts.tolist(), strict=False) for byte in range(size)
    }  # fmt: skip
    lengths: Counter[int] = Counter()
    for warp, row, byte in touched:
        if (warp, row, byte - 1) not in touched:
            lengths[next(n for n in count(1) if (warp, row, byte + n) not in touched)] += 1
    # In a sector, which has 32 bytes, a run may begin at every multiple of the access's size.
    sectors = {n: [(begin + n - 1) // 32 + 1 for begin in range(0, 32, size)] for n in lengths}
    assert stated.warps == len({lane // 32 for lane in lanes})
    assert dict(map(reversed, stated.runs)) == lengths
    assert stated.sectors == tuple(sum(lengths[n] * of(sectors[n]) for n in lengths) for of in (min, max))
    assert (stated.operand, stated.opcode) == ("A", "st.shared.u32")


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "conflicts"), [(product, False), (product_without_swizzle, True)])
def test_a_certificate_states_what_an_execution_counts(subject: Callable[[], Subject], conflicts: bool) -> None:
    """A fact is about one instruction, and the counters add up all instructions of a kind. Therefore the counted mean
    of a request lies between the least and the largest stated number of the kind's instructions."""
    kernel = subject()
    (claim,) = (claim for claim in certify(kernel).claims if claim.shared_accesses)
    counters = count_traffic(kernel, 128, 128, 96, 1)
    for kind, banks in counters.shared_banks.items():
        facts = [fact for fact in claim.shared_accesses if kind_of(fact.opcode) == kind]
        needed = [fact.wavefronts / fact.warps for fact in facts]
        ideal = [fact.without_conflicts / fact.warps for fact in facts]
        assert min(needed) <= banks.wavefronts / banks.requests <= max(needed), kind
        assert min(ideal) <= banks.ideal / banks.requests <= max(ideal), kind
    assert any(fact.wavefronts > fact.without_conflicts for fact in claim.shared_accesses) == conflicts
    assert any(banks.conflicts for banks in counters.shared_banks.values()) == conflicts
    for fact in claim.global_accesses:
        traffic = counters.global_traffic["st.global" if fact.operand == "D" else "ld.global"]
        least, most = (number / fact.warps for number in fact.sectors)
        assert least <= traffic.sectors / traffic.requests <= most, fact


@pytest.mark.slow
def test_facts_of_a_sum_of_rows() -> None:
    """256 threads read float4 after float4 of a row; one lane of each warp stores to shared memory, and one reads.

    A load is one run of 512 consecutive bytes in each of 8 warps: 16 sectors of 32 bytes, or 17 if the row begins
    within a sector, which makes 128 to 136. The store is one run of 4 bytes, in one sector, by one warp.
    """
    (claim,) = certify(row_sum()).claims
    (load,) = (fact for fact in claim.global_accesses if fact.operand == "A")
    assert (load.warps, load.runs, load.sectors) == (8, ((8, 512),), (128, 136))
    (store,) = (fact for fact in claim.global_accesses if fact.operand == "D")
    assert (store.warps, store.runs, store.sectors) == (1, ((1, 4),), (1, 1))
    assert all(fact.wavefronts == fact.without_conflicts == fact.warps for fact in claim.shared_accesses)


@pytest.mark.slow
def test_a_certificate_with_other_facts_does_not_hold() -> None:
    """The load of A is said to touch one sector, which is less than it does."""
    subject = row_sum()
    attempt = by_contract.prove(subject.ptx, subject.contract)
    by_contract.recheck(attempt, subject.ptx)
    assert attempt.certificate is not None
    claim = attempt.certificate.claims[0]
    fewer = claim.global_accesses[0].model_copy(update={"sectors": (1, 1)})
    changed = claim.model_copy(update={"global_accesses": (fewer, *claim.global_accesses[1:])})
    certificate = attempt.certificate.model_copy(update={"claims": (changed,)})
    with pytest.raises(NotCertified):
        by_contract.recheck(attempt.model_copy(update={"certificate": certificate}), subject.ptx)
