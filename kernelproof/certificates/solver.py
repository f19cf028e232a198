"""Asks the SMT solver z3 whether a polynomial is at least 0 for all values that its named integers may have.

``facts`` calls this for questions that bounds of the names do not answer. No other module uses z3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelproof.certificates.polynomials import Monomial
from kernelproof.ground.errors import WrongInput, installation

# The work that z3 may do for one question, in z3's units (``rlimit``): one to a few seconds. Unlike a limit of time, it
# gives the same answer on a busy machine.
MOST_WORK = 50_000_000
Terms = Mapping[Monomial, int]  # a polynomial, the same in all lanes: product of names -> coefficient


class Unanswered(Exception):
    """The solver did not answer a question within its limit of work."""


def counterexample(
    terms: Terms, bounds: Mapping[Monomial, tuple[int, int]], assumed: Sequence[Terms]
) -> dict[str, int] | None:
    """Values of the names for which a polynomial is negative although all facts hold; None if it is at least 0 always.

    ``bounds``: the least and the largest value of a name or of a product of names. ``assumed``: polynomials that are at
    least 0. Names without bounds are any integers. Raises Unanswered, and WrongInput if z3 is not installed.
    """
    z3 = _z3()
    names = {name for each in (terms, *assumed) for monomial in each for name in monomial}
    # A bounded product such as m * k relates its names, so k needs a variable too if only m is in the question.
    names |= {name for monomial in bounds for name in monomial if len(monomial) > 1 and names & set(monomial)}
    variables = {name: z3.Int(name) for name in sorted(names)}

    def value(terms: Terms) -> Any:
        total = z3.IntVal(0)
        for monomial, coefficient in terms.items():
            product = z3.IntVal(coefficient)
            for name in monomial:
                product = product * variables[name]
            total = total + product
        return total

    solver = z3.Solver()
    solver.set("rlimit", MOST_WORK)
    for monomial, (low, high) in bounds.items():
        if monomial and names.issuperset(monomial):
            solver.add(value({monomial: 1}) >= low, value({monomial: 1}) <= high)
    for each in assumed:
        solver.add(value(each) >= 0)
    solver.add(value(terms) < 0)
    answer = solver.check()
    if answer == z3.unsat:
        return None
    if answer == z3.unknown:
        raise Unanswered(f"the solver does not decide whether {_spelled(terms)} is at least 0")
    model = solver.model()
    return {name: model.eval(variable, model_completion=True).as_long() for name, variable in variables.items()}


def _spelled(terms: Terms) -> str:
    """A polynomial as text."""
    return " + ".join(f"{c}{'*' if x else ''}{'*'.join(x)}" for x, c in terms.items()) or "0"


def _z3() -> Any:
    """The module z3, which is optional."""
    try:
        import z3
    except ImportError:
        raise WrongInput(f"proofs need z3-solver: {installation('prove')}") from None
    return z3
