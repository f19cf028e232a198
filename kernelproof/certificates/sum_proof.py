"""Proves how a split-k pipeline adds partial sums: each group of every CTA adds an equal share of them.

Each item of such a pipeline is a slice of a tile's k. A group of consumers stores the item's partial sums to the item's
own slab of a workspace and executes its barrier. Then one thread counts the item in the tile's counter, with release.
When a group has no item left, it takes its **share** of the vectors of all tiles: of V vectors, group g of G (counted
over all CTAs) has those from V * g / G to before V * (g + 1) / G, both rounded down. So each vector belongs to one
group.

A group goes through its share tile by tile:

- Its first thread waits, with acquire, until all parts of the tile are counted, and counts the group's vectors in the
  upper half of the counter. All threads execute the group's barrier. Each thread then loads its vectors of all slabs of
  the tile, adds them in the order of slices, and stores those sums that lie within D, each once.
- Each group counts its vectors after its wait. So the group that finds all other vectors of the tile counted is the
  last one that reads the counter: it alone returns the counter to zero.

No wait lasts for ever: a thread that waits for parts has no item left, neither items nor producers wait for a sum, and
all CTAs run at the same time, so every part is counted at some time.

The proof executes one thread that stands for any thread of a group, one tile for any tile of the share, and one
iteration of the loop over vectors for any iteration. One iteration suffices because only the registers that count
vectors pass from one to the next: all others that the loop writes are unknown when it begins.

``pipeline_proof`` calls ``SumProof`` after it has proven the roles. ``sum_machine`` executes the thread, and ``share``
has the numbers of threads and vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kernelproof.certificates import rests
from kernelproof.certificates.cells import UNKNOWN, Kinds
from kernelproof.certificates.conditions import OpenFacts, at_least
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import Facts, Fraction, NotCertified
from kernelproof.certificates.invariants import bits_of, is_number, poly_of
from kernelproof.certificates.loops import Case
from kernelproof.certificates.part_loops import PartLoop
from kernelproof.certificates.pipelines import Pipeline, Protocol
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.progress import Key, Phase, Progress
from kernelproof.certificates.role_loops import after_items, exits_of, loops_of, registers_of
from kernelproof.certificates.role_state import CONSUMER
from kernelproof.certificates.share import AT, LEFT, VECTOR, Share
from kernelproof.certificates.slices import SlabContents
from kernelproof.certificates.sum_machine import COUNTER_HALF, SumMachine
from kernelproof.certificates.tensor_loops import heads_of, meeting_of
from kernelproof.certificates.thread_machine import Registers
from kernelproof.certificates.words import Word
from kernelproof.emulator.frontend.flow.loops import reachable
from kernelproof.emulator.frontend.instruction import defs_uses
from kernelproof.emulator.frontend.ptx import Imm
from kernelproof.ground.chips import WARP

# Names in polynomials: the first vector of a group's share, and the one after its last, counted over all tiles.
FIRST, END = "share_first", "share_end"
MOST_VECTORS = 1 << 60  # limit on these two
named = Polynomial.named


class Way(NamedTuple):
    """What a thread has done in a tile, as far as the threads that add with it must do the same. ``taken``, ``agreed``:
    the attributes of ``SumMachine`` at the end of the tile."""

    taken: dict[int, list[object]]
    agreed: list[object]


def common_to(cluster: list[Protocol]) -> tuple[dict[int, int], SlabContents]:
    """What the CTAs of a cluster have in common: the number of each group's barrier, and what an item leaves in its
    slab. CTAs whose tiles lie beyond D leave nothing. Raises NotCertified if no CTA leaves sums, or if
    the CTAs differ in these."""
    leaving = [each for each in cluster if each.slab is not None]
    first = leaving[0].slab if leaving else None
    if first is None:
        raise NotCertified("no item leaves partial sums")
    for each in leaving:
        assert each.slab is not None
        same = np.array_equal(each.slab.rows, first.rows) and np.array_equal(each.slab.cols, first.cols)
        if not same or each.meetings != leaving[0].meetings:
            raise NotCertified(
                "the CTAs of a cluster leave partial sums at different places, or meet at other barriers"
            )
    return leaving[0].meetings, first


class SumProof:
    """Proves what the groups of any CTA do after their items. ``cluster``: what the proofs of roles have shown of
    barriers and slabs of its CTAs. Raises NotCertified for a kernel without the loops of the module's docstring: one
    over tiles, and in it a wait for a counter and a loop over vectors.

    ``items``, ``tiles`` and ``spin`` are the heads of the loops over items and tiles, and of the wait; ``vectors``:
    those of the loops over vectors, one for each number of parts that the text tells apart. ``after``: the block after
    the loop over items. ``stores``: whether items have bulk stores, for which a thread must wait before it ends.
    """

    def __init__(
        self, program: Program, pipeline: Pipeline, cluster: list[Protocol], kinds: Kinds, stores: bool
    ) -> None:  # fmt: skip
        assert pipeline.parts is not None
        assert pipeline.adders is not None
        self.program, self.pipeline, self.kinds, self.stores = program, pipeline, kinds, stores
        self.parts, self.adders = pipeline.parts, pipeline.adders
        self.meetings, self.slab = common_to(cluster) if self.adders.within else ({}, SlabContents.nothing(0))
        self.variable = program.emitter.variable
        # Where threads of all roles meet after their items, None if they do not: the end of what is proven here.
        self.end = meeting_of(program) if pipeline.tensor else None
        self.items = heads_of(program)[CONSUMER] if pipeline.tensor else loops_of(program, CONSUMER)[0]
        self.after = after_items(program, self.items)
        spins = list(program.graph.spin_heads)
        outer = [head for head, body in program.loops.items() if spins and spins[0] in body and head != spins[0]]
        if len(spins) != 1 or len(outer) != 1:
            raise NotCertified("partial sums that are not added in one loop over tiles, with one wait for a counter")
        (self.spin,), (self.tiles,) = spins, outer
        within = [x for x in program.loops if x in program.loops[self.tiles] and x not in (self.tiles, self.spin)]
        # A loop over vectors may contain one over slices.
        self.vectors = [x for x in within if not any(x in program.loops[other] for other in within if other != x)]
        several = not isinstance(self.parts.count, int)
        if not self.vectors or (len(self.vectors) > 1 and not several) or self.tiles in program.loops[self.items]:
            raise NotCertified("the vectors of a tile that are not added in one loop after all items")
        # The registers to which an iteration over vectors adds a number. Where they count vectors is checked.
        self.stepped = {
            self.variable(name)
            for head in self.vectors
            for block in program.loops[head]
            for ins in program.blocks[block].all()
            if ins.base == "add" and any(isinstance(operand, Imm) for operand in ins.operands)
            for name in defs_uses(ins)[0]
        }
        if max(self._most_parts(), self.parts.vectors) >= COUNTER_HALF:
            raise NotCertified("a counter has no room for all parts and vectors of a tile")
        self.steps = 0

    def _most_parts(self) -> int:
        """The most parts that a tile may have."""
        count, within = self.parts.count, self.adders.within
        return count if isinstance(count, int) else int(within.facts.interval(count)[1]) if within else 0

    def cases(self) -> Iterator[Case]:
        """Yield a case for each group of the CTA once its sums are proven. Raises NotCertified."""
        if self.adders.within is None:
            for group in range(len(self.pipeline.groups)):
                self.steps = 0
                self._check_no_share(group)
                yield Case(covers=f"group {group} has no partial sums to add", instructions=self.steps)
            return
        self._check_slab()
        for group in range(len(self.pipeline.groups)):
            self.steps = 0
            first, last = self.pipeline.groups[group]
            warpgroups = range((last - first) // (4 * WARP))
            ways = [self._thread(group, True, 0), *(self._thread(group, False, each) for each in warpgroups)]
            self._check_together(ways)
            yield Case(covers=f"group {group} adds partial sums of any tile", instructions=self.steps)

    def _check_slab(self) -> None:
        """Raise NotCertified unless a slab has every sum of a tile exactly once."""
        tile = self.adders.within.tile if self.adders.within else None
        assert tile is not None
        rows, cols = self.slab.rows, self.slab.cols
        inside = (rows >= 0) & (rows < tile.rows) & (cols >= 0) & (cols < tile.cols)
        counts = np.bincount((rows * tile.cols + cols)[inside], minlength=tile.rows * tile.cols)
        if not inside.all() or (counts != 1).any():
            raise NotCertified("an item does not leave each sum of its tile once")

    def _check_together(self, ways: list[list[Way]]) -> None:
        """Check that threads of a group execute its barriers, and lanes of a warp their shuffles and movmatrix,
        together: none of these lies between a branch at which threads may differ and the block where its sides meet.
        ``ways``: what ``_thread`` returns for the first thread, for others of its warpgroup, and then for those of
        further warpgroups. Raises NotCertified."""
        blocks = self.program.blocks
        # The blocks with an instruction that threads must execute together.
        bases = ("bar", "barrier", "movmatrix", "shfl")
        collective = {x.index for x in blocks if any(ins.base in bases for ins in x.all())}
        for of_threads in zip(*ways, strict=True):
            for block in set[int]().union(*(way.taken for way in of_threads)):
                join = self.program.joins[block]
                differs = any(way.taken.get(block) != of_threads[0].taken.get(block) for way in of_threads)
                if differs and (join is None or collective & set(reachable(blocks, blocks[block].targets, join))):
                    raise NotCertified("threads of a group do not meet, or exchange sums, together")
            if of_threads[0].agreed != of_threads[1].agreed:
                raise NotCertified("lanes of a warp exchange sums of different vectors")

    # --- a thread's share

    def _thread(self, group: int, first: bool, warpgroup: int) -> list[Way]:
        """Prove the first thread of a group, or any other thread of a warpgroup. Returns what it has done in a tile
        whose last vector is in the share, and in a tile before whose last vector the share ends."""
        share = self._share(group, first, warpgroup)
        registers, agreed = self._to_share(share)
        ways = []
        for goes_on in (True, False):
            at = rests.number(AT, share.vectors)
            last = Polynomial.of(share.vectors) if goes_on else at + named(LEFT) + 1
            mine = replace(share, tile=self.parts.tile, at=at, end=last)
            assert self.adders.within is not None
            way = self._tile(mine, registers, goes_on, self.adders.within)
            ways.append(way._replace(agreed=agreed + way.agreed))
            for contract in self.adders.passed:
                self._tile(mine, registers, goes_on, contract)
        return ways

    def _share(self, group: int, first: bool, warpgroup: int) -> Share:
        """The share of a group, for its first thread or any other one of a warpgroup; its tile is not set yet. Raises
        NotCertified if the group has no barrier of its own."""
        start, end = self.pipeline.groups[group]
        if group not in self.meetings and self.adders.within is not None:
            raise NotCertified("a group of consumers without a barrier of its own")
        return Share(
            self.parts, group, len(self.pipeline.groups), start, end - start, first, warpgroup,
            self.meetings.get(group, 0), self.slab,
        )  # fmt: skip

    @staticmethod
    def _facts(facts: Facts, share: Share, *assumed: Polynomial) -> OpenFacts:
        """The facts of a problem and those of a thread and its share. ``assumed``: polynomials that are at least 0."""
        out = OpenFacts.of(facts, *assumed, *share.limits)
        out.bounds |= share.bounds
        out.private = frozenset(share.lane_names)
        return out

    def _to_share(self, share: Share) -> tuple[Registers, list[object]]:
        """The registers with which a thread reaches the loop over the tiles of its share, and the machine's ``agreed``
        there. Registers that its items write are unknown. Proves that the loop is reached exactly if the share is not
        empty; raises NotCertified otherwise."""
        parts, groups = self.parts, share.groups
        facts = self._facts(self.adders.entry.facts, share)
        facts.bounds |= {(name,): (0, MOST_VECTORS) for name in (FIRST, END)}
        # The quotients of the module, V * g / G: FIRST and END are defined as these, and the text must compute them.
        own, all_vectors = parts.cta * groups + share.group, parts.tiles * parts.vectors
        facts.fractions += [
            Fraction(all_vectors * own, parts.ctas * groups, named(FIRST)),
            Fraction(all_vectors * (own + 1), parts.ctas * groups, named(END)),
        ]
        machine = SumMachine(self.program, self.adders.entry, facts, self.kinds, share)
        if not facts.holds(parts.ctas - 1 - parts.cta):
            raise NotCertified("the number of a CTA may not be below that of CTAs")
        registers = self._after_items(machine)
        found: list[Registers] = []

        def reached(block: int | None, registers: Registers) -> None:
            gap = named(END) - 1 - named(FIRST)
            if not facts.holds(-gap - 1 if block != self.tiles else gap):
                raise NotCertified("a group does not add its share exactly if it is not empty")
            if block == self.tiles:
                found.append(registers)
            self._check_end(machine, block)

        machine.follow(self.after, registers, None, self._stops(self.tiles), reached)
        self.steps += machine.steps
        if len(found) != 1:
            raise NotCertified(f"the loop over tiles is reached in {len(found)} ways")
        return found[0], machine.agreed

    def _after_items(self, machine: SumMachine) -> Registers:
        """The registers with which a thread has done its items. Those that items write are unknown."""

        def ended(*_: Any) -> None:
            raise NotCertified("a thread of a group ends before its items")

        registers: Registers = machine.follow(0, {}, self.items, (), ended)
        written = registers_of(self.program, self.program.loops[self.items])[1]
        machine.phase = Phase.SHARE
        return registers | dict.fromkeys(map(self.variable, written), UNKNOWN)

    def _check_end(self, machine: SumMachine, block: int | None) -> None:
        """Check, where a thread ends, that it has waited for its bulk stores. ``block``: None at the kernel's end."""
        if block is None and self.stores and not machine.progress.stores_read:
            raise NotCertified("a thread ends while its bulk stores may still read shared memory")

    def _check_no_share(self, group: int) -> None:
        """Check that a thread of a group ends after its items, if no tile has partial sums. Raises NotCertified."""
        for first in (True, False):
            share = self._share(group, first, 0)
            machine = SumMachine(
                self.program, self.adders.entry, self._facts(self.adders.entry.facts, share), self.kinds, share
            )

            def reached(block: int | None, _: Registers, machine: SumMachine = machine) -> None:
                if block == self.tiles:
                    raise NotCertified("a group adds partial sums although there are none")
                self._check_end(machine, block)

            machine.follow(self.after, self._after_items(machine), None, self._stops(self.tiles), reached)
            self.steps += machine.steps

    def _stops(self, *blocks: int) -> tuple[int, ...]:
        """Some blocks, and that at which all threads meet."""
        return (*blocks, *(() if self.end is None else (self.end,)))

    def _at_tile(self, machine: SumMachine, registers: Registers) -> tuple[Registers, list[str]]:
        """The registers with which any tile of the share is reached, and the variables of those that count vectors:
        their value is the number of the next vector, counted over all tiles.

        A register that held FIRST before the loop and is written in it is taken for such a counter, which ``_tile``
        checks. Others that the loop writes are unknown. In others, END and
        ``Pipeline.names`` are replaced by what they are in the tile's own names.
        """
        at, written = machine.share.tile * machine.share.vectors + machine.share.at, self._written(self.tiles)
        values = self.pipeline.names | {END: at + named(LEFT) + 1}
        out, counting = dict[str, Any](), list[str]()
        for name in map(self.variable, self.program.live(self.tiles)):
            value = registers.get(name, UNKNOWN)
            if name in written:
                if is_number(value) and poly_of(value).equals(named(FIRST)):
                    counting.append(name)
                    out[name] = Word(at, bits_of(value), machine.facts)
                else:
                    out[name] = UNKNOWN
            elif isinstance(value, Word) and FIRST not in value.poly.names():
                poly = value.poly
                for old, new in values.items():
                    poly = poly.substituted(old, new)
                out[name] = Word(poly, value.bits, machine.facts, value.signed)
            else:
                out[name] = value if isinstance(value, np.ndarray) else UNKNOWN
        if not counting:
            raise NotCertified("no register counts the vectors of a share")
        return out, counting

    def _written(self, head: int) -> set[str]:
        """The variables of the registers that a loop writes."""
        return set(map(self.variable, registers_of(self.program, self.program.loops[head])[1]))

    def _tile(self, share: Share, registers: Registers, goes_on: bool, contract: Contract) -> Way:
        """Prove any tile of a share. ``goes_on``: whether the share has the tile's last vector, and may go on with the
        next tile, or ends before that vector. A tile that does not begin within D has no sums, and is passed over.
        Raises NotCertified."""
        # At least 0 exactly if the share has the tile's last vector: LEFT vectors follow its first one in the tile.
        has_last = share.at + named(LEFT) + 1 - share.vectors
        # The last fact says that all groups together count at most the vectors of the tile.
        facts = self._facts(
            contract.facts, share, has_last if goes_on else -has_last - 1,
            share.vectors - share.before - (share.end - share.at),
        )  # fmt: skip
        machine = SumMachine(self.program, contract, facts, self.kinds, share)
        machine.phase = Phase.TILE
        start, counting = self._at_tile(machine, registers)
        # Both are counted over all tiles: the vector after the group's last one of this tile, and the end of its share.
        at = share.tile * share.vectors + share.end
        end = share.tile * share.vectors + share.at + named(LEFT) + 1

        def reached(block: int | None, registers: Registers) -> None:
            progress = machine.progress
            if contract.tile is None:
                if progress != Progress(stores_read=progress.stores_read):
                    raise NotCertified("a group adds the vectors of a tile that lies beyond D")
            elif not (progress.synchronised and progress.added) or (
                share.is_first_thread and not (progress.waited and progress.counted)
            ):
                raise NotCertified("a group does not wait for, count, meet for and add the vectors of a tile")
            elif progress.cleared is False:
                machine.check_not_last()
            for name in counting:
                value = registers.get(name)
                if not is_number(value) or not poly_of(value).equals(at):
                    raise NotCertified("the vector after those of a tile is not the next one of the share")
            gap = end - 1 - at
            if not facts.holds(-gap - 1 if block != self.tiles else gap):
                raise NotCertified("a share does not end after its last vector")
            self._check_end(machine, block)

        machine.proven_loops = {self.spin: machine.wait_for_parts}
        machine.proven_loops |= dict.fromkeys(self.vectors, partial(self._vectors, machine))
        machine.follow(self.tiles, start, None, self._stops(self.tiles), reached)
        self.steps += machine.steps
        return Way(machine.taken, machine.agreed)

    # --- the vectors of a tile

    def _vectors(self, machine: SumMachine, head: int, registers: Registers) -> tuple[int, Registers]:
        """Prove a loop over the group's vectors of a tile, from its head. Returns the block after the loop, and the
        registers there. Raises NotCertified."""
        share, facts, written = machine.share, machine.facts, self._written(head)
        if machine.phase != Phase.TILE or machine.progress.added or not facts.holds(share.end - 1 - share.at):
            raise NotCertified("the vectors of a tile are added twice, or although there are none")
        exits = exits_of(self.program, head)
        if len(exits) != 1:
            raise NotCertified("the loop over vectors is left for different places")
        before, machine.phase = machine.progress.copied(), Phase.VECTORS
        counted, loop = share, None
        if not share.count.is_constant:
            loop = PartLoop(self.program, machine, head)
            counted = replace(share, parts=share.parts.of_count(loop.fewest))
            machine.proven_loops[loop.head] = loop.prove
        for iterations in counted.iterations():
            machine.share = replace(iterations, parts=replace(iterations.parts, count=share.count))
            self._iteration(machine, head, registers, written, exits)
        if loop is not None:
            del machine.proven_loops[loop.head]
        machine.share = share
        machine.progress, machine.phase = replace(before, added=True), Phase.TILE
        return exits[0], registers | dict.fromkeys(written, UNKNOWN)

    def _iteration(
        self, machine: SumMachine, head: int, registers: Registers, written: set[str], exits: list[int]
    ) -> None:  # fmt: skip
        """Prove any iteration of a loop over vectors, of those that begin in the columns of the machine's share.
        ``registers``: those before the loop. A register that held the share's first vector there and is written in the
        loop is taken for a counter of vectors, which ``_next_vector`` checks."""
        share, facts = machine.share, machine.facts
        start, counting = dict(registers), dict[str, Polynomial]()
        for name in map(self.variable, self.program.live(head)):
            value = registers.get(name)
            gap = poly_of(value) - share.at if name in written and is_number(value) else None
            if gap is not None and (gap.is_constant or name in self.stepped):
                counting[name] = gap
                start[name] = Word(share.vector + gap, bits_of(value), facts)
        start |= dict.fromkeys(written - counting.keys(), UNKNOWN)
        machine.at, machine.progress.stored = share.vector, {}
        known = (share.vector - share.at, share.end - 1 - share.vector, *share.column_limits)
        if any(facts.truth(gap) is False for gap in known):
            return  # no iteration of this share begins in these columns
        with facts.side(at_least(facts, *known)):
            machine.follow(
                head, start, None, (head, *exits),
                lambda block, after: self._next_vector(machine, counting, block, block == head, after),
            )  # fmt: skip

    def _next_vector(
        self, machine: SumMachine, counting: dict[str, Polynomial], block: int | None, again: bool, registers: Registers
    ) -> None:  # fmt: skip
        """Check that an iteration has stored all sums of its vectors, and counts on by as many vectors. ``counting``:
        the registers that count, and by how much each is larger than the vector's number. ``block``: where the
        iteration leads, None at the kernel's end. ``again``: whether that is the loop's head, to which it must lead
        exactly if vectors of the share are left. Raises NotCertified."""
        if block is None:
            raise NotCertified("a thread ends while its group adds vectors")
        share = machine.share
        steps = set[int]()
        for name, gap in counting.items():
            value = registers.get(name)
            more = poly_of(value) - share.vector - gap if is_number(value) else ZERO
            steps.add(int(more.constant) if more.is_constant else 0)
        if len(steps) != 1 or min(steps) < 1:
            raise NotCertified("no register counts the vectors of a tile")
        (step,) = steps
        # The iteration's vectors. Those after the share's last one belong to another group, or do not exist.
        vectors = [share.vector + i for i in range(step)]
        due = [x for x in vectors if machine.facts.truth(x - share.end) is not True]
        stored = machine.progress.stored.keys()
        if not all(self._are_stored(vector, stored) for vector in due):
            raise NotCertified(f"not all sums of {step} vectors are stored")
        if {key for key, _, _ in stored} - {vector.key for vector in vectors}:
            raise NotCertified(f"an iteration stores sums of more than {step} vectors")
        machine.agreed.append(frozenset(stored))
        left = share.end - 1 - share.vector - step
        if not machine.facts.holds(left if again else -left - 1):
            raise NotCertified("the loop over vectors does not end after the last one")

    @staticmethod
    def _are_stored(vector: Polynomial, stored: Set[Key]) -> bool:
        """Whether each sum of a vector is stored once: of each pair of adjacent sums, both as they were loaded or both
        as movmatrix has exchanged them. Otherwise two lanes would store one sum, and none another one."""
        mine = {(element, turned) for key, element, turned in stored if key == vector.key}
        pairs = [{(first, turned), (first + 1, turned)} for first in range(0, VECTOR, 2) for turned in (False, True)]
        return len(mine) == VECTOR and sum(pair <= mine for pair in pairs) == VECTOR // 2
