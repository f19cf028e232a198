"""The rules whose violation is a finding: their ids, which stay, and how severe each is."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """``error``: a result can be wrong, or the behaviour is undefined. ``benign``: a rule is broken, and no result can
    depend on it. ``lint``: legal, and likely not what was meant."""

    ERROR = "error"
    BENIGN = "benign"
    LINT = "lint"


class Rule(NamedTuple):
    """What is wrong, and how severe that is. Errors about a value that reaches no memory are benign."""

    severity: Severity
    meaning: str


_ERRORS = {
    "global-out-of-bounds": "an access outside of all buffers, or of the kernel's parameters",
    "global-misaligned": "an address of global memory that is no multiple of the access",
    "shared-out-of-bounds": "an access outside of the CTA's shared memory, or an operand of another space or CTA",
    "shared-misaligned": "an address of shared memory that is no multiple of what the access needs",
    "local-out-of-bounds": "an access outside of local memory, or misaligned",
    "uninitialised-shared": "a read of shared memory that nobody has written",
    "uninitialised-global": "a read of global memory that nobody has written",
    "in-flight": "data of an asynchronous copy touched before its wait, or a CTA that exits under one",
    "shared-race": "accesses to shared memory without order",
    "global-race": "accesses to global memory without order",
    "memory-scope": "accesses of several CTAs that only synchronisation of CTA scope orders",
    "unwritten-output": "elements of an output that nobody has written",
    "outside-region": "a write outside of the region that an output declares",
    "input-modified": "a write to an input",
    "barrier-divergence": "a barrier at which threads arrive that may not",
    "deadlock": "threads that wait for each other for ever",
    "warp-divergence": "an instruction of whole warps or warpgroups, executed by a part",
    "trap": "a trap or a failed assertion",
    "runaway": "a loop beyond the limit of turns",
    "launch-error": "a launch that the machine cannot execute",
    "mbarrier": "an mbarrier that is misused, or not visibly initialised",
    "proxy-fence": "an asynchronous access without fence.proxy.async behind writes of threads",
    "wgmma-registers": "accumulators touched under way, or wgmma.fence missing",
    "wgmma-descriptor": "descriptors that differ in a warpgroup",
    "cluster": "shared memory of another CTA before its start or after its end, or of a CTA that does not exist",
    "tensor-map": "a tensor map that is none",
    "registers": "setmaxnreg against the pool of registers",
    "grid-dependency": "global memory touched before griddepcontrol.wait",
}
# Whether the value of a racing read matters is seen by giving it others.
RACES = frozenset(("shared-race", "memory-scope"))
RULES = {
    **{rule: Rule(Severity.ERROR, meaning) for rule, meaning in _ERRORS.items()},
    "plain-first-load": Rule(Severity.BENIGN, "a weak load of what the compare-and-swap behind it checks"),
    "phase-at-exit": Rule(Severity.LINT, "a CTA that exits in the middle of an mbarrier's phase"),
}
