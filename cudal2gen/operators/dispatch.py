"""Dispatch: calls of the same shapes and strides get one plan, a kernel of a pack or torch's own product, and a reason.

A plan holds the decision; every call is counted under it. A kernel is opened when the first plan needs it; nothing is
compiled. Calls go down only: dispatch asks the pack's table (``choice``), opens the kernel (``launcher``), binds it
(``binding``); what the launcher refuses comes back up as an exception.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cudal2gen.kernel import Problem
from cudal2gen.kernel.launch import Matrix
from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.operators import buckets
from cudal2gen.operators.autotuning import Autotuning, Race
from cudal2gen.operators.binding import Cuda, Device, bind, native_by_torch, native_call
from cudal2gen.operators.contests import Arguments
from cudal2gen.operators.native import NATIVE, NativeCall
from cudal2gen.operators.products import Request, Run
from cudal2gen.operators.races import Mode, mode_of
from cudal2gen.operators.watching import deterministic, foreign
from cudal2gen.pack import Pack, installed, open_pack, search, serving
from cudal2gen.results.choice import Choice, Kernel, Prefer, Table
from kernelproof.ground.chips import CardFacts
from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    import torch

Key = tuple[Any, ...]

MAX_PLANS = 1 << 14  # bounds memory for models with ever new shapes
# Codes by which the launcher refuses operands; others are faults of the device or of the installation.
REFUSALS = {1, 716}
# Codes by which a driver refuses a kernel's image: it is too old for it, or the image is for other cards.
UNLOADABLE = {35, 200, 209, 218, 222}
PREFER = "CUDAL2GEN_PREFER"
UNLOADED = "cannot be loaded"
MEANWHILE = "another thread measures products on this device; torch computes until it has ended"
BIAS_US = 3.0  # cost of an extra launch, which the vendor's product does not need


class Plan:
    """The plan for tensors of one kind, and the count of its calls. ``by_torch`` replaces a kernel that the launcher
    refuses. ``native``: the call in a form that C++ can make."""

    def __init__(self, name: str, reason: str, run: Run, on_kernel: bool, by_torch: Run) -> None:
        self.name, self.reason, self.run, self.on_kernel, self.by_torch = name, reason, run, on_kernel, by_torch
        self.key: Key = ()
        self.native: NativeCall | None = None
        self.calls, self.gain_us = 0, 0.0  # a call's, against torch, as it was measured
        self.by_bucket = False  # whether the measurement is of other rows, see buckets
        self.spans = (0, 0, 0)  # bytes of a, b and out, where out is given

    def counted(self, drop: bool = False) -> int:
        """Calls of Python and of C++; ``drop``: C++ makes no more of them."""
        if self.native is not None:
            calls = self.native.calls(drop)
            if not drop:
                return self.calls + calls
            self.calls += calls
        return self.calls


class ByTorch(Exception):
    """No kernel answers a request. ``short``: the reason, equal for all requests alike; ``lasting``: whether later
    requests get the same answer."""

    def __init__(self, short: str, reason: str = "", lasting: bool = True) -> None:
        super().__init__(reason or short)
        self.short, self.lasting = short, lasting


class Dispatcher:
    """Packs, opened kernels and plans of a process. ``device``: takes CPU tensors for its own, in tests."""

    def __init__(
        self,
        packs: Sequence[Pack] | None = None,
        device: Device | None = None,
        prefer: Prefer | None = None,
        mode: Mode | None = None,
    ) -> None:
        self.device = device
        self._tuning = Autotuning(mode_of(mode), self._warn)
        self._gained_us: Counter[str] = Counter()
        self._by_bucket: Counter[str] = Counter()
        self.plans: dict[Key, Plan] = {}
        self.prefer: Prefer = prefer or _preference()
        self._packs = None if packs is None else {pack.gpu: pack for pack in packs}
        self._serving: dict[CardFacts, Pack | None] = {}
        self._shadowed: dict[str, list[str]] = {}
        self._cuda: dict[int, Cuda] = {}
        self._opened: dict[tuple[int, Path, str], OpenKernel] = {}
        self._unloadable: dict[tuple[int, Path, str], str] = {}  # kernels that the driver refused, which is final
        self._retired: Counter[tuple[bool, str]] = Counter()
        self._warned: set[str] = set()
        self._lock, self._opening = threading.RLock(), threading.Lock()

    @property
    def mode(self) -> Mode:
        """Of autotuning."""
        return self._tuning.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._tuning.mode = mode

    @cached_property
    def regardless(self) -> Dispatcher:
        """A dispatcher with the same packs and device that takes kernels whether they were measured or not, for callers
        that measure by themselves."""
        return Dispatcher(list(self._search().values()), self.device, "kernel", "off")

    def plan(self, key: Key, request: Request, arguments: Arguments | None = None) -> Plan:
        """The plan for a key, made where there is none. ``arguments``: the call's, which autotuning may race on."""
        with self._lock:
            if key in self.plans:
                return self.plans[key]
            race = self._race(request) if arguments is not None and self.mode != "off" else None
            due = race is not None and race.due()
        barred = due and (deterministic() or self._device(request.device).capturing())
        if race is not None and arguments is not None and due and self.mode == "once" and not barred:
            if not race.run(arguments):  # outside of the lock, so that other calls go on
                return self._passing(
                    Plan("another thread measures", MEANWHILE, request.by_torch, False, request.by_torch)
                )
            due = race.due()  # still, where the race told nothing of other calls
        with self._lock:
            if key in self.plans:
                return self.plans[key]
            plan, lasting = self._decided(request)
            plan.key = key
            if not lasting:
                return self._passing(plan)
            if race is not None and (due or race.due(hot=True)):
                plan.run = self._racing(plan, race, hot=not due)
            if len(self.plans) >= MAX_PLANS:
                self.forget()
            self.plans[key] = plan
            return plan

    def _decided(self, request: Request) -> tuple[Plan, bool]:
        """What a request takes, and whether it does so later as well."""
        try:
            return self._fused_or_plain(request) if request.fusion else self._on_kernel(request), True
        except ByTorch as why:
            plan = Plan(why.short, str(why), request.by_torch, False, request.by_torch)
            plan.native = native_by_torch(request)
            return plan, why.lasting

    def _passing(self, plan: Plan) -> Plan:
        """A plan of one call, counted here."""
        self.count(plan.name, plan.on_kernel)
        return plan

    def count(self, name: str, on_kernel: bool = False) -> None:
        """Counts a call without a plan, of a kernel or by the reason why it is torch's."""
        with self._lock:
            self._retired[(on_kernel, name)] += 1

    def aside(self, run: Run, operands: Sequence[Any]) -> Plan | None:
        """A plan of one call for operands that only torch's functions know, ``run``; None for others."""
        reason = foreign(operands)
        return self._passing(Plan(reason, f"{reason}: torch's own product", run, False, run)) if reason else None

    def keep(self, plan: Plan, a: torch.Tensor, b: torch.Tensor, kind: int) -> None:
        """Lets C++ make the later calls of a plan. ``kind``: all of its key that does not lie in the tensors."""
        with self._lock:
            native, current = plan.native, self is Current.dispatcher and self.plans.get(plan.key) is plan
            # A plan that was dropped meanwhile, or that autotuning wraps, stays Python's.
            if native is not None and current and plan.run is native.run:
                native.keep(a, b, kind)

    def withdraw(self) -> None:
        """Returns all calls to Python until they are planned again, because another dispatcher is in use."""
        with self._lock:
            for plan in self.plans.values():
                plan.counted(drop=True)

    def call(self, plan: Plan, *operands: Any) -> Any:
        """Runs a plan, or torch's product where the launcher refuses. Raises as ``replace``.

        Plain products and linear layers write this out: one Python call more would add to the time of each.
        """
        plan.calls += 1
        run: Any = plan.run
        try:
            return run(*operands)
        except LaunchError as error:
            run = self.replace(plan, error).run
            return run(*operands)

    def replace(self, plan: Plan, error: LaunchError) -> Plan:
        """torch's product in the place of a plan whose call the launcher refused, now and later.

        Raises the error again where the operands are not its reason.
        """
        if error.code not in REFUSALS:
            raise error
        with self._lock:
            plan.calls -= 1
            by_torch = self.plans.get(plan.key, plan)
            if by_torch is plan:  # otherwise another thread has replaced it
                self._retire(plan)
                by_torch = Plan("the launcher refuses", str(error), plan.by_torch, False, plan.by_torch)
                by_torch.key, by_torch.spans = plan.key, plan.spans
                self.plans[plan.key] = by_torch
            by_torch.calls += 1
            return by_torch

    def _fused_or_plain(self, request: Request) -> Plan:
        """The plan of a fused kernel, else of a plain one behind which torch does the rest. Raises ByTorch."""
        try:
            return self._on_kernel(request.fused)
        except ByTorch as fused:
            try:
                plan = self._on_kernel(request)
            except ByTorch as plain:
                raise ByTorch(fused.short, str(fused), fused.lasting and plain.lasting) from None
            plan.reason += f"; {request.fusion} by torch: {fused}"
            if not fused.lasting:
                raise
            return plan

    def _on_kernel(self, request: Request) -> Plan:
        """The plan of a kernel. Raises ByTorch where none answers."""
        if self.device is None and request.device == -1:
            raise ByTorch("on the CPU")
        if request.problem is None:
            raise ByTorch(request.obstacle)
        device = self._device(request.device)
        pack = self._pack(device)
        native = device.place is not None and NATIVE.serves(device.place, pack.torch_library)
        problem = request.problem.model_copy(update={"gpu": pack.gpu})
        choice = self._choose(pack, problem, request)
        if choice.kernel is None or choice.use is None:
            raise ByTorch(choice.short, choice.reason)
        alone = request.problem.suffix.strip()
        if alone and any(choice.use.copied):
            raise ByTorch(
                f"{alone}: a kernel would copy operands", f"{choice.reason}: {choice.use.matrices} would be copied"
            )
        kernel, n = pack.table.kernels[choice.kernel], request.sizes.n
        if request.problem.fusion.aux and not kernel.record.launch.takes_aux(n, Matrix(n)):
            raise ByTorch(f"rows of aux of {n} elements, which no kernel stores")
        opened = self._open(pack, kernel, request.device, device)
        run = bind(device, opened, choice.use, request, request.problem.layout)
        plan = Plan(kernel.record.name, choice.reason, run, True, request.by_torch)
        plan.native = native_call(device, opened, choice.use, request, run) if native else None
        row = self._table(pack, request.device).measured(problem, request.batches.products)
        rows, plan.by_bucket = choice.rows or ((row,) if row is not None else ()), bool(choice.rows)
        plan.gain_us = min((row.vendor_us - row.us for row in rows), default=0.0)
        return plan

    def _table(self, pack: Pack, index: int) -> Table:
        """The pack's table with what calls measured by themselves."""
        return self._tuning.table(self._own_table(pack), index, self._device(index))

    def _own_table(self, pack: Pack) -> Table:
        """The pack's table. Raises ByTorch where its file is of another version, or was altered since it was opened."""
        try:
            return pack.table
        except WrongInput as error:
            raise self._not_understood(error) from None

    def _not_understood(self, error: WrongInput) -> ByTorch:
        self._warn(f"{error}; make the pack anew")
        return ByTorch("pack not understood")

    def _choose(self, pack: Pack, problem: Problem, request: Request) -> Choice:
        # A bias or an activation is one more pass over D, which the vendor's product has built in.
        moved, products = 2 * problem.output.bytes * problem.m * problem.n, request.batches.products
        table = self._table(pack, request.device)
        try:
            extra_us = BIAS_US + moved / (table.bandwidth / 2) if request.finish is not None else 0.0
            of_bucket = None
            if self.mode != "off" and self.prefer == "measured":
                of_bucket = buckets.choose(table, problem, request.operands, extra_us, products)
            return of_bucket or table.choose(problem, request.operands, self.prefer, extra_us, products)
        except WrongInput as error:  # whole, and yet with a record of another version
            raise self._not_understood(error) from None

    def _race(self, request: Request) -> Race | None:
        """What may be measured of a request; None where nothing is."""
        if request.problem is None or self.prefer != "measured" or (self.device is None and request.device < 0):
            return None
        device = self._device(request.device)
        try:
            pack = self._pack(device)
            table = self._own_table(pack)
        except ByTorch:
            return None

        def opened(kernel: Kernel) -> OpenKernel:
            try:
                return self._open(pack, kernel, request.device, device)
            except ByTorch as why:
                raise GpuError(str(why)) from None

        return Race(self._tuning, device, table, request, opened)

    def _racing(self, plan: Plan, race: Race, hot: bool) -> Run:
        """The plan's function, which after some calls advances a race; at its end the next call makes its plan anew.
        While a plan has it, the plan must be called by it. ``hot``: whether many calls of the shape come first."""
        run, left = plan.run, buckets.HOT_CALLS if hot else race.pause()

        def racing(*operands: Any) -> Any:
            nonlocal left
            if left > 0:
                left -= 1
            elif plan.run is racing and race.advance(plan, Arguments(*operands), hot=hot):
                if race.due(hot=hot):
                    left = race.pause(hot=hot)
                    return run(*operands)
                plan.run = run
                with self._lock:
                    if self.plans.get(plan.key) is plan:
                        self._retire(self.plans.pop(plan.key))
            return run(*operands)

        return racing

    def _device(self, index: int) -> Device:
        if self.device is not None:
            return self.device
        if index not in self._cuda:
            self._cuda[index] = Cuda(index)
        return self._cuda[index]

    def _pack(self, device: Device) -> Pack:
        """The pack for a device, of its own model or of one whose kernels run there. Raises ByTorch without one."""
        card = device.card
        if card not in self._serving:
            packs = self._search()
            try:
                pack = self._serving[card] = serving(packs, card)
            except WrongInput as error:
                raise self._not_understood(error) from None
            available = f"packs are there for {', '.join(sorted(packs))}" if packs else "no pack is installed"
            if pack is None:
                self._warn(
                    f"no kernels for {card.text}: {available}; torch computes all products. See 'cudal2gen pack --help'"
                )
            elif pack.card is not None and self.mode == "off" and self.prefer == "measured":
                self._warn(
                    f"{card.text} has no pack of its own; kernels of {pack.gpu}'s run on it, but nothing was measured "
                    "on it: torch computes all products. CUDAL2GEN_AUTOTUNE=once races the kernels"
                )
        pack = self._serving[card]
        if pack is None:
            raise ByTorch("no pack for this GPU")
        return pack

    def _search(self) -> dict[str, Pack]:
        if self._packs is None:
            self._packs, refused, self._shadowed = search(installed())
            for reason in refused:
                self._warn(f"a pack is not used: {reason}")
        return self._packs

    @property
    def shadowed(self) -> list[str]:
        """Usable packs that are not used, with the reason; empty before the first search."""
        return [reason for reasons in self._shadowed.values() for reason in reasons]

    def add(self, pack: Pack) -> None:
        """Uses a pack from now on."""
        with self._lock:
            self._packs = self._search() | {pack.gpu: pack}
            self._serving.clear()
            self._shadowed.pop(pack.gpu, None)
            vars(self).pop("regardless", None)
            self.forget()

    def _open(self, pack: Pack, kernel: Kernel, index: int, device: Device) -> OpenKernel:
        """The kernel, opened at its first use. Raises ByTorch where that is impossible."""
        options = kernel.record.launch_options
        name = (index, pack.kernel(kernel.digest), repr(options))
        with self._opening:  # a lock of its own, because races open kernels as well
            if name in self._opened:
                return self._opened[name]
            if name in self._unloadable:
                raise ByTorch(UNLOADED, self._unloadable[name])
            if device.capturing():
                raise ByTorch("first used in a graph capture", lasting=False)
            try:
                with device.current():
                    self._opened[name] = OpenKernel(pack.library, name[1], options, device.runtime_library)
            except (LaunchError, GpuError, OSError) as error:
                if isinstance(error, LaunchError) and error.code in UNLOADABLE:
                    self._unloadable[name] = str(error)
                    self._warn(
                        f"the driver of {device.card.text} refuses kernels of {pack.directory} (cudaError "
                        f"{error.code}); torch computes their products: update the driver, or make the pack anew: "
                        f"cudal2gen pack --gpu {pack.gpu}"
                    )
                else:
                    self._warn(f"kernels of {pack.directory} cannot be loaded: {error}")
                raise ByTorch(UNLOADED, str(error)) from None
            return self._opened[name]

    def _warn(self, text: str) -> None:
        """Warns, once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"cudal2gen: {text}", stacklevel=2)

    def forget(self) -> None:
        """Drops all plans and the race in the background; what they counted stays."""
        with self._lock:
            self._tuning.drop()
            for plan in self.plans.values():
                self._retire(plan)
            self.plans.clear()

    def _retire(self, plan: Plan) -> None:
        calls = plan.counted(drop=True)
        self._retired[(plan.on_kernel, plan.name)] += calls
        self._gained_us[plan.name] += round(calls * plan.gain_us)
        self._by_bucket[plan.name] += calls * plan.by_bucket
        plan.calls = 0

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls by kernel (``kernel``), and calls that torch computed by reason (``torch``); and where there are any,
        microseconds that kernels saved against torch, as they were measured (``gained_us``), and the calls of kernels
        that were measured for a bucket of rows (``by_bucket``)."""
        with self._lock:
            counts, gained, of_buckets = Counter(self._retired), Counter(self._gained_us), Counter(self._by_bucket)
            for plan in self.plans.values():
                calls = plan.counted()
                counts[(plan.on_kernel, plan.name)] += calls
                gained[plan.name] += round(calls * plan.gain_us)
                of_buckets[plan.name] += calls * plan.by_bucket
        if "regardless" in vars(self):
            for place, of_place in self.regardless.stats().items():  # these plans have no measured gain
                counts.update({(place == "kernel", name): calls for name, calls in of_place.items()})
        table: dict[str, dict[str, int]] = {"kernel": {}, "torch": {}}
        for (on_kernel, name), calls in sorted(counts.items()):
            if calls:
                table["kernel" if on_kernel else "torch"][name] = calls
        for title, sums in (("gained_us", gained), ("by_bucket", of_buckets)):
            if total := {name: count for name, count in sorted(sums.items()) if count > 0}:
                table[title] = total
        return table

    def close(self) -> None:
        """Unloads all kernels."""
        if "regardless" in vars(self):
            self.regardless.close()
            del self.regardless
        self.forget()
        for kernel in self._opened.values():
            kernel.close()
        self._opened.clear()
        self._unloadable.clear()


def _preference() -> Prefer:
    value = os.environ.get(PREFER, "measured")
    preferences: tuple[Prefer, ...] = get_args(Prefer)
    for prefer in preferences:
        if value == prefer:
            return prefer
    raise ValueError(f"{PREFER}={value}: must be one of {', '.join(preferences)}")


class Current:
    """The dispatcher in use; one object, so that compiled code finds it wherever it was traced."""

    dispatcher: Dispatcher | None = None


def current() -> Dispatcher:
    """The dispatcher in use, made at the first call."""
    if Current.dispatcher is None:
        Current.dispatcher = Dispatcher()
    return Current.dispatcher


def stats() -> dict[str, dict[str, int]]:
    """How often which kernel ran (``kernel``: name to calls), and why torch computed instead (``torch``: reason to
    calls), since the process began."""
    return current().stats()


@contextmanager
def prefer(what: Prefer) -> Iterator[None]:
    """Within it, ``kernel``: the nearest kernel that computes a product, measured or not; ``vendor``: torch always;
    ``measured``: the default. For the whole process, also set by ``CUDAL2GEN_PREFER``. Raises ValueError."""
    if what not in get_args(Prefer):
        raise ValueError(f"prefer={what!r}: must be one of {', '.join(get_args(Prefer))}")
    dispatcher = current()
    before, dispatcher.prefer = dispatcher.prefer, what
    dispatcher.forget()
    try:
        yield
    finally:
        dispatcher.prefer = before
        dispatcher.forget()


@contextmanager
def autotune(mode: Mode = "once") -> Iterator[None]:
    """Within it, calls measure what is fastest for them (`races`): ``once``, at the first call of a problem that was
    never measured; ``background``, between later calls; ``off``. For the whole process, ``CUDAL2GEN_AUTOTUNE``.
    Results stay in the user's store, for the same card, driver, clocks and versions. Raises WrongInput."""
    dispatcher = current()
    before, dispatcher.mode = dispatcher.mode, mode_of(mode)
    dispatcher.forget()
    try:
        yield
    finally:
        dispatcher.mode = before
        dispatcher.forget()


def load_pack(directory: str | Path) -> Pack:
    """Uses the pack in a folder, checked file by file. Raises PackError for what is none, or not whole."""
    pack = open_pack(Path(directory))
    current().add(pack)
    return pack


@contextmanager
def emulated(device: Device, packs: Sequence[Pack], prefer: Prefer = "measured") -> Iterator[Dispatcher]:
    """For tests: within it, CPU tensors in the device's memory are computed with by kernels of the packs, as on a
    GPU."""
    with replaced(Dispatcher(packs, device, prefer)) as dispatcher:
        yield dispatcher


@contextmanager
def replaced(dispatcher: Dispatcher) -> Iterator[Dispatcher]:
    """Inside the context, a dispatcher makes all calls; it is closed at the end."""
    before, Current.dispatcher = Current.dispatcher, dispatcher
    if before is not None:
        before.withdraw()
    try:
        yield dispatcher
    finally:
        dispatcher.close()
        Current.dispatcher = before
