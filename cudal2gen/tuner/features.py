"""Inputs of a policy: tokens for a record's decisions, numbers for the facts derived from them.

A token is one value of one field, or of two fields that matter together. The numbers are facts that the record's own
properties and the problem give: waves, their last one's share, steps of k, padding. No estimate of a time is among
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import FAMILIES, GPUS, Fields, Problem, Record, ceil_div
from cudal2gen.kernel.space import NO_DECISION, Candidates

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Fields whose values mean something together, as the tile's two extents do.
PAIRS = (
    ("bm", "bn"),
    ("family", "bm"),
    ("bn", "stages"),
    ("bm", "schedule"),
    ("bk", "split_k"),
    ("bm", "mma_repeat"),
    ("bn", "cluster"),
    ("prefetch", "stages"),
)
CLASSES = ("small-m", "split-k", "tiny", "medium", "large", "huge")
NUMBERS = 12


class Encoded(NamedTuple):
    """Records of one problem. ``ids``: their tokens' numbers, 0 for none; ``numbers``: derived facts."""

    context: Floats
    ids: Ids
    numbers: Floats


class Vocabulary:
    """Tokens and their numbers, in the order in which the tokens were met. 0 stands for no token."""

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.tokens: list[str] = ["", *tokens]
        self._ids: dict[tuple[str, Any], int] = {}
        self._numbers = {token: index for index, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def id(self, head: str, value: Any) -> int:
        """A token's number. A new token gets the next one."""
        choice = (head, value if isinstance(value, (str, int, bool, type(None), tuple)) else json.dumps(value))
        number = self._ids.get(choice)
        if number is None:
            token = f"{head}={json.dumps(choice[1])}"
            number = self._numbers.setdefault(token, len(self.tokens))
            if number == len(self.tokens):
                self.tokens.append(token)
            self._ids[choice] = number
        return number

    def structure(self, fields: Mapping[str, Any]) -> list[int]:
        """The tokens of a structure's decisions: single fields, then pairs of fields."""
        left_out = NO_DECISION | FAMILIES[fields["family"]].FREE_FIELDS
        ids = [self.id(name, value) for name, value in fields.items() if name not in left_out]
        for first, second in PAIRS:
            if first in fields and second in fields:
                ids.append(self.id(f"{first}+{second}", json.dumps([fields[first], fields[second]])))
        return ids

    def choice(self, fields: Fields) -> int:
        """The token of one value of free fields."""
        return self.id("loose", json.dumps(fields, sort_keys=True))


def context(problem: Problem) -> Floats:
    """The features of a problem and its GPU, each of the order of one."""
    gpu = GPUS[problem.gpu]
    m, n, k = ((math.log2(extent) - 10) / 4 for extent in (problem.m, problem.n, problem.k))
    fill = math.log2(problem.m * problem.n / (128 * 128 * gpu.sms)) / 6
    return np.array(
        [
            1.0, m, n, k, m * n, m * k, n * k, m * m, n * n, k * k, fill, math.tanh(2 * fill),
            *(float(problem.size_class == name) for name in CLASSES), float(problem.acc == "f32"),
            float(problem.layout == "nn"), float(gpu.capability.has_wgmma), gpu.sms / GPUS["h200"].sms - 1,
            gpu.capability.smem_block_bytes / 2**18,
        ],
        np.float32,
    )  # fmt: skip


CONTEXT = 23


def numbers(record: Record) -> list[float]:
    """Facts derived from a record on its own problem and GPU, as numbers."""
    gpu, registers = record.target, record.estimated_registers
    resident = max(1, record.ctas_per_sm(registers))
    waves = record.ctas / (resident * gpu.sms)
    per_sm = record.ctas / gpu.sms
    steps = ceil_div(ceil_div(record.k, record.k_step), record.split_k)
    reach = record.cluster_ctas if record.split_k == 1 else 1
    return [
        math.log2(waves) / 5,
        waves / math.ceil(waves),
        math.log2(per_sm) / 5,
        per_sm / math.ceil(per_sm),
        min(2.0, record.padding_waste),
        (record.smem_bytes + record.smem_static_bytes) / gpu.capability.smem_block_bytes,
        record.accumulator_registers / 128,
        math.log2(steps) / 5,
        64 / record.bm + 64 / record.bn / reach,
        math.log2(record.split_k),
        min(1.0, record.ring_steps / steps),
        math.log2(resident * record.threads / 128) / 3,
    ]


def encode(vocabulary: Vocabulary, problem: Problem, fields: Sequence[Fields], records: Sequence[Record]) -> Encoded:
    """Records as a policy reads them; ``fields`` and ``records`` correspond one by one."""
    rows = [vocabulary.structure(structure) for structure in fields]
    ids = np.zeros((len(rows), max(map(len, rows), default=1)), np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
    return Encoded(context(problem), ids, np.array([numbers(record) for record in records], np.float32))


def encode_candidates(vocabulary: Vocabulary, candidates: Candidates) -> Encoded:
    """All structures of a problem."""
    return encode(vocabulary, candidates.problem, candidates.fields, candidates.records)


def free_choices(record: Record) -> list[Fields]:
    """A record's choices among its family's free fields, in the form of ``Record.free_fields``."""
    heads = record.free_fields(record.problem).values()
    return [{name: getattr(record, name) for name in alternatives[0]} for alternatives in heads]
