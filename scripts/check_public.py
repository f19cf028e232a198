"""Runs public programs by ``cudal2gen check`` and compares what it finds with ``scripts/public_programs.json``.

    python scripts/check_public.py NVIDIA/cuda-samples DIR [NAME ...]

DIR is a checkout of the repository at the commit that the file names. Prints a line per program; exit code 1 where an
outcome differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("public_programs.json")


def outcome(program: dict[str, Any], checkout: Path) -> tuple[bool, str]:
    """Whether a program's findings are the expected ones, and a line about it."""
    sources = [str(checkout / source) for source in program["sources"]]
    include = program.get("nvcc_args", "").replace("-I", f"-I{checkout}/")
    command = [sys.executable, "-m", "cudal2gen", "check", *sources, "--nvcc-args", include, "--json"]
    done = subprocess.run(
        [*command, "--", *program.get("args", [])], capture_output=True, text=True, check=False, cwd=checkout
    )
    name = Path(sources[0]).stem
    try:
        result = json.loads(done.stdout)
    except ValueError:
        return False, f"{name}: {done.stderr.strip().splitlines()[-1]}"
    rules = sorted({item["rule"] for item in result["findings"] if item["severity"] == "error"})
    launches = sum(kernel["launches"] for kernel in result["kernels"])
    line = f"{name}: {launches} launches, {result['seconds']} s, {', '.join(rules) or 'no errors'} {result['ending']}"
    same = rules == program["rules"] and not result["not_checked"] and (bool(rules) or not result["ending"])
    return same, line.strip()


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
