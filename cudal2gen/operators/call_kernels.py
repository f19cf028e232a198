"""Makes the functions that call an opened kernel with operands of one kind. They run at every call, so they are short.

A call allocates D, scratch memory and padded copies from torch, and launches the kernel once on the current stream. It
never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudal2gen.kernel import Layout, Use, aligned, ceil_div
from cudal2gen.kernel.fusion import PLAIN
from cudal2gen.kernel.launch import Groups
from cudal2gen.kernel.problem import rows_along_k
from cudal2gen.launch.launcher import Fused, OpenKernel
from cudal2gen.operators.call_native import (
    BIAS,
    BIAS_AFTER,
    MAX_DIMENSIONS,
    NATIVE,
    NONE,
    OUT,
    NativeCall,
    NativeLaunch,
    TorchCall,
)
from cudal2gen.operators.call_torch import torch_linear, torch_matmul
from cudal2gen.operators.derived import DERIVED
from cudal2gen.operators.devices import LaunchDevice
from cudal2gen.operators.plan_requests import BIASED, Finish, Request, Run, add
from kernelproof.ground.element import Element

if TYPE_CHECKING:
    import torch


_OPERATORS: dict[Run, str] = {torch_matmul: "aten::matmul", torch_linear: "aten::linear"}


def bind(device: LaunchDevice, kernel: OpenKernel, use: Use, request: Request, layout: Layout) -> Run:
    """A function that calls a kernel with operands like those of ``request``.

    ``use``: the sizes to launch, and which operands are copied to padded memory. ``layout``: how A and B are stored.
    The function raises LaunchError if the launcher refuses the operands.
    """
    problem = request.problem
    assert problem is not None
    bind_kind = (
        _bind_grouped
        if problem.grouped
        else _bind_fused
        if problem.fusion
        else _bind_padded
        if any(use.copied)
        else _bind_direct
    )
    run = bind_kind(device, kernel, use, request, layout)
    if request.finish is not None:
        run = _with_finish(run, request.finish)
    if request.pair:
        run = _with_interleaving(device, run, request.by_torch)
    if device.alone:
        return run

    def on_its_device(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Any:
        with device.current():
            return run(a, b, out)

    return on_its_device


def native_call(device: LaunchDevice, kernel: OpenKernel, use: Use, request: Request, run: Run) -> NativeCall | None:
    """The call of ``run``, which ``bind`` returned, in a form that C++ can make; None if C++ cannot make it.

    C++ launches only plain kernels and kernels that add a bias, on the operands in place. It makes no calls with groups
    or padded copies, and the only step that it leaves to torch is adding a bias.
    """
    problem, place = request.problem, device.place
    if place is None or problem is None or problem.grouped or any(use.copied):
        return None
    if problem.fusion not in (PLAIN, BIASED) or request.finish not in (None, add):
        return None
    if request.pair or len(request.shape) > MAX_DIMENSIONS:
        return None
    a, b, d = request.operands
    launch, sized = kernel.sized_call(a.ld, b.ld, d.ld, *use.launched, request.batches)
    scratch = _workspace(kernel, use, request, request.batches.products)
    call = NativeLaunch(launch, sized, kernel.fused_call, scratch, request.shape, problem.d == "f32", place)
    return NativeCall(run, call, _third(request, BIAS if problem.fusion else BIAS_AFTER))


def _third(request: Request, bias: int) -> int:
    """The kind of a call's third operand (``OUT``, ``NONE``, ..); ``bias``: the kind if it is a bias."""
    return OUT if request.has_out else NONE if request.fusion == PLAIN else bias


def native_by_torch(request: Request) -> NativeCall | None:
    """torch's own product in a form that C++ can make; None if it takes more than one operator of torch.

    On the CPU it takes several, because operands are first converted to fp32.
    """
    operator = _OPERATORS.get(request.by_torch)
    if operator is None or not (NATIVE.connected and on_gpu(request)):
        return None
    return NativeCall(request.by_torch, TorchCall(operator, "out" if request.has_out else ""), _third(request, BIAS))


def on_gpu(request: Request) -> bool:
    """Whether a request's tensors lie on a CUDA device."""
    return request.device >= 0


def _with_finish(run: Run, finish: Finish) -> Run:
    """The call of a plain kernel, after which torch computes the rest (``finish``) of the fused operation."""
    if finish is add:

        def biased(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return run(a, b, None).add_(bias)

        return biased

    def completed(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return finish(run(a, b, None), bias)

    return completed


def _with_interleaving(device: LaunchDevice, run: Run, by_torch: Run) -> Run:
    """A call with two weights, of which the kernel reads an interleaved copy that is kept between calls.

    While a CUDA graph is captured, torch computes instead: replays of the graph would read the old copy even after the
    weights have changed.
    """

    def on_copy(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor | None) -> Any:
        assert w3 is not None
        if device.capturing():
            return by_torch(x, w1, w3)
        return run(x, DERIVED.interleaved(w1, w3, device.empty), None)

    return on_copy


def _bind_fused(device: LaunchDevice, kernel: OpenKernel, use: Use, request: Request, layout: Layout) -> Run:  # noqa: ARG001
    """A launch of a fused kernel. Returns D, and also Z if the fusion has ``aux``; both are contiguous. The third
    operand is a bias along n."""
    (lda, ldb, ldd), sizes = (matrix.ld for matrix in request.operands), use.launched
    scratch_size, aux = _workspace(kernel, use, request), request.fusion.aux
    shape, shape_of_z = request.shape, (*request.shape[:-1], request.sizes.n)

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Any:
        d = device.empty(a, *shape)
        z = device.empty(a, *shape_of_z) if aux else None
        scratch = device.empty(a, scratch_size) if scratch_size else None
        # ``vector`` and ``scratch`` are freed when this returns, before the kernel has run. That is safe: torch gives
        # their memory only to later work of the same stream.
        vector = None if bias is None else bias.contiguous()
        operands = Fused(
            0 if vector is None else vector.data_ptr(), 0, 0, 1.0, 0.0, 0 if z is None else z.data_ptr(), sizes.n
        )
        workspace = 0 if scratch is None else scratch.data_ptr()
        places = a.data_ptr(), lda, b.data_ptr(), ldb, d.data_ptr(), ldd
        kernel.launch(*places, *sizes, workspace, device.stream(), operands)
        return d if z is None else (d, z)

    return run


def _bind_grouped(device: LaunchDevice, kernel: OpenKernel, use: Use, request: Request, layout: Layout) -> Run:  # noqa: ARG001
    """A launch on groups of rows. The third operand ``offs`` has for each group the index of the row after its last."""
    (lda, ldb, ldd), sizes, spacing = (matrix.ld for matrix in request.operands), use.launched, request.batches
    empty_d = d_memory(device, request)

    def run(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
        assert offs is not None
        d, ends = empty_d(a, *request.shape), offs.contiguous()
        groups = Groups(ends.data_ptr(), spacing.products, spacing.b)
        places = a.data_ptr(), lda, b.data_ptr(), ldb, d.data_ptr(), ldd
        kernel.launch(*places, *sizes, 0, device.stream(), groups=groups)
        return d

    return run


def _bind_direct(device: LaunchDevice, kernel: OpenKernel, use: Use, request: Request, layout: Layout) -> Run:  # noqa: ARG001
    """A launch of a plain kernel on the operands in place."""
    a, b, d = request.operands
    launch = kernel.sized(a.ld, b.ld, d.ld, *use.launched, request.batches)
    scratch_size = _workspace(kernel, use, request, request.batches.products)
    empty, stream, shape, check = device.empty, device.stream, request.shape, kernel.check
    empty_d = d_memory(device, request)

    # This repeats parts of ``_bind_padded``, because further Python calls would add to the host's time of every call.
    # Scratch is freed when it returns, before the kernel has run. That is safe, because torch gives its memory only to
    # later work of the same stream.
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        d = empty_d(a, *shape) if out is None else out
        if scratch_size:
            scratch = empty(a, scratch_size)
            code = launch(a.data_ptr(), b.data_ptr(), d.data_ptr(), scratch.data_ptr(), stream())
        else:
            code = launch(a.data_ptr(), b.data_ptr(), d.data_ptr(), 0, stream())
        if code:
            check(code)
        return d

    return run


def _bind_padded(device: LaunchDevice, kernel: OpenKernel, use: Use, request: Request, layout: Layout) -> Run:
    """A launch on padded copies of the operands that the kernel does not take in place."""
    # m, n, k are the extents of the caller's product; rows, cols, depth are those of the launched, padded product.
    (m, n, k), (rows, cols, depth), operands = request.sizes, use.launched, request.operands
    along = rows_along_k(layout)
    a_own, a_wide = ((m, k), (rows, depth)) if along.a else ((k, m), (depth, rows))
    b_own, b_wide = ((n, k), (cols, depth)) if along.b else ((k, n), (depth, cols))
    vector = _element(request).vector  # elements in 16 bytes; rows of D are aligned too, as its elements are no smaller
    lda, ldb, ldd = (
        aligned(wide, vector) if copied else matrix.ld
        for matrix, copied, wide in zip(operands, use.copied, (a_wide[1], b_wide[1], cols), strict=True)
    )
    copies_a, copies_b, copies_d = use.copied
    launch, scratch_size = kernel.sized(lda, ldb, ldd, *use.launched), _workspace(kernel, use, request)
    empty_d = d_memory(device, request)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        d = empty_d(a, *request.shape) if out is None else out
        wide_a = _wide(device, a.as_strided(a_own, (operands.a.ld, 1)), a_wide[0], lda) if copies_a else a
        wide_b = _wide(device, b.as_strided(b_own, (operands.b.ld, 1)), b_wide[0], ldb) if copies_b else b
        wide_d = empty_d(a, rows, ldd) if copies_d else d
        scratch = device.empty(a, scratch_size) if scratch_size else None
        workspace = 0 if scratch is None else scratch.data_ptr()
        kernel.check(launch(wide_a.data_ptr(), wide_b.data_ptr(), wide_d.data_ptr(), workspace, device.stream()))
        if copies_d:
            d.as_strided((m, n), (operands.d.ld, 1)).copy_(wide_d[:m, :n])
        return d

    return run


def d_memory(device: LaunchDevice, request: Request) -> Callable[..., torch.Tensor]:
    """A function that allocates D. The device allocates elements of A's type; an fp32 D is a view of twice as many."""
    if request.problem is None or request.problem.d == "same":
        return device.empty
    dtype = request.problem.output.torch_dtype

    def empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
        return device.empty(like, *shape[:-1], shape[-1] * dtype.itemsize // like.element_size()).view(dtype)

    return empty


def _element(request: Request) -> Element:
    """The type of A and B of a request that has a problem."""
    assert request.problem is not None
    return request.problem.element


def _workspace(kernel: OpenKernel, use: Use, request: Request, products: int = 1) -> int:
    """The size of a launch's scratch memory, in elements of A's type."""
    return ceil_div(kernel.workspace_bytes(*use.launched, products), _element(request).bytes)


def _wide(device: LaunchDevice, matrix: torch.Tensor, rows: int, ld: int) -> torch.Tensor:
    """A copy of the matrix in the upper left corner of a larger one, which is zero elsewhere.

    Zeros along k add nothing to a sum, and the additional rows and columns of D are not copied back.
    """
    wide = device.empty(matrix, rows, ld)
    if wide.shape != matrix.shape:
        wide.zero_()
    wide[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
    return wide
