"""Proves that the script hides a system CUDA toolkit from a command, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Prints the programs that are found, and CUDA's variables.
PROBE = 'for name in nvcc ptxas other python3; do command -v $name > /dev/null && echo $name; done; echo "$CUDA_HOME"; '


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """PATH begins with a folder that holds CUDA's programs, another one and Python."""
    for name in ("nvcc", "ptxas", "other"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    return os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_HOME": str(tmp_path)}


def run_without_cuda(checkout: Path, environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """Executes a command by the script."""
    script = checkout / "scripts/without_cuda"
    return subprocess.run([script, *command], capture_output=True, text=True, env=environment, check=False)


def test_programs_and_variables_are_hidden_and_their_neighbours_stay(
    checkout: Path, environment: dict[str, str]
) -> None:
    visible = subprocess.run(["sh", "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    assert {"nvcc", "ptxas", "other", "python3", environment["CUDA_HOME"]} <= set(visible.stdout.splitlines())
    done = run_without_cuda(checkout, environment, "sh", "-c", f"{PROBE} exit 7")
    assert (done.stdout.splitlines(), done.returncode) == (["other", "python3", ""], 7)


def test_a_python_next_to_nvcc_keeps_its_own_path(checkout: Path, environment: dict[str, str], tmp_path: Path) -> None:
    done = run_without_cuda(checkout, environment, "python3", "-c", "import sys; print(sys.executable)")
    assert done.stdout.strip() == str(tmp_path / "python3")


def test_the_toolkits_folder_is_empty_where_mounts_are_permitted(checkout: Path, tmp_path: Path) -> None:
    mount = ["unshare", "-m", "mount", "--bind", str(tmp_path), str(tmp_path)]
    permitted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    contents = {path.name for folder in Path("/usr/local").glob("cuda*") for path in folder.iterdir()}
    command = 'for folder in /usr/local/cuda*; do [ ! -d "$folder" ] || ls -A "$folder"; done'
    done = run_without_cuda(checkout, dict(os.environ), "sh", "-c", command)
    assert set(done.stdout.splitlines()) == (set() if permitted else contents)
