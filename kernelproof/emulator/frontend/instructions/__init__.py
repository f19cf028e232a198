"""Translates each PTX instruction that the emulator supports to Python text, by handlers in modules by subject.

A handler is a decorated function; importing this package registers all of them. Its docstring lists what is modelled,
because error messages quote it. ``facts`` looks up the form of an instruction.
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
