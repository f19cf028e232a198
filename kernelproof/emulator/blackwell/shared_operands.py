"""Finds, checks and reads the operands of tcgen05.mma in shared memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.blackwell.descriptors import ProductShape, strides
from kernelproof.emulator.blackwell.tensor_clocks import TensorClocks
from kernelproof.emulator.blackwell.tensor_memory import Issuer
from kernelproof.emulator.hopper.async_reads import Elements, ProductPlaces
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.pattern import numbers, pattern
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.batch_state import BatchState

RULE = "tcgen05-descriptor"
# The most products whose places are cached. A ring of stages uses the same places again and again.
MAX_PLACES = 1024


class Part(NamedTuple):
    """The part of an operand in one CTA: its row of the batch, its elements, and the number of its reader among that
    CTA's asynchronous readers."""

    row: int
    elements: Elements
    reader: int


class ProductOperands(NamedTuple):
    """The places of a product's operands. ``parts``: those of A (none if A is in tensor memory), then those of B.
    ``combined``: the 16-byte elements of all parts, one after another. ``chunks_of_a``: how many of them, the first
    ones, belong to A."""

    parts: list[Part]
    combined: ProductPlaces
    chunks_of_a: int


class SharedOperands:
    """The operands that the products of a batch read in shared memory."""

    def __init__(self, batch: BatchState, clocks: TensorClocks, shared: ClusterMemory) -> None:
        self.batch, self.clocks, self.shared = batch, clocks, shared
        self.hazards = batch.launch.options.hazards
        self.places: dict[tuple[ProductShape, int | None, int, tuple[int, ...], int, int], ProductOperands] = {}

    def read(
        self, kind: ProductShape, a: int | None, b: int, rows: tuple[int, ...], issuer: Issuer, site: int
    ) -> tuple[Array | None, Array] | None:
        """Check, tag and read operands, given by their descriptors.

        Returns A of each CTA, shape (CTAs, rows of A, 16), and B, shape (16, n), of which each CTA of a pair has half
        of the columns. If ``a`` is None, A lies in tensor memory, and None is returned for it. Returns None, and
        reports, if an operand cannot be read.
        """
        key = kind, a, b, rows, issuer.row, issuer.warp
        places = self.places.get(key)
        if places is None:
            places = self._place(kind, a, b, rows, issuer, site)
            if places is None:
                return None
            if len(self.places) >= MAX_PLACES:
                self.places.clear()
            self.places[key] = places
        if self.hazards:
            self._tag(places, issuer, site)
        raw, count = self.shared.views[16].take(places.combined.indices), len(rows)
        left = None
        if a is not None:
            left_raw = raw[: places.chunks_of_a].reshape(count, -1)
            left = np.asarray(numbers(left_raw, kind.kind_a, kind.m // count, kind.m_major_a, False))
        right_raw = raw[places.chunks_of_a :].reshape(count, -1)
        right = numbers(right_raw, kind.kind_b, kind.n // count, kind.n_major_b, True)
        return left, np.asarray(right[0] if count == 1 else np.concatenate(right, axis=1))

    # --- places ---

    def _place(
        self, kind: ProductShape, a: int | None, b: int, rows: tuple[int, ...], issuer: Issuer, site: int
    ) -> ProductOperands | None:
        """The places of the operands; None, and a report, if one cannot lie there."""
        operands = [("B", b, kind.n // len(rows), kind.n_major_b)]
        if a is not None:
            operands.insert(0, ("A", a, kind.m // len(rows), kind.m_major_a))
        parts_of_operands = [self._parts(*operand, rows, issuer, site) for operand in operands]
        if any(len(parts) < len(rows) for parts in parts_of_operands):
            return None
        parts = [part for parts in parts_of_operands for part in parts]
        # Tags have the shape (readers, elements of the batch); their flat indices are reader * length + element.
        length = self.shared.async_reads.tags.shape[1]
        combined = ProductPlaces(
            np.concatenate([part.elements.indices for part in parts]),
            np.concatenate([part.elements.indices + part.reader * length for part in parts]),
            tuple((part.reader, part.elements.low, part.elements.high, part.row != issuer.row) for part in parts),
        )
        chunks_of_a = 0 if a is None else sum(len(part.elements.indices) for part in parts_of_operands[0])
        return ProductOperands(parts, combined, chunks_of_a)

    def _parts(
        self, name: str, bits: int, height: int, rows_contiguous: bool, rows: tuple[int, ...], issuer: Issuer, site: int
    ) -> list[Part]:
        """The part of an operand in every CTA; empty, and a report, if it cannot lie there."""
        fields, wrong = strides(bits)
        if fields is None:
            self.batch.report_lane(RULE, f"shared memory descriptor of {name}: {wrong}", site, issuer.thread)
            return []
        place = pattern(fields, height, rows_contiguous)
        if not self.shared.fits(place.low, place.high, issuer.thread, site):
            return []
        out = []
        for row in rows:
            indices = place.chunks + row * (self.shared.stride >> 4)
            reader = issuer.warp if row == issuer.row else self.clocks.warps + issuer.warp
            out.append(Part(row, Elements(indices, place.low, place.high), reader))
        return out

    # --- checks ---

    def _tag(self, places: ProductOperands, issuer: Issuer, site: int) -> None:
        """Check and tag the reads of operands."""
        written = self.shared.product_reads(places.combined, issuer.thread, issuer.agent)
        if written is not None:
            self._check_fence(*written, issuer, site)
            return
        for row, elements, reader in places.parts:
            self.shared.async_read(elements, issuer.thread, row, reader, site, "tcgen05.mma", issuer.agent)
            if row == issuer.row:
                self._check_fence(*self.shared.last_write(int(elements.indices[0])), issuer, site)

    def _check_fence(self, column: int, tick: int, issuer: Issuer, site: int) -> None:
        """Report an operand that was written before the issuer's last synchronisation, but not before its last
        tcgen05.fence::after_thread_sync. ``column``, ``tick``: the writer's column of the clocks (-1: nobody has
        written), and when it wrote."""
        own = int(self.clocks.first[issuer.row]) + issuer.warp
        if column in (own, -1) or tick < self.clocks.fence_clock_of(issuer.thread)[column]:
            return
        if tick < self.clocks.of_lane(issuer.thread)[column]:
            text = "tcgen05.mma reads an operand: no tcgen05.fence::after_thread_sync follows the wait that shows it"
            self.batch.report_lane("tcgen05-fence", text, site, issuer.thread)
