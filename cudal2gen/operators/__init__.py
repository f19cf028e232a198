"""The library for PyTorch: products of fp16 and bf16 tensors by the fastest measured kernel, or by torch.

Imports and calls go down, a module per floor: ``torch_operators``, ``fused_operators`` and ``grouped`` (what torch
sees: operators and derivatives, by ``registration``) ask ``dispatch`` (what a call does, decided once per shapes and
strides), which uses ``binding`` (a kernel on operands), ``products`` (tensors as matrices, ``batches`` of them) and
``torch_products``. ``fused_layers`` replaces a model's layers. Importing this imports torch.
"""

from cudal2gen.operators.dispatch import autotune, emulated, load_pack, prefer, stats
from cudal2gen.operators.epilogues import deinterleave, interleave
from cudal2gen.operators.explaining import explain
from cudal2gen.operators.fused_layers import patch
from cudal2gen.operators.fused_operators import linear, swiglu
from cudal2gen.operators.grouped import grouped_mm
from cudal2gen.operators.layers import Replaced, unpatch
from cudal2gen.operators.torch_operators import bmm, matmul

__all__ = [
    "Replaced",
    "autotune",
    "bmm",
    "deinterleave",
    "emulated",
    "explain",
    "grouped_mm",
    "interleave",
    "linear",
    "load_pack",
    "matmul",
    "patch",
    "prefer",
    "stats",
    "swiglu",
    "unpatch",
]
