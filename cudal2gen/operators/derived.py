"""Interleaved copies of pairs of weights, for gated kernels; made when a kernel first wants one, and again when a
weight has changed.

A change is seen by torch's version counter (optimizers, ``load_state_dict``, any operation in place) or by another
storage (``.to()``). A write through ``tensor.data`` counts on neither: call ``DERIVED.clear`` behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.operators.epilogues import HALF

if TYPE_CHECKING:
    import torch

Empty = Callable[..., "torch.Tensor"]


class Copy(NamedTuple):
    """``storages``: weak references, which also keep their addresses from being those of other storages."""

    storages: tuple[Any, Any]
    versions: tuple[int, int]
    weight: torch.Tensor


class Derived:
    """Copies of a process by where their weights lie."""

    def __init__(self) -> None:
        self._copies: dict[Any, Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def interleaved(
        self, w1: torch.Tensor, w3: torch.Tensor, empty: Empty, capturing: Callable[[], bool]
    ) -> torch.Tensor:
        """W1 and W3 (h,k), h a multiple of 8, by turns of 8 rows, as (2h,k). ``empty``: gives its memory.

        A graph that is being captured makes a copy of its own, at every replay: its memory is the graph's.
        """
        key = tuple((w.untyped_storage()._cdata, w.storage_offset(), w.shape, w.stride(), w.dtype) for w in (w1, w3))
        versions = w1._version, w3._version
        copy = self._copies.get(key)
        if copy is None or copy.versions != versions:
            copy = self._interleave(w1, w3, versions, empty)
            if not capturing():
                self._copies[key] = copy
        return copy.weight

    def _interleave(self, w1: torch.Tensor, w3: torch.Tensor, versions: tuple[int, int], empty: Empty) -> Copy:
        from torch.multiprocessing.reductions import StorageWeakRef

        dead = [key for key, copy in self._copies.items() if any(storage.expired() for storage in copy.storages)]
        for key in dead:
            del self._copies[key]
        rows, depth = w1.shape
        weight = empty(w1, 2 * rows, depth)
        pairs = weight.view(rows // HALF, 2, HALF, depth)
        for place, source in enumerate((w1, w3)):
            pairs[:, place].copy_(source.detach().view(rows // HALF, HALF, depth))
        return Copy((StorageWeakRef(w1.untyped_storage()), StorageWeakRef(w3.untyped_storage())), versions, weight)

    def clear(self) -> None:
        """Drops all copies."""
        self._copies.clear()


DERIVED = Derived()
