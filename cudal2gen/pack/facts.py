"""Defines what writing and reading packs share: names of files, the JSON text that digests cover, and the error."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kernelproof.ground.errors import WrongInput

LIBRARY = "libcudal2gen.so"
HEADER = "cudal2gen.h"
LICENCES = ("LICENSE", "LICENSE-CUTLASS")
ENTRY_POINTS = "cudal2gen.packs"


class PackError(WrongInput):
    """A pack that cannot be written, or must not be used; the message says why."""


def as_json(values: Any) -> bytes:
    """Values as the bytes of a JSON file: sorted, so that equal values have equal digests."""
    return (json.dumps(values, sort_keys=True, indent=1) + "\n").encode()


def sha256(content: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
