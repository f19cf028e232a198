"""Lists honest programs to grade, none of which may break a rule; their kernels are in ``honest.cu``."""

from __future__ import annotations

import numpy as np

from kernelproof.grading import Tolerance
from tests.kernelproof.grading import programs
from tests.kernelproof.grading.programs import (
    ATTENTION,
    NORM,
    ROW_SUM,
    WHOLE_SUM,
    Form,
    Table,
    binary,
    product,
    product_tn,
    rows,
    unary,
)


def _gelu(x: np.ndarray) -> np.ndarray:
    """The GELU by its tanh formula."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _clamp(x: np.ndarray) -> np.ndarray:
    """The numbers between -1 and 1."""
    return np.clip(x, -1, 1)


def _axpy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / 2 + y."""
    return 0.5 * x + y


# Programs by the entry of their kernel.
ELEMENTS: Table = {
    "add_f32": binary("f32", np.add).program("add_f32"),
    "axpy_vector": binary("f32", _axpy).program("axpy_vector", args=["x", "y", "z", 0.5, "n"]),
    "gelu_f32": unary("f32", _gelu).program("gelu_f32"),
    "relu_half2": unary("f16", lambda x: np.maximum(x, 0)).program("relu_half2"),
    "add_bf16": binary("bf16", np.add).program("add_bf16"),
    "add_half2": binary("f16", np.add).program("add_half2"),
    "silu_mul_f16": binary("f16", lambda x, y: x / (1 + np.exp(-x)) * y).program("silu_mul_f16"),
    "sigmoid_f32": unary("f32", lambda x: 1 / (1 + np.exp(-x))).program("sigmoid_f32"),
    "clamp_in_place": Form(_clamp, [{"n": 300}], {"x": "inout:f32[n]"}, ["x", "n"], 2, 64).program("clamp_in_place"),
    "add_i32": binary("i32", lambda x, y: x + 3 * y).program("add_i32"),
    "axpy_f64": binary("f64", _axpy).program("axpy_f64", args=["x", "y", "z", 0.5, "n"]),
}
ROWS: Table = {
    "sum_rows": ROW_SUM.program("sum_rows"),
    "max_rows": rows("f32", lambda x: x.max(1), "out:f32[m]", 128).program("max_rows"),
    "argmax_rows": rows("f32", lambda x: x.argmax(1), "out:i32[m]", 32).program("argmax_rows"),
    "sum_atomic": WHOLE_SUM.program(
        "", buffers={"x": "in:f32[n]", "y": "out:f32[1]"},
        launches=[
            {"entry": "fill_zero", "block": 32, "args": ["y", 1]},
            {"entry": "sum_atomic", "grid": 3, "block": 64, "args": ["x", "y", "n"]},
        ],
    ),
    "sum_last_block": WHOLE_SUM.program(
        "sum_last_block", args=["x", "y", "partial", "ticket", "n"],
        buffers={"x": "in:f32[n]", "y": "out:f32[1]", "partial": "scratch:f32[3]", "ticket": "scratch:u32[1]=zeros"},
    ),
    "sum_resetting": WHOLE_SUM.program(
        "sum_resetting", args=["x", "y", "partial", "n"],
        buffers={"x": "in:f32[n]", "y": "out:f32[1]", "partial": "scratch:f32[3]"},
    ),
    "mean_columns": rows("f32", lambda x: x.mean(0), "out:f32[n]").program(
        "mean_columns", grid=2, args=["x", "y", "m", "n"]
    ),
    "softmax_f32": rows("f32", programs.softmax).program("softmax_f32"),
    "softmax_bf16": rows("bf16", programs.softmax).program("softmax_bf16"),
    "softmax_online": rows("f32", programs.softmax).program(
        "softmax_online", grid="m // 2", block=(32, 2), shapes=[{"m": 6, "n": 100}, {"m": 2, "n": 77}]
    ),
    "layer_norm": NORM.program("layer_norm"),
    "layer_norm_welford": NORM.program("layer_norm_welford"),
    "rms_norm_f16": NORM.program(
        "rms_norm_f16", args=["x", "weight", "y", "n"],
        reference=lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight,
        buffers={"x": "in:f16[m, n]", "weight": "in:f16[n]", "y": "out:f16[m, n]"},
    ),
}  # fmt: skip
# The first launch of a product whose k is split into three parts.
SPLIT = {"entry": "split_k_partial", "grid": "ceil_div(n, 16), ceil_div(m, 16), 3", "block": (16, 16)}
PRODUCTS: Table = {
    "matmul_naive": product("f32").program("matmul_naive", draws={"m": (1, 40), "n": (1, 40), "k": (1, 60)}),
    "matmul_tiled_f32": product("f32", bias=True).program("matmul_tiled_f32"),
    "matmul_tiled_f16": product("f16", bias=True).program("matmul_tiled_f16"),
    "matmul_bias_relu_bf16": product("bf16", bias=True).program(
        "matmul_bias_relu_bf16", reference=lambda a, b, c: np.maximum(a @ b + c, 0)
    ),
    "matmul_registers": product("f32").program("matmul_registers", grid="ceil_div(n, 32), ceil_div(m, 32)", block=64),
    "wmma_f16_tn": product_tn("f16", "f32").program("wmma_f16_tn"),
    "wmma_bf16_tn": product_tn("bf16", "f32").program("wmma_bf16_tn"),
    "wmma_f16_sums_tn": product_tn("f16", "f16", accumulator="f16").program("wmma_f16_sums_tn"),
    "wmma_tf32_tn": product_tn("f32", "f32", operands="tf32").program("wmma_tf32_tn"),
    "mma_f16_tn": product_tn("f16", "f16").program("mma_f16_tn", grid="n // 8, m // 16"),
    "cp_async_tn": product_tn("f16", "f32").program("cp_async_tn"),
    "split_k_atomic": product("f32").program(
        "", launches=[
            {"entry": "fill_zero", "grid": 4, "block": 64, "args": ["d", "m * n"]},
            {**SPLIT, "entry": "split_k_atomic", "args": ["a", "b", "d", "m", "n", "k"]},
        ],
    ),
    "split_k_partial": product("f32").program(
        "", buffers={**product("f32").buffers, "w": "scratch:f32[3, m, n]"},
        launches=[
            {**SPLIT, "args": ["a", "b", "w", "m", "n", "k"]},
            {"entry": "split_k_sum", "grid": 4, "block": 64, "args": ["w", "d", "m * n", 3]},
        ],
    ),
    "matmul_persistent": product("f32").program(
        "matmul_persistent", grid=4, args=["a", "b", "d", "next", "m", "n", "k"],
        buffers={**product("f32").buffers, "next": "scratch:u32[1]=zeros"},
    ),
    "matmul_batched": product("f16").program(
        "matmul_batched", grid="ceil_div(n, 16), ceil_div(m, 16), z", shapes=[{"z": 3, "m": 17, "n": 20, "k": 24}],
        buffers={"a": "in:f16[z, m, k]", "b": "in:f16[z, k, n]", "d": "out:f16[z, m, n]"}, flops="2 * z * m * n * k",
    ),
    "matvec_bf16": product("bf16").program(
        "matvec_bf16", reference=np.matmul, grid="ceil_div(m, 4)", block=(32, 4), args=["a", "x", "y", "m", "k"],
        buffers={"a": "in:bf16[m, k]", "x": "in:bf16[k]", "y": "out:bf16[m]"}, flops="2 * m * k",
    ),
    "matmul_i8_tn": product("i8").program(
        "matmul_i8_tn", reference=lambda a, b: a @ b.T, shapes=[{"m": 17, "n": 20, "k": 32}],
        buffers={"a": "in:i8[m, k]=-100..100", "b": "in:i8[n, k]=-100..100", "d": "out:i32[m, n]"},
    ),
    "matmul_i8_scaled": product("i8").program(
        "matmul_i8_scaled", reference=lambda a, b, u, v: (a @ b.T) * u[:, None] * v,
        shapes=[{"m": 17, "n": 20, "k": 32}], args=["a", "b", "u", "v", "d", "m", "n", "k"], tolerance=Tolerance(),
        buffers={
            "a": "in:i8[m, k]=-128..128", "b": "in:i8[n, k]=-128..128", "u": "in:f32[m]=0.001..0.002",
            "v": "in:f32[n]=0.001..0.002", "d": "out:f16[m, n]",
        },
    ),
    "wmma_bias_relu_tn": product_tn("f16", "f16", tolerance=Tolerance(terms="k + 1")).program(
        "wmma_bias_relu_tn", reference=lambda a, b, c: np.maximum(a @ b.T + c, 0), args=["a", "b", "c", "d", "n", "k"],
        shapes=[{"m": 32, "n": 16, "k": 16}],
        buffers={"a": "in:f16[m, k]", "b": "in:f16[n, k]", "c": "in:f32[n]", "d": "out:f16[m, n]"},
    ),
    "outer_product": product("f32").program(
        "outer_product", reference=np.outer, grid=4, block=64, args=["x", "y", "d", "m", "n"],
        buffers={"x": "in:f32[m]", "y": "in:f32[n]", "d": "out:f32[m, n]"},
        tolerance=Tolerance(terms=1), flops="m * n",
    ),
}  # fmt: skip


def _conv_2d(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The correlation of channels x (c, h, w) with filters (f, c, 3, 3), without padding."""
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))
    return np.einsum("chwuv,fcuv->fhw", windows, weights)


def _conv_1d(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The causal convolution of each row of x (c, n) with its 4 weights (c, 4)."""
    padded = np.pad(x, ((0, 0), (3, 0)))
    return sum(padded[:, 3 - u : 3 - u + x.shape[1]] * w[:, u, None] for u in range(4))


def _rope(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Neighbouring columns of x (m, n), rotated in pairs by angles (m, n / 2)."""
    u, v, s, c = x[:, 0::2], x[:, 1::2], np.sin(angle), np.cos(angle)
    return np.stack([u * c - v * s, u * s + v * c], -1).reshape(x.shape)


def _cross_entropy(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The loss of each row of logits x (m, n) for its label."""
    top = x.max(1)
    return np.log(np.exp(x - top[:, None]).sum(1)) + top - x[np.arange(len(x)), label]


def _scatter_add(x: np.ndarray, index: np.ndarray, r: int) -> np.ndarray:
    """The sums, for each of r rows, of the rows of x whose index is its number."""
    y = np.zeros((r, x.shape[1]))
    np.add.at(y, index, x)
    return y


TRANSPOSED = Form(
    np.transpose, [{"m": 33, "n": 21}], {"x": "in:f32[m, n]", "y": "out:f32[n, m]"}, ["x", "y", "m", "n"],
    "ceil_div(n, 16), ceil_div(m, 16)", (16, 16),
)  # fmt: skip
OTHERS: Table = {
    "transpose_shared": TRANSPOSED.program("transpose_shared"),
    "transpose_f16": TRANSPOSED.program(
        "transpose_f16", grid=3, block=64, buffers={"x": "in:f16[m, n]", "y": "out:f16[n, m]"}
    ),
    "conv_2d": Form(
        _conv_2d, [{"h": 9, "w": 12, "c": 3, "f": 4}],
        {"x": "in:f32[c, h, w]", "weights": "in:f32[f, c, 3, 3]", "y": "out:f32[f, h - 2, w - 2]"},
        ["x", "weights", "y", "h", "w", "c"], "ceil_div((h - 2) * (w - 2), 64), f", 64,
        {"tolerance": Tolerance(terms="9 * c")},
    ).program("conv_2d"),
    "conv_1d_causal": Form(
        _conv_1d, [{"m": 3, "n": 50}], {"x": "in:f16[m, n]", "w": "in:f16[m, 4]", "y": "out:f16[m, n]"},
        ["x", "w", "y", "n"], "m", 32, {"tolerance": Tolerance(terms=4), "flops": "8 * m * n - 20 * m"},
    ).program("conv_1d_causal"),
    "attention": ATTENTION.program("attention", smem="4 * n"),
    "attention_online": ATTENTION.program(
        "attention_online", reference=programs.causal, grid="ceil_div(n, 4)", block=(32, 4),
        buffers=dict.fromkeys("qkv", "in:f16[n, d]") | {"o": "out:f16[n, d]"},
        args=["q", "k", "v", "o", "n", "d", "1 / sqrt(d)"], flops="2 * n * n * d",
    ),
    "gather_rows": Form(
        lambda index, table: table[index], [{"m": 9, "v": 30, "d": 40}],
        {"index": "in:i32[m]=0..v", "table": "in:f32[v, d]", "y": "out:f32[m, d]"},
        ["index", "table", "y", "d"], "m", 32,
    ).program("gather_rows"),
    "scale_by_norm": unary("f32", lambda x: x / np.sqrt((x**2).sum())).program(
        "", buffers={"x": "in:f32[n]", "y": "out:f32[n]", "partial": "scratch:f32[4]"},
        launches=[
            {
                "entry": "scale_by_norm", "grid": 4, "block": 96, "cooperative": True,
                "args": ["x", "y", "partial", "n"],
            }
        ],
    ),
    "scatter_add": Form(
        _scatter_add, [{"n": 40, "r": 7, "d": 10}],
        {"x": "in:f32[n, d]", "index": "in:i32[n]=0..r", "y": "out:f32[r, d]"}, [], 1, 1,
        {"tolerance": Tolerance(terms="n"), "flops": "n * d"},
    ).program("", launches=[
        {"entry": "fill_zero", "grid": 2, "block": 64, "args": ["y", "r * d"]},
        {"entry": "scatter_add", "grid": 3, "block": 64, "args": ["x", "index", "y", "n", "d"]},
    ]),
    "scan_rows": rows("f32", lambda x: x.cumsum(1), block=32, tolerance=Tolerance(terms="n")).program("scan_rows"),
    "histogram": Form(
        lambda x: np.bincount(x, minlength=16), [{"n": 300}], {"x": "in:i32[n]=0..16", "y": "out:i32[16]"},
        ["x", "y", "n"], 1, 64,
    ).program("histogram"),
    "max_pool": Form(
        lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).max((1, 3)), [{"h": 8, "w": 14}],
        {"x": "in:f32[h, w]", "y": "out:f32[h // 2, w // 2]"}, ["x", "y", "h", "w"], 1, 32,
    ).program("max_pool"),
    "cross_entropy": Form(
        _cross_entropy, [{"m": 5, "n": 70}],
        {"x": "in:f32[m, n]", "label": "in:i32[m]=0..n", "y": "out:f32[m]"}, ["x", "label", "y", "n"], "m", 32,
    ).program("cross_entropy"),
    "rope_f32": Form(
        _rope, [{"n": 7, "d": 24}], {"x": "in:f32[n, d]", "angle": "in:f32[n, d // 2]", "y": "out:f32[n, d]"},
        ["x", "angle", "y", "n", "d"], 2, 64,
    ).program("rope_f32"),
}  # fmt: skip

PROGRAMS: Table = {**ELEMENTS, **ROWS, **PRODUCTS, **OTHERS}
