"""The machine: a launch, a batch of CTAs in lockstep, its scheduler, barriers, warp collectives and global memory.

A compiled kernel (see ``translate``) is a generator that keeps all registers and calls the methods of ``Batch``. It
yields when every lane of its batch waits for another CTA.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.hopper.bulk import Bulk
from cudal2gen.emulator.hopper.clocks import Clocks
from cudal2gen.emulator.hopper.cluster_memory import ClusterMemory
from cudal2gen.emulator.hopper.mbarrier import Barriers
from cudal2gen.emulator.hopper.warpgroup import Warpgroups
from cudal2gen.emulator.machine.collectives import Warps
from cudal2gen.emulator.machine.tensor import MatrixInstructions
from cudal2gen.emulator.memory.arena import MOVER, POISON, Memory
from cudal2gen.emulator.memory.device import DeviceMemory, Tags
from cudal2gen.emulator.memory.shared import GENERIC_LOCAL, GENERIC_SHARED, SharedMemory
from cudal2gen.emulator.state.counters import Counters
from cudal2gen.emulator.state.hazards import EmulatorError, GlobalOrder, Report, Reports, Site

Array = NDArray[Any]
Mask = Array | None
# What the scheduler hands back: next block (DONE, BLOCKED), mask (None: all lanes), and whether other lanes wait
# elsewhere.
Step = tuple[int, Mask, bool]
DONE, BLOCKED = -1, -2
MAX_IDLE_ROUNDS = 64
# The number under which lanes wait at bar.warp.sync.
WARP_BARRIER = -1


@dataclass(frozen=True)
class Device:
    """The GPU that a host launcher sees. Sizes in bytes."""

    sm_count: int = 108
    smem_optin_bytes: int = 163 * 1024
    capability: tuple[int, int] = (8, 0)
    name: str = "emulated"
    smem_per_sm_bytes: int = 164 * 1024
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    l2_bytes: int = 40 << 20


# An H100 or H200 with 132 SMs.
HOPPER = Device(
    sm_count=132,
    smem_optin_bytes=227 * 1024,
    capability=(9, 0),
    name="emulated sm_90",
    smem_per_sm_bytes=228 * 1024,
    l2_bytes=50 << 20,
)


@dataclass(frozen=True)
class Options:
    """``hazards``: ordering checks; ``counters``: performance counters; ``lanes``: threads executed as one vector;
    ``loop_limit``: taken backward branches per batch before a launch counts as hung. ``adverse``: another order of
    events that hardware may choose: of all warpgroups that can run the last one does, until it waits, and a try_wait
    that has to wait times out at first."""

    hazards: bool = True
    counters: bool = False
    lanes: int = 2048
    loop_limit: int = 1_000_000
    adverse: bool = False


@dataclass
class LaunchResult:
    """What one launch did: reports, counters (None if off), grid and block, CTAs executed (linear numbers)."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    reports: list[Report] = field(default_factory=list)
    counters: Counters | None = None
    ctas: Array | None = None


KernelFunction = Callable[["Batch"], Generator[None, None, None]]


@dataclass(eq=False)
class Compiled:
    """A translated kernel: its function and what the machine has to know beforehand."""

    name: str
    function: KernelFunction
    sites: list[Site]
    shared_static: int
    shared_granule: int
    global_granule: int
    local_bytes: int
    clobbers: list[frozenset[str]]
    live_in: list[frozenset[str]]
    block_lines: list[int]
    block_opcodes: list[dict[str, int]]
    symbols: dict[str, tuple[str, int]]
    source: str
    conservative: bool
    has_clobbers: bool
    # Uses clusters, mbarriers, bulk copies or wgmma.
    asynchronous: bool
    # Directives of the entry: maxntid, minnctapersm, ...
    attributes: dict[str, tuple[int, ...]]


class Overtaken(Exception):
    """Lanes left lockstep where the translation relied on it: run again with the conservative translation."""


class Launch:
    """State that all CTAs of a launch share."""

    def __init__(
        self,
        compiled: Compiled,
        memory: Memory,
        options: Options,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        device: Device,
        addresses: dict[str, int],
        poison: int = POISON,
        cluster: tuple[int, int, int] = (1, 1, 1),
        overlapping: bool = False,
    ) -> None:
        self.poison, self.cluster, self.overlapping = poison, cluster, overlapping
        self.compiled, self.memory, self.options, self.device = compiled, memory, options, device
        self.grid, self.block, self.shared_bytes, self.params = grid, block, shared_bytes, params
        self.addresses = addresses
        self.threads = block[0] * block[1] * block[2]
        self.reports = Reports(compiled.name, compiled.sites)
        self.counters = Counters(compiled) if options.counters else None
        self.tick = 1
        self.version = 0
        self.order = GlobalOrder(-(-self.threads // 32) * 32)
        # Per buffer and launch: tags of global accesses.
        self.buffer_tags: dict[int, Tags] = {}

    def run(self, ctas: Array) -> None:
        """Execute the CTAs with these linear numbers."""
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        per = max(1, self.options.lanes // max(32, self.threads) // size) * size
        waiting = [ctas[i : i + per] for i in range(0, len(ctas), per)]
        waiting.reverse()
        running: list[tuple[Batch, Generator[None, None, None]]] = []
        idle = rounds = 0
        with np.errstate(all="ignore"):
            while waiting or running:
                if waiting:
                    batch = Batch(self, waiting.pop())
                    running.insert(0, (batch, self.compiled.function(batch)))
                before = self.version
                alive = []
                for batch, code in running:
                    try:
                        next(code)
                        alive.append((batch, code))
                    except StopIteration:
                        idle = -1
                running = alive
                idle = 0 if self.version != before or waiting or idle < 0 else idle + 1
                rounds += 1
                if idle > MAX_IDLE_ROUNDS or rounds > self.options.loop_limit:
                    for batch, _ in running:
                        batch.report_stuck()
                    return


def in_clusters(ctas: Array, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Array:
    """The CTAs of all clusters that these belong to, cluster by cluster, by rank in each."""
    (gx, gy, _), (cx, cy, cz) = grid, cluster
    x, y, z = ctas % gx, ctas // gx % gy, ctas // (gx * gy)
    first = np.unique(x // cx * cx + gx * (y // cy * cy + gy * (z // cz * cz)))
    rank = np.arange(cx * cy * cz)
    step = rank % cx + gx * (rank // cx % cy + gy * (rank // (cx * cy)))
    out: Array = (first[:, None] + step).reshape(-1)
    return out


class Batch:
    """Some CTAs of a launch, all their threads as one vector of ``size`` lanes, ``width`` lanes (whole warps) per
    CTA."""

    def __init__(self, launch: Launch, ctas: Array) -> None:
        self.launch, self.ctas = launch, ctas
        self.count = len(ctas)
        self.threads = launch.threads
        self.width = -(-self.threads // 32) * 32
        self.size = self.count * self.width
        self.row_of = np.repeat(np.arange(self.count), self.width)
        self.thread = np.tile(np.arange(self.width), self.count)
        self.warp = self.thread >> 5
        self.lane = (self.thread & 31).astype(np.uint32)
        self.gthread = ctas.astype(np.int64)[self.row_of] * self.width + self.thread
        cx, cy, cz = launch.cluster
        self.cluster_size = cx * cy * cz
        # Per row: the CTA's rank in its cluster. Clusters are whole, their rows follow each other.
        self.rank: Array = np.arange(self.count) % self.cluster_size
        self.alive: Array = self.thread < self.threads
        self.complete = self.width == self.threads
        # Every CTA has all of its threads, or none.
        self.whole = True
        self.pend: dict[int, Array] = {}
        self.waiting: list[_Waiting] = []
        self.arrived: dict[int, Array] = {}
        self.deferred: dict[int, Array] = {}
        self.idle = 0
        self.seen_version = -1
        self.last_mask: Mask = None
        self.last_lanes: Array = np.zeros(0, np.int64)
        self.steps = 0
        self.constants: dict[tuple[int, int], Array] = {}
        self.known_ticks: Array | None = None
        # Of asynchronous kernels: what every warp knows of its cluster (Clocks), else None.
        self.clocks: Any = None
        self.base_tick: Array = np.zeros(self.count, np.int64)
        self.meetings: dict[int, _Meeting] = {}
        shared_bytes, granule = launch.compiled.shared_static + launch.shared_bytes, launch.compiled.shared_granule
        if launch.compiled.asynchronous:
            self.clocks = Clocks(self)
            self.known_ticks = self.clocks.known
            self.shared: SharedMemory = ClusterMemory(self, shared_bytes, granule)
            self.barriers = Barriers(self)
            self.bulk = Bulk(self)
            self.warpgroups = Warpgroups(self)
        else:
            self.shared = SharedMemory(self, shared_bytes, granule)
        self.specials: dict[str, Array] = {}
        self.memory = DeviceMemory(self)
        self.warps = Warps(self)
        self.matrices = MatrixInstructions(self)
        launch.tick += 1
        self.shared.barrier_all()
        self.base_tick[:] = launch.tick

    # --- lanes and registers ---

    def start(self) -> Step:
        return (0, None, False) if self.complete else (0, self.alive.copy(), False)

    def lanes(self, m: Array) -> Array:
        """Indices of the lanes in a mask."""
        if m is not self.last_mask:
            self.last_mask, self.last_lanes = m, np.flatnonzero(m)
        return self.last_lanes

    def is_everyone(self, m: Array) -> bool:
        """Does the mask hold every lane that is still alive?"""
        return bool(m[self.alive].all())

    def poison(self, width: int) -> Array:
        return np.full(self.size * width, 0xFF, np.uint8).view(MOVER[width])

    def spread(self, values: Array, lanes: Array, width: int) -> Array:
        out = np.zeros(self.size, MOVER[width])
        out[lanes] = values
        return out

    def constant(self, value: int, width: int) -> Array:
        """A register (``width`` bytes; 0: predicate) with the same value in every lane."""
        key = (value, width)
        out = self.constants.get(key)
        if out is None:
            out = np.full(self.size, bool(value) if width == 0 else value, bool if width == 0 else MOVER[width])
            if len(self.constants) < 512:
                self.constants[key] = out
        return out

    def special(self, name: str) -> Array:
        """A special register, uint32 (or uint64 for 64-bit ones), per lane."""
        out = self.specials.get(name)
        if out is None:
            out = self.specials[name] = self._special(name)
        return out

    def _special(self, name: str) -> Array:
        gx, gy, _ = self.launch.grid
        bx, by, _ = self.launch.block
        cx, cy, cz = self.launch.cluster
        cta = self.ctas[self.row_of].astype(np.int64)
        lane = self.lane.astype(np.int64)
        values: dict[str, Callable[[], Any]] = {
            "%tid.x": lambda: self.thread % bx,
            "%tid.y": lambda: self.thread // bx % by,
            "%tid.z": lambda: self.thread // (bx * by),
            "%ctaid.x": lambda: cta % gx,
            "%ctaid.y": lambda: cta // gx % gy,
            "%ctaid.z": lambda: cta // (gx * gy),
            "%clusterid.x": lambda: cta % gx // cx,
            "%clusterid.y": lambda: cta // gx % gy // cy,
            "%clusterid.z": lambda: cta // (gx * gy) // cz,
            "%cluster_ctaid.x": lambda: cta % gx % cx,
            "%cluster_ctaid.y": lambda: cta // gx % gy % cy,
            "%cluster_ctaid.z": lambda: cta // (gx * gy) % cz,
            "%cluster_ctarank": lambda: self.rank[self.row_of],
            "%laneid": lambda: lane,
            "%warpid": lambda: self.warp,
            "%smid": lambda: cta % self.launch.device.sm_count,
            "%lanemask_eq": lambda: 1 << lane,
            "%lanemask_le": lambda: (2 << lane) - 1,
            "%lanemask_lt": lambda: (1 << lane) - 1,
            "%lanemask_ge": lambda: 0xFFFFFFFF & ~((1 << lane) - 1),
            "%lanemask_gt": lambda: 0xFFFFFFFF & ~((2 << lane) - 1),
        }
        if name.startswith("%reserved_smem") or name.endswith(".w"):
            return self.constant(0, 4)
        if name not in values:
            raise EmulatorError(f"special register {name} is not modelled")
        return np.asarray(values[name]()).astype(np.uint32)

    def launch_constant(self, name: str) -> int:
        launch = self.launch
        axis = "xyz".find(name[-1])
        if name.startswith("%ntid"):
            return launch.block[axis]
        if name.startswith("%nctaid"):
            return launch.grid[axis]
        if name.startswith("%nclusterid"):
            return launch.grid[axis] // launch.cluster[axis]
        if name.startswith("%cluster_nctaid"):
            return launch.cluster[axis]
        if name == "%cluster_nctarank":
            return self.cluster_size
        if name == "%is_explicit_cluster":
            return int(self.cluster_size > 1)
        if name == "%gridid":
            return 0
        if name == "WARP_SZ":
            return 32
        if name == "%nsmid":
            return launch.device.sm_count
        if name == "%nwarpid":
            return launch.device.threads_per_sm // 32
        if name == "%dynamic_smem_size":
            return launch.shared_bytes
        if name in ("%total_smem_size", "%aggr_smem_size"):
            return launch.compiled.shared_static + launch.shared_bytes
        raise EmulatorError(f"special register {name} is not modelled")

    def clock(self, bits: int) -> Array:
        """A counter that advances with every call: no model of time."""
        self.steps += 1
        return np.full(self.size, self.steps * 32 & ((1 << bits) - 1), MOVER[bits // 8])

    def address_of(self, symbol: str) -> int:
        return self.launch.addresses[symbol]

    def param(self, offset: int, width: int) -> int:
        return int.from_bytes(self.launch.params[offset : offset + width], "little")

    def param_at(self, address: Array, width: int, m: Mask, site: int) -> Array:
        """Kernel parameters at offsets that differ per lane."""
        offsets = address.astype(np.int64)
        bad = (offsets < 0) | (offsets + width > len(self.launch.params))
        if m is not None:
            bad &= m
        if bad.any():
            lanes = np.flatnonzero(bad)
            text = f"reads at byte {int(offsets[lanes[0]])} of {len(self.launch.params)} bytes of kernel parameters"
            self.report_lanes("global-out-of-bounds", text, site, lanes)
        raw = np.frombuffer(self.launch.params.ljust(-(-len(self.launch.params) // 16) * 16 + 16, b"\0"), np.uint8)
        offsets = np.clip(offsets, 0, len(raw) - width)
        out = np.ascontiguousarray(raw[offsets[:, None] + np.arange(width)])
        return out.reshape(-1).view(MOVER[width])

    # --- reports ---

    def cta_index(self, row: int) -> tuple[int, int, int]:
        gx, gy, _ = self.launch.grid
        cta = int(self.ctas[row])
        return cta % gx, cta // gx % gy, cta // (gx * gy)

    def report(
        self,
        kind: str,
        message: str,
        site: int | None,
        row: int,
        threads: Iterable[int],
        address: int | None = None,
        count: int = 1,
        doubtful: bool = False,
    ) -> None:
        listed = sorted({int(t) for t in threads})
        self.launch.reports.add(kind, message, site, self.cta_index(row), listed, address, count, doubtful)

    def report_lanes(
        self, kind: str, message: str, site: int, lanes: Array, address: int | None = None, doubtful: bool = False
    ) -> None:
        """Report a finding of some lanes; those of the first lane's CTA are listed."""
        row = int(self.row_of[lanes[0]])
        threads = self.thread[lanes[self.row_of[lanes] == row]]
        self.report(kind, message, site, row, threads, address, len(lanes), doubtful)

    # --- scheduler ---

    def next(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block`` while others are pending: the first block in order runs."""
        self.park(block, m)
        return self.pick()

    def park(self, block: int, m: Mask) -> None:
        mask = self.alive.copy() if m is None else m
        old = self.pend.get(block)
        self.pend[block] = mask if old is None else old | mask

    def pick(self) -> Step:
        pend = self.pend
        if not pend:
            return self._blocked()
        block, mask = self._last_warpgroup() if self.launch.options.adverse else self._first_block()
        others = bool(pend or self.waiting or self.deferred)
        if others and self.launch.compiled.has_clobbers:
            written = self.launch.compiled.clobbers[block]
            if written:
                live = self.launch.compiled.live_in
                places = [*pend, *(w.block for w in self.waiting), *self.deferred]
                if any(written & live[place] for place in places):
                    raise Overtaken
        if not others and self.complete:
            return block, None, False
        return block, mask, others

    def _first_block(self) -> tuple[int, Array]:
        block = min(self.pend)
        return block, self.pend.pop(block)

    def _last_warpgroup(self) -> tuple[int, Array]:
        """The last warpgroup that can run, at the first block where it has lanes; the others stay where they are."""
        start = max(int(np.flatnonzero(mask)[-1]) for mask in self.pend.values()) // 128 * 128
        mine = slice(start, start + 128)
        block = min(block for block, mask in self.pend.items() if mask[mine].any())
        rest = self.pend.pop(block).copy()
        chosen = np.zeros(self.size, bool)
        chosen[mine] = rest[mine]
        rest[mine] = False
        if rest.any():
            self.pend[block] = rest
        return block, chosen

    def branch(self, taken: Array, yes: int, no: int, m: Mask) -> Step:
        """A divergent branch."""
        if m is None:
            t = taken
            f = ~taken
        else:
            t = taken & m
            f = m & ~taken
        if not t.any():
            return self.go(no, m)
        if not f.any():
            return self.go(yes, m)
        self.park(yes, t)
        self.park(no, f)
        return self.pick()

    def switch(self, index: Array, targets: tuple[int, ...], m: Mask) -> Step:
        """brx.idx."""
        for i in np.unique(index if m is None else index[m]):
            hit = index == i
            self.park(targets[min(int(i), len(targets) - 1)], hit if m is None else hit & m)
        return self.pick()

    def go(self, block: int, m: Mask) -> Step:
        if self.pend:
            return self.next(block, m)
        return block, m, bool(self.waiting or self.deferred)

    def exit(self, m: Mask) -> Step:
        """The running lanes have finished."""
        if m is None:
            self.alive[:] = False
            if self.launch.compiled.asynchronous:
                self._leaving(np.ones(self.size, bool))
            return (DONE, None, False) if not (self.pend or self.waiting or self.deferred) else self.pick()
        self.complete = False
        self.alive &= ~m
        if self.launch.compiled.asynchronous:
            self._leaving(m)
        left = self.alive.reshape(self.count, self.width).sum(axis=1)
        self.whole = bool(((left == 0) | (left == self.threads)).all())
        return self.pick()

    def _leaving(self, m: Array) -> None:
        """Lanes have exited: barriers of the cluster and meetings may be complete without them."""
        self.barriers.exited(np.flatnonzero(m))
        for site in list(self.meetings):
            self._settle_meeting(site)

    def grid_wait(self, m: Mask) -> None:
        """griddepcontrol.wait."""
        if not self.memory.guarded:
            return
        self.launch.tick += 1
        lanes = np.arange(self.size) if m is None else self.lanes(m)
        self.memory.waited[self.row_of[lanes], self.warp[lanes]] = self.launch.tick
        self.shared.retag()

    def sleep(self, barrier: Any, mask: Array, block: int, site: int, token: int = 0) -> None:
        """Lanes wait for an mbarrier or a cluster barrier, which releases them."""
        self.waiting.append(_Waiting(barrier, mask, block, site, token))

    def converge(self, members: Any, m: Mask, resume: int, site: int) -> Step:
        """The named lanes of a warp (``members`` None: the warps of a warpgroup) meet, without any order of memory."""
        if not (self.pend or self.waiting or self.deferred):
            return resume, m, False
        mask = (self.alive if m is None else m).copy()
        meeting = self.meetings.get(site)
        if meeting is None:
            meeting = self.meetings[site] = _Meeting(np.zeros(self.size, bool), members, resume)
        meeting.here |= mask
        self.waiting.append(_Waiting(meeting, mask, resume, site))
        self._settle_meeting(site)
        return self.pick()

    def _settle_meeting(self, site: int) -> None:
        meeting = self.meetings[site]
        warps = self.width // 32
        absent = self.alive & ~meeting.here
        if meeting.members is None:
            per = -(-warps // 4)
            missing = np.zeros((self.count, per * 4), bool)
            missing[:, :warps] = absent.reshape(self.count, warps, 32).any(axis=2)
            groups = np.repeat(missing.reshape(self.count, per, 4).any(axis=2), 4, axis=1)[:, :warps]
            late = np.repeat(groups.reshape(-1), 32)
        elif type(meeting.members) is int:
            named = (meeting.members >> np.arange(32) & 1).astype(bool)
            late = np.repeat((absent.reshape(-1, 32) & named).any(axis=1), 32)
        else:
            bits = (meeting.members.reshape(-1, 32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
            late = (bits.astype(bool) & absent.reshape(-1, 1, 32)).any(axis=2).reshape(-1)
        free = meeting.here & ~late
        if free.any():
            meeting.here &= ~free
            self.release(meeting, free)
        if not meeting.here.any():
            del self.meetings[site]

    def backward(self, site_block: int, m: Mask) -> None:
        """A backward branch was taken: give up on endless loops."""
        self.steps += 1
        if self.steps > self.launch.options.loop_limit:
            lanes = np.flatnonzero(self.alive if m is None else m)
            row = int(self.row_of[lanes[0]])
            line = self.launch.compiled.block_lines[site_block]
            self.report(
                "runaway",
                f"more than {self.launch.options.loop_limit} backward branches; last seen at PTX line {line}",
                None,
                row,
                self.thread[lanes[self.row_of[lanes] == row]],
            )
            raise Runaway

    def spin(self, head: int, m: Mask) -> Step:
        """Back at the head of a loop that polls memory: everyone else may run first."""
        mask = self.alive.copy() if m is None else m
        old = self.deferred.get(head)
        self.deferred[head] = mask if old is None else old | mask
        if self.pend:
            return self.pick()
        return BLOCKED, None, True

    def spin_branch(self, taken: Array, yes: int, no: int, head: int, m: Mask) -> Step:
        """A conditional branch with one way back to the head of a polling loop."""
        t = taken if m is None else taken & m
        f = ~taken if m is None else m & ~taken
        for target, group in ((yes, t), (no, f)):
            if group.any():
                if target == head:
                    old = self.deferred.get(head)
                    self.deferred[head] = group if old is None else old | group
                else:
                    self.park(target, group)
        if self.pend:
            return self.pick()
        return BLOCKED, None, True

    def _blocked(self) -> Step:
        if self.deferred:
            return BLOCKED, None, True
        if self.waiting:
            if self.launch.compiled.asynchronous and self.barriers.expire():
                return self.pick()
            self.report_stuck()
        return DONE, None, False

    def resume(self) -> Step:
        """After a yield: the pollers try again."""
        self.pend.update(self.deferred)
        self.deferred = {}
        return self.pick()

    def report_stuck(self) -> None:
        """Nothing can run any more: say where every group waits."""
        places = []
        for w in self.waiting:
            lanes = np.flatnonzero(w.mask)
            places.append((w.site, w.barrier, lanes))
        exited = ~self.alive & (self.thread < self.threads)
        rows = sorted({int(r) for _, _, lanes in places for r in self.row_of[lanes]})
        for row in rows[:4]:
            parts = []
            first = None
            threads: list[int] = []
            for site, barrier, lanes in places:
                mine = self.thread[lanes[self.row_of[lanes] == row]]
                if len(mine):
                    first = site if first is None else first
                    threads += [int(t) for t in mine]
                    at = self.launch.compiled.sites[site]
                    where = f"PTX line {at.line}" + (f" [{at.source}]" if at.source else "")
                    name = _barrier_name(barrier, row)
                    parts.append(f"{len(mine)} threads ({_ranges(mine)}) wait at {name}, {where}")
            gone = self.thread[exited & (self.row_of == row)]
            if len(gone):
                parts.append(f"{len(gone)} threads ({_ranges(gone)}) have exited")
            for head, mask in self.deferred.items():
                mine = self.thread[mask & (self.row_of == row)]
                if len(mine):
                    line = self.launch.compiled.block_lines[head]
                    parts.append(f"{len(mine)} threads ({_ranges(mine)}) poll in the loop at PTX line {line}")
            named = all(isinstance(w.barrier, int) for w in self.waiting)
            self.report("barrier-divergence" if named else "deadlock", "; ".join(parts), first, row, threads)
        polls = [(head, np.flatnonzero(mask)) for head, mask in self.deferred.items()]
        if polls and not rows:
            head, lanes = polls[0]
            row = int(self.row_of[lanes[0]])
            line = self.launch.compiled.block_lines[head]
            near = next((i for i, s in enumerate(self.launch.compiled.sites) if s.line >= line), None)
            self.report(
                "deadlock",
                f"all CTAs are blocked; these threads poll in the loop at PTX line {line} for a value nobody writes",
                near,
                row,
                self.thread[lanes[self.row_of[lanes] == row]],
            )

    # --- barriers ---

    def known(self, row: Array, warp: Array, other: Array) -> Array:
        """Ticks before which accesses of warp ``other`` are ordered before warp ``warp`` of the same CTA, per
        element."""
        if self.known_ticks is None:
            return self.base_tick[row]
        if self.clocks is not None:
            other = other + self.clocks.first[row]
        return self.known_ticks[row, warp, other]

    def first_column(self, row: int) -> int:
        """Where the own warps of a CTA start in ``known_ticks``."""
        return 0 if self.clocks is None else int(self.clocks.first[row])

    def ticks(self) -> Array:
        """Per row, warp and other warp: the tick before which the other's accesses are ordered before the warp."""
        if self.known_ticks is None:
            warps = self.width // 32
            self.known_ticks = np.repeat(self.base_tick, warps * warps).reshape(self.count, warps, warps)
        return self.known_ticks

    def barrier(self, number: Any, expected: Any, m: Mask, resume: int, site: int, arrive_only: bool = False) -> Step:
        """bar.sync: ``number`` and ``expected`` (threads; 0: all of the CTA) are ints or arrays."""
        launch = self.launch
        if launch.counters is not None:
            launch.counters.barriers += self.count if m is None else len(np.unique(self.row_of[self.lanes(m)]))
        if (
            type(number) is int
            and (expected == 0 or (type(expected) is int and expected == self.threads))
            and not (arrive_only or self.pend or self.waiting or self.deferred or number in self.arrived)
            and self.whole
            and (m is None or self.is_everyone(m))
        ):
            self._sync_all()
            return resume, m, False
        mask = (self.alive if m is None else m).copy()
        if type(number) is not int or type(expected) is not int:
            numbers = number if type(number) is not int else np.full(self.size, number)
            counts = expected if type(expected) is not int else np.full(self.size, expected)
            pairs = {(int(a), int(b)) for a, b in zip(numbers[mask], counts[mask], strict=True)}
            groups = [(a, b, mask & (numbers == a) & (counts == b)) for a, b in sorted(pairs)]
        else:
            groups = [(number, expected, mask)]
        for one, count, group in groups:
            self._arrive(one, count or self.threads, group, resume, site, arrive_only)
        if arrive_only:
            return resume, m, False
        return self.pick()

    def arrive(self, number: Any, expected: Any, m: Mask, site: int) -> None:
        """bar.arrive: counts, does not wait."""
        self.barrier(number, expected, m, 0, site, True)

    def _arrive(self, number: int, expected: int, mask: Array, resume: int, site: int, arrive_only: bool) -> None:
        here = self.arrived.get(number)
        if here is not None and (here & mask).any():
            lanes = np.flatnonzero(here & mask)
            self.report_lanes(
                "barrier-divergence",
                f"arrives at barrier {number} again before it has completed ({expected} threads expected)",
                site,
                lanes,
            )
        here = mask.copy() if here is None else here | mask
        if not arrive_only:
            self.waiting.append(_Waiting(number, mask, resume, site))
        counts = here.reshape(self.count, self.width).sum(axis=1)
        done = counts >= expected
        if done.any():
            finished = done[self.row_of]
            self._sync_some(here & finished, done)
            self.release(number, finished)
            here = here & ~finished
        if here.any():
            self.arrived[number] = here
        else:
            self.arrived.pop(number, None)

    def _sync_all(self) -> None:
        launch = self.launch
        launch.tick += 1
        self.base_tick[:] = launch.tick
        if self.clocks is not None:
            self.clocks.share()
            for row in range(self.count):
                self.clocks.meet(row, slice(None))
        elif self.known_ticks is not None:
            self.known_ticks[:] = launch.tick
        self.shared.barrier_all()
        if launch.order.active:
            warps = range(self.width // 32)
            everyone = np.arange(self.threads)
            for cta in self.ctas:
                launch.order.barrier(int(cta), warps, everyone)

    def _sync_some(self, participants: Array, rows: Array) -> None:
        launch = self.launch
        launch.tick += 1
        tick = launch.tick
        for row in np.flatnonzero(rows):
            base = row * self.width
            threads = np.flatnonzero(participants[base : base + self.width])
            warps = np.unique(threads >> 5)
            if self.clocks is not None:
                met = np.zeros((self.count, self.width // 32), bool)
                met[row, warps] = True
                self.clocks.share(met)
                self.clocks.meet(int(row), warps)
                if len(threads) == self.threads:
                    self.base_tick[row] = tick
            elif len(threads) == self.threads:
                self.base_tick[row] = tick
                if self.known_ticks is not None:
                    self.known_ticks[row] = tick
            else:
                known = self.ticks()[row]
                best = known[warps].max(axis=0)
                best[warps] = tick
                known[warps] = best
            launch.order.barrier(int(self.ctas[row]), [int(w) for w in warps], threads)
        self.shared.retag()
        if self.clocks is None:
            self.shared.fresh = (
                max(self.shared.fresh, (int(self.base_tick.min()) - self.shared.t0 + 1) << 11) if rows.any() else 0
            )

    def warp_sync(self, m: Mask) -> None:
        """bar.warp.sync and the other warp collectives: they order the accesses of the lanes of a warp."""
        launch = self.launch
        if not launch.options.hazards:
            return
        known = self.ticks()
        launch.tick += 1
        warps = self.width // 32
        met = np.ones((self.count, warps), bool) if m is None else m.reshape(self.count, warps, 32).any(axis=2)
        rows, which = np.nonzero(met)
        if self.clocks is None:
            known[rows, which, which] = launch.tick
        else:
            if self.clocks.private:
                self.clocks.share(met)
            known[rows, which, which + self.clocks.first[rows]] = launch.tick
        self.shared.retag()

    def bar_warp(self, members: Any, m: Mask, resume: int, site: int) -> Step:
        """bar.warp.sync: the named lanes of a warp that are still alive wait for each other, wherever they are."""
        if not (self.pend or self.waiting or self.deferred):
            self.warp_sync(m)
            return resume, m, False
        mask = (self.alive if m is None else m).copy()
        here = self.arrived.get(WARP_BARRIER)
        here = mask if here is None else here | mask
        wanted = self.constant(members, 4) if type(members) is int else members
        named = ((wanted.reshape(-1, 32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(bool)
        missing = (named & (self.alive & ~here).reshape(-1, 1, 32)).any(axis=2).reshape(-1) & mask
        # Lanes of one warp may name different sets: each set is complete when all its living members have arrived.
        self.waiting.append(_Waiting(WARP_BARRIER, mask, resume, site))
        ready = np.repeat((mask & ~missing).reshape(-1, 32).any(axis=1), 32)
        if ready.any():
            free = here & ready
            if int(wanted[np.flatnonzero(mask)[0]]) != 0xFFFFFFFF:
                group = (named & (mask & ~missing).reshape(-1, 32, 1)).any(axis=1).reshape(-1)
                free &= group
            self.release(WARP_BARRIER, free)
            here = here & ~free
            self.warp_sync(free)
        if here.any():
            self.arrived[WARP_BARRIER] = here
        else:
            self.arrived.pop(WARP_BARRIER, None)
        return self.pick()

    def release(self, number: Any, free: Array) -> None:
        """Wake the lanes of ``free`` that sleep at a barrier."""
        kept = []
        for w in self.waiting:
            if w.barrier == number and (w.mask & free).any():
                self.park(w.block, w.mask & free)
                w.mask = w.mask & ~free
                if not w.mask.any():
                    continue
            kept.append(w)
        self.waiting = kept

    def require_whole_warps(self, m: Array, site: int) -> None:
        """mma, ldmatrix and friends need all 32 lanes."""
        lanes = m.reshape(-1, 32)
        partial = lanes.any(axis=1) & ~lanes.all(axis=1)
        if partial.any():
            bad = np.flatnonzero(np.repeat(partial, 32) & m)
            self.report_lanes("warp-divergence", "executed by some lanes of a warp only", site, bad)

    def bar_red(self, mode: str, value: Array, m: Mask, site: int) -> Array:
        """bar.red over the CTA (all threads take part): popc gives uint32, and/or predicates."""
        active = self.alive if m is None else m
        here = active.reshape(self.count, self.width).sum(axis=1)
        if ((here != 0) & (here != self.threads)).any():
            line = self.launch.compiled.sites[site].line
            raise EmulatorError(f"PTX line {line}: barrier with reduction by a part of a CTA is not modelled")
        bits = (value & active).reshape(self.count, self.width)
        if mode == "popc":
            return np.repeat(bits.sum(axis=1).astype(np.uint32), self.width)
        if mode == "or":
            return np.repeat(bits.any(axis=1), self.width)
        return np.repeat((bits | ~active.reshape(self.count, self.width)).all(axis=1), self.width)

    # --- traps ---

    def trap(self, site: int, message: str, m: Mask) -> None:
        lanes = np.flatnonzero(self.alive if m is None else m)
        if len(lanes):
            self.report_lanes("trap", message, site, lanes)


class Runaway(Exception):
    """A launch was given up."""


class _Waiting:
    """A group of lanes asleep at a barrier."""

    __slots__ = ("barrier", "block", "mask", "site", "token")

    def __init__(self, barrier: Any, mask: Array, block: int, site: int, token: int = 0) -> None:
        self.barrier, self.mask, self.block, self.site, self.token = barrier, mask, block, site, token


class _Meeting:
    """Lanes that wait for the others of their warp or warpgroup at one instruction."""

    __slots__ = ("here", "members", "resume")

    def __init__(self, here: Array, members: Any, resume: int) -> None:
        self.here, self.members, self.resume = here, members, resume

    def describe(self, row: int) -> str:  # noqa: ARG002
        """What is waited for, in words."""
        return "an instruction that their " + ("warpgroup" if self.members is None else "warp") + " executes together"


def _barrier_name(barrier: Any, row: int) -> str:
    if isinstance(barrier, int):
        return "bar.warp.sync" if barrier == WARP_BARRIER else f"barrier {barrier}"
    text: str = barrier.describe(row)
    return text


def _ranges(numbers: Array) -> str:
    """1, 2, 3, 7 -> ``1-3, 7``."""
    out = []
    values = sorted(int(n) for n in numbers)
    start = previous = values[0]
    for n in [*values[1:], -1]:
        if n != previous + 1:
            out.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ", ".join(out[:6]) + (", ..." if len(out) > 6 else "")


__all__ = [
    "GENERIC_LOCAL",
    "GENERIC_SHARED",
    "Batch",
    "Compiled",
    "Device",
    "Launch",
    "LaunchResult",
    "Options",
    "Overtaken",
    "Runaway",
]
