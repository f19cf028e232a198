"""Executes one launch, and decides which of its findings matter.

Variables of the module are placed in memory and the CTAs are executed. Then the launch is executed again with other
values in place of undefined ones, and with other results of racing reads: findings whose values reach no output are
benign. Sessions and ``Program.launch`` both execute launches by ``KernelLaunch.execute``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from kernelproof.emulator.blackwell.blackwell_batch import BlackwellBatch
from kernelproof.emulator.frontend.ptx import Module, Variable
from kernelproof.emulator.frontend.translate import Compiled, translate
from kernelproof.emulator.hopper.hopper_batch import HopperBatch
from kernelproof.emulator.host.launch_limits import check_launch, check_target, fixed_cluster
from kernelproof.emulator.host.naming import Naming
from kernelproof.emulator.machine.ampere_batch import AmpereBatch
from kernelproof.emulator.machine.execution import in_clusters, run
from kernelproof.emulator.machine.scheduler import Overtaken, Runaway, Waits
from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.memory.device_state import AccessedGranules, DeviceState
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.collector import few_collections
from kernelproof.emulator.state.launch_state import USUAL, Geometry, LaunchResult, LaunchState, StaleRead, Variation
from kernelproof.emulator.state.options import Device, Options
from kernelproof.emulator.state.participants import Participant, Place, Space
from kernelproof.emulator.state.reports import EmulatorError, Report
from kernelproof.emulator.state.rules import UNORDERED
from kernelproof.emulator.state.suspects import Trial

# Bytes of writable memory up to which it is copied, so that a launch can be executed again. With more memory every
# finding counts, and lanes must not leave lockstep where the translation relies on it.
SNAPSHOT_LIMIT = 1 << 28
# The rules that are broken by lanes which wait for an event that never happens.
ENDLESS_WAITS = ("deadlock", "runaway", "barrier-divergence")
# At most this many loads are made to overlook a store, each in an execution of its own.
MAX_OVERLOOKED = 8
# Another byte for undefined memory. Repeated, it is a finite number: 1.06 in fp16, 0.0115 in bf16 and fp32.
OTHER_POISON = 0x3C
# The bytes that racing reads return, one per further execution. Repeated, the first three are a NaN, a large number and
# its opposite in fp16, bf16 and fp32; the last is zero, like a flag that is not set.
RACING_BYTES = (0xFF, 0x7B, 0xFB, 0x00)


def load_globals(module: Module, memory: Memory) -> dict[str, int]:
    """Place the module's global and constant variables in memory, and return their addresses by name. Variables that an
    earlier launch of the same text has placed keep their address and content."""
    variables = [v for v in module.variables.values() if v.space in ("global", "const")]
    for function in (*module.kernels.values(), *module.functions.values()):
        variables += [v for v in function.variables if v.space in ("global", "const")]
    addresses: dict[str, int] = {}
    new_variables: list[tuple[Variable, Buffer]] = []
    for variable in variables:
        if variable.within is not None:
            continue
        key = (module.text, variable.name)
        buffer = memory.globals.get(key)
        if buffer is None:
            buffer = memory.globals[key] = memory.allocate(
                max(variable.size, 1),
                "input" if variable.space == "const" else "inout",
                name=variable.name,
                of_host=variable.managed,
            )
            buffer.bytes()[:] = 0
            if variable.init is not None:
                buffer.bytes()[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
            new_variables.append((variable, buffer))
        addresses[variable.name] = buffer.address
    for variable in variables:
        if variable.within is not None:
            container, offset = variable.within
            addresses[variable.name] = addresses[container] + offset
    for variable, buffer in new_variables:
        for offset, symbol, addend in variable.pointers:
            address = addresses.get(symbol, module.function_addresses.get(symbol, 0)) + addend
            buffer.bytes()[offset : offset + 8] = np.frombuffer(struct.pack("<Q", address), np.uint8)
    return addresses


@dataclass
class KernelLaunch:
    """A launch that is ready to execute.

    ``parameters``: the kernel's parameter block. ``ctas``: linear numbers (x + gx * (y + gy * z)) of the CTAs to run,
    all if None. ``dynamic_limit``: bytes of dynamic shared memory allowed. ``large_clusters``: clusters may have more
    than 8 CTAs. ``memory_state``: the tags of the launch's accesses, once it has been executed. ``before``: a copy of
    memory before the launch, if the caller has one. ``matters``: does the caller want the accesses to a buffer?
    ``remembered``: the accesses of a launch that is not executed because its effect is known.
    """

    module: Module
    kernel: str
    geometry: Geometry
    parameters: bytes
    memory: Memory
    device: Device
    options: Options
    ctas: Iterable[int] | None
    dynamic_limit: int
    large_clusters: bool = False
    memory_state: DeviceState | None = None
    before: Snapshot | None = None
    matters: Callable[[Buffer], bool] = lambda _: False
    remembered: list[AccessedGranules] = field(default_factory=list)

    def touched(self) -> list[AccessedGranules]:
        """The granules that the launch has accessed, of the buffers that matter; empty without the option
        ``hazards``."""
        return self.memory_state.touched(self.matters) if self.memory_state is not None else self.remembered

    def execute(self) -> LaunchResult:
        """Check the launch and run it. Raises LaunchRefused or EmulatorError."""
        function = self.module.kernels[self.kernel]
        check_target(self.module.target, self.device, function.machine_code)
        compiled = translate(self.module, self.kernel, self.options.counters)
        geometry = self.geometry
        if geometry.cluster == (1, 1, 1):
            geometry = replace(geometry, cluster=fixed_cluster(function) or (1, 1, 1))
        check_launch(function, geometry, compiled.shared_static, self.dynamic_limit, self.device, self.large_clusters)
        checked = _CheckedLaunch(self, geometry, load_globals(self.module, self.memory), self._cta_numbers(geometry))
        state = checked.execute_and_judge(compiled)
        naming = Naming(self.memory, function, self.parameters, compiled)
        for report in state.reports.by_key.values():
            naming.name(report)
        return LaunchResult(
            self.kernel,
            geometry.grid,
            geometry.block,
            geometry.shared_bytes,
            state.reports.list(),
            state.counters,
            checked.ctas,
            "".join(state.printed),
            state.failed_asserts,
        )

    def _cta_numbers(self, geometry: Geometry) -> Array:
        """The numbers of the CTAs to run: the clusters of the requested CTAs run completely. Raises EmulatorError for
        CTAs outside of the grid."""
        count = geometry.ctas
        if self.ctas is None:
            numbers = np.arange(count)
        else:
            numbers = np.unique(np.fromiter((int(c) for c in self.ctas), np.int64))
        if len(numbers) and (numbers[0] < 0 or numbers[-1] >= count):
            raise EmulatorError(f"CTA numbers {numbers[0]}..{numbers[-1]} for a grid of {count}")
        return numbers if geometry.cluster_size == 1 else in_clusters(numbers, geometry.grid, geometry.cluster)


@dataclass
class _CheckedLaunch:
    """A launch that the CUDA runtime would accept. It may be executed several times.

    ``symbols``: addresses of the module's variables. ``ctas``: numbers of the CTAs to run.
    """

    launch: KernelLaunch
    geometry: Geometry
    symbols: dict[str, int]
    ctas: Array
    # The number of CTAs in each batch of the last execution. Further executions form the same batches.
    batches: list[int] = field(default_factory=list)

    def execute_once(self, code: Compiled, options: Options, variation: Variation = USUAL) -> LaunchState:
        """Execute the launch once. Raises Overtaken if lanes leave lockstep where the translation relies on it, Waits
        if lanes wait for others where the translation saw no wait."""
        launch, geometry = self.launch, self.geometry
        state = LaunchState(code, geometry, options, launch.device, variation, self.batches)
        for name, site in code.uncertain:
            text = f"register {name} is read on a path that has not written it"
            state.reports.add("uninitialised-register", text, site, doubtful=True)
        for hazard in code.hazards:
            state.reports.add("register-hazard", hazard.why, hazard.later, other=Participant(hazard.earlier))
        device = DeviceState(
            launch.memory,
            geometry.threads,
            launch.parameters,
            self.symbols,
            geometry.overlapping and launch.device.capability >= (9, 0),  # dependent launch begins with sm_90
            code.origins,
            code.written,
        )
        try:
            batch = BlackwellBatch if code.blackwell else HopperBatch if code.hopper else AmpereBatch
            with few_collections():
                run(state, device, code.function, self.ctas, batch)
        except Runaway:
            pass  # The findings so far count; one of them is the loop that never ends.
        except (EmulatorError, Overtaken, Waits):
            raise
        except Exception as error:
            raise EmulatorError(f"{launch.kernel}: internal error, {type(error).__name__}: {error}") from error
        if variation in (USUAL, Variation(recording=True)):
            launch.memory_state = device
        return state

    def execute_fully(
        self, compiled: Compiled, before: Snapshot | None, variation: Variation
    ) -> tuple[LaunchState, Compiled]:
        """Execute the launch to its end, and return its state and the translation that allowed this.

        After Overtaken or Waits the launch starts again from ``before``, with a translation that allows for what the
        lanes did. Raises EmulatorError if ``before`` is None.
        """
        launch = self.launch
        conservative = compiled.conservative
        while True:
            try:
                return self.execute_once(compiled, launch.options, variation), compiled
            except Overtaken:
                conservative = True
            except Waits as waits:
                launch.module.waiting.setdefault(launch.kernel, set()).add(waits.line)
            if before is None:
                raise EmulatorError(
                    f"{launch.kernel}: threads leave lockstep, and too much memory is allocated to start over"
                )
            before.restore()
            self.batches.clear()
            compiled = translate(launch.module, launch.kernel, launch.options.counters, conservative)

    def execute_and_judge(self, compiled: Compiled) -> LaunchState:
        """Execute the launch, and execute it again where findings need it. Memory ends up as the first complete
        execution left it.

        - Races: an execution that records instructions names both sides. A correct kernel does not need it.
        - Undefined values count if an execution with other undefined values has another outcome.
        - Racing reads: if races are the only errors, they count if executions in which the reads return other values
          have another outcome.
        - Older values: if strong loads could have returned older values, all of the above is done again with the oldest
          ones. A thread that tests a flag before it goes on has no race in either execution. Races of a thread that
          does not test are found in the second execution.
        - Stale reads: in adverse order, a strong load overlooks a store, although its thread has seen something that
          came after the store. That is a finding if the outcome changes.
        - Polling loops: in adverse order, each loop gets only the newest value. A value that would end the loop may
          have been overwritten before the loop looks at it. Threads that then wait forever are found.
        """
        before = self.launch.before
        if before is None or not before.covers(self.launch.memory):
            before = Snapshot.of(self.launch.memory)
        # A launch that cannot be executed again records instructions from the start.
        state, compiled = self.execute_fully(compiled, before, Variation(recording=before is None))
        state = self._judge(state, compiled, before, USUAL)
        if before is not None and state.older_allowed:
            after = Snapshot.of(self.launch.memory)
            assert after is not None
            before.restore()
            oldest = Variation(oldest=True)
            second, compiled = self.execute_fully(compiled, before, oldest)
            state.reports.adopt(self._judge(second, compiled, before, oldest).reports, UNORDERED)
            for site, overlooked in list(state.overlooked.items())[:MAX_OVERLOOKED]:
                before.restore()
                self.execute_fully(compiled, before, Variation(overlooks=site))
                if not after.matches():
                    self._report_stale(state, site, overlooked)
            after.restore()
        if before is not None and state.polled_older and self.launch.options.adverse:
            after = Snapshot.of(self.launch.memory)
            assert after is not None
            before.restore()
            second, compiled = self.execute_fully(compiled, before, Variation(newest=True))
            state.reports.adopt(second.reports, ENDLESS_WAITS)
            after.restore()
        return state

    def _report_stale(self, state: LaunchState, site: int, overlooked: StaleRead) -> None:
        """Report a load whose result depends on a store that it need not see."""
        cta, thread, other = overlooked
        text = "may return the value from before a store, though its thread has seen what came after that: no fence or"
        text += " release orders the two"
        state.reports.add("stale-read", text, site, cta, (thread,), other=other)

    def _judge(self, state: LaunchState, compiled: Compiled, before: Snapshot | None, usual: Variation) -> LaunchState:
        """Find out which findings of an execution matter, and name both sides of its races; returns the state with the
        judged findings. ``usual``: how ``state`` was executed. Memory ends up as that execution left it."""
        if state.reports.one_sided and before is not None:
            state = self._execute_recording(state, compiled, before, replace(usual, recording=True))
        reports = state.reports
        if before is None:
            reports.forget(reports.unspecified)
        if before is None or not (reports.undefined or reports.races or reports.unspecified):
            return state
        after = Snapshot.of(self.launch.memory)
        assert after is not None
        other_poison = replace(usual, poison=OTHER_POISON)
        if reports.undefined and self._has_same_outcome(before, after, compiled, other_poison):
            reports.acquit(reports.undefined)
        other_unspecified = replace(usual, unspecified=OTHER_POISON)
        if reports.unspecified and self._has_same_outcome(before, after, compiled, other_unspecified):
            reports.forget(reports.unspecified)
        if reports.races and reports.errors() <= reports.races:
            trials = (replace(other_poison, trial=Trial(state.suspects, byte)) for byte in RACING_BYTES)
            if all(self._has_same_outcome(before, after, compiled, trial) for trial in trials):
                reports.acquit(reports.races)
        after.restore()
        return state

    def _execute_recording(
        self, state: LaunchState, compiled: Compiled, before: Snapshot, recording: Variation
    ) -> LaunchState:
        """Execute a launch that has races once more, so that findings name both sides.

        The names should not depend on the option ``lanes``, so the launch is first executed without it. If that does
        not break all rules that ``state`` reports, it is executed with the option.
        """
        planned, options = list(self.batches), self.launch.options
        if options.lanes is not None:
            before.restore()
            self.batches.clear()
            try:
                named = self.execute_once(compiled, replace(options, lanes=None), recording)
                if _broken_rules(state) <= _broken_rules(named):
                    return named
            except (Overtaken, Waits):
                pass
            self.batches[:] = planned
        before.restore()
        return self.execute_once(compiled, options, recording)

    def _has_same_outcome(self, before: Snapshot, after: Snapshot, compiled: Compiled, variation: Variation) -> bool:
        """Does an execution with a variation leave the same memory? Its poison also fills undefined device memory."""
        before.restore()
        if variation.poison != USUAL.poison:
            before.poison(variation.poison)
        # Which values strong loads return depends on what is checked.
        hazards = variation.trial is not None or bool(compiled.observed_spaces)
        try:
            self.execute_once(compiled, replace(self.launch.options, hazards=hazards), variation)
        except (Overtaken, Waits):
            return False  # With other values the lanes have taken other branches.
        return after.matches()


def _broken_rules(state: LaunchState) -> set[str]:
    """The rules that an execution breaks. Without recorded instructions a load that a swap checks counts as a usual
    one, so its rule is counted as that of global races."""
    return {"global-race" if kind == "plain-first-load" else kind for kind in state.reports.kinds}


class Snapshot:
    """A copy of all writable buffers: a launch can be executed again from it, or compared with it."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.saved = [(b, _copy(b.bytes()), None if b.written is None else _copy(b.written)) for b in buffers]

    @classmethod
    def of(cls, memory: Memory) -> Snapshot | None:
        """A copy of the present contents; None if there is too much to keep."""
        writable = [b for b in memory.buffers if b.role != "input"]
        return cls(writable) if sum(b.nbytes for b in writable) <= SNAPSHOT_LIMIT else None

    def restore(self) -> None:
        """Put the contents back."""
        for buffer, content, written in self.saved:
            buffer.bytes()[:] = content
            if written is not None and buffer.written is not None:
                buffer.written[:] = written

    def poison(self, value: int) -> None:
        """Fill the bytes that were unwritten when the copy was made with a value."""
        for buffer, _, written in self.saved:
            if written is not None:
                buffer.bytes()[written == 0] = value

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copy takes."""
        kept = [array for _, content, written in self.saved for array in (content, written) if array is not None]
        return sum(len(array) if array.strides[0] else 1 for array in kept)

    def covers(self, memory: Memory) -> bool:
        """Is this a copy of exactly those buffers that are writable now?"""
        return [b for b, _, _ in self.saved] == [b for b in memory.buffers if b.role != "input"]

    def matches(self) -> bool:
        """Are the same bytes written now, with the same values?"""
        return all(_unchanged(*saved) for saved in self.saved)

    def changed(self) -> list[Buffer]:
        """The buffers in which other bytes are written now, or other values."""
        return [saved[0] for saved in self.saved if not _unchanged(*saved)]


def _copy(content: Array) -> Array:
    """A read-only copy. If all bytes are equal, as in fresh memory, a single byte stands for all (stride 0)."""
    step = 1 << 18  # bytes that are compared at a time, so that other content is soon recognised
    if len(content) and all((content[at : at + step] == content[0]).all() for at in range(0, len(content), step)):
        return np.broadcast_to(content[:1].copy(), content.shape)
    return content.copy()


def _unchanged(buffer: Buffer, content: Array, written: Array | None) -> bool:
    """Are the same bytes of a buffer written as in a copy of it, with the same values?"""
    if written is None or buffer.written is None:
        return np.array_equal(buffer.bytes(), content)
    if not np.array_equal(buffer.written, written):
        return False
    return np.array_equal(buffer.bytes(), content) or not ((buffer.bytes() != content) & (written != 0)).any()


def output_reports(memory: Memory, kernel: str = "") -> list[Report]:
    """Elements of output buffers that were never written, one finding per buffer."""
    out = []
    for buffer in memory.buffers:
        missing = buffer.unwritten() if buffer.role == "output" else np.zeros(0, np.int64)
        if len(missing):
            elements = np.unique(missing // buffer.dtype.itemsize)
            index = tuple(int(i) for i in np.unravel_index(elements[0], buffer.shape))
            last = tuple(int(i) for i in np.unravel_index(elements[-1], buffer.shape))
            out.append(
                Report(
                    "unwritten-output",
                    f"{len(elements)} of {int(np.prod(buffer.shape))} elements of {buffer.name or 'an output'} "
                    f"were never written, first {index}, last {last}",
                    kernel,
                    place=Place(
                        Space.GLOBAL,
                        buffer.address + int(missing[0]),
                        buffer.name or "an output",
                        int(missing[0]),
                        buffer.element_name,
                        index,
                    ),
                    count=len(elements),
                )
            )
    return out
