"""Proves what each family proposes for a problem, and that a new family, a Python file and a template, is rendered,
compiled, checked, tuned and shown without other changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cudal2gen import cli, validator
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import FAMILIES, GPUS, IllegalRecord, Problem, Record, parse, register, space
from cudal2gen.timing import model
from tests.cudal2gen.toy_family import WARPS, Toy


def problem(**sizes: Any) -> Problem:
    """A small problem of the A100, with other sizes or fields."""
    return Problem(**({"gpu": "a100", "acc": "f32", "layout": "tn", "m": 64, "n": 64, "k": 128} | sizes))


def counts(problem: Problem) -> Counter[str]:
    """The number of legal structures of each family."""
    return Counter(record.family for record in space.candidates(problem).records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "structures"),
    [
        ({}, 2 * 3 * 3),  # rows 16, 32; columns 16, 32, 64; 1, 2, 4 slices of the four k-steps
        ({"k": 64}, 2 * 3 * 2),  # two k-steps have no four slices
        ({"k": 32}, 2 * 3),
        ({"m": 512, "n": 512, "k": 2048}, 2 * 3 * 3),
        ({"m": 1024, "n": 512, "k": 2048}, 0),  # there is enough work to fill a ring
        ({"k": 2080}, 0),
        ({"gpu": "h200"}, 0),
    ],
)
def test_tiles_without_a_ring_are_proposed_for_small_problems(sizes: dict[str, Any], structures: int) -> None:
    assert counts(problem(**sizes))["sm80_direct"] == structures


@pytest.mark.parametrize("gpu", GPUS)
def test_free_fields_are_named_by_their_family(gpu: str) -> None:
    """The alternatives of ``free_fields`` set exactly ``FREE_FIELDS``, which are fields of the family."""
    for family in FAMILIES.values():
        choices = family.free_fields(problem(gpu=gpu, n=4096)).values()
        assert {name for fields in chain(*choices) for name in fields} == family.FREE_FIELDS
        assert family.model_fields.keys() >= family.FREE_FIELDS


# --- a toy family ---


@pytest.fixture
def toy() -> Iterator[Record]:
    """A record of the toy family, which is registered during the test."""
    register(Toy)
    yield parse(space.base(problem(k=40), "toy") | Toy.plain(problem()))
    del FAMILIES["toy"]


def test_the_toys_rules_are_its_own(toy: Record) -> None:
    with pytest.raises(IllegalRecord, match=r"^bm=20:"):
        toy.at(toy.problem, bm=20, warps=3, bn=32)
    assert toy.name.startswith("hgemm_toy_f32_tn_16x32_w4_")


def test_the_toy_is_rendered_from_its_own_folder(toy: Record) -> None:
    text = render(toy)
    assert "kBM = 16, kBN = 32, kWarps = 4;" in text
    assert text != render(toy.at(toy.problem, warps=2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tn", "nn"])
def test_the_toy_is_built_and_its_results_are_right(toy: Record, layout: str) -> None:
    record = parse(toy.model_dump(mode="json") | {"layout": layout})
    (artifact,) = compiler.build([record])
    verdict = validator.emulated.validate(record, artifact, compiler.launcher())
    assert verdict.passed, verdict.findings
    assert len(verdict.cases) > 5


def test_the_tuner_and_the_model_take_the_toy(toy: Record) -> None:
    structures = space.candidates(toy.problem)
    offers = [record for record in structures.records if record.family == "toy"]
    assert [record.threads for record in offers] == [32 * warps for warps in WARPS]
    assert "warps" in structures.columns
    # There are 4 x 2 tiles, at most one for each SM. An SM loads 64 bytes a clock, and each of five steps of 8 k needs
    # (16 + 32) x 8 halves.
    bounds = model.estimate(toy).bounds_us
    assert bounds["L2"] == pytest.approx(5 * (16 + 32) * 8 * 2 / 64 / 1380)


@pytest.mark.parametrize("verb", ["show", "render", "run"])
def test_verbs_take_a_catalog_line_of_the_toy(
    toy: Record, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.save([toy], tmp_path / "kernels.jsonl")
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "kernels.jsonl"))
    result = CliRunner().invoke(cli.app, [verb, "--mnk", toy.mnk, "--acc", "f32"])
    assert result.exit_code == 0, result.output
    assert toy.name in result.output
    if verb == "render":
        assert result.output == render(toy)


def test_the_toy_leaves_nothing_behind() -> None:
    assert "toy" not in FAMILIES
    assert counts(problem())["toy"] == 0
