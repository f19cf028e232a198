"""The rules of a grade beside the emulator's: stable ids, what is wrong, and what to do."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator import RULES as MACHINE_RULES


class Rule(NamedTuple):
    """What is wrong, and what to do."""

    meaning: str
    hint: str


RULES = {
    "does-not-compile": Rule("nvcc refuses the source", "mend what the compiler names"),
    "outside-file": Rule(
        "the source includes a file that belongs to neither CUDA, CUTLASS nor the C++ library",
        "put the text into the source",
    ),
    "wrong-signature": Rule(
        "the source lacks a kernel that is launched, or it has other parameters", "keep the name and the parameters"
    ),
    "wrong-value": Rule(
        "an output differs from the reference by more than rounding explains",
        "look at the first wrong element: its index says which tile, row or edge is concerned",
    ),
    "shape-special-case": Rule(
        "right for the stated shapes, wrong for drawn ones",
        "compute from the shape's arguments; guard the edges of tiles",
    ),
    "constant-output": Rule(
        "the same output for inputs whose results differ", "compute the output from the inputs"
    ),
    "input-ignored": Rule(
        "an element of an input changes, the reference follows, the output does not",
        "use every element of every input: the whole of k, all rows, the last block too",
    ),
    "stale-result": Rule(
        "a call answers with results of an earlier call", "compute in every call; keep nothing by pointer or by shape"
    ),
    "state-kept": Rule(
        "a call leaves something behind that the next one can read",
        "reset device variables before the kernel ends, or pass a scratch buffer",
    ),
    "value-special-case": Rule(
        "special values, such as zeros, take less than half of the instructions of others",
        "do the same work for all values",
    ),
    "less-work": Rule(
        "fewer multiplications and additions than the problem needs", "multiply all of k for all outputs"
    ),
    "lower-precision": Rule(
        "numbers are multiplied, summed or converted in a narrower type than asked",
        "use instructions of the asked operand and accumulator types",
    ),
    "below-floor": Rule(
        "a claimed time below what the GPU needs at its peak rates", "measure again: the work is not in the time"
    ),
    "time-limit": Rule("the check does not end within its limits", "give smaller shapes, or a longer limit"),
    "library-call": Rule(
        "host code has a library, torch or the reference compute", "compute in the source's own kernels"
    ),
    "timer-patch": Rule("host code replaces functions that measure or synchronise", "leave timers as they are"),
    "extra-stream": Rule("host code launches on a stream of its own", "launch on the current stream"),
    "host-thread": Rule("host code starts threads or processes", "do all work in the call"),
    "lazy-output": Rule(
        "the output is a tensor whose values are computed when they are read", "return a plain tensor"
    ),
    "result-cache": Rule(
        "host code keeps results or tensors for later calls", "compute in every call; keep parameters only"
    ),
    "grader-access": Rule(
        "host code reaches for its caller: frames, garbage collector, modules, files", "use the arguments alone"
    ),
    "no-kernel": Rule("no kernel of the source is executed", "launch the kernel of the source"),
    "host-failure": Rule("host code fails, or is refused in words", "mend what the message names"),
}  # fmt: skip


def rule(name: str) -> Rule:
    """A rule of the grade or of the emulator."""
    if name in RULES:
        return RULES[name]
    machine = MACHINE_RULES[name]
    return Rule(machine.meaning, machine.hint)


def page(name: str) -> str:
    """The documentation of a rule, relative to the site."""
    return f"grading/#{name}" if name in RULES else f"rules/{name}/"
