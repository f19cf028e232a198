"""One function for each mnemonic of machine code; importing this package registers them."""

from kernelproof.emulator.machine_code.instructions import (  # noqa: F401
    atomics,
    compare,
    control,
    doubles,
    floating,
    integer,
    matrices,
    memory,
    moves,
    packed,
    predicates,
    warps,
)
