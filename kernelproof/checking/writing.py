"""Writes findings for other programs: as SARIF, as annotations for GitHub, and as an HTML page with source lines."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelproof.checking import text
from kernelproof.checking.findings import frames, local
from kernelproof.checking.names import plain
from kernelproof.checking.result import Result
from kernelproof.emulator import RULES, Report
from kernelproof.emulator.state.sites import Frame
from kernelproof.ground import files
from kernelproof.ground.version import __version__

LEVELS = {"error": "error", "benign": "note", "lint": "note"}
CONTEXT = 4  # source lines shown before and after that of a finding


def sarif(result: Result, path: Path) -> None:
    """Write the findings as a SARIF 2.1.0 file. Raises Failure."""
    rules = sorted({item.kind for item in result.ordered})
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "kernelproof check",
                "version": __version__,
                "rules": [
                    {"id": rule, "shortDescription": {"text": RULES[rule].meaning}, "help": {"text": RULES[rule].hint},
                     "defaultConfiguration": {"level": LEVELS[RULES[rule].severity.value]}}
                    for rule in rules
                ],
            }
        },
        "results": [_sarif_result(item, rules) for item in result.ordered],
        # The id distinguishes the runs of several programs if a viewer shows them together.
        "automationDetails": {"id": f"kernelproof/{result.target}/"},
    }  # fmt: skip
    document = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    files.write(path, json.dumps(document, indent=1) + "\n")


def _sarif_result(item: Report, rules: list[str]) -> dict[str, Any]:
    """A finding as a SARIF result. ``rules``: the rules of the file; the result refers to one by its index."""
    places = [
        {"physicalLocation": {"artifactLocation": {"uri": local(place).file}, "region": {"startLine": place.line}}}
        for place in frames(item)
    ]
    record: dict[str, Any] = {
        "ruleId": item.kind,
        "ruleIndex": rules.index(item.kind),
        "level": LEVELS[str(item.severity)],
        "message": {"text": _message(item)},
        "locations": places[:1],
        "occurrenceCount": item.count,
    }
    if places[1:]:
        record["relatedLocations"] = places[1:]
    return record


def _message(item: Report) -> str:
    """What is wrong, in which kernel, and what else follows from it."""
    message = f"{plain(item.kernel)}: {item.message}" if item.kernel else item.message
    return f"{message}\n{text.others(item)}" if item.also else message


def github(result: Result) -> Iterator[str]:
    """One workflow command per finding; GitHub shows each beside its source line."""
    return map(annotation, result.ordered)


def annotation(item: Report) -> str:
    """The workflow command of one finding."""
    kind = "error" if item.is_error else "notice"
    home = item.access.site.home
    place = f"file={local(home).file},line={home.line}," if home else ""
    escaped = _message(item).replace("%", "%25").replace("\n", "%0A")
    return f"::{kind} {place}title={item.kind}::{escaped}"


def page(result: Result, path: Path) -> None:
    """Write an HTML page with the summary and every source line that has findings, in its context. Raises Failure."""
    by_place: dict[Frame | None, list[Report]] = {}
    for item in result.ordered:
        by_place.setdefault(item.access.site.home, []).append(item)
    body = [f"<h1>{html.escape(result.target)}</h1><pre>{html.escape(result.summary())}</pre>"]
    for place, items in sorted(
        by_place.items(), key=lambda pair: (str(pair[0].file), pair[0].line) if pair[0] else ("", 0)
    ):
        body.append(f"<h2>{html.escape(str(place) if place else 'no source line')}</h2>")
        body += [_item(item) for item in items]
        if place:
            body.append(_source(place))
    files.write(path, _PAGE.format(title=html.escape(result.target), body="\n".join(body)))


def _item(item: Report) -> str:
    """A finding as a paragraph of the page."""
    times = f" &times;{item.count}" if item.count > 1 else ""
    words = html.escape(f"{item.kind} in {plain(item.kernel)}: {item.message}")
    small = "<br>".join(html.escape(line) for line in (item.text, *([text.others(item)] if item.also else [])))
    return f'<p class="{item.severity}"><b>{item.severity}</b> {words}{times}<br><small>{small}</small></p>'


def _source(place: Frame) -> str:
    """The source lines around a place, the place itself highlighted; empty if the file cannot be read."""
    try:
        lines = Path(place.file).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    rows = []
    for number in range(max(1, place.line - CONTEXT), min(len(lines), place.line + CONTEXT) + 1):
        mark = ' class="here"' if number == place.line else ""
        rows.append(f"<span{mark}>{number:5} {html.escape(lines[number - 1])}</span>")
    return "<pre>" + "\n".join(rows) + "</pre>"


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px sans-serif;margin:2em;max-width:70em}}pre{{background:#f4f4f4;padding:.6em;overflow:auto}}
.here{{background:#ffd9a8;display:inline-block;width:100%}}.error b{{color:#b00020}}
.benign b,.lint b{{color:#665}}</style>
{body}</html>
"""
