"""What may be proposed for a problem: sensible values of every field, and which of their combinations are legal.

``candidates`` lists the legal structures of a problem, each a record that its own rules let pass: nothing here repeats
a rule. Fields that no rule ties to others (``loose``) are chosen beside the structure, so that they do not multiply
the list. A structure that is legal but senseless, such as a tile of twice the problem, is left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import (
    GPUS,
    REGISTERS_THREAD,
    IllegalRecord,
    Problem,
    Record,
    ceil_div,
    parse,
)

Fields = dict[str, Any]
Tile = tuple[int, int, str, int, list[int] | None]

# bm, bn, schedule, consumers, registers: tiles of sm90_wgmma that ptxas compiles clean, by accumulator.
TILES: dict[str, list[Tile]] = {
    "f32": [
        *[(128, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192, 224, 256)],
        *[(256, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192)],
        (256, 208, "cooperative", 2, [24, 240]),
        *[(192, bn, "cooperative", 3, [32, 160]) for bn in (128, 192)],
        *[(64, bn, "cooperative", 1, None) for bn in (32, 64, 96, 128, 192)],
        *[(64, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(128, bn, "pingpong", 2, [40, 232]) for bn in (64, 96, 128, 160, 192)],
    ],
    "f16": [
        *[(128, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192, 224, 256)],
        *[(256, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192, 256)],
        *[(64, bn, "cooperative", 1, None) for bn in (32, 64, 96, 128, 192)],
        *[(64, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(128, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(192, bn, "pingpong", 2, [40, 232]) for bn in (128, 192, 256)],
    ],
}
CLUSTERS = ([1, 1], [2, 1], [1, 2])
SPLITS: tuple[tuple[int, str | None], ...] = (
    (1, None),
    *((slices, "cluster") for slices in (2, 4, 8)),
    *((slices, "workspace") for slices in (4, 8, 16)),
)
RING_BYTES = 227 << 10
# sm80_multistage: bm, bn of tiles, warps along them, and what a k-tile of 32 or 64 allows beside that.
TILES_80 = (
    *((16, bn) for bn in (16, 32, 64)),
    *((32, bn) for bn in (32, 64, 128)),
    *((64, bn) for bn in (32, 64, 96, 128, 192, 256)),
    *((96, bn) for bn in (64, 128, 256)),
    *((128, bn) for bn in (32, 64, 96, 128, 160, 192, 256)),
    *((160, 128), (256, 64), (256, 128), (256, 256)),
)
WARPS_80 = ([1, 1, 1], [1, 2, 1], [2, 2, 1], [4, 2, 1], [2, 4, 1])
STAGES_80 = (2, 3, 4, 6)
PREFETCHES: tuple[Fields, ...] = (
    {"kind": "single", "distance": None},
    {"kind": "none", "distance": None},
    {"kind": "single_intra_tile", "distance": None},
    {"kind": "multi", "distance": 2},
)
SPLITS_80 = (1, 2, 4)
STRIDES = (512, 1024, 2048, 4096)
GROUPS = (1, 4, 8, 16)

# What is no decision: the question, and where the answer comes from.
GIVEN = frozenset({*Problem.model_fields, "origin"})


def decisions(record: Record) -> Fields:
    """A record's fields without problem and origin, as JSON values; equal decisions are the same answer."""
    return record.model_dump(mode="json", exclude=set(GIVEN))


def key(record: Record) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """What a measurement of a record depends on beside its problem: the binary, and how it is launched.

    Records of one key are the same kernel in every respect and are timed once.
    """
    return record.name, tuple(sorted(record.launch_options.items()))


def loose(problem: Problem, family: str) -> dict[str, list[Fields]]:
    """Heads that no rule of a family ties to its structure: for each the alternatives, as fields to set."""
    if family == "sm90_wgmma":
        return {
            "raster_axis": [{"raster_axis": axis} for axis in "mn"],
            "raster_group": [{"raster_group": group} for group in GROUPS],
            "hint_a": [{"hint_a": hint} for hint in ("normal", "first", "last")],
            "hint_b": [{"hint_b": hint} for hint in ("normal", "first", "last")],
        }
    if family == "sm80_multistage":
        strides = [stride for stride in STRIDES if stride < problem.n]
        plain: list[Fields] = [{"raster": "plain", "swizzle_stride": None}]
        return {"raster": plain + [{"raster": "zsplit", "swizzle_stride": stride} for stride in strides]}
    return {}


@dataclass(frozen=True)
class Candidates:
    """The legal structures of one problem. ``fields`` and ``records`` belong together, one by one."""

    problem: Problem
    fields: Sequence[Fields]
    records: Sequence[Record]

    @cached_property
    def heads(self) -> dict[str, dict[str, list[Fields]]]:
        """``loose`` of every family that is there."""
        return {family: loose(self.problem, family) for family in dict.fromkeys(one.family for one in self.records)}

    @cached_property
    def index(self) -> list[dict[str, int]]:
        """For each structural field (``columns``), its values here as JSON, numbered."""
        found: list[dict[str, int]] = [{} for _ in self.columns]
        for fields in self.fields:
            for numbers, name in zip(found, self.columns, strict=True):
                numbers.setdefault(json.dumps(fields.get(name)), len(numbers))
        return found

    @cached_property
    def columns(self) -> list[str]:
        """The structural fields that the families here have."""
        names = dict.fromkeys(name for fields in (self.fields[0], self.fields[-1]) for name in fields)
        free = {name for heads in self.heads.values() for values in heads.values() for name in values[0]}
        return [name for name in names if name not in GIVEN | free]

    @cached_property
    def codes(self) -> NDArray[np.int16]:
        """The structures as numbers of ``index``: a row each, a column per structural field."""
        rows = [self.code(fields) for fields in self.fields]
        return np.array(rows, np.int16)

    def code(self, fields: Mapping[str, Any]) -> list[int]:
        """One record's structure in numbers of ``index``; -1 for a value that no candidate has."""
        pairs = zip(self.index, self.columns, strict=True)
        return [numbers.get(json.dumps(fields.get(name)), -1) for numbers, name in pairs]

    def apart(self, fields: Mapping[str, Any]) -> NDArray[np.int64]:
        """How many structural fields each candidate has in which it differs from a record."""
        found: NDArray[np.int64] = (self.codes != np.array(self.code(fields), np.int16)).sum(axis=1)
        return found

    def compose(self, row: int, chosen: Mapping[str, int], source: str) -> Record:
        """A structure with its loose heads chosen, by index; validated as every record is. Raises IllegalRecord."""
        fields = dict(self.fields[row])
        for head, index in chosen.items():
            fields |= self.heads[fields["family"]][head][index]
        return parse(fields | {"origin": tuned(source)})

    def drawn(self, rng: random.Random, source: str) -> Record:
        """Any of them, all equally likely."""
        row = rng.randrange(len(self.records))
        heads = self.heads[self.records[row].family]
        return self.compose(row, {head: rng.randrange(len(values)) for head, values in heads.items()}, source)


def adopt(record: Record, found: Candidates, source: str) -> Record:
    """Another problem's decisions for this one: as they are where that is legal, else the candidate most like them."""
    fields = decisions(record)
    try:
        return parse(found.problem.model_dump(mode="json") | fields | {"origin": tuned(source)})
    except IllegalRecord:
        row = int(found.apart(fields).argmin())
        return found.compose(row, {}, source)


def tuned(source: str) -> Fields:
    """The origin of a record that a tuner made."""
    return {"source": source, "structure": "tuned", "changed": []}


def candidates(problem: Problem, most: int | None = None, seed: int = 0) -> Candidates:
    """Every legal structure for a problem, or about ``most`` drawn ones.

    Raises IllegalRecord where none is legal.
    """
    proposed = list(_proposed(problem))
    if most is not None and len(proposed) > most:
        proposed = random.Random(f"{seed} {problem.mnk}").sample(proposed, most)
    fields: list[Fields] = []
    records: list[Record] = []
    for one in proposed:
        try:
            record = parse(one)
        except IllegalRecord:
            continue
        if record.estimated_registers <= REGISTERS_THREAD and record.ctas_per_sm(record.estimated_registers):
            fields.append(one)
            records.append(record)
    if not records:
        raise IllegalRecord(
            f"no family has a legal record for {problem.gpu} {problem.acc} {problem.layout} {problem.mnk}"
        )
    return Candidates(problem, fields, records)


def _proposed(problem: Problem) -> Iterator[Fields]:
    if GPUS[problem.gpu].sm == "sm_90":
        yield from wgmma(problem, depths=(0, 1, 2))
        yield from small(problem)
    else:
        yield from multistage(problem)
        yield from direct(problem)


def base(problem: Problem, family: str, source: str = "candidate") -> Fields:
    """Problem, family and origin of a record that is still to be decided."""
    origin = {"source": source, "structure": "modelled", "changed": []}
    return problem.model_dump(mode="json") | {"family": family, "origin": origin}


def wgmma(problem: Problem, depths: Sequence[int] = (0,), source: str = "candidate") -> Iterator[Fields]:
    """sm90_wgmma: tiles, clusters, splits of k. ``depths``: how many stages fewer than fit."""
    shapes = [(False, tile) for tile in TILES[problem.acc]]
    if problem.m <= 64:
        # Few rows: D^T = B^T A^T, whose rows are many.
        bm = ceil_div(problem.m, 16) * 16
        shapes += [(True, (bm, bn, "cooperative", groups, None)) for bn, groups in ((64, 1), (128, 1), (128, 2))]
    for (swap_ab, tile), cluster, (split_k, reduce), bk in product(shapes, CLUSTERS, SPLITS, (64, 128)):
        bm, bn, schedule, consumers, registers = tile
        if (not swap_ab and bm >= 2 * problem.m > 128) or (bn >= 2 * problem.n and bn > 64):
            continue
        if split_k > 1 and (cluster != [1, 1] or schedule != "cooperative" or ceil_div(problem.k, bk) < 2 * split_k):
            continue
        epilogue = "direct" if reduce == "cluster" or problem.n % 8 else "tma"
        columns = bm if swap_ab else bn
        buffers = consumers * 4 * 2 * 16 * 64 * 2 if epilogue == "tma" else 0
        deepest = min(8 if bk == 64 else 4, (RING_BYTES - buffers - 512) // ((bm + bn) * bk * 2))
        for stages in (deepest - fewer for fewer in depths):
            if stages < 2:
                continue
            yield base(problem, "sm90_wgmma", source) | {
                "bm": bm, "bn": bn, "bk": bk, "stages": stages, "cluster": cluster, "consumers": consumers,
                "atom_n": 128 if consumers == 3 and bn == 256 else columns, "schedule": schedule,
                "raster_axis": "m" if problem.m >= problem.n else "n", "raster_group": 8, "split_k": split_k,
                "reduce": reduce, "swap_ab": swap_ab, "epilogue": epilogue, "registers": registers,
                "hint_a": "normal", "hint_b": "normal", "pdl": False, "min_blocks": 1,
            }  # fmt: skip


def small(problem: Problem, source: str = "candidate") -> Iterator[Fields]:
    """sm90_small: for problems that are latency, all of a slice of k in shared memory."""
    if problem.m * problem.n > 1 << 20:
        return
    chunks = ceil_div(problem.k, 64)
    for split_k in (1, 2, 4, 8):
        held = 1 << (ceil_div(chunks, split_k) - 1).bit_length()
        if held > 8 or split_k > chunks:
            continue
        for bm, bn in ((16, 32), (32, 32), (32, 64)):
            decided = {"bm": bm, "bn": bn, "k_chunks": held, "split_k": split_k}
            yield base(problem, "sm90_small", source) | decided


def multistage(problem: Problem) -> Iterator[Fields]:
    """sm80_multistage: tiles, warps, ring, order of loads, splits of k; what copies and stages follows from them."""
    for (bm, bn), warps, bk in product(TILES_80, WARPS_80, (32, 64)):
        threads = 32 * warps[0] * warps[1]
        if bm % (16 * warps[0]) or bn % (16 * warps[1]) or not 512 <= bm * bn * 32 // threads <= 8192:
            continue
        if (bm >= 2 * problem.m and bm > 16) or (bn >= 2 * problem.n and bn > 16):
            continue
        tiles, steps = ceil_div(problem.m, bm) * ceil_div(problem.n, bn), ceil_div(problem.k, bk)
        for stages, split_k in product(STAGES_80, SPLITS_80):
            if split_k > 1 and (steps < 2 * split_k or tiles * split_k > 2 * GPUS[problem.gpu].sms):
                continue
            if stages > max(2, steps):
                continue
            ring, mma_tiles = stages * (bm + bn) * bk * 2, bm * bn // (8 * threads)
            batches = [batch for batch in (4, 2, 1) if batch <= mma_tiles and batch * threads * 16 <= ring]
            for prefetch in PREFETCHES:
                yield base(problem, "sm80_multistage") | {
                    "bm": bm, "bn": bn, "bk": bk, "stages": stages, "mma_repeat": warps, "min_blocks": 1,
                    "smem_swizzle": [3, 3, 3] if bk == 64 else [2, 3, 3], "smem_swizzle_c": [3, 3, 3], "g2s_cols": 4,
                    "g2s_slot": 0, "raster": "plain", "swizzle_stride": None, "prefetch": prefetch,
                    "unroll_k": False, "bake": [], "epilogue": "staged", "c_batch": batches[0] if batches else 1,
                    "r2s_bytes": 4, "padding": _padding(problem, bm, bn, bk), "split_k": split_k,
                }  # fmt: skip


def direct(problem: Problem) -> Iterator[Fields]:
    """sm80_direct: for problems too small to fill a ring."""
    if problem.m * problem.n > 1 << 18 or problem.k > 2048:
        return
    for bm, bn, split_k in product((16, 32), (16, 32, 64), SPLITS_80):
        if ceil_div(problem.k, 32) >= split_k:
            yield base(problem, "sm80_direct") | {
                "bm": bm, "bn": bn, "mma_repeat": [1, 1, 1], "unroll_k": False, "bake": [],
                "padding": _padding(problem, bm, bn, 32), "split_k": split_k,
            }  # fmt: skip


def _padding(problem: Problem, bm: int, bn: int, bk: int) -> str:
    if not (problem.m % bm or problem.n % bn or problem.k % bk):
        return "none"
    return "pad" if problem.k % 8 else "predicate"


def differing(old: Record, new: Record) -> dict[str, tuple[Any, Any]]:
    """Decisions in which two records differ: old and new value, None where a family has no such field."""
    before, after = (one.model_dump(mode="json", exclude=set(GIVEN)) for one in (old, new))
    names: Iterable[str] = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
