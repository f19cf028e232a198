"""States the releases of torch, CUDA and the driver that the operators support.

The extras of pyproject.toml and docs/packs.md state the same releases; ``tests/cudal2gen/test_torch_range.py`` checks
that.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class CudaRelease(NamedTuple):
    """What machine code of a major version of CUDA needs. ``runtime``: the file of the runtime library, unless the user
    names another. ``driver``: the first driver that loads the code."""

    runtime: str
    driver: int


OLDEST = "2.10.0"  # the oldest with which all tests pass; the launcher in C++ needs its stable ABI
NEWEST = "2.15.0"  # the newest that was tested; newer ones are used all the same, and `doctor` says so
ALSO_TESTED = ("2.11.0",)  # tested as well, because many servers have it
# By the major version of the ptxas that wrote the machine code. Minor versions are compatible, and a later runtime
# serves too.
CUDAS = {number: CudaRelease(f"libcudart.so.{number}", driver) for number, driver in ((12, 525), (13, 580))}
CUDA = max(CUDAS)  # the CUDA of kernels, unless KERNELPROOF_PTXAS names another ptxas than nvcc's own
RUNTIME, DRIVER = CUDAS[CUDA]
PTXAS = "12.9.86"  # the last release of CUDA 12's ptxas on PyPI, which knows every architecture of the catalog


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a release, without the suffix of a build: (2, 11, 0) for "2.11.0+cu130"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def remark_on_torch(version: str) -> str:
    """A remark on a release of torch outside of the tested range; "" for one within it."""
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
    """A version of CUDA as text, from the number that a driver or a runtime states: "12.8" for 12080."""
    return f"{version // 1000}.{version % 1000 // 10}"


def runtimes(cuda: int) -> list[str]:
    """Files of the runtimes that serve kernels of this CUDA, in the order in which they are looked for."""
    return [CUDAS[number].runtime for number in sorted(CUDAS) if number >= cuda] or [f"libcudart.so.{cuda}"]


def remark_on_cuda(cuda: str) -> str:
    """A sentence on which packs work with a torch that is built for a CUDA older than ``CUDA``, the default of packs.
    It is "" for another torch.

    ``cuda``: a version such as 12.8, or "" for a build without CUDA.
    """
    number = major(cuda)
    if not number or number >= CUDA:
        return ""
    if number in CUDAS:
        return (
            f"its runtime serves packs of CUDA {number} (KERNELPROOF_PTXAS=FILE cudal2gen pack); those of CUDA {CUDA} "
            f"need driver {DRIVER} and pip install 'nvidia-cuda-runtime=={CUDA}.0.*'"
        )
    return f"no kernels are made for CUDA {number}: torch computes"


def remark_on_driver(version: int, cuda: int = CUDA) -> str:
    """A sentence on a driver that is too old for kernels of ``cuda``; "" if it is not, or if its version is unknown.

    ``version``: the newest CUDA that the driver supports, 12080 for 12.8, or 0 if that is unknown.
    """
    if not version or version >= 1000 * cuda:
        return ""
    number = version // 1000
    remedy = f", until the pack is made by a KERNELPROOF_PTXAS of CUDA {number}" if number in CUDAS else ""
    return (
        f"the driver supports CUDA up to {spelled(version)}, and kernels of CUDA {cuda} need driver "
        f"{CUDAS[cuda].driver} or newer: torch computes{remedy}"
    )
