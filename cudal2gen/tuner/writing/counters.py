"""Reads Nsight Compute's counters of one launch of a built kernel, if ``ncu`` is installed and permitted.

``ncu`` runs ``cudal2gen.validator.sanitizer``, which launches the kernel, in a separate process.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record
from cudal2gen.launch import gpu
from cudal2gen.places import PACKAGE
from cudal2gen.validator.problems import Shape
from cudal2gen.validator.sanitizer import launch_of
from kernelproof.ground import process_tree

# Nsight Compute's names of metrics, and the names in the evidence.
METRICS = {
    "gpu__time_duration.sum": "time under the profiler, cold",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM throughput",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor pipe",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 throughput",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory throughput",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "shared memory bank conflicts",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
NAME, UNIT, VALUE = "Metric Name", "Metric Unit", "Metric Value"  # columns of ncu's CSV
TIMEOUT_S = 120.0  # seconds for the launch under the profiler


def program() -> Path | None:
    """The path of ncu; None if it is not installed."""
    path = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    return Path(path) if os.access(path, os.X_OK) else None


def lines(record: Record, device: int = 0, profiler: Path | None = None) -> list[str]:
    """One line with the metrics of a record's kernel on the record's problem, or with the reason why there are none.

    Empty if the kernel does not compile. ``device``: the GPU's number. ``profiler``: the path of ncu, or None to find
    it.
    """
    profiler = profiler or program()
    if profiler is None:
        return ["Nsight Compute is not installed"]
    (artifact,) = compiler.attempt([record])
    if not isinstance(artifact, Artifact):
        return []
    shape = Shape(record.m, record.n, record.k)
    launch = launch_of(record, shape, artifact.directory, compiler.launcher(), gpu.runtime_of_built())
    command = [str(profiler), "--csv", "--metrics", ",".join(METRICS), "--launch-count", "1"]
    command += ["--target-processes", "application-only", "--kernel-name", record.launch.entry]
    command += [sys.executable, "-m", "cudal2gen.validator.sanitizer", json.dumps(asdict(launch))]
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDAL2GEN_DEVICE": str(device),
    }  # fmt: skip
    try:
        _, output = process_tree.output(command, environment, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return [f"Nsight Compute took more than {TIMEOUT_S:.0f} s"]
    if counted := list(_metrics(output)):
        return [f"counted by Nsight Compute: {', '.join(counted)}"]
    refusal = re.search(r"==(?:ERROR|WARNING)== (.+)|^error: (.+)", output, re.M)
    return [f"Nsight Compute: {refusal[1] or refusal[2] if refusal else 'no metrics'}"]


def _metrics(output: str) -> Iterator[str]:
    """The metrics in ncu's output, in which a CSV table with a row for each metric follows other lines."""
    rows = csv.reader(line for line in output.splitlines() if line.startswith('"'))
    header = next(rows, [])
    if not {NAME, UNIT, VALUE} <= set(header):
        return
    name, unit, value = (header.index(column) for column in (NAME, UNIT, VALUE))
    for row in rows:
        if len(row) == len(header) and row[name] in METRICS:
            yield f"{METRICS[row[name]]} {row[value]} {row[unit]}".strip()
