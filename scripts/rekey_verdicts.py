"""Gives the stored verdicts the digests of texts whose comments have changed, after a check that nothing else has.

    git worktree add /tmp/old REVISION
    python scripts/rekey_verdicts.py /tmp/old
    python scripts/rekey_verdicts.py /tmp/old --unused    where unused constants and members were removed too

A verdict belongs to a binary by its digest, which covers the whole text of the kernel, comments included. This script
renders every record of the catalog, and every bf16 kernel that has a verdict, by the old checkout's templates and by
this one's. It stops if the two texts of a record differ in anything but comments, or if a drawn kernel's PTX differs in
anything but line numbers. With ``--unused`` texts may differ in code, and each that does is compiled: its PTX must be
the same. Only then does it write the new digests to ``results/verdicts.jsonl``, which is left as it was if a single
verdict cannot be mapped. The verdicts must be of this machine's nvcc and CUTLASS.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cudal2gen import places
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record
from kernelproof.ground import files, toolchain

VERDICTS = Path(__file__).parents[1] / "results" / "verdicts.jsonl"
DRAWN = 40  # kernels whose PTX is compared
IN_UNIT = 24  # kernels that are compiled in one translation unit
# A string, or a comment. Strings are matched so that "//" inside of one is not taken for a comment.
TOKENS = re.compile(r"""("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/""", re.DOTALL)
# In names of CuTe's unused constants: a hash of the translation unit's text.
UNIT_HASH = re.compile(r"_[0-9a-f]{8}(?=_10_kernels_cu_)")
# Runs in the old checkout, whose modules may lie elsewhere: texts of the records on standard input, a line each.
OLD_TEXTS = """
import sys, json
try:
    from cudal2gen.generation.renderer import render
except ModuleNotFoundError:
    from cudal2gen.renderer import render
from cudal2gen.kernel import parse
for line in sys.stdin:
    print(json.dumps(render(parse(line))))
"""


class Pair(NamedTuple):
    """A record with the text that the old checkout renders of it, and with this checkout's."""

    record: Record
    old: str
    new: str


class Difference(Exception):
    """A text that changed by more than its comments, or a verdict that belongs to no text."""


def verdict_records() -> list[Record]:
    """A record of each binary that may have a verdict: the catalog's, and what it becomes of bf16."""
    records = catalog.load(places.shipped("configs") / "kernels.jsonl")
    for gpu in ("h200", "a100"):
        for layout in ("tn", "nn"):
            records += catalog.library(gpu, "f32", layout, ab="bf16", d="same")
    # Equal names and launches have equal texts, which tests/cudal2gen/test_renderer.py shows.
    return list({(record.name, record.launch.write()): record for record in records}.values())


def rendered_by(checkout: Path, records: Iterable[Record]) -> list[str]:
    """The texts of records by another checkout's templates. Raises CalledProcessError if it cannot render one."""
    lines = "".join(catalog.dump(record) + "\n" for record in records)
    done = subprocess.run(
        [sys.executable, "-c", OLD_TEXTS], input=lines, stdout=subprocess.PIPE, text=True, check=True, cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def without_comments(text: str) -> str:
    """A C++ text without comments, blank lines and blanks at the ends of lines."""
    code = TOKENS.sub(lambda match: match[1] or "", text)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def drawn(pairs: Sequence[Pair]) -> list[Pair]:
    """Some pairs of every family, spread evenly over its records."""
    families: dict[str, list[Pair]] = {}
    for pair in pairs:
        families.setdefault(pair.record.family, []).append(pair)
    each = -(-DRAWN // len(families))
    return [pair for family in families.values() for pair in family[:: -(-len(family) // each)]]


def ptx(texts: Sequence[str], arch: str, folder: Path, tools: toolchain.Toolchain) -> str:
    """The PTX of several texts in one translation unit, without line numbers. Raises CalledProcessError."""
    folder.mkdir()
    (folder / "kernels.cu").write_text("\n".join(texts))
    flags = [flag for flag in compiler.NVCC_FLAGS if flag != "-lineinfo"]
    command = [str(tools.nvcc), *flags, "-w", f"-arch={arch}", f"-I{tools.cutlass_include}", "-ptx", "kernels.cu"]
    subprocess.run([*command, "-o", "kernels.ptx"], check=True, cwd=folder, env=toolchain.environment())
    return UNIT_HASH.sub("", (folder / "kernels.ptx").read_text())


def with_other_code(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs whose texts differ by more than comments."""
    return [pair for pair in pairs if without_comments(pair.old) != without_comments(pair.new)]


def check_texts(pairs: Iterable[Pair]) -> None:
    """Raises Difference if the code of a record differs."""
    for record, *_ in with_other_code(pairs):
        raise Difference(f"{record.name}: the text changed by more than its comments; validate it anew")


def check_ptx(pairs: Sequence[Pair], tools: toolchain.Toolchain) -> None:
    """Raises Difference if the PTX of the pairs of one architecture differs by more than line numbers."""
    for arch, texts in units(pairs):
        with tempfile.TemporaryDirectory() as folder:
            old = ptx([pair.old for pair in texts], arch, Path(folder, "old"), tools)
            new = ptx([pair.new for pair in texts], arch, Path(folder, "new"), tools)
        if old != new:
            raise Difference(f"the PTX for {arch} of one of {', '.join(pair.record.name for pair in texts)} changed")
        print(f"{len(texts)} kernels for {arch}: PTX of {len(new)} bytes is the same", flush=True)


def units(pairs: Sequence[Pair]) -> Iterator[tuple[str, list[Pair]]]:
    """The pairs that are compiled together, and their architecture. No two have one name."""
    for arch in sorted({pair.record.arch for pair in pairs}):
        texts = list({pair.record.name: pair for pair in pairs if pair.record.arch == arch}.values())
        yield from ((arch, texts[at : at + IN_UNIT]) for at in range(0, len(texts), IN_UNIT))


def digests(pairs: Sequence[Pair], tools: toolchain.Toolchain) -> dict[str, str]:
    """The new digest of each old one, for every architecture.

    One text is compiled for several GPUs, and its verdicts stay right when the catalog no longer has a record for one.
    """
    return {
        compiler.digest(old, arch, launch, tools): compiler.digest(new, arch, launch, tools)
        for arch in sorted({pair.record.arch for pair in pairs})
        for old, new, launch in ((old, new, record.launch.write()) for record, old, new in pairs)
    }


def rekeyed(lines: Iterable[str], new_digest: dict[str, str]) -> list[str]:
    """The lines of a file of verdicts with new digests. Raises Difference with the verdicts that have none."""
    changed: list[str] = []
    unmapped: list[str] = []
    for line in lines:
        verdict = json.loads(line)
        old = verdict["digest"]
        if old not in new_digest:
            unmapped.append(f"{verdict['record']} ({old})")
            continue
        # The digest stands once in a line, and the rest of the line must keep its bytes.
        changed.append(line.replace(f'"digest":"{old}"', f'"digest":"{new_digest[old]}"', 1))
    if unmapped:
        raise Difference(f"{len(unmapped)} verdicts belong to no record, the first to {unmapped[0]}")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout from before the change of comments")
    parser.add_argument(
        "--unused", action="store_true", help="code may differ where the PTX of each kernel is the same"
    )
    parser.add_argument("--dry-run", action="store_true", help="check, and write nothing")
    options = parser.parse_args()
    tools = toolchain.discover()
    records = verdict_records()
    texts = rendered_by(options.old.resolve(), records)
    pairs = [Pair(record, old, render(record)) for record, old in zip(records, texts, strict=True)]
    try:
        changed = with_other_code(pairs) if options.unused else []
        if not options.unused:
            check_texts(pairs)
        print(f"{len(pairs) - len(changed)} of {len(pairs)} texts are the same but for comments", flush=True)
        lines = rekeyed(VERDICTS.read_text().splitlines(keepends=True), digests(pairs, tools))
        check_ptx([*changed, *drawn(pairs)], tools)
    except Difference as difference:
        sys.exit(str(difference))
    if not options.dry_run:
        files.write(VERDICTS, "".join(lines))
        print(f"{len(lines)} verdicts have new digests")


if __name__ == "__main__":
    main()
