"""Computes special registers (PTX ISA), clocks, and approximate functions whose errors depend on the device.

Special registers give the place of a lane in the launch, and constants of the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic import half_approximation, inexact
from kernelproof.emulator.state.arrays import MOVER, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.ground.chips import SYSTEM_SMEM, allocated_smem


class Environment(NamedTuple):
    """Values of special registers that may differ from run to run: the start of clocks, the SM of each CTA, and the
    number of the grid."""

    clock: int
    sms: Array
    grid: int

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, seed: int, sm_count: int) -> Environment:
        """The environment that a seed draws. Seed 0 has zeros, and SMs in their order."""
        if not seed:
            return cls(0, np.arange(sm_count), 0)
        rng = np.random.default_rng([seed, 5])  # 5: draws from the same seed elsewhere have other numbers
        return cls(int(rng.integers(1 << 40, 1 << 60)), rng.permutation(sm_count), int(rng.integers(1, 1 << 20)))


class SpecialRegisters:
    """The special registers of a batch, by their names in PTX."""

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self._values: dict[str, Array] = {}
        self.environment = Environment.of(batch.launch.options.environment, batch.launch.device.sm_count)
        # The value of the clock per lane. ``reads_clock``: whether a lane has read it.
        self.time: Array = np.full(batch.size, self.environment.clock, np.uint64)
        self.reads_clock = False

    def lanes(self, name: str) -> Array:
        """A special register that differs between threads, uint32 per lane. It is computed once. Raises EmulatorError
        for an unknown name."""
        out = self._values.get(name)
        if out is None:
            out = self._values[name] = self._compute(name)
        return out

    def _compute(self, name: str) -> Array:
        """A special register that differs between threads, uint32 per lane."""
        batch, geometry = self.batch, self.launch.geometry
        if name.startswith("%reserved_smem") or name.endswith(".w"):
            return batch.constant(0, 4)
        bx, by, _ = geometry.block
        lane = batch.lane.astype(np.int64)
        all_lanes = 0xFFFFFFFF
        of_threads: dict[str, Callable[[], Array]] = {
            "%tid.x": lambda: batch.thread % bx,
            "%tid.y": lambda: batch.thread // bx % by,
            "%tid.z": lambda: batch.thread // (bx * by),
            "%laneid": lambda: lane,
            "%warpid": lambda: batch.warp,
            "%lanemask_eq": lambda: 1 << lane,
            "%lanemask_le": lambda: (2 << lane) - 1,
            "%lanemask_lt": lambda: (1 << lane) - 1,
            "%lanemask_ge": lambda: all_lanes & ~((1 << lane) - 1),
            "%lanemask_gt": lambda: all_lanes & ~((2 << lane) - 1),
        }
        if name in of_threads:
            # These values are the same in all batches of this many CTAs.
            common = batch.identities.special
            if name not in common:
                common[name] = of_threads[name]().astype(np.uint32)
            return common[name]
        return np.repeat(self._of_ctas(name).astype(np.uint32), batch.width)

    def _of_ctas(self, name: str) -> Array:
        """A special register that all threads of a CTA share, one element per row."""
        batch, geometry = self.batch, self.launch.geometry
        gx, gy, _ = geometry.grid
        cx, cy, cz = geometry.cluster
        cta = batch.ctas.astype(np.int64)
        x, y, z = cta % gx, cta // gx % gy, cta // (gx * gy)
        of_ctas: dict[str, Array] = {
            "%ctaid.x": x,
            "%ctaid.y": y,
            "%ctaid.z": z,
            "%clusterid.x": x // cx,
            "%clusterid.y": y // cy,
            "%clusterid.z": z // cz,
            "%cluster_ctaid.x": x % cx,
            "%cluster_ctaid.y": y % cy,
            "%cluster_ctaid.z": z % cz,
            "%cluster_ctarank": batch.rank,
            "%smid": self.environment.sms[cta % self.launch.device.sm_count],
        }
        if name not in of_ctas:
            raise EmulatorError(f"special register {name} is not modelled")
        return of_ctas[name]

    def constant(self, name: str) -> int:
        """A special register that has one value in the whole launch. Raises EmulatorError for an unknown name."""
        launch, geometry = self.launch, self.launch.geometry
        by_axis = {
            "%ntid": geometry.block,
            "%nctaid": geometry.grid,
            "%nclusterid": tuple(g // c for g, c in zip(geometry.grid, geometry.cluster, strict=True)),
            "%cluster_nctaid": geometry.cluster,
        }
        base, _, axis = name.partition(".")
        if base in by_axis:
            return by_axis[base]["xyz".find(axis)]
        shared_bytes = allocated_smem(launch.kernel.shared_static + geometry.shared_bytes)
        values = {
            "%cluster_nctarank": geometry.cluster_size,
            "%is_explicit_cluster": int(geometry.cluster_size > 1),
            "%gridid": self.environment.grid,
            "%nsmid": launch.device.sm_count,
            "%nwarpid": launch.device.threads_per_sm // 32,
            "%dynamic_smem_size": geometry.shared_bytes,
            "%total_smem_size": shared_bytes,
            "%aggr_smem_size": shared_bytes + SYSTEM_SMEM,
        }
        if name not in values:
            raise EmulatorError(f"special register {name} is not modelled")
        return values[name]

    def inexact(self, name: str, exact: Array) -> Array:
        """Results of an approximate function, with errors that the environment draws."""
        return inexact(name, exact, self.batch.launch.options.environment)

    def approximation(self, name: str, kind: str, ftz: bool) -> Callable[[Array], Array]:
        """An approximate function of f16 or bf16, with errors that the environment draws."""
        return half_approximation(name, kind, ftz, self.batch.launch.options.environment)

    def clock(self, bits: int, m: Mask) -> Array:
        """A clock register: a counter that advances with every read of the lane. Time is not modelled."""
        self.reads_clock = True
        self.time[self.batch.lanes(m)] += np.uint64(self.launch.clock_step)
        return (self.time & np.uint64((1 << bits) - 1)).astype(MOVER[bits // 8])
