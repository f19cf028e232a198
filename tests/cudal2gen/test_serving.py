"""Proves which kernel serves a size without a record, and that every way to ask gives the same one."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.cli import choosing
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import GPUS, Layout, Problem, Record, Use, revise, serving
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.operators import dispatch
from cudal2gen.operators.plan_requests import Request
from cudal2gen.pack import Pack
from cudal2gen.results.choice import Table, TableKernel
from kernelproof.ground import chips
from tests.cudal2gen.strategies import multistage, wgmma

H200_F32 = ("h200", "f32", "tn")  # GPU, accumulator and layout


def problem(gpu: str, acc: str, layout: str, m: int, n: int, k: int) -> Problem:
    """A plain problem of these sizes m, n, k."""
    return Problem.model_validate({"gpu": gpu, "acc": acc, "layout": layout, "m": m, "n": n, "k": k})


def distance(m: int, n: int, k: int, record: Record, gpu: str = "h200") -> float:
    """The distance of a record from sizes on this GPU."""
    own = problem(gpu, record.acc, record.layout, m, n, k)
    return serving.distance(own, record.problem, (record.bm, record.bn))


# --- how far a record is ---


def test_a_distance_counts_octaves() -> None:
    """The distance adds up the octaves between both problems over m, n and k."""
    record = wgmma(m=1024, n=1024, k=1024)
    assert distance(1024, 1024, 1024, record) == 0
    assert distance(512, 1024, 1024, record) == pytest.approx(1)
    assert distance(512, 256, 1024, record) == pytest.approx(3)
    assert distance(1024, 1024, 2048, record) == pytest.approx(3), "a smaller record's octaves count three times"
    assert distance(2048, 1024, 1024, record) == pytest.approx(4), "and the tiles that it needs more of"
    other = problem("h200", record.acc, "nn", 1024, 1024, 1024)
    assert serving.distance(other, record.problem, (record.bm, record.bn)) == serving.OTHER_LAYOUT_OCTAVES


@pytest.mark.parametrize(
    ("extent", "nearest"),
    [(4097, 4096), (4095, 4096), (5, 8), (3, 4), (9, 8), (33, 64), (65, 128), (1, 1), (300, 512), (20000, 4096)],
)
def test_rows_take_the_record_that_holds_them_unless_it_is_far(extent: int, nearest: int) -> None:
    """``extent`` rows are served by the record of ``nearest`` rows. So 9 rows are served by that of 8, at 0.17 octaves
    which count three times, and not by that of 16, at 0.83 octaves; 33 rows are too many for the one tile of 32."""
    few = [wgmma(m=m, bm=max(16, m), atom_n=max(16, m), bn=128, swap_ab=True) for m in (1, 2, 4, 8, 16, 32, 64)]
    records = [*few, *(wgmma(m=m) for m in (128, 256, 512, 4096))]
    match = catalog.nearest(problem(*H200_F32, extent, 4096, 4096), records)
    assert match.record.m == extent
    assert match.note is None or f" {nearest}_4096_4096" in match.note


def test_a_gpu_is_as_far_as_its_sms_are_fewer() -> None:
    """Between models of one capability the ratio of SMs counts: log2(132 / 78) = 0.759 octaves from H20 to H200. The
    first stand-in of another capability is one octave away, the second one and a half."""
    assert chips.distance("h100", "h100") == 0
    assert chips.distance("h100", "h200") == chips.OTHER_MODEL
    assert chips.distance("h20", "h200") == pytest.approx(chips.OTHER_MODEL + 0.759, abs=1e-3)
    assert chips.distance("b200", "a100") == chips.OTHER_CAPABILITY
    assert chips.distance("rtx4090", "a100") == 1.5 > chips.distance("rtx4090", "rtx3090") == 1.0
    assert chips.distance("h200", "a100") == chips.OTHER_CAPABILITY + chips.WITHOUT_WGMMA
    assert chips.distance("rtx4090", "l40s") < 1
    for gpu, other in ((gpu, other) for gpu in GPUS for other in GPUS):
        assert (chips.distance(gpu, other) < chips.OTHER_CAPABILITY) == chips.related(gpu, other)
        assert set(GPUS[gpu].stand_ins) <= GPUS.keys() - {gpu}


@pytest.mark.parametrize("sms", [20, 84, 500])
def test_a_model_of_any_size_takes_its_relatives_records_first(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chips.GPUS, "rtx5080", GPUS["rtx5090"]._replace(sms=sms))
    assert chips.distance("rtx5080", "rtx5090") < min(
        chips.distance("rtx5080", other) for other in GPUS if not chips.related("rtx5080", other)
    )


def test_one_record_of_a_gpu_hides_none_of_its_relatives() -> None:
    sizes = (256, 1024, 4096)
    lent = [wgmma(m=m, n=n, k=4096) for m in sizes for n in sizes]
    own = revise(wgmma(m=4096, n=4096, k=4096, stages=3), gpu="h100")
    for m, n, gpu in ((4096, 4096, "h100"), (4090, 4090, "h100"), (256, 1024, "h200"), (1000, 1000, "h200")):
        match = catalog.nearest(problem("h100", "f32", "tn", m, n, 4096), [own, *lent])
        assert (match.note is not None and "that of h200" in match.note) == (gpu == "h200"), (m, n)
        assert getattr(match.record, "stages", 0) == (3 if gpu == "h100" else wgmma().stages)


def test_one_record_of_a_gpu_hides_few_of_its_stand_ins() -> None:
    lent = [multistage(m=size, n=size, k=1024) for size in (512, 1024, 4096)]
    own = revise(lent[1], gpu="rtx4090", stages=2)
    sources = {(1024, 1024): "", (900, 1000): "1024_1024_1024", (512, 512): "a100", (4096, 4096): "a100"}
    for (m, n), source in sources.items():
        match = catalog.nearest(problem("rtx4090", "f16", "tn", m, n, 1024), [own, *lent])
        assert source in (match.note or ""), (m, n)
        assert (match.note is not None and "a100" in match.note) == (source == "a100"), (m, n)


def test_a_library_is_the_gpus_own_records_among_those_of_its_relatives(tmp_path: Path) -> None:
    lent = [wgmma(m=m, n=4096, k=4096) for m in (256, 1024, 4096)]
    own = revise(lent[2], gpu="h100", stages=3)
    foreign = multistage(acc="f32", m=128, n=256, k=64)
    path = tmp_path / "kernels.jsonl"
    catalog.save([own, *lent, foreign], path)
    library = catalog.library("h100", "f32", "tn", path=path)
    assert [record.mnk for record in library] == ["256_4096_4096", "1024_4096_4096", "4096_4096_4096"]
    assert library[2] == own
    assert catalog.library("h200", "f32", "tn", path=path) == lent
    assert [record.family for record in catalog.library("b200", "f32", "nn", path=path)] == ["sm80_multistage"]
    lone = catalog.library("h100", "f32", "tn", "h200", path)
    assert [record.name for record in lone] == [record.name for record in lent]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "acc", "lender", "arch"),
    [
        ("l40s", "f16", "rtx4090", "sm_89"),
        ("l40s", "f32", "rtx4090", "sm_89"),
        ("h20", "f16", "h200", "sm_90a"),
    ],
)
def test_a_gpu_without_records_is_lent_some_and_says_whose(gpu: str, acc: str, lender: str, arch: str) -> None:
    match = catalog.find(problem(gpu, acc, "tn", 1024, 1024, 1024))
    assert match.note is not None
    assert f"that of {lender} 1024_1024_1024 stands in" in match.note
    assert "mma.sync" not in match.note, "at all of the tensor cores' rate"
    assert match.record.arch == arch
    assert match.record.origin.structure == "edited"
    library = catalog.library(gpu, acc, "tn")
    assert len(library) > 900
    assert {record.gpu for record in library} == {gpu}


# --- one answer, whoever asks ---


def planned_kernel(record: Record, own: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Use]:
    """The name of the kernel of ``matmul``'s plan with a pack that has only this record, and how it is launched. The
    pack and the device are stand-ins: nothing is compiled or bound."""
    pack = Pack(Path("nowhere"), {"gpu": own.gpu})
    pack.__dict__["table"] = Table(own.gpu, [TableKernel(record.name, record.model_dump(mode="json"))], [])
    chip = GPUS[own.gpu]
    card = chips.CardFacts(chip.title, own.gpu, chip.capability.number, chip.sms, chip.capability.smem_block_bytes)
    device: Any = SimpleNamespace(card=card, place=None)
    uses: list[Use] = []
    monkeypatch.setattr(dispatch.Packs, "open", lambda *_: None)
    monkeypatch.setattr(dispatch, "bind", lambda _device, _kernel, use, *_: uses.append(use))
    operands, sizes = LaunchOperands.packed(own.layout, serving.sizes_of(own)), serving.sizes_of(own)
    no_torch: Any = None
    request = Request(own, "", sizes, operands, (own.m, own.n), 0, no_torch)
    plan = dispatch.Dispatcher([pack], device, "kernel").plan(("key",), request)
    assert plan.on_kernel, plan.reason
    return plan.name, uses[0]


extents = st.one_of(st.integers(1, 20000), st.integers(1, 2500).map(lambda number: 8 * number), st.integers(1, 130))


@pytest.fixture(scope="module")
def empty_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder of results."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(
    gpu=st.sampled_from(sorted(GPUS)),
    acc=st.sampled_from(["f16", "f32"]),
    layout=st.sampled_from(get_args(Layout)),
    sizes=st.tuples(extents, extents, extents),
)
def test_the_command_line_explain_and_matmul_agree(
    empty_results: Path, gpu: str, acc: Any, layout: Any, sizes: tuple[int, int, int]
) -> None:
    own = problem(gpu, acc, layout, *sizes)
    selection = Selection(mnk=(own.mnk,), gpu=gpu, acc=acc, layout=layout)
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(StringIO()) as notes:
        patched.setenv("CUDAL2GEN_RESULTS", str(empty_results))
        patched.setenv("CUDAL2GEN_PACK", "")
        record = selection.record()
        answer = choosing.explanation(selection, None, ())
        name, use = planned_kernel(record, own, patched)
    assert record.problem == own, "the problem asked is the problem that runs"
    assert name == record.name
    copies = f"copies of {use.matrices}" if any(use.copied) else "no copies"
    assert answer["kernel"] == f"{record.name}, of {own.mnk}; launched as {use.launched.text}, {copies}"
    assert record.padded(serving.sizes_of(own)) == use.launched
    assert answer["remark"] is not None
    assert str(answer["remark"]) in notes.getvalue()
    assert ("padded to" in str(answer["remark"])) == (use.launched.text != own.mnk)
