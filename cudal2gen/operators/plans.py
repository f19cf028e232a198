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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, get_args

from cudal2gen.chips import model_of
from cudal2gen.choice import Choice, Matrix, Operands, Prefer, Served, Sizes
from cudal2gen.gpu import GpuError, runtime
from cudal2gen.kernel import Acc, IllegalRecord, Layout, Problem, aligned
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

    @property
    def stream(self) -> Callable[[], int]:
        """The current stream, at every call."""
        ...

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
        self.model = model_of(self.name)
        self.alone = torch.cuda.device_count() == 1
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream: Callable[[], int] = partial(raw or _current_stream, index)

    @property
    def runtime_library(self) -> Path:
        return runtime()

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return like.new_empty(shape)

    def capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.device(self._index):
            yield


def _current_stream(index: int) -> int:
    import torch

    return int(torch.cuda.current_stream(index).cuda_stream)


class Given(NamedTuple):
    """A product as it is asked for: tensors as matrices, ``b`` as its layout stores it; and how torch computes it."""

    problem: Problem | None
    why_not: str
    sizes: Sizes
    operands: Operands
    shape: tuple[int, ...]
    vendor: Run


class Plan:
    """What is done with tensors of one kind, and how often it was."""

    def __init__(self, name: str, reason: str, run: Run, on_kernel: bool) -> None:
        self.name, self.reason, self.run, self.on_kernel = name, reason, run, on_kernel
        self.calls = 0
        self.spans = (0, 0, 0)  # bytes of a, b and out, where out is given


def launch(
    bed: Bed, kernel: OpenKernel, served: Served, given: Given, layout: Layout, refused: Callable[..., torch.Tensor]
) -> Run:
    """A kernel on operands of one kind. ``refused`` is called with the launcher's code, where that is not 0, and the
    operands."""
    a, b, d = (
        aligned(wide) if copied else given_as.ld
        for given_as, copied, wide in zip(given.operands, served.copied, _widths(served, layout), strict=True)
    )
    call = kernel.sized(a, b, d, *served.launched)
    workspace = -(-kernel.workspace_bytes(*served.launched) // 2)
    if any(served.copied):
        run = _padded(bed, call, workspace, served, given, layout, refused)
    else:
        run = _direct(bed, call, workspace, given, refused)
    if bed.alone:
        return run

    def on_its_device(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        with bed.current():
            return run(a, b, out)

    return on_its_device


def _direct(bed: Bed, call: Callable[..., int], workspace: int, given: Given, refused: Callable[..., Any]) -> Run:
    empty, stream, shape = bed.empty, bed.stream, given.shape

    # Written out, without a further function: this is what every call waits for.
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        d = empty(a, *shape) if out is None else out
        if workspace:
            scratch = empty(a, workspace)
            code = call(a.data_ptr(), b.data_ptr(), d.data_ptr(), scratch.data_ptr(), stream())
        else:
            code = call(a.data_ptr(), b.data_ptr(), d.data_ptr(), 0, stream())
        return refused(code, a, b, out) if code else d

    return run


def _padded(
    bed: Bed,
    call: Callable[..., int],
    workspace: int,
    served: Served,
    given: Given,
    layout: Layout,
    refused: Callable[..., Any],
) -> Run:
    (m, n, k), (rows, cols, depth), copied, operands = given.sizes, served.launched, served.copied, given.operands
    b_given, b_wide = ((n, k), (cols, depth)) if layout == "tn" else ((k, n), (depth, cols))

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        d = bed.empty(a, *given.shape) if out is None else out
        matrix_d = d.as_strided((m, n), (operands.d.ld, 1))
        wide_a = _wide(bed, a.as_strided((m, k), (operands.a.ld, 1)), (rows, depth)) if copied[0] else a
        wide_b = _wide(bed, b.as_strided(b_given, (operands.b.ld, 1)), b_wide) if copied[1] else b
        wide_d = bed.empty(a, rows, aligned(cols)) if copied[2] else d
        scratch = bed.empty(a, workspace) if workspace else None
        where = 0 if scratch is None else scratch.data_ptr()
        if code := call(wide_a.data_ptr(), wide_b.data_ptr(), wide_d.data_ptr(), where, bed.stream()):
            return cast("torch.Tensor", refused(code, a, b, out))
        if copied[2]:
            matrix_d.copy_(wide_d[:m, :n])
        return d

    return run


def _wide(bed: Bed, matrix: torch.Tensor, extents: tuple[int, int]) -> torch.Tensor:
    """The matrix within zeros, rows on 16 bytes."""
    wide = bed.empty(matrix, extents[0], aligned(extents[1]))
    if wide.shape != matrix.shape:
        wide.zero_()
    wide[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
    return wide


def _widths(served: Served, layout: Layout) -> tuple[int, int, int]:
    """Columns of A, of B as it is stored, and of D, as they are launched."""
    _, n, k = served.launched
    return (k, k if layout == "tn" else n, n)


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
        try:
            choice = self._choose(pack, problem, given, biased)
        except (IllegalRecord, LookupError, TypeError) as error:  # whole, and yet of another version
            self._say(f"the table of {pack.directory} is not understood: {error}; make the pack anew")
            return by_torch("pack not understood")
        if choice.kernel is None or choice.served is None:
            return by_torch(choice.short, choice.reason)
        if bed.capturing() and not self._is_open(pack, choice.kernel, index):
            return by_torch("first used in a graph capture", lasting=False)
        try:
            kernel = self._open(pack, choice.kernel, index, bed)
        except (LaunchError, GpuError, OSError) as error:
            self._say(f"kernels of {pack.directory} cannot be loaded: {error}")
            return by_torch("cannot be loaded", str(error))
        run = launch(bed, kernel, choice.served, given, problem.layout, self._refused(key, kernel, given))
        name = pack.table.kernels[choice.kernel].record.name
        return Plan(name, choice.reason, run, on_kernel=True), True

    def _choose(self, pack: Pack, problem: Problem, given: Given, biased: bool) -> Choice:
        # A bias is one more pass over D, which the vendor's product has built in.
        extra_us = 3.0 + 2 * 2 * problem.m * problem.n / (pack.table.bandwidth / 2) if biased else 0.0
        return pack.table.choose(problem, given.operands, self.prefer, extra_us)

    def _refused(self, key: Key, kernel: OpenKernel, given: Given) -> Callable[..., torch.Tensor]:
        """What is done where the launcher returns an error: operands that it refuses are torch's from then on."""

        def refused(code: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            try:
                kernel.check(code)
            except LaunchError as error:
                if code not in REFUSALS:
                    raise
                plan = Plan("the launcher refuses", str(error), given.vendor, on_kernel=False)
            plan.calls = 1
            with self._lock:
                if before := self.plans.get(key):
                    before.calls -= 1
                    self._retire(before)
                self.plans[key] = plan
            return given.vendor(a, b, out)

        return refused

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
    ld = row_stride if rows > 1 else aligned(cols)
    return Matrix(ld, tensor.data_ptr() % 16 == 0) if ld >= cols else None


def problem_of(acc: Acc, layout: Layout, m: int, n: int, k: int) -> tuple[Problem | None, str]:
    """The problem, its GPU to be filled in; or why it is none."""
    from pydantic import ValidationError

    try:
        return Problem(gpu="", acc=acc, layout=layout, m=m, n=n, k=k), ""
    except ValidationError:
        return None, "an extent is 0" if 0 in (m, n, k) else "an extent is too large"
