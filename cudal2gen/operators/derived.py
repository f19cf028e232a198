"""Interleaved copies of pairs of weights, for gated kernels. A copy is made when a kernel first needs it, and made
again when a weight has changed.

A change is detected by torch's version counter, which optimizers, ``load_state_dict`` and any operation in place raise,
or by another storage (``.to()``). Two kinds of change are not detected: writes through ``tensor.data``, by which
adapters are merged (call ``DERIVED.clear`` after them), and FSDP's gathering, so ``patch`` fuses no gate of weights
that FSDP manages. In a graph capture torch computes: replays see the weights as they are then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.operators.epilogues import HALF

if TYPE_CHECKING:
    import torch

Empty = Callable[..., "torch.Tensor"]


class DerivedCopy(NamedTuple):
    """A copy. ``storages``: weak references to the weights' storages; while they exist, no other storage can get the
    same address, so an equal key means the same storage. ``ready``: the event after the copying, on ``stream``; None on
    the CPU."""

    storages: tuple[Any, Any]
    versions: tuple[int, int]
    weight: torch.Tensor
    stream: Any = None
    ready: Any = None


class Derived:
    """The copies of a process, by storage, place and strides of their weights."""

    def __init__(self) -> None:
        self._copies: dict[Any, DerivedCopy] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    def interleaved(self, w1: torch.Tensor, w3: torch.Tensor, empty: Empty) -> torch.Tensor:
        """W1 and W3 (h,k), h a multiple of 8, as (2h,k): 8 rows of one, then 8 of the other. ``empty`` allocates it.

        Must not be called in a graph capture: replays would read the copy's memory after it was replaced and freed.
        """
        key = tuple((w.untyped_storage()._cdata, w.storage_offset(), w.shape, w.stride(), w.dtype) for w in (w1, w3))
        with self._lock:  # so that two threads do not make one copy twice, and neither reads a half-made one
            # Read before the copying: a write during it raises the counter again, and the next call copies anew.
            versions = w1._version, w3._version
            copy = self._copies.get(key)
            if copy is None or copy.versions != versions:
                self._copies[key] = copy = self._interleave(w1, w3, versions, empty)
        if copy.ready is not None:
            _wait(copy)
        return copy.weight

    def _interleave(self, w1: torch.Tensor, w3: torch.Tensor, versions: tuple[int, int], empty: Empty) -> DerivedCopy:
        from torch.multiprocessing.reductions import StorageWeakRef

        # Copies of weights that are gone; their keys may come again with other storages.
        dead = [key for key, copy in self._copies.items() if any(storage.expired() for storage in copy.storages)]
        for key in dead:
            del self._copies[key]
        rows, depth = w1.shape
        weight = empty(w1, 2 * rows, depth)
        pairs = weight.view(rows // HALF, 2, HALF, depth)
        for place, source in enumerate((w1, w3)):
            pairs[:, place].copy_(source.detach().view(rows // HALF, HALF, depth))
        storages = StorageWeakRef(w1.untyped_storage()), StorageWeakRef(w3.untyped_storage())
        return DerivedCopy(storages, versions, weight, *_recorded(weight))

    def clear(self) -> None:
        """Drops all copies."""
        with self._lock:
            self._copies.clear()


def _recorded(weight: torch.Tensor) -> tuple[Any, Any]:
    """The current stream and an event after everything that it has to do; None and None on the CPU."""
    import torch

    if not weight.is_cuda:
        return None, None
    stream = torch.cuda.current_stream(weight.device)
    return stream, stream.record_event()


def _wait(copy: DerivedCopy) -> None:
    """Lets a stream other than the copy's wait for it, and keeps its memory until that stream has read it."""
    import torch

    stream = torch.cuda.current_stream(copy.weight.device)
    if stream != copy.stream:
        stream.wait_event(copy.ready)
        copy.weight.record_stream(stream)


DERIVED = Derived()
