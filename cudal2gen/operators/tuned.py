"""What calls measured by themselves: a store of the user's, shared by processes, in the form of ``bench``'s.

A measurement counts for the card, driver, clocks and versions that it was taken on. A kernel that is about to run for
the first time is banned on disk, and the ban is lifted when it has run and its result is right: where it hangs, crashes
or is wrong, no process tries it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from cudal2gen import results
from cudal2gen.choice import Kernel, Row, Table, row_of
from cudal2gen.errors import reading
from cudal2gen.results import Environment, Line, Measurement
from cudal2gen.version import __version__


class Trial(Line):
    """A kernel's first run on a card. ``outcome``: begun, right, wrong, or not run; ``reason``: why it stays banned."""

    kind: Literal["first run"] = "first run"
    card: str
    version: str
    digest: str
    outcome: str
    reason: str = ""

    # What a later version adds must not hide a ban.
    model_config = ConfigDict(extra="ignore")


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
        self._whole = results.START  # up to which the trials are read

    # --- measurements ---

    def add(self, measurement: Measurement) -> None:
        """Stores a measurement with its environment; it is on disk when this returns. Raises OSError."""
        results.append([self.environment, measurement], self.measurements_file)

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

    def lift(self, digest: str) -> None:
        """Lifts the ban of a kernel that did not come to run."""
        self._note(digest, "not run")

    def _note(self, digest: str, outcome: Literal["begun", "right", "wrong", "not run"], reason: str = "") -> None:
        row = Trial(card=self.environment.name, version=__version__, digest=digest, outcome=outcome, reason=reason)
        results.append([row], self.trials_file)

    def trials(self) -> dict[str, Trial]:
        """The last entry of each kernel on this card, by digest; what was added to the file is read. Raises
        WrongInput."""
        whole = self._whole_lines()
        for _, row in results.read(TypeAdapter(Trial), self.trials_file, self._whole):
            if row.card == self.environment.name:
                self._trials[row.digest] = row
        self._whole = whole
        return self._trials

    def _whole_lines(self) -> results.Place:
        """The end of the file's last whole line."""
        with reading(self.trials_file):
            if not self.trials_file.exists():
                return results.START
            if self.trials_file.stat().st_size < self._whole.bytes:  # another file
                self._trials, self._whole = {}, results.START
            with self.trials_file.open("rb") as file:
                file.seek(self._whole.bytes)
                added = file.read()
        return results.Place(self._whole.bytes + added.rfind(b"\n") + 1, self._whole.lines + added.count(b"\n"))

    def banned(self) -> set[str]:
        """Digests of kernels that began and did not end well, in this process or another."""
        return {digest for digest, row in self.trials().items() if row.outcome not in ("right", "not run")}


def options_of(kernel: Kernel) -> str:
    """A kernel's launch options as measurements are compared by."""
    return repr(kernel.record.launch_options)
