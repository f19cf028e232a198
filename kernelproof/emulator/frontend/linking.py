"""Links modules that were compiled separately into one, by the rules of PTX linkage (PTX ISA, "Linking Directives").

A name without a linkage directive belongs to its module. ``.visible`` defines it for all modules, ``.extern`` uses a
definition in another module, and of several ``.weak`` definitions the first one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kernelproof.emulator.frontend.ptx import (
    Function,
    Instr,
    Label,
    Linkage,
    LinkError,
    Mem,
    Module,
    Operand,
    Sym,
    TensorOperand,
    Variable,
    Vec,
)
from kernelproof.emulator.state.mangled import plain_name


def link(modules: Sequence[Module]) -> Module:
    """One module with all kernels, functions and variables of some modules. An instruction's PTX line still refers to
    the text of its own module.

    Raises LinkError for a name that two modules define, and for a variable that none defines.
    """
    out = Module("", "", {}, {}, set(), {}, {}, "\n".join(module.text for module in modules))
    out.target = max((module.target for module in modules), default="")
    out.version = max((module.version for module in modules), default="")
    for number, module in enumerate(modules, 1):
        _add(out, _rename_locals(module, out.linkage, number))
    missing = [plain_name(name) for name, linkage in out.linkage.items() if linkage is Linkage.EXTERN]
    if missing:
        raise LinkError(f"no file defines the variable {', '.join(missing)}, which is declared extern")
    out.declared = set().union(*(module.declared for module in modules)) - out.functions.keys()
    return out


def _add(out: Module, module: Module) -> None:
    """Add a module to ``out``. Its local names must differ from all names there."""
    for name, linkage in module.linkage.items():
        before = out.linkage.get(name)
        if before is Linkage.STRONG and linkage is Linkage.STRONG:
            raise LinkError(f"two files define {plain_name(name)}: make it static or inline")
        if before not in (None, Linkage.EXTERN) and linkage is not Linkage.STRONG:
            continue  # the present definition counts
        out.linkage[name] = linkage
        for source, target in ((module.kernels, out.kernels), (module.functions, out.functions)):
            if name in source:
                target[name] = source[name]
        if name in module.variables:
            out.variables[name] = module.variables[name]


def _rename_locals(module: Module, present: Mapping[str, Linkage], number: int) -> Module:
    """The module, which is the ``number``-th, with names changed so that no local one equals a name in ``present``, and
    no name equals a local one there."""
    names = {
        name: f"{name}@@file{number}"
        for name, linkage in module.linkage.items()
        if name in present and Linkage.LOCAL in (linkage, present[name])
    }
    if not names:
        return module
    return replace(
        module,
        kernels={names.get(name, name): _rename_function(function, names) for name, function in module.kernels.items()},
        functions={
            names.get(name, name): _rename_function(function, names) for name, function in module.functions.items()
        },
        variables={
            names.get(name, name): _rename_variable(variable, names) for name, variable in module.variables.items()
        },
        linkage={names.get(name, name): linkage for name, linkage in module.linkage.items()},
    )


def _rename_function(function: Function, names: Mapping[str, str]) -> Function:
    """A function with its name and symbols renamed."""
    body: list[Instr | Label] = [
        replace(item, operands=tuple(_rename_operand(op, names) for op in item.operands))
        if isinstance(item, Instr)
        else item
        for item in function.body
    ]
    targets = {
        name: tuple(names.get(target, target) for target in targets_of_list)
        for name, targets_of_list in function.branch_targets.items()
    }
    return replace(function, name=names.get(function.name, function.name), body=body, branch_targets=targets)


def _rename_variable(variable: Variable, names: Mapping[str, str]) -> Variable:
    """A variable with its name, and the symbols in its initialiser, renamed."""
    pointers = tuple((offset, names.get(symbol, symbol), addend) for offset, symbol, addend in variable.pointers)
    return replace(variable, name=names.get(variable.name, variable.name), pointers=pointers)


def _rename_operand(operand: Operand, names: Mapping[str, str]) -> Operand:
    """An operand with its symbols renamed."""
    if isinstance(operand, Sym):
        return Sym(names.get(operand.name, operand.name), operand.offset)
    if isinstance(operand, Mem | TensorOperand) and isinstance(operand.base, Sym):
        return operand._replace(base=Sym(names.get(operand.base.name, operand.base.name), operand.base.offset))
    if isinstance(operand, Vec):
        return Vec(tuple(_rename_operand(item, names) for item in operand.items))
    return operand
