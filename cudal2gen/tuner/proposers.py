"""Who proposes records: interchangeable, and mixable. Each answers the same question with proposals.

A proposer that makes fields of its own rather than picking candidates, as a language model does, answers with
``proposal``: what breaks a rule then carries the rule, and becomes a trial like every other failure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from cudal2gen.kernel import Fields, IllegalRecord, Problem, Record, parse
from cudal2gen.results import Trial
from cudal2gen.tuner import reward, space
from cudal2gen.tuner.policy import Action, Group, Policy, Ranked, View
from cudal2gen.tuner.space import Candidates

FAILED = -20.0  # the logarithm of a speed that nothing measured has


class Proposal(NamedTuple):
    """A record, or fields that are none and the rules they break. ``note``: what its maker wants to be remembered."""

    proposer: str
    fields: Fields
    record: Record | None
    refused: str = ""
    note: str = ""


def proposal(proposer: str, fields: Fields, note: str = "") -> Proposal:
    """Fields put to the rules."""
    try:
        return Proposal(proposer, fields, parse(fields), note=note)
    except IllegalRecord as error:
        return Proposal(proposer, fields, None, str(error), note)


@dataclass(frozen=True)
class Question:
    """What a proposer is asked: legal candidates of a problem, and what is known of it so far.

    ``trials``: of this problem, failures with reasons among them. ``seen``: keys of what was proposed already; another
    proposal of one is not evaluated again.
    """

    candidates: Candidates
    trials: Sequence[Trial] = ()
    incumbent: Record | None = None
    seen: frozenset[object] = field(default_factory=frozenset)

    @property
    def problem(self) -> Problem:
        return self.candidates.problem

    @cached_property
    def ranked(self) -> list[Trial]:
        """Measured trials, the fastest first; of a record that was timed more than once, the last."""
        last = {trial_key(trial): trial for trial in self.trials if trial.measured}
        return sorted(last.values(), key=lambda trial: trial.cost)

    @property
    def failures(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.measured]


class Proposer(Protocol):
    """Something that proposes records for one problem after the other."""

    @property
    def name(self) -> str: ...

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Up to ``count`` proposals; fewer, or none, where it has no more to say. Raises nothing for a bad idea."""
        ...

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """What became of proposals, its own and others', as soon as it is known."""
        ...


class Absent(RuntimeError):
    """A proposer that cannot work here; the message says what to install."""


def trial_key(trial: Trial) -> tuple[str, str]:
    """Equal for trials of one kernel, launched in one way."""
    fields = {name: value for name, value in trial.record.items() if name not in space.GIVEN}
    return trial.name, repr(sorted(fields.items()))


class Blind:
    """What learns nothing from trials."""

    name = ""

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Nothing to learn."""


class Random(Blind):
    """Any legal candidate, all equally likely."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Fewer only where next to all have been seen."""
        return _fresh(question, count, lambda: question.candidates.drawn(self._rng, self.name))


class Nearest(Blind):
    """What the nearest tuned problems do, the nearest first: the decisions of their records, or what is most like them.

    The pool is given; who compares proposers leaves the problems out that are asked about.
    """

    name = "nearest"

    def __init__(self, pool: Iterable[Record], most: int = 32) -> None:
        self._pool = list(pool)
        self._most = most

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Ends when ``most`` neighbours have been asked."""
        problem, found, keys = question.problem, [], set(question.seen)
        pool = [record for record in self._pool if record.acc == problem.acc and record.problem != problem]
        for record in sorted(pool, key=lambda record: distance(problem, record))[: self._most]:
            taken = space.adopt(record, question.candidates, self.name)
            if space.key(taken) not in keys:
                keys.add(space.key(taken))
                found.append(_of(self.name, taken))
            if len(found) == count:
                break
        return found


def distance(one: Problem, other: Problem) -> float:
    """Between problems: the ratios of their extents, as logarithms; another GPU or layout is far away."""
    sizes = [(one.m, other.m), (one.n, other.n), (one.k, other.k)]
    far = 20.0 * (one.gpu != other.gpu) + 10.0 * (one.layout != other.layout)
    return far + sum(abs(math.log2(a / b)) for a, b in sizes)


class Evolution(Blind):
    """Mutates the best so far: another candidate that differs in few fields, or another choice of a loose head."""

    name = "evolution"

    def __init__(self, seed: int = 0, parents: int = 6) -> None:
        self._rng = random.Random(seed)
        self._parents = parents

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Random candidates until there is something to mutate."""
        parents = question.ranked[: self._parents]
        if not parents:
            return _fresh(question, count, lambda: question.candidates.drawn(self._rng, self.name))
        return _fresh(question, count, lambda: self._child(question, self._rng.choice(parents).record))

    def _child(self, question: Question, parent: Fields) -> Record:
        found, rng = question.candidates, self._rng
        apart = found.apart(parent)
        if rng.random() < 0.25:
            apart = np.where(apart == 0, 0, 10**6)  # only loose heads change
        # The fewer fields differ, the likelier; some noise, so that it is not always the same neighbour.
        noisy = apart + np.random.default_rng(rng.getrandbits(32)).exponential(1.0, len(apart))
        row = int(noisy.argmin())
        choices = {}
        for head, values in found.heads[found.records[row].family].items():
            kept = next((i for i, one in enumerate(values) if one.items() <= parent.items()), None)
            choices[head] = rng.randrange(len(values)) if kept is None or rng.random() < 0.4 else kept
        return found.compose(row, choices, self.name)


class Tpe:
    """Optuna's tree-structured Parzen estimator, asked and told; a suggestion is taken to the nearest candidate."""

    name = "tpe"

    def __init__(self, seed: int = 0) -> None:
        try:
            import optuna
        except ImportError:
            raise Absent("proposer tpe needs optuna: pip install 'cudal2gen[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._seed = optuna, seed
        self._studies: dict[Problem, Any] = {}

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Random at first, as TPE is."""
        study, spaces = self._study(question), self._spaces(question.candidates)
        found = []
        for _ in range(count):
            asked = study.ask(spaces)
            found.append(_of(self.name, self._candidate(question.candidates, asked.params)))
            # What is told is the candidate that the suggestion became, not the suggestion.
            study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
        return found

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Every measured trial is told, whoever proposed it; a failure as ten times the slowest."""
        optuna, study, spaces = self._optuna, self._study(question), self._spaces(question.candidates)
        slowest = max((one.cost for one in question.ranked), default=1e3)
        for trial in trials:
            params = {
                name: value
                for name, value in self._params(question.candidates, trial.record).items()
                if name in spaces and value in spaces[name].choices
            }
            if params.keys() == spaces.keys():
                value = math.log(trial.cost if trial.measured else 10 * slowest)
                study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=value))

    def _study(self, question: Question) -> Any:
        if question.problem not in self._studies:
            sampler = self._optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=8)
            self._studies[question.problem] = self._optuna.create_study(sampler=sampler)
        return self._studies[question.problem]

    def _spaces(self, found: Candidates) -> dict[str, Any]:
        choices = {name: list(values) for name, values in zip(found.columns, found.index, strict=True)}
        for heads in found.heads.values():
            for head, values in heads.items():
                choices[f"loose {head}"] = [repr(one) for one in values]
        categorical = self._optuna.distributions.CategoricalDistribution
        return {name: categorical(values) for name, values in choices.items() if len(values) > 1}

    def _params(self, found: Candidates, fields: Mapping[str, Any]) -> dict[str, str]:
        names = zip(found.columns, found.index, found.code(fields), strict=True)
        params = {name: list(values)[code] for name, values, code in names if code >= 0}
        for heads in found.heads.values():
            for head, values in heads.items():
                chosen = next((one for one in values if one.items() <= fields.items()), values[0])
                params[f"loose {head}"] = repr(chosen)
        return params

    def _candidate(self, found: Candidates, params: Mapping[str, str]) -> Record:
        wanted = [
            values.get(params[name], -1) if name in params else 0
            for name, values in zip(found.columns, found.index, strict=True)
        ]
        row = int((found.codes != np.array(wanted, np.int16)).sum(axis=1).argmin())
        heads = found.heads[found.records[row].family]
        spelled = {head: [repr(one) for one in values] for head, values in heads.items()}
        choices = {
            head: values.index(params[f"loose {head}"]) for head, values in spelled.items() if f"loose {head}" in params
        }
        return found.compose(row, choices, self.name)


class Heuristics(Blind):
    """What nvidia-matmul-heuristics would build, as the candidates most like it. Needs the package, not a GPU."""

    name = "heuristics"
    cards = {
        "a100": "A100_SXM_80GB", "rtx3090": "RTX_3090", "l40s": "L40S", "h100": "H100_SXM", "h200": "H200_SXM",
        "rtx5090": "RTX_5090",
    }  # fmt: skip

    def __init__(self) -> None:
        try:
            import nvMatmulHeuristics as heuristics
        except ImportError:
            raise Absent(
                "proposer heuristics needs nvidia-matmul-heuristics, under NVIDIA's licence: "
                "pip install nvidia-matmul-heuristics"
            ) from None
        self._library = heuristics
        self._interfaces: dict[str, Any] = {}
        self._asked: dict[Problem, int] = {}

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Its first sixteen or so, in its order; then nothing."""
        done = self._asked.get(question.problem, 0)
        if done >= 16:
            return []
        self._asked[question.problem] = 16
        keys, found = set(question.seen), []
        for config in self._configs(question.problem, 16):
            taken = _like(question.candidates, config, self.name)
            if space.key(taken) not in keys:
                keys.add(space.key(taken))
                found.append(_of(self.name, taken))
        return found[:count]

    def _configs(self, problem: Problem, count: int) -> list[Any]:
        library = self._library
        if problem.gpu not in self._interfaces:
            hopper = problem.gpu in ("h100", "h200")
            self._interfaces[problem.gpu] = library.NvMatmulHeuristicsInterfaceEx(
                backend=library.NvMatmulHeuristicsTarget["CUTLASS3" if hopper else "CUTLASS"],
                gpu=library.NvMatmulHeuristicsNvidiaGpu[self.cards[problem.gpu]],
            )
        interface = self._interfaces[problem.gpu]
        precision = "HSH" if problem.acc == "f32" else "HHH"
        # Row-major A as it is; B is transposed where it is stored (n, k).
        layout = library.NvMatmulHeuristicsMatmulLayout["NT_ROW_MAJOR" if problem.layout == "tn" else "NN_ROW_MAJOR"]
        interface.loadInternalDiscoverySet(layout, precision=precision)
        asked = interface.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout)
        return [one["kernel"] for one in interface.get(asked, count, precision)]


def _like(found: Candidates, config: Any, source: str) -> Record:
    """The candidate whose tile, ring, split and cluster differ least from a configuration's."""

    def apart(record: Record) -> float:
        cluster = getattr(record, "cluster", (1, 1))
        pairs = [
            (record.bm, config.cta_tile_m), (record.bn, config.cta_tile_n), (record.k_step, config.cta_tile_k),
            (record.split_k, config.split_k), (cluster[0], config.cluster_m), (cluster[1], config.cluster_n),
        ]  # fmt: skip
        return float(sum(abs(math.log2(a / b)) for a, b in pairs)) + 0.1 * abs(record.ring_steps - int(config.stages))

    row = min(range(len(found.records)), key=lambda row: apart(found.records[row]))
    return found.compose(row, {}, source)


class Learned:
    """The policy. ``frozen``: its prior alone, which nothing changes. Else it learns from every trial of a problem.

    ``adapt``: steps on contrastive pairs after each batch of trials, 0 for none. ``group``: whether its own proposals
    of a batch are a group for a policy-gradient step as well. What it learns of a problem stays with a copy of the
    policy, unless ``keep``: then the policy itself goes on learning from problem to problem. ``shuffled``: it is told
    other records' rewards, a control that must not help.
    """

    def __init__(
        self, policy: Policy, name: str = "policy", seed: int = 0, frozen: bool = False, adapt: int = 12,
        group: bool = False, keep: bool = False, shuffled: bool = False, reward: reward.Settings | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.policy = policy
        self._seed, self._frozen, self._adapt, self._group, self._keep = seed, frozen, adapt, group, keep
        self._reward = reward
        self._shuffle = random.Random(seed) if shuffled else None
        self._own: tuple[Problem, Policy, View] | None = None
        self._actions: dict[object, Action] = {}

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Draws without replacement: no structure twice in one answer."""
        policy, view = self._at(question)
        found = []
        self._actions = {}
        for action in policy.draw(view, 3 * count, prior_only=self._frozen, distinct=True):
            record = view.candidates.compose(action.row, action.choices, self.name)
            if (key := space.key(record)) not in question.seen and key not in self._actions:
                self._actions[key] = action
                found.append(_of(self.name, record))
            if len(found) == count:
                break
        return found

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """A group's step on its own proposals, then some steps on pairs of all that was tried of this problem."""
        tried = [trial for trial in question.trials if trial.outcome != "illegal"]
        if self._frozen or len(tried) < 2:
            return
        policy, view = self._at(question)
        if self._group:
            self._follow(policy, view, trials)
        records, scores = [parse(trial.record) for trial in tried], [self._told(trial) for trial in tried]
        if self._shuffle:
            self._shuffle.shuffle(scores)
        known = policy.prepared(Ranked(records, scores))
        for _ in range(self._adapt):
            policy.contrast([known], margin=0.003)

    def _follow(self, policy: Policy, view: View, trials: Sequence[Trial]) -> None:
        keyed = [(space.key(parse(trial.record)), trial) for trial in trials if trial.outcome != "illegal"]
        own = [(self._actions[key], self._told(trial)) for key, trial in keyed if key in self._actions]
        if len(own) > 1:
            rewards = [told for _, told in own]
            if self._shuffle:
                self._shuffle.shuffle(rewards)
            policy.follow_rewards([Group(view, [action for action, _ in own], rewards)])

    def _told(self, trial: Trial) -> float:
        """The paper's reward where it is asked for, else the logarithm of speed; a failure is below all."""
        if self._reward is not None and (not trial.measured or len(trial.timings) > 1):
            return reward.of_trials([trial], self._reward)
        return -math.log(trial.cost) if trial.measured else FAILED

    def _at(self, question: Question) -> tuple[Policy, View]:
        if self._own is None or self._own[0] != question.problem:
            policy = self.policy if self._keep else self.policy.copy(self._seed)
            self._own = (question.problem, policy, policy.view(question.candidates))
        return self._own[1:]


class Mixture:
    """Several proposers in turns: each is asked for its share, and what one leaves the next may fill."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = list(proposers)
        self.name = "+".join(one.name for one in proposers)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Shares are equal but for rounding; who has nothing to say leaves its share to those who have."""
        found: list[Proposal] = []
        asked = list(self._proposers)
        while asked and len(found) < count:
            share = max(1, (count - len(found)) // len(asked))
            for one in list(asked):
                got = one.propose(question, min(share, count - len(found))) if len(found) < count else []
                found += got
                question = replace(question, seen=question.seen | {space.key(it.record) for it in got if it.record})
                if not got:
                    asked.remove(one)
        return found

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """All learn from all."""
        for one in self._proposers:
            one.observe(question, trials)


NAMES = ("policy", "prior", "llm", "nearest", "heuristics", "tpe", "evolution", "random")


def named(
    names: Sequence[str],
    policy: Callable[[], Policy],
    pool: Iterable[Record],
    seed: int = 0,
    rewarded: reward.Settings | None = None,
    llm: Callable[[], Proposer] | None = None,
) -> Proposer:
    """Proposers by name, mixed. ``policy`` is called at most once, and only where one of them needs it; ``rewarded``:
    what it learns from, the logarithm of speed if None. ``llm`` likewise makes the language model's.

    Raises ValueError for a name that is none, Absent where a library is missing.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"{', '.join(unknown)}: must be of {', '.join(NAMES)}")
    learned = policy() if {"policy", "prior"} & set(names) else None
    found: list[Proposer] = []
    for name in dict.fromkeys(names):
        if name in ("policy", "prior") and learned is not None:
            prior = name == "prior"
            found.append(Learned(learned, name, seed, frozen=prior, keep=not prior, group=True, reward=rewarded))
        elif name == "llm":
            if llm is None:
                raise ValueError("proposer llm needs a server")
            found.append(llm())
        elif name == "nearest":
            found.append(Nearest(pool))
        elif name == "heuristics":
            found.append(Heuristics())
        else:
            found.append({"tpe": Tpe, "evolution": Evolution, "random": Random}[name](seed))
    return found[0] if len(found) == 1 else Mixture(found)


TRIES = 20  # draws for each proposal before a proposer has nothing new to say


def _fresh(question: Question, count: int, draw: Callable[[], Record]) -> list[Proposal]:
    """Draws that nobody has proposed before, each once."""
    keys, found = set(question.seen), []
    for _ in range(TRIES * count):
        record = draw()
        if (key := space.key(record)) not in keys:
            keys.add(key)
            found.append(_of(record.origin.source, record))
        if len(found) == count:
            break
    return found


def _of(proposer: str, record: Record) -> Proposal:
    return Proposal(proposer, space.decisions(record), record)
