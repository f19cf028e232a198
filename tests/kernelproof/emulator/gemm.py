"""Launches the matrix product of ``kernels/multistage.cu`` on drawn matrices, and compares it with NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelproof.emulator import LaunchResult, Memory, Options, Program

# Bytes of four stages, each with A and B of 128 x 32 halves.
SHARED_BYTES = 4 * 2 * 128 * 32 * 2


def gemm(
    program: Program, kernel: str, m: int, n: int, k: int, options: Options | None = None, low: int = 0, high: int = 2
) -> tuple[LaunchResult, bool]:
    """Runs a product of integers drawn from [low, high), small enough that it is exact. ``kernel``: gemm_f32 or
    gemm_f16. Returns the launch's result, and whether D is exact."""
    rng = np.random.default_rng(m * 7 + n * 5 + k)
    a = rng.integers(low, high, (m, k)).astype(np.float16)
    b = rng.integers(low, high, (n, k)).astype(np.float16)
    memory = Memory()
    args: list[Any] = [
        memory.upload(a),
        memory.upload(b),
        memory.upload(np.empty((m, n), np.float16), "output"),
        m,
        n,
        k,
    ]
    result = program.launch(
        kernel, (n // 128, m // 128), 128, args, memory=memory, shared_bytes=SHARED_BYTES, options=options or Options()
    )
    want = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)
    return result, np.array_equal(args[2].download(), want)
