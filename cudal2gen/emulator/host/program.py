"""Programs and sessions: explicit launches, and the stand-in CUDA runtime under an unmodified host launcher.

The stand-in (``runtime.c``, built once with the system's C compiler) hands each runtime call to ``Session``, which
enforces what the real runtime enforces and executes launches at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.frontend import ptx
from cudal2gen.emulator.frontend.ptx import Function, Module
from cudal2gen.emulator.frontend.translate import translate
from cudal2gen.emulator.hopper import bulk
from cudal2gen.emulator.machine.batch import (
    Compiled,
    Device,
    Launch,
    LaunchResult,
    Options,
    Overtaken,
    Runaway,
    in_clusters,
)
from cudal2gen.emulator.memory.arena import POISON, Buffer, Memory
from cudal2gen.emulator.state.hazards import EmulatorError, Report

Array = NDArray[Any]
Dim = int | Sequence[int]
CtaFilter = Callable[[tuple[int, int, int]], Iterable[int]]
# Beyond this many bytes of writable memory no copy is kept for a second, conservative run.
SNAPSHOT_LIMIT = 1 << 28
# A second pattern for undefined shared memory: a finite number (1.0 and a little) as fp16, bf16 and fp32.
OTHER_POISON = 0x3C
STATIC_SHARED_LIMIT = 48 * 1024
RESERVED_SHARED = 1024

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION, INVALID_SYMBOL = 0, 1, 2, 9, 13
INVALID_FUNCTION, NO_DEVICE, INVALID_DEVICE, INVALID_IMAGE, FILE_NOT_FOUND = 98, 100, 101, 200, 301
INVALID_HANDLE, SYMBOL_NOT_FOUND, LAUNCH_FAILURE, NOT_SUPPORTED = 400, 500, 719, 801
INVALID_CLUSTER = 912
# cudaLaunchAttributeID.
CLUSTER_DIMENSION, STREAM_SERIALIZATION = 4, 6
PORTABLE_CLUSTER, NON_PORTABLE_CLUSTER = 8, 16


class LaunchRefused(EmulatorError):
    """The runtime would refuse this launch; ``code`` is its cudaError_t."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def cache_dir() -> Path:
    """Folder of the compiled stand-in: ``$CUDAL2GEN_CACHE_DIR``, else ``cudal2gen`` in the user's cache folder."""
    own = os.environ.get("CUDAL2GEN_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cudal2gen"


def runtime_path() -> Path:
    """The stand-in runtime as a shared library, built at the first call.

    Raises EmulatorError when there is no C compiler or it fails.
    """
    source = Path(__file__).with_name("runtime.c")
    text = source.read_bytes()
    flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    compiler = next((c for c in (os.environ.get("CC"), "gcc", "cc", "clang") if c and shutil.which(c)), None)
    digest = hashlib.sha256(text + " ".join(flags).encode()).hexdigest()[:20]
    folder = cache_dir() / "emulator"
    target = folder / f"runtime-{digest}.so"
    if target.exists():
        return target
    if compiler is None:
        raise EmulatorError("no C compiler (gcc, cc or clang) on PATH: the stand-in CUDA runtime cannot be built")
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, "-x", "c", str(source), "-o", name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise EmulatorError(f"{compiler} failed on {source.name}:\n{done.stderr}")
        # A reader sees either nothing or the whole file.
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


# --- programs
# ----------------------------------------------------------------------------------------------------------


def _dim(value: Dim) -> tuple[int, int, int]:
    if isinstance(value, int | np.integer):
        return int(value), 1, 1
    x, y, z = (*value, 1, 1, 1)[:3]
    return int(x), int(y), int(z)


class Program:
    """A PTX file, ready to launch, with its host launcher if there is one."""

    def __init__(self, text: str, name: str = "") -> None:
        self.module: Module = ptx.parse(text)
        self.name = name
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.library: ctypes.CDLL | None = None
        self.owner = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """Entry names, in the order of the file."""
        return tuple(self.module.kernels)

    def compiled(self, kernel: str, counters: bool = False, conservative: bool = False) -> Compiled:
        """The translated kernel. Raises EmulatorError for unknown kernels and instructions, PtxError for bad text."""
        return translate(self.module, kernel, counters, conservative)

    def launch(
        self,
        kernel: str,
        grid: Dim,
        block: Dim,
        args: Sequence[Any],
        *,
        memory: Memory,
        shared_bytes: int = 0,
        ctas: Iterable[int] | None = None,
        device: Device | None = None,
        options: Options | None = None,
        check_outputs: bool = True,
        cluster: Dim = 1,
        overlapping: bool = False,
    ) -> LaunchResult:
        """Run one kernel with explicit grid, block, arguments and dynamic shared memory (bytes).

        ``cluster``: CTAs per cluster. ``overlapping``: launched with programmatic stream serialization.

        ``args``: one per parameter: a Buffer or int (pointers, integers), a float, a NumPy scalar, or bytes (structs).
        ``ctas``: linear numbers (x + gx * (y + gy * z)) of those to run; all if None. ``check_outputs`` reports what an
        output buffer lacks afterwards (only when all CTAs ran). Raises LaunchRefused where the CUDA runtime would
        refuse, EmulatorError for what the machine does not know.
        """
        function = self.module.kernels.get(kernel)
        if function is None:
            raise LaunchRefused(
                SYMBOL_NOT_FOUND, f"no kernel {kernel!r}; the file has {', '.join(self.kernels) or 'none'}"
            )
        params = pack_arguments(function, args)
        device = device or Device()
        result = execute(
            self,
            kernel,
            _dim(grid),
            _dim(block),
            params,
            shared_bytes,
            memory,
            device,
            options or Options(),
            ctas,
            device.smem_optin_bytes,
            _dim(cluster),
            overlapping,
            True,
        )
        if check_outputs and ctas is None:
            result.reports += output_reports(memory, kernel)
        return result

    def call(self, function: str, *args: Any) -> int:
        """Call a function of the launcher. Buffers become pointers, ints ``int`` (or 64-bit if they do not fit), NumPy
        scalars their own type, floats ``double``; ctypes objects pass as they are. Returns the function's int.

        Raises EmulatorError without launcher, or outside a session.
        """
        if self.library is None:
            raise EmulatorError("this program was loaded without a launcher")
        if Session.current is None:
            raise EmulatorError("call launchers inside `with emulator.session(...)`")
        _owners[self.owner] = self
        target = getattr(self.library, function, None)
        if target is None:
            raise EmulatorError(f"the launcher has no function {function!r}")
        return int(target(*(_c_argument(a) for a in args)))


_C_TYPES: dict[str, Any] = {
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


def _c_argument(value: Any) -> Any:
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
    if isinstance(value, str):
        return value.encode()
    return value


def pack_arguments(function: Function, args: Sequence[Any]) -> bytes:
    """Arguments -> the kernel's parameter block. Raises EmulatorError when number or size do not fit."""
    if len(args) != len(function.params):
        raise EmulatorError(f"{function.name} takes {len(function.params)} arguments, not {len(args)}")
    block = bytearray(function.param_bytes)
    for i, (arg, param, offset) in enumerate(zip(args, function.params, function.offsets, strict=True)):
        if isinstance(arg, Buffer):
            raw = struct.pack("<Q", arg.address)
        elif isinstance(arg, bool | int):
            raw = (arg & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little")
        elif isinstance(arg, float):
            raw = struct.pack({2: "<e", 4: "<f", 8: "<d"}.get(param.size, "<d"), arg)
        elif isinstance(arg, np.generic | np.ndarray):
            raw = arg.tobytes()
        else:
            raw = bytes(arg)
        if len(raw) != param.size:
            raise EmulatorError(f"argument {i} of {function.name} has {len(raw)} bytes, the parameter {param.size}")
        block[offset : offset + param.size] = raw
    return bytes(block)


def _load_globals(program: Program, memory: Memory) -> dict[str, int]:
    """Place the module's global and constant variables; returns their addresses."""
    key = program.digest
    out = {}
    fresh = []
    variables = [v for v in program.module.variables.values() if v.space in ("global", "const")]
    for function in (*program.module.kernels.values(), *program.module.functions.values()):
        variables += [v for v in function.variables if v.space in ("global", "const")]
    for variable in variables:
        buffer = memory.globals.get((key, variable.name))
        if buffer is None:
            buffer = memory.allocate(max(variable.size, 1), "inout", name=variable.name)
            buffer.bytes()[:] = 0
            if variable.init is not None:
                buffer.bytes()[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
            memory.globals[(key, variable.name)] = buffer
            fresh.append((variable, buffer))
        out[variable.name] = buffer.address
    for variable, buffer in fresh:
        for offset, symbol, addend in variable.pointers:
            address = out.get(symbol, 0) + addend
            buffer.bytes()[offset : offset + 8] = np.frombuffer(struct.pack("<Q", address), np.uint8)
    return out


def check_launch(
    function: Function,
    compiled: Compiled,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    dynamic_limit: int,
    device: Device,
    cluster: tuple[int, int, int] = (1, 1, 1),
    large_clusters: bool = False,
) -> None:
    """Refuse what the CUDA runtime refuses. Raises LaunchRefused."""
    check_cluster(function, grid, device, cluster, large_clusters)
    threads = block[0] * block[1] * block[2]
    if min(*grid, *block) < 1:
        raise LaunchRefused(INVALID_CONFIGURATION, f"grid {grid} and block {block} must be positive")
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        raise LaunchRefused(INVALID_CONFIGURATION, f"grid {grid} exceeds (2147483647, 65535, 65535)")
    if threads > 1024 or block[0] > 1024 or block[1] > 1024 or block[2] > 64:
        raise LaunchRefused(INVALID_CONFIGURATION, f"block {block} exceeds 1024 threads or (1024, 1024, 64)")
    limit = function.attributes.get("maxntid")
    if limit and threads > int(np.prod(limit)):
        raise LaunchRefused(
            INVALID_CONFIGURATION,
            f"block of {threads} threads, the kernel was compiled for at most {int(np.prod(limit))}",
        )
    wanted = function.attributes.get("reqntid")
    if wanted and tuple(block) != (*wanted, 1, 1, 1)[:3]:
        raise LaunchRefused(INVALID_CONFIGURATION, f"block {block}, the kernel requires {wanted}")
    if shared_bytes < 0 or shared_bytes > dynamic_limit:
        raise LaunchRefused(
            INVALID_VALUE,
            f"{shared_bytes} bytes of dynamic shared memory, allowed are {dynamic_limit} "
            "(cudaFuncSetAttribute raises it)",
        )
    total = compiled.shared_static + shared_bytes
    if total > device.smem_optin_bytes:
        raise LaunchRefused(INVALID_VALUE, f"{total} bytes of shared memory, the device has {device.smem_optin_bytes}")


def check_cluster(
    function: Function, grid: tuple[int, int, int], device: Device, cluster: tuple[int, int, int], large: bool
) -> None:
    """Refuse cluster dimensions that the CUDA runtime refuses. ``large``: non-portable sizes are allowed."""
    size = cluster[0] * cluster[1] * cluster[2]
    fixed = function.attributes.get("reqnctapercluster")
    if fixed and min(fixed) > 0 and (*fixed, 1, 1, 1)[:3] != cluster:
        raise LaunchRefused(INVALID_CLUSTER, f"cluster {cluster}, the kernel was compiled for {fixed}")
    if size == 1:
        return
    if min(cluster) < 1:
        raise LaunchRefused(INVALID_CLUSTER, f"cluster {cluster} must be positive")
    if device.capability[0] < 9:
        raise LaunchRefused(NOT_SUPPORTED, f"clusters need compute capability 9.0, the device has {device.capability}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchRefused(INVALID_CONFIGURATION, f"grid {grid} is no multiple of the cluster {cluster}")
    most = NON_PORTABLE_CLUSTER if large else PORTABLE_CLUSTER
    if size > most:
        raise LaunchRefused(
            INVALID_CLUSTER,
            f"cluster {cluster} has {size} CTAs, allowed are {most}"
            + ("" if large else " (cudaFuncAttributeNonPortableClusterSizeAllowed raises it to 16)"),
        )


def execute(
    program: Program,
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    params: bytes,
    shared_bytes: int,
    memory: Memory,
    device: Device,
    options: Options,
    ctas: Iterable[int] | None,
    dynamic_limit: int,
    cluster: tuple[int, int, int] = (1, 1, 1),
    overlapping: bool = False,
    large_clusters: bool = False,
) -> LaunchResult:
    """Check and run one launch. Raises LaunchRefused or EmulatorError."""
    function = program.module.kernels[kernel]
    compiled = program.compiled(kernel, options.counters)
    fixed = function.attributes.get("reqnctapercluster")
    if fixed and min(fixed) > 0 and cluster == (1, 1, 1):
        cluster = _dim((*fixed, 1, 1)[:3])
    check_launch(function, compiled, grid, block, shared_bytes, dynamic_limit, device, cluster, large_clusters)
    addresses = _load_globals(program, memory)
    count = grid[0] * grid[1] * grid[2]
    chosen = np.arange(count) if ctas is None else np.unique(np.fromiter((int(c) for c in ctas), np.int64))
    if len(chosen) and (chosen[0] < 0 or chosen[-1] >= count):
        raise EmulatorError(f"CTA numbers {chosen[0]}..{chosen[-1]} for a grid of {count}")

    if cluster != (1, 1, 1):
        chosen = in_clusters(chosen, grid, cluster)

    def once(code: Compiled, options: Options, poison: int = POISON) -> Launch:
        launch = Launch(
            code, memory, options, grid, block, shared_bytes, params, device, addresses, poison, cluster, overlapping
        )
        try:
            launch.run(chosen)
        except Runaway:
            pass
        except (EmulatorError, Overtaken):
            raise
        except Exception as error:
            raise EmulatorError(f"{kernel}: internal error, {type(error).__name__}: {error}") from error
        return launch

    before = _Snapshot.of(memory)
    try:
        launch = once(compiled, options)
    except Overtaken:
        if before is None:
            raise EmulatorError(
                f"{kernel}: threads leave lockstep, and too much memory is allocated to start over"
            ) from None
        before.restore()
        compiled = program.compiled(kernel, options.counters, conservative=True)
        launch = once(compiled, options)
    if launch.reports.doubtful and before is not None:
        # Whether undefined values matter is seen by running again with other ones: if nothing differs, they never
        # reached an output.
        after = _Snapshot.of(memory)
        assert after is not None
        before.restore()
        before.poison(OTHER_POISON)
        once(compiled, replace(options, hazards=False), OTHER_POISON)
        if after.matches():
            launch.reports.acquit()
        after.restore()
    return LaunchResult(kernel, grid, block, shared_bytes, launch.reports.list(), launch.counters, chosen)


class _Snapshot:
    """The contents of all writable buffers, to run a launch again."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.saved = [(b, b.bytes().copy(), None if b.written is None else b.written.copy()) for b in buffers]

    @classmethod
    def of(cls, memory: Memory) -> _Snapshot | None:
        """None if there is too much to keep."""
        writable = [b for b in memory.buffers if b.role != "input"]
        return cls(writable) if sum(b.nbytes for b in writable) <= SNAPSHOT_LIMIT else None

    def restore(self) -> None:
        for buffer, content, written in self.saved:
            buffer.bytes()[:] = content
            if written is not None and buffer.written is not None:
                buffer.written[:] = written

    def poison(self, value: int) -> None:
        """Overwrite what nobody has written."""
        for buffer, _, written in self.saved:
            if written is not None:
                buffer.bytes()[written == 0] = value

    def matches(self) -> bool:
        """Is the same written now, and with the same values?"""
        for buffer, content, written in self.saved:
            if written is None or buffer.written is None:
                same = np.array_equal(buffer.bytes(), content)
            else:
                same = (
                    np.array_equal(buffer.written, written) and not ((buffer.bytes() != content) & (written != 0)).any()
                )
            if not same:
                return False
        return True


def output_reports(memory: Memory, kernel: str = "") -> list[Report]:
    """What output buffers lack."""
    out = []
    for buffer in memory.buffers:
        if buffer.role == "output":
            missing = buffer.unwritten()
            if len(missing):
                item = buffer.dtype.itemsize
                elements = np.unique(missing // item)
                index = tuple(int(i) for i in np.unravel_index(elements[0], buffer.shape))
                last = tuple(int(i) for i in np.unravel_index(elements[-1], buffer.shape))
                out.append(
                    Report(
                        "unwritten-output",
                        f"{len(elements)} of {int(np.prod(buffer.shape))} elements of {buffer.name or 'an output'} "
                        f"were never written, first {index}, last {last}",
                        kernel,
                        address=buffer.address + int(missing[0]),
                        count=len(elements),
                    )
                )
    return out


_owners: dict[int, Program] = {}
_owner_of_path: dict[str, int] = {}
_libraries: dict[int, ctypes.CDLL] = {}


def load(source: str | Path, launcher: str | Path | None = None) -> Program:
    """A program from PTX text or a file of it (a Path, or a str without line breaks that ends in ``.ptx``).

    ``launcher``: a shared library built by ``nvcc -shared -Xcompiler -fPIC -cudart none``; its kernels are looked up by
    name in this PTX. Raises PtxError for text that is not PTX, EmulatorError for a launcher that cannot be opened.
    """
    if isinstance(source, Path) or ("\n" not in source and source.endswith(".ptx")):
        program = Program(Path(source).read_text(), str(source))
    else:
        program = Program(source)
    if launcher is not None:
        standin()
        path = str(Path(launcher).resolve())
        owner = _owner_of_path.get(path)
        if owner is None:
            owner = len(_owner_of_path) + 1
            standin().emulator_owner(owner)
            try:
                _libraries[owner] = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
            except OSError as error:
                raise EmulatorError(f"launcher {path}: {error}") from error
            finally:
                standin().emulator_owner(0)
            _owner_of_path[path] = owner
        program.library, program.owner = _libraries[owner], owner
        _owners[owner] = program
    return program


# --- the stand-in runtime
# ----------------------------------------------------------------------------------------------

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))


@cache
def standin() -> ctypes.CDLL:
    """The stand-in runtime, loaded so that launchers opened later resolve against it."""
    library = ctypes.CDLL(str(runtime_path()), mode=ctypes.RTLD_GLOBAL)
    library.emulator_function.restype = ctypes.c_char_p
    library.emulator_function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.emulator_variable.restype = ctypes.c_char_p
    library.emulator_variable.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.emulator_install(_callback)
    return library


def _dispatch(name: bytes, args: Any) -> int:
    session = Session.current
    if session is None:
        return NO_DEVICE
    try:
        return session.handle(name.decode(), args)
    except LaunchRefused as refused:
        session.refusals.append(str(refused))
        return refused.code
    except BaseException as error:
        # Nothing may escape through C: the error becomes a failed call and a report.
        session.errors.append(error)
        session.reports.append(Report("launch-error", f"{type(error).__name__}: {error}"))
        return LAUNCH_FAILURE


_callback = _CALLBACK(_dispatch)


def _launch_attributes(pointer: int, count: int) -> tuple[tuple[int, int, int], bool]:
    """(cluster dimensions, programmatic stream serialization) of an array of cudaLaunchAttribute."""
    cluster, overlapping = (1, 1, 1), False
    for i in range(count):
        # A cudaLaunchAttribute has 72 bytes: the id, and the value at byte 8.
        at = pointer + 72 * i
        identity = int.from_bytes(ctypes.string_at(at, 4), "little")
        if identity == CLUSTER_DIMENSION:
            cluster = struct.unpack("<3I", ctypes.string_at(at + 8, 12))
        elif identity == STREAM_SERIALIZATION:
            overlapping = int.from_bytes(ctypes.string_at(at + 8, 4), "little") != 0
    return cluster, overlapping


class _Kernel:
    """A kernel handle of the runtime."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name


def _attributes(device: Device) -> dict[int, int]:
    """cudaDeviceAttr -> value; attributes not listed are 0."""
    d = device
    return {
        1: 1024,
        2: 1024,
        3: 1024,
        4: 64,
        5: 2**31 - 1,
        6: 65535,
        7: 65535,
        8: STATIC_SHARED_LIMIT,
        9: 65536,
        10: 32,
        12: d.registers_per_sm,
        13: 1_410_000,
        16: d.sm_count,
        31: 1,
        36: 1_215_000,
        37: 5120,
        38: d.l2_bytes,
        39: d.threads_per_sm,
        41: 1,
        75: d.capability[0],
        76: d.capability[1],
        81: d.smem_per_sm_bytes,
        82: d.registers_per_sm,
        95: 1,
        97: d.smem_optin_bytes,
        106: 32,
        111: RESERVED_SHARED,
        115: 1,
        120: int(d.capability[0] >= 9),
    }


class Session:
    """The emulated device while a host launcher runs. Use ``emulator.session``.

    ``launches``: results in order; ``reports``: all findings; ``errors``: exceptions behind failed calls; ``refusals``:
    why the runtime refused a call.
    """

    current: Session | None = None

    def __init__(
        self,
        memory: Memory | None = None,
        device: Device | None = None,
        options: Options | None = None,
        cta_filter: CtaFilter | None = None,
        programs: Iterable[Program] = (),
    ) -> None:
        self.memory = memory or Memory()
        self.device = device or Device()
        self.options = options or Options()
        self.cta_filter = cta_filter
        self.programs = list(programs)
        self.launches: list[LaunchResult] = []
        self.reports: list[Report] = []
        self.errors: list[BaseException] = []
        self.refusals: list[str] = []
        self.dynamic_limits: dict[tuple[str, str], int] = {}
        self.large_clusters: set[tuple[str, str]] = set()
        self.libraries: dict[int, Program] = {}
        self.kernels: dict[int, _Kernel] = {}
        self.images: dict[bytes, Program] = {}
        self.next_handle = 0x1000
        self._outer: Session | None = None

    def __enter__(self) -> Session:
        # A fresh device: no error of an earlier session is pending.
        standin().cudaGetLastError()
        self._outer, Session.current = Session.current, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Session.current = self._outer
        if kind is None and self.cta_filter is None and self.launches:
            self.reports += output_reports(self.memory, self.launches[-1].kernel)

    def handle(self, name: str, args: Any) -> int:
        """One runtime call; returns its cudaError_t."""
        method: Callable[[Any], int] | None = getattr(self, "_on_" + name, None)
        return NOT_SUPPORTED if method is None else method(args)

    # --- kernels ---

    def _kernel(self, pointer: int) -> _Kernel:
        known = self.kernels.get(pointer)
        if known is not None:
            return known
        owner = ctypes.c_int(0)
        raw = standin().emulator_function(pointer, ctypes.byref(owner))
        if raw is None:
            raise LaunchRefused(INVALID_FUNCTION, f"{hex(pointer)} is no registered kernel")
        name = raw.decode()
        candidates = [p for p in self.programs if name in p.module.kernels]
        bound = _owners.get(owner.value)
        if bound is not None:
            candidates.insert(0, bound)
        for program in candidates:
            if name in program.module.kernels:
                return _Kernel(program, name)
        raise LaunchRefused(INVALID_FUNCTION, f"kernel {name} is in no loaded PTX")

    def _limit(self, kernel: _Kernel) -> int:
        static = self._static(kernel)
        return self.dynamic_limits.get((kernel.program.digest, kernel.name), STATIC_SHARED_LIMIT - static)

    def _static(self, kernel: _Kernel) -> int:
        return kernel.program.compiled(kernel.name, self.options.counters).shared_static

    def _on_launch(self, a: Any) -> int:
        kernel = self._kernel(a[0])
        function = kernel.program.module.kernels[kernel.name]
        pointers = ctypes.cast(ctypes.c_void_p(a[8]), ctypes.POINTER(ctypes.c_void_p))
        block = bytearray(function.param_bytes)
        for i, (param, offset) in enumerate(zip(function.params, function.offsets, strict=True)):
            block[offset : offset + param.size] = ctypes.string_at(pointers[i], param.size)
        grid = (a[1] & 0xFFFFFFFF, a[2] & 0xFFFFFFFF, a[3] & 0xFFFFFFFF)
        threads = (a[4] & 0xFFFFFFFF, a[5] & 0xFFFFFFFF, a[6] & 0xFFFFFFFF)
        cluster, overlapping = _launch_attributes(a[10], a[11])
        ctas = None
        if self.cta_filter is not None and min(*grid) > 0:
            ctas = self.cta_filter(grid)
        result = execute(
            kernel.program,
            kernel.name,
            grid,
            threads,
            bytes(block),
            a[7],
            self.memory,
            self.device,
            self.options,
            ctas,
            self._limit(kernel),
            cluster,
            overlapping,
            (kernel.program.digest, kernel.name) in self.large_clusters,
        )
        self.launches.append(result)
        self.reports += result.reports
        return SUCCESS

    def _on_func_set_attribute(self, a: Any) -> int:
        kernel = self._kernel(a[0])
        attribute, value = int(a[1]), int(a[2])
        if attribute == 8:
            if value < 0 or value + self._static(kernel) > self.device.smem_optin_bytes:
                raise LaunchRefused(
                    INVALID_VALUE,
                    f"{value} bytes of dynamic shared memory exceed the device's {self.device.smem_optin_bytes}",
                )
            key = (kernel.program.digest, kernel.name)
            self.dynamic_limits[key] = max(value, STATIC_SHARED_LIMIT - self._static(kernel))
        elif attribute == 14:
            key = (kernel.program.digest, kernel.name)
            (self.large_clusters.add if value else self.large_clusters.discard)(key)
        elif attribute not in (9, 10, 11, 12, 13, 15):
            return INVALID_VALUE
        return SUCCESS

    def _on_func_get_attributes(self, a: Any) -> int:
        kernel = self._kernel(a[1])
        compiled = kernel.program.compiled(kernel.name, self.options.counters)
        limit = kernel.program.module.kernels[kernel.name].attributes.get("maxntid")
        most = int(np.prod(limit)) if limit else 1024
        version = self.device.capability[0] * 10 + self.device.capability[1]
        packed = struct.pack(
            "<3Q7i",
            compiled.shared_static,
            0,
            compiled.local_bytes,
            most,
            64,
            version,
            version,
            0,
            self._limit(kernel),
            -1,
        )
        ctypes.memset(a[0], 0, 144)
        ctypes.memmove(a[0], packed, len(packed))
        return SUCCESS

    def _on_occupancy(self, a: Any) -> int:
        kernel = self._kernel(a[1])
        threads, shared = int(a[2]), int(a[3])
        if not 0 < threads <= 1024:
            return INVALID_VALUE
        ctypes.memmove(a[0], struct.pack("<i", self._resident(kernel, threads, shared)), 4)
        return SUCCESS

    def _on_occupancy_clusters(self, a: Any) -> int:
        kernel = self._kernel(a[1])
        grid, threads, shared = (int(a[2]), int(a[3]), int(a[4])), int(a[5]), int(a[6])
        cluster, _ = _launch_attributes(a[7], a[8])
        function = kernel.program.module.kernels[kernel.name]
        large = (kernel.program.digest, kernel.name) in self.large_clusters
        check_cluster(function, grid, self.device, cluster, large)
        size = cluster[0] * cluster[1] * cluster[2]
        # As if the SMs of a cluster could be anywhere: real devices have groups of SMs, and hold fewer.
        count = self._resident(kernel, threads, shared) * self.device.sm_count // size
        ctypes.memmove(a[0], struct.pack("<i", count), 4)
        return SUCCESS

    def _resident(self, kernel: _Kernel, threads: int, shared: int) -> int:
        """CTAs that an SM holds at once."""
        warps = -(-threads // 32)
        blocks = min(32, self.device.threads_per_sm // (32 * warps))
        per = self._static(kernel) + shared
        if per > self.device.smem_optin_bytes:
            blocks = 0
        else:
            blocks = min(blocks, self.device.smem_per_sm_bytes // (per + RESERVED_SHARED))
        return blocks

    def _new_handle(self, out: int) -> int:
        self.next_handle += 16
        ctypes.memmove(out, struct.pack("<Q", self.next_handle), 8)
        return self.next_handle

    def _on_library_load_file(self, a: Any) -> int:
        path = Path(ctypes.string_at(a[1]).decode())
        sibling = path.with_suffix(".ptx")
        if not path.exists() and not sibling.exists():
            raise LaunchRefused(FILE_NOT_FOUND, f"{path} does not exist")
        if not sibling.exists():
            raise LaunchRefused(FILE_NOT_FOUND, f"{sibling} does not exist: the emulator executes PTX, not {path.name}")
        program = next((p for p in self.programs if p.name == str(sibling)), None) or _cached_file(sibling)
        self.libraries[self._new_handle(a[0])] = program
        return SUCCESS

    def _on_library_load_data(self, a: Any) -> int:
        head = ctypes.string_at(a[1], 4)
        for image, program in self.images.items():
            if ctypes.string_at(a[1], len(image)) == image:
                self.libraries[self._new_handle(a[0])] = program
                return SUCCESS
        if head in (b"\x7fELF",) or not head.strip(b"\t\n /.").isascii():
            raise LaunchRefused(INVALID_IMAGE, "this cubin was not registered with Session.register_image")
        self.libraries[self._new_handle(a[0])] = load(ctypes.string_at(a[1]).decode() + "\n")
        return SUCCESS

    def register_image(self, image: bytes, program: Program) -> None:
        """Tell which PTX stands for a cubin that the launcher loads from memory."""
        self.images[bytes(image)] = program

    def _on_library_unload(self, a: Any) -> int:
        return SUCCESS if self.libraries.pop(a[0], None) is not None else INVALID_HANDLE

    def _on_library_get_kernel(self, a: Any) -> int:
        program = self.libraries.get(a[1])
        if program is None:
            return INVALID_HANDLE
        name = ctypes.string_at(a[2]).decode()
        if name not in program.module.kernels:
            raise LaunchRefused(
                SYMBOL_NOT_FOUND, f"no kernel {name!r}; the library has {', '.join(program.kernels) or 'none'}"
            )
        self.kernels[self._new_handle(a[0])] = _Kernel(program, name)
        return SUCCESS

    def _on_tensor_map(self, a: Any) -> int:
        """cuTensorMapEncodeTiled, after the map itself: its arguments in order."""
        rank = a[2] & 0xFFFFFFFF
        if not 1 <= rank <= 5 or a[0] % 64:
            raise LaunchRefused(INVALID_VALUE, f"tensor map at {a[0]:#x} of rank {rank}: 1 to 5, aligned to 64 bytes")

        def numbers(pointer: int, count: int, form: str, width: int) -> tuple[int, ...]:
            return struct.unpack(f"<{count}{form}", ctypes.string_at(pointer, count * width)) if count else ()

        map_ = bulk.TensorMap(
            int(a[1]) & 0xFFFFFFFF, int(a[3]) & (1 << 64) - 1, numbers(a[4], rank, "Q", 8),
            numbers(a[5], rank - 1, "Q", 8), numbers(a[6], rank, "I", 4), numbers(a[7], rank, "I", 4),
            int(a[8]), int(a[9]), int(a[10]), int(a[11]),
        )  # fmt: skip
        why = bulk.refuse(map_)
        if why:
            raise LaunchRefused(INVALID_VALUE, f"cuTensorMapEncodeTiled: {why}")
        ctypes.memmove(a[0], map_.encode(), bulk.MAP_BYTES)
        return SUCCESS

    # --- memory ---

    def _region(self, address: int, count: int) -> Buffer | None:
        """The buffer behind a device range; None for host memory. Raises LaunchRefused for a device range outside any
        buffer."""
        offset = address - self.memory.base
        if not 0 <= offset < self.memory.capacity:
            return None
        buffer = self.memory.find(offset)
        if buffer is None or offset + count > buffer.end:
            raise LaunchRefused(INVALID_VALUE, f"{count} bytes at {hex(address)}: {self.memory.describe(address)}")
        return buffer

    def _touch(self, address: int, count: int) -> Buffer | None:
        buffer = self._region(address, count) if count else None
        if buffer is not None and buffer.written is not None:
            start = address - buffer.address
            buffer.written[start : start + count] = 1
        return buffer

    def _on_malloc(self, a: Any) -> int:
        try:
            buffer = self.memory.allocate(max(1, int(a[1])), "scratch", name="cudaMalloc")
        except EmulatorError:
            return OUT_OF_MEMORY
        ctypes.memmove(a[0], struct.pack("<Q", buffer.address), 8)
        return SUCCESS

    def _on_free(self, a: Any) -> int:
        if not a[0]:
            return SUCCESS
        buffer = self.memory.find(a[0] - self.memory.base)
        if buffer is None or buffer.address != a[0]:
            return INVALID_VALUE
        self.memory.free(buffer)
        return SUCCESS

    def _on_memcpy(self, a: Any) -> int:
        if a[2]:
            self._region(a[1], a[2])
            self._touch(a[0], a[2])
            ctypes.memmove(a[0], a[1], a[2])
        return SUCCESS

    def _on_memset(self, a: Any) -> int:
        if a[2]:
            if self._touch(a[0], a[2]) is None:
                raise LaunchRefused(INVALID_VALUE, f"memset of {hex(a[0])}, which is not device memory")
            ctypes.memset(a[0], a[1] & 255, a[2])
        return SUCCESS

    def _symbol(self, host: int) -> int:
        owner = ctypes.c_int(0)
        raw = standin().emulator_variable(host, ctypes.byref(owner))
        if raw is None:
            raise LaunchRefused(INVALID_SYMBOL, f"{hex(host)} is no registered variable")
        program = _owners.get(owner.value)
        address = _load_globals(program, self.memory).get(raw.decode()) if program is not None else None
        if address is None:
            raise LaunchRefused(INVALID_SYMBOL, f"variable {raw.decode()} is in no loaded PTX")
        return address

    def _on_symbol_address(self, a: Any) -> int:
        ctypes.memmove(a[0], struct.pack("<Q", self._symbol(a[1])), 8)
        return SUCCESS

    def _on_memcpy_to_symbol(self, a: Any) -> int:
        address = self._symbol(a[0]) + a[3]
        self._touch(address, a[2])
        ctypes.memmove(address, a[1], a[2])
        return SUCCESS

    def _on_memcpy_from_symbol(self, a: Any) -> int:
        address = self._symbol(a[1]) + a[3]
        self._region(address, a[2])
        ctypes.memmove(a[0], address, a[2])
        return SUCCESS

    def _on_mem_info(self, a: Any) -> int:
        free = self.memory.capacity - self.memory.next
        ctypes.memmove(a[0], struct.pack("<Q", free), 8)
        ctypes.memmove(a[1], struct.pack("<Q", self.memory.capacity), 8)
        return SUCCESS

    # --- device ---

    def _on_get_device(self, a: Any) -> int:
        ctypes.memmove(a[0], struct.pack("<i", 0), 4)
        return SUCCESS

    def _on_device_count(self, a: Any) -> int:
        ctypes.memmove(a[0], struct.pack("<i", 1), 4)
        return SUCCESS

    def _on_synchronize(self, _: Any) -> int:
        return SUCCESS

    def _on_device_attribute(self, a: Any) -> int:
        if a[2] != 0:
            return INVALID_DEVICE
        value = _attributes(self.device).get(int(a[1]), 0)
        ctypes.memmove(a[0], struct.pack("<i", value), 4)
        return SUCCESS

    def _on_device_properties(self, a: Any) -> int:
        if a[1] != 0:
            return INVALID_DEVICE
        d = self.device
        # Offsets of cudaDeviceProp in CUDA 13.
        out = bytearray(1008)
        fields: list[tuple[int, str, tuple[int, ...]]] = [
            (288, "Q", (self.memory.capacity,)),
            (296, "Q", (STATIC_SHARED_LIMIT,)),
            (304, "i", (d.registers_per_sm,)),
            (308, "i", (32,)),
            (320, "i", (1024,)),
            (324, "3i", (1024, 1024, 64)),
            (336, "3i", (2**31 - 1, 65535, 65535)),
            (352, "Q", (65536,)),
            (360, "2i", d.capability),
            (384, "i", (d.sm_count,)),
            (560, "i", (1,)),
            (588, "i", (1,)),
            (596, "i", (d.l2_bytes,)),
            (604, "i", (d.threads_per_sm,)),
            (624, "Q", (d.smem_per_sm_bytes,)),
            (632, "i", (d.registers_per_sm,)),
            (668, "i", (1,)),
            (672, "Q", (d.smem_optin_bytes,)),
            (688, "i", (32,)),
        ]
        name = d.name.encode()[:255]
        out[: len(name)] = name
        for offset, form, values in fields:
            struct.pack_into("<" + form, out, offset, *values)
        ctypes.memmove(a[0], bytes(out), len(out))
        return SUCCESS


@lru_cache(maxsize=16)
def _program_of(path: Path, modified_ns: int, nbytes: int) -> Program:
    """The program of one version of a file."""
    del modified_ns, nbytes
    return Program(path.read_text(), str(path))


def _cached_file(path: Path) -> Program:
    stat = path.stat()
    return _program_of(path.resolve(), stat.st_mtime_ns, stat.st_size)


def session(
    memory: Memory | None = None,
    device: Device | None = None,
    options: Options | None = None,
    cta_filter: CtaFilter | None = None,
    programs: Iterable[Program] = (),
) -> Session:
    """A device for host launchers, to be used in a ``with`` statement; outside of one every runtime call fails with
    cudaErrorNoDevice.

    ``memory``: where buffers live (a fresh one if None). ``cta_filter``: grid (x, y, z) -> linear numbers of the CTAs
    to run; with it outputs are not checked for gaps. ``programs``: where kernels are looked up beside the launcher's
    own program; a program loaded from ``DIR/kernel.ptx`` also answers cudaLibraryLoadFromFile("DIR/kernel.cubin").
    """
    return Session(memory, device, options, cta_filter, programs)
