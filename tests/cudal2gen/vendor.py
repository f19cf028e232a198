"""Stands in for nvmath's bindings of cuBLAS and cuBLASLt: column-major products in host memory, without a GPU.

Documented behaviour only: column-major matrices with leading dimensions, op(A) op(B), a workspace limit, algorithms
that differ in time. Names and order of arguments are compared with the real modules'.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# cuBLAS codes of a transposed and of a plain operand (cublasOperation_t), and of the types in which it accumulates
# (cublasComputeType_t).
T, N = 1, 0
COMPUTE_16F, COMPUTE_32F = 64, 68
COMPUTE = {COMPUTE_16F: np.float16, COMPUTE_32F: np.float32}


def matrix(pointer: int, rows: int, cols: int, ld: int) -> Any:
    """A column-major fp16 matrix in memory, as a NumPy view."""
    assert ld >= rows, "a column is longer than the leading dimension"
    assert pointer % 16 == 0
    size = (cols - 1) * ld + rows
    flat = np.frombuffer((ctypes.c_uint16 * size).from_address(pointer), np.float16)
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (2, 2 * ld))


def scalar(pointer: int, compute: int) -> float:
    """The number of the compute type at a host address."""
    kind = COMPUTE[compute]
    size = np.dtype(kind).itemsize
    return float(np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), kind)[0])


def product(a: Any, b: Any, compute: int) -> Any:
    """The product; if the accumulator is fp16, it is rounded after every 8 of k."""
    if compute == COMPUTE_32F:
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    total = np.zeros((a.shape[0], b.shape[1]), np.float16)
    for at in range(0, a.shape[1], 8):
        part = a[:, at : at + 8].astype(np.float32) @ b[at : at + 8].astype(np.float32)
        total = (total.astype(np.float32) + part).astype(np.float16)
    return total


@dataclass
class Library:
    """The state of both libraries.

    - ``spend``: called with the microseconds and the name of each product.
    - ``times``: microseconds of cuBLASLt's algorithms, in the order of its heuristic; ``loading_us``: the additional
      time of the first call of each, and ``loaded``: the numbers of those that were called.
    - ``refused``: the numbers of algorithms that raise ``error`` when they are called.
    - ``objects``: the facts of each handle, descriptor, layout and preference by its number, also after its end.
    - ``computes``, ``streams``, ``workspace_limits``, ``heuristics``: the compute types and streams of all products so
      far, and the workspace limits and the number of questions to the heuristic.
    """

    spend: Callable[[float, str], None]
    times: list[float] = field(default_factory=lambda: [10.0])
    loading_us: float = 0.0
    loaded: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    error: type[Exception] = RuntimeError
    version: int = 130000
    objects: dict[int, dict[str, Any]] = field(default_factory=dict)
    computes: list[int] = field(default_factory=list)
    heuristics: int = 0
    streams: list[int] = field(default_factory=list)
    workspace_limits: list[int] = field(default_factory=list)

    def _new(self, **facts: Any) -> int:
        """Makes an object with these facts, and returns its number."""
        number = 1000 + len(self.objects)
        self.objects[number] = {"alive": True, **facts}
        return number

    def _get(self, number: int) -> dict[str, Any]:
        """The facts of an object that exists."""
        assert self.objects[number]["alive"], "used after it was destroyed"
        return self.objects[number]

    def _end(self, number: int) -> None:
        """Destroys an object."""
        assert self.objects[number]["alive"], "destroyed twice"
        self.objects[number]["alive"] = False

    def alive(self, kind: str) -> int:
        """The number of objects of this kind that exist."""
        return sum(facts["alive"] and facts["kind"] == kind for facts in self.objects.values())

    def blas(self) -> dict[str, Callable[..., Any]]:
        """cuBLAS's functions by name."""

        def set_workspace(handle: int, workspace: int, size: int) -> None:
            self._get(handle)["workspace"] = size

        def set_stream(handle: int, stream: int) -> None:
            self._get(handle).update(stream=stream, workspace=0)

        def gemm_ex(
            handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, atype: int, lda: int,
            b: int, btype: int, ldb: int, beta: int, c: int, ctype: int, ldc: int, compute_type: int, algo: int,
        ) -> None:  # fmt: skip
            assert (atype, btype, ctype, algo) == (2, 2, 2, 99)
            assert (scalar(alpha, compute_type), scalar(beta, compute_type)) == (1.0, 0.0)
            assert self._get(handle)["workspace"] >= 32 << 20
            self.streams.append(self._get(handle)["stream"])
            self.computes.append(compute_type)
            left = matrix(a, k, m, lda).T if transa == T else matrix(a, m, k, lda)
            right = matrix(b, n, k, ldb).T if transb == T else matrix(b, k, n, ldb)
            matrix(c, m, n, ldc)[:] = product(left, right, compute_type)
            self.spend(12.0, "cublas")

        return {
            "create": lambda: self._new(kind="handle", stream=0, workspace=0),
            "set_workspace": set_workspace,
            "set_stream": set_stream,
            "gemm_ex": gemm_ex,
        }

    def lt(self) -> dict[str, Callable[..., Any]]:
        """cuBLASLt's functions by name."""

        def get_heuristic(
            light_handle: int, operation_desc: int, adesc: int, bdesc: int, cdesc: int, ddesc: int, preference: int,
            requested_algo_count: int, heuristic_results_array: int, return_algo_count: int,
        ) -> None:  # fmt: skip
            from nvmath.bindings import cublasLt

            self.heuristics += 1
            for number in (light_handle, operation_desc, adesc, bdesc, cdesc, ddesc):
                self._get(number)
            self.workspace_limits.append(self._get(preference)["MAX_WORKSPACE_BYTES"])
            kind = cublasLt.matmul_heuristic_result_dtype
            count = min(requested_algo_count, len(self.times))
            raw = (ctypes.c_uint8 * (kind.itemsize * count)).from_address(heuristic_results_array)
            answers = np.frombuffer(raw, kind)
            for index in range(count):
                answers[index]["algo"]["data_"][:] = [index, 7, 7, 7, 7, 7, 7, 7]
                answers[index]["workspace_size"] = 1 << 20
            (ctypes.c_int32 * 1).from_address(return_algo_count)[0] = count

        def matmul(
            light_handle: int, compute_desc: int, alpha: int, a: int, adesc: int, b: int, bdesc: int, beta: int, c: int,
            cdesc: int, d: int, ddesc: int, algo: int, workspace: int, workspace_size_in_bytes: int, stream: int,
        ) -> None:  # fmt: skip
            index, *rest = np.frombuffer((ctypes.c_uint64 * 8).from_address(algo), np.uint64)
            assert rest == [7] * 7, "the algorithm is as the heuristic gave it"
            assert workspace_size_in_bytes >= 32 << 20
            assert workspace % 256 == 0
            if int(index) in self.refused:
                raise self.error(15)
            operation, of_a, of_b, of_d = (self._get(number) for number in (compute_desc, adesc, bdesc, ddesc))
            assert operation["scale"] == (2 if operation["compute"] == COMPUTE_16F else 0)
            assert (scalar(alpha, operation["compute"]), scalar(beta, operation["compute"])) == (1.0, 0.0)
            left, right = (matrix(at, of["rows"], of["cols"], of["ld"]) for at, of in ((a, of_a), (b, of_b)))
            left = left.T if operation.get("TRANSA") == T else left
            matrix(d, of_d["rows"], of_d["cols"], of_d["ld"])[:] = product(left, right, operation["compute"])
            self.computes.append(operation["compute"])
            self.streams.append(stream)
            loading_us = 0.0 if int(index) in self.loaded else self.loading_us
            self.loaded.add(int(index))
            self.spend(self.times[int(index)] + loading_us, f"lt {index}")

        def set_attribute(enumeration: str) -> Callable[[int, int, int, int], None]:
            def set_value(number: int, attr: int, buf: int, size_in_bytes: int) -> None:
                from nvmath.bindings import cublasLt

                name = getattr(cublasLt, enumeration)(attr).name
                raw = bytes((ctypes.c_uint8 * size_in_bytes).from_address(buf))
                self._get(number)[name] = int.from_bytes(raw, "little")

            return set_value

        # Every attribute of an algorithm is its number in the order of the heuristic.
        def config(algo: int, attr: int, buf: int, size_in_bytes: int, size_written: int) -> None:
            first = (ctypes.c_uint8 * 1).from_address(algo)[0]
            (ctypes.c_uint8 * size_in_bytes).from_address(buf)[0] = first

        return {
            "create": lambda: self._new(kind="handle"),
            "get_version": lambda: self.version,
            "matmul_desc_create": lambda compute, scale: self._new(kind="desc", compute=compute, scale=scale),
            "matmul_desc_set_attribute": set_attribute("MatmulDescAttribute"),
            "matmul_desc_destroy": self._end,
            "matrix_layout_create": lambda type, rows, cols, ld: self._new(kind="layout", rows=rows, cols=cols, ld=ld),
            "matrix_layout_destroy": self._end,
            "matmul_preference_create": lambda: self._new(kind="preference"),
            "matmul_preference_set_attribute": set_attribute("MatmulPreferenceAttribute"),
            "matmul_preference_destroy": self._end,
            "matmul_algo_get_heuristic": get_heuristic,
            "matmul": matmul,
            "matmul_algo_config_get_attribute": config,
        }


def install(monkeypatch: Any, spend: Callable[[float, str], None]) -> Library:
    """Replaces nvmath's bindings by the fakes, name by name. A name that nvmath lacks is an error."""
    from nvmath.bindings import cublas, cublasLt

    class Refused(cublasLt.cuBLASLtError):  # type: ignore[misc]
        """The library's error; the real one asks the library for its text."""

        def __init__(self, status: int) -> None:
            Exception.__init__(self, f"status {status}")

    library = Library(spend, error=Refused)
    for module, functions in ((cublas, library.blas()), (cublasLt, library.lt())):
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)
    return library
