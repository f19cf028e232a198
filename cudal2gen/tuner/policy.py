"""The policy: a distribution over the legal records of a problem, and how rewards change it.

A record's logit is the sum of a number for each of its decisions, alone and in pairs, each linear in the features of
problem and GPU, and of a small network over what follows from the record. Softmax runs over the legal structures of
the problem: that is the mask, made by the records' own rules. Loose heads are categorical beside it.

logits = logits of the prior + learned part. The prior imitates published kernels and is then frozen; the learned part
starts at zero and is trained

- by group-relative policy gradient: records drawn from the policy itself, each one's advantage being its reward
  minus the mean of the others' (leave one out), with the KL divergence from the prior as a cost;
- by contrastive pairs: of two measured records of a problem the faster one gets the higher logit (Bradley-Terry).
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Problem, Record
from cudal2gen.tuner import space
from cudal2gen.tuner.features import (
    CONTEXT,
    NUMBERS,
    Encoded,
    Vocabulary,
    encode,
    encode_candidates,
    free_choices,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

HIDDEN = 24
CAPACITY = 4096  # tokens that a policy can know
FORMAT = 1


class CheckpointError(ValueError):
    """A file that holds no policy of this version; the message says what to do."""


class Action(NamedTuple):
    """One draw: a row of the candidates, and an index for each loose head of its family."""

    row: int
    choices: dict[str, int]


def on_one_core() -> None:
    """A policy's steps are too small to be shared out among threads. Raises ImportError."""
    import torch

    torch.set_num_threads(1)


def leave_one_out(rewards: Sequence[float], normalise: bool = False) -> list[float]:
    """Each reward minus the mean of the others; divided by the group's standard deviation where ``normalise``."""
    count, total = len(rewards), sum(rewards)
    if count < 2:
        raise ValueError(f"{count} rewards make no group: an advantage is against the others'")
    found = [reward - (total - reward) / (count - 1) for reward in rewards]
    if not normalise:
        return found
    spread = float(np.std(rewards))
    return [advantage / spread for advantage in found] if spread > 1e-9 else [0.0] * count


class Net:
    """One part of the logits, the prior's or the learned one. Zero at first, but for the numbers of a hidden layer."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        width = NUMBERS + CONTEXT
        self.heads = torch.zeros(CAPACITY, CONTEXT)
        self.inner = torch.randn(width, HIDDEN, generator=generator) / width**0.5
        self.bias = torch.zeros(HIDDEN)
        self.outer = torch.zeros(HIDDEN)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"heads": self.heads, "inner": self.inner, "bias": self.bias, "outer": self.outer}

    def trainable(self, wanted: bool) -> None:
        """Whether gradients are kept."""
        for tensor in self.tensors.values():
            tensor.requires_grad_(wanted)

    def logits(self, context: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """One per row."""
        import torch

        per_token = self.heads @ context
        around = context.expand(len(numbers), -1)
        inside = torch.tanh(torch.cat([numbers, around], 1) @ self.inner + self.bias)
        return per_token[ids].sum(1) + inside @ self.outer

    def of_tokens(self, context: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the alternatives of a loose head."""
        found: torch.Tensor = self.heads[ids] @ context
        return found


@dataclass
class View:
    """A problem's candidates, encoded: what one step of a policy works on. Loose heads: token ids by family."""

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
    """Measured records of one problem, and how good each is: larger is better."""

    records: Sequence[Record]
    scores: Sequence[float]


class Prepared(NamedTuple):
    """The same, as a policy reads it."""

    read: tuple[torch.Tensor, ...]
    scores: Sequence[float]


class Policy:
    """Prior and learned part. ``seed``: of draws and of the hidden layers."""

    def __init__(self, seed: int = 0, learning_rate: float = 0.02) -> None:

        self.vocabulary = Vocabulary()
        self.prior, self.learned = Net(seed), Net(seed + 1)
        self.steps = 0
        self.learning_rate = learning_rate
        self._rng = np.random.default_rng(seed)
        self._optimizer: torch.optim.Optimizer | None = None

    # What the policy says

    def view(self, found: space.Candidates) -> View:
        """Candidates, encoded."""
        import torch

        encoded = self._room(encode_candidates(self.vocabulary, found))
        loose = {
            family: {
                head: torch.tensor([self.vocabulary.choice(one) for one in values]) for head, values in heads.items()
            }
            for family, heads in found.heads.items()
        }
        tensors = [torch.from_numpy(part) for part in encoded]
        return View(found, tensors[0], tensors[1], tensors[2], loose)

    def _room(self, encoded: Encoded) -> Encoded:
        if len(self.vocabulary) > CAPACITY:
            raise CheckpointError(f"{len(self.vocabulary)} different decisions exceed the {CAPACITY} a policy can know")
        return encoded

    def logits(self, view: View, prior_only: bool = False) -> torch.Tensor:
        """One per candidate."""
        base = self.prior.logits(view.context, view.ids, view.numbers)
        return base if prior_only else base + self.learned.logits(view.context, view.ids, view.numbers)

    def head_logits(self, view: View, family: str, prior_only: bool = False) -> dict[str, torch.Tensor]:
        """One per alternative of each loose head."""
        found = {}
        for head, ids in view.loose[family].items():
            base = self.prior.of_tokens(view.context, ids)
            found[head] = base if prior_only else base + self.learned.of_tokens(view.context, ids)
        return found

    def draw(
        self, view: View, count: int, prior_only: bool = False, temperature: float = 1.0, distinct: bool = False
    ) -> list[Action]:
        """Draws from the distribution; ``distinct``: no structure twice, so there may be fewer than asked for."""
        import torch

        with torch.no_grad():
            scaled = (self.logits(view, prior_only) / temperature).numpy()
            heads = {
                family: {head: (one / temperature).numpy() for head, one in parts.items()}
                for family in view.loose
                for parts in [self.head_logits(view, family, prior_only)]
            }
        if distinct:
            # Gumbel noise: the largest so many are draws without replacement.
            noisy = scaled + self._rng.gumbel(size=len(scaled))
            rows = np.argsort(-noisy)[:count]
        else:
            rows = np.searchsorted(_cumulative(scaled), self._rng.random(count), side="right")
        drawn = {
            family: {
                head: np.searchsorted(_cumulative(values), self._rng.random(len(rows)), side="right").tolist()
                for head, values in parts.items()
            }
            for family, parts in heads.items()
        }
        return [
            Action(row, {head: chosen[at] for head, chosen in drawn[view.family(row)].items()})
            for at, row in enumerate(rows.tolist())
        ]

    def log_probability(self, view: View, actions: Sequence[Action]) -> torch.Tensor:
        """Of each action, with gradient."""
        import torch

        total = torch.log_softmax(self.logits(view), 0)[torch.tensor([action.row for action in actions])]
        parts = {
            family: {head: torch.log_softmax(one, 0) for head, one in self.head_logits(view, family).items()}
            for family in view.loose
        }
        loose = []
        for action in actions:
            own = parts[view.family(action.row)]
            loose.append(sum((own[head][at] for head, at in action.choices.items()), torch.zeros(())))
        return total + torch.stack(loose)

    def divergence(self, view: View) -> torch.Tensor:
        """KL from the prior, exact: the candidates are all there. Loose heads count by their family's share."""
        import torch

        here, prior = (torch.log_softmax(self.logits(view, only), 0) for only in (False, True))
        total = (here.exp() * (here - prior)).sum()
        for family in view.loose:
            own, theirs = (self.head_logits(view, family, only) for only in (False, True))
            share = here.exp()[torch.tensor([one.family == family for one in view.candidates.records])].sum().detach()
            for head, logits in own.items():
                p, q = torch.log_softmax(logits, 0), torch.log_softmax(theirs[head], 0)
                total = total + share * (p.exp() * (p - q)).sum()
        return total

    def scores(self, problem: Problem, records: Sequence[Record], prior_only: bool = False) -> torch.Tensor:
        """Logits of any records of a problem, loose heads included, comparable with one another."""
        return self._scores(self._read(problem, records), prior_only)

    def prepared(self, ranked: Ranked) -> Prepared:
        """What ``contrast`` works on, encoded once for many steps."""
        return Prepared(self._read(ranked.records[0].problem, ranked.records), ranked.scores)

    def _read(self, problem: Problem, records: Sequence[Record]) -> tuple[torch.Tensor, ...]:
        import torch

        fields = [space.decisions(record) for record in records]
        encoded = self._room(encode(self.vocabulary, problem, fields, records))
        context, ids, numbers = (torch.from_numpy(part) for part in encoded)
        loose = [[self.vocabulary.choice(one) for one in free_choices(record)] for record in records]
        width = max(map(len, loose), default=0)
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in loose], dtype=torch.int64)
        # A loose head is one token more; token 0 has no number.
        return context, torch.cat([ids, padded], 1), numbers

    def _scores(self, read: tuple[torch.Tensor, ...], prior_only: bool = False) -> torch.Tensor:
        found = self.prior.logits(*read)
        return found if prior_only else found + self.learned.logits(*read)

    # What changes it

    def imitate(self, examples: Sequence[Record], seconds: float = 60.0, passes: int = 6, others: int = 192) -> float:
        """Trains the prior to prefer what others chose; answers the mean log loss of the last pass.

        Each example stands against ``others`` drawn legal records of its problem, for at most about ``seconds``.
        """
        import time

        import torch

        until = time.monotonic() + seconds
        sets = []
        for record in examples:
            found = space.candidates(record.problem, others)
            fields = [space.decisions(record), *found.fields]
            encoded = self._room(encode(self.vocabulary, record.problem, fields, [record, *found.records]))
            heads = record.free_fields(record.problem)
            ids = [[self.vocabulary.choice(one) for one in values] for values in heads.values()]
            chosen = [self.vocabulary.choice(one) for one in free_choices(record)]
            known = [(values, values.index(own)) for values, own in zip(ids, chosen, strict=False) if own in values]
            sets.append(([torch.from_numpy(part) for part in encoded], known))
            if time.monotonic() > until - seconds / 2:
                break
        with self._training(self.prior) as optimizer:
            mean = float("nan")
            for _ in range(passes):
                losses: list[float] = []
                for start in range(0, len(sets), 16):
                    order = sets[start : start + 16]
                    loss = torch.zeros(())
                    for (context, tokens, numbers), known in order:
                        loss = loss - torch.log_softmax(self.prior.logits(context, tokens, numbers), 0)[0]
                        for values, own in known:
                            logits = self.prior.of_tokens(context, torch.tensor(values))
                            loss = loss - torch.log_softmax(logits, 0)[own]
                    _step(optimizer, loss / len(order))
                    losses.append(float(loss.detach()) / len(order))
                mean = sum(losses) / len(losses)
                if time.monotonic() > until:
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
        """One step on pairs: the better record of each pair should have the higher logit. Answers the mean loss.

        Pairs that differ by less than ``margin`` in score say nothing. ``weight``: cost of the learned part's squares,
        which keeps it near the prior.
        """
        import torch

        with self._training(self.learned) as optimizer:
            total, count = torch.zeros(()), 0
            for one in ranked:
                prepared = one if isinstance(one, Prepared) else self.prepared(one)
                loss, pairs = bradley_terry(self._scores(prepared.read), prepared.scores, margin)
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
            if self._optimizer is None:
                self._optimizer = torch.optim.Adam(net.tensors.values(), lr=self.learning_rate)
            yield self._optimizer
            self.steps += 1
        net.trainable(False)

    # Where it is kept

    def copy(self, seed: int = 0) -> Policy:
        """An independent policy with the same numbers; its draws are its own."""
        other = Policy(seed, self.learning_rate)
        other.vocabulary = Vocabulary(self.vocabulary.tokens[1:])
        other.steps = self.steps
        for mine, theirs in ((self.prior, other.prior), (self.learned, other.learned)):
            for name, tensor in mine.tensors.items():
                theirs.tensors[name].copy_(tensor.detach())
        return other

    def save(self, path: Path) -> None:
        """Writes a checkpoint; readers see the old one or the new one, never a part."""
        import torch

        known = len(self.vocabulary)
        nets = {
            part: {name: one[:known].clone() if name == "heads" else one.clone() for name, one in net.tensors.items()}
            for part, net in (("prior", self.prior), ("learned", self.learned))
        }
        whole = {"format": FORMAT, "tokens": self.vocabulary.tokens[1:], "steps": self.steps, "nets": nets}
        if self._optimizer:
            whole["optimizer"] = _resized(self._optimizer.state_dict(), known)
        buffer = io.BytesIO()
        torch.save(whole, buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)

    @classmethod
    def load(cls, path: Path, seed: int = 0) -> Policy:
        """A checkpoint's policy, ready to go on learning. Raises CheckpointError."""
        import torch

        try:
            whole: dict[str, Any] = torch.load(path, weights_only=True)
            if whole["format"] != FORMAT:
                raise CheckpointError(f"{path} is of format {whole['format']}, not {FORMAT}; remove it to start anew")
            policy = cls(seed)
            policy.vocabulary, policy.steps = Vocabulary(whole["tokens"]), whole["steps"]
            for part, net in (("prior", policy.prior), ("learned", policy.learned)):
                for name, tensor in net.tensors.items():
                    stored = whole["nets"][part][name]
                    tensor[: len(stored)].copy_(stored)
            if "optimizer" in whole:
                policy._optimizer = torch.optim.Adam(policy.learned.tensors.values(), lr=policy.learning_rate)
                policy._optimizer.load_state_dict(_resized(whole["optimizer"], CAPACITY))
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise CheckpointError(f"{path} holds no policy ({type(error).__name__}); remove it to start anew") from None
        return policy


def _resized(state: dict[str, Any], rows: int) -> dict[str, Any]:
    """An optimiser's state whose tensors for the heads, the first of a net, have so many rows; no token, no number."""
    import torch

    def fit(value: torch.Tensor) -> torch.Tensor:
        if value.ndim != 2:
            return value
        wide = torch.zeros(rows, value.shape[1])
        kept = min(rows, len(value))
        wide[:kept] = value[:kept]
        return wide

    heads = {name: fit(value) for name, value in state["state"].get(0, {}).items()}
    return state | {"state": state["state"] | {0: heads}}


def bradley_terry(logits: torch.Tensor, scores: Sequence[float], margin: float = 0.0) -> tuple[torch.Tensor, int]:
    """Mean over pairs of -log sigmoid(logit of the better - logit of the worse), and how many pairs there are."""
    import torch

    values = torch.tensor(scores)
    better, worse = torch.nonzero(values[:, None] > values[None, :] + margin, as_tuple=True)
    if not len(better):
        return torch.zeros(()), 0
    return torch.nn.functional.softplus(logits[worse] - logits[better]).mean(), len(better)


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _cumulative(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Of the probabilities; the last is 1, so that no draw falls beyond it."""
    wide = np.exp(logits.astype(np.float64) - logits.max())
    found: NDArray[np.float64] = np.cumsum(wide) / wide.sum()
    found[-1] = 1.0
    return found


Rewarder = Callable[[Sequence[Record]], Sequence[float]]


def practise(
    policy: Policy,
    views: Sequence[View],
    rewards: Callable[[Problem, Sequence[Record]], Sequence[float]],
    rounds: int,
    group: int = 16,
    problems: int = 8,
    kl: float = 0.02,
    seed: int = 0,
    source: str = "policy",
) -> int:
    """Group-relative training: in each round some problems, a group of draws each. Answers the evaluations it took."""
    rng, spent = np.random.default_rng(seed), 0
    for _ in range(rounds):
        groups = []
        for at in rng.choice(len(views), min(problems, len(views)), replace=False):
            view = views[at]
            actions = policy.draw(view, group)
            records = [view.candidates.compose(action.row, action.choices, source) for action in actions]
            groups.append(Group(view, actions, rewards(view.candidates.problem, records)))
            spent += len(actions)
        policy.follow_rewards(groups, kl)
    return spent


def compare(policy: Policy, ranked: Sequence[Ranked], rounds: int, problems: int = 8, seed: int = 0) -> None:
    """Contrastive training on measured records of many problems."""
    rng, known = np.random.default_rng(seed), [policy.prepared(one) for one in ranked]
    for _ in range(rounds):
        policy.contrast([known[at] for at in rng.choice(len(known), min(problems, len(known)), replace=False)])


def by_problem(records: Iterable[Record], scores: Iterable[float]) -> list[Ranked]:
    """Measured records, grouped; problems with one record only say nothing and are left out."""
    grouped: dict[Problem, tuple[list[Record], list[float]]] = {}
    for record, score in zip(records, scores, strict=True):
        own, values = grouped.setdefault(record.problem, ([], []))
        own.append(record)
        values.append(score)
    return [Ranked(*parts) for parts in grouped.values() if len(parts[0]) > 1]
