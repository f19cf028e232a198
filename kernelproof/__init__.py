"""Proves any CUDA kernel without a GPU: executes it on the CPU and reports what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelproof.ground.version import __version__ as __version__

if TYPE_CHECKING:
    from kernelproof.grading import check_source as check_source

_GRADING = ("check_source",)


def __getattr__(name: str) -> Any:
    """What grading offers, imported at its first use: it imports NumPy, and most commands do without."""
    if name not in _GRADING:
        raise AttributeError(f"module 'kernelproof' has no attribute {name!r}")
    from kernelproof import grading

    globals().update({name: getattr(grading, name) for name in _GRADING})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_GRADING})
