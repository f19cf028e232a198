"""Lets processes share a build directory: by byte locks, scratch folders, and publication by one rename.

A process that builds a kernel locks a byte of ``build/.lock``, which the kernel's digest selects. It works in a scratch
folder ``build/.tmp-<token>``, which it locks in the same way. The system releases the locks of a killed process, so the
next build sees that its scratch folder is abandoned and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def publish(built: Path, target: Path) -> None:
    """Renames a finished directory to its target, and replaces an incomplete directory there."""
    try:
        built.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(target, ignore_errors=True)
        built.rename(target)


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """A context with a scratch folder for this build. It also removes the folders that killed builds left behind."""
    with Locks(root) as locks:
        for leftover in root.glob(".tmp-*"):
            if locks.try_take(leftover.name):
                shutil.rmtree(leftover, ignore_errors=True)
        scratch = root / f".tmp-{secrets.token_hex(16)}"
        locks.try_take(scratch.name)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


class Locks:
    """Advisory locks on single bytes of one file. Each name selects a byte.

    The locks belong to the open file, so threads of one process exclude each other too. The file is closed at the end
    of a ``with`` block, or with this object.
    """

    # Linux's F_OFD_GETLK, F_OFD_SETLK and F_OFD_SETLKW. The fcntl module does not have them on every system.
    GET, SET, SET_WAIT = 36, 37, 38

    def __init__(self, root: Path, file: str = ".lock") -> None:
        self._file = (root / file).open("a+b")
        weakref.finalize(self, self._file.close)

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def try_take(self, name: str) -> bool:
        """Takes the lock of ``name`` if it is free; False if another holder has it."""
        try:
            self._call(self.SET, fcntl.F_WRLCK, name)
        except (BlockingIOError, PermissionError):
            return False
        return True

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Waits for the lock of ``name`` and holds it inside the block."""
        self._call(self.SET_WAIT, fcntl.F_WRLCK, name)
        try:
            yield
        finally:
            self._call(self.SET, fcntl.F_UNLCK, name)

    def held_elsewhere(self, name: str) -> bool:
        """Whether another holder has the lock of ``name``. The lock does not change."""
        (kind,) = struct.unpack_from("h", self._call(self.GET, fcntl.F_WRLCK, name))
        return bool(kind != fcntl.F_UNLCK)

    def release_all(self) -> None:
        """Releases every lock of this file."""
        self._lock(self.SET, fcntl.F_UNLCK, 0, 0)

    # The lock of a name is the byte at its digest's first 60 bits. Bytes beyond the end of a file can be locked, so the
    # file stays empty. Two names share a byte so rarely that waiting for the wrong one does not matter.
    def _call(self, command: int, kind: int, name: str) -> bytes:
        return self._lock(command, kind, int(hashlib.sha256(name.encode()).hexdigest()[:15], 16), 1)

    def _lock(self, command: int, kind: int, start: int, length: int) -> bytes:
        """Call fcntl for a range of bytes with a ``struct flock``, and return the struct that the system filled."""
        return fcntl.fcntl(self._file, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))


def writable(folder: Path) -> tuple[bool, str]:
    """Whether kernels can be built into a folder. The text is its path, or else the reason and the option to change."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder):
            return True, str(folder)
    except OSError as error:
        return False, f"{folder}: {error.strerror}; choose another folder with --build-dir"
