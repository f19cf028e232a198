"""Chooses small sets of paths: one with every branch of the templates, and a larger one with every value of a field
too.

``make test`` executes the first, ``make thorough`` and a GPU's tests the second. golden/covering.txt names both, the
first up to its empty line; ``make goldens`` renews it, and ``test_validator`` proves that both are complete.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment

from cudal2gen.kernel import FAMILIES, Record
from tests.cudal2gen.paths import PATHS

FILE = Path(__file__).parent / "golden" / "covering.txt"
# Names of paths: those that cover every branch, and the further ones that cover every value of a field.
BRANCHES, _VALUES = (part.splitlines() for part in FILE.read_text().split("\n\n"))
COVERING = [*BRANCHES, *_VALUES]
DATA = ("gpu", "m", "n", "k")  # fields that may have any value
# Groups of fields of which each combination of values is executed, in addition to each value of each field.
COMBINED = (("layout", "acc"), ("layout", "pair", "swap_ab"), ("reduce", "split_k"), ("batch", "gate"))


def branches(text: str) -> Iterator[tuple[int, str]]:
    """The places and tags of a template that get marks: every macro, if, elif, else and endif."""
    for tag in re.finditer(r"{%-?\s*(macro|if|elif|else|endif)\b[^%]*?(?:%(?!})[^%]*?)*-?%}", text):
        yield tag.start(), tag.group(0)


def with_marks(name: str, text: str) -> tuple[str, list[str]]:
    """The template with marks that report which of its branches are taken, and the names of all marks.

    A mark is a call of ``took`` behind each tag. An if without else gets an else with a mark, "not so".
    """
    marks: list[str] = []
    out: list[str] = []
    end, has_else = 0, []  # the end of the last tag, and of each open if, whether its else was met
    for start, tag in branches(text):
        line = text.count("\n", 0, start) + 1
        kind = re.match(r"{%-?\s*(\w+)", tag)
        assert kind is not None
        out.append(text[end:start])
        end = start + len(tag)

        def mark(what: str, line: int = line) -> str:
            marks.append(f"{name}:{line} {what}".replace("'", '"'))
            return "{{ took('" + marks[-1] + "') }}"

        statement = re.sub(r"{%-?\s*|\s*-?%}", "", tag)
        if kind.group(1) == "endif":
            out.append(tag if has_else.pop() else "{% else %}" + mark("not so") + tag)
        else:
            if kind.group(1) == "if":
                has_else.append(False)
            if kind.group(1) == "else":
                has_else[-1] = True
            out.append(tag + mark(statement))
    return "".join([*out, text[end:]]), marks


def branches_by_path(checkout: Path) -> tuple[dict[str, set[str]], list[str]]:
    """The branches of the templates that each path takes, and all branches."""
    folder = checkout / "templates"
    texts, known = {}, []
    for path in sorted([*folder.glob("*.cu.j2"), *(folder / "macros").glob("*.j2")]):
        name = str(path.relative_to(folder))
        texts[name], marks = with_marks(name, path.read_text())
        known += marks
    now: set[str] = set()

    def took(mark: str) -> str:
        now.add(mark)
        return ""

    environment = Environment(loader=DictLoader(texts), trim_blocks=True, lstrip_blocks=True)
    environment.globals["took"] = took
    out = {}
    for name, record in PATHS.items():
        now.clear()
        environment.get_template(f"{record.family}.cu.j2").render(r=record)
        out[name] = set(now)
    return out, known


def values(record: Record) -> Iterator[Hashable]:
    """The values of a record's fields, and their combinations."""
    fields = [field for field in FAMILIES[record.family].line_fields() if field not in DATA]
    yield from ((field, repr(getattr(record, field))) for field in fields)
    for names in COMBINED:
        yield (
            names,
            tuple(bool(record.fusion.gate) if name == "gate" else getattr(record, name, None) for name in names),
        )


def features_by_family(shown: Mapping[str, set[Any]]) -> dict[str, set[Hashable]]:
    """The features of each path, each with the path's family: a set of paths must cover a feature in every family."""
    return {name: {(PATHS[name].family, feature) for feature in features} for name, features in shown.items()}


def cover(shown: Mapping[str, set[Hashable]], chosen: Iterable[str] = ()) -> list[str]:
    """Paths that together with the chosen ones show all features, by the greedy algorithm for set cover. ``shown``: the
    features of each path."""
    left = set().union(*shown.values()).difference(*(shown[name] for name in chosen))
    out: list[str] = []
    while left:
        out.append(max(shown, key=lambda name: len(shown[name] & left)))
        left -= shown[out[-1]]
    return [name for name in shown if name in out]


def sets(checkout: Path) -> tuple[list[str], list[str]]:
    """The paths that cover every branch, and further paths that cover every value of a field."""
    branches = branches_by_path(checkout)[0]
    first = cover(features_by_family(branches))
    shown = {name: {*branches[name], *values(record)} for name, record in PATHS.items()}
    return first, cover(features_by_family(shown), first)


def renew(checkout: Path) -> None:
    """Writes ``FILE``."""
    FILE.write_text("\n".join("".join(f"{name}\n" for name in part) for part in sets(checkout)))
