"""Makes the files of a pack: their paths within it, and their bytes."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudal2gen import places, torch_range
from cudal2gen.kernel import Problem
from cudal2gen.launch.launcher import TORCH_LIBRARY
from cudal2gen.pack.abi import ABI, FORMAT, used_fields
from cudal2gen.pack.facts import HEADER, LIBRARY, LICENCES, PackError, as_json, sha256
from cudal2gen.results.choice import Table, TableKernel
from kernelproof.ground.chips import GPUS, VARIANTS, capability_range
from kernelproof.ground.toolchain import ToolchainError
from kernelproof.ground.version import __version__

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact

UNEXECUTED = "not executed"  # stands in place of the verdict on a binary's machine code if there is none
CUBIN_FILES = ("kernel.cubin", "kernel.launch")


def contents(
    table: Table,
    artifacts: dict[str, Artifact],
    library: Path,
    cuda: str,
    with_ptx: bool = False,
    machine_code: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """All files of a pack by their path in it. Raises PackError for a table without kernels.

    ``artifacts``: built kernels by digest; ``cuda``: the version of the ptxas that assembled them; ``with_ptx``:
    whether the pack has the kernels' PTX too; ``machine_code``: by digest, the verdict on a binary's machine code, in
    words.
    """
    if not table.kernels:
        raise PackError(
            f"no kernel of {table.gpu} was measured faster than the vendor's library: nothing to pack; 'cudal2gen pack "
            "--candidates' packs kernels of which nothing was measured"
        )
    names = (*CUBIN_FILES, "kernel.ptx") if with_ptx else CUBIN_FILES
    major = torch_range.major(cuda)
    files = {"table.json": as_json(table.dump()), LIBRARY: library.read_bytes()}
    verdicts = machine_code or {}
    files |= _torch_launcher()
    files[HEADER] = (places.PACKAGE / "launch" / HEADER).read_bytes()
    files |= {name: text.encode() for name, text in _licences().items()}
    for digest in sorted({kernel.digest for kernel in table.kernels}):
        files |= {f"kernels/{digest}/{name}": _built_file(artifacts[digest].directory / name) for name in names}
    files["pack.txt"] = _table_for_c(table, files)
    facts = {
        "format": FORMAT,
        "abi": ABI,
        "fields": used_fields(table),
        "gpu": table.gpu,
        "sku": [f"NVIDIA {GPUS[table.gpu].title}"],
        "not_sku": sorted(VARIANTS),
        "sm": GPUS[table.gpu].capability.sm,
        "cuda": cuda,
        # CUDA's minor versions are compatible: what 12.8 assembles runs under every 12, and later.
        "cuda_range": f">={major}.0,<{torch_range.CUDA + 1}",
        "driver_minimum": str(torch_range.CUDAS[major].driver),
        "machine": platform.machine(),
        "version": __version__,
        "kernels": len(table.kernels),
        "binaries": len({kernel.digest for kernel in table.kernels}),
        "problems_measured": len(table.rows),
        "problems_won": sum(row.wins for row in table.rows),
        "ptx": with_ptx,
        "machine_code": {kernel.digest: verdicts.get(kernel.digest, UNEXECUTED) for kernel in table.kernels},
        "files": {name: sha256(content) for name, content in sorted(files.items())},
    }
    return files | {"pack.json": as_json(facts | {"sha256": sha256(as_json(facts))})}


def _built_file(path: Path) -> bytes:
    """The content of a file of a built kernel. Source lines and PTX text are removed from a cubin."""
    from kernelproof.sass import without_lines  # imported late: machines that only open packs do not need it

    content = path.read_bytes()
    return without_lines(content) if path.name == "kernel.cubin" else content


def _torch_launcher() -> dict[str, bytes]:
    """The launcher for torch, as a file of the pack; empty if g++ is missing. Without it Python makes the calls."""
    from cudal2gen.generation import compiler  # imported late: machines that only open packs do not need it

    with contextlib.suppress(ToolchainError):
        return {TORCH_LIBRARY: compiler.torch_launcher().read_bytes()}
    return {}


def _licences() -> dict[str, str]:
    """The licence of this package and that of CUTLASS, whose headers are compiled into the cubins. Raises PackError if
    one is not found."""
    root = places.checkout()
    own = (root / "LICENSE").read_text() if root else _licence_of("cudal2gen", "LICENSE")
    cutlass = os.environ.get("CUTLASS_PATH")
    file = Path(cutlass or "") / "LICENSE.txt"
    text = file.read_text() if cutlass and file.is_file() else _licence_of("nvidia-cutlass", "LICENSE.txt")
    return dict(zip(LICENCES, (own, text), strict=True))


def _licence_of(package: str, name: str) -> str:
    """The text of an installed package's licence, from its file ``name``. Raises PackError if there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(package)
        for place in ("licenses/", ""):
            if text := distribution.read_text(place + name):
                return text
    raise PackError(f"the licence of {package} is not found, which a pack must carry; install {package}")


def _table_for_c(table: Table, files: dict[str, bytes]) -> bytes:
    """The table for C. A line is a word and ``name=value`` tokens; the last line is the digest of all lines before."""
    gpu, others = GPUS[table.gpu], ",".join(sorted(VARIANTS))
    title = gpu.title.replace(" ", ",")
    lines = [f"pack format={FORMAT} gpu={table.gpu} sms={gpu.sms} title={title} others={others}"]
    lines += [f"file path={name} sha256={sha256(content)}" for name, content in sorted(files.items())]
    by_decisions = {
        _decisions(kernel): number for number, kernel in enumerate(table.kernels) if not kernel.record.problem.suffix
    }
    lines += [_kernel_line(kernel, by_decisions.get(_decisions(kernel))) for kernel in table.kernels]
    for row in (row for row in table.rows if row.wins):
        fields = _problem_fields(row._asdict()) | ({"products": row.products} if row.products > 1 else {})
        lines.append(f"choice {_tokens(fields)} kernel={row.kernel} low={row.speedup[1]}")
    text = "\n".join(lines) + "\n"
    return f"{text}sha256={sha256(text.encode())}\n".encode()


def _decisions(kernel: TableKernel) -> tuple[object, ...]:
    """Sizes, types and decisions, which are equal for kernels that differ in fusion and batch alone."""
    problem = kernel.record.problem
    return (problem.ab, problem.d, problem.acc, problem.layout, kernel.sizes, str(kernel.record.decisions()))


def _kernel_line(kernel: TableKernel, plain: int | None) -> str:
    """The line of a kernel. ``plain``: the number of the kernel with the same decisions for the plain product, or
    None."""
    first, last = capability_range(kernel.record.arch)
    tokens = _problem_fields(kernel.fields) | {
        "digest": kernel.digest,
        "first": first,
        "last": last,
        "smem": kernel.smem_bytes,
    }
    if kernel.record.problem.suffix and plain is not None:
        tokens["plain"] = plain
    if options := kernel.record.launch_options:
        tokens["options"] = ",".join(f"{name}={value}" for name, value in options.items())
    return f"kernel {_tokens(tokens)}"


def _problem_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's fields as a line states them, without those of neutral value."""
    stated = Problem.without_neutral({name: fields[name] for name in Problem.model_fields if name in fields})
    return {name: value for name, value in stated.items() if name != "gpu"}


def _tokens(values: Mapping[str, Any]) -> str:
    """Values by name in a line: name=value, separated by blanks."""
    return " ".join(f"{name}={value}" for name, value in values.items())
