"""Proves tables of the units of Hopper and Blackwell: who needs them, columns of clocks, registers at a kernel's entry.

``ptxas`` refuses an instruction of a later architecture, but the emulator also executes PTX that it is given.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernelproof.emulator.blackwell.tensor_clocks import TensorClocks
from kernelproof.emulator.frontend import translate
from kernelproof.emulator.frontend.instruction import registered
from kernelproof.emulator.hopper.cluster_clocks import MAX_BARRIERS, ClusterClocks
from kernelproof.emulator.hopper.register_pool import entry_registers

# The first words of all opcodes that the emulator executes by its units of sm_100, and by those of sm_90 (mbarriers,
# bulk copies, wgmma, clusters). By the PTX manual, elect, griddepcontrol and stmatrix also need sm_90, but the emulator
# executes them without a unit.
SM_100 = ("tcgen05.", "clusterlaunchcontrol.", "emu_loaded")
SM_90 = (
    "barrier.cluster.", "cp.async.bulk", "cp.async.mbarrier.", "emu_try_wait", "emu_waited", "fence.mbarrier_init",
    "fence.proxy", "membar.proxy", "getctarank", "mapa", "mbarrier.", "setmaxnreg", "st.async", "tensormap.", "wgmma.",
)  # fmt: skip


def test_instructions_have_the_units_of_their_architecture() -> None:
    assert translate.UNITS.keys().isdisjoint(translate.HOPPER_UNITS.keys() | translate.BLACKWELL_UNITS.keys())
    forms = list(registered())
    assert {"tcgen05.mma", "wgmma.mma_async", "mma", "add"} <= {form.opcode for form in forms}
    for form in forms:
        is_latest = form.opcode.startswith(SM_100)
        assert (form.blackwell, form.hopper) == (is_latest, is_latest or form.opcode.startswith(SM_90)), form.opcode


def batch_of(clusters: int, size: int, warps: int, restricts: bool) -> Any:
    """The part of a batch that clocks need: clusters of ``size`` CTAs with so many warps."""
    count = clusters * size
    launch = SimpleNamespace(tick=5, kernel=SimpleNamespace(restricts=restricts))
    return SimpleNamespace(
        count=count, cluster_size=size, warps_per_cta=warps, size=32 * warps * count, launch=launch,
        rank=np.arange(count) % size,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [ClusterClocks, TensorClocks])
def test_every_agent_of_a_cluster_has_a_column_of_its_own(kind: type[ClusterClocks]) -> None:
    for size, warps, restricts in product((1, 2, 4), (1, 4, 7), (False, True)):
        clocks = kind(batch_of(2, size, warps, restricts))
        for first in (0, size):  # the first row of each cluster
            columns: list[int] = [clocks.started]
            for row in range(first, first + size):
                for warp in range(warps):
                    columns += [clocks.column(row, warp), clocks.column(row, warp) + clocks.all_lanes_offset]
                    columns.append(clocks.bulk_column(row, warp))
                    if isinstance(clocks, TensorClocks):
                        columns += [clocks.product_column(row, warp), clocks.access_column(row, warp)]
                if not isinstance(clocks, TensorClocks):
                    columns += [clocks.wgmma_column(row, group) for group in range(-(-warps // 4))]
                columns += [clocks.barrier_column(row) for _ in range(MAX_BARRIERS)]
            assert sorted(columns) == list(range(clocks.columns))
        parts = 1 + (size > 1) + restricts
        assert clocks.parts == tuple(range(0, parts * clocks.columns, clocks.columns))
        assert clocks.length == parts * clocks.columns


def test_products_and_accesses_of_tensor_memory_are_told_apart() -> None:
    clocks = TensorClocks(batch_of(2, 2, 5, False))
    for row, warp in product(range(4), range(5)):
        columns = np.array([clocks.product_column(row, warp), clocks.access_column(row, warp)])
        assert clocks.is_product(columns).tolist() == [True, False]


def test_a_thread_has_the_most_registers_that_the_bounds_allow_at_entry() -> None:
    """An SM has 65536 registers, of which warpgroups take 128 threads' worth. A number is a multiple of 8, at most 255
    rounded down to one, and at most the largest that the kernel names."""
    for threads, ctas, largest in product((32, 128, 129, 256, 384, 400, 1024), (1, 2, 3), (24, 100, 168, 232, 256)):
        texts = ["setmaxnreg.dec.sync.aligned.u32 24;", f"setmaxnreg.inc.sync.aligned.u32 {largest};", "bar.sync 0;"]
        fitting = [
            count for count in range(0, 256, 8) if count <= largest and ctas * -(-threads // 128) * 128 * count <= 65536
        ]
        for attributes, given in (
            ({"maxntid": (threads, 1, 1), "minnctapersm": (ctas,)}, 7), ({"minnctapersm": (ctas,)}, threads),
            ({"reqntid": (1, threads, 1), "minnctapersm": (ctas,)}, 7),
        ):  # fmt: skip
            assert entry_registers(attributes, given, 65536, texts) == max(fitting)
    assert entry_registers({"maxnreg": (77,)}, 128, 65536, ["setmaxnreg.dec.sync.aligned.u32 24;"]) == 77
