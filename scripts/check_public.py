"""Runs public programs by ``cudal2gen check`` and compares what it finds with ``scripts/public_programs.json``.

    python scripts/check_public.py NVIDIA/cuda-samples DIR [NAME ...]

DIR is a checkout of the repository at the commit that the file names. Of a program with "edits" (smaller sizes) the
first source is checked as an edited copy. Prints a line per program; exit code 1 where an outcome differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("public_programs.json")


def outcome(program: dict[str, Any], checkout: Path) -> tuple[bool, str]:
    """Whether a program's findings are the expected ones, and a line about it."""
    sources = [str(checkout / source) for source in program["sources"]]
    stem = Path(sources[0]).stem
    include = program.get("nvcc_args", "").replace("-I", f"-I{checkout}/")
    with tempfile.TemporaryDirectory() as folder:
        if "edits" in program:
            sources[0] = _edited(Path(sources[0]), program["edits"], Path(folder))
        command = [sys.executable, "-m", "cudal2gen", "check", *sources, "--nvcc-args", include, "--json"]
        command += [*program.get("options", []), "--", *program.get("args", [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout)
    name = " ".join([stem, *program.get("args", [])])
    try:
        result = json.loads(done.stdout)
    except ValueError:
        return False, f"{name}: {done.stderr.strip().splitlines()[-1]}"
    rules = sorted({item["rule"] for item in result["findings"] if item["severity"] == "error"})
    launches = sum(kernel["launches"] for kernel in result["kernels"])
    line = f"{name}: {launches} launches, {result['seconds']} s, {', '.join(rules) or 'no errors'} {result['ending']}"
    same = rules == program["rules"] and not result["not_checked"]
    return same and result["exit_code"] == program.get("exit_code", 0), line.strip()


def _edited(source: Path, edits: list[list[str]], folder: Path) -> str:
    """The path of a copy in which each text of ``edits`` is replaced by the one beside it."""
    text = source.read_text()
    for old, new in edits:
        if old not in text:
            raise SystemExit(f"{source}: no {old!r} to replace; is it the commit of {PROGRAMS.name}?")
        text = text.replace(old, new)
    (folder / source.name).write_text(text)
    return str(folder / source.name)


def main() -> int:
    repository, folder, *names = sys.argv[1:]
    entry = next(item for item in json.loads(PROGRAMS.read_text())["repositories"] if item["repository"] == repository)
    different = 0
    for program in entry["programs"]:
        if names and Path(program["sources"][0]).stem not in names:
            continue
        same, line = outcome(program, Path(folder).resolve())
        different += not same
        print(f"{'as expected' if same else 'DIFFERENT  '}  {line}", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
