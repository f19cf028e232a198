"""Recognises a benign race in the code of Triton's compiler.

If a tensor has fewer elements than the CTA has threads, several threads load each element and one of them stores it.
Values that the others load after that store are not used.
"""

from __future__ import annotations

import re

from kernelproof.emulator import Report

SAME_CTA_MESSAGE = "write after read by a thread in the same CTA"
# Instructions whose operands affect only their destination.
_COMPUTATION = re.compile(
    r"(mov|cvt|add|sub|mul|mad|fma|div|rem|neg|abs|min|max|and|or|xor|not|shl|shr|shf|prmt|selp|bfe|bfi|sqrt|rsqrt|rcp"
    r"|ex2|lg2|sin|cos|tanh)\."
)
# Groups: the predicate, the destinations (of a load), and the address.
_LOAD = re.compile(r"(?:@!?(%p\d+) )?ld\.global\S* \{(.*?)\}, \[ ?(.*?) ?\]")
_STORE = re.compile(r"@!?(%p\d+) st\.global\S* \[ ?(.*?) ?\]")
_REGISTER = re.compile(r"%\w+")


def is_benign_copy_race(report: Report, ptx: str) -> bool:
    """Whether a race is between a store and loads of the same element by threads that do not store it."""
    if report.other is None or not report.message.startswith(SAME_CTA_MESSAGE):
        return False
    lines = ptx.splitlines()
    store, load = report.access.site.line - 1, report.other.site.line - 1
    stored, loaded = _STORE.search(lines[store]), _LOAD.search(lines[load])
    # The addresses must be the same text, and the predicates different ones: only some of the loading threads store.
    if stored is None or loaded is None or stored[2] != loaded[3] or stored[1] == loaded[1]:
        return False
    return _reaches_only(lines, load, set(_REGISTER.findall(loaded[2])), store)


def _reaches_only(lines: list[str], load: int, values: set[str], store: int) -> bool:
    """Whether the loaded values are used only by the store and by instructions that compute the stored value."""
    reached: set[int] = set()
    while True:
        users = {
            number for number, line in enumerate(lines)
            if number not in (load, store) and values & set(_REGISTER.findall(line))
        } - reached  # fmt: skip
        if not users:
            return True
        for number in users:
            line = lines[number].strip()
            if line.startswith(".reg"):
                continue
            if not _COMPUTATION.match(line):
                return False
            values.add(_REGISTER.findall(line)[0])
        reached |= users
