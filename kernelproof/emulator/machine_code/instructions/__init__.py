"""What each mnemonic of machine code does: a function decorated by ``lowering.mnemonic``, which emits PTX for it.

Importing this package registers all of them. A new mnemonic is one more function in the module of its kind.
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
    packed,
    predicates,
    tensor_memory,
    warpgroups,
    warps,
)
