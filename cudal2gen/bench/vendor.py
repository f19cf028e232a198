"""The vendor's library as the yardstick of a device's verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cudal2gen.bench import baselines
from cudal2gen.bench.protocols import prepare
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Absent, Contender, Gpu, GpuError


def autotuned_vendor(card: Gpu, tuned: Path) -> Callable[[Problem], Contender]:
    """cuBLASLt auto-tuned, prepared for a problem. ``tuned``: the store of its algorithms. The answer raises Absent."""
    contenders: dict[tuple[str, str], Contender] = {}

    def prepared(problem: Problem) -> Contender:
        if problem.suffix:
            raise Absent(f"{problem.title}: the vendor's product is one plain product")
        key = (problem.acc, problem.layout)
        if key not in contenders:
            try:
                (contenders[key],) = baselines.contenders(
                    [f"cublaslt-autotuning-{problem.layout}"], problem.acc, card, tuned
                )
            except GpuError as error:
                raise Absent(str(error)) from None
        return prepare(card, contenders[key], problem)

    return prepared
