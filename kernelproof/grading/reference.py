"""Calls the user's reference, a function on NumPy arrays or torch tensors, with inputs in fp64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from kernelproof.grading.contract import Contract, ContractBuffer
from kernelproof.grading.expressions import Shape
from kernelproof.grading.formats import Array
from kernelproof.ground.errors import WrongInput


class Reference:
    """The user's function with the types of its arrays.

    If all of its parameters are names of inputs or of the shape, it is called with these; otherwise it receives all
    inputs in order. It may return an array, several arrays in the order of the outputs, or a dictionary of outputs.
    """

    def __init__(
        self, function: Callable[..., Any], contract: Contract, arrays: Literal["numpy", "torch"] = "numpy"
    ) -> None:
        if arrays not in ("numpy", "torch"):
            raise WrongInput(f"arrays {arrays!r}: numpy or torch")
        self.function, self.contract, self.arrays = function, contract, arrays

    def __call__(self, values: Mapping[str, Array], shape: Shape) -> list[Array]:
        """Compute the outputs (fp64, or int64 for integers) in the order of the contract. ``values``: the inputs by
        name. Raises WrongInput if the function fails, or if its results do not have the outputs' number and shapes."""
        if self.arrays == "torch":
            import torch

            prepared: dict[str, Any] = {
                name: torch.from_numpy(np.array(array, np.int64 if array.dtype.kind in "iu" else np.float64))
                for name, array in values.items()
            }
        else:
            prepared = {name: array.copy() for name, array in values.items()}
        try:
            with np.errstate(all="ignore"):
                result = self._call(prepared, shape)
        except Exception as error:
            raise WrongInput(f"reference on shape {dict(shape)}: {type(error).__name__}: {error}") from error
        outputs = self.contract.outputs
        if isinstance(result, Mapping):
            missing = [item.name for item in outputs if item.name not in result]
            if missing:
                raise WrongInput(f"reference: its dictionary lacks {', '.join(missing)}")
            result = [result[item.name] for item in outputs]
        parts = list(result) if isinstance(result, tuple | list) else [result]
        if len(parts) != len(outputs):
            raise WrongInput(f"reference: {len(parts)} results for {len(outputs)} outputs")
        return [_array(part, item, shape) for part, item in zip(parts, outputs, strict=True)]

    def _call(self, prepared: Mapping[str, Any], shape: Shape) -> Any:
        """Call the function with the arguments that its parameters name, or else with all inputs."""
        try:
            names = list(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):  # Functions written in C may have no signature.
            names = []
        usable = {**shape, **prepared}
        if names and all(name in usable for name in names):
            return self.function(*(usable[name] for name in names))
        return self.function(*prepared.values())


def _array(part: Any, item: ContractBuffer, shape: Shape) -> Array:
    """A result (NumPy array, torch tensor or number) as an array of an output's shape. Raises WrongInput for another
    shape."""
    if hasattr(part, "detach"):
        part = part.detach().cpu().double() if item.format.is_float else part.detach().cpu()
        part = part.numpy()
    array = np.asarray(part)
    extents = item.shape(shape)
    # A result may have other axes of extent 1 than the buffer, as after a sum with or without ``keepdims``.
    if (
        array.shape != extents
        and array.size == np.prod(extents)
        and [n for n in array.shape if n > 1] == [n for n in extents if n > 1]
    ):
        array = array.reshape(extents)
    if array.shape != extents:
        raise WrongInput(f"reference: output {item.name} has shape {array.shape}, the buffer {extents}")
    return array.astype(np.float64) if item.format.is_float else array.astype(np.int64)
