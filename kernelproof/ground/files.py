"""Writes files and folders by one rename, so that readers see either the old or the new content.

A write that fails or is interrupted leaves the old content unchanged, and no temporary files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kernelproof.ground.errors import Failure


def write(path: Path, content: str | bytes) -> None:
    """Writes a file and creates the folders above it. A link's target is replaced, not the link. A device or a pipe is
    written directly.

    Raises Failure.
    """
    path = path.resolve()
    data = content.encode() if isinstance(content, str) else content
    with _failures(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch_path(path)
        try:
            with scratch.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                scratch.chmod(path.stat().st_mode)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A context with a scratch folder, which becomes ``path`` at the end of the block.

    ``path`` must be absent or an empty folder. Raises Failure, also for an OSError in the block.
    """
    path = path.resolve()
    with _failures(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch_path(path)
        scratch.mkdir()
        try:
            yield scratch
            scratch.replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[FileIO]:
    """A context with an exclusively locked file, created if absent, unbuffered and positioned at its end.

    If another process replaces the file while this one waits for the lock, the new file is locked instead. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # While this process waited, another may have replaced the file by a rename; then the lock is on a file that
            # no path names any more.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return


def append(file: FileIO, data: bytes) -> None:
    """Appends data to an unbuffered file and syncs it to disk. If that fails, the file's old content is restored and
    OSError is raised."""
    before = os.fstat(file.fileno()).st_size
    unwritten = data
    try:
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
        os.fsync(file.fileno())
    except OSError as error:
        file.truncate(before)
        raise OSError(error.errno, error.strerror, file.name) from None


def _scratch_path(path: Path) -> Path:
    """A new path in the folder of ``path``, from which a rename to ``path`` is atomic."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """A context that turns an OSError into a Failure about ``path``."""
    try:
        yield
    except OSError as error:
        unchanged = "; it is as it was" if path.exists() else ""
        raise Failure(f"cannot write {path}: {error.strerror or error}{unchanged}") from None
