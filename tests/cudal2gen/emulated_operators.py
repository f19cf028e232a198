"""Fixtures for operators on an emulated device.

``opened_pack`` is for the card ``GPU``. Modules that need other kernels define an ``opened_pack`` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cudal2gen.pack import Pack, open_pack
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice

if TYPE_CHECKING:
    from cudal2gen.operators.dispatch import Dispatcher

GPU = "a100"


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A pack whose only kernel computes products of any size."""
    table = packed.table([packed.RECORDS["predicated"]])
    return open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / GPU))


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated device on which the test must cause no finding."""
    with EmulatedDevice(packed.RECORDS["predicated"]) as own:
        yield own
        assert own.session.errors == []


@pytest.fixture
def operator_device(device: EmulatedDevice) -> OperatorDevice:
    """The emulated device as the operators see it."""
    return OperatorDevice(device, GPU)


@pytest.fixture
def kernels(operator_device: OperatorDevice, opened_pack: Pack) -> Iterator[Dispatcher]:
    """Makes the operators run the kernels of ``opened_pack`` on the emulated device, and yields their dispatcher.

    A call takes the nearest kernel, whether it was measured or not.
    """
    from cudal2gen.operators import emulated

    with emulated(operator_device, [opened_pack], prefer="kernel") as dispatcher:
        yield dispatcher
