# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels of the usual kinds, on which the emulator is tested and timed. Importing this module needs triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add(x_ptr, y_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    """sum = x + y, n elements."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    x = tl.load(x_ptr + index, mask=inside)
    y = tl.load(y_ptr + index, mask=inside)
    tl.store(sum_ptr + index, x + y, mask=inside)


@triton.jit
def add_unmasked(x_ptr, y_ptr, sum_ptr, BLOCK: tl.constexpr):
    """``add`` without its mask: wrong if the number of elements is no multiple of BLOCK."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sum_ptr + index, tl.load(x_ptr + index) + tl.load(y_ptr + index))


@triton.jit
def count_unordered(count_ptr):
    """Every program adds 1 to the same element, without an atomic operation: a race."""
    tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def softmax(x_ptr, y_ptr, rows, columns, x_stride, y_stride, BLOCK: tl.constexpr):
    """y = softmax of each row of x; a program takes every num_programs-th row. BLOCK >= columns."""
    column = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def layer_norm(x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    """y = (x - mean) * rstd * weight + bias, a row of ``columns`` for each program; mean and rstd are kept in fp32."""
    row = tl.program_id(0)
    x_row = x_ptr + row * columns
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        sums += tl.load(x_row + column, mask=column < columns, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / columns
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < columns, other=0.0).to(tl.float32)
        centred = tl.where(column < columns, x - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, lock_ptr, filled_ptr, columns,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of a row. The row's part of dweight and dbias is added in fp32 to one of GROUPS rows, which a lock guards.
    ``lock`` and ``filled`` start as zeros. BLOCK >= columns."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    normal = tl.where(inside, (x - mean) * rstd, 0.0)
    scaled = tl.where(inside, weight * dy, 0.0)
    along = tl.sum(normal * scaled, axis=0) / columns
    level = tl.sum(scaled, axis=0) / columns
    dx = (scaled - (normal * along + level)) * rstd
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    group = row % GROUPS
    share = group * columns + column
    dweight = dy * normal
    dbias = dy
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    filled = tl.load(filled_ptr + group)
    tl.debug_barrier()  # all warps read before one of them writes
    if filled == 0:
        tl.store(filled_ptr + group, 1)
    else:
        dweight += tl.load(dweight_ptr + share, mask=inside, other=0.0)
        dbias += tl.load(dbias_ptr + share, mask=inside, other=0.0)
    tl.store(dweight_ptr + share, dweight, mask=inside)
    tl.store(dbias_ptr + share, dbias, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


@triton.jit
def tile_of(number, m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(row, column) of the number-th tile, in groups of GROUP rows of tiles."""
    across = tl.cdiv(n, BN)
    first = number // (GROUP * across) * GROUP
    height = min(tl.cdiv(m, BM) - first, GROUP)
    return first + number % (GROUP * across) % height, number % (GROUP * across) // height


@triton.jit
def matmul(
    a_ptr, b_ptr, d_ptr, m, n, k, a_stride, b_stride, d_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """D = A B, row-major, a tile for each program; strides are of rows, in elements."""
    tile_row, tile_column = tile_of(tl.program_id(0), m, n, BM, BN, GROUP)
    row = tile_row * BM + tl.arange(0, BM)
    column = tile_column * BN + tl.arange(0, BN)
    along = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        inner = start + along
        a = tl.load(a_ptr + row[:, None] * a_stride + inner, mask=(row[:, None] < m) & (inner < k), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_stride + column, mask=(inner[:, None] < k) & (column < n), other=0.0)
        total = tl.dot(a, b, total)
    inside = (row[:, None] < m) & (column < n)
    tl.store(d_ptr + row[:, None] * d_stride + column, total.to(d_ptr.dtype.element_ty), mask=inside)


@triton.jit
def matmul_split_k(
    a_ptr, b_ptr, d_ptr, m, n, k, a_stride, b_stride, d_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """D += A B, row-major; along the grid's second axis SPLITS programs share a tile, and each adds its part of k."""
    tile_row, tile_column = tile_of(tl.program_id(0), m, n, BM, BN, GROUP)
    row = tile_row * BM + tl.arange(0, BM)
    column = tile_column * BN + tl.arange(0, BN)
    along = tl.program_id(1) * BK + tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK * SPLITS):
        inner = start + along
        a = tl.load(a_ptr + row[:, None] * a_stride + inner, mask=(row[:, None] < m) & (inner < k), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_stride + column, mask=(inner[:, None] < k) & (column < n), other=0.0)
        total = tl.dot(a, b, total)
    inside = (row[:, None] < m) & (column < n)
    tl.atomic_add(d_ptr + row[:, None] * d_stride + column, total.to(d_ptr.dtype.element_ty), mask=inside)


@triton.jit
def matmul_persistent(
    a_ptr, b_ptr, d_ptr, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """D = A B, contiguous and row-major. A program computes every num_programs-th tile, by descriptors that it
    makes."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [m, k], [k, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, [k, n], [n, 1], [BK, BN])
    d_desc = tl.make_tensor_descriptor(d_ptr, [m, n], [n, 1], [BM, BN])
    for number in range(tl.program_id(0), tl.cdiv(m, BM) * tl.cdiv(n, BN), tl.num_programs(0)):
        tile_row, tile_column = tile_of(number, m, n, BM, BN, GROUP)
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, k, BK):
            a = a_desc.load([tile_row * BM, start])
            b = b_desc.load([start, tile_column * BN])
            total = tl.dot(a, b, total)
        d_desc.store([tile_row * BM, tile_column * BN], total.to(d_ptr.dtype.element_ty))


@triton.jit
def matmul_tma(a_desc, b_desc, d_desc, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """D = A B by descriptors that the host makes, a tile for each program of a two-dimensional grid."""
    row = tl.program_id(0) * BM
    column = tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        total = tl.dot(a_desc.load([row, start]), b_desc.load([start, column]), total)
    d_desc.store([row, column], total.to(d_desc.dtype))


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr, length, scale,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q k^T) v for heads of (length, HEAD). The grid's first axis counts blocks of BM queries, its
    second one heads. ``length`` is a multiple of BM and BN."""
    head = tl.program_id(1) * length * HEAD
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    lane = tl.arange(0, HEAD)
    q = tl.load(q_ptr + head + query[:, None] * HEAD + lane)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    weights = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, HEAD), tl.float32)
    last = (tl.program_id(0) + 1) * BM if CAUSAL else length
    # ``weights`` sums exp2(score - largest) over the keys so far, and ``total`` the same times v. When a larger score
    # comes, ``shrink`` adapts both to it.
    for start in range(0, last, BN):
        key = start + tl.arange(0, BN)
        k = tl.load(k_ptr + head + key[None, :] * HEAD + lane[:, None])
        scores = tl.dot(q, k) * (scale * 1.4426950408889634)  # log2(e), since exp2 replaces exp
        if CAUSAL:
            scores = tl.where(query[:, None] >= key, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        share = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        weights = weights * shrink + tl.sum(share, axis=1)
        v = tl.load(v_ptr + head + key[:, None] * HEAD + lane)
        total = tl.dot(share.to(v.dtype), v, total * shrink[:, None])
        largest = larger
    out = (total / weights[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head + query[:, None] * HEAD + lane, out)


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((128, 1), (256, 2), (512, 4))],
    key=["n"],
)
@triton.heuristics({"WHOLE": lambda values: values["n"] % values["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """y = factor x, n elements; without a mask if BLOCK divides n."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        tl.store(y_ptr + index, factor * tl.load(x_ptr + index))
    else:
        tl.store(y_ptr + index, factor * tl.load(x_ptr + index, mask=index < n), mask=index < n)


@triton.jit
def shift_both(pair, n, BLOCK: tl.constexpr):
    """Copies the first tensor of a pair, shifted by one element, to the second."""
    source, target = pair
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index + 1, mask=index < n - 1, other=0), mask=index < n)


@triton.jit
def increment_dependent(x_ptr, y_ptr, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    """y = x + 1, in a launch that may begin before the previous launch has ended; wrong without WAIT."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WAIT:
        gdc_wait()
    x = tl.load(x_ptr + index)
    gdc_launch_dependents()
    tl.store(y_ptr + index, x + 1)


@triton.jit
def sort_and_sum(x_ptr, sorted_ptr, sums_ptr, BLOCK: tl.constexpr):
    """Sorts BLOCK elements, and stores the running sums of x; prints the first element and asserts that it is
    positive."""
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index)
    tl.store(sorted_ptr + index, tl.sort(x))
    tl.store(sums_ptr + index, tl.cumsum(x, 0))
    first = tl.load(x_ptr)
    tl.device_print("first", first)
    tl.device_assert(first > 0, "not positive")


@triton.jit
def double_in_place(x_ptr, size, BLOCK: tl.constexpr):
    """x = 2 x. If there are more threads than elements, several hold a copy of one, and one of them stores it."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    tl.store(x_ptr + index, 2 * tl.load(x_ptr + index, mask=mask), mask=mask)


@triton.jit
def take_numbers(count_ptr, out_ptr, BLOCK: tl.constexpr):
    """Wrong: without a barrier some threads read the count after another thread has stored the new one."""
    count = tl.load(count_ptr)
    tl.store(count_ptr, count + BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), count + tl.arange(0, BLOCK))
