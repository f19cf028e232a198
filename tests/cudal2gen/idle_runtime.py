"""A CUDA runtime on which everything succeeds and nothing runs, for tests of what the launcher itself refuses and asks.

A stream is captured where ``capture`` says so: the next launch then depends on nodes of these types.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kernelproof.ground.toolchain import discover

KERNEL_NODE, MEMCPY_NODE, MEMSET_NODE = 0, 1, 2  # cudaGraphNodeType
NOTHING = (
    *("cudaLibraryLoadFromFile", "cudaLibraryUnload", "cudaLibraryGetKernel", "cudaKernelSetAttributeForDevice"),
    *("cudaGetDevice", "cudaFuncGetAttributes", "cudaMemsetAsync", "cudaGetLastError"),
)
SOURCE = """
#include <driver_types.h>

int idle_overlaps, idle_cooperates, idle_captures, idle_nodes[8];
size_t idle_count;

int cudaDeviceGetAttribute(int* value) { return *value = 4, 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count) { return *count = 1, 0; }
int cudaOccupancyMaxActiveClusters(int* count) { return *count = 4, 0; }
char const* cudaGetErrorString(int code) { return code ? "an error" : "none"; }
static int encode(void) { return 0; }
int cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned version, unsigned long long flags,
                                     int* status) {
  return *function = (void*)encode, *status = name ? 0 : 1, (int)(version * flags * 0);
}
int cudaStreamIsCapturing(void* stream, int* status) { return *status = idle_captures, stream ? 0 : 0; }
int cudaStreamGetCaptureInfo(void* stream, int* status, void* id, void* graph, void*** nodes, void* edges,
                             size_t* count) {
  static void* pointers[8];
  for (int i = 0; i < 8; ++i) pointers[i] = &idle_nodes[i];
  return *nodes = pointers, *count = idle_count, *status = 1, stream || id || graph || edges ? 0 : 0;
}
int cudaGraphNodeGetType(int* node, int* type) { return *type = *node, 0; }
int cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  idle_overlaps = idle_cooperates = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      idle_overlaps = config->attrs[i].val.programmaticStreamSerializationAllowed;
    else if (config->attrs[i].id == cudaLaunchAttributeCooperative)
      idle_cooperates = config->attrs[i].val.cooperative;
  return function || arguments ? 0 : 0;
}
"""


def build(folder: Path) -> Path:
    """Compiles the library into a folder."""
    library = folder / "libcudart.so"
    source = SOURCE + "".join(f"int {name}(void) {{ return 0; }}\n" for name in NOTHING)
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-I{discover().cuda_include}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


def capture(library: Path, nodes: Sequence[int] | None) -> None:
    """Captures streams behind nodes of these types; None ends it."""
    opened = ctypes.CDLL(str(library))
    ctypes.c_int.in_dll(opened, "idle_captures").value = nodes is not None
    ctypes.c_size_t.in_dll(opened, "idle_count").value = len(nodes or ())
    (ctypes.c_int * 8).in_dll(opened, "idle_nodes")[: len(nodes or ())] = list(nodes or ())


def overlaps(library: Path) -> bool:
    """Whether the last launch was allowed to overlap with the kernel before it."""
    return bool(ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "idle_overlaps").value)


def cooperates(library: Path) -> bool:
    """Whether the last launch demanded that all its CTAs run at once."""
    return bool(ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "idle_cooperates").value)
