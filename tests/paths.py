"""Records that together take every path through the templates; other tests execute them and mutate their PTX."""

from __future__ import annotations

from typing import Any

from cudal2gen.kernel import Sm80Direct, Sm80Multistage
from tests.strategies import STAGED_8, STAGED_16, STRAIGHT, TO_GLOBAL, direct, multistage, prefetch

# Small tiles execute fast; two warps, so that barriers matter.
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
    return multistage(**(SMALL | changes))


PATHS: dict[str, Sm80Multistage | Sm80Direct] = {
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
    "direct beyond the ring": small(bm=64, bn=64, bk=16, stages=1, g2s_cols=2, **STRAIGHT, **prefetch("none")),
    "global": small(**TO_GLOBAL),
    "zsplit": small(raster="zsplit", swizzle_stride=48, n=160),
    "persistent": small(raster="persistent"),
    "bounded registers": small(min_blocks=4),
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
    "baked n and k": small(bake=["n", "k"], k=192, raster="zsplit", swizzle_stride=32),
    "baked n and k nn persistent": small(bake=["n", "k"], k=192, layout="nn", raster="persistent"),
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
    "small direct unrolled": direct(bake=["n", "k"], unroll_k=True),
}
