"""Answers runtime calls about the device: its attributes and properties."""

from __future__ import annotations

import ctypes
import struct

from kernelproof.emulator.host.cuda import INVALID_DEVICE, STATIC_SHARED_LIMIT, SUCCESS
from kernelproof.emulator.host.runtime_state import Call, RuntimeState, put
from kernelproof.emulator.host.standin import Words
from kernelproof.emulator.state.options import RESERVED_SHARED, Device

PROPERTIES_BYTES = 1008  # of cudaDeviceProp in CUDA 13


def attributes(d: Device) -> dict[int, int]:
    """cudaDeviceAttr -> value; other attributes are 0. Clocks, the bus and textures are those of an A100 for every
    device, since the emulator models none of them."""
    return {
        1: 1024,  # maxThreadsPerBlock
        2: 1024,  # maxBlockDimX, Y, Z
        3: 1024,
        4: 64,
        5: 2**31 - 1,  # maxGridDimX, Y, Z
        6: 65535,
        7: 65535,
        8: STATIC_SHARED_LIMIT,  # maxSharedMemoryPerBlock
        9: 65536,  # totalConstantMemory
        10: 32,  # warpSize
        11: 2**31 - 1,  # maxPitch
        12: d.registers_per_sm,  # maxRegistersPerBlock
        13: 1_410_000,  # clockRate, kHz
        14: 512,  # textureAlignment
        15: 1,  # gpuOverlap
        16: d.sm_count,  # multiProcessorCount
        19: 1,  # canMapHostMemory
        31: 1,  # concurrentKernels
        36: 1_215_000,  # memoryClockRate, kHz
        37: 5120,  # globalMemoryBusWidth, bits
        38: d.l2_bytes,  # l2CacheSize
        39: d.threads_per_sm,  # maxThreadsPerMultiProcessor
        40: 3,  # asyncEngineCount
        41: 1,  # unifiedAddressing
        51: 32,  # texturePitchAlignment
        75: d.capability[0],  # computeCapabilityMajor, Minor
        76: d.capability[1],
        78: 1,  # streamPrioritiesSupported
        79: 1,  # globalL1CacheSupported
        80: 1,  # localL1CacheSupported
        81: d.smem_per_sm_bytes,  # maxSharedMemoryPerMultiprocessor
        82: d.registers_per_sm,  # maxRegistersPerMultiprocessor
        83: 1,  # managedMemory
        89: 1,  # concurrentManagedAccess
        90: 1,  # computePreemptionSupported
        95: 1,  # cooperativeLaunch
        97: d.smem_optin_bytes,  # maxSharedMemoryPerBlockOptin
        106: d.blocks_per_sm,  # maxBlocksPerMultiprocessor
        108: persisting_l2(d),  # maxPersistingL2CacheSize
        109: persisting_l2(d),  # maxAccessPolicyWindowSize
        111: RESERVED_SHARED,  # reservedSharedMemoryPerBlock
        115: 1,  # memoryPoolsSupported
        120: int(d.capability[0] >= 9),  # clusterLaunch
    }


def persisting_l2(d: Device) -> int:
    """Bytes of the L2 that an access policy may reserve: three quarters."""
    return d.l2_bytes * 3 // 4


class DeviceCalls:
    """Calls about the device. The session has one device, whose number is 0."""

    def __init__(self, state: RuntimeState) -> None:
        self.state = state
        self.calls: dict[str, Call] = {
            "get_device": self.get_device,
            "device_count": self.device_count,
            "device_attribute": self.device_attribute,
            "device_properties": self.device_properties,
            "device_name": self.device_name,
        }

    def get_device(self, a: Words) -> int:
        """cudaGetDevice."""
        put(a[0], "i", 0)
        return SUCCESS

    def device_count(self, a: Words) -> int:
        """cudaGetDeviceCount."""
        put(a[0], "i", 1)
        return SUCCESS

    def device_name(self, a: Words) -> int:
        """cuDeviceGetName: out, its size."""
        name = self.state.device.name.encode()[: max(0, a[1] - 1)] + b"\0"
        ctypes.memmove(a[0], name, len(name))
        return SUCCESS

    def device_attribute(self, a: Words) -> int:
        """cudaDeviceGetAttribute: out, attribute, device."""
        if a[2] != 0:
            return INVALID_DEVICE
        put(a[0], "i", attributes(self.state.device).get(a[1], 0))
        return SUCCESS

    def device_properties(self, a: Words) -> int:
        """cudaGetDeviceProperties: out, device."""
        if a[1] != 0:
            return INVALID_DEVICE
        d = self.state.device
        # Offsets of cudaDeviceProp in CUDA 13.
        fields: list[tuple[int, str, tuple[int, ...]]] = [
            (288, "Q", (self.state.memory.capacity,)),  # totalGlobalMem
            (296, "Q", (STATIC_SHARED_LIMIT,)),  # sharedMemPerBlock
            (304, "i", (d.registers_per_sm,)),  # regsPerBlock
            (308, "i", (32,)),  # warpSize
            (312, "Q", (2**31 - 1,)),  # memPitch
            (320, "i", (1024,)),  # maxThreadsPerBlock
            (324, "3i", (1024, 1024, 64)),  # maxThreadsDim
            (336, "3i", (2**31 - 1, 65535, 65535)),  # maxGridSize
            (352, "Q", (65536,)),  # totalConstMem
            (360, "2i", d.capability),  # major, minor
            (368, "2Q", (512, 32)),  # textureAlignment, texturePitchAlignment
            (384, "i", (d.sm_count,)),  # multiProcessorCount
            (392, "i", (1,)),  # canMapHostMemory
            (560, "i", (1,)),  # concurrentKernels
            (584, "2i", (3, 1)),  # asyncEngineCount, unifiedAddressing
            # memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, and whether there are
            # priorities of streams and L1 caches for global and local memory
            (592, "7i", (5120, d.l2_bytes, persisting_l2(d), d.threads_per_sm, 1, 1, 1)),
            (624, "Q", (d.smem_per_sm_bytes,)),  # sharedMemPerMultiprocessor
            (632, "i", (d.registers_per_sm,)),  # regsPerMultiprocessor
            (636, "i", (1,)),  # managedMemory
            (656, "2i", (1, 1)),  # concurrentManagedAccess, computePreemptionSupported
            (668, "i", (1,)),  # cooperativeLaunch
            (672, "Q", (d.smem_optin_bytes,)),  # sharedMemPerBlockOptin
            (688, "2i", (d.blocks_per_sm, persisting_l2(d))),  # maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize
            (696, "Q", (RESERVED_SHARED,)),  # reservedSharedMemPerBlock
            (720, "i", (1,)),  # memoryPoolsSupported
            (748, "i", (int(d.capability[0] >= 9),)),  # clusterLaunch
        ]
        out = bytearray(PROPERTIES_BYTES)
        name = d.name.encode()[:255]
        out[: len(name)] = name
        for offset, form, values in fields:
            struct.pack_into("<" + form, out, offset, *values)
        ctypes.memmove(a[0], bytes(out), len(out))
        return SUCCESS
