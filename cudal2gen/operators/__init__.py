"""The library for PyTorch: products of fp16 and bf16 tensors by the fastest measured kernel, or by torch.

``torch_operators``, ``fused_operators`` and ``grouped`` define the operators, which ``registration`` registers with
torch. If autocast is on, operands are cast first (``casting``). A call then takes three steps; no step calls an earlier
one:

1. check: ``check_modes`` (does a gradient, a tracer or a subclass need torch's dispatcher?) and ``check_operands``
   (types and shapes);
2. plan: ``plan_requests`` describes the tensors as matrices. ``dispatch`` decides once for given shapes and strides
   which kernel of ``plan_packs`` computes such calls, or gives the reason for leaving them to torch. ``plans`` defines
   the classes of these decisions.
3. call: ``call_kernels`` launches a kernel, ``call_native`` does so from C++, and ``call_torch`` calls torch's product.

``measuring`` times kernels during calls; only ``dispatch`` uses it. ``layers`` and ``fused_layers`` let the layers of a
model call these operators; ``inductor`` offers them to torch.compile. Importing this package imports torch.
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
