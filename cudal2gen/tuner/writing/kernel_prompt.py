"""Writes the question to a language model that writes kernels, as one Markdown document."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cudal2gen import places
from cudal2gen.generation.renderer import SYNTAX
from cudal2gen.kernel import GPUS, Fields, Problem
from cudal2gen.tuner.memory import Note

LONGEST_TEXT = 40_000  # most characters of a kernel's text in a prompt
LONGEST_DIFF, LONGEST_REPORT = 4_000, 2_500  # most characters of a diff, and of the report on a failure
MOST_FAULTS = 8  # most faults that a correction lists, so that the message stays short
_FOLDER = "writing"  # the folder of the prompts' templates
CONVENTIONS = ("tiles", "cluster", "tma")  # launch conventions; each has a page of the same name in the folder


class ShownKernel(NamedTuple):
    """A right kernel in a prompt.

    ``time``: its time in words. ``why``: the idea that its author gave. ``evidence``: lines with facts of its profile.
    ``listing``: the machine code where warps wait in the main loop. ``is_complete``: the prompt has its complete text,
    and not a diff.
    """

    label: str
    time: str
    why: str
    launch: Fields
    text: str
    evidence: Sequence[str] = ()
    listing: Sequence[str] = ()
    is_complete: bool = True


class FailedKernel(NamedTuple):
    """A failed kernel in a prompt.

    ``why``: the idea that its author gave. ``outcome`` and ``reason``: what failed; ``report`` has the details.
    ``diff``: the changes of its text against the text of the kernel labelled ``base``.
    """

    outcome: str
    reason: str
    why: str
    report: str
    base: str
    diff: str


@cache
def _pages() -> Environment:
    """The environment in which pages are rendered."""
    folder = places.shipped("templates")
    return Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, **SYNTAX)


def page(name: str, **values: Any) -> str:
    """A rendered template. Its code fences are longer than any run of backticks in a value, so no value can end one."""
    runs = re.findall(r"`{3,}", repr(values))
    fence = "`" * (max(map(len, runs), default=2) + 1)
    return _pages().get_template(f"{_FOLDER}/{name}").render(fence=fence, **values)


@cache
def system() -> str:
    """The system message."""
    return _static_page("system")


def _static_page(name: str) -> str:
    """The text of a page that has no variables."""
    return (places.shipped("templates") / _FOLDER / f"{name}.md").read_text(encoding="utf-8")


def question(
    problem: Problem,
    variants: Sequence[ShownKernel],
    failures: Sequence[FailedKernel],
    notes: Iterable[Note],
    clock: str,
    count: int,
) -> str:
    """The user message.

    - ``variants``: right kernels, the fastest first. Those without ``is_complete`` are shown as a diff from the first.
    - ``clock``: how the times were found, in words. ``count``: the number of kernels to ask for.
    """
    first, chip = variants[0], GPUS[problem.gpu]
    return page(
        "request.md.j2",
        problem=_problem(problem),
        gpu=[f"{name}: {value}" for name, value in {"gpu": chip.title, **chip.limits}.items()],
        contract=_contract(first.launch),
        clock=clock,
        kernels=[_kernel(variant, first) for variant in variants],
        failures=[failed._asdict() | {"diff": failed.diff[:LONGEST_DIFF]} for failed in failures],
        notes=[": ".join(note.visible.values()) for note in notes],
        count=count,
    )


def correction(faults: Sequence[str], count: int) -> str:
    """The message that lists the first faults of an answer and asks for ``count`` corrected kernels."""
    lines = "\n".join(f"- {fault}" for fault in faults[:MOST_FAULTS])
    return f"Refused:\n\n{lines}\n\nAnswer again in the same form, with {count} corrected kernels only."


def difference(before: str, after: str) -> str:
    """A unified diff of two texts."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "text, before", "text, after", "", "", 3, "")
    return "\n".join(lines)


def launch_line(launch: Mapping[str, Any]) -> str:
    """The fields of a launch in one line."""
    return ", ".join(f"{name}={value}" for name, value in launch.items() if value not in ("", None))


def _kernel(variant: ShownKernel, first: ShownKernel) -> dict[str, Any]:
    """The values with which the template shows a kernel: its complete text, or the difference from the ``first``."""
    is_complete = variant.is_complete and len(variant.text) <= LONGEST_TEXT
    text = variant.text if is_complete else difference(first.text, variant.text)[:LONGEST_DIFF]
    return variant._asdict() | {
        "launch": launch_line(variant.launch),
        "text": text.rstrip("\n"),
        "language": "cuda" if is_complete else "diff",
        "form": "Its text:" if is_complete else f"What it changes of {first.label}:",
    }


def _problem(problem: Problem) -> str:
    """Sizes, types, layout and work of a problem in one line."""
    stored = "A stored ({}), B stored ({})".format(*problem.along_k.shapes)
    types = f"A and B {problem.element.title}, D {problem.output.title}, sums in {problem.acc}"
    work = f"{problem.flops / 1e9:.3g} GFLOP, {problem.traffic_bytes / 1e6:.3g} MB at the least"
    return (
        f"{problem.title}: m={problem.m}, n={problem.n}, k={problem.k}, {stored}; {types}. {work}, "
        f"{problem.flops / problem.traffic_bytes:.0f} FLOP a byte; size class {problem.size_class}."
    )


def _contract(launch: Mapping[str, Any]) -> list[str]:
    """Two paragraphs: the launch convention that a launch follows, and the names of the other ones."""
    convention = str(launch["call"]).split(" ", maxsplit=1)[0]
    others = ", ".join(name for name in CONVENTIONS if name != convention)
    return [
        f"Convention `{convention}`: {_static_page(convention)}",
        f"Other conventions are {others}: name one in `call`, with all facts of its own.",
    ]
