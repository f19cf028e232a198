"""Runs Triton kernels on the CPU by their real PTX, with the emulator's findings, such as races and missing fences.

    with triton_emulation.emulate(device="sm_90a") as session:
        kernel[grid](x, y, n, BLOCK=1024)      # CPU tensors; results are in them
    session.launches[0].ptx, session.reports

While the session is open, Triton compiles for that device and launches there. No GPU, driver or ptxas is needed.
Everything else is Triton's own: its compiler and cache, specialisation of arguments, heuristics, callable grids. When
the session ends, errors are raised as ``Findings`` unless ``check=False``. Only one session may be open at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kernelproof.checking import devices
from kernelproof.emulator import Device, Options
from kernelproof.ground.errors import MissingTool, WrongInput
from kernelproof.triton_emulation.findings import Findings

__all__ = ["EmulatedKernel", "Findings", "emulate", "emulated"]

if TYPE_CHECKING:
    from kernelproof.triton_emulation.session import TritonSession


def emulate(
    device: str | Device = "sm_80",
    *,
    config: Any = None,
    check: bool = True,
    options: Options | None = None,
) -> TritonSession:
    """Return a context in which ``kernel[grid](...)`` runs on the emulated device.

    ``device``: ``sm_80``, ``sm_90a``, a GPU such as ``h100``, or an emulator's Device; kernels are compiled for its
    compute capability. ``config``: the configuration of autotuned kernels, as a number in their list or a
    triton.Config; by default the first one left after Triton's pruning (``session.notes`` names it). ``check``: raise
    ``Findings`` at the end if there are errors. ``options``: the emulator's; ``Options(hazards=False)`` turns off
    checks of order. Raises MissingTool without triton, WrongInput for an unknown device or with TRITON_INTERPRET set.
    """
    if find_spec("triton") is None:
        raise MissingTool("Triton kernels need triton: pip install triton torch")
    from kernelproof.triton_emulation.session import TritonSession

    target = devices.device(device) if isinstance(device, str) else device
    return TritonSession(target, config, check, options or Options())


class EmulatedKernel:
    """A Triton kernel that always runs in a session of its own. ``session`` is the last one; all other attributes are
    those of the kernel."""

    def __init__(self, kernel: Any, arguments: dict[str, Any]) -> None:
        self.kernel, self.arguments = kernel, arguments
        self.session: TritonSession | None = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """``kernel[grid](...)``, as with a kernel of Triton."""

        def launch(*args: object, **values: object) -> Any:
            self.session = emulate(**self.arguments)
            with self.session:
                return self.kernel[grid](*args, **values)

        return launch

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # not set yet while the object is being copied
            raise AttributeError(name)
        return getattr(self.kernel, name)


def emulated(
    device: str | Device = "sm_80", *, config: Any = None, check: bool = True, options: Options | None = None
) -> Callable[[Any], EmulatedKernel]:
    """A decorator to be written above ``@triton.jit`` (and ``autotune``, ``heuristics``), with the arguments of
    ``emulate``. Raises WrongInput if it is written below, where there is no kernel yet."""

    def decorate(kernel: Any) -> EmulatedKernel:
        if not hasattr(kernel, "run"):
            name = getattr(kernel, "__name__", kernel)
            raise WrongInput(f"{name} is no Triton kernel: write emulated above @triton.jit")
        return EmulatedKernel(kernel, {"device": device, "config": config, "check": check, "options": options})

    return decorate
