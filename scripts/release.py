"""Rehearses a release: builds the sdist and two wheels, from the sdist and from the checkout. It publishes nothing.

    python scripts/release.py          or: make release

dist/ then holds the sdist and its wheel. Exit code 1: version.py, the newest heading of CHANGELOG.md and the names of
the files state different versions, or the wheels differ.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions(version_file: str, changelog: str, names: Sequence[str]) -> dict[str, str]:
    """The version that each place states, "" if it states none. The places are the texts of version.py and
    CHANGELOG.md, and the names of an sdist and of wheels."""
    assignment = re.search(r'^__version__ = "(.*)"$', version_file, re.MULTILINE)
    heading = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    stated = {"version.py": assignment[1] if assignment else "", "CHANGELOG.md": heading[1] if heading else ""}
    for name in names:
        part = re.fullmatch(r"cudal2gen-([^-]+)(?:\.tar\.gz|-py3-none-any\.whl)", name)
        stated[name] = part[1] if part else ""
    return stated


def differences(first: Path, second: Path) -> list[str]:
    """The names of files that are not the same in two wheels."""
    contents = []
    for wheel in (first, second):
        with zipfile.ZipFile(wheel) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    names = sorted(contents[0].keys() | contents[1].keys())
    return [name for name in names if contents[0].get(name) != contents[1].get(name)]


def build(root: Path, folder: Path, *options: str) -> None:
    """Builds the sdist and the wheel of a checkout into a folder, or what the options of ``build`` choose."""
    command = [sys.executable, "-m", "build", *options, "--outdir", str(folder), str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rehearse(root: Path = ROOT) -> list[str]:
    """Builds dist/ anew; returns a line for each fault."""
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build(root, dist)  # the sdist, and the wheel of what it holds
    (wheel,) = dist.glob("*.whl")
    names = sorted(path.name for path in dist.iterdir())
    stated = versions((root / "kernelproof/ground/version.py").read_text(), (root / "CHANGELOG.md").read_text(), names)
    faults = []
    if len(set(stated.values())) > 1:
        lines = ", ".join(f"{place}: {version or 'none'}" for place, version in stated.items())
        faults.append(
            f"the versions differ ({lines}): state one version in kernelproof/ground/version.py and in the first "
            "heading of CHANGELOG.md"
        )
    with tempfile.TemporaryDirectory() as folder:
        build(root, Path(folder), "--wheel")
        (direct,) = Path(folder).glob("*.whl")
        if changed := differences(wheel, direct):
            faults.append(
                f"the wheels of sdist and checkout differ in {', '.join(changed[:5])} ({len(changed)} files):"
                " add them to the sdist's include in pyproject.toml, or remove what git does not track"
            )
    return faults


if __name__ == "__main__":
    sys.exit("\n".join(rehearse()) or 0)
