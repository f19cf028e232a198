"""Records on disk the first run of each kernel on a card, so that no process tries a kernel that failed again.

A kernel fails if it hangs, crashes or computes a wrong result. Before a kernel runs, the file gets a line that the run
has begun; after the run it gets a line with the outcome. A beginning without an outcome bans the kernel, unless its
process is still running it. To show this, the process holds a byte lock for the run. The system releases the lock
however the process ends, and a later process with the same number does not hold it. A run that takes more than
``MAX_SECONDS`` hangs, and bans the kernel although its process lives. Several processes may run a kernel for the first
time simultaneously; if one of them finds it wrong, it stays banned whatever the others find. If the file exceeds
``MAX_BYTES``, only its bans are kept.
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

MAX_BYTES = 1 << 16  # most bytes of the file, enough for some 200 kernels, which are read in milliseconds
MAX_SECONDS = 60.0  # limit of a first run, which is a launch of milliseconds and the comparison of its result
LOCKS = ".autotune-first-runs.lock"

Outcome = Literal["right", "wrong", "not run"]


class RunEntry(Line):
    """A line of the file: the beginning or the end of a kernel's first run on a card.

    - ``run``: the run's random number, empty in lines of older versions; ``when``: seconds since 1970.
    - ``outcome``: begun, right, wrong, or not run; ``reason``: the reason for the last two.
    """

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
        """Whether the run may have failed: it has not ended, ended wrong, or has an outcome of a later version."""
        return self.outcome not in ("right", "not run")


_ENTRIES = TypeAdapter(RunEntry)


class RunId(NamedTuple):
    """The key of a run: the kernel's digest and a random number."""

    digest: str
    number: str


class FirstRuns:
    """The first runs of kernels on one card. Processes and cards share the ``file``."""

    def __init__(self, card: str, file: Path) -> None:
        self.card, self.file = card, file
        self._entries: dict[RunId, RunEntry] = {}
        self._state: tuple[int, ...] = ()  # state of the file when it was last read
        self._running: set[str] = set()  # numbers of this object's runs that have not ended

    @contextmanager
    def begin(self, digest: str) -> Iterator[Callable[[Outcome, str], None]]:
        """A context in which a kernel runs for the first time. It gives a function that records the outcome.

        If that function is not called, the kernel is banned. Raises OSError if the file cannot be written, because a
        kernel that cannot be banned must not be tried.
        """
        run = RunId(digest, secrets.token_hex(8))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The lock is taken before the beginning is recorded, and released after the outcome is. So if another process
        # finds it free and reads no outcome, there will be none.
        self._running.add(run.number)
        try:
            with self._locks.take(run.number):
                self._note(run, "begun")
                yield lambda outcome, reason: self._note(run, outcome, reason)
        finally:
            self._running.discard(run.number)

    def ban(self, digest: str, reason: str) -> None:
        """Bans a kernel that passed its first run."""
        self._note(RunId(digest, secrets.token_hex(8)), "wrong", reason)

    def banned(self) -> set[str]:
        """The digests of kernels whose run failed in this process or another one. Raises WrongInput and OSError."""
        suspects = {run: row for run, row in self.entries().items() if row.suspect}
        ended = {run for run, row in suspects.items() if not self._is_running(row)}
        # The file is read again, because a process may have recorded its outcome and released its lock meanwhile.
        return {run.digest for run, row in self.entries().items() if run in ended and row.suspect}

    def entries(self) -> dict[RunId, RunEntry]:
        """The last line of each run on this card. Reads the file if it has changed. Raises WrongInput."""
        with reading(self.file):
            status = self.file.stat() if self.file.exists() else None
        state = () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        if state != self._state:
            end = results.end_of(self.file) if self.file.exists() else None
            rows = [row for _, row in results.read(_ENTRIES, self.file, end=end)]
            self._entries = {RunId(row.digest, row.run): row for row in rows if row.card == self.card}
            self._state = state
        return self._entries

    def _is_running(self, row: RunEntry) -> bool:
        """Whether a run has not ended: its process lives, and the kernel does not hang."""
        if row.outcome != "begun" or not row.run or time.time() - row.when > MAX_SECONDS:
            return False
        return row.run in self._running or self._locks.held_elsewhere(row.run)

    @cached_property
    def _locks(self) -> Locks:
        """The locks beside the file."""
        return Locks(self.file.parent, LOCKS)

    def _note(self, run: RunId, outcome: Literal["begun", Outcome], reason: str = "") -> None:
        """Appends the state of a run to the file, which is rewritten shorter when it grows too large."""
        row = RunEntry(
            card=self.card, version=__version__, digest=run.digest, run=run.number, when=round(time.time(), 3),
            outcome=outcome, reason=reason,
        )  # fmt: skip
        results.append([row], self.file)
        if self.file.stat().st_size > MAX_BYTES:
            with suppress(Failure):  # the next append tries again
                self._compact()

    def _compact(self) -> None:
        """Reduces the file to bans, runs that have not ended, and lines that this version does not understand.

        A rename replaces the file, so it is always complete even if this process is killed. Raises Failure and OSError.
        """
        path = self.file
        with files.locked(path):
            # This process holds the lock, so scratch files are left over from killed processes.
            for scratch in path.parent.glob(f".{path.name}.*"):
                scratch.unlink(missing_ok=True)
            rows = dict(results.read(_ENTRIES, path))
            last = {(row.card, row.digest, row.run): number for number, row in rows.items()}
            stay = {number for number in last.values() if rows[number].suspect}
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for number, line in enumerate(lines, 1) if number in stay or number not in rows]
            files.write(path, b"".join(kept))
