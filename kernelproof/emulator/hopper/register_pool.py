"""Checks setmaxnreg of the PTX ISA, by which warpgroups return registers to their CTA or take more from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from kernelproof.emulator.state.arrays import Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.ground.chips import REGISTERS_THREAD

# The number of registers that a setmaxnreg names, in PTX or in machine code.
NAMED_COUNT = re.compile(r"(?:setmaxnreg\S*\s+|USETMAXREG\S*\s+(?:UP\w,\s*)?)(\w+)")


def entry_registers(
    attributes: Mapping[str, Sequence[int]], threads: int, registers_per_sm: int, texts: Iterable[str]
) -> int:
    """Registers per thread at the kernel's entry, as ptxas 13.0 decides: as many as the launch bounds allow, in units
    of 8, but no more than the largest number in a setmaxnreg of the kernel.

    ``attributes``: those of the kernel, by name. ``threads``: threads per CTA, if the launch bounds do not fix them.
    ``registers_per_sm``: registers of an SM. ``texts``: the kernel's instructions, of which at least one is a
    setmaxnreg.
    """
    max_registers = attributes.get("maxnreg")
    if max_registers:
        return max_registers[0]
    min_ctas = (attributes.get("minnctapersm") or (1,))[0]
    block = attributes.get("maxntid") or attributes.get("reqntid")
    threads = math.prod(block) if block else threads
    limit = registers_per_sm // min_ctas // (-(-threads // 128) * 128)
    named = [int(count[1], 0) for text in texts if (count := NAMED_COUNT.search(text))]
    return min(REGISTERS_THREAD, limit, max(named)) // 8 * 8


class RegisterPool:
    """Registers per thread of every warpgroup of a batch, numbered row by row."""

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.warpgroups_per_row = -(-batch.warps_per_cta // 4)
        # Warpgroup -> (registers, instruction) of every setmaxnreg, in order. If the warps of a warpgroup execute it
        # one after the other, each of them adds an entry.
        self.steps: dict[int, list[tuple[int, int]]] = {}
        # Warpgroup -> how many setmaxnreg its warps have executed, summed over the warps.
        self.warp_counts: dict[int, int] = {}

    def change(self, count: int, increases: bool, m: Mask, site: int) -> None:
        """setmaxnreg.inc (``increases``) or .dec: change the registers per thread of the lanes' warpgroups to
        ``count``."""
        batch = self.batch
        lanes = batch.lanes(m)
        if not 24 <= count <= 256 or count % 8:
            batch.report_lanes(
                "registers", f"setmaxnreg to {count}: the number must be a multiple of 8 from 24 to 256", site, lanes
            )
        warpgroups = batch.row_of[lanes] * self.warpgroups_per_row + (batch.warp[lanes] >> 2)
        for warpgroup in distinct(warpgroups).tolist():
            steps = self.steps.setdefault(warpgroup, [])
            before = steps[-1][0] if steps else self.entry_registers
            if count < before if increases else count > before:
                text = f"setmaxnreg.{'inc' if increases else 'dec'} to {count} where a thread has {before} registers"
                batch.report_lanes("registers", text, site, lanes)
            steps.append((count, site))
            warps = distinct(batch.warp[lanes[warpgroups == warpgroup]])
            self.warp_counts[warpgroup] = self.warp_counts.get(warpgroup, 0) + len(warps)

    @cached_property
    def entry_registers(self) -> int:
        """Registers per thread at the entry of this launch."""
        launch = self.launch
        texts = (site.text for site in launch.kernel.sites)
        return entry_registers(launch.kernel.attributes, launch.threads, launch.device.registers_per_sm, texts)

    def exited(self, row: int) -> None:
        """Report the warpgroups of a CTA that has ended if they need more registers than the CTA has. Also report a
        warpgroup of which only some warps have executed a setmaxnreg."""
        batch = self.batch
        changes = {
            warpgroup: steps for warpgroup, steps in self.steps.items() if warpgroup // self.warpgroups_per_row == row
        }
        if not changes:
            return
        for warpgroup, steps in changes.items():
            warps = min(4, batch.warps_per_cta - 4 * (warpgroup % self.warpgroups_per_row))
            executed = self.warp_counts[warpgroup]
            if executed != warps * len({site for _, site in steps}) and executed % warps:
                text = f"setmaxnreg was executed by {executed} of {warps} warps of a warpgroup"
                batch.report("registers", text, steps[0][1], row, ())
        entry = self.entry_registers
        pool = entry * self.warpgroups_per_row
        warpgroups = range(row * self.warpgroups_per_row, (row + 1) * self.warpgroups_per_row)
        final = [changes[warpgroup][-1][0] if warpgroup in changes else entry for warpgroup in warpgroups]
        if sum(final) > pool:
            worst = max(changes, key=lambda warpgroup: changes[warpgroup][-1][0])
            text = (
                f"setmaxnreg waits for ever: the warpgroups want {' + '.join(map(str, final))} registers per thread, "
                f"the CTA has {self.warpgroups_per_row} * {entry} = {pool}"
            )
            batch.report("registers", text, changes[worst][-1][1], row, ())
