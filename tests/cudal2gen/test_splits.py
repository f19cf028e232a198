"""Proves where published kernels split k, and that their published structures stay reachable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog, published
from cudal2gen.kernel import Record
from cudal2gen.timing import model
from scripts import splits
from tests.commands import run
from tests.cudal2gen.strategies import multistage

Pairs = list[tuple[Record, Record | None]]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """Each published record that was replaced, and the one that replaces it; None if there is none."""
    own = {record.problem: record for record in catalog.load(gpus=["a100"])}
    return [(record, own.get(record.problem)) for record in published.replaced()]


def tall_record(**fields: object) -> Record:
    """A record of few tiles and a large k, whose structure was published."""
    published_exactly = {"source": "test", "structure": "exact", "changed": []}
    return multistage(**({"m": 128, "n": 128, "k": 16384, "origin": published_exactly} | fields))


def test_a_replaced_record_differs_from_the_published_one_by_its_slices(pairs: Pairs) -> None:
    assert Counter((record.gpu, record.acc) for record, _ in pairs) == {("a100", "f16"): 40, ("a100", "f32"): 40}
    for before, after in pairs:
        assert after is not None
        assert (before.origin.structure, after.origin.structure) == ("exact", "modelled")
        assert after.origin.source == f"{before.origin.source}, {splits.MODEL_SOURCE}"
        assert (before.split_k, after.split_k in splits.SLICES) == (1, True)
        assert after.at(after.problem, split_k=1, origin=before.origin) == before
        assert model.estimate(before).us >= splits.MIN_GAIN * model.estimate(after).us
        partials = after.m * after.n * splits.PARTIAL_BYTES * after.split_k
        assert partials <= splits.L2_SHARE * after.target.rates.l2_size


def test_every_published_structure_is_there_once() -> None:
    structures = published.structures()
    assert [record.key for record in structures] == sorted({record.key for record in structures})
    assert {record.origin.structure for record in structures} == set(published.CLAIMS)
    kinds = Counter((record.gpu, record.acc) for record in structures)
    assert kinds == {("a100", "f16"): 1000, ("a100", "f32"): 1000, ("rtx3090", "f32"): 1000}
    exact = Counter((record.gpu, record.acc) for record in structures if record.origin.structure == "exact")
    assert exact["a100", "f16"] >= 950


def test_a_published_structure_is_selected_by_its_origin(pairs: Pairs, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pairs[0]
    assert Selection(mnk=(before.mnk,)).record() == after
    chosen = Selection(mnk=(before.mnk,), origin="published")
    assert (chosen.record(), chosen.options) == (before, f"--mnk {before.mnk} --where origin=published")
    off_the_grid = Selection(mnk=("60_64_8192",), origin="published").record()
    assert (off_the_grid.mnk, off_the_grid.split_k) == ("60_64_8192", 1)
    assert "taking that of 64_64_8192" in capsys.readouterr().err
    every = Selection(everything=True, origin="published").records()
    assert {record.split_k for record in every} == {1}
    assert len(every) == 1000


@pytest.mark.slow
def test_the_commands_take_the_origin(pairs: Pairs) -> None:
    mnk = pairs[0][0].mnk
    lines = [run("list", "--gpu", "a100", "--acc", "f16", "--mnk", mnk, *words).stdout.split() for words in
             ((), ("--origin", "published"))]  # fmt: skip
    assert [line[-1] for line in lines] == ["modelled", "exact"]
    assert "split_k" not in run("render", "--mnk", mnk, "--origin", "published").stdout
    refused = run("bench", "--mnk", mnk, "--origin", "published", "--where", "records=h200")
    assert (refused.returncode, "--origin published" in refused.stderr) == (2, True)
    none = run("build", "--all", "--gpu", "h200", "--origin", "published")
    assert (none.returncode, "no records for h200" in none.stderr) == (2, True)


def test_a_kernel_that_is_faster_than_the_vendors_somewhere_keeps_its_structure() -> None:
    record = tall_record()
    slower, faster = {record.mnk: 0.9}, {record.mnk: 1.1}
    assert splits.slower_than_vendor([record], [slower, slower]) == [record]
    assert splits.slower_than_vendor([record], [slower, faster]) == []
    assert splits.slower_than_vendor([record], [slower, {}]) == []
    assert splits.slower_than_vendor([tall_record(split_k=2)], [slower, slower]) == []
    nearest = tall_record(origin={"source": "test", "structure": "nearest", "changed": ["acc"]})
    assert splits.slower_than_vendor([nearest], [slower, slower]) == [], "the published speed is another kernel's"


def test_splits_of_one_accumulator_are_written_without_the_others(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fp32 splits are chosen anew, all but one; those with fp16 sums stay."""
    own, beside = tmp_path / "kernels.jsonl", tmp_path / "records.jsonl"
    catalog.save([after for _, after in pairs if after is not None], own)
    catalog.save([before for before, _ in pairs], beside)
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(own))
    monkeypatch.setattr(published, "replaced_path", lambda: beside)
    f32 = [splits.Split(before, after, (2.0, 2.0)) for before, after in pairs if after and after.acc == "f32"]
    splits.write(f32[1:], {"f32"})
    assert [record.split_k == 1 for record in catalog.load(own)].count(True) == 1
    assert f32[0].published in catalog.load(own)
    assert f32[0].published not in catalog.load(beside)
    assert len(catalog.load(beside)) == len(pairs) - 1


def test_the_split_that_gains_most_by_the_less_favourable_form_is_chosen() -> None:
    record = tall_record()

    def form(*us: float) -> splits.Modelled:
        times = dict(zip((1, *splits.SLICES), us, strict=True))
        return lambda item: times[item.split_k]

    halves, fast = form(100, 80, 60, 50, 40), form(100, 70, 65, 85, 95)
    chosen = splits.best_split(record, [halves, fast])
    assert chosen is not None
    assert (chosen.split.split_k, chosen.gains, chosen.published) == (4, (100 / 60, 100 / 65), record)
    assert splits.best_split(record, [halves, form(100, 92, 93, 94, 95)]) is None


def test_partial_sums_that_exceed_the_l2_are_not_proposed() -> None:
    slices = [record.split_k for record in splits.splits(multistage(m=1024, n=1024, k=16384))]
    assert slices == [2, 4], "of 1024 x 1024 sums of 4 bytes each; 20 MB of the A100's L2 hold four"
    assert [record.split_k for record in splits.splits(tall_record())] == list(splits.SLICES)


def test_recorded_gains_are_of_the_fastest_tile(tmp_path: Path) -> None:
    device = '{"device_capa": [8, 0]}\n'
    names = "mat1_dtype,mat2_dtype,m,n,k,mat1_stride_0,mat1_stride_1,mat2_stride_0,mat2_stride_1,choice,feedback\n"
    product = "torch.float16,torch.float16,64,64,16384,16384,1,64,1"
    shapes = [(bm, bk) for bm in (16, 32, 64) for bk in (16, 32, 64, 128)]
    tiles = [
        f"{product},type=triton_BLOCK-M={bm}_BLOCK-K={bk}_BLOCK-N=64_numstages=4_numwarps=4,{0.2 + index / 10}\n"
        for index, (bm, bk) in enumerate(shapes)
    ]
    (tmp_path / "a.txt").write_text(device + names + "".join(tiles) + f"{product},extern_mm,0.05\n")
    (gain,) = splits.recorded_gains(tmp_path, "a100")
    assert gain.over_vendor == pytest.approx(4.0)
    assert gain.modelled_gain > 2.0
