"""Reads a cubin as a module of the emulator, by lowering each kernel's machine code to PTX."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kernelproof.emulator.frontend.instruction import needs_hopper
from kernelproof.emulator.frontend.ptx import Function, Imm, Instr, Label, Module, Reg, Sym, Variable
from kernelproof.emulator.machine_code import instructions  # noqa: F401
from kernelproof.emulator.machine_code.abi import Bank
from kernelproof.emulator.machine_code.data import Data, variables
from kernelproof.emulator.machine_code.idioms import REPLACED, replaced_addresses, with_allocations
from kernelproof.emulator.machine_code.instructions.control import PRINT
from kernelproof.emulator.machine_code.instructions.tensor_memory import load_scoreboards
from kernelproof.emulator.machine_code.lowering import Lowering, UnknownMachineCode
from kernelproof.emulator.machine_code.webs import with_webs
from kernelproof.emulator.state.sites import Frame, Hazard, Site
from kernelproof.sass import Function as MachineFunction
from kernelproof.sass import Instruction, disassemble, hazards
from kernelproof.sass.decoding import BYTES
from kernelproof.sass.flow import ENDS, JUMPS, conditional
from kernelproof.sass.image import image


def read_cubin(path: Path) -> Module:
    """The kernels of a cubin, as a module that can be launched.

    Raises DisassemblyError if nvdisasm cannot read the file, UnknownMachineCode for an architecture, instruction or
    modifier that is not modelled.
    """
    functions = disassemble(path)
    data = image(path)
    if data.relocatable:
        raise UnknownMachineCode(f"{path}: is not linked; link it by nvcc, or compile it without -rdc=true")
    entries = data.kernels()
    kernels = {item.name: _lowered(item, Data(data, item.name)) for item in functions if item.name in entries}
    return Module(
        target=functions[0].sm, version="", kernels=kernels, functions={}, declared=set(),
        variables={variable.name: variable for variable in variables(data)}, files={},
        # Launches of equal texts share their variables, and a cubin has no text; so its digest takes that place.
        text=f"cubin {hashlib.sha256(path.read_bytes()).hexdigest()}",
    )  # fmt: skip


def _lowered(function: MachineFunction, data: Data) -> Function:
    """A kernel as a PTX function. Raises UnknownMachineCode for code that is not modelled."""
    resources = function.resources
    base = resources.parameter_base or 0
    parameters = [(f"parameter_{i}", base + offset, size) for i, (offset, size) in enumerate(resources.parameters)]
    bank = Bank.of(function.sm, base, parameters, resources.whole_stack_bytes)
    if bank is None:
        raise UnknownMachineCode(f"{function.name}: machine code of {function.sm} is not executed yet")
    schedule = hazards(function)
    function = replace(function, instructions=tuple(with_allocations(function.instructions)))
    # An allocation is executed as one instruction, so the schedule of ptxas' code for it is not judged.
    replaced = replaced_addresses(function.instructions)
    schedule = [each for each in schedule if not any(each.earlier.address in addresses for addresses in replaced)]
    reachable = _reachable(function, data.functions(), data.system_functions() == {PRINT})
    # LDGDEPBAR commits a group of asynchronous copies to a scoreboard, UTMACMDFLUSH one of bulk stores.
    copy_boards = frozenset(f"SB{ins.control.write_barrier}" for ins in reachable if ins.name == "LDGDEPBAR")
    bulk_boards = frozenset(f"SB{ins.control.read_barrier}" for ins in reachable if ins.name == "UTMACMDFLUSH")
    returns = tuple(ins.address + BYTES for ins in reachable if ins.name == "CALL")
    low = Lowering(
        bank, data, function.instructions, copy_boards, bulk_boards, load_scoreboards(reachable, function.sm), returns,
        resources.whole_stack_bytes,
    )  # fmt: skip
    # The addresses that need a label: a call through a register may lead to any function.
    targets = {target for ins in reachable for target in (ins.target, *ins.targets)} | set(returns)
    if any(ins.name == "CALL" and ins.target is None for ins in reachable):
        targets |= set(data.functions())
    stack = Variable(f"{function.name} stack", "local", low.stack, 16)
    static = Variable(f"{function.name} static", "shared", resources.shared_bytes, 16)
    if resources.shared_bytes:  # a variable gets memory only if an instruction names it
        low.body.append(Instr("mov.u32", ("mov", "u32"), (Reg(low.temp()), Sym(static.name)), None, 0, (), ""))
    for ins in reachable:
        if ins.address in targets:
            low.label(ins.address)
        low.lower(ins)
    body, kinds = with_webs(_without_rank(reachable, low.body), low.kinds)
    # Parameters may have gaps between them. Each but the first is aligned to its own offset, so that it lies there.
    params = [Variable(name, "param", size, start - bank.start or 16) for name, start, size in parameters]
    attributes: dict[str, tuple[int, ...]] = {}
    if resources.cluster:
        attributes["reqnctapercluster"] = resources.cluster
    if any(ins.name == "USETMAXREG" for ins in reachable):
        attributes["maxnreg"] = (resources.registers,)  # how many a thread has at the start
    return Function(
        function.name, True, params, [], 0, body, kinds, attributes=attributes,
        variables=[stack, static, *data.literals], machine_code=True,
        hazards=tuple(Hazard(found.why, _site(found.earlier), _site(found.later)) for found in schedule),
    )  # fmt: skip


def _site(instruction: Instruction) -> Site:
    """An instruction of machine code as the site of a finding."""
    frames = tuple(Frame(line.file, line.line) for line in instruction.source)
    return Site(instruction.address, instruction.text, frames, True, instruction.ptx_line)


_RANK = "%cluster_ctarank"
_GENERIC_ACCESSES = frozenset(("LD", "ST", "ATOM", "RED"))  # they may reach the shared memory of other CTAs


def _without_rank(reachable: Sequence[Instruction], body: list[Instr | Label]) -> list[Instr | Label]:
    """The body with rank 0 in place of the CTA's rank, if it uses the rank only in shared addresses and nothing else of
    clusters. Then no unit of sm_90 is needed."""
    instrs = [item for item in body if isinstance(item, Instr)]
    ranks = {id(ins) for ins in instrs if ins.parts == ("mov", "b32") and _names_rank(ins)}
    if any(ins.name in _GENERIC_ACCESSES for ins in reachable) or any(
        needs_hopper(ins) for ins in instrs if id(ins) not in ranks
    ):
        return body
    return [
        replace(item, operands=(item.operands[0], Imm(0))) if isinstance(item, Instr) and id(item) in ranks else item
        for item in body
    ]


def _names_rank(ins: Instr) -> bool:
    """Does a move read the CTA's rank?"""
    source = ins.operands[1]
    return isinstance(source, Reg) and source.name == _RANK


def _reachable(function: MachineFunction, functions: Sequence[int], system_returns: bool) -> list[Instruction]:
    """The instructions that can be reached from the entry, in the order of addresses. A return may lead to the address
    after any call, and a call through a register to any of ``functions``. ``system_returns``: whether functions of the
    system return."""
    by_address = {ins.address: ins for ins in function.instructions}
    returns = [ins.address + BYTES for ins in function.instructions if ins.name == "CALL"]
    reached, pending = set[int](), [function.instructions[0].address]
    while pending:
        address = pending.pop()
        ins = by_address.get(address)
        if ins is None or address in reached:
            continue
        reached.add(address)
        if ins.name in JUMPS | REPLACED | {"CALL"}:
            pending += [*ins.targets, *([] if ins.target is None else [ins.target])]
        if ins.name == "CALL" and ins.target is None:
            pending += functions
        if ins.name == "RET":
            pending += returns
        if ins.name == "CALL" and "ABS" in ins.modifiers and system_returns:
            pending.append(address + BYTES)
        if ins.name not in JUMPS | ENDS | REPLACED | {"CALL"} or conditional(ins):
            pending.append(address + BYTES)
    return [ins for ins in function.instructions if ins.address in reached]
