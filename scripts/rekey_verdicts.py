"""Renews the digests of stored verdicts and proofs after a change of comments in the templates.

    git worktree add /tmp/old REVISION
    python scripts/rekey_verdicts.py /tmp/old
    python scripts/rekey_verdicts.py /tmp/old --unused    if unused constants and members were removed as well

A verdict or a proof belongs to a binary by its digest, which covers the whole text of the kernel, comments included.
This script renders every kernel that may have a verdict with the old checkout's templates and with this one's. It stops
if the two texts differ in anything but comments, or if a drawn kernel's PTX differs in anything but line numbers. With
``--unused`` texts may differ in code, and each that does and has a line to renew is compiled: its PTX must be the same.

Only then are the new digests written to ``results/verdicts.jsonl`` and ``results/proofs.jsonl``. Lines that have a new
digest already stay, so that lines which were added under the old templates can be renewed later. All lines of a family
stay if none of its texts changed. If another line belongs to no rendered text, both files stay as they are.
``--records`` names a file with the records of kernels that have left the catalog, one a line, like an earlier
``kernels.jsonl``. All digests must be of this machine's nvcc and CUTLASS.
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
from cudal2gen.generation import catalog, compiler, published
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record, parse
from kernelproof.ground import files, toolchain

RESULTS = Path(__file__).parents[1] / "results"
# The stores whose keys are renewed.
STORED = (RESULTS / "verdicts.jsonl", RESULTS / "proofs.jsonl")
DRAWN = 40  # kernels whose PTX is compared
IN_UNIT = 24  # kernels that are compiled in one translation unit
# A string, or a comment. Strings are matched so that "//" inside of one is not taken for a comment.
TOKENS = re.compile(r"""("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/""", re.DOTALL)
# In names of CuTe's unused constants: a hash of the translation unit's text.
UNIT_HASH = re.compile(r"_[0-9a-f]{8}(?=_10_kernels_cu_)")
# A program for the old checkout, whose modules may have other names: prints the texts of the records on its input.
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
    """A record, its text by the old checkout's templates, and its text by this checkout's."""

    record: Record
    old: str
    new: str


class Difference(Exception):
    """A text changed by more than its comments, or a stored line belongs to no text."""


def verdict_records(others: Path | None = None) -> list[Record]:
    """A record of each binary that may have a verdict: the catalog's, those that it replaced, those of both that
    stand in for bf16 operands, those on an RTX 3090, and the others."""
    records = catalog.load(places.shipped("configs") / "kernels.jsonl") + published.replaced()
    records += [parse(line) for line in others.read_text().splitlines()] if others else []
    for gpu in ("h200", "a100"):
        for layout in ("tn", "nn"):
            records += catalog.library(gpu, "f32", layout, ab="bf16", d="same")
    for layout in ("tn", "nn"):
        records += catalog.library("a100", "f32", layout, path=published.replaced_path(), ab="bf16", d="same")
    records += catalog.library("rtx3090", "f16", "tn")  # it has no fp16 sums of its own, so the A100's stand in
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
    """About DRAWN pairs, equally many of each family, spread evenly over its records."""
    families: dict[str, list[Pair]] = {}
    for pair in pairs:
        families.setdefault(pair.record.family, []).append(pair)
    per_family = -(-DRAWN // len(families))
    return [pair for family in families.values() for pair in family[:: -(-len(family) // per_family)]]


def ptx(texts: Sequence[str], arch: str, folder: Path, tools: toolchain.Toolchain) -> str:
    """The PTX of texts in one translation unit, without line numbers. Raises CalledProcessError if nvcc fails."""
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
    """Groups of pairs to compile in one translation unit, each with its architecture. Names in a group are distinct.

    Neighbours by name have tiles alike, for which a unit instantiates CuTe's templates once. That halves the time.
    """
    for arch in sorted({pair.record.arch for pair in pairs}):
        by_name = {pair.record.name: pair for pair in pairs if pair.record.arch == arch}
        texts = [by_name[name] for name in sorted(by_name)]
        yield from ((arch, texts[at : at + IN_UNIT]) for at in range(0, len(texts), IN_UNIT))


def digests(pairs: Sequence[Pair], tools: toolchain.Toolchain) -> dict[str, str]:
    """The new digest by the old one, for every text and architecture.

    A text may have verdicts for architectures for which the catalog no longer has its record.
    """
    return {
        compiler.digest(old, arch, launch, tools): compiler.digest(new, arch, launch, tools)
        for arch in sorted({pair.record.arch for pair in pairs})
        for old, new, launch in ((old, new, record.launch.write()) for record, old, new in pairs)
    }


def same_families(pairs: Iterable[Pair]) -> set[str]:
    """The families whose texts are all the same in both checkouts, comments included."""
    pairs = list(pairs)
    return {pair.record.family for pair in pairs} - {pair.record.family for pair in pairs if pair.old != pair.new}


def rekey(lines: Iterable[str], new_digest: dict[str, str], same: Iterable[str] = ()) -> list[str]:
    """The lines of a file of verdicts or proofs with new digests. ``same``: families whose lines may stay.

    Raises Difference if a line belongs to no text.
    """
    renewed = set(new_digest.values())
    changed: list[str] = []
    unmapped: list[str] = []
    for line in lines:
        stored = json.loads(line)
        old = stored["digest"]
        if old in renewed or any(f"_{family}_" in stored["record"] for family in same):
            changed.append(line)
            continue
        if old not in new_digest:
            unmapped.append(f"{stored['record']} ({old})")
            continue
        # The digest stands once in a line, and the rest of the line must keep its bytes.
        changed.append(line.replace(f'"digest":"{old}"', f'"digest":"{new_digest[old]}"', 1))
    if unmapped:
        raise Difference(f"{len(unmapped)} lines belong to no record: {unmapped[0]}, ..; give --records")
    return changed


def names_to_renew(before: Iterable[str], after: Iterable[str]) -> set[str]:
    """The names of the records whose lines change."""
    return {json.loads(old)["record"] for old, new in zip(before, after, strict=True) if old != new}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout from before the change of comments")
    parser.add_argument(
        "--unused", action="store_true", help="code may differ where the PTX of each kernel is the same"
    )
    parser.add_argument("--records", type=Path, help="a file of records with verdicts that the catalog no longer has")
    parser.add_argument("--dry-run", action="store_true", help="check, and write nothing")
    options = parser.parse_args()
    tools = toolchain.discover()
    records = verdict_records(options.records)
    texts = rendered_by(options.old.resolve(), records)
    pairs = [Pair(record, old, render(record)) for record, old in zip(records, texts, strict=True)]
    try:
        changed = with_other_code(pairs) if options.unused else []
        if not options.unused:
            check_texts(pairs)
        print(f"{len(pairs) - len(changed)} of {len(pairs)} texts are the same but for comments", flush=True)
        new_digest, same = digests(pairs, tools), same_families(pairs)
        stored = {path: path.read_text().splitlines(keepends=True) for path in STORED}
        renewed = {path: rekey(lines, new_digest, same) for path, lines in stored.items()}
        names = {name for path, lines in stored.items() for name in names_to_renew(lines, renewed[path])}
        check_ptx([pair for pair in changed if pair.record.name in names] + drawn(pairs), tools)
    except Difference as difference:
        sys.exit(str(difference))
    if options.dry_run:
        return
    for path, lines in renewed.items():
        files.write(path, "".join(lines))
        print(f"{len(lines)} lines of {path.name} have new digests")


if __name__ == "__main__":
    main()
