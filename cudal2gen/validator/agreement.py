"""Compares a device with the emulator, bit for bit, on the same binary and the same inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Record, ceil_div
from cudal2gen.launch.gpu import Contender
from cudal2gen.results import Case, Rounding
from cudal2gen.validator.device import BuiltKernel, VerdictDevice
from cudal2gen.validator.emulated import Execution, execute
from cudal2gen.validator.matrices import Matrices
from cudal2gen.validator.problems import Shape
from cudal2gen.validator.rounding import SAMPLE, agreement, ulps
from kernelproof.ground.element import Element

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

LENGTHS = (32, 256, 2048)  # values of k that are compared, the lengths of the sums: few and many steps
EXACT_INPUTS = ("binary", "integers")  # their sums are exact in any order; those of 0/1 up to 2048 also in fp16


def against_emulator(device: VerdictDevice, built: BuiltKernel) -> tuple[list[Case], list[Rounding]]:
    """Compares the device's results with the emulator's, for one tile of D, several k and several kinds of inputs.

    Each comparison gives a ``Rounding``, which says how far the device's D is from the emulator's. If D is exact
    whatever the order of the sums, both must be equal, and the comparison also gives a ``Case`` that says whether they
    are.
    """
    record, artifact = built.record, built.artifact
    contender = built.open(device)
    cases, roundings = [], []
    for k in lengths(record):
        shape = Shape(record.bm, record.bn, k, groups=(record.bm,) if record.grouped else ())
        for inputs in (*EXACT_INPUTS, "normal", "cancelling"):
            emulated = execute(record, artifact, built.library, shape, inputs, hazards=False, seed=k)
            d = product(device, record, contender, emulated)
            distances = ulps(d, emulated.d)
            # Activations other than these are approximated, and the device's result may differ in the last bits.
            exact = inputs in EXACT_INPUTS and record.fusion.activation in ("none", "relu")
            differing = int((distances != 0).sum())
            # Only rounded sums that are stored unchanged tell which model of rounding the device follows.
            is_modelled = not (exact or record.fusion)
            if exact:
                wrong = [f"differs-from-emulator: {differing} of {d.size} elements"] if differing else []
                findings, ctas = [*emulated.findings, *wrong], shape.ctas(record)
                cases.append(shape.case(inputs, ctas, "equality with the emulator", findings, float(distances.max())))
            roundings.append(
                Rounding(
                    on=device.model,
                    record=record.name,
                    digest=artifact.digest,
                    family=record.family,
                    ab=record.ab,
                    d=record.d,
                    acc=record.acc,
                    m=shape.m,
                    n=shape.n,
                    k=k,
                    inputs=inputs,
                    differing=differing / d.size,
                    max_ulp=int(distances.max()),
                    compared=min(SAMPLE, shape.m) * min(SAMPLE, shape.n) if is_modelled else 0,
                    models=agreement(record.acc, emulated.a, emulated.b, d, record.k_order(k)) if is_modelled else {},
                )
            )
    return cases, roundings


def lengths(record: Record) -> list[int]:
    """The values of k to compare: ``LENGTHS`` in whole steps, up to the kernel's limit, or the k that is compiled
    in."""
    if record.baked_k:
        return [record.baked_k]
    step, least = record.k_step, record.k_step * record.split_k
    most = record.most_k or max(LENGTHS) + least
    return sorted({min(most, max(least, ceil_div(k, step) * step)) for k in LENGTHS})


def product(device: VerdictDevice, record: Record, contender: Contender, emulated: Execution) -> Array:
    """D (m,n) of the emulator's operands, computed on the device; for a batch, that of the first product."""
    import torch

    m, n, k = len(emulated.a), len(emulated.b), emulated.a.shape[1]
    matrices = Matrices(device.empty, record, Shape(m, n, k).problem(record))

    def tensor(values: Array, element: Element) -> torch.Tensor:
        # Copied as bits, because torch and NumPy do not have all of each other's types.
        bits = np.ascontiguousarray(values).view(f"i{element.bytes}")
        return torch.from_numpy(bits).view(element.torch_dtype)

    fused_operands = emulated.products[0].fused
    bias = None if fused_operands.bias is None else tensor(fused_operands.bias, record.element)
    c = None if fused_operands.c is None else tensor(fused_operands.c, record.output)
    a, b = (tensor(values, record.element) for values in (emulated.a, emulated.b))
    # In a batch A and B have a first dimension for the product. The A of a grouped problem has the rows of all groups.
    a, b = a[None] if record.batched and not record.grouped else a, b[None] if record.batched else b
    matrices.put(a, b, record.output.poisons[0], bias, c)
    contender.bind(matrices.operands)()
    device.wait()
    d: Array = np.ascontiguousarray(matrices.d.bits.reshape(m, -1).cpu().numpy()).view(record.output.numpy_dtype)
    return d
