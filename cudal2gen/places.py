"""Finds the checkout or the installed package, the catalog, the build directory, and the caches."""

from __future__ import annotations

import os
from pathlib import Path

from kernelproof.ground import places as ground

PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """The root of the source checkout that this package runs from, or None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "templates").is_dir() else None


def shipped(name: str) -> Path:
    """``templates`` or ``configs`` as shipped: beside the package in a checkout, inside it in a wheel."""
    return (checkout() or PACKAGE) / name


def user_data() -> Path:
    """The user's folder for an edited catalog."""
    return Path(os.environ.get("XDG_DATA_HOME") or ground.home() / ".local/share") / "cudal2gen"


def user_cache() -> Path:
    """The user's folder for files that can be made again; ``CUDAL2GEN_CACHE_DIR`` moves it."""
    return ground.cache_of("cudal2gen")


def catalog() -> Path:
    """The catalog to read: ``CUDAL2GEN_CATALOG``, the checkout's, the user's edited copy, or the shipped one."""
    if configured := os.environ.get("CUDAL2GEN_CATALOG"):
        return Path(configured)
    edited = user_data() / "kernels.jsonl"
    if checkout() is None and edited.is_file():
        return edited
    return shipped("configs") / "kernels.jsonl"


def editable_catalog() -> Path:
    """The catalog to write. For an installed wheel it is the user's copy, so that the wheel's files stay unchanged."""
    if os.environ.get("CUDAL2GEN_CATALOG") or checkout() is not None:
        return catalog()
    return user_data() / "kernels.jsonl"


def sources() -> tuple[Path, ...]:
    """The folders with texts that records name: those beside the catalogs, then the user's."""
    catalogs = (catalog(), editable_catalog(), shipped("configs") / "kernels.jsonl")
    return tuple(dict.fromkeys([*(path.parent / "sources" for path in catalogs), user_data() / "sources"]))


def build_dir() -> Path:
    """``CUDAL2GEN_BUILD_DIR``, or ``build`` in a checkout, or a folder in the user's cache."""
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


# Messages that list the folders of the program name them in this order.
ground.FOLDERS.update(
    {
        "CUDAL2GEN_RESULTS": results,
        "CUDAL2GEN_CATALOG": editable_catalog,
        "CUDAL2GEN_BUILD_DIR": build_dir,
        "CUDAL2GEN_CACHE_DIR": user_cache,
    }
)
