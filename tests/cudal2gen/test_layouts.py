"""Proves what a layout says of A and of B, which kernels take an A (k,m), and that packs and C agree with it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings

from cudal2gen import pack
from cudal2gen.cli.packing import Additions
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import IllegalRecord, Layout, Problem, Record, Sm80Multistage, revise, serving
from cudal2gen.kernel.launch import LaunchOperands, Sizes, rows_of
from cudal2gen.kernel.problem import AlongK, rows_along_k
from cudal2gen.validator import stress_shapes
from tests.cudal2gen import idle_runtime, packed
from tests.cudal2gen.c_interface import Answer, interface
from tests.cudal2gen.c_interface import Problem as PosedInC
from tests.cudal2gen.paths import RAGGED, once, ring, small, tensor, warps
from tests.cudal2gen.strategies import direct, records
from tests.draws import THOROUGH

LAYOUTS: Sequence[Layout] = get_args(Layout)
# A kernel for A (k,m) and B (k,n).
PREDICATED = small(acc="f32", layout="nt", padding="predicate", m=64, n=64, k=128)
BUILT_AHEAD = [PREDICATED]


def test_a_layout_names_b_then_a_as_a_column_major_blas_does() -> None:
    assert {layout: rows_along_k(layout).shapes for layout in LAYOUTS} == {
        "tn": ("m,k", "n,k"), "nn": ("m,k", "k,n"), "nt": ("k,m", "k,n"), "tt": ("k,m", "n,k"),
    }  # fmt: skip
    assert [rows_along_k(layout).layout for layout in LAYOUTS] == list(LAYOUTS)
    assert {layout: rows_of(layout, Sizes(1, 2, 3)) for layout in LAYOUTS} == {
        "tn": (3, 3), "nn": (3, 2), "nt": (1, 2), "tt": (1, 3),
    }  # fmt: skip


@settings(max_examples=200 if THOROUGH else 40)
@given(records)
def test_the_text_of_a_layout_depends_on_each_operand_alone(record: Record) -> None:
    """Tiles and boxes of an operand do not depend on the direction of the other one's rows."""
    if not record.along_k.a and not record.along_k.b:
        return
    other = AlongK(True, not record.along_k.b) if record.along_k.a else AlongK(False, not record.along_k.b)
    try:
        revised = revise(record, layout=other.layout, padding=getattr(record, "padding", None) or "none")
    except IllegalRecord:
        return
    of_a = [line for line in render(record).splitlines() if line.startswith(("using TileA", "using CopyA"))]
    assert of_a == [line for line in render(revised).splitlines() if line.startswith(("using TileA", "using CopyA"))]


@pytest.mark.parametrize(
    ("make", "changes", "rule"),
    [
        (direct, {}, "layout"),
        (direct, {"layout": "tt"}, "layout"),
        (small, {"batch": "grouped", "padding": "predicate"}, "layout"),
        (ring, {"batch": "grouped"}, "layout"),
        (ring, {"m": 197}, "m"),
        (ring, {"layout": "tt", "k": 325}, "k"),
        (ring, {"layout": "tt", "cluster": [4, 1], "bn": 16, "atom_n": 16}, "bn"),
        (once, {"n": 61}, "n"),
        (warps, {"m": 61}, "m"),
        (tensor, {"m": 61}, "m"),
        (small, {"layout": "tt", **RAGGED, "k": 245}, "k"),
    ],
)
def test_what_does_not_take_an_a_across_k(make: Any, changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(IllegalRecord) as refusal:
        make(**({"layout": "nt"} | changes))
    assert str(refusal.value).startswith(f"{rule}="), refusal.value


def test_rows_across_k_let_k_be_any_number() -> None:
    for make in (ring, once, warps, tensor):
        record = make(layout="nt", m=56, n=64, k=125)
        assert record.wider(Sizes(53, 61, 125)) == (56, 64, 125)
        assert any(shape.k % 8 for shape in stress_shapes(make(layout="nt", m=56, n=64, k=128)))
    paddings = [
        Sm80Multistage.least_padding(Problem(gpu="a100", acc="f32", layout=layout, m=61, n=59, k=245), 32, 32, 64)
        for layout in LAYOUTS
    ]
    assert paddings == ["pad", "pad", "predicate", "pad"]
    predicated = small(layout="nt", **RAGGED | {"k": 245})
    assert not serving.use(predicated, Sizes(64, 64, 245), LaunchOperands.packed("nt", Sizes(64, 64, 245))).copied[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h200", "rtx5090", "b200"])
def test_the_nearest_record_serves_a_weights_gradient_without_copies(gpu: str) -> None:
    for sizes in ((4096, 14336, 8192), (1024, 4096, 2040), (64, 64, 120)):
        m, n, k = sizes
        problem = Problem(gpu=gpu, acc="f32", layout="nt", m=m, n=n, k=k)
        match = catalog.find(problem)
        assert match.record.layout == "nt"
        assert "layout" in match.record.origin.changed
        assert "taking that of tn" in match.note or "stands in" in match.note
        use = serving.own_use(match.record, Sizes(*sizes), LaunchOperands.packed("nt", Sizes(*sizes)))
        assert use == (sizes, (False, False, False))


# --- packs and C ---


def test_a_pack_has_other_layouts_on_request() -> None:
    rows = [small(acc="f32"), small(acc="f32", layout="nn"), direct(acc="f32")]
    added = Additions(("nt", "bias_n")).added_to(rows)
    assert added[:3] == rows
    fused, transposed = ([record for record in added[3:] if bool(record.fusion) == own] for own in (True, False))
    assert [record.layout for record in fused] == ["tn", "nn", "tn"]
    assert transposed == [revise(rows[0], layout="nt")], (
        "one record for both layouts of B, and none for a family without nt"
    )


def test_any_layout_is_that_of_rows_of_a() -> None:
    assert Selection(layout="any").layouts == ("tn", "nn")
    assert Selection(layout="nt").layouts == ("nt",)
    assert {kind["layout"] for kind in Selection(layout="any", acc="f32").kinds} == {"tn", "nn"}


def test_c_has_the_layouts_of_python(tmp_path: Path) -> None:
    folder = packed.folder(packed.table([PREDICATED]), tmp_path / "pack", with_ptx=False)
    api, runtime = interface(folder / pack.facts.LIBRARY), idle_runtime.build(tmp_path)
    handle, answer = ctypes.c_void_p(), Answer()
    assert api.cudal2gen_pack_open(os.fsencode(folder), os.fsencode(runtime), ctypes.byref(handle)) == 0

    def code_of_layout(layout: int, lda: int = 0) -> int:
        question = PosedInC(1, layout, 64, 40, 101, 1)
        if not lda:
            return int(api.cudal2gen_query(handle, ctypes.byref(question), ctypes.byref(answer)))
        words = (ctypes.byref(question), 1 << 20, lda, 1 << 21, 40, 1 << 22, 40, None, None)
        return int(api.cudal2gen_matmul(handle, *words))

    assert [code_of_layout(LAYOUTS.index(layout)) for layout in LAYOUTS] == [-1, -1, 0, -1]
    assert code_of_layout(len(LAYOUTS)) == 1
    assert (code_of_layout(LAYOUTS.index("nt"), 64), code_of_layout(LAYOUTS.index("nt"), 56)) == (0, 1), (
        "a row of A has m elements, not k"
    )
    assert api.cudal2gen_pack_close(handle) == 0


# --- the share of a training step ---


@pytest.mark.torch
@pytest.mark.slow
def test_all_products_of_a_training_step_are_served(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(checkout / "scripts")])
    import training_step

    assert {name: sum(i * o * number for i, o, number in model.layers) // 10**8 for name, model in
            training_step.MODELS.items()} == {"1b": 12, "8b": 75, "70b": 695}  # fmt: skip
    tiny = training_step.Llama(256, 512, 128, 2, 1024)
    shares = training_step.shares(tiny, 248, "h200")
    flops = 2 * 248 * sum(i * o * number for i, o, number in tiny.layers)
    assert [(total, served) for total, served, _ in shares.values()] == [(flops, flops)] * 3
