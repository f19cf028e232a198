"""Proves the catalog's claims about CUDA-L2's kernels from the published facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudal2gen import places
from cudal2gen.generation import catalog
from scripts import published

# How many kernels were published, by GPU and accumulator.
KERNELS = {("a100", "f16"): 1000, ("a100", "f32"): 1000, ("rtx3090", "f32"): 736, ("h100", "f32"): 1000}


def test_every_claim_of_the_catalog_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 wrong claims"
    assert "970" in lines[0]  # the README states the number of exact products
    assert "925" in lines[1]
    assert "695" in lines[2]


@pytest.mark.slow
def test_the_files_hold_every_published_kernel() -> None:
    for (gpu, acc), count in KERNELS.items():
        facts = published.facts_of(gpu, acc)
        assert len(facts) == count
        assert set(facts) <= {(m, n, k) for m in published.SIZES for n in published.SIZES for k in published.SIZES}
        mislabelled = sum(row["acc_actual"] == "f16" for row in facts.values())
        assert mislabelled == {("a100", "f32"): 56, ("rtx3090", "f32"): 33, ("h100", "f32"): 192}.get((gpu, acc), 1000)
    size = sum(path.stat().st_size for path in published.FACTS.iterdir())
    assert size < 1_000_000


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [("structure", "nearest"), ("changed", []), ("bk", None)],
    ids=["understated", "a change left out", "another tile"],
)
def test_a_broken_claim_is_noticed(
    field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = places.catalog().read_text().splitlines()
    number = next(
        number
        for number, line in enumerate(lines)
        if '"structure":"exact","changed":["' in line and '"bk":64' in line and '"gpu":"a100"' in line
    )
    record = json.loads(lines[number])
    if value is None:
        record |= {"bk": 32, "stages": 2, "smem_swizzle": [2, 3, 3], "unroll_k": False, "bake": []}
    else:
        record["origin"][field] = value
    lines[number] = json.dumps(record)
    changed = tmp_path / "kernels.jsonl"
    changed.write_text("\n".join(lines) + "\n")
    assert published.main(["--check", str(changed)]) == 1
    out = capsys.readouterr().out
    assert out.endswith("1 wrong claims\n")
    assert f"a100 {record['acc']} {record['m']}_{record['n']}_{record['k']}: claims " in out


def test_records_that_were_tuned_since_claim_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = [record for record in catalog.load() if record.key[:6] == ("a100", "f16", "tn", 4096, 4096, 64)]
    changed = tmp_path / "kernels.jsonl"
    origin = record.origin.model_copy(update={"structure": "modelled"})
    catalog.save([record.at(record.problem, origin=origin)], changed)
    assert published.main(["--check", str(changed)]) == 0
    assert "1 records: {'modelled, no claim': 1}" in capsys.readouterr().out


def test_missing_facts_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main(["--check", "--facts", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'a100_f16.jsonl.xz'}: ")
    (tmp_path / "a100_f16.jsonl.xz").write_bytes(b"no xz")
    assert published.main(["--check", "--facts", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
