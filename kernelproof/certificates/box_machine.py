"""Executes the memory accesses of a role's threads: TMA loads of boxes, ldmatrix, stmatrix, and TMA stores of D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, Kind
from kernelproof.certificates.contract import BoxMap, Matrix
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.loops import TURN
from kernelproof.certificates.pipelines import FIRST_STAGE, FIRST_WARP
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.role_machine import RoleMachine
from kernelproof.certificates.role_state import CONSUMER, PRODUCER
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.words import Word, polynomial
from kernelproof.emulator.hopper.bulk import Delivery
from kernelproof.emulator.hopper.tensor_map import swizzled
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Mask
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window
from kernelproof.ground.chips import WARP

BOX_ALIGNMENT = 128  # bytes, of a box in shared memory (PTX ISA)


class BoxMachine(RoleMachine):
    """The machine of a role: a producer loads boxes of A and B, and consumers read matrices and store boxes of D.
    Methods raise NotCertified for an access that other threads could disturb."""

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of every role, and those that access memory."""
        boxes: dict[str, Callable[..., Any]] = {
            "load_tensor": self.load_box, "store_tensor": self.store_box, "commit": self.commit_stores,
            "wait": self.wait_for_stores, "prefetch_tensor": self.prefetch_box,
        }  # fmt: skip
        return super().units() | {
            "S": {"fence_proxy": self.fence_proxy},
            "H": {"load": self.load_matrices, "store": self.store_matrices},
            "C": boxes,
        }

    def _box(self, address: Any, lanes: Lanes) -> tuple[BoxMap, Matrix]:
        """What ``_described`` returns, for an access, which must follow the end of the previous kernel."""
        if not self.track.granted:
            raise NotCertified("global memory is accessed before the previous kernel is known to have ended")
        return self._described(address, lanes)

    def _described(self, address: Any, lanes: Lanes) -> tuple[BoxMap, Matrix]:
        """The tensor map at an address, which must be the same in these lanes, and the operand that it describes."""
        at = self._one(address, lanes)
        known = {box.parameter: box for box in self.contract.maps}
        if at >> SHIFT_TO_WINDOW != Window.PARAM or at & 0xFFFFFFFF not in known:
            raise NotCertified("there is no tensor map in the contract at this address")
        box = known[at & 0xFFFFFFFF]
        return box, next(x for x in self.contract.matrices if x.name == box.matrix)

    def _box_places(self, box: BoxMap, matrix: Matrix, address: int) -> Lanes:
        """Where the elements of a box that begins at an address lie in shared memory: indices of shape (rows, cols)."""
        if matrix.width != ELEMENT:
            raise NotCertified(f"boxes of {matrix.type} are not covered")
        offset, size = address - WINDOW_START, box.rows * box.cols * matrix.width
        if address % BOX_ALIGNMENT or offset < 0 or offset + size > self.memory.bytes:
            raise NotCertified(f"a box at byte {offset} of {self.memory.bytes} of shared memory")
        vectors = swizzled(offset, size, box.span)  # byte offsets: swizzling keeps vectors of 16 bytes together
        if vectors.max() + 16 > self.memory.bytes:
            raise NotCertified("a box reaches beyond shared memory")
        return (vectors[:, None] // ELEMENT + np.arange(16 // ELEMENT)).reshape(box.rows, box.cols)

    def _corner(self, coordinates: list[Any], lane: int) -> tuple[Polynomial, Polynomial]:
        """The row and column at which a lane's box begins, as signed numbers of 32 bits."""
        if len(coordinates) != 2:
            raise NotCertified("tensor maps of two dimensions are covered")
        polys = [Polynomial(polynomial(each, 32).in_lane(lane)) for each in coordinates]
        col, row = (Word(poly, 32, self.facts, signed=True).number() for poly in polys)
        return row, col

    @staticmethod
    def _box_elements(box: BoxMap, matrix: Matrix, row: Polynomial, col: Polynomial) -> tuple[Kind, Lanes, Lanes]:
        """The kind of a box's elements, and the offsets of their rows and columns, each of the box's shape."""
        shape = (box.rows, box.cols)
        rows = np.broadcast_to(int(row.constant) + np.arange(box.rows)[:, None], shape)
        cols = np.broadcast_to(int(col.constant) + np.arange(box.cols), shape)
        if matrix.across:
            row, col, rows, cols = col, row, cols, rows
        return Kind(matrix.name, row.varying, col.varying), rows, cols

    def load_box(self, address: Any, coordinates: list[Any], delivery: Delivery, m: Mask, _site: int) -> None:
        """cp.async.bulk.tensor: the producer loads a box to the stage that it fills, in one or several CTAs of the
        cluster."""
        track, protocol, pipeline = self.track, self.protocol, self.pipeline
        paired = pipeline.tensor is not None and pipeline.tensor.paired
        if self.role != PRODUCER or self.lanes != 1 or m is not None or delivery.paired != paired:
            raise NotCertified("a copy to shared memory that is not the producer's")
        if track.filling is None or (track.expected is None and pipeline.leads):
            raise NotCertified("a copy to a stage that was not waited for, or whose bytes are not expected")
        box, matrix = self._box(address, self.all_lanes)
        ranks, bar = self.cluster_places(delivery.bar_address, self.all_lanes)
        # Where a box goes to several pairs, its bytes count in each at the mbarrier of the leader.
        if ranks[0] != pipeline.leader:
            raise NotCertified("bytes count at the mbarrier of a CTA that does not wait for them")
        protocol.mbarrier(protocol.full, track.filling, int(bar[0]), "the stage")
        if matrix.written:
            raise NotCertified(f"{matrix.name} is read")
        places = self._box_places(box, matrix, self._one(delivery.address))
        row, col = self._corner(coordinates, 0)
        first = self.contract.first  # k is counted from the start of the CTA's slice
        row, col = (row - first, col) if matrix.across else (row, col - first)
        kind, rows, cols = self._box_elements(box, matrix, row, col)
        for rank in self._receivers(delivery.ranks):
            peer = protocol.cluster[rank]
            peer.bring(places, pipeline.rank, track.filling)
            if self.notes_loads:
                peer.hold(places, self.kinds.number(kind), rows, cols)
            track.boxes += ((rank, places.reshape(-1)),)
        track.landed += box.rows * box.cols * matrix.width
        share = pipeline.share or track.expected or 0
        if track.landed > share:
            raise NotCertified(f"{share} bytes are expected, and {track.landed} copied")
        if track.landed == share:
            self._filled(track.filling, track.expected)

    def prefetch_box(self, address: Any, _coordinates: list[Any], m: Mask, _site: int) -> None:
        """cp.async.bulk.prefetch.tensor to the L2: it changes no value, also while the previous kernel runs, and TMA
        clips its box. But its tensor map must be one of the contract."""
        if (lanes := self.active(m)) is not None:
            self._described(address, lanes)

    def _receivers(self, ranks: Any) -> list[int]:
        """The ranks of the CTAs that get a box: those in the mask ``ranks``, or the own CTA's if that is None."""
        if ranks is None:
            return [self.pipeline.rank]
        mask = self._one(ranks)
        if not 0 < mask < 1 << self.pipeline.ranks:
            raise NotCertified(f"a box for the CTAs {mask:#b} of a cluster of {self.pipeline.ranks}")
        return [rank for rank in range(self.pipeline.ranks) if mask >> rank & 1]

    def _filled(self, stage: int, expected: int | None) -> None:
        """Records that the producer has issued all copies of a k-tile to a stage. ``expected``: how many bytes the
        stage's mbarrier expects; None if the mbarrier of another CTA counts them."""
        track = self.track
        at = {
            rank: np.concatenate([x for to, x in track.boxes if to == rank]) for rank in {to for to, _ in track.boxes}
        }
        self.protocol.send(stage, at)
        if expected is not None and self.protocol.sizes.setdefault(stage, expected) != expected:
            raise NotCertified("a stage expects another number of bytes than for another k-tile")
        track.filling, track.expected, track.landed, track.boxes = None, None, 0, ()
        track.position, track.step = (track.position + 1) % self.pipeline.round, track.step + 1

    def load_matrices(self, address: Any, matrices: int, m: Mask, site: int, transpose: bool) -> list[Cells]:
        """ldmatrix, from a stage that the role holds."""
        self._together(m)
        places = self.matrix_places(address, matrices, transpose, site)
        owners = self.protocol.owner[places]
        stage, held = int(owners.flat[0]) - FIRST_STAGE, self.track.held or {}
        if (owners != owners.flat[0]).any() or stage not in held or self.track.arrived:
            raise NotCertified("shared memory is read that is not of a stage that was waited for, or was handed back")
        if self.pipeline.ranks > 1:
            raise NotCertified("ldmatrix is not covered in clusters, whose CTAs hand stages back to each other")
        self.track.unmet = True
        numbers = self._contents(held[stage])
        kinds, rows, cols = (x[places] for x in (self.protocol.kinds, self.protocol.rows, self.protocol.cols))
        known, inverse = np.unique(kinds, return_inverse=True)
        kinds = np.array([numbers(int(each)) for each in known], np.int64)[inverse].reshape(places.shape)
        return [Cells(kinds[i], rows[i], cols[i], ELEMENT) for i in range(matrices)]

    def _contents(self, step: Polynomial) -> Callable[[int], int]:
        """A function that converts the number of a kind: from the elements that a stage holds of the k-tile TURN, as
        the protocol notes them, to those that it holds of the k-tile ``step``."""

        def number(old: int) -> int:
            kind = self.kinds[old]
            if kind is None:
                raise NotCertified("shared memory is read that no copy has filled")
            row, col = kind.row.substituted(TURN, step), kind.col.substituted(TURN, step)
            return self.kinds.number(kind._replace(row=row, col=col))

        return number

    def store_matrices(self, address: Any, values: tuple[Any, ...], m: Mask, site: int, transpose: bool) -> None:
        """stmatrix, to shared memory that belongs to the storing warp."""
        self._together(m)
        if self.role != CONSUMER:
            raise NotCertified("a store to shared memory by threads that do not multiply")
        count = len(values)
        if not all(isinstance(each, Cells) and each.width == ELEMENT and each.bytes == 4 for each in values):
            raise NotCertified("what is stored to shared memory are not elements of 16 bits")
        places = self.matrix_places(address, count, transpose, site)
        warps = np.broadcast_to((self.threads // WARP)[None, :, None], places.shape)
        self.protocol.claim(places, (FIRST_WARP + warps).astype(np.int32))
        self.track.stores.write(places)
        state = self.memory.state.own()
        for at, cells in zip(places, values, strict=True):
            state.kinds[at], state.rows[at], state.cols[at] = cells.kinds, cells.rows, cells.cols

    def fence_proxy(self, m: Mask) -> None:
        """fence.proxy.async of shared memory, by all threads of the role."""
        self._together(m)
        self.track.stores.fence()

    def store_box(self, address: Any, coordinates: list[Any], source: Any, reduction: str, m: Mask, _site: int) -> None:
        """cp.async.bulk.tensor to global memory: each lane stores a box of complete sums to D, from shared memory that
        belongs to its warp."""
        lanes = self.active(m)
        if lanes is None:
            return
        tile = self.contract.tile
        if self.role != CONSUMER or reduction or tile is None:
            raise NotCertified("a store of a box that is not a consumer's of sums")
        box, matrix = self._box(address, lanes)
        if not matrix.written:
            raise NotCertified(f"{matrix.name} is written")
        for lane in lanes.tolist():
            places = self._box_places(box, matrix, self._one(source, np.array([lane])))
            if (self.protocol.owner[places] != FIRST_WARP + self.threads[lane] // WARP).any():
                raise NotCertified("a bulk store reads what another warp has written")
            self.track.stores.begin(lane, places.reshape(-1))
            state = self.memory.state
            value = Cells(state.kinds[places], state.rows[places], state.cols[places], ELEMENT)
            target, rows, cols = self._box_elements(box, matrix, *self._corner(coordinates, lane))
            kind = self.whole_sum(value, matrix.name, matrix.width, tile)
            same = kind.row.equals(target.row) and kind.col.equals(target.col)
            if not same or (value.rows != rows).any() or (value.cols != cols).any():
                raise NotCertified("D gets the sum of another element")
            self.written.append((rows, cols))

    def commit_stores(self, m: Mask) -> None:
        """cp.async.bulk.commit_group: each lane's stores since its last commit become a bulk group."""
        lanes = self.active(m)
        for lane in () if lanes is None else lanes.tolist():
            self.track.stores.commit(lane)

    def wait_for_stores(self, most: int, _reads: bool, m: Mask) -> None:
        """cp.async.bulk.wait_group: all bulk groups of a lane but the last ``most`` have read shared memory."""
        lanes = self.active(m)
        for lane in () if lanes is None else lanes.tolist():
            self.track.stores.wait(lane, most)
