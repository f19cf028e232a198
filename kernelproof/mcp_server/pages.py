"""Finds the documentation of rules: the meaning of each, a small wrong program, and how to correct it."""

from __future__ import annotations

import re

from kernelproof.emulator import RULES
from kernelproof.ground import places
from kernelproof.ground.errors import WrongInput, reading

MAX_PAGES = 4  # most pages for a report
# The places where a report names a rule: the start of a finding, or a field of its JSON. Ids elsewhere in a text do not
# count, because some of them are common words.
_IN_REPORTS = re.compile(r'(?:\b(?:error|benign|lint): |"(?:rule|ruleId)": ?"|title=)([a-z-]+)')


def pages(subject: str) -> str:
    """The page of a rule, or the pages of all rules that a report names, in the report's order.

    Raises WrongInput for a text that names no rule.
    """
    rule = subject.strip()
    rules = [rule] if rule in RULES else list(dict.fromkeys(_IN_REPORTS.findall(subject)))
    rules = [rule for rule in rules if rule in RULES]
    if not rules:
        raise WrongInput(f"no rule in {rule[:60]!r}; the rules are {', '.join(sorted(RULES))}")
    texts = []
    for rule in rules[:MAX_PAGES]:
        path = places.pages() / "rules" / f"{rule}.md"
        with reading(path):
            texts.append(path.read_text())
    if rules[MAX_PAGES:]:
        texts.append(f"Also named: {', '.join(rules[MAX_PAGES:])}\n")
    return "\n".join(texts)


def guide() -> str:
    """The guide that tells a language model how to use the tools; it is meant as a file SKILL.md. Raises WrongInput."""
    path = places.pages() / "skill.md"
    with reading(path):
        return path.read_text()
