"""Runs public programs by ``kernelproof check`` and compares the findings with ``scripts/public_programs.json``.

    python scripts/check_public.py NVIDIA/cuda-samples DIR [NAME ...]

DIR is a checkout of the repository at the commit that the JSON file names. A program may have these keys in that file:

- "edits": smaller sizes, as texts to replace by file; the program is then checked in a copy of its folder;
- "modules": files that the program loads, each with the source that is compiled for it;
- "variants": the arguments of each of several runs;
- "rules": the rules that each run violates.

Prints a line for each run. Exit code 1 if an outcome differs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("public_programs.json")


def outcomes(program: dict[str, Any], flags: str, checkout: Path) -> Iterator[tuple[bool, str]]:
    """Whether the findings of each run of a program are the expected ones, with a line that says so."""
    sources = [checkout / source for source in program["sources"]]
    folder = sources[0].parent
    includes = f"{flags} {program.get('nvcc_args', '')}".replace("-I", f"-I{checkout}/") + f" -I{folder}"
    with tempfile.TemporaryDirectory() as scratch:
        if "edits" in program or "modules" in program:
            copy = Path(scratch, folder.name)
            shutil.copytree(folder, copy)
            _edit(copy, program.get("edits", {}))
            _compile(copy, program.get("modules", {}), includes)
            sources = [copy / path.relative_to(folder) if path.is_relative_to(folder) else path for path in sources]
        for variant in program.get("variants", [program.get("args", [])]):
            yield _outcome(program, sources, includes, variant)


def _outcome(program: dict[str, Any], sources: list[Path], includes: str, arguments: list[str]) -> tuple[bool, str]:
    """Whether a run's findings are the expected ones, with a line that says so."""
    command = [sys.executable, "-m", "kernelproof", "check", *map(str, sources), "--nvcc-args", includes, "--json"]
    command += [*program.get("options", []), "--", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=sources[0].parent)
    name = " ".join([sources[0].stem, *arguments])
    try:
        result = json.loads(process.stdout)
    except ValueError:
        return False, f"{name}: {process.stderr.strip().splitlines()[-1]}"
    rules = sorted({item["rule"] for item in result["findings"] if item["severity"] == "error"})
    launches = sum(kernel["launches"] for kernel in result["kernels"])
    line = f"{name}: {launches} launches, {result['seconds']} s, {', '.join(rules) or 'no errors'} {result['ending']}"
    expected = program.get("rules", [])
    if isinstance(expected, dict):
        expected = expected.get(" ".join(arguments), [])
    as_expected = rules == expected and bool(result["not_checked"]) == program.get("refused", False)
    return as_expected and result["program_exit_code"] == program.get("exit_code", 0), line.strip()


def _edit(folder: Path, edits: dict[str, list[list[str]]]) -> None:
    """Replaces texts in files of a folder."""
    for name, replacements in edits.items():
        text = (folder / name).read_text()
        for old, new in replacements:
            if old not in text:
                raise SystemExit(f"{name}: no {old!r} to replace; is it the commit of {PROGRAMS.name}?")
            text = text.replace(old, new)
        (folder / name).write_text(text)


def _compile(folder: Path, modules: dict[str, str], includes: str) -> None:
    """Compiles sources of a folder to the files that a program loads: PTX, or fat binaries of it."""
    for name, source in modules.items():
        kind = "-ptx" if name.endswith("ptx") else "-fatbin"
        command = ["nvcc", kind, "-arch=compute_80", *includes.split(), "-o", folder / name, folder / source]
        subprocess.run(command, check=True)


def main() -> int:
    repository, folder, *names = sys.argv[1:]
    entry = next(item for item in json.loads(PROGRAMS.read_text())["repositories"] if item["repository"] == repository)
    different = 0
    for program in entry["programs"]:
        if names and Path(program["sources"][0]).stem not in names:
            continue
        for as_expected, line in outcomes(program, entry["nvcc_args"], Path(folder).resolve()):
            different += not as_expected
            print(f"{'as expected' if as_expected else 'DIFFERENT  '}  {line}", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
