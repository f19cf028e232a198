"""Plans: what calls of one kind do, decided once, and how many calls each plan made."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from cudal2gen.launch.launcher import LaunchError
from cudal2gen.operators.call_native import NativeCall
from cudal2gen.operators.plan_requests import Run

Key = tuple[Any, ...]

MAX_PLANS = 1 << 14  # bounds memory for models with ever new shapes
# cudaErrorInvalidValue and cudaErrorMisalignedAddress, by which the launcher refuses operands. Other codes are faults
# of the device or of the installation.
REFUSALS = {1, 716}


class ByTorch(Exception):
    """No kernel computes a request. ``short``: the reason without the call's sizes, so that ``stats`` can count it;
    ``lasting``: whether later calls get the same answer."""

    def __init__(self, short: str, reason: str = "", lasting: bool = True) -> None:
        super().__init__(reason or short)
        self.short, self.lasting = short, lasting


class CallPlan:
    """What calls of one kind do. ``run`` computes them, ``by_torch`` does if the launcher refuses; ``native`` is the
    same call in a form that C++ can make."""

    def __init__(self, name: str, reason: str, run: Run, on_kernel: bool, by_torch: Run) -> None:
        self.name, self.reason, self.run, self.on_kernel, self.by_torch = name, reason, run, on_kernel, by_torch
        self.key: Key = ()
        self.native: NativeCall | None = None
        # ``gain_us``: microseconds that a call saves against torch, as measured.
        self.calls, self.gain_us = 0, 0.0
        self.by_bucket = False  # whether the measurement was taken with another number of rows, see ``buckets``
        self.spans = (0, 0, 0)  # bytes of a, b and out, if the call has ``out``

    def count(self, drop: bool = False) -> int:
        """Calls made from Python and from C++. ``drop``: C++ makes no more of them."""
        if self.native is not None:
            calls = self.native.calls(drop)
            if not drop:
                return self.calls + calls
            self.calls += calls
        return self.calls


class Plans:
    """The plans of a process by their keys, and the counts of all calls, those of dropped plans included.

    ``lock`` guards everything here, and the dispatcher holds it while it decides. A planned call does not take it: it
    looks its plan up in ``by_key``, which is one step of the interpreter, and adds to ``CallPlan.calls``, so a count
    may lose calls that several threads make at the same instant.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, CallPlan] = {}
        self.lock = threading.RLock()
        self._retired: Counter[tuple[bool, str]] = Counter()
        self._gained_us: Counter[str] = Counter()
        self._by_bucket: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether the limit is reached; all plans are then dropped before the next one is kept."""
        return len(self.by_key) >= MAX_PLANS

    def drop(self, plan: CallPlan) -> None:
        """Lets the next call of a plan's kind be planned anew."""
        with self.lock:
            if self.by_key.get(plan.key) is plan:
                self._retire(self.by_key.pop(plan.key))

    def replace(self, plan: CallPlan, error: LaunchError) -> CallPlan:
        """Puts torch's product in the place of a plan whose call the launcher refused, and counts this call for it.

        Raises the error again if something else than the operands is its reason.
        """
        if error.code not in REFUSALS:
            raise error
        with self.lock:
            plan.calls -= 1
            by_torch = self.by_key.get(plan.key, plan)
            if by_torch is plan:  # otherwise another thread has replaced it
                self._retire(plan)
                by_torch = CallPlan("the launcher refuses", str(error), plan.by_torch, False, plan.by_torch)
                by_torch.key, by_torch.spans = plan.key, plan.spans
                self.by_key[plan.key] = by_torch
            by_torch.calls += 1
            return by_torch

    def count(self, name: str, on_kernel: bool = False) -> None:
        """Counts a call that has no plan: of a kernel, or of torch for the reason ``name``."""
        with self.lock:
            self._retired[(on_kernel, name)] += 1

    def once(self, plan: CallPlan) -> CallPlan:
        """Counts the only call of a plan that is not kept."""
        self.count(plan.name, plan.on_kernel)
        return plan

    def withdraw(self) -> None:
        """Returns all calls from C++ to Python."""
        with self.lock:
            for plan in self.by_key.values():
                plan.count(drop=True)

    def forget(self) -> None:
        """Drops all plans; their counts stay."""
        with self.lock:
            for plan in self.by_key.values():
                self._retire(plan)
            self.by_key.clear()

    def _retire(self, plan: CallPlan) -> None:
        # C++ is stopped first: a call that it made between counting and stopping would be lost.
        calls = plan.count(drop=True)
        self._retired[(plan.on_kernel, plan.name)] += calls
        self._gained_us[plan.name] += round(calls * plan.gain_us)
        self._by_bucket[plan.name] += calls * plan.by_bucket
        plan.calls = 0

    def counts(self) -> tuple[Counter[tuple[bool, str]], Counter[str], Counter[str]]:
        """Three counts: calls by kernel or by torch's reason, microseconds saved by kernel, and calls that a bucket's
        measurement answered by kernel."""
        with self.lock:
            counts, gained, of_buckets = Counter(self._retired), Counter(self._gained_us), Counter(self._by_bucket)
            for plan in self.by_key.values():
                calls = plan.count()
                counts[(plan.on_kernel, plan.name)] += calls
                gained[plan.name] += round(calls * plan.gain_us)
                of_buckets[plan.name] += calls * plan.by_bucket
        return counts, gained, of_buckets
