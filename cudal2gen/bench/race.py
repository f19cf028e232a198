"""A race finds the fastest of many candidates, such as a library's algorithms. Each stage times fewer of them, longer.

Times follow the ``device`` protocol, from a cold L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import median

from cudal2gen.launch.gpu import Absent, Binder, Call, Device, Race, Winner
from cudal2gen.launch.operands import Operands

# How long first calls of candidates take at most, for which a library loads kernels, and then the race's first stage:
# problems of 10^12 FLOP make both long. Then, stage by stage, how many stay and how often each is timed.
LOADING_SECONDS, RACE_SECONDS = 5.0, 1.0
RACE_STAGES = ((16, 3), (4, 8))
RACE_CALLS = 16


def race(device: Device, operands: Sequence[Operands]) -> Race:
    """The race in which a baseline's candidates are timed: the ``device`` protocol, from a cold L2."""
    return _Race(device, operands[:RACE_CALLS]).run


class _Race:
    """Candidates in stages: ever fewer are timed ever more often. ``run`` is the ``gpu.Race``."""

    def __init__(self, device: Device, sets: Sequence[Operands]) -> None:
        self._device, self._sets = device, sets

    def run(self, binders: Sequence[Binder]) -> Winner:
        """Raises Absent where no candidate runs."""
        calls = self._first_calls(binders)
        graphs: dict[int, Call] = {}
        times: dict[int, list[float]] = {}

        def sample(index: int) -> None:
            elapsed_us = self._device.elapsed_us(graphs[index], self._device.evict)
            times[index].append(elapsed_us / len(self._sets))

        deadline = self._device.now() + RACE_SECONDS
        for index in calls:
            if times and self._device.now() > deadline:
                break
            graphs[index], times[index] = self._graph(calls[index]), []
            sample(index)
        if not times:
            raise Absent(f"none of {len(binders)} candidates runs")
        timed = len(times)
        for count, samples in RACE_STAGES:
            field = sorted(times, key=lambda index: median(times[index]))[:count]
            times, graphs = {index: times[index] for index in field}, {index: graphs[index] for index in field}
            for _ in range(samples):
                for index in field:
                    sample(index)
        best = min(times, key=lambda index: median(times[index]))
        return Winner(best, median(times[best]), timed)

    def _first_calls(self, binders: Sequence[Binder]) -> dict[int, list[Call]]:
        """Calls on every set by candidate, called once, so that what a library loads for them is loaded; without the
        candidates that it refuses."""
        deadline = self._device.now() + LOADING_SECONDS
        calls: dict[int, list[Call]] = {}
        for index, binder in enumerate(binders):
            if calls and self._device.now() > deadline:
                break
            with suppress(Absent):
                calls_on_sets = [binder(matrices) for matrices in self._sets]
                calls_on_sets[0]()
                self._device.synchronize()
                calls[index] = calls_on_sets
        return calls

    def _graph(self, calls: Sequence[Call]) -> Call:
        graph = self._device.capture(calls)
        if len(self._sets) > 1:  # a graph's first launch also loads it, which short calls do not hide
            graph()
        return graph
