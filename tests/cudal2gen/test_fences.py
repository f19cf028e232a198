"""Proves that kernels have only those full fences for which ``scripts/fences.py`` states a reason."""

from __future__ import annotations

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from scripts import fences
from tests.cudal2gen.covering import BRANCHES
from tests.cudal2gen.paths import PATHS
from tests.draws import draw_part

pytestmark = pytest.mark.slow


def features_of(record: Record) -> tuple[object, ...]:
    """How a kernel sums, claims and stores tiles."""
    claims, summed = getattr(record, "claims_tiles", False), getattr(record, "summed_in", record.split_k > 1)
    return record.family, summed, record.cluster_ctas > 1, claims, getattr(record, "epilogue", None)


# The paths without batches and fusions.
PLAIN = {name: record for name, record in PATHS.items() if not record.batched and not record.fusion}
# The name of a record with each set of features: one of BRANCHES if there is one, since those are compiled anyway.
RECORD_OF_FEATURES = {features_of(PLAIN[name]): name for name in sorted(PLAIN, key=BRANCHES.__contains__)}
EXECUTED = draw_part([*RECORD_OF_FEATURES.values()], 3)
BUILT_AHEAD = [PATHS[name] for name in EXECUTED]


@pytest.mark.parametrize("name", EXECUTED)
def test_a_full_fence_has_a_reason(name: str) -> None:
    record = PATHS[name]
    found = list(fences.fences(compiler.build([record])[0].directory))
    assert fences.unexplained(found) == []
    keeps_parts = getattr(record, "keeps_parts", record.split_k > 1 and record.family.startswith("sm80"))
    assert bool(found) == keeps_parts, "only partial sums in device memory need full fences"
    assert all(".j2:" in fence.template for fence in found)
