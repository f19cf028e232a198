"""A race of candidates, such as a library's algorithms: the ``device`` protocol, from a cold L2, in stages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cudal2gen.gpu import Absent, Binder, Call, Device, Operands, Race, Winner

# A race of candidates: how long its first stage takes at most (kernels that the library loads for the first time make
# it long, and problems of 10^12 FLOP); then, stage by stage, how many stay and how often each is timed.
RACE_SECONDS = 1.0
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
        graphs: dict[int, Call] = {}
        times: dict[int, list[float]] = {}

        def sample(index: int) -> None:
            elapsed_us = self._device.elapsed_us(graphs[index], self._device.evict)
            times[index].append(elapsed_us / len(self._sets))

        deadline = self._device.now() + RACE_SECONDS
        for index, binder in enumerate(binders):
            if times and self._device.now() > deadline:
                break
            graph = self._graph(binder)
            if graph is None:
                continue
            graphs[index], times[index] = graph, []
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

    def _graph(self, binder: Binder) -> Call | None:
        """Calls of a candidate on every set, captured; None for one that the library refuses."""
        try:
            calls = [binder(matrices) for matrices in self._sets]
            calls[0]()
            graph = self._device.capture(calls)
        except Absent:
            return None
        if len(self._sets) > 1:  # a graph's first launch also loads it, which short calls do not hide
            graph()
        return graph
