"""Facts shared by writing and reading packs: file names, the JSON that digests cover, the error."""

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
    """The bytes of a JSON file; a digest of values is one of these."""
    return (json.dumps(values, sort_keys=True, indent=1) + "\n").encode()


def sha256(content: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
