"""What a product of given tensors does: prepared once per shapes and strides, then a look-up and one launch.

A plan is a kernel of a pack or torch's own product, with the reason; every call is counted under it. A kernel is opened
when the first plan needs it; nothing is compiled, nothing waits for the device, and scratch memory is torch's, on the
current stream.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

from cudal2gen.choice import Choice, Matrix, Operands, Prefer, Served, Sizes
from cudal2gen.gpu import GpuError, runtime, sku
from cudal2gen.kernel import VECTOR, Acc, Layout, Problem
from cudal2gen.launcher import LaunchError, OpenKernel
from cudal2gen.pack import Pack, installed, open_pack, search

if TYPE_CHECKING:
    import torch

Run = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
Key = tuple[Any, ...]

MOST_PLANS = 1 << 14  # a model with ever new shapes costs no more memory
# What the launcher refuses of operands; anything else is a fault of the device or of the installation.
REFUSALS = {1, 716}
PREFER = "CUDAL2GEN_PREFER"


class Bed(Protocol):
    """What launching asks of a device. ``model``: the pack's GPU, None for one that no pack can be for."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str | None: ...
    @property
    def runtime_library(self) -> Path: ...
    @property
    def alone(self) -> bool:
        """Whether it is always the current device."""
        ...

    def stream(self) -> int: ...
    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor: ...
    def capturing(self) -> bool: ...
    def current(self) -> AbstractContextManager[None]:
        """Makes it the current device, within."""
        ...


class Cuda:
    """A CUDA device of torch."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch, self._index = torch, index
        self.name = str(torch.cuda.get_device_properties(index).name)
        self.model = sku(self.name)
        self.alone = torch.cuda.device_count() == 1
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._raw = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    @property
    def runtime_library(self) -> Path:
        return runtime()

    def stream(self) -> int:
        return int(self._raw(self._index))

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return like.new_empty(shape)

    def capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.device(self._index):
            yield


class Given(NamedTuple):
    """A product as it is asked for: tensors as matrices, ``b`` as its layout stores it; and how torch computes it."""

    problem: Problem | None
    why_not: str
    operands: Operands
    shape: tuple[int, ...]
    vendor: Run


class Plan:
    """What is done with tensors of one kind, and how often it was."""

    def __init__(self, name: str, reason: str, run: Run, on_kernel: bool) -> None:
        self.name, self.reason, self.run, self.on_kernel = name, reason, run, on_kernel
        self.calls = 0


class Launch:
    """One kernel on operands of one kind: the call itself."""

    def __init__(
        self, bed: Bed, kernel: OpenKernel, served: Served, given: Given, sizes: Sizes, layout: Layout
    ) -> None:
        self._bed, self._kernel, self._call = bed, kernel, kernel.call
        self._served, self._given, self._sizes, self._tn = served, given, sizes, layout == "tn"
        self._workspace = -(-kernel.workspace_bytes(*served.launched) // 2)
        run = self._padded if any(served.copied) else self._direct
        self.run: Run = run if bed.alone else self._there(run)

    def _there(self, run: Run) -> Run:
        def on_its_device(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            with self._bed.current():
                return run(a, b, out)

        return on_its_device

    def _direct(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        d = self._bed.empty(a, *self._given.shape) if out is None else out
        operands = self._given.operands
        self._launch(a, a.data_ptr(), operands.a.ld, b.data_ptr(), operands.b.ld, d.data_ptr(), operands.d.ld)
        return d

    def _padded(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        (m, n, k), (rows, cols, depth), operands = self._sizes, self._served.launched, self._given.operands
        d = self._bed.empty(a, *self._given.shape) if out is None else out
        stored, extents = (b.as_strided((n, k), (operands.b.ld, 1)), (cols, depth)) if self._tn else (b, (depth, cols))
        matrix_a, matrix_d = a.as_strided((m, k), (operands.a.ld, 1)), d.as_strided((m, n), (operands.d.ld, 1))
        copied_a, copied_b, copied_d = self._served.copied
        wide_a = self._wide(matrix_a, (rows, depth)) if copied_a else matrix_a
        wide_b = self._wide(stored, extents) if copied_b else stored
        wide_d = self._bed.empty(a, rows, _aligned(cols)) if copied_d else matrix_d
        self._launch(
            a,
            wide_a.data_ptr(),
            wide_a.stride(0),
            wide_b.data_ptr(),
            wide_b.stride(0),
            wide_d.data_ptr(),
            wide_d.stride(0),
        )
        if copied_d:
            matrix_d.copy_(wide_d[:m, :n])
        return d

    def _wide(self, matrix: torch.Tensor, extents: tuple[int, int]) -> torch.Tensor:
        """The matrix within zeros, rows on 16 bytes."""
        wide = self._bed.empty(matrix, extents[0], _aligned(extents[1]))
        if wide.shape != matrix.shape:
            wide.zero_()
        wide[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
        return wide

    def _launch(self, like: torch.Tensor, a: int, lda: int, b: int, ldb: int, d: int, ldd: int) -> None:
        scratch = self._bed.empty(like, self._workspace) if self._workspace else None
        where = 0 if scratch is None else scratch.data_ptr()
        if code := self._call(a, lda, b, ldb, d, ldd, *self._served.launched, where, self._bed.stream()):
            self._kernel.check(code)


class Dispatcher:
    """Packs, opened kernels and plans of a process. ``bed``: takes CPU tensors for a device's, in tests."""

    def __init__(
        self, packs: Sequence[Pack] | None = None, bed: Bed | None = None, prefer: Prefer | None = None
    ) -> None:
        self.bed = bed
        self.plans: dict[Key, Plan] = {}
        self.prefer: Prefer = prefer or _preference()
        self._packs = None if packs is None else {pack.gpu: pack for pack in packs}
        self._cuda: dict[int, Cuda] = {}
        self._opened: dict[tuple[int, Path, str], OpenKernel] = {}
        self._retired: Counter[tuple[bool, str]] = Counter()
        self._said: set[str] = set()
        self._lock = threading.RLock()

    def plan(self, key: Key, index: int, given: Given, biased: bool = False) -> Plan:
        """The plan for a key that has none; ``index``: of the CUDA device, -1 for the CPU."""
        with self._lock:
            if known := self.plans.get(key):
                return known
            plan, lasting = self._made(key, index, given, biased)
            if len(self.plans) >= MOST_PLANS:
                self.forget()
            if lasting:
                self.plans[key] = plan
            else:
                self._retired[(plan.on_kernel, plan.name)] += 1
            return plan

    def _made(self, key: Key, index: int, given: Given, biased: bool) -> tuple[Plan, bool]:
        """A plan, and whether it holds for later calls."""

        def by_torch(short: str, reason: str = "", lasting: bool = True) -> tuple[Plan, bool]:
            return Plan(short, reason or short, given.vendor, on_kernel=False), lasting

        if self.bed is None and index < 0:
            return by_torch("on the CPU")
        if given.problem is None:
            return by_torch(given.why_not)
        bed = self._bed(index)
        pack, why_not = self._pack(bed)
        if pack is None:
            return by_torch(why_not)
        problem = given.problem.model_copy(update={"gpu": pack.gpu})
        choice = self._choose(pack, problem, given, biased)
        if choice.kernel is None or choice.served is None:
            return by_torch(choice.short, choice.reason)
        if bed.capturing() and not self._is_open(pack, choice.kernel, index):
            return by_torch("first used in a graph capture", lasting=False)
        try:
            kernel = self._open(pack, choice.kernel, index, bed)
        except (LaunchError, GpuError) as error:
            self._say(f"kernels of {pack.directory} cannot be loaded: {error}")
            return by_torch("cannot be loaded", str(error))
        sizes = Sizes(problem.m, problem.n, problem.k)
        launch = Launch(bed, kernel, choice.served, given, sizes, problem.layout)
        name = pack.table.kernels[choice.kernel].record.name
        return Plan(name, choice.reason, self._guarded(key, launch, given), on_kernel=True), True

    def _choose(self, pack: Pack, problem: Problem, given: Given, biased: bool) -> Choice:
        # A bias is one more pass over D, which the vendor's product has built in.
        extra_us = 3.0 + 2 * 2 * problem.m * problem.n / (pack.table.bandwidth / 2) if biased else 0.0
        return pack.table.choose(problem, given.operands, self.prefer, extra_us)

    def _guarded(self, key: Key, launch: Launch, given: Given) -> Run:
        """The launch; operands that the launcher refuses after all are torch's from then on."""

        def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            try:
                return launch.run(a, b, out)
            except LaunchError as error:
                if error.code not in REFUSALS:
                    raise
                plan = Plan("the launcher refuses", str(error), given.vendor, on_kernel=False)
                plan.calls = 1
                with self._lock:
                    if refused := self.plans.get(key):
                        refused.calls -= 1
                        self._retire(refused)
                    self.plans[key] = plan
                return given.vendor(a, b, out)

        return run

    def _bed(self, index: int) -> Bed:
        if self.bed is not None:
            return self.bed
        if index not in self._cuda:
            self._cuda[index] = Cuda(index)
        return self._cuda[index]

    def _pack(self, bed: Bed) -> tuple[Pack | None, str]:
        if self._packs is None:
            self._packs, refused = search(installed())
            for reason in refused:
                self._say(f"a pack is not used: {reason}")
        if bed.model in self._packs:
            return self._packs[bed.model], ""
        there = f"packs are there for {', '.join(sorted(self._packs))}" if self._packs else "no pack is installed"
        self._say(f"no kernels for {bed.name}: {there}; torch computes all products. See 'cudal2gen pack --help'")
        return None, "no pack for this GPU"

    def add(self, pack: Pack) -> None:
        """Uses a pack from now on."""
        with self._lock:
            known = self._packs if self._packs is not None else search(installed())[0]
            self._packs = known | {pack.gpu: pack}
            self.forget()

    def _name(self, pack: Pack, number: int, index: int) -> tuple[int, Path, str]:
        kernel = pack.table.kernels[number]
        return (index, pack.kernel(kernel.digest), repr(kernel.record.launch_options))

    def _is_open(self, pack: Pack, number: int, index: int) -> bool:
        return self._name(pack, number, index) in self._opened

    def _open(self, pack: Pack, number: int, index: int, bed: Bed) -> OpenKernel:
        name = self._name(pack, number, index)
        if name not in self._opened:
            options = pack.table.kernels[number].record.launch_options
            with bed.current():
                self._opened[name] = OpenKernel(pack.library, name[1], options, bed.runtime_library)
        return self._opened[name]

    def _say(self, text: str) -> None:
        """Warns, once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"cudal2gen: {text}", stacklevel=2)

    def forget(self) -> None:
        """Drops all plans; what they counted stays."""
        with self._lock:
            for plan in self.plans.values():
                self._retire(plan)
            self.plans.clear()

    def _retire(self, plan: Plan) -> None:
        self._retired[(plan.on_kernel, plan.name)] += plan.calls
        plan.calls = 0

    def stats(self) -> dict[str, dict[str, int]]:
        with self._lock:
            counted = Counter(self._retired)
            for plan in self.plans.values():
                counted[(plan.on_kernel, plan.name)] += plan.calls
        found: dict[str, dict[str, int]] = {"kernel": {}, "torch": {}}
        for (on_kernel, name), calls in sorted(counted.items()):
            if calls:
                found["kernel" if on_kernel else "torch"][name] = calls
        return found

    def close(self) -> None:
        """Unloads all kernels."""
        self.forget()
        for kernel in self._opened.values():
            kernel.close()
        self._opened.clear()


def _preference() -> Prefer:
    wanted = os.environ.get(PREFER, "measured")
    for known in get_args(Prefer):
        if wanted == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"{PREFER}={wanted}: must be one of {', '.join(get_args(Prefer))}")


class _Current:
    """The dispatcher in use; one object, so that compiled code finds it wherever it was traced."""

    dispatcher: Dispatcher | None = None


def current() -> Dispatcher:
    """The dispatcher in use, made at the first call."""
    if _Current.dispatcher is None:
        _Current.dispatcher = Dispatcher()
    return _Current.dispatcher


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


def load_pack(directory: str | Path) -> Pack:
    """Uses the pack in a folder, checked file by file. Raises PackError for what is none, or not whole."""
    pack = open_pack(Path(directory))
    current().add(pack)
    return pack


@contextmanager
def emulated(bed: Bed, packs: Sequence[Pack], prefer: Prefer = "measured") -> Iterator[Dispatcher]:
    """For tests: within it, CPU tensors in the bed's memory are computed with by kernels of the packs, as on a GPU."""
    before, _Current.dispatcher = _Current.dispatcher, Dispatcher(packs, bed, prefer)
    try:
        yield _Current.dispatcher
    finally:
        _Current.dispatcher.close()
        _Current.dispatcher = before


def explain(a: torch.Tensor, b: torch.Tensor, acc: Acc = "f32") -> str:
    """What ``matmul(a, b, acc=acc)`` does and why, in one line. Raises what it raises."""
    from cudal2gen.operators.library import planned

    plan = planned(a, b, acc)
    return f"{plan.name}: {plan.reason}" if plan.on_kernel else f"torch: {plan.reason}"


# --- tensors as matrices ---


def matrix(tensor: torch.Tensor, rows: int, cols: int, row_stride: int, col_stride: int) -> Matrix | None:
    """A tensor as a row-major matrix; None where its rows are not contiguous."""
    if cols > 1 and col_stride != 1:
        return None
    # The only row of a matrix is as far from the next as one likes.
    ld = row_stride if rows > 1 else _aligned(cols)
    return Matrix(ld, tensor.data_ptr() % 16 == 0) if ld >= cols else None


def problem_of(acc: Acc, layout: Layout, m: int, n: int, k: int) -> tuple[Problem | None, str]:
    """The problem, its GPU to be filled in; or why it is none."""
    from pydantic import ValidationError

    try:
        return Problem(gpu="", acc=acc, layout=layout, m=m, n=n, k=k), ""
    except ValidationError:
        return None, "an extent is 0" if 0 in (m, n, k) else "an extent is too large"


def _aligned(extent: int) -> int:
    return -(-extent // VECTOR) * VECTOR
