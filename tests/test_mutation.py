"""The checker is checked: mechanical mutants of built kernels must be noticed, or be proven equivalent."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from cudal2gen import compiler
from tests.mutation import equivalence, survivors
from tests.paths import PATHS

pytestmark = pytest.mark.slow

# One kernel of every family, prefetch kind, epilogue, raster, padding and layout.
MUTATED = [
    "single",
    "single one stage",
    "single_intra_tile",
    "none bk 16",
    "none one stage",
    "multi",
    "pingpong",
    "staggered",
    "nn f32 global",
    "staged with 16 bytes",
    "direct",
    "zsplit",
    "persistent",
    "predicate",
    "split_k",
    "small direct",
    "small direct split_k",
    "wgmma pingpong 2x1 nn",
    "wgmma 2x2",
]


def judged(name: str, library: Path) -> tuple[int, Counter[str], list[str]]:
    """Mutants of one kernel, the reasons of the equivalent ones, and the survivors without a reason."""
    artifact = compiler.build([PATHS[name]])[0]
    ptx = artifact.ptx.read_text()
    total, reasons, unexplained = 0, Counter[str](), []
    for mutant, survived in survivors(PATHS[name], artifact, library):
        total += 1
        if survived and (reason := equivalence(mutant, ptx)) is not None:
            reasons[reason] += 1
        elif survived:
            unexplained.append(f"{mutant.name}: {ptx.splitlines()[mutant.line - 1].strip()}")
    return total, reasons, unexplained


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[int, Counter[str], list[str]]]:
    compiler.build([PATHS[name] for name in MUTATED])
    library = compiler.launcher()
    with ProcessPoolExecutor() as pool:
        futures = {name: pool.submit(judged, name, library) for name in MUTATED}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", MUTATED)
def test_every_mutant_is_noticed_or_equivalent(
    name: str, verdicts: dict[str, tuple[int, Counter[str], list[str]]]
) -> None:
    total, reasons, unexplained = verdicts[name]
    print(f"\n{name}: {total} mutants, {total - sum(reasons.values()) - len(unexplained)} noticed, {dict(reasons)}")
    assert unexplained == []
    assert total >= 50
    assert sum(reasons.values()) < total / 8, "most mutants must be real faults"
