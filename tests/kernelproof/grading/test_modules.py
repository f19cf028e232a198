"""Proves that modules with inline extensions are parsed, cheating host code is found, and honest host code is
called."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproof.checking import includes
from kernelproof.grading import Limits, Verdict, check_source
from kernelproof.grading.modules import take_apart
from kernelproof.ground.errors import WrongInput
from tests.kernelproof.grading import modules

# What the honest module's launch has: its buffers, the launch of its kernel, and the call of its host function.
BUFFERS = {"x": "in:f32[n]", "y": "out:f32[n]"}
LAUNCH = {"entry": "scale_kernel<float>", "grid": "ceil_div(n, 128)", "block": 128, "args": ["x", "y", 2.0, "n"]}
CALL = {"function": "scale_cuda", "args": ["x", 2.0]}


def grade_module(text: str, **options: Any) -> Verdict:
    """The verdict on a module that should double its input."""
    return check_source(text, lambda x: 2 * x, [{"n": 300}, {"n": 77}], buffers=BUFFERS, **options)


def module_with(old: str, new: str) -> str:
    """The honest module with another text in one place."""
    assert old in modules.HONEST
    return modules.HONEST.replace(old, new)


def test_a_module_is_taken_apart() -> None:
    module = take_apart(modules.HONEST)
    (extension,) = module.extensions
    assert extension.functions == ("scale_cuda",)
    assert extension.kernels == ("scale_kernel",)
    (launch,) = extension.launches
    assert launch.kernel == "scale_kernel<scalar_t>"
    assert launch.configuration[:2] == ("ceil_div(n, threads)", "threads")
    assert launch.arguments[-1] == "n"
    assert "torch" not in extension.device_text.replace("torch::relu(x)", "")
    assert "scale_kernel" in extension.device_text


@pytest.mark.slow
def test_its_kernel_is_graded_without_its_host_code() -> None:
    verdict = grade_module(modules.HONEST, launches=[LAUNCH])
    assert verdict.right, str(verdict)
    half = grade_module(module_with("if (i < n)", "if (i < n / 2)"), launches=[LAUNCH])
    assert "unwritten-output" in half.rules


@pytest.mark.parametrize("name", modules.CHEATS)
def test_cheats_of_host_code_are_read(name: str) -> None:
    rule, old, new = modules.CHEATS[name]
    text = module_with(old, new)
    if rule == "outside-file":
        assert rule in grade_module(text, launches=[LAUNCH]).rules
        return
    assert rule in {finding.rule for finding in take_apart(text).findings}


def test_honest_host_code_is_not_accused() -> None:
    assert take_apart(modules.HONEST).findings == ()


@pytest.mark.parametrize("name", modules.HONEST_CHANGES)
def test_what_honest_host_code_does_is_not_accused(name: str) -> None:
    text = module_with(*modules.HONEST_CHANGES[name]).replace(modules.CALL, modules.CALLS.get(name, modules.CALL))
    assert take_apart(text).findings == ()


@pytest.mark.slow
def test_operations_of_torch_may_be_allowed() -> None:
    text = module_with(modules.CALL, "return torch.relu(self.extension.scale_cuda(x, self.alpha))")
    assert "library-call" in grade_module(text, launches=[LAUNCH]).rules
    assert grade_module(text, launches=[LAUNCH], host_calls=["relu"]).right


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        # The host computes the kernel's right values by pointers that a real host cannot access.
        ("for (int i = 0; i < n; ++i) y.data_ptr<float>()[i] = alpha * x.data_ptr<float>()[i];", "host-access"),
        ("y.data_ptr<float>()[n - 1] = alpha * x.data_ptr<float>()[n - 1];", "host-access"),
        ("auto *p = y.data_ptr<float>(); cudaFree(p); p[0] = 1;", "use-after-free"),
        ("float *h; cudaMallocHost(&h, 4 * n); cudaMemcpyAsync(h, x.data_ptr<float>(), 4 * n, cudaMemcpyDefault);"
         "if (h[0] == 0.5f) return x; cudaFreeHost(h);", "host-race"),
    ],
)  # fmt: skip
def test_host_code_that_touches_memory_of_the_device_is_wrong(body: str, rule: str) -> None:
    text = module_with('    return y;\n}\n"""', f'    {body}\n    return y;\n}}\n"""')
    verdict = grade_module(text, call=CALL, run_host=True)
    assert verdict.outcome == "wrong", str(verdict)
    finding = next(item for item in verdict.findings if item.rule == rule)
    assert finding.evidence["line"]


@pytest.mark.slow
def test_its_launcher_is_called_where_that_is_allowed() -> None:
    verdict = grade_module(modules.HONEST, call=CALL, run_host=True)
    assert verdict.right, str(verdict)
    assert verdict.kernels[0].name == "scale_kernel"
    assert verdict.calls >= 20


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", modules.EXECUTED)
def test_execution_shows_what_a_launcher_does(name: str) -> None:
    rule, old, new = modules.EXECUTED[name]
    assert rule in grade_module(module_with(old, new), call=CALL, run_host=True).rules


# CUDA code whose kernel takes accessors instead of pointers.
ACCESSORS = """
#include <torch/extension.h>
using View = torch::PackedTensorAccessor32<float, 2, torch::RestrictPtrTraits>;
__global__ void scale_kernel(const View x, View y, float alpha) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < x.size(0)) y[i][0] = alpha * x[i][0];
}
torch::Tensor scale_cuda(torch::Tensor x, double alpha) {
    TORCH_CHECK(x.dim() == 1, "one dimension, not ", x.dim(), " of ", x.sizes());
    auto column = x.view({x.size(0), 1});
    auto y = at::empty({x.size(0), 1}, x.options());
    std::function<int(int)> groups = [](int n) { return (n + 127) / 128; };
    std::ostringstream text; text << x.device();
    torch::Tensor unused = torch::full({2, 1}, 3.0, x.options());
    scale_kernel<<<groups(x.size(0)), 128>>>(column.packed_accessor32<float, 2, torch::RestrictPtrTraits>(),
        y.packed_accessor32<float, 2, torch::RestrictPtrTraits>(), alpha);
    return y.view({-1});
}
"""


def inline(cuda: str) -> str:
    """The honest module with other CUDA code."""
    start, end = modules.HONEST.index("source ="), modules.HONEST.index("declaration =")
    return f'{modules.HONEST[:start]}source = """{cuda}"""\n{modules.HONEST[end:]}'


@pytest.mark.slow
def test_accessors_factories_and_what_torchs_headers_bring_along() -> None:
    verdict = grade_module(inline(ACCESSORS), call=CALL, run_host=True)
    assert verdict.right, str(verdict)
    assert (
        "wrong-value" in grade_module(inline(ACCESSORS.replace("alpha * x[i]", "x[i]")), call=CALL, run_host=True).rules
    )


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("torch::full({2, 1}, 3.0, x.options())", "torch::linspace(0, 1, 5)", "not checked"),
        ("<torch/extension.h>", "<torch/csrc/utils/nothing.h>", "not checked"),
        ("TORCH_CHECK(", "TORCH_CHECK_LINALG(", "not checked"),
        ("auto column =", "int column = nonsense +", "wrong"),
    ],
)
def test_host_code_that_needs_more_of_torch_is_not_called_wrong(old: str, new: str, outcome: str) -> None:
    assert old in ACCESSORS
    verdict = grade_module(inline(ACCESSORS.replace(old, new)), call=CALL, run_host=True)
    assert verdict.outcome == outcome, str(verdict)


@pytest.mark.slow
def test_kernels_that_take_types_of_torch_are_not_graded_alone() -> None:
    verdict = grade_module(
        inline(ACCESSORS), launches=[{"entry": "scale_kernel", "block": 128, "args": ["x", "y", 2.0]}]
    )
    assert verdict.outcome == "not checked"


@pytest.mark.parametrize("limits", [{"run_host": False}, {"run_host": True, "limits": Limits(isolated=False)}])
def test_host_code_needs_permission_and_a_process(limits: dict[str, Any]) -> None:
    with pytest.raises(WrongInput, match="run_host"):
        grade_module(modules.HONEST, call=CALL, **limits)


@pytest.mark.parametrize(
    "text",
    [
        module_with("cuda_sources=[source]", "cuda_sources=[read(path)]"),
        module_with("cuda_sources=[source]", "cuda_sources=[open('kernel.cu').read()]"),
        module_with("cuda_sources=[source]", "cuda_sources=[f'{source:>10}']"),
        module_with("HEAD =", "HEAD = HEAD + "),
        "import triton\n\n@triton.jit\ndef scale_kernel(x, y): pass\n",
        "import tilelang\n", "from cutlass import cute\n", "import torch\nclass ModelNew(torch.nn.Module): pass\n",
    ],
)  # fmt: skip
def test_modules_whose_kernels_are_not_at_hand_are_not_called_wrong(text: str) -> None:
    verdict = grade_module(text, launches=[LAUNCH])
    assert (verdict.outcome, verdict.findings) == ("not checked", [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('source = HEAD + """', 'THREADS = 128\nsource = f"{HEAD}#define THREADS {THREADS}\\n" + """'),
        ("cuda_sources=[source]", 'cuda_sources=[source.replace("threads = 128", "threads = 64")]'),
    ],
)
def test_constants_may_be_put_together(old: str, new: str) -> None:
    assert "scale_kernel" in take_apart(module_with(old, new)).extensions[0].cuda


def test_a_character_that_no_file_holds_does_not_compile() -> None:
    assert grade_module("__global__ void scale_kernel() {} // \ud800", launches=[LAUNCH]).rules == {"does-not-compile"}


@pytest.mark.parametrize(
    "text",
    [
        '#include "/etc/hosts"', "# include </etc/hosts>", '%:include "/etc/hosts"', "#include FILE",
        '/* */ #/**/include/**/"../x.h"', 'char a[] = "/*";\n#include "/etc/hosts"\nchar b[] = "*/";',
        '// /*\n#include "/etc/hosts"\n// */', '#inc\\  \nlude "/etc/hosts"', '//\r#include "/etc/hosts"',
        '#if __has_include("/etc/hosts")', "#if _CCCL_HAS_INCLUDE (</etc/hosts>)", "#if __has_include /**/ (FILE)",
        '#define ASKS __has_include\n#if ASKS("/etc/hosts")',
        '#define ASKS(f) f("/etc/hosts")\n#if ASKS(__has_include)',
        '\v#include "/etc/hosts"', '\ufeff#include "a/../../b.h"', '#inc\\\r\nlude "/etc/hosts"',
    ],
)  # fmt: skip
def test_files_outside_are_found_however_they_are_included(text: str) -> None:
    assert len(includes.revealing_lines(f"{text}\n__global__ void f() {{}}\n")) == 1


def test_headers_of_libraries_are_included() -> None:
    text = '#include <mma.h> // half\n#include "cute/tensor.hpp" /* layouts */\n  #include <cuda/std/array>\n'
    assert includes.revealing_lines(text) == []
    assert includes.revealing_lines("#if defined(__has_include) && __has_include(<cuda_fp8.h>)\n#endif\n") == []
    assert includes.revealing_lines("#ifdef __has_include\n#if defined __has_include\n#endif\n#endif\n") == []


# A module that compiles its kernel by TVM instead of torch.
TVM = """
import tvm_ffi

TEXT = r'''
#include <tvm/ffi/container/tensor.h>
__global__ void twice(const float* x, float* y, int n) { y[threadIdx.x] = 2 * x[threadIdx.x]; }
void run(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
    twice<<<1, 32>>>((float*)x.data_ptr(), (float*)y.data_ptr(), 32);
}
'''
mod = tvm_ffi.cpp.load_inline(name="twice", cuda_sources=TEXT, functions="run")
"""


@pytest.mark.parametrize(
    "text",
    [
        TVM, TVM.replace("import tvm_ffi", "from tvm_ffi.cpp import load_inline").replace("tvm_ffi.cpp.load", "load"),
        TVM.replace("import tvm_ffi", "import tvm.ffi as tvm_ffi"),
        "import cutlass.cute as cute\n@cute.kernel\ndef f(): ...",
        "import tilelang\n@tilelang.jit\ndef f(): ...",
    ],
)  # fmt: skip
def test_modules_of_other_builders_are_not_judged(text: str) -> None:
    """Neither their kernels nor their host code are judged, and they are never called wrong."""
    for options in ({"launches": [LAUNCH]}, {"call": CALL, "run_host": True}):
        verdict = grade_module(text, **options)
        assert (verdict.outcome, verdict.findings) == ("not checked", []), str(verdict)


@pytest.mark.parametrize(
    ("header", "outcome"),
    [
        ("torch/extension.h", "not checked"), ("tvm/ffi/container/tensor.h", "not checked"),
        ("cutlass/of_tomorrow.h", "not checked"), ("my_kernels.h", "wrong"), ("cuda/of_tomorrow.h", "wrong"),
    ],
)  # fmt: skip
def test_a_text_that_needs_the_headers_of_a_library_is_not_wrong(header: str, outcome: str) -> None:
    text = f"#include <{header}>\n__global__ void scale_kernel(const float* x, float* y, float a, int n) {{}}"
    verdict = grade_module(text, launches=[{**LAUNCH, "entry": "scale_kernel"}])
    assert verdict.outcome == outcome, str(verdict)
    assert verdict.rules == ({"does-not-compile"} if outcome == "wrong" else set())
