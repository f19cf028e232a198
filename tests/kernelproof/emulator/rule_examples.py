"""Reads and executes the examples on the rules' pages, programs whose first line is the command that executes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernelproof.checking import plan
from kernelproof.emulator import HOPPER, RULES, Device, Memory, Options, Report, load
from kernelproof.ground.chips import GPUS
from tests.kernelproof.emulator.build import ptx_of_text

PAGES = Path(__file__).parents[3] / "docs" / "kernelproof" / "rules"
# Host code breaks these rules, not a kernel. Some have programs as examples, which test_host_order.py runs.
OF_THE_HOST = {"launch-error", "launch-refused", "copy-out-of-bounds", "grid-sync"}
WITH_PROGRAMS = {"stream-race", "host-race", "host-access", "use-after-free", "invalid-free", "copy-direction"}
OF_CHECKS = {"does-not-assemble"}  # test_assembly.py runs its example
OF_MACHINE_CODE = {"register-hazard"}  # no source can have it; test_machine_schedules.py edits a cubin
WITH_EXAMPLES = sorted(RULES.keys() - OF_THE_HOST - WITH_PROGRAMS - OF_CHECKS - OF_MACHINE_CODE)
DEVICES = {"sm_90a": HOPPER, "sm_100a": Device.of(GPUS["b200"])}
# The command that executes the example in x.cu.
COMMAND = re.compile(r'// kernelproof check x\.cu --launch "(.*?)" --args "(.*?)"( --adverse)?(?: --gpu (sm_\w+))?')
# A launch that only Python's interface can describe.
IN_PYTHON = re.compile(r"// from Python: <<<(\d+), (\d+)>>>( overlapping:)? (.*?)(?: \((sm_\w+)\))?")
TYPES = {"float": np.dtype("f4"), "int": np.dtype("i4")}


class Example(NamedTuple):
    """A program of a rule's page. Its first line is a comment that says how it is launched: it matches ``COMMAND`` or
    ``IN_PYTHON``."""

    code: str

    def marked(self, mark: str) -> list[int]:
        """The lines (from 1) that a comment marks."""
        lines = self.code.split("\n")
        return [i for i, line in enumerate(lines, 1) if re.search(rf"//.*\b{mark}\b", line)]

    def run(self, default: str = "sm_80", lanes: int | None = 64) -> list[Report]:
        """The findings of its launch. ``default``: the architecture if the page names none. ``lanes``: the number of
        threads that are executed together, None for the emulator's choice."""
        head, memory = self.code.split("\n")[0], Memory()
        arguments: list[Any]
        if command := COMMAND.fullmatch(head):
            launch, words, adverse, arch = command.groups()
            spec = plan.launch(launch, tuple(plan.argument(word, {}) for word in words.split()))
            grid, block, overlapping = spec.grid, spec.block, None
            arguments = [
                memory.upload(each.array(0), each.role) if isinstance(each, plan.BufferSpec) else each
                for each in spec.arguments
            ]
        else:
            in_python = IN_PYTHON.fullmatch(head)
            assert in_python is not None, self.code
            ctas, threads, overlapping, words, arch = in_python.groups()
            grid, block, adverse = (int(ctas),), (int(threads),), None
            arguments = [argument(word.strip(), memory) for word in words.split(",")]
        arch = arch or default
        program = load(ptx_of_text(self.code, arch=arch))
        return program.launch(
            program.kernels[0],
            grid,
            block,
            arguments,
            memory=memory,
            overlapping=overlapping is not None,
            options=Options(loop_limit=2000, lanes=lanes, adverse=adverse is not None),
            **({"device": DEVICES[arch]} if arch in DEVICES else {}),
        ).reports


def argument(text: str, memory: Memory) -> Any:
    """An argument of ``IN_PYTHON``: ``5``, ``zeros BYTES``, or ``ROLE TYPE[COUNT]``, of which ``region N`` elements may
    be written."""
    if text.isdigit():
        return int(text)
    if text.startswith("zeros"):
        return bytes(int(text.split()[1]))
    m = re.match(r"(in|out|inout) (\w+)\[(\d+)\](?: region (\d+))?$", text)
    assert m is not None, text
    role, kind, count = plan.ROLES[m[1]], TYPES[m[2]], int(m[3])
    values = np.arange(count, dtype=kind) if role == "input" else np.zeros(count, kind)
    return memory.upload(values, role, region=slice(0, int(m[4])) if m[4] else None)


def examples(rule: str) -> list[Example]:
    """The CUDA texts on a rule's page."""
    text = (PAGES / f"{rule}.md").read_text()
    return [Example(code) for code in re.findall(r"```cuda\n(.*?)```", text, re.S)]
