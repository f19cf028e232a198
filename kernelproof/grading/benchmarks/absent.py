"""Notes which packages of kernels a solution asked for that are not installed here, also if it caught the exception."""

from __future__ import annotations

from typing import Any

# What kernels are written in, or come from, beside inline extensions. Without such a package a solution may fall back
# to torch, which says nothing about it. Other names that are not there excuse nothing: anybody can write one.
PACKAGES = frozenset((
    "apex", "bitsandbytes", "cupy", "cuda", "cutlass", "cutlass_library", "deep_gemm", "fbgemm_gpu", "flash_attn",
    "flashinfer", "helion", "jax", "liger_kernel", "mamba_ssm", "causal_conv1d", "numba", "nvmath", "pycuda", "quack",
    "sgl_kernel", "tilelang", "torchao", "transformer_engine", "triton", "tvm", "tvm_ffi", "vllm", "warp", "xformers",
))  # fmt: skip


class AbsentPackages:
    """The last of Python's finders, which is asked only where no other one knows a module. It finds nothing."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        """Note a package."""
        if name in PACKAGES:
            self.names[name] = None
