"""The checker is checked: mechanical mutants of built kernels must be noticed, or be proven equivalent.

Of each kernel, every third mutant of each kind; all of them in ``make thorough``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cudal2gen import compiler
from tests.draws import drawn_by
from tests.mutation import candidates, equivalence, survivors
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
    "wgmma workspace",
    "wgmma stream",
    "wgmma n80",
    "wgmma rests of two instructions",
    "wgmma rests, pingpong",
    "wgmma padded",
    "wgmma cluster split 8 swapped",
    "once padded",
    "once split 2",
]

# Of how many mutants one may be equivalent. A cluster that sums one tile ends
# twice over: the producer's warps only keep the barriers' count, the CTA's others wait for the same readers.
MOST_EQUIVALENT = dict.fromkeys(MUTATED, 8) | {"wgmma cluster split 8 swapped": 7}

BUILT_AHEAD = [PATHS[name] for name in MUTATED]


@pytest.fixture(scope="module")
def library() -> Path:
    return compiler.launcher()


@pytest.mark.parametrize("name", MUTATED)
def test_every_mutant_is_noticed_or_equivalent(name: str, library: Path) -> None:
    record = PATHS[name]
    artifact = compiler.build([record])[0]
    ptx = artifact.ptx.read_text()
    mutants = candidates(record, ptx)
    assert len(mutants) >= 50
    executed = drawn_by(lambda mutant: mutant.kind, mutants, 3)
    reasons, unexplained = Counter[str](), []
    for mutant in survivors(record, artifact, library, executed):
        if (reason := equivalence(record, mutant, ptx)) is not None:
            reasons[reason] += 1
        else:
            unexplained.append(f"{mutant.name}: {ptx.splitlines()[mutant.line - 1].strip()}")
    print(f"\n{name}: {len(executed)} of {len(mutants)} mutants, {dict(reasons)}")
    assert unexplained == []
    assert reasons.total() < len(executed) / MOST_EQUIVALENT[name], "most mutants must be real faults"
