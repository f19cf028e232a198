"""The machine code of a cubin: decoded instructions, loops, the units that execute them, and warps simulated.

Imports go down: ``summary``, ``ways`` > ``simulation``, ``trips`` > ``timeline`` > ``operations`` > ``flow``,
``latencies`` > ``pipes`` > ``decoding``. No GPU is used, and nothing is measured.
"""

from cudal2gen.sass.decoding import Control, DisassemblyError, Function, Instruction, disassemble
from cudal2gen.sass.flow import Block, Graph, Loop
from cudal2gen.sass.latencies import Release, scoreboard
from cudal2gen.sass.pipes import Pipe, PipeUse, pipe_use
from cudal2gen.sass.simulation import Machine, Stall, Stream, Timeline, simulate
from cudal2gen.sass.summary import Summary, summarise

__all__ = [
    "Block",
    "Control",
    "DisassemblyError",
    "Function",
    "Graph",
    "Instruction",
    "Loop",
    "Machine",
    "Pipe",
    "PipeUse",
    "Release",
    "Stall",
    "Stream",
    "Summary",
    "Timeline",
    "disassemble",
    "pipe_use",
    "scoreboard",
    "simulate",
    "summarise",
]
