"""Finds the folders that both packages need: the checkout or the installed package, and the user's caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """The root of the source checkout that this package runs from, or None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "docs" / PACKAGE.name).is_dir() else None


def pages() -> Path:
    """The folder of this package's documentation: below ``docs`` in a checkout, inside the package in a wheel."""
    root = checkout()
    return root / "docs" / PACKAGE.name if root is not None else PACKAGE / "docs"


def home() -> Path:
    """The user's home folder; for a user without one, as in some containers, ``/~``, to which nobody can write."""
    return Path("/", os.path.expanduser("~"))  # noqa: PTH111 - pathlib's raises an error of its own


def cache_of(package: str) -> Path:
    """The cache folder of a package; a variable such as ``KERNELPROOF_CACHE_DIR`` moves it."""
    if configured := os.environ.get(f"{package.upper()}_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / package


def user_cache() -> Path:
    """The cache folder of ``kernelproof``: compiled programs, and the emulator's runtime."""
    return cache_of("kernelproof")


# Environment variables, and the folders that they name. A package that has more adds them when it is imported.
FOLDERS: dict[str, Callable[[], Path]] = {"KERNELPROOF_CACHE_DIR": user_cache}


def remedy(path: Path) -> str:
    """The end of an error message naming the variables that would move an unusable path.

    These name the folder that contains the path, or else the folders below it. The text is empty for a path that is
    related to none of these folders.
    """
    folders = {name: folder() for name, folder in FOLDERS.items()}
    within = [name for name, folder in folders.items() if path.is_relative_to(folder)]
    names = within[:1] or [name for name, folder in folders.items() if folder.is_relative_to(path)]
    return f"; name another place by {', '.join(names)}" if names else ""
