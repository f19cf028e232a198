"""The library for PyTorch: products of fp16 and bf16 tensors by the fastest measured kernel, or by torch.

A call goes one way, and calls and imports go down only. ``torch_operators``, ``fused_operators`` and ``grouped`` are
the operators that torch knows (``registration``), which cast operands first if autocast is on (``casting``). They

1. check: ``check_modes`` (is a gradient, a tracer or a subclass at work?) and ``check_operands`` (types, shapes);
2. plan: ``plan_requests`` describes the tensors as matrices, and ``dispatch`` decides once per shapes and strides which
   kernel of ``plan_packs`` computes such calls, or why torch does; the result is one of ``plans``;
3. call: ``call_kernels`` launches a kernel, ``call_native`` does so from C++, ``call_torch`` is torch's own product.

``measuring`` is a second layer, which times kernels during calls. Only ``dispatch`` uses it. ``layers`` and
``fused_layers`` let a model's layers call these operators; ``inductor`` offers them to torch.compile. Importing this
imports torch.
"""

from cudal2gen.operators.dispatch import autotune, emulated, load_pack, prefer, stats
from cudal2gen.operators.epilogues import deinterleave, interleave
from cudal2gen.operators.explaining import explain
from cudal2gen.operators.fused_layers import patch
from cudal2gen.operators.fused_operators import linear, swiglu
from cudal2gen.operators.grouped import grouped_mm
from cudal2gen.operators.layers import Replaced, unpatch
from cudal2gen.operators.torch_operators import bmm, matmul
from cudal2gen.operators.warming import warm_up

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
    "warm_up",
]
