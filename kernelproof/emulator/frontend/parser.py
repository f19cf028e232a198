"""Parses PTX text into a ``Module``.

Only syntax is checked here. The meaning of an opcode is defined where its handler is registered (``instruction``).
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import dataclass, field

from kernelproof.emulator.frontend.locations import Locations
from kernelproof.emulator.frontend.operands import literal, operands
from kernelproof.emulator.frontend.ptx import (
    GRID_WORKSPACE,
    TYPE_BYTES,
    Function,
    Instr,
    Label,
    Linkage,
    Module,
    Operand,
    PtxError,
    Reg,
    Sym,
    Variable,
)
from kernelproof.emulator.state.sites import Frame

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_BRACE = re.compile(r"[{}]")
_SPACE = re.compile(r"\s*")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc)\b[ \t]*([^\n]*)")
_FUNC = re.compile(r"((?:\.(?:visible|weak|extern|common|internal)\s+)*)\.(entry|func)\b")
_NAME = re.compile(r"[\w$%]+(?:\.\w+)*")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%]+)\s*")
_OPCODE = re.compile(r"[a-zA-Z][\w.:]*")
_DECL = re.compile(
    r"(?:\.(?:visible|weak|extern|common|internal)\s+)*\.(global|const|shared|local|param|reg)\b(.*)", re.S
)
# Groups: (1) modifiers, (2) type, (3) names, extents and initialiser.
_DECL_BODY = re.compile(
    r"\s*((?:\.(?:align|attribute|ptr|managed|space|unified)\b\s*(?:\d+|\([^)]*\))?\s*|\.(?:global|const|shared|local|v2|v4)\b\s*)*)"
    r"\.(\w+)\s*(.*)",
    re.S,
)
# What a parameter's declaration says about the memory that the parameter points to.
_POINTEE = re.compile(r"^(?:\.(?:ptr|global|const|shared|local|generic)\b\s*|\.align\s+\d+\s*)+")
# Attributes of a kernel, and their numbers.
_ATTRIBUTE = re.compile(
    r"\.(maxntid|reqntid|minnctapersm|maxnctapersm|maxnreg|reqnctapercluster|maxclusterrank|noreturn|explicitcluster"
    r"|abi_preserve\w*|blocksareclusters|pragma)\b[ \t]*([^\n{.]*)"
)


def parse(text: str) -> Module:
    """Parse the text of a PTX file. Raises PtxError, which names the line, for text that is not PTX."""
    return _Parser(text).module()


class _Parser:
    """Reads a file from left to right. Offsets are those of characters in ``text``, in which comments are blanked.
    Methods raise PtxError for what they do not understand."""

    def __init__(self, text: str) -> None:
        self.original = text
        self.text = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.files: dict[int, str] = {
            int(m[1]): m[2] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)
        }
        self.locations = Locations(text, self.files)
        self.scopes = 0
        # A cache of operands by their text. It is not used inside of scopes, where equal names may be other registers.
        self.operands_of: dict[str, tuple[Operand, ...]] = {}

    def skip(self, offset: int) -> int:
        """The next offset that is not white space."""
        space = _SPACE.match(self.text, offset)
        return offset if space is None else space.end()

    def line(self, offset: int) -> int:
        """The number of the line, from 1 on, at an offset."""
        return bisect_right(self.newlines, offset - 1) + 1 if offset else 1

    def module(self) -> Module:
        """Parse the complete text."""
        text, offset, end = self.text, 0, len(self.text)
        out = Module("", "", {}, {}, set(), {}, self.files, self.original)
        while True:
            offset = self.skip(offset)
            if offset >= end:
                break
            directive = _LINE_DIRECTIVE.match(text, offset)
            if directive is not None:
                if directive[1] == "target":
                    out.target = directive[2].split(",")[0].strip()
                elif directive[1] == "version":
                    out.version = directive[2].strip()
                offset = directive.end()
                continue
            if text.startswith(".section", offset):  # information for debuggers
                offset = self.closing(text.index("{", offset)) + 1
                continue
            func = _FUNC.match(text, offset)
            if func is not None:
                offset = self.function(out, offset, func)
                continue
            if text[offset] == ".":
                stop = self.statement_end(offset)
                statement = text[offset:stop]
                if _DECL.match(statement) is not None:
                    for variable in self.declaration(statement, offset)[1]:
                        # A variable may be declared (.extern) and then defined; the definition counts.
                        if variable.name not in out.variables or variable.size:
                            out.variables[variable.name] = variable
                            out.linkage[variable.name] = _linkage(statement, variable)
                offset = stop + 1
                continue
            raise PtxError(self.line(offset), f"not PTX: {text[offset : offset + 40].splitlines()[0]!r}")
        if "%envreg" in text:
            # %envreg1 and %envreg2 are the address of this workspace, in which cooperative groups count arrivals. Its
            # first word holds the size, 8 bytes; the second one counts arrivals, none at first.
            out.variables[GRID_WORKSPACE] = Variable(GRID_WORKSPACE, "global", 8, 8, b"\x08" + bytes(7))
            out.linkage[GRID_WORKSPACE] = Linkage.WEAK
        if not out.target:
            raise PtxError(1, "no .target directive: this is not a PTX file")
        return out

    def statement_end(self, offset: int) -> int:
        """The offset of the semicolon that ends a statement."""
        stop = self.text.find(";", offset)
        if stop < 0:
            raise PtxError(self.line(offset), "statement without ';'")
        return stop

    def closing(self, offset: int) -> int:
        """The offset of the brace that closes the opening brace at ``offset``."""
        depth = 0
        for m in _BRACE.finditer(self.text, offset):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                return m.start()
        raise PtxError(self.line(offset), "'{' without '}'")

    def declaration(self, statement: str, offset: int) -> tuple[str, list[Variable]]:
        """The state space and the variables of a declaration. For ``.reg``, ``Variable.space`` is the register's
        type."""
        line = self.line(offset)
        m = _DECL.match(statement)
        assert m is not None
        space = m[1]
        body = _DECL_BODY.match(m[2])
        if body is None:
            raise PtxError(line, f"declaration not understood: {statement.strip()[:60]!r}")
        # .ptr, a space and an alignment after a parameter's type describe the memory that it points to; they are
        # dropped.
        modifiers, kind, rest = body[1], body[2], _POINTEE.sub("", body[3])
        if kind not in TYPE_BYTES:
            raise PtxError(line, f"unknown type .{kind}")
        unit = TYPE_BYTES[kind] * (2 if ".v2" in modifiers else 4 if ".v4" in modifiers else 1)
        align_m = re.search(r"\.align\s+(\d+)", modifiers)
        align = int(align_m[1]) if align_m is not None else unit
        if space == "reg":
            return space, [Variable(n.strip(), kind, unit, align, line=line) for n in rest.split(",") if n.strip()]
        name, _, initialiser = rest.partition("=")
        names = name.split(",") if "[" not in name else [name]
        out = []
        for declared in names:
            m2 = re.match(r"\s*([\w$%.]+)\s*((?:\[\s*\d*\s*\]\s*)*)$", declared.strip())
            if m2 is None:
                raise PtxError(line, f"declaration not understood: {statement.strip()[:60]!r}")
            size = unit
            for extent in re.findall(r"\[\s*(\d*)\s*\]", m2[2]):
                size *= int(extent) if extent else 0
            init, pointers = self.initialiser(initialiser, kind, size, line) if initialiser else (None, ())
            managed = ".managed" in modifiers
            out.append(Variable(m2[1], space, size, align, init, pointers, line, kind, managed))
        return space, out

    def initialiser(self, text: str, kind: str, size: int, line: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
        """The bytes of an initialiser, padded to ``size``, and its addresses (see ``Variable.pointers``)."""
        data, pointers, unit = bytearray(), [], TYPE_BYTES[kind]
        for item in re.findall(r"[^\s,{}][^,{}]*", text):
            item = item.strip()
            if re.match(r"-?\d|0[xXfFdD]", item):
                number = literal(item.lstrip("-"), line)
                value = -number.value if item[0] == "-" else number.value
                if number.kind == "d" and unit == 4:
                    value = int.from_bytes(
                        struct.pack("<f", struct.unpack("<d", struct.pack("<Q", value))[0]), "little"
                    )
                data += (value & ((1 << 8 * unit) - 1)).to_bytes(unit, "little")
            else:
                m = re.match(r"(?:generic\s*\(\s*)?([\w$]+)\s*\)?\s*(?:\+\s*(\d+))?$", item)
                if m is None or unit != 8:
                    raise PtxError(line, f"initialiser not understood: {item!r}")
                pointers.append((len(data), m[1], int(m[2] or 0)))
                data += bytes(unit)
        return bytes(data.ljust(size, b"\0")), tuple(pointers)

    def parameters(self, text: str, offset: int) -> list[Variable]:
        """The variables of a list of parameters."""
        out = []
        for item in text.split(","):
            if item.strip():
                space, variables = self.declaration(item.strip(), offset)
                if space == "reg":
                    raise PtxError(self.line(offset), "functions with .reg parameters are not modelled")
                out += variables
        return out

    def group(self, offset: int) -> tuple[str, int]:
        """The text in the parentheses that begin at ``offset`` ("" if there are none), and the offset after them."""
        offset = self.skip(offset)
        if not self.text.startswith("(", offset):
            return "", offset
        stop = self.text.index(")", offset)
        return self.text[offset + 1 : stop], stop + 1

    def function(self, out: Module, offset: int, m: re.Match[str]) -> int:
        """Parse a kernel or function, or the declaration of one, into ``out``; returns the offset after it."""
        text, line, entry = self.text, self.line(offset), m[2] == "entry"
        results, after_results = self.group(m.end()) if not entry else ("", m.end())
        name_m = _NAME.match(text, self.skip(after_results))
        if name_m is None:
            raise PtxError(line, "function without a name")
        params, after_params = self.group(name_m.end())
        brace, semicolon = text.find("{", after_params), text.find(";", after_params)
        pragma = re.compile(r"\s*(?:\.pragma[^;]*;)").match(text, after_params)
        if pragma is None and semicolon >= 0 and (brace < 0 or semicolon < brace):
            out.declared.add(name_m[0])
            return semicolon + 1
        fn = Function(name_m[0], entry, self.parameters(params, offset), self.parameters(results, offset), line)
        for attribute in _ATTRIBUTE.finditer(text, after_params, brace):
            fn.attributes[attribute[1]] = tuple(int(x) for x in re.findall(r"\d+", attribute[2]))
        stop = self.closing(brace)
        self.body(fn, brace + 1, stop)
        (out.kernels if entry else out.functions)[fn.name] = fn
        out.linkage[fn.name] = _linkage(m[1])
        return stop + 1

    def body(self, fn: Function, offset: int, end: int) -> None:
        """Parse the statements of a function, from ``offset`` to before its closing brace at ``end``."""
        text = self.text
        scopes = _Scopes(fn)
        frames: tuple[Frame, ...] = ()
        self.locations.enter(fn.name)
        # ``line`` is the number of the line at offset ``counted``.
        line, counted = self.line(offset), offset
        while (offset := min(self.skip(offset), end)) < end:
            line += text.count("\n", counted, offset)
            counted = offset
            ch = text[offset]
            if ch == "{":
                self.scopes += 1
                scopes.enter(self.scopes)
                offset += 1
            elif ch == "}":
                scopes.leave()
                offset += 1
            elif ch == ".":
                directive = _LINE_DIRECTIVE.match(text, offset)
                if directive is not None:
                    frames = self.locations.frames(directive[2]) if directive[1] == "loc" else frames
                    offset = directive.end()
                else:
                    stop = self.statement_end(offset)
                    self.local_declaration(scopes, text[offset:stop], offset)
                    offset = stop + 1
            elif (label := _LABEL.match(text, offset)) is not None:
                offset = self.label(scopes, label, line)
            else:
                stop = self.statement_end(offset)
                fn.body.append(self.instruction(text[offset:stop], line, frames, scopes.renames))
                offset = stop + 1

    def label(self, scopes: _Scopes, label: re.Match[str], line: int) -> int:
        """Parse a label, or a labelled list (.branchtargets, .calltargets or .callprototype); returns the offset after
        it."""
        offset = self.skip(label.end())
        if self.text.startswith((".branchtargets", ".callprototype", ".calltargets"), offset):
            stop = self.statement_end(offset)
            targets = self.text[offset + len(".branchtargets") : stop]
            scopes.function.branch_targets[label[1]] = tuple(re.findall(r"[\w$]+", targets))
            return stop + 1
        scopes.label(label[1], line)
        return label.end()

    def local_declaration(self, scopes: _Scopes, statement: str, offset: int) -> None:
        """Parse a declaration inside of a function."""
        if _DECL.match(statement) is None:
            if statement.startswith(".pragma"):
                return
            raise PtxError(self.line(offset), f"directive not understood: {statement[:60]!r}")
        space, variables = self.declaration(statement, offset)
        for variable in variables:
            if space == "reg":
                scopes.register(variable)
            else:
                scopes.variable(variable)

    def instruction(self, text: str, line: int, frames: tuple[Frame, ...], renames: dict[str, str]) -> Instr:
        """The instruction in a statement's text. ``renames``: see ``operands.operands``."""
        guard, offset = None, 0
        if text.startswith("@"):
            m = _GUARD.match(text)
            if m is None:
                raise PtxError(line, f"predicate not understood: {text[:40]!r}")
            guard, offset = Reg(renames.get(m[2], m[2]), m[1] == "!"), m.end()
        op = _OPCODE.match(text, offset)
        if op is None:
            raise PtxError(line, f"not an instruction: {text[:60]!r}" if text else "a statement is empty")
        rest = text[op.end() :]
        parsed = self.operands_of.get(rest) if not renames else None
        if parsed is None:
            parsed = operands(rest, line, renames)
            if not renames:
                self.operands_of[rest] = parsed
        return Instr(op[0], tuple(op[0].replace("::", ":").split(".")), parsed, guard, line, frames, text)


def _linkage(directives: str, variable: Variable | None = None) -> Linkage:
    """The linkage of a variable, or of a function with a body. ``.extern .shared`` variables, whose size the launch
    sets, and ``.common`` variables may be declared by several modules."""
    named = re.match(r"\s*\.(visible|weak|extern|common)\b", directives)
    if named is None:
        return Linkage.LOCAL
    if named[1] == "common" or (variable is not None and variable.space == "shared"):
        return Linkage.WEAK
    return Linkage(named[1])


@dataclass
class _Scope:
    """A pair of braces inside of a function. ``outer``: the renames outside of it. ``start``: the number of statements
    of the body before it. ``labels``: its labels -> unique names."""

    number: int
    outer: dict[str, str]
    start: int
    labels: dict[str, str] = field(default_factory=dict)


class _Scopes:
    """The open scopes of a function. Names that they declare are replaced by names that are unique in the function:
    ``name@scope`` for registers and labels, ``name@@scope`` for variables. ``renames``: the names that are visible at
    the present place -> unique names."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.open: list[_Scope] = []
        self.renames: dict[str, str] = {}

    def enter(self, number: int) -> None:
        """Begin a scope."""
        self.open.append(_Scope(number, self.renames, len(self.function.body)))
        self.renames = dict(self.renames)

    def leave(self) -> None:
        """End the innermost scope."""
        scope = self.open.pop()
        self.renames = scope.outer
        if scope.labels:
            # A branch may come before its label in the text, so labels are renamed when their scope ends.
            for item in self.function.body[scope.start :]:
                _retarget(item, scope.labels)

    def label(self, name: str, line: int) -> None:
        """Add a label to the function's body."""
        if self.open:
            scope = self.open[-1]
            scope.labels[name] = f"{name}@{scope.number}"
            name = scope.labels[name]
        self.function.body.append(Label(name, line))

    def register(self, variable: Variable) -> None:
        """Declare a register, whose type is in ``variable.space``. A name such as ``%r<9>`` declares a range."""
        fn, kind = self.function, variable.space
        ranged = re.match(r"([\w$%]+)<(\d+)>$", variable.name)
        if ranged is not None and not self.open:
            fn.ranges[ranged[1]] = (kind, int(ranged[2]))
            return
        names = [variable.name] if ranged is None else [f"{ranged[1]}{i}" for i in range(int(ranged[2]))]
        for name in names:
            unique = name
            if self.open:
                unique = self.renames[name] = f"{name}@{self.open[-1].number}"
            fn.registers[unique] = kind

    def variable(self, variable: Variable) -> None:
        """Declare a variable of the function."""
        if self.open:
            unique = f"{variable.name}@@{self.open[-1].number}"
            self.renames[variable.name] = unique
            variable.name = unique
        self.function.variables.append(variable)


def _retarget(item: Instr | Label, labels: dict[str, str]) -> None:
    """Rename the target of a branch."""
    if isinstance(item, Instr) and item.base == "bra":
        target = item.operands[0]
        if isinstance(target, Sym) and target.name in labels:
            item.operands = (Sym(labels[target.name]),)
