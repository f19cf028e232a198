"""Proves that races in shared memory, unawaited copies, and sums with a product twice or missing are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.certificates.cells import Cells, Kind, Kinds, SummedRange, unknown
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.shared_memory import SharedMemory
from kernelproof.certificates.slices import Complete, Partial

LANES = np.arange(64)  # of two warps


@pytest.fixture
def memory() -> SharedMemory:
    """Shared memory of 1024 bytes, from address 1024 on."""
    return SharedMemory(1024, 1024)


def places(memory: SharedMemory, shift: int = 0) -> np.ndarray:
    """Each lane's own four bytes, or those of the lane ``shift`` lanes on."""
    return memory.places(1024 + (LANES + shift) % 64 * 4, 4)


def test_a_barrier_orders_a_store_and_another_threads_load(memory: SharedMemory) -> None:
    memory.write(places(memory), LANES, unknown(64, 2, 2))
    memory.read(places(memory), LANES)
    with pytest.raises(NotCertified, match="written since the last barrier"):
        memory.read(places(memory, 1), LANES)
    memory.barrier()
    memory.read(places(memory, 1), LANES)
    with pytest.raises(NotCertified, match="read since the last barrier"):
        memory.write(places(memory), LANES, unknown(64, 2, 2))
    memory.barrier()
    memory.write(places(memory), LANES, unknown(64, 2, 2))


def test_lanes_that_read_one_place_are_several(memory: SharedMemory) -> None:
    memory.read(memory.places(np.full(64, 1024), 4), LANES)
    with pytest.raises(NotCertified, match="read since the last barrier"):
        memory.write(memory.places(np.array([1024]), 4), np.array([0]), unknown(1, 2, 2))


def test_lanes_that_write_one_place_at_once_are_refused(memory: SharedMemory) -> None:
    with pytest.raises(NotCertified, match="two lanes"):
        memory.write(memory.places(np.full(64, 1024), 4), LANES, unknown(64, 2, 2))


def test_a_copy_is_pending_until_its_group_and_a_barrier(memory: SharedMemory) -> None:
    """Two groups are committed, of which the first has the copies and the second is empty. A wait that leaves one group
    in flight makes the copies visible to their own lanes, and a barrier to others (None stands for any lane)."""
    memory.copy(places(memory), LANES, unknown(64, 2, 2))
    memory.commit()
    memory.commit()
    memory.wait(2)
    for lanes in (LANES, None):
        with pytest.raises(NotCertified, match="pending"):
            memory.read(places(memory), lanes)
    memory.wait(1)
    memory.read(places(memory), LANES)
    with pytest.raises(NotCertified, match="written since the last barrier"):
        memory.read(places(memory), None)
    memory.barrier()
    memory.read(places(memory), None)
    with pytest.raises(NotCertified, match="read since the last barrier"):
        memory.copy(places(memory), LANES, unknown(64, 2, 2))


@dataclass
class History:
    """What threads have done with elements of shared memory, as lists and not as the arrays of ``SharedMemory``.

    ``accesses``: element -> (thread, whether it has written) since the last barrier. ``groups``: the copies of each
    group that was not waited for, (thread, element) each, the oldest first; the last one is not committed.
    """

    accesses: dict[int, list[tuple[int | None, bool]]] = field(default_factory=dict)
    groups: list[list[tuple[int, int]]] = field(default_factory=lambda: [[]])

    def is_safe(self, writes: bool, lanes: Sequence[int | None], elements: Sequence[int]) -> bool:
        """Whether threads may access these elements, one each."""
        pending = {element for group in self.groups for _, element in group}
        conflicts = any(
            (wrote or writes) and (other is None or other != lane)
            for lane, element in zip(lanes, elements, strict=True)
            for other, wrote in self.accesses.get(element, [])
        )
        twice = writes and len(set(elements)) < len(elements)
        return not (pending & set(elements) or conflicts or twice)

    def note(self, writes: bool, lanes: Sequence[int | None], elements: Sequence[int]) -> None:
        """Note accesses."""
        for lane, element in zip(lanes, elements, strict=True):
            self.accesses.setdefault(element, []).append((lane, writes))

    def wait(self, most: int) -> None:
        """All groups but the last ``most`` have landed; each copy is then a write of its thread."""
        while len(self.groups) - 1 > most:
            for lane, element in self.groups.pop(0):
                self.note(True, [lane], [element])


THREADS_OF = st.lists(st.tuples(st.sampled_from((3, 4, 40)), st.integers(0, 2)), min_size=1, max_size=2)
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(("read", "write", "copy")), THREADS_OF.filter(lambda x: len({y for y, _ in x}) == len(x))
    ),
    st.tuples(st.just("matrix"), st.integers(0, 2)),
    st.tuples(st.sampled_from(("barrier", "commit")), st.none()),
    st.tuples(st.just("wait"), st.integers(0, 2)),
)


@given(st.lists(STEPS, max_size=8))
def test_an_access_is_refused_exactly_where_another_one_conflicts(steps: list[tuple[str, object]]) -> None:
    """Threads 3 and 4 of one warp and 40 of another access three elements. ``matrix``: an element is read by a thread
    that is not known. No drawn order of steps may be accepted with a race, nor refused without one."""
    memory, history = SharedMemory(6, 0), History()
    for name, operand in steps:
        if name == "barrier":
            memory.barrier()
            history.accesses.clear()
        elif name == "commit":
            memory.commit()
            history.groups.append([])
        elif isinstance(operand, int) and name == "wait":
            memory.wait(operand)
            history.wait(operand)
        else:
            lanes, elements = zip(*operand, strict=True) if isinstance(operand, list) else ((None,), (operand,))
            at = np.array(elements)[:, None]
            known = None if lanes == (None,) else np.array(lanes)
            writes = name in ("write", "copy")
            cells = unknown(len(elements), 1, 2)

            def access(
                name: str = name, at: np.ndarray = at, known: np.ndarray | None = known, cells: Cells = cells
            ) -> None:
                if known is not None and name != "read":
                    (memory.write if name == "write" else memory.copy)(at, known, cells)
                else:
                    memory.read(at, known)

            if not history.is_safe(writes, lanes, elements):
                with pytest.raises(NotCertified):
                    access()
                return
            access()
            if name == "copy":
                history.groups[-1] += zip(lanes, elements, strict=True)
            else:
                history.note(writes, lanes, elements)


@given(st.sampled_from((1, 2, 4, 8, 16)), st.lists(st.integers(-4, 40), min_size=1, max_size=3))
def test_an_access_has_the_elements_of_its_bytes(size: int, offsets: list[int]) -> None:
    memory = SharedMemory(32, 1024)
    elements = [sorted({byte // 2 for byte in range(offset, offset + size)}) for offset in offsets]
    if all(x >= 0 and x + size <= 32 and x % max(size, 2) == 0 for x in offsets):
        assert memory.places(1024 + np.array(offsets), size).tolist() == elements
        memory.write(np.arange(memory.elements)[:, None], np.zeros(memory.elements, np.int64), unknown(16, 1, 2))
    else:
        with pytest.raises(NotCertified):
            memory.places(1024 + np.array(offsets), size)


@pytest.mark.parametrize("address", [1020, 1024 + 1024, 1026])
def test_accesses_beyond_shared_memory_or_unaligned_are_refused(memory: SharedMemory, address: int) -> None:
    with pytest.raises(NotCertified):
        memory.places(np.array([address]), 4)


def test_a_sum_takes_each_product_once() -> None:
    """A sum has the products of all k below ``done``, and beyond these a bit for each in ``beyond``: here those of
    k, k + 1 and k + 3."""
    k = Polynomial.named("k")
    first = SummedRange(k, 0).plus(k, (1, 0, 3))
    assert first.done.equals(k + 2)
    assert first.beyond == 0b10
    assert first.plus(k, (2,)).done.equals(k + 4)
    for offsets in ((0,), (3,), (2, 2)):
        with pytest.raises(NotCertified, match="twice"):
            first.plus(k, offsets)
    with pytest.raises(NotCertified):
        first.plus(ZERO, (5,))


def test_equal_kinds_have_one_number_and_one_text() -> None:
    kinds = Kinds()
    a = Kind("A", Polynomial.named("x", 2), ZERO)
    b = Kind("A", Polynomial({("x",): 2, (): 0}), ZERO)
    others = [Kind("B", a.row, ZERO), Kind("A", ZERO, a.row), Kind("A", a.row, ZERO, SummedRange(ZERO, 0))]
    assert kinds.number(a) == kinds.number(b)
    numbers = [kinds.number(kind) for kind in (a, *others)]
    assert len(set(numbers)) == len({kind.text for kind in (a, *others)}) == 4


def test_partial_sums_are_added_in_order_and_as_floats_only() -> None:
    """The partial sums of both slices make the whole sum."""
    whole = unknown(64, 1, 4)
    zero, one, two = map(Polynomial.of, range(3))
    first, second = Partial(whole, zero, one, two), Partial(whole, one, two, two)
    total = first.view("f4") + second.view("f4")
    assert isinstance(total, Complete)
    assert np.array_equal(total.kinds, whole.kinds)
    assert isinstance(total.view("f4") + np.zeros(64, "f4"), Complete)
    with pytest.raises(NotCertified, match="something else than zeros"):
        total.view("f4") + second.view("f4")
    for a, b in ((first, second), (first.view("f4"), second), (first.view("f4"), np.zeros(64, "u4"))):
        with pytest.raises(NotCertified, match="as floats"):
            a + b
    with pytest.raises(NotCertified, match="in the order"):
        first.view("f4") + first.view("f4")
