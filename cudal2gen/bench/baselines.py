"""The baselines with which our kernels are compared: torch, cuBLAS, cuBLASLt and Triton.

A plain product is compared with ``torch.matmul``, with ``cublasGemmEx``, and with cuBLASLt using the first algorithm of
its heuristic or the fastest of many (auto-tuned). A fused product is compared with torch's product followed by one
operation for each part of the fusion, and with torch's calls of fused library epilogues where they exist. Batches are
compared with ``torch.bmm``, grouped products with ``torch._grouped_mm``.

Every baseline is a ``gpu.Contender``: it uses the same operands and stream as our kernel, writes D in place and sums in
the same type. cuBLAS expects column-major matrices, so it is asked for D^T = B^T A^T, whose column-major matrices are
our row-major ones; nothing is copied. The endings ``tn`` and ``nn`` of their names say how B is stored (N,K or K,N); A
is used as the problem stores it. The letters of a layout are those of cuBLAS's operations (t: transposed, n: not).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen import results
from cudal2gen.kernel import Acc, Layout, Problem, ceil_div
from cudal2gen.kernel.fusion import PLAIN
from cudal2gen.kernel.launch import Sizes, rows_of
from cudal2gen.kernel.problem import AlongK, rows_along_k
from cudal2gen.launch.gpu import Absent, Binder, Call, Contender, GpuError, MeasuringDevice, Race
from cudal2gen.launch.operands import Operands
from kernelproof.ground.element import F16, Element, element_of, output_of
from kernelproof.ground.errors import installation

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

WORKSPACE_BYTES = 64 << 20  # generous: NVIDIA recommends 32 MiB for cuBLASLt on Hopper
CANDIDATES = 100  # at most this many of the heuristic's algorithms are timed when auto-tuning
DEFAULT_BASELINES = (
    "torch.matmul",
    *(
        f"{name}-{layout}"
        for name in ("cublas", "cublaslt-heuristic", "cublaslt-autotuning")
        for layout in ("nn", "tn")
    ),
)
OPTIONAL_BASELINES = ("triton", "torch.compile")
# The baselines of fused and batched problems.
VARIANT_BASELINES = (results.UNFUSED, results.EPILOGUE, results.BATCHED, results.GROUPED)


def default_names(problem: Problem) -> tuple[str, ...]:
    """The default baselines of a problem of this kind."""
    return results.rivals(problem) if problem.suffix else DEFAULT_BASELINES


class Baseline:
    """The base of all baselines. ``prepare`` does nothing unless a subclass has an algorithm to choose."""

    def __init__(self, name: str, acc: Acc, device: MeasuringDevice) -> None:
        self.name = name
        self.acc = acc
        self._device = device

    def prepare(self, problem: Problem, race: Race) -> None:
        """Does nothing: there is no algorithm to choose."""

    @property
    def detail(self) -> str:
        """The library or algorithm that computes the last prepared problem."""
        return ""

    def bind(self, operands: Operands) -> Call:
        """A function that enqueues the product of these operands on the device's stream."""
        raise NotImplementedError


class Matmul(Baseline):
    """``torch.matmul`` of row-major A and B; torch chooses the library and the algorithm."""

    def prepare(self, problem: Problem, race: Race) -> None:  # noqa: ARG002
        import torch

        matmul = torch.backends.cuda.matmul
        if hasattr(matmul, "allow_fp16_accumulation"):
            matmul.allow_fp16_accumulation = self.acc == "f16"
        elif self.acc == "f16":
            raise Absent(f"torch {torch.__version__} cannot accumulate in fp16")

    @property
    def detail(self) -> str:
        import torch

        reduced = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        return f"allow_fp16_accumulation={self.acc == 'f16'} allow_fp16_reduced_precision_reduction={reduced}"

    def bind(self, operands: Operands) -> Call:
        import torch

        if operands.d.dtype == operands.a.dtype:
            return partial(torch.matmul, operands.a, operands.b_nn, out=operands.d)
        return partial(torch.mm, operands.a, operands.b_nn, out_dtype=operands.d.dtype, out=operands.d)


class UnfusedMatmul(Matmul):
    """torch's product, followed by one in-place operation for each part of a fusion.

    This is what a program without fused kernels does: every operation reads, rounds and writes all of D.
    """

    _fusion = PLAIN

    def prepare(self, problem: Problem, race: Race) -> None:
        super().prepare(problem, race)
        if problem.fusion.aux or problem.fusion.gate:
            raise Absent(f"{self.name} does not compute {problem.fusion}")
        self._fusion = problem.fusion

    def bind(self, operands: Operands) -> Call:
        import torch

        fusion, d, product = self._fusion, operands.d, super().bind(operands)
        bias = operands.bias if operands.bias is None or fusion.bias == "n" else operands.bias[:, None]
        activations = {
            "none": lambda: None,
            "relu": d.relu_,
            "silu": partial(torch.nn.functional.silu, d, inplace=True),
            "gelu": partial(torch._C._nn.gelu_, d),
            "gelu_tanh": partial(torch._C._nn.gelu_, d, approximate="tanh"),
        }
        activate = activations[fusion.activation]

        def call() -> None:
            product()
            if fusion.scale:
                d.mul_(operands.alpha)
            if bias is not None:
                d.add_(bias)
            if operands.c is not None:
                d.add_(operands.c, alpha=operands.beta)
            activate()

        return call


class EpilogueMatmul(Matmul):
    """torch's calls that compute a fusion in one kernel of cuBLAS or cuBLASLt.

    ``addmm`` computes alpha A B + beta C, or adds a bias along n; ``_addmm_activation`` adds such a bias and applies
    relu or the tanh approximation of gelu. The baseline is absent for other fusions.
    """

    _fusion = PLAIN

    def prepare(self, problem: Problem, race: Race) -> None:
        super().prepare(problem, race)
        if problem.fusion.text not in ("residual", "alpha+residual", "bias_n", "bias_n+relu", "bias_n+gelu_tanh"):
            raise Absent(f"torch has no epilogue for {problem.fusion}")
        if problem.d != "same":
            raise Absent(f"torch's epilogues store D as A and B, not d={problem.d}")
        self._fusion = problem.fusion

    def bind(self, operands: Operands) -> Call:
        import torch

        a, b, d, fusion = operands.a, operands.b_nn, operands.d, self._fusion
        if fusion.residual:
            return partial(torch.addmm, operands.c, a, b, beta=operands.beta, alpha=operands.alpha, out=d)
        if fusion.activation == "none":
            return partial(torch.addmm, operands.bias, a, b, out=d)
        gelu = fusion.activation == "gelu_tanh"
        return partial(torch._addmm_activation, operands.bias, a, b, use_gelu=gelu, out=d)


class GroupedMatmul(Matmul):
    """``torch._grouped_mm``, torch's product of groups of rows. It has no ``out`` argument, so each call returns a new
    D instead of writing into ours."""

    def prepare(self, problem: Problem, race: Race) -> None:
        import torch

        super().prepare(problem, race)
        if problem.fusion:
            raise Absent(f"{self.name} does not compute {problem.fusion}")
        if not hasattr(torch, "_grouped_mm"):
            raise Absent(f"torch {torch.__version__} has no product of groups")

    def bind(self, operands: Operands) -> Call:
        import torch

        out_dtype = {} if operands.d.dtype == operands.a.dtype else {"out_dtype": operands.d.dtype}
        return partial(torch._grouped_mm, operands.a, operands.b_nn, offs=operands.ends, **out_dtype)


class BatchedMatmul(Matmul):
    """``torch.bmm``, torch's batched product."""

    def prepare(self, problem: Problem, race: Race) -> None:
        super().prepare(problem, race)
        if problem.fusion:
            raise Absent(f"{self.name} does not compute {problem.fusion}")

    def bind(self, operands: Operands) -> Call:
        import torch

        a, b, d = operands.a, operands.b_nn, operands.d
        out_dtype = {} if d.dtype == a.dtype else {"out_dtype": d.dtype}
        return partial(torch.bmm, a, b, out=d, **out_dtype)


class CompiledMatmul(Matmul):
    """``torch.compile`` in its max-autotune mode."""

    def prepare(self, problem: Problem, race: Race) -> None:
        """Makes torch forget earlier problems. After a few shapes torch stops compiling new ones and only logs that,
        so later problems would run uncompiled."""
        import torch

        super().prepare(problem, race)
        torch._dynamo.reset()

    def bind(self, operands: Operands) -> Call:
        import torch

        product = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
        out_dtype = {} if operands.d.dtype == operands.a.dtype else {"out_dtype": operands.d.dtype}
        return partial(product, operands.a, operands.b_nn, out=operands.d, **out_dtype)


class TritonMatmul(Baseline):
    """A persistent Triton kernel; a race finds the fastest of its configurations for each problem."""

    def __init__(self, name: str, acc: Acc, device: MeasuringDevice) -> None:
        super().__init__(name, acc, device)
        self._configuration: dict[str, Any] | None = None

    def prepare(self, problem: Problem, race: Race) -> None:
        try:
            from cudal2gen.bench import triton_matmul
        except ImportError as error:
            raise Absent(f"triton is not installed ({error})") from None
        if not problem.along_k.a:
            raise Absent(f"the kernel of Triton reads A (m,k), not layout {problem.layout}")
        configurations = triton_matmul.CONFIGURATIONS
        binders: list[Binder] = [partial(self._bound, **configuration) for configuration in configurations]
        self._configuration = configurations[race(binders).index]

    @property
    def detail(self) -> str:
        return " ".join(f"{name}={value}" for name, value in (self._configuration or {}).items())

    def bind(self, operands: Operands) -> Call:
        """A call with the prepared configuration. Raises RuntimeError if ``prepare`` has not chosen one."""
        if self._configuration is None:
            raise RuntimeError(f"{self.name}: prepare() comes before bind()")
        return self._bound(operands, **self._configuration)

    def _bound(self, operands: Operands, **configuration: Any) -> Call:
        """A call of the Triton kernel on these operands. ``configuration``: the kernel's constants, such as its tile BM
        x BN."""
        import torch
        from triton.runtime.errors import OutOfResources

        from cudal2gen.bench.triton_matmul import persistent_matmul

        a, b, d = operands.a, operands.b_nn, operands.d
        (m, k), n = a.shape, d.shape[1]
        # On the CPU Triton interprets the kernel, for tests; any small number of CTAs will do.
        sms = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 4
        ctas = min(sms, ceil_div(m, configuration["BM"]) * ceil_div(n, configuration["BN"]))
        launch = partial(
            persistent_matmul[(ctas,)], a, b, d, m, n, k, a.stride(0), b.stride(0), d.stride(0),
            CTAS=ctas, HALF=self.acc == "f16", **configuration,
        )  # fmt: skip

        def call() -> None:
            try:
                launch()
            except OutOfResources as error:
                raise Absent(str(error)) from None

        return call


class _Scalars:
    """The addresses of alpha = 1 and beta = 0, stored in the accumulator's type as cuBLAS expects them."""

    def __init__(self, acc: Acc) -> None:
        self._values = np.array([1, 0], F16.dtype if acc == "f16" else "float32")
        self.alpha = self._values.ctypes.data
        self.beta = self.alpha + self._values.itemsize


class VendorResources:
    """The device, the workspace and the file of auto-tuned algorithms, which all baselines of the vendor share."""

    def __init__(self, device: MeasuringDevice, tuned: Path) -> None:
        self.device = device
        self.tuned = tuned

    @cached_property
    def workspace(self) -> torch.Tensor:
        """The workspace, which is allocated at its first use."""
        return self.device.empty(WORKSPACE_BYTES // F16.bytes)


class Vendor(Baseline):
    """Computes a product by cuBLAS or cuBLASLt. It reads A as it is stored; its name states how B is stored."""

    def __init__(self, name: str, acc: Acc, shared: VendorResources, b_along_k: bool) -> None:
        super().__init__(name, acc, shared.device)
        self._b_along_k = b_along_k
        self._shared = shared
        self._scalars = _Scalars(acc)

    def _layout(self, a_along_k: bool) -> Layout:
        """The layout of the product, whose B has the layout of the baseline's name."""
        return AlongK(a_along_k, self._b_along_k).layout

    def _matrices(self, operands: Operands) -> tuple[Layout, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The layout, A and B as that layout stores them, and D."""
        (rows, step), k = operands.a.stride()[-2:], operands.a.shape[-1]
        layout = self._layout(step == 1 and rows >= k)
        return layout, operands.stored_a(layout), operands.stored_b(layout), operands.d

    @property
    def _workspace(self) -> torch.Tensor:
        """The workspace that all baselines of the vendor share."""
        return self._shared.workspace


class Cublas(Vendor):
    """``cublasGemmEx`` with the default tensor-op algorithm and a workspace of ``WORKSPACE_BYTES``."""

    _stream: int | None = None

    @cached_property
    def _handle(self) -> int:
        from nvmath.bindings import cublas

        return int(cublas.create())

    def _follow(self, stream: int) -> None:
        """Sets the handle's stream, then its workspace: ``cublasSetStream`` resets the workspace to the default."""
        from nvmath.bindings import cublas

        cublas.set_stream(self._handle, stream)
        cublas.set_workspace(self._handle, self._workspace.data_ptr(), self._workspace.nbytes)
        self._stream = stream

    def bind(self, operands: Operands) -> Call:
        from nvmath import CudaDataType
        from nvmath.bindings import cublas

        layout, a, b, d = self._matrices(operands)
        (m, k), n = operands.a.shape, d.shape[1]
        kind, kind_d = int(CudaDataType[element_of(a).cuda_type]), int(CudaDataType[output_of(d).cuda_type])
        gemm = partial(
            cublas.gemm_ex, self._handle,
            *(int(cublas.Operation[letter.upper()]) for letter in layout), n, m, k,
            self._scalars.alpha, b.data_ptr(), kind, b.stride(0), a.data_ptr(), kind, a.stride(0),
            self._scalars.beta, d.data_ptr(), kind_d, d.stride(0),
            int(cublas.ComputeType.COMPUTE_16F if self.acc == "f16" else cublas.ComputeType.COMPUTE_32F),
            int(cublas.GemmAlgo.DEFAULT_TENSOR_OP),
        )  # fmt: skip
        stream = self._device.stream

        # The library reads raw addresses; ``_keep`` holds the objects behind them for as long as the call lives.
        def call(_keep: Any = (operands, self._scalars)) -> None:
            if (current := stream()) != self._stream:
                self._follow(current)
            gemm()

        return call


class _Descriptors:
    """cuBLASLt's descriptors of an operation and its matrices; D's descriptor also serves as C's.

    They are destroyed with the last call that uses them, but not when the interpreter exits: the library may be
    unloaded by then, and it frees its memory itself.
    """

    def __init__(self, types: tuple[Element, Element], acc: Acc, layout: Layout, *sizes: int) -> None:
        """``types``: the type of A and B, and that of D. ``sizes``: m, n, k, lda, ldb and ldd, in elements."""
        from nvmath import CudaDataType
        from nvmath.bindings import cublas, cublasLt

        m, n, k, lda, ldb, ldd = sizes
        compute = cublas.ComputeType.COMPUTE_16F if acc == "f16" else cublas.ComputeType.COMPUTE_32F
        scale = CudaDataType[F16.cuda_type if acc == "f16" else "CUDA_R_32F"]
        kind, kind_d = (int(CudaDataType[element.cuda_type]) for element in types)
        self.operation = int(cublasLt.matmul_desc_create(int(compute), int(scale)))
        # A column-major library takes B first, and the columns of its matrices are our rows.
        for attribute, letter in zip(("TRANSA", "TRANSB"), layout, strict=True):
            operation = np.array([int(cublas.Operation[letter.upper()])], np.int32)
            number = int(cublasLt.MatmulDescAttribute[attribute])
            cublasLt.matmul_desc_set_attribute(self.operation, number, operation.ctypes.data, operation.nbytes)
        along = rows_along_k(layout)
        self.b = int(cublasLt.matrix_layout_create(kind, *((k, n) if along.b else (n, k)), ldb))
        self.a = int(cublasLt.matrix_layout_create(kind, *((k, m) if along.a else (m, k)), lda))
        self.d = int(cublasLt.matrix_layout_create(kind_d, n, m, ldd))
        weakref.finalize(self, cublasLt.matmul_desc_destroy, self.operation).atexit = False
        for matrix in (self.b, self.a, self.d):
            weakref.finalize(self, cublasLt.matrix_layout_destroy, matrix).atexit = False


class CublasLt(Vendor):
    """``cublasLtMatmul`` with the first algorithm of the library's heuristic and up to ``WORKSPACE_BYTES`` of
    workspace."""

    def __init__(self, name: str, acc: Acc, shared: VendorResources, b_along_k: bool) -> None:
        super().__init__(name, acc, shared, b_along_k)
        self._algorithm: Array | None = None
        self._described: weakref.WeakValueDictionary[tuple[str | int, ...], _Descriptors] = (
            weakref.WeakValueDictionary()
        )

    @cached_property
    def _handle(self) -> int:
        from nvmath.bindings import cublasLt

        return int(cublasLt.create())

    def prepare(self, problem: Problem, race: Race) -> None:  # noqa: ARG002
        self._algorithm = np.array(self._candidates(problem, 1)["algo"][0])

    def bind(self, operands: Operands) -> Call:
        """A call with the prepared algorithm. Raises RuntimeError if ``prepare`` has not chosen one."""
        if self._algorithm is None:
            raise RuntimeError(f"{self.name}: prepare() comes before bind()")
        return self._bound(operands, self._algorithm)

    @property
    def detail(self) -> str:
        """The algorithm's attributes, as the library names them."""
        from nvmath.bindings import cublasLt

        if self._algorithm is None:
            return ""
        words = []
        for attribute in cublasLt.MatmulAlgoConfigAttribute:
            value = np.zeros(1, cublasLt.get_matmul_algo_config_attribute_dtype(int(attribute)))
            size = np.zeros(1, np.uint64)
            with suppress(cublasLt.cuBLASLtError):  # not every algorithm has every attribute
                cublasLt.matmul_algo_config_get_attribute(
                    self._algorithm.ctypes.data, int(attribute), value.ctypes.data, value.nbytes, size.ctypes.data
                )
                words.append(f"{attribute.name.lower()}={value[0]}")
        return " ".join(words)

    def _candidates(self, problem: Problem, count: int) -> Array:
        """Up to ``count`` algorithms that the heuristic proposes, its best first. Raises Absent if there is none."""
        from nvmath.bindings import cublasLt

        preference = cublasLt.matmul_preference_create()
        sizes, layout = Sizes(problem.m, problem.n, problem.k), self._layout(problem.along_k.a)
        types = (problem.element, problem.output)
        descriptors = self._descriptors(types, layout, *sizes, *rows_of(layout, sizes), problem.n)
        try:
            size = np.array([self._workspace.nbytes], np.uint64)
            attribute = cublasLt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
            cublasLt.matmul_preference_set_attribute(preference, int(attribute), size.ctypes.data, size.nbytes)
            candidates = np.zeros(count, cublasLt.matmul_heuristic_result_dtype)
            returned = np.zeros(1, np.int32)
            try:
                cublasLt.matmul_algo_get_heuristic(
                    self._handle,
                    descriptors.operation,
                    descriptors.b,
                    descriptors.a,
                    descriptors.d,
                    descriptors.d,
                    preference,
                    count,
                    candidates.ctypes.data,
                    returned.ctypes.data,
                )
            except cublasLt.cuBLASLtError as error:
                raise Absent(f"cuBLASLt has no algorithm: {error}") from None
        finally:
            cublasLt.matmul_preference_destroy(preference)
        candidates = candidates[: returned[0]]
        usable: Array = candidates[candidates["state"] == 0]
        if not len(usable):
            raise Absent("cuBLASLt has no algorithm for this problem")
        return usable

    def _descriptors(self, types: tuple[Element, Element], layout: Layout, *sizes: int) -> _Descriptors:
        """The descriptors for these types and sizes. All calls that are alive share one set."""
        key: tuple[str | int, ...] = (*(element.name for element in types), layout, *sizes)
        descriptors = self._described.get(key)
        if descriptors is None:
            descriptors = _Descriptors(types, self.acc, layout, *sizes)
            self._described[key] = descriptors
        return descriptors

    def _bound(self, operands: Operands, algorithm: Array) -> Call:
        """A call with one algorithm. The call raises Absent if the library refuses the algorithm, which happens even
        with some that its heuristic proposes."""
        from nvmath.bindings import cublasLt

        layout, a, b, d = self._matrices(operands)
        (m, k), n = operands.a.shape, d.shape[1]
        types = (element_of(a), output_of(d))
        descriptors = self._descriptors(types, layout, m, n, k, a.stride(0), b.stride(0), d.stride(0))
        own_algorithm = np.array(algorithm)
        matmul = partial(
            cublasLt.matmul, self._handle, descriptors.operation, self._scalars.alpha, b.data_ptr(), descriptors.b,
            a.data_ptr(), descriptors.a, self._scalars.beta, d.data_ptr(), descriptors.d, d.data_ptr(), descriptors.d,
            own_algorithm.ctypes.data,
            self._workspace.data_ptr(), self._workspace.nbytes,
        )  # fmt: skip
        stream = self._device.stream

        # As in ``Cublas``, ``_keep`` holds the objects behind the raw addresses.
        def call(_keep: Any = (operands, self._scalars, own_algorithm, descriptors)) -> None:
            try:
                matmul(stream())
            except cublasLt.cuBLASLtError as error:
                raise Absent(f"cuBLASLt refuses its algorithm: {error}") from None

        return call


class AutoTunedCublasLt(CublasLt):
    """``cublasLtMatmul`` with the fastest of up to ``CANDIDATES`` algorithms that its heuristic proposes.

    A race finds the fastest once per card, library version and problem; a file keeps the winners for later runs.
    """

    @cached_property
    def _stored(self) -> dict[tuple[str | int, ...], results.Algorithm]:
        return results.algorithms(self._shared.tuned)

    @cached_property
    def _library(self) -> str:
        from nvmath.bindings import cublasLt

        return f"cublasLt {cublasLt.get_version()}"

    def prepare(self, problem: Problem, race: Race) -> None:
        from nvmath.bindings import cublasLt

        card, layout = self._device.environment.name, self._layout(problem.along_k.a)
        own = {"name": card, "library": self._library, "acc": self.acc, "layout": layout}
        key = results.Algorithm.key_of(dict(problem) | own)
        algorithm = self._stored.get(key)
        if algorithm is None:
            candidates = self._candidates(problem, CANDIDATES)
            binders: list[Binder] = [partial(self._bound, algorithm=result["algo"]) for result in candidates]
            winner = race(binders)
            fastest = candidates[winner.index]
            algorithm = results.Algorithm(
                name=card, library=self._library, acc=self.acc, layout=layout,
                m=problem.m, n=problem.n, k=problem.k, ab=problem.ab, d=problem.d,
                blob=fastest["algo"].tobytes().hex(), workspace_bytes=int(fastest["workspace_size"]),
                candidates=winner.timed, rank=winner.index, median_us=winner.median_us,
            )  # fmt: skip
            results.append([algorithm], self._shared.tuned)
            self._stored[key] = algorithm
        blob = bytes.fromhex(algorithm.blob)
        self._algorithm = np.array(np.frombuffer(blob, cublasLt.matmul_algo_dtype)[0])


def _check_vendor() -> None:
    """Checks that cuBLASLt can be loaded, since nvmath looks for it only at the first call. Raises GpuError."""
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()
    except Exception as error:
        raise GpuError(
            f"cuBLAS and cuBLASLt cannot be called ({type(error).__name__}: {error}): {installation('gpu')}, "
            f"or choose --baselines without them"
        ) from None


def contenders(names: Iterable[str], acc: Acc, device: MeasuringDevice, tuned: Path) -> list[Contender]:
    """The baselines with these names. ``tuned`` is the file of auto-tuned algorithms.

    Raises ValueError for an unknown name, and GpuError if the vendor's bindings or libraries are not installed. Without
    that check, every measurement would be stored with the vendor's baselines absent.
    """
    names = list(names)
    by_torch: dict[str, type[Baseline]] = {
        "torch.matmul": Matmul,
        "torch.compile": CompiledMatmul,
        "triton": TritonMatmul,
        results.UNFUSED: UnfusedMatmul,
        results.EPILOGUE: EpilogueMatmul,
        results.BATCHED: BatchedMatmul,
        results.GROUPED: GroupedMatmul,
    }
    vendors: dict[str, type[Vendor]] = {
        "cublas": Cublas,
        "cublaslt-heuristic": CublasLt,
        "cublaslt-autotuning": AutoTunedCublasLt,
    }
    every_name = (*DEFAULT_BASELINES, *OPTIONAL_BASELINES, *VARIANT_BASELINES)
    if unknown := [name for name in names if name not in every_name]:
        raise ValueError(f"no baseline {', '.join(unknown)}: must be of {', '.join(every_name)}")
    if not set(names) <= set(by_torch):
        _check_vendor()
    shared = VendorResources(device, tuned)
    baselines: list[Contender] = []
    for name in names:
        if name in by_torch:
            baselines.append(by_torch[name](name, acc, device))
        else:
            kind, _, ending = name.rpartition("-")
            baselines.append(vendors[kind](name, acc, shared, ending == "tn"))
    return baselines
