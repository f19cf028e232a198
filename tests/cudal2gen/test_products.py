"""Proves on drawn combinations of type, fusion, batch, family and layout that legal kernels are right.

Illegal combinations are refused with an error. ``make test`` draws a few, ``make thorough`` hundreds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cudal2gen import validator
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import IllegalRecord, Record, parse
from cudal2gen.kernel.fusion import PARTS
from cudal2gen.kernel.launch import read
from cudal2gen.validator import Shape, stress_shapes
from cudal2gen.validator.problems import thorough_shape
from tests.cudal2gen.strategies import (
    direct_records,
    multistage_records,
    records,
    records_of_any_product,
    single_shot_records,
    wgmma_records,
)
from tests.draws import THOROUGH

# A smaller batch would be compiled again at every step, and the message names the record anyway.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
DRAWN = 6 if THOROUGH else 3  # records of one example
# Records with any types, fusion and batch, and with small tiles, so that many compile quickly.
SMALL_RECORDS = records_of_any_product(
    st.one_of(direct_records(), single_shot_records(), multistage_records(max_tile=64), wgmma_records(max_cols=64))
)
# Those that compute another product than a plain one.
MORE = SMALL_RECORDS.filter(lambda record: record.problem.kind != record.problem.revised(**PLAIN_PRODUCT).kind)
# The fields of a problem that make it a plain fp16 product.
PLAIN_PRODUCT: dict[str, Any] = {"ab": "f16", "d": "same", "fusion": "none", "batch": "none"}


def shapes_of(record: Record) -> Iterator[Shape]:
    """The thorough problem of a verdict, and a batch if the record supports one."""
    shapes = stress_shapes(record)
    yield thorough_shape(record, shapes)
    yield from islice((shape for shape in shapes if shape.shared_b), 1)


@pytest.mark.slow
@given(st.lists(MORE, min_size=DRAWN, max_size=DRAWN, unique_by=lambda record: record.name))
@settings(max_examples=50 if THOROUGH else 1, phases=NO_SHRINKING)
def test_legal_products_are_right(library: Path, drawn: list[Record]) -> None:
    for record, artifact in zip(drawn, compiler.build(drawn), strict=True):
        for shape in shapes_of(record):
            for inputs in ("integers", "normal"):
                case, _ = validator.run_case(record, artifact, library, shape, inputs, hazards=inputs == "integers")
                assert case.findings == (), (catalog.dump(record), shape)


CHANGES: dict[str, list[Any]] = {
    "acc": ["f16", "f32", "bf16"],
    "ab": ["f16", "bf16", "f32", "fp8"],
    "d": ["same", "f32", "f16", "bf16", None],
    "layout": ["tn", "nn", "nt"],
    "batch": ["none", "strided", "grouped", "", 2],
    "fusion": ["none", "", "+", "silu+bias_n", "bias_n+bias_m", None, 1, *PARTS, "+".join(PARTS)],
    "n": [0, 1, 61, 64, 2**25],
    "split_k": [1, 2, 64],
    "epilogue": ["staged", "direct", "global", "tma", None],
}


@pytest.mark.slow
@given(records, st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHANGES.items()}))
@settings(max_examples=1000 if THOROUGH else 60, phases=NO_SHRINKING)
def test_what_is_not_legal_is_refused_in_words(record: Record, changes: dict[str, Any]) -> None:
    """Each rule names the field that breaks it. A record that no rule refuses has a text, and launch facts that Python
    and C++ read alike."""
    fields = json.loads(catalog.dump(record)) | changes
    refusal, other = "", None
    try:
        other = parse(fields)
    except IllegalRecord as error:
        refusal = str(error)
    if other is None:
        names = "|".join([*type(record).line_fields(), *CHANGES])
        assert re.match(rf"({names})\b", refusal), (refusal, fields)
        return
    assert all(getattr(other, name, value) == value or name == "fusion" for name, value in changes.items())
    assert other.name in render(other)
    assert read(other.launch.write()) == other.launch
