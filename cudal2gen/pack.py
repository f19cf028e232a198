"""Packs: what a machine without nvcc and CUTLASS needs to run kernels of one GPU model.

A pack is a folder, or a wheel that installs one as the package ``cudal2gen_<gpu>``:

- ``pack.json``: what it is for, the SHA-256 of every other file, and of itself;
- ``table.json``: kernels and measurements (``choice``);
- ``kernels/<digest>/kernel.cubin`` and ``kernel.launch``, each binary once; ``kernel.ptx`` on request;
- ``libcudal2gen.so``, ``cudal2gen.h`` and ``pack.txt``: the launcher, and the same table for C.

The same records, measurements and compilers give the same bytes. The digests find damage; they are no signature.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudal2gen import places
from cudal2gen.chips import GPUS, VARIANTS
from cudal2gen.choice import Kernel, Row, Table
from cudal2gen.errors import WrongInput, parse_json, reading
from cudal2gen.files import folder, write
from cudal2gen.kernel import Problem, spelled
from cudal2gen.version import __version__

if TYPE_CHECKING:
    from cudal2gen.compiler import Artifact

FORMAT = 1
LIBRARY = "libcudal2gen.so"
HEADER = "cudal2gen.h"
# CUDA's minor versions are compatible: what 13.0 needs runs under every 13.
CUDA_RANGE = ">=13.0,<14"
DRIVER_MINIMUM = "580"
ENTRY_POINTS = "cudal2gen.packs"
FOLDERS = "CUDAL2GEN_PACK"
LICENCES = ("LICENSE", "LICENSE-CUTLASS")
CUBIN_FILES = ("kernel.cubin", "kernel.launch")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say
FILE_NAME = re.compile(r"(?!.*\.\.)\w[\w./-]{0,200}", re.ASCII)  # of a file within the folder
WHEEL_NAME = re.compile(r"[\w.]+-[\w.]+(-\d[\w.]*)?-[\w.]+-[\w.]+-[\w.]+\.whl")


class PackError(WrongInput):
    """A pack that cannot be written, or must not be used; the message says why."""


@dataclass(frozen=True)
class Pack:
    """A pack whose files were checked when it was opened."""

    directory: Path
    facts: dict[str, Any]

    @property
    def gpu(self) -> str:
        return str(self.facts["gpu"])

    @property
    def library(self) -> Path:
        return self.directory / LIBRARY

    @cached_property
    def table(self) -> Table:
        """Kernels and rows. Raises WrongInput for a table of another version."""
        path = self.directory / "table.json"
        return Table.load(_read_json(path), str(path))

    def kernel(self, digest: str) -> Path:
        """The folder of a built kernel."""
        return self.directory / "kernels" / digest


# --- writing ---


def contents(
    table: Table, artifacts: dict[str, Artifact], library: Path, cuda: str, with_ptx: bool = False
) -> dict[str, bytes]:
    """All files of a pack by their path in it. Raises PackError for a table without kernels.

    ``artifacts``: built kernels by digest; ``cuda``: the compiler's version.
    """
    if not table.kernels:
        raise PackError(f"no kernel of {table.gpu} was measured faster than the vendor's library: nothing to pack")
    names = (*CUBIN_FILES, "kernel.ptx") if with_ptx else CUBIN_FILES
    files = {"table.json": _json(table.dump()), LIBRARY: library.read_bytes()}
    files[HEADER] = (places.PACKAGE / HEADER).read_bytes()
    files |= {name: text.encode() for name, text in _licences().items()}
    for digest in sorted({kernel.digest for kernel in table.kernels}):
        files |= {f"kernels/{digest}/{name}": (artifacts[digest].directory / name).read_bytes() for name in names}
    files["pack.txt"] = _plain(table, files)
    facts = {
        "format": FORMAT,
        "gpu": table.gpu,
        "sku": [f"NVIDIA {GPUS[table.gpu].title}"],
        "not_sku": sorted(VARIANTS),
        "sm": GPUS[table.gpu].capability.sm,
        "cuda": cuda,
        "cuda_range": CUDA_RANGE,
        "driver_minimum": DRIVER_MINIMUM,
        "machine": platform.machine(),
        "version": __version__,
        "kernels": len(table.kernels),
        "binaries": len({kernel.digest for kernel in table.kernels}),
        "problems_measured": len(table.rows),
        "problems_won": sum(row.wins for row in table.rows),
        "ptx": with_ptx,
        "files": {name: _sha256(content) for name, content in sorted(files.items())},
    }
    return files | {"pack.json": _json(facts | {"sha256": _sha256(_json(facts))})}


def check_target(target: Path) -> None:
    """Raises PackError where a folder cannot be written because something is there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PackError(f"{target} is there already; remove it, or choose another --out")


def write_folder(files: dict[str, bytes], target: Path) -> Path:
    """Writes a pack as a folder, which appears when it is whole. Raises PackError, and Failure."""
    check_target(target)
    with folder(target) as scratch:
        for name, content in files.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return target


def write_wheel(files: dict[str, bytes], target: Path) -> Path:
    """Writes a pack as a wheel; answers the file, which has the name that pip asks for where ``target``'s is none."""
    facts = json.loads(files["pack.json"])
    package, version = f"cudal2gen_{facts['gpu']}", facts["version"]
    tag = f"py3-none-linux_{facts['machine']}"
    if not WHEEL_NAME.fullmatch(target.name):
        target = target.with_name(f"{package}-{version}-{tag}.whl")
    info = f"{package}-{version}.dist-info"
    members = {f"{package}/{name}": content for name, content in sorted(files.items())}
    members[f"{package}/__init__.py"] = _INIT.format(**facts).encode()
    members[f"{info}/METADATA"] = _METADATA.format(package=package, **facts).encode()
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
            entry.create_system = 3  # Unix, wherever it is made
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
Requires-Dist: cudal2gen=={version}
"""


def _licences() -> dict[str, str]:
    """Ours, and CUTLASS's, whose headers are compiled into the cubins. Raises PackError where one is not found."""
    root = places.checkout()
    own = (root / "LICENSE").read_text() if root else _licence_of("cudal2gen", "LICENSE")
    cutlass = os.environ.get("CUTLASS_PATH")
    beside = Path(cutlass or "") / "LICENSE.txt"
    text = beside.read_text() if cutlass and beside.is_file() else _licence_of("nvidia-cutlass", "LICENSE.txt")
    return dict(zip(LICENCES, (own, text), strict=True))


def _licence_of(package: str, name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(package)
        for place in ("licenses/", ""):
            if text := distribution.read_text(place + name):
                return text
    raise PackError(f"the licence of {package} is not found, which a pack must carry; install {package}")


def _plain(table: Table, files: dict[str, bytes]) -> bytes:
    """The table for C: a line is a word and ``name=value`` tokens; the last one is the digest of all before."""
    gpu, others = GPUS[table.gpu], ",".join(sorted(VARIANTS))
    title = gpu.title.replace(" ", ",")
    lines = [f"pack format={FORMAT} gpu={table.gpu} title={title} others={others}"]
    lines += [f"file path={name} sha256={_sha256(content)}" for name, content in sorted(files.items())]
    plain = {_decided(kernel): number for number, kernel in enumerate(table.kernels) if not kernel.record.problem.later}
    lines += [_plain_kernel(kernel, plain.get(_decided(kernel))) for kernel in table.kernels]
    lines += [
        f"choice {_tokens(_posed(row._asdict()) | _products(row))} kernel={row.kernel} low={row.speedup[1]}"
        for row in table.rows
        if row.wins
    ]
    text = "\n".join(lines) + "\n"
    return f"{text}sha256={_sha256(text.encode())}\n".encode()


def _products(row: Row) -> dict[str, int]:
    return {"products": row.products} if row.products > 1 else {}


def _decided(kernel: Kernel) -> tuple[object, ...]:
    """Sizes, types and decisions: equal for the kernels of a product with different fusions and batches."""
    problem = kernel.record.problem
    return (problem.ab, problem.d, problem.acc, problem.layout, kernel.sizes, str(kernel.record.decisions()))


def _plain_kernel(kernel: Kernel, plain: int | None) -> str:
    """The line of a kernel; ``plain``: the number of that with its decisions for the plain product, None for none."""
    tokens = _posed(kernel.fields) | {"digest": kernel.digest}
    if kernel.record.problem.later and plain is not None:
        tokens["plain"] = plain
    if options := kernel.record.launch_options:
        tokens["options"] = ",".join(f"{name}={value}" for name, value in options.items())
    return f"kernel {_tokens(tokens)}"


def _posed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's fields as a line spells them: types where they are not fp16."""
    posed = Problem.without_neutral({name: fields[name] for name in Problem.model_fields if name in fields})
    return {name: value for name, value in posed.items() if name != "gpu"}


def _tokens(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


# --- reading ---


def open_pack(directory: Path) -> Pack:
    """Opens a pack after checking every file; raises PackError that names a file that is missing or was altered."""
    directory = Path(directory).resolve()
    if directory.suffix == ".whl" and directory.is_file():
        raise PackError(f"{directory} is a wheel: install it with pip, or unpack it")
    if not directory.is_dir():
        raise PackError(f"no pack at {directory}")
    facts = _signed_facts(directory / "pack.json")
    if facts["version"] != __version__:
        raise PackError(f"{directory} was made by cudal2gen {facts['version']}, this is {__version__}: make it anew")
    if facts["machine"] != platform.machine() or sys.platform != "linux":
        raise PackError(
            f"{directory} is for Linux on {facts['machine']}, this is {sys.platform} on {platform.machine()}"
        )
    for name, digest in facts["files"].items():
        if not FILE_NAME.fullmatch(name):
            raise PackError(f"{directory / 'pack.json'}: files: {spelled(name)} is no file of a pack")
        if not (directory / name).is_file():
            raise PackError(f"{directory / name}: no such file; the pack is incomplete")
        with reading(directory / name):
            content = (directory / name).read_bytes()
        if _sha256(content) != digest:
            raise PackError(f"{directory / name} is truncated or was altered: its digest is not the pack's")
    if "table.json" not in facts["files"]:
        raise PackError(f"{directory / 'pack.json'}: files: table.json is missing; make the pack anew")
    return Pack(directory, facts)


def _signed_facts(path: Path) -> dict[str, Any]:
    """The facts of a ``pack.json`` of this format, whose own digest is right. Raises PackError."""
    facts = _read_json(path)
    digest = facts.pop("sha256", None)
    try:
        whole = digest == _sha256(_json(facts))
    except RecursionError:
        whole = False
    if not whole:
        raise PackError(f"{path} was altered: its digest is not its own")
    if facts.get("format") != FORMAT:
        raise PackError(f"{path} has format {spelled(facts.get('format'))}, this cudal2gen reads {FORMAT}")
    for name, kind in (("gpu", str), ("version", str), ("machine", str), ("files", dict)):
        if not isinstance(facts.get(name), kind):
            raise PackError(f"{path}: {name}={spelled(facts.get(name))}: is no {kind.__name__}; make the pack anew")
    return facts


def installed() -> Iterator[Path]:
    """Folders of packs: those in ``CUDAL2GEN_PACK``, separated by colons, then those of installed wheels.

    An installed package that cannot say where its folder is, is passed over: it is not a pack of ours.
    """
    yield from (Path(name) for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name)
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            yield Path(entry.load()())
        except Exception:
            continue


def search(folders: Iterable[Path]) -> tuple[dict[str, Pack], list[str]]:
    """The first good pack of each GPU model, and why others are not used."""
    packs: dict[str, Pack] = {}
    refused = []
    for directory in folders:
        try:
            pack = open_pack(directory)
        except PackError as error:
            refused.append(str(error))
            continue
        packs.setdefault(pack.gpu, pack)
    return packs, refused


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}; the pack is incomplete") from None
    except WrongInput as error:
        raise PackError(f"{path} is truncated or was altered: {error}") from None
    if not isinstance(values, dict):
        raise PackError(f"{path} was altered: it is no JSON object")
    return values


def _json(values: Any) -> bytes:
    return (json.dumps(values, sort_keys=True, indent=1) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
