"""Proposers by name, as ``tune --proposers`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cudal2gen.kernel import Record
from cudal2gen.tuner import cost_model, reward
from cudal2gen.tuner.climbing import CostModelProposer
from cudal2gen.tuner.cost_model import CostModel
from cudal2gen.tuner.policy import Policy
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.proposers import Evolution, Heuristics, Mixture, Nearest, PolicyProposer, Random, Tpe

NAMES = ("cost-model", "policy", "prior", "llm", "nearest", "heuristics", "tpe", "evolution", "random")


def make_proposer(
    names: Sequence[str],
    policy: Callable[[], Policy],
    pool: Iterable[Record],
    seed: int = 0,
    reward_settings: reward.Settings | None = None,
    llm: Callable[[], Proposer] | None = None,
    costs: Callable[[], CostModel] = cost_model.load,
) -> Proposer:
    """The proposer of these names (``NAMES``), a mixture where there are several.

    ``policy``, ``llm`` and ``costs`` make the policy, the language model and the cost model; each is
    called at most once, and only where a name needs it. ``reward_settings``: the policy's reward, the logarithm of
    speed if None. Raises ValueError for an unknown name, MissingLibrary.
    """
    if strangers := [name for name in names if name not in NAMES]:
        raise ValueError(f"no proposer {', '.join(strangers)}: must be of {', '.join(NAMES)}")
    records = list(pool)
    learned = policy() if {"policy", "prior"} & set(names) else None
    proposers: list[Proposer] = []
    for name in dict.fromkeys(names):
        if name in ("policy", "prior") and learned is not None:
            prior = name == "prior"
            proposers.append(
                PolicyProposer(learned, name, seed, frozen=prior, keep=not prior, group=True, reward=reward_settings)
            )
        elif name == "llm":
            if llm is None:
                raise ValueError("proposer llm needs a server: --llm-url and --llm-model, or --llm-replay FILE")
            proposers.append(llm())
        elif name == "cost-model":
            proposers.append(CostModelProposer(costs(), records, name))
        elif name == "nearest":
            proposers.append(Nearest(records))
        elif name == "heuristics":
            proposers.append(Heuristics())
        else:
            proposers.append({"tpe": Tpe, "evolution": Evolution, "random": Random}[name](seed))
    return proposers[0] if len(proposers) == 1 else Mixture(proposers)
