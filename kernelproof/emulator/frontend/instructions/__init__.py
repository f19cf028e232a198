"""The instructions that the machine knows: one decorated function each. ``facts`` looks in all of these tables."""

from kernelproof.emulator.frontend.instruction import facts
from kernelproof.emulator.frontend.instructions import (
    bits,
    bulk,
    cluster_launch,
    clusters,
    compare,
    conversions,
    floating,
    integer,
    matrices,
    mbarriers,
    memory,
    moves,
    synchronisation,
    tcgen05,
    tensor_maps,
    warps,
    wgmma,
)

__all__ = [
    "bits",
    "bulk",
    "cluster_launch",
    "clusters",
    "compare",
    "conversions",
    "facts",
    "floating",
    "integer",
    "matrices",
    "mbarriers",
    "memory",
    "moves",
    "synchronisation",
    "tcgen05",
    "tensor_maps",
    "warps",
    "wgmma",
]
