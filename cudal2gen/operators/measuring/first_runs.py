"""First runs of kernels on a card, noted on disk: one that hangs, crashes or is wrong is tried by no process again.

A kernel that is about to run is noted as begun, and what came of it after that. Such a note without an outcome bans the
kernel unless its process still runs it: the process holds a byte lock of the run, which the system drops with the
process however it ends, and keeps from a process of the same number. A run of more than ``MAX_SECONDS`` hangs, and
bans although its process lives. Processes run a kernel for the first time side by side; what one finds wrong stays
banned whatever others find. The file is compacted to the bans where it exceeds ``MAX_BYTES``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from cudal2gen import results
from cudal2gen.results import Line
from kernelproof.ground import files
from kernelproof.ground.build_folder import Locks
from kernelproof.ground.errors import Failure, reading
from kernelproof.ground.version import __version__

MAX_BYTES = 1 << 16  # most bytes of the file: some 200 kernels, read in milliseconds
MAX_SECONDS = 60.0  # of a first run, which is a launch of milliseconds and the comparison of its result
LOCKS = ".autotune-first-runs.lock"

Outcome = Literal["right", "wrong", "not run"]


class Trial(Line):
    """A kernel's first run on a card. ``run``: which one, by chance; empty in rows of older versions. ``when``: in
    seconds since 1970. ``outcome``: begun, right, wrong, or not run; ``reason``: of the last two."""

    kind: Literal["first run"] = "first run"
    card: str
    version: str
    digest: str
    run: str = ""
    when: float = 0.0
    outcome: str
    reason: str = ""

    # Unknown fields of later versions must not hide a ban.
    model_config = ConfigDict(extra="ignore")

    @property
    def suspect(self) -> bool:
        """Whether it did not end well, or not yet, or in a way that a later version knows."""
        return self.outcome not in ("right", "not run")


_TRIALS = TypeAdapter(Trial)


class Run(NamedTuple):
    """A run of a kernel, as the file names it."""

    digest: str
    number: str


class FirstRuns:
    """The first runs of a card's kernels; ``file``: shared by processes and cards."""

    def __init__(self, card: str, file: Path) -> None:
        self.card, self.file = card, file
        self._trials: dict[Run, Trial] = {}
        self._state: tuple[int, ...] = ()  # state of the file when it was last read
        self._running: set[str] = set()  # numbers of this object's own runs

    @contextmanager
    def begun(self, digest: str) -> Iterator[Callable[[Outcome, str], None]]:
        """A block in which a kernel runs for the first time; it is given a function that notes the outcome. A block
        without an outcome leaves a ban. Raises OSError: what cannot be banned must not be tried."""
        run = Run(digest, secrets.token_hex(8))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The lock is held before the note is there and until the outcome is: who finds it free finds the outcome, or
        # there is none.
        self._running.add(run.number)
        try:
            with self._locks.take(run.number):
                self._note(run, "begun")
                yield lambda outcome, reason: self._note(run, outcome, reason)
        finally:
            self._running.discard(run.number)

    def ban(self, digest: str, reason: str) -> None:
        """Bans a kernel that passed its first run."""
        self._note(Run(digest, secrets.token_hex(8)), "wrong", reason)

    def banned(self) -> set[str]:
        """Digests of kernels that began and did not end well, in this process or another. Raises WrongInput and
        OSError."""
        suspects = {run: row for run, row in self.trials().items() if row.suspect}
        ended = {run for run, row in suspects.items() if not self._goes_on(row)}
        # A process may have noted the outcome since the file was read, and dropped its lock.
        return {run.digest for run, row in self.trials().items() if run in ended and row.suspect}

    def trials(self) -> dict[Run, Trial]:
        """The last entry of each run on this card; the file is read again where it has changed. Raises WrongInput."""
        with reading(self.file):
            status = self.file.stat() if self.file.exists() else None
        state = () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        if state != self._state:
            rows = [row for _, row in self._rows()]
            self._trials = {Run(row.digest, row.run): row for row in rows if row.card == self.card}
            self._state = state
        return self._trials

    def _rows(self) -> Iterator[tuple[int, Trial]]:
        end = results.end_of(self.file) if self.file.exists() else None
        return results.read(_TRIALS, self.file, end=end)

    def _goes_on(self, row: Trial) -> bool:
        """Whether a run is under way: its process lives, and it does not hang."""
        if row.outcome != "begun" or not row.run or time.time() - row.when > MAX_SECONDS:
            return False
        return row.run in self._running or self._locks.held_elsewhere(row.run)

    @cached_property
    def _locks(self) -> Locks:
        return Locks(self.file.parent, LOCKS)

    def _note(self, run: Run, outcome: Literal["begun", Outcome], reason: str = "") -> None:
        row = Trial(
            card=self.card, version=__version__, digest=run.digest, run=run.number, when=round(time.time(), 3),
            outcome=outcome, reason=reason,
        )  # fmt: skip
        results.append([row], self.file)
        if self.file.stat().st_size > MAX_BYTES:
            with suppress(Failure):  # the next append tries again
                self._compact()

    def _compact(self) -> None:
        """Leaves the bans and the runs under way in the file, of all cards, as they are spelled, and lines that are not
        understood.

        The new file takes the old one's place at once: a process that is killed meanwhile leaves either. Raises Failure
        and OSError.
        """
        path = self.file
        with files.locked(path):
            for scratch in path.parent.glob(f".{path.name}.*"):  # left by killed processes: this one holds the lock
                scratch.unlink(missing_ok=True)
            rows = dict(results.read(_TRIALS, path))
            last = {(row.card, row.digest, row.run): number for number, row in rows.items()}
            stay = {number for number in last.values() if rows[number].suspect}
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for number, line in enumerate(lines, 1) if number in stay or number not in rows]
            files.write(path, b"".join(kept))
