"""The examples on the pages of the rules: programs whose first line says how they are launched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernelproof.emulator import HOPPER, RULES, Device, Memory, Options, Report, load
from kernelproof.ground.chips import GPUS
from tests.kernelproof.emulator.build import compiled_text

PAGES = Path(__file__).parents[3] / "docs" / "kernelproof" / "rules"
# Host code breaks these rules, not a kernel. Some have programs as examples, which test_host_order.py runs.
OF_THE_HOST = {"launch-error", "launch-refused", "copy-out-of-bounds", "grid-sync"}
WITH_PROGRAMS = {"stream-race", "host-race", "host-access", "use-after-free", "invalid-free", "copy-direction"}
OF_CHECKS = {"does-not-assemble"}  # test_assembly.py runs its example
OF_MACHINE_CODE = {"register-hazard"}  # no source can have it; test_machine_schedules.py edits a cubin
WITH_EXAMPLES = sorted(RULES.keys() - OF_THE_HOST - WITH_PROGRAMS - OF_CHECKS - OF_MACHINE_CODE)
TYPES = {"float": np.dtype("f4"), "float4": np.dtype("(4,)f4"), "int": np.dtype("i4")}
DEVICES = {"sm_90a": HOPPER, "sm_100a": Device.of(GPUS["b200"])}
HEAD = re.compile(r"// <<<(\d+), (\d+)>>>(?: cluster (\d+):)?( overlapping:)?( adverse:)? (.*?)(?: \((sm_\w+)\))?$")


class Example(NamedTuple):
    """A program of a page. Its first line is a comment: grid, block, cluster, arguments, architecture."""

    code: str

    def marked(self, mark: str) -> list[int]:
        """The lines (from 1) that a comment marks."""
        lines = self.code.split("\n")
        return [i for i, line in enumerate(lines, 1) if re.search(rf"//.*\b{mark}\b", line)]

    def run(self, default: str = "sm_80") -> list[Report]:
        """The findings of its launch. ``default``: the architecture if the page names none."""
        head = HEAD.match(self.code.split("\n")[0])
        assert head is not None, self.code
        grid, block, cluster, overlapping, adverse, arguments, arch = head.groups()
        arch = arch or default
        program = load(compiled_text(self.code, arch=arch))
        memory = Memory()
        settings: dict[str, Any] = {"device": DEVICES[arch]} if arch in DEVICES else {}
        return program.launch(
            program.kernels[0],
            int(grid),
            int(block),
            [argument(text.strip(), memory) for text in arguments.split(",")],
            memory=memory,
            cluster=int(cluster or 1),
            overlapping=overlapping is not None,
            options=Options(loop_limit=2000, lanes=64, adverse=adverse is not None),
            **settings,
        ).reports


def argument(text: str, memory: Memory) -> Any:
    """``5``, ``zeros BYTES``, or ``ROLE TYPE[COUNT]``, of which ``region N`` elements may be written."""
    if text.isdigit():
        return int(text)
    if text.startswith("zeros"):
        return bytes(int(text.split()[1]))
    m = re.match(r"(in|out|inout|scratch) (\w+)\[(\d+)\](?: region (\d+))?$", text)
    assert m is not None, text
    role = {"in": "input", "out": "output"}.get(m[1], m[1])
    kind, count = TYPES[m[2]], int(m[3])
    values = np.zeros((count, *kind.shape), kind.base) if role != "input" else np.arange(count, dtype=kind)
    return memory.upload(values, role, region=slice(0, int(m[4])) if m[4] else None)


def examples(rule: str) -> list[Example]:
    """The CUDA texts on a rule's page."""
    text = (PAGES / f"{rule}.md").read_text()
    return [Example(code) for code in re.findall(r"```cuda\n(.*?)```", text, re.S)]
