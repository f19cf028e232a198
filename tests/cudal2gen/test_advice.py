"""Proves that advice leads to a legal record: tests follow every proposal of a refused setting, and it must be
accepted.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from cudal2gen import places
from cudal2gen.cli.changes import changed
from cudal2gen.generation import catalog
from cudal2gen.kernel import FAMILIES, IllegalRecord, IllegalValue, Record
from cudal2gen.kernel.fieldset import fieldset
from cudal2gen.kernel.suggestions import WORDS
from kernelproof.ground.errors import UserError
from tests.draws import THOROUGH

# The number of drawn edits, and the families whose texts are written elsewhere.
EDITS = 5000 if THOROUGH else 60
WRITTEN = [family for family in FAMILIES.values() if family.TEXTUAL]


@cache
def records() -> list[Record]:
    """The catalog's records of all families whose texts are rendered."""
    own = catalog.load(places.shipped("configs") / "kernels.jsonl")
    return [record for record in own if type(record) not in WRITTEN]


def settings(record: Record, rng: random.Random) -> list[str]:
    """One to three fields with values of their types, or a word that the family does not know with any value."""
    if rng.random() < 0.4:
        others = [name for family in FAMILIES.values() if not family.TEXTUAL for name in family.line_fields()]
        word = rng.choice(rng.choice([others, [word for words in WORDS.values() for word in words.split()]]))
        if word not in type(record).line_fields():
            return [f"{word}={rng.choice([1, 2, 64, 'true'])}"]
    values = {name: values for name, values in fieldset(type(record)).values.items() if values}
    names = rng.sample(sorted(values), rng.randint(1, 3))
    return [f"{name}={json.dumps(rng.choice(values[name]))}" for name in names]


def refusal(record: Record, edits: list[str], *, fit: bool = False) -> str | None:
    """The error message of edits; None if they give a legal record."""
    try:
        changed(record, edits, fit=fit)
    except IllegalValue:
        raise
    except (IllegalRecord, UserError) as error:
        return str(error)
    return None


def proposals_in(record: Record, edits: list[str], message: str) -> Iterator[tuple[str, list[str], bool]]:
    """What a message proposes: its kind, the settings to use now, and whether with ``--fit``."""
    if families := re.search(r"add --set (family=\w+)$", message):
        yield "family", [families[1]], True
    if near := re.search(r"did you mean (.*)\?$", message):
        names = near[1]
        while (outside := re.sub(r" ?\([^()]*\)", "", names)) != names:  # explanations, from the innermost parentheses
            names = outside
        for name, value in re.findall(r"(?:^| or )([\w.]+)(=[\w.]+)?", names):
            current = fieldset(type(record)).flat(record.model_dump(mode="json")).get(name, ...)
            if current is ...:  # a fact of the problem, such as acc
                assert name in type(record).line_fields()
            else:
                yield "field", [f"{name}{value or '=' + json.dumps(current)}"], bool(value)
    if legal := re.search(r"; legal with(?: (.*), or with)? --fit$", message):
        yield "fit", edits, True
        if legal[1]:
            yield "settings", [*edits, *legal[1].removeprefix("--set ").split(" --set ")], False


@pytest.mark.slow
def test_what_a_refusal_proposes_is_taken() -> None:
    rng = random.Random(0)
    followed: Counter[str] = Counter()
    for _ in range(EDITS):
        record = rng.choice(records())
        edits = settings(record, rng)
        message = refusal(record, edits)
        for kind, proposal, fit in proposals_in(record, edits, message or ""):
            followed[kind] += 1
            again = refusal(record, proposal, fit=fit)
            assert again is None, f"{catalog.dump(record)} {edits}: {message}\n{proposal}: {again}"
    assert min(followed[kind] for kind in ("family", "field", "fit", "settings")), followed


@pytest.mark.parametrize(
    ("gpu", "word", "fields"),
    [
        ("a100", "num_warps", ["mma_repeat"]),
        ("h200", "num_warps", ["consumers"]),
        ("h200", "BLOCK_M", ["bm"]),
        ("h200", "warps_m", ["consumers"]),
        ("h200", "swizzle", ["raster_group"]),
        ("a100", "swizzle", ["smem_swizzle", "swizzle_stride"]),
        ("b200", "cta_group", ["pair"]),
    ],
)
def test_words_of_other_tools_are_answered_by_the_field(gpu: str, word: str, fields: list[str]) -> None:
    record = next(record for record in records() if (record.gpu, record.mnk) == (gpu, "4096_4096_4096"))
    message = refusal(record, [f"{word}=2"])
    assert message is not None
    assert [proposal[0].partition("=")[0] for _, proposal, _ in proposals_in(record, [], message)] == fields


def test_a_field_of_other_gpus_families_alone_is_not_proposed() -> None:
    record = next(record for record in records() if record.gpu == "a100")
    message = refusal(record, ["stream_k=true"])
    assert message is not None
    assert not list(proposals_in(record, [], message))


def test_a_list_may_be_spelled_as_a_shape() -> None:
    record = next(record for record in records() if (record.gpu, record.mnk) == ("h200", "4096_4096_4096"))
    assert changed(record, ["cluster=2x1", "schedule=cooperative"]) == changed(
        record, ["cluster=[2,1]", "schedule=cooperative"]
    )
