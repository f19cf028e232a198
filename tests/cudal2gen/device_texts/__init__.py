"""Gives tests the text of a kernel as a language model might write it, and the text's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cudal2gen import kernel, places
from cudal2gen.generation import catalog
from cudal2gen.kernel import Origin, Problem, Record, device_text

# The problem that the texts of this folder compute, and where they say they are from.
PROBLEM = Problem(gpu="a100", acc="f32", layout="tn", m=64, n=48, k=64)
ORIGIN = Origin(source="a test", structure="modelled", changed=())
# How the launcher launches gemm.cu: its entry, tile, block and the order of its arguments.
LAUNCH: dict[str, Any] = {
    "entry": "gemm", "bm": 16, "bn": 16, "bk": 16, "stages": 1, "split_k": 1, "block": 32, "dynamic_smem": 0,
    "call": "tiles raster=plain", "baked": 0, "padding": "predicate",
}  # fmt: skip


def gemm(*edits: tuple[str, str]) -> str:
    """The CUDA text of a right kernel. ``edits``: pairs of a part of it and the text that replaces the part. Fails if
    the text lacks a part."""
    text = (Path(__file__).parent / "gemm.cu").read_text()
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after)
    return device_text.normal(text)


def record(text: str, problem: Problem = PROBLEM, **launch: Any) -> Record:
    """The record of a text, which is added to the user's texts. ``launch``: replaces entries of ``LAUNCH``."""
    catalog.keep_text(text, places.user_data() / "sources", device_text.digest(text))
    return kernel.of_text(problem, text, ORIGIN, LAUNCH | launch)
