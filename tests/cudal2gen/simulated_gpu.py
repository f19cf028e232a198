"""An environment for tests of executors: the timing model with delays, which logs what is evaluated when and where."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudal2gen import places
from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Effort, Trial, Verdict
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.ray_executor import Parcel

# Values of ``raster_group`` (the band of tiles) whose records fail in a certain way. The rules allow up to 64.
KILLS, HANGS, RAISES = 61, 62, 63


class SimulatedGpu(ModelEnvironment):
    """Takes ``seconds`` per record. Records of some bands kill their process, hang, or make the environment raise.

    Once as many records as ``allow`` sets have been evaluated, new evaluations wait, so that a test can act while every
    worker is in the middle of an evaluation, however busy the machine is.
    """

    def __init__(self, log: Path, seconds: float = 0.1) -> None:
        super().__init__(seed=7, noise=0.0)
        self._log, self._seconds = log, seconds
        self.verdicts: dict[str, Verdict] = {}

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """Logs the beginning and the end of an evaluation, and fails in it as the record's ``raster_group`` says."""
        built = sorted(path.name for path in places.build_dir().iterdir()) if places.build_dir().is_dir() else []
        write(self._log, begin=bands(records), built=built)
        while count_ended(self._log).total() >= allowed_records(self._log):
            time.sleep(0.02)
        for record in records:
            time.sleep(self._seconds)
            band = getattr(record, "raster_group", 0)
            if band == KILLS:
                os.kill(os.getpid(), 9)
            if band == HANGS:
                time.sleep(60)
            if band == RAISES:
                raise ArithmeticError("the device is in a bad mood")
        trials = super().evaluate(problem, records, effort)
        write(self._log, end=bands(records))
        for record in records:
            self.verdicts[record.name] = verdict(record.name)
        return trials


class MissingGpu(SimulatedGpu):
    """An environment that cannot be made, as without a GPU."""

    def __init__(self, log: Path) -> None:
        raise OSError("no CUDA device")


def verdict(digest: str) -> Verdict:
    """A verdict without cases on a kernel that has this digest and name."""
    return Verdict(record=digest, digest=digest, on="a card", cases=(), counters={})


def bands(records: Sequence[Record]) -> list[int]:
    """The bands of records, by which the log names them."""
    return [getattr(record, "raster_group", 0) for record in records]


def write(log: Path, **entries: Any) -> None:
    """Appends a line, under a lock, since several processes log to one file. ``at``: seconds of a clock that all
    share."""
    import ray

    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    line = json.dumps(entries | {"at": time.monotonic(), "pid": os.getpid(), "node": node}) + "\n"
    with log.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # so that a reader sees no part of a line
        file.write(line.encode())


def read_log(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, [] if nothing was logged yet."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return [json.loads(line) for line in file]


def count_ended(log: Path) -> Counter[int]:
    """How often each band was evaluated to the end."""
    return Counter(band for line in read_log(log) for band in line.get("end", ()))


def unended_evaluations(log: Path) -> list[dict[str, Any]]:
    """The log lines of evaluations that have begun and not ended, the latest of each process."""
    latest = {line["pid"]: line for line in read_log(log) if "begin" in line or "end" in line}
    return [line for line in latest.values() if "begin" in line]


def allow(log: Path, count: int) -> None:
    """Lets ``count`` records be evaluated; further evaluations wait until a larger number is allowed."""
    temporary = log.with_suffix(".new")
    temporary.write_text(str(count))
    temporary.replace(log.with_suffix(".allowed"))


def allowed_records(log: Path) -> float:
    """The number of records that may be evaluated; infinite if no limit was set."""
    limit = log.with_suffix(".allowed")
    return int(limit.read_text()) if limit.exists() else float("inf")


class FakeCompiler:
    """Stands in for a compiler on CPU workers: a parcel with each record's name."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self, records: Sequence[Record]) -> Parcel:
        write(self._log, packed=bands(records))
        return {record.name: {"kernel.cubin": record.name.encode()} for record in records}
