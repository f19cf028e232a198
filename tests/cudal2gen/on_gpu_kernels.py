"""Lists every kernel that the tests on a GPU use, so that they are compiled before a day on one."""

from __future__ import annotations

import random
from itertools import product

from cudal2gen.generation import catalog
from cudal2gen.kernel import IllegalRecord, Problem, Record, revise
from scripts.race_operators import LAYERS, MAX_ROWS
from tests.cudal2gen.paths import PATHS, small
from tests.cudal2gen.test_launcher import REFUSED
from tests.cudal2gen.test_on_gpu import LARGE, LONGER, ROUNDED

GPU = "h200"  # the card on which these tests run


def kernels() -> list[Record]:
    """The legal kernels, each once."""
    changes = [{}, {"acc": "f32"}, LONGER, *LARGE, *(case[0] for case in REFUSED)]
    rounded = [revise(PATHS[name], acc=acc) for name, acc in product(ROUNDED, ("f16", "f32"))]
    records: dict[str, Record] = {}
    for record in [*PATHS.values(), *rounded, *(small(**edits) for edits in changes)]:
        try:
            record = revise(record, gpu=GPU)
        except IllegalRecord:
            continue
        records[record.name] = record
    return list(records.values())


SAMPLED, SERVED, SERVED_NN = 200, 24, 4


def sampled() -> list[tuple[int, int, int]]:
    """Sizes off the catalog's grid: few rows, some of them odd, and weights of real layers."""
    rng = random.Random(0)
    return [(rng.randint(1, MAX_ROWS), *rng.choice(LAYERS)) for _ in range(SAMPLED)]


def served(model: str) -> list[Record]:
    """Records for a few of the sampled problems, with B stored both ways."""
    records = catalog.load()
    tn = [Problem(gpu=model, acc="f32", layout="tn", m=m, n=n, k=k) for m, n, k in sampled()[:SERVED]]
    nn = [problem.model_copy(update={"layout": "nn"}) for problem in tn[:SERVED_NN]]
    return [catalog.nearest(problem, records).record for problem in [*tn, *nn]]
