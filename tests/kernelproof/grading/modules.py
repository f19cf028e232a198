"""Python modules with inline extensions: an honest one, and texts that replace parts of it to cheat."""

from __future__ import annotations

# The honest module, and parts of it that changes replace.
HONEST = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

HEAD = "#include <torch/extension.h>\\n#include <ATen/cuda/CUDAContext.h>\\n"
source = HEAD + """
// in place of torch::relu(x) and x.sum()
template <typename scalar_t>
__global__ void scale_kernel(const scalar_t* __restrict__ x, scalar_t* y, scalar_t alpha, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = alpha * x[i];
}

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

torch::Tensor scale_cuda(torch::Tensor x, double alpha) {
    TORCH_CHECK(x.is_cuda(), "x must be a CUDA tensor");
    static bool configured = false;
    const int threads = 128;
    auto y = torch::empty_like(x);
    int n = x.numel();
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scale", ([&] {
        scale_kernel<scalar_t><<<ceil_div(n, threads), threads, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), (scalar_t)alpha, n);
    }));
    return y;
}
"""
declaration = "torch::Tensor scale_cuda(torch::Tensor x, double alpha);"
extension = load_inline(
    name="scale", cpp_sources=[declaration], cuda_sources=[source], functions=["scale_cuda"], verbose=False
)

class ModelNew(nn.Module):
    def __init__(self, alpha=2.0):
        super().__init__()
        self.alpha = alpha
        self.weight = nn.Parameter(torch.ones(3))
        self.extension = extension

    def forward(self, x):
        x = x.contiguous().view(-1)
        return self.extension.scale_cuda(x, self.alpha)
'''

# Parts of the honest module: the call of its kernel, its first line, and the result's memory.
CALL = "return self.extension.scale_cuda(x, self.alpha)"
HEAD = "import torch\n"
ALLOCATION = "auto y = torch::empty_like(x);"
# Replacements of the call.
LAYER = """return self.layer(x)

    def __init__(self):
        self.layer = nn.Linear(3, 3)
        self.extension = extension"""
FALLBACK = """
        try:
            return extension.scale_cuda(x, 2.0)
        except RuntimeError:
            return torch.mul(x, 2)"""
MEMBER = """if not hasattr(self, "last"):
            self.last = extension.scale_cuda(x, 2.0)
        return self.last"""
KEYED = """key = x.data_ptr()
        CACHE[key] = extension.scale_cuda(x, 2.0)
        return CACHE[key]"""
# For each cheat: the rule that it breaks, a part of the text, and its replacement.
CHEATS = {
    "operator": ("library-call", CALL, "return x @ x.t()"),
    "functional": ("library-call", CALL, "return torch.nn.functional.relu(self.extension.scale_cuda(x, 2.0))"),
    "method": ("library-call", CALL, "return self.extension.scale_cuda(x, 2.0) + x.softmax(-1)"),
    "layer": ("library-call", CALL, LAYER),
    "fallback": ("library-call", CALL, FALLBACK),
    "no kernel": ("no-kernel", CALL, "return x"),
    "cublas": ("library-call", ALLOCATION, ALLOCATION + " cublasSgemm(handle, 0, 0, n, n, n, p);"),
    "aten": ("library-call", ALLOCATION, "auto y = at::relu(x);"),
    "tensor method": ("library-call", ALLOCATION, "auto y = x.matmul(x);"),
    "timer": ("timer-patch", HEAD, HEAD + "torch.cuda.synchronize = lambda *a: None\n"),
    "event": ("timer-patch", HEAD, HEAD + "torch.cuda.Event.elapsed_time = lambda *a: 0.001\n"),
    "setattr": ("timer-patch", HEAD, HEAD + "setattr(torch.cuda, 'synchronize', print)\n"),
    "clock": ("timer-patch", HEAD, HEAD + "import time\ntime.perf_counter = lambda: 0\n"),
    "stream": ("extra-stream", CALL, "with torch.cuda.stream(torch.cuda.Stream()):\n            " + CALL),
    "stream of C++": ("extra-stream", ALLOCATION, ALLOCATION + " cudaStream_t s; cudaStreamCreate(&s);"),
    "pool": ("extra-stream", ALLOCATION, ALLOCATION + " auto s = at::cuda::getStreamFromPool();"),
    "thread": ("host-thread", HEAD, HEAD + "import threading\n"),
    "thread of C++": ("host-thread", ALLOCATION, ALLOCATION + " std::thread([] {}).detach();"),
    "lazy": ("lazy-output", HEAD, HEAD + "class Later(torch.Tensor):\n    pass\n"),
    "dispatch": ("lazy-output", HEAD, HEAD + "class Later:\n    def __torch_function__(self, *a):\n        pass\n"),
    "cache": ("result-cache", CALL, MEMBER),
    "memo": ("result-cache", "    def forward", "    @functools.lru_cache\n    def forward"),
    "key": ("result-cache", CALL, KEYED),
    "static tensor": ("result-cache", ALLOCATION, "static torch::Tensor y = torch::empty_like(x);"),
    "static pointer": ("result-cache", ALLOCATION, ALLOCATION + " static const void* last = nullptr;"),
    "global tensor": ("result-cache", "static inline", "torch::Tensor kept;\nstatic inline"),
    "frames": ("grader-access", HEAD, HEAD + "import inspect\n"),
    "collector": ("grader-access", HEAD, HEAD + "import gc\n"),
    "modules": ("grader-access", HEAD, HEAD + "import sys\nsys.modules['__main__'].check = lambda *a: True\n"),
    "file": ("grader-access", CALL, "open('/tmp/answer')\n        " + CALL),
    "environment": ("grader-access", ALLOCATION, ALLOCATION + ' getenv("EXPECTED");'),
    "absolute include": ("outside-file", '"#include <torch', '"#include </etc/passwd>\\n#include <torch'),
}  # fmt: skip
# Honest modules, by the same kind of replacements.
HONEST_CHANGES = {
    "parameters": (
        CALL, "return self.extension.scale_cuda(x, self.linear.weight, x.size(0))\n\n    def __init__(self):\n"
        "        self.linear, self.extension = nn.Linear(3, 4), extension",
    ),
    "environment": (HEAD, HEAD + "import os\nimport math\nos.environ['TORCH_CUDA_ARCH_LIST'] = '8.0'\n"),
    "backends": (HEAD, HEAD + "torch.backends.cuda.matmul.allow_tf32 = False\n"),
    "allocation": (
        CALL, "out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)\n        extension.scale_cuda(x, out)\n"
        "        return out.view(2, -1).transpose(0, 1).to(torch.float16)",
    ),
    "numbers": (CALL, "return self.extension.scale_cuda(x, 1.0 / math.sqrt(max(1, x.size(-1))))"),
    "function": ("class ModelNew", "def run(x):\n    return extension.scale_cuda(x, 2.0)\n\nclass ModelNew"),
    "autograd": (
        "class ModelNew", "class Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return extension.scale_cuda(x, 2.0)\n\nclass ModelNew",
    ),
    "binding": ("declaration =", 'source += """PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}"""\ndeclaration ='),
    "attribute": (
        "static bool configured = false;",
        "static bool configured = false; static constexpr int kTile = 3; std::vector<torch::Tensor> outs; "
        "if (!configured) cudaFuncSetAttribute(scale_kernel<float>, cudaFuncAttributeMaxDynamicSharedMemorySize, 9); "
        "cudaStream_t stream = at::cuda::getCurrentCUDAStream(); C10_CUDA_KERNEL_LAUNCH_CHECK();",
    ),
    "device code": (
        "static inline", "static __device__ __forceinline__ float add(float a) { return a; }\n"
        "__constant__ float t[4];\nstatic inline",
    ),
}  # fmt: skip
# Functions and classes above, by whose names the call is replaced.
CALLS = {"function": "return run(x)", "autograd": "return Fn.apply(x)"}
# Texts that replace parts of the host code, and the findings of its execution.
EXECUTED = {
    "half": ("unwritten-output", "int n = x.numel();", "int n = x.numel() / 2;"),
    "refusal": ("host-failure", "int n = x.numel();", 'int n = x.numel(); TORCH_CHECK(n < 0, "no");'),
    "crash": ("host-failure", "int n = x.numel();", "int n = *(volatile int*)nullptr;"),
    "counter": ("state-kept", ALLOCATION, ALLOCATION + " static int calls = 0; if (++calls > 4) alpha = 0;"),
    "no launch": ("no-kernel", "int n = x.numel();", "int n = x.numel(); if (n > 0) return torch::zeros_like(x);"),
}
