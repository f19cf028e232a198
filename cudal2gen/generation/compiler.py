"""Compiles records to kernels, with one ninja graph, into a build directory whose folders are named by digest.

``build/<digest>/`` holds kernel.cu, kernel.ptx, kernel.cubin, ptxas.json and kernel.launch. The digest covers text,
launch, architecture, flags and the versions of nvcc and CUTLASS, and no path. The directory appears by one rename when
all its files are complete, so if it exists it is valid. Kernels are compiled to PTX in batches, the PTX is split per
kernel, and each part is assembled alone: a batched build and a single one give the same files.

Processes that build the same kernel compile it once: a process locks the digest (``build_folder.Locks``) while it
builds. It takes the free locks in one pass without waiting, builds those kernels, releases all its locks, and only then
waits for the kernels that other processes build. No process waits while it holds a lock, so there is no deadlock.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cudal2gen import places, torch_range
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record
from cudal2gen.launch.launcher import TORCH_LIBRARY
from kernelproof.ground import process_tree, sandbox
from kernelproof.ground.build_folder import Locks, publish, scratch_folder
from kernelproof.ground.errors import Failure, brief
from kernelproof.ground.toolchain import (
    PREBUILT,
    Toolchain,
    ToolchainError,
    discover,
    environment,
    release_of,
    temporary_folder,
    toolchain_folders,
    unread_by_shells,
)

Progress = Callable[[int, int], None]  # is called with the numbers of finished kernels and of all kernels

NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-DNDEBUG", "-lineinfo")
LAUNCHER_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcudal2gen.so")
FIRST_CUDA_WITH_F = (12, 9)  # the first CUDA that knows family-specific architectures such as sm_100f
SPLITTER = Path(__file__).with_name("ptx_split.py")  # run by ninja, for each batch
SOURCES = places.PACKAGE / "launch"  # of the host launchers
LAUNCHER_HEADERS = (
    *("cudal2gen.h", "launch.h", "counters.h", "handles.h", "map_cache.h", "pack.h", "race_rule.h"),
    *("runtime.h", "sha256.h", "sized.h"),
)
LAUNCHER_SOURCES = (*LAUNCHER_HEADERS, "launcher.cpp", "pack.cpp", "interface.cpp", "autotune.cpp")
TORCH_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{TORCH_LIBRARY}")
TORCH_SOURCES = ("sized.h", "torch_launcher.cpp")
# The files of a complete kernel folder.
FILES = ("kernel.cu", "kernel.ptx", "kernel.cubin", "kernel.launch", "ptxas.json")
# A warning of ptxas: its code and text.
LOSS = re.compile(r"\((C\d+)\) Potential Performance Loss: (.*?)(?: (?:in|for) the function .*)?$", re.MULTILINE)
# Kernels per translation unit. On two cores, 691 kernels for sm_80 compile in 116 s with 16 kernels in a unit and in
# 93 s with 64, for which a compiler takes 0.7 GB.
BATCH = 64
LONGEST_MESSAGE = 1000  # most characters of a compiler's message that are kept
TEXT_BOX = sandbox.Sandbox()  # the sandbox in which untrusted texts are compiled


class BuildError(Failure):
    """A kernel did not compile, or its binary must not be in a catalog."""


@dataclass(frozen=True)
class Ptxas:
    """The report of ptxas on one kernel: registers per thread, bytes of spills, stack frame and static shared memory.

    ``losses``: its warnings of potential performance loss, by code. C7508: it ignores a setmaxnreg; C7510 to C7512: it
    serialises wgmma.
    """

    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_static_bytes: int
    barriers: int
    losses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists only.
        object.__setattr__(self, "losses", tuple(self.losses))

    @property
    def findings(self) -> list[str]:
        """Reasons why this kernel must not be in a catalog; empty for a clean one."""
        findings = []
        if self.spill_store_bytes or self.spill_load_bytes:
            findings.append(f"spills {self.spill_store_bytes} bytes ({self.registers} registers)")
        elif self.stack_bytes:
            findings.append(f"has a stack frame of {self.stack_bytes} bytes")
        return findings + [f"is slow, says ptxas: {loss}" for loss in self.losses]


@dataclass(frozen=True)
class Artifact:
    """A built kernel: the directory named by its digest, and ptxas's report."""

    directory: Path
    ptxas: Ptxas

    @property
    def digest(self) -> str:
        return self.directory.name

    @property
    def source(self) -> Path:
        return self.directory / "kernel.cu"

    @property
    def ptx(self) -> Path:
        return self.directory / "kernel.ptx"

    @property
    def cubin(self) -> Path:
        """The file of the machine code."""
        return self.directory / "kernel.cubin"


@dataclass(frozen=True)
class BuildJob:
    """One distinct binary to build."""

    name: str
    arch: str
    text: str
    launch: str
    digest: str
    # Whether it has a translation unit of its own: the macros of an untrusted text must not reach other kernels.
    own_unit: bool = False


def job(record: Record, tools: Toolchain) -> BuildJob:
    """The binary of a record. Records that differ only in data fields have the same one."""
    text, launch = render(record), record.launch.write()
    return BuildJob(record.name, record.arch, text, launch, digest(text, record.arch, launch, tools), record.TEXTUAL)


def digest(text: str, arch: str, launch: str, tools: Toolchain) -> str:
    """The name of a binary: it covers everything that the binary depends on, and no path."""
    identity = {"text": text, "arch": arch, "flags": NVCC_FLAGS, "launch": launch, **tools.versions}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def find(record: Record, *, build_dir: Path | None = None) -> Artifact | None:
    """The record's compiled kernel, or None before it is built."""
    return _open((build_dir or places.build_dir()) / job(record, discover()).digest)


def count_kernels(build_dir: Path | None = None) -> int:
    """How many compiled kernels the build directory holds."""
    root = build_dir or places.build_dir()
    return (
        sum(re.fullmatch(r"[0-9a-f]{32}", entry.name) is not None for entry in root.iterdir()) if root.is_dir() else 0
    )


def build(
    records: Sequence[Record],
    *,
    build_dir: Path | None = None,
    tools: Toolchain | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Artifact]:
    """Compiles the records and returns their kernels in the same order. Kernels that are built already are reused.

    Raises BuildError with a line for each kernel that does not compile (its text and the compiler's messages stay in
    ``build/failed``), after the others are built, and ToolchainError without a compiler. A spill or a stack frame
    does not raise, see ``Ptxas.findings``. ``jobs``: how many compilers run at a time, by default one for each core.
    ``progress`` receives the numbers of finished kernels and of all kernels.
    """
    outcomes = attempt(records, build_dir=build_dir, tools=tools, jobs=jobs, progress=progress)
    if failures := dict.fromkeys(str(outcome) for outcome in outcomes if isinstance(outcome, BuildError)):
        raise BuildError("\n".join(failures))
    return [outcome for outcome in outcomes if isinstance(outcome, Artifact)]


def attempt(
    records: Sequence[Record],
    *,
    build_dir: Path | None = None,
    tools: Toolchain | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Artifact | BuildError]:
    """Does what ``build`` does, but returns the BuildError of a kernel that does not compile in place of its artifact.

    Raises BuildError if the build directory cannot be written, and ToolchainError without a compiler.
    """
    tools = tools or discover()
    root = build_dir or places.build_dir()
    items = [job(record, tools) for record in records]
    missing = {item.digest: item for item in items if _open(root / item.digest) is None}
    if missing and not tools.compiles:
        raise _not_prebuilt(root, tools, [item.name for item in missing.values()])
    f_arch = next((item.arch for item in missing.values() if item.arch.endswith("f")), "")
    if f_arch and release_of(tools.cuda) < FIRST_CUDA_WITH_F:
        raise ToolchainError(
            f"{f_arch}: ptxas {tools.cuda} does not know it, {'.'.join(map(str, FIRST_CUDA_WITH_F))} does: pip install "
            f"--target FOLDER nvidia-cuda-nvcc-cu12=={torch_range.PTXAS}"
        )
    failures: dict[str, str] = {}
    try:
        if missing:
            root.mkdir(parents=True, exist_ok=True)
            failures = _build_missing(list(missing.values()), root, tools, jobs or os.cpu_count() or 1, progress)
    except OSError as error:
        raise _unwritable(root, error) from error
    return [
        _open(root / item.digest)
        or BuildError(
            failures.get(item.digest) or f"{item.name}: {root / item.digest} disappeared during the build; build again"
        )
        for item in items
    ]


def launcher(*, build_dir: Path | None = None, tools: Toolchain | None = None) -> Path:
    """The shared library of the generic launcher and of packs, compiled at its first use, which takes seconds.

    Raises BuildError, and ToolchainError without a compiler.
    """
    tools = tools or discover()
    flags = launcher_flags(tools)
    root = build_dir or places.build_dir()
    identity = [_texts(LAUNCHER_SOURCES), flags, tools.nvcc_version]
    library = root / f"launcher-{_digest(identity)}" / "libcudal2gen.so"
    if not tools.compiles and not library.is_file():
        raise _not_prebuilt(root, tools, ["the launcher"])
    return _shared_library(library, "the launcher", LAUNCHER_SOURCES, [*flags, f"-I{tools.cuda_include}"])


def launcher_flags(tools: Toolchain) -> list[str]:
    """The compiler flags of the launcher. They tell it which driver and CUDA runtime its kernels need."""
    cuda = torch_range.major(tools.cuda)
    runtimes = ",".join(f'"{name}"' for name in torch_range.runtimes(cuda))
    needed = {"CUDA": cuda, "DRIVER": torch_range.CUDAS[cuda].driver, "RUNTIMES": runtimes}
    return [*LAUNCHER_FLAGS, *(f"-DCUDAL2GEN_{name}={value}" for name, value in needed.items())]


def torch_launcher(*, build_dir: Path | None = None) -> Path:
    """The shared library of planned calls of torch, compiled at its first use in a second. It needs only g++.

    Raises BuildError, and ToolchainError without g++.
    """
    library = torch_launcher_file(build_dir)
    if not library.is_file() and shutil.which("g++") is None:
        raise ToolchainError("the launcher of torch needs g++, which PATH lacks; e.g. apt install g++")
    return _shared_library(library, "the launcher of torch", TORCH_SOURCES, TORCH_FLAGS)


def torch_launcher_file(build_dir: Path | None = None) -> Path:
    """Where ``torch_launcher`` puts its library."""
    root = build_dir or places.build_dir()
    return root / f"torch-launcher-{_digest([_texts(TORCH_SOURCES), TORCH_FLAGS])}" / TORCH_LIBRARY


def _texts(sources: Sequence[str]) -> list[str]:
    """The texts of our C++ files with these names."""
    return [(SOURCES / name).read_text() for name in sources]


def _digest(identity: object) -> str:
    """The digest of a JSON value, for the name of a library's folder."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _shared_library(library: Path, name: str, sources: Sequence[str], flags: Sequence[str]) -> Path:
    """A shared library of our own C++ sources, compiled if it is absent. Raises BuildError."""
    if library.is_file():
        return library
    root = library.parent.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with Locks(root) as locks, locks.take(library.parent.name), scratch_folder(root) as scratch:
            if not library.is_file():
                _compile_shared(scratch / library.parent.name / library.name, name, sources, flags, root / "failed")
                publish(scratch / library.parent.name, library.parent)
    except OSError as error:
        raise _unwritable(root, error) from error
    return library


def _not_prebuilt(root: Path, tools: Toolchain, names: Sequence[str]) -> ToolchainError:
    """The error for binaries that another machine should have built."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ToolchainError(
        f"{names[0]}{more}: not in {root}, and {PREBUILT} leaves compiling to nvcc {tools.nvcc_version} elsewhere; "
        f"build there, or unset {PREBUILT}"
    )


def _compile_shared(library: Path, name: str, sources: Sequence[str], flags: Sequence[str], failed: Path) -> None:
    """Compiles a library with g++. Raises BuildError; all messages are then in the folder ``failed``."""
    library.parent.mkdir()
    paths = [str(SOURCES / source) for source in sources if source.endswith(".cpp")]
    command = ["g++", *flags, *paths, "-o", str(library), "-ldl"]
    with _temporary_files() as variables:
        code, text = process_tree.output(command, environment() | variables)
    if code:
        raise BuildError(f"{name} did not compile: {_write_messages(text.splitlines(), failed / 'launcher.log')}")


def _unwritable(root: Path, error: OSError) -> BuildError:
    """The error for a build directory that cannot be written."""
    reason = error.strerror or str(error)
    hint = "free some space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return BuildError(f"cannot write to {root}: {reason}; {hint}choose another folder with --build-dir")


def _open(directory: Path) -> Artifact | None:
    """The built kernel in a directory; None if the directory is absent or lacks a file."""
    try:
        ptxas = Ptxas(**json.loads((directory / "ptxas.json").read_text()))
        complete = all((directory / name).stat().st_size for name in FILES)
    except (OSError, ValueError, TypeError):
        return None
    return Artifact(directory, ptxas) if complete else None


def _build_missing(
    items: list[BuildJob], root: Path, tools: Toolchain, jobs: int, progress: Progress | None
) -> dict[str, str]:
    """Builds the kernels that no other process is building, then waits for the others. Returns failures by digest."""
    with Locks(root) as locks:
        locked: list[BuildJob] = []
        contended: list[BuildJob] = []
        for item in items:
            (locked if locks.try_take(item.digest) else contended).append(item)
        # Another process may have published a kernel after the caller found it missing, and before it was locked here.
        locked = [item for item in locked if _open(root / item.digest) is None]
        failures = _build_locked(locked, root, tools, jobs, progress) if locked else {}
        locks.release_all()
        for item in contended:
            with locks.take(item.digest):
                if _open(root / item.digest) is None:
                    failures |= _build_locked([item], root, tools, jobs, progress)
    return failures


def _build_locked(
    items: list[BuildJob], root: Path, tools: Toolchain, jobs: int, progress: Progress | None
) -> dict[str, str]:
    """Builds and publishes kernels whose digests this process has locked. Returns failures by digest.

    Kernels of a batch that fails are compiled again one by one.
    """
    with scratch_folder(root) as scratch:
        size = max(1, min(BATCH, -(-len(items) // jobs)))  # smaller batches if there would be fewer than ``jobs``
        batches = _batches(items, size)
        total = len(items)

        def report(built: int) -> None:
            if progress:
                progress(built, total)

        report(0)
        _ninja(batches, scratch, root, tools, jobs, report)
        failed = [item for item in items if _open(root / item.digest) is None]
        if failed and size > 1:
            built = total - len(failed)
            _ninja(_batches(failed, 1), scratch, root, tools, jobs, lambda count: report(built + count))
            failed = [item for item in items if _open(root / item.digest) is None]
        return {item.digest: _failure(item, scratch, root) for item in failed}


def _batches(items: list[BuildJob], size: int) -> list[list[BuildJob]]:
    """Translation units of up to ``size`` kernels of one architecture; an untrusted text has a unit of its own."""
    ordered = sorted(items, key=lambda item: (item.arch, item.name))
    batches: list[list[BuildJob]] = []
    for item in ordered:
        last = batches[-1] if batches else [item]
        if batches and last[0].arch == item.arch and len(last) < size and not (last[0].own_unit or item.own_unit):
            last.append(item)
        else:
            batches.append([item])
    return batches


def _ninja(
    batches: list[list[BuildJob]], scratch: Path, root: Path, tools: Toolchain, jobs: int, report: Callable[[int], None]
) -> None:
    """Runs ninja on batches in a scratch folder, and publishes each kernel as soon as it is assembled.

    ``report`` receives the number of kernels that are assembled. Compilers' messages go to ``ninja.log``.
    """
    for items in batches:
        _write_batch(items, scratch)
    confinement = _sandbox_command(scratch, tools) if any(item.own_unit for items in batches for item in items) else ()
    (scratch / "build.ninja").write_text(ninja_text(batches, tools, Path(sys.executable), confinement))
    command = [str(_ninja_binary()), "-k", "0", "-j", str(jobs), "-C", str(scratch), "--quiet"]
    by_name = {_folder(item): item for items in batches for item in items}
    log, count = [], 0
    # Compilers end where this block does, so an exception leaves none running.
    with _temporary_files() as variables, process_tree.started(command, environment() | variables) as process:
        for line in process.stdout or ():
            if line.startswith("assembled "):
                _publish_kernel(by_name[line.split()[1]], scratch, root)
                count += 1
                report(count)
            else:
                log.append(line)
        process.wait()
    with (scratch / "ninja.log").open("a") as file:
        file.writelines(log)


@contextmanager
def _temporary_files() -> Iterator[dict[str, str]]:
    """The variable that names a folder for a compiler's temporary files, which a killed compiler leaves behind.

    It is not in the build directory, because the path of that may contain characters that nvcc does not quote.
    """
    with tempfile.TemporaryDirectory("", "cudal2gen-", temporary_folder(), ignore_cleanup_errors=True) as folder:
        yield {"TMPDIR": folder}


def _sandbox_command(scratch: Path, tools: Toolchain) -> list[str]:
    """The command that runs another one in a sandbox, where it reads the toolchain only and writes to ``scratch``."""
    readable = (*toolchain_folders(tools), sys.prefix, sys.base_prefix, SPLITTER)
    box = TEXT_BOX._replace(readable=tuple(map(str, readable)), writable=(str(scratch),))
    return sandbox.command(box, [])


def _folder(item: BuildJob) -> str:
    """The folder of a kernel within the scratch folder."""
    return f"{item.arch}/{item.name}"


def _batch_name(items: list[BuildJob]) -> str:
    """The name of a translation unit, which is unique within a build."""
    return f"{items[0].arch}_{items[0].name}_{len(items)}"


def _write_batch(items: list[BuildJob], scratch: Path) -> None:
    """Writes the text of each kernel, and the translation unit that includes these texts."""
    folder = scratch / items[0].arch
    folder.mkdir(exist_ok=True)
    for item in items:
        (folder / f"{item.name}.cu").write_text(item.text)
    includes = "".join(f'#include "{item.arch}/{item.name}.cu"\n' for item in items)
    (scratch / f"{_batch_name(items)}.cu").write_text(includes)


def ninja_text(batches: list[list[BuildJob]], tools: Toolchain, python: Path, confinement: Sequence[str] = ()) -> str:
    """The build graph: batch.cu -> batch.ptx -> one kernel.ptx per kernel -> kernel.cubin and ptxas's report.

    ``confinement``: the words before a command that run it in a sandbox, for compilers of untrusted texts.
    """
    paths = {name: _quote(path) for name, path in asdict(tools).items() if isinstance(path, Path)}
    words = unread_by_shells([*NVCC_FLAGS, f"-I{tools.cutlass_include}", "-I."])
    rules = {
        "nvcc": f"{paths['nvcc']} {' '.join(map(_quote, words))} -arch=$arch -ptx $in -o $out",
        "split": f"{_quote(python)} -I -S {_quote(SPLITTER)} $in $arch {tools.isa}".rstrip(),
        "ptxas": f"{paths['ptxas']} -v -arch=$arch $in -o $out > $out.log 2>&1 && echo assembled $kernel",
    }
    lines = ["ninja_required_version = 1.8"]
    for rule, command in rules.items():
        lines += [f"rule {rule}", f"  command = {command}"]
        if confinement:
            lines += [f"rule limited_{rule}", f"  command = {' '.join(map(_quote, confinement))} {command}"]
    for items in batches:
        arch, batch = items[0].arch, _batch_name(items)
        limited = "limited_" if items[0].own_unit else ""
        parts = " ".join(f"{_folder(item)}/kernel.ptx" for item in items)
        lines += [f"build {batch}.ptx: {limited}nvcc {batch}.cu", f"  arch = {arch}"]
        lines += [f"build {parts}: {limited}split {batch}.ptx", f"  arch = {arch}"]
        for item in items:
            lines += [f"build {_folder(item)}/kernel.cubin: {limited}ptxas {_folder(item)}/kernel.ptx"]
            lines += [f"  arch = {arch}", f"  kernel = {_folder(item)}"]
    return "\n".join(lines) + "\n"


def _quote(word: str | Path) -> str:
    """A word, quoted for ninja and for the shell."""
    escaped = str(word).replace("$", "$$")
    return "'" + escaped.replace("'", "'\\''") + "'"


def _ninja_binary() -> Path:
    """The program ninja: of the wheel, or on PATH. Raises ToolchainError if there is none."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        return Path(ninja.BIN_DIR) / "ninja"
    if path := shutil.which("ninja"):
        return Path(path)
    raise ToolchainError("no ninja found; install it: pip install ninja")


def _publish_kernel(item: BuildJob, scratch: Path, root: Path) -> None:
    """Completes the folder of an assembled kernel, and moves it into the build directory."""
    built = scratch / _folder(item)
    log = built / "kernel.cubin.log"
    (built / "ptxas.json").write_text(json.dumps(asdict(parse_ptxas(log.read_text(), item.arch)), indent=1) + "\n")
    (built / "kernel.cu").write_text(item.text)
    (built / "kernel.launch").write_text(item.launch)
    log.unlink()
    publish(built, root / item.digest)


def parse_ptxas(log: str, arch: str) -> Ptxas:
    """The report that ``ptxas -v`` prints on a module with one kernel."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match.group(1)) if match else 0

    return Ptxas(
        arch=arch,
        registers=number(r"Used (\d+) registers"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        smem_static_bytes=number(r"(\d+) bytes smem"),
        barriers=number(r"used (\d+) barriers"),
        losses=tuple(dict.fromkeys(f"{code} {text}" for code, text in LOSS.findall(log))),
    )


def _write_messages(messages: list[str], path: Path) -> str:
    """Writes a compiler's messages to a file. Returns the first error and the file, as the rest of a sentence."""
    path.parent.mkdir(exist_ok=True)
    messages = [brief(line, LONGEST_MESSAGE) for line in messages]
    path.write_text("\n".join(messages) + "\n")
    errors = [line for line in messages if re.search("error|fatal", line)]
    first = next(iter([*errors, *messages]), "no message").strip()
    return f"{first}; all messages are in {path}"


def _failure(item: BuildJob, scratch: Path, root: Path) -> str:
    """One line that says why a kernel did not compile. Its text and the compiler's messages are kept."""
    source = root / "failed" / f"{item.digest}.cu"
    source.parent.mkdir(exist_ok=True)
    source.write_text(item.text)
    log = (scratch / "ninja.log").read_text()
    log = log.replace(f"{item.arch}/{item.name}.cu", str(source))
    excerpt = [line for line in log.splitlines() if str(source) in line or item.name in line]
    assembler = scratch / _folder(item) / "kernel.cubin.log"
    if assembler.is_file():
        excerpt += assembler.read_text().splitlines()
    if number := _fatal_signal(item, log):
        name = signal.Signals(number).name
        return f"{item.name}: {name} ended its compiler; if memory ran out, build again with fewer --jobs"
    return f"{item.name} did not compile: {_write_messages(excerpt or log.splitlines(), source.with_suffix('.log'))}"


def _fatal_signal(item: BuildJob, log: str) -> int:
    """The signal that ended a compiler of this kernel, or 0. Ninja reports the exit code, nvcc names the signal."""
    commands = [command for command in log.split("FAILED: ") if item.name in command.partition("\n")[0]]
    for code, number in re.findall(r"\A\[code=(\d+)\]|died due to signal (\d+)", commands[-1] if commands else ""):
        signal_number = int(number or int(code) - 128)  # a shell exits with 128 + the signal
        if signal_number in signal.valid_signals():  # 127 is none: ptxas exits with 255 after an error
            return signal_number
    return 0


def peak_rss_bytes() -> int:
    """Largest resident size of any compiler process that this process has waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
