"""Executes tcgen05.mma of kind::f16 and tcgen05.commit, and checks that their use of memory is ordered (PTX ISA).

Values are computed when the product is issued. Sums are rounded once per instruction, like those of wgmma. The operands
of a product in shared memory count as being read, and its accumulator as being written, until a thread has waited for
an mbarrier on which a later commit of the issuing thread arrives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.operands import halves
from kernelproof.emulator.arithmetic.tensor_rounding import ROUNDINGS, add_products
from kernelproof.emulator.blackwell.allocation import Allocation
from kernelproof.emulator.blackwell.descriptors import ProductShape, is_tf32, product_shape
from kernelproof.emulator.blackwell.shared_operands import RULE, SharedOperands
from kernelproof.emulator.blackwell.tensor_clocks import TensorClocks
from kernelproof.emulator.blackwell.tensor_memory import COLUMNS, GROUPS, Issuer, Region, TensorMemory
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.mbarrier import MBarriers
from kernelproof.emulator.hopper.peers import Peers
from kernelproof.emulator.hopper.tile import WgmmaForm, add_accumulators
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.reports import EmulatorError

# The disable mask of a product that writes all lanes of both CTAs of a pair; do not change it.
NO_LANE_DISABLED = np.zeros(256, bool)


class Operands(NamedTuple):
    """The operands of a tcgen05.mma, in arrays with one element per lane.

    ``group``: the cta_group. ``d``: the address of D in tensor memory. ``a``: the address of A in tensor memory
    (``a_in_tensor_memory``), or its descriptor. ``b``, ``descriptor``: the descriptors of B and of the instruction.
    ``disabled``: words with a bit for each lane of D that remains unchanged (None: none does). ``accumulates``: the
    products are added to the old D, which is first multiplied by 2 to the power of ``-scale``. ``names_kind``: the
    instruction has .kind::f16 (machine code does not name its kind).
    """

    group: int
    a_in_tensor_memory: bool
    d: Array
    a: Array
    b: Array
    descriptor: Array
    disabled: tuple[Array, ...] | None
    accumulates: Array
    scale: int
    names_kind: bool


class AccumulatorPlace(NamedTuple):
    """The place of D in the tensor memory of each CTA: ``rows`` of the batch, first lane and column, width in columns.
    ``halved``: D occupies 16 of each 32 lanes (M 64)."""

    rows: tuple[int, ...]
    lane: int
    column: int
    width: int
    halved: bool

    def region(self, row: int) -> Region:
        """The region of D in a row of the batch."""
        # A halved D occupies every second group of 16 lanes.
        groups = slice(0, GROUPS) if not self.halved else slice(self.lane // 16, GROUPS, 2)
        return Region(row, groups, self.column, self.column + self.width)


class TensorProducts:
    """The tcgen05.mma of a batch.

    ``uncommitted``: warp of the batch -> lane -> tick of the first product that the lane has issued since its last
    commit. ``last_products``: warp -> tick and instruction of its last product. ``issuers``: lanes that have issued
    products. ``form_numbers``: shape and place of an accumulator -> a number for it. ``remote_work``: row -> column of
    the clocks -> (tick, instruction) of the last asynchronous work on the row's memory by another CTA.
    """

    def __init__(
        self,
        batch: BatchState,
        clocks: TensorClocks,
        peers: Peers,
        shared: ClusterMemory,
        mbarriers: MBarriers,
        memory: TensorMemory,
        allocation: Allocation,
    ) -> None:
        self.batch, self.launch, self.clocks, self.peers = batch, batch.launch, clocks, peers
        self.shared, self.mbarriers, self.memory, self.allocation = shared, mbarriers, memory, allocation
        self.shared_operands = SharedOperands(batch, clocks, shared)
        self.hazards = batch.launch.options.hazards
        self.uncommitted: dict[int, dict[int, int]] = {}
        self.issuers: set[int] = set()
        self.form_numbers: dict[tuple[object, ...], int] = {}
        self.remote_work: dict[int, dict[int, tuple[int, int]]] = {}
        self.last_products: dict[int, tuple[int, int]] = {}

    # --- tcgen05.mma ---

    def mma(self, operands: Operands, m: Mask, site: int) -> None:
        """tcgen05.mma by one thread of each CTA, or of each pair."""
        lanes = self.batch.lanes(m)
        if not lanes.size:
            return
        self.allocation.use_group(operands.group, lanes, site)
        for lane in self._issuing_lanes(lanes, site, "tcgen05.mma"):
            self._issue(operands, lane, site)
        self.launch.version += 1

    def _issuing_lanes(self, lanes: Array, site: int, name: str) -> list[int]:
        """The first lane of each warp. Warps of which several lanes execute the instruction are reported."""
        warps, first = np.unique(lanes >> 5, return_index=True)
        if len(warps) < len(lanes):
            several = lanes[np.isin(lanes >> 5, warps[np.bincount(np.searchsorted(warps, lanes >> 5)) > 1])]
            text = f"{name} by {len(several)} threads at once: each of them issues it, but only one may (elect.sync)"
            self.batch.report_lanes("tcgen05-issuer", text, site, several)
        return [int(lane) for lane in lanes[first]]

    def _issue(self, operands: Operands, lane: int, site: int) -> None:
        """Execute the product that a lane issues. Raises EmulatorError for kinds that are not modelled."""
        descriptor = int(operands.descriptor[lane])
        if not operands.names_kind and is_tf32(descriptor):
            raise EmulatorError("tcgen05.mma of kind::tf32 is not modelled")
        kind, wrong = product_shape(descriptor, operands.group)
        if wrong:
            self.batch.report_lane(RULE, f"instruction descriptor: {wrong}", site, lane)
        if kind is None:
            return
        row, warp = int(self.batch.row_of[lane]), int(self.batch.warp[lane])
        issuer = Issuer(lane, row, warp, self.clocks.product_column(row, warp))
        rows = (row,) if operands.group == 1 else tuple(sorted((row, self.allocation.peer(row))))
        place = self._place(int(operands.d[lane]), kind, operands.group, rows, lane, site)
        if place is None:
            return
        for other in rows:
            if other != row:
                self._visit(other, issuer, self.launch.tick, site)
        factors = self._operands(operands, kind, rows, issuer, site)
        if factors is None:
            return
        accumulates = bool(operands.accumulates[lane])
        self._tag_accumulator(place, kind, issuer, accumulates, site)
        self._accumulate(kind, place, *factors, accumulates, operands.scale, self._disabled(operands, lane))
        self.issuers.add(lane)
        self.uncommitted.setdefault(lane >> 5, {}).setdefault(lane, self.launch.tick)
        self.last_products[lane >> 5] = self.launch.tick, site
        if self.launch.counters is not None:
            self.launch.counters.tcgen05 += 1
            self.launch.counters.tcgen05_flops += 2 * kind.m * kind.n * 16

    def _tag_accumulator(
        self, place: AccumulatorPlace, kind: ProductShape, issuer: Issuer, accumulates: bool, site: int
    ) -> None:
        """Check and tag the write of D."""
        shape = (place.column, place.lane, kind.m, kind.n, kind.acc)
        number = self.form_numbers.setdefault(shape, len(self.form_numbers) + 1)
        for row in place.rows:
            self.memory.product_write(place.region(row), issuer, number, accumulates, site)

    def _visit(self, row: int, issuer: Issuer, tick: int, site: int) -> None:
        """Check that another CTA has started, and record asynchronous work on its memory, before whose end it must not
        exit."""
        if self.hazards:
            self.peers.visit(row, np.array([issuer.thread]), site, remember=False)
            self.remote_work.setdefault(row, {})[issuer.agent] = tick, site

    # --- places in tensor memory ---

    def _place(
        self, address: int, kind: ProductShape, group: int, rows: tuple[int, ...], lane: int, site: int
    ) -> AccumulatorPlace | None:
        """The place of D; None, and a report, if it cannot lie there."""
        first, column = address >> 16, address & 0xFFFF
        halved = kind.m == 64
        width = kind.n // 2 if group == 2 and kind.m == 128 else kind.n
        if first not in ((0, 16) if halved else (0,)):
            text = f"D at lane {first} of tensor memory: M {kind.m} begins at lane 0{' or 16' if halved else ''}"
            self.batch.report_lane("tensor-memory-bounds", text, site, lane)
            return None
        out = AccumulatorPlace(rows, first, column, width, halved)
        return out if all(self._is_owned(row, column, width, "D", lane, site) for row in rows) else None

    def _is_owned(self, row: int, column: int, width: int, name: str, lane: int, site: int) -> bool:
        """Do the columns of an operand lie in tensor memory? Columns that are not allocated are reported."""
        high = column + width
        if high <= COLUMNS and self.allocation.owned[row, column:high].all():
            if self.memory.hazards:
                self.allocation.check_access(row, column, high, lane, site)
            return True
        where = "" if row == self.batch.row_of[lane] else " of the peer"
        text = f"{name} in columns {column} to {high - 1} of tensor memory{where}, which are not allocated"
        self.batch.report_lane("tensor-memory-bounds", text, site, lane)
        return high <= COLUMNS

    def _view(self, place: AccumulatorPlace) -> Array:
        """A view of the words of D: (rows, 128, columns), or (rows, 4, 16, columns) if D is halved."""
        low, high = place.column, place.column + place.width
        # The CTAs of a pair are neighbours.
        data = self.memory.data[place.rows[0] : place.rows[-1] + 1]
        if place.halved:
            return np.asarray(data.reshape(-1, 4, 32, COLUMNS)[:, :, place.lane : place.lane + 16, low:high])
        return np.asarray(data[:, :, low:high])

    # --- operands ---

    def _operands(
        self, operands: Operands, kind: ProductShape, rows: tuple[int, ...], issuer: Issuer, site: int
    ) -> tuple[Array, Array] | None:
        """The values of A of each CTA, shape (CTAs, rows of A, 16), and of B, shape (16, n); None, and a report, if
        they cannot be read."""
        a, b, height = int(operands.a[issuer.thread]), int(operands.b[issuer.thread]), kind.m // len(rows)
        if operands.a_in_tensor_memory:
            from_tensor_memory = self._tensor_memory_a(a, kind, height, rows, issuer, site)
            shared = self.shared_operands.read(kind, None, b, rows, issuer, site)
        else:
            from_tensor_memory = None
            shared = self.shared_operands.read(kind, a, b, rows, issuer, site)
        if shared is None:
            return None
        left, right = (from_tensor_memory if operands.a_in_tensor_memory else shared[0]), shared[1]
        return None if left is None else (left, right)

    def _tensor_memory_a(
        self, address: int, kind: ProductShape, height: int, rows: tuple[int, ...], issuer: Issuer, site: int
    ) -> Array | None:
        """The values of A in tensor memory, shape (CTAs, height, 16); None, and a report, if it cannot lie there. A has
        8 columns of words with two elements."""
        first, column = address >> 16, address & 0xFFFF
        halved = height == 64
        if kind.m_major_a or (halved and len(rows) == 2) or first not in ((0, 16) if halved else (0,)):
            text = (
                f"A at lane {first} of tensor memory for M {kind.m}: it is not K-major, does not begin at lane 0, or "
                "has M 128 in a pair of CTAs"
            )
            self.batch.report_lane(RULE, text, site, issuer.thread)
            return None
        place = AccumulatorPlace(rows, first, column, 8, halved)
        for row in rows:
            if not self._is_owned(row, column, 8, "A", issuer.thread, site):
                return None
            self.memory.product_read(place.region(row), issuer, site)
        words = np.ascontiguousarray(self._view(place).reshape(len(rows), height, 8))
        return halves(words.view(np.uint16), kind.kind_a)

    # --- sums ---

    def _disabled(self, operands: Operands, lane: int) -> Array:
        """Per lane of the tensor memory of the CTAs, shape (256,): does the product leave it unchanged?"""
        if operands.disabled is None:
            return NO_LANE_DISABLED
        words = np.array([register[lane] for register in operands.disabled], np.uint32)
        out = np.zeros(256, bool)
        # Bit i of word w belongs to lane 32 * w + i.
        bits = (words[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).reshape(-1)
        out[: len(bits)] = bits
        return out

    def _accumulate(
        self,
        kind: ProductShape,
        place: AccumulatorPlace,
        left: Array,
        right: Array,
        accumulates: bool,
        scale: int,
        disabled: Array,
    ) -> None:
        """Compute D of each CTA and write it to tensor memory."""
        count, height = left.shape[:2]
        view = self._view(place)
        before = self._old_accumulator(kind, view, height, scale) if accumulates else None
        rounding = ROUNDINGS.get(self.launch.options.rounding)
        if kind.acc == "f32" and rounding is not None:
            total = np.zeros((count, height, kind.n), np.float32) if before is None else before
            block = add_products(kind.sign * left, np.broadcast_to(right, (count, *right.shape)), total, rounding)
        else:
            block = np.matmul(left, right)
            form = WgmmaForm(
                kind.n, kind.kind_a, kind.kind_b, kind.acc, False, kind.m_major_a, kind.n_major_b, kind.sign
            )
            block = add_accumulators(form, -block if kind.sign < 0 else block, before, [accumulates] * count)
        words = self._words(block, view.shape)
        if disabled.any():
            lanes = disabled[: 128 * count].reshape(count, 4, 32)
            lanes = lanes[:, :, place.lane : place.lane + 16] if place.halved else lanes.reshape(count, 128)
            words = np.where(lanes[..., None], view, words)
        view[...] = words

    def _old_accumulator(self, kind: ProductShape, view: Array, height: int, scale: int) -> Array:
        """The values of D before the product, times 2 to the power of ``-scale``, shape (CTAs, rows of D, n), in the
        accumulator's type."""
        count = len(view)
        # M 128 of a pair: each CTA has 64 rows, whose second half of columns lies in lanes 64 to 127.
        paired = view.shape[1] == 128 and height == 64
        words = view.reshape(count, 2, 64, -1).transpose(0, 2, 1, 3) if paired else view
        words = words.reshape(count, height, kind.n)
        if kind.acc == "f16":
            values = words.astype(np.uint16).view(np.float16)
            return values if not scale else (values * np.float16(2.0**-scale)).astype(np.float16)
        out = words.view(np.float32)
        return out if not scale else out * np.float32(2.0**-scale)

    def _words(self, block: Array, shape: tuple[int, ...]) -> Array:
        """Sums, shape (CTAs, rows of D, n), as words of tensor memory. The upper half of a word with an f16 is
        undefined."""
        if block.dtype == np.float16:
            words = block.view(np.uint16).astype(np.uint32) | np.uint32(0xFFFF0000)
        else:
            words = block.view(np.uint32)
        # The inverse of the exchange in ``_old_accumulator``.
        if block.shape[1] == 64 and shape[1] == 128:
            words = words.reshape(len(block), 64, 2, -1).transpose(0, 2, 1, 3)
        return words.reshape(shape)

    # --- tcgen05.commit ---

    def commit(self, group: int, address: Array, ranks: Array | None, m: Mask, site: int) -> None:
        """tcgen05.commit: one arrival on an mbarrier in each CTA of ``ranks``, which comes when the thread's products
        are complete."""
        lanes = self.batch.lanes(m)
        if not lanes.size:
            return
        self.allocation.use_group(group, lanes, site)
        for row, offset, _, issuing in list(self.mbarriers.places(address, m, site)):
            for lane in issuing.tolist():
                self._check_issuer(lane, site)
                self.launch.tick += 1
                clock, last_tick = self._released_clock(lane), self.launch.tick - 1
                for target in self._target_rows(row, lane, ranks, site):
                    self._arrive(target, offset, clock, last_tick, lane, site)
                self.uncommitted.get(lane >> 5, {}).pop(lane, None)

    def _column(self, lane: int) -> int:
        """The column of the clocks for the products of a lane's warp."""
        return self.clocks.product_column(int(self.batch.row_of[lane]), int(self.batch.warp[lane]))

    def _check_issuer(self, lane: int, site: int) -> None:
        """Report a commit by a thread that has issued no products although others have: it does not cover theirs."""
        row = self.batch.row_of[lane]
        others = [other for lanes in self.uncommitted.values() for other in lanes if self.batch.row_of[other] == row]
        if lane not in self.issuers and others:
            text = (
                "tcgen05.commit by a thread that has issued no tcgen05.mma: it does not wait for those of thread "
                f"{int(self.batch.thread[others[0]])}"
            )
            self.batch.report_lane("tcgen05-issuer", text, site, lane)

    def _target_rows(self, row: int, lane: int, ranks: Array | None, site: int) -> list[int]:
        """The rows of the CTAs in which a lane's commit arrives. ``ranks``: a mask of ranks per lane; None: ``row``."""
        if ranks is None:
            return [row]
        chosen = [rank for rank in range(16) if int(ranks[lane]) >> rank & 1]
        beyond = [rank for rank in chosen if rank >= self.batch.cluster_size]
        if beyond:
            text = f"names CTA {beyond[0]} of a cluster of {self.batch.cluster_size}"
            self.batch.report_lane("cluster", text, site, lane)
        own = int(self.batch.row_of[lane])
        return [self.peers.row_of_rank(own, rank) for rank in chosen if rank not in beyond]

    def _arrive(self, target: int, offset: int, clock: Array, last_tick: int, lane: int, site: int) -> None:
        """Arrive on the mbarrier of one CTA. ``last_tick``: the tick before that of the commit."""
        row, warp = int(self.batch.row_of[lane]), int(self.batch.warp[lane])
        if target != row:
            self._visit(target, Issuer(lane, row, warp, self._column(lane)), last_tick, site)
        self.mbarriers.commit(target, offset, clock, np.array([lane]), site)

    def _released_clock(self, lane: int) -> Array:
        """The clock that the arrival of a commit releases. It includes the products of this thread, accesses that have
        ended for the thread, and its warp's completed accesses, as after a tcgen05.fence::before_thread_sync."""
        clocks = self.clocks
        if not self.hazards:
            return clocks.empty()
        row, warp = int(self.batch.row_of[lane]), int(self.batch.warp[lane])
        column = self._column(lane)
        present = clocks.of_lane(lane)
        clock = clocks.only_ended(present)
        # Without clusters the columns of asynchronous work have no second entry, so they are released unchanged.
        if not clocks.ended:
            clock[clocks.wgmma :] = present[clocks.wgmma :]
            clock[clocks.all_lanes_offset : clocks.columns] = 0
        others = [tick for other, tick in self.uncommitted.get(lane >> 5, {}).items() if other != lane]
        # All lanes of a warp share this column, so the tick must not cover products of other lanes that are not
        # committed.
        clocks.set(clock, column, min([self.launch.tick, *others]))
        clocks.set(clock, clocks.access_column(row, warp), self.memory.completed_before(row, warp))
        return clock

    # --- the end ---

    def exited(self, row: int) -> None:
        """Report products that may still be in flight when a CTA ends: those of its threads, and those on its
        memory."""
        clock, clocks = self.clocks.of_cta(row), self.clocks
        for warp, (tick, site) in self.last_products.items():
            owner, index = divmod(warp, self.batch.warps_per_cta)
            if owner == row and tick >= clock[clocks.product_column(row, index) + clocks.ended]:
                text = "the CTA exits while tcgen05.mma may be under way: none of its threads has waited for a commit"
                self.batch.report("in-flight", text, site, row, ())
        for column, (tick, site) in self.remote_work.get(row, {}).items():
            if tick >= clock[column + clocks.ended]:
                text = "tcgen05.mma or commit of another CTA may use this CTA's memory after its exit"
                self.batch.report("cluster", text, site, row, ())
