"""Collects how efficiently the warps of a CTA access memory, for each instruction of a kernel that is proven.

For shared memory it counts wavefronts, and how many of them are bank conflicts. For operands in global memory it counts
the runs of consecutive bytes that warps access, and the sectors of 32 bytes that these runs touch.

A proof executes an instruction in every state that it covers, with known lanes. So the worst of these executions is the
worst of all launches. A certificate states these facts; whether a kernel is certified does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from kernelproof.certificates.polynomials import Lanes
from kernelproof.emulator.state.counters import SECTOR_BYTES, Counters
from kernelproof.emulator.state.sites import Site
from kernelproof.ground.chips import WARP
from kernelproof.ground.pages import counted
from kernelproof.ground.schema import Schema


class SharedAccess(Schema):
    """The accesses to shared memory of instructions with one opcode that cost the same, each in its worst execution."""

    opcode: str
    lines: Annotated[tuple[int, ...], Field(description="PTX lines of the instructions")]
    warps: Annotated[int, Field(description="warps of a CTA that execute one of them at once")]
    wavefronts: Annotated[int, Field(description="what these need together")]
    without_conflicts: Annotated[int, Field(description="wavefronts if no two words shared a bank")]

    def __str__(self) -> str:
        more = self.wavefronts - self.without_conflicts
        conflicts = f"{more} by bank conflicts" if more else "no bank conflicts"
        return (
            f"shared memory, {self.opcode}: {self.wavefronts} wavefronts of {counted(self.warps, 'warp')}, {conflicts}"
        )


class GlobalAccess(Schema):
    """The accesses to an operand in global memory of instructions with one opcode that cost the same, each in its worst
    execution. Where a row starts within a sector of 32 bytes depends on the problem, so the number of sectors has two
    bounds."""

    opcode: str
    lines: Annotated[tuple[int, ...], Field(description="PTX lines of the instructions")]
    operand: str
    warps: Annotated[int, Field(description="warps of a CTA that execute one of them at once")]
    runs: Annotated[tuple[tuple[int, int], ...], Field(description="(number, bytes) of runs of consecutive bytes")]
    sectors: Annotated[tuple[int, int], Field(description="the fewest and the most that these runs touch")]

    def __str__(self) -> str:
        runs = " and ".join(f"{number} x {length} consecutive bytes" for number, length in self.runs)
        least, most = self.sectors
        sectors = counted(least, "sector") if least == most else f"{least} to {most} sectors"
        return f"{self.operand}, {self.opcode}: {runs} of {counted(self.warps, 'warp')}, {sectors}"


class _Wavefronts(NamedTuple):
    """The fields of a ``SharedAccess`` without those that name the instruction."""

    warps: int
    wavefronts: int
    without_conflicts: int

    @property
    def cost(self) -> tuple[int, int]:
        """What makes an access worse than another one: bank conflicts, then wavefronts."""
        return self.wavefronts - self.without_conflicts, self.wavefronts


class _Runs(NamedTuple):
    """The fields of a ``GlobalAccess`` without those that name the instruction."""

    operand: str
    warps: int
    runs: tuple[tuple[int, int], ...]
    sectors: tuple[int, int]

    @property
    def cost(self) -> int:
        """What makes an access worse than another one: the most sectors that it touches."""
        return self.sectors[1]


Fact = TypeVar("Fact", _Wavefronts, _Runs)


class Traffic:
    """Collects the accesses of a kernel's executions, and keeps the worst one of each instruction. ``sites``: the
    kernel's instructions; the ``site`` of an access is the index of its instruction there."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._seen: set[tuple[int, bytes]] = set()
        self._shared: dict[int, _Wavefronts] = {}
        self._global: dict[int, _Runs] = {}

    def shared(self, site: int, address: Lanes, lanes: Lanes, size: int) -> None:
        """Lanes access ``size`` bytes each at addresses of shared memory. ``lanes``: their numbers in the CTA,
        ascending. An access by a single lane is left out, because it says nothing about a warp."""
        if len(lanes) == 1 or not self._is_new(site, address, lanes):
            return
        # The emulator's counters expect an address for each lane of complete warps, and a mask of those that access.
        every = np.zeros(-(-(int(lanes[-1]) + 1) // WARP) * WARP, np.int64)
        every[lanes] = address
        mask = np.zeros(len(every), bool)
        mask[lanes] = True
        counters = Counters([], [])
        counters.shared("", every, size, mask)
        banks = counters.shared_banks[""]
        new = _Wavefronts(banks.requests, banks.wavefronts, banks.ideal)
        self._shared[site] = max(self._shared.get(site, new), new, key=lambda fact: fact.cost)

    def of_operand(self, site: int, operand: str, rows: Lanes, starts: Lanes, lanes: Lanes, size: int) -> None:
        """Lanes access ``size`` bytes each of an operand, in its row ``rows`` as stored, from byte ``starts`` of the
        row on. ``rows``, ``starts`` and ``lanes`` (numbers in the CTA) have shape (lanes,)."""
        place = np.stack([lanes // WARP, rows, starts], axis=1)
        if not self._is_new(site, place, lanes):
            return
        # Accesses in the order of warp, row and byte. A run begins where warp or row change, or bytes are left out.
        warp, row, start = np.unique(place, axis=0).T
        begins = np.ones(len(start), bool)
        begins[1:] = (warp[1:] != warp[:-1]) | (row[1:] != row[:-1]) | (start[1:] > start[:-1] + size)
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(start)) - 1
        lengths, numbers = np.unique(start[last] + size - start[first], return_counts=True)
        runs = tuple(zip(numbers.tolist(), lengths.tolist(), strict=True))
        # Runs touch the fewest sectors if they begin with a sector, and the most if they begin as late in one as they
        # can: an access is aligned to its size, so ``size`` bytes before the sector's end.
        late = max(0, SECTOR_BYTES - size)
        least, most = (sum(n * -(-(begin + length) // SECTOR_BYTES) for n, length in runs) for begin in (0, late))
        new = _Runs(operand, len(np.unique(warp)), runs, (least, most))
        self._global[site] = max(self._global.get(site, new), new, key=lambda fact: fact.cost)

    def shared_accesses(self) -> tuple[SharedAccess, ...]:
        """The accesses to shared memory of all instructions, in the order of the PTX."""
        return tuple(
            SharedAccess(opcode=opcode, lines=tuple(lines), **fact._asdict())
            for (opcode, fact), lines in self._by_fact(self._shared).items()
        )

    def global_accesses(self) -> tuple[GlobalAccess, ...]:
        """The accesses to operands of all instructions, in the order of the PTX."""
        return tuple(
            GlobalAccess(opcode=opcode, lines=tuple(lines), **fact._asdict())
            for (opcode, fact), lines in self._by_fact(self._global).items()
        )

    def _by_fact(self, facts: Mapping[int, Fact]) -> dict[tuple[str, Fact], list[int]]:
        """Opcode and fact -> the PTX lines of the instructions that have both, both in the order of lines."""
        groups: dict[tuple[str, Fact], list[int]] = {}
        for site in sorted(facts, key=lambda site: self._sites[site].line):
            ins = self._sites[site]
            opcode = next(word for word in ins.text.split() if not word.startswith("@"))  # after a predicate
            groups.setdefault((opcode, facts[site]), []).append(ins.line)
        return groups

    def _is_new(self, site: int, place: Lanes, lanes: Lanes) -> bool:
        """Whether an instruction has not accessed the same places by the same lanes before."""
        key = site, place.tobytes() + lanes.tobytes()
        known = key in self._seen
        self._seen.add(key)
        return not known
