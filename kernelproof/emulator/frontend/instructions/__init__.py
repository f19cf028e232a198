"""The instructions that the emulator supports, one decorated function each, in modules by subject.

Importing this package registers all of them; ``facts`` looks up the form of an instruction.
"""

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
    video,
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
    "video",
    "warps",
    "wgmma",
]
