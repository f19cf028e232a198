"""Decides for which problems a kernel published for the A100 should split k. The published kernels do not split it.

    python scripts/splits.py SPEEDUPS             prints the choices
    python scripts/splits.py SPEEDUPS --acc f32   prints those with fp32 sums
    python scripts/splits.py SPEEDUPS --write     writes them to configs/kernels.jsonl
    python scripts/splits.py --recordings FOLDER  compares modelled gains of a split with recorded timings

``SPEEDUPS`` is the folder eval_results of github.com/deepreinforce-ai/CUDA-L2, ``FOLDER`` has the unpacked archives of
github.com/AlnisM/autoheuristic-datasets. A published kernel gets ``split_k`` and no other change, if

- a record stands for it exactly, so that its published speed is that of the record;
- in both published modes it is slower than cuBLASLt's fastest algorithm, which may split k;
- without the split it takes at least ``MIN_GAIN`` times as long, by both forms of the timing model: the cheap one, and
  the one that reads machine code;
- the partial sums fit in the part of the L2 that the model gives to them.

If several slice counts qualify, the one with the largest gain is taken. A gain is the time without the split over the
time with it; of the two that the forms of the model estimate, the smaller one counts. The record as published moves to
configs/published/records.jsonl. Nothing is measured, and records that were tuned on a GPU stay as they are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from cudal2gen import places
from cudal2gen.generation import catalog, compiler, published
from cudal2gen.kernel import IllegalRecord, Origin, Record
from cudal2gen.timing import model
from cudal2gen.timing.evidence.speedups import BASELINES, MODES, NAMES, code_us, speedup_table
from cudal2gen.timing.model.code import L2_SHARE
from cudal2gen.timing.recordings import autoheuristic, triton

GPU = "a100"  # whose records may split k
ACCS = ("f16", "f32")  # accumulators of these records
VENDOR = BASELINES["cuBLASLt-AutoTuning"]
SLICES = (2, 4, 8, 16)  # certificates cover only powers of two: their polynomials express no quotient by other numbers
RECORDED_SLICES = (*SLICES, 3, 6, 12)  # slice counts tried on recorded tiles, which need no certificate
MIN_GAIN = 1.10  # the least modelled gain for which k is split
PARTIAL_BYTES = 4  # of a partial sum, which is fp32
CLASSES = (1.0, 1.0001, 1.1, 1.2, 1.5, 2.0, math.inf)  # bounds of classes of the modelled gain
MODEL_SOURCE = "tuned by model"  # how the origin of a record says that the timing model changed it

# For each published mode: m_n_k -> the published kernel's speed over the vendor's.
Tables = Sequence[Mapping[str, float]]
Modelled = Callable[[Record], float]  # the modelled time of a record, in microseconds


class Split(NamedTuple):
    """A published record, the record with its split, and the gains by the two forms of the model."""

    published: Record
    split: Record
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The gain by the less favourable form."""
        return min(self.gains)


def slower_than_vendor(records: Iterable[Record], tables: Tables) -> list[Record]:
    """The records without a split that stand exactly for a published kernel which is slower than the vendor's in each
    of ``tables``."""
    return [
        record for record in records
        if (record.split_k, record.origin.structure) == (1, "exact")
        and all(table.get(record.mnk, math.inf) < 1 for table in tables)
    ]  # fmt: skip


def splits(record: Record) -> Iterator[Record]:
    """The record with each legal number of slices whose partial sums fit in the L2."""
    room = L2_SHARE * record.target.rates.l2_size
    for slices in SLICES:
        if record.m * record.n * PARTIAL_BYTES * slices > room:
            return
        origin = Origin(
            source=f"{record.origin.source}, {MODEL_SOURCE}", structure="modelled",
            changed=tuple(sorted({*record.origin.changed, "split_k"})),
        )  # fmt: skip
        try:
            yield record.at(record.problem, split_k=slices, origin=origin)
        except IllegalRecord:
            continue


def best_split(record: Record, forms: Sequence[Modelled]) -> Split | None:
    """The split with the largest gain, None if no split gains ``MIN_GAIN`` by every form of the model."""
    before = [us(record) for us in forms]
    found = [
        Split(record, split, tuple(time / us(split) for time, us in zip(before, forms, strict=True)))
        for split in splits(record)
    ]
    best = max(found, key=lambda item: item.gain, default=None)
    return best if best and best.gain >= MIN_GAIN else None


def choose(records: Sequence[Record], tables: Tables) -> list[Split]:
    """The records that split k. Only those that gain by the cheap form are built for the other one."""
    candidates = [record for record in slower_than_vendor(records, tables) if best_split(record, [_cheap_us])]
    compiler.build([version for record in candidates for version in (record, *splits(record))])
    chosen = (best_split(record, [_cheap_us, _built_us]) for record in candidates)
    return [item for item in chosen if item is not None]


def _cheap_us(record: Record) -> float:
    """A record's microseconds by the cheap form of the model, which needs no build."""
    return model.estimate(record).us


def _built_us(record: Record) -> float:
    """A built record's microseconds by the form of the model that reads its machine code."""
    us = code_us(record)
    assert us is not None, f"{record.name} is not built"
    return us


def write(chosen: Sequence[Split], accs: Container[str]) -> None:
    """Puts the splits into the catalog, and the records that they replace beside it. Earlier splits of the same
    accumulators that are not chosen again go back to the published records."""
    new = {item.split.problem: item.split for item in chosen}
    earlier = published.replaced()
    # The published record of every problem that splits k now or did so before.
    former = {record.problem: record for record in earlier if record.acc in accs}
    former |= {item.published.problem: item.published for item in chosen}
    kept = [record for record in catalog.load() if record.origin.structure == "tuned" or record.problem not in former]
    tuned = {record.problem for record in kept}
    catalog.save(
        [*kept, *(new.get(problem, record) for problem, record in former.items() if problem not in tuned)],
        places.editable_catalog(),
    )
    others = [record for record in earlier if record.acc not in accs]
    replaced = [record for problem, record in former.items() if problem in new]
    catalog.save([*others, *replaced], published.replaced_path())


class GainAndRatio(NamedTuple):
    """The modelled gain of a kernel by a split, and its time without a split, recorded or published, over the
    vendor's."""

    modelled_gain: float
    over_vendor: float


def recorded_gains(folder: Path, gpu: str) -> list[GainAndRatio]:
    """For each recorded problem, the fastest tile: its modelled gain by a split, and its recorded time over cuBLAS's.
    The recorded tiles do not split k; cuBLAS may."""
    gains = []
    for item in autoheuristic.load(folder).get(gpu, []):
        if item.vendor_us is None:
            continue
        tile = min(item.tiles, key=item.tiles.__getitem__)
        kernel = triton.kernel_of(triton.problem_of(gpu, item.sizes), tile)
        whole = model.estimate_kernel(kernel).us
        steps = kernel.tile_steps
        parts = [model.estimate_kernel(kernel._replace(split_k=n)).us for n in RECORDED_SLICES if n <= steps]
        gains.append(GainAndRatio(whole / min([whole, *parts]), item.tiles[tile] / item.vendor_us))
    return gains


def published_gains(records: Iterable[Record], table: Mapping[str, float]) -> list[GainAndRatio]:
    """For each published kernel without a split: its gain by a split, as the cheap form of the model estimates it, and
    its published time over that of cuBLASLt's fastest algorithm. ``table``: see ``Tables``."""
    gains = []
    for record in records:
        if record.split_k == 1 and record.mnk in table:
            whole = _cheap_us(record)
            parts = [_cheap_us(split) for split in splits(record)]
            gains.append(GainAndRatio(whole / min([whole, *parts]), 1 / table[record.mnk]))
    return gains


def print_classes(gains: Sequence[GainAndRatio]) -> None:
    """Prints a row of a Markdown table for each class of the modelled gain: the class, its kernels, the geometric means
    of their modelled gains and of their times over the vendor's, and the share of kernels that are slower than it."""
    for low, high in pairwise(CLASSES):
        row = [gain for gain in gains if low <= gain.modelled_gain < high]
        if row:
            modelled_gain, over_vendor = (geometric_mean(column) for column in zip(*row, strict=True))
            share = sum(gain.over_vendor > 1 for gain in row) / len(row)
            print(f"| {low} to {high} | {len(row)} | {modelled_gain:.3f} | {over_vendor:.3f} | {share:.2f} |")


def choose_and_print(folder: Path, acc: str) -> list[Split]:
    """Prints the gains of all records with an accumulator and the splits that are chosen; returns these splits.

    ``folder``: has the published speedups.
    """
    files = [folder / f"cuda_l2_{NAMES[GPU, acc]}_speedup_{mode}.csv" for mode in MODES]
    tables = [{mnk: row[VENDOR] for mnk, row in speedup_table(path).items()} for path in files]
    records = [record for record in published.structures() if (record.gpu, record.acc) == (GPU, acc)]
    print_classes(published_gains(records, tables[0]))
    chosen = choose(records, tables)
    for item in chosen:
        gains = " ".join(f"{gain:.3f}" for gain in item.gains)
        speeds = " ".join(f"{table[item.split.mnk]:.3f}" for table in tables)
        print(f"{item.split.mnk} split_k={item.split.split_k} gains {gains}, published {speeds}")
    print(f"{len(chosen)} of {len(records)} with {acc} sums")
    if chosen:
        columns = [*zip(*(item.gains for item in chosen), strict=True)]
        columns += [tuple(table[item.split.mnk] for item in chosen) for table in tables]
        print("geometric means:", " ".join(f"{geometric_mean(column):.3f}" for column in columns))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speedups", type=Path, nargs="?", help="the folder of published speedups")
    parser.add_argument("--acc", choices=ACCS, help="only records with this accumulator")
    parser.add_argument("--recordings", type=Path, help="the folder of recorded timings")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.recordings:
        print_classes(recorded_gains(options.recordings, GPU))
    if not options.speedups:
        return
    accs = [acc for acc in ACCS if options.acc in (None, acc)]
    chosen = [split for acc in accs for split in choose_and_print(options.speedups, acc)]
    if options.write:
        write(chosen, accs)


if __name__ == "__main__":
    main()
