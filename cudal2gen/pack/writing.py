"""Writes a pack as a folder or as a wheel."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from pathlib import Path

from cudal2gen import torch_range
from cudal2gen.pack.abi import FIRST_READER
from cudal2gen.pack.facts import ENTRY_POINTS, LICENCES, PackError
from kernelproof.ground.files import folder, write

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can store
WHEEL_NAME = re.compile(r"[\w.]+-[\w.+]+(-\d[\w.]*)?-[\w.]+-[\w.]+-[\w.]+\.whl")


def check_target(target: Path) -> None:
    """Raises PackError if ``target`` exists and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PackError(f"{target} is there already; remove it, or choose another --out")


def write_folder(files: dict[str, bytes], target: Path) -> Path:
    """Writes a pack as a folder, which appears when all files are in it. Raises PackError as ``check_target``, and
    Failure if a file cannot be written."""
    check_target(target)
    with folder(target) as scratch:
        for name, content in files.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return target


def write_wheel(files: dict[str, bytes], target: Path) -> Path:
    """Writes a pack as a wheel and returns its path. If ``target`` is no name of a wheel that pip accepts, the wheel
    gets such a name in the same folder. Raises Failure if it cannot be written."""
    facts = json.loads(files["pack.json"])
    # Wheels of candidates and of measurements, and wheels for CUDA 12 and 13, have different versions, so that pip
    # replaces one by the other.
    package, version = f"cudal2gen_{facts['gpu']}", facts["version"]
    local = [] if facts["problems_measured"] else ["candidates"]
    local += [f"cu{cuda}"] if (cuda := torch_range.major(facts["cuda"])) < torch_range.CUDA else []
    version += f"+{'.'.join(local)}" if local else ""
    tag = f"py3-none-linux_{facts['machine']}"
    if not WHEEL_NAME.fullmatch(target.name):
        target = target.with_name(f"{package}-{version}-{tag}.whl")
    info = f"{package}-{version}.dist-info"
    members = {f"{package}/{name}": content for name, content in sorted(files.items())}
    members[f"{package}/__init__.py"] = _INIT.format(**facts).encode()
    stated = facts | {"package": package, "since": FIRST_READER, "version": version}
    members[f"{info}/METADATA"] = _METADATA.format(**stated).encode()
    members[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: cudal2gen\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    members[f"{info}/entry_points.txt"] = f"[{ENTRY_POINTS}]\n{facts['gpu']} = {package}:folder\n".encode()
    members |= {f"{info}/licenses/{name}": files[name] for name in LICENCES}
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_urlsafe(content)},{len(content)}\n" for name, content in members.items()]
    members[record] = "".join([*lines, f"{record},,\n"]).encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.create_system = 3  # host system Unix, on every machine
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    write(target, wheel.getvalue())
    return target


_INIT = '''"""Kernels of cudal2gen for the {gpu}: data, which cudal2gen finds where this package is installed."""

from pathlib import Path


def folder():
    return Path(__file__).resolve().parent
'''
_METADATA = """Metadata-Version: 2.4
Name: {package}
Version: {version}
Summary: Compiled HGEMM kernels of cudal2gen for the {gpu} ({sm}), CUDA {cuda_range}, driver {driver_minimum} or newer
License-Expression: MIT AND BSD-3-Clause
License-File: LICENSE
License-File: LICENSE-CUTLASS
Requires-Python: >=3.11
Requires-Dist: cudal2gen>={since}
"""


def _urlsafe(content: bytes) -> str:
    """A SHA-256 digest as RECORD of a wheel has it: in base64 for URLs, without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
