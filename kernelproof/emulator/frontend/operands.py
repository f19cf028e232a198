"""Parses the operands of an instruction from text to ``Operand`` objects."""

from __future__ import annotations

import re
import struct

from kernelproof.emulator.frontend.ptx import Imm, Mem, Operand, Pair, PtxError, Reg, Sym, TensorOperand, Vec

_TOKEN = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|[%$\w.]+|[{}\[\](),|+\-!<>=]")


def literal(token: str, line: int) -> Imm:
    """The operand of a literal token, such as ``0x1F`` or ``0f3F800000``. Raises PtxError for other tokens."""
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


def operands(text: str, line: int, renames: dict[str, str]) -> tuple[Operand, ...]:
    """The operands in a text. ``renames``: names that scopes have declared -> unique names. Raises PtxError, which
    names the ``line``, for text that is not understood."""
    return _Reader(text, line, renames).all()


class _Reader:
    """Reads tokens from left to right. ``position`` is the number of the next token. Methods raise PtxError for tokens
    that they do not understand, and IndexError if the tokens end too early, which ``all`` turns into a PtxError."""

    def __init__(self, text: str, line: int, renames: dict[str, str]) -> None:
        self.text, self.line, self.renames = text, line, renames
        self.tokens: list[str] = _TOKEN.findall(text)
        self.position = 0

    def all(self) -> tuple[Operand, ...]:
        """All operands of the text."""
        try:
            return tuple(self.items(""))
        except IndexError:
            raise PtxError(self.line, f"operands not understood: {self.text.strip()[:60]!r}") from None

    def items(self, stop: str) -> list[Operand]:
        """The operands between commas, up to a closing token (which is consumed) or the end."""
        out: list[Operand] = []
        while self.position < len(self.tokens) if not stop else self.tokens[self.position] != stop:
            if self.tokens[self.position] == ",":
                self.position += 1
            else:
                out.append(self.operand())
        self.position += bool(stop)
        return out

    def take(self) -> str:
        """Consume the next token."""
        token = self.tokens[self.position]
        self.position += 1
        return token

    def name(self, token: str) -> str:
        """The unique name of an identifier, which differs from it if a scope has declared the identifier."""
        return self.renames.get(token, token)

    def following(self) -> str:
        """The next token, without consuming it; "" at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def operand(self) -> Operand:
        """The next operand, including its offset, or the second register if it is a pair ``a|b``."""
        item = self.atom()
        if self.following() in ("+", "-"):
            offset = self.offset()
            if isinstance(item, Sym):
                return Sym(item.name, item.offset + offset)
            if isinstance(item, Reg):
                return Mem(item, offset)
            if isinstance(item, Imm):
                return Imm(item.value + offset)
        if self.following() == "|":
            self.position += 1
            second = self.atom()
            return Pair(item if isinstance(item, Reg) else Reg("_"), second if isinstance(second, Reg) else Reg("_"))
        return item

    def offset(self) -> int:
        """The signed number after a plus or minus sign, which comes next."""
        sign = 1 if self.take() == "+" else -1
        if self.tokens[self.position] == "-":
            sign, self.position = -sign, self.position + 1
        return sign * literal(self.take(), self.line).value

    def atom(self) -> Operand:
        """The next operand without an offset or a second part."""
        token = self.take()
        first = token[0]
        if first == "%":
            return Reg(self.name(token))
        if first.isdigit():
            return literal(token, self.line)
        if first == "-":
            return self.negative()
        if token == "WARP_SZ":
            return Imm(32)
        if first == "!":
            return Reg(self.name(self.take()), True)
        if first in "{(":
            return Vec(tuple(self.items("}" if first == "{" else ")")))
        if first == "[":
            return self.address()
        unique = self.name(token)
        # A register that is declared in a scope may have a name without '%'. Unique names are name@scope for registers
        # and name@@scope for variables (see the parser), which tells them apart.
        return Reg(unique) if "@" in unique and "@@" not in unique else Sym(unique)

    def negative(self) -> Imm:
        """The literal after a minus sign."""
        token = self.take()
        if token[0] == "%":
            raise PtxError(self.line, "negated register operand is not modelled")
        number = literal(token, self.line)
        if number.kind == "i":
            return Imm(-number.value)
        return Imm(number.value ^ (1 << (31 if number.kind == "f" else 63)), number.kind)

    def address(self) -> Mem | TensorOperand:
        """The address in brackets, of which the opening one has been consumed."""
        if self.tokens[self.position] == "{":
            raise PtxError(self.line, "texture coordinates are not modelled")
        inside = self.operand()
        mem: Mem
        if isinstance(inside, Mem):
            mem = inside
        elif isinstance(inside, Sym):
            mem = Mem(Sym(inside.name), inside.offset)
        elif isinstance(inside, Reg | Imm):
            mem = Mem(inside, 0)
        else:
            raise PtxError(self.line, "address not understood")
        if self.take() != ",":
            return mem
        coordinates = self.operand()
        if not isinstance(coordinates, Vec):
            raise PtxError(self.line, "tensor coordinates not understood")
        self.position += 1
        return TensorOperand(mem.base, mem.offset, coordinates.items)
