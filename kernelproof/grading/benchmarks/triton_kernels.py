"""Executes a solution's Triton kernels on the emulator, inside a room, and records them in the ledger. Needs triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kernelproof.emulator import Device, EmulatorError, Options, Program
from kernelproof.grading.benchmarks.cuda_face import note_work
from kernelproof.grading.benchmarks.device import RoomDevice
from kernelproof.grading.benchmarks.ledger import address
from kernelproof.triton_emulation.session import TritonSession


class RecordedTriton(TritonSession):
    """A Triton session that is open as long as the room. Its obstacles and constants are added to the room's device."""

    def __init__(self, chip: Device, device: RoomDevice) -> None:
        super().__init__(chip, None, False, Options(counters=True))
        self.room, self.ledger = device, device.ledger

    def launch(
        self, program: Program, source: Any, metadata: Any, grid: tuple[int, int, int], args: Sequence[object]
    ) -> None:
        """Run a compiled kernel and record which storages it may have written."""
        note_work()
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            try:
                super().launch(program, source, metadata, grid, args)
            except EmulatorError as error:
                self.room.obstacles.append(str(error))
                raise
        if not self.launches:
            return  # an empty grid
        self.room.note_comparisons(program.module.text, self.launches[-1].result)
        (kernel,) = program.kernels
        places = [arg for arg, kind in zip(args, source.signature.values(), strict=False) if kind != "constexpr"]
        read_only = program.read_only(kernel, self.options.counters)
        used = {number: address(arg) for number, arg in enumerate(places) if isinstance(arg, torch.Tensor)}
        self.ledger.add_launch(
            source.fn.__name__, used.values(), [at for number, at in used.items() if number not in read_only]
        )
