"""Builds the control-flow graph of one kernel, from which its Python function is written.

The machine runs a batch of CTAs in lockstep. After a divergent branch it always runs the group of lanes whose block
comes first in ``Graph.blocks``. That order keeps every loop contiguous and is topological inside of it, so the lanes
converge at the branch's immediate post-dominator. ``Graph.uniform`` relies on this: a register in it has the same value
in every lane that can still read it, so the translation stores it as one Python int. The machine checks this while it
runs (``Graph.clobbers``); if values differ, the launch is executed again with the conservative translation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kernelproof.emulator.frontend.flow.blocks import Block, expand_composites, insert_meetings, split
from kernelproof.emulator.frontend.flow.dataflow import Liveness, launch_constants, varying_registers
from kernelproof.emulator.frontend.flow.inline import Inliner
from kernelproof.emulator.frontend.flow.loops import add_latches, natural_loops, scheduling_order
from kernelproof.emulator.frontend.flow.polling import Polling, spin_heads
from kernelproof.emulator.frontend.instruction import needs_blackwell, needs_hopper
from kernelproof.emulator.frontend.ptx import Function, Instr, Label, Module, Variable
from kernelproof.emulator.frontend.registers import SPECIALS


@dataclass(slots=True)
class Graph:
    """Blocks in scheduling order (``blocks[i].index == i``, the entry is 0), and facts about registers.

    ``kinds``: register -> declared type. ``variables``: those of the kernel and of the functions that it calls.
    ``live_in``: per block, the registers that are live at its start. ``uniform``: see the module. ``shared_across``:
    registers that several blocks access. ``clobbers``: per block, uniform registers that it writes and other blocks
    read, without launch constants. ``spin_heads``: head of a loop that waits for memory -> facts about the loop.
    ``back_edges``: pairs of blocks (from, to). ``conservative``: only launch constants, and registers that a single
    block accesses, are uniform. ``hopper``, ``blackwell``: the kernel needs the units of sm_90, of sm_100.
    """

    function: Function
    blocks: list[Block]
    kinds: dict[str, str]
    variables: list[Variable]
    live_in: list[set[str]]
    uniform: set[str]
    shared_across: set[str]
    clobbers: list[set[str]]
    spin_heads: dict[int, Polling]
    back_edges: set[tuple[int, int]]
    conservative: bool
    hopper: bool
    blackwell: bool

    def instructions(self) -> Iterator[Instr]:
        """Every instruction, including blocking ones."""
        for block in self.blocks:
            yield from block.all()


def build(module: Module, kernel: Function, conservative: bool = False, waiting: frozenset[int] = frozenset()) -> Graph:
    """The graph of ``kernel``. Raises PtxError for code that is not modelled.

    ``waiting``: PTX lines of the heads of loops that are known to wait for other threads. ``conservative``: assume that
    lanes may overtake each other. This is assumed in any case for a kernel that polls, needs the units of sm_90, waits
    on both sides of a divergent branch, or has irreducible loops.
    """
    inliner = Inliner(module, kernel)
    items = list(expand_composites(inliner.run()))
    hopper = any(isinstance(item, Instr) and needs_hopper(item) for item in items)
    blackwell = any(isinstance(item, Instr) and needs_blackwell(item) for item in items)
    variables = [*module.variables.values(), *inliner.variables]
    # In kernels that may have clusters, an address of shared memory contains the rank of the CTA, so it varies.
    rank_dependent = frozenset(v.name for v in variables if v.space == "shared") if hopper else frozenset()
    blocks, reducible, back, liveness, heads = _flow(
        insert_meetings(items) if hopper else items, rank_dependent, waiting
    )
    # If a loop polls, lanes of a warp may be at different blocks, so warp-wide instructions must first wait for all of
    # their lanes. Kernels for sm_90 have these waits in any case.
    if heads and not hopper:
        blocks, reducible, back, liveness, heads = _flow(insert_meetings(items), rank_dependent, waiting)
    constant = launch_constants(liveness.sites)
    # Lanes that sleep at an mbarrier, or poll, are overtaken by others. In an irreducible graph no order of blocks
    # makes all lanes converge. In both cases only the conservative analysis is right.
    conservative = conservative or not reducible or hopper or bool(heads)
    varying = varying_registers(blocks, liveness, constant, conservative)
    if varying is None:  # lanes may overtake each other
        conservative = True
        varying = varying_registers(blocks, liveness, constant, conservative)
    assert varying is not None
    sites, live = liveness.sites, liveness.live_registers()
    # A register that nothing writes has the same initial value in every lane.
    unwritten = {r for r in set().union(*liveness.uses) if r not in sites and r not in SPECIALS}
    uniform = (set(sites) - varying) | unwritten
    clobbers = [{r for r in defs if r in uniform and r in live and r not in constant} for defs in liveness.defs]
    return Graph(
        kernel, blocks, inliner.kinds, inliner.variables, liveness.live, uniform, live, clobbers, heads, back,
        conservative, hopper, blackwell,
    )  # fmt: skip


class _Flow(NamedTuple):
    """Blocks in scheduling order, whether the graph is ``reducible``, and facts of the same names as in ``Graph``."""

    blocks: list[Block]
    reducible: bool
    back_edges: set[tuple[int, int]]
    liveness: Liveness
    spin_heads: dict[int, Polling]


def _flow(items: Iterable[Instr | Label], rank_dependent: frozenset[str], waiting: frozenset[int]) -> _Flow:
    """The blocks and facts of a body. ``rank_dependent``: variables whose addresses differ between CTAs. ``waiting``:
    as for ``build``."""
    blocks, reducible = _ordered(split(items))
    loops, back, _ = natural_loops(blocks)
    liveness = Liveness.of(blocks, rank_dependent)
    return _Flow(blocks, reducible, back, liveness, spin_heads(blocks, loops, liveness.sites, waiting))


def _ordered(blocks: list[Block]) -> tuple[list[Block], bool]:
    """The reachable blocks in scheduling order, and whether the graph is reducible."""
    add_latches(blocks)
    order, reducible = scheduling_order(blocks)
    position = {old: new for new, old in enumerate(order)}
    blocks = [blocks[old] for old in order]
    for block in blocks:
        block.index = position[block.index]
        block.targets = [position[t] for t in block.targets]
    return blocks, reducible
