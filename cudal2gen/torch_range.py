"""The releases of torch, CUDA and the driver for which the operators are made.

The extras of pyproject.toml and docs/pytorch.md state the same, see ``tests/cudal2gen/test_torch_range.py``.
"""

from __future__ import annotations

import re

OLDEST = "2.10.0"  # all of whose tests pass; C++ needs its stable ABI
NEWEST = "2.15.0"  # the newest that was tested; later ones are tried, and `doctor` says so
BESIDE = ("2.11.0",)  # is tested beside these two: many servers have it
CUDA = 13  # the major version of the runtime that kernels and launcher need
RUNTIME = f"libcudart.so.{CUDA}"  # its file, where no other is named
DRIVER = 580  # the first driver that loads such kernels


def numbers(version: str) -> tuple[int, ...]:
    """A release's first three numbers, without what a build adds to them: (2, 11, 0) of "2.11.0+cu130"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def place(version: str) -> str:
    """Where a version lies in the range, in words; "" if it was tested or lies between tested ones."""
    if numbers(version) < numbers(OLDEST):
        return f"older than {OLDEST}, the oldest that is supported: pip install --upgrade torch"
    if numbers(version) > numbers(NEWEST):
        return f"newer than {NEWEST}, the newest that was tested"
    return ""


def other_cuda(cuda: str) -> str:
    """What a build of torch for another CUDA than ``CUDA`` means, in a sentence; "" for others. ``cuda``: such as 12.8,
    "" for a build without CUDA."""
    if not cuda or int(cuda.partition(".")[0]) == CUDA:
        return ""
    return (
        f"kernels need the runtime of CUDA {CUDA}, which this torch does not bring: pip install "
        f"'nvidia-cuda-runtime=={CUDA}.0.*' with a driver of {DRIVER} or newer, else torch computes"
    )


def old_driver(version: int) -> str:
    """What is wrong with a driver that supports CUDA up to ``version`` (12080 for 12.8), in a sentence; "" if nothing
    is, or if it is unknown (0)."""
    if not version or version >= 1000 * CUDA:
        return ""
    newest = f"{version // 1000}.{version % 1000 // 10}"
    return f"the driver supports CUDA up to {newest}, and kernels need driver {DRIVER} or newer: torch computes"
