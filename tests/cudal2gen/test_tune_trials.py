"""Proves that the trials of each environment have a store of their own, and where each environment makes them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import places, results
from cudal2gen.cli.searching import Trials
from cudal2gen.launch import gpu
from cudal2gen.tuner import executor

RECORDED = (Path("recorded.jsonl"),)


@pytest.mark.parametrize(("chosen", "recordings", "file"), [
    *product(("gpu", "model"), ((), RECORDED), (None, Path("own.jsonl"))),
])  # fmt: skip
def test_trials_of_different_environments_are_kept_apart(
    chosen: Any, recordings: tuple[Path, ...], file: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("CUDAL2GEN_BUILD_DIR", str(tmp_path / "build"))
    trials = Trials(chosen, file, recordings)
    environment = "replay" if recordings else chosen
    assert trials.environment == environment
    tuner = places.build_dir() / "tuner"
    stores = {
        "gpu": results.store("trials"), "model": tuner / "modelled-trials.jsonl",
        "replay": tuner / "replayed-trials.jsonl",
    }  # fmt: skip
    assert len(set(stores.values())) == 3
    assert trials.store == (file or stores[environment])
    assert trials.transcript == trials.store.parent / f"{trials.store.stem}-llm.jsonl"


def test_a_model_is_asked_in_this_process_and_a_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[int] = []

    def connect(device: int) -> Any:
        connected.append(device)
        raise gpu.GpuError("none")

    monkeypatch.setattr(gpu, "connect", connect)
    modelled = Trials("model").executor([], 1)
    assert isinstance(modelled, executor.InProcess)
    assert connected == []
    with pytest.raises(gpu.GpuError):
        Trials("gpu", device=2).executor([], 1)
    assert connected == [2]
