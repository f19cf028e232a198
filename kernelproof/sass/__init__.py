"""The machine code of a cubin: decoded instructions, loops, registers, the units that execute them, warps simulated.

Imports go down: ``summary``, ``ways`` > ``analysis``, ``simulation`` > ``loops``, ``banks``, ``timeline`` >
``operations`` > ``latencies`` > ``registers``, ``trips`` > ``flow``, ``pipes`` > ``decoding``, ``stripping`` > ``elf``.
No GPU is used, and nothing is measured.
"""

from kernelproof.sass.analysis import Analysis, analyse, spill_bytes
from kernelproof.sass.decoding import Control, DisassemblyError, Function, Instruction, SourceLine, disassemble
from kernelproof.sass.elf import Resources
from kernelproof.sass.flow import Block, Graph, Loop
from kernelproof.sass.latencies import Release, fixed, scoreboard
from kernelproof.sass.loops import CodeLoop, Loops, Role
from kernelproof.sass.pipes import Pipe, PipeUse, pipe_use
from kernelproof.sass.registers import Liveness, access, register_names
from kernelproof.sass.simulation import Machine, Stall, Stream, Timeline, simulate
from kernelproof.sass.summary import Summary, summarise

__all__ = [
    "Analysis",
    "Block",
    "CodeLoop",
    "Control",
    "DisassemblyError",
    "Function",
    "Graph",
    "Instruction",
    "Liveness",
    "Loop",
    "Loops",
    "Machine",
    "Pipe",
    "PipeUse",
    "Release",
    "Resources",
    "Role",
    "SourceLine",
    "Stall",
    "Stream",
    "Summary",
    "Timeline",
    "access",
    "analyse",
    "disassemble",
    "fixed",
    "pipe_use",
    "register_names",
    "scoreboard",
    "simulate",
    "spill_bytes",
    "summarise",
]
