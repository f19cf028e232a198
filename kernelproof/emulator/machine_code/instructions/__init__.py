"""One function for each mnemonic of machine code; importing this package registers them."""

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
