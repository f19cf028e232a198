"""Finds the compilers and headers of this machine (nvcc, ptxas, CuTe) and their versions.

They are searched in this order: the caller's argument, environment variables, PATH, the system's folder, PyPI wheels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from kernelproof.ground.errors import MissingTool, WrongInput, installation, printable

PREBUILT = "CUDAL2GEN_PREBUILT"  # the name of an environment variable, see ``discover``
# nvcc passes its commands to a shell. It puts paths and definitions between double quotes, where a shell interprets
# some characters. Other words are not quoted, so that a shell interprets nearly all special characters in them.
_READ_IN_QUOTES = re.compile(r'["$`\x00-\x1f\x7f]|\\(?=[\\"$`,]|\Z)')
_PLAIN = re.compile(r"[\w@%+=:,./ -]*")
_DEFINITION = re.compile(r"-D[A-Za-z_][^$`\\\x00-\x1f\x7f]*")  # nvcc escapes the double quotes of these
_PATH_OPTION = re.compile(rf"(?:-I|-isystem=|-MF=)(?!.*{_READ_IN_QUOTES.pattern}).+")
# Words that are complete: no option that takes the next word for its value.
_COMPLETE = re.compile(r"-[DIU].+|-O\d?|--?[\w-]+=.+|[^-].*")

# The newest PTX of releases of CUDA 12 whose ptxas may assemble what a later nvcc compiled.
ISAS: dict[tuple[int, ...], str] = {(12, 8): "8.7", (12, 9): "8.8"}
PTXAS = "KERNELPROOF_PTXAS"  # the name of an environment variable, see ``discover``


class ToolchainError(MissingTool):
    """A part of the toolchain is missing. The message says which one, and how to install it."""


@dataclass(frozen=True)
class Toolchain:
    """The compilers and headers in use, and the versions that are part of a kernel's digest."""

    nvcc: Path
    ptxas: Path
    cuda_include: Path
    cutlass_include: Path
    nvcc_version: str
    cutlass_version: str
    compiles: bool = True  # False if kernels were built on another machine, see ``discover``
    ptxas_version: str = ""  # "" for the ptxas of nvcc's toolkit

    @property
    def versions(self) -> dict[str, str]:
        """The versions that are part of a kernel's digest, by tool; ptxas has one only if it is not of nvcc's
        toolkit."""
        own = {"nvcc": self.nvcc_version, "cutlass": self.cutlass_version}
        return own | ({"ptxas": self.ptxas_version} if self.ptxas_version else {})

    @property
    def cuda(self) -> str:
        """The version of CUDA whose ptxas writes machine code."""
        return self.ptxas_version or self.nvcc_version

    @property
    def isa(self) -> str:
        """The version of PTX to state for a ptxas that is older than nvcc; "" if ptxas is not older.

        nvcc states the newest version that it knows, whatever a text uses, and an older ptxas refuses that version. It
        still refuses instructions that it does not know.
        """
        return "" if release_of(self.cuda) >= release_of(self.nvcc_version) else ISAS[release_of(self.cuda)]

    @property
    def link_flags(self) -> list[str]:
        """Options with which a link by nvcc finds libraries: nvcc searches ``lib64``, and the wheels have ``lib``."""
        root = self.cuda_include.parent
        return [] if (root / "lib64").is_dir() else [f"-L{root / 'lib'}"]


def nvcc_candidates(nvcc: Path | None = None) -> list[Path]:
    """The absolute paths at which nvcc may be. If the argument or ``KERNELPROOF_NVCC`` names one, it is the only one;
    otherwise they are from PATH, the system folder and PyPI wheels."""
    configured = nvcc or os.environ.get("KERNELPROOF_NVCC")
    if configured:
        return [Path(configured).absolute()]
    candidates = [Path(path) for path in [shutil.which("nvcc")] if path]
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(root).glob("cu13/bin/nvcc"))
    return [path.absolute() for path in candidates if os.access(path, os.X_OK)]


def find_cutlass() -> Path | None:
    """The folder that holds ``cute/``: ``CUTLASS_PATH``, else the nvidia-cutlass wheel's; None without either."""
    if configured := os.environ.get("CUTLASS_PATH"):
        return Path(configured).absolute() / "include"
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "source" / "include"


def find_nvdisasm() -> Path:
    """CUDA's disassembler: ``KERNELPROOF_NVDISASM``, PATH, the system folder, or the wheels nvidia-cuda-nvdisasm and
    triton.

    Raises ToolchainError that names a command to install it.
    """
    return _program("nvdisasm", "nvidia-cuda-nvdisasm", os.environ.get("KERNELPROOF_NVDISASM"), os.environ.get("PATH"))


def find_ptxas() -> Path:
    """CUDA's assembler: ``KERNELPROOF_PTXAS``, PATH, the system folder, or the wheels nvidia-cuda-nvcc and triton.

    Raises ToolchainError that names a command to install it.
    """
    return _program("ptxas", "nvidia-cuda-nvcc", os.environ.get(PTXAS), os.environ.get("PATH"))


@cache
def _program(name: str, package: str, configured: str | None, _path: str | None) -> Path:
    """A program of the toolkit. ``package``: the wheel that has it. ``configured``: what its variable names."""
    variable = f"KERNELPROOF_{name.upper()}"
    if configured:
        if not os.access(configured, os.X_OK):
            raise ToolchainError(f"{variable}={configured} is no program; name {name}, or unset the variable")
        return Path(configured).absolute()
    candidates = [Path(path) for path in [shutil.which(name)] if path]
    candidates.append(Path(f"/usr/local/cuda/bin/{name}"))
    for module, pattern in (("nvidia", f"cu13/bin/{name}"), ("triton", f"backends/nvidia/bin/{name}")):
        spec = importlib.util.find_spec(module)
        for root in (spec.submodule_search_locations or []) if spec else []:
            candidates += Path(root).glob(pattern)
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate.absolute()
    raise ToolchainError(f"no {name} found ({variable}, PATH, PyPI wheels); install it: pip install {package}")


def discover(nvcc: Path | None = None) -> Toolchain:
    """The toolchain of this machine. It is searched once for each state of the environment variables that choose it.

    Raises ToolchainError that names the missing part and a command to install it.

    ``KERNELPROOF_PTXAS`` names a ptxas to use in place of that of nvcc's toolkit, for example an older one, whose
    machine code older drivers load.

    ``CUDAL2GEN_PREBUILT`` names a JSON file of ``versions``. It means that the build directory was filled by a
    toolchain with these versions, perhaps on another machine. If this machine's toolchain has other versions, the
    returned one has those of the file, so that it finds the built kernels, and compiles nothing.
    """
    choices = [os.environ.get(name) for name in (PTXAS, "KERNELPROOF_NVCC", "CUTLASS_PATH", "PATH")]
    if not (file := os.environ.get(PREBUILT)):
        return _installed(nvcc, *choices)
    try:
        versions = json.loads(Path(file).read_text())
        stated = {"nvcc": str(versions["nvcc"]), "cutlass": str(versions["cutlass"])}
        stated |= {"ptxas": str(versions["ptxas"])} if "ptxas" in versions else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolchainError(f"{PREBUILT}={file}: holds no versions of nvcc and cutlass ({error})") from None
    return _prebuilt_toolchain(tuple(stated.items()), nvcc, *choices)


@cache
def _prebuilt_toolchain(stated: tuple[tuple[str, str], ...], nvcc: Path | None, *variables: str | None) -> Toolchain:
    """This machine's toolchain if it has these versions, otherwise one with these versions that compiles nothing."""
    try:
        tools = _installed(nvcc, *variables)
    except ToolchainError:
        nowhere = Path(os.devnull)
        tools = Toolchain(nowhere, nowhere, nowhere, nowhere, "", "")
    versions = dict(stated)
    if tools.versions == versions:
        return tools
    nvcc_version, cutlass_version, ptxas_version = (versions.get(name, "") for name in ("nvcc", "cutlass", "ptxas"))
    return replace(
        tools, nvcc_version=nvcc_version, cutlass_version=cutlass_version, ptxas_version=ptxas_version, compiles=False
    )


@cache
def _installed(nvcc: Path | None, ptxas: str | None, *_variables: str | None) -> Toolchain:
    """The first toolchain found, with the ``ptxas`` that is named. ``_variables``: the environment variables that the
    search reads, as a key of the cache."""
    cutlass = find_cutlass()
    if cutlass is None or not (cutlass / "cute" / "layout.hpp").is_file():
        raise ToolchainError("the CuTe headers are missing; install them: pip install nvidia-cutlass==4.2.0.0")
    if reason := _misread(cutlass):
        raise ToolchainError(f"{reason}; move the CuTe headers, or name others by CUTLASS_PATH")
    for compiler in ("gcc", "g++"):
        if shutil.which(compiler) is None:
            raise ToolchainError(f"nvcc and the launcher need {compiler}, which PATH lacks; e.g. apt install g++")
    header = (cutlass / "cutlass" / "version.h").read_text()
    cutlass_version = ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) +(\d+)", header))
    faults = ["no nvcc found (option --nvcc, KERNELPROOF_NVCC, PATH, PyPI wheels)"]
    for candidate in nvcc_candidates(nvcc):
        if reason := _misread(candidate):
            faults.append(f"{reason}: move it")
            continue
        try:
            root, version = _interrogate(candidate)
        except (OSError, ValueError) as error:
            faults.append(f"{candidate} does not run or answer like nvcc ({error})")
            continue
        except subprocess.CalledProcessError as error:
            words = (error.stderr or error.stdout).strip().splitlines() or [f"exit code {error.returncode}"]
            faults.append(f"{candidate} does not run or answer like nvcc ({words[-1]})")
            continue
        if version.split(".")[0] == "13":
            tools = Toolchain(candidate, root / "bin/ptxas", root / "include", cutlass, version, cutlass_version)
            return _with_ptxas(tools, Path(ptxas).absolute()) if ptxas else tools
        faults.append(f"{candidate} is of CUDA {version}, not 13")
    raise ToolchainError(f"{faults[-1]}; install a compiler: {installation('nvcc')}")


def release_of(version: str) -> tuple[int, ...]:
    """The release of a CUDA version, such as (12, 8) for 12.8.93."""
    return tuple(int(number) for number in version.split(".")[:2])


def _with_ptxas(tools: Toolchain, ptxas: Path) -> Toolchain:
    """The tools with another ptxas. Raises ToolchainError if it does not run, or is too old for nvcc's PTX."""
    if reason := _misread(ptxas):
        raise ToolchainError(f"{reason}: move it")
    try:
        command = [str(ptxas), "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{PTXAS}={ptxas} does not run ({error}); name a ptxas, or unset the variable") from None
    found = re.search(r"V(\d+\.\d+\.[\d.]+)", text)
    if found is None:
        raise ToolchainError(f"{PTXAS}={ptxas} does not answer like ptxas; name a ptxas, or unset the variable")
    version = found[1]
    if version == tools.nvcc_version:
        return tools
    if release_of(version) < min(ISAS):
        oldest = ".".join(map(str, min(ISAS)))
        raise ToolchainError(
            f"{PTXAS}={ptxas} is of CUDA {version}; kernels need {oldest} or newer: pip install --target FOLDER "
            f"'nvidia-cuda-nvcc-cu12=={oldest}.*'"
        )
    return replace(tools, ptxas=ptxas, ptxas_version=version)


def _interrogate(nvcc: Path) -> tuple[Path, str]:
    """The root of an nvcc's toolkit, even if nvcc is a wrapper script, and its version."""

    def output(*arguments: str) -> str:
        command = [str(nvcc), *arguments]
        process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
        return process.stdout + process.stderr

    top = re.search(r"^#\$ TOP=(.*)$", output("-dryrun", "-ptx", "-x", "cu", os.devnull), re.MULTILINE)
    release = re.search(r"V([\d.]+)", output("--version"))
    if top is None or release is None:
        raise ValueError("no version")
    return Path(top.group(1)).resolve(), release.group(1)


def environment() -> dict[str, str]:
    """The environment for compilers, without variables that change their output, which the digest does not cover.

    TMPDIR is set to a folder that exists and whose name a shell leaves unchanged, because nvcc fails otherwise.
    """
    variables = {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    return kept | {"TMPDIR": temporary_folder()}


def nvcc_command(nvcc: Path, arguments: Sequence[str], files: Sequence[Path], target: Path) -> list[str]:
    """The command by which nvcc makes ``target`` from files. Raises WrongInput if a shell would interpret a word."""
    paths = [path.absolute() for path in (*files, target)]  # an absolute path cannot look like an option
    for path in paths:
        accept(path, "rename the folder or the file")
    return [str(nvcc), *unread_by_shells(arguments), *map(str, paths[:-1]), "-o", str(paths[-1])]


def unread_by_shells(arguments: Sequence[str]) -> list[str]:
    """Returns arguments of nvcc unchanged. Raises WrongInput for the first one in which nvcc's shell would interpret a
    character. Definitions and folders may have special characters; other words may not."""
    before = "-O"  # stands before the first word: an option that takes no value
    for word in arguments:
        quoted = _DEFINITION.fullmatch(word) or _PATH_OPTION.fullmatch(word)
        if not _PLAIN.fullmatch(word) and not (quoted and _COMPLETE.fullmatch(before)):
            character = next((char for char in word if not _PLAIN.fullmatch(char)), "")
            raise WrongInput(
                f"argument {word!r} of nvcc: its shell would read {character!r}; write -DNAME=VALUE and -IFOLDER as "
                "one word each, after no option that takes a value, and without $, `, \\ and control characters"
            )
        before = word
    return list(arguments)


def toolchain_folders(tools: Toolchain) -> list[Path]:
    """The files and folders that nvcc reads and runs, besides the system's programs and libraries."""
    compilers = [Path(path).resolve().parents[1] for name in ("gcc", "g++") if (path := shutil.which(name))]
    libraries = [Path(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    folders = [tools.ptxas.parents[1], tools.cuda_include, tools.cutlass_include, *compilers, *libraries]
    return [tools.nvcc, *(folder for folder in dict.fromkeys(folders) if folder.is_dir())]


def temporary_folder() -> str:
    """The folder for compilers' temporary files: Python's, or /tmp if nvcc would misread its path."""
    folder = tempfile.gettempdir()
    return "/tmp" if _misread(Path(folder)) else folder


def accept(path: Path, remedy: str) -> None:
    """Raises WrongInput, with the remedy, if nvcc would misread the path."""
    if reason := _misread(path):
        raise WrongInput(f"{reason}; {remedy}")


def _misread(path: Path) -> str:
    """The reason why nvcc would misread a path; empty if it would not."""
    character = _READ_IN_QUOTES.search(str(path))
    name = printable(character[0]) if character else ""
    return f"{path}: nvcc's shell does not take the {name} of this path as it is" if character else ""
