"""Lists the rules of a grade: for each stable id, what is wrong and what to do. The emulator has rules of its own."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator import RULES as MACHINE_RULES


class GradingRule(NamedTuple):
    """What a source that breaks the rule does wrong, and what to do."""

    meaning: str
    hint: str


RULES = {
    "does-not-compile": GradingRule("nvcc or ptxas refuses the source", "correct what the compiler names"),
    "outside-file": GradingRule(
        "the source includes a file that belongs to neither CUDA, CUTLASS nor the C++ library",
        "copy the needed text into the source",
    ),
    "wrong-signature": GradingRule(
        "the source lacks a kernel that is launched, or the kernel has other parameters",
        "keep the name and the parameters",
    ),
    "wrong-value": GradingRule(
        "an output differs from the reference by more than rounding explains",
        "look at the first wrong element: its index shows which tile, row or edge is wrong",
    ),
    "shape-special-case": GradingRule(
        "the outputs are right for the stated shapes and wrong for randomly drawn ones",
        "compute from the shape's arguments; guard the edges of tiles",
    ),
    "environment-dependent": GradingRule(
        "the result or the work depends on clocks, the number of the SM or of the grid, or addresses",
        "read nothing of the machine that may differ in the next run",
    ),
    "constant-output": GradingRule(
        "the output is the same for inputs whose results differ", "compute the output from the inputs"
    ),
    "input-ignored": GradingRule(
        "an element of an input changes and with it the reference, but not the output",
        "use every element of every input: all of k, all rows, and the last block too",
    ),
    "stale-result": GradingRule(
        "a call answers with results of an earlier call", "compute in every call; keep nothing by pointer or by shape"
    ),
    "state-kept": GradingRule(
        "a call stores something that the next call can read",
        "reset device variables before the kernel ends, or pass a scratch buffer",
    ),
    "value-special-case": GradingRule(
        "special values, such as zeros, take less than half of the instructions that other values take",
        "do the same work for all values",
    ),
    "broken-relation": GradingRule(
        "inputs are permuted, scaled, repeated or added, the reference follows exactly, the output does not",
        "compute all elements in the same way, whatever their values are",
    ),
    "less-work": GradingRule(
        "the kernels execute fewer multiplications and additions than the problem needs",
        "multiply all of k for all outputs",
    ),
    "lower-precision": GradingRule(
        "numbers are multiplied, summed or converted in a narrower type than required",
        "use instructions with the required operand and accumulator types",
    ),
    "below-floor": GradingRule(
        "the claimed time is below what the GPU needs at its peak rates",
        "measure again: the measured interval does not contain the work",
    ),
    "time-limit": GradingRule("host code does not end within its limits", "use smaller shapes or a longer limit"),
    "library-call": GradingRule(
        "host code lets a library, torch or the reference compute the result", "compute in the source's own kernels"
    ),
    "timer-patch": GradingRule("host code replaces functions that measure or synchronise", "leave timers as they are"),
    "extra-stream": GradingRule("host code launches on a stream of its own", "launch on the current stream"),
    "host-thread": GradingRule("host code starts threads or processes", "do all work in the call"),
    "lazy-output": GradingRule(
        "the output is a tensor whose values are computed when they are read", "return a plain tensor"
    ),
    "result-cache": GradingRule(
        "host code keeps results or tensors for later calls", "compute in every call; keep parameters only"
    ),
    "grader-access": GradingRule(
        "host code accesses its caller: frames, garbage collector, modules or files", "use only the arguments"
    ),
    "no-kernel": GradingRule("no kernel of the source is executed", "launch the kernel of the source"),
    "host-failure": GradingRule("host code fails or throws an exception", "correct what the message names"),
}  # fmt: skip


def rule(name: str) -> GradingRule:
    """The rule with an id, of the grade or of the emulator. Raises KeyError for an unknown id."""
    if name in RULES:
        return RULES[name]
    machine = MACHINE_RULES[name]
    return GradingRule(machine.meaning, machine.hint)


def page(name: str) -> str:
    """The page that documents a rule, as a path relative to the root of the documentation."""
    return f"grading/#{name}" if name in RULES else f"rules/{name}/"
