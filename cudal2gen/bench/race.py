"""Finds the fastest of many candidates, such as the algorithms that cuBLASLt offers for one problem.

All candidates are timed once, then the fastest ones several times more, in stages of fewer candidates with more
samples. This takes a fraction of the time of measuring all of them well. Times follow the ``device`` protocol with a
cold L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import median

from cudal2gen.launch.gpu import Absent, Binder, Call, MeasuringDevice, Race, Winner
from cudal2gen.launch.operands import Operands

# Time limits for the first call of all candidates (in which a library loads kernels) and for timing each of them once.
# Without them, a problem of 10^12 FLOP would take minutes. At a limit the candidates not yet reached are dropped; a
# library lists its likely best first. RACE_STAGES: how many candidates stay, and how often each is timed.
LOADING_SECONDS, RACE_SECONDS = 5.0, 1.0
RACE_STAGES = ((16, 3), (4, 8))
RACE_SETS = 16  # the most sets of operands; one sample calls a candidate once on each set


def race(device: MeasuringDevice, operands: Sequence[Operands]) -> Race:
    """The function that a baseline calls to find the fastest of its candidates on these operands."""
    return _Race(device, operands[:RACE_SETS]).run


class _Race:
    """A race on one device and some sets of operands. Its method ``run`` is a ``gpu.Race``."""

    def __init__(self, device: MeasuringDevice, sets: Sequence[Operands]) -> None:
        self._device, self._sets = device, sets

    def run(self, binders: Sequence[Binder]) -> Winner:
        """The candidate with the least median time in the last stage. Raises Absent if no candidate runs."""
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
            fastest = sorted(times, key=lambda index: median(times[index]))[:count]
            times, graphs = {index: times[index] for index in fastest}, {index: graphs[index] for index in fastest}
            for _ in range(samples):
                for index in fastest:
                    sample(index)
        best = min(times, key=lambda index: median(times[index]))
        return Winner(best, median(times[best]), timed)

    def _first_calls(self, binders: Sequence[Binder]) -> dict[int, list[Call]]:
        """For each candidate, its calls on every set of operands; candidates that the library refuses are left out.

        Each candidate is called once, so that the library loads its kernels before the timing.
        """
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
        """A CUDA graph of a candidate's calls, ready to be timed."""
        graph = self._device.capture(calls)
        # A graph's first launch also uploads it, which would distort the time of short calls. Several sets mean short
        # calls; with one set the operands exceed the L2, and the upload is negligible.
        if len(self._sets) > 1:
            graph()
        return graph
