"""Compares the machine code of the A100 f16 records with that of the published CUDA-L2 kernels for the same problems.

    python scripts/machine_code.py                          compiles all records and prints them by kind
    python scripts/machine_code.py --published CHECKOUT     also compares sixty records with the published kernels
    python scripts/machine_code.py ... --draw SEED COUNT    compares others: that many of all exact ones, except those
                                                            whose loop takes little more than any loop must
    python scripts/machine_code.py ... --save FILE          keeps each record's numbers
    python scripts/machine_code.py ... --before FILE        compares with numbers that were kept

docs/machine-code.md sums up what it printed.

CHECKOUT is a clone of deepreinforce-ai/CUDA-L2 at the commit that scripts/published.py names. Its kernels, 13 seconds
of a core each, are compiled into the user's cache, by the same nvcc; headers of PyTorch that they include are replaced
by ``published_host/``. No GPU is used and nothing is measured: ``kernelproof/sass`` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cudal2gen import places
from cudal2gen.generation import compiler, published
from cudal2gen.kernel import Record, Sm80Multistage
from kernelproof.ground import toolchain
from kernelproof.ground.pages import grid
from kernelproof.sass import Summary, summarise
from kernelproof.sass.simulation import BARRIER_CYCLES

# The sample of records that are compared with published kernels: its seed, records of each kind of prefetch, and size.
SEED, PER_KIND, DRAWN = 14, 10, 60
MMA_CYCLES = 8  # cycles for which an m16n8k16 occupies a sub-core's tensor core
LARGEST = 1.03  # ratio to the cycles of the published loop above which docs/machine-code.md gives a reason
FOLDER = "kernels/a100_F16F16F16F16"  # the folder of the kernels in a clone of CUDA-L2
HEADERS = Path(__file__).resolve().parent / "published_host"  # stand-ins for the headers of PyTorch
# The flags of the published build, for an A100.
FLAGS = (
    "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math", "-w",
    "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF2_OPERATORS__", "-arch=sm_80",
)  # fmt: skip
# By name: a number that is compared.
Numbers = dict[str, float]
# Fields of a Summary that are compared: the first three are of one warp in one k-tile, the others of the whole kernel.
COLUMNS = ("issue_slots", "stall_cycles", "loop_cycles", "epilogue", "registers", "spill_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--published", type=Path, help="a clone of deepreinforce-ai/CUDA-L2")
    parser.add_argument("--draw", type=int, nargs=2, metavar=("SEED", "COUNT"), help="which records are compared")
    parser.add_argument("--save", type=Path, help="where to write the numbers of each record, as JSON")
    parser.add_argument("--before", type=Path, help="numbers of an earlier state, as --save wrote them")
    options = parser.parse_args()
    records = [record for record in published.structures() if (record.gpu, record.acc) == ("a100", "f16")]
    numbers = record_numbers(records)
    if options.save:
        options.save.write_text(json.dumps(numbers, indent=0))
    before = json.loads(options.before.read_text()) if options.before else {}
    page = []
    if options.published:
        draw = drawn(records, options.draw)
        compared = [record for record in draw if not (options.draw and is_decided(record, numbers))]
        page += ["## Compared with the published kernels", ""]
        page += comparison(compared, numbers, before, options.published)
        page += [f"- decided by the bound of a k-tile: {len(draw) - len(compared)} of {len(draw)} drawn", ""]
    page += ["## All records", "", *groups(records, numbers), ""]
    exact = exact_ones(records)
    decided = sum(is_decided(record, numbers) for record in exact)
    page += [f"{decided} of {len(exact)} exact records take at most {LARGEST} of the bound of a k-tile."]
    print("\n".join(page))


def problem(record: Record) -> str:
    """The record's sizes, as files of CUDA-L2 are named."""
    return f"{record.m}_{record.n}_{record.k}"


def tile_mmas(record: Record) -> int:
    """MMAs of one warp in one step of its main loop."""
    return record.warp_m * record.warp_n * record.k_step // record.element.mma_k


def loop_bound(record: Record) -> int:
    """Cycles that every loop with a record's MMAs takes for a k-tile, alone on its sub-core.

    If neither k nor the loop is constant, each k-tile has a barrier. Two MMAs stand around it, and the second issues
    ``BARRIER_CYCLES`` after the barrier, which issues after the first.
    """
    cycles = MMA_CYCLES * tile_mmas(record)
    rolled = record.k > record.k_step and not record.bake
    return cycles - MMA_CYCLES + 1 + BARRIER_CYCLES if rolled else cycles


def is_decided(record: Record, numbers: dict[str, Numbers]) -> bool:
    """Whether a record's loop takes at most ``LARGEST`` of its bound. The published loop of an exact record has the
    same bound and need not be compiled."""
    return numbers[problem(record)]["loop_cycles"] <= LARGEST * loop_bound(record)


def record_numbers(records: Sequence[Record]) -> dict[str, Numbers]:
    """The numbers of each record's kernel, by problem."""
    artifacts = compiler.build(records)
    cubins = {artifact.cubin: record for artifact, record in zip(artifacts, records, strict=True)}
    with ThreadPoolExecutor() as pool:
        counted = dict(zip(cubins, pool.map(_numbers, cubins, cubins.values()), strict=True))
    return {problem(record): counted[artifact.cubin] for artifact, record in zip(artifacts, records, strict=True)}


def _numbers(cubin: Path, record: Record) -> Numbers:
    """The values of ``COLUMNS`` for a kernel's machine code."""
    summary: Summary = summarise(cubin, tile_mmas=tile_mmas(record))
    return {name: value for name, value in asdict(summary).items() if name in COLUMNS}


def kinds(record: Record) -> tuple[str, str]:
    """The kinds of prefetch and of epilogue by which records are grouped."""
    return (record.prefetch.kind, record.epilogue) if isinstance(record, Sm80Multistage) else ("no ring", "registers")


def groups(records: Sequence[Record], numbers: dict[str, Numbers]) -> list[str]:
    """A Markdown table: medians over the records of each prefetch and epilogue kind.

    Slots and stalls are divided by the number of MMAs, because tiles differ. T1 is the cycles of one warp alone in a
    k-tile, here divided by the cycles of its MMAs.
    """
    members: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        members[kinds(record)].append(record)
    columns = (
        "prefetch",
        "epilogue",
        "records",
        "slots / MMA",
        "stalls / MMA",
        "T1 / bound",
        "epilogue / store",
        "registers",
        "spills",
    )
    cells = []
    for (prefetch, epilogue), group in [*sorted(members.items()), (("all", ""), list(records))]:
        rows = [(record, numbers[problem(record)]) for record in group]

        def median_of(value: Callable[[Record, Numbers], float], rows: list[tuple[Record, Numbers]] = rows) -> float:
            return median(value(record, row) for record, row in rows)

        registers = [row["registers"] for _, row in rows]
        cells.append(
            (
                prefetch,
                epilogue,
                len(rows),
                f"{median_of(lambda record, row: row['issue_slots'] / tile_mmas(record)):.2f}",
                f"{median_of(lambda record, row: row['stall_cycles'] / tile_mmas(record)):.2f}",
                f"{median_of(lambda record, row: row['loop_cycles'] / tile_mmas(record) / MMA_CYCLES):.3f}",
                f"{median_of(lambda record, row: row['epilogue'] / stores(record)):.1f}",
                f"{median(registers):.0f}, at most {max(registers):.0f}",
                f"{sum(row['spill_bytes'] for _, row in rows):.0f}",
            )
        )
    return grid(columns, cells, left=2).split("\n")


def stores(record: Record) -> int:
    """Stores of 16 bytes to D that a thread must make."""
    return max(1, record.bm * record.bn // record.threads // 8)


def exact_ones(records: Iterable[Record]) -> list[Sm80Multistage]:
    """The records that have the structure of the published kernel, by size."""
    return [
        record
        for record in sorted(records, key=lambda record: (record.m, record.n, record.k))
        if isinstance(record, Sm80Multistage) and record.origin.structure == "exact"
    ]


def drawn(records: Iterable[Record], seed_and_count: Sequence[int] | None = None) -> list[Record]:
    """Ten exact records of each prefetch kind; what a kind lacks is drawn from the exact records of all kinds.

    With ``seed_and_count`` that many are drawn from the exact records of all kinds with this seed.
    """
    exact = exact_ones(records)
    if seed_and_count is not None:
        seed, count = seed_and_count
        return list(random.Random(seed).sample(exact, count))
    generator = random.Random(SEED)
    draw: list[Record] = []
    for kind in sorted({record.prefetch.kind for record in exact}):
        members = [record for record in exact if record.prefetch.kind == kind]
        draw += generator.sample(members, min(PER_KIND, len(members)))
    return draw + generator.sample([record for record in exact if record not in draw], DRAWN - len(draw))


def comparison(
    draw: Sequence[Record], numbers: dict[str, Numbers], before: dict[str, Numbers], checkout: Path
) -> list[str]:
    """A Markdown table of drawn records. Its cells have a number before, now, and in the published kernel; then the
    geometric means of now over published follow. ``before``: the numbers of an earlier state, by problem, or empty."""
    rows = []
    for record in draw:
        published = _numbers(published_cubin(checkout, record), record)
        rows.append((record, before.get(problem(record), {}), numbers[problem(record)], published))
    rows.sort(key=lambda row: (kinds(row[0]), row[0].m, row[0].n, row[0].k))
    columns = (
        "record",
        "prefetch, epilogue",
        "slots",
        "stalls",
        "T1",
        "T1 ratio",
        "epilogue",
        "epilogue ratio",
        "registers",
    )
    cells_of_rows = []
    for record, *states in rows:
        cells = [" / ".join(f"{state[name]:.0f}" if state else "-" for state in states) for name in COLUMNS]
        slots, stalls, cycles, epilogue, registers, _ = cells
        cycles_ratio = f"{states[1]['loop_cycles'] / states[2]['loop_cycles']:.3f}"
        epilogue_ratio = f"{states[1]['epilogue'] / states[2]['epilogue']:.2f}"
        cells_of_rows.append(
            (
                problem(record),
                ", ".join(kinds(record)),
                slots,
                stalls,
                cycles,
                cycles_ratio,
                epilogue,
                epilogue_ratio,
                registers,
            )
        )
    lines = grid(columns, cells_of_rows, left=2).split("\n")
    for name, title in (
        ("loop_cycles", "T1"),
        ("epilogue", "epilogue"),
        ("issue_slots", "issue slots"),
        ("registers", "registers"),
    ):
        ratios = [built[name] / published[name] for _, _, built, published in rows]
        earlier = [past[name] / published[name] for _, past, _, published in rows if past]
        mean = f"geometric mean {_mean(ratios):.3f}" + (f", {_mean(earlier):.3f} before" if earlier else "")
        lines.append(
            f"{'' if lines[-1].startswith('-') else chr(10)}- {title} over published: {mean}; largest {max(ratios):.3f}"
        )
    return lines


def _mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def published_cubin(checkout: Path, record: Record) -> Path:
    """The published kernel of a record's problem, compiled once into the user's cache."""
    tools = toolchain.discover()
    source = checkout / FOLDER / f"{problem(record)}.cu"
    identity = json.dumps([source.read_text(), FLAGS, tools.versions])
    cubin = places.user_cache() / "published" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
    if not cubin.is_file():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cubin.parent) as scratch:
            includes = [f"-I{HEADERS}", f"-I{tools.cutlass_include}"]
            fresh = Path(scratch) / "kernel.cubin"
            command = [str(tools.nvcc), *FLAGS, "-cubin", *includes, "-o", str(fresh), str(source)]
            subprocess.run(command, check=True, env=toolchain.environment())
            fresh.rename(cubin)
    return cubin


if __name__ == "__main__":
    main()
