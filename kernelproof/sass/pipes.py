"""Says which unit (pipe) of an SM executes an instruction, and for how many cycles the instruction occupies it.

An SM has four sub-cores. Each has pipes of its own and one dispatch port, which issues one warp's instruction per
cycle. Loads, stores, shuffles, special registers and barriers go through the sub-core's address unit to a memory unit
that the four share.

Sources: NVIDIA's Nsight Compute Profiling Guide (section "Pipelines") says which pipe executes which instructions. Its
CUDA C++ Programming Guide (table "Throughput of Native Arithmetic Instructions") has results per clock and SM, which
are divided by four sub-cores and 32 lanes here. If neither names an instruction, the output of ptxas shows its pipe:
ptxas spaces two neighbours on one pipe by the pipe's interval. For example, it issues VIADD two cycles after IMAD and
one after IADD3, so VIADD shares IMAD's pipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kernelproof.ground.chips import CAPABILITIES, MMA_FLOPS_BYTES, SUB_CORES, Chip
from kernelproof.sass.decoding import Instruction

LANES = 32
SHARED_BYTES = 128  # read or written per cycle and SM: 32 banks of 4 bytes (QuACK, gpu_pipe_microbench_notes.md)
# Cycles of a memory instruction in a sub-core's address unit, and least cycles in the SM's memory unit. Source: arXiv
# 2503.20481.
ADDRESS_CYCLES = 4
SHARED_CYCLES = 2
UTC_ISSUE = 11  # cycles from one tcgen05.mma to the next: arXiv 2512.02189


class Pipe(StrEnum):
    """The units that execute instructions.

    ``SHARED``: the SM's unit of shared memory and L1, for memory, shuffle and barrier instructions. ``GLOBAL``: the
    same for instructions that also go to the L2. ``NONE``: only the dispatch port (NOP, waits for scoreboards).
    """

    TENSOR = "tensor"
    ALU = "alu"
    FMA = "fma"
    FP16 = "fp16"
    FP64 = "fp64"
    XU = "xu"
    UNIFORM = "uniform"
    BRANCH = "branch"
    SHARED = "shared"
    GLOBAL = "global"
    CONSTANT = "constant"
    TMA = "tma"
    NONE = "none"


@dataclass(frozen=True)
class PipeUse:
    """Cycles for which one warp's instruction occupies units of its sub-core and SM.

    ``issue_cycles``: the dispatch port. ``busy_cycles``: the pipe, which belongs to the sub-core, or to the SM if
    ``shared_by_sm``. ``address_cycles``: the sub-core's address unit. ``data_cycles``: the SM's banks of shared memory,
    without conflicts; for a wgmma the operands that it reads there, a quarter of them for each of its four warps.
    """

    pipe: Pipe
    issue_cycles: int = 1
    busy_cycles: float = 1.0
    shared_by_sm: bool = False
    address_cycles: int = 0
    data_cycles: float = 0.0


def pipe_use(instruction: Instruction, sm: str, chip: Chip | None = None) -> PipeUse:
    """The pipe of an instruction on ``sm_80`` .. ``sm_120f``, and for how long the instruction occupies it.

    ``chip``: the GPU model, which matters if it has less tensor throughput than others of its sm (GeForce with f32
    sums, H20). By default it is the model of the sm with the highest throughput.
    """
    name, sm = instruction.name, sm.rstrip("af")
    if name in MMA:
        return _tensor(instruction, sm, chip)
    if name in MEMORY:
        return _memory(instruction)
    pipe = PIPES.get(name) or (Pipe.UNIFORM if name.startswith("U") and name[1:] in PIPES else Pipe.ALU)
    # As ptxas spaces it, CS2R runs apart from the ALU on sm_8x and sm_12x.
    if name == "CS2R" and not sm.startswith(("sm_9", "sm_10")):
        return PipeUse(Pipe.NONE)
    if name in SECOND_FP32_LANES and sm.startswith("sm_12"):
        return PipeUse(Pipe.FMA)
    if pipe is Pipe.FP16 and sm != "sm_80":
        # Only GA100 has separate FP16 lanes. From GA10x on the FMA pipe computes paired halves.
        pipe = Pipe.FMA
        return PipeUse(pipe, busy_cycles=HALF_CYCLES.get(sm, 2))
    return PipeUse(pipe, busy_cycles=_cycles(instruction, pipe, sm), shared_by_sm=pipe in SHARED_PIPES)


# Cycles of arithmetic on pairs of halves, by sm; 2 for others. 8.0, 9.0 and 10.0 compute 256 results per clock and SM,
# others 128; a lane has two results.
HALF_CYCLES = {"sm_80": 1, "sm_90": 1, "sm_100": 1}
# Cycles of FP32 arithmetic, 1 for others: 8.0 computes 64 results per clock and SM, others 128. IMAD has 64 on all.
SINGLE_CYCLES = {"sm_80": 2}
# Cycles of FP64 arithmetic, 64 for others: 32 results per clock and SM on 8.0, 64 on 9.0 and 10.0, 2 on the others.
DOUBLE_CYCLES = {"sm_80": 4, "sm_90": 2, "sm_100": 2}
# Instructions that sm_120 executes on its second set of FP32 lanes: ptxas issues them one cycle after ALU or IMAD.
SECOND_FP32_LANES = frozenset(("IADD", "ISETP", "SEL", "MOV", "FMNMX", "FSETP", "VIMNMX"))
SHARED_PIPES = frozenset((Pipe.CONSTANT, Pipe.TMA))  # pipes that the sub-cores share


def _cycles(instruction: Instruction, pipe: Pipe, sm: str) -> float:
    """Cycles for which a warp's instruction occupies a pipe that is neither the tensor core nor a memory unit."""
    if pipe is Pipe.FMA:
        return SINGLE_CYCLES.get(sm, 1) if instruction.name in ("FFMA", "FADD", "FMUL", "FFMA32I", "FSWZADD") else 2
    if pipe is Pipe.FP16:
        return HALF_CYCLES.get(sm, 2)
    if pipe is Pipe.FP64:
        return DOUBLE_CYCLES.get(sm, 64)
    if pipe is Pipe.XU:
        return 8  # 16 results per clock and SM
    if pipe is Pipe.UNIFORM:
        return 1 if sm.startswith("sm_12") or (instruction.name == "UMOV" and not sm.startswith("sm_8")) else 2
    return 2 if pipe is Pipe.ALU else 1


MMA = frozenset(
    ("HMMA", "IMMA", "BMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA", "BGMMA", "UTCHMMA", "UTCIMMA",
     "UTCQMMA", "UTCOMMA", "UTCMXQMMA")
)  # fmt: skip
WARPGROUP = frozenset(("HGMMA", "QGMMA", "IGMMA", "BGMMA"))
ELEMENT_BITS = {"Q": 8, "I": 8, "B": 1, "O": 4}  # bits of an operand's element, by the first letter of the opcode


def mma_shape(instruction: Instruction) -> tuple[int, int, int] | None:
    """m, n and k of an MMA of a warp (``16816``) or of a warpgroup (``64x128x16``). None if they are in a descriptor
    (tcgen05)."""
    for modifier in instruction.modifiers:
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", modifier):
            m, n, k = map(int, match.groups())
            return m, n, k
        if match := re.fullmatch(r"(16|8)(8)(\d+)", modifier):
            m, n, k = map(int, match.groups())
            return m, n, k
    return None


def _tensor(instruction: Instruction, sm: str, chip: Chip | None) -> PipeUse:
    """The use of the tensor core by an MMA, from its FMAs and those that a sub-core's tensor core makes per clock."""
    shape = mma_shape(instruction)
    if shape is None:
        return PipeUse(Pipe.TENSOR, busy_cycles=UTC_ISSUE, shared_by_sm=True)
    m, n, k = shape
    if instruction.name == "DMMA":
        # FP64: 19.5 TFLOP/s of an A100 and 67 of an H100 (data sheets) are 64 and 128 FMA per clock and SM.
        return PipeUse(Pipe.TENSOR, busy_cycles=m * n * k / (32 if sm.startswith("sm_9") else 16))
    warpgroup = instruction.name in WARPGROUP
    fma = _tensor_flops(instruction, sm, chip, warpgroup) / 2 / SUB_CORES  # per clock and sub-core
    if "SP" in instruction.modifiers:
        fma *= 2  # the zeros of a sparse A, half of it, are not multiplied
    if not warpgroup:
        return PipeUse(Pipe.TENSOR, busy_cycles=m * n * k / fma)
    operands = [operand for operand in instruction.operands[1:3] if operand.startswith("gdesc")]
    data_cycles = sum(_operand_bytes(instruction, shape, len(operands))) / SHARED_BYTES
    # The four sub-cores share the FMAs. If n is below 64, reading A from shared memory takes longer than they do.
    fma_cycles = m * n * k / SUB_CORES / fma
    return PipeUse(Pipe.TENSOR, busy_cycles=max(fma_cycles, data_cycles), data_cycles=data_cycles / SUB_CORES)


def _operand_bytes(instruction: Instruction, shape: tuple[int, int, int], descriptors: int) -> tuple[float, float]:
    """Bytes of A and of B that a warpgroup's MMA reads from shared memory. A may be in registers instead."""
    m, n, k = shape
    size = operand_bits(instruction) / 8
    registers = instruction.operands[1:2] and instruction.operands[1].startswith("R")
    return (0.0 if registers or not descriptors else m * k * size), n * k * size


def operand_bits(instruction: Instruction) -> int:
    """Bits of an element of A and B, by an MMA's opcode."""
    return 32 if "TF32" in instruction.modifiers else ELEMENT_BITS.get(instruction.name.removeprefix("UTC")[0], 16)


def _tensor_flops(instruction: Instruction, sm: str, chip: Chip | None, warpgroup: bool) -> float:
    """FLOP per clock and SM of the chip, or by default of the sm's model with the highest throughput."""
    size = operand_bits(instruction) / 8
    if chip is not None:
        fp32_sums = "F32" in instruction.modifiers
        return chip.tensor_flops(fp32_sums, size) if warpgroup else chip.mma_sync_flops(fp32_sums, size)
    capability = next(capability for capability in CAPABILITIES.values() if capability.sm == sm)
    return capability.mma_flops * (1.0 if warpgroup else capability.mma_sync_share) * MMA_FLOPS_BYTES / size


SHARED_ACCESSES = frozenset(("LDSM", "LDS", "STS", "STSM", "ATOMS", "LDSMT"))
GLOBAL_ACCESSES = frozenset(("LDG", "STG", "LD", "ST", "LDL", "STL", "LDGSTS", "ATOMG", "ATOM", "RED", "REDG", "CCTL",
                             "LDGMC", "REDAS", "STAS", "CCTLL", "CCTLT"))  # fmt: skip
# Other instructions of the memory unit, with the bytes that each lane moves: shuffles, special registers, barriers.
EXCHANGES = {"SHFL": 4, "S2R": 0, "S2UR": 0, "BAR": 0, "SYNCS": 0, "LDGDEPBAR": 0, "ARRIVES": 0, "UCGABAR_ARV": 0,
             "UCGABAR_WAIT": 0, "REDUX": 8, "CREDUX": 8, "MATCH": 8, "LDTM": 0, "STTM": 0}  # fmt: skip
MEMORY = SHARED_ACCESSES | GLOBAL_ACCESSES | EXCHANGES.keys()


def _memory(instruction: Instruction) -> PipeUse:
    """The use of the memory unit by a load, a store or an exchange between lanes."""
    name = instruction.name
    size = EXCHANGES[name] if name in EXCHANGES else access_bytes(instruction)
    data = LANES * size / SHARED_BYTES
    return PipeUse(
        Pipe.GLOBAL if name in GLOBAL_ACCESSES else Pipe.SHARED,
        busy_cycles=max(SHARED_CYCLES, data),
        shared_by_sm=True,
        address_cycles=ADDRESS_CYCLES,
        data_cycles=data,
    )


def access_bytes(instruction: Instruction) -> int:
    """Bytes that one lane loads or stores."""
    if instruction.name in ("LDSM", "STSM"):
        return 4 * int(next((part for part in instruction.modifiers if part in ("2", "4")), "1"))
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return next((widths[part] for part in instruction.modifiers if part in widths), 4)


def _table() -> dict[str, Pipe]:
    """The pipe of each opcode. Opcodes that are missing here run on the ALU."""
    names = {
        # Bit manipulation, logic, and integers except products. From Ampere on also FP32 to FP16 (F2FP).
        Pipe.ALU: "IADD3 IADD IADD32I IABS LOP3 LOP LEA SHF SHL SHR SEL FSEL PRMT ISETP FSETP ICMP PLOP3 P2R R2P IMNMX "
        "IMNMX3 VIMNMX VIMNMX3 VIADDMNMX VHMNMX FMNMX FMNMX3 F2FP F2IP I2IP I2FP LOP32I MOV MOV32I CS2R "
        "SGXT BMSK VOTE R2UR ELECT VABSDIFF VABSDIFF4 SCATTER GATHER PSETP MOVM",
        Pipe.FMA: "FFMA FADD FMUL FFMA32I FADD32I FMUL32I FSWZADD IMAD VIADD IMUL IDP IDP4A FFMA2 FADD2 FMUL2 IMAD32I",
        Pipe.FP16: "HADD2 HMUL2 HFMA2 HADD2_32I HFMA2_32I HMUL2_32I HSET2 HSETP2 HMNMX2 HFMA2_MMA",
        Pipe.FP64: "DADD DMUL DFMA DSETP DMNMX",
        # Special functions, conversions between widths, bit counts, and FCHK: ptxas spaces it and MUFU by this pipe's
        # interval, and waits for both by the scoreboard of MUFU.
        Pipe.XU: "MUFU F2F F2I I2F I2I FRND POPC FLO BREV F2FS FCHK",
        Pipe.BRANCH: "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSSY BSYNC BREAK BMOV WARPSYNC YIELD NANOSLEEP "
        "RPCMOV WARPGROUP WARPGROUPSET ENDCOLLECTIVE BPT PREEXIT ACQBULK RTT",
        Pipe.CONSTANT: "LDC LDCU ULDC",
        Pipe.GLOBAL: "MEMBAR ERRBAR CGAERRBAR FENCE UTMACMDFLUSH",
        Pipe.TMA: "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UBLKCP UBLKRED UBLKPF UTCBAR UTCATOMSWS UTCCP UTCSHIFT",
        Pipe.NONE: "NOP DEPBAR USETMAXREG SETMAXREG PMTRIG UVIRTCOUNT ULEPC LEPC SETCTAID DEPBAR2",
    }
    table = {name: pipe for pipe, text in names.items() for name in text.split()}
    uniform = (
        "UIADD3 UIMAD ULEA ULOP3 USHF USEL UMOV UISETP UPLOP3 UPRMT UFLO UPOPC UBREV UBMSK USGXT UP2UR UR2UP UF2FP "
        "UIABS UVIADD UVIMNMX UVIADDMNMX UFADD UFFMA UFMUL UFSETP UFSEL UFMNMX UI2F UF2I UMEMSETS USETSHMSZ UPSETP "
        "UI2FP UF2F UFRND UREDUX ULOP32I ULOP UCLEA VOTEU UGETNEXTWORKID"
    )
    return table | dict.fromkeys(uniform.split(), Pipe.UNIFORM)


PIPES = _table()
