"""The library in a PyTorch user's hands: products of fp16 tensors by the fastest kernel that is known, or by torch.

What a call does is decided once per shapes and strides (``plans``); the operators are registered with torch
(``library``), so they are differentiable and work under torch.compile and in CUDA graphs. Importing this imports torch.
"""

from cudal2gen.operators.layers import Replaced, patch, unpatch
from cudal2gen.operators.library import linear, matmul
from cudal2gen.operators.plans import emulated, explain, load_pack, prefer, stats

__all__ = [
    "Replaced",
    "emulated",
    "explain",
    "linear",
    "load_pack",
    "matmul",
    "patch",
    "prefer",
    "stats",
    "unpatch",
]
