"""Proves that solutions of FlashInfer-Bench are read from JSON, and called with or without outputs as arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.grading import Limits
from kernelproof.grading.benchmarks import flashinfer
from kernelproof.grading.benchmarks.task import task
from kernelproof.grading.verdict import Verdict
from kernelproof.ground.errors import WrongInput

# The reference of a definition, and the definition.
REFERENCE = """
import torch

def run(x, weight, eps):
    wide = x.to(torch.float32)
    scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(torch.float32)).to(torch.float16)
"""
DEFINITION = {
    "name": "rmsnorm_h96", "op_type": "rmsnorm", "reference": REFERENCE,
    "axes": {"batch": {"type": "var"}, "hidden": {"type": "const", "value": 96}},
    "inputs": {
        "x": {"shape": ["batch", "hidden"], "dtype": "float16"}, "weight": {"shape": ["hidden"], "dtype": "float16"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["batch", "hidden"], "dtype": "float16"}},
}  # fmt: skip
HEADER = "#pragma once\n#include <torch/extension.h>\n#include <cuda_fp16.h>\nconstexpr int HIDDEN = 96;\n"
# A solution in CUDA.
CUDA = """
#include "kernel.h"
#include "kernel.h"
__global__ void rmsnorm(const __half* x, const __half* w, __half* y, float eps) {
    float sum = 0;
    for (int i = 0; i < HIDDEN; i++) { float v = __half2float(x[blockIdx.x * HIDDEN + i]); sum += v * v; }
    float scale = rsqrtf(sum / HIDDEN + eps);
    int at = blockIdx.x * HIDDEN + threadIdx.x;
    y[at] = __float2half(__half2float(x[at]) * scale * __half2float(w[threadIdx.x]));
}
void run(torch::Tensor x, torch::Tensor weight, double eps, torch::Tensor y) {
    auto half = [](torch::Tensor t) { return reinterpret_cast<__half*>(t.data_ptr<at::Half>()); };
    rmsnorm<<<x.size(0), HIDDEN>>>(half(x), half(weight), half(y), eps);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""
# The files of a solution in Triton.
TRITON = """
import torch
import triton
from parts.kernels import rmsnorm

def run(x, weight, eps):
    y = torch.empty_like(x)
    rmsnorm[(x.shape[0],)](x, weight, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return {"y": y}
"""
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def rmsnorm(x, weight, y, n, eps, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * n + i, mask=i < n, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v) / n + eps)
    out = v * scale * tl.load(weight + i, mask=i < n).to(tl.float32)
    tl.store(y + tl.program_id(0) * n + i, out, mask=i < n)
"""


def solution(language: str, entry: str, files: dict[str, str], **spec: Any) -> str:
    """A solution of FlashInfer-Bench with these files."""
    sources = [{"path": path, "content": text} for path, text in files.items()]
    build = {"language": language, "target_hardware": ["NVIDIA_H100"], "entry_point": entry, **spec}
    return json.dumps({"name": "s", "definition": "rmsnorm_h96", "author": "a", "spec": build, "sources": sources})


def cuda(text: str = CUDA, **spec: Any) -> str:
    """A solution in CUDA."""
    return solution("cuda", "kernel.cu::run", {"kernel.h": HEADER, "kernel.cu": text}, **{"binding": "torch", **spec})


def triton(text: str = TRITON) -> str:
    """A solution in Triton."""
    files = {"main.py": text, "parts/kernels.py": KERNELS}
    return solution("triton", "main.py::run", files, destination_passing_style=False)


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    """The file of a definition that has three workloads."""
    path = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h96.json"
    workloads = tmp_path / "workloads" / "rmsnorm" / "rmsnorm_h96.jsonl"
    for file in (path, workloads):
        file.parent.mkdir(parents=True)
    path.write_text(json.dumps(DEFINITION))
    inputs = {"x": {"type": "random"}, "weight": {"type": "random"}, "eps": {"type": "scalar", "value": 1e-6}}
    rows = [{"workload": {"uuid": "u", "axes": {"batch": batch}, "inputs": inputs}} for batch in (900, 5, 70)]
    workloads.write_text("\n".join(map(json.dumps, rows)))
    return path


def verdict_of(text: str, reference: Path) -> Verdict:
    """The verdict on a solution. ``reference``: the file of its definition."""
    pytest.importorskip("torch")
    from kernelproof.grading.benchmarks.judgement import check_solution

    return check_solution(text, reference, limits=Limits(compile_s=200))


def test_the_smallest_workloads_and_a_drawn_one_are_taken(definition: Path) -> None:
    read = task(definition, cuda())
    assert [case["batch"] for case in read.cases if case][:2] == [5, 70]
    assert len(read.cases) == 3
    assert all(case is not None and case["hidden"] == 96 for case in read.cases)
    others = [task(definition, cuda(), seed).cases for seed in (0, 0, 1)]
    assert others[0] == others[1] == read.cases
    assert others[2][:2] == read.cases[:2]
    assert others[2][2] != read.cases[2], "a seed draws its own"
    assert json.loads(read.text)["scalars"] == {"eps": 1e-6}


def test_what_cannot_be_read_is_refused_in_words(definition: Path) -> None:
    workloads = definition.parents[2] / "workloads" / "rmsnorm" / "rmsnorm_h96.jsonl"
    rows = workloads.read_text()
    for text in (rows.replace('"random"', '"safetensors"'), "{", '{"workload": {"axes": 3}}', "[]"):
        workloads.write_text(text)
        with pytest.raises(WrongInput):
            task(definition, "")
    workloads.unlink()
    with pytest.raises(WrongInput):  # nothing gives the scalar
        task(definition, "")
    for text in ("{}", "[", json.dumps({**DEFINITION, "axes": {"batch": {"type": "new"}}})):
        definition.write_text(text)
        with pytest.raises(WrongInput):
            task(definition, "")


@pytest.mark.parametrize("path", ["../up.py", "/etc/passwd", "a/../../b.py", ""])
def test_files_of_a_solution_stay_in_its_folder(path: str) -> None:
    with pytest.raises(WrongInput):
        flashinfer.parse(flashinfer.Solution, solution("python", "main.py::run", {path: "x = 1"}), "the solution")


def test_headers_of_a_solution_are_put_in_once() -> None:
    text = flashinfer.parse(flashinfer.Solution, cuda(), "the solution").inlined()
    assert text.count("constexpr int HIDDEN") == 1
    assert '"kernel.h"' not in text
    assert "<cuda_fp16.h>" in text


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["<{}.h>", '"{}.h"', '"x/{}.h"', '"other/{}.h"'])),
                max_size=9), st.integers(0, 9))  # fmt: skip
def test_included_files_of_a_solution_replace_their_includes(includes: list[tuple[str, str]], unit_count: int) -> None:
    """Headers a, b and c are files of the solution, d is not. The first ``unit_count`` includes stand in kernel.cu, the
    others in header a."""
    lines = ["#include " + form.format(name) for name, form in includes]
    own, inner = lines[:unit_count], lines[unit_count:]
    files = {f"x/{name}.h": f"int {name};" for name in "abc"} | {"k.cu": "\n".join([*own, "int unit;"])}
    files["x/a.h"] = "\n".join(["int a;", *inner])
    text = flashinfer.parse(flashinfer.Solution, solution("cuda", "k.cu::run", files), "the solution").inlined()
    expected: list[str] = []
    seen: set[str] = set()
    known = {f'#include "{folder}{name}.h"': f"x/{name}.h" for folder in ("", "x/") for name in "abc"}

    def expand(path: str) -> None:
        for line in files[path].splitlines():
            if line not in known:
                expected.append(line)
            elif known[line] not in seen:
                seen.add(known[line])
                expand(known[line])

    expand("k.cu")
    assert [line for line in text.splitlines() if line] == expected


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("text", [cuda(), triton()], ids=["outputs are arguments", "Triton, outputs are returned"])
def test_honest_solutions_are_right(definition: Path, text: str) -> None:
    verdict = verdict_of(text, definition)
    assert verdict.right, str(verdict)
    assert len(verdict.shapes) == 3
    assert any("rmsnorm" in kernel.name for kernel in verdict.kernels)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (cuda(CUDA.replace("+ eps", "+ eps + 0.3f")), "wrong-value"),
        (cuda(CUDA.replace("blockIdx.x * HIDDEN + threadIdx.x;", "blockIdx.x * HIDDEN; if (threadIdx.x) return;")),
         "wrong-value"),
        (triton("from torch.nn.functional import rms_norm\n"
                "def run(x, weight, eps):\n    return rms_norm(x, (96,), weight, eps)\n"), "no-kernel"),
        (triton("def no_run():\n    pass\n"), "host-failure"),
        ("{", "host-failure"),
    ],
)  # fmt: skip
def test_wrong_solutions_are_found(definition: Path, text: str, rule: str) -> None:
    verdict = verdict_of(text, definition)
    assert verdict.outcome == "wrong", str(verdict)
    assert rule in verdict.rules, str(verdict)


@pytest.mark.slow
def test_a_solution_without_a_binding_is_not_checked(definition: Path) -> None:
    assert verdict_of(cuda(binding=None), definition).outcome == "not checked"
