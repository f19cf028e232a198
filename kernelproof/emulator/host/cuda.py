"""Names numbers of the CUDA runtime: error codes, attributes, limits."""

from __future__ import annotations

from kernelproof.emulator.state.reports import EmulatorError

STATIC_SHARED_LIMIT = 48 * 1024
PORTABLE_CLUSTER, NON_PORTABLE_CLUSTER = 8, 16
# cudaError_t.
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION, INVALID_SYMBOL = 0, 1, 2, 9, 13
INVALID_FUNCTION, NO_DEVICE, INVALID_DEVICE, INVALID_IMAGE, FILE_NOT_FOUND = 98, 100, 101, 200, 301
INVALID_HANDLE, SYMBOL_NOT_FOUND, LAUNCH_FAILURE, NOT_SUPPORTED = 400, 500, 719, 801
COOPERATIVE_TOO_LARGE, INVALID_CLUSTER, NO_IMAGE, FAILED_ASSERT = 720, 912, 209, 710
# cudaLaunchAttributeID.
COOPERATIVE, CLUSTER_DIMENSION, STREAM_SERIALIZATION = 2, 4, 6
# cudaFuncAttribute: two that are modelled, and those that have no effect here.
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER_ALLOWED = 8, 14
OTHER_FUNCTION_ATTRIBUTES = (9, 10, 11, 12, 13, 15)


class LaunchRefused(EmulatorError):
    """The CUDA runtime would refuse this call. ``code`` is the cudaError_t that it returns. ``kernel`` names the kernel
    of a refused launch, else it is empty. ``rule``: the rule of the finding; if empty, ``refusal_report`` chooses it by
    the call."""

    def __init__(self, code: int, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.code, self.kernel, self.rule = code, "", rule
