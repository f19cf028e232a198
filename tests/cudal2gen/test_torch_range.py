"""Proves that extras, pages and doctor state the same range of torch, and that doctor reports an old CUDA or driver."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudal2gen import torch_range
from cudal2gen.cli import machine
from cudal2gen.launch import gpu
from kernelproof.ground.chips import CardFacts
from scripts import torch_matrix


def short(version: str) -> str:
    """A version without a last .0, as it is written in ranges."""
    return version.removesuffix(".0")


def test_extras_and_pages_state_the_range(checkout: Path) -> None:
    extras = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = [word for words in extras.values() for word in words if re.match(r"torch\b", word)]
    assert stated == [f"torch>={short(torch_range.OLDEST)}"] * 2
    page = (checkout / "docs" / "packs.md").read_text()
    assert f"torch {short(torch_range.OLDEST)} to {short(torch_range.NEWEST)}" in page
    assert f"driver {torch_range.DRIVER}" in page
    pinned = re.search(r"^torch==(.*)$", (checkout / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert torch_range.remark_on_torch(pinned[1]) == ""
    assert f"driver {torch_range.CUDAS[12].driver}" in page
    assert torch_range.PTXAS in page


@pytest.mark.parametrize(
    ("version", "cuda", "ok", "words"),
    [
        ("2.9.1", "13.0", False, "older than"),
        (torch_range.OLDEST, "13.0", True, "for CUDA 13.0"),
        ("2.11.0", "12.8", False, "nvidia-cuda-runtime==13.0.*"),
        ("2.13.0+cpu", None, True, "without CUDA"),
        (torch_range.NEWEST, "13.2", True, "for CUDA 13.2"),
        ("2.99.0", "13.0", True, "newer than"),
    ],
)
def test_doctor_places_torch(
    version: str, cuda: str | None, ok: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
    distribution = SimpleNamespace(version=version, locate_file=lambda _: tmp_path / "version.py")
    monkeypatch.setattr(metadata, "distribution", lambda _: distribution)
    check = machine._torch({})
    assert (check.ok, words in check.detail) == (ok, True), check.detail


def test_doctor_checks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are CUDA's: 12080 is 12.8. Without a card the check fails, whether or not a driver's file or library is
    there."""
    card = CardFacts.of("NVIDIA H200", (9, 0), 132, 227 << 10)
    monkeypatch.setattr(gpu, "cards", lambda: [card])
    for version, ok in ((12080, False), (13000, True), (13020, True)):
        monkeypatch.setattr(gpu, "driver_cuda", lambda version=version: version)
        assert machine._cards({}).ok == ok
    assert "12.8" in torch_range.remark_on_driver(12080)
    monkeypatch.setattr(gpu, "cards", list)
    for has_file, has_library in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(Path, "exists", lambda _, has_file=has_file: has_file)
        monkeypatch.setattr(gpu, "has_driver", lambda has_library=has_library: has_library)
        check = machine._cards({})
        assert not check.ok, "a driver that lists no device"
        assert ("libcuda" in check.detail) == (has_file or has_library)


def test_doctor_checks_nvmath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.0.0")
    assert machine._vendor().ok

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert not machine._vendor().ok


def test_the_matrix_runs_the_tests_of_operators() -> None:
    names = {Path(path).name for path in torch_matrix.tests()}
    assert {"test_operators.py", "test_inductor.py", "test_native_calls.py", "test_plugins.py"} <= names
    assert not {"test_torch_range.py", "test_kernel.py"} & names
