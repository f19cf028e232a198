"""The machine code of a cubin: decoded instructions, loops, the units that execute them, and one warp's time.

Imports go down: ``summary`` > ``warp``, ``trips`` > ``flow``, ``latencies`` > ``pipes`` > ``decoding``. No GPU is used,
and nothing is measured.
"""

from cudal2gen.sass.decoding import Control, DisassemblyError, Function, Instruction, disassemble
from cudal2gen.sass.flow import Block, Graph, Loop
from cudal2gen.sass.latencies import Release, scoreboard
from cudal2gen.sass.pipes import Pipe, PipeUse, pipe_use
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
    "Pipe",
    "PipeUse",
    "Release",
    "Summary",
    "Warp",
    "disassemble",
    "pipe_use",
    "scoreboard",
    "summarise",
]
