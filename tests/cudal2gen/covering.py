"""The paths that ``make test`` executes: a small set that has every branch of the templates and every value of a field.

golden/covering.txt names them, ``make goldens`` renews it, and ``test_validator`` proves that it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

from jinja2 import DictLoader, Environment

from cudal2gen.kernel import FAMILIES, Record
from tests.cudal2gen.paths import PATHS

FILE = Path(__file__).parent / "golden" / "covering.txt"
COVERING = FILE.read_text().splitlines()
DATA = ("gpu", "m", "n", "k")  # fields that may have any value
# Fields of which each combination of values is executed, besides each value of each field.
COMBINED = (("layout", "acc"), ("layout", "pair", "swap_ab"), ("reduce", "split_k"), ("batch", "gate"))


def branches(text: str) -> Iterator[tuple[int, str]]:
    """Where marks go into a template: after every macro, if, elif and else; an if without else gets one."""
    for tag in re.finditer(r"{%-?\s*(macro|if|elif|else|endif)\b[^%]*?(?:%(?!})[^%]*?)*-?%}", text):
        yield tag.start(), tag.group(0)


def marked(name: str, text: str) -> tuple[str, list[str]]:
    """A template that reports which of its branches are taken, and all their names."""
    marks: list[str] = []
    out: list[str] = []
    end, has_else = 0, []
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


def taken(checkout: Path) -> tuple[dict[str, set[str]], list[str]]:
    """The branches of the templates that each path takes, and all that there are."""
    folder = checkout / "templates"
    texts, known = {}, []
    for path in sorted([*folder.glob("*.cu.j2"), *(folder / "macros").glob("*.j2")]):
        name = str(path.relative_to(folder))
        texts[name], marks = marked(name, path.read_text())
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


def features(checkout: Path) -> dict[str, set[Hashable]]:
    """What each path has to show, in its family: branches and values."""
    return {
        name: {(PATHS[name].family, feature) for feature in (*branches_taken, *values(PATHS[name]))}
        for name, branches_taken in taken(checkout)[0].items()
    }


def covering(shown: Mapping[str, set[Hashable]]) -> list[str]:
    """Paths that together show all features: each time the one that adds most, as long as one adds any."""
    left = set().union(*shown.values())
    out: list[str] = []
    while left:
        out.append(max(shown, key=lambda name: len(shown[name] & left)))
        left -= shown[out[-1]]
    return [name for name in shown if name in out]


def renew(checkout: Path) -> None:
    """Write the file anew."""
    FILE.write_text("".join(f"{name}\n" for name in covering(features(checkout))))
