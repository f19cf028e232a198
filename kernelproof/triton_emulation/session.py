"""Makes Triton compile for an emulated device and launch on it while a session is open. Needs triton."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import triton
from triton import knobs
from triton.backends import backends
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from kernelproof import emulator
from kernelproof.emulator import (
    Device,
    EmulatorError,
    LaunchResult,
    Memory,
    Options,
    Program,
    Report,
    SessionPolicy,
    by_cause,
)
from kernelproof.emulator.hopper.mbarrier import UNFENCED
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.emulator.memory.tensors import TorchTensor, host_bytes, is_tensor
from kernelproof.ground.errors import WrongInput
from kernelproof.triton_emulation.backend import EmulatedDriver, backend, in_file
from kernelproof.triton_emulation.copies import is_benign_copy_race
from kernelproof.triton_emulation.findings import Findings
from kernelproof.triton_emulation.parameters import Parameters, scratch

OUR_BACKEND = "nvidia"  # the entry in Triton's list of backends that the emulated one replaces


@dataclass
class TritonLaunch:
    """A launch of a Triton kernel: its name in Python, its PTX, warps per CTA, CTAs per program instance, bytes of
    shared memory, and the emulator's result."""

    kernel: str
    ptx: str
    num_warps: int
    num_ctas: int
    shared_bytes: int
    result: LaunchResult

    @property
    def reports(self) -> list[Report]:
        """The findings in the user's code. Findings in code that Triton's compiler adds are left out."""
        return [report for report in self.result.reports if not self.is_in_compiler_code(report)]

    @property
    def compiler_reports(self) -> list[Report]:
        """The findings in code that Triton's compiler adds, which no change of the kernel can remove."""
        return [report for report in self.result.reports if self.is_in_compiler_code(report)]

    def is_in_compiler_code(self, report: Report) -> bool:
        """Whether a finding is in code that Triton's compiler adds: a fence that Triton omits, or loads of the same
        element by several threads."""
        return (report.kind == "mbarrier" and report.message.endswith(UNFENCED)) or is_benign_copy_race(
            report, self.ptx
        )


@dataclass
class TritonSession:
    """The emulated device while Triton kernels run. Use ``triton_emulation.emulate``.

    ``device``, ``config``, ``check``, ``options``: as in ``emulate``. ``launches``: all launches in order. ``notes``:
    the configuration of each autotuned kernel that ran. ``reports``: the findings. ``compiler_reports``: findings that
    no change of a kernel can remove. ``roles``: "input" or "output" by the address of a tensor's storage.
    """

    device: Device
    config: int | Any = None
    check: bool = True
    options: Options = field(default_factory=Options)
    launches: list[TritonLaunch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    roles: dict[int, str] = field(default_factory=dict)
    _emulated: emulator.Session = field(init=False)
    _tensors: list[object] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._emulated = emulator.Session(SessionPolicy(self.device, self.options))

    @property
    def reports(self) -> list[Report]:
        """The findings of all launches, one per cause, errors first."""
        return by_cause(report for launch in self.launches for report in launch.reports)

    @property
    def compiler_reports(self) -> list[Report]:
        """The findings of all launches in code that Triton's compiler adds.

        Before copies by TMA it omits the fence after the initialisation of their mbarrier. If a tensor has fewer
        elements than there are threads, several threads load an element and one of them stores it in place.
        """
        return by_cause(report for launch in self.launches for report in launch.compiler_reports)

    # --- roles of tensors ---

    def mark_input(self, *tensors: TorchTensor) -> None:
        """From now on a kernel that writes to these tensors is reported."""
        self._mark("input", tensors)

    def mark_output(self, *tensors: TorchTensor) -> None:
        """The next launch that gets these tensors must write every element, and must not read one before it is written.
        They contain NaN before the launch."""
        self._mark("output", tensors)

    def _mark(self, role: str, tensors: Sequence[TorchTensor]) -> None:
        """Give tensors a role, and keep them alive, so that no other tensor gets their addresses."""
        for tensor in tensors:
            host_bytes(tensor)  # raises EmulatorError for tensors that cannot be arguments
            self.roles[tensor.untyped_storage().data_ptr()] = role
            self._tensors.append(tensor)

    # --- what a session replaces in Triton ---

    def __enter__(self) -> Self:
        if knobs.runtime.interpret:
            raise WrongInput("TRITON_INTERPRET is set, so that kernels are not compiled: unset it before the start")
        emulated = EmulatedDriver(self.device, self.launch)
        old_driver, old_backend, old_run = driver._active, backends.get(OUR_BACKEND), Autotuner.run
        self._undo = [
            lambda: driver.set_active(old_driver),
            lambda: backends.update({OUR_BACKEND: old_backend}),
            lambda: setattr(Autotuner, "run", old_run),
        ]
        driver.set_active(emulated)
        backends[OUR_BACKEND] = backend()
        session = self

        def run(tuner: Autotuner, *args: object, **values: object) -> object:
            return session.run_configured(tuner, args, values)

        Autotuner.run = run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()
        errors = [report for report in self.reports if report.is_error]
        if kind is None and self.check and errors:
            raise Findings(errors)

    # --- launches ---

    def run_configured(self, tuner: Any, args: Sequence[object], values: dict[str, Any]) -> object:
        """Run an autotuned kernel with one configuration, because emulated times do not show which is fast on a GPU."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        config, words = self._configuration(tuner, values)
        self.notes.append(f"{tuner.base_fn.__name__}: {words}: {config}")
        tuner.best_config = config
        everything = {**tuner.nargs, **values, **config.all_kwargs()}
        tuner.pre_hook(everything, reset_only=True)
        if config.pre_hook is not None:
            config.pre_hook(everything)
        try:
            return tuner.fn.run(*args, **values, **config.all_kwargs())
        finally:
            tuner.nargs = None

    def _configuration(self, tuner: Any, values: dict[str, Any]) -> tuple[Any, str]:
        """The configuration to run, and a description of it in words."""
        if isinstance(self.config, triton.Config):
            return self.config, "the given configuration"
        if self.config is None:
            return tuner.prune_configs(values)[0], f"the first of {len(tuner.configs)} configurations"
        if not -len(tuner.configs) <= self.config < len(tuner.configs):
            raise WrongInput(f"config={self.config}: {tuner.base_fn.__name__} has {len(tuner.configs)} configurations")
        return tuner.configs[self.config], f"configuration {self.config} of {len(tuner.configs)}"

    def launch(
        self, program: Program, source: Any, metadata: Any, grid: tuple[int, int, int], args: Sequence[object]
    ) -> None:
        """Run a compiled kernel. ``grid`` counts program instances. Raises EmulatorError, with the kernel's name."""
        if min(grid) < 1:
            return  # an empty grid launches nothing, as in Triton
        name, memory = source.fn.__name__, Memory()
        program = in_file(program, str(Path(source.fn.fn.__code__.co_filename).absolute()))
        tensors = Tensors(memory, self.roles)
        try:
            result = self._execute(program, source, metadata, grid, args, tensors)
        except EmulatorError as error:
            raise EmulatorError(f"{name}: {error}") from error
        tensors.store()
        self._end_output_roles(args)
        if result.output:
            sys.stdout.write(result.output)
        text = program.module.text
        self.launches.append(TritonLaunch(name, text, metadata.num_warps, metadata.num_ctas, metadata.shared, result))

    def _execute(
        self, program: Program, source: Any, metadata: Any, grid: tuple[int, int, int], args: Sequence[object],
        tensors: Tensors,
    ) -> LaunchResult:  # fmt: skip
        """Run a program on the emulated device, with one cluster of ``num_ctas`` CTAs per program instance."""
        (kernel,) = program.kernels
        programs, ctas = grid[0] * grid[1] * grid[2], metadata.num_ctas
        read_only = program.read_only(kernel, self.options.counters)
        values = Parameters(source, metadata, tensors).arguments(args, read_only)
        values += scratch(metadata, tensors.memory, programs * ctas)
        return self._emulated.run(
            program,
            kernel,
            grid=(grid[0] * ctas, grid[1], grid[2]),
            block=32 * metadata.num_warps,
            args=values[: len(program.module.kernels[kernel].params)],
            memory=tensors.memory,
            shared_bytes=metadata.shared,
            cluster=ctas,
            overlapping=bool(metadata.launch_pdl),
            cooperative=bool(metadata.launch_cooperative_grid),
        )

    def _end_output_roles(self, args: Sequence[object]) -> None:
        """Ends the role "output" of the tensors among a launch's arguments, since the launch has written them."""
        for arg in args:
            if is_tensor(arg):
                start = arg.untyped_storage().data_ptr()
                if self.roles.get(start) == "output":
                    del self.roles[start]
