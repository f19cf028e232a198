"""Fixtures of operators on an emulated device: a test's module has a pack, ``opened``, for the card of ``GPU``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cudal2gen.pack import Pack
from tests import packed
from tests.emulated import EmulatedDevice, OperatorDevice

if TYPE_CHECKING:
    from cudal2gen.operators.dispatch import Dispatcher

GPU = "a100"


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(packed.RECORDS["predicated"]) as own:
        yield own
        assert own.session.errors == []


@pytest.fixture
def operator_device(device: EmulatedDevice) -> OperatorDevice:
    return OperatorDevice(device, GPU)


@pytest.fixture
def kernels(operator_device: OperatorDevice, opened: Pack) -> Iterator[Dispatcher]:
    """Calls take the nearest kernel."""
    from cudal2gen.operators import emulated

    with emulated(operator_device, [opened], prefer="kernel") as dispatcher:
        yield dispatcher
