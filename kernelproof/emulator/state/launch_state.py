"""Keeps the state that all units of the emulator share during a launch: facts of the kernel, geometry, findings, tick.

The tick counts synchronisations; it orders accesses. See ``LaunchState``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import POISON, Array
from kernelproof.emulator.state.counters import Counters
from kernelproof.emulator.state.lanes import Lanes
from kernelproof.emulator.state.options import Device, Options
from kernelproof.emulator.state.participants import Dim3, Participant
from kernelproof.emulator.state.queue import CtaQueue
from kernelproof.emulator.state.reports import Report, Reports
from kernelproof.emulator.state.scopes import Scope
from kernelproof.emulator.state.sites import NOWHERE, Hazard, Site, place
from kernelproof.emulator.state.suspects import Suspects, Trial


@dataclass
class LaunchResult:
    """The result of a launch. ``shared_bytes``: its dynamic shared memory. ``reports``: its findings. ``counters``:
    None if they were off. ``ctas``: linear numbers of the CTAs that were executed. ``output``: the text that printf
    wrote. ``failed_asserts``: has an assert of the kernel failed?"""

    kernel: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    reports: list[Report] = field(default_factory=list)
    counters: Counters | None = None
    ctas: Array | None = None
    output: str = ""
    failed_asserts: bool = False


class SharedVariable(NamedTuple):
    """A variable in shared memory: its name in the source, its offset, and its bytes (0: the size of the dynamic shared
    memory, which the launch sets)."""

    name: str
    offset: int
    nbytes: int


# By how much a clock register, such as %clock64, advances per read. A kernel that waits for milliseconds then reads it
# some thousand times.
CLOCK_STEP = 2048

# The origin of a pointer: the offset of a parameter (bytes), or the name of a variable.
Origin = int | str


@dataclass(eq=False)
class KernelFacts:
    """The facts of a translated kernel that the machine needs.

    Instructions are numbered by their place in ``sites``, and basic blocks in scheduling order.
    """

    name: str
    sites: list[Site]
    # Memory. A granule is as many bytes as the kernel's smallest access to shared memory; one tag describes a granule.
    shared_static: int
    shared_variables: tuple[SharedVariable, ...]
    shared_granule: int
    local_bytes: int
    # For each basic block: the uniform registers that it writes and other blocks access (``clobbers``), and the
    # registers that are live at its start.
    clobbers: list[frozenset[str]]
    live_in: list[frozenset[str]]
    # Polling loops, which wait for memory. A loop is named by the block at its head. ``polling_variables``: head -> the
    # variables of the kernel's function that decide whether the loop ends. ``polling_heads``: an instruction that
    # decides whether a polling loop ends -> its head. ``learned``: heads of loops whose text does not show that they
    # wait; an execution has shown it.
    polling_variables: dict[int, frozenset[str]]
    polling_heads: dict[int, int]
    learned: frozenset[int]
    # For each basic block: the line at which it begins, and how many instructions of each opcode it has.
    block_lines: list[int]
    block_opcodes: list[dict[str, int]]
    attributes: dict[str, tuple[int, ...]]  # directives of the entry, such as maxntid
    # Pointers. ``origins``: instruction -> those from which its address may be computed. ``written``: those through
    # which the kernel may write global memory; None if one cannot be followed.
    origins: dict[int, frozenset[Origin]]
    written: frozenset[Origin] | None
    uncertain: list[tuple[str, int]]  # registers that a path reads before it writes them, with the reading instructions
    hazards: tuple[Hazard, ...]  # faults in the schedule of machine code
    cancels: bool  # its CTAs may cancel others that have not started
    restricts: bool  # it has fences of shared memory alone
    flag_spaces: frozenset[str]  # state spaces in which its threads may synchronise with strong writes of others
    # State spaces in which its instructions may return older values than the newest: strong loads, and atomics in
    # polling loops.
    observed_spaces: frozenset[str]
    machine_code: bool  # it was lowered from a cubin, so its lines are addresses
    window_readings: list[Site]  # instructions that read upper bits of generic addresses

    def place(self, line: int) -> str:
        """The place of an instruction with this line, in words."""
        return place(line, self.machine_code)


@dataclass(frozen=True)
class Geometry:
    """The shape of a launch: grid, block and cluster (x, y, z), and bytes of dynamic shared memory. ``overlapping``: it
    may overlap the previous launch (programmatic stream serialization). ``cooperative``: all its CTAs must be resident
    at the same time. ``concurrent``: work on other streams may run at the same time."""

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    overlapping: bool = False
    cooperative: bool = False
    concurrent: bool = False

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def cluster_size(self) -> int:
        """CTAs per cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


class StaleRead(NamedTuple):
    """A load that may return a value from before a store, although its thread has seen what came after that store.
    ``cta`` and ``thread`` load; ``other`` has stored."""

    cta: Dim3
    thread: int
    other: Participant


@dataclass(frozen=True)
class Variation:
    """How a repeated execution of a launch differs from the first one. Repetitions show which
    findings matter.

    - ``poison``: the byte in undefined shared memory.
    - ``unspecified``: the byte of values that no rule of PTX defines, such as unset registers, shuffles from absent
      lanes, and divisions by zero.
    - ``trial``: racing reads of an earlier execution, which read other values in this one.
    - ``recording``: accesses record their instruction, so that a finding can name both sides of a race. This costs time
      and memory.
    - ``oldest``: strong loads outside of polling loops return the oldest value that they may, not the newest.
    - ``overlooks``: strong loads by this instruction return the oldest value even if their warp has seen newer ones.
    - ``newest``: loads in polling loops return the newest value only.
    """

    poison: int = POISON
    unspecified: int = POISON
    trial: Trial | None = None
    recording: bool = False
    oldest: bool = False
    overlooks: int | None = None
    newest: bool = False


USUAL = Variation()


class LaunchState:
    """State that all CTAs of a launch share.

    ``tick`` is the machine's clock. It counts synchronisations, not instructions. An access is tagged with the tick at
    which it happens, and a synchronisation advances the tick before it records what it orders. So an access whose tag
    is below a recorded tick came before that synchronisation. ``version`` counts changes of memory: if no lane can run
    and memory does not change, that is a deadlock.
    """

    def __init__(
        self,
        kernel: KernelFacts,
        geometry: Geometry,
        options: Options,
        device: Device,
        variation: Variation = USUAL,
        batches: list[int] | None = None,
    ) -> None:
        self.kernel, self.geometry, self.options, self.device = kernel, geometry, options, device
        self.threads = geometry.threads
        # See ``Variation``. ``suspects`` collects the racing reads of this execution, ``trial`` has those of another.
        self.poison, self.unspecified = variation.poison, variation.unspecified
        self.suspects, self.trial = Suspects(), variation.trial
        self.recording = variation.recording and options.hazards
        self.oldest, self.newest = variation.oldest, variation.newest
        # Has a polling loop been given a value that was not the newest?
        self.polled_older = False
        # Numbers of load instructions that returned the newest value but were allowed to return an older one.
        self.older_allowed: set[int] = set()
        # Those of them whose warp had seen the newer value, though nothing orders the load after the store of it.
        # ``overlooks``: see ``Variation``.
        self.overlooked: dict[int, StaleRead] = {}
        self.overlooks = variation.overlooks
        self.reports = Reports(kernel.name, kernel.sites)
        self.counters = (
            Counters(kernel.block_opcodes, kernel.sites, kernel.window_readings) if options.counters else None
        )
        # What printf has written; has an assert failed?
        self.printed: list[str] = []
        self.printed_characters = 0
        self.failed_asserts = False
        self.tick = 1
        self.version = 0
        # Has no batch started or ended for long? Does a batch compare its state with an earlier one? In both cases
        # stores of the values that memory already holds do not count as changes.
        self.idle = self.repeating = False
        self.clock_step = CLOCK_STEP
        # CTAs that have started and not ended.
        self.active = 0
        # How many CTAs each batch so far has. A repeated execution must form the same batches: suspects refer to them.
        self.batches: list[int] = [] if batches is None else batches
        self.queue = CtaQueue(np.zeros(0, np.int64), 1, 0)
        self._lanes: dict[int, Lanes] = {}

    def count_store(self, is_there: Callable[[], bool]) -> None:
        """Count a store as a change of memory; while ``idle`` or ``repeating``, only if it changes a value.
        ``is_there``: a function without arguments that says whether memory already holds the new values."""
        if not (self.idle or self.repeating) or not is_there():
            self.version += 1

    def lanes(self, count: int) -> Lanes:
        """The lanes of a batch of ``count`` CTAs, which are made once per launch and count."""
        out = self._lanes.get(count)
        if out is None:
            out = self._lanes[count] = Lanes(count, self.threads)
        return out

    def site(self, number: int) -> Site:
        """The instruction with this number; NOWHERE for a negative number."""
        return self.kernel.sites[number] if number >= 0 else NOWHERE

    def cta_index(self, cta: int) -> Dim3:
        """(x, y, z) of a CTA's linear number."""
        gx, gy, _ = self.geometry.grid
        return cta % gx, cta // gx % gy, cta // (gx * gy)

    def cluster_of(self, cta: int) -> int:
        """The linear number of the first CTA of the cluster to which a CTA belongs."""
        (gx, gy, _), (cx, cy, cz) = self.geometry.grid, self.geometry.cluster
        # Each coordinate is rounded down to a multiple of the extent of a cluster.
        x, y, z = self.cta_index(cta)
        return x // cx * cx + gx * (y // cy * cy + gy * (z // cz * cz))

    def scope_of_both(self, cta: int, other: int) -> Scope:
        """The smallest scope that includes two CTAs, which are given by linear numbers."""
        if cta == other:
            return Scope.CTA
        return Scope.CLUSTER if self.cluster_of(cta) == self.cluster_of(other) else Scope.GPU
