"""Compares published speedups of CUDA-L2's kernels with modelled ones, by the order of problems.

The published tables have no times. The modelled speedup is the least time that nvidia-matmul-heuristics models for the
problem, divided by the modelled time of the record that regenerates the kernel. The A100 multiplies equally fast with
fp16 and fp32 sums, so that the vendor's time with fp16 sums is at most that with fp32 sums. For small problems the
library disagrees (64 cubed: 84 us against 15), and the lesser time counts.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.results.ratios import spearman
from cudal2gen.timing import model
from cudal2gen.timing.evidence.findings import Array, interval
from cudal2gen.timing.evidence.published import SETS, regenerated
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.timing.model.code import estimate_code
from kernelproof.ground.errors import WrongInput
from kernelproof.sass.decoding import disassemble

NAMES = {
    ("a100", "f16"): "a100_F16F16F16F16",
    ("a100", "f32"): "a100_F32F16F16F32",
    ("rtx3090", "f32"): "3090_F32F16F16F32",
}
BASELINES = {
    "cuBLASLt-AutoTuning": "cuBLASLt-auto-tuning-max",
    "torch.matmul": "torch.matmul",
    "cuBLAS": "cuBLAS-max",
}
LARGE_FLOPS = 5e10
TARGETS = {
    ("f16", "cuBLASLt-AutoTuning", False): 0.80,
    ("f16", "torch.matmul", False): 0.82,
    ("f16", "cuBLASLt-AutoTuning", True): 0.72,
    ("f32", "cuBLASLt-AutoTuning", False): 0.85,
    ("f32", "cuBLASLt-AutoTuning", True): 0.45,
}


def published_speedups(folder: Path, held_out: bool = False, code: bool = False) -> list[Finding]:
    """Rank correlations by set and baseline, of all problems and of those above ``LARGE_FLOPS``.

    ``code``: take only kernels in the build folder, with times modelled from machine code, which take half a second
    each. Raises WrongInput if the folder has no table, or if ``code`` is given and no kernel is built; MissingLibrary
    if nvidia-matmul-heuristics is not installed.
    """
    heuristics = MatmulHeuristics()
    findings = []
    for gpu, acc in SETS:
        table = _table(folder / f"cuda_l2_{NAMES[gpu, acc]}_speedup_offline.csv")
        records = [record for record in regenerated(gpu, acc, held_out) if record.mnk in table]
        times = {record: _code_us(record) if code else model.estimate(record).us for record in records}
        records = [record for record in records if times[record] is not None]
        if len(records) < 3:
            continue
        modelled = np.array([times[record] for record in records], np.float64)
        vendor = np.array([vendor_us(heuristics, record) for record in records])
        flops = np.array([float(record.problem.flops) for record in records])
        for baseline, column in BASELINES.items():
            speedups = np.array([table[record.mnk][column] for record in records])
            for large in (False, True):
                chosen = flops > LARGE_FLOPS if large else flops > 0
                if chosen.sum() < 3:
                    continue
                target = TARGETS.get((acc, baseline, large)) if gpu == "a100" else None
                subject = f"{gpu} {acc}" + (f" above {LARGE_FLOPS:.0e} FLOP" if large else "")
                findings.append(
                    _finding(
                        subject, baseline, speedups[chosen], vendor[chosen], modelled[chosen], flops[chosen], target
                    )
                )
    if not findings:
        raise WrongInput(
            f"{folder}: no cuda_l2_*_speedup_offline.csv here{', or no kernel is built' if code else ''}: name the "
            "folder eval_results of github.com/deepreinforce-ai/CUDA-L2"
        )
    return findings


def _code_us(record: Record) -> float | None:
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
    subject: str, baseline: str, speedups: Array, vendor: Array, modelled: Array, flops: Array, target: float | None
) -> Finding:
    proxy = vendor / modelled
    low, high = interval(len(proxy), lambda places: _correlation(proxy[places], speedups[places]))
    baselines = {"size": _correlation(-flops, speedups), "nvidia-matmul-heuristics": _correlation(-vendor, speedups)}
    goal = None if target is None else f">= {target:.2f}"
    value = _correlation(proxy, speedups)
    return Finding("a", f"{subject}, over {baseline}", "Spearman", len(proxy), value, low, high, goal, baselines)


def _correlation(x: Array, y: Array) -> float:
    return spearman(x.tolist(), y.tolist())


def _table(path: Path) -> dict[str, dict[str, float]]:
    """The speedups of a table, by problem and column; empty if there is no file. Raises WrongInput for another
    table."""
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
