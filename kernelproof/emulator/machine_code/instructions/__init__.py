"""Lowers machine code to PTX, by one function for each mnemonic, which ``lowering.mnemonic`` decorates.

Importing this package registers all of them. To add a mnemonic, add a function to the module of its kind.
"""

from kernelproof.emulator.machine_code.instructions import (  # noqa: F401
    atomics,
    bulk,
    clusters,
    compare,
    control,
    doubles,
    floating,
    integer,
    matrices,
    mbarriers,
    memory,
    moves,
    narrow,
    packed,
    predicates,
    tensor_memory,
    warpgroups,
    warps,
)
