"""The user's store of measurements made during calls, shared by processes, in the format of ``bench``.

A measurement counts for the card, driver, clocks and versions that it was taken on. A kernel that is about to run for
the first time is banned on disk, and the ban is lifted when it has run and its result is right: where it hangs, crashes
or is wrong, no process tries it again. The file of these is compacted to the bans where it exceeds ``MAX_BYTES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from cudal2gen import files, results
from cudal2gen.choice import Kernel, Row, Table, row_of
from cudal2gen.errors import Failure, reading
from cudal2gen.results import Environment, Line, Measurement
from cudal2gen.version import __version__

MAX_BYTES = 1 << 16  # most bytes of the file of first runs: some 200 kernels, read in milliseconds


class Trial(Line):
    """A kernel's first run on a card. ``outcome``: begun, right, wrong, or not run; ``reason``: of the last two."""

    kind: Literal["first run"] = "first run"
    card: str
    version: str
    digest: str
    outcome: str
    reason: str = ""

    # Unknown fields of later versions must not hide a ban.
    model_config = ConfigDict(extra="ignore")

    @property
    def banned(self) -> bool:
        """Whether the kernel began and did not end well, or ended in a way that a later version knows."""
        return self.outcome not in ("right", "not run")


_TRIALS = TypeAdapter(Trial)


class Conditions(NamedTuple):
    """What two measurements must share to be told together."""

    name: str
    driver: str
    max_sm_mhz: int
    power_limit_w: float
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, environment: Environment) -> Conditions:
        versions = tuple(sorted(environment.versions.items()))
        return cls(environment.name, environment.driver, environment.max_sm_mhz, environment.power_limit_w, versions)


class Store:
    """The store of one card. ``folder``: where its files are, by default beside the user's other results."""

    def __init__(self, environment: Environment, folder: Path | None = None) -> None:
        self.environment = environment
        self.measurements_file = results.store("autotune") if folder is None else folder / "autotune.jsonl"
        self.trials_file = self.measurements_file.with_name("autotune-first-runs.jsonl")
        self._read: tuple[int, int] = (-1, -1)
        self._measurements: list[Measurement] = []
        self._trials: dict[str, Trial] = {}
        self._state: tuple[int, ...] = ()  # state of the file of trials when it was last read

    # --- measurements ---

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores measurements with their environment; they are on disk when this returns. Raises OSError."""
        results.append([self.environment, *measurements], self.measurements_file)

    def measurements(self) -> Sequence[Measurement]:
        """Those taken under this card's conditions; the file is read again when another process has added to it."""
        try:
            status = self.measurements_file.stat()
        except OSError:
            return ()
        if self._read != (status.st_size, status.st_mtime_ns):
            stored, conditions = results.measurements(self.measurements_file), Conditions.of(self.environment)
            self._measurements = [
                row for row in stored.measurements if Conditions.of(stored.environments[row.environment]) == conditions
            ]
            self._read = status.st_size, status.st_mtime_ns
        return self._measurements

    def rows(self, table: Table) -> list[Row]:
        """Rows of a pack's table: the latest measurement of each problem whose kernel the pack has, or that the
        vendor's library won."""
        numbers: dict[tuple[str, str], int] = {}
        for place, kernel in enumerate(table.kernels):
            numbers.setdefault((kernel.digest, options_of(kernel)), place)
        latest: dict[tuple[object, ...], Row] = {}
        for measurement in self.measurements():
            number = numbers.get((measurement.digest, repr(measurement.options)))
            problem = measurement.problem
            if number is not None:
                row = row_of(problem, measurement.products, number, {measurement.l2: measurement})
                if row is not None:
                    latest[(problem.kind, row.sizes, row.products)] = row
        return list(latest.values())

    # --- first runs ---

    def begin(self, digest: str) -> None:
        """Bans a kernel until ``end``. Raises OSError: what cannot be banned must not be tried."""
        self._note(digest, "begun")

    def end(self, digest: str, wrong: str = "") -> None:
        """Lifts a ban; where the kernel was ``wrong``, says how, and it stays."""
        self._note(digest, "wrong" if wrong else "right", wrong)

    def lift(self, digest: str, reason: str = "") -> None:
        """Lifts the ban of a kernel that did not come to run, and says why."""
        self._note(digest, "not run", reason)

    def _note(self, digest: str, outcome: Literal["begun", "right", "wrong", "not run"], reason: str = "") -> None:
        row = Trial(card=self.environment.name, version=__version__, digest=digest, outcome=outcome, reason=reason)
        results.append([row], self.trials_file)
        if self.trials_file.stat().st_size > MAX_BYTES:
            with suppress(Failure):  # the next append tries again
                self._compact()

    def _compact(self) -> None:
        """Leaves the bans in the file of trials, of all cards, as they are spelled, and lines that are not understood.

        The new file takes the old one's place at once: a process that is killed meanwhile leaves either. Raises Failure
        and OSError.
        """
        path = self.trials_file
        with files.locked(path):
            for scratch in path.parent.glob(f".{path.name}.*"):  # left by killed processes: this one holds the lock
                scratch.unlink(missing_ok=True)
            rows = dict(results.read(_TRIALS, path))
            last = {(row.card, row.digest): number for number, row in rows.items()}
            stay = {number for number in last.values() if rows[number].banned}
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for number, line in enumerate(lines, 1) if number in stay or number not in rows]
            files.write(path, b"".join(kept))

    def trials(self) -> dict[str, Trial]:
        """The last entry of each kernel on this card, by digest; the file is read again where it has changed. Raises
        WrongInput."""
        with reading(self.trials_file):
            status = self.trials_file.stat() if self.trials_file.exists() else None
        state = () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        if state != self._state:
            rows = [row for _, row in results.read(_TRIALS, self.trials_file)]
            self._trials = {row.digest: row for row in rows if row.card == self.environment.name}
            self._state = state
        return self._trials

    def banned(self) -> set[str]:
        """Digests of kernels that began and did not end well, in this process or another."""
        return {digest for digest, row in self.trials().items() if row.banned}


def options_of(kernel: Kernel) -> str:
    """A kernel's launch options as measurements are compared by."""
    return repr(kernel.record.launch_options)
