"""Executes any thread of a group of consumers that adds the partial sums of tiles in a split-k pipeline.

``sum_proof`` runs the kernel's text on this machine, one part after another (``Phase``). The machine checks each
barrier, atomic, load and store of the thread against what the thread has done before (``Progress``) and what its group
has to add (``Share``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from kernelproof.certificates.cells import UNKNOWN, Cells, Kind, Kinds, unknown
from kernelproof.certificates.conditions import AtLeast, Condition, OpenFacts, Unstated, at_least, settled
from kernelproof.certificates.contract import Contract, Matrix
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.global_places import ARRIVALS, PARTIALS
from kernelproof.certificates.invariants import poly_of
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.progress import Phase, Progress, Stored
from kernelproof.certificates.share import Share
from kernelproof.certificates.slices import Partial
from kernelproof.certificates.thread_machine import Registers, ThreadMachine
from kernelproof.certificates.words import Word, polynomial
from kernelproof.emulator.memory.atomics import AtomicKind
from kernelproof.emulator.state.arrays import Mask
from kernelproof.emulator.state.scopes import ORDERS, READ_ONLY, Scope, scope_of

# The sources of kinds for partial sums: SLAB for sums as they were loaded, whose ``col`` is their position in a slab.
# TURNED for sums after movmatrix: ``col`` is the slab position of the sum that this register held before movmatrix.
SLAB, TURNED = "slab", "turned slab"
SUM_BYTES = 4  # bytes of a partial sum, and of a counter
COUNTER_HALF = 1 << 16  # the low 16 bits of a counter count parts, the high ones vectors
# Names in polynomials: the parts and vectors that a thread finds counted if their number varies.
PARTS_SEEN, VECTORS_SEEN = "parts_seen", "vectors_seen"


class SumMachine(ThreadMachine):
    """The machine of one thread. Methods raise NotCertified for an instruction that does not continue its progress.

    ``share``: what its group adds. ``phase``: where the thread is. ``at``: in VECTORS, the first vector of the
    iteration. ``taken``: from TILE on, for each branching block, the targets taken; where both sides ran, the key of
    the condition. ``agreed``: what all lanes of a warp must have in common, in the order of execution: values that they
    shuffle, vectors of movmatrix, and which sums an iteration has stored. ``sum_proof`` compares ``taken`` and
    ``agreed`` between threads.
    """

    def __init__(self, program: Program, contract: Contract, facts: OpenFacts, kinds: Kinds, share: Share) -> None:
        super().__init__(program, contract, facts, kinds, share)
        self.share, self.phase, self.at = share, Phase.START, ZERO
        self.taken: dict[int, list[object]] = {}
        self.agreed: list[object] = []
        self.counter_value: Any = None  # what a load of the counter returns, in the loop that waits for it

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of a thread that adds sums. Instructions that prepare the kernel do nothing here, because the
        proofs of roles check them."""
        return {
            "G": {"load": self.load, "store": self.store, "grid_wait": self.nothing},
            "Q": {"apply": self.count_vectors}, "Z": {}, "S": {}, "H": {},
            "I": {"lanes": self.lanes_of, "constant": self.constant},
            "W": {"shfl": self.shuffle},
            "J": {"sync": self.sync}, "Y": {"converge": lambda *_: None}, "E": {}, "X": {},
            "D": {"arrive": self.nothing, "wait": self.nothing},
            "B": {"fence_init": self.nothing}, "O": {"change": self.nothing}, "TM": {"fence_before": lambda *_: None},
            "C": {"wait": self.wait_for_stores},
        }  # fmt: skip

    def nothing(self, *_: Any) -> None:
        """Ignore an instruction that prepares the kernel. Raises NotCertified after the start."""
        if self.phase != Phase.START:
            raise NotCertified("a thread that adds partial sums does something else")

    def wait_for_stores(self, most: int, _reads: bool, m: Mask) -> None:
        """cp.async.bulk.wait_group: a thread that waits for all its groups may end."""
        if m is None and not self.depth and not most:
            self.progress.stores_read = True

    # --- running

    def _step(self, block: int, registers: Registers) -> int | Condition | None:
        """Executes a block; notes where branches lead while slices are added."""
        following = super()._step(block, registers)
        branches = self.program.pieces[block].condition is not None
        if branches and self.phase >= Phase.TILE and self.counter_value is None:
            target = following.key if isinstance(following, Condition) else following
            self.taken.setdefault(block, []).append(target)
        return following

    def unknown_branch(self) -> Condition:
        """At the start, whose values are checked by the proofs of roles, a thread may go either way."""
        if self.phase != Phase.START:
            return super().unknown_branch()
        return Condition(self.facts, (Unstated(frozenset(self.thread.lane_names)),))

    def _execute(self, block: int, registers: Registers) -> None:
        """Executes the statements of a block."""
        if self.phase != Phase.START:
            super()._execute(block, registers)
            return
        # At the start, a value that this machine cannot compute becomes unknown: items may need it, and the proof of
        # the thread's role checks these. Lines without a result, such as stores, must be covered.
        for line in self.program.pieces[block].text:
            name, equals, _ = line.partition(" = ")
            try:
                exec(line, self.scope, registers)
            except (NotCertified, AttributeError, TypeError):
                if not equals or not name.isidentifier():
                    raise
                registers[name] = UNKNOWN

    def _met_progress(self, sides: list[tuple[Condition, Any, Progress]]) -> Progress:
        """As in the base class. Both sides must also have waited, counted, synchronised and added alike. If only one
        has returned the counter to zero, the group must not be the last one on the other side."""
        (_, _, a), (_, _, b) = sides
        if (a.waited, a.counted, a.synchronised, a.added) != (b.waited, b.counted, b.synchronised, b.added):
            raise NotCertified("a part of a group's threads waits, counts or meets")
        out = super()._met_progress(sides)
        out.stores_read = a.stores_read and b.stores_read
        if a.cleared is not b.cleared:
            for test, _, progress in sides:
                if progress.cleared is False:
                    with self.facts.side(test):
                        self.check_not_last()
            out.cleared = None
        return out

    def beyond(self, stored: Stored) -> tuple[Polynomial, ...]:
        """As in the base class; a sum also need not be stored if its vector lies beyond the share."""
        return *super().beyond(stored), stored.vector - self.share.end

    # --- values

    def shuffle(self, mode: str, value: Any, lane: Any, clamp: Any, members: Any, m: Mask, site: int) -> Any:
        """As in the base class. Records the shuffled value without its warp term; ``sum_proof`` checks that all lanes
        agree."""
        out = super().shuffle(mode, value, lane, clamp, members, m, site)
        self.agreed.append(poly_of(value).substituted("warp", ZERO).key)
        return out

    def movmatrix(self, value: Any, m: Mask, _site: int) -> Cells:
        """movmatrix of two adjacent sums of a vector (number 0 and 1, or 2 and 3), by all lanes of a warp. Raises
        NotCertified for anything else."""
        value, share = settled(value), self.share
        kind = self.kinds[value.one_kind] if isinstance(value, Cells) else None
        if m is not None or self.depth or kind is None or kind.source != SLAB or (value.width, value.bytes) != (2, 4):
            raise NotCertified("movmatrix operand is not two 16-bit sums in every lane")
        (first, element), second = (share.vector_of(kind.col + int(at)) for at in value.cols.flat)
        if (
            element % 2
            or second[1] != element + 1
            or not second[0].equals(first)
            or share.lane_names & {*first.names()}
        ):
            raise NotCertified("movmatrix of sums that are not neighbours in a vector")
        self.agreed.append((first.key, element))
        number = self.kinds.number(kind._replace(source=TURNED))
        return Cells(np.full_like(value.kinds, number), value.rows, value.cols, value.width)

    # --- other groups: barriers and counters

    def sync(self, number: Any, count: Any, m: Mask, *_: int) -> None:
        """bar.sync: of any threads at the start, which the proofs of roles check; then of the group, once per tile.
        Raises NotCertified for any other one."""
        if self.phase == Phase.START:
            return
        share, progress = self.share, self.progress
        if self.phase != Phase.TILE or m is not None or self.depth or progress.synchronised or progress.added:
            raise NotCertified("a barrier that is not the one of a group for a tile")
        barriers, threads = (np.unique(self._number(each)) for each in (number, count))
        if barriers.tolist() != [share.barrier_number] or threads.tolist() != [share.threads]:
            raise NotCertified(f"barrier {barriers} of {threads} threads is not the group's")
        if share.is_first_thread and not progress.waited:
            raise NotCertified("a group meets before its first thread has waited for all partial sums of a tile")
        progress.synchronised = True

    def check_counter(self, address: Any) -> None:
        """Raise NotCertified unless an address is that of the tile's counter."""
        number = self.counter(address, self.all_lanes)
        if not number.equals(self.share.tile):
            raise NotCertified(f"the counter of tile {number}, not of the group's tile")

    def wait_for_parts(self, block: int, registers: Registers) -> tuple[int, Registers]:
        """Prove the loop of one block in which the first thread waits for all parts of a tile: for every value that the
        counter may have, it ends exactly if all parts are counted. Returns the block after the loop, and the registers
        there. Raises NotCertified if the loop does anything else than to load the counter and compare it."""
        share, progress = self.share, self.progress
        if self.phase != Phase.TILE or not share.is_first_thread or progress.waited or progress.synchronised:
            raise NotCertified("a wait for a counter that is not the one of a group's first thread")
        if self.program.loops[block] != {block} or any(
            ins.base not in ("ld", "and", "or", "xor", "shl", "shr", "add", "sub", "setp", "mov", "selp", "bfe")
            for ins in self.program.blocks[block].all()
        ):
            raise NotCertified("between two looks at a counter, a thread does more than to compute")
        (after,) = {target for target in self.program.blocks[block].targets if target != block}
        changed: Registers = registers
        for value, complete, assumed in self._counted():
            with self.facts.side(at_least(self.facts, *assumed)):
                self.counter_value = value
                try:
                    following = self._step(block, changed := dict(registers))
                finally:
                    self.counter_value = None
            if following != (after if complete else block):
                raise NotCertified(f"a wait for {share.count} parts goes on, or does not, when {value} is counted")
        written = {name for name in changed if changed[name] is not registers.get(name)}
        progress.waited = True
        return after, registers | dict.fromkeys(written, UNKNOWN)

    def _counted(self) -> Iterator[tuple[Any, bool, tuple[Polynomial, ...]]]:
        """Every value that the counter may have, as one or several; whether all parts are counted then, and polynomials
        that are at least 0 for these values. The low half counts parts, the upper half vectors."""
        count, vectors = self.share.count, self.share.vectors
        if count.is_constant:
            for seen in product(range(int(count.constant) + 1), range(vectors + 1)):
                yield np.array([seen[0] + seen[1] * COUNTER_HALF], "u4"), seen[0] == count.constant, ()
            return
        self.facts.bounds |= {(PARTS_SEEN,): (0, COUNTER_HALF - 1), (VECTORS_SEEN,): (0, vectors)}
        upper, parts = Polynomial.named(VECTORS_SEEN, COUNTER_HALF), Polynomial.named(PARTS_SEEN)
        yield Word(upper + parts, 32, self.facts), False, (count - 1 - parts,)
        yield Word(upper + count, 32, self.facts), True, ()

    def count_vectors(self, kind: AtomicKind, address: Any, value: Any, _compared: Any, m: Mask, *_: int) -> Any:
        """atom.add: the first thread counts the vectors that its group adds. Returns the counter's value before: all
        parts, and the vectors that other groups have counted. Raises NotCertified for any other atomic."""
        share, progress = self.share, self.progress
        if self.phase != Phase.TILE or not share.is_first_thread or m is not None or self.depth or progress.counted:
            raise NotCertified("an atomic that does not count a group's vectors once")
        if not progress.waited or (kind.op, kind.kind) != ("add", "u32") or kind.space == "shared" or not kind.returns:
            raise NotCertified("an atomic that does not add to the counter of a tile that was waited for")
        if scope_of(kind.read) != Scope.GPU or scope_of(kind.write) != Scope.GPU:
            raise NotCertified("an atomic that counts vectors for a part of the device only")
        self.check_counter(address)
        if not polynomial(value, 32).equals((share.end - share.at) * COUNTER_HALF):
            raise NotCertified("not as many vectors are counted as are added")
        progress.counted = True
        return Word(share.before * COUNTER_HALF + share.count, 32, self.facts)

    def check_not_last(self) -> None:
        """Raise NotCertified unless the group is provably not the last one to count vectors of the tile. Only the last
        group's first thread must zero the counter."""
        share = self.share
        if share.is_first_thread and not self.facts.holds(
            Polynomial.of(share.vectors - 1) - share.before - (share.end - share.at)
        ):
            raise NotCertified("the last group to count its vectors does not return the counter to zero")

    def _clear(self, address: Any, value: Any, size: int, strength: int) -> None:
        """A store to a counter: the first thread of the last group returns it to zero. Raises NotCertified for any
        other store, and if the group may not be the last one."""
        share, progress = self.share, self.progress
        self.check_counter(address)
        if (
            self.phase != Phase.TILE
            or not share.is_first_thread
            or not progress.counted
            or not progress.added
            or progress.cleared is not False
        ):
            raise NotCertified("a counter is returned to zero by another thread, twice or too early")
        if size != SUM_BYTES or not strength or scope_of(strength) != Scope.GPU or self._number(value).any():
            raise NotCertified("a counter is not returned to zero for the whole device")
        if not self.facts.holds(share.before + (share.end - share.at) - share.vectors):
            raise NotCertified("a counter is returned to zero that other groups still need")
        progress.cleared = True

    # --- global memory

    def load(self, address: Any, size: int, m: Mask, _site: int = 0, strength: int = 0) -> Any:
        """ld.global of partial sums, or of a counter in the loop that waits for it. Partial sums may be loaded under a
        condition: they are then valid where it holds, and unknown if it is known to be false."""
        if self.counter_value is not None:
            self.check_counter(address)
            if m is not None or size != SUM_BYTES or not strength & ORDERS or scope_of(strength) != Scope.GPU:
                raise NotCertified("a wait for a counter that does not acquire for the whole device")
            return self.counter_value
        test = settled(m)
        if test is None or (isinstance(test, np.ndarray) and test.all()):
            return self._load(address, size, strength)
        if isinstance(test, np.ndarray):
            return unknown(1, size // SUM_BYTES, SUM_BYTES)
        with self.facts.side(test):
            # A vector that lies before the end of the share is one of the tile.
            left = self.share.vectors - self.share.end
            if self.facts.truth(left):
                self.facts.learn(*(each.gap + left for each in test.implied() if isinstance(each, AtLeast)))
            return self._load(address, size, strength)

    def _load(self, address: Any, size: int, strength: int) -> Partial:
        """Loads one k slice's partial sums for these positions, ``size`` bytes of a slab of the tile. Raises
        NotCertified before the group's barrier, and for other positions."""
        if self.phase != Phase.VECTORS or not self.progress.synchronised:
            raise NotCertified("partial sums are loaded before all parts of the tile are known to be stored")
        if strength & READ_ONLY:
            raise NotCertified("partial sums are loaded through the read-only path")
        matrix, place = self._elements_at(address, size, False, self.all_lanes)
        kind = self.kinds[place.one_kind]
        if matrix.name != PARTIALS or kind is None:
            raise NotCertified("a load of what are no partial sums")
        # A slab is a row of the workspace: the tile's are from tile * count on, one for each slice.
        number = kind.row + int(place.rows.flat[0]) - self.share.first_slab
        if not (self.facts.holds(number) and self.facts.holds(self.share.count - 1 - number)):
            raise NotCertified("partial sums are loaded from a slab that is none of the tile's")
        kinds = np.full_like(place.kinds, self.kinds.number(Kind(SLAB, ZERO, kind.col)))
        whole = Cells(kinds, np.zeros_like(place.rows), place.cols, SUM_BYTES)
        return Partial(whole, number, number + 1, self.share.count)

    def store_sums(self, address: Any, value: Any, size: int, strength: int) -> None:
        """Store sums to D, in the loop over vectors, or zero to a counter. Raises NotCertified for any other store."""
        if isinstance(address, Word) and ARRIVALS in address.poly.names():
            self._clear(address, value, size, strength)
            return
        if self.phase != Phase.VECTORS:
            raise NotCertified("sums are stored to D before all parts of the tile are known to be stored")
        super().store_sums(address, value, size, strength)

    def store_sum(self, address: Any, value: Cells, d: Matrix) -> None:
        """As in the base class. The sum must also be of a vector of the iteration and of the share."""
        matrix, place = self._elements_at(address, d.width, True, self.all_lanes)
        target, kind = self.kinds[place.one_kind], self.kinds[value.one_kind]
        if matrix.name != d.name or target is None or kind is None or kind.source not in (SLAB, TURNED):
            raise NotCertified("what is stored to D is not a sum over all slices")
        row, col = target.row + int(place.rows.flat[0]), target.col + int(place.cols.flat[0])
        position = kind.col + int(value.cols.flat[0])
        vector, element = self.share.vector_of(position)
        tile = self.contract.tile
        if tile is None:
            raise NotCertified("a group adds the vectors of a tile that it must pass over")
        is_turned = kind.source == TURNED
        summed = self.share.turned(vector, element) if is_turned else position
        self.share.check_place(vector, summed, row - tile.row, col - tile.col)
        for gap in (vector - self.at, self.share.end - 1 - vector):
            if not self.facts.holds(gap):
                raise NotCertified("a group stores sums of a vector that is not of its share")
        key = vector.key, element, is_turned
        if key in self.progress.stored:
            raise NotCertified("a sum is stored twice")
        self.progress.stored[key] = Stored(row, col, vector, False)
