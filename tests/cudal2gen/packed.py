"""Makes packs of small kernels with invented measurements, for tests of packs and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cudal2gen import pack
from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.results import Measurements
from cudal2gen.results.choice import Row, Table, tabulate
from kernelproof.ground import toolchain
from tests.cudal2gen.paths import small

# No measurements.
NOTHING = Measurements({}, [])
# Records with tiles of 32x32x64: for any shape; for whole tiles, so others are padded; for B (k,n); with split k; with
# fp16 sums; with CTAs in bands of columns.
RECORDS: dict[str, Record] = {
    "predicated": small(acc="f32", padding="predicate", m=64, n=64, k=128),
    "whole": small(acc="f32", m=96, n=96, k=64),
    "nn": small(acc="f32", layout="nn", padding="predicate", m=64, n=64, k=128),
    "split": small(acc="f32", padding="predicate", split_k=2, m=32, n=32, k=256),
    "f16": small(padding="predicate", m=64, n=64, k=128),
    "zsplit": small(layout="nn", raster="zsplit", swizzle_stride=48, n=160, m=64, k=128),
}


def row(record: Record, number: int, low: float, us: float = 100.0, products: int = 1) -> Row:
    """An invented measurement of a kernel.

    ``number``: the kernel's index in its table. ``low``: the low end of its speedup over torch.matmul. ``us``: its time
    in microseconds. ``products``: how many products the launch had.
    """
    speedup = (low + 0.01, low, low + 0.02)
    sizes = (record.m, record.n, record.k)
    state = "cold L2, torch.matmul"
    types = (record.ab, record.d, record.batch, record.fusion)
    return Row(record.acc, record.layout, *sizes, number, us, us * low, speedup, state, *types, products)


def table(records: Sequence[Record], lows: dict[int, float] | None = None, bandwidth: float = 1e9) -> Table:
    """A table of built kernels with invented measurements.

    ``lows``: for each measured record, its index in ``records`` -> the low end of its speedup. ``bandwidth``: bytes per
    microsecond of device memory; by default so large that the bytes of a copy take no time.
    """
    digests = {record.name: artifact.digest for record, artifact in zip(records, compiler.build(records), strict=True)}
    table = tabulate(records[0].gpu, records, NOTHING, lambda record: digests[record.name])
    return replace(table, rows=[row(records[i], i, low) for i, low in (lows or {}).items()], bandwidth=bandwidth)


def files(table: Table, with_ptx: bool = True) -> dict[str, bytes]:
    """The files of a table's pack, by path, with its kernels compiled."""
    artifacts = {artifact.digest: artifact for artifact in compiler.build([kernel.record for kernel in table.kernels])}
    return pack.contents(table, artifacts, compiler.launcher(), toolchain.discover().cuda, with_ptx)


def folder(table: Table, target: Path, with_ptx: bool = True) -> Path:
    """Writes the pack of a table into a new folder, which it returns."""
    return pack.write_folder(files(table, with_ptx), target)
