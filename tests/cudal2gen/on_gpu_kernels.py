"""Lists every kernel that the GPU tests use, so that all are compiled before GPU time is borrowed."""

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


# Sampled sizes, and how many of them have a record with B (n,k), and also one with B (k,n).
SIZE_COUNT, TN_COUNT, NN_COUNT = 200, 24, 4


def sampled_sizes() -> list[tuple[int, int, int]]:
    """Sizes (m, n, k) that the catalog lacks: m is a small, often odd batch, and (n, k) the shape of a real layer's
    weight."""
    rng = random.Random(0)
    return [(rng.randint(1, MAX_ROWS), *rng.choice(LAYERS)) for _ in range(SIZE_COUNT)]


def nearest_records(gpu: str) -> list[Record]:
    """Records for a few of the sampled problems, with B stored both ways."""
    records = catalog.load()
    tn = [Problem(gpu=gpu, acc="f32", layout="tn", m=m, n=n, k=k) for m, n, k in sampled_sizes()[:TN_COUNT]]
    nn = [problem.model_copy(update={"layout": "nn"}) for problem in tn[:NN_COUNT]]
    return [catalog.nearest(problem, records).record for problem in [*tn, *nn]]
