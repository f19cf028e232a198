"""Proves that numbers of CUDA's interfaces are those that its own headers define."""

from __future__ import annotations

import re
from functools import cache

import pytest

from kernelproof.emulator.hopper import tensor_map
from kernelproof.emulator.host import cuda, graph_memory, graphs, memory_calls, streams
from kernelproof.grading import device
from kernelproof.ground.toolchain import discover


@cache
def header_numbers() -> dict[str, int]:
    """Name -> number of every enumerator, and of every macro that is a plain number."""
    out: dict[str, int] = {}
    for name in ("cuda.h", "driver_types.h"):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (discover().cuda_include / name).read_text(), flags=re.S)
        for body in re.findall(r"\benum\b[^{;]*\{([^}]*)\}", text):
            number = -1
            for item in body.split(","):
                if (match := re.match(r"\s*(\w+)\s*(?:=\s*(-?(?:0x)?[0-9A-Fa-f]+)\s*)?$", item)) is None:
                    continue
                number = number + 1 if match[2] is None else int(match[2], 0)
                out[match[1]] = number
        for macro, value in re.findall(
            r"#define\s+(\w+)\s+(?:\(?\([\w ]+\))?(-?(?:0x)?[0-9A-Fa-f]+)\)?\s*$", text, re.M
        ):
            out[macro] = int(value, 0)
    return out


ERRORS = {
    "SUCCESS": "Success", "INVALID_VALUE": "ErrorInvalidValue", "OUT_OF_MEMORY": "ErrorMemoryAllocation",
    "INVALID_CONFIGURATION": "ErrorInvalidConfiguration", "INVALID_SYMBOL": "ErrorInvalidSymbol",
    "INVALID_FUNCTION": "ErrorInvalidDeviceFunction", "NO_DEVICE": "ErrorNoDevice",
    "INVALID_DEVICE": "ErrorInvalidDevice", "INVALID_IMAGE": "ErrorInvalidKernelImage",
    "FILE_NOT_FOUND": "ErrorFileNotFound", "INVALID_HANDLE": "ErrorInvalidResourceHandle",
    "SYMBOL_NOT_FOUND": "ErrorSymbolNotFound", "LAUNCH_FAILURE": "ErrorLaunchFailure",
    "NOT_SUPPORTED": "ErrorNotSupported", "COOPERATIVE_TOO_LARGE": "ErrorCooperativeLaunchTooLarge",
    "INVALID_CLUSTER": "ErrorInvalidClusterSize", "NO_IMAGE": "ErrorNoKernelImageForDevice",
    "FAILED_ASSERT": "ErrorAssert", "COOPERATIVE": "LaunchAttributeCooperative",
    "CLUSTER_DIMENSION": "LaunchAttributeClusterDimension",
    "STREAM_SERIALIZATION": "LaunchAttributeProgrammaticStreamSerialization",
    "MAX_DYNAMIC_SHARED": "FuncAttributeMaxDynamicSharedMemorySize",
    "NON_PORTABLE_CLUSTER_ALLOWED": "FuncAttributeNonPortableClusterSizeAllowed",
}  # fmt: skip
# What a pointer says of its memory; flags; and the attributes of a device's memory for graphs.
OTHERS = {
    "MemoryTypeHost": memory_calls.PINNED, "MemoryTypeDevice": memory_calls.DEVICE,
    "MemoryTypeManaged": memory_calls.MANAGED, "InvalidDeviceId": memory_calls._INVALID_DEVICE,
    "StreamPerThread": streams.PER_THREAD, "StreamNonBlocking": streams.NON_BLOCKING,
    "GraphInstantiateFlagAutoFreeOnLaunch": graphs.AUTO_FREE,
    "GraphMemAttrUsedMemCurrent": graph_memory.USED, "GraphMemAttrUsedMemHigh": graph_memory.USED_HIGH,
    "GraphMemAttrReservedMemCurrent": graph_memory.RESERVED, "GraphMemAttrReservedMemHigh": graph_memory.RESERVED_HIGH,
}  # fmt: skip


def test_numbers_of_the_runtime_are_those_of_its_headers() -> None:
    numbers = header_numbers()
    ours = {f"cuda{name}": getattr(cuda, constant) for constant, name in ERRORS.items()}
    ours |= {f"cuda{name}": number for name, number in OTHERS.items()}
    assert ours == {name: numbers[name] for name in ours}
    attributes = {number for name, number in numbers.items() if re.match(r"cudaFuncAttribute(?!Max$)[A-Z]", name)}
    named = {cuda.MAX_DYNAMIC_SHARED, cuda.NON_PORTABLE_CLUSTER_ALLOWED, *cuda.OTHER_FUNCTION_ATTRIBUTES}
    assert named == attributes


def test_every_constant_of_the_runtime_is_compared() -> None:
    constants = {name for name, value in vars(cuda).items() if name.isupper() and isinstance(value, int)}
    limits = {"STATIC_SHARED_LIMIT", "PORTABLE_CLUSTER", "NON_PORTABLE_CLUSTER"}
    assert constants - limits == ERRORS.keys()


@pytest.mark.parametrize("kind", ["HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice", "Default"])
def test_a_kind_of_copy_says_where_both_sides_are(kind: str) -> None:
    source, _, destination = kind.partition("To")
    sides = None if kind == "Default" else (destination == "Device", source == "Device")
    assert memory_calls._ON_DEVICE[header_numbers()[f"cudaMemcpy{kind}"]] == (sides or (None, None))


# A type of the grader -> that of a tensor map, and its bytes.
TYPES = {
    "u8": ("UINT8", 1), "u16": ("UINT16", 2), "u32": ("UINT32", 4), "i32": ("INT32", 4), "u64": ("UINT64", 8),
    "i64": ("INT64", 8), "f16": ("FLOAT16", 2), "f32": ("FLOAT32", 4), "f64": ("FLOAT64", 8), "bf16": ("BFLOAT16", 2),
}  # fmt: skip


def test_types_and_swizzles_of_tensor_maps_are_those_of_the_driver() -> None:
    numbers = header_numbers()
    types = {name: numbers[f"CU_TENSOR_MAP_DATA_TYPE_{kind}"] for name, (kind, _) in TYPES.items()}
    assert types == device.MAP_TYPES
    wide = {f"CU_TENSOR_MAP_DATA_TYPE_{kind}": 4 for kind in ("FLOAT32_FTZ", "TFLOAT32", "TFLOAT32_FTZ")}
    sizes = {types[name]: size for name, (_, size) in TYPES.items()} | {numbers[name]: 4 for name in wide}
    assert sizes == tensor_map.ELEMENT_BYTES
    spans = {numbers["CU_TENSOR_MAP_SWIZZLE_NONE"]: 0}
    spans |= {numbers[f"CU_TENSOR_MAP_SWIZZLE_{span}B"]: span for span in (32, 64, 128)}
    assert dict(enumerate(device.MAP_SWIZZLES)) == spans
    assert spans | {0: 16} == tensor_map.SWIZZLE_SPAN
