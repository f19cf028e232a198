"""Gives Triton a compiler that ends with PTX and a driver that launches on the emulator. Needs triton."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from triton.backends import Backend
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaDriver

from kernelproof.emulator import Device, Program, load

# Constants in place of ptxas's report, by which some kernels choose their grid (a persistent softmax, for example).
REGISTERS, SPILLS, THREADS = 64, 0, 1024

# Launches a program: Triton's source and metadata, the grid, and the arguments.
LaunchFunction = Callable[[Program, Any, Any, tuple[int, int, int], Sequence[object]], None]


class PtxBackend(CUDABackend):  # type: ignore[misc] # triton has no types
    """Triton's own compiler passes down to PTX, which takes the place of machine code."""

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Add Triton's stages. The last one returns the PTX instead of assembling it."""
        super().add_stages(stages, options, language)
        stages["cubin"] = lambda text, _: text.encode()

    def hash(self) -> str:
        """The key by which Triton's cache distinguishes this PTX from machine code."""
        return f"ptx-{super().hash()}"


class DriverLibrary:
    """The part of a driver's library that Triton calls."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def load_binary(self, name: str, image: bytes, shared: int, device: str) -> tuple[None, Program, int, int, int]:  # noqa: ARG002
        """Load a compiled kernel; returns (module, function, registers, spills, most threads)."""
        return None, _program(image), REGISTERS, SPILLS, THREADS

    def unload_module(self, module: None) -> None:
        """Nothing to free."""

    def get_device_properties(self, device: str) -> dict[str, int]:  # noqa: ARG002
        """Properties by which kernels choose grids and stages: bytes, counts, kHz."""
        # Clocks and bus width are an A100's for all devices.
        return {
            "max_shared_mem": self.device.smem_optin_bytes, "max_num_regs": self.device.registers_per_sm,
            "multiprocessor_count": self.device.sm_count, "warpSize": 32,
            "sm_clock_rate": 1_410_000, "mem_clock_rate": 1_215_000, "mem_bus_width": 5120,
        }  # fmt: skip


@lru_cache(maxsize=64)
def _program(image: bytes) -> Program:
    """The program of a PTX text, in which each inline assembly keeps only its first location."""
    return load(_INLINE.sub(_first_location, image.decode()))


@lru_cache(maxsize=64)
def in_file(program: Program, path: str) -> Program:
    """The program of a kernel that ``path`` defines, with that path in its line information.

    Triton's cache identifies kernels by their text and line. So cached PTX may name the file in which the same kernel
    was when it was compiled.
    """
    text = program.module.text
    files = _FILE.findall(text)
    stale = [file for file in files if len(files) == 1 or Path(file).name == Path(path).name]
    if path in files or len(stale) != 1:
        return program
    return load(text.replace(f'"{stale[0]}"', json.dumps(path)))


_FILE = re.compile(r'^\s*\.file\s+\d+ "([^"]+)"', re.MULTILINE)

# LLVM counts the lines of inline assembly from the user's line on, so only its first location exists in the source.
_INLINE = re.compile(r"// begin inline asm\n.*?// end inline asm", re.DOTALL)
_LOCATION = re.compile(r"^[ \t]*\.loc[ \t].*$", re.MULTILINE)


def _first_location(inline: re.Match[str]) -> str:
    """An inline assembly without its locations after the first."""
    first = _LOCATION.search(inline[0])
    end = first.end() if first is not None else 0
    return inline[0][:end] + _LOCATION.sub("", inline[0][end:])


class Launcher(NamedTuple):
    """The object that Triton calls to launch a compiled kernel. It passes the launch to the open session."""

    source: Any
    metadata: Any

    def __call__(
        self, x: int, y: int, z: int, _stream: int, program: Program, _packed: object, launch_metadata: object,
        enter: Callable[[object], None] | None, leave: Callable[[object], None] | None, *args: object,
    ) -> None:  # fmt: skip
        """Launch a kernel; ``enter`` and ``leave`` are Triton's hooks."""
        from triton.runtime.driver import driver

        if enter is not None:
            enter(launch_metadata)
        driver.active.launch(program, self.source, self.metadata, (x, y, z), args)
        if leave is not None:
            leave(launch_metadata)


class EmulatedDriver(DriverBase):  # type: ignore[misc] # triton has no types
    """The driver that Triton finds in place of a GPU's. It has the device's architecture, limits and launcher."""

    launcher_cls = Launcher

    def __init__(self, device: Device, launch: LaunchFunction) -> None:
        super().__init__()
        self.device, self.launch = device, launch
        self.utils = DriverLibrary(device)
        major, minor = device.capability
        self.target = GPUTarget("cuda", 10 * major + minor, 32)
        # Triton's cache in memory uses it as the key of a device.
        self.identity = f"emulated {device}"

    @classmethod
    def is_active(cls) -> bool:
        """Returns False, because only a session makes this driver active."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Triton never calls this function here, because nothing is compiled for a host."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The architecture that kernels are compiled for."""
        return self.target

    def get_current_device(self) -> str:
        """The name of the only device."""
        return self.identity

    def set_current_device(self, device: object) -> None:
        """Does nothing, because there is only one device."""

    def get_device_capability(self, device: object = None) -> tuple[int, int]:  # noqa: ARG002
        """The compute capability: (major, minor)."""
        return self.device.capability

    def get_current_stream(self, device: object = None) -> int:  # noqa: ARG002
        """The default stream. Launches are executed immediately and in order."""
        return 0

    def get_active_torch_device(self) -> Any:
        """The device of tensors: the CPU."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """torch's module for the CPU."""
        import torch

        return torch.cpu

    def get_benchmarker(self) -> Any:
        """Raises NotImplementedError, because the time of an emulated launch says nothing about a GPU."""
        raise NotImplementedError("emulated launches have no time of a GPU: pass config= in place of autotuning")


def backend() -> Backend:
    """The entry in Triton's list of backends while a session is open."""
    return Backend(compiler=PtxBackend, driver=CudaDriver)
