"""Computes the inputs of the cost model: numbers derived from a record and its problem, and tokens of other decisions.

The timing model's estimate and its bounds are among the numbers, because the cost model learns what they miss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Fields, Record
from cudal2gen.timing.model import Estimate, ModelledKernel, estimate_kernel
from cudal2gen.timing.recordings.tile import kernel_of

Floats = NDArray[np.float32]

EXTENTS = 7  # the first numbers of a record are the logarithms of its own extents
NUMBERS = 44  # all numbers of a record
# Decisions that are among the numbers and therefore have no tokens.
NUMERIC_FIELDS = frozenset({"bm", "bn", "bk", "stages", "split_k", "warps"})


class Facts(NamedTuple):
    """Facts of one problem's records: ``numbers`` of shape (records, ``NUMBERS``), the ``tokens`` of each record, and
    ``modelled_us``, the timing model's estimates in µs."""

    numbers: Floats
    tokens: list[tuple[str, ...]]
    modelled_us: NDArray[np.float64]

    @property
    def log_us(self) -> Floats:
        """Logarithms of the estimates, as the networks see them."""
        log_us: Floats = self.numbers[:, EXTENTS] * np.log(2.0)
        return log_us


def facts(records: Sequence[Record]) -> Facts:
    """Numbers, tokens and estimates of records."""
    kernels = [kernel_of(record) for record in records]
    estimates = [estimate_kernel(kernel) for kernel in kernels]
    rows = [_numbers(*described) for described in zip(records, kernels, estimates, strict=True)]
    numbers = np.array(rows, np.float32).reshape(len(rows), NUMBERS)
    modelled_us = np.array([estimate.us for estimate in estimates], np.float64)
    return Facts(numbers, [tokens(record.decisions()) for record in records], modelled_us)


def tokens(fields: Fields) -> tuple[str, ...]:
    """Each decision as the text ``name=value``, except those that are among the numbers."""
    return tuple(f"{name}={json.dumps(value)}" for name, value in fields.items() if name not in NUMERIC_FIELDS)


def coordinates(numbers: Floats, one_hot: Floats) -> Floats:
    """Coordinates of records, of shape (records, coordinates), from their ``numbers`` and their one-hot tokens.

    The squared distance of two records is the sum of the squared log2 ratios of their extents and the number of
    differing fields.
    """
    # Two records that differ in one field differ in two columns of ``one_hot``, so each column counts 0.5.
    return np.concatenate([numbers[:, :EXTENTS], one_hot * np.sqrt(0.5)], 1)


class Tokens:
    """Assigns a column to each token of ``names``. Other tokens have no column and are ignored."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self._columns = {name: column for column, name in enumerate(self.names)}

    def one_hot(self, rows: Sequence[tuple[str, ...]]) -> Floats:
        """1 in the columns of a record's tokens, else 0; shape (records, tokens)."""
        encoded = np.zeros((len(rows), len(self.names)), np.float32)
        for number, row in enumerate(rows):
            for name in row:
                if (column := self._columns.get(name)) is not None:
                    encoded[number, column] = 1.0
        return encoded


def _numbers(record: Record, kernel: ModelledKernel, estimate: Estimate) -> list[float]:
    """The numbers of one record. Lengths, times and counts are logarithms, the others are ratios and flags.

    The first ``EXTENTS`` numbers must be the record's own extents, which ``coordinates`` uses, and the next one the
    estimate, which ``Facts.log_us`` uses. Constant factors scale the numbers to a magnitude of about 1.
    """
    problem, work, chip, log2 = kernel.problem, kernel.work, kernel.target, math.log2
    steps, per_sm = kernel.tile_steps, kernel.ctas / kernel.target.sms
    waves = per_sm / kernel.resident
    rows, cols = kernel.tiles_m * kernel.bm / problem.m, kernel.tiles_n * kernel.bn / problem.n
    wgmma, us = work.instruction == "wgmma", estimate.us
    group = getattr(record, "raster_group", None) or getattr(record, "swizzle_stride", None) or 1
    parts = ("mma", "shared memory", "L2", "latency", "device memory")
    return [
        # the record's extents
        log2(kernel.bm), log2(kernel.bn), log2(kernel.k_step), log2(max(1, record.ring_steps)), log2(kernel.split_k),
        log2(kernel.threads), log2(kernel.cluster_ctas),
        # the estimate, and its parts relative to it; 1e-3 stands for a part that is 0
        log2(us), *(log2(1e-3 + estimate.bounds_us[part] / us) for part in parts), log2(estimate.around_us / us),
        # the problem, and how well tiles and waves fill it
        log2(problem.m), log2(problem.n), log2(problem.k), log2(kernel.flight + 1), log2(kernel.resident),
        log2(waves), waves / math.ceil(waves), log2(per_sm), per_sm / math.ceil(per_sm), log2(rows), log2(cols),
        log2(steps), problem.k / (steps * kernel.k_step * kernel.split_k), min(1.0, kernel.flight / steps),
        # the shape of a tile, the alignment of extents, the types, the chip, and the resources of a CTA
        log2(kernel.bm * kernel.bn / kernel.threads), log2(kernel.bm / kernel.bn), float(wgmma),
        *(float(_twos(extent)) for extent in (problem.m, problem.n, problem.k)),
        float(2 - sum(problem.along_k)), float(problem.acc == "f32"), chip.sms / 132, float(chip.capability.has_wgmma),
        log2(record.smem_bytes + 1024) - 10, record.estimated_registers / 128, log2(1 + problem.m * problem.n / 2**20),
        work.l2_bytes / 2**15, 0.3 * log2(group), float(work.issuers),
    ]  # fmt: skip


def _twos(extent: int) -> int:
    """How many times an extent can be halved, at most seven."""
    return min(7, (extent & -extent).bit_length() - 1)
