"""Generates half-precision matrix-multiply kernels for NVIDIA GPUs from records, and offers them as operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelproof.ground.late_import import after_import
from kernelproof.ground.version import __version__ as __version__

if TYPE_CHECKING:
    from cudal2gen.operators import autotune as autotune
    from cudal2gen.operators import bmm as bmm
    from cudal2gen.operators import deinterleave as deinterleave
    from cudal2gen.operators import explain as explain
    from cudal2gen.operators import grouped_mm as grouped_mm
    from cudal2gen.operators import interleave as interleave
    from cudal2gen.operators import linear as linear
    from cudal2gen.operators import load_pack as load_pack
    from cudal2gen.operators import matmul as matmul
    from cudal2gen.operators import patch as patch
    from cudal2gen.operators import prefer as prefer
    from cudal2gen.operators import stats as stats
    from cudal2gen.operators import swiglu as swiglu
    from cudal2gen.operators import unpatch as unpatch
    from cudal2gen.operators import warm_up as warm_up

_OPERATORS = (
    "autotune", "bmm", "deinterleave", "explain", "grouped_mm", "interleave", "linear", "load_pack", "matmul",
    "patch", "prefer",
    "stats", "swiglu", "unpatch", "warm_up",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    # Operators need torch, which takes a second to import, so they are imported at their first use.
    if name not in _OPERATORS:
        raise AttributeError(f"module 'cudal2gen' has no attribute {name!r}")
    try:
        from cudal2gen import operators
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(f"cudal2gen.{name} needs torch: pip install torch", name="torch") from None
        raise

    globals().update({name: getattr(operators, name) for name in _OPERATORS})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPERATORS})


def _offer_operators(torch: Any) -> None:
    """Makes ``torch.ops.cudal2gen`` register the operators at its first use.

    Exported programs name operators in this way when ``torch.export.load`` reads them. Registering them as soon as
    torch is imported would import half of the package.
    """

    class Namespace(torch._ops._OpNamespace):  # type: ignore[misc]  # torch is not imported here
        def __getattr__(self, name: str) -> Any:
            if vars(torch.ops).get("cudal2gen") is self:
                del torch.ops.cudal2gen  # torch's own takes its place
                from cudal2gen import operators  # noqa: F401  # registers them
            return getattr(torch.ops.cudal2gen, name)

    if "cudal2gen" not in vars(torch.ops):
        torch.ops.cudal2gen = Namespace("cudal2gen")


after_import("torch", _offer_operators)
