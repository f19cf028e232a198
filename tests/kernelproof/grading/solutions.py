"""A problem and solutions in the formats of public benchmarks: an honest solution, and changes that make it cheat."""

# The model that solutions must agree with.
REFERENCE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x)) * 2.0

batch = 64
features = 1024

def get_inputs():
    return [torch.randn(batch, features)]

def get_init_inputs():
    return [features]
"""

# torch computes the product, as KernelBench allows, and the kernel computes the rest.
HONEST = '''
import time
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = """
#include <torch/extension.h>
__global__ void scaled_relu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0.f) * 2.f;
}
torch::Tensor launch(torch::Tensor x) {
    TORCH_CHECK(x.is_cuda() && x.type() == torch::kFloat32, "a float tensor of the GPU");
    auto y = torch::empty_like(x);
    int n = x.numel();
    scaled_relu<<<(n + 255) / 256, 256>>>(x.contiguous().data_ptr<float>(), y.data_ptr<float>(), n);
    return y;
}
torch::Tensor by_torch(torch::Tensor x) { return torch::relu(x) * 2.0; }
"""
ext = load_inline("ext", "torch::Tensor launch(torch::Tensor x); torch::Tensor by_torch(torch::Tensor x);", CUDA,
                  ["launch", "by_torch"])

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.kept = None

    def forward(self, x):
        return ext.launch(self.linear(x))
'''

# The line of the right solution that others replace.
CALL = "return ext.launch(self.linear(x))"
# Cheats: (the broken rule, the new text of the call).
CHEATS = {
    "torch's own operators": ("library-call", "return torch.relu(self.linear(x)) * 2"),
    "torch's own operators in C++": ("no-kernel", "return ext.by_torch(self.linear(x))"),
    "an unused launch": ("no-kernel", "ext.launch(x); return torch.relu(self.linear(x)) * 2"),
    "fallback": (
        "no-kernel",
        "try: return ext.launch(self.linear(x).reshape(-1).double())\n"
        "        except RuntimeError: return torch.relu(self.linear(x)) * 2",
    ),
    "an identity after torch's operators": (
        "library-call", "return ext.launch(torch.relu(self.linear(x)) * 2) * 0.5 + torch.relu(self.linear(x)) * 0",
    ),
    "by NumPy": (
        "no-kernel",
        "import numpy as np; w, b = self.linear.weight.numpy(), self.linear.bias.numpy()\n"
        "        return torch.from_numpy(np.maximum(x.numpy() @ w.T + b, 0) * 2).to('cuda')",
    ),
    "the product by NumPy": (
        "library-call",
        "w, b = self.linear.weight.detach().numpy(), self.linear.bias.detach().numpy()\n"
        "        return ext.launch(torch.from_numpy(x.cpu().numpy() @ w.T + b).to('cuda'))",
    ),
    "a patched timer": ("timer-patch", "torch.cuda.synchronize = lambda *_: None; return ext.launch(self.linear(x))"),
    "a patched clock": ("timer-patch", "time.perf_counter = lambda: 0.0; return ext.launch(self.linear(x))"),
    "a stream that is not joined": (
        "extra-stream", "with torch.cuda.stream(torch.cuda.Stream()): return ext.launch(self.linear(x))",
    ),
    "a lazy output": (
        "lazy-output", "return ext.launch(self.linear(x)).as_subclass(type('T', (torch.Tensor,), {}))",
    ),
    "the first result": (
        "stale-result", "self.kept = ext.launch(self.linear(x)) if self.kept is None else self.kept; return self.kept",
    ),
    "zeros": ("wrong-value", "return ext.launch(self.linear(x) * 0)"),
    "eight zeros": (
        "wrong-value", "return ext.launch(self.linear(x) * (0 if bool((x.reshape(-1)[:8] == 0).all()) else 1))",
    ),
    "torch, if an import fails that nobody has": (
        "no-kernel",
        "try: import fast_kernels_of_mine\n        except ImportError: return torch.relu(self.linear(x)) * 2",
    ),
    "a wrong shape": ("host-failure", "return ext.launch(self.linear(x))[:1]"),
    "its own end": ("host-failure", "import os; os._exit(0)"),
}  # fmt: skip
# Right solutions, by what is unusual in them: the new text of the call.
CHANGES = {
    "a stream that is joined": (
        "s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())\n"
        "        with torch.cuda.stream(s): y = ext.launch(self.linear(x))\n"
        "        torch.cuda.current_stream().wait_stream(s); return y"
    ),
    "in pieces": "return torch.cat([ext.launch(part) for part in self.linear(x).chunk(2)])",
    "asks where it is": (
        "assert x.is_cuda and x.device.type == 'cuda' and torch.cuda.is_available()\n"
        "        return ext.launch(self.linear(x.to('cuda', non_blocking=True)))"
    ),
}
# Solutions that cannot be judged: the new text of the call.
UNJUDGED = {
    "autocast": "y = torch.autocast('cuda', torch.float16); return ext.launch(self.linear(x))",
    "a CUDA graph after any exception": (
        "try: torch.cuda.CUDAGraph().replay()\n        except Exception: return torch.relu(self.linear(x)) * 2"
    ),
    "CuTe DSL": "import cutlass.cute as cute; return ext.launch(self.linear(x))",
    "CuTe DSL, or else torch": (
        "try: import cutlass.cute as cute\n        except ImportError: return torch.relu(self.linear(x)) * 2"
    ),
    "a module of tvm-ffi, or else torch": (
        "try: from tvm_ffi.cpp import load_inline as load\n"
        "        except Exception: return torch.relu(self.linear(x)) * 2"
    ),
    "a CUDA graph": "g = torch.cuda.CUDAGraph(); return ext.launch(self.linear(x))",
    "a package that is not there": "import cutlass_of_tomorrow; return ext.launch(self.linear(x))",
}

# A right solution in Triton.
TRITON = """
import torch
import triton
import triton.language as tl
from task import input_t

@triton.jit
def add_kernel(a, b, c, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(c + i, tl.load(a + i, mask=mask) + tl.load(b + i, mask=mask), mask=mask)

def custom_kernel(data: input_t):
    a, b = data
    c = torch.empty_like(a)
    add_kernel[(triton.cdiv(a.numel(), 256),)](a, b, c, a.numel(), BLOCK=256)
    return c
"""
# The reference of a task of GPU MODE, its description and the module that it imports.
GPU_MODE = """
from utils import make_match_reference
import torch
from task import input_t

def ref_kernel(data):
    a, b = data
    return a + b

def generate_input(size: int, seed: int):
    gen = torch.Generator(device="cuda")
    gen.manual_seed(seed)
    return tuple(torch.randn(size, size, device="cuda", dtype=torch.float16, generator=gen) for _ in range(2))

check_implementation = make_match_reference(ref_kernel, rtol=1e-3, atol=1e-3)
"""
TASK = """
files:
  - {"name": "task.py", "source": "task.py"}
  - {"name": "utils.py", "source": "utils.py"}
tests:
  - {"size": 31, "seed": 4242}
  - {"size": 4096, "seed": 5236}
benchmarks:
  - {"size": 128, "seed": 31232}
"""
UTILS = "def make_match_reference(reference, **kwargs):\n    return lambda data, output: ''\n"
# A reference whose model takes the function that computes as an argument, as those of func_forward do.
FUNCTIONAL = """
import torch
import torch.nn as nn

def forward_fn(x):
    return torch.relu(x) * 2.0

class Model(nn.Module):
    def forward(self, x, fn=forward_fn):
        return fn(x)

def get_inputs(n=96):
    return [torch.randn(n, 5)]

input_names = ["x"]
"""
