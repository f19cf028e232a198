"""Paths: the checkout or the installed package, the catalog, the build directory, the caches."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """The root of the source checkout that this package runs from, or None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "templates").is_dir() else None


def shipped(name: str) -> Path:
    """``templates``, ``configs`` or ``docs`` as shipped: beside the package in a checkout, inside it in a wheel. Of
    ``docs`` a wheel has the pages of rules."""
    return (checkout() or PACKAGE) / name


def _home() -> Path:
    """The user's home; ``/~``, which nobody can write to, for a user without one, as in some containers."""
    return Path("/", os.path.expanduser("~"))  # noqa: PTH111 - pathlib's raises an error of its own


def user_data() -> Path:
    """The user's folder for an edited catalog."""
    return Path(os.environ.get("XDG_DATA_HOME") or _home() / ".local/share") / "cudal2gen"


def user_cache() -> Path:
    """The user's folder for files that can be made again; ``CUDAL2GEN_CACHE_DIR`` moves it."""
    if configured := os.environ.get("CUDAL2GEN_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "cudal2gen"


def catalog() -> Path:
    """The catalog to read: ``CUDAL2GEN_CATALOG``, the checkout's, the user's edited copy, or the shipped one."""
    if configured := os.environ.get("CUDAL2GEN_CATALOG"):
        return Path(configured)
    edited = user_data() / "kernels.jsonl"
    if checkout() is None and edited.is_file():
        return edited
    return shipped("configs") / "kernels.jsonl"


def editable_catalog() -> Path:
    """The catalog to write: in an installed wheel the user's copy, so that the wheel's files stay unchanged."""
    if os.environ.get("CUDAL2GEN_CATALOG") or checkout() is not None:
        return catalog()
    return user_data() / "kernels.jsonl"


def sources() -> tuple[Path, ...]:
    """Folders of texts that records name: beside the catalogs, and the user's, where new ones go first."""
    catalogs = (catalog(), editable_catalog(), shipped("configs") / "kernels.jsonl")
    return tuple(dict.fromkeys([*(path.parent / "sources" for path in catalogs), user_data() / "sources"]))


def build_dir() -> Path:
    """``CUDAL2GEN_BUILD_DIR``, ``build`` in a checkout, else the user's cache."""
    if configured := os.environ.get("CUDAL2GEN_BUILD_DIR"):
        return Path(configured)
    root = checkout()
    return root / "build" if root is not None else user_cache() / "build"


def results() -> Path:
    """The folder of the stores: ``CUDAL2GEN_RESULTS``, the checkout's ``results``, or the user's data folder."""
    if configured := os.environ.get("CUDAL2GEN_RESULTS"):
        return Path(configured)
    root = checkout()
    return (root if root is not None else user_data()) / "results"


def remedy(path: Path) -> str:
    """What moves a path that cannot be used, as the end of a sentence: the variables that name the folders around it,
    or the folders that could not be made below it. Empty for a path that the user named."""
    folders = {
        "CUDAL2GEN_RESULTS": results(),
        "CUDAL2GEN_CATALOG": editable_catalog(),
        "CUDAL2GEN_BUILD_DIR": build_dir(),
        "CUDAL2GEN_CACHE_DIR": user_cache(),
    }
    within = [name for name, folder in folders.items() if path.is_relative_to(folder)]
    names = within[:1] or [name for name, folder in folders.items() if folder.is_relative_to(path)]
    return f"; name another place by {', '.join(names)}" if names else ""
