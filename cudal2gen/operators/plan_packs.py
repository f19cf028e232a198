"""Chooses the pack for a card, and opens a kernel of it when a plan or a race first needs the kernel."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.operators.devices import LaunchDevice
from cudal2gen.operators.plans import ByTorch
from cudal2gen.pack import Pack, installed, search, serving
from cudal2gen.results.choice import Table, TableKernel
from kernelproof.ground.chips import CardFacts
from kernelproof.ground.errors import WrongInput

# Error codes by which a driver refuses a kernel's image: the driver is too old, or the image is for other cards.
UNLOADABLE = {35, 200, 209, 218, 222}
TOO_OLD = 35  # the driver is too old for all kernels that this version of CUDA compiled
UNLOADED = "cannot be loaded"


class ImageKey(NamedTuple):
    """The key of an opened kernel: the device's index, the built kernel's folder, and the launch options."""

    device: int
    directory: Path
    options: str


class Packs:
    """The packs of a process, by default those that are installed, and their opened kernels."""

    def __init__(self, packs: Sequence[Pack] | None) -> None:
        self._packs = None if packs is None else {pack.gpu: pack for pack in packs}
        self._serving: dict[CardFacts, Pack | None] = {}
        self._shadowed: dict[str, list[str]] = {}
        self._opened: dict[ImageKey, OpenKernel] = {}
        self._unloadable: dict[ImageKey, str] = {}  # kernels that the driver refused, which is final
        self._warned: set[str] = set()
        self._opening = threading.Lock()

    def all(self) -> dict[str, Pack]:
        """The packs by their GPU. The first call searches for installed packs."""
        if self._packs is None:
            self._packs, refused, self._shadowed = search(installed())
            for reason in refused:
                self.warn(f"a pack is not used: {reason}")
        return self._packs

    @property
    def shadowed(self) -> list[str]:
        """Usable packs that are not used, with the reason; empty before the first search."""
        return [reason for reasons in self._shadowed.values() for reason in reasons]

    def add(self, pack: Pack) -> None:
        """Uses a pack from now on."""
        self._packs = self.all() | {pack.gpu: pack}
        self._serving.clear()
        self._shadowed.pop(pack.gpu, None)

    def serving(self, device: LaunchDevice, needs_races: bool) -> Pack:
        """The pack for a device: that of its model, or of another model whose kernels run on it.

        ``needs_races``: whether calls use measured kernels only but do not measure, so that a pack of another model is
        useless. Raises ByTorch if there is no pack.
        """
        card = device.card
        if card not in self._serving:
            packs = self.all()
            try:
                pack = self._serving[card] = serving(packs, card)
            except WrongInput as error:
                raise self.not_understood(error) from None
            available = f"packs are there for {', '.join(sorted(packs))}" if packs else "no pack is installed"
            if pack is None:
                self.warn(
                    f"no kernels for {card.text}: {available}; torch computes all products. See 'cudal2gen pack --help'"
                )
            elif pack.card is not None and needs_races:
                self.warn(
                    f"{card.text} has no pack of its own; kernels of {pack.gpu}'s run on it, but nothing was measured "
                    "on it: torch computes all products. CUDAL2GEN_AUTOTUNE=once races the kernels"
                )
        pack = self._serving[card]
        if pack is None:
            raise ByTorch("no pack for this GPU")
        return pack

    def table(self, pack: Pack) -> Table:
        """A pack's table. Raises ByTorch if its file is of another version or was altered since it was opened."""
        try:
            return pack.table
        except WrongInput as error:
            raise self.not_understood(error) from None

    def not_understood(self, error: WrongInput) -> ByTorch:
        """Warns of a pack that this version cannot read, and returns the exception to raise."""
        self.warn(f"{error}; make the pack anew")
        return ByTorch("pack not understood")

    def open(self, pack: Pack, kernel: TableKernel, index: int, device: LaunchDevice) -> OpenKernel:
        """The opened kernel on the device of this index. Its first use opens it. Raises ByTorch if that fails."""
        options = kernel.record.launch_options
        image = ImageKey(index, pack.kernel(kernel.digest), repr(options))
        # Opening has a lock of its own: races open kernels without the lock of plans, and two threads may open the same
        # kernel.
        with self._opening:
            if image in self._opened:
                return self._opened[image]
            if image in self._unloadable:
                raise ByTorch(UNLOADED, self._unloadable[image])
            # Loading a module is not allowed while a graph is captured. ``lasting=False``: later calls try again.
            if device.capturing():
                raise ByTorch("first used in a graph capture", lasting=False)
            try:
                with device.current():
                    library = device.runtime(pack.cuda)
                    self._opened[image] = OpenKernel(pack.library, image.directory, options, library)
            except (LaunchError, GpuError, OSError) as error:
                if isinstance(error, LaunchError) and error.code in UNLOADABLE:
                    self._unloadable[image] = str(error)
                    program = f"{'KERNELPROOF_PTXAS=FILE_OF_CUDA_12 ' if error.code == TOO_OLD else ''}cudal2gen"
                    self.warn(
                        f"the driver of {device.card.text} refuses kernels of {pack.directory} (cudaError "
                        f"{error.code}); torch computes their products: update the driver, or make the pack anew: "
                        f"{program} pack --gpu {pack.gpu}"
                    )
                else:
                    self.warn(f"kernels of {pack.directory} cannot be loaded: {error}")
                raise ByTorch(UNLOADED, str(error)) from None
            return self._opened[image]

    def warn(self, text: str) -> None:
        """Issues each warning once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"cudal2gen: {text}", stacklevel=2)

    def close(self) -> None:
        """Unloads all kernels."""
        for kernel in self._opened.values():
            kernel.close()
        self._opened.clear()
        self._unloadable.clear()
