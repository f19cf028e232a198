"""Every kernel that the tests on a GPU ask for, to be compiled before a day on one."""

from __future__ import annotations

from itertools import product

from cudal2gen.kernel import IllegalRecord, Record, revise
from tests.paths import PATHS, small
from tests.test_launcher import REFUSED
from tests.test_on_gpu import LARGE, LONGER, ROUNDED

GPU = "h200"  # the card that is borrowed


def kernels() -> list[Record]:
    """Each legal one once."""
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
