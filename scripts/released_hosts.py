"""Extracts the modules that our plugins patch from released wheels of vLLM and SGLang, as packages that run alone.

    python scripts/released_hosts.py FOLDER [WHEEL ...]

Writes FOLDER/vllm and FOLDER/sglang: functions and classes as they were released, with stand-ins for what they import.
Without wheels, pip downloads the versions of ``VERSIONS`` (400 MB), and they are removed afterwards.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

VERSIONS = ("vllm==0.33.0", "sglang==0.5.23")


class Part(NamedTuple):
    """A module of a host. ``names``: the functions and classes to extract, by default all. ``head``: text in place of
    its imports."""

    path: str
    names: tuple[str, ...] = ()
    head: str = ""


IMPORTS = """from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, List, Optional

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)
"""
VLLM_UTILS = (
    IMPORTS
    + """
def _no() -> bool: return False
def _yes() -> bool: return True
envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
current_platform = SimpleNamespace(is_rocm=_no, is_cpu=_no, is_cuda=_yes, is_xpu=_no, is_cuda_alike=_yes,
                                   is_arch_support_pdl=_no)
is_flashinfer_cutedsl_bf16_gemm_supported = _yes
"""
)
VLLM_LINEAR = (
    IMPORTS
    + """
from vllm.model_executor.layers.utils import current_platform, dispatch_unquantized_gemm, envs

class LinearMethodBase: pass
def get_current_vllm_config_or_none(): return None
def linear_batch_invariant(x, weight, bias): return F.linear(x, weight, bias)
"""
)
SGLANG_UNQUANT = (
    IMPORTS
    + """
class LinearMethodBase: pass
_use_aiter = _is_gfx95 = _is_cpu = _is_cpu_amx_available = _enable_bf16_splitk_gemm = False
_is_cuda, _batch_invariant = True, False
_use_cutedsl_bf16_gemm = _cutedsl_bf16_gemm = _use_hopper_bf16_gemv = _hopper_bf16_gemv = None
def is_batch_invariant_mode_enabled(): return _batch_invariant
def use_intel_amx_backend(layer): return getattr(layer, "use_intel_amx_backend", False)
"""
)
PARTS = (
    Part(
        "vllm/model_executor/layers/utils.py",
        (
            *("default_unquantized_gemm", "_FlashInferBf16RuntimeCheck", "_FlashInferBf16Backend"),
            *("_can_use_flashinfer_cutedsl_bf16", "_FLASHINFER_BF16_BACKENDS", "cuda_flashinfer_bf16_gemm"),
            *("rocm_unquantized_gemm", "cpu_unquantized_gemm", "dispatch_unquantized_gemm"),
        ),
        VLLM_UTILS,
    ),
    Part("vllm/model_executor/layers/linear.py", ("UnquantizedLinearMethod",), VLLM_LINEAR),
    Part(
        "sglang/srt/layers/quantization/unquant.py",
        (
            *("Bf16GemmBackend", "_BF16_GEMM_BACKEND", "_bf16_gemm_dispatch_impl", "_can_accumulate_into_addend"),
            *("get_bf16_gemm_backend", "UnquantizedLinearMethod"),
        ),
        SGLANG_UNQUANT,
    ),
    Part("sglang/srt/plugins/hook_registry.py"),
)


def name_of(node: ast.stmt) -> str:
    """The name that a statement of a module defines; "" for others."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if targets and isinstance(targets[0], ast.Name) else ""


def first_line(node: ast.stmt) -> int:
    """The number of a statement's first line, that of its first decorator if it has some."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def extracted_text(source: str, part: Part) -> str:
    """The text of the extracted module. Raises LookupError if the release lacks one of its names."""
    if not part.names:
        return source
    lines = source.splitlines()
    found = {name_of(node): "\n".join(lines[first_line(node) - 1 : node.end_lineno]) for node in ast.parse(source).body}
    if missing := [name for name in part.names if name not in found]:
        raise LookupError(f"{part.path} has no {', '.join(missing)}")
    texts = [text for name, text in found.items() if name in part.names]
    return "\n\n\n".join([part.head, *texts]) + "\n"


def extract(wheels: Iterable[Path], folder: Path) -> None:
    """Writes the packages of these wheels. Raises LookupError if a release lacks a name of ``PARTS``."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for part in PARTS:
                if part.path.split("/")[0] != wheel.name.split("-")[0]:
                    continue
                target = folder / part.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(extracted_text(archive.read(part.path).decode(), part))
                for parent in Path(part.path).parents[:-1]:
                    (folder / parent / "__init__.py").touch()


def download(folder: Path) -> list[Path]:
    """The wheels of ``VERSIONS``. Raises CalledProcessError if pip does not find them."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    subprocess.run([*command, *VERSIONS], check=True, capture_output=True, text=True)
    return sorted(folder.glob("*.whl"))


def main(target: str, *wheels: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        extract(map(Path, wheels) if wheels else download(Path(scratch)), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
