"""Converts the arguments of a Triton launch to those of its PTX. Needs triton.

Tuples are replaced by their parts and constants are left out. Descriptors become tensor maps, or pointer, shape and
strides. The last arguments are the pointers to scratch memory that Triton's launcher adds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from triton.backends.driver import decompose_descriptor, expand_signature

from kernelproof.emulator import Memory
from kernelproof.emulator.hopper.tensor_map import DEVICE_TYPES, TensorMap, refusal_of
from kernelproof.emulator.host.program import KernelArgument
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.emulator.memory.tensors import is_tensor
from kernelproof.ground.errors import WrongInput

MAP = "nvTmaDesc"  # Triton's type of a tensor map
TF32 = 11  # CUtensorMapDataType of fp32 rounded to tf32
L2_PROMOTION_128 = 2  # CUtensorMapL2promotion: sectors of 128 bytes
_FLOATS = ("fp32", "f32", "bf16")  # numbers that are passed by way of fp32


class Parameters:
    """Makes the arguments of launches of one kernel, from the ``source`` and ``metadata`` of Triton's compiler."""

    def __init__(self, source: Any, metadata: Any, tensors: Tensors) -> None:
        self.signature = dict(source.signature)
        self.names = list(source.fn.arg_names)
        self.metadata, self.tensors = metadata, tensors
        self.maps = list(getattr(metadata, "tensordesc_meta", None) or ())

    def arguments(self, args: Sequence[object], read_only: frozenset[int] = frozenset()) -> list[KernelArgument]:
        """One argument for each parameter of the PTX, without the scratch memory. ``read_only``: the numbers of
        parameters through which nothing is written."""
        types = _flat_types(expand_signature(self.signature.values(), self.maps, MAP))
        values: list[tuple[str, object]] = []
        maps = iter(self.maps)
        for name, sig, arg in zip(self.names, self.signature.values(), args, strict=True):
            values += ((name, part) for part in _parts(sig, arg, maps))
        kinds = [kind for kind in types if kind != "constexpr"]
        return [
            self._argument(kind, value, name, "input" if i in read_only else "inout")
            for i, (kind, (name, value)) in enumerate(zip(kinds, values, strict=True))
        ]

    def _argument(self, kind: str, value: Any, name: str, role: str) -> KernelArgument:
        """The argument for a parameter of type ``kind``: an address, a tensor map, or the bytes of a number."""
        if kind == MAP:
            descriptor, facts = value
            return self._tensor_map(descriptor, facts, name, role)
        if kind.startswith("*"):
            if not is_tensor(value):
                value = getattr(value, "base", value)  # unwraps triton.reinterpret
            if value is None or isinstance(value, int):
                return value or 0
            if not is_tensor(value):
                raise WrongInput(f"argument {name} is {type(value).__name__}: a CPU tensor is needed")
            return self.tensors.address(value, name, role)
        if kind == "fp64":
            return struct.pack("<d", value)
        if kind in _FLOATS:
            # As in Triton's launcher, what is too large for fp32 becomes infinite, and bf16 is the upper half of fp32.
            with np.errstate(over="ignore"):
                single = np.float32(value).tobytes()
            return single[2:] if kind == "bf16" else single
        return struct.pack("<e", value) if kind == "fp16" else int(value)

    def _tensor_map(self, descriptor: Any, facts: dict[str, Any], name: str, role: str) -> bytes:
        """The tensor map that the driver would encode for a host-side descriptor, whose innermost dimension is last."""
        if facts.get("is_im2col"):
            raise WrongInput(f"argument {name}: descriptors with im2col are not emulated")
        element_bytes = facts["elem_size"]
        shape = list(descriptor.shape)
        shape[-1] *= 1 + bool(facts["fp4_padded"])
        kind = facts["elem_type"]
        map_ = TensorMap(
            TF32 if descriptor.round_f32_to_tf32 else DEVICE_TYPES.get(kind, kind),
            self.tensors.address(descriptor.base, name, role),
            tuple(reversed(shape)),
            tuple(element_bytes * stride for stride in reversed(descriptor.strides[:-1])),
            box=tuple(reversed(facts["block_size"])), steps=(1,) * len(shape), interleave=0, swizzle=facts["swizzle"],
            promotion=L2_PROMOTION_128, fill=int(descriptor.padding == "nan"),
        )  # fmt: skip
        reason = refusal_of(map_)
        if reason:
            raise WrongInput(f"argument {name} has no tensor map: {reason}")
        return map_.encode()


def scratch(metadata: Any, memory: Memory, ctas: int) -> list[int]:
    """Addresses of the two scratch buffers that Triton's launcher passes after a kernel's own arguments, 0 if one is
    not needed. ``ctas``: CTAs of the grid."""
    addresses = []
    for kind in ("global", "profile"):
        nbytes = ctas * getattr(metadata, f"{kind}_scratch_size", 0)
        addresses.append(memory.allocate(nbytes, name=f"{kind} scratch").address if nbytes else 0)
    return addresses


def _parts(sig: Any, arg: Any, maps: Iterator[dict[str, Any]]) -> Iterator[object]:
    """The values of the PTX's parameters that an argument becomes. ``maps``: the facts of the remaining descriptors."""
    if isinstance(sig, tuple):
        for part, value in zip(sig, arg, strict=True):
            yield from _parts(part, value, maps)
    elif sig.startswith("tensordesc"):
        facts = next(maps, None)
        if facts is None:
            yield from decompose_descriptor(arg)
        else:
            yield arg, facts
            yield from (*arg.shape, *arg.strides)
    elif sig != "constexpr":
        yield arg


def _flat_types(kinds: Sequence[Any]) -> list[str]:
    """Triton's types without nesting: the types of a tuple's parts in place of the tuple."""
    out: list[str] = []
    for kind in kinds:
        out += _flat_types(kind) if isinstance(kind, tuple) else [kind]
    return out
