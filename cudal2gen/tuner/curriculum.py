"""Names the stages of CUDA-L2's training: kernels of any kind, then matrix products, then half-precision products.

The paper (arXiv 2512.02551) trains a language model on these in turn. Here they name what an exchange is about, and
order what ``cudal2gen export`` writes, so that a trainer that does not shuffle follows the curriculum.
"""

from __future__ import annotations

from typing import Literal, get_args

from cudal2gen.kernel import Problem

Stage = Literal["kernels", "matmul", "hgemm"]
STAGES: tuple[Stage, ...] = get_args(Stage)


def stage_of(problem: Problem) -> Stage:
    """``hgemm`` for one plain product of fp16, ``matmul`` for other types, fused and batched products."""
    plain = problem.ab == "f16" and problem.d == "same" and not problem.fusion and not problem.batched
    return "hgemm" if plain else "matmul"
