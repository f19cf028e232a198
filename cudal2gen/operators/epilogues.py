"""Computes activations, gates and their derivatives by torch, and interleaves weights for gated kernels.

Z (..., n) is the product plus bias, before any activation. With a gate, blocks of 8 columns of Z1 alternate in Z with
blocks of 8 columns of Z3, and D (..., n/2) = activation(Z1) * Z3. 16-bit tensors are computed in fp32 and rounded once.
``kernel.fusion`` defines what kernels support.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudal2gen.kernel.fusion import ACTIVATIONS, GATE_COLS
from cudal2gen.operators.check_modes import check_tensors
from kernelproof.ground.element import F32

if TYPE_CHECKING:
    import torch

BLOCK_COLS = GATE_COLS // 2  # columns of a block of Z1 or Z3
ACTIVATION_NAMES = tuple(name for name in ACTIVATIONS if name != "none")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32 if its type is narrower, else itself."""
    return tensor.float() if tensor.element_size() < F32.bytes else tensor


def activate(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of Z, in Z's shape and type. ``activation``: one of ``ACTIVATION_NAMES``."""
    from torch.nn import functional

    if activation == "relu":
        return functional.relu(z)
    if activation == "silu":
        return functional.silu(z)
    return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_backward(grad: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """``grad`` times the activation's derivative at Z."""
    import torch

    aten = torch.ops.aten
    gradient: torch.Tensor
    if activation == "relu":
        gradient = aten.threshold_backward(grad, z, 0)
    elif activation == "silu":  # written out: torch's silu_backward has no derivative of its own
        wide_z = wide(z)
        sigmoid = torch.sigmoid(wide_z)
        gradient = (wide(grad) * sigmoid * (1 + wide_z * (1 - sigmoid))).to(z.dtype)
    else:
        gradient = aten.gelu_backward(grad, z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return gradient


def apply(z: torch.Tensor, activation: str, gate: bool) -> torch.Tensor:
    """D from Z, in Z's type: (..., n), or (..., n/2) with a gate."""
    if not gate:
        return activate(z, activation)
    z1, z3 = split_columns(wide(z))
    return (activate(z1, activation) * z3).to(z.dtype)


def apply_backward(grad: torch.Tensor, z: torch.Tensor, activation: str, gate: bool) -> torch.Tensor:
    """The gradient of Z, in Z's type, from ``grad``, the gradient of D."""
    if not gate:
        return activate_backward(grad, z, activation)
    return join_columns(*pair_backward(grad, z, activation))


def pair_backward(grad: torch.Tensor, z: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of both halves of Z (``split_columns``), from ``grad``, the gradient of a gated D."""
    z1, z3 = split_columns(wide(z))
    d_gradient = wide(grad)
    z1_gradient, z3_gradient = activate_backward(d_gradient * z3, z1, activation), d_gradient * activate(z1, activation)
    return z1_gradient.to(z.dtype), z3_gradient.to(z.dtype)


def split_columns(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The half of Z to which the activation is applied, and the half by which it is multiplied, each (..., n/2)."""
    pairs = z.unflatten(-1, (z.shape[-1] // GATE_COLS, 2, BLOCK_COLS))
    return pairs[..., 0, :].flatten(-2), pairs[..., 1, :].flatten(-2)


def join_columns(z1: torch.Tensor, z3: torch.Tensor) -> torch.Tensor:
    """Undoes ``split_columns``: Z (..., n) from its halves, each (..., n/2)."""
    import torch

    blocks = z1.shape[-1] // BLOCK_COLS
    return torch.stack((z1.unflatten(-1, (blocks, BLOCK_COLS)), z3.unflatten(-1, (blocks, BLOCK_COLS))), -2).flatten(-3)


def interleave(w1: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    """The weight (2h,k) that ``swiglu`` takes, from W1 and W3 (h,k): alternately 8 rows of W1 and 8 of W3. Two biases
    (h,) give one of (2h,) in the same way.

    Raises ValueError if h is no multiple of 8 or the shapes of W1 and W3 differ, TypeError for values that are no
    tensors.
    """
    check_pair(w1, w3)
    return join_columns(w1.t(), w3.t()).t().contiguous() if w1.ndim > 1 else join_columns(w1, w3)


def deinterleave(w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undoes ``interleave``: W1 and W3 (h,k) from w13 (2h,k), or two biases (h,) from one of (2h,).

    Raises ValueError if 2h is no multiple of 16 or ``w13`` has more dimensions, TypeError if it is no tensor.
    """
    check_tensors(w13=w13)
    if w13.ndim not in (1, 2) or w13.shape[0] % GATE_COLS:
        raise ValueError(f"w13: expected rows in blocks of {GATE_COLS}, got the shape {tuple(w13.shape)}")
    if w13.ndim == 1:
        return split_columns(w13)
    w1, w3 = split_columns(w13.t())
    return w1.t().contiguous(), w3.t().contiguous()


def check_pair(w1: torch.Tensor, w3: torch.Tensor) -> None:
    """Raises ValueError for weights that cannot be interleaved, TypeError for values that are no tensors."""
    check_tensors(w1=w1, w3=w3)
    if w1.ndim not in (1, 2) or w1.shape != w3.shape or w1.shape[0] % BLOCK_COLS:
        shapes = f"{tuple(w1.shape)} and {tuple(w3.shape)}"
        raise ValueError(f"w1 and w3: expected one shape (h,k) with h a multiple of {BLOCK_COLS}, got {shapes}")
