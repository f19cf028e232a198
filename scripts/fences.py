"""Lists the full fences in the machine code of kernels, by the template line that they come from.

    python scripts/fences.py                 for one kernel of each text of the catalog
    python scripts/fences.py RECORD ...      for these records, by name or problem

A full fence waits until all memory accesses of its thread are visible to the device: a MEMBAR of more than a CTA.
``REASONS`` says for each line why it needs one, and a fence without a reason there is an error.
``tests/cudal2gen/test_fences.py`` applies it to kernels of every way to sum, claim and store tiles.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cudal2gen import places
from cudal2gen.generation import catalog, compiler
from kernelproof import sass

FULL = re.compile(r"MEMBAR\S*(?<!\.CTA)$")  # opcodes of fences that reach beyond the CTA
# For the text of each line that yields full fences: why it needs them, and which test fails without them.
REASONS = {
    'CUTE_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }': (
        "a slice's partial sums, stored by all threads of a CTA, are read by the CTA that arrives last: "
        "a ticket without a fence before and after it is a global-race (tests/cudal2gen/test_counters.py)"
    ),
    ':: "l"(__cvta_generic_to_global(gemm.arrivals + work.tile)) : "memory");': (
        "a part of a tile's sum, stored by all threads that share it, is read by other CTAs: "
        "a relaxed arrival is a global-race (tests/cudal2gen/test_counters.py)"
    ),
}


class Fence(NamedTuple):
    """Full fences of one line of a kernel's text. ``count``: how many instructions."""

    line: str
    template: str
    count: int


def main() -> None:
    names = sys.argv[1:]
    records = [r for r in catalog.load() if not names or r.name in names or r.problem.mnk in names]
    built = list({record.name: record for record in records}.values())
    lines: dict[Fence, list[str]] = defaultdict(list)
    for record in built:
        directory = places.build_dir() / compiler.build([record])[0].digest
        for fence in fences(directory):
            lines[fence].append(record.name)
    for fence, kernels in sorted(lines.items()):
        reason = REASONS.get(fence.line, "NO REASON")
        print(f"{fence.template}: {fence.count} in each of {len(kernels)} kernels, e.g. {kernels[0]}")
        print(f"  {fence.line}\n  {reason}")
    print(f"{len(built)} kernels")
    if unexplained(lines):
        sys.exit("a full fence has no reason")


def fences(directory: Path) -> Iterator[Fence]:
    """The full fences of a built kernel."""
    text = (directory / "kernel.cu").read_text().splitlines()
    counts: dict[str, int] = defaultdict(int)
    for function in sass.disassemble(directory / "kernel.cubin"):
        for instruction in function.instructions:
            if FULL.match(instruction.opcode):
                counts[text[instruction.source[0].line - 1].strip()] += 1
    for line, count in counts.items():
        yield Fence(line, template_of(line), count)


def unexplained(fences: Iterable[Fence]) -> list[Fence]:
    """Fences without a reason."""
    return [fence for fence in fences if fence.line not in REASONS]


def template_of(line: str) -> str:
    """The line of a template that a line of a text comes from, as ``file:number``."""
    return _template_lines().get(line, "a line that a template composes")


@cache
def _template_lines() -> dict[str, str]:
    root = places.shipped("templates")
    return {
        line.strip(): f"{path.relative_to(root)}:{number}"
        for path in sorted(root.rglob("*.j2"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
    }


if __name__ == "__main__":
    main()
