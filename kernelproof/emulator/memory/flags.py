"""Flags: strong writes publish clocks to the readers that the scopes of both sides reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kernelproof.emulator.state.scopes import SCOPES, Scope

Clock = TypeVar("Clock")


class Side(NamedTuple):
    """The thread on one side of a synchronisation: its CTA and its cluster."""

    cta: int
    cluster: int

    def group(self, scope: Scope) -> tuple[Scope, int]:
        """The threads within a scope of this side."""
        return scope, {Scope.CTA: self.cta, Scope.CLUSTER: self.cluster, Scope.GPU: 0}[scope]


def up_to(scope: Scope, clock: Clock) -> dict[Scope, Clock]:
    """A clock that is passed on at a scope is passed on at all smaller ones."""
    return {smaller: clock for smaller in SCOPES if smaller <= scope}


class Flags(Generic[Clock]):
    """Clocks that readers of a place learn, by the threads that they are meant for.

    A write of scope s tells the writer's CTA, cluster or device, as far as s; a read looks at its own as far as its
    scope. So they synchronise iff both scopes reach the other side.
    """

    def __init__(self, merge: Callable[[Clock, Clock], Clock]) -> None:
        self._merge = merge
        self._places: dict[int, dict[tuple[Scope, int], Clock]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def write(self, place: int, side: Side, scope: Scope, clocks: dict[Scope, Clock], keep: bool = False) -> None:
        """A strong write; ``clocks``: what it publishes at each scope; ``keep``: a read-modify-write, which continues
        the release sequence."""
        published = self._places.get(place, {}) if keep else {}
        for reach, clock in clocks.items():
            if reach <= scope:
                group = side.group(reach)
                published[group] = self._merge(published[group], clock) if group in published else clock
        self._places[place] = published

    def read(self, place: int, side: Side, scope: Scope) -> dict[Scope, Clock]:
        """What a strong read can learn, by scope."""
        published = self._places.get(place)
        if not published:
            return {}
        return {
            reach: published[side.group(reach)] for reach in SCOPES if reach <= scope and side.group(reach) in published
        }

    def merged(self, a: dict[Scope, Clock], b: dict[Scope, Clock]) -> dict[Scope, Clock]:
        """The union of clocks, scope by scope."""
        if not a or not b:
            return a or b
        return a | {scope: self._merge(a[scope], clock) if scope in a else clock for scope, clock in b.items()}

    def take(self, pending: dict[Scope, Clock], scope: Scope) -> list[Clock]:
        """The clocks, removed from ``pending``, that a fence of a scope brings into force."""
        return [pending.pop(reach) for reach in SCOPES if reach <= scope and reach in pending]
