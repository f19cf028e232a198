"""Proves the group of warps that stores sums from tensor memory, for every number of items.

An item has no loop over k-tiles for this group: it waits once, for all sums of the item.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.certificates.item_roles import ItemRole, named
from kernelproof.certificates.loops import TILES
from kernelproof.certificates.role_controls import Controls


class StoreRole(ItemRole):
    """Proves the group, whose inner loops have known numbers of iterations."""

    def body(self, at: Controls) -> Iterator[Controls]:
        for last, known in self._cases():
            machine = self.machine(named(TILES), {}, *known)
            end = self._run_to_item_end(machine, self._item_start(at, machine), last)
            self._check_next_item(last, end)
            if end is not None:
                machine.end_item()
                yield Controls(self._controls(end, {}, {}), end)
