"""Proves what the catalog contains, what it refuses, and that it is written as a whole."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from cudal2gen import places
from cudal2gen.generation import catalog
from cudal2gen.kernel import MmaSyncKernel, Problem, revise
from kernelproof.ground import errors
from kernelproof.ground.chips import GPUS
from tests.cudal2gen.strategies import multistage, wgmma

# The GPUs whose records the cost model has chosen.
MODELLED = ("rtx4090", "rtx5090", "b200")
# The GPUs and accumulators that have a record for each size of the grid.
KINDS = (("a100", "f16"), ("a100", "f32"), ("rtx3090", "f32"), *product(MODELLED, ("f16", "f32")))


@pytest.fixture(scope="module")
def records() -> list[catalog.Record]:
    """The shipped catalog."""
    return catalog.load(places.shipped("configs") / "kernels.jsonl")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A catalog of eight sizes."""
    path = tmp_path / "kernels.jsonl"
    catalog.save([multistage(m=m, n=n, k=k) for m in (128, 1024) for n in (128, 1024) for k in (64, 4096)], path)
    return path


def problem(m: int, n: int, k: int, gpu: str = "a100", acc: str = "f16", layout: str = "tn") -> Problem:
    """The problem of these sizes with fp16 operands."""
    return Problem.model_validate({"gpu": gpu, "acc": acc, "layout": layout, "m": m, "n": n, "k": k})


def test_every_line_is_legal_unique_sorted_and_in_normal_form(records: list[catalog.Record]) -> None:
    lines = (places.shipped("configs") / "kernels.jsonl").read_text().splitlines()
    assert lines == [catalog.dump(record) for record in records]
    keys = [record.key for record in records]
    assert keys == sorted(set(keys))


def test_the_grid_is_complete(records: list[catalog.Record]) -> None:
    sizes = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
    grid = {(m, n, k) for m in sizes for n in sizes for k in sizes}
    have = {kind: {(r.m, r.n, r.k) for r in records if (r.gpu, r.acc, r.layout) == (*kind, "tn")} for kind in KINDS}
    decoding = {(r.m, r.n, r.k) for r in records if (r.gpu, r.acc) == ("h200", "f32")} - grid
    assert len(decoding) == 57
    for kind in KINDS:
        assert have[kind] - grid == (decoding if kind == ("b200", "f32") else set())
        assert have[kind] >= grid


def test_a_gpu_whose_records_are_modelled_has_few_kernels(records: list[catalog.Record]) -> None:
    """``scripts/modelled.py`` prefers kernels that serve many problems, since each has to be built, proven and
    packed."""
    for gpu in MODELLED:
        own = [record for record in records if record.gpu == gpu]
        assert {record.origin.source for record in own if record.origin.structure != "tuned"} == {"timing model"}
        assert len({record.name for record in own}) <= 300


def test_origins_are_what_they_may_be(records: list[catalog.Record]) -> None:
    free = {"g2s_cols", "g2s_slot", "smem_swizzle", "smem_swizzle_c", "min_blocks", "r2s_bytes", "c_batch"}
    for record in records:
        if record.origin.structure == "exact":
            assert set(record.origin.changed) <= free


def test_k_is_baked_only_where_it_was_published(records: list[catalog.Record]) -> None:
    a100 = [record for record in records if (record.gpu, record.acc) == ("a100", "f16")]
    baked = [record for record in a100 if isinstance(record, MmaSyncKernel) and record.bake]
    assert len(baked) == 85
    assert all(record.bake == ("k",) for record in baked)


def test_a_problem_of_the_catalog_finds_its_own_record(records: list[catalog.Record]) -> None:
    for record in records[::97]:
        match = catalog.find(record.problem, places.shipped("configs") / "kernels.jsonl")
        assert match.record == record
        assert match.note is None


def test_off_the_grid_the_nearest_record_computes_the_problem(small: Path) -> None:
    match = catalog.find(problem(100, 600, 64), small)
    assert (match.record.mnk, match.record.predicated) == ("100_600_64", True)
    assert match.note == "no record for a100 f16 tn 100_600_64; taking that of 128_1024_64, predicated"
    assert match.record.origin.changed == ("m", "n", "padding")
    beyond = catalog.find(problem(5120, 128, 64), small)
    assert (beyond.record.mnk, beyond.record.predicated) == ("5120_128_64", False)
    assert beyond.note == "no record for a100 f16 tn 5120_128_64; taking that of 1024_128_64"
    odd = catalog.find(problem(100, 200, 63), small)
    assert odd.record.caller_pads
    assert odd.note is not None
    assert odd.note.endswith("taking that of 128_1024_64, padded to 128_256_64 by copies of A, B and D")


@pytest.mark.slow
def test_the_nearest_lines_give_the_record_that_all_lines_give(
    records: list[catalog.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "FIRST_LINES", 1)
    drawn = random.Random(5)
    path = places.shipped("configs") / "kernels.jsonl"
    for gpu in GPUS:
        m, n, k = (int(2 ** drawn.uniform(0, 15)) for _ in "mnk")
        question = problem(m, n, k, gpu, drawn.choice(("f16", "f32")), drawn.choice(("tn", "nn")))
        assert catalog.find(question, path) == catalog.nearest(question, records), question.title


def test_another_gpu_or_layout_takes_the_record_with_that_field_changed(small: Path) -> None:
    match = catalog.find(problem(128, 128, 64, gpu="h200", layout="nn"), small)
    assert (match.record.gpu, match.record.layout, match.record.mnk) == ("h200", "nn", "128_128_64")
    assert match.note is not None
    assert match.note.endswith("that of a100 tn 128_128_64 stands in, by mma.sync at 62% of h200's tensor cores")


def test_h100_takes_the_records_of_h200_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    catalog.save([multistage(acc="f32", m=m) for m in (128, 4096)] + [wgmma(m=4096), wgmma(m=256)], path)
    match = catalog.find(problem(4096, 4096, 4096, gpu="h100", acc="f32"), path)
    assert match.record.decisions() == revise(wgmma(), gpu="h100").decisions()
    assert match.record.name == wgmma().name, "the same kernel"
    assert match.note == ("no record for h100 f32 tn 4096_4096_4096; that of h200 4096_4096_4096 stands in")
    # Records off the grid also precede all records of another architecture. An A100 never gets one of these.
    near = catalog.find(problem(128, 4096, 4096, gpu="h100", acc="f32"), path)
    assert near.note is not None
    assert "that of h200 256_4096_4096 stands in" in near.note
    assert catalog.find(problem(256, 4096, 4096, acc="f32"), path).record.family == "sm80_multistage"
    nn = catalog.find(problem(256, 4096, 4096, gpu="h100", acc="f32", layout="nn"), path)
    assert (nn.record.layout, nn.record.family) == ("nn", "sm90_wgmma")
    assert nn.note is not None
    assert nn.note.endswith("that of h200 tn 256_4096_4096 stands in")


def test_a_gpu_that_the_record_does_not_fit_takes_the_nearest_that_does(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    catalog.save([multistage(m=128, n=128, stages=5), multistage(m=256, n=256, stages=2)], path)
    match = catalog.find(problem(128, 128, 4096, gpu="rtx3090"), path)
    assert (match.record.gpu, match.record.stages) == ("rtx3090", 2)  # type: ignore[union-attr]
    assert match.note is not None
    assert "that of a100 256_256_4096 stands in" in match.note


def test_no_record_of_the_accumulator_is_an_error(small: Path) -> None:
    with pytest.raises(catalog.CatalogError, match="no record becomes legal for a100 f32 tn 128_128_64"):
        catalog.find(problem(128, 128, 64, acc="f32"), small)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[: len(line) // 2], r":2: not JSON"),
        (lambda line: line.replace('"stages":3', '"stages":99'), r":2: stages=99: input should be less than"),
        (
            lambda line: line.replace('"stages":3', '"stages":"three"'),
            r':2: stages="three": input should be a valid int',
        ),
        (lambda line: line.replace('"stages"', '"stagez"'), r":2: stages: field required; stagez: extra inputs"),
        (lambda line: line.replace('"bm":128', '"bm":100'), r":2: bm=100: must be a multiple of 16\*mma_repeat"),
        (lambda line: "[1, 2]", r":2: "),
    ],
)
def test_a_bad_line_is_named_by_file_line_field_and_rule(small: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    # ``spoil`` changes the text of the second line.
    lines = small.read_text().splitlines()
    lines[1] = spoil(lines[1])
    small.write_text("\n".join(lines) + "\n")
    with pytest.raises(catalog.CatalogError, match=message) as caught:
        catalog.load(small)
    assert str(small) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lines_of_other_gpus_are_not_parsed(small: Path) -> None:
    catalog.save([*catalog.load(small), wgmma(m=256), multistage(gpu="rtx3090", stages=2)], small)
    lines = small.read_text().splitlines()
    loose = json.dumps(dict(reversed(json.loads(lines[-2]).items())))
    small.write_text("\n".join([*lines[:-2], loose, lines[-1].replace('"stages":2', '"stages":99')]))
    assert [record.gpu for record in catalog.load(small, ["h200"])] == ["h200"]
    assert {record.gpu for record in catalog.load(small, ["a100"])} == {"a100"}
    assert len(catalog.load(small, ["h200", "a100"])) == len(lines) - 1
    with pytest.raises(catalog.CatalogError, match=f":{len(lines)}: stages=99"):
        catalog.load(small, ["rtx3090"])
    small.write_text("\n".join([*lines[:-1], lines[-1].replace("rtx3090", "rtx390")]))
    with pytest.raises(catalog.CatalogError, match=f":{len(lines)}: gpu=rtx390"):
        catalog.load(small, ["h200"])


def test_a_duplicate_is_refused(small: Path) -> None:
    lines = small.read_text().splitlines()
    small.write_text("\n".join([*lines, lines[0]]) + "\n")
    with pytest.raises(catalog.CatalogError, match=":9: duplicate of line 1: a100 f16 tn 128_128_64"):
        catalog.load(small)


def test_an_absent_catalog_says_so(tmp_path: Path) -> None:
    with pytest.raises(catalog.CatalogError, match="no catalog at"):
        catalog.load(tmp_path / "none.jsonl")


def test_put_replaces_the_problems_record_and_keeps_the_order(small: Path) -> None:
    changed = revise(multistage(m=1024, n=128, k=64), stages=4)
    before = catalog.load(small)
    assert catalog.put(changed, small) == small
    after = catalog.load(small)
    assert len(after) == len(before)
    assert catalog.find(changed.problem, small).record == changed
    assert [record.key for record in after] == [record.key for record in before]
    catalog.put(revise(changed, m=2048), small)
    assert len(catalog.load(small)) == len(before) + 1


def test_an_edit_parses_its_own_line_and_those_out_of_normal_form(small: Path) -> None:
    changed = multistage(m=1024, n=128, k=64, stages=4)
    lines = small.read_text().splitlines()
    illegal = lines[0].replace('"stages":3', '"stages":99')
    loose = json.dumps(dict(reversed(json.loads(lines[1]).items())))
    small.write_text("\n".join([*reversed(lines[2:]), loose, illegal]))
    catalog.put(changed, small)
    own = next(place for place, line in enumerate(lines) if line.startswith(catalog.dump_problem(changed.problem)))
    assert small.read_text().splitlines() == [illegal, *lines[1:own], catalog.dump(changed), *lines[own + 1 :]]
    for spoilt, message in (
        (loose.replace('"stages": 3', '"stages": 99'), ":2: stages=99"),
        (loose, ":2: duplicate of"),
    ):
        before = "\n".join([lines[1], spoilt])
        small.write_text(before)
        with pytest.raises(catalog.CatalogError, match=message):
            catalog.put(changed, small)
        assert small.read_text() == before


def test_records_of_the_same_sizes_are_sorted_by_their_other_fields(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    records = [multistage(acc="f32", **fields) for fields in ({"ab": "bf16"}, {}, {"batch": "strided"})]
    for record in (*records, *records[:2]):
        catalog.put(record, path) if path.is_file() else catalog.save([record], path)
    assert catalog.load(path) == sorted(records, key=lambda record: record.key)


def test_normal_form_is_only_the_fast_way(small: Path) -> None:
    loose = [json.dumps(json.loads(line)) for line in small.read_text().splitlines()]
    small.write_text("\ufeff" + "\n".join(loose) + "\n")
    match = catalog.find(problem(128, 128, 64), small)
    assert (match.record.mnk, match.note) == ("128_128_64", None)
    small.write_text("\n".join([*loose, loose[0]]))
    with pytest.raises(catalog.CatalogError, match="duplicate of line 1"):
        catalog.find(problem(128, 128, 64), small)


def test_a_duplicate_line_is_noticed_when_its_problem_is_looked_up(small: Path) -> None:
    small.write_text(small.read_text() + small.read_text().splitlines()[0] + "\n")
    with pytest.raises(catalog.CatalogError, match="duplicate of line 1"):
        catalog.find(problem(128, 128, 64), small)


@pytest.mark.slow
def test_edits_at_the_same_time_are_all_kept(small: Path) -> None:
    program = "import sys; from pathlib import Path; from cudal2gen.generation import catalog;"
    program += "from tests.cudal2gen.strategies import multistage;"
    program += "catalog.put(multistage(m=128 * int(sys.argv[2]), n=256, k=64), Path(sys.argv[1]))"
    editors = [subprocess.Popen([sys.executable, "-c", program, str(small), str(m)]) for m in range(1, 9)]
    assert [editor.wait(300) for editor in editors] == [0] * 8
    assert len(catalog.load(small)) == 8 + 8


def test_an_edit_goes_through_a_link_and_keeps_the_mode(small: Path, tmp_path: Path) -> None:
    small.chmod(0o640)  # a temporary file has 0o600, a new catalog 0o644
    link = tmp_path / "link.jsonl"
    link.symlink_to(small)
    catalog.put(multistage(m=2048, n=128, k=64), link)
    assert link.is_symlink()
    assert len(catalog.load(small)) == 9
    assert small.stat().st_mode & 0o777 == 0o640


@pytest.mark.slow
def test_the_first_edit_copies_the_shipped_catalog(
    records: list[catalog.Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package's own files are not edited."""
    shipped = places.catalog()
    before = shipped.read_bytes()
    monkeypatch.setattr(places, "editable_catalog", lambda: tmp_path / "home" / "kernels.jsonl")
    changed = revise(records[0], origin={"source": "test", "structure": "tuned", "changed": []})
    target = catalog.put(changed)
    assert target == tmp_path / "home" / "kernels.jsonl"
    assert catalog.load(target) == [changed, *records[1:]]
    assert target.stat().st_mode & 0o777 == 0o644
    assert shipped.read_bytes() == before


def test_a_missing_list_of_problems_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(catalog.CatalogError, match=r"no list of problems at .*/none\.jsonl; 'cudal2gen tune-model'"):
        catalog.load_problems(tmp_path / "none.jsonl")


def test_a_failed_save_leaves_the_old_catalog(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = small.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(errors.Failure, match="No space left on device; it is as it was"):
        catalog.put(multistage(m=1024, n=128, k=64, stages=4), small)
    assert small.read_bytes() == before
    assert {path.name for path in small.parent.iterdir()} == {"kernels.jsonl", ".kernels.jsonl.lock"}, "no scratch file"
