"""The machine code of a cubin: decoded instructions, loops, and the time that one warp takes for them.

Imports go down: ``summary`` > ``warp``, ``trips`` > ``flow`` > ``decoding``. No GPU is used, and nothing is measured.
"""

from cudal2gen.sass.decoding import Control, DisassemblyError, Function, Instruction, disassemble
from cudal2gen.sass.flow import Block, Graph, Loop
from cudal2gen.sass.summary import Summary, summarise
from cudal2gen.sass.warp import Warp

__all__ = [
    "Block",
    "Control",
    "DisassemblyError",
    "Function",
    "Graph",
    "Instruction",
    "Loop",
    "Summary",
    "Warp",
    "disassemble",
    "summarise",
]
