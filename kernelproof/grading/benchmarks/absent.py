"""Notes which packages of kernels a solution tried to import although they are not installed here.

A solution may catch the exception of such an import and fall back to torch, which says nothing about its kernels.
"""

from __future__ import annotations

from typing import Any

# Packages in which kernels are written, or which contain kernels. Only these names excuse a solution, because anybody
# can import a name that does not exist.
PACKAGES = frozenset((
    "apex", "bitsandbytes", "cupy", "cuda", "cutlass", "cutlass_library", "deep_gemm", "fbgemm_gpu", "flash_attn",
    "flashinfer", "helion", "jax", "liger_kernel", "mamba_ssm", "causal_conv1d", "numba", "nvmath", "pycuda", "quack",
    "sgl_kernel", "tilelang", "torchao", "transformer_engine", "triton", "tvm", "tvm_ffi", "vllm", "warp", "xformers",
))  # fmt: skip


class AbsentPackages:
    """A finder for the end of ``sys.meta_path``, which Python calls only for modules that no other finder knows.

    It finds no module. ``names``: the packages that were asked for, in order, as keys.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        """Note the name if it is one of ``PACKAGES``."""
        if name in PACKAGES:
            self.names[name] = None
