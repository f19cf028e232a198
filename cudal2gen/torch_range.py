"""The releases of torch, CUDA and the driver for which the operators are made.

The extras of pyproject.toml and docs/pytorch.md state the same, see ``tests/cudal2gen/test_torch_range.py``.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class CudaRelease(NamedTuple):
    """What machine code of a CUDA needs: its runtime's file, where no other is named, and the first driver that loads
    it."""

    runtime: str
    driver: int


OLDEST = "2.10.0"  # all of whose tests pass; C++ needs its stable ABI
NEWEST = "2.15.0"  # the newest that was tested; later ones are tried, and `doctor` says so
BESIDE = ("2.11.0",)  # is tested beside these two: many servers have it
# By the major version of the ptxas that wrote the machine code, whose minor versions are compatible. A later runtime
# serves too.
CUDAS = {number: CudaRelease(f"libcudart.so.{number}", driver) for number, driver in ((12, 525), (13, 580))}
CUDA = max(CUDAS)  # that of kernels which nvcc's own ptxas assembles
RUNTIME, DRIVER = CUDAS[CUDA]
PTXAS = "12.9.86"  # the last release of CUDA 12's ptxas on PyPI, which knows every architecture of the catalog


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


def major(cuda: str) -> int:
    """The major version of a CUDA such as 12.8; 0 for "", a build without CUDA."""
    found = re.match(r"\d+", cuda)
    return int(found[0]) if found else 0


def spelled(version: int) -> str:
    """A version of CUDA that a driver or a runtime states, such as 12080: 12.8."""
    return f"{version // 1000}.{version % 1000 // 10}"


def runtimes(cuda: int) -> list[str]:
    """Files of the runtimes that serve kernels of this CUDA, in the order in which they are looked for."""
    return [CUDAS[number].runtime for number in sorted(CUDAS) if number >= cuda] or [f"libcudart.so.{cuda}"]


def other_cuda(cuda: str) -> str:
    """What a build of torch for a CUDA before ``CUDA`` means, in a sentence; "" for others. ``cuda``: such as 12.8, ""
    for a build without CUDA."""
    number = major(cuda)
    if not number or number >= CUDA:
        return ""
    if number in CUDAS:
        return (
            f"its runtime serves packs of CUDA {number} (KERNELPROOF_PTXAS=FILE cudal2gen pack); those of CUDA {CUDA} "
            f"need driver {DRIVER} and pip install 'nvidia-cuda-runtime=={CUDA}.0.*'"
        )
    return f"no kernels are made for CUDA {number}: torch computes"


def old_driver(version: int, cuda: int = CUDA) -> str:
    """What is wrong with a driver that supports CUDA up to ``version`` (12080 for 12.8) for kernels of ``cuda``, in a
    sentence; "" if nothing is, or if it is unknown (0)."""
    if not version or version >= 1000 * cuda:
        return ""
    number = version // 1000
    remedy = f", until the pack is made by a KERNELPROOF_PTXAS of CUDA {number}" if number in CUDAS else ""
    return (
        f"the driver supports CUDA up to {spelled(version)}, and kernels of CUDA {cuda} need driver "
        f"{CUDAS[cuda].driver} or newer: torch computes{remedy}"
    )
