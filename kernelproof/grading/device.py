"""Compiles device code to PTX and calls it on the emulator, always in the same memory at the same addresses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from kernelproof.checking import compilation, devices
from kernelproof.checking.names import plain, resolved
from kernelproof.emulator import (
    Buffer,
    EmulatorError,
    LaunchResult,
    Memory,
    Options,
    Program,
    Report,
    Session,
    SessionPolicy,
    load,
)
from kernelproof.emulator.frontend.ptx import GRID_WORKSPACE
from kernelproof.emulator.hopper.tensor_map import TensorMap
from kernelproof.emulator.host.program import KernelArgument, pack_arguments
from kernelproof.emulator.state.counters import Comparison
from kernelproof.emulator.state.sites import Site
from kernelproof.grading import elsewhere
from kernelproof.grading.contract import ROLES, Contract, ContractLaunch, MapBox, box, struct
from kernelproof.grading.expressions import Number, Shape
from kernelproof.grading.formats import Array
from kernelproof.ground.errors import Failure, WrongInput, reading
from kernelproof.ground.toolchain import discover

# The values of the CUDA driver's enum CUtensorMapDataType.
MAP_TYPES = {"u8": 0, "u16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
MAP_SWIZZLES = (0, 32, 64, 128)  # bytes of a row of the pattern, in the order of the enum CUtensorMapSwizzle
POISON = 0xFF  # the value of every poisoned byte: NaN as any float, -1 as an integer
PAGE, DISTANCES = 4096, 97  # buffers lie 1 to DISTANCES pages apart, as the environment says
LANES = 8192  # threads that the emulator executes as one vector


def is_ptx(source: str) -> bool:
    """Whether the source is PTX rather than CUDA C++."""
    return (
        re.search(r"^\s*\.version\s", source, re.M) is not None
        and re.search(r"^\s*\.target\s", source, re.M) is not None
    )


def ptx(source: str, device: str, arguments: tuple[str, ...], seconds: float) -> str:
    """Compile CUDA text to PTX, without its host code. Raises Failure with the compiler's errors."""
    if is_ptx(source):
        return source
    path = compilation.text_file(source, ".cu")
    return compilation.ptx(path, arguments, devices.target(device), discover(), seconds, foreign=()).read_text()


def ptx_elsewhere(source: str, device: str, arguments: tuple[str, ...], seconds: float) -> str | None:
    """The PTX of a CUDA text that is compiled as if on another machine. None if the text cannot distinguish machines,
    or compiles only here."""
    if is_ptx(source) or not elsewhere.may_query_machine(source):
        return None
    for text, more, has_cutlass in elsewhere.variants(source):
        path = compilation.text_file(text, ".cu")
        try:
            return compilation.ptx(
                path, (*arguments, *more), devices.target(device), discover(), seconds, foreign=(),
                has_cutlass=has_cutlass, alias=elsewhere.PATH,
            ).read_text()  # fmt: skip
        except Failure:
            continue
    return None


@lru_cache(maxsize=8)
def program(text: str) -> Program:
    """The program of a PTX text. Raises PtxError."""
    return load(text)


class WrongSignature(Exception):
    """The source lacks a kernel that the contract launches, or has it with other parameters."""


@dataclass
class Call:
    """The results of one call.

    ``outputs`` are bits by buffer. ``globals_changed`` counts the changed bytes of each device variable. ``launches``
    and ``ctas`` are counts by kernel. ``opcodes`` (executions per warp, by kernel), ``wgmma_flops`` (operations of
    wgmma and tcgen05), ``comparisons`` (of loaded values, by kernel and place) and ``window_readings`` (places that
    read upper bits of generic addresses) are empty without counters.
    """

    outputs: dict[str, Array]
    reports: list[Report] = field(default_factory=list)
    globals_changed: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, Counter[str]] = field(default_factory=dict)
    wgmma_flops: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    ctas: Counter[str] = field(default_factory=Counter)
    comparisons: dict[tuple[str, Site], Comparison] = field(default_factory=dict)
    window_readings: dict[tuple[str, Site], None] = field(default_factory=dict)

    def add(self, launch: LaunchResult) -> None:
        """Count a launch."""
        name = plain(launch.kernel)
        self.launches[name] += 1
        self.ctas[name] += len(launch.ctas) if launch.ctas is not None else 0
        if launch.counters is not None:
            self.opcodes.setdefault(name, Counter()).update(launch.counters.instructions)
            self.wgmma_flops[name] += launch.counters.wgmma_flops + launch.counters.tcgen05_flops
            self.window_readings |= {(name, site): None for site in launch.counters.window_readings}
            for site, item in launch.counters.comparisons.items():
                self.comparisons.setdefault((name, site), Comparison()).add(item.outcomes, item.operands)

    @property
    def instructions(self) -> int:
        """The executed instructions of all warps; 0 without counters."""
        return sum(counter.total() for counter in self.opcodes.values())


class RepeatedCalls:
    """Calls of one shape, all in the same memory at the same addresses.

    Before each call, inputs are written again, and outputs and scratch memory are poisoned, so that no earlier result
    can pass for a new one. ``names``: the buffers of the contract that exist before the first call. ``environment``:
    see ``Options``; it also determines the distance between buffers.
    ``written``: for outputs that host code allocated itself, a mask of the elements that were written.
    ``runs_host_code``: whether host code of the source runs, which must not touch the device's memory. ``unreturned``:
    the reports of a call that raised an error. ``count``: how many calls were made.
    """

    runs_host_code = False

    def __init__(
        self, contract: Contract, shape: Shape, device: str, names: Iterable[str], environment: int = 0
    ) -> None:
        self.contract, self.shape, self.device = contract, shape, devices.device(device)
        self.environment = environment
        self.memory = Memory(guard=PAGE * (1 + environment % DISTANCES), protected=self.runs_host_code)
        self.buffers: dict[str, Buffer] = {}
        self.written: dict[str, Array] = {}
        for name in names:
            item = contract.buffers[name]
            zeros = np.zeros(item.shape(shape), item.format.dtype)
            role = "inout" if item.zeroed else ROLES[item.role]
            self.buffers[name] = self.memory.upload(zeros, role, name=name)
        self.unreturned: list[Report] = []
        self.count = 0

    def call(self, inputs: Mapping[str, Array], counters: bool = False, hazards: bool = False) -> Call:
        """Make one call on inputs, which are given as bits."""
        raise NotImplementedError

    @property
    def ptx(self) -> str:
        """The PTX of the kernels; "" if it is not known."""
        return ""

    def session(self, counters: bool, hazards: bool, lanes: int | None = None) -> Session:
        """The emulated device for one call."""
        options = Options(hazards=hazards, counters=counters, lanes=lanes, environment=self.environment)
        return Session(SessionPolicy(self.device, options), self.memory)

    def fill(self, inputs: Mapping[str, Array]) -> None:
        """Write the inputs, zero the buffers that have to be zero, and poison all others."""
        self.memory.writes += 1
        for name, buffer in self.buffers.items():
            item = self.contract.buffers[name]
            if item.is_input:
                buffer.bytes()[:] = np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8)
                continue
            buffer.bytes()[:] = 0 if item.zeroed else POISON
            if buffer.written is not None:
                buffer.written[:] = 0

    def written_elements(self, name: str) -> Array:
        """A mask of the elements of an output that the last call wrote."""
        extents = self.contract.buffers[name].shape(self.shape)
        if name in self.written:
            return self.written[name]
        buffer = self.buffers.get(name)
        if buffer is None or buffer.written is None:
            return np.ones(extents, bool)
        return np.asarray(buffer.written.reshape(*extents, -1).all(axis=-1))


class LaunchedCalls(RepeatedCalls):
    """Calls that run the launches of the contract.

    The kernels are those of the PTX ``text``. If ``is_elsewhere`` is True, they are those of ``text_elsewhere``, the
    build of another machine, unless that is None.
    """

    def __init__(
        self, text: str, text_elsewhere: str | None, contract: Contract, shape: Shape, device: str,
        environment: int = 0, is_elsewhere: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(contract, shape, device, contract.buffers, environment)
        self.program = program(text_elsewhere if is_elsewhere and text_elsewhere else text)
        try:
            self.kernels = [resolved(launch.entry, self.program.kernels) for launch in contract.launches]
        except WrongInput as error:
            raise WrongSignature(str(error)) from None

    @property
    def ptx(self) -> str:
        return self.program.module.text

    def call(self, inputs: Mapping[str, Array], counters: bool = False, hazards: bool = False) -> Call:
        """Run all launches of the contract, in order. Raises LaunchRefused, EmulatorError."""
        self.fill(inputs)
        before = {key: buffer.bytes().copy() for key, buffer in self.memory.globals.items()}
        result = Call({})
        session = self.session(counters, hazards, LANES)
        for launch, kernel in zip(self.contract.launches, self.kernels, strict=True):
            self._launch(launch, kernel, session, result)
        self.count += 1
        session.check_outputs()
        result.reports += session.reports
        for key, buffer in self.memory.globals.items():
            if key[1] == GRID_WORKSPACE:  # It belongs to the driver and holds the barrier of cooperative grids.
                continue
            previous = before.get(key)
            changed = buffer.bytes() != (_initial(self.program, key[1], buffer) if previous is None else previous)
            if changed.any():
                result.globals_changed[key[1]] = int(changed.sum())
        result.outputs = {item.name: self.buffers[item.name].download() for item in self.contract.outputs}
        return result

    def _launch(self, launch: ContractLaunch, kernel: str, session: Session, result: Call) -> None:
        """Run one launch and count it. Raises WrongSignature if the arguments do not fit the kernel's parameters."""
        grid, block, cluster, smem = launch.geometry(self.shape)
        arguments = [self._argument(argument, launch) for argument in launch.args]
        try:
            pack_arguments(self.program.module.kernels[kernel], arguments)
        except EmulatorError as error:
            raise WrongSignature(str(error)) from None
        launched = session.run(
            self.program, kernel, grid, block, arguments, shared_bytes=smem, cluster=cluster,
            cooperative=launch.cooperative,
        )  # fmt: skip
        result.add(launched)

    def _argument(self, argument: Number, launch: ContractLaunch) -> KernelArgument:
        """A buffer, a tensor map of one, or a number. Raises WrongInput."""
        if isinstance(argument, str) and argument in self.buffers:
            return self.buffers[argument]
        if (words := struct(argument, self.shape)) is not None:
            return words
        shape = box(argument, self.shape)
        return launch.scalar(argument, self.shape) if shape is None else self._tensor_map(shape)

    def _tensor_map(self, shape: MapBox) -> bytes:
        """A tensor map of a buffer, as the driver would encode it. Raises WrongInput."""
        item = self.contract.buffers.get(shape.buffer)
        extents = item.shape(self.shape) if item is not None else ()
        if item is None or len(extents) != len(shape.extents) or item.format.name not in MAP_TYPES:
            raise WrongInput(
                f"map of {shape.buffer}: no buffer of {len(shape.extents)} extents and a type that maps have"
            )
        # A map has the innermost dimension first; its strides are in bytes, without that of the innermost dimension.
        dims, nbytes = tuple(reversed(extents)), item.format.dtype.itemsize
        strides = tuple(nbytes * prod(dims[: number + 1]) for number in range(len(dims) - 1))
        swizzle = MAP_SWIZZLES.index(shape.swizzle)
        encoded = TensorMap(
            MAP_TYPES[item.format.name], self.buffers[shape.buffer].address, dims, strides,
            box=tuple(reversed(shape.extents)), steps=(1,) * len(dims), interleave=0, swizzle=swizzle, promotion=0,
            fill=0,
        )  # fmt: skip
        return encoded.encode()


def _initial(code: Program, name: str, buffer: Buffer) -> Array:
    """The bytes of a device variable before the first launch. Pointers in it are as the loader wrote them."""
    variable = code.module.variables.get(name)
    content = np.zeros(buffer.nbytes, np.uint8)
    if variable is not None and variable.pointers:
        return buffer.bytes().copy()
    if variable is not None and variable.init is not None:
        content[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
    return content


def read(source: str | Path) -> str:
    """The text of a source, which may be a file. Bytes that are no UTF-8 are replaced, since compilers accept them.

    Raises WrongInput for a file that cannot be read.
    """
    if isinstance(source, str):
        return source
    with reading(source):
        return source.read_text(errors="replace")
