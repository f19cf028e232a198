"""Provides cuBLASLt's product as a yardstick of accuracy.

A verdict on a GPU compares the error of our kernel with the error of the vendor's library on the same problem.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cudal2gen import results
from cudal2gen.bench import baselines
from cudal2gen.bench.protocols import prepare
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Absent, Contender, Gpu, GpuError


def autotuned_vendor(card: Gpu, tuned: Path) -> Callable[[Problem], Contender]:
    """A function that prepares auto-tuned cuBLASLt for a problem.

    ``tuned``: the file of algorithms that were tuned before. The function raises Absent for fused and batched problems,
    and if the library is not installed.
    """
    contenders: dict[tuple[str, str], Contender] = {}

    def prepared(problem: Problem) -> Contender:
        if problem.suffix:
            raise Absent(f"{problem.title}: the vendor's product is one plain product")
        key = (problem.acc, results.stored_b(problem))
        if key not in contenders:
            try:
                (contenders[key],) = baselines.contenders(
                    [f"cublaslt-autotuning-{results.stored_b(problem)}"], problem.acc, card, tuned
                )
            except GpuError as error:
                raise Absent(str(error)) from None
        return prepare(card, contenders[key], problem)

    return prepared
