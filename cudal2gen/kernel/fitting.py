"""Finds the nearest legal record in which the fields that a user sets keep their values.

``fit`` searches among the records of one family, cheapest changes first. It finds out which fields to move by trying:
a field matters if another value of it changes which rules are broken. The values of a field come from its type and from
the family's ``candidates``. If the search ends without a legal record, ``fit`` tries the candidates themselves. This
module repeats no rule and names no family.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import chain, combinations, count, takewhile
from typing import Any, NamedTuple

from cudal2gen.kernel.fieldset import Fieldset, fieldset, spell
from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import Fields, Origin, Record
from cudal2gen.kernel.schema import IllegalRecord, IllegalValue
from cudal2gen.kernel.spelling import FAMILIES, PROBLEM_FIELDS, parse
from kernelproof.ground.chips import GPUS

# The most records whose rules each of three phases evaluates: the search from the start, the candidates themselves, and
# the search from the best candidates. Together they take about 0.3 s.
SEARCH_PROBES, CANDIDATE_PROBES, SEED_PROBES = 2500, 500, 1500
MAX_SEEDS = 8  # most candidates from which the second search starts
FIRST_PROBES = 3  # values of a field that are tried first; if none changes the broken rules, the field is left alone
MAX_TRIES = 32  # most values of a field that are tried
# Values of a field that the search follows up: for each set of broken rules that they lead to, and in all.
VALUES_PER_OUTCOME, VALUES_PER_FIELD = 3, 8
RULE_COST = 0.3  # estimated cost of mending a broken rule
# Weights of a change in the cost of a fit: of an extent of the tile, and of a field that follows from others. Other
# fields have weight 1.
TILE_WEIGHT, FOLLOWING_WEIGHT = 2.0, 0.3
SPILL_COST = 2.0  # cost of a record that is likely to spill
TILE = ("bm", "bn")
FAR_COST = 3.0  # a fit that costs more than this is compared with the candidates
MAX_CANDIDATES = 2000  # most candidates that are sorted by cost; all of these are tried if nothing else is legal


class Difference(NamedTuple):
    """A field that the fit changed, its JSON values before and after, and the rule that required the change.

    ``field``: the name, such as ``bm``, or ``prefetch.distance`` for a part of a field.
    """

    field: str
    before: Any
    after: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.field} {spell(self.before)} -> {spell(self.after)}: {self.reason}"

    @property
    def setting(self) -> str:
        """The new value as a user would set it: ``FIELD=VALUE``."""
        return f"{self.field}={spell(self.after)}"


class Fit(NamedTuple):
    """A legal record, and the fields in which it differs from the requested one."""

    record: Record
    differences: tuple[Difference, ...]


def fit(record: Record, named: Mapping[str, Any], problem: Problem | None = None) -> Fit:
    """The legal record nearest to ``record`` in which the ``named`` fields have these JSON values, for ``problem``.

    A name may be that of a part, such as ``prefetch.kind``. ``problem`` defaults to the record's own. A fit evaluates
    the rules at most 6500 times, which takes half a second. Raises IllegalValue for a value that its field never takes,
    and IllegalRecord if there is no legal record near.
    """
    fields: Fields = record.model_dump(mode="json") | (problem or record.problem).model_dump(mode="json")
    for name, value in named.items():
        field, _, part = name.partition(".")
        if part and not isinstance(fields.get(field), dict):
            raise IllegalValue(f"{name}: {field} has no parts")
        fields[field] = fields[field] | {part: value} if part else value
    return fit_fields(fields, named)


def fit_fields(fields: Fields, named: Collection[str]) -> Fit:
    """``fit`` for the fields of a line, where decisions may be missing. The ``named`` fields keep their values. Raises
    IllegalRecord if no legal record is near."""
    if family := FAMILIES.get(str(fields.get("family"))):
        fields = family.NEUTRAL | fields
    try:
        return Fit(parse(fields), ())
    except IllegalValue:
        raise
    except IllegalRecord as error:
        refusal = error
    search = _search(fields, frozenset(named), refusal)
    moves = search.nearest()
    if moves is None:
        values = ", ".join(f"{name}={spell(value)}" for name, value in search.start.items() if search.is_named(name))
        raise IllegalRecord(f"{refusal}; no legal {fields['family']} record with {values or 'these fields'} is near")
    differences = tuple(
        Difference(name, search.start[name], value, search.reason(moves, name)) for name, value in moves.items()
    )
    return Fit(parse(fields | search.fieldset.nested(search.start | moves)), differences)


def _search(fields: Fields, named: frozenset[str], refusal: IllegalRecord) -> _Search:
    """A search that starts from a line's fields. Absent decisions are taken from the nearest candidate.

    Raises the refusal if the fields name no family or no problem, or if decisions are absent and the family has no
    candidates.
    """
    family = FAMILIES.get(str(fields.get("family")))
    if family is None:
        raise refusal
    try:
        problem = Problem.model_validate({name: fields[name] for name in PROBLEM_FIELDS if name in fields})
        origin = Origin.model_validate_json(json.dumps(fields["origin"]))
    except (ValueError, KeyError):
        raise refusal from None
    search = _Search(fieldset(family), problem, origin, {}, named)
    search.start = search.fieldset.flat(fields)
    if search.fieldset.values.keys() - search.start.keys():
        shared = search.start
        nearest = min(search.candidates, key=lambda flat: _changes_cost(shared, flat), default=shared)
        search.start = {name: (nearest | shared).get(name, ...) for name in search.fieldset.values}
        if ... in search.start.values():
            raise refusal
    return search


@dataclass
class _Search:
    """One search for a fit. A set of moves maps names of fields to the values that they get.

    ``start``: the flat decisions from which the search starts, including the values of the ``named`` fields.
    ``probes``: how many records' rules were evaluated so far.
    """

    fieldset: Fieldset
    problem: Problem
    origin: Origin
    start: Fields
    named: frozenset[str]
    probes: int = 0

    def is_named(self, name: str) -> bool:
        """Whether a user set this field, or the field of which it is a part."""
        return name in self.named or name.partition(".")[0] in self.named

    def record(self, moves: Fields) -> Record:
        """The record after a set of moves; it may break rules."""
        return self.fieldset.record(self.problem, self.origin, self.start | moves)

    def broken(self, moves: Fields) -> list[str]:
        """The rules that a set of moves breaks."""
        self.probes += 1
        return self.record(moves).broken_rules()

    def cost(self, moves: Fields) -> float:
        """How far a set of moves leads from the start: the sum over its fields, each by weight and distance."""
        return sum(self._weight(name) * (1 + _distance(self.start[name], value)) for name, value in moves.items())

    def legal_cost(self, moves: Fields) -> float:
        """The cost of a legal set of moves; a record that is likely to spill costs more."""
        return self.cost(moves) + (SPILL_COST if self.record(moves).spill_remarks else 0.0)

    def _weight(self, name: str) -> float:
        """The weight of a field's change in the cost."""
        if name in self.fieldset.family.FOLLOWING:
            return FOLLOWING_WEIGHT
        return TILE_WEIGHT if name in TILE else 1.0

    def nearest(self) -> Fields | None:
        """The cheapest legal set of moves that is found, without moves that are not needed; None if there is none."""
        if not self.broken({}):  # the start is legal: only absent decisions made the line illegal
            return {}
        moves = self._best_first([{}], SEARCH_PROBES)
        legal = [] if moves is None else [self._reduced(moves)]
        if not legal or self.legal_cost(legal[0]) > FAR_COST:
            cheapest = self._candidate_moves[:CANDIDATE_PROBES]
            moves = self._first_legal(cheapest) or self._best_first(self._seeds, SEED_PROBES)
            moves = moves or (None if legal else self._first_legal(self._candidate_moves[CANDIDATE_PROBES:]))
            legal += [] if moves is None else [self._reduced(moves)]
        return min(legal, key=self.legal_cost, default=None)

    def _best_first(self, seeds: list[Fields], probes: int) -> Fields | None:
        """The cheapest set of moves that breaks no rule, among those that the probes reach from the ``seeds``.

        The frontier is ordered by cost so far, plus an estimate for every rule that is still broken. A counter breaks
        ties, because dictionaries cannot be compared.
        """
        order, best, best_cost, last_probe = count(), None, math.inf, self.probes + probes
        frontier = [(self.cost(seed), next(order), seed, seed, self.broken(seed)) for seed in seeds]
        visited: set[str] = set()
        while frontier and self.probes < last_probe:
            _, _, seed, moves, broken = heappop(frontier)
            for child, rules in self._children(seed, moves, broken, best_cost - RULE_COST):
                key = json.dumps(child, sort_keys=True)
                if not rules and self.legal_cost(child) < best_cost:
                    best, best_cost = child, self.legal_cost(child)
                objections = rules or self.record(child).spill_remarks
                if objections and key not in visited:
                    bound = self.cost(child) + RULE_COST * len(objections)
                    heappush(frontier, (bound, next(order), seed, child, objections))
                visited.add(key)
                if self.probes >= last_probe:
                    break
        return best

    def _children(
        self, seed: Fields, moves: Fields, broken: list[str], most: float
    ) -> Iterator[tuple[Fields, list[str]]]:
        """Sets with one more move, of fields that affect the broken rules, and the rules that each set breaks.

        A field moves only once from the seed. Moves that mend no rule are left out, even if they break no other one,
        and so are moves that cost more than ``most``. Of moves that lead to the same broken rules, only the nearest few
        are kept.
        """
        before = _outcome(broken)
        for name in self.start:
            if self.is_named(name) or moves.get(name, self.start[name]) != seed.get(name, self.start[name]):
                continue
            outcomes: Counter[frozenset[str]] = Counter()
            touched = False
            for number, value in enumerate(self.values[name][:MAX_TRIES]):
                child = moves | {name: value}
                if (number >= FIRST_PROBES and not touched) or self.cost(child) > most:
                    break
                rules = self.broken(child)
                touched |= rules != broken
                outcome = _outcome(rules)
                if (
                    not before <= outcome
                    and outcomes[outcome] < VALUES_PER_OUTCOME
                    and outcomes.total() < VALUES_PER_FIELD
                ):
                    outcomes[outcome] += 1
                    yield child, rules

    @cached_property
    def candidates(self) -> list[Fields]:
        """The family's flat proposals for the problem; if there are none, its proposals for a stand-in GPU."""
        for gpu in (self.problem.gpu, *GPUS[self.problem.gpu].stand_ins):
            if fields := list(self.fieldset.family.candidates(self.problem.revised(gpu=gpu))):
                return list(map(self.fieldset.flat, fields))
        return []

    @cached_property
    def values(self) -> dict[str, list[Any]]:
        """Other values of each field, nearest first. If its type has too many, they are those of the candidates."""
        free = list(chain(*self.fieldset.family.free_fields(self.problem).values()))
        values: dict[str, list[Any]] = {}
        for name, old in self.start.items():
            choices = list(self.fieldset.values[name])
            if len(choices) < 2:
                proposed = (flat[name] for flat in (*self.candidates, *free) if name in flat)
                choices += [json.loads(text) for text in dict.fromkeys(map(json.dumps, proposed))]
            values[name] = sorted((value for value in choices if value != old), key=partial(_distance, old))
        return values

    @cached_property
    def _candidate_moves(self) -> list[Fields]:
        """The sets of moves that lead to candidates, cheapest first. Named and free fields keep the start's values."""
        family = self.fieldset.family
        fixed = {name: value for name, value in self.start.items() if self.is_named(name) or name in family.FREE_FIELDS}
        named = [name for name in fixed if self.is_named(name)]
        agreeing = [flat for flat in self.candidates if all(flat.get(name) == fixed[name] for name in named)]
        flats = agreeing or self.candidates
        move_sets = (
            {name: value for name, value in (flat | fixed).items() if value != self.start[name]}
            for flat in flats[:: 1 + len(flats) // MAX_CANDIDATES]
        )
        return sorted(move_sets, key=self.cost)

    def _first_legal(self, move_sets: list[Fields]) -> Fields | None:
        """The first of these sets of moves that breaks no rule."""
        return next((moves for moves in move_sets if not self.broken(moves)), None)

    @property
    def _seeds(self) -> list[Fields]:
        """The sets of moves to candidates that break the fewest rules, cheapest first."""
        return sorted(self._candidate_moves[:CANDIDATE_PROBES], key=lambda moves: len(self.broken(moves)))[:MAX_SEEDS]

    def _reduced(self, moves: Fields) -> Fields:
        """A legal set of moves without those that are not needed, alone or in pairs. Each remaining move gets the
        nearest value that keeps the set legal."""
        for dropped in chain(combinations(moves, 1), combinations(moves, 2)):
            remaining = {name: value for name, value in moves.items() if name not in dropped}
            if self._improves(remaining, moves):
                return self._reduced(remaining)
        for name, value in moves.items():
            for nearer in takewhile(lambda other: other != value, self.values[name]):  # noqa: B023
                if self._improves(other := moves | {name: nearer}, moves):
                    return self._reduced(other)
        return moves

    def _improves(self, moves: Fields, legal: Fields) -> bool:
        """Whether ``moves`` break no rule and cost less than the set ``legal``."""
        return self.legal_cost(moves) < self.legal_cost(legal) and not self.broken(moves)

    def reason(self, moves: Fields, name: str) -> str:
        """Why a field had to move: a rule that is broken without its move.

        A rule that starts with the field itself is preferred; a rule of a field that only follows it comes last.
        """
        followers = [follower for follower in moves if follower in self.fieldset.family.FOLLOWING - {name}]
        rules: list[str] = []
        for dropped in ((name,), *((name, follower) for follower in followers)):
            remaining = {field: value for field, value in moves.items() if field not in dropped}
            rules += self.broken(remaining) or self.record(remaining).spill_remarks
        own = name.partition(".")[0]
        rule = min(rules, key=lambda rule: (_field(rule) in followers, _field(rule) != own))
        return re.sub(rf"^{re.escape(name)}=[^:]*: ", "", rule)


def _field(rule: str) -> str:
    """The field with which the text of a broken rule starts."""
    return re.split(r"[.=:]", rule, maxsplit=1)[0]


def _outcome(rules: Collection[str]) -> frozenset[str]:
    """Which rules are broken, regardless of the numbers in them."""
    return frozenset(re.sub(r"\d+", "#", rule) for rule in rules)


def _changes_cost(shared: Fields, flat: Fields) -> float:
    """The distance of two sets of decisions, summed over the fields that both have."""
    return sum(_distance(value, flat[name]) for name, value in shared.items() if name in flat)


def _distance(old: Any, new: Any) -> float:
    """The distance of two values: the logarithm (base 2) of the ratio of numbers, at most 3; 1 for values without an
    order; 0.5 to or from null, since a part that is added or left out changes less than a kind."""
    if old == new:
        return 0.0
    if old is None or new is None:
        return 0.5
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return sum(_distance(*pair) + _warps_cost(pair[1]) for pair in zip(old, new, strict=True))
    if any(isinstance(value, bool) or not isinstance(value, int) for value in (old, new)):
        return 1.0
    return min(3.0, abs(math.log2(max(new, 0.5) / max(old, 0.5))))  # 0 counts as 0.5, because it has no logarithm


def _warps_cost(value: Any) -> float:
    """An additional cost for a number, such as one of warps, that is not a power of two."""
    return 0.25 if isinstance(value, int) and value & (value - 1) else 0.0
