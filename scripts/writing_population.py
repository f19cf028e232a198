"""Simulates which kernels the questions of several sessions on one problem should show to a writing language model.

    python scripts/writing_population.py > table.md

Six ways to select them are compared:

- ``separate``: a session shows its fastest kernel, and others that ``exemplars.draw`` draws from its own;
- ``common``: the same, from the kernels of all sessions;
- ``islands``: as ``separate``, but every ``MIGRATION`` rounds the fastest kernel of each session is copied to the next
  session;
- ``lead``: as ``separate``, but the fastest kernel of all sessions takes the place of the last one (``writing.lead``);
- ``separate grid``, ``common grid``: MAP-Elites. Kernels lie in cells by tile area, threads and shared memory; a
  question shows the fastest kernel, and the fastest ones of other cells, which are drawn uniformly.

A random writer stands for the model: it changes one of the shown kernels a little, often the fastest. Times are those
of the model environment, modelled times with hidden terms. So the table compares ways to select kernels, not writers,
and nothing in it is measured.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from cudal2gen.generation import catalog
from cudal2gen.kernel import Record, space
from cudal2gen.tuner import benchmark
from cudal2gen.tuner.benchmark import BenchmarkPlan
from cudal2gen.tuner.climbing import Choices, compose, first_choices, widths, with_fields
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.writing import exemplars
from cudal2gen.tuner.writing.session import MAX_DRAWN
from kernelproof.ground.pages import grid

KERNELS, RIGHT = 3, 0.6  # kernels of an answer, and the share of them that is right
FASTEST = 0.5  # probability that the writer changes the fastest of the shown kernels, and not another one of them
# A written kernel has one of the NEAREST structures, those that differ least from the changed kernel's. With
# probability KEEPS it has the changed kernel's own, and each free field gets another value with probability SWITCHES.
NEAREST, KEEPS, SWITCHES = 32, 0.3, 0.3
MIGRATION = 3  # rounds between two migrations of ``islands``
CHECKPOINTS = (4, 8, 16)  # rounds after which regrets are compared


class Kernel(NamedTuple):
    """A right kernel, and its true time in µs."""

    record: Record
    us: float

    @property
    def cell(self) -> tuple[int, int, int]:
        """The kernel's cell of the grid: the rounded log2 of tile area, of threads, and of shared memory in KiB."""
        extents = self.record.bm * self.record.bn, self.record.threads, 1 + self.record.smem_bytes // 1024
        area, threads, smem = (round(math.log2(extent)) for extent in extents)
        return area, threads, smem


Populations = Sequence[Sequence[Kernel]]  # the kernels of each session, in the order in which they were written
Selection = Callable[[Populations, int, random.Random], list[Kernel]]  # what session ``number`` shows, fastest first


def drawn(kernels: Sequence[Kernel], rng: random.Random) -> list[Kernel]:
    """The fastest kernel and up to ``MAX_DRAWN`` others by the rule of ``exemplars``, the fastest first."""
    ranked = sorted(kernels, key=lambda kernel: kernel.us)
    speeds = [ranked[-1].us / kernel.us for kernel in ranked[1:]]
    return [ranked[0], *(ranked[1 + index] for index in exemplars.draw(speeds, MAX_DRAWN, str(rng.random())))]


def elites(kernels: Sequence[Kernel], rng: random.Random) -> list[Kernel]:
    """The fastest kernel, and the fastest of up to ``MAX_DRAWN`` other cells, the fastest first."""
    cells: dict[tuple[int, int, int], Kernel] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.us):
        cells.setdefault(kernel.cell, kernel)
    first, *rest = cells.values()
    return [first, *sorted(rng.sample(rest, min(MAX_DRAWN, len(rest))), key=lambda kernel: kernel.us)]


def everything(populations: Populations) -> list[Kernel]:
    """The kernels of all sessions."""
    return [kernel for kernels in populations for kernel in kernels]


def with_lead(populations: Populations, number: int, rng: random.Random) -> list[Kernel]:
    """A session's own kernels with the fastest of all sessions in place of the last one."""
    shown = drawn(populations[number], rng)
    fastest = min(everything(populations), key=lambda kernel: kernel.us)
    return shown if fastest in shown else [fastest, *shown[:MAX_DRAWN]]


SELECTIONS: dict[str, Selection] = {
    "separate": lambda populations, number, rng: drawn(populations[number], rng),
    "common": lambda populations, _, rng: drawn(everything(populations), rng),
    "islands": lambda populations, number, rng: drawn(populations[number], rng),  # ``migrate`` adds to the populations
    "lead": with_lead,
    "separate grid": lambda populations, number, rng: elites(populations[number], rng),
    "common grid": lambda populations, _, rng: elites(everything(populations), rng),
}


def migrate(populations: Sequence[list[Kernel]]) -> None:
    """Adds the fastest kernel of each session to the next session's."""
    fastest = [min(kernels, key=lambda kernel: kernel.us) for kernels in populations]
    for number, kernel in enumerate(fastest):
        populations[(number + 1) % len(populations)].append(kernel)


def changed_record(shown: Sequence[Kernel], candidates: space.Candidates, rng: random.Random) -> Record:
    """What the writer makes of the shown kernels: one of them, with other values of free fields, or with one of the
    ``NEAREST`` other structures."""
    record = (shown[0] if len(shown) == 1 or rng.random() < FASTEST else rng.choice(shown[1:])).record
    distances = candidates.distances(record.model_dump())  # 0 for the record's own structure
    own, *others = np.argsort(distances, kind="stable")[: NEAREST + 1].tolist()
    choices = with_fields(candidates, own, record.model_dump())
    numbers = widths(candidates, own)
    if rng.random() < KEEPS and max(numbers, default=1) > 1:
        free = tuple(
            rng.randrange(width) if rng.random() < SWITCHES else old
            for old, width in zip(choices.free, numbers, strict=True)
        )
        return compose(candidates, Choices(own, free), "writer")
    return compose(candidates, with_fields(candidates, rng.choice(others), record.model_dump()), "writer")


def regrets(
    name: str, environment: ModelEnvironment, candidates: space.Candidates, best: float, sessions: int, seed: int
) -> list[float]:
    """1 - best / fastest of all sessions, at each of ``CHECKPOINTS``. ``best``: the least time known, in µs."""
    rng = random.Random(f"{seed} {candidates.problem.title}")
    times = environment.true_us(candidates.records)
    # All sessions begin with one kernel of the slower half, because a fast one would leave a writer nothing to do.
    # Small changes lead to no other family, so it is of the fastest kernel's family.
    family = candidates.records[int(times.argmin())].family
    rows = [row for row, record in enumerate(candidates.records) if record.family == family]
    row = rng.choice([row for row in rows if times[row] >= np.median(times[rows])])
    record = compose(candidates, first_choices(candidates, row), "incumbent")
    populations = [[Kernel(record, float(environment.true_us([record])[0]))] for _ in range(sessions)]
    found = []
    for number in range(1, max(CHECKPOINTS) + 1):
        answers = [SELECTIONS[name](populations, session, rng) for session in range(sessions)]
        for kernels, shown in zip(populations, answers, strict=True):
            records = [changed_record(shown, candidates, rng) for _ in range(KERNELS)]
            right = [record for record in records if rng.random() < RIGHT]
            kernels += [Kernel(*pair) for pair in zip(right, environment.true_us(right).tolist(), strict=True)]
        if name == "islands" and number % MIGRATION == 0:
            migrate(populations)
        if number in CHECKPOINTS:
            fastest = min(kernel.us for kernel in everything(populations))
            found.append(max(0.0, 1 - best / fastest))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=12, help="problems of each GPU")
    parser.add_argument("--seeds", type=int, default=3, help="environments, each with own hidden terms")
    parser.add_argument("--sessions", type=int, nargs="+", default=[4, 8], help="sessions of each problem")
    options = parser.parse_args()
    rows = []
    for sessions in options.sessions:
        scores: dict[str, list[list[float]]] = {name: [] for name in SELECTIONS}
        for gpu in ("a100", "h200"):
            plan = BenchmarkPlan(gpu=gpu, held_out=options.problems)
            problems, _ = benchmark.split(catalog.load(), plan)
            for problem in problems:
                candidates = space.candidates(problem, most=2000)
                for seed in range(options.seeds):
                    environment = ModelEnvironment(seed=seed)
                    best = benchmark.best_known(environment, candidates)
                    for name, found in scores.items():
                        found.append(regrets(name, environment, candidates, best, sessions, seed))
        for name, found in scores.items():
            rows.append([sessions, name, *(f"{100 * fmean(column):.1f}" for column in zip(*found, strict=True))])
    heads = [f"% regret after {count} rounds" for count in CHECKPOINTS]
    print(grid(["sessions", "what a question shows", *heads], rows))


if __name__ == "__main__":
    main()
