"""Defines fusions: operations on the sums of a product before they are rounded and stored, as data of the problem.

D = activation(Z), where Z = alpha A B + bias + beta C is computed in fp32 and D is rounded once, to its type.
``Fusion`` says which of these parts a kernel has; they are compiled in. alpha, beta and the addresses of bias and C are
arguments of a launch. If beta is 0 the kernel still reads C, so NaN or infinity in C makes D NaN, whereas BLAS does not
read C. To leave C unread, use the fusion without ``residual``.

``gate`` makes D half as wide as Z, whose columns are pairs interleaved by 8: Z1 has the columns 16 j to 16 j + 7, Z3
the columns 16 j + 8 to 16 j + 15, and D = activation(Z1) Z3. ``aux`` also stores all of Z, in D's type.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, model_serializer, model_validator

Bias = Literal["none", "n", "m"]
Activation = Literal["none", "relu", "gelu_tanh", "gelu", "silu"]

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
NONE = "none"  # the text of a fusion without parts, and an activation that changes nothing
# For each part of a fusion's text, the fields that it sets. Texts name parts in this order, in which they are applied.
PARTS: dict[str, dict[str, Any]] = {
    "alpha": {"scale": True},
    "bias_n": {"bias": "n"},
    "bias_m": {"bias": "m"},
    "residual": {"residual": True},
    "aux": {"aux": True},
    **{name: {"activation": name} for name in ACTIVATIONS if name != NONE},
    "gate": {"gate": True},
}
ALPHA, BETA = 1.5, -0.5  # for tests and measurements: exact in every type, not neutral, not opposite
GATE_COLS = 16  # columns of Z that give 8 of D; n is a multiple of it


class Fusion(BaseModel):
    """The parts of a fused product. Without any part it is the plain product.

    ``scale``: the sums are multiplied by alpha. ``bias``: a vector is added, in the type of A and B; it has n elements,
    one for each column of Z, or m, one for each row. ``residual``: beta C is added, C (m,n) in the type of D. ``aux``:
    Z (m,n) is also stored, rounded to D's type. ``activation``: gelu uses the error function, gelu_tanh the usual
    approximation of it. ``gate``: columns of Z are pairs, and D (m,n/2) is the activated half times the other half.
    The text of a fusion has the names of its parts in this order, such as ``bias_n+silu``; JSON uses this text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scale: bool = False
    bias: Bias = "none"
    residual: bool = False
    aux: bool = False
    activation: Activation = "none"
    gate: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """The fields that a fusion's text sets. Raises ValueError if a part is unknown, repeated or out of order."""
        if not isinstance(value, str):
            return value
        fields: dict[str, Any] = {}
        for part in value.split("+") if value != NONE else ():
            if part not in PARTS:
                raise ValueError(f"{part!r} is no part of a fusion; parts are {', '.join(PARTS)}, joined by +")
            if twice := fields.keys() & PARTS[part].keys():
                raise ValueError(f"{value}: {twice.pop()} appears more than once")
            fields |= PARTS[part]
        if value != (text := "+".join(part for part in PARTS if PARTS[part].items() <= fields.items()) or NONE):
            raise ValueError(f"{value}: parts must stand in the order of application, {text}")
        return fields

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        """Refuses parts that exclude each other, or that would have no effect."""
        if self.residual and self.gate:
            raise ValueError(f"{self}: residual excludes gate, because C is as wide as D, half as wide as the sums")
        if self.aux and not self.gate and self.activation == NONE:
            raise ValueError(f"{self}: aux needs an activation or gate, without which it would equal D")
        return self

    @model_serializer
    def _spell(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        """The parts joined by +, or ``none``."""
        parts = [part for part, fields in PARTS.items() if all(getattr(self, name) == fields[name] for name in fields)]
        return "+".join(parts) or NONE

    @property
    def before_activation(self) -> Fusion:
        """The parts of Z, which aux stores."""
        return Fusion(scale=self.scale, bias=self.bias, residual=self.residual)

    def d_cols(self, n: int) -> int:
        """Columns of D if the product has n columns."""
        return n // 2 if self.gate else n

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        return self.text != NONE


PLAIN = Fusion()  # D is the product alone
