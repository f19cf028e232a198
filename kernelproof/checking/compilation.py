"""Compiles CUDA sources into a shared library of host code and PTX, and caches what nvcc made.

nvcc is called once for each source and embeds PTX, without machine code, in the object file. The objects are linked
into a shared library rather than a program, so that the check can call the program's ``main`` in its own process.
Relocatable device code (``-rdc=true``) is embedded as PTX as well. nvcc's device linker is left out, because it would
make machine code; the emulated runtime links the modules instead.

The cache is in the user's cache folder. An object in it is used again if the compiler's version, the flags, the source
and all headers that it included are unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from kernelproof.ground import build_folder, files, places, process_tree, sandbox
from kernelproof.ground.errors import Failure, WrongInput, reading
from kernelproof.ground.toolchain import Toolchain, accept, environment, nvcc_command, toolchain_folders

# For an untrusted source, the folders from which it may include files; its compiler then runs in a sandbox. None for
# the user's own source.
Foreign = Sequence[Path] | None

# Options that this module sets itself, each with the number of words that follow it.
_REPLACED_OPTIONS = {
    "-arch": 1, "--gpu-architecture": 1, "-gencode": 1, "--generate-code": 1, "-code": 1, "--gpu-code": 1, "-o": 1,
    "-cudart": 1, "--cudart": 1, "-c": 0, "-shared": 0, "-ptx": 0, "-cubin": 0, "-lcuda": 0, "-lcudart": 0,
    "-lcudadevrt": 0, "-lcudart_static": 0, "-lineinfo": 0, "--generate-line-info": 0, "-dlto": 0,
    "--dlink-time-opt": 0,
}  # fmt: skip
# Substitutes for the headers of libraries that are not emulated: just enough for programs to compile.
_STAND_INS = Path(__file__).parent / "include"
# Functions that every program is linked with.
_HOST_CALLS = Path(__file__).parent / "host_calls.c"
_RELOCATABLE = frozenset(("-dc", "--device-c", "-rdc=true", "--relocatable-device-code=true"))
_RDC = "-rdc=true"
# Functions that nvcc's device linker would define. The constructor of each relocatable object calls one of them to
# register its device code.
_REGISTRATION = re.compile(rb"__cudaRegisterLinkedBinary_\w+")
# The messages of GNU ld and gold, and of lld, about a library that they cannot find.
_NOT_FOUND = re.compile(r"(?:cannot find|unable to find library) -l:?([^\s:]+)")
MOST_FAULTS = 12  # most lines of a compiler's output in a message; the later ones mostly follow from the first
# The lines of a compiler's output that say what is wrong, and with which types.
_FAULT = re.compile(r"\berror\b|fatal|undefined|multiple definition|(?:operand|argument) types are")
# The CUDA runtime and the driver, in the forms in which programs link them.
_RUNTIME_LIBRARY = re.compile(r"(?:lib)?(?:cuda|cudart|cudart_static|cudadevrt)(?:\.(?:a|so[\d.]*))?")


class MissingLibraries(Failure):
    """The linker finds no file of some libraries.

    ``libraries`` are their names, as after ``-l``. ``replaced`` are those among them that the emulated runtime
    replaces, so that the program can be linked without them.
    """

    def __init__(self, libraries: Sequence[str], folder: Path) -> None:
        self.libraries = tuple(libraries)
        self.replaced = tuple(name for name in libraries if _RUNTIME_LIBRARY.fullmatch(name))
        others = [name for name in libraries if name not in self.replaced]
        remedies = []
        if self.replaced:
            remedies.append(f"leave {', '.join(self.replaced)} out: the check brings a CUDA runtime and a driver")
        if others:
            remedies.append(f"install {', '.join(others)}, or name the folder by --nvcc-args -LFOLDER")
        super().__init__(
            f"the program in {folder} does not link: the linker finds no file of {', '.join(libraries)}; "
            + "; ".join(remedies)
        )


def split_arguments(text: str) -> tuple[list[str], str | None]:
    """Split the user's arguments for nvcc.

    Returns two things: the arguments without those that choose the architecture, the output and the runtime, which this
    module sets itself; and the newest architecture that they named, such as ``sm_90a``, or None. Raises WrongInput if
    a quote is not closed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WrongInput(f"--nvcc-args {text!r}: {error}") from None
    arguments, sm, at = [], None, 0
    while at < len(words):
        word = words[at]
        name, _, value = word.partition("=")
        at += 1
        if word in ("-rdc", "--relocatable-device-code") and words[at : at + 1]:
            word, at = f"-rdc={words[at]}", at + 1
        if word in _RELOCATABLE:
            arguments.append(_RDC)
            continue
        if name not in _REPLACED_OPTIONS:
            arguments.append(word)
            continue
        if not value and _REPLACED_OPTIONS[name]:
            value, at = " ".join(words[at : at + 1]), at + 1
        if (number := re.search(r"(?:sm|compute)_(\d+[af]?)", value)) is not None:
            sm = max(sm or "", f"sm_{number[1]}", key=lambda target: (int(re.sub(r"\D", "", target) or 0), target))
    return arguments, sm


def library(
    sources: Sequence[Path], arguments: Sequence[str], sm: str, tools: Toolchain, seconds: float | None = None,
    *, foreign: Foreign = None, alias: Path | None = None,
) -> Path:  # fmt: skip
    """Compile sources and link them into a shared library, whose path is returned.

    ``sm``: the architecture of the PTX, such as ``sm_90a``. ``foreign`` and ``alias`` are explained at ``ptx``.

    Raises MissingLibraries, and Failure with the compiler's errors or if one compiler takes longer than ``seconds``.
    """
    objects = [_object(source, arguments, sm, tools, seconds, foreign, alias) for source in sources]
    # Linking takes the same arguments, without the language of the sources ("-x cu", two words).
    without_language = re.sub(r"\0(?:-x|--x)\0[^\0]*", "", "\0".join(["", *arguments])).split("\0")[1:]
    link_arguments = [argument for argument in without_language if argument != _RDC]
    link = ["-shared", "-nodlink", "-cudart=none", "-Xlinker=-Bsymbolic", *link_arguments, *tools.link_flags]
    stubs = _HOST_CALLS.read_text() + (_registration(objects) if _RDC in arguments else "")
    key = _digest(tools.nvcc_version, *link, stubs, *(path.name for path in objects))
    target = _folder() / f"{key}.so"
    if target.exists():
        return target
    with _workplace(key) as folder:
        inputs = [*objects, folder / "stubs.c"]
        files.write(inputs[-1], stubs)
        scratch = folder / target.name
        _compile(tools, link, inputs, scratch, sources[0].parent, seconds, foreign)
        scratch.replace(target)
    return target


@contextmanager
def _workplace(key: str) -> Iterator[Path]:
    """A temporary folder for one compiler, on the same file system as the cache, so that results move there atomically.

    Raises WrongInput if the cache lies at a path that nvcc misreads.
    """
    accept(_folder(), "name another folder by KERNELPROOF_CACHE_DIR")
    _folder().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory("", f"{key}.", _folder(), ignore_cleanup_errors=True) as name:
        yield Path(name)


def _registration(objects: Sequence[Path]) -> str:
    """C text that registers the device code of relocatable objects as one group, in place of the device linker."""
    names = sorted({name.decode() for path in objects for name in _REGISTRATION.findall(path.read_bytes())})
    head = "static char group;\nvoid kernelproof_register_linked(void (*)(void **), void *, const void *);\n"
    return head + "".join(
        f"void {name}(void (*callback)(void **), void *image, void *name, void (*unused)(void *))\n"
        "{ kernelproof_register_linked(callback, image, &group); }\n"
        for name in names
    )


def text_file(text: str, suffix: str) -> Path:
    """Store a text in the cache and return its file. Equal texts have the same file."""
    path = _folder() / "texts" / f"{_digest(text)}{suffix}"
    if not path.exists():
        files.write(path, text)
    return path


def _folder() -> Path:
    """The folder of compiled programs."""
    return places.user_cache() / "check"


def ptx(
    source: Path, arguments: Sequence[str], sm: str, tools: Toolchain, seconds: float | None = None,
    *, foreign: Foreign = None, has_cutlass: bool = True, alias: Path | None = None,
) -> Path:  # fmt: skip
    """Compile a source's kernels to a file of PTX; its host code is not compiled.

    ``has_cutlass``: whether the source may include CUTLASS. ``alias``: the path that the source gives itself by
    ``#line``.

    For an untrusted source, ``foreign`` lists the folders from which it may include files, besides those that
    ``arguments`` name; its compiler then runs in a sandbox. Raises Failure with the compiler's errors, or if the
    compiler takes longer than ``seconds``.
    """
    options = ["-ptx", "-lineinfo", *_includes(tools, has_cutlass), f"-arch={sm}", *arguments]
    return _compilation(source, options, ".ptx", tools, seconds, foreign, _place(source, arguments, foreign), alias)


def cubin(source: Path, arguments: Sequence[str], sm: str, tools: Toolchain) -> Path:
    """Compile the kernels of the user's own source to machine code for one architecture, with line information.

    Raises Failure with the compiler's errors.
    """
    options = ["-cubin", "-lineinfo", *_includes(tools), f"-arch={sm}", *arguments]
    return _compilation(source, options, ".cubin", tools, None, None, _place(source, arguments, None))


def _object(
    source: Path, arguments: Sequence[str], sm: str, tools: Toolchain, seconds: float | None, foreign: Foreign,
    alias: Path | None,
) -> Path:  # fmt: skip
    """The object file of a source."""
    number = sm.removeprefix("sm_")
    options = [
        "-c", "-lineinfo", "--no-compress", "-Xcompiler=-fPIC,-g1", *_includes(tools),
        f"-gencode=arch=compute_{number},code=compute_{number}", *arguments,
    ]  # fmt: skip
    try:
        return _compilation(source, options, ".o", tools, seconds, foreign, _place(source, arguments, foreign), alias)
    except Failure as error:
        if source.suffix == ".cu" or "-x" in arguments or "__global__" not in source.read_text(errors="replace"):
            raise
        hint = f'{source.name} has kernels and is compiled as C++: name it .cu, or pass --nvcc-args "-x cu"'
        raise Failure(f"{error}\n{hint}") from None


def _place(source: Path, arguments: Sequence[str], foreign: Foreign) -> Path:
    """The folder in which nvcc runs. It is the current folder if arguments may name files relative to it. Otherwise it
    is the source's, so that the key of the cache does not depend on the current folder."""
    return Path.cwd() if arguments or foreign is not None else source.resolve().parent


def _includes(tools: Toolchain, has_cutlass: bool = True) -> list[str]:
    """The options that name the folders of headers: CUTLASS, and the substitutes of ``_STAND_INS``."""
    accept(_STAND_INS, "move this program")
    return [*([f"-I{tools.cutlass_include}"] if has_cutlass else ()), f"-isystem={_STAND_INS}"]


def _compilation(
    source: Path, options: Sequence[str], suffix: str, tools: Toolchain, seconds: float | None, foreign: Foreign,
    place: Path, alias: Path | None = None,
) -> Path:  # fmt: skip
    """Compile a source in a folder, or take the result from the cache if the source and its headers are unchanged.

    The headers are known only after a compilation. So the key of the cache covers the source alone and leads to a
    manifest, which names the object and the digests of all headers. A lock on the key makes processes that need the
    same object at the same time compile it once.
    """
    with reading(source):
        content = source.read_bytes()
    where = source.resolve()
    key = _digest(tools.nvcc_version, *options, str(where), str(place), content)
    manifest = _folder() / f"{key}.json"
    _folder().mkdir(parents=True, exist_ok=True)
    with build_folder.Locks(_folder()) as locks, locks.take(key):
        if (stored := _valid_object(manifest)) is not None:
            return stored
        with _workplace(key) as scratch:
            target, rule = scratch / f"kernel{suffix}", scratch / "headers.d"
            words = ["-MD", "-MT=object", f"-MF={rule}", *options]
            _compile(tools, words, [where], target, place, seconds, foreign)
            headers = _headers(rule.read_text() if rule.exists() else "", tools)
            headers = [path for path in headers if alias is None or path != alias.resolve()]
            if foreign is not None:
                _refuse_outside(headers, [where, *_include_folders(options), *foreign])
            # The dependency rule cannot express a path with a backslash. Such a header is missing from the digests, its
            # changes would go unnoticed, and therefore no manifest is written below.
            digests = {str(path): _digest(path.read_bytes()) for path in headers if path.is_file()}
            final = _folder() / f"{_digest(key, target.read_bytes())}{suffix}"
            target.replace(final)
        if len(digests) == len(headers):
            files.write(manifest, json.dumps({"object": final.name, "headers": digests}))
    return final


def _valid_object(manifest: Path) -> Path | None:
    """The object that a manifest names, or None if it does not exist or a header has changed since."""
    try:
        record = json.loads(manifest.read_text())
        target = _folder() / str(record["object"])
        unchanged = all(_digest(Path(path).read_bytes()) == digest for path, digest in record["headers"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return target if unchanged and target.exists() else None


def _headers(rule: str, tools: Toolchain) -> list[Path]:
    """The files in a dependency rule, without those of the toolkit and the system, which the compiler's version
    covers."""
    text = rule.partition(":")[2].replace("\\\n", " ")
    paths = [Path(word.replace("\\ ", " ")).resolve() for word in re.findall(r"(?:\\ |\S)+", text)]
    toolkit = (tools.cuda_include.resolve(), tools.cutlass_include.resolve(), Path("/usr/include"), Path("/usr/lib"))
    return sorted({path for path in paths if not any(path.is_relative_to(root) for root in toolkit)})


def _include_folders(options: Sequence[str]) -> list[Path]:
    """The folders of headers that options of nvcc name, with links resolved."""
    words = [*options, ""]
    names = [
        match[1] or after for word, after in pairwise(words) if (match := re.fullmatch(r"(?:-I|-isystem=?)(.*)", word))
    ]
    return [Path(part).resolve() for name in names for part in name.split(",") if part]


def _refuse_outside(headers: Sequence[Path], folders: Sequence[Path]) -> None:
    """Raise Failure for a header outside of ``folders``. A sandbox hides such files, but not every system has one."""
    for path in headers:
        if not any(path.is_relative_to(folder) for folder in folders):
            raise Failure(f"{path}: a file outside of the folders that may be read is included")


def _compile(
    tools: Toolchain, arguments: Sequence[str], sources: Sequence[Path], target: Path, folder: Path,
    seconds: float | None, foreign: Foreign,
) -> None:  # fmt: skip
    """Run nvcc in a folder, in a sandbox if ``foreign`` is not None.

    Raises MissingLibraries, Failure with nvcc's first errors or after ``seconds``, and WrongInput for an argument that
    nvcc's shell would interpret.
    """
    command = nvcc_command(tools.nvcc, arguments, sources, target)
    if foreign is not None:
        views = [*toolchain_folders(tools), _STAND_INS, *sources, *_include_folders(arguments), *foreign]
        command = sandbox.command(sandbox.Sandbox(tuple(map(str, views)), (str(target.parent),)), command)
    try:
        code, output = process_tree.output(command, environment(), seconds, folder)
    except subprocess.TimeoutExpired:
        raise Failure(f"nvcc did not end within {seconds:.0f} s") from None
    if code:
        if missing := dict.fromkeys(_NOT_FOUND.findall(output)):
            raise MissingLibraries(list(missing), folder)
        lines = [line for line in output.splitlines() if line.strip()]
        # Without a sandbox, an untrusted text may have included any file, and messages about that file would quote it.
        if foreign is not None and sandbox.namespace_obstacle():
            lines = [line for line in lines if line.startswith(tuple(map(str, sources)))] or ["it does not compile"]
        faults = [line for line in lines if _FAULT.search(line)]
        raise Failure("nvcc failed:\n" + "\n".join((faults or lines)[:MOST_FAULTS]))


def _digest(*parts: str | bytes) -> str:
    """A key of the cache: 24 hexadecimal digits that depend on all parts and on their order."""
    total = hashlib.sha256()
    for part in parts:
        total.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return total.hexdigest()[:24]
