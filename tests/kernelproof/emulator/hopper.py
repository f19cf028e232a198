"""Runs the matrix products by TMA and wgmma of these tests, each through the launcher in its own source."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from kernelproof import emulator
from kernelproof.emulator import Memory, Options, Program
from tests.kernelproof.emulator.build import compile_file

FLAGS = ("-DPDL",)  # the kernels are launched with programmatic dependent launches


class Run(NamedTuple):
    """A launch's code, whether D is exact, and the session with its findings."""

    code: int
    exact: bool
    session: emulator.Session


@cache
def text(name: str = "tma_gemm") -> str:
    """The PTX of ``kernels/NAME.cu``."""
    return compile_file(name, ".ptx", *FLAGS, arch="sm_90a").read_text()


def load(source: str, name: str = "tma_gemm") -> Program:
    """A program of this PTX and the compiled launchers of ``kernels/NAME.cu``."""
    return emulator.load(source, compile_file(name, ".so", *FLAGS, arch="sm_90a"))


@cache
def program(name: str = "tma_gemm") -> Program:
    """The compiled program of ``kernels/NAME.cu``."""
    return load(text(name), name)


def gemm(
    entry: str,
    mnk: tuple[int, int, int],
    clusters: int = 0,
    pdl: bool = False,
    options: Options | None = None,
    source: Program | None = None,
) -> Run:
    """Launches a product of matrices of drawn 0 and 1.

    ``entry``: the launcher, whose name begins with the layout. ``clusters``: the clusters of the grid, 0 for one for
    each tile. ``pdl``: whether to launch as a dependent. ``source``: another program than that of ``tma_gemm``.
    """
    m, n, k = mnk
    rng = np.random.default_rng(m + n + k)
    nn = entry.startswith("nn")
    a = rng.integers(0, 2, (m, k)).astype(np.float16)
    b = rng.integers(0, 2, (k, n) if nn else (n, k)).astype(np.float16)
    memory = Memory()
    d = memory.upload(np.empty((m, n), np.float16), "output")
    arguments = [memory.upload(a), memory.upload(b), d, m, n, k, clusters, int(pdl)]
    with emulator.session(memory=memory, device=emulator.HOPPER, options=options or Options()) as session:
        code = (source or program()).call(entry, *arguments)
    want = (a.astype(np.float32) @ (b if nn else b.T).astype(np.float32)).astype(np.float16)
    return Run(code, np.array_equal(d.download(), want), session)
