"""Makes catalog records from facts about the published CUDA-L2 kernels, and checks the catalog's claims against them.

    python scripts/published.py --check [CATALOG]    recomputes `structure` and `changed` of every line
    python scripts/published.py --write CATALOG      makes all records anew
    python scripts/published.py --summarise TABLES   writes configs/published.json from the published speedup tables

The facts are in configs/published/, one JSON object for each published kernel; its README.md names the keys. A key that
is absent was not determined. TABLES is a folder of CUDA-L2's speedup tables (CSV), which are not in this repository.
The summary keeps their means, medians and shares, which the report shows beside ours.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cudal2gen import places
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.published import CLAIMS, replaced
from cudal2gen.kernel import FAMILIES, IllegalRecord, parse, revise
from cudal2gen.report.statistics import best_of, summarise
from cudal2gen.results.ratios import Ratio

SETS = (("a100", "f16"), ("a100", "f32"), ("rtx3090", "f32"))  # GPU and accumulator of the sets with published kernels
# The names of all sets, as CUDA-L2's tables of speedups have them.
SPEEDUPS = {
    ("a100", "f16"): "a100_F16F16F16F16",
    ("a100", "f32"): "a100_F32F16F16F32",
    ("rtx3090", "f32"): "3090_F32F16F16F32",
    ("h100", "f32"): "h100_F32F16F16F32",
}
FACTS = places.shipped("configs") / "published"
# Where the published kernels are from.
SOURCE = {
    "title": "CUDA-L2, by DeepReinforce",
    "paper": "arXiv 2512.02551",
    "repository": "deepreinforce-ai/CUDA-L2",
    "commit": "dbe0177",
}
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)  # each of m, n and k has each of these
# What a record of structure `exact` may change, and must list.
FREE = {"g2s_cols", "g2s_slot", "smem_swizzle", "smem_swizzle_c", "min_blocks", "r2s_bytes", "c_batch"}
# From the values of facts to those of a record's fields ``epilogue`` and ``raster``.
EPILOGUES = {
    "smem_via_t": "staged",
    "smem_tiled_copy": "direct",
    "smem_autovec_copy": "direct",
    "direct_gmem_copy": "global",
    "direct_gmem_elements": "global",
}
RASTERS = {"plain": "plain", "zsplit": "zsplit", "persistent_loop": "persistent"}

# The facts of a kernel by name, sizes m, n and k, and a record of the catalog.
Facts = dict[str, Any]
Sizes = tuple[int, int, int]
Record = catalog.Record


def fields_of(facts: Facts) -> dict[str, Any]:
    """The fields of a record that describe a published kernel. A field is None if its fact was not determined, or if no
    record can express it."""
    kind = facts.get("prefetch_inner") if facts.get("prefetch") == "k_unrolled" else facts.get("prefetch")
    rings = facts.get("g2s_op_a") == "SM80_CP_ASYNC_CACHEGLOBAL" and not facts.get("smem_pad_a")
    own_c = str(facts.get("c_smem", "")).startswith("offset")
    return {
        "acc": facts["acc_actual"],
        "family": "sm80_multistage" if facts["abstraction"] == "cute_sm80_mma" and rings else None,
        "bm": facts["bm"],
        "bn": facts["bn"],
        "bk": facts["bk"],
        "stages": facts.get("stages"),
        "mma_repeat": [facts["mma_rep_m"], facts["mma_rep_n"], 1] if "mma_rep_m" in facts else None,
        "min_blocks": facts.get("launch_bounds_min_blocks", 1),
        "smem_swizzle": _shared(facts, "swizzle_a", "swizzle_b") if facts.get("smem_atom_rows_a") == 8 else None,
        "smem_swizzle_c": facts.get("swizzle_c"),
        "g2s_cols": (_shared(facts, "g2s_thr_a", "g2s_thr_b") or [None, None])[1],
        "g2s_slot": (_shared(facts, "g2s_slot_a", "g2s_slot_b") or [None])[0],
        "raster": RASTERS.get(facts["cta_map"]),
        "swizzle_stride": _stride(facts),
        "prefetch": {"kind": kind, "distance": facts.get("prefetch_dist_a") if kind == "multi" else None},
        "unroll_k": facts.get("prefetch") == "k_unrolled",
        "bake": [] if facts.get("k_generic", True) else ["k"],
        "epilogue": None if own_c else EPILOGUES.get(facts.get("epilogue", "")),
        "c_batch": facts.get("c_batch"),
        "r2s_bytes": facts.get("r2s_bytes"),
        "padding": "pad" if facts["pads_problem"] else "none",
        "split_k": None if facts["split_k"] else 1,
    }


def _shared(facts: Facts, a: str, b: str) -> Any:
    """The value of two facts, one about A and one about B; None if they differ."""
    return facts.get(a) if facts.get(a) == facts.get(b) else None


def _stride(facts: Facts) -> int | None:
    """Columns in a slice. If only the grid is known, the stride that gives this grid."""
    if facts["cta_map"] != "zsplit":
        return None
    return facts.get("swizzle_stride") or math.ceil(facts["padded_n"] / facts["grid_z"])


def judge(record: Record, facts: Facts) -> tuple[str, list[str]]:
    """`structure` and `changed` of a record that was made from this published kernel. `changed` lists the fields that
    differ from the published ones."""
    published_fields = fields_of(facts)
    fields = record.model_dump(mode="json")
    if record.family != "sm80_multistage":
        published_fields = {name: published_fields[name] for name in published_fields if name in fields}
    changed = sorted(name for name, value in published_fields.items() if fields[name] != value)
    return ("exact" if set(changed) <= FREE else "nearest"), changed


def translate(gpu: str, acc: str, facts: Facts) -> Record:
    """The legal record closest to a published kernel. Whether it compiles without spills is not known yet."""
    published_fields = fields_of(facts)
    fields = {name: value for name, value in published_fields.items() if value is not None}
    fields |= {"gpu": gpu, "acc": acc, "layout": "tn", "m": facts["m"], "n": facts["n"], "k": facts["k"]}
    fields["origin"] = {"source": f"CUDA-L2 {gpu} {facts['acc_published']} {facts['m']}_{facts['n']}_{facts['k']}"}
    if facts["abstraction"] == "wmma" or (fields.get("stages") is None and published_fields["mma_repeat"] is None):
        return _direct(fields)
    return _multistage(fields, facts)


def _direct(fields: dict[str, Any]) -> Record:
    """The record of family sm80_direct for a published kernel without a ring, which shares only problem and loop."""
    keep = {name: fields[name] for name in ("gpu", "acc", "layout", "m", "n", "k", "origin", "bake", "unroll_k")}
    keep["origin"] |= {"structure": "nearest"}
    return parse(
        keep | {"family": "sm80_direct", "bm": 16, "bn": 16, "mma_repeat": [1, 1, 1], "padding": "none", "split_k": 1}
    )


def _multistage(fields: dict[str, Any], facts: Facts) -> Record:
    """The record of family sm80_multistage with a published kernel's fields. Undetermined fields get common values.

    Raises SystemExit if no legal record is close to the kernel.
    """
    fields["origin"] |= {"structure": "nearest"}
    k_blocks = fields["bk"] // 16
    fields.setdefault("stages", max(1, min(3, facts["k"] // fields["bk"])))
    fields.setdefault("raster", "plain")
    fields["swizzle_stride"] = fields.get("swizzle_stride") if fields["raster"] == "zsplit" else None
    fields.setdefault("smem_swizzle", [3, 3, 3] if fields["bk"] >= 64 else [2, 3, 3])
    fields.setdefault("epilogue", "staged")
    if fields.get("r2s_bytes") not in (4, 8, 16):
        fields["r2s_bytes"] = 4
    fields.setdefault("split_k", min(facts.get("grid_z") or 4, facts["k"] // fields["bk"]))
    if fields["prefetch"]["kind"] is None:
        fields["prefetch"] = {"kind": "single" if k_blocks > 1 else "none", "distance": None}
    # Fields of the epilogue that the chosen kind of epilogue does not have must be None.
    multistage = set(FAMILIES["sm80_multistage"].line_fields())
    fields = {name: value for name, value in fields.items() if name in multistage} | {"family": "sm80_multistage"}
    if fields["epilogue"] == "global":
        fields |= {"c_batch": None, "r2s_bytes": None, "smem_swizzle_c": None}
    if fields["epilogue"] == "direct":
        fields["c_batch"] = None
    if fields["r2s_bytes"] != 4:
        fields["smem_swizzle_c"] = None
    else:
        fields.setdefault("smem_swizzle_c", fields["smem_swizzle"])
    # The staged epilogue stores ``c_batch`` vectors of 8 elements per thread at a time, through the memory of the ring.
    threads = 32 * fields["mma_repeat"][0] * fields["mma_repeat"][1]
    vectors = fields["bm"] * fields["bn"] // (threads * 8)
    ring_bytes = fields["stages"] * (fields["bm"] + fields["bn"]) * fields["bk"] * 2
    fields.setdefault("g2s_cols", 4)
    fields.setdefault("g2s_slot", 0)
    if fields["epilogue"] == "staged":
        fields["c_batch"] = min(fields.get("c_batch", 4), vectors, ring_bytes // (threads * 16))
    # Changes that are tried one after the other until the record is legal.
    attempts = (
        {},
        {"g2s_slot": 0},
        {"smem_swizzle_c": [2, 3, 3]},
        {"smem_swizzle": [2, 3, 3], "smem_swizzle_c": [2, 3, 3]},
        {"g2s_cols": min(4, fields["bk"] // 8), "g2s_slot": 0},
    )
    for change in attempts:
        applied = {name: value for name, value in change.items() if fields[name] is not None}
        try:
            return parse(fields | applied)
        except IllegalRecord as error:
            reason = error
    raise SystemExit(f"{facts['m']}_{facts['n']}_{facts['k']}: {reason}")


def relaxations(record: Record) -> Iterator[Record]:
    """Records to try in turn if ptxas spills: looser bounds first, then other orders of the same structure."""
    if record.family != "sm80_multistage":
        return
    for blocks in range(record.min_blocks - 1, 0, -1):
        yield revise(record, min_blocks=blocks)
    base = revise(record, min_blocks=1)
    for change in ({"g2s_cols": 8}, {"g2s_slot": 1}, {"c_batch": 1}, {"c_batch": 2}, {"g2s_cols": 8, "g2s_slot": 1}):
        try:
            yield revise(base, **{name: value for name, value in change.items() if getattr(base, name) is not None})
        except IllegalRecord:
            continue
    for kind in ("staggered", "single_intra_tile", "none"):
        try:
            yield revise(base, prefetch={"kind": kind, "distance": None}, g2s_slot=0)
        except IllegalRecord:
            continue
    for repeat in ([2, 4, 1], [4, 2, 1]):
        try:
            yield revise(base, mma_repeat=repeat, c_batch=base.c_batch and 1)
        except IllegalRecord:
            continue


def compile_clean(records: list[Record]) -> list[Record]:
    """The records; one that spills is replaced by its first relaxation that does not."""
    artifacts = compiler.build(records)
    final = list(records)
    pending = {i: relaxations(records[i]) for i, artifact in enumerate(artifacts) if artifact.ptxas.findings}
    print(f"{len(pending)} of {len(records)} spill as published", file=sys.stderr)
    while pending:
        trial = {i: next(options, None) for i, options in pending.items()}
        hopeless = [records[i] for i, record in trial.items() if record is None]
        if hopeless:
            raise SystemExit(f"no form without spills: {[catalog.dump(record) for record in hopeless]}")
        built = compiler.build(list(trial.values()))
        for (i, record), artifact in zip(trial.items(), built, strict=True):
            if not artifact.ptxas.findings:
                final[i] = record
                del pending[i]
    return final


def with_claims(record: Record, facts: Facts) -> Record:
    """The record with the ``structure`` and ``changed`` that ``judge`` finds."""
    structure, changed = judge(record, facts)
    return revise(record, origin={"source": record.origin.source, "structure": structure, "changed": changed})


def fill(records: list[Record], gpu: str, acc: str) -> list[Record]:
    """Records for the sizes of the grid that have no published kernel, from the nearest kernel that is legal there."""
    present = {(record.m, record.n, record.k) for record in records}
    records_made = []
    for m, n, k in ((m, n, k) for m in SIZES for n in SIZES for k in SIZES if (m, n, k) not in present):

        def distance(record: Record, m: int = m, n: int = n, k: int = k) -> float:
            return abs(math.log2(record.m / m)) + abs(math.log2(record.n / n)) + abs(math.log2(record.k / k))

        for record in sorted(records, key=distance):
            candidate = _resized(record, m, n, k)
            if candidate is not None:
                records_made.append(candidate)
                break
        else:
            raise SystemExit(f"{gpu} {acc} {m}_{n}_{k}: no record is legal there")
    return records_made


def _resized(record: Record, m: int, n: int, k: int) -> Record | None:
    """A record for another size; None if the size is baked into it or the record is illegal for that size."""
    if record.bake:
        return None
    extents = {name: value for name, value in (("m", m), ("n", n), ("k", k)) if getattr(record, name) != value}
    divides = m % record.bm == 0 and n % record.bn == 0
    padding = "none" if divides else "pad"
    changes = sorted([*extents, *(["padding"] if padding != record.padding else [])])
    origin = {"source": record.origin.source, "structure": "nearest", "changed": changes}
    try:
        return revise(record, **extents, padding=padding, origin=origin)
    except IllegalRecord:
        return None


def facts_of(gpu: str, acc: str, folder: Path = FACTS) -> dict[Sizes, Facts]:
    """The facts about the published kernels of a GPU and accumulator, by (m, n, k). Raises ValueError if there are
    none."""
    path = folder / f"{gpu}_{acc}.jsonl.xz"
    try:
        rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    except (OSError, lzma.LZMAError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {reason}; restore it from the repository") from None
    return {(row["m"], row["n"], row["k"]): row for row in rows}


def write(target: Path, facts: Path = FACTS) -> None:
    """Writes a catalog with a record for every size of ``SETS``. ``facts``: the folder of facts. Raises SystemExit if a
    kernel has no legal record without spills."""
    catalog_records: list[Record] = []
    for gpu, acc in SETS:
        rows = facts_of(gpu, acc, facts)
        drafts = compile_clean([translate(gpu, acc, row) for row in rows.values()])
        records = [with_claims(record, row) for record, row in zip(drafts, rows.values(), strict=True)]
        catalog_records += records + fill(records, gpu, acc)
    catalog.save(catalog_records, target)


def check(target: Path, facts: Path = FACTS) -> int:
    """Prints every claim of a catalog that the facts contradict, and returns how many there are.

    Where ``configs/published/records.jsonl`` has the record that a modelled one replaced, its claim is checked. Other
    records that were edited, tuned or modelled since then claim nothing about a published kernel.
    """
    faults = 0
    former = {record.problem: record for record in replaced()}
    records = [
        former.get(record.problem, record) if record.origin.structure == "modelled" else record
        for record in catalog.load(target)
    ]
    for gpu, acc in SETS:
        rows = facts_of(gpu, acc, facts)
        set_records = [record for record in records if (record.gpu, record.acc, record.layout) == (gpu, acc, "tn")]
        structures: Counter[str] = Counter()
        changes: Counter[str] = Counter()
        for record in set_records:
            claim = (record.origin.structure, list(record.origin.changed))
            if claim[0] not in CLAIMS:
                structures[f"{claim[0]}, no claim"] += 1
                continue
            row = rows.get((record.m, record.n, record.k))
            truth = ("nearest", claim[1]) if row is None else judge(record, row)
            structures[truth[0] if row is not None else "nearest, no published kernel"] += 1
            changes.update(truth[1] if truth[0] == "exact" else [])
            if truth != claim:
                faults += 1
                print(
                    f"{gpu} {acc} {record.mnk}: claims {' '.join(map(str, claim))}, the facts say {truth[0]} {truth[1]}"
                )
        print(f"{gpu} {acc}: {len(set_records)} records: {dict(structures)}; changed in exact ones: {dict(changes)}")
    print(f"{faults} wrong claims")
    return faults


def baseline_name(column: str) -> str:
    """The name of a published column in this project: B stored (N,K) is tn in both."""
    return column.replace("cuBLASLt-auto-tuning", "cublaslt-autotuning").replace("cuBLAS", "cublas").replace("Lt", "lt")


def published_speedups(path: Path) -> dict[str, list[float]]:
    """The speedups of a published table by baseline, in the table's order."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {baseline_name(name): [float(row[name]) for row in rows] for name in rows[0] if name != "mnk"}


def summary_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each set, mode and baseline: mean, median, sample standard deviation, geometric mean, shares of wins
    and losses, and the mean of the best of both modes."""
    for (gpu, acc), name in SPEEDUPS.items():
        for mode in ("offline", "server"):
            table = published_speedups(folder / f"cuda_l2_{name}_speedup_{mode}.csv")
            for baseline, values in table.items():
                ratios = [Ratio(value, value, value) for value in values]
                summary, best_summary = summarise(ratios), summarise(best_of(ratios))
                yield {
                    "gpu": gpu,
                    "acc": acc,
                    "mode": mode,
                    "baseline": baseline,
                    "shapes": summary.shapes,
                    "mean": round(summary.mean, 4),
                    "median": round(summary.median, 4),
                    "std": round(summary.std, 4),
                    "geomean": round(summary.geomean.value, 4),
                    "wins": round(summary.wins, 4),
                    "losses": round(summary.losses, 4),
                    "best_of_mean": round(best_summary.mean, 4),
                    "best_of_geomean": round(best_summary.geomean.value, 4),
                }


def summarise_speedups(tables: Path, target: Path) -> None:
    """Writes the summary of a folder of published tables to a JSON file."""
    rows = [json.dumps(row) for row in summary_rows(tables)]
    source = json.dumps(SOURCE)
    target.write_text(f'{{\n"source": {source},\n"rows": [\n' + ",\n".join(rows) + "\n]\n}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: the catalog makes a wrong claim; 2: a file is missing or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, nargs="?", const=places.catalog(), metavar="CATALOG")
    action.add_argument("--write", type=Path, metavar="CATALOG")
    action.add_argument("--summarise", type=Path, metavar="TABLES")
    parser.add_argument("--facts", type=Path, default=FACTS, help="a folder like configs/published")
    options = parser.parse_args(arguments)
    try:
        if options.summarise is not None:
            summarise_speedups(options.summarise, FACTS.with_name("published.json"))
        elif options.write is not None:
            write(options.write, options.facts)
        elif check(options.check, options.facts):
            return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
