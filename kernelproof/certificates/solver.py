"""The one place that asks an SMT solver: is a linear or polynomial inequality true for all named integers?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    from kernelproof.certificates.facts import Facts
    from kernelproof.certificates.polynomials import Monomial

LIMIT_MS = 2000  # of one question


def counterexample(terms: dict[Monomial, int], facts: Facts) -> dict[str, int] | None:
    """Values of the names, within their facts, for which a sum of monomials is negative; None if there are none.

    Raises NotCertified if the solver does not know, and WrongInput if it is not installed.
    """
    from kernelproof.certificates.facts import NotCertified

    z3 = _z3()
    names = {name for monomial in terms for name in monomial}
    for each in facts.assumed:
        names |= set(each.names())
    names |= {name for monomial in facts.bounds for name in monomial if len(monomial) > 1 and names & set(monomial)}
    variables = {name: z3.Int(name) for name in sorted(names)}

    def value(terms: dict[Monomial, int]) -> Any:
        total = z3.IntVal(0)
        for monomial, coefficient in terms.items():
            product = z3.IntVal(coefficient)
            for name in monomial:
                product = product * variables[name]
            total = total + product
        return total

    solver = z3.Solver()
    solver.set("timeout", LIMIT_MS)
    for monomial, (low, high) in facts.bounds.items():
        if monomial and names.issuperset(monomial):
            solver.add(value({monomial: 1}) >= low, value({monomial: 1}) <= high)
    for each in facts.assumed:
        solver.add(value(each.in_lane(0)) >= 0)
    solver.add(value(terms) < 0)
    answer = solver.check()
    if answer == z3.unsat:
        return None
    if answer == z3.unknown:
        raise NotCertified(f"the solver does not decide whether {_spelled(terms)} is at least 0")
    model = solver.model()
    return {name: model.eval(variable, model_completion=True).as_long() for name, variable in variables.items()}


def _spelled(terms: dict[Monomial, int]) -> str:
    return " + ".join(f"{c}{'*' if x else ''}{'*'.join(x)}" for x, c in terms.items()) or "0"


def _z3() -> Any:
    try:
        import z3
    except ImportError:
        raise WrongInput("proofs need z3-solver: pip install 'cudal2gen[prove]'") from None
    return z3
