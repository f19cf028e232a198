"""Proves that the rehearsal of a release finds places with another version, and files that differ between wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts import release

# The texts that state a version, and the names of files that do.
VERSION_FILE, CHANGELOG = (
    '"""A docstring."""\n\n__version__ = "1.2.0"\n',
    "# Changelog\n\n## 1.2.0 (a day)\n\n- x\n\n## 1.1.0\n",
)
NAMES = ("cudal2gen-1.2.0-py3-none-any.whl", "cudal2gen-1.2.0.tar.gz")


def test_every_place_states_its_version() -> None:
    stated = release.versions(VERSION_FILE, CHANGELOG, NAMES)
    assert stated == dict.fromkeys(("version.py", "CHANGELOG.md", *NAMES), "1.2.0")


@pytest.mark.parametrize(
    ("texts", "place", "version"),
    [
        ((VERSION_FILE.replace("1.2.0", "1.3.0"), CHANGELOG, NAMES), "version.py", "1.3.0"),
        (("", CHANGELOG, NAMES), "version.py", ""),
        ((VERSION_FILE, "# Changelog\n\n## Unreleased\n\n## 1.2.0\n", NAMES), "CHANGELOG.md", "Unreleased"),
        ((VERSION_FILE, "# Changelog\n", NAMES), "CHANGELOG.md", ""),
        ((VERSION_FILE, CHANGELOG, ("cudal2gen-1.1.0.tar.gz",)), "cudal2gen-1.1.0.tar.gz", "1.1.0"),
        ((VERSION_FILE, CHANGELOG, ("other-1.2.0.tar.gz",)), "other-1.2.0.tar.gz", ""),
    ],
)
def test_a_place_that_differs_is_named(texts: tuple[str, str, tuple[str, ...]], place: str, version: str) -> None:
    stated = release.versions(*texts)
    assert {name: text for name, text in stated.items() if text != "1.2.0"} == {place: version}


def test_this_checkout_states_one_version(checkout: Path) -> None:
    texts = [(checkout / name).read_text() for name in ("kernelproof/ground/version.py", "CHANGELOG.md")]
    assert len(set(release.versions(*texts, ()).values())) == 1


def test_files_that_wheels_do_not_have_alike_are_named(tmp_path: Path) -> None:
    contents = ({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"})
    for name, content in zip(("first", "second"), contents, strict=True):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for file, text in content.items():
                wheel.writestr(file, text)
    assert release.differences(tmp_path / "first", tmp_path / "second") == ["b", "c", "d"]
    assert release.differences(tmp_path / "first", tmp_path / "first") == []
