"""Proves a kernel whose CTAs load all of their k at once, without a ring, so that it has only a few k-tiles.

Each number of k-tiles is executed from the entry to the block after the products. If the CTAs of a cluster have slices
of k, that is the block after the wait for the sums of the cluster. What threads hold there must not depend on the
number of k-tiles. From there on any thread is followed, as ``cluster_sum_proof`` describes.

In a cluster each CTA says how many bytes of sums come to it, at an mbarrier which it has just initialised. Then it
arrives at the barrier of the cluster. When it has waited there, all CTAs run and all mbarriers are there. A CTA sends
the sums over its slice to the CTAs that add them, to shared memory that these use for nothing else, and waits for its
own bytes. These come, because every CTA sends before it waits. No CTA ends before all bytes have come to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernelproof.certificates.cells import UNKNOWN, Cells, Kinds, same_elements
from kernelproof.certificates.cluster_sum_proof import ClusterSumMachine, ConsumerThread, check_counts, count_stores
from kernelproof.certificates.cluster_sums import ClusterSums
from kernelproof.certificates.conditions import OpenFacts
from kernelproof.certificates.contract import Contract, Tile
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.loops import TILES, Case
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_loops import block_after_products, block_after_waits, spins
from kernelproof.certificates.shot_machine import ShotMachine
from kernelproof.certificates.sum_peer import Sending
from kernelproof.certificates.thread_machine import Registers, same_value
from kernelproof.certificates.words import Word


@dataclass(frozen=True)
class SingleShot:
    """What is stated of such a kernel. ``most``: how many k-tiles a CTA holds at most. ``peers``: in a cluster, the
    contracts of the CTAs from rank 1 on."""

    most: int
    peers: tuple[Contract, ...] = ()


class Reached(NamedTuple):
    """What CTAs have done up to the last block that is executed for all threads together.

    ``registers``: what each holds, for any thread. ``mbarrier_address``, ``expected``: the mbarrier of the sums, and
    their bytes. ``sendings``: what a CTA has sent. ``used``: the elements of shared memory that sums must not come to.
    """

    registers: Registers
    mbarrier_address: int | None
    expected: int | None
    sendings: list[Sending]
    used: Lanes


class SingleShotProof:
    """Proves such a kernel under a contract in which the number of k-tiles is the name ``TILES``."""

    def __init__(self, program: Program, contract: Contract, shot: SingleShot) -> None:
        if not all(spins(program, head) for head in program.loops):
            raise NotCertified("where all of k is loaded at once, only loops that wait for an mbarrier are covered")
        self.program, self.shot = program, shot
        self.contracts = (contract, *shot.peers)
        self.ranks = len(self.contracts)
        self.kinds = Kinds()
        self.stop = block_after_waits(program, [0]) if shot.peers else block_after_products(program)
        self.thread = ConsumerThread(0, contract.lanes)

    def cases(self) -> Iterator[Case]:
        """Prove every case. Raises NotCertified at the first that cannot be proven."""
        reached, size = list[Reached](), self.contracts[0].shared_bytes + self.program.layout.shared_static
        for rank in range(self.ranks):
            ways = []
            for tiles in range(1, self.shot.most + 1):
                machine, way = self._execute(rank, tiles)
                ways.append(way)
                yield Case(covers=f"{tiles} k-tiles{self._title(rank)}", instructions=machine.steps)
            reached.append(_common(ways))
        sums = [ClusterSums(size) for _ in reached]
        if self.ranks > 1:
            _deliver(reached, sums)
        tile = _tile(self.contracts[0])
        counts = np.zeros(tile.rows * tile.cols, np.int64)
        for rank, (each, coming) in enumerate(zip(reached, sums, strict=True)):
            contract = self.contracts[rank]
            follower = self._any_thread(contract, coming, rank)
            count_stores(follower, self.stop, _with_facts(each.registers, follower.facts), _tile(contract), counts)
            yield Case(covers=f"any thread stores its sums{self._title(rank)}", instructions=follower.steps)
        check_counts(counts)

    def _title(self, rank: int) -> str:
        """How a case names its CTA; empty without clusters."""
        return f", in CTA {rank} of a cluster" if self.ranks > 1 else ""

    def _execute(self, rank: int, tiles: int) -> tuple[ShotMachine, Reached]:
        """Execute the CTA with a rank on ``tiles`` k-tiles, and return what it has done then."""
        contract = self.contracts[rank].where(TILES, Polynomial.of(tiles), {})
        machine = ShotMachine(self.program, contract, self.kinds, rank, self.ranks)
        state = machine.run(machine.start(), self.stop)
        if state is None:
            raise NotCertified("a CTA ends before it stores its sums")
        machine.check_end()
        follower = self._any_thread(contract, ClusterSums(0), rank)  # states values only, so no sums come to it
        names = [self.program.emitter.variable(register) for register in self.program.live(self.stop)]
        registers = {
            name: self._of_any_thread(state.registers[name], machine, follower)
            for name in names if name in state.registers
        }  # fmt: skip
        mbarrier = machine.mbarrier_elements
        if machine.used[mbarrier].any():
            raise NotCertified("an mbarrier lies where the CTA copies to or reads from")
        used = machine.used.copy()
        used[mbarrier] = True
        return machine, Reached(registers, machine.mbarrier_address, machine.expected, machine.sendings, used)

    def _any_thread(self, contract: Contract, coming: ClusterSums, rank: int) -> ClusterSumMachine:
        """The machine of any thread of a CTA, to which those sums come."""
        facts = OpenFacts.of(contract.facts)
        facts.bounds |= {(name,): (0, size - 1) for name, size in self.thread.extents.items()}
        return ClusterSumMachine(
            self.program, contract, facts, self.kinds, self.thread, coming, rank, self.ranks
        )  # fmt: skip

    def _of_any_thread(self, value: Any, machine: ShotMachine, follower: ClusterSumMachine) -> Any:
        """What a register holds in any thread: a number, or complete sums of the tile."""
        if not isinstance(value, Cells):
            return self.thread.known(value, follower.facts)
        tile = _tile(machine.contract)
        if self.ranks > 1:
            return UNKNOWN  # sums over a slice, which have been sent
        try:
            machine.whole_sum(value, "D", value.width, tile)
        except NotCertified:
            return UNKNOWN
        return follower.sums_at(value.rows - int(tile.row.constant), value.cols - int(tile.col.constant), value.width)


def _tile(contract: Contract) -> Tile:
    """The contract's tile, which every kernel of this kind has."""
    assert contract.tile is not None
    return contract.tile


def _common(ways: list[Reached]) -> Reached:
    """What is true for every number of k-tiles. Registers that differ are unknown; nothing else may differ but the
    elements that are used."""
    first = ways[0]
    registers = {
        name: value if all(_same(value, way.registers.get(name)) for way in ways) else UNKNOWN
        for name, value in first.registers.items()
    }
    for way in ways[1:]:
        if (way.mbarrier_address, way.expected) != (first.mbarrier_address, first.expected) or len(way.sendings) != len(
            first.sendings
        ):
            raise NotCertified("what a CTA sends or expects depends on the number of k-tiles")
        for a, b in zip(way.sendings, first.sendings, strict=True):
            same = all(np.array_equal(getattr(a.sent, x), getattr(b.sent, x)) for x in ("rank", "at", "rows", "cols"))
            if not same or a.signal != b.signal:
                raise NotCertified("what a CTA sends depends on the number of k-tiles")
    used = np.logical_or.reduce([way.used for way in ways])
    return Reached(registers, first.mbarrier_address, first.expected, first.sendings, used)


def _same(a: Any, b: Any) -> bool:
    """Whether two values of a register of any thread are the same."""
    if isinstance(a, Cells) and isinstance(b, Cells):
        return a.width == b.width and same_elements(a, b)
    return same_value(a, b)


def _with_facts(registers: Registers, facts: OpenFacts) -> Registers:
    """Registers whose words have other facts."""
    return {
        name: Word(value.poly, value.bits, facts, value.signed) if isinstance(value, Word) else value
        for name, value in registers.items()
    }


def _deliver(reached: list[Reached], sums: list[ClusterSums]) -> None:
    """Note at every CTA of a cluster what comes to it. Raises NotCertified unless its mbarrier counts these bytes, and
    they come to shared memory that the CTA uses for nothing else."""
    for each, coming in zip(reached, sums, strict=True):
        coming.expected = each.expected
    for rank, each in enumerate(reached):
        for sending in each.sendings:
            receiver = reached[sending.sent.rank]
            if sending.signal != receiver.mbarrier_address:
                raise NotCertified("bytes of sums count at what is not the mbarrier of the CTA to which they go")
            if receiver.used[sending.elements].any():
                raise NotCertified("a sum is sent to shared memory that its CTA uses otherwise")
            sums[sending.sent.rank].receive(rank, sending.sent)
    for coming in sums:
        coming.check()
