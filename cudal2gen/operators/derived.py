"""Keeps interleaved copies of pairs of weights for gated kernels.

A copy is made when a kernel first needs it, and made again when a weight has changed. A change is detected by torch's
version counter, which optimizers, ``load_state_dict`` and every operation in place increment, or by another storage
(``.to()``). Two kinds of change are not detected: writes through ``tensor.data``, by which adapters are merged (call
``DERIVED.clear`` after them), and FSDP's gathering of weights. Therefore ``patch`` does not fuse gates whose weights
FSDP manages. While a graph is captured torch computes, so that replays read the current weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.operators.epilogues import BLOCK_COLS

if TYPE_CHECKING:
    import torch

Empty = Callable[..., "torch.Tensor"]  # allocates a tensor with the device and type of its first argument


class DerivedCopy(NamedTuple):
    """An interleaved copy of two weights.

    - ``storages``: weak references to the weights' storages. While they exist, no other storage can get the same
      address, so an equal key means the same storage.
    - ``versions``: the weights' version counters when they were copied.
    - ``ready``: the event on ``stream`` after the copying; None on the CPU.
    """

    storages: tuple[Any, Any]
    versions: tuple[int, int]
    weight: torch.Tensor
    stream: Any = None
    ready: Any = None


class Derived:
    """The copies of a process, by storage, offset, shape, strides and type of their weights."""

    def __init__(self) -> None:
        self._copies: dict[Any, DerivedCopy] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    def interleaved(self, w1: torch.Tensor, w3: torch.Tensor, empty: Empty) -> torch.Tensor:
        """W1 and W3 (h,k), h a multiple of 8, as (2h,k): alternately 8 rows of W1 and 8 of W3.

        ``empty`` allocates the copy. Must not be called while a graph is captured, because replays would read the
        copy's memory after it was replaced and freed.
        """
        key = tuple((w.untyped_storage()._cdata, w.storage_offset(), w.shape, w.stride(), w.dtype) for w in (w1, w3))
        with self._lock:  # so that no copy is made twice at the same time, and no thread reads an unfinished one
            # The versions are read before the copying: after a write during it the next call copies again.
            versions = w1._version, w3._version
            copy = self._copies.get(key)
            if copy is None or copy.versions != versions:
                self._copies[key] = copy = self._interleave(w1, w3, versions, empty)
        if copy.ready is not None:
            _wait(copy)
        return copy.weight

    def _interleave(self, w1: torch.Tensor, w3: torch.Tensor, versions: tuple[int, int], empty: Empty) -> DerivedCopy:
        """A new copy with blocks of rows of w1 and w3 in turns. ``versions``: those of the weights now; ``empty``:
        allocates the copy."""
        from torch.multiprocessing.reductions import StorageWeakRef

        # Copies of freed weights are dropped, because other storages may get the same keys.
        dead_keys = [key for key, copy in self._copies.items() if any(storage.expired() for storage in copy.storages)]
        for key in dead_keys:
            del self._copies[key]
        rows, depth = w1.shape
        weight = empty(w1, 2 * rows, depth)
        pairs = weight.view(rows // BLOCK_COLS, 2, BLOCK_COLS, depth)
        for half, source in enumerate((w1, w3)):
            pairs[:, half].copy_(source.detach().view(rows // BLOCK_COLS, BLOCK_COLS, depth))
        storages = StorageWeakRef(w1.untyped_storage()), StorageWeakRef(w3.untyped_storage())
        return DerivedCopy(storages, versions, weight, *_record_event(weight))

    def clear(self) -> None:
        """Drops all copies."""
        with self._lock:
            self._copies.clear()


def _record_event(weight: torch.Tensor) -> tuple[Any, Any]:
    """The current stream, and an event after all work that was enqueued there; None and None on the CPU."""
    import torch

    if not weight.is_cuda:
        return None, None
    stream = torch.cuda.current_stream(weight.device)
    return stream, stream.record_event()


def _wait(copy: DerivedCopy) -> None:
    """If the current stream is not the copy's, lets it wait for the copying, and keeps the copy's memory until this
    stream has read it."""
    import torch

    stream = torch.cuda.current_stream(copy.weight.device)
    if stream != copy.stream:
        stream.wait_event(copy.ready)
        copy.weight.record_stream(stream)


DERIVED = Derived()
