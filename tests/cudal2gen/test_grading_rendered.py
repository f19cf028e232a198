"""Proves that the grader calls a kernel of each family of the catalog honest."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given

from cudal2gen import kernel
from cudal2gen.generation import catalog
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record, ceil_div
from cudal2gen.kernel.launch import LaunchOperands, Sizes, Tiles, Tma
from cudal2gen.tuner.writing.contract import description
from kernelproof.grading import Limits, Verdict, check_source
from tests.cudal2gen.strategies import plain_records


def smallest(family: str) -> Record:
    """The family's record of least work that needs no workspace and stores whole boxes."""
    records = [
        record
        for record in catalog.load()
        if record.family == family and record.split_k == 1 and record.layout == "tn" and not stores_rests(record)
    ]
    return min(records, key=lambda record: record.launch.bm * record.launch.bn * record.k)


def stores_rests(record: Record) -> bool:
    """Whether a kernel stores narrower boxes or parts of tiles, or goes over its tiles in another order than rows."""
    match record.launch:
        case Tma() as launch:
            return bool(launch.box_d_rest_cols or launch.stream_k)
        case Tiles() as launch:
            return launch.raster != "plain"
    return False


def grade(record: Record, text: str) -> Verdict:
    """The grader's verdict on a CUDA text with a record's launch, for all shapes of the launch's description but the
    first, and no drawn ones."""
    device = {"h200": "sm_90a", "b200": "sm_100a", "rtx5090": "sm_120a"}.get(record.gpu, "sm_80")
    limits = Limits(device=device, isolated=False)
    described = description(record)
    return check_source(text, **described | {"shapes": described["shapes"][1:], "draws": {}}, limits=limits)


@pytest.mark.one_in(3)
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, family in kernel.FAMILIES.items() if not family.TEXTUAL])
def test_rendered_kernels_are_right(family: str) -> None:
    record = smallest(family)
    verdict = grade(record, render(record))
    assert verdict.right, str(verdict)
    assert verdict.kernels[0].mma_flops >= 2 * record.launch.bm * record.launch.bn * record.k


# Kinds of launches that no record of ``smallest`` has.
LAUNCHES = ("stream_k", "workspace", "zsplit", "split_k")


def kind(record: Record) -> str:
    """The name in ``LAUNCHES`` of a record's launch. It is found by the record's fields, since making launches is
    slower."""
    if getattr(record, "stream_k", False):
        return "stream_k"
    if getattr(record, "reduce", None) == "workspace":
        return "workspace"
    if getattr(record, "raster", "") == "zsplit":
        return "zsplit"
    return "split_k" if record.split_k > 1 and not hasattr(record, "reduce") else ""


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_with_a_workspace_or_slices_are_described(name: str) -> None:
    records = [record for record in catalog.load() if kind(record) == name and record.layout == "tn"]
    record = min(records, key=lambda record: record.bm * record.bn * record.split_k * record.ring_steps)
    facts = record.launch.model_dump()
    assert {"stream_k": 1, "workspace": "workspace", "zsplit": "zsplit", "split_k": record.split_k}[
        name
    ] in facts.values()
    verdict = grade(record, render(record))
    assert verdict.right, str(verdict)


@given(plain_records)
def test_shapes_are_ragged_fill_the_ring_and_are_taken_by_the_launch(record: Record) -> None:
    """The record's own rules allow the shapes, and its launch takes their packed matrices; also those of the least and
    of the largest extents that are drawn."""
    described, step = description(record), record.k_step
    few, many = (Sizes(**shape) for shape in described["shapes"])
    ends = product(*([(name, extent) for extent in ends] for name, ends in described["draws"].items()))
    for sizes in (few, many, *(few._replace(**dict(extents)) for extents in ends)):
        record.at(record.problem.revised(**sizes._asdict()))
        assert all(record.launch.takes(sizes, LaunchOperands.packed(record.layout, sizes))), sizes
    whole = [sizes.m % record.bm == sizes.n % record.bn == 0 for sizes in (few, many)]
    assert whole == [not record.predicated] * 2 or min(record.bm, record.bn) == record.element.vector
    if not record.predicated:
        assert len({few[:2], many[:2], (record.bm, record.bn)}) == 3, "several tiles along each axis"
    if record.baked_k:
        assert few.k == many.k == record.baked_k
    else:
        assert few.k == min(step * record.split_k, record.most_k or few.k), "one step of each slice"
        wanted = max(record.split_k, record.ring_steps + 1)
        assert ceil_div(many.k, step) == min(wanted, ceil_div(record.most_k or many.k, step))
