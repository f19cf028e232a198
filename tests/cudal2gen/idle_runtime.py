"""A CUDA runtime that launches nothing and reports success, to test what the launcher itself refuses and calls.

``capture`` sets that a stream is captured, and the types of the nodes on which the next launch depends. Events read a
clock that launches advance (``cost``). After ``refuse_both`` the driver refuses launches that both cooperate and
overlap.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelproof.ground.toolchain import discover

KERNEL_NODE, MEMCPY_NODE, MEMSET_NODE = 0, 1, 2  # cudaGraphNodeType
# Functions that only return success.
NOTHING = (
    *("cudaGetDevice", "cudaFuncGetAttributes", "cudaGetLastError", "cudaEventSynchronize", "cudaFree"),
    *("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithFlags", "cudaStreamSynchronize", "cudaStreamDestroy"),
)
# The name of the card that the runtime says it has.
A100 = "NVIDIA A100-SXM4-80GB"
# The C text of the runtime. Its variables say what the last calls asked for, and tests set some of them.
SOURCE = """
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

int idle_overlaps, idle_cooperates, idle_captures, idle_nodes[8], idle_memsets, idle_launches, idle_refuses_both;
unsigned idle_words[32], idle_wanted, idle_argument; /* of an argument of the last launch; no words unless wanted */
size_t idle_count, idle_kernels, idle_cleared;
long long idle_clock, idle_costs[16]; /* ns; of a launch by the order in which kernels were opened, from 1 on */

int idle_versions[2] = {13000, 13000}; /* of the runtime, and the newest that the driver supports */
int cudaRuntimeGetVersion(int* version) { return *version = idle_versions[0], 0; }
int cudaDriverGetVersion(int* version) { return *version = idle_versions[1], 0; }
int cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return *value = 8, 0;
    case cudaDevAttrComputeCapabilityMinor: return *value = 0, 0;
    case cudaDevAttrMultiProcessorCount: return *value = 108, 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = 163 << 10, 0;
    default: return *value = 4, 0;
  }
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count) { return *count = 1, 0; }
int cudaOccupancyMaxActiveClusters(int* count) { return *count = 4, 0; }
char const* cudaGetErrorString(int code) { return code ? "an error" : "none"; }
static int encode(void) { return 0; }
int idle_driver; /* how often it was called for kernels; -1: it lacks these functions */
#ifdef CUDA_12_6
static int count_driver(void) { return ++idle_driver, 0; }
static int get_kernel(size_t* kernel) { return ++idle_driver, *kernel = ++idle_kernels, 0; }
#else
int cudaLibraryLoadFromFile(void) { return 0; }
int cudaLibraryUnload(void) { return 0; }
int cudaKernelSetAttributeForDevice(void) { return 0; }
int cudaLibraryGetKernel(size_t* kernel) { return *kernel = ++idle_kernels, 0; }
#endif
int cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned version, unsigned long long flags,
                                     int* status) {
  *function = (void*)encode, *status = 0;
#ifdef CUDA_12_6 /* which leaves kernels to the driver */
  if (!strncmp(name, "cuLibrary", 9) || !strncmp(name, "cuKernel", 8)) {
    *function = !strcmp(name, "cuLibraryGetKernel") ? (void*)get_kernel : (void*)count_driver;
    if (idle_driver < 0) *function = NULL, *status = 1;
  }
#endif
  return (int)(version * flags * 0);
}
int cudaStreamIsCapturing(void* stream, int* status) { return *status = idle_captures, stream ? 0 : 0; }
int cudaMalloc(void** memory, size_t bytes) { return *memory = (void*)(bytes << 10), 0; }
int cudaMemsetAsync(void) { return ++idle_memsets, 0; }
int cudaStreamGetId(void* stream, unsigned long long* id) { return *id = (unsigned long long)stream, 0; }
#ifdef CUDA_12_6 /* whose function without a version has other arguments */
int cudaStreamGetCaptureInfo(void) { abort(); }
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v3
#endif
int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void* graph, void*** nodes, void* edges,
                             size_t* count) {
  static void* pointers[8];
  for (int i = 0; i < 8; ++i) pointers[i] = &idle_nodes[i];
  return *nodes = pointers, *count = idle_count, *status = 1, *id = idle_captures, stream || graph || edges ? 0 : 0;
}
int cudaGraphNodeGetType(int* node, int* type) { return *type = *node, 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties + 24); /* as much as CUDA 12 writes */
  strcpy(properties->name, "A100_NAME");
  return device * 0;
}
int cudaMemset2DAsync(void* d, size_t pitch, int value, size_t width, size_t height) {
  return idle_cleared += width * height, d && pitch >= width && !value ? 0 : 1;
}
int cudaEventCreate(long long** event) { return (*event = malloc(sizeof **event)) ? 0 : 2; }
int cudaEventDestroy(long long* event) { return free(event), 0; }
int cudaEventRecord(long long* event) { return *event = idle_clock, 0; }
int cudaEventElapsedTime(float* ms, long long const* start, long long const* stop) {
  return *ms = (float)(*stop - *start) * 1e-6f, 0;
}
int cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  idle_overlaps = idle_cooperates = 0;
  idle_clock += idle_costs[(size_t)function & 15];
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      idle_overlaps = config->attrs[i].val.programmaticStreamSerializationAllowed;
    else if (config->attrs[i].id == cudaLaunchAttributeCooperative)
      idle_cooperates = config->attrs[i].val.cooperative;
  if (idle_wanted) memcpy(idle_words, arguments[idle_argument], idle_wanted * sizeof *idle_words);
  ++idle_launches;
  if (idle_refuses_both && idle_overlaps && idle_cooperates) return 801;
  return function || arguments ? 0 : 0;
}
"""


def build(folder: Path, *defined: str) -> Path:
    """Compiles the library into a folder. ``defined``: -DCUDA_12_6 for a runtime that loads no kernels itself."""
    library = folder / "libcudart.so"
    source = SOURCE.replace("A100_NAME", A100) + "".join(f"int {name}(void) {{ return 0; }}\n" for name in NOTHING)
    command = ["gcc", "-O2", "-shared", "-fPIC", *defined, f"-I{discover().cuda_include}", "-x", "c", "-"]
    command += ["-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


def hide_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it appear that this process has loaded no library, such as torch's own runtime."""
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: "" if self.name == "maps" else real(self, *a, **k))


def versions(library: Path, runtime: int = 13000, driver: int = 13000) -> None:
    """Sets the versions that the runtime reports of itself and of the driver, in CUDA's form: 12080 for 12.8."""
    own = (ctypes.c_int * 2).in_dll(ctypes.CDLL(str(library)), "idle_versions")
    own[0], own[1] = runtime, driver


def capture(library: Path, nodes: Sequence[int] | None, number: int = 1) -> None:
    """Makes streams captured by the capture of this number, after nodes of these types; None ends the capture."""
    opened = ctypes.CDLL(str(library))
    ctypes.c_int.in_dll(opened, "idle_captures").value = 0 if nodes is None else number
    ctypes.c_size_t.in_dll(opened, "idle_count").value = len(nodes or ())
    (ctypes.c_int * 8).in_dll(opened, "idle_nodes")[: len(nodes or ())] = list(nodes or ())


def overlaps(library: Path) -> bool:
    """Whether the last launch was allowed to overlap with the previous kernel."""
    return bool(_number(library, "idle_overlaps"))


def cooperates(library: Path) -> bool:
    """Whether the last launch demanded that all its CTAs run at once."""
    return bool(_number(library, "idle_cooperates"))


def memsets(library: Path) -> int:
    """The number of memsets so far."""
    return _number(library, "idle_memsets")


def launches(library: Path) -> int:
    """The number of launches so far, with the refused ones."""
    return _number(library, "idle_launches")


@contextmanager
def words_of(library: Path, argument: int, count: int) -> Iterator[ctypes.Array[ctypes.c_uint]]:
    """The first ``count`` words (of 32 bits, at most 32) of an argument of each launch, after it. ``argument``: its
    number; it must have so many words."""
    opened = ctypes.CDLL(str(library))
    wanted = ctypes.c_uint.in_dll(opened, "idle_wanted")
    ctypes.c_uint.in_dll(opened, "idle_argument").value, wanted.value = argument, count
    try:
        yield (ctypes.c_uint * count).in_dll(opened, "idle_words")
    finally:
        wanted.value = 0


def refuse_both(library: Path, refuses: bool) -> None:
    """Sets whether the driver refuses launches that both cooperate and overlap."""
    ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "idle_refuses_both").value = refuses


def _number(library: Path, name: str) -> int:
    """A variable of the library of type int."""
    return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), name).value


def cost(library: Path, *microseconds: float) -> None:
    """Sets how long launches take, for kernels in the order in which they were opened."""
    opened = ctypes.CDLL(str(library))
    costs = (ctypes.c_longlong * 16).in_dll(opened, "idle_costs")
    first = ctypes.c_size_t.in_dll(opened, "idle_kernels").value + 1
    for number, us in enumerate(microseconds, first):
        costs[number & 15] = round(1e3 * us)


def spend(library: Path, microseconds: float) -> None:
    """Advances the runtime's clock by time in which no kernel runs, such as the host's own work."""
    ctypes.c_longlong.in_dll(ctypes.CDLL(str(library)), "idle_clock").value += round(1e3 * microseconds)


def cleared_bytes(library: Path) -> int:
    """The number of bytes that cudaMemset2DAsync has filled with zeros."""
    return ctypes.c_size_t.in_dll(ctypes.CDLL(str(library)), "idle_cleared").value
