"""The one place that asks an SMT solver: is a linear or polynomial inequality true for all named integers?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelproof.certificates.polynomials import Monomial
from kernelproof.ground.errors import WrongInput, installation

# The work that z3 may do for one question, in z3's units (``rlimit``): one to a few seconds. Unlike a limit of time, it
# gives the same answer on a busy machine.
MOST_WORK = 50_000_000
Terms = Mapping[Monomial, int]


class Unanswered(Exception):
    """A question that the solver does not answer within its limit."""


def counterexample(
    terms: Terms, bounds: Mapping[Monomial, tuple[int, int]], assumed: Sequence[Terms]
) -> dict[str, int] | None:
    """Values of the names for which a sum of monomials is negative; None if there are none.

    ``bounds``: the least and the largest value of each product of names. ``assumed``: sums that are at least 0.
    Raises Unanswered, and WrongInput if the solver is not installed.
    """
    z3 = _z3()
    names = {name for each in (terms, *assumed) for monomial in each for name in monomial}
    # A bound of a product limits its names together, so names that share a product with the question's count too.
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
    """A sum of monomials in words."""
    return " + ".join(f"{c}{'*' if x else ''}{'*'.join(x)}" for x, c in terms.items()) or "0"


def _z3() -> Any:
    """The module z3, which is optional."""
    try:
        import z3
    except ImportError:
        raise WrongInput(f"proofs need z3-solver: {installation('prove')}") from None
    return z3
