"""Reads a cubin as a module of the emulator: each kernel's machine code, lowered."""

from __future__ import annotations

from pathlib import Path

from kernelproof.emulator.frontend.ptx import Function, Instr, Module, Reg, Sym, Variable
from kernelproof.emulator.machine_code import instructions  # noqa: F401
from kernelproof.emulator.machine_code.abi import Bank
from kernelproof.emulator.machine_code.lowering import Lowering, UnknownMachineCode
from kernelproof.emulator.machine_code.webs import separated
from kernelproof.sass import Function as MachineFunction
from kernelproof.sass import Instruction, disassemble
from kernelproof.sass.decoding import BYTES
from kernelproof.sass.flow import conditional


def read_cubin(path: Path) -> Module:
    """The kernels of a cubin, as a module that can be launched.

    Raises DisassemblyError if nvdisasm cannot read the file, UnknownMachineCode for an architecture, instruction or
    modifier that is not modelled.
    """
    functions = disassemble(path)
    kernels = {function.name: _lowered(function) for function in functions}
    sm = functions[0].sm
    return Module(target=sm, version="", kernels=kernels, functions={}, declared=set(), variables={}, files={}, text="")


def _lowered(function: MachineFunction) -> Function:
    resources = function.resources
    base = resources.parameter_base or 0
    parameters = [(f"parameter_{i}", base + at, size) for i, (at, size) in enumerate(resources.parameters)]
    bank = Bank.of(function.sm, parameters)
    if bank is None:
        raise UnknownMachineCode(f"{function.name}: machine code of {function.sm} is not executed yet")
    reachable = _reachable(function)
    boards = frozenset(f"SB{ins.control.write_barrier}" for ins in reachable if ins.name == "LDGDEPBAR")
    returns = tuple(ins.address + BYTES for ins in reachable if ins.name == "CALL")
    low = Lowering(bank, boards, returns)
    targets = {ins.target for ins in reachable if ins.target is not None} | set(returns)
    static = Variable(f"{function.name} static", "shared", resources.shared_bytes, 16)
    if resources.shared_bytes:  # a variable takes memory if an instruction names it
        low.body.append(Instr("mov.u32", ("mov", "u32"), (Reg(low.temp()), Sym(static.name)), None, 0, (), ""))
    for ins in reachable:
        if ins.address in targets:
            low.label(ins.address)
        low.lower(ins)
    body, kinds = separated(low.body, low.kinds)
    # An alignment for which each parameter lies at its offset, if those before it do.
    variables = [
        Variable(name, "param", size, (start - base) & (base - start) or 16) for name, start, size in parameters
    ]
    return Function(function.name, True, variables, [], 0, body, kinds, variables=[static], machine_code=True)


def _reachable(function: MachineFunction) -> list[Instruction]:
    """The instructions that the entry leads to, in the order of addresses. A return leads behind every call."""
    by_address = {ins.address: ins for ins in function.instructions}
    returns = [ins.address + BYTES for ins in function.instructions if ins.name == "CALL"]
    reached, pending = set[int](), [function.instructions[0].address]
    while pending:
        address = pending.pop()
        ins = by_address.get(address)
        if ins is None or address in reached:
            continue
        reached.add(address)
        if ins.name in ("BRA", "CALL") and ins.target is not None:
            pending.append(ins.target)
        if ins.name == "RET":
            pending += returns
        if ins.name not in ("BRA", "CALL", "RET", "EXIT") or conditional(ins):
            pending.append(address + BYTES)
    return [ins for ins in function.instructions if ins.address in reached]
