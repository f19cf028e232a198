"""Grades kernels that a language model wrote, without a GPU: are they right, and do they really do the work?

    from kernelproof.grading import Tolerance, check_source

    verdict = check_source(
        text, lambda a, b: a @ b.T, [{"m": 64, "n": 48, "k": 32}],
        buffers={"a": "in:f16[m, k]", "b": "in:f16[n, k]", "d": "out:f16[m, n]"},
        launches=[{"entry": "gemm", "grid": "ceil_div(n, 16), ceil_div(m, 16)", "block": 32,
                   "args": ["a", "b", "d", "m", "n", "k"]}],
        tolerance=Tolerance(terms="k"),
    )
    verdict.right, verdict.findings, verdict.model_dump_json()

A wrong kernel has wrong values. A cheating one may give right values for the inputs it expects: it ignores some inputs,
keeps results of earlier calls, does less work, computes in a narrower type, or claims an impossible time. ``rules``
lists all that a grade looks for.

``contract`` describes what is launched. ``device`` executes device code, ``launcher`` host code. ``examination`` calls
the kernels of one shape many times and compares them with the ``reference``; ``inputs``, ``tolerance`` and
``arithmetic`` say on which values, how exactly, and with how many operations. ``floor`` is the least time that a GPU
needs. ``source`` does all of this for a text and returns a ``verdict``.
"""

from kernelproof.grading.contract import ContractLaunch
from kernelproof.grading.rules import RULES
from kernelproof.grading.source import Limits, check_source
from kernelproof.grading.tolerance import Tolerance
from kernelproof.grading.verdict import Finding, Verdict

__all__ = ["RULES", "ContractLaunch", "Finding", "Limits", "Tolerance", "Verdict", "check_source"]
