"""Reads the machine code of cubins (SASS) and simulates its warps. Needs no GPU and measures nothing.

``disassemble`` decodes the functions of a cubin. ``Graph`` and ``Loops`` find its loops, ``RegisterLiveness`` its live
registers, and ``pipe_use`` names the unit of an SM that executes an instruction. ``simulate`` runs the warps of a
scheduler, and ``hazards`` finds instructions that do not wait for what they need. A ``Way`` holds one role's
instructions: before, in and after its main loop. ``Ways`` has those of a kernel's roles.

Other packages use the names that are imported here, and none of the modules below.

Imports go down: ``summary``, ``ways``, ``hazards`` > ``completions`` > ``analysis``, ``simulation``, ``in_flight`` >
``loops``, ``banks``, ``timeline``, ``scheduling`` > ``operations`` > ``latencies`` > ``registers``, ``trips`` >
``paths`` > ``flow``, ``pipes`` > ``decoding``, ``stripping`` > ``elf``.
"""

from kernelproof.sass.analysis import Analysis, analyse, spill_bytes
from kernelproof.sass.decoding import Control, DisassemblyError, Function, Instruction, SourceLine, disassemble
from kernelproof.sass.elf import Resources, assembler, sections
from kernelproof.sass.flow import Block, Graph, Loop
from kernelproof.sass.hazards import RegisterHazard, hazards
from kernelproof.sass.latencies import Release, fixed, scoreboard
from kernelproof.sass.loops import COPIES, CodeLoop, Loops, Role, count
from kernelproof.sass.pipes import MMA, WARPGROUP, Pipe, PipeUse, mma_shape, pipe_use
from kernelproof.sass.registers import RegisterLiveness, access, register_names
from kernelproof.sass.scheduling import queue_names, waits
from kernelproof.sass.simulation import Issue, Machine, Stall, Stream, Timeline, simulate
from kernelproof.sass.stripping import without_lines
from kernelproof.sass.summary import Summary, summarise
from kernelproof.sass.ways import Way, Ways

__all__ = [
    "COPIES",
    "MMA",
    "WARPGROUP",
    "Analysis",
    "Block",
    "CodeLoop",
    "Control",
    "DisassemblyError",
    "Function",
    "Graph",
    "Instruction",
    "Issue",
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
    "Way",
    "Ways",
    "access",
    "analyse",
    "assembler",
    "count",
    "disassemble",
    "fixed",
    "hazards",
    "mma_shape",
    "pipe_use",
    "queue_names",
    "register_names",
    "scoreboard",
    "sections",
    "simulate",
    "spill_bytes",
    "summarise",
    "waits",
    "without_lines",
]
