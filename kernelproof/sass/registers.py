"""Finds the registers that instructions read and write, and those that are live.

A set of registers is a bit mask, so that the data flow of a function takes milliseconds. Bits stand for R0 .. R254,
then uniform registers, predicates and uniform predicates (``STARTS``); zero registers and true predicates have no bit.
``register_names`` turns a mask into names. The tables of opcodes agree with nvdisasm's live ranges (``-plr``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.flow import Block, Graph
from kernelproof.sass.pipes import MMA, WARPGROUP, Pipe, access_bytes, mma_shape, operand_bits, pipe_use

STARTS = {"R": 0, "UR": 256, "P": 512, "UP": 520}  # the bit of register 0 of each file
VECTOR, UNIFORM = (1 << 256) - 1, (1 << 512) - (1 << 256)  # masks of the vector and of the uniform registers
STACK = 1 << 1  # R1, the stack pointer, is live up to the exit
REGISTER = re.compile(r"(?<![\w.])(UR|UP|R|P)(\d+)(\.64)?")


def _names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Opcodes whose operands are all read. (R2P writes predicates, which are handled apart.)
NO_RESULT = _names(
    "STG STS STL ST STSM STTM STAS LDGSTS RED REDG REDAS BAR BRA BRX BRXU JMP JMX CALL RET EXIT WARPSYNC NANOSLEEP "
    "BSSY BSYNC BREAK CCTL MEMBAR DEPBAR WARPGROUP UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UBLKCP UBLKRED UBLKPF "
    "UTCBAR UTCCP UTCSHIFT R2P UVIRTCOUNT KILL BPT RPCMOV ARRIVES UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA"
)
# Opcodes whose second operand is a result too if the first is a predicate.
SECOND_RESULT = _names(
    "LOP3 ULOP3 SHFL ATOMG ATOM MATCH ELECT R2UR UTCATOMSWS ISETP FSETP DSETP HSETP2 UISETP PSETP PLOP3 UPLOP3 UFSETP "
    "UPSETP USETP"
)
LOADS = _names("LDG LDS LDL LD LDSM LDC LDCU ULDC ATOMG ATOMS ATOM")
STORES = _names("STG STS STL ST STSM STAS RED REDG ATOMG ATOMS ATOM SYNCS")
# Opcodes whose operands are pairs of registers.
PAIRS = _names("DADD DMUL DFMA DSETP DMNMX FFMA2 FADD2 FMUL2")
TMA = _names("UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL")
GENERIC = _names("LD ST ATOM ATOMG RED REDG LDG STG")  # with modifier E their address has 64 bits
PREDICATES = {"PR": "P", "UPR": "UP"}  # all predicates of a file; an immediate operand chooses some of them


class RegisterAccess(NamedTuple):
    """Masks of the registers that an instruction reads and writes."""

    reads: int
    writes: int


class _Widths(NamedTuple):
    """Widths in registers: of each result, and of each source operand; further sources have the last width."""

    result: int
    sources: tuple[int, ...] = (1,)

    def source(self, at: int) -> int:
        """The width of the source operand with index ``at``."""
        return self.sources[min(at, len(self.sources) - 1)]


def register_names(mask: int) -> list[str]:
    """The names of the registers in a mask, in the order of its bits."""
    names = []
    for kind, start in STARTS.items():
        width = 8 if "P" in kind else 256
        bits = mask >> start & (1 << width) - 1
        while bits:
            low = bits & -bits  # the lowest bit that is set
            names.append(f"{kind}{low.bit_length() - 1}")
            bits ^= low
    return names


def access(instruction: Instruction) -> RegisterAccess:
    """The registers that an instruction reads, including its guard, and those that it writes."""
    return _access(instruction.opcode, instruction.operands, instruction.guard)


def address_reads(instruction: Instruction) -> int:
    """The registers that an instruction reads for its addresses and descriptors."""
    name, *modifiers = instruction.opcode.split(".")
    return reduce(
        or_,
        (_address(name, modifiers, item, at) for at, item in enumerate(instruction.operands) if "[" in item),
        0,
    )


@lru_cache(maxsize=1 << 16)
def _access(opcode: str, operands: tuple[str, ...], guard: str | None) -> RegisterAccess:
    """``access`` by the parts of an instruction on which it depends, so that equal instructions share the result."""
    name, *modifiers = opcode.split(".")
    results = _result_count(name, operands)
    widths = _widths(name, modifiers, operands)
    reads, writes = _mask(guard or "", 1), 0
    for at, operand in enumerate(operands):
        if operand in PREDICATES:
            selected = _selected_predicates(PREDICATES[operand], operands)
            reads, writes = (reads, writes | selected) if name == "R2P" else (reads | selected, writes)
        elif at < results:
            writes |= _mask(operand, 1 if _is_predicate(operand) else widths.result)
        elif "[" in operand:
            reads |= _address(name, modifiers, operand, at)
        else:
            reads |= _mask(operand, 1 if _is_predicate(operand) else widths.source(at - results))
    return RegisterAccess(reads, writes)


def _result_count(name: str, operands: tuple[str, ...]) -> int:
    """How many operands are results. These come first: a register and predicates, or predicates and a register."""
    if name in NO_RESULT or not operands or "[" in operands[0]:
        return 0
    count = 1
    if name in LOADS and operands[1:3] and operands[1][:1] == "R" and "[" in operands[-1]:
        return 2  # 256 bits: LDG.E.ENL2.256 R8, R4, [..]
    if _is_predicate(operands[0]):
        return 2 if name in SECOND_RESULT and len(operands) > 2 else 1
    while count <= 2 and count < len(operands) - 1 and _is_predicate(operands[count]) and operands[count][0] != "!":
        count += 1
    # Predicates of these are sources, wherever they are.
    return count if name not in ("SEL", "USEL", "FSEL", "MOV", "UMOV") else 1


def _is_predicate(operand: str) -> bool:
    """Whether an operand is a single predicate, such as ``!UP0``."""
    return operand.lstrip("!U").startswith("P") and operand not in PREDICATES


def _mask(operand: str, width: int) -> int:
    """The mask of the registers that an operand names. ``width``: how many registers a name stands for; those with
    ``.64`` stand for two."""
    mask = 0
    for kind, number, wide in REGISTER.findall(operand):
        mask |= (1 << (2 if wide else width)) - 1 << STARTS[kind] + int(number)
    return mask


def _selected_predicates(kind: str, operands: tuple[str, ...]) -> int:
    """The predicates of a file (``P`` or ``UP``) that the immediate operand selects; without one, all seven."""
    last = operands[-1]
    return (int(last, 16) if last.startswith("0x") else 0x7F) << STARTS[kind]


def _address(name: str, modifiers: list[str], operand: str, at: int) -> int:
    """The registers of an address or descriptor: ``desc[UR4][R2.64+UR8]``, ``[UR8]`` of TMA, ``gdesc[UR4].tnspB``.

    ``at``: its place among all operands of the instruction.
    """
    mask = 0
    for space, inner in re.findall(r"(\w*)\[([^\]]*)\]", operand):
        if space == "c":
            mask |= _mask(inner, 1)
            continue
        width = {"desc": 2, "gdesc": 2, "cx": 2}.get(space, 1)
        # The first descriptor of a wgmma, its second operand, holds those of A and of B.
        if space == "gdesc" and name in WARPGROUP and at == 1:
            width = 4
        if space == "" and name in TMA:
            width = _tma_width(name, modifiers, at)
        elif space == "" and name.startswith("UBLK"):
            width = 2
        elif space == "" and name in GENERIC and "E" in modifiers:
            base, *_ = inner.split("+")
            mask |= _mask(base, 2) if base.startswith("R") else 0
        # A pair of uniform registers is a 64-bit address (CCTL), or a 64-bit offset from one.
        if name == "CCTL" or (".64" in inner and "+UR" in inner):
            mask |= _mask("".join(re.findall(r"UR\d+", inner)), 2)
        mask |= _mask(inner, width)
    return mask


def _tma_width(name: str, modifiers: list[str], at: int) -> int:
    """How many uniform registers an operand of a TMA instruction has. The first operand has the shared address (not of
    prefetches), the mbarrier (of loads) and one coordinate per dimension; others are pairs."""
    dimensions = next((int(part[0]) for part in modifiers if re.fullmatch(r"\dD", part)), 0)
    first = 0 if name != "UTMACCTL" else -1  # UTMACCTL has no such operand
    return dimensions + {"UTMALDG": 2, "UTMAPF": 0}.get(name, 1) if at == first else 2


def _widths(name: str, modifiers: list[str], operands: tuple[str, ...]) -> _Widths:
    """How many registers each operand of an instruction has, apart from predicates and addresses."""
    opcode = ".".join((name, *modifiers))
    if name in MMA:
        return _mma_widths(opcode, operands)
    if name in LOADS or name in STORES:
        words = max(1, access_bytes(Instruction.bare(opcode)) // 4)
        if "ENL2" in modifiers:  # two operands, each with half of the words
            return _Widths(words // 2, (words // 2,))
        return _Widths(words if name in LOADS else 1, (words,))
    if name in ("LDTM", "STTM"):
        words = _tensor_memory_words(modifiers)
        return _Widths(words, (words,))
    if name in PAIRS or ("64" in modifiers and name not in ("SHF", "USHF")):
        return _Widths(2, (2,))
    plain = name.removeprefix("U")
    if plain == "IMAD" and "WIDE" in modifiers:
        return _Widths(2, (1, 1, 2))
    if plain == "IMAD" and "HI" in modifiers:
        return _Widths(1, (1, 1, 2))
    if name == "CS2R":
        return _Widths(1 if "32" in modifiers else 2)
    if name in ("RET", "BRX", "JMX"):
        return _Widths(1, (2,))
    if plain in ("F2F", "F2I", "I2F", "FRND"):
        return _conversion_widths(plain, modifiers)
    return _Widths(1)


def _conversion_widths(name: str, modifiers: list[str]) -> _Widths:
    """The widths of a conversion: 64-bit types take two registers."""
    floats = 2 if "F64" in modifiers else 1
    integers = 2 if "U64" in modifiers or "S64" in modifiers else 1
    if name == "FRND":
        return _Widths(floats, (floats,))
    if name == "F2F":  # F2F.F64.F32 converts F32 to F64
        kinds = [part for part in modifiers if part in ("F16", "F32", "F64", "BF16")]
        first, second = ([*kinds, "F32", "F32"])[:2]
        return _Widths(2 if first == "F64" else 1, (2 if second == "F64" else 1,))
    return _Widths(integers, (floats,)) if name == "F2I" else _Widths(floats, (integers,))


def _tensor_memory_words(modifiers: list[str]) -> int:
    """Registers per lane of tcgen05.ld and .st: those of its shape (1, 2 or 4), repeated as by ``x32``."""
    times = next((int(part[1:]) for part in modifiers if re.fullmatch(r"x\d+", part)), 1)
    shape = next((part for part in modifiers if part.startswith(("16dp", "32dp"))), "")
    return times * next((words for text, words in (("256bit", 4), ("128bit", 2)) if text in shape), 1)


def _mma_widths(opcode: str, operands: tuple[str, ...]) -> _Widths:
    """Registers per lane of A, B and the sums of an MMA, whose elements are spread over a warp or a warpgroup."""
    instruction = Instruction.bare(opcode)
    shape = mma_shape(instruction)
    if shape is None:
        return _Widths(1)
    m, n, k = shape
    lanes = 128 if instruction.name in WARPGROUP else 32
    bits = 64 if instruction.name == "DMMA" else operand_bits(instruction)
    sums = 64 if instruction.name == "DMMA" else 16 if "F16" in instruction.modifiers else 32
    # Each lane holds an equal share of each matrix, packed into registers of 32 bits.
    a, b, c = m * k * bits // lanes // 32, n * k * bits // lanes // 32, m * n * sums // lanes // 32
    if "SP" in instruction.modifiers:
        a //= 2
    if lanes == 128:  # B is in shared memory; so is A if its operand is a descriptor
        return _Widths(c, (a, c) if operands[1:2] and operands[1].startswith("gdesc") else (a, 1, c))
    return _Widths(max(1, c), (max(1, a), max(1, b), max(1, c), 1))


def read_operands(instruction: Instruction) -> list[tuple[int, bool]]:
    """For each source operand its vector registers, and whether it is marked ``.reuse``."""
    return _read_operands(instruction.opcode, instruction.operands)


@lru_cache(maxsize=1 << 16)
def _read_operands(opcode: str, operands: tuple[str, ...]) -> list[tuple[int, bool]]:
    """``read_operands`` by the parts of an instruction on which it depends."""
    results = _result_count(opcode.split(".", 1)[0], operands)
    name, *modifiers = opcode.split(".")
    widths = _widths(name, modifiers, operands)
    # Addresses take their width in vector registers from the operand alone; its place matters to uniform registers.
    return [
        (
            (_address(name, modifiers, operand, at) if "[" in operand else _mask(operand, widths.source(at))) & VECTOR,
            ".reuse" in operand,
        )
        for at, operand in enumerate(operands[results:])
    ]


# Pipes and loads whose instructions have no effect but to write their results. EFFECTS are exceptions on these pipes.
PURE = frozenset((Pipe.ALU, Pipe.FMA, Pipe.FP16, Pipe.FP64, Pipe.XU, Pipe.UNIFORM, Pipe.CONSTANT, Pipe.TENSOR))
PURE_LOADS = _names("LDG LDS LDSM LDL S2R S2UR SHFL")
EFFECTS = _names("ELECT VOTE VOTEU")


def unread_instructions(instructions: Sequence[Instruction], liveness: RegisterLiveness, sm: str) -> list[Instruction]:
    """Instructions that only write registers which no instruction reads.

    Arguments of a subroutine count as unread, because calls that return are not followed.
    """
    return [
        instruction
        for instruction, (_, writes), after in zip(instructions, liveness.accesses, liveness.after, strict=True)
        if writes and not writes & after and _is_pure(instruction, sm)
    ]


def _is_pure(instruction: Instruction, sm: str) -> bool:
    """Whether an instruction has no effect but to write its results."""
    if instruction.name in EFFECTS or instruction.name.startswith("UTC"):
        return False
    return instruction.name in PURE_LOADS or pipe_use(instruction, sm).pipe in PURE


class RegisterLiveness:
    """The registers that are live before and after each instruction of a function.

    ``accesses``, ``before`` and ``after`` have an item per instruction, in the order of addresses.
    """

    def __init__(self, graph: Graph) -> None:
        self.accesses = [access(instruction) for instruction in graph.function.instructions]
        self.before: list[int] = []
        self.after: list[int] = []
        entries = _entries(graph, self.accesses)
        for block in graph.blocks:
            live = _live_out(block, entries)
            at = len(self.before)
            points = _live_masks(block.instructions, self.accesses[at : at + len(block.instructions)], live)
            self.before += points[:-1]
            self.after += points[1:]

    @property
    def pressure(self) -> list[int]:
        """How many vector registers are in use at each instruction: those live after it, and those that it writes."""
        return [
            ((after | accessed.writes) & VECTOR).bit_count()
            for after, accessed in zip(self.after, self.accesses, strict=True)
        ]


def _live_masks(instructions: Sequence[Instruction], accesses: Sequence[RegisterAccess], live: int) -> list[int]:
    """The mask of live registers before each instruction of a block, and last at the block's end (``live``).

    A guarded instruction may not execute, so its result remains live before it.
    """
    points = [live]
    for instruction, (reads, writes) in zip(reversed(instructions), reversed(accesses), strict=True):
        live = (live if instruction.guard else live & ~writes) | reads
        points.append(live)
    return points[::-1]


def _entries(graph: Graph, accesses: Sequence[RegisterAccess]) -> list[int]:
    """The registers that are live at the start of each block."""
    # A block needs what it reads before writing it (``uses``), and what its followers need and it does not surely write
    # (``kills`` are the registers that it writes without a guard).
    uses, kills, at = [], [], 0
    for block in graph.blocks:
        own = accesses[at : at + len(block.instructions)]
        uses.append(_live_masks(block.instructions, own, 0)[0])
        pairs = zip(block.instructions, own, strict=True)
        kills.append(reduce(or_, (writes for instruction, (_, writes) in pairs if instruction.guard is None), 0))
        at += len(block.instructions)
    entries = [0] * len(graph.blocks)
    # Data flow runs backwards, so the last pending block is taken first. Masks only grow, so the loop ends.
    pending = set(range(len(graph.blocks)))
    while pending:
        index = max(pending)
        pending.discard(index)
        entry = uses[index] | _live_out(graph.blocks[index], entries) & ~kills[index]
        if entry != entries[index]:
            entries[index] = entry
            pending.update(graph.predecessors[index])
    return entries


def _live_out(block: Block, entries: Sequence[int]) -> int:
    """The registers that are live at the end of a block; at the exit of the function only the stack pointer is."""
    return reduce(or_, (entries[successor] for successor in block.successors), 0 if block.successors else STACK)
