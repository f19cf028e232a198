"""Lists records that together take every path through the templates. Other tests execute them and mutate their PTX."""

from __future__ import annotations

from typing import Any

from cudal2gen.kernel import Record, Sm80Multistage, Sm90Small, Sm90Wgmma, Sm100Tcgen05, Sm120Mma
from tests.cudal2gen.strategies import (
    STAGED_8,
    STAGED_16,
    STRAIGHT,
    TO_GLOBAL,
    direct,
    multistage,
    prefetch,
    single_shot,
    tcgen05,
    warp_mma,
    wgmma,
)

# Small tiles execute fast. There are two warps, so that barriers matter.
SMALL: dict[str, Any] = {
    "bm": 32,
    "bn": 32,
    "bk": 64,
    "mma_repeat": [1, 2, 1],
    "g2s_cols": 4,
    "c_batch": 1,
    "m": 64,
    "n": 64,
    "k": 256,
}


def small(**changes: Any) -> Sm80Multistage:
    """A multistage record of little work, with changes."""
    return multistage(**(SMALL | changes))


# A kernel with one consumer warpgroup and a narrow tile. No size of its problem is a multiple of the tile's.
RING: dict[str, Any] = {
    "bm": 64,
    "bn": 32,
    "atom_n": 32,
    "consumers": 1,
    "registers": None,
    "stages": 3,
    "m": 200,
    "n": 136,
    "k": 328,
}
TENSOR: dict[str, Any] = {"bn": 32, "stages": 3, "m": 200, "n": 136, "k": 328}
WIDER_THAN_INSTRUCTION: dict[str, Any] = {"accumulators": 1, "n": 520}  # more columns than one instruction computes
PAIR: dict[str, Any] = {"pair": True, "cluster": [2, 1]}
CLAIMED: dict[str, Any] = {"scheduler": "clc"}
SWAPPED_TENSOR: dict[str, Any] = {"swap_ab": True, "bm": 32, "bn": 128}
TWO_CONSUMERS: dict[str, Any] = {"consumers": 2, "bm": 128}
PINGPONG: dict[str, Any] = {"consumers": 2, "schedule": "pingpong"}
SWAPPED: dict[str, Any] = {"swap_ab": True, "bm": 32, "bn": 64}
IN_CLUSTER: dict[str, Any] = {"reduce": "cluster", "epilogue": "direct"}
SINGLE_SHOT_SMALL: dict[str, Any] = {"bm": 32, "bn": 32, "k_chunks": 3, "m": 64, "n": 64, "k": 128}
# One tile of 192 x 192, whose fragments leave few registers, and five k-tiles.
FEW_STEPS: dict[str, Any] = {
    "bm": 192,
    "bn": 192,
    "bk": 32,
    "stages": 2,
    "mma_repeat": [2, 2, 1],
    "smem_swizzle": [2, 3, 3],
    "c_batch": 4,
    "m": 192,
    "n": 192,
    "k": 160,
}


def ring(**changes: Any) -> Sm90Wgmma:
    """A wgmma record with a short ring and a narrow tile, with changes."""
    return wgmma(**(RING | changes))


def tensor(**changes: Any) -> Sm100Tcgen05:
    """A tcgen05 record with a short ring, with changes."""
    return tcgen05(**(TENSOR | changes))


def warps(**changes: Any) -> Sm120Mma:
    """An mma.sync record with a TMA ring, with changes."""
    fields = {name: value for name, value in RING.items() if name not in ("atom_n", "cluster", "reduce")}
    return warp_mma(**(fields | changes))


def once(**changes: Any) -> Sm90Small:
    """A record that loads all of its k at once, with changes."""
    return single_shot(**(SINGLE_SHOT_SMALL | changes))


# Every width of the instruction, with alternating accumulators and layouts.
WIDTHS: dict[str, Record] = {
    f"wgmma n{n}": ring(
        acc="f16" if n // 16 % 2 or n > 208 else "f32",
        layout="nn" if n // 32 % 2 else "tn",
        bn=n,
        atom_n=n,
        n=2 * n + 8,
        epilogue="direct" if n == 112 else "tma",
    )
    for n in range(16, 257, 16)
}

BF16_IN: dict[str, Any] = {"ab": "bf16", "acc": "f32"}
F32_OUT: dict[str, Any] = {"acc": "f32", "d": "f32"}
BF16_IN_F32_OUT = BF16_IN | F32_OUT
RAGGED: dict[str, Any] = {"padding": "predicate", "m": 61, "n": 59, "k": 248}

# All types: every macro that stores, converts or multiplies, in every family.
TYPED: dict[str, Record] = {
    "multistage bf16": small(**BF16_IN),
    "multistage bf16 nn ragged": small(**BF16_IN, layout="nn", **RAGGED, **STRAIGHT),
    "multistage bf16 split": small(**BF16_IN, split_k=2),
    "multistage d": small(**BF16_IN_F32_OUT, **TO_GLOBAL),
    "multistage d of f16, ragged": small(**F32_OUT, **RAGGED, **TO_GLOBAL),
    "multistage d split persistent": small(**BF16_IN_F32_OUT, split_k=2, raster="persistent", **TO_GLOBAL),
    "direct bf16": direct(**BF16_IN),
    "direct d nn ragged": direct(**BF16_IN_F32_OUT, layout="nn", **RAGGED | {"k": 120}),
    "direct d split": direct(**BF16_IN_F32_OUT, split_k=2),
    "wgmma bf16": ring(**BF16_IN),
    "wgmma bf16 nn direct": ring(**BF16_IN, layout="nn", epilogue="direct"),
    "wgmma bf16 swapped": ring(**BF16_IN, **SWAPPED, epilogue="direct"),
    "wgmma d": ring(**BF16_IN_F32_OUT),
    "wgmma d, boxes of two widths": ring(**BF16_IN_F32_OUT, bn=48, atom_n=48),
    "wgmma d, narrow boxes": ring(**BF16_IN_F32_OUT, bn=16, atom_n=16),
    "wgmma d of f16, two consumers": ring(**F32_OUT, bn=64, atom_n=64, **TWO_CONSUMERS),
    "wgmma d swapped": ring(**BF16_IN_F32_OUT, **SWAPPED),
    "wgmma d swapped direct, any n": ring(**BF16_IN_F32_OUT, **SWAPPED, epilogue="direct", n=133),
    "wgmma d direct, any n": ring(**BF16_IN_F32_OUT, epilogue="direct", n=133),
    "wgmma d cluster": ring(**BF16_IN_F32_OUT, split_k=2, **IN_CLUSTER),
    "wgmma d workspace": ring(**BF16_IN_F32_OUT, split_k=3, reduce="workspace"),
    "wgmma d stream": ring(**BF16_IN_F32_OUT, stream_k=True),
    "once bf16": once(**BF16_IN),
    "once d split": once(**BF16_IN_F32_OUT, split_k=2),
    "once d of f16 nn, any n": once(**F32_OUT, layout="nn", n=56),
}

# Gated pairs of columns, with every way in which the templates store or sum; D is half as wide.
WIDE_TILE: dict[str, Any] = {"bn": 64}
GATED_N: dict[str, Any] = {"n": 144}  # for gates, n must be a multiple of 16; that of RING is none
GATED: dict[str, Record] = {
    "multistage gated": small(fusion="bias_n+silu+gate", **WIDE_TILE),
    "multistage gated, wide": small(fusion="bias_m+gelu+gate", acc="f32", **WIDE_TILE, **STAGED_16),
    "multistage gated, three warps": small(
        fusion="aux+silu+gate", acc="f32", bn=96, n=96, mma_repeat=[1, 3, 1], g2s_cols=8, **STAGED_8
    ),
    "multistage gated direct, ragged": small(
        fusion="alpha+bias_n+silu+gate", **BF16_IN, **WIDE_TILE, **RAGGED | {"k": 120, "n": 80}, **STRAIGHT
    ),
    "multistage gated global, d": small(fusion="bias_n+gate", **BF16_IN_F32_OUT, **TO_GLOBAL),
    "multistage gated global, ragged": small(fusion="bias_n+relu+gate", **RAGGED | {"n": 48}, **TO_GLOBAL),
    "multistage gated, padded by its caller": small(
        fusion="bias_n+silu+gate", **WIDE_TILE, padding="pad", m=61, n=48, k=250
    ),
    "multistage gated split": small(fusion="bias_n+silu+gate", **WIDE_TILE, split_k=2, acc="f32"),
    "direct gated": direct(fusion="bias_n+silu+gate", acc="f32"),
    "direct gated ragged": direct(fusion="aux+gelu_tanh+gate", **RAGGED | {"k": 120, "n": 48}),
    "wgmma gated": ring(fusion="bias_n+silu+gate", **BF16_IN, **GATED_N),
    "wgmma gated, two instructions": ring(fusion="aux+silu+gate", bm=128, bn=64, atom_n=32, acc="f16", **GATED_N),
    "wgmma gated, rests": ring(fusion="silu+gate", bn=160, atom_n=160, n=320, stages=2),
    "wgmma gated direct": ring(fusion="bias_m+silu+gate", epilogue="direct", bn=48, atom_n=48, **GATED_N),
    "wgmma gated swapped": ring(fusion="bias_n+silu+gate", **SWAPPED, epilogue="direct", **GATED_N),
    "wgmma gated swapped, d": ring(
        fusion="bias_m+aux+silu+gate", **BF16_IN_F32_OUT, **SWAPPED, epilogue="direct", **GATED_N
    ),
    "wgmma gated pingpong": ring(fusion="bias_n+silu+gate", **PINGPONG, **GATED_N),
    "wgmma gated cluster": ring(fusion="bias_n+silu+gate", split_k=2, **IN_CLUSTER, **GATED_N),
    "wgmma gated swapped cluster": ring(fusion="bias_n+silu+gate", split_k=2, **SWAPPED, **IN_CLUSTER, **GATED_N),
    "wgmma gated workspace": ring(fusion="aux+silu+gate", split_k=3, reduce="workspace", **GATED_N),
    "wgmma gated swapped workspace": ring(
        fusion="bias_n+silu+gate", split_k=3, **SWAPPED, epilogue="direct", reduce="workspace", **GATED_N
    ),
    "wgmma gated stream": ring(fusion="bias_n+silu+gate", stream_k=True, **GATED_N),
    "wgmma gated swapped stream": ring(fusion="silu+gate", stream_k=True, **SWAPPED, epilogue="direct", **GATED_N),
    "wgmma gated grouped": ring(fusion="bias_n+silu+gate", batch="grouped", **GATED_N),
    "multistage gated batched": small(fusion="bias_n+silu+gate", batch="strided", **WIDE_TILE),
    "once gated": once(fusion="bias_n+silu+gate"),
    "once gated split": once(fusion="bias_n+aux+gelu+gate", split_k=2, **BF16_IN_F32_OUT),
}
WITH_AUX: dict[str, Record] = {
    "multistage aux": small(fusion="bias_n+aux+silu"),
    "multistage aux, ragged": small(fusion="bias_n+residual+aux+gelu", **RAGGED, **TO_GLOBAL),
    "direct aux split": direct(fusion="aux+relu", split_k=2, **RAGGED | {"k": 120}),
    "wgmma aux": ring(fusion="bias_n+aux+silu"),
    "wgmma aux swapped": ring(fusion="bias_n+aux+silu", **SWAPPED),
    "wgmma aux workspace": ring(fusion="aux+silu", split_k=3, reduce="workspace", **BF16_IN_F32_OUT),
    "once aux split": once(fusion="aux+silu", n=56, split_k=2),
}

# Every activation and every bias in every family, and every way to store and to sum.
ALL_OPERANDS = "alpha+bias_n+residual"
FUSED: dict[str, Record] = {
    "multistage staged": small(fusion="bias_n+silu"),
    "multistage staged, wide": small(fusion="bias_n+residual+relu", acc="f32", **STAGED_16),
    "multistage direct, ragged": small(
        fusion=f"{ALL_OPERANDS}+gelu", **BF16_IN, layout="nn", **RAGGED | {"k": 120}, **STRAIGHT
    ),
    "multistage global, d": small(fusion="bias_m+gelu_tanh", **BF16_IN_F32_OUT, **TO_GLOBAL),
    "multistage global, ragged": small(fusion="alpha+bias_m+residual", **RAGGED | {"k": 120}, **TO_GLOBAL),
    "multistage padded by its caller": small(fusion=f"{ALL_OPERANDS}+silu", padding="pad", m=61, n=59, k=250),
    "multistage alpha": small(fusion="alpha", acc="f32"),
    "multistage split": small(fusion=f"{ALL_OPERANDS}+relu", split_k=2),
    "multistage split persistent": small(
        fusion="residual+silu", **BF16_IN_F32_OUT, split_k=3, raster="persistent", **TO_GLOBAL
    ),
    "direct": direct(fusion="bias_n+gelu", acc="f32"),
    "direct ragged": direct(fusion=f"{ALL_OPERANDS}+silu", **RAGGED | {"k": 120}),
    "direct d split": direct(fusion="bias_m+relu", **BF16_IN_F32_OUT, split_k=2),
    "direct tanh": direct(fusion="bias_n+gelu_tanh"),
    "wgmma": ring(fusion="bias_n+silu", **BF16_IN),
    "wgmma f16": ring(fusion=f"{ALL_OPERANDS}+gelu_tanh", acc="f16", bn=48, atom_n=48),
    "wgmma swapped": ring(fusion=f"{ALL_OPERANDS}+gelu", **SWAPPED),
    "wgmma swapped, any n": ring(fusion="bias_m+residual+silu", **BF16_IN_F32_OUT, **SWAPPED, epilogue="direct", n=133),
    "wgmma any n": ring(fusion="alpha+bias_m+residual+relu", epilogue="direct", n=133),
    "wgmma pingpong": ring(fusion="bias_n", **PINGPONG),
    "wgmma two consumers": ring(fusion="residual", **TWO_CONSUMERS),
    "wgmma cluster": ring(fusion=f"{ALL_OPERANDS}+silu", split_k=2, **BF16_IN_F32_OUT, **IN_CLUSTER),
    "wgmma swapped cluster": ring(fusion=f"{ALL_OPERANDS}+relu", split_k=2, **SWAPPED, **IN_CLUSTER),
    "wgmma workspace": ring(fusion=f"{ALL_OPERANDS}+silu", split_k=3, reduce="workspace"),
    "wgmma stream": ring(fusion=f"{ALL_OPERANDS}+relu", stream_k=True),
    "once": once(fusion="bias_n+gelu"),
    "once f16": once(fusion="bias_m+silu", acc="f16"),
    "once split": once(fusion=f"{ALL_OPERANDS}+gelu_tanh", split_k=2, n=56),
    "once split, no bias": once(fusion="residual+relu", split_k=2),
    "once bf16": once(fusion="bias_n+residual+relu", **BF16_IN, n=56),
    **GATED,
    **WITH_AUX,
}

# Batches and groups, in every family.
BATCHED: dict[str, Record] = {
    "batched zsplit split": small(batch="strided", raster="zsplit", swizzle_stride=32, split_k=3, acc="f32"),
    "batched wgmma": ring(batch="strided"),
    "batched wgmma nn, weights asked for ahead": ring(batch="strided", layout="nn", cluster=[2, 1], prefetch_b=True),
    "batched once": once(batch="strided"),
    "grouped": small(batch="grouped", padding="predicate"),
    "grouped persistent nn": small(batch="grouped", padding="predicate", raster="persistent", layout="nn"),
    "grouped wgmma": ring(batch="grouped"),
    "grouped wgmma, two maps of D": ring(batch="grouped", bn=96, atom_n=96, n=200, cluster=[1, 2]),
    "grouped wgmma swapped": ring(batch="grouped", **SWAPPED),
    "batched fused split": small(batch="strided", fusion=f"{ALL_OPERANDS}+relu", split_k=2),
    "batched fused wgmma workspace": ring(
        batch="strided", fusion="bias_m+residual+silu", split_k=3, reduce="workspace"
    ),
    "grouped fused": small(batch="grouped", padding="predicate", acc="f32", fusion="bias_n+residual+silu"),
    "grouped fused direct": direct(batch="grouped", padding="predicate", fusion="bias_m+relu"),
    "grouped fused wgmma": ring(batch="grouped", fusion="bias_n+residual+silu"),
    "grouped fused wgmma swapped": ring(batch="grouped", fusion="alpha+bias_n+gelu", **SWAPPED),
    "grouped gated": small(batch="grouped", padding="predicate", fusion="bias_n+silu+gate", **WIDE_TILE),
    "grouped gated direct": direct(batch="grouped", padding="predicate", fusion="alpha+bias_n+gelu+gate"),
    "batched gated direct": direct(batch="strided", fusion="silu+gate"),
    "batched gated wgmma": ring(batch="strided", fusion="bias_n+silu+gate", **GATED_N),
    "batched gated once": once(batch="strided", fusion="bias_n+silu+gate"),
}

# Roles of warps around tensor memory: every width of a load, both layouts and accumulators, single and in pairs.
TENSORS: dict[str, Record] = {
    "tensor": tensor(),
    "tensor nn": tensor(layout="nn", bn=64, raster_axis="n", hint_a="first", hint_b="last", pdl=True),
    "tensor nn, narrow boxes": tensor(layout="nn", bn=48, acc="f16", hint_a="last", hint_b="first"),
    "tensor 2x2 f16": tensor(cluster=[2, 2], bk=128, stages=2, acc="f16", bn=96),
    "tensor single accumulators": tensor(accumulators=1, bn=128, stages=4, padding="pad", k=325),
    "tensor direct, any n": tensor(epilogue="direct", n=133),
    "tensor pair": tensor(**PAIR),
    "tensor pair nn f16": tensor(**PAIR, layout="nn", bn=64, acc="f16"),
    "tensor pair, full size": tensor(**PAIR, bn=256, stages=4, m=256, n=256, k=256),
    "tensor pair, two instructions wide": tensor(
        **PAIR, **WIDER_THAN_INSTRUCTION, bn=512, layout="nn", fusion="bias_n+silu"
    ),
    "tensor two instructions wide": tensor(
        **WIDER_THAN_INSTRUCTION, bn=384, acc="f16", cluster=[1, 2], fusion="residual"
    ),
    "tensor pair, two instructions wide, weights asked for ahead": tensor(
        **PAIR, **WIDER_THAN_INSTRUCTION, bn=512, prefetch_b=True
    ),
    "tensor pairs 2x2 fused": tensor(pair=True, cluster=[2, 2], bn=64, fusion="residual+relu"),
    "tensor swapped d": tensor(**F32_OUT, **SWAPPED_TENSOR),
    "tensor swapped nn": tensor(**SWAPPED_TENSOR, layout="nn", acc="f16", cluster=[2, 1]),
    "tensor swapped, sixteen rows": tensor(**SWAPPED_TENSOR | {"bm": 16}, m=16, epilogue="direct"),
    "tensor swapped pair nn": tensor(**SWAPPED_TENSOR | {"bm": 64}, pair=True, cluster=[1, 2], layout="nn"),
    "tensor workspace pair f16": tensor(**PAIR, split_k=2, acc="f16", bn=64),
    "tensor workspace swapped": tensor(**SWAPPED_TENSOR, split_k=2, layout="nn"),
    "tensor stream pair": tensor(**PAIR, stream_k=True, m=600),
    "tensor stream swapped": tensor(**SWAPPED_TENSOR, stream_k=True, epilogue="direct", m=90),
    "tensor d": tensor(**BF16_IN_F32_OUT, bn=64),
    "tensor d swapped direct": tensor(**BF16_IN_F32_OUT, **SWAPPED_TENSOR, epilogue="direct", n=133),
    "tensor fused bf16": tensor(fusion="bias_n+silu", **BF16_IN, bn=64),
    "tensor fused f16": tensor(fusion=f"{ALL_OPERANDS}+gelu_tanh", acc="f16", bn=48),
    "tensor fused swapped": tensor(fusion=f"{ALL_OPERANDS}+gelu", **SWAPPED_TENSOR),
    "tensor fused, any n": tensor(fusion="alpha+bias_m+residual+relu", epilogue="direct", n=133, bn=64),
    "tensor gated direct": tensor(fusion="bias_m+aux+silu+gate", epilogue="direct", bn=48, **GATED_N),
    "tensor gated swapped": tensor(fusion="bias_n+silu+gate", **SWAPPED_TENSOR, epilogue="direct", **GATED_N),
    "tensor gated workspace": tensor(fusion="aux+silu+gate", split_k=3, **WIDE_TILE, **GATED_N),
    "tensor gated stream": tensor(fusion="bias_n+silu+gate", stream_k=True, **WIDE_TILE, **GATED_N),
    "tensor claimed, narrow": tensor(**CLAIMED, bn=48, n=200),
    "tensor claimed pair": tensor(**CLAIMED, **PAIR, m=600),
    "tensor claimed 2x2": tensor(**CLAIMED, cluster=[2, 2], accumulators=1, m=600, pdl=True),
    "tensor claimed pairs 2x2 bf16": tensor(**CLAIMED, **BF16_IN, pair=True, cluster=[2, 2], m=700),
    "tensor claimed swapped pair": tensor(
        **CLAIMED, **SWAPPED_TENSOR | {"bm": 64}, pair=True, cluster=[1, 2], layout="nn"
    ),
    "tensor claimed swapped f16": tensor(**CLAIMED, **SWAPPED_TENSOR, acc="f16", epilogue="direct", m=90),
    "tensor claimed batched gated": tensor(
        **CLAIMED, batch="strided", fusion="bias_n+silu+gate", **BF16_IN, **WIDE_TILE, **GATED_N
    ),
    "tensor claimed pair, two instructions wide": tensor(**CLAIMED, **PAIR, **WIDER_THAN_INSTRUCTION, bn=512, m=600),
    "tensor claimed grouped": tensor(**CLAIMED, batch="grouped", cluster=[1, 2]),
    "tensor batched gated": tensor(batch="strided", fusion="bias_n+silu+gate", **WIDE_TILE, **GATED_N),
    "tensor grouped gated": tensor(batch="grouped", fusion="bias_n+silu+gate", **WIDE_TILE, **GATED_N),
}

# mma.sync from the ring: both layouts and accumulators, every width of a box, pingpong, sums, stores.
WARPED: dict[str, Record] = {
    "warps": warps(),
    "warps nn": warps(layout="nn", bn=64, raster_axis="n", hint_a="first", hint_b="last", pdl=True),
    "warps nn, narrow boxes": warps(layout="nn", bn=48, acc="f16", hint_a="last", hint_b="first"),
    "warps nn, boxes of 32": warps(layout="nn", bn=96, min_blocks=2, bk=64, stages=2),
    "warps f16, stage of 128": warps(acc="f16", bk=128, stages=2, padding="pad", k=325),
    "warps two consumers": warps(bm=128, consumers=2, registers=[40, 232], m=264),
    "warps three consumers": warps(bm=192, consumers=3, m=264, stages=2),
    "warps two rows": warps(bm=128, acc="f16", m=264),
    "warps pingpong": warps(consumers=2, schedule="pingpong", registers=[40, 232], m=264),
    "warps pingpong nn": warps(consumers=2, schedule="pingpong", layout="nn", m=264, epilogue="direct"),
    "warps direct, any n": warps(epilogue="direct", n=133),
    "warps swapped": warps(**SWAPPED),
    "warps swapped nn": warps(**SWAPPED, layout="nn", acc="f16"),
    "warps swapped nn, two consumers": warps(**SWAPPED | {"bn": 128}, consumers=2, layout="nn", epilogue="direct"),
    "warps swapped d": warps(**SWAPPED, **F32_OUT),
    "warps swapped d direct": warps(**SWAPPED, **BF16_IN_F32_OUT, epilogue="direct", n=133),
    "warps d": warps(**BF16_IN_F32_OUT, bn=64),
    "warps d, two widths": warps(**BF16_IN_F32_OUT, bn=48),
    "warps workspace": warps(split_k=3, acc="f16"),
    "warps workspace swapped": warps(**SWAPPED, split_k=2, layout="nn"),
    "warps stream": warps(stream_k=True),
    "warps stream direct": warps(stream_k=True, epilogue="direct", layout="nn", bn=64),
    "warps fused bf16": warps(fusion="bias_n+silu", **BF16_IN, bn=64),
    "warps fused f16": warps(fusion=f"{ALL_OPERANDS}+gelu_tanh", acc="f16", bn=48),
    "warps fused swapped": warps(fusion=f"{ALL_OPERANDS}+gelu", **SWAPPED),
    "warps fused, any n": warps(fusion="alpha+bias_m+residual+relu", epilogue="direct", n=133, bn=64),
    "warps gated direct": warps(fusion="bias_m+aux+silu+gate", epilogue="direct", **GATED_N),
    "warps gated workspace": warps(fusion="aux+silu+gate", split_k=3, **GATED_N),
    "warps batched gated": warps(batch="strided", fusion="bias_n+silu+gate", **GATED_N),
    "warps grouped gated": warps(batch="grouped", fusion="bias_n+silu+gate", **GATED_N),
}

# A stored (k,m), in every family that supports it: each operand on both sides of the instruction, ragged tiles, shared
# boxes, several instructions along the columns, slices, and a compiled-in row length.
TRANSPOSED: dict[str, Record] = {
    "nt": small(layout="nt"),
    "nt odd width": small(layout="nt", bm=96, m=96, acc="f32", **STAGED_16),
    "nt ragged": small(layout="nt", **RAGGED | {"k": 245}, **TO_GLOBAL),
    "nt narrow": small(layout="nt", bm=16, m=48, **BF16_IN),
    "tt ragged": small(layout="tt", **RAGGED, **STRAIGHT),
    "tt baked split": small(layout="tt", bake=["k"], split_k=2),
    "tt unrolled": small(layout="tt", bake=["k"], k=192, unroll_k=True),
    "nt batched fused": small(layout="nt", batch="strided", fusion="bias_m+silu"),
    "wgmma nt": ring(layout="nt", **BF16_IN, m=200, k=333),
    "wgmma nt two rows 1x2": ring(layout="nt", bm=128, bn=64, atom_n=64, cluster=[1, 2], acc="f16"),
    "wgmma nt 2x2 pingpong": ring(layout="nt", **PINGPONG, cluster=[2, 2], bk=128, stages=2),
    "wgmma tt 2x1": ring(layout="tt", **TWO_CONSUMERS, cluster=[2, 1], acc="f16"),
    "wgmma tt swapped": ring(layout="tt", **SWAPPED, m=96),
    "wgmma nt swapped, narrow boxes": ring(
        layout="nt", **SWAPPED | {"bm": 48, "atom_n": 48}, acc="f16", epilogue="direct"
    ),
    "wgmma nt stream": ring(layout="nt", stream_k=True, m=152),
    "wgmma tt batched": ring(layout="tt", batch="strided", fusion="bias_n+silu"),
    "wgmma nt padded": ring(layout="nt", padding="pad", m=197, k=325),
    "once nt": once(layout="nt", m=56, k=125),
    "once tt split 2": once(layout="tt", split_k=2, k=256, acc="f16"),
    "warps nt": warps(layout="nt", acc="f16"),
    "warps tt swapped": warps(layout="tt", **SWAPPED, m=96),
    "tensor nt": tensor(layout="nt"),
    "tensor tt f16": tensor(layout="tt", acc="f16"),
    "tensor nt f16": tensor(layout="nt", acc="f16", cluster=[1, 2], bn=64),
    "tensor pair nt": tensor(layout="nt", **PAIR),
    "tensor pair tt": tensor(layout="tt", **PAIR, bn=64),
    "tensor nt swapped": tensor(layout="nt", **SWAPPED_TENSOR),
    "tensor tt swapped": tensor(layout="tt", **SWAPPED_TENSOR),
    "tensor nt swapped pair": tensor(layout="nt", **SWAPPED_TENSOR | {"bm": 64}, pair=True, cluster=[1, 2]),
    "tensor tt swapped pair": tensor(layout="tt", **SWAPPED_TENSOR | {"bm": 64}, pair=True, cluster=[1, 2]),
}

# All records by name. A name says what is special about its record.
PATHS: dict[str, Record] = {
    "single": small(),
    "single f32": small(acc="f32"),
    "single two stages": small(stages=2),
    "single five stages": small(stages=5),
    "single more than 48 KiB": small(bm=64, bn=64, stages=4),
    "single late slot": small(g2s_slot=3),
    "single one stage": small(stages=1),
    "single_intra_tile": small(**prefetch("single_intra_tile")),
    "single_intra_tile one stage": small(stages=1, **prefetch("single_intra_tile")),
    "none": small(**prefetch("none")),
    "none one stage": small(stages=1, **prefetch("none")),
    "none bk 16": small(bk=16, g2s_cols=2, **prefetch("none")),
    "multi": small(**prefetch("multi", 2)),
    "multi one stage": small(stages=1, **prefetch("multi", 3)),
    "pingpong": small(bn=64, **prefetch("pingpong")),
    "pingpong one stage": small(stages=1, bm=64, **prefetch("pingpong")),
    "staggered": small(**prefetch("staggered")),
    "staggered late slot": small(g2s_slot=3, **prefetch("staggered")),
    "nn": small(layout="nn"),
    "nn f32 global": small(layout="nn", acc="f32", **TO_GLOBAL),
    "nn odd width": small(layout="nn", bn=96, n=96, smem_swizzle=[2, 3, 3]),
    "nn narrow": small(layout="nn", bn=16, n=48, mma_repeat=[2, 1, 1]),
    "staged in batches": small(bm=64, c_batch=3),
    "staged with 8 bytes": small(**STAGED_8),
    "staged with 16 bytes": small(acc="f32", **STAGED_16),
    "direct": small(acc="f32", **STRAIGHT),
    "direct with 16 bytes": small(**STRAIGHT, **STAGED_16),
    "direct in rounds": small(bm=64, bn=64, bk=16, stages=1, g2s_cols=2, **STRAIGHT, **prefetch("none")),
    "global": small(**TO_GLOBAL),
    "zsplit": small(raster="zsplit", swizzle_stride=48, n=160),
    "persistent": small(raster="persistent"),
    "bounded registers": small(min_blocks=4),
    "registers short": small(**FEW_STEPS, **prefetch("single_intra_tile")),
    "predicate": small(padding="predicate", m=61, n=59, k=248),
    "predicate nn": small(padding="predicate", layout="nn", m=61, n=59, k=248, **STRAIGHT),
    "predicate global": small(padding="predicate", m=61, n=59, k=248, **TO_GLOBAL),
    "pad": small(padding="pad", m=61, n=59, k=250),
    "split_k": small(split_k=2),
    "split_k f32 zsplit": small(split_k=3, acc="f32", raster="zsplit", swizzle_stride=32),
    "split_k persistent": small(split_k=2, raster="persistent", **STRAIGHT),
    "split_k baked": small(split_k=2, bake=["k"]),
    "baked k": small(bake=["k"], k=192),
    "baked k nn": small(bake=["k"], k=192, layout="nn"),
    "unrolled": small(bake=["k"], k=192, unroll_k=True),
    "unrolled none": small(bake=["k"], k=192, unroll_k=True, **prefetch("none")),
    "baked k zsplit": small(bake=["k"], k=192, raster="zsplit", swizzle_stride=32),
    "baked k nn persistent": small(bake=["k"], k=192, layout="nn", raster="persistent"),
    "odd swizzle": small(smem_swizzle=[2, 4, 3], smem_swizzle_c=[1, 3, 2]),
    "odd k-tile": small(bk=48, g2s_cols=2, k=240, smem_swizzle=[2, 3, 3]),
    "steps off the swizzle period": small(bk=32, smem_swizzle=[3, 3, 5], mma_repeat=[1, 1, 1]),
    "copies of part of the threads": small(bm=16, bk=32, mma_repeat=[1, 2, 1], g2s_cols=1, m=32),
    "three warps": small(bn=96, n=96, mma_repeat=[1, 3, 1], g2s_cols=8),
    "small direct": direct(),
    "small direct f32": direct(acc="f32", mma_repeat=[2, 1, 1]),
    "small direct nn": direct(layout="nn"),
    "small direct predicate": direct(padding="predicate", m=61, n=59, k=120),
    "small direct predicate nn": direct(padding="predicate", layout="nn", m=61, n=59, k=120),
    "small direct split_k": direct(split_k=2, mma_repeat=[2, 1, 1]),
    "small direct split_k f32": direct(split_k=3, acc="f32"),
    "small direct baked": direct(bake=["k"]),
    "small direct unrolled": direct(bake=["k"], unroll_k=True),
    "wgmma": ring(),
    "wgmma nn": ring(layout="nn", bn=64, atom_n=64),
    "wgmma bk 128": ring(bk=128, stages=2, acc="f16", layout="nn"),
    "wgmma five stages": ring(stages=5, raster_axis="n", hint_a="first", hint_b="last", pdl=True),
    "wgmma two CTAs an SM": ring(min_blocks=2, hint_a="last", hint_b="first"),
    "wgmma 2x1": ring(cluster=[2, 1]),
    "wgmma 1x2 nn": ring(cluster=[1, 2], layout="nn"),
    "wgmma 2x1 nn, three chunks": ring(cluster=[2, 1], layout="nn", bn=96, atom_n=96, n=200),
    "wgmma 2x2": ring(cluster=[2, 2], bk=128, stages=2),
    "wgmma 4x1 nn": ring(cluster=[4, 1], layout="nn", acc="f16"),
    "wgmma 1x4": ring(cluster=[1, 4]),
    "wgmma two consumers": ring(**TWO_CONSUMERS, registers=[40, 232], cluster=[2, 1], layout="nn"),
    "wgmma three consumers": ring(consumers=3, bm=192, registers=[32, 160], cluster=[1, 2]),
    "wgmma three consumers, two boxes of A": ring(consumers=3, bm=384, stages=2, m=400),
    "wgmma four instructions": ring(bm=128, bn=64, atom_n=32, acc="f16"),
    "wgmma full size": ring(**TWO_CONSUMERS, bn=256, atom_n=256, registers=[40, 232], m=256, n=256, k=256),
    "wgmma full size f16": ring(acc="f16", consumers=2, bm=256, bn=256, atom_n=256, m=256, n=256, k=256),
    "wgmma pingpong": ring(**PINGPONG, registers=[40, 232]),
    "wgmma pingpong 2x1 nn": ring(**PINGPONG, cluster=[2, 1], layout="nn", acc="f16"),
    "wgmma rests of two instructions": ring(bn=160, atom_n=80, n=328, stages=2),
    "wgmma rests, pingpong": ring(**PINGPONG, bn=96, atom_n=96, n=200, layout="nn", cluster=[2, 1], acc="f16"),
    "wgmma padded": ring(padding="pad", k=325),
    "wgmma direct": ring(epilogue="direct", acc="f16"),
    "wgmma direct, any n": ring(epilogue="direct", n=133),
    "wgmma swapped": ring(**SWAPPED),
    "wgmma swapped nn": ring(**SWAPPED, layout="nn", cluster=[2, 1]),
    "wgmma swapped, sixteen rows": ring(swap_ab=True, bm=16, bn=128, atom_n=16, consumers=2, m=16, n=256),
    "wgmma swapped 1x2 f16": ring(
        **SWAPPED | {"bm": 64, "bn": 128}, consumers=2, acc="f16", cluster=[1, 2], bk=128, stages=2
    ),
    "wgmma swapped direct": ring(**SWAPPED, layout="nn", epilogue="direct", cluster=[1, 2]),
    "wgmma swapped pingpong": ring(**(PINGPONG | SWAPPED), acc="f16"),
    "wgmma workspace": ring(split_k=3, reduce="workspace"),
    "wgmma workspace pingpong f16": ring(**PINGPONG, split_k=2, reduce="workspace", acc="f16", epilogue="direct"),
    "wgmma workspace 2x1": ring(**TWO_CONSUMERS, split_k=2, reduce="workspace", cluster=[2, 1]),
    "wgmma workspace swapped nn": ring(**SWAPPED, split_k=5, reduce="workspace", layout="nn", acc="f16"),
    "wgmma workspace, seventeen slices": ring(split_k=17, reduce="workspace", k=1160),
    # Problems with an odd number of tiles: two clusters run in the emulator, so they share the last tile.
    "wgmma stream": ring(stream_k=True, m=150),
    "wgmma stream 2x1 nn": ring(**TWO_CONSUMERS, stream_k=True, cluster=[2, 1], layout="nn", m=150),
    "wgmma stream, any n": ring(stream_k=True, epilogue="direct", m=150, n=133, bk=128, stages=2),
    "wgmma stream swapped": ring(**SWAPPED, stream_k=True, layout="nn", m=150),
    "wgmma stream 1x2, four instructions": ring(
        stream_k=True, bm=128, bn=64, atom_n=32, cluster=[1, 2], registers=[40, 232], consumers=2, m=300, n=264
    ),
    "wgmma cluster split 2": ring(**IN_CLUSTER, split_k=2),
    "wgmma cluster split 4 f16 nn": ring(**IN_CLUSTER, **TWO_CONSUMERS, split_k=4, acc="f16", layout="nn", bn=64),
    "wgmma cluster split 8 swapped": ring(
        **IN_CLUSTER, swap_ab=True, bm=16, bn=64, atom_n=16, split_k=8, m=1, k=1000, pdl=True
    ),
    **WIDTHS,
    "once": once(),
    "once nn": once(bm=16, bn=64, layout="nn"),
    "once any n": once(n=61, m=61),
    "once padded": once(padding="pad", k=125),
    "once one warp f16": once(bm=16, bn=16, acc="f16", k_chunks=1, k=56),
    "once large": once(bm=64, bn=96, m=100, n=200, k=136),
    "once split 2": once(split_k=2, k=256, pdl=True),
    "once split 4 f16 nn": once(split_k=4, k=512, acc="f16", layout="nn"),
    "once split 8": once(split_k=8, k=1000, m=1),
    **TYPED,
    **{f"fused {name}": record for name, record in FUSED.items()},
    **BATCHED,
    **TENSORS,
    **WARPED,
    **TRANSPOSED,
    "sixteen threads along a row": small(bk=128, g2s_cols=16),
    "thirty-two threads along a row": small(bk=256, g2s_cols=32, stages=2),
    "small direct padded by its caller": direct(padding="pad", m=61, n=59, k=125),
}
