"""Executes tcgen05.mma and tcgen05.commit of the thread that multiplies, on elements known by their origin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Kind, SummedRange
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.pipelines import Protocol
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.role_state import MULTIPLIER
from kernelproof.certificates.tensor_memory import (
    BASE,
    NO_SUM,
    ItemSums,
    ProductPlaces,
    SummedColumns,
    TensorPlan,
)
from kernelproof.certificates.warpgroup_machine import Operand, WarpgroupMachine
from kernelproof.certificates.words import polynomial
from kernelproof.emulator.blackwell.descriptors import ProductShape, product_shape, strides
from kernelproof.emulator.blackwell.products import Operands
from kernelproof.emulator.blackwell.tensor_memory import LANES
from kernelproof.emulator.hopper.pattern import Strides
from kernelproof.emulator.state.arrays import Mask

WIDTHS = {"f16": 2, "f32": 4}  # bytes of a sum


class TensorProducts(WarpgroupMachine):
    """The machine of a role that may multiply into tensor memory. Methods raise NotCertified for a product or a commit
    that does not fit the plan."""

    @property
    def plan(self) -> TensorPlan:
        assert self.pipeline.tensor is not None
        return self.pipeline.tensor

    @property
    def pair(self) -> list[Protocol]:
        """The protocols of the CTAs that a product concerns: the own one, or both of the pair."""
        rank = self.pipeline.rank
        return self.protocol.cluster[rank : rank + self.plan.cta_group]

    def _addresses(self, address: Any) -> Lanes:
        """Addresses of tensor memory in all lanes, counted from that of the allocation."""
        offset = polynomial(address, 32) - Polynomial.named(BASE)
        if not offset.is_constant:
            raise NotCertified("an address of tensor memory that is not computed from that of the allocation")
        return np.broadcast_to(np.asarray(offset.constant, np.int64), (self.lanes,))

    def _check_issuer(self, cta_group: int, m: Mask) -> None:
        """Check that the multiplier executes an instruction, and that it has the cta_group of all others."""
        if self.role != MULTIPLIER or self.lanes != 1 or m is not None or cta_group != self.plan.cta_group:
            raise NotCertified(
                "a product or a commit by other threads than the one that multiplies, or of another cta_group"
            )

    # --- products

    def add_products(self, operands: Operands, m: Mask, _site: int) -> None:
        """tcgen05.mma: products of 16 k are added to accumulators of the item, or overwrite them."""
        self._check_issuer(operands.group, m)
        tensor, track = self.protocol.tensor, self.track
        if not (track.tensor.opened and track.tensor.fenced) or track.tensor.passed:
            raise NotCertified("a product without a wait and a fence before it, or one after the item's commit")
        bits = self._one(operands.descriptor)
        shape, fault = product_shape(bits, operands.group)
        if shape is None or fault:
            raise NotCertified(f"the descriptor of an instruction: {fault}")
        self._check_shape(operands, shape)
        _, first = self._location_of_d(operands, shape)
        parts_a = [self._part(peer, operands.a, shape.m // self.plan.cta_group, shape.m_major_a) for peer in self.pair]
        parts_b = [self._part(peer, operands.b, shape.n // self.plan.cta_group, shape.n_major_b) for peer in self.pair]
        rows, cols = (self._one_kind(each) for each in (parts_a, parts_b))
        same_k = parts_a[0].steps == parts_b[0].steps and rows.col.equals(cols.col)
        if {rows.source, cols.source} != {"A", "B"} or not same_k:
            raise NotCertified("a product does not multiply A by B, or they have different k")
        place, across = track.item % self.plan.tiles, rows.source == "B"
        columns = np.concatenate([each.places for each in parts_b])
        for peer, mine in zip(self.pair, parts_a, strict=True):
            row, col = (cols.row, rows.row) if across else (rows.row, cols.row)
            peer.tensor.multiply(place, first, ProductPlaces(row, col, mine.places, columns, across))
        before = self._before_product(first, shape.n, bits) if self._keeps(operands.accumulates) else NO_SUM
        added = SummedColumns(first, first + shape.n, before.plus(rows.col, parts_a[0].steps), bits)
        others = [each for each in track.tensor.sums if each.first != first]
        if any(each.first < added.end and first < each.end for each in others):
            raise NotCertified("products are added to columns that others have written a part of")
        track.tensor = replace(track.tensor, sums=tuple(sorted([*others, added], key=lambda each: each.first)))
        tensor.width = WIDTHS[shape.acc]

    def _check_shape(self, operands: Operands, shape: ProductShape) -> None:
        """Check that a product has the contract's types, that it is added as it is, and that each CTA has 128 rows."""
        contract = self.contract
        types, output = contract.type_of("A"), contract.type_of("D")
        plain = shape.sign == 1 and operands.disabled is None and not operands.scale and operands.names_kind
        if not plain or operands.a_in_tensor_memory or (shape.kind_a, shape.kind_b) != (types, types):
            raise NotCertified(f"a tcgen05.mma that does not multiply {types} from shared memory as it is")
        if shape.acc != "f32" and (shape.acc, output) != ("f16", "f16"):
            raise NotCertified(f"a tcgen05.mma adds in {shape.acc} for a D of {output}")
        if shape.m != LANES * self.plan.cta_group:
            raise NotCertified(f"a tcgen05.mma of {shape.m} rows for {self.plan.cta_group} CTAs")

    def _location_of_d(self, operands: Operands, shape: ProductShape) -> tuple[int, int]:
        """The lane and the first column of D, which must be 0 and allocated in each CTA."""
        address = int(self._addresses(operands.d)[0])
        for peer in self.pair:
            lane, first = peer.tensor.location(address, shape.n)
            if lane:
                raise NotCertified(f"the sums of a product begin in lane {lane} of tensor memory")
        return lane, first

    def _part(self, peer: Protocol, descriptors: Any, rows: int, rows_contiguous: bool) -> Operand:
        """The part of an operand that one CTA has, in a stage that was waited for."""
        (descriptor,) = self._bits(descriptors)
        fields, fault = strides(int(descriptor) & (1 << 64) - 1)
        if fields is None:
            raise NotCertified(f"a descriptor of shared memory: {fault}")
        return self._held(peer, fields, rows, rows_contiguous)

    def _one_kind(self, parts: list[Operand]) -> Kind:
        """The kind that the parts of an operand have in common, up to constants."""
        first = parts[0]
        if any(each.number != first.number or each.steps != first.steps for each in parts):
            raise NotCertified("the parts of an operand in the CTAs of a pair differ by more than their rows")
        kind = self.kinds[first.number]
        assert kind is not None
        return kind

    def _before_product(self, first: int, columns: int, bits: int) -> SummedRange:
        """The k whose products columns have, to which more are added by an instruction of the same shape."""
        for each in self.track.tensor.sums:
            if (each.first, each.end, each.shape) == (first, first + columns, bits):
                return each.summed
        raise NotCertified("a product is added to columns that hold no sums of the item, or those of another shape")

    # --- commits

    def commit_to(self, cta_group: int, address: Any, ranks: Any, m: Mask, _site: int) -> None:
        """tcgen05.commit: when all products have ended, it arrives at mbarriers of the stage that they have read, or at
        those of the item's sums."""
        self._check_issuer(cta_group, m)
        track, protocol = self.track, self.protocol
        owners, places = self.cluster_places(address, self.all_lanes)
        at = int(places[0])
        if owners[0] != self.pipeline.rank:
            raise NotCertified("a commit names an mbarrier of another CTA")
        receivers = frozenset(self._receivers(ranks))
        assert track.held is not None
        stage = next(iter(track.held), None)
        if stage is not None:
            for rank in receivers:
                peer = protocol.cluster[rank]
                peer.mbarrier(peer.empty, stage, at, "the stage")
            if receivers != self.pipeline.returns:
                raise NotCertified("a stage is handed back to other CTAs than those that have loaded it")
            del track.held[stage]
            return
        if track.tensor.passed or not track.step.equals(self.tiles):
            raise NotCertified("a commit before all k-tiles of the item are multiplied, or a second one")
        if receivers != frozenset(peer.pipeline.rank for peer in self.pair):
            raise NotCertified("the sums of an item are committed to other CTAs than those that have them")
        place = track.item % self.plan.tiles
        for peer in self.pair:
            peer.mbarrier(peer.tensor.summed, place, at, "the item's sums")
            peer.tensor.leave(place, self._sums_of(peer, place), protocol.tensor.width)
        track.tensor = replace(track.tensor, passed=True)

    def _sums_of(self, peer: Protocol, place: int) -> ItemSums:
        """The sums that an item leaves in the tensor memory of a CTA."""
        out = ItemSums()
        for columns in self.track.tensor.sums:
            products = peer.tensor.products[place, columns.first]
            at = slice(columns.first, columns.end)
            out.kinds[:, at] = self.kinds.number(Kind("sum", products.row, products.col, columns.summed))
            rows, cols = products.rows[:, None], products.cols[None, :]
            out.rows[:, at], out.cols[:, at] = (cols, rows) if products.across else (rows, cols)
        return out

    # --- operands

    def _held(self, peer: Protocol, fields: Strides, rows: int, rows_contiguous: bool) -> Operand:
        """The operand in a CTA's shared memory, in a stage that the multiplier holds."""
        key = fields, rows, rows_contiguous
        if key not in peer.operands:
            peer.operands[key] = self.named_by(peer, fields, rows, rows_contiguous)
        stage, kind, places, steps = peer.operands[key]
        held = self.track.held or {}
        if stage not in held:
            raise NotCertified("a tcgen05.mma reads a stage that was not waited for, or was handed back")
        return Operand(self._contents(held[stage])(kind), places, steps)
