"""Decides, once for all calls of the same shapes and strides, whether a kernel or torch computes them.

The decision is a plan. An operator checks its operands, asks the dispatcher for the plan of their kind, and calls the
plan. The dispatcher chooses a kernel by measurements (``measuring``), opens it (``plan_packs``) and binds it to
operands of that kind (``call_kernels``). None of these modules calls the dispatcher; if a pack or the launcher refuses
something, they raise an exception.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cudal2gen.kernel import Problem
from cudal2gen.kernel.launch import Matrix
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.operators.call_kernels import bind, native_by_torch, native_call
from cudal2gen.operators.call_native import NATIVE
from cudal2gen.operators.check_modes import FREE, INVARIANT, foreign, invariance, refusal
from cudal2gen.operators.devices import Cuda, LaunchDevice
from cudal2gen.operators.measuring import Measuring, Mode, mode_of
from cudal2gen.operators.plan_invariance import OneKernel
from cudal2gen.operators.plan_packs import Packs
from cudal2gen.operators.plan_requests import CPU, Arguments, Request, Run, linear_of_rows
from cudal2gen.operators.plans import ByTorch, CallPlan, Key, Plans
from cudal2gen.pack import Pack, open_pack
from cudal2gen.results.choice import Choice, Prefer
from kernelproof.ground.element import ElementName
from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    import torch

PREFER = "CUDAL2GEN_PREFER"
MEANWHILE = "another thread measures products on this device; torch computes until it has ended"
ROWS = tuple(1 << octave for octave in range(16))  # numbers of rows for which ``may_win`` looks for a kernel
BIAS_US = 3.0  # microseconds of the second launch that a bias needs after a plain kernel, and not after the vendor's


class Dispatcher:
    """Decides what the calls of a process do. ``device``: in tests, the device that CPU tensors are treated as on."""

    def __init__(
        self,
        packs: Sequence[Pack] | None = None,
        device: LaunchDevice | None = None,
        prefer: Prefer | None = None,
        mode: Mode | None = None,
    ) -> None:
        self.device = device
        self.prefer: Prefer = prefer or _preference()
        self._plans, self._packs = Plans(), Packs(packs)
        self.plans = self._plans.by_key  # an attribute of its own, which makes the look-up of planned calls faster
        self._may_win: dict[tuple[Any, ...], bool] = {}
        self._measuring, self._one_kernel = Measuring(mode_of(mode), self._plans, self._packs), OneKernel()
        self._cuda: dict[int, Cuda] = {}

    @property
    def mode(self) -> Mode:
        """Whether and when calls measure (``Mode``)."""
        return self._measuring.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._measuring.mode = mode

    @cached_property
    def any_kernel(self) -> Dispatcher:
        """A dispatcher with the same packs and device that also uses kernels that were not measured. It is for callers
        that measure by themselves."""
        return Dispatcher(list(self._packs.all().values()), self.device, "kernel", "off")

    def plan(self, key: Key, request: Request, arguments: Arguments | None = None, level: int = FREE) -> CallPlan:
        """The plan for a key; it is made if there is none.

        ``arguments``: the call's tensors, on which kernels may be measured. ``level``: see ``invariance``.
        """
        plans, request = self._plans, request.with_invariance(level) if level else request
        # The lock is held while a plan is decided, so each is made once, but not while a race runs, which may take a
        # tenth of a second. Hence the key is looked up again afterwards.
        with plans.lock:
            if key in self.plans:
                return self.plans[key]
            measurable = self._measurable(request)
        watch = None
        if measurable is not None and arguments is not None:
            watch = self._measuring.observe(*measurable, request, arguments)  # may race, so without the lock
        if watch is not None and watch.busy:
            return plans.once(CallPlan("another thread measures", MEANWHILE, request.by_torch, False, request.by_torch))
        with plans.lock:
            if key in self.plans:  # another thread has made it meanwhile
                return self.plans[key]
            plan, lasting = self._decide(request)
            plan.key = key
            if not lasting:
                return plans.once(plan)
            if watch is not None:
                watch.follow(plan)
            if plans.full:
                self.forget()
            self.plans[key] = plan
            return plan

    def _measurable(self, request: Request) -> tuple[LaunchDevice, Pack] | None:
        """The device and the pack whose kernels a call may measure; None if the call may not measure."""
        if self.prefer != "measured" or self.mode == "off" or request.problem is None or request.invariance:
            return None
        if self.device is None and request.device < 0:
            return None
        device = self._device(request.device)
        try:
            pack = self._pack(device)
            self._packs.table(pack)
        except ByTorch:
            return None
        return device, pack

    def _decide(self, request: Request) -> tuple[CallPlan, bool]:
        """The plan of a request, and whether later calls get the same plan."""
        try:
            return self._fused_or_plain(request) if request.fusion else self._on_kernel(request), True
        except ByTorch as why:
            if request.invariance == INVARIANT:
                refused = refusal(str(why))
                return CallPlan(f"refused: {why.short}", str(why), refused, False, refused), why.lasting
            plan = CallPlan(why.short, str(why), request.by_torch, False, request.by_torch)
            plan.native = native_by_torch(request)
            return plan, why.lasting

    def may_win(self, n: int, k: int, element: ElementName, device: int, biased: bool) -> bool:
        """Whether a linear layer with a packed weight (n,k) may run on a kernel for some number of rows.

        ``device``: as in a ``Request``. While calls measure, this is true for every layer if there is a pack.
        """
        key = (n, k, element, device, biased, invariance())
        known = self._may_win.get(key)
        if known is None:
            with self._plans.lock:
                known = self._may_win[key] = self._find_winner(*key)
        return known

    def _find_winner(self, n: int, k: int, element: ElementName, index: int, biased: bool, level: int) -> bool:
        """``may_win`` at a level of batch invariance, computed anew. ``index``: the device of a ``Request``."""
        if self.prefer == "vendor" or (self.device is None and index < 0):
            return False
        device = self._device(index)
        try:
            pack = self._pack(device)
            table = self._packs.table(pack)
        except ByTorch:
            return False
        if not level and (self.mode != "off" or self.prefer != "measured"):
            return True
        rows = {row.m for row in table.rows if (row.n, row.k) == (n, k)}.union(ROWS)
        requests = [linear_of_rows(m, n, k, element, index, biased).with_invariance(level) for m in sorted(rows)]
        variants = [*(request.fused for request in requests if biased), *requests]
        return any(self._wins(device, pack, request) for request in variants)

    def _wins(self, device: LaunchDevice, pack: Pack, request: Request) -> bool:
        """Whether a kernel is chosen for a request."""
        if request.problem is None:
            return False
        problem = request.problem.model_copy(update={"gpu": pack.gpu})
        return self._choose(device, pack, problem, request).kernel is not None

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """Memory that kernels can read, for a contiguous copy of a tensor."""
        return like.new_empty(like.shape) if self.device is None else self.device.empty(like, *like.shape)

    def count(self, name: str, on_kernel: bool = False) -> None:
        """Counts a call without a plan: by the kernel ``name``, or by torch for the reason ``name``."""
        self._plans.count(name, on_kernel)

    def plan_foreign(self, run: Run, operands: Sequence[Any], level: int) -> CallPlan | None:
        """The plan of one call by ``run``, for operands that only torch's functions support; None for other operands.

        The call is refused if it must be batch-invariant. ``level``: see ``invariance``.
        """
        reason = foreign(operands)
        run = refusal(reason) if level == INVARIANT else run
        return self._plans.once(CallPlan(reason, f"{reason}: torch's own product", run, False, run)) if reason else None

    def keep(self, plan: CallPlan, kind: int, *operands: torch.Tensor) -> None:
        """Lets C++ make the later calls of a plan. ``kind``: the part of its key that does not follow from tensors."""
        with self._plans.lock:
            native, current = plan.native, self is Current.dispatcher and self.plans.get(plan.key) is plan
            # Python makes the calls of a plan that was dropped meanwhile or that measures: C++ would notice neither.
            if native is not None and current and plan.run is native.run:
                native.keep(operands, kind, plan.spans)

    def withdraw(self) -> None:
        """Returns all calls to Python until they are planned again, because another dispatcher is in use."""
        self._plans.withdraw()

    def call(self, plan: CallPlan, *operands: Any) -> Any:
        """Runs a plan, or torch's product if the launcher refuses. Raises as ``replace``.

        Plain products and linear layers repeat this code, because one more Python call would add to each call's time.
        """
        plan.calls += 1
        run: Any = plan.run
        try:
            return run(*operands)
        except LaunchError as error:
            run = self.replace(plan, error).run
            return run(*operands)

    def replace(self, plan: CallPlan, error: LaunchError) -> CallPlan:
        """Replaces a plan whose call the launcher refused by torch's product, for this call and later ones.

        Raises the error again if the operands are not its reason.
        """
        return self._plans.replace(plan, error)

    def _fused_or_plain(self, request: Request) -> CallPlan:
        """The plan of a fused kernel, else of a plain kernel after which torch computes the rest. Raises ByTorch."""
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

    def _on_kernel(self, request: Request) -> CallPlan:
        """The plan of a kernel. Raises ByTorch if no kernel computes the request."""
        if self.device is None and request.device == CPU:
            raise ByTorch("on the CPU")
        if request.problem is None:
            raise ByTorch(request.obstacle)
        device = self._device(request.device)
        pack = self._pack(device)
        native = device.place is not None and NATIVE.serves(device.place, pack.torch_library)
        problem = request.problem.model_copy(update={"gpu": pack.gpu})
        choice = self._choose(device, pack, problem, request)
        if choice.kernel is None or choice.use is None:
            raise ByTorch(choice.short, choice.reason)
        feature = request.problem.suffix.strip()  # such as a batch or a fusion, for which padded copies are not made
        if feature and any(choice.use.copied):
            raise ByTorch(
                f"{feature}: a kernel would copy operands", f"{choice.reason}: {choice.use.matrices} would be copied"
            )
        kernel, n = pack.table.kernels[choice.kernel], request.sizes.n
        if request.problem.fusion.aux and not kernel.record.launch.takes_aux(n, Matrix(n)):
            raise ByTorch(f"rows of aux of {n} elements, which no kernel stores")
        opened = self._packs.open(pack, kernel, request.device, device)
        run = bind(device, opened, choice.use, request, request.problem.layout)
        plan = CallPlan(kernel.record.name, choice.reason, run, True, request.by_torch)
        plan.native = native_call(device, opened, choice.use, request, run) if native else None
        row = self._measuring.table(device, pack, request.device).measured(problem, request.batches.products)
        rows, plan.by_bucket = choice.rows or ((row,) if row is not None else ()), bool(choice.rows)
        plan.gain_us = min((row.vendor_us - row.us for row in rows if row.kernel == choice.kernel), default=0.0)
        return plan

    def _choose(self, device: LaunchDevice, pack: Pack, problem: Problem, request: Request) -> Choice:
        """The choice of a kernel for a request. ``problem``: the request's, with its GPU. Raises ByTorch."""
        try:
            if request.invariance and self.prefer != "vendor":
                measured = request.invariance != INVARIANT and self.prefer != "kernel"
                table = self._measuring.table(device, pack, request.device)
                return self._one_kernel.choose(table, problem, request.operands, measured, request.device)
            extra_us = 0.0
            if request.finish is not None:
                # A plain kernel with a bias or an activation needs one more pass over D; the vendor's product does not.
                # The pass is assumed to reach half of the bandwidth, as copies do (``choice.COPY_SHARE``).
                moved = 2 * problem.output.bytes * problem.m * problem.n
                extra_us = BIAS_US + moved / (self._packs.table(pack).bandwidth / 2)
            return self._measuring.choose(device, pack, problem, request, self.prefer, extra_us)
        except WrongInput as error:  # the pack is intact, but has a record of another version
            raise self._packs.not_understood(error) from None

    def _device(self, index: int) -> LaunchDevice:
        """The device with this index, as in a ``Request``."""
        if self.device is not None:
            return self.device
        if index not in self._cuda:
            self._cuda[index] = Cuda(index)
        return self._cuda[index]

    def _pack(self, device: LaunchDevice) -> Pack:
        """The pack for a device. Raises ByTorch if there is none."""
        return self._packs.serving(device, needs_races=self.prefer == "measured" and self.mode == "off")

    @property
    def shadowed(self) -> list[str]:
        """Usable packs that are not used, with the reason; empty before the first search."""
        return self._packs.shadowed

    def add(self, pack: Pack) -> None:
        """Uses a pack from now on."""
        with self._plans.lock:
            self._packs.add(pack)
            self._one_kernel.forget()
            vars(self).pop("any_kernel", None)
            self.forget()

    def forget(self) -> None:
        """Drops all plans and the race in the background; their counts stay."""
        with self._plans.lock:
            self._measuring.drop()
            self._plans.forget()
            self._may_win.clear()

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts of calls since the process began.

        - ``kernel``: calls by kernel; ``torch``: calls that torch computed, by reason.
        - ``gained_us``, if not empty: by kernel, the microseconds saved against torch according to measurements.
        - ``by_bucket``, if not empty: by kernel, calls of kernels that were measured for a bucket of rows.
        """
        counts, gained, of_buckets = self._plans.counts()
        if "any_kernel" in vars(self):
            for title, calls_of in self.any_kernel.stats().items():  # these plans have no measured gain
                counts.update({(title == "kernel", name): calls for name, calls in calls_of.items()})
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
        if "any_kernel" in vars(self):
            self.any_kernel.close()
            del self.any_kernel
        self.forget()
        self._packs.close()


def _preference() -> Prefer:
    """The preference that the environment's variable states. Raises ValueError for another word."""
    value = os.environ.get(PREFER, "measured")
    preferences: tuple[Prefer, ...] = get_args(Prefer)
    for prefer in preferences:
        if value == prefer:
            return prefer
    raise ValueError(f"{PREFER}={value}: must be one of {', '.join(preferences)}")


class Current:
    """Holds the dispatcher in use as an attribute, so that compiled code finds the present one."""

    dispatcher: Dispatcher | None = None


def current() -> Dispatcher:
    """The dispatcher in use. The first call makes it."""
    if Current.dispatcher is None:
        Current.dispatcher = Dispatcher()
    return Current.dispatcher


def stats() -> dict[str, dict[str, int]]:
    """Counts calls since the process began: those of kernels by name (``kernel``), and those that torch computed by
    reason (``torch``). If kernels were measured, there are also ``gained_us`` and ``by_bucket``: see
    ``Dispatcher.stats``."""
    return current().stats()


@contextmanager
def prefer(what: Prefer) -> Iterator[None]:
    """A context that decides which kernels calls use.

    ``kernel``: the nearest kernel, measured or not. ``vendor``: none, so that torch computes. ``measured``, the
    default: one that was measured faster than torch. The context applies to all threads of the process, as
    ``CUDAL2GEN_PREFER`` does. Raises ValueError for another name.
    """
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
    """A context in which calls measure which kernel is fastest for them: at the first call of a problem that was never
    measured (``once``), between later calls (``background``), or not at all (``off``).

    It applies to all threads of the process, as ``CUDAL2GEN_AUTOTUNE`` does. Results are stored for the user, and
    count on the same card with the same driver, clocks and versions. Raises WrongInput for another name.
    """
    dispatcher = current()
    before, dispatcher.mode = dispatcher.mode, mode_of(mode)
    dispatcher.forget()
    try:
        yield
    finally:
        dispatcher.mode = before
        dispatcher.forget()


def load_pack(directory: str | Path) -> Pack:
    """Uses the pack in a folder after checking every file. Raises PackError if there is none, or a damaged one."""
    pack = open_pack(Path(directory))
    current().add(pack)
    return pack


@contextmanager
def emulated(device: LaunchDevice, packs: Sequence[Pack], prefer: Prefer = "measured") -> Iterator[Dispatcher]:
    """For tests: a context in which the packs' kernels compute on CPU tensors, as if ``device`` were their GPU."""
    with replaced(Dispatcher(packs, device, prefer)) as dispatcher:
        yield dispatcher


@contextmanager
def replaced(dispatcher: Dispatcher) -> Iterator[Dispatcher]:
    """A context in which this dispatcher makes all calls; it is closed at the end."""
    before, Current.dispatcher = Current.dispatcher, dispatcher
    if before is not None:
        before.withdraw()
    try:
        yield dispatcher
    finally:
        dispatcher.close()
        Current.dispatcher = before
