"""Checks launches against the limits of the CUDA runtime and of the device, and says which code a device can run."""

from __future__ import annotations

import math
import re

from kernelproof.emulator.frontend.ptx import Function
from kernelproof.emulator.host.cuda import (
    COOPERATIVE_TOO_LARGE,
    INVALID_CLUSTER,
    INVALID_CONFIGURATION,
    INVALID_VALUE,
    NO_IMAGE,
    NON_PORTABLE_CLUSTER,
    NOT_SUPPORTED,
    PORTABLE_CLUSTER,
    LaunchRefused,
)
from kernelproof.emulator.state.launch_state import Geometry
from kernelproof.emulator.state.options import HOPPER, Device
from kernelproof.emulator.state.participants import Dim3
from kernelproof.ground import chips
from kernelproof.ground.chips import GPUS


def check_launch(
    function: Function, geometry: Geometry, shared_static: int, dynamic_limit: int, device: Device, large_clusters: bool
) -> None:
    """Check a launch as the CUDA runtime does. ``shared_static``: bytes of the kernel's own shared memory.
    ``dynamic_limit``: bytes of dynamic shared memory allowed. Raises LaunchRefused."""
    grid, block, threads = geometry.grid, geometry.block, geometry.threads
    check_cluster(function, grid, device, geometry.cluster, large_clusters)
    if min(*grid, *block) < 1:
        raise LaunchRefused(INVALID_CONFIGURATION, f"grid {grid} and block {block} must be positive")
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        raise LaunchRefused(INVALID_CONFIGURATION, f"grid {grid} exceeds (2147483647, 65535, 65535)")
    if threads > 1024 or block[2] > 64:
        raise LaunchRefused(INVALID_CONFIGURATION, f"block {block} exceeds 1024 threads or (1024, 1024, 64)")
    limit = function.attributes.get("maxntid")
    if limit and threads > math.prod(limit):
        raise LaunchRefused(
            INVALID_CONFIGURATION, f"block of {threads} threads, the kernel was compiled for at most {math.prod(limit)}"
        )
    required = function.attributes.get("reqntid")
    if required and tuple(block) != (*required, 1, 1, 1)[:3]:
        raise LaunchRefused(INVALID_CONFIGURATION, f"block {block}, the kernel requires {required}")
    _check_shared(geometry.shared_bytes, shared_static, dynamic_limit, device)
    if geometry.cooperative:
        _check_resident(geometry, shared_static + geometry.shared_bytes, device)


def _check_resident(geometry: Geometry, shared_bytes: int, device: Device) -> None:
    """Refuse a cooperative grid if the device cannot hold all of its clusters at the same time."""
    size = geometry.cluster_size
    most = device.resident(geometry.threads, shared_bytes) * device.sm_count // size * size
    if geometry.ctas > most:
        raise LaunchRefused(
            COOPERATIVE_TOO_LARGE, f"a cooperative grid of {geometry.ctas} CTAs, the device holds {most} at a time"
        )


def _check_shared(dynamic: int, static: int, limit: int, device: Device) -> None:
    """Refuse too much shared memory, in bytes. ``limit``: bytes of dynamic shared memory allowed."""
    if not 0 <= dynamic <= limit:
        raise LaunchRefused(
            INVALID_VALUE,
            f"{dynamic} bytes of dynamic shared memory, allowed are {limit} (cudaFuncSetAttribute raises it)",
        )
    total = static + dynamic
    if total > device.smem_optin_bytes:
        raise LaunchRefused(INVALID_VALUE, f"{total} bytes of shared memory, the device has {device.smem_optin_bytes}")


def check_target(target: str, device: Device, machine_code: bool = False) -> None:
    """Refuse PTX, or machine code, that the device cannot run. Raises LaunchRefused."""
    if not runs(target, device, machine_code):
        major, minor = device.capability
        what, others = ("machine code", " and later ones of its family") if machine_code else ("PTX", " and later")
        hint = {"a": " alone", "f": " and later ones of its family"}.get(target[-1:], others)
        text = f"the {what} is for {target}{hint}, the device is sm_{major}{minor}"
        raise LaunchRefused(NO_IMAGE, text)


def runs(target: str, device: Device, machine_code: bool = False) -> bool:
    """Can a device run code for a target such as sm_80? PTX without a suffix runs on its target and on all later
    devices. Machine code, and PTX of a target with suffix a or f, runs only on devices of the same family."""
    number = re.fullmatch(r"sm_(\d+)([af]?)", target)
    if number is None:
        return True
    major, minor = device.capability
    if number[2]:
        return chips.runs(target, device.capability)
    family = not machine_code or int(number[1]) // 10 == major
    return family and int(number[1]) <= 10 * major + minor


def device_for(target: str, machine_code: bool = False) -> Device:
    """A device that can run code of a target: an A100 if it can, else an H200, else the first GPU of the catalogue."""
    devices = [Device(), HOPPER, *map(Device.of, GPUS.values())]
    return next((device for device in devices if runs(target, device, machine_code)), devices[0])


def check_cluster(function: Function, grid: Dim3, device: Device, cluster: Dim3, large: bool) -> None:
    """Refuse cluster dimensions as the CUDA runtime does, by LaunchRefused. ``large``: more than 8 CTAs are allowed."""
    size = math.prod(cluster)
    fixed = fixed_cluster(function)
    if fixed is not None and fixed != cluster:
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


def fixed_cluster(function: Function) -> Dim3 | None:
    """The cluster dimensions that a kernel was compiled for; None if the launch chooses them."""
    fixed = function.attributes.get("reqnctapercluster")
    if not fixed or min(fixed) < 1:
        return None
    x, y, z = (*fixed, 1, 1)[:3]
    return x, y, z
