"""Reads the machine code of cubins (SASS) and simulates its warps. Needs no GPU and measures nothing.

``disassemble`` decodes the functions of a cubin. ``Graph`` and ``Loops`` find its loops, ``RegisterLiveness`` its live
registers, and ``pipe_use`` names the unit of an SM that executes an instruction. ``simulate`` runs the warps of a
scheduler, and ``hazards`` finds instructions that do not wait for what they need.

Imports go down: ``summary``, ``ways``, ``hazards`` > ``analysis``, ``simulation``, ``in_flight`` > ``loops``,
``banks``, ``timeline``, ``scheduling`` > ``operations`` > ``latencies`` > ``registers``, ``trips`` > ``paths`` >
``flow``, ``pipes`` > ``editing`` > ``decoding``, ``stripping`` > ``elf``.
"""

from kernelproof.sass.analysis import Analysis, analyse, spill_bytes
from kernelproof.sass.decoding import Control, DisassemblyError, Function, Instruction, SourceLine, disassemble
from kernelproof.sass.elf import Resources
from kernelproof.sass.flow import Block, Graph, Loop
from kernelproof.sass.hazards import RegisterHazard, hazards
from kernelproof.sass.latencies import Release, fixed, scoreboard
from kernelproof.sass.loops import CodeLoop, Loops, Role
from kernelproof.sass.pipes import Pipe, PipeUse, pipe_use
from kernelproof.sass.registers import RegisterLiveness, access, register_names
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
    "Loop",
    "Loops",
    "Machine",
    "Pipe",
    "PipeUse",
    "RegisterHazard",
    "RegisterLiveness",
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
    "hazards",
    "pipe_use",
    "register_names",
    "scoreboard",
    "simulate",
    "spill_bytes",
    "summarise",
]
