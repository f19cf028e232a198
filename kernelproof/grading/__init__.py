"""Grades of model-written kernels without a GPU: values, dependence on every input, work, types, state, floors.

    from kernelproof.grading import Limits, check_source

    verdict = check_source(
        text, lambda a, b: a @ b.T, [{"m": 64, "n": 48, "k": 32}],
        buffers={"a": "in:f16[m, k]", "b": "in:f16[n, k]", "d": "out:f16[m, n]"},
        launches=[{"entry": "gemm", "grid": "ceil_div(n, 16), ceil_div(m, 16)", "block": 32,
                   "args": ["a", "b", "d", "m", "n", "k"]}],
        tolerance=Tolerance(terms="k"),
    )
    verdict.right, verdict.findings, verdict.model_dump_json()

``contract`` says what is launched, ``device`` executes calls of it, ``examination`` judges those of a shape by
``tolerance``, ``inputs`` and ``arithmetic``, ``floor`` bounds times, ``source`` puts a verdict together.
"""

from kernelproof.grading.contract import Launch
from kernelproof.grading.rules import RULES
from kernelproof.grading.source import Limits, check_source
from kernelproof.grading.tolerance import Tolerance
from kernelproof.grading.verdict import Finding, Verdict

__all__ = ["RULES", "Finding", "Launch", "Limits", "Tolerance", "Verdict", "check_source"]
