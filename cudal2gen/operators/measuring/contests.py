"""Computes the product of a race by kernels and by torch, and compares the results with an fp64 reference.

The product is that of a call, or one with another number of rows of its bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.kernel import Problem, Use
from cudal2gen.kernel.launch import Matrix
from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.launch.operands import Operands as Tensors
from cudal2gen.operators.call_kernels import bind, native_by_torch, native_call, on_gpu
from cudal2gen.operators.call_native import NATIVE, NONE, NativeCall, TorchCall
from cudal2gen.operators.check_modes import TORCH
from cudal2gen.operators.derived import DERIVED
from cudal2gen.operators.devices import LaunchDevice, StaleMemory
from cudal2gen.operators.measuring import buckets
from cudal2gen.operators.plan_requests import Arguments, Request, Run
from cudal2gen.operators.plans import ByTorch
from cudal2gen.results.choice import TableKernel

if TYPE_CHECKING:
    import torch

    from cudal2gen.bench.check import Reference


_KINDS = itertools.count(-2, -1)  # kinds of calls in C++, negative so that no operator's call has them
OpenFunction = Callable[[TableKernel], OpenKernel]  # opens a kernel of the pack; raises ByTorch


class Contest:
    """A product that kernels and torch compute alternately, into newly allocated memory.

    ``problem``: the request's problem with its GPU. If it has another number of rows than the request, A has copies of
    the request's rows. ``open_kernel`` opens a kernel.
    """

    def __init__(
        self, device: LaunchDevice, request: Request, problem: Problem, arguments: Arguments,
        open_kernel: OpenFunction,
    ) -> None:  # fmt: skip
        self.problem, self._device, self._open_kernel = problem, device, open_kernel
        self.products = request.batches.products
        self.operands = request.operands._replace(d=Matrix(problem.d_cols))
        a, b, third = arguments
        shape, batches = request.shape, request.batches
        if problem.m != request.sizes.m:
            self.operands = self.operands._replace(a=Matrix(request.operands.a.ld))
        if request.pair and not problem.fusion:
            assert third is not None
            b = DERIVED.interleaved(b, third, device.empty)
        if problem.grouped and problem.m != request.sizes.m:
            assert third is not None
            a, third = _groups(device, a, third, request, problem.m)
            shape = (problem.m, problem.d_cols)
        elif not problem.batched:
            a, shape = _rows(device, a, request, problem.m, request.sizes.m), (problem.m, problem.d_cols)
        elif not problem.grouped:  # a strided batch, whose results lie one after the other
            third, batches = None, batches._replace(d=problem.m * problem.n)
        if not (problem.fusion or problem.batched):
            # Operands may be vectors, and batch dimensions may be rows of A or repeats of B: here all are matrices.
            b, third = _cols(b, request).t(), None
        self._arguments = Arguments(a, b, third)
        self._sets = itertools.cycle([self._arguments])
        self._natives: list[NativeCall] = []
        self._request = request._replace(
            problem=problem, sizes=request.sizes._replace(m=problem.m), operands=self.operands, shape=shape,
            batches=batches, pair=request.pair and bool(problem.fusion), has_out=False,
        )  # fmt: skip

    def rotate(self, count: int) -> None:
        """Lets calls alternate between ``count`` copies of the operands, so that none of ``count`` calls in a row finds
        another one's operands in the L2."""
        self._sets = itertools.cycle(
            [self._arguments, *(_copies(self._device, self._arguments) for _ in range(count - 1))]
        )

    def by_torch(self) -> object:
        """Computes the complete request by torch."""
        return self._by_torch(*next(self._sets))

    @property
    def _by_torch(self) -> Run:
        """Torch's product of the contest: that of the call, or of plain matrices without its checks."""
        problem = self.problem
        if problem.fusion or problem.batched or problem.d != "same":
            return self._request.by_torch
        return lambda a, b, _: TORCH.mm(a, b)

    def planned_by_torch(self) -> Callable[[], object]:
        """A function that does the same as ``by_torch``, as a planned call."""
        if self._by_torch is self._request.by_torch:
            return self._planned(self._by_torch, native_by_torch(self._request))
        native = NATIVE.connected and on_gpu(self._request)
        return self._planned(self._by_torch, NativeCall(self._by_torch, TorchCall("aten::mm")) if native else None)

    def planned(self, kernel: TableKernel, use: Use) -> Callable[[], object]:
        """A function that calls a kernel as a planned call. Raises as ``call``."""
        run, handle = self._bound(self._device, kernel, use)
        return self._planned(
            run, native_call(self._device, handle, use, self._request, run) if NATIVE.connected else None
        )

    def _planned(self, run: Run, native: NativeCall | None) -> Callable[[], object]:
        """A function that makes the call in C++ if that supports it, else in Python."""
        arguments = self._arguments
        operands = arguments[: 2 + (native is not None and native.third != NONE)]
        if native is None or None in operands:
            return lambda: run(*arguments)
        kind = next(_KINDS)
        native.keep(cast("Sequence[torch.Tensor]", operands), kind, (0, 0, 0))
        self._natives.append(native)
        make: Callable[..., Any] = NATIVE.planned if len(operands) == 2 else NATIVE.planned_biased

        def call() -> object:
            d = make(*operands, kind)
            return run(*arguments) if d is None else d

        return call

    def close(self) -> None:
        """Removes this contest's plans from C++."""
        for native in self._natives:
            native.calls(drop=True)
        self._natives.clear()

    def takes(self, kernel: TableKernel, use: Use) -> bool:
        """Whether the dispatcher would make a plan with this use of a kernel."""
        problem = self.problem
        if problem.suffix and any(use.copied):
            return False
        return not problem.fusion.aux or kernel.record.launch.takes_aux(problem.n, Matrix(problem.n))

    def call(self, kernel: TableKernel, use: Use, *, stale: bool = False) -> Callable[[], Any]:
        """A function that calls a kernel.

        ``stale``: whether D is filled with NaN before each call, so that old contents cannot pass for a result. Raises
        LaunchError, GpuError or OSError, and so does the returned function.
        """
        device = cast("LaunchDevice", StaleMemory(self._device)) if stale else self._device
        run, _ = self._bound(device, kernel, use)
        return lambda: run(*next(self._sets))

    def _bound(self, device: LaunchDevice, kernel: TableKernel, use: Use) -> tuple[Run, OpenKernel]:
        """A function that runs a kernel on a set of operands, and the opened kernel. Raises GpuError if the kernel
        cannot be opened."""
        try:
            handle = self._open_kernel(kernel)
        except ByTorch as why:
            raise GpuError(str(why)) from None
        return bind(device, handle, use, self._request, self.problem.layout), handle

    @cached_property
    def _references(self) -> list[Reference]:
        """The references of D, and of Z if the fusion stores it as well."""
        from cudal2gen.bench.check import Reference  # imported late: with it comes the emulator, a third of a second

        problem, tensors = self.problem, self._tensors()
        references = [Reference(problem, tensors)]
        if problem.fusion.aux:
            references.append(Reference(problem.revised(fusion=problem.fusion.before_activation), tensors))
        return references

    @property
    def comparable(self) -> bool:
        """Whether results can be compared: the reference must be finite."""
        return all(reference.can_judge for reference in self._references)

    @property
    def computed(self) -> Problem:
        """The problem without the rows after the last group, which are not computed."""
        ends = self._tensors().ends
        return self.problem if ends is None else buckets.with_rows(self.problem, max(1, int(ends[-1])))

    def compare(self, result: Any) -> tuple[float, str]:
        """The largest error of a call's result, and what is wrong with the result, "" if it is right."""
        largest, wrong = 0.0, ""
        for reference, stored in zip(self._references, result if isinstance(result, tuple) else (result,), strict=True):
            several = self.problem.batched and not self.problem.grouped
            batch = (self.products, self.problem.m) if several else (-1,)
            error, finding = reference.compare(stored.reshape(*batch, stored.shape[-1]))
            largest, wrong = max(largest, error), wrong or finding
        return largest, wrong

    def _tensors(self) -> Tensors:
        """The operands in the form that the comparison takes: B as (n,k). The place of D has A, which is not used."""
        request, problem, (a, b, third) = self._request, self.problem, self._arguments
        if problem.batched and not problem.grouped:
            products = (self.products,), (request.batches.a,)
            a = _by_extent(a, problem.along_k.a, (problem.m, problem.k), request.operands.a.ld, *products)
        if request.pair and third is not None:
            cols = DERIVED.interleaved(b, third, self._device.empty)
        else:
            cols = _cols(b, request) if problem.fusion or problem.batched else b.t()
        bias = third if problem.fusion.bias == "n" else None
        return Tensors(a, cols, cols.mT, a, bias=bias, ends=third if problem.grouped else None)


class Contests:
    """Makes the contests of one call: for the ends of its bucket.

    ``outlives_call``: whether the contests continue after the call has returned. Then they use copies of the call's
    tensors.
    """

    def __init__(
        self, device: LaunchDevice, request: Request, arguments: Arguments, open_kernel: OpenFunction,
        outlives_call: bool,
    ) -> None:  # fmt: skip
        self._device, self._request, self._open_kernel = device, request, open_kernel
        self._arguments, self._must_copy = arguments, outlives_call
        self._made: list[Contest] = []

    def on(self, problem: Problem) -> Contest:
        """The contest on a problem. Raises torch's error if memory is short."""
        if self._must_copy:
            self._arguments, self._must_copy = _copies(self._device, self._arguments), False
        contest = Contest(self._device, self._request, problem, self._arguments, self._open_kernel)
        self._made.append(contest)
        return contest

    def close(self) -> None:
        """Closes all contests that were made."""
        for contest in self._made:
            contest.close()


def _rows(device: LaunchDevice, a: torch.Tensor, request: Request, rows: int, first: int) -> torch.Tensor:
    """A as a matrix with this number of rows. If the call has another number, it is a new matrix with repeated copies
    of the call's ``first`` rows (a number)."""
    m, _, k = request.sizes
    assert request.problem is not None
    matrix = _by_extent(a, request.problem.along_k.a, (m, k), request.operands.a.ld)
    if rows == m:
        return matrix
    wide = device.empty(a, rows, request.operands.a.ld)[:, :k]
    TORCH.index_select(matrix, 0, TORCH.arange(rows, device=a.device) % first, out=wide)
    return wide


def _groups(
    device: LaunchDevice, a: torch.Tensor, ends: torch.Tensor, request: Request, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A with this number of rows, which repeat the call's rows that are in groups, and the ends of the groups.

    The ends are in proportion to those of the call. They are rounded up, so that some group has rows if one of the
    call's groups has. Rows after the last group would not be compared.
    """
    m, scaled = request.sizes.m, device.empty(ends, len(ends))
    ends = ends.long().clamp(max=m)  # ends beyond A's rows would make torch fault on the device
    scaled.copy_((ends * rows + m - 1) // m)
    return _rows(device, a, request, rows, int(ends[-1]) or m), scaled


def _cols(b: torch.Tensor, request: Request) -> torch.Tensor:
    """B as (n,k), or in a batch as (products,n,k)."""
    problem, (_, n, k), ld = request.problem, request.sizes, request.operands.b.ld
    assert problem is not None
    several, steps = ((request.batches.products,), (request.batches.b,)) if problem.batched else ((), ())
    return _by_extent(b, problem.along_k.b, (n, k), ld, several, steps)


def _by_extent(
    tensor: torch.Tensor, along_k: bool, shape: tuple[int, int], ld: int, several: tuple[int, ...] = (),
    steps: tuple[int, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """A view of ``tensor`` with the ``shape`` (extent,k).

    ``along_k``: whether k is contiguous in memory; else the other extent is. ``ld``: the leading dimension in elements.
    ``several`` and ``steps``: the extents and strides of a batch, in front.
    """
    if along_k:
        return tensor.as_strided((*several, *shape), (*steps, ld, 1))
    return tensor.as_strided((*several, *shape[::-1]), (*steps, ld, 1)).mT


def _copies(device: LaunchDevice, arguments: Arguments) -> Arguments:
    """Copies of a call's tensors in the device's memory, with the same shapes and strides."""
    a, b, third = arguments
    return Arguments(_copy(device, a), _copy(device, b), None if third is None else _copy(device, third))


def _copy(device: LaunchDevice, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in memory of its own, with the same strides and the same elements between its rows."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = device.empty(tensor, span)
    memory.copy_(tensor.detach().as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride())
