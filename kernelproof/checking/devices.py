"""Lists the GPUs that a check can emulate, and the names by which users choose them."""

from __future__ import annotations

import re

from kernelproof.emulator import HOPPER, Device
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import WrongInput

DEFAULT = "sm_80"  # what is emulated where the user names no device
# The chip that is emulated for a compute capability. Every chip can also be chosen by its own name.
_CHIPS = {
    "sm_80": "a100",
    "sm_86": "rtx3090",
    "sm_89": "rtx4090",
    "sm_90": "h200",
    "sm_100": "b200",
    "sm_120": "rtx5090",
}


def names() -> list[str]:
    """The values that ``--gpu`` accepts."""
    return [*_CHIPS, "sm_90a", *GPUS]


def device(name: str) -> Device:
    """The device for a compute capability (sm_90a means sm_90) or a chip. Raises WrongInput."""
    base = re.sub(r"^(?:compute|sm)_(\d+)[af]?$", r"sm_\1", name.casefold())
    chip = GPUS.get(_CHIPS.get(base, base))
    if chip is None:
        raise WrongInput(f"--gpu {name}: expected one of {', '.join(names())}")
    return HOPPER if chip is GPUS["h200"] else Device.of(chip)


def target(name: str | None = None) -> str:
    """The architecture to compile for on a device, such as ``sm_90a``; ``name``: what ``device`` takes, or None for the
    default.

    Since 9.0 the suffix ``a`` enables the instructions that only this architecture has. Raises WrongInput.
    """
    major, minor = device(name or DEFAULT).capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def nearest(sm: str) -> str:
    """The device on which to run code of an architecture such as sm_86: the first whose capability is the same or
    later; if none is, the last device. A text without digits counts as sm_80."""
    number = int(re.sub(r"\D", "", sm) or 80)
    return next((name for name in _CHIPS if int(name[3:]) >= number), list(_CHIPS)[-1])
