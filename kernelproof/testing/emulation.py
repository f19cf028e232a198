"""Defines the fixture ``cuda_emulator``: an emulated GPU for the duration of a test, and its findings."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from kernelproof import triton_emulation
from kernelproof.checking import compilation, devices, plan, supervision, text, writing
from kernelproof.checking.execution import REPLACED_LIBRARIES, open_library
from kernelproof.checking.findings import local
from kernelproof.checking.names import plain, resolved, short_names
from kernelproof.checking.result import Result
from kernelproof.emulator import (
    RULES,
    Buffer,
    Device,
    EmulatorError,
    LaunchResult,
    Memory,
    Options,
    Program,
    Report,
    Session,
    SessionPolicy,
    by_cause,
    load,
)
from kernelproof.emulator.host.program import Dim, call, from_file
from kernelproof.emulator.host.standin import standin
from kernelproof.emulator.memory.tensors import TorchTensor
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.causes import grouped
from kernelproof.ground import places, toolchain
from kernelproof.ground.errors import MissingTool, WrongInput
from kernelproof.testing.arrays import ArrayRole, Loan

if TYPE_CHECKING:
    from kernelproof.triton_emulation.session import TritonSession

TIMEOUT_S, MEMORY_GIB = 600.0, 8.0  # limits of check_program


@dataclass(frozen=True)
class MarkOptions:
    """The options of the mark ``emulated``.

    ``device``: a name as for ``check --gpu``; None means the GPU for which each kernel was compiled. ``adverse``:
    whether events happen in another order that hardware may choose. ``allow``: rules whose findings fail no test.
    ``counters``: whether executed instructions are counted. ``triton``: whether launches of Triton kernels are
    emulated; None means only if triton has been imported.
    """

    device: str | None = None
    adverse: bool = False
    allow: tuple[str, ...] = ()
    counters: bool = False
    triton: bool | None = None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> MarkOptions:
        """Makes the options from a mark's arguments. Raises WrongInput."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise WrongInput(f"no option {name!r}; there are {', '.join(names)}")
        allow = options.get("allow", ())
        rules = (allow,) if isinstance(allow, str) else tuple(allow) if isinstance(allow, Iterable) else (allow,)
        for rule in rules:
            if rule not in RULES:
                raise WrongInput(f"allow: no rule {rule!r}; the rules are {', '.join(sorted(RULES))}")
        device = options.get("device")
        if device is not None:
            devices.device(str(device))
        triton = options.get("triton")
        return cls(
            None if device is None else str(device), bool(options.get("adverse")), tuple(map(str, rules)),
            bool(options.get("counters")), None if triton is None else bool(triton),
        )  # fmt: skip

    @property
    def target(self) -> Device | None:
        """The emulated device, None if the mark names none."""
        return devices.device(self.device) if self.device else None


class KernelFile:
    """The kernels of one source or PTX file, as ``cuda_emulator.compile`` and ``load`` return them."""

    def __init__(self, emulator: CudaEmulator, program: Program, library: Callable[[], Path] | None = None) -> None:
        self.program = program
        self._emulator, self._library = emulator, library
        self._opened: ctypes.CDLL | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The shortest names of the kernels that are unambiguous."""
        return tuple(short_names(self.program.kernels).values())

    def launch(
        self, kernel: str, grid: Dim = 1, block: Dim = 1, args: Sequence[object] = (), *,
        smem: int = 0, cluster: Dim = 1, cooperative: bool = False, overlapping: bool = False,
    ) -> LaunchResult:  # fmt: skip
        """Run a kernel of this file; see ``CudaEmulator.launch``."""
        name = resolved(kernel, self.program.kernels)
        return self._emulator.run(
            self.program, name, grid, block, args, shared_bytes=smem, cluster=cluster, cooperative=cooperative,
            overlapping=overlapping,
        )  # fmt: skip

    def function(self, name: str) -> ctypes.CDLL | None:
        """The library of the file's host code if it has such a function, else None. The library is compiled by the
        first call."""
        if self._opened is None and self._library is not None:
            self._opened = self._emulator.open_library(self._library())
        return self._opened if self._opened is not None and hasattr(self._opened, name) else None

    def call(self, function: str, *args: object) -> int:
        """Call a function of this file's host code; see ``CudaEmulator.call``. Raises WrongInput if it has none of this
        name."""
        library = self.function(function)
        if library is None:
            raise WrongInput(f'call: no function {function} in this file; it must be extern "C"')
        return self._emulator.call_in(library, function, args)


class CudaEmulator:
    """An emulated GPU for the duration of a test.

    Arguments of kernels and launchers are NumPy arrays and torch tensors on the CPU, numbers, NumPy scalars, and
    Buffers of ``upload``. An array is a pointer to its memory on the device, and has what the kernel wrote after the
    launch. Its role is ``inout`` unless ``input``, ``output`` or ``scratch`` is wrapped around it; an array that NumPy
    calls read-only is ``input``. ``folders``: where files are searched, in this order. ``missing``: ends the test,
    given the reason, if a compiler is missing. ``triton``: the session of Triton's launches, if they are taken over.
    """

    def __init__(self, settings: MarkOptions, folders: Sequence[Path], missing: Callable[[str], NoReturn]) -> None:
        self.settings, self.folders, self._missing = settings, folders, missing
        self.options = Options(counters=settings.counters, adverse=settings.adverse)
        # Outputs are checked by ``end``, and those of a direct launch by its ``Loan``.
        policy = SessionPolicy(settings.target, self.options, check_outputs=False, refusals_are_findings=True)
        self.session = Session(policy)
        self.files: list[KernelFile] = []
        self.failures: list[str] = []  # failures of programs
        self.triton: TritonSession | None = None
        self._libraries: list[ctypes.CDLL] = []
        self._spare: Memory | None = None
        self._stack = ExitStack()
        self._open = self._ended = False

    def start(self, needed: bool) -> None:
        """Begin the session, which needs a C compiler. Without one, kernels can be launched but host launchers cannot
        be called; if those are ``needed``, the test ends here."""
        self._take_over_triton()
        try:
            standin()
        except EmulatorError as error:
            if needed:
                self._missing(str(error))
            return
        self._stack.enter_context(self.session)
        self._open = True

    def _take_over_triton(self) -> None:
        """Let launches of Triton kernels run on the emulated device. Without an option this is done if triton has been
        imported and does not interpret kernels."""
        emulates_triton = self.settings.triton
        if emulates_triton is None:
            emulates_triton = "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET")
        if emulates_triton and self.triton is None:
            device = self.settings.device or devices.DEFAULT
            try:
                session = triton_emulation.emulate(device, check=False, options=self.options)
            except MissingTool as error:
                self._missing(str(error))
            self.triton = self._stack.enter_context(session)

    def end(self) -> None:
        """End the session, once. Outputs of ``upload`` must be completely written by now."""
        if self._ended:
            return
        self._ended = True
        self._stack.close()
        self.session.check_outputs()

    # --- kernels ---

    def compile(self, source: str | Path, nvcc_args: str = "") -> KernelFile:
        """Compile a CUDA file, or CUDA text (which has line breaks), and return its kernels.

        A file is searched beside the test, then in pytest's root folder. Each content is compiled once. Raises
        WrongInput, and Failure with the compiler's errors.
        """
        path = self._path(source, ".cu")
        arguments, sm = compilation.split_arguments(nvcc_args)
        sm = sm or devices.target(self.settings.device)
        try:
            tools = toolchain.discover()
        except MissingTool as error:
            self._missing(str(error))
        program = from_file(compilation.ptx(path, arguments, sm, tools))
        return self._add(KernelFile(self, program, lambda: compilation.library([path], arguments, sm, tools)))

    def load(self, ptx: str | Path) -> KernelFile:
        """The kernels of a PTX file, or of PTX text (which has line breaks)."""
        if isinstance(ptx, str) and "\n" in ptx:
            return self._add(KernelFile(self, load(ptx)))
        return self._add(KernelFile(self, from_file(self._path(ptx, ".ptx"))))

    def _add(self, file: KernelFile) -> KernelFile:
        """Keep a file, so that ``launch`` and ``call`` find its functions."""
        self.files.append(file)
        return file

    def _path(self, source: str | Path, suffix: str) -> Path:
        """The path of a file in one of the folders, or of a new file with this text. Raises WrongInput."""
        if isinstance(source, str) and "\n" in source:
            return compilation.text_file(source, suffix)
        paths = [folder / source for folder in (*self.folders, Path.cwd())]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise WrongInput(f"no file {source} in {' or '.join(dict.fromkeys(map(str, self.folders)))}")
        return path

    def launch(
        self, kernel: str, grid: Dim = 1, block: Dim = 1, args: Sequence[object] = (), *,
        smem: int = 0, cluster: Dim = 1, cooperative: bool = False, overlapping: bool = False,
    ) -> LaunchResult:  # fmt: skip
        """Run a kernel of a file that was compiled or loaded, by its short name.

        ``grid``, ``block``, ``cluster``: x, or up to (x, y, z); ``smem``: bytes of dynamic shared memory. The result
        has the launch's counters, if the mark asks for them. Raises WrongInput for an unknown or ambiguous name,
        EmulatorError, LaunchRefused.
        """
        owners = {name: file for file in self.files for name in file.program.kernels}
        return owners[resolved(kernel, owners)].launch(
            resolved(kernel, owners), grid, block, args,
            smem=smem, cluster=cluster, cooperative=cooperative, overlapping=overlapping,
        )  # fmt: skip

    def run(
        self, program: Program, kernel: str, grid: Dim, block: Dim, args: Sequence[object], *,
        shared_bytes: int, cluster: Dim, cooperative: bool, overlapping: bool,
    ) -> LaunchResult:  # fmt: skip
        """Run a kernel by its full name."""
        # If nothing is in the session's memory, each launch gets other memory, so that tests with many launches stay
        # small.
        memory = self.session.memory if self.session.memory.buffers else self._spare or Memory()
        loan = Loan(memory, args)
        try:
            result = self.session.run(
                program, kernel, grid, block, [loan.argument(argument) for argument in args], memory=memory,
                shared_bytes=shared_bytes, cluster=cluster, cooperative=cooperative, overlapping=overlapping,
            )  # fmt: skip
            unwritten = loan.unwritten(kernel)
        finally:
            loan.store()
        self._spare = memory if memory.buffers else None
        result.reports += unwritten
        self.session.reports += unwritten
        print(result.output, end="")
        return result

    # --- arrays ---

    def input(self, array: Array | TorchTensor) -> ArrayRole:
        """An argument that kernels only read. A write is a finding."""
        return ArrayRole(array, "input")

    def output(self, array: Array | TorchTensor) -> ArrayRole:
        """An argument whose every element the launch must write, and not read before."""
        return ArrayRole(array, "output")

    def scratch(self, array: Array | TorchTensor) -> ArrayRole:
        """An argument whose content is undefined before the launch and is not copied back."""
        return ArrayRole(array, "scratch")

    def upload(self, array: Array, role: str = "inout", name: str = "") -> Buffer:
        """Copy an array to device memory that exists until the test ends; ``download()`` of the buffer copies it back.
        ``role``: input, output, inout or scratch."""
        return self.session.memory.upload(array, role, name=name)

    # --- host code ---

    def open(self, library: str | Path) -> ctypes.CDLL:
        """Open a library with host launchers. The emulated runtime replaces CUDA's, so the library must be linked with
        -cudart none or shared, and its PTX be uncompressed. Its functions are called by ``call`` or by ctypes."""
        opened = self.open_library(self._path(library, ".so"))
        self._libraries.append(opened)
        return opened

    def open_library(self, path: Path) -> ctypes.CDLL:
        """Open a library by its path. Raises WrongInput."""
        if not self._open:
            self.start(needed=True)
        content = path.read_bytes()
        return open_library(path, [name for name in REPLACED_LIBRARIES if name.encode() in content])

    def call(self, function: str, *args: object) -> int:
        """Call an extern "C" function of an opened library or of a compiled file's host code, and return its int.

        Arrays are pointers to device memory; for a function that takes a pointer to host memory pass
        ``x.ctypes.data_as(ctypes.c_void_p)``. int is int (long long if it does not fit), float is double. Raises
        WrongInput if there is no such function.
        """
        for library in self._libraries:
            if hasattr(library, function):
                return self.call_in(library, function, args)
        for file in self.files:
            if (host_library := file.function(function)) is not None:
                return self.call_in(host_library, function, args)
        raise WrongInput(f'call: no function {function} in what was opened and compiled; it must be extern "C"')

    def call_in(self, library: ctypes.CDLL, function: str, args: Sequence[object]) -> int:
        """Call a function of one library."""
        loan = Loan(self.session.memory, args)
        try:
            code = call(library, function, *(loan.argument(argument) for argument in args))
            self.session.reports += loan.unwritten()
            return code
        finally:
            loan.store()

    def check_program(
        self, *sources: str | Path, args: Sequence[str] = (), nvcc_args: str = "", exit_code: int = 0,
        timeout: float = TIMEOUT_S, memory: float = MEMORY_GIB, sample: int = 0,
    ) -> Result:  # fmt: skip
        """Compile a program and run its main in a process of its own, as ``kernelproof check`` does.

        The test fails if it does not end with ``exit_code``. ``timeout``: seconds; ``memory``: GiB; ``sample``: CTAs of
        a grid to run, 0: all.
        """
        paths = [self._path(source, ".cu") for source in sources]
        arguments, sm = compilation.split_arguments(nvcc_args)
        device = self.settings.device or devices.nearest(sm or devices.DEFAULT)
        try:
            tools = toolchain.discover()
        except MissingTool as error:
            self._missing(str(error))
        library = compilation.library(paths, arguments, sm or devices.target(device), tools)
        main = (str(paths[0].with_suffix("")), *args)
        program = plan.CheckPlan(
            device, library, main=main, counters=self.settings.counters, adverse=self.settings.adverse, sample=sample,
            quiet=True,
        )  # fmt: skip
        with TemporaryDirectory() as folder:
            # The child process loads a copy. If this process has opened the library, it would inherit its state.
            copy = Path(shutil.copy(library, folder))
            result = supervision.run(replace(program, library=copy), " ".join(map(str, sources)), timeout, memory)
        self.session.reports += result.findings.values()
        self.failures += [f"{result.target}: not checked: {reason}" for _, reason in result.refusals]
        if result.program_exit_code != exit_code:
            ending = result.ending or "ended with exit code 0"
            self.failures.append(f"{result.target}: the program {ending}; {exit_code} is expected")
        return result

    # --- findings ---

    @property
    def findings(self) -> list[Report]:
        """All findings so far: one per cause, errors first."""
        triton = self.triton.reports if self.triton is not None else []
        return by_cause([*self.session.reports, *triton])

    @property
    def errors(self) -> list[Report]:
        """The findings that fail the test."""
        return [item for item in self.findings if item.is_error and item.kind not in self.settings.allow]

    def failure(self) -> str:
        """The reasons why the test fails, one line per error; empty if it passes."""
        lines = [*self.failures, *(f"{item.kind}{_where(item)}: {item.message}" for item in grouped(self.errors))]
        return "\n".join(lines)

    def report(self) -> str:
        """The text of all findings: what is wrong, where, both accesses, what to do, and the page of the rule."""
        failing = grouped(self.errors)
        allowed_errors = grouped(item for item in self.findings if item.is_error and item.kind in self.settings.allow)
        parts = []
        for item in (*failing, *allowed_errors, *grouped(item for item in self.findings if not item.is_error)):
            allowed = "allowed " if item.is_error and item.kind in self.settings.allow else ""
            times = f"    {item.count} times\n" if item.count > 1 else ""
            page = places.pages() / "rules" / f"{item.kind}.md"
            others = f"    {text.others(item)}\n" if item.also else ""
            parts.append(f"{allowed}{text.finding(item)}{times}{others}    page: {page}")
        if os.environ.get("GITHUB_ACTIONS"):
            parts += [writing.annotation(item) for item in failing]
        return "\n".join([*parts, *self.failures])


def _where(item: Report) -> str:
    """The kernel and the source line of a finding, as the end of a phrase."""
    home = local(item.access.site.home) if item.access.site.home else None
    kernel = f" in {plain(item.kernel)}" if item.kernel else ""
    return kernel + (f" at {home.file}:{home.line}" if home is not None else "")
