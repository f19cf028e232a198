"""Loads records that regenerate published CUDA-L2 kernels, and facts about the published kernels of the H100."""

from __future__ import annotations

import json
import lzma
from typing import Any

from cudal2gen import places
from cudal2gen.generation import catalog, published
from cudal2gen.kernel import Record
from cudal2gen.timing.evidence.findings import is_development

SETS = (("a100", "f16"), ("a100", "f32"), ("rtx3090", "f32"))


def regenerated(gpu: str, acc: str, held_out: bool) -> list[Record]:
    """The shipped records that regenerate the published kernels of a GPU and an accumulator.

    ``held_out``: whether the problems are those of the half that is held out.
    """
    return [
        record
        for record in published.structures(catalog.load(places.shipped("configs") / "kernels.jsonl"))
        if (record.gpu, record.acc) == (gpu, acc) and is_development(record.n, record.k) != held_out
    ]


def hopper_configurations() -> list[dict[str, Any]]:
    """Facts, from configs/published, about those published H100 kernels that can only be one CUTLASS configuration,
    with TMA."""
    with lzma.open(places.shipped("configs") / "published" / "h100_f32.jsonl.xz", "rt") as lines:
        kernels = [json.loads(line) for line in lines]
    return [
        facts
        for facts in kernels
        if facts.get("n_candidate_configs") == 1 and "Tma" in (facts.get("kernel_schedule") or "") and "bm" in facts
    ]
