"""Answers runtime calls about kernels: launches, attributes, occupancy, libraries, tensor maps."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kernelproof.emulator.frontend.ptx import Function
from kernelproof.emulator.hopper.tensor_map import MAP_BYTES, TensorMap, refusal_of
from kernelproof.emulator.host.cuda import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    FAILED_ASSERT,
    FILE_NOT_FOUND,
    INVALID_FUNCTION,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    MAX_DYNAMIC_SHARED,
    NON_PORTABLE_CLUSTER_ALLOWED,
    OTHER_FUNCTION_ATTRIBUTES,
    STATIC_SHARED_LIMIT,
    STREAM_SERIALIZATION,
    SUCCESS,
    SYMBOL_NOT_FOUND,
    LaunchRefused,
)
from kernelproof.emulator.host.execution import KernelLaunch, load_globals
from kernelproof.emulator.host.images import ELF, cubin_at, is_fat_binary, machine_program, program_of, registered
from kernelproof.emulator.host.launch_limits import check_cluster
from kernelproof.emulator.host.program import Program, from_file, load, owners
from kernelproof.emulator.host.runtime_state import Call, RuntimeState, put
from kernelproof.emulator.host.standin import Words, standin
from kernelproof.emulator.host.streams import Streams
from kernelproof.emulator.state.launch_state import Geometry
from kernelproof.emulator.state.participants import Dim3

MAX_THREADS = 1024  # of a CTA
REGISTERS = 64  # what a program is told of the registers per thread, which only ptxas decides
FUNCTION_ATTRIBUTES_BYTES, LAUNCH_ATTRIBUTE_BYTES = 144, 72  # of cudaFuncAttributes, of cudaLaunchAttribute
FIRST_HANDLE, HANDLE_DISTANCE = 0x1000, 16  # handles look like addresses


@dataclass(frozen=True)
class KernelHandle:
    """A kernel for which the runtime has given a handle: the entry ``name`` of a program."""

    program: Program
    name: str

    @property
    def function(self) -> Function:
        """The kernel's PTX."""
        return self.program.module.kernels[self.name]

    @property
    def key(self) -> tuple[str, str]:
        """The text of the PTX and the kernel's name, which distinguish it from kernels of the same name elsewhere."""
        return self.program.module.text, self.name


class KernelCalls:
    """Runtime calls about kernels, and the attributes that they set. Programs name a kernel by a handle or by the
    address of its host symbol."""

    def __init__(self, state: RuntimeState, streams: Streams) -> None:
        self.state, self.streams = state, streams
        self.dynamic_limits: dict[tuple[str, str], int] = {}
        self.large_clusters: set[tuple[str, str]] = set()
        self.libraries: dict[int, Program] = {}
        self.kernels: dict[int, KernelHandle] = {}
        self.last_handle = FIRST_HANDLE
        self.calls: dict[str, Call] = {
            "launch": self.launch,
            "func_set_attribute": self.set_attribute,
            "func_get_attributes": self.get_attributes,
            "occupancy": self.occupancy,
            "occupancy_clusters": self.occupancy_of_clusters,
            "library_load_file": self.load_file,
            "library_load_data": self.load_data,
            "library_unload": self.unload,
            "library_get_kernel": self.get_kernel,
            "library_get_global": self.get_global,
            "func_get_attribute": self.get_attribute,
            "parameter_layout": self.get_parameter_layout,
            "tensor_map": self.encode_tensor_map,
        }

    # --- launches ---

    def launch(self, a: Words) -> int:
        """cudaLaunchKernel and its relatives: kernel, grid, block, shared bytes, arguments, stream, attributes."""
        state, kernel = self.state, self._kernel(a[0])
        grid, block = _dims(a, 1), _dims(a, 4)
        attributes = launch_attributes(a[10], a[11])
        ctas = None
        # The CTAs of a cooperative grid wait for each other, so all of them run.
        if state.policy.cta_filter is not None and min(*grid) > 0 and not attributes.cooperative:
            ctas = state.policy.cta_filter(grid)
        function = kernel.function
        parameters = ctypes.string_at(a[12], function.param_bytes) if a[12] else _parameters(function, a[8])
        launch = KernelLaunch(
            kernel.program.module,
            kernel.name,
            Geometry(grid, block, a[7], *attributes, concurrent=self.streams.has_own_streams),
            parameters,
            state.memory,
            state.device,
            state.options,
            ctas,
            self._limit(kernel),
            kernel.key in self.large_clusters,
            matters=self.streams.matters,
        )
        return self.streams.give(a[9], lambda stream: self._execute(launch, stream))

    def _execute(self, launch: KernelLaunch, stream: int) -> int:
        """Execute a launch on a stream; compare its accesses with other work and record its result."""
        try:
            result = self.state.policy.hooks.execute(launch)
        except LaunchRefused as refused:
            refused.kernel = launch.kernel
            raise
        # A launch that was given up has not made all of its accesses, so none of them are compared.
        is_incomplete = any(report.kind == "launch-error" for report in result.reports)
        touched = [] if is_incomplete else launch.touched()
        if touched and not launch.module.may_signal_host(launch.kernel):
            touched = [part._replace(strong=None) for part in touched]
        self.streams.touch(stream, launch.kernel, touched)
        launch.memory_state = None
        if result.failed_asserts:
            self.state.device_failure = FAILED_ASSERT
        self.state.record(result)
        return SUCCESS

    def _kernel(self, pointer: int) -> KernelHandle:
        """The kernel that a handle or a host symbol denotes. Raises LaunchRefused."""
        handle = self.kernels.get(pointer)
        if handle is not None:
            return handle
        owner, image = ctypes.c_int(0), ctypes.c_int(0)
        raw = standin().emulator_function(pointer, ctypes.byref(owner), ctypes.byref(image))
        if raw is None:
            raise LaunchRefused(INVALID_FUNCTION, f"{hex(pointer)} is no registered kernel")
        name = raw.decode()
        bound = owners.get(owner.value)
        for program in [*([bound] if bound is not None else []), *self.state.programs]:
            if name in program.module.kernels:
                return KernelHandle(program, name)
        if bound is None:
            program = registered(image.value, self.state.device, self.state.policy.machine_code)
            if name in program.module.kernels:
                return KernelHandle(program, name)
        raise LaunchRefused(INVALID_FUNCTION, f"kernel {name} is in no loaded PTX")

    # --- attributes ---

    def _static(self, kernel: KernelHandle) -> int:
        """Bytes of static shared memory of a kernel."""
        return kernel.program.compiled(kernel.name, self.state.options.counters).shared_static

    def _limit(self, kernel: KernelHandle) -> int:
        """Bytes of dynamic shared memory that a launch of a kernel may have."""
        return self.dynamic_limits.get(kernel.key, STATIC_SHARED_LIMIT - self._static(kernel))

    def set_attribute(self, a: Words) -> int:
        """cudaFuncSetAttribute: kernel, attribute, value."""
        kernel, attribute, value = self._kernel(a[0]), a[1], a[2]
        if attribute == MAX_DYNAMIC_SHARED:
            static, most = self._static(kernel), self.state.device.smem_optin_bytes
            if value < 0 or value + static > most:
                text = f"{value} bytes of dynamic shared memory exceed the device's {most}"
                raise LaunchRefused(INVALID_VALUE, text)
            self.dynamic_limits[kernel.key] = max(value, STATIC_SHARED_LIMIT - static)
        elif attribute == NON_PORTABLE_CLUSTER_ALLOWED:
            (self.large_clusters.add if value else self.large_clusters.discard)(kernel.key)
        elif attribute not in OTHER_FUNCTION_ATTRIBUTES:
            return INVALID_VALUE
        return SUCCESS

    def get_attributes(self, a: Words) -> int:
        """cudaFuncGetAttributes: a cudaFuncAttributes, kernel."""
        kernel = self._kernel(a[1])
        compiled = kernel.program.compiled(kernel.name, self.state.options.counters)
        limit = kernel.function.attributes.get("maxntid")
        most = math.prod(limit) if limit else MAX_THREADS
        major, minor = self.state.device.capability
        version = major * 10 + minor
        ctypes.memset(a[0], 0, FUNCTION_ATTRIBUTES_BYTES)
        put(
            a[0], "3Q7i", compiled.shared_static, 0, compiled.local_bytes, most, REGISTERS, version, version, 0,
            self._limit(kernel), -1,
        )  # fmt: skip
        return SUCCESS

    def get_attribute(self, a: Words) -> int:
        """cuFuncGetAttribute: out, attribute, kernel. The first values of CUfunction_attribute are the fields of
        cudaFuncGetAttributes."""
        kernel = self._kernel(a[2])
        compiled = kernel.program.compiled(kernel.name, self.state.options.counters)
        limit = kernel.function.attributes.get("maxntid")
        # CUfunction_attribute: 0 is the most threads of a CTA, 1 the static shared memory, 3 the local memory of a
        # thread.
        values = {0: math.prod(limit) if limit else MAX_THREADS, 1: compiled.shared_static, 3: compiled.local_bytes}
        put(a[0], "i", values.get(a[1], self._limit(kernel) if a[1] == MAX_DYNAMIC_SHARED else 0))
        return SUCCESS

    def get_parameter_layout(self, a: Words) -> int:
        """cudaFuncGetParamInfo: kernel, number of the parameter, out offset and out size in bytes."""
        function = self._kernel(a[0]).function
        if not 0 <= a[1] < len(function.params):
            return INVALID_VALUE
        put(a[2], "Q", function.offsets[a[1]])
        put(a[3], "Q", function.params[a[1]].size)
        return SUCCESS

    # --- occupancy ---

    def occupancy(self, a: Words) -> int:
        """cudaOccupancyMaxActiveBlocksPerMultiprocessor: out, kernel, threads, dynamic shared bytes."""
        kernel = self._kernel(a[1])
        if not 0 < a[2] <= MAX_THREADS:
            return INVALID_VALUE
        put(a[0], "i", self._resident(kernel, a[2], a[3]))
        return SUCCESS

    def occupancy_of_clusters(self, a: Words) -> int:
        """cudaOccupancyMaxActiveClusters: out, kernel, grid, threads, dynamic shared bytes, launch attributes."""
        state, kernel = self.state, self._kernel(a[1])
        cluster = launch_attributes(a[7], a[8]).cluster
        large = kernel.key in self.large_clusters
        check_cluster(kernel.function, (a[2], a[3], a[4]), state.device, cluster, large)
        # Upper bound: a cluster may use any SMs here, while real devices confine it to a GPC.
        count = self._resident(kernel, a[5], a[6]) * state.device.sm_count // math.prod(cluster)
        put(a[0], "i", count)
        return SUCCESS

    def _resident(self, kernel: KernelHandle, threads: int, shared: int) -> int:
        """CTAs that an SM can hold at a time."""
        return self.state.device.resident(threads, self._static(kernel) + shared)

    # --- libraries ---

    def _new_handle(self, out: int) -> int:
        """Make a handle and write it to host memory at ``out``."""
        self.last_handle += HANDLE_DISTANCE
        put(out, "Q", self.last_handle)
        return self.last_handle

    def load_file(self, a: Words) -> int:
        """cudaLibraryLoadFromFile and cuModuleLoad: out, path. For DIR/kernel.cubin, DIR/kernel.ptx is loaded if it
        exists, unless machine code is to be executed."""
        path = Path(ctypes.string_at(a[1]).decode())
        sibling = path.with_suffix(".ptx")
        if sibling.exists() and not (self.state.policy.machine_code and path.suffix == ".cubin"):
            loaded = (program for program in self.state.programs if program.name == str(sibling))
            program = next(loaded, None) or from_file(sibling)
        elif path.exists():
            content = ctypes.create_string_buffer(path.read_bytes())
            program = self._in_memory(ctypes.addressof(content))
        else:
            raise LaunchRefused(FILE_NOT_FOUND, f"{path} does not exist")
        self.libraries[self._new_handle(a[0])] = program
        return SUCCESS

    def load_data(self, a: Words) -> int:
        """cudaLibraryLoadData: out, and the address of PTX text, a cubin or a fat binary."""
        self.libraries[self._new_handle(a[0])] = self._in_memory(a[1])
        return SUCCESS

    def _in_memory(self, address: int) -> Program:
        """The program of PTX text, a cubin or a fat binary at an address. Raises LaunchRefused."""
        if is_fat_binary(address):
            return program_of(address, self.state.device, self.state.policy.machine_code)
        head = ctypes.string_at(address, 4)
        if head == ELF:
            return machine_program(cubin_at(address))
        if not head.strip(b"\t\n /.").isascii():
            raise LaunchRefused(INVALID_IMAGE, "the image is neither PTX, nor a cubin, nor a fat binary")
        return load(ctypes.string_at(address).decode() + "\n")

    def unload(self, a: Words) -> int:
        """cudaLibraryUnload."""
        return SUCCESS if self.libraries.pop(a[0], None) is not None else INVALID_HANDLE

    def get_kernel(self, a: Words) -> int:
        """cudaLibraryGetKernel: out, library, name."""
        program = self.libraries.get(a[1])
        if program is None:
            return INVALID_HANDLE
        name = ctypes.string_at(a[2]).decode()
        if name not in program.module.kernels:
            text = f"no kernel {name!r}; the library has {', '.join(program.kernels) or 'none'}"
            raise LaunchRefused(SYMBOL_NOT_FOUND, text)
        self.kernels[self._new_handle(a[0])] = KernelHandle(program, name)
        return SUCCESS

    def get_global(self, a: Words) -> int:
        """cuModuleGetGlobal: out address, out bytes, module, name."""
        program = self.libraries.get(a[2])
        if program is None:
            return INVALID_HANDLE
        name = ctypes.string_at(a[3]).decode()
        address = load_globals(program.module, self.state.memory).get(name)
        if address is None:
            raise LaunchRefused(SYMBOL_NOT_FOUND, f"no variable {name!r} in the module")
        if a[0]:
            put(a[0], "Q", address)
        if a[1]:
            put(a[1], "Q", program.module.variables[name].size)
        return SUCCESS

    # --- tensor maps ---

    def encode_tensor_map(self, a: Words) -> int:
        """cuTensorMapEncodeTiled: the map, then its other arguments in order."""
        rank = a[2] & 0xFFFFFFFF
        if not 1 <= rank <= 5 or a[0] % 64:
            text = f"tensor map at {a[0]:#x} of rank {rank}: 1 to 5, aligned to 64 bytes"
            raise LaunchRefused(INVALID_VALUE, text)
        map_ = TensorMap(
            a[1] & 0xFFFFFFFF, a[3] & (1 << 64) - 1, _numbers(a[4], rank, "Q"), _numbers(a[5], rank - 1, "Q"),
            _numbers(a[6], rank, "I"), _numbers(a[7], rank, "I"), a[8], a[9], a[10], a[11],
        )  # fmt: skip
        why = refusal_of(map_)
        if why:
            raise LaunchRefused(INVALID_VALUE, f"cuTensorMapEncodeTiled: {why}")
        ctypes.memmove(a[0], map_.encode(), MAP_BYTES)
        return SUCCESS


def _dims(a: Words, first: int) -> Dim3:
    """The extents (x, y, z) of three unsigned 32-bit words."""
    return a[first] & 0xFFFFFFFF, a[first + 1] & 0xFFFFFFFF, a[first + 2] & 0xFFFFFFFF


def _numbers(pointer: int, count: int, form: str) -> tuple[int, ...]:
    """The elements of an array in host memory. ``form``: their format of ``struct``."""
    layout = f"<{count}{form}"
    return struct.unpack(layout, ctypes.string_at(pointer, struct.calcsize(layout))) if count else ()


def _parameters(function: Function, pointer: int) -> bytes:
    """The parameter block, from an array of pointers to the arguments."""
    pointers = ctypes.cast(ctypes.c_void_p(pointer), ctypes.POINTER(ctypes.c_void_p))
    block = bytearray(function.param_bytes)
    for i, (param, offset) in enumerate(zip(function.params, function.offsets, strict=True)):
        block[offset : offset + param.size] = ctypes.string_at(pointers[i], param.size)
    return bytes(block)


class LaunchAttributes(NamedTuple):
    """The content of an array of cudaLaunchAttribute. The fields come in the same order as in ``Geometry``."""

    cluster: Dim3
    overlapping: bool
    cooperative: bool


def launch_attributes(pointer: int, count: int) -> LaunchAttributes:
    """Read an array of cudaLaunchAttribute. An element has its id (4 bytes), and its value from byte 8 on."""
    values = {}
    for i in range(count):
        identity, value = struct.unpack("<I4x12s", ctypes.string_at(pointer + LAUNCH_ATTRIBUTE_BYTES * i, 20))
        values[identity] = struct.unpack("<3I", value)
    cluster: Dim3 = values.get(CLUSTER_DIMENSION, (1, 1, 1))
    overlapping, cooperative = (values.get(flag, (0,))[0] != 0 for flag in (STREAM_SERIALIZATION, COOPERATIVE))
    return LaunchAttributes(cluster, overlapping, cooperative)
