"""Flags: clocks that strong writes publish. A reader finds one if its scope includes the writer and the reverse.

This is how a release synchronises with an acquire (PTX ISA, "Release and Acquire Patterns"): the write leaves a clock
at its place, the read takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kernelproof.emulator.state.scopes import SCOPES, Scope

Clock = TypeVar("Clock")


class Side(NamedTuple):
    """The CTA and the cluster of a thread on one side of a synchronisation."""

    cta: int
    cluster: int

    def group(self, scope: Scope) -> tuple[Scope, int]:
        """The key of the threads that a scope of this side comprises."""
        return scope, {Scope.CTA: self.cta, Scope.CLUSTER: self.cluster, Scope.GPU: 0}[scope]


def up_to(scope: Scope, clock: Clock) -> dict[Scope, Clock]:
    """A clock that is published at a scope is published at all smaller scopes, too."""
    return {smaller: clock for smaller in SCOPES if smaller <= scope}


class Flags(Generic[Clock]):
    """The clocks published at each place, by the group of threads that they are meant for.

    A write of scope s publishes to the writer's CTA, cluster and device, as far as s. A read looks up its own CTA,
    cluster and device, as far as its own scope. So the two synchronise iff each scope reaches the other side.
    """

    def __init__(self, merge: Callable[[Clock, Clock], Clock]) -> None:
        self._merge = merge
        self._places: dict[int, dict[tuple[Scope, int], Clock]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def write(self, place: int, side: Side, scope: Scope, clocks: dict[Scope, Clock], keep: bool = False) -> None:
        """A strong write. ``clocks``: what it publishes at each scope. ``keep``: it is a read-modify-write, which
        continues the release sequence, so what was published there stays."""
        published = self._places.get(place, {}) if keep else {}
        for reach, clock in clocks.items():
            # The key is the writer's own CTA, cluster or device, so a reader elsewhere has another key.
            if reach <= scope:
                group = side.group(reach)
                published[group] = self._merge(published[group], clock) if group in published else clock
        self._places[place] = published

    def read(self, place: int, side: Side, scope: Scope) -> dict[Scope, Clock]:
        """The clocks that a strong read finds, by scope."""
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
        """Remove from ``pending`` the clocks that a fence of this scope brings into force, and return them."""
        return [pending.pop(reach) for reach in SCOPES if reach <= scope and reach in pending]
