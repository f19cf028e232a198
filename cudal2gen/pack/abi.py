"""States the ABI of packs: what a pack and the version of this package that reads it must share.

A pack may be read by an older or a newer version than the one that wrote it. It states the ABI that it needs and the
fields that its records and rows use, and every version that has these can use the pack. A field with its neutral value
is not written (``kernel.schema``), so adding a field does not change the ABI. Raise the number of a part of the ABI if
an older version would misread what a newer one writes; ``tests/cudal2gen/abi.json`` states the contract behind each
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from cudal2gen.kernel import FAMILIES, Problem, spelled
from cudal2gen.results.choice import Row, Table
from kernelproof.ground.version import __version__

# The version of the folder's form: file names, digests, ``pack.json`` itself.
FORMAT = 1
# ``table``: the form of ``table.json``. ``library``: the functions of libcudal2gen.so that ``launcher`` calls.
ABI = {"table": 1, "library": 1}
OLDEST_ABI = {"table": 1, "library": 1}  # the oldest ABI that this version reads
UNSTATED_ABI = {"table": 1, "library": 1}  # the ABI of packs that state none
FIRST_READER = "0.1.0"  # the first version that reads packs of this ABI; their wheels require it


def used_fields(table: Table) -> dict[str, list[str]]:
    """The names of the fields that a table uses: for each kernel family those of its records, and those of the measured
    rows under the key ``rows``."""
    families: dict[str, set[str]] = {}
    for kernel in table.kernels:
        families.setdefault(str(kernel.fields["family"]), set()).update(kernel.fields)
    rows = {name for row in table.rows for name in row.spelled}
    return {name: sorted(used) for name, used in sorted((families | {"rows": rows}).items())}


def obstacle(facts: Mapping[str, object]) -> str | None:
    """Why this version cannot use a pack with these facts, and what to do; None if it can use the pack."""
    maker = f"cudal2gen {spelled(facts.get('version'))}"
    needs, used = facts.get("abi", UNSTATED_ABI), facts.get("fields", {})
    if not isinstance(needs, dict) or not all(type(needs.get(name)) is int for name in ABI):
        return f"abi={spelled(needs)}: is no number for each of {' and '.join(ABI)}; make the pack anew"
    if not isinstance(used, dict) or not all(isinstance(names, list) for names in used.values()):
        return f"fields={spelled(used)}: are no lists of names; make the pack anew"
    for name, newest in ABI.items():
        if needs[name] > newest:
            return _needs_newer(f"{name} ABI {needs[name]}", f"{maker}, this {__version__} reads up to {newest}")
        if needs[name] < OLDEST_ABI[name]:
            return (
                f"needs {name} ABI {needs[name]} of {maker}, this {__version__} reads from {OLDEST_ABI[name]} "
                "on: make it anew with this version, or install that one"
            )
    unknown = next(_unknown_fields(used.items()), None)
    return unknown and _needs_newer(unknown, f"{maker}, unknown to this {__version__}")


def _unknown_fields(used: Iterable[tuple[str, list[object]]]) -> Iterator[str]:
    """Families and fields that this version does not have, as text."""
    for family, names in used:
        if family == "rows":
            existing = set(Row._fields)
        elif family in FAMILIES:
            existing = {*Problem.model_fields, *FAMILIES[family].model_fields}
        else:
            yield f"the family {spelled(family)}"
            continue
        yield from (f"the field {spelled(name)} of {family}" for name in names if name not in existing)


def _needs_newer(part: str, owner: str) -> str:
    """Why a pack cannot be used with this version."""
    return f"needs {part} of {owner}: install a newer cudal2gen, or make the pack anew with this version"
