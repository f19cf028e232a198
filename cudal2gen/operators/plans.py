"""Keeps the plans of a process, each of which computes all calls of one kind, and counts their calls."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from cudal2gen.launch.launcher import LaunchError
from cudal2gen.operators.call_native import NativeCall
from cudal2gen.operators.plan_requests import Run

Key = tuple[Any, ...]

MAX_PLANS = 1 << 14  # limits the memory of models whose shapes keep changing
# The codes by which the launcher refuses operands: cudaErrorInvalidValue and cudaErrorMisalignedAddress. Other codes
# are faults of the device or of the installation.
REFUSALS = {1, 716}


class ByTorch(Exception):
    """No kernel computes a request, so torch does. ``short``: the reason without the call's sizes, so that ``stats``
    can count it. ``lasting``: whether the reason applies to later calls too."""

    def __init__(self, short: str, reason: str = "", lasting: bool = True) -> None:
        super().__init__(reason or short)
        self.short, self.lasting = short, lasting


class CallPlan:
    """The plan for all calls of one kind.

    ``run`` computes a call; ``by_torch`` computes it if the launcher refuses the operands. ``native``: the same call in
    a form that C++ can make, or None. ``calls``: the number of calls that Python made. ``gain_us``: the microseconds
    that a call saves against torch, as measured. ``by_bucket``: whether the measurement had another number of rows
    (``buckets``). ``spans``: the bytes that a, b and out extend over, if the call has ``out``.
    """

    def __init__(self, name: str, reason: str, run: Run, on_kernel: bool, by_torch: Run) -> None:
        self.name, self.reason, self.run, self.on_kernel, self.by_torch = name, reason, run, on_kernel, by_torch
        self.key: Key = ()
        self.native: NativeCall | None = None
        self.calls, self.gain_us, self.by_bucket = 0, 0.0, False
        self.spans = (0, 0, 0)

    def count(self, drop: bool = False) -> int:
        """The number of calls that Python and C++ made. ``drop``: C++ makes no further ones."""
        if self.native is not None:
            calls = self.native.calls(drop)
            if not drop:
                return self.calls + calls
            self.calls += calls
        return self.calls


class Plans:
    """The plans of a process by their keys, and the counts of all calls, including those of dropped plans.

    ``lock`` guards everything here, and the dispatcher holds it while it decides. A planned call does not take the
    lock: it looks up its plan in ``by_key``, which is atomic in the interpreter, and increments ``CallPlan.calls``. So
    a count may miss calls that several threads make at the same instant.
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
        """Drops a plan, so that the next call of its kind is planned anew."""
        with self.lock:
            if self.by_key.get(plan.key) is plan:
                self._retire(self.by_key.pop(plan.key))

    def replace(self, plan: CallPlan, error: LaunchError) -> CallPlan:
        """Replaces a plan whose call the launcher refused by torch's product, and counts this call for torch.

        Raises the error again if the operands are not its reason.
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
        """Counts a call without a plan: by the kernel ``name``, or by torch for the reason ``name``."""
        with self.lock:
            self._retired[(on_kernel, name)] += 1

    def once(self, plan: CallPlan) -> CallPlan:
        """Counts the only call of a plan that is not kept, and returns the plan."""
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
        """Adds the calls of a plan that is no longer used to the counts."""
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
