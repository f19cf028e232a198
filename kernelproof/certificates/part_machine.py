"""Split-k in a pipeline: checks that consumers store the partial sums of their items to a workspace and count them.

``roles`` executes a consumer on a subclass of this machine, which adds the stores, the group's barrier and the
counter's atomic to ``box_machine``. ``slices`` says in which order these must come, and ``sum_proof`` proves how the
partial sums are added afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernelproof.certificates.box_machine import BoxMachine
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.role_state import CONSUMER
from kernelproof.certificates.slices import ItemWorkspace
from kernelproof.emulator.memory.atomics import AtomicKind
from kernelproof.emulator.state.arrays import Mask
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_of


class PartMachine(BoxMachine):
    """The machine of a role whose items may be slices of a tile's k."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.slices = ItemWorkspace(self.contract.slices)

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of every role, and those for partial sums."""
        return super().units() | {
            "G": {"grid_wait": self.grid_wait, "store": self.store_part}, "Q": {"apply": self.count_part},
        }  # fmt: skip

    def sync(self, number: Any, count: Any, m: Mask, *_: int) -> None:
        """bar.sync: a consumer group that stores partial sums must synchronise alone, all others with the whole CTA."""
        if self.role == CONSUMER and self.pipeline.parts is not None:
            self._group_barrier(number, count, m)
        else:
            super().sync(number, count, m)

    def end_item(self) -> None:
        """As in the base class; also note what the item has stored to its slab of the workspace."""
        contents, tile = self.slices.contents, self.contract.tile
        super().end_item()
        if self.role == CONSUMER and self.skipped is None and self.slices.slices is not None and tile is not None:
            rows, cols = contents.rows - int(tile.row.constant), contents.cols - int(tile.col.constant)
            self.protocol.leave(replace(contents, rows=rows, cols=cols))

    def finish_stores(self) -> None:
        """As in the base class. A group that adds partial sums goes on, and ``sum_proof`` shows that it waits for its
        stores before it ends."""
        if self.role == CONSUMER and self.pipeline.parts is not None:
            if self.track.stores.open:
                raise NotCertified("a group goes on to partial sums with bulk stores that are in no group")
            return
        super().finish_stores()

    def _group_barrier(self, number: Any, count: Any, m: Mask) -> None:
        """bar.sync of exactly the threads of one group of consumers, at a barrier that no other group uses. Raises
        NotCertified for any other one."""
        self._together(m)
        if self._one(count) != self.lanes:
            raise NotCertified("a barrier of more or fewer threads than those of a group")
        self.protocol.meeting(self.group, self._one(number))
        self.slices.barrier()

    def store_part(self, address: Any, value: Any, size: int, m: Mask, site: int, *_: int) -> None:
        """st.global: a group stores the partial sums of its item. Raises NotCertified for any other store."""
        if self.role != CONSUMER or self.pipeline.parts is None or not self.track.granted:
            raise NotCertified("a store to global memory that is not a consumer's of partial sums")
        super().global_store(address, value, size, m, site)

    def count_part(self, kind: AtomicKind, address: Any, value: Any, _compared: Any, m: Mask, *_: int) -> None:
        """red.add of 1: one thread of a group counts its item in the tile's counter, with release for the whole device.
        Raises NotCertified for any other atomic."""
        lanes = self.active(m)
        if self.role != CONSUMER or self.pipeline.parts is None or lanes is None or len(lanes) != 1:
            raise NotCertified("an atomic that does not count an item by one of a group's threads")
        if (kind.op, kind.kind) != ("add", "u32") or kind.space == "shared" or kind.returns:
            raise NotCertified("an atomic that does not add to a counter of a tile")
        if not kind.write & ORDERS or scope_of(kind.write) != Scope.GPU:
            raise NotCertified("an item is counted without release for the whole device")
        if self._one(value, lanes) != 1:
            raise NotCertified("an item is not counted as one")
        self.slices.arrive(self.counter(address, lanes))
