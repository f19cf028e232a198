# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""A matrix product D = A B written in Triton, as a baseline that users of Triton would write themselves.

The kernel is persistent: only as many CTAs are launched as run concurrently, and each computes several tiles. Importing
this module needs triton.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import triton
import triton.language as tl


@triton.jit
def persistent_matmul(
    a_ptr, b_ptr, d_ptr, m, n, k, lda, ldb, ldd,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, CTAS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Computes D (m,n) from A (m,k) and B (k,n), all row-major.

    Each CTA computes every ``CTAS``-th tile. Tiles are numbered in groups of ``GROUP`` rows of tiles, and within a
    group column by column, so that tiles that run at the same time share operands in the L2. ``HALF``: whether sums are
    fp16. ``lda``, ``ldb`` and ``ldd``: elements from one row to the next.
    """
    rows_of_tiles = tl.cdiv(m, BM)
    columns_of_tiles = tl.cdiv(n, BN)
    tiles_of_group = GROUP * columns_of_tiles
    accumulator_type = tl.float16 if HALF else tl.float32
    for tile in range(tl.program_id(0), rows_of_tiles * columns_of_tiles, CTAS):
        # The group's first row of tiles, and its number of rows, which is smaller in the last group.
        first = tile // tiles_of_group * GROUP
        height = min(rows_of_tiles - first, GROUP)
        rows = (first + tile % tiles_of_group % height) * BM + tl.arange(0, BM)
        columns = tile % tiles_of_group // height * BN + tl.arange(0, BN)
        along_k = tl.arange(0, BK)
        total = tl.zeros((BM, BN), dtype=accumulator_type)
        for start in range(0, k, BK):
            remaining = k - start
            a = tl.load(
                a_ptr + rows[:, None].to(tl.int64) * lda + (start + along_k)[None, :],
                mask=(rows[:, None] < m) & (along_k[None, :] < remaining), other=0.0,
            )  # fmt: skip
            b = tl.load(
                b_ptr + (start + along_k)[:, None].to(tl.int64) * ldb + columns[None, :],
                mask=(along_k[:, None] < remaining) & (columns[None, :] < n), other=0.0,
            )  # fmt: skip
            total = tl.dot(a, b, total, out_dtype=accumulator_type)
        tl.store(
            d_ptr + rows[:, None].to(tl.int64) * ldd + columns[None, :],
            total.to(d_ptr.dtype.element_ty),
            mask=(rows[:, None] < m) & (columns[None, :] < n),
        )


# The tile sizes (BM, BN, BK) that Triton's users commonly try on Ampere and Hopper.
TILES = ((128, 256, 64), (128, 128, 64), (64, 128, 64), (64, 64, 128), (32, 64, 128), (16, 64, 128))
CONFIGURATIONS: list[dict[str, Any]] = [
    {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8, "num_stages": stages, "num_warps": 8 if bm * bn > 128 * 128 else 4}
    for (bm, bn, bk), stages in product(TILES, (3, 4))
]
