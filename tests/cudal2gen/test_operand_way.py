"""Proves that an operand of ``cudal2gen.matmul`` passes through few functions, and seldom back up the layers.

A visit is a call of a function of ``cudal2gen`` that holds the operand among its locals when it is entered or left: the
tensor, another tensor on the same storage, or its ``TensorFacts``, by itself, in a container, in an object of the
package or in a closure. A climb is a call of a module that imports the caller's, while either function holds the
operand. ``python -m pytest -rP`` on this file prints each way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import pytest

from cudal2gen import pack
from tests import house
from tests.cudal2gen import racing
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.racing import store
from tests.packages import require

if TYPE_CHECKING:
    from cudal2gen.operators.dispatch import Dispatcher

require("torch")

import torch  # noqa: E402

import cudal2gen  # noqa: E402
from cudal2gen.operators.plan_requests import TensorFacts  # noqa: E402

__all__ = ["store"]  # a fixture
pytestmark = pytest.mark.torch

# The package, and two of its layers.
PACKAGE = "cudal2gen"
OPERATORS, MEASURING = f"{PACKAGE}.operators", f"{PACKAGE}.operators.measuring"
NESTED = 8  # depth to which containers, objects and closures are searched
# The most visits and climbs in a first call, and visits in a planned one.
MOST_VISITS, MOST_CLIMBS, MOST_PLANNED_VISITS = 20, 3, 8
MOST_CALLS = 60  # limit of calls of the operators' functions in a first call, with or without the operand


class Visit(str):
    """A function's module and name, as ``module:name``."""

    @property
    def module(self) -> str:
        """The function's module."""
        return self.partition(":")[0]


@dataclass
class Way:
    """The path of an operand. ``calls``: all called functions of the package. ``visits``: those that hold the operand.
    ``climbs``: pairs of caller and callee. ``measuring``: functions by which others enter the measuring layer."""

    calls: list[Visit] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    climbs: list[tuple[Visit, Visit]] = field(default_factory=list)
    measuring: set[str] = field(default_factory=set)

    def report(self, title: str) -> None:
        """Prints the way."""
        files = {visit.module for visit in self.visits}
        operators = [call for call in self.calls if call.module.startswith(OPERATORS)]
        print(f"{title}: {len(self.visits)} visits in {len(files)} files, {len(self.climbs)} climbs; of the operators")
        print(f"{len(operators)} calls, of the package {len(self.calls)}")
        print(*(f"  {visit}" for visit in self.visits), sep="\n")
        print(*(f"  {caller} climbs to {callee}" for caller, callee in self.climbs), sep="\n")


def name_of(frame: FrameType) -> Visit:
    """The module and the function of a frame."""
    return Visit(f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}")


def in_package(frame: FrameType) -> bool:
    """Whether a frame executes code of the package."""
    return str(frame.f_globals.get("__name__", "")).startswith(f"{PACKAGE}.")


def parts(value: Any) -> Iterator[Any]:
    """The values that a container, an object of the package or a closure holds."""
    if isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
    elif isinstance(value, MethodType):
        yield value.__self__
    elif type(value).__module__.startswith(PACKAGE) and hasattr(value, "__dict__"):
        yield from vars(value).values()


def is_filled(cell: CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# The import graph of a package, made once.
graph_of = functools.cache(house.import_graph)


@functools.cache
def imports_of(checkout: Path, module: str) -> set[str]:
    """All modules that a module imports, directly or indirectly."""
    found: set[str] = set()
    todo = [module]
    while todo:
        new = graph_of(checkout / PACKAGE).get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


class Tracer:
    """Follows an operand through the calls of one thread."""

    def __init__(self, operand: torch.Tensor, checkout: Path) -> None:
        self.storage, self.shape = operand.untyped_storage().data_ptr(), tuple(operand.shape)
        self.way = Way()
        self._reached = functools.partial(imports_of, checkout)
        self._holds_now: dict[FrameType, bool] = {}

    def trace(self, call: Callable[[], object]) -> Way:
        """The way of the operand through a call."""
        sys.setprofile(self._event)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self.way

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        """Follows calls and returns of the package; the profiler of Python calls it."""
        if event not in ("call", "return") or not in_package(frame):
            return
        sys.setprofile(None)  # the inspection of locals must not be recorded
        try:
            if event == "call":
                self._enter(frame)
            elif not self._holds_now.pop(frame, True) and self._is_held_by(frame):
                self.way.visits.append(name_of(frame))
        finally:
            sys.setprofile(self._event)

    def _enter(self, frame: FrameType) -> None:
        """Notes a call, and whether it visits the operand or climbs with it."""
        name, held = name_of(frame), self._is_held_by(frame)
        self._holds_now[frame] = held
        self.way.calls.append(name)
        if held:
            self.way.visits.append(name)
        caller = frame.f_back
        while caller is not None and not in_package(caller):
            caller = caller.f_back
        if caller is None:
            return
        above = name_of(caller)
        if name.module.startswith(MEASURING) and not above.module.startswith(MEASURING):
            self.way.measuring.add(name.partition(":")[2])
        if (held or self._is_held_by(caller)) and above.module in self._reached(name.module) - {name.module}:
            self.way.climbs.append((above, name))

    def _is_held_by(self, frame: FrameType) -> bool:
        """Whether a function holds the operand now."""
        return any(self._holds(value, NESTED, set()) for value in list(frame.f_locals.values()))

    def _holds(self, value: Any, depth: int, seen: set[int]) -> bool:
        """Whether a value is the operand or holds it, at most ``depth`` containers deep. ``seen``: ids of containers
        already searched."""
        if isinstance(value, torch.Tensor):
            return value.is_cpu and value.untyped_storage().data_ptr() == self.storage
        if isinstance(value, TensorFacts):
            return value.shape == self.shape
        if not depth or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._holds(part, depth - 1, seen) for part in list(parts(value)))


@pytest.fixture
def operands(device: EmulatedDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """A (30,64) and B (64,24)."""
    a, b = device.empty(30, 64), device.empty(24, 64)
    return a.fill_(1), b.fill_(1).t()


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids="ab")
def test_a_call_visits_few_functions_and_seldom_climbs(
    place: int, operands: tuple[torch.Tensor, torch.Tensor], kernels: Dispatcher, checkout: Path
) -> None:
    cudal2gen.matmul(operands[0][:16], operands[1])  # opens the pack
    first = Tracer(operands[place], checkout).trace(lambda: cudal2gen.matmul(*operands))
    planned = Tracer(operands[place], checkout).trace(lambda: cudal2gen.matmul(*operands))
    first.report("first call")
    planned.report("planned call")
    assert kernels.stats()["torch"] == {}
    assert first.visits[0] == planned.visits[0] == f"{OPERATORS}.torch_operators:matmul"
    assert len(planned.visits) <= MOST_PLANNED_VISITS
    assert len(first.visits) <= MOST_VISITS
    assert len(first.climbs + planned.climbs) <= MOST_CLIMBS
    assert sum(call.module.startswith(OPERATORS) for call in first.calls) <= MOST_CALLS


@pytest.mark.slow
def test_measuring_is_a_layer_of_its_own(
    operands: tuple[torch.Tensor, torch.Tensor], device: EmulatedDevice, opened_pack: pack.Pack, checkout: Path
) -> None:
    """A first call that times kernels enters the measuring layer only by the functions that are named here. Outside of
    that layer it makes no more visits and climbs than another first call."""
    clock = racing.Clock(device, {}, 1000.0)
    with racing.simulated_process(opened_pack, racing.ClockedDevice(device, clock), "once") as dispatcher:
        way = Tracer(operands[0], checkout).trace(lambda: cudal2gen.matmul(*operands))
        assert sum(dispatcher.stats()["kernel"].values()) == 1
    outside = [visit for visit in way.visits if not visit.module.startswith(MEASURING)]
    within = len(way.visits) - len(outside)
    print(f"racing call: {len(outside)} visits outside of measuring, {within} within, {len(way.climbs)} climbs")
    print(*(f"  {caller} climbs to {callee}" for caller, callee in way.climbs), sep="\n")
    assert within > 100
    assert len(outside) <= MOST_VISITS
    assert len(way.climbs) <= MOST_CLIMBS
    assert way.measuring <= {
        "Measuring.observe", "Measuring.choose", "Measuring.table", "Watch.follow", "Watch.follow.<locals>.watched",
    }  # fmt: skip
