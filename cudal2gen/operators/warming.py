"""Defines ``warm_up``, which makes the first calls of a patched model before its first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cudal2gen.operators.layers import check_model, has_our_types, is_patched

if TYPE_CHECKING:
    import torch

ROWS = (1, 16, 256)  # rows of a decoded token, of a small batch, and of the largest bucket


def warm_up(model: torch.nn.Module, rows: Iterable[int] = ROWS) -> list[str]:
    """Computes every patched module of a model once for each number of ``rows``, on random inputs. Returns the names of
    the modules.

    Later calls with these numbers of rows then have a plan and a loaded kernel. If calls measure
    (``CUDAL2GEN_AUTOTUNE``), these calls measure too. Modules that do not begin with a linear layer, such as experts,
    are left out. Hooks of the modules themselves are not called. Raises TypeError for a value that is no module,
    ValueError for rows below 1.
    """
    import torch

    check_model(model)
    sizes = sorted(set(rows))
    if sizes and sizes[0] < 1:
        raise ValueError(f"rows: must be positive, got {sizes[0]}")
    names = []
    for name, module in model.named_modules():
        layer = next((part for part in module.modules() if isinstance(part, torch.nn.Linear)), None)
        if not is_patched(module) or layer is None or not has_our_types(layer.weight, layer.weight):
            continue
        with torch.no_grad():
            for count in sizes:
                module.forward(layer.weight.new_empty(count, layer.in_features).normal_())
        names.append(name)
    return names
