"""Splits the PTX of a batch into one file per kernel. It runs in the ninja graph and imports only the standard library.

The parts are in normal form, so that a kernel has the same part whether it is compiled alone or in a batch.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

# An entry ends with a brace at the start of a line. So may inline assembly, but there the end comment follows.
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\($.*?^}$(?!\n\t// end inline asm)", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r'^\t\.file\t(\d+) "([^"]*)"', re.MULTILINE)
_LOC = re.compile(r"^\t\.loc\t(\d+) (\d+) (\d+).*\n", re.MULTILINE)
_LABEL = re.compile(r"^(\$L__(?:tmp|func)\w*):\n", re.MULTILINE)
_SYMBOL = re.compile(
    r"^\.(?:global|const|shared|extern \.shared)[^;]*?\b([A-Za-z_$][\w$]*)(?:\[\d*\])?(?: = [^;]*)?;$", re.MULTILINE
)


def split(ptx: str) -> dict[str, str]:
    """Entry name -> PTX module with that entry and the symbols that it uses.

    Keeps line information of the kernel's own source, as file ``kernel.cu``; instructions inlined from headers keep
    the last line of that source. Raises ValueError for a module without an entry.
    """
    header = re.search(r"^\.version.*\n\.target.*\n\.address_size.*\n", ptx, re.MULTILINE)
    entries = list(_ENTRY.finditer(ptx))
    if header is None or not entries:
        raise ValueError("no kernel entry in the PTX that nvcc wrote")
    globals_text = ptx[header.end() : entries[0].start()] + "".join(
        ptx[a.end() : b.start()] for a, b in itertools.pairwise(entries)
    )
    symbols = [(match.group(1), match.group(0)) for match in _SYMBOL.finditer(globals_text)]
    files = {number: Path(name).stem for number, name in _FILE.findall(ptx)}
    return {entry.group(1): _part(header.group(0), entry.group(1), entry.group(0), symbols, files) for entry in entries}


def _part(header: str, name: str, body: str, symbols: list[tuple[str, str]], files: dict[str, str]) -> str:
    """The module of one entry, in normal form: no file, line or label differs if other kernels were compiled with it.

    ``symbols``: (name, definition) of the batch's globals. ``files``: name without suffix by number in ``.loc``.
    """

    def locate(match: re.Match[str]) -> str:
        number, line, column = match.groups()
        return f"\t.loc\t1 {line} {column}\n" if files.get(number) == name else ""

    body = _LOC.sub(locate, body)
    # Dropping the headers' .loc leaves runs of equal lines.
    body = re.sub(r"(\t\.loc\t\S+ \S+ \S+\n)(?:\1)+", r"\1", body)
    body = _LABEL.sub("", body)
    body = re.sub(r"\$L__BB\d+_", "$L__BB_", body)
    words = set(re.findall(r"[A-Za-z_$][\w$]*", body))
    definitions = [text for symbol, text in symbols if symbol in words]
    file = '\t.file\t1 "kernel.cu"\n' if "\t.loc\t" in body else ""
    return "\n".join([header, *definitions, "", body, file])


def main(batch: str, parts: str, isa: str = "") -> int:
    """Writes ``parts/<entry>/kernel.ptx`` for every entry of the batch. ``isa``: the version of PTX that each states,
    if it is not the batch's."""
    ptx = Path(batch).read_text()
    ptx = re.sub(r"^\.version .*", f".version {isa}", ptx, count=1, flags=re.MULTILINE) if isa else ptx
    for name, text in split(ptx).items():
        folder = Path(parts) / name
        folder.mkdir(exist_ok=True)
        (folder / "kernel.ptx").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
