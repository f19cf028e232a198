"""The policy: a distribution over the legal records of a problem, and its updates by rewards.

A record's logit is the sum of a number for each of its decisions, alone and in pairs, each linear in the features of
problem and GPU, and of a small network over the record's derived facts. Softmax runs over the legal structures of the
problem, so the records' own rules are the mask. Each free field has a categorical distribution beside it.

logits = logits of the prior + learned part. The prior imitates published kernels and is then frozen; the learned part
starts at zero and is trained

- by group-relative policy gradient: records drawn from the policy itself, each one's advantage being its reward
  minus the mean of the others' (leave one out), with the KL divergence from the prior as a cost;
- by contrastive pairs: of two measured records of a problem the faster one gets the higher logit (Bradley-Terry).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cudal2gen.kernel import Problem, Record, space
from cudal2gen.tuner.features import Encoded, Vocabulary, encode, encode_candidates, free_choices
from cudal2gen.tuner.network import CAPACITY, Net, bradley_terry, cumulative, leave_one_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class CapacityError(ValueError):
    """More decisions than a policy has room for."""


class Action(NamedTuple):
    """One draw: a row of the candidates, and an index for each loose head of its family."""

    row: int
    choices: dict[str, int]


def on_one_core() -> None:
    """Limits torch to one thread: the policy's steps are too small to share. Raises ImportError."""
    import torch

    torch.set_num_threads(1)


@dataclass
class View:
    """A problem's candidates as tensors, for the steps of a policy. ``loose``: token ids by family and free field."""

    candidates: space.Candidates
    context: torch.Tensor
    ids: torch.Tensor
    numbers: torch.Tensor
    loose: dict[str, dict[str, torch.Tensor]]

    def family(self, row: int) -> str:
        return self.candidates.records[row].family


class Group(NamedTuple):
    """Draws from the policy for one problem, and their rewards."""

    view: View
    actions: Sequence[Action]
    rewards: Sequence[float]


class Ranked(NamedTuple):
    """Measured records of one problem, and a score for each; larger is better."""

    records: Sequence[Record]
    scores: Sequence[float]


class Prepared(NamedTuple):
    """``Ranked`` as tensors."""

    encoding: tuple[torch.Tensor, ...]
    scores: Sequence[float]


class Policy:
    """Prior and learned part. ``seed``: of draws and of the hidden layers."""

    def __init__(self, seed: int = 0, learning_rate: float = 0.02) -> None:

        self.vocabulary = Vocabulary()
        self.prior, self.learned = Net(seed), Net(seed + 1)
        self.steps = 0
        self.learning_rate = learning_rate
        self._rng = np.random.default_rng(seed)
        self.optimizer: torch.optim.Optimizer | None = None

    # Distributions and draws

    def view(self, candidates: space.Candidates) -> View:
        """Candidates, encoded."""
        import torch

        encoded = self._room(encode_candidates(self.vocabulary, candidates))
        loose = {
            family: {
                head: torch.tensor([self.vocabulary.choice(choice) for choice in values])
                for head, values in heads.items()
            }
            for family, heads in candidates.heads.items()
        }
        tensors = [torch.from_numpy(part) for part in encoded]
        return View(candidates, tensors[0], tensors[1], tensors[2], loose)

    def _room(self, encoded: Encoded) -> Encoded:
        if len(self.vocabulary) > CAPACITY:
            raise CapacityError(
                f"{len(self.vocabulary)} different decisions exceed the {CAPACITY} of a policy; start a new one"
            )
        return encoded

    def logits(self, view: View, prior_only: bool = False) -> torch.Tensor:
        """One per candidate."""
        base = self.prior.logits(view.context, view.ids, view.numbers)
        return base if prior_only else base + self.learned.logits(view.context, view.ids, view.numbers)

    def head_logits(self, view: View, family: str, prior_only: bool = False) -> dict[str, torch.Tensor]:
        """One per alternative of each loose head."""
        logits = {}
        for head, ids in view.loose[family].items():
            base = self.prior.of_tokens(view.context, ids)
            logits[head] = base if prior_only else base + self.learned.of_tokens(view.context, ids)
        return logits

    def draw(
        self, view: View, count: int, prior_only: bool = False, temperature: float = 1.0, distinct: bool = False
    ) -> list[Action]:
        """Draws from the distribution; ``distinct``: no structure twice, so maybe fewer than ``count``."""
        import torch

        with torch.no_grad():
            scaled = (self.logits(view, prior_only) / temperature).numpy()
            heads = {
                family: {head: (values / temperature).numpy() for head, values in parts.items()}
                for family in view.loose
                for parts in [self.head_logits(view, family, prior_only)]
            }
        if distinct:
            # Gumbel noise: the largest so many are draws without replacement.
            noisy = scaled + self._rng.gumbel(size=len(scaled))
            rows = np.argsort(-noisy)[:count]
        else:
            rows = np.searchsorted(cumulative(scaled), self._rng.random(count), side="right")
        choices = {
            family: {
                head: np.searchsorted(cumulative(values), self._rng.random(len(rows)), side="right").tolist()
                for head, values in parts.items()
            }
            for family, parts in heads.items()
        }
        return [
            Action(row, {head: indices[position] for head, indices in choices[view.family(row)].items()})
            for position, row in enumerate(rows.tolist())
        ]

    def log_probability(self, view: View, actions: Sequence[Action]) -> torch.Tensor:
        """The log probability of each action, with gradient; shape (actions,)."""
        import torch

        total = torch.log_softmax(self.logits(view), 0)[torch.tensor([action.row for action in actions])]
        parts = {
            family: {head: torch.log_softmax(logits, 0) for head, logits in self.head_logits(view, family).items()}
            for family in view.loose
        }
        loose = []
        for action in actions:
            heads = parts[view.family(action.row)]
            loose.append(sum((heads[head][index] for head, index in action.choices.items()), torch.zeros(())))
        return total + torch.stack(loose)

    def divergence(self, view: View) -> torch.Tensor:
        """The exact KL divergence from the prior, over all candidates. Free fields weigh by their family's share."""
        import torch

        current, prior = (torch.log_softmax(self.logits(view, only), 0) for only in (False, True))
        total = (current.exp() * (current - prior)).sum()
        for family in view.loose:
            logits_now, logits_prior = (self.head_logits(view, family, only) for only in (False, True))
            share = (
                current.exp()[torch.tensor([record.family == family for record in view.candidates.records])]
                .sum()
                .detach()
            )
            for head, logits in logits_now.items():
                p, q = torch.log_softmax(logits, 0), torch.log_softmax(logits_prior[head], 0)
                total = total + share * (p.exp() * (p - q)).sum()
        return total

    def scores(self, problem: Problem, records: Sequence[Record], prior_only: bool = False) -> torch.Tensor:
        """Logits of any records of a problem with their free fields, comparable with one another; shape (records,)."""
        return self._scores(self._encode(problem, records), prior_only)

    def prepared(self, ranked: Ranked) -> Prepared:
        """Ranked records as tensors, for many steps of ``contrast``."""
        return Prepared(self._encode(ranked.records[0].problem, ranked.records), ranked.scores)

    def _encode(self, problem: Problem, records: Sequence[Record]) -> tuple[torch.Tensor, ...]:
        import torch

        fields = [space.decisions(record) for record in records]
        encoded = self._room(encode(self.vocabulary, problem, fields, records))
        context, ids, numbers = (torch.from_numpy(part) for part in encoded)
        loose = [[self.vocabulary.choice(choice) for choice in free_choices(record)] for record in records]
        width = max(map(len, loose), default=0)
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in loose], dtype=torch.int64)
        # A loose head is one token more; token 0 has no number.
        return context, torch.cat([ids, padded], 1), numbers

    def _scores(self, encoding: tuple[torch.Tensor, ...], prior_only: bool = False) -> torch.Tensor:
        logits = self.prior.logits(*encoding)
        return logits if prior_only else logits + self.learned.logits(*encoding)

    # Updates

    def imitate(self, examples: Sequence[Record], seconds: float = 60.0, passes: int = 6, rivals: int = 192) -> float:
        """Trains the prior to prefer ``examples`` to ``rivals`` drawn legal records of the same problem.

        Takes at most about ``seconds``; returns the mean log loss of the last pass.
        """
        import time

        import torch

        deadline = time.monotonic() + seconds
        sets = []
        for record in examples:
            candidates = space.candidates(record.problem, rivals)
            fields = [space.decisions(record), *candidates.fields]
            encoded = self._room(encode(self.vocabulary, record.problem, fields, [record, *candidates.records]))
            heads = record.free_fields(record.problem)
            ids = [[self.vocabulary.choice(choice) for choice in values] for values in heads.values()]
            tokens_chosen = [self.vocabulary.choice(choice) for choice in free_choices(record)]
            targets = [
                (values, values.index(target))
                for values, target in zip(ids, tokens_chosen, strict=False)
                if target in values
            ]
            sets.append(([torch.from_numpy(part) for part in encoded], targets))
            if time.monotonic() > deadline - seconds / 2:
                break
        with self._training(self.prior) as optimizer:
            mean = float("nan")
            for _ in range(passes):
                losses: list[float] = []
                for start in range(0, len(sets), 16):
                    order = sets[start : start + 16]
                    loss = torch.zeros(())
                    for (context, tokens, numbers), targets in order:
                        loss = loss - torch.log_softmax(self.prior.logits(context, tokens, numbers), 0)[0]
                        for values, target in targets:
                            logits = self.prior.of_tokens(context, torch.tensor(values))
                            loss = loss - torch.log_softmax(logits, 0)[target]
                    _step(optimizer, loss / len(order))
                    losses.append(float(loss.detach()) / len(order))
                mean = sum(losses) / len(losses)
                if time.monotonic() > deadline:
                    break
        return mean

    def follow_rewards(self, groups: Sequence[Group], kl: float = 0.02, normalise: bool = True) -> None:
        """One step of group-relative policy gradient."""
        import torch

        with self._training(self.learned) as optimizer:
            loss = torch.zeros(())
            for group in groups:
                advantages = torch.tensor(leave_one_out(group.rewards, normalise))
                loss = loss - (advantages * self.log_probability(group.view, group.actions)).mean()
                loss = loss + kl * self.divergence(group.view)
            _step(optimizer, loss / len(groups))

    def contrast(self, ranked: Sequence[Ranked | Prepared], margin: float = 0.0, weight: float = 1e-4) -> float:
        """One step towards a higher logit for the better record of each pair; returns the mean loss.

        Skips pairs whose scores differ by less than ``margin``. ``weight``: cost of the learned part's squares, which
        keeps it near the prior.
        """
        import torch

        with self._training(self.learned) as optimizer:
            total, count = torch.zeros(()), 0
            for ranking in ranked:
                prepared = ranking if isinstance(ranking, Prepared) else self.prepared(ranking)
                loss, pairs = bradley_terry(self._scores(prepared.encoding), prepared.scores, margin)
                if pairs:
                    total, count = total + loss, count + 1
            if not count:
                return float("nan")
            squares = sum((tensor.square().sum() for tensor in self.learned.tensors.values()), torch.zeros(()))
            _step(optimizer, total / count + weight * squares)
            return float(total.detach()) / count

    @contextmanager
    def _training(self, net: Net) -> Iterator[torch.optim.Optimizer]:
        import torch

        net.trainable(True)
        if net is self.prior:
            yield torch.optim.Adam(net.tensors.values(), lr=self.learning_rate)
        else:
            if self.optimizer is None:
                self.optimizer = torch.optim.Adam(net.tensors.values(), lr=self.learning_rate)
            yield self.optimizer
            self.steps += 1
        net.trainable(False)

    def copy(self, seed: int = 0) -> Policy:
        """An independent policy with the same parameters and draws of its own."""
        copy = Policy(seed, self.learning_rate)
        copy.vocabulary = Vocabulary(self.vocabulary.tokens[1:])
        copy.steps = self.steps
        for source, target in ((self.prior, copy.prior), (self.learned, copy.learned)):
            for name, tensor in source.tensors.items():
                target.tensors[name].copy_(tensor.detach())
        return copy


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def practise(
    policy: Policy,
    views: Sequence[View],
    rewards: Callable[[Problem, Sequence[Record]], Sequence[float]],
    rounds: int,
    *,
    group: int = 16,
    problems: int = 8,
    kl: float = 0.02,
    seed: int = 0,
    source: str = "policy",
) -> int:
    """Group-relative training: each round draws a group for some problems. Returns the number of evaluations."""
    rng, evaluations = np.random.default_rng(seed), 0
    for _ in range(rounds):
        groups = []
        for index in rng.choice(len(views), min(problems, len(views)), replace=False):
            view = views[index]
            actions = policy.draw(view, group)
            records = [view.candidates.compose(action.row, action.choices, source) for action in actions]
            groups.append(Group(view, actions, rewards(view.candidates.problem, records)))
            evaluations += len(actions)
        policy.follow_rewards(groups, kl)
    return evaluations


def compare(policy: Policy, ranked: Sequence[Ranked], rounds: int, problems: int = 8, seed: int = 0) -> None:
    """Contrastive training on measured records of many problems."""
    rng, prepared = np.random.default_rng(seed), [policy.prepared(ranking) for ranking in ranked]
    for _ in range(rounds):
        policy.contrast(
            [prepared[index] for index in rng.choice(len(prepared), min(problems, len(prepared)), replace=False)]
        )


def by_problem(records: Iterable[Record], scores: Iterable[float]) -> list[Ranked]:
    """Measured records by problem, without problems that have only one record."""
    groups: dict[Problem, tuple[list[Record], list[float]]] = {}
    for record, score in zip(records, scores, strict=True):
        own_records, values = groups.setdefault(record.problem, ([], []))
        own_records.append(record)
        values.append(score)
    return [Ranked(*parts) for parts in groups.values() if len(parts[0]) > 1]
