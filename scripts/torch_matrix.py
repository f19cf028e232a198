"""Runs the tests of operators with other releases of torch than the installed one, on CPUs.

    python -m scripts.torch_matrix [--torch VERSION ...] [words for pytest]

By default it runs the oldest supported version, those of ``torch_range.ALSO_TESTED``, and the newest on PyPI. Each is
installed into a folder of its own in the user's cache, of 1.5 GB; all other packages are those of this environment.
PyPI's builds for Linux cannot be imported without NVIDIA's libraries, so stand-ins are compiled, which report that
there is no CUDA device. Exit code 1 if a test fails with one of the versions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from cudal2gen import places
from cudal2gen.torch_range import ALSO_TESTED, NEWEST, OLDEST

CHECKOUT = Path(__file__).resolve().parents[1]
TESTS = CHECKOUT / "tests" / "cudal2gen"
NVIDIA = re.compile(r"lib(cu|nv|nccl)")  # libraries that a build for CUDA needs
# A line of nm: an undefined function of NVIDIA's libraries, and the version of the symbol if it has one.
UNDEFINED = re.compile(r"^\s+U ((?:__)?(?:cu|nv|nccl)\w+)(@\S+)?$", re.MULTILINE)
TEXTS = ("cudaGetErrorString", "cudaGetErrorName")  # functions that return a text
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE


def newest() -> str:
    """The newest release on the index that pip uses."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    found = re.search(r"torch \(([\d.]+)", subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found is not None
    return found[1]


def installed_torch(version: str) -> Path:
    """A folder for PYTHONPATH that has this torch; it is filled at the first call."""
    folder = places.user_cache() / "torch-matrix" / version
    if not folder.is_dir():
        scratch = folder.with_name(f"{version}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        # A user's constraints are for environments, and this folder is none: they may hold back the newest torch.
        unconstrained = os.environ | {"PIP_CONSTRAINT": os.devnull}
        subprocess.run([*command, "--target", str(scratch), f"torch=={version}"], check=True, env=unconstrained)
        stand_in(scratch / "torch" / "lib")
        scratch.rename(folder)
    return folder


def stand_in(libraries: Path) -> None:
    """Compiles stand-ins for NVIDIA's libraries into the folder of torch's, which look there first.

    They have the functions that torch's libraries need, with the symbol versions that these expect. Each function
    returns that there is no device.
    """
    own = {library.name: library for library in sorted(libraries.glob("*.so*"))}
    # ``needed``: names of NVIDIA's libraries. ``functions``: undefined functions by symbol version, "" for none.
    # ``files``: by symbol version, the library that must define the version.
    needed, functions, files = set[str](), defaultdict[str, set[str]](set), {"": ""}
    for library in own.values():
        needed |= {
            name for name in re.findall(r"NEEDED.*\[(.*)\]", _output_of("readelf", "-d", library)) if NVIDIA.match(name)
        }
        for file, versions in re.findall(r"File: (\S+) .*\n((?:.*Name: .*\n)+)", _output_of("readelf", "-VW", library)):
            files |= dict.fromkeys(re.findall(r"Name: (\S+)", versions), file)
        for name, version in UNDEFINED.findall(_output_of("nm", "-D", library)):
            functions[version.lstrip("@")].add(name)
    absent = sorted(needed - own.keys())
    for file in absent:
        # nm does not say which library has a function without a version, so the first stand-in gets all of them.
        of_file = {version: names for version, names in functions.items() if files.get(version) == file}
        if file == absent[0]:
            of_file[""] = functions[""] - set().union(*(functions[version] for version in functions if version))
        _compile(libraries / file, of_file)


def _compile(library: Path, functions: dict[str, set[str]]) -> None:
    """Compiles a library of functions by their versions, "" for those without one."""
    names = sorted(set().union(*functions.values()))
    source = "".join(
        f"""char const* {name}(void) {{ return ""; }}\n"""
        if name.startswith(TEXTS)
        else f"int {name}(void) {{ return {NO_DEVICE}; }}\n"
        for name in names
    )
    script = "".join(
        f"{version} {{ {' '.join(f'{name};' for name in sorted(own))} }};\n"
        for version, own in functions.items()
        if version
    )
    with tempfile.NamedTemporaryFile("w", suffix=".map") as versions:
        versions.write(script)
        versions.flush()
        flags = [
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{library.name}",
            *([f"-Wl,--version-script={versions.name}"] if script else []),
        ]
        subprocess.run(["gcc", *flags, "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)


def _output_of(*words: object) -> str:
    """What a command prints. Raises CalledProcessError if it fails."""
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


def tests() -> list[str]:
    """The files with tests of operators, which are marked ``torch`` for the whole file."""
    marked = re.compile(r"^pytestmark = .*mark\.torch", re.MULTILINE)
    return [str(path) for path in sorted(TESTS.glob("test_*.py")) if marked.search(path.read_text())]


def names_files(words: list[str]) -> bool:
    """Whether pytest's words name files."""
    return any(".py" in word for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"such as {NEWEST}")
    arguments, words = parser.parse_known_args()
    failed = []
    for version in arguments.torch or [OLDEST, *ALSO_TESTED, newest()]:
        folder = installed_torch(version)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)])}
        stated = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__version__, torch.version.cuda)"],
            check=True, capture_output=True, text=True, env=environment,
        ).stdout  # fmt: skip
        print(f"torch {stated.strip()}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *words,
            *([] if names_files(words) else tests()),
        ]
        if subprocess.run(command, env=environment, cwd=CHECKOUT, check=False).returncode:
            failed.append(version)
    print(f"failed with torch {', '.join(failed)}" if failed else "no test failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
