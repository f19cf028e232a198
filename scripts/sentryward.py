"""Runs the same launches through SentryWard, a static verifier of PTX for Blackwell, and through the emulator.

    pip install sentryward                           # in an environment of its own
    python -m scripts.sentryward PATH/TO/sentryward  # minutes; prints a Markdown table

There are two sets of launches. The first has the example programs on the documentation page of each rule; each is known
to be wrong or right. They are compiled for sm_100a unless their page names an architecture. The second has a kernel of
every third record of ``tests.cudal2gen.paths.PATHS``, which together cover all branches of the templates. These kernels
are right. SentryWard's input states grid, block, scalar parameters and tensor maps (``input_of``), but not where
buffers lie. Its ``race_free`` counts as right; a race, a wrong lifetime or a lack of synchronisation as wrong;
everything else as not decided.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from cudal2gen.generation import compiler
from cudal2gen.validator import Shape
from cudal2gen.validator.emulated import execute
from kernelproof.emulator.frontend.ptx import Instr, Mem, Sym
from kernelproof.emulator.hopper.tensor_map import MAP_BYTES, TensorMap, decode
from kernelproof.emulator.host.execution import KernelLaunch
from kernelproof.emulator.state.launch_state import LaunchResult
from tests.cudal2gen.paths import PATHS
from tests.kernelproof.emulator.rule_examples import WITH_EXAMPLES, examples

# The format of what SentryWard reads.
SCHEMA = "spverify.kernel-input/v1"
# CUtensorMapDataType, CUtensorMapSwizzle -> SentryWard's words.
ELEMENT_TYPES = {6: "f16", 7: "f32", 9: "bf16"}
SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B"}
# By bytes: how an unsigned parameter is unpacked.
UNSIGNED = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}
# SentryWard's words for a wrong kernel.
WRONG = ("not_wellsynced", "potential_race", "invalid_lifecycle")
TIMEOUT = 60  # seconds for a launch
STRIDE = 3  # every third record of PATHS is launched
# Rules about order, synchronisation and lifetimes. SentryWard does not ask about the others, such as bounds and values.
ORDERING_RULES = {
    "barrier-count", "barrier-divergence", "cluster", "cluster-launch-control", "deadlock", "exit-before-barrier",
    "global-race", "grid-dependency", "in-flight", "mbarrier", "mbarrier-overwritten", "memory-scope", "phase-at-exit",
    "proxy-fence", "runaway", "shared-race", "stale-read", "tcgen05-fence", "tcgen05-group", "tensor-map-fence",
    "tensor-memory-allocation", "tensor-memory-race", "warp-divergence", "wgmma-registers",
}  # fmt: skip


class Answer(NamedTuple):
    """A tool's answer for a launch, and the seconds that it took. ``verdict``: right, wrong or undecided.
    ``raw_result``: the tool's own word for that."""

    verdict: str
    raw_result: str
    seconds: float


class Comparison(NamedTuple):
    """A launch and the verdicts of both tools. ``group``: its row of the table, which also says whether it is right, as
    in ``examples of order and lifetimes that are right``."""

    name: str
    group: str
    sentryward: Answer
    emulator: Answer


def input_of(launch: KernelLaunch) -> dict[str, Any]:
    """A launch as SentryWard's input: every scalar that the kernel loads from its parameters, and every tensor map.
    Pointers are left out, so that they stay symbolic."""
    function, geometry = launch.module.kernels[launch.kernel], launch.geometry
    starts = dict(zip((each.name for each in function.params), function.offsets, strict=True))
    scalars: dict[tuple[str, int], dict[str, Any]] = {}
    for ins in function.body:
        if isinstance(ins, Instr) and ins.base == "ld" and "param" in ins.parts:
            for name, offset, kind in _loads(ins):
                size = int(re.sub(r"\D", "", kind)) // 8
                (value,) = struct.unpack_from(UNSIGNED[size], launch.parameters, starts[name] + offset)
                # A value of 8 bytes that is an address within a buffer is taken for a pointer.
                if not (size == 8 and launch.memory.find(value - launch.memory.base)):
                    scalar = {"parameter": name, "offset": offset, "type": f"u{8 * size}", "value": value}
                    scalars[name, offset] = scalar
    # A tensor map may be at any multiple of 64 bytes of a parameter.
    maps = []
    for variable in function.params:
        raw = launch.parameters[starts[variable.name] :][: variable.size]
        for offset in range(0, variable.size - MAP_BYTES + 1, 64):
            if (map_ := decode(raw[offset : offset + MAP_BYTES])) is not None:
                maps.append({"parameter": variable.name, "offset": offset} | _words(map_))
    return {
        "schema": SCHEMA,
        "entry": launch.kernel,
        "launch": {
            "grid_dim": geometry.grid, "block_dim": geometry.block, "cluster_dim": geometry.cluster,
            "dynamic_shared_bytes": geometry.shared_bytes,
        },
        "arguments": list(scalars.values()),
        "tma_descriptors": maps,
    }  # fmt: skip


def _loads(ins: Instr) -> Iterator[tuple[str, int, str]]:
    """The parameter, byte offset and type of each word that an ld.param loads."""
    count = next((int(part[1:]) for part in ins.parts if re.fullmatch(r"v\d", part)), 1)
    for at in ins.operands:
        if isinstance(at, Mem) and isinstance(at.base, Sym):
            size = int(re.sub(r"\D", "", ins.parts[-1])) // 8
            yield from ((at.base.name, at.offset + i * size, ins.parts[-1]) for i in range(count))


def _words(map_: TensorMap) -> dict[str, Any]:
    """A tensor map in SentryWard's words."""
    return {
        "element_type": ELEMENT_TYPES.get(map_.dtype, str(map_.dtype)), "global_shape": map_.dims,
        "global_strides_bytes": map_.strides, "box_shape": map_.box, "element_strides": map_.steps,
        "interleave": "none", "swizzle": SWIZZLES[map_.swizzle], "oob_fill": "zero",
    }  # fmt: skip


def ask(tool: str, ptx: str, given: dict[str, Any]) -> Answer:
    """SentryWard's answer for a launch."""
    with tempfile.TemporaryDirectory() as folder:
        text, config = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        text.write_text(ptx)
        config.write_text(json.dumps(given))
        command = [tool, str(text), "--input", str(config), "--timeout", str(TIMEOUT)]
        start = time.monotonic()
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
    try:
        result = json.loads(process.stdout)
    except ValueError:
        return Answer("undecided", "no answer", seconds)
    word = result["result"]
    if word == "invalid_input":
        raise SystemExit(f"SentryWard refuses the input: {result['diagnostics']}")
    return Answer("right" if word == "race_free" else "wrong" if word in WRONG else "undecided", word, seconds)


@contextmanager
def launches() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collects the PTX and the input of every launch that is executed meanwhile."""
    found: list[tuple[str, dict[str, Any]]] = []
    plain = KernelLaunch.execute

    def execute(launch: KernelLaunch) -> LaunchResult:
        found.append((launch.module.text, input_of(launch)))
        return plain(launch)

    with patch.object(KernelLaunch, "execute", execute):
        yield found


def judge_examples(tool: str) -> Iterator[Comparison]:
    """The examples of the pages: the first of each is wrong, and the others are right."""
    for rule in WITH_EXAMPLES:
        for number, example in enumerate(examples(rule)):
            with launches() as found:
                start = time.monotonic()
                reports = example.run("sm_100a")
                seconds = time.monotonic() - start
            if found:
                own = Answer("wrong" if reports else "right", reports[0].kind if reports else "", seconds)
                kind = "of order and lifetimes" if rule in ORDERING_RULES else "of the other rules"
                group = f"examples {kind} that are {'right' if number else 'wrong'}"
                yield Comparison(f"{rule} {number}", group, ask(tool, *found[0]), own)


def judge_records(tool: str) -> Iterator[Comparison]:
    """One launch of a kernel of every third path of the templates, on one tile. Kernels that take no such problem are
    left out."""
    library, records = compiler.launcher(), dict(list(PATHS.items())[::STRIDE])
    for (name, record), artifact in zip(records.items(), compiler.build(list(records.values())), strict=True):
        sizes = Shape(record.bm, record.bn, 2 * record.k_step)
        with launches() as found:
            start = time.monotonic()
            execution = execute(record, artifact, library, sizes, "integers")
            seconds = time.monotonic() - start
        if found:
            own = Answer("wrong" if execution.findings else "right", "", seconds)
            yield Comparison(name, f"kernels of {record.family}, all right", ask(tool, *found[0]), own)


def table(rows: list[Comparison]) -> str:
    """How both tools judge the launches of each group."""
    heads = "| launches | tool | called right | called wrong | not decided | median seconds |"
    lines = [heads, "|---|---|---:|---:|---:|---:|"]
    for group in dict.fromkeys(row.group for row in rows):
        for title, tool in (("SentryWard", "sentryward"), ("emulator", "emulator")):
            answers = [getattr(row, tool) for row in rows if row.group == group]
            said = Counter(answer.verdict for answer in answers)
            cells = (f"{len(answers)} {group}", title, *(str(said[x]) for x in ("right", "wrong", "undecided")))
            lines.append(f"| {' | '.join(cells)} | {median(x.seconds for x in answers):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", help="path of the executable sentryward")
    tool = parser.parse_args().tool
    rows = []
    for row in chain(judge_examples(tool), judge_records(tool)):
        print(*row[:2], row.sentryward, row.emulator, sep="\t", file=sys.stderr)
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
