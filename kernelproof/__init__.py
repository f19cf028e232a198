"""Proves any CUDA kernel without a GPU: executes it on the CPU and reports what is wrong with it.

``load`` makes the kernels of a source launchable from Python, and ``check_source`` grades a source against a reference.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelproof.ground.version import __version__ as __version__

if TYPE_CHECKING:
    from kernelproof.checking.loading import load as load
    from kernelproof.grading import check_source as check_source

_PLACES = {"check_source": "kernelproof.grading", "load": "kernelproof.checking.loading"}


def __getattr__(name: str) -> Any:
    """Imports ``load`` and ``check_source`` at their first use: they need NumPy, and most commands do not."""
    if name not in _PLACES:
        raise AttributeError(f"module 'kernelproof' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
