"""Proposers of records: at random, from the nearest problems, by evolution, TPE, NVIDIA's heuristics or the policy.

``Mixture`` lets several of them share a search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from cudal2gen.kernel import Fields, Problem, Record, parse, space
from cudal2gen.kernel.space import Candidates
from cudal2gen.results import Trial
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.tuner import reward
from cudal2gen.tuner.policy import Action, Group, Policy, Ranked, View
from cudal2gen.tuner.proposal import Awaited, FixedStrategy, Proposal, Proposer, Question, legal_proposal
from kernelproof.ground.errors import MissingLibrary

FAILED = -20.0  # score of a failure, below the logarithm of any measured speed


class Random(FixedStrategy):
    """Any legal candidate, all equally likely."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Fewer than ``count`` proposals only if nearly all candidates were proposed before."""
        return _new_proposals(question, count, lambda: question.candidates.draw(self._rng, self.name))


class Nearest(FixedStrategy):
    """The records of the nearest problems, nearest first; if one is illegal here, the most similar legal candidate.

    ``pool``: the records to take from; a comparison of proposers removes its held-out problems from it. ``ordered``:
    they are taken in the pool's own order.
    """

    name = "nearest"

    def __init__(self, pool: Iterable[Record], neighbours: int = 32, ordered: bool = False) -> None:
        self._pool = list(pool)
        self._neighbours, self._ordered = neighbours, ordered

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """No proposals after ``neighbours`` records of the pool."""
        problem, proposals, keys = question.problem, [], set(question.proposed_keys)
        pool = [record for record in self._pool if record.acc == problem.acc and record.problem != problem]
        if not self._ordered:
            pool.sort(key=lambda record: distance(problem, record.problem))
        for record in pool[: self._neighbours]:
            adopted = space.adopt(record, question.candidates, self.name)
            if adopted.kernel_key not in keys:
                keys.add(adopted.kernel_key)
                proposals.append(legal_proposal(self.name, adopted))
            if len(proposals) == count:
                break
        return proposals


def distance(first: Problem, second: Problem) -> float:
    """The distance of two problems, in doublings: the sum of |log2| of their extents' ratios, with 20 more for another
    GPU and 10 more for another layout."""
    sizes = [(first.m, second.m), (first.n, second.n), (first.k, second.k)]
    penalty = 20.0 * (first.gpu != second.gpu) + 10.0 * (first.layout != second.layout)
    return penalty + sum(abs(math.log2(a / b)) for a, b in sizes)


class Evolution(FixedStrategy):
    """Mutates the best so far: takes a candidate that differs in few fields, or another value of a free field."""

    name = "evolution"

    def __init__(self, seed: int = 0, parents: int = 6) -> None:
        self._rng = random.Random(seed)
        self._parents = parents

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Random candidates until there is something to mutate."""
        parents = question.ranked[: self._parents]
        if not parents:
            return _new_proposals(question, count, lambda: question.candidates.draw(self._rng, self.name))
        return _new_proposals(question, count, lambda: self._child(question, self._rng.choice(parents).record))

    def _child(self, question: Question, parent: Fields) -> Record:
        candidates, rng = question.candidates, self._rng
        distances = candidates.distances(parent)
        if rng.random() < 0.25:
            distances = np.where(distances == 0, 0, 10**6)  # only loose heads change
        # Fewer differing fields are likelier; the noise varies the neighbour.
        noisy = distances + np.random.default_rng(rng.getrandbits(32)).exponential(1.0, len(distances))
        row = int(noisy.argmin())
        choices = {}
        for head, values in candidates.heads[candidates.records[row].family].items():
            index = next((i for i, choice in enumerate(values) if choice.items() <= parent.items()), None)
            choices[head] = rng.randrange(len(values)) if index is None or rng.random() < 0.4 else index
        return candidates.compose(row, choices, self.name)


class Tpe:
    """Optuna's tree-structured Parzen estimator; proposes the nearest candidate to its suggestion that is a new one."""

    name = "tpe"

    def __init__(self, seed: int = 0) -> None:
        try:
            import optuna
        except ImportError:
            raise MissingLibrary("proposer tpe needs optuna: pip install 'cudal2gen[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._seed = optuna, seed
        self._studies: dict[Problem, Any] = {}

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Random until TPE has eight trials."""
        study, spaces = self._study(question), self._spaces(question.candidates)
        proposals = []
        for _ in range(count):
            suggestion = study.ask(spaces)
            proposals.append(legal_proposal(self.name, self._candidate(question, suggestion.params)))
            # ``observe`` adds the candidate that the suggestion became; the suggestion itself counts as failed.
            study.tell(suggestion, state=self._optuna.trial.TrialState.FAIL)
        return proposals

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Adds every trial to the study, whoever proposed it; a failure counts as ten times the slowest."""
        optuna, study, spaces = self._optuna, self._study(question), self._spaces(question.candidates)
        slowest = max((trial.cost for trial in question.ranked), default=1e3)
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

    def _spaces(self, candidates: Candidates) -> dict[str, Any]:
        choices = {name: list(values) for name, values in zip(candidates.columns, candidates.index, strict=True)}
        for heads in candidates.heads.values():
            for head, values in heads.items():
                choices[f"loose {head}"] = [repr(choice) for choice in values]
        categorical = self._optuna.distributions.CategoricalDistribution
        return {name: categorical(values) for name, values in choices.items() if len(values) > 1}

    def _params(self, candidates: Candidates, fields: Mapping[str, Any]) -> dict[str, str]:
        names = zip(candidates.columns, candidates.index, candidates.code(fields), strict=True)
        params = {name: list(values)[code] for name, values, code in names if code >= 0}
        for heads in candidates.heads.values():
            for head, values in heads.items():
                choice = next(
                    (alternative for alternative in values if alternative.items() <= fields.items()), values[0]
                )
                params[f"loose {head}"] = repr(choice)
        return params

    def _candidate(self, question: Question, params: Mapping[str, str]) -> Record:
        candidates = question.candidates
        codes = [
            values.get(params[name], -1) if name in params else 0
            for name, values in zip(candidates.columns, candidates.index, strict=True)
        ]
        rows = (candidates.codes != np.array(codes, np.int16)).sum(axis=1).argsort(kind="stable")
        records = (self._composed(candidates, int(row), params) for row in rows)
        nearest = next(records)
        ordered = chain([nearest], records)
        return next((record for record in ordered if record.kernel_key not in question.proposed_keys), nearest)

    def _composed(self, candidates: Candidates, row: int, params: Mapping[str, str]) -> Record:
        heads = candidates.heads[candidates.records[row].family]
        texts = {head: [repr(choice) for choice in values] for head, values in heads.items()}
        choices = {
            head: values.index(params[f"loose {head}"]) for head, values in texts.items() if f"loose {head}" in params
        }
        return candidates.compose(row, choices, self.name)


class Heuristics(FixedStrategy):
    """The candidates most like the first choices of nvidia-matmul-heuristics. Needs the package, not a GPU."""

    name = "heuristics"

    def __init__(self) -> None:
        self._heuristics = MatmulHeuristics()
        self._finished: dict[Problem, int] = {}

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """The first sixteen choices of the package, in its order; then no more."""
        count_before = self._finished.get(question.problem, 0)
        if count_before >= 16:
            return []
        self._finished[question.problem] = 16
        keys, proposals = set(question.proposed_keys), []
        for answer in self._heuristics.answers(question.problem, 16):
            candidate = _most_similar(question.candidates, answer.configuration, self.name)
            if candidate.kernel_key not in keys:
                keys.add(candidate.kernel_key)
                proposals.append(legal_proposal(self.name, candidate))
        return proposals[:count]


def _most_similar(candidates: Candidates, config: Any, source: str) -> Record:
    """The candidate whose tile, ring, split and cluster differ least from a configuration's."""

    def difference(record: Record) -> float:
        cluster = getattr(record, "cluster", (1, 1))
        pairs = [
            (record.bm, config.cta_tile_m), (record.bn, config.cta_tile_n), (record.k_step, config.cta_tile_k),
            (record.split_k, config.split_k), (cluster[0], config.cluster_m), (cluster[1], config.cluster_n),
        ]  # fmt: skip
        return float(sum(abs(math.log2(a / b)) for a, b in pairs)) + 0.1 * abs(record.ring_steps - int(config.stages))

    row = min(range(len(candidates.records)), key=lambda row: difference(candidates.records[row]))
    return candidates.compose(row, {}, source)


class PolicyProposer:
    """Draws from a policy. ``frozen``: from its prior alone, which never changes; else it learns from every trial.

    ``adapt``: steps on contrastive pairs after each batch of trials, 0 for none. ``group``: whether its own proposals
    of a batch also make a group for a policy-gradient step. It trains a copy of the policy per problem; with ``keep``
    it serves one search, from a copy made now, and ``conclude`` makes the policy itself learn what the copy learnt.
    ``shuffled``: permutes the rewards, a control that must not help.
    """

    def __init__(
        self, policy: Policy, name: str = "policy", seed: int = 0, frozen: bool = False, *, adapt: int = 12,
        group: bool = False, keep: bool = False, shuffled: bool = False, reward: reward.RewardWeights | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.policy = policy
        self._seed, self._frozen, self._adapt, self._group = seed, frozen, adapt, group
        self._reward = reward
        self._shuffle = random.Random(seed) if shuffled else None
        self._session: tuple[Problem, Policy, View] | None = None
        self._actions: dict[object, Action] = {}
        self._copy = policy.copy(seed) if keep else None
        self._lessons: list[tuple[Question, Sequence[Trial], dict[object, Action]]] = []

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Draws without replacement: an answer has no structure twice."""
        policy, view = self._open_session(question)
        proposals = []
        self._actions = {}
        for action in policy.draw(view, 3 * count, prior_only=self._frozen, distinct=True):
            record = view.candidates.compose(action.row, action.choices, self.name)
            if (key := record.kernel_key) not in question.proposed_keys and key not in self._actions:
                self._actions[key] = action
                proposals.append(legal_proposal(self.name, record))
            if len(proposals) == count:
                break
        return proposals

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """One group step on its own proposals, then steps on pairs of all legal trials of this problem."""
        if self._frozen:
            return
        self._learn(*self._open_session(question), question, trials, self._actions)
        if self._copy is not None:
            self._lessons.append((question, trials, self._actions))

    def conclude(self) -> None:
        """Ends a search: the policy learns from its trials, batch by batch. Without ``keep`` nothing happens."""
        if self._lessons:
            view = self.policy.view(self._lessons[0][0].candidates)
            for question, trials, actions in self._lessons:
                self._learn(self.policy, view, question, trials, actions)
        self._lessons = []

    def _learn(
        self, policy: Policy, view: View, question: Question, trials: Sequence[Trial], actions: dict[object, Action]
    ) -> None:
        legal_trials = [trial for trial in question.trials if trial.outcome != "illegal"]
        if len(legal_trials) < 2:
            return
        if self._group:
            self._follow(policy, view, trials, actions)
        records, scores = (
            [parse(trial.record) for trial in legal_trials],
            [self._score(trial) for trial in legal_trials],
        )
        if self._shuffle:
            self._shuffle.shuffle(scores)
        prepared = policy.prepared(Ranked(records, scores))
        for _ in range(self._adapt):
            policy.contrast([prepared], margin=0.003)

    def _follow(self, policy: Policy, view: View, trials: Sequence[Trial], actions: dict[object, Action]) -> None:
        keyed = [(parse(trial.record).kernel_key, trial) for trial in trials if trial.outcome != "illegal"]
        scored = [(actions[key], self._score(trial)) for key, trial in keyed if key in actions]
        if len(scored) > 1:
            rewards = [score for _, score in scored]
            if self._shuffle:
                self._shuffle.shuffle(rewards)
            policy.follow_rewards([Group(view, [action for action, _ in scored], rewards)])

    def _score(self, trial: Trial) -> float:
        """CUDA-L2's reward where the settings ask for it, else the logarithm of speed; ``FAILED`` for a failure."""
        if self._reward is not None and (not trial.measured or len(trial.timings) > 1):
            return reward.of_trials([trial], self._reward)
        return -math.log(trial.cost) if trial.measured else FAILED

    def _open_session(self, question: Question) -> tuple[Policy, View]:
        if self._session is None or self._session[0] != question.problem:
            policy = self._copy or self.policy.copy(self._seed)
            self._session = (question.problem, policy, policy.view(question.candidates))
        return self._session[1:]


class Mixture:
    """Several proposers in turns: each answers for its share; the next ones fill what it leaves open."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self.members = list(proposers)
        self.name = "+".join(proposer.name for proposer in proposers)

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Equal shares of legal proposals but for rounding; a proposer without any leaves its share to the rest."""
        proposals: list[Proposal] = []
        active, places = list(self.members), count
        while active and places:
            share = max(1, places // len(active))
            for proposer in list(active):
                answers = proposer.propose(question, min(share, places)) if places else []
                proposals += answers
                legal = sum(proposal.record is not None for proposal in answers)
                places -= legal
                question = replace(
                    question,
                    proposed_keys=question.proposed_keys
                    | {proposal.record.kernel_key for proposal in answers if proposal.record},
                )
                if not legal:
                    active.remove(proposer)
        return proposals

    def wait(self, problem: Problem) -> bool:
        """Waits for the first member with an answer under way: see ``Awaited``."""
        return any(proposer.wait(problem) for proposer in self.members if isinstance(proposer, Awaited))

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:  # noqa: ARG002
        """Returns False at once, because a search with other proposers does not wait for a server that rests."""
        return False

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Hands every trial to every proposer."""
        for proposer in self.members:
            proposer.observe(question, trials)


def awaits(proposer: Proposer) -> bool:
    """Whether a proposer, or a member of a mixture, may wait for a server."""
    if isinstance(proposer, Mixture):
        return any(map(awaits, proposer.members))
    return isinstance(proposer, Awaited)


TRIES = 20  # draws for each proposal before a proposer gives up


def _new_proposals(question: Question, count: int, draw: Callable[[], Record]) -> list[Proposal]:
    """Distinct draws that were not proposed before."""
    keys, proposals = set(question.proposed_keys), []
    for _ in range(TRIES * count):
        record = draw()
        if (key := record.kernel_key) not in keys:
            keys.add(key)
            proposals.append(legal_proposal(record.origin.source, record))
        if len(proposals) == count:
            break
    return proposals
