"""Imports packages that tests need: optional on a developer's machine, required in CI."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """The package; skips the test or module without it. With CI set, a missing package raises ImportError instead."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name)
    return module
