"""Compares published speedups of CUDA-L2's kernels with modelled ones, by the order of problems.

The published tables have no times. The modelled speedup is a stand-in for the vendor's time, divided by the modelled
time of the record that regenerates the kernel. For A100 and RTX 3090 the stand-in is the least time that
nvidia-matmul-heuristics models for the problem. The A100 multiplies equally fast with fp16 and fp32 sums, so the
vendor's time with fp16 sums should be at most that with fp32 sums. For small problems the library says otherwise (64
cubed: 84 us against 15 us), so the lesser of its two times is taken.

For the H100 only tiles are published. There the kernel's time is the least modelled time of candidates with its tile,
and the stand-in is the least modelled time of all candidates. The library's times are not used there: with them even
the true times of kernels give the reverse of the true order, because they are too far from recorded times of cuBLAS
(``vendors``).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cudal2gen.generation import compiler
from cudal2gen.kernel import Problem, Record
from cudal2gen.timing import model
from cudal2gen.timing.evidence.choices import tile_times
from cudal2gen.timing.evidence.findings import Array, interval, is_development, rank_correlation
from cudal2gen.timing.evidence.learned import corrected
from cudal2gen.timing.evidence.published import SETS, hopper_configurations, regenerated
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.timing.model.code import estimate_code
from kernelproof.ground.errors import WrongInput
from kernelproof.sass import disassemble

# The names of CUDA-L2's sets, by GPU and accumulator.
NAMES = {
    ("a100", "f16"): "a100_F16F16F16F16",
    ("a100", "f32"): "a100_F32F16F16F32",
    ("rtx3090", "f32"): "3090_F32F16F16F32",
    ("h100", "f32"): "h100_F32F16F16F32",
}
MODES = ("offline", "server")  # of timing: one call after the other, or calls after pauses
BASELINES = {"cuBLASLt-AutoTuning": "cuBLASLt-auto-tuning-max", "torch.matmul": "torch.matmul"}  # baseline: its column
LARGE_FLOPS = 5e10  # problems with more FLOP are also compared separately
NEIGHBOURS = 5  # shapes whose mean speedup is the prediction of a baseline that knows no kernel
FEWEST = 20  # problems from which a correction is learned
LARGE, QUARTER = f"above {LARGE_FLOPS:.0e} FLOP", "largest quarter"
# The least accepted rank correlations of offline speedups over cuBLASLt-AutoTuning, by GPU, accumulator and part of the
# problems ("": all).
TARGETS = {
    ("a100", "f16", ""): 0.80, ("a100", "f16", LARGE): 0.70, ("a100", "f32", ""): 0.85, ("a100", "f32", LARGE): 0.60,
    ("h100", "f32", LARGE): 0.60,
}  # fmt: skip


class ModelledSpeedup(NamedTuple):
    """A problem with the modelled times of its published kernel and of the vendor's, in microseconds."""

    problem: Problem
    own_us: float
    vendor_us: float


def published_speedups(folder: Path, held_out: bool = False, code: bool = False) -> list[Finding]:
    """Rank correlations by set, mode and baseline: of all problems, of those above ``LARGE_FLOPS``, and of the quarter
    with the most FLOP.

    ``code``: use only kernels in the build folder, and model their times from machine code, half a second each.

    Raises WrongInput if the folder has no table, or if ``code`` is given and no kernel is built; MissingLibrary if
    nvidia-matmul-heuristics is not installed.
    """
    heuristics = MatmulHeuristics()
    findings: list[Finding] = []
    for (gpu, acc), name in NAMES.items():
        tables = {mode: speedup_table(folder / f"cuda_l2_{name}_speedup_{mode}.csv") for mode in MODES}
        if not any(tables.values()):
            continue
        if (gpu, acc) in SETS:
            known = frozenset().union(*tables.values())
            # By whether the problems are held out. The development half is always needed: the learned correction of
            # ``_finding`` learns from it.
            halves = {half: list(_regenerated(gpu, acc, half, known, heuristics, code)) for half in {held_out, False}}
        else:
            halves = {half: [] if code else list(_hopper(half)) for half in {held_out, False}}
        for mode, table in tables.items():
            for baseline, column in BASELINES.items():
                speedups = {mnk: row[column] for mnk, row in table.items()}
                title = f"{gpu} {acc}{' server' * (mode == 'server')}, over {baseline}"
                headline = (mode, baseline) == (MODES[0], "cuBLASLt-AutoTuning")
                for part, chosen, known_mnks in _parts(halves[held_out], speedups, held_out):
                    if len(chosen) >= 3:
                        target = TARGETS.get((gpu, acc, part)) if headline else None
                        learned = [
                            item for item in halves[False] if item.problem.mnk in known_mnks and item not in chosen
                        ]
                        findings.append(
                            _finding(f"{title} {part}".strip(), chosen, speedups, known_mnks, learned, target)
                        )
    if not findings:
        raise WrongInput(
            f"{folder}: no cuda_l2_*_speedup_offline.csv here{', or no kernel is built' if code else ''}: name the "
            "folder eval_results of github.com/deepreinforce-ai/CUDA-L2"
        )
    return findings


def _regenerated(
    gpu: str, acc: str, held_out: bool, known: frozenset[str], heuristics: MatmulHeuristics, code: bool
) -> Iterator[ModelledSpeedup]:
    """The modelled speedups of the regenerated kernels of a GPU and an accumulator. ``known``: the problems of the
    published tables; others are left out."""
    for record in regenerated(gpu, acc, held_out):
        own = None if record.mnk not in known else code_us(record) if code else model.estimate(record).us
        if own is not None:
            yield ModelledSpeedup(record.problem, own, vendor_us(heuristics, record))


def _hopper(held_out: bool) -> Iterator[ModelledSpeedup]:
    """The modelled speedups of the published configurations of the H100 whose tile some candidate has."""
    for facts in hopper_configurations():
        if is_development(facts["n"], facts["k"]) != held_out:
            problem = Problem(gpu="h100", acc="f32", layout="tn", m=facts["m"], n=facts["n"], k=facts["k"])
            times = tile_times(problem)
            if (own := times.get((facts["bm"], facts["bn"]))) is not None:
                yield ModelledSpeedup(problem, own, min(times.values()))


def _parts(
    modelled: Sequence[ModelledSpeedup], speedups: Mapping[str, float], held_out: bool
) -> Iterator[tuple[str, list[ModelledSpeedup], list[str]]]:
    """Parts of the problems: name, problems, and the problems of the table whose speedups the baselines may use.

    Baselines of held-out problems use development ones. Those of the largest quarter use only smaller problems.
    """
    present = [item for item in modelled if item.problem.mnk in speedups]
    if not present:
        return
    known = [mnk for mnk in speedups if not held_out or is_development(*_extents(mnk)[1:])]
    least = float(np.quantile([item.problem.flops for item in present], 0.75))
    yield "", present, known
    yield LARGE, [item for item in present if item.problem.flops > LARGE_FLOPS], known
    smaller = [mnk for mnk in known if 2 * float(np.prod(_extents(mnk))) < least]
    yield QUARTER, [item for item in present if item.problem.flops >= least], smaller


def nearest_speedups(mnks: Sequence[str], speedups: Mapping[str, float], known: Sequence[str]) -> Array:
    """For each problem the mean speedup of the ``NEIGHBOURS`` others in ``known`` with the nearest extents."""
    places = np.log2([_extents(mnk) for mnk in known])
    values = np.array([speedups[mnk] for mnk in known])
    predicted = []
    for mnk in mnks:
        distances = ((places - np.log2(_extents(mnk))) ** 2).sum(1)
        distances[[place for place, other in enumerate(known) if other == mnk]] = np.inf
        predicted.append(values[np.argsort(distances, kind="stable")[:NEIGHBOURS]].mean())
    return np.array(predicted)


def _extents(mnk: str) -> tuple[int, int, int]:
    """m, n, k of a text such as 64_128_256."""
    m, n, k = map(int, mnk.split("_"))
    return m, n, k


def code_us(record: Record) -> float | None:
    """The time modelled from a record's machine code, in microseconds; None if it is not built."""
    artifact = compiler.find(record)
    if artifact is None:
        return None
    functions = disassemble(artifact.cubin)
    return estimate_code(record, max(functions, key=lambda function: len(function.instructions))).us


def vendor_us(heuristics: MatmulHeuristics, record: Record) -> float:
    """The time that the library models for a record's problem, in microseconds."""
    # GeForce cards multiply with fp32 sums at half the rate.
    is_geforce = record.target.title.startswith("GeForce")
    accs = {record.acc} if is_geforce else {record.acc, "f32"}
    return min(heuristics.least_us(record.problem.revised(acc=acc)) for acc in accs)


def _finding(
    subject: str, chosen: Sequence[ModelledSpeedup], speedups: Mapping[str, float], known: Sequence[str],
    learned: Sequence[ModelledSpeedup], target: float | None,
) -> Finding:  # fmt: skip
    """The rank correlation of modelled with published speedups for the ``chosen`` problems.

    ``known``: problems whose speedups the baselines may use. ``learned``: problems among these that have a modelled
    speedup; the correction learns from them.
    """
    mnks = [item.problem.mnk for item in chosen]
    published = np.array([speedups[mnk] for mnk in mnks])
    own, vendor = (np.array([getattr(item, name) for item in chosen], np.float64) for name in ("own_us", "vendor_us"))
    flops = np.array([float(item.problem.flops) for item in chosen])
    proxy = vendor / own
    low, high = interval(len(proxy), lambda places: rank_correlation(proxy[places], published[places]))
    baselines = {"size": rank_correlation(-flops, published), "vendor's stand-in": rank_correlation(-vendor, published)}
    if len(known) > NEIGHBOURS:
        baselines[f"{NEIGHBOURS} nearest shapes"] = rank_correlation(nearest_speedups(mnks, speedups, known), published)
    if len(learned) >= FEWEST:
        values = np.array([speedups[item.problem.mnk] for item in learned])
        predicted = corrected(_facts(learned), values, _facts(chosen))
        baselines["learned correction"] = rank_correlation(predicted, published)
    goal = None if target is None else f">= {target:.2f}"
    return Finding(
        "speedups", subject, "Spearman", len(proxy), rank_correlation(proxy, published), low, high, goal, baselines
    )


def _facts(modelled: Sequence[ModelledSpeedup]) -> Array:
    """A row for each problem: m, n, k and the modelled speedup."""
    return np.array([(*_extents(item.problem.mnk), item.vendor_us / item.own_us) for item in modelled], np.float64)


def speedup_table(path: Path) -> dict[str, dict[str, float]]:
    """The speedups of a table, by problem and column; empty if there is no file. Raises WrongInput for a file of
    another form."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines)
        if missing := {"mnk", *BASELINES.values()} - set(rows.fieldnames or ()):
            raise WrongInput(f"{path}: has no column {min(missing)}; copy the file from CUDA-L2's eval_results anew")
        try:
            return {row["mnk"]: {column: float(row[column]) for column in BASELINES.values()} for row in rows}
        except (TypeError, ValueError) as error:
            raise WrongInput(f"{path}:{rows.line_num}: {error}; copy it from CUDA-L2's eval_results anew") from None
