"""Loads programs, which launch the kernels of a PTX file or cubin and call the functions of its host launcher."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np

from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Function, Module, Variable
from kernelproof.emulator.frontend.translate import Compiled, translate
from kernelproof.emulator.host.cuda import SYMBOL_NOT_FOUND, LaunchRefused
from kernelproof.emulator.host.execution import KernelLaunch, output_reports
from kernelproof.emulator.host.launch_limits import device_for
from kernelproof.emulator.host.standin import active, standin
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.emulator.machine_code.module import read_cubin
from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.memory.tensors import TorchTensor, is_tensor
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.launch_state import Geometry, LaunchResult
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.options import Device, Options
from kernelproof.emulator.state.participants import Dim3
from kernelproof.emulator.state.reports import EmulatorError

Dim = int | Sequence[int]
# An argument of a kernel.
KernelArgument = Buffer | TorchTensor | int | float | np.generic | Array | bytes | bytearray


def as_dim(value: Dim) -> Dim3:
    """Extents (x, y, z) from x alone, or from up to three of them; missing ones are 1."""
    if isinstance(value, int | np.integer):
        return int(value), 1, 1
    x, y, z = (*value, 1, 1, 1)[:3]
    return int(x), int(y), int(z)


class Program:
    """The kernels of a PTX file or cubin, and the library of its host launcher if there is one. ``name``: the file, for
    messages. ``owner``: the owner number of the launcher, see ``owners``; 0 without one."""

    def __init__(self, text: str | Module, name: str = "") -> None:
        self.module = parse(text) if isinstance(text, str) else text
        self.name = name
        self.library: ctypes.CDLL | None = None
        self.owner = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """Entry names, in the order of the file."""
        return tuple(self.module.kernels)

    def entry(self, name: str) -> str:
        """The name in the PTX of the kernel with this name, or of the only kernel with this plain name. Raises
        LaunchRefused."""
        if name in self.module.kernels:
            return name
        matching = [kernel for kernel in self.kernels if plain_name(kernel) == name]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise LaunchRefused(SYMBOL_NOT_FOUND, f"kernel {name!r} is ambiguous; write one of {', '.join(matching)}")
        raise LaunchRefused(SYMBOL_NOT_FOUND, f"no kernel {name!r}; the file has {', '.join(self.kernels) or 'none'}")

    def compiled(self, kernel: str, counters: bool = False, conservative: bool = False) -> Compiled:
        """The translated kernel. Raises EmulatorError for unknown kernels and instructions, PtxError for invalid
        text."""
        return translate(self.module, kernel, counters, conservative)

    def read_only(self, kernel: str, counters: bool = False) -> frozenset[int]:
        """The numbers of parameters through which a kernel certainly writes nothing. Raises as ``compiled`` does."""
        written = self.compiled(kernel, counters).written
        if written is None:
            return frozenset()
        return frozenset(i for i, offset in enumerate(self.module.kernels[kernel].offsets) if offset not in written)

    def launch(
        self,
        kernel: str,
        grid: Dim,
        block: Dim,
        args: Sequence[KernelArgument],
        *,
        memory: Memory | None = None,
        shared_bytes: int = 0,
        ctas: Iterable[int] | None = None,
        device: Device | None = None,
        options: Options | None = None,
        check_outputs: bool = True,
        cluster: Dim = 1,
        overlapping: bool = False,
        cooperative: bool = False,
    ) -> LaunchResult:
        """Run one kernel with explicit grid, block, arguments and dynamic shared memory (bytes).

        ``kernel``: its name in the PTX, or its plain name if only one kernel has it (``vectorAdd``). ``memory``: the
        device memory; None: the memory of the buffers among ``args``, or a fresh one. ``cluster``: CTAs per cluster.
        ``overlapping``: launched with programmatic stream serialization. ``cooperative``: all CTAs are resident at the
        same time, so they may wait for each other.

        ``args``: one per parameter: a Buffer or int (pointers, integers), a float, a NumPy scalar, bytes (structs), or
        a CPU tensor of PyTorch. The kernel gets a pointer to the tensor's elements; after the launch, the tensor has
        the values that the kernel wrote.
        ``ctas``: linear numbers (x + gx * (y + gy * z)) of the CTAs to run; all if None. ``check_outputs``: elements of
        output buffers that were never written are findings, if all CTAs ran. Raises LaunchRefused if the CUDA runtime
        would refuse the launch, EmulatorError for instructions and features that the emulator does not support.
        """
        tensors = Tensors(_memory_of(args, memory))
        launch = self.prepare(
            kernel, grid, block, args, tensors, device, options or Options(), shared_bytes=shared_bytes, ctas=ctas,
            cluster=cluster, overlapping=overlapping, cooperative=cooperative,
        )  # fmt: skip
        result = launch.execute()
        tensors.store()
        if check_outputs and ctas is None:
            result.reports += output_reports(launch.memory, launch.kernel)
        return result

    def prepare(
        self,
        kernel: str,
        grid: Dim,
        block: Dim,
        args: Sequence[KernelArgument],
        tensors: Tensors,
        device: Device | None,
        options: Options,
        *,
        shared_bytes: int,
        ctas: Iterable[int] | None,
        cluster: Dim,
        overlapping: bool,
        cooperative: bool,
    ) -> KernelLaunch:
        """A launch that is ready to execute; arguments are those of ``launch``. PyTorch tensors among ``args`` are
        uploaded to the memory of ``tensors``, which has to store them back afterwards."""
        kernel = self.entry(kernel)
        device = device or device_for(self.module.target, self.module.kernels[kernel].machine_code)
        geometry = Geometry(as_dim(grid), as_dim(block), shared_bytes, as_dim(cluster), overlapping, cooperative)
        # Only tensors need the analysis of which parameters are read-only: those are not copied back.
        read_only = self.read_only(kernel, options.counters) if any(map(is_tensor, args)) else frozenset()
        parameters = pack_arguments(self.module.kernels[kernel], args, tensors, read_only)
        return KernelLaunch(
            self.module, kernel, geometry, parameters, tensors.memory, device, options, ctas, device.smem_optin_bytes,
            large_clusters=True,
        )  # fmt: skip

    def call(self, function: str, *args: object) -> int:
        """Call a function of the launcher, and return its int.

        Buffers are passed as pointers, ints as ``int`` (64-bit if they do not fit), floats as ``double``, NumPy scalars
        as their own type, and ctypes objects unchanged. CPU tensors of PyTorch are passed as pointers, too: they are
        uploaded before the call, and after it they have the values that kernels wrote. Raises EmulatorError without a
        launcher, or outside of a session.
        """
        if self.library is None:
            raise EmulatorError("this program was loaded without a launcher")
        if not active:
            raise EmulatorError("call launchers inside `with emulator.session(...)`")
        owners[self.owner] = self
        tensors = session_tensors[-1]
        words = (ctypes.c_void_p(tensors.address(arg)) if is_tensor(arg) else arg for arg in args)
        code = call(self.library, function, *words)
        tensors.store()
        return code


# The tensors of the sessions that are open, the innermost last.
session_tensors: list[Tensors] = []


def _memory_of(args: Sequence[KernelArgument], memory: Memory | None) -> Memory:
    """The memory of a launch: ``memory``, or that of the buffers among the arguments, or a fresh one. Raises
    EmulatorError if these are several."""
    found = [] if memory is None else [memory]
    for arg in args:
        if isinstance(arg, Buffer) and not any(arg.memory is other for other in found):
            found.append(arg.memory)
    if len(found) > 1:
        which = "than the one that is passed as `memory`" if memory is not None else "than others"
        raise EmulatorError(f"a buffer among the arguments is in another memory {which}: upload all to one Memory")
    return found[0] if found else Memory()


def call(library: ctypes.CDLL, function: str, *args: object) -> int:
    """Call a function of a library. Arguments: see ``Program.call``. Raises EmulatorError for an unknown function."""
    target = getattr(library, function, None)
    if target is None:
        raise EmulatorError(f"the launcher has no function {function!r}")
    return int(target(*(_c_argument(a) for a in args)))


_C_TYPES: dict[str, type[ctypes._SimpleCData[int]] | type[ctypes._SimpleCData[float]]] = {
    "i1": ctypes.c_int8,
    "i2": ctypes.c_int16,
    "i4": ctypes.c_int32,
    "i8": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u2": ctypes.c_uint16,
    "u4": ctypes.c_uint32,
    "u8": ctypes.c_uint64,
    "f4": ctypes.c_float,
    "f8": ctypes.c_double,
}


def _c_argument(value: object) -> object:
    """An argument of ``Program.call`` in the form in which ctypes passes it."""
    if isinstance(value, Buffer):
        return ctypes.c_void_p(value.address)
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, np.generic):
        return _C_TYPES[value.dtype.str[1:]](value.item())
    if isinstance(value, bool | int):
        return ctypes.c_int(value) if -(1 << 31) <= value < 1 << 31 else ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return value.encode() if isinstance(value, str) else value


def pack_arguments(
    function: Function,
    args: Sequence[KernelArgument],
    tensors: Tensors | None = None,
    read_only: frozenset[int] = frozenset(),
) -> bytes:
    """The kernel's parameter block with these arguments. Tensors among them are uploaded by ``tensors``, as inputs if
    ``read_only`` has their index. Raises EmulatorError if number, size or type of arguments do not fit."""
    name = plain_name(function.name)
    if len(args) != len(function.params):
        kinds = ", ".join(
            f".{param.kind}[{param.size}]" if param.kind == "b8" else f".{param.kind}" for param in function.params
        )
        raise EmulatorError(f"{name} takes ({kinds}), and {len(args)} arguments are passed")
    block = bytearray(function.param_bytes)
    for i, (arg, param, offset) in enumerate(zip(args, function.params, function.offsets, strict=True)):
        if tensors is not None and is_tensor(arg):
            arg = tensors.address(arg, role="input" if i in read_only else "inout")
        raw = _raw_argument(arg, param, f"argument {i} of {name}")
        if len(raw) != param.size:
            hint = "; to pass an array: memory.upload(array, 'inout')" if isinstance(arg, np.ndarray) else ""
            raise EmulatorError(f"argument {i} of {name} has {len(raw)} bytes, the parameter {param.size}{hint}")
        block[offset : offset + param.size] = raw
    return bytes(block)


def _raw_argument(arg: KernelArgument, param: Variable, name: str) -> bytes:
    """The bytes of an argument for a parameter. ``name``: what errors call the argument."""
    if isinstance(arg, Buffer):
        return struct.pack("<Q", arg.address)
    if isinstance(arg, bool | int) and param.kind not in _FLOATS:
        bits = 8 * param.size
        if not -(1 << bits - 1) <= arg < 1 << bits:
            raise EmulatorError(f"{name}: {arg} does not fit into {param.size} bytes")
        return (arg & ((1 << bits) - 1)).to_bytes(param.size, "little")
    if isinstance(arg, bool | int | float):
        if re.fullmatch(r"[us]\d+", param.kind):
            raise EmulatorError(f"{name} is an integer (.{param.kind}), not {arg}")
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}.get(param.size, "<d"), arg)
    if isinstance(arg, np.generic | np.ndarray):
        return arg.tobytes()
    if isinstance(arg, bytes | bytearray):
        return bytes(arg)
    raise EmulatorError(f"{name} is {type(arg).__name__}: a Buffer, a number, bytes or a CPU tensor is needed")


_FLOATS = ("f16", "f32", "f64")


# Every launcher that has been opened has a number, its owner number, under which the stand-in runtime keeps its
# kernels.
_owner_of_version: dict[tuple[str, int, int, int], int] = {}  # version of the file -> owner number
_libraries: dict[int, ctypes.CDLL] = {}  # owner number -> library
owners: dict[int, Program] = {}  # owner number -> the program in which its kernels are looked up at present


def load(source: str | Path, launcher: str | Path | None = None) -> Program:
    """A program from PTX text, from a PTX file (a Path, or a str without line breaks that ends in ``.ptx``), or from
    the machine code of a cubin (a Path that ends in ``.cubin``).

    ``launcher``: a shared library built by ``nvcc -shared -Xcompiler -fPIC -cudart none``; its kernels are looked up by
    name in this PTX. Raises PtxError for text that is not PTX, EmulatorError for a launcher that cannot be opened and
    for machine code that is not modelled, DisassemblyError for a file that is no cubin.
    """
    if isinstance(source, Path) and source.suffix == ".cubin":
        program = Program(read_cubin(source), str(source))
    elif isinstance(source, Path) or ("\n" not in source and source.endswith(".ptx")):
        program = Program(Path(source).read_text(), str(source))
    else:
        program = Program(source)
    if launcher is not None:
        program.owner = _owner_of(str(Path(launcher).resolve()))
        program.library = _libraries[program.owner]
        owners[program.owner] = program
    return program


def _owner_of(path: str) -> int:
    """The owner number of a launcher; each version of the file is opened once per process."""
    try:
        stat = Path(path).stat()
        version = path, stat.st_ino, stat.st_mtime_ns, stat.st_size
        owner = _owner_of_version.get(version)
        if owner is None:
            # 0 is the number of kernels that no launcher of ours registered.
            owner = len(_owner_of_version) + 1
            has_older = any(file == path for file, *_ in _owner_of_version)
            _libraries[owner] = _open(path, owner, copied=has_older)
            _owner_of_version[version] = owner
    except OSError as error:
        raise EmulatorError(f"launcher {path}: {error}") from error
    return owner


def _open(path: str, owner: int, *, copied: bool) -> ctypes.CDLL:
    """Open a launcher, whose static constructors register its kernels under the owner number. ``copied``: a copy of the
    file is opened, because for a known path the system's loader returns the file that it opened before."""
    with tempfile.TemporaryDirectory(prefix="kernelproof-launcher-") if copied else nullcontext() as folder:
        name = shutil.copy(path, folder) if folder else path
        standin().emulator_owner(owner)
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL)
        finally:
            standin().emulator_owner(0)


def from_file(path: Path) -> Program:
    """The program of a PTX file, which is parsed once per version of the file."""
    stat = path.stat()
    return _parsed_version(path.resolve(), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _parsed_version(path: Path, modified_ns: int, nbytes: int) -> Program:
    """The program of a version of a PTX file. Time and size are only part of the cache's key."""
    del modified_ns, nbytes
    return Program(path.read_text(), str(path))
