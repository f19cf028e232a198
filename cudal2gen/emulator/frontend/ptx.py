"""PTX text -> ``Module``: kernels and functions as flat lists of instructions and labels, module variables, the target.

Only syntax lives here. What an opcode means is in ``translate`` and the instruction tables; control flow is in
``flow``.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple


class PtxError(Exception):
    """The text is not PTX that this machine understands. The message starts with ``line N:``."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


class Reg(NamedTuple):
    """A register, or a special register such as ``%tid.x``; ``negated`` is the ``!`` of a predicate operand."""

    name: str
    negated: bool = False


class Imm(NamedTuple):
    """A literal. ``value`` is an int, or the raw bits when ``kind`` is ``f`` (single) or ``d`` (double)."""

    value: int
    kind: str = "i"


class Sym(NamedTuple):
    """The address of a variable, a label or a function, plus a byte offset."""

    name: str
    offset: int = 0


class Mem(NamedTuple):
    """``[base + offset]``, the offset in bytes."""

    base: Reg | Sym | Imm
    offset: int = 0


class Tensor(NamedTuple):
    """``[base + offset, {c0, c1, ...}]``: a tensor map's address and the coordinates of a box, innermost first."""

    base: Reg | Sym | Imm
    offset: int
    coordinates: tuple[Operand, ...]


class Vec(NamedTuple):
    """``{a, b, ...}``; also the parenthesised lists of a call."""

    items: tuple[Operand, ...]


class Pair(NamedTuple):
    """``p|q``: two destinations."""

    first: Reg
    second: Reg


Operand = Reg | Imm | Sym | Mem | Tensor | Vec | Pair


class Loc(NamedTuple):
    """A position in the CUDA source; ``inlined_at`` is the call site that the code was inlined into."""

    file: str
    line: int
    inlined_at: tuple[str, int] | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        if self.inlined_at is not None and self.inlined_at != (self.file, self.line):
            where += f" (inlined at {self.inlined_at[0]}:{self.inlined_at[1]})"
        return where


@dataclass(slots=True)
class Instr:
    """One instruction. ``parts`` is the opcode split at the dots; ``guard`` is ``@p`` or ``@!p``."""

    op: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    loc: Loc | None
    text: str

    @property
    def base(self) -> str:
        return self.parts[0]


@dataclass(slots=True)
class Label:
    """A branch target. ``line`` is its PTX line."""

    name: str
    line: int


@dataclass(slots=True)
class Variable:
    """A declared variable. ``size`` is in bytes (0: ``.extern .shared``), ``init`` the bytes of its initialiser, and
    ``pointers`` the places (byte offset, symbol, addend) in it that hold addresses."""

    name: str
    space: str
    size: int
    align: int
    init: bytes | None = None
    pointers: tuple[tuple[int, str, int], ...] = ()
    line: int = 0


@dataclass(slots=True)
class Function:
    """An ``.entry`` or ``.func`` with a body. ``params`` carry byte sizes; ``offsets`` are the kernel ABI's byte
    offsets."""

    name: str
    entry: bool
    params: list[Variable]
    results: list[Variable]
    line: int
    body: list[Instr | Label] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def register_type(self, name: str, line: int) -> str:
        """The declared type (``b32``, ``pred``, ...) of a register, or PtxError."""
        kind = self.registers.get(name)
        if kind is not None:
            return kind
        match = _NUMBERED.match(name)
        if match is not None:
            entry = self.ranges.get(match.group(1))
            if entry is not None and int(match.group(2)) < entry[1]:
                self.registers[name] = entry[0]
                return entry[0]
        raise PtxError(line, f"register {name} is not declared")

    @property
    def offsets(self) -> list[int]:
        """Byte offset of every parameter, each aligned to its own alignment."""
        out, at = [], 0
        for p in self.params:
            at = -(-at // p.align) * p.align
            out.append(at)
            at += p.size
        return out

    @property
    def param_bytes(self) -> int:
        return self.offsets[-1] + self.params[-1].size if self.params else 0


@dataclass(slots=True)
class Module:
    """A PTX file. ``kernels`` and ``functions`` by name, ``variables`` of module scope, ``target`` such as
    ``sm_80``."""

    target: str
    version: str
    kernels: dict[str, Function]
    functions: dict[str, Function]
    declared: set[str]
    variables: dict[str, Variable]
    files: dict[int, str]
    text: str
    # Translations, kept here so that they live as long as the text they belong to.
    translated: dict[tuple[str, bool, bool], object] = field(default_factory=dict)


TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 1,
    "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "u16x2": 4, "s16x2": 4,
}  # fmt: skip

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_NUMBERED = re.compile(r"(.*?)(\d+)$", re.S)
_BRACE = re.compile(r"[{}]")
_SPACE = re.compile(r"\s*")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc)\b[ \t]*([^\n]*)")
_FUNC = re.compile(r"((?:\.(?:visible|weak|extern|common|internal)\s+)*)\.(entry|func)\b")
_NAME = re.compile(r"[\w$%]+(?:\.\w+)*")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_STATEMENT = re.compile(r"[^;]*;")
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%]+)\s*")
_OPCODE = re.compile(r"[a-zA-Z][\w.:]*")
_TOKEN = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|[%$\w.]+|[{}\[\](),|+\-!<>=]")
_DECL = re.compile(
    r"(?:\.(?:visible|weak|extern|common|internal)\s+)*\.(global|const|shared|local|param|reg)\b(.*)", re.S
)
_DECL_BODY = re.compile(
    r"\s*((?:\.(?:align|attribute|ptr|managed|space|unified)\b\s*(?:\d+|\([^)]*\))?\s*|\.(?:global|const|shared|local|v2|v4)\b\s*)*)"
    r"\.(\w+)\s*(.*)",
    re.S,
)
_POINTEE = re.compile(r"^(?:\.(?:ptr|global|const|shared|local|generic)\b\s*|\.align\s+\d+\s*)+")
_ATTRIBUTE = re.compile(
    r"\.(maxntid|reqntid|minnctapersm|maxnctapersm|maxnreg|reqnctapercluster|maxclusterrank|noreturn|explicitcluster"
    r"|abi_preserve\w*|blocksareclusters|pragma)\b[ \t]*([^\n{.]*)"
)


def parse(text: str) -> Module:
    """Parse one PTX file.

    Raises PtxError, which names the line, for text that is not PTX.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.original = text
        self.text = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.files: dict[int, str] = {
            int(m[1]): m[2] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)
        }
        self.scopes = 0
        self.operands_seen: dict[str, tuple[Operand, ...]] = {}

    def line(self, at: int) -> int:
        return bisect_right(self.newlines, at - 1) + 1 if at else 1

    def module(self) -> Module:
        text, at, end = self.text, 0, len(self.text)
        out = Module("", "", {}, {}, set(), {}, self.files, self.original)
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at >= end:
                break
            directive = _LINE_DIRECTIVE.match(text, at)
            if directive is not None:
                if directive[1] == "target":
                    out.target = directive[2].split(",")[0].strip()
                elif directive[1] == "version":
                    out.version = directive[2].strip()
                at = directive.end()
                continue
            if text.startswith(".section", at):
                at = self.closing(text.index("{", at)) + 1
                continue
            func = _FUNC.match(text, at)
            if func is not None:
                at = self.function(out, at, func)
                continue
            if text[at] == ".":
                stop = self.statement_end(at)
                statement = text[at:stop]
                if _DECL.match(statement) is not None:
                    for variable in self.declaration(statement, at)[1]:
                        # A repeated declaration (.extern then a definition) keeps the definition.
                        if variable.name not in out.variables or variable.size:
                            out.variables[variable.name] = variable
                at = stop + 1
                continue
            raise PtxError(self.line(at), f"not PTX: {text[at : at + 40].splitlines()[0]!r}")
        if not out.target:
            raise PtxError(1, "no .target directive: this is not a PTX file")
        return out

    def statement_end(self, at: int) -> int:
        stop = self.text.find(";", at)
        if stop < 0:
            raise PtxError(self.line(at), "statement without ';'")
        return stop

    def closing(self, at: int) -> int:
        depth = 0
        for m in _BRACE.finditer(self.text, at):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                return m.start()
        raise PtxError(self.line(at), "'{' without '}'")

    def declaration(self, statement: str, at: int) -> tuple[str, list[Variable]]:
        """A variable declaration -> (space, variables). For ``.reg`` the variable's ``space`` is its type."""
        line = self.line(at)
        m = _DECL.match(statement)
        assert m is not None
        space = m[1]
        body = _DECL_BODY.match(m[2])
        if body is None:
            raise PtxError(line, f"declaration not understood: {statement.strip()[:60]!r}")
        # After a parameter's type, .ptr and its space and alignment speak of what it points to.
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
        for one in names:
            m2 = re.match(r"\s*([\w$%.]+)\s*((?:\[\s*\d*\s*\]\s*)*)$", one.strip())
            if m2 is None:
                raise PtxError(line, f"declaration not understood: {statement.strip()[:60]!r}")
            size = unit
            for extent in re.findall(r"\[\s*(\d*)\s*\]", m2[2]):
                size *= int(extent) if extent else 0
            init, pointers = self.initialiser(initialiser, kind, size, line) if initialiser else (None, ())
            out.append(Variable(m2[1], space, size, align, init, pointers, line))
        return space, out

    def initialiser(self, text: str, kind: str, size: int, line: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
        data, pointers, unit = bytearray(), [], TYPE_BYTES[kind]
        for item in re.findall(r"[^\s,{}][^,{}]*", text):
            item = item.strip()
            if re.match(r"-?\d|0[xXfFdD]", item):
                literal = _literal(item.lstrip("-"), line)
                value = -literal.value if item[0] == "-" else literal.value
                if literal.kind == "d" and unit == 4:
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

    def parameters(self, text: str, at: int) -> list[Variable]:
        out = []
        for item in text.split(","):
            if item.strip():
                space, variables = self.declaration(item.strip(), at)
                if space == "reg":
                    raise PtxError(self.line(at), "functions with .reg parameters are not modelled")
                out += variables
        return out

    def group(self, at: int) -> tuple[str, int]:
        at = _SPACE.match(self.text, at).end()  # type: ignore[union-attr]
        if not self.text.startswith("(", at):
            return "", at
        stop = self.text.index(")", at)
        return self.text[at + 1 : stop], stop + 1

    def function(self, out: Module, at: int, m: re.Match[str]) -> int:
        text, line, entry = self.text, self.line(at), m[2] == "entry"
        results, pos = self.group(m.end()) if not entry else ("", m.end())
        pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]
        name_m = _NAME.match(text, pos)
        if name_m is None:
            raise PtxError(line, "function without a name")
        params, pos = self.group(name_m.end())
        brace, semicolon = text.find("{", pos), text.find(";", pos)
        pragma = re.compile(r"\s*(?:\.pragma[^;]*;)").match(text, pos)
        if pragma is None and semicolon >= 0 and (brace < 0 or semicolon < brace):
            out.declared.add(name_m[0])
            return semicolon + 1
        fn = Function(name_m[0], entry, self.parameters(params, at), self.parameters(results, at), line)
        for attribute in _ATTRIBUTE.finditer(text, pos, brace):
            fn.attributes[attribute[1]] = tuple(int(x) for x in re.findall(r"\d+", attribute[2]))
        stop = self.closing(brace)
        self.body(fn, brace + 1, stop)
        (out.kernels if entry else out.functions)[fn.name] = fn
        return stop + 1

    def body(self, fn: Function, at: int, end: int) -> None:
        text, body = self.text, fn.body
        loc: Loc | None = None
        # Scopes: (names declared there -> unique names, where in the body it started, its labels).
        scopes: list[tuple[dict[str, str], int, dict[str, str]]] = []
        renames: dict[str, str] = {}
        line, counted = self.line(at), at
        while True:
            at = _SPACE.match(text, at, end).end()  # type: ignore[union-attr]
            if at >= end:
                return
            line += text.count("\n", counted, at)
            counted = at
            ch = text[at]
            if ch == "{":
                self.scopes += 1
                scopes.append((renames, len(body), {}))
                renames = dict(renames)
                at += 1
            elif ch == "}":
                renames, start, labels = scopes.pop()
                if labels:
                    for i in range(start, len(body)):
                        _retarget(body, i, labels)
                at += 1
            elif ch == ".":
                directive = _LINE_DIRECTIVE.match(text, at)
                if directive is not None:
                    if directive[1] == "loc":
                        loc = self.location(directive[2])
                    at = directive.end()
                    continue
                stop = self.statement_end(at)
                self.local_declaration(fn, text[at:stop], at, renames if scopes else None)
                at = stop + 1
            else:
                label = _LABEL.match(text, at)
                if label is not None:
                    at = label.end()
                    after = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                    if text.startswith((".branchtargets", ".callprototype", ".calltargets"), after):
                        stop = self.statement_end(after)
                        fn.branch_targets[label[1]] = tuple(re.findall(r"[\w$]+", text[after + 14 : stop]))
                        at = stop + 1
                        continue
                    name = label[1]
                    if scopes:
                        scopes[-1][2][name] = name = f"{name}@{self.scopes}"
                    body.append(Label(name, line))
                    continue
                stop = self.statement_end(at)
                body.append(self.instruction(text[at:stop], line, loc, renames))
                at = stop + 1

    def location(self, text: str) -> Loc | None:
        m = re.match(r"(\d+)\s+(\d+)\s+\d+(?:.*?inlined_at\s+(\d+)\s+(\d+))?", text)
        if m is None or m[2] == "0":
            return None
        inlined = (self.files.get(int(m[3]), "?"), int(m[4])) if m[3] else None
        return Loc(self.files.get(int(m[1]), "?"), int(m[2]), inlined)

    def local_declaration(self, fn: Function, statement: str, at: int, renames: dict[str, str] | None) -> None:
        if _DECL.match(statement) is None:
            if statement.startswith(".pragma"):
                return
            raise PtxError(self.line(at), f"directive not understood: {statement[:60]!r}")
        space, variables = self.declaration(statement, at)
        for variable in variables:
            name = variable.name
            ranged = re.match(r"([\w$%]+)<(\d+)>$", name)
            unique = f"{name}@{self.scopes}" if renames is not None else name
            if space == "reg":
                if ranged is not None:
                    if renames is not None:
                        for i in range(int(ranged[2])):
                            renames[f"{ranged[1]}{i}"] = f"{ranged[1]}{i}@{self.scopes}"
                            fn.registers[f"{ranged[1]}{i}@{self.scopes}"] = variable.space
                    else:
                        fn.ranges[ranged[1]] = (variable.space, int(ranged[2]))
                    continue
                fn.registers[unique] = variable.space
            else:
                if renames is not None:
                    unique = f"{name}@@{self.scopes}"
                variable.name = unique
                fn.variables.append(variable)
            if renames is not None:
                renames[name] = unique

    def instruction(self, text: str, line: int, loc: Loc | None, renames: dict[str, str]) -> Instr:
        guard, at = None, 0
        if text[0] == "@":
            m = _GUARD.match(text)
            if m is None:
                raise PtxError(line, f"predicate not understood: {text[:40]!r}")
            guard, at = Reg(renames.get(m[2], m[2]), m[1] == "!"), m.end()
        op = _OPCODE.match(text, at)
        if op is None:
            raise PtxError(line, f"not an instruction: {text[:60]!r}")
        rest = text[op.end() :]
        if renames:
            operands = _operands(rest, line, renames)
        else:
            cached = self.operands_seen.get(rest)
            if cached is None:
                cached = self.operands_seen[rest] = _operands(rest, line, renames)
            operands = cached
        return Instr(op[0], tuple(op[0].replace("::", ":").split(".")), operands, guard, line, loc, text)


def _retarget(body: list[Instr | Label], i: int, labels: dict[str, str]) -> None:
    item = body[i]
    if isinstance(item, Instr) and item.base == "bra":
        target = item.operands[0]
        if isinstance(target, Sym) and target.name in labels:
            item.operands = (Sym(labels[target.name]),)


def _literal(token: str, line: int) -> Imm:
    head = token[:2].lower()
    try:
        if head == "0f":
            return Imm(int(token[2:], 16), "f")
        if head == "0d":
            return Imm(int(token[2:], 16), "d")
        if "." in token or (head != "0x" and "e" in token.lower()):
            return Imm(int.from_bytes(struct.pack("<d", float(token)), "little"), "d")
        digits = token.rstrip("uU")
        if head == "0x":
            return Imm(int(digits, 16))
        if head == "0b":
            return Imm(int(digits[2:], 2))
        return Imm(int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10))
    except ValueError:
        raise PtxError(line, f"literal not understood: {token!r}") from None


def _operands(text: str, line: int, renames: dict[str, str]) -> tuple[Operand, ...]:  # noqa: PLR0915
    tokens = _TOKEN.findall(text)
    out: list[Operand] = []
    at, end = 0, len(tokens)

    def name(token: str) -> str:
        return renames.get(token, token) if renames else token

    def atom(at: int) -> tuple[Operand, int]:
        token = tokens[at]
        first = token[0]
        if first == "%":
            return Reg(name(token)), at + 1
        if first.isdigit():
            return _literal(token, line), at + 1
        if first == "-":
            if tokens[at + 1][0] == "%":
                raise PtxError(line, "negated register operand is not modelled")
            literal = _literal(tokens[at + 1], line)
            if literal.kind == "i":
                return Imm(-literal.value), at + 2
            return Imm(literal.value ^ (1 << (31 if literal.kind == "f" else 63)), literal.kind), at + 2
        if first == "!":
            return Reg(name(tokens[at + 1]), True), at + 2
        if first in "{(":
            stop = "}" if first == "{" else ")"
            items: list[Operand] = []
            at += 1
            while tokens[at] != stop:
                if tokens[at] == ",":
                    at += 1
                    continue
                item, at = full(at)
                items.append(item)
            return Vec(tuple(items)), at + 1
        if first == "[":
            if tokens[at + 1] == "{":
                raise PtxError(line, "texture coordinates are not modelled")
            base, at = full(at + 1)
            if tokens[at] == ",":
                where, at = full(at + 1)
                if not isinstance(where, Vec) or isinstance(base, Vec | Pair | Tensor):
                    raise PtxError(line, "tensor coordinates not understood")
                if isinstance(base, Mem):
                    return Tensor(base.base, base.offset, where.items), at + 1
                offset = base.offset if isinstance(base, Sym) else 0
                return Tensor(Sym(base.name) if isinstance(base, Sym) else base, offset, where.items), at + 1
            if isinstance(base, Sym):
                return Mem(Sym(base.name), base.offset), at + 1
            if isinstance(base, Mem):
                return base, at + 1
            if isinstance(base, Vec | Pair | Tensor):
                raise PtxError(line, "address not understood")
            return Mem(base, 0), at + 1
        unique = name(token)
        # A register of a scope may be declared without '%': its unique name tells it from a variable's.
        return (Reg(unique) if "@" in unique and "@@" not in unique else Sym(unique)), at + 1

    def full(at: int) -> tuple[Operand, int]:
        item, at = atom(at)
        if at < end and tokens[at] in ("+", "-"):
            sign = 1 if tokens[at] == "+" else -1
            at += 1
            if tokens[at] == "-":
                sign, at = -sign, at + 1
            offset = sign * _literal(tokens[at], line).value
            at += 1
            if isinstance(item, Sym):
                return Sym(item.name, item.offset + offset), at
            if isinstance(item, Reg):
                return Mem(item, offset), at
            if isinstance(item, Imm):
                return Imm(item.value + offset), at
        if at < end and tokens[at] == "|":
            second, at = atom(at + 1)
            first_reg = item if isinstance(item, Reg) else Reg("_")
            return Pair(first_reg, second if isinstance(second, Reg) else Reg("_")), at
        return item, at

    try:
        while at < end:
            if tokens[at] == ",":
                at += 1
                continue
            item, at = full(at)
            out.append(item)
    except IndexError:
        raise PtxError(line, f"operands not understood: {text.strip()[:60]!r}") from None
    return tuple(out)
