"""``warm_up``: makes the first calls of a patched model before its first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cudal2gen.operators.layers import as_typed, check_model, patched

if TYPE_CHECKING:
    import torch

ROWS = (1, 16, 256)  # of a decoded token, a small batch, and the largest bucket


def warm_up(model: torch.nn.Module, rows: Iterable[int] = ROWS) -> list[str]:
    """Computes every patched module of a model once for each number of ``rows``, on random inputs, and returns their
    names.

    Afterwards calls with so many rows find their plan made and its kernel loaded. If calls measure, these ones do
    (``CUDAL2GEN_AUTOTUNE``). Modules that do not begin with a linear layer, such as experts, are left out. Hooks of the
    modules themselves are not called. Raises TypeError for what is no module, ValueError for rows below 1.
    """
    import torch

    check_model(model)
    sizes = sorted(set(rows))
    if sizes and sizes[0] < 1:
        raise ValueError(f"rows: must be positive, got {sizes[0]}")
    warmed = []
    for name, module in model.named_modules():
        layer = next((each for each in module.modules() if isinstance(each, torch.nn.Linear)), None)
        if not patched(module) or layer is None or not as_typed(layer.weight, layer.weight):
            continue
        with torch.no_grad():
            for count in sizes:
                module.forward(layer.weight.new_empty(count, layer.in_features).normal_())
        warmed.append(name)
    return warmed
