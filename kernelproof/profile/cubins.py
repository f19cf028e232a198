"""Makes the profile of a kernel with MMAs from its cubin: its main loop, and, given a launch, its occupancy and time.

The model assumes that data arrives as fast as the L2 delivers it to one SM. It also assumes that data of TMA has
arrived when a warp waits for it, because a cubin does not say how many stages its ring has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kernelproof import sass
from kernelproof.ground.chips import GPUS, SUB_CORES, Chip, runs
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.integers import ceil_div
from kernelproof.ground.schema import Schema
from kernelproof.profile import advice, figures
from kernelproof.profile.composition import compose
from kernelproof.profile.loop import Listing, LoopWindow, steady_window
from kernelproof.profile.occupancy import occupancy
from kernelproof.profile.rates import LAUNCH_US, l2_share
from kernelproof.sass.pipes import MMA
from kernelproof.sass.simulation import Machine, Stream, Timeline, simulate
from kernelproof.sass.ways import Ways

ITERATIONS = 12  # simulated iterations of the main loop
WARPGROUP_THREADS = 128
EXAMPLE_LAUNCH = {"ctas": 1024, "threads": 128, "smem_bytes": 65536, "iterations": 128}


class LaunchFacts(Schema):
    """The launch of a kernel: the fields of a JSON file that ``--launch`` names."""

    ctas: Annotated[int, Field(ge=1, le=2**31, description="CTAs of the grid")]
    threads: Annotated[int, Field(ge=32, le=1024, multiple_of=32, description="Threads of a CTA")]
    smem_bytes: Annotated[
        int, Field(ge=0, le=1 << 20, description="Bytes of shared memory of a CTA, static and dynamic together")
    ]
    iterations: Annotated[int, Field(ge=1, le=2**31, description="Iterations of the main loop that each CTA makes")]

    @classmethod
    def load(cls, path: Path) -> LaunchFacts:
        """Reads a launch from a JSON file. Raises WrongInput if the file is no object with these fields."""
        hint = f"a launch is an object such as {json.dumps(EXAMPLE_LAUNCH)}"
        return figures.validated(cls, path, figures.read_object(path, hint), hint)


def of_cubin(
    cubin: Path, gpu: str | None = None, kernel: str | None = None, launch: LaunchFacts | None = None
) -> figures.Profile:
    """Returns the profile of one function: the longest one with MMAs among those whose name contains ``kernel``.

    ``gpu``: the GPU whose rates the model uses, by default the first of ``GPUS`` that runs the cubin. ``launch``: adds
    occupancy and time. Raises WrongInput if the cubin has no such function, or if the GPU does not run it or has no
    room for its CTAs. Also raises DisassemblyError and ToolchainError.
    """
    functions = [
        function
        for function in sass.disassemble(cubin)
        if (kernel is None or kernel in function.name) and any(code.name in MMA for code in function.instructions)
    ]
    if not functions:
        restriction = f" whose name has {kernel}" if kernel else ""
        raise WrongInput(f"{cubin}: has no function{restriction} with an MMA; name a kernel that multiplies matrices")
    function = max(functions, key=lambda function: len(function.instructions))
    suitable_gpus = [name for name, chip in GPUS.items() if runs(function.sm, chip.capability.number)]
    gpu = gpu or (suitable_gpus[0] if suitable_gpus else None)
    if gpu is None:
        raise WrongInput(f"{cubin}: is for {function.sm}, which no GPU with known rates runs: {', '.join(GPUS)}")
    if gpu not in suitable_gpus:
        others = ", ".join(suitable_gpus) or "no GPU"
        raise WrongInput(
            f"{cubin}: is for {function.sm}, which {gpu} does not run; --gpu names one that does: {others}"
        )
    profile = _CubinKernel(function, gpu, launch).profile
    if (occupancy := profile.occupancy) and not occupancy.ctas:
        limits = " and ".join(occupancy.limits)
        raise WrongInput(
            f"--launch: no CTA of {cubin} fits an SM of {gpu} by {limits}; mend the launch or name a --gpu"
        )
    return profile


@dataclass(frozen=True)
class _CubinKernel:
    """A kernel, the GPU whose rates the model uses, and its launch if that is known.

    ``forced_resident``: how many CTAs an SM holds; None for as many as it has room for.
    """

    function: sass.Function
    gpu: str
    launch: LaunchFacts | None
    forced_resident: int | None = None

    @property
    def chip(self) -> Chip:
        """The GPU for which the kernel is profiled."""
        return GPUS[self.gpu]

    @property
    def threads(self) -> int:
        """Threads per CTA: those of the launch, else those that the cubin demands, else a warpgroup."""
        return self.launch.threads if self.launch else self.function.resources.threads or WARPGROUP_THREADS

    @cached_property
    def ways(self) -> Ways:
        """The ways through its machine code."""
        return Ways(self.function)

    @cached_property
    def occupancy(self) -> figures.Occupancy | None:
        if self.launch is None:
            return None
        smem = self.launch.smem_bytes
        return occupancy(self.chip.capability, self.launch.threads, self.function.registers, smem)

    @property
    def resident(self) -> int:
        """How many CTAs are simulated together on one SM: as many as it holds, but no more than its share of the
        launch; one if no launch is known."""
        if self.launch is None or self.occupancy is None:
            return 1
        held = self.forced_resident or self.occupancy.ctas
        return max(1, min(held, ceil_div(self.launch.ctas, self.chip.sms)))

    def streams(self, iterations: int) -> list[Stream]:
        """The warps of one scheduler: every fourth one of the SM, without those of a warpgroup that only copies by TMA.

        ``iterations``: how many iterations of the main loop each warp makes.
        """
        way = self.ways.consumer
        warps = max(1, self.threads // 32 - (WARPGROUP_THREADS // 32 if self.ways.producer else 0))
        parts = ((way.before, 1), (way.iteration, iterations), (way.after, 1))
        return [Stream(parts, cta=warp // warps) for warp in range(0, self.resident * warps, SUB_CORES)]

    @cached_property
    def machine(self) -> Machine:
        """The hardware on which the warps are simulated.

        All sub-cores are assumed to run equal warps. With fewer warps than sub-cores, only as many sub-cores are busy.
        """
        rates = self.chip.rates
        return Machine(
            self.function.sm,
            self.chip,
            sub_cores=min(SUB_CORES, self.resident * self.threads // 32),
            l2_bytes=l2_share(rates, self.chip.sms, self.launch.ctas if self.launch else self.chip.sms),
            l2_cycles=rates.l2_clocks,
        )

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.streams(ITERATIONS), self.machine, detail=True)

    @cached_property
    def window(self) -> LoopWindow:
        return steady_window(self.timeline.issues, self.ways.consumer.iteration)

    @cached_property
    def time(self) -> figures.Time | None:
        """The time of the launch. Resident CTAs run together, as one generation, and generations follow each other.

        Transfers from device memory are not counted, because a cubin does not say which bytes are loaded for the first
        time.
        """
        if self.launch is None or self.occupancy is None or not self.occupancy.ctas:
            return None
        mhz, sms = self.chip.rates.mhz, self.chip.sms
        generations = ceil_div(self.launch.ctas, sms) / self.resident
        iteration = self.window.cycles / self.window.iterations
        # The cycles of a generation in its main loop, and outside of it: the simulated cycles minus those of its
        # ITERATIONS iterations.
        outside_cycles = 0.0
        main_cycles = self.timeline.cycles
        if self.ways.consumer.iteration:
            outside_cycles = max(0.0, self.timeline.cycles - ITERATIONS * iteration)
            main_cycles = self.launch.iterations * iteration
        parts = {
            "launch": LAUNCH_US,
            "main loop": generations * main_cycles / mhz,
            "prologue and epilogue": generations * outside_cycles / mhz,
        }
        tensor_us = self.loop.tensor_cycles * self.launch.iterations * generations / mhz
        bounds = {"tensor cores": tensor_us, "machine code": parts["main loop"]}
        ctas_of_busiest_sm = ceil_div(self.launch.ctas, sms)
        return figures.Time(
            us=sum(parts.values()),
            parts=parts,
            bounds=bounds,
            bound=self.loop.bound,
            ctas=self.launch.ctas,
            waves=self.launch.ctas / (self.occupancy.ctas * sms),
            tail_share=1 - self.launch.ctas / (ctas_of_busiest_sm * sms),
            floor_us=LAUNCH_US + tensor_us,
        )

    @cached_property
    def listing(self) -> Listing:
        return Listing(self.window, self.function, self.chip)

    @cached_property
    def loop(self) -> figures.MainLoop:
        return self.listing.loop("iteration", 1, bool(self.ways.consumer.iteration))

    def _advice(self) -> Iterator[figures.Advice]:
        """Candidates for advice: one more CTA on each SM, and the removal of kinds of instructions."""
        if self.time and self.occupancy and (more := advice.more_residents(self.occupancy, 0)):
            after = replace(self, forced_resident=self.occupancy.ctas + 1).time
            if after and self.resident == self.occupancy.ctas:
                yield figures.Advice(
                    change=more, figure="time", form="machine code", before=self.time.us, after=after.us
                )
        if self.ways.consumer.iteration:
            yield from advice.removals(self.streams, self.machine, ITERATIONS)

    @property
    def profile(self) -> figures.Profile:
        return compose(
            self.function, self.listing, self.loop, self.occupancy, self.time, self._advice(),
            arch=self.function.sm,
            gpu=self.gpu,
        )  # fmt: skip
