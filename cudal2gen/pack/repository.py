"""Turns a pack into a repository for Hugging Face's ``kernels``: a variant for CUDA, layers, and a benchmark.

The layout is that of ``kernels`` 0.17.2. ``build/torch-cuda`` is a package of Python code, which imports only torch and
the standard library and registers operators in a namespace of its own; it contains the complete pack.
``metadata.json`` has its name, architectures and digests. ``kernels benchmark`` runs ``benchmarks/benchmark.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cudal2gen import places
from cudal2gen.generation.renderer import SYNTAX
from cudal2gen.kernel import Problem
from cudal2gen.pack.facts import as_json
from cudal2gen.results.choice import Table
from kernelproof.ground.chips import GPUS
from kernelproof.ground.element import ELEMENTS

VARIANT = "build/torch-cuda"  # the folder of the variant for CUDA, by which ``kernels`` finds it
KERNELS_MINIMUM = "0.17.0"  # the first version of the package ``kernels`` that has these metadata and layers
MODULES = ("__init__.py", "_ops.py", "layers.py", "library.py", "operators.py")
WORKLOADS = 8  # most products of the benchmark


class BenchmarkProduct(NamedTuple):
    """A product of the benchmark. ``dtype``: torch's name of A's and B's type; ``transposed``: whether B is (n,k)."""

    m: int
    n: int
    k: int
    dtype: str
    transposed: bool
    acc: str

    @property
    def sizes(self) -> str:
        """The sizes as arguments of a call in Python."""
        return f"{self.m}, {self.n}, {self.k}"

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.acc}_{'tn' if self.transposed else 'nn'}_{self.m}_{self.n}_{self.k}"


def repository(pack: Mapping[str, bytes], table: Table) -> dict[str, bytes]:
    """The files of a repository by their paths, made from a pack's files and its table."""
    facts = json.loads(pack["pack.json"])
    name = f"cudal2gen-{facts['gpu']}"
    won, rows = facts["problems_won"], facts["problems_measured"]
    values = facts | {
        "name": name,
        # Operators of two builds in one process must not share a namespace.
        "id": f"_{name.replace('-', '_')}_cuda_{facts['sha256'][:7]}",
        "title": f"NVIDIA {GPUS[facts['gpu']].title}",
        "claim": f"{won} of {rows} measured problems were won." if rows else "Nothing in it was measured yet.",
        "preference": "measured" if won else "kernel",
        "workloads": workloads(table),
        "elements": tuple(ELEMENTS.values()),  # numbered as in cudal2gen.h
    }
    templates = Environment(
        loader=FileSystemLoader(places.shipped("templates") / "hf"), undefined=StrictUndefined, **SYNTAX
    )
    variant = {module: templates.get_template(f"{module}.j2").render(values).encode() for module in MODULES}
    variant |= {f"pack/{path}": content for path, content in pack.items()}
    files = {f"{VARIANT}/{path}": content for path, content in variant.items()}
    files[f"{VARIANT}/metadata.json"] = as_json(_metadata(values, architectures(table), variant))
    for path in ("README.md", "benchmarks/benchmark.py"):
        files[path] = templates.get_template(f"{path.rpartition('/')[2]}.j2").render(values).encode()
    return files


def workloads(table: Table) -> list[BenchmarkProduct]:
    """Up to ``WORKLOADS`` plain products, spread over the sizes: problems that kernels won, or if none was won, the
    problems of the kernels' own records."""
    won = {row.kernel for row in table.rows if row.wins}
    problems = [
        Problem.model_validate({name: kernel.fields[name] for name in Problem.model_fields if name in kernel.fields})
        for number, kernel in enumerate(table.kernels)
        if not won or number in won
    ]
    plain = {
        BenchmarkProduct(problem.m, problem.n, problem.k, ELEMENTS[problem.ab].dtype, problem.along_k.b, problem.acc)
        for problem in problems
        if not problem.suffix and problem.d == "same" and problem.along_k.a
    }
    ordered = sorted(plain, key=lambda workload: (workload.m * workload.n * workload.k, workload))
    step = max(1, len(ordered) // WORKLOADS)
    return ordered[::step][:WORKLOADS]


def architectures(table: Table) -> list[str]:
    """The architectures that the binaries are compiled for, such as 9.0a."""
    by_binary = {kernel.digest: kernel for kernel in table.kernels}
    names = {kernel.record.arch.removeprefix("sm_") for kernel in by_binary.values()}
    return sorted(re.sub(r"(\d)([a-z]?)$", r".\1\2", name) for name in names)


def _metadata(
    values: Mapping[str, object], architectures: Sequence[str], variant: Mapping[str, bytes]
) -> dict[str, object]:
    """The content of metadata.json. ``variant``: the files of the built package, by path."""
    digests = {path: base64.b64encode(hashlib.sha256(content).digest()).decode() for path, content in variant.items()}
    return {
        "id": values["id"],
        "name": values["name"],
        "version": 1,
        "license": "MIT AND BSD-3-Clause",
        "kernels-minver": KERNELS_MINIMUM,
        "python-depends": [],
        "backend": {"type": "cuda", "archs": architectures},
        "digest": {"algorithm": "sha256", "files": digests},
    }
