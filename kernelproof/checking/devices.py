"""The devices that a check can emulate."""

from __future__ import annotations

import re

from kernelproof.emulator import HOPPER, Device
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import WrongInput

DEFAULT = "sm_80"
# The chip that stands for a capability; every chip also goes by its own name.
_CHIPS = {
    "sm_80": "a100",
    "sm_86": "rtx3090",
    "sm_89": "rtx4090",
    "sm_90": "h200",
    "sm_100": "b200",
    "sm_120": "rtx5090",
}


def names() -> list[str]:
    """The values of ``--gpu``."""
    return [*_CHIPS, "sm_90a", *GPUS]


def device(name: str) -> Device:
    """The device of a capability (sm_90a is sm_90) or chip. Raises WrongInput."""
    base = re.sub(r"^(?:compute|sm)_(\d+)[af]?$", r"sm_\1", name.casefold())
    chip = GPUS.get(_CHIPS.get(base, base))
    if chip is None:
        raise WrongInput(f"--gpu {name}: expected one of {', '.join(names())}")
    return HOPPER if chip is GPUS["h200"] else Device.of(chip)


def target(name: str) -> str:
    """The architecture to compile for: with every instruction of the device."""
    major, minor = device(name).capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def nearest(sm: str) -> str:
    """The device that runs code of an architecture: the first of its capability or later ones."""
    number = int(re.sub(r"\D", "", sm) or 80)
    later = [name for name in _CHIPS if int(name[3:]) >= number]
    return later[0] if later else list(_CHIPS)[-1]
