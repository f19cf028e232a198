"""Declares for ctypes the structures and functions of cudal2gen.h, the C interface of packs.

That header describes each field. The structures' names here lack its prefix ``cudal2gen_``.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_INT, _POINTER, _LONG = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64


class Fusion(ctypes.Structure):
    """Which parts a fusion has: flags and codes."""

    _fields_ = [(name, _INT) for name in ("alpha", "bias", "residual", "aux", "activation", "gate")]


class Problem(ctypes.Structure):
    """The problem of a query or call."""

    _fields_ = [
        *((name, _INT) for name in ("acc", "layout", "m", "n", "k", "prefer", "ab", "d")),
        ("fusion", Fusion),
        *((name, _INT) for name in ("batch", "products")),
    ]


class Operands(ctypes.Structure):
    """The further operands of fusions and batches."""

    _fields_ = [
        *(("bias", _POINTER), ("c", _POINTER), ("ldc", _INT)),
        *(("alpha", ctypes.c_float), ("beta", ctypes.c_float)),
        *(("aux", _POINTER), ("ldaux", _INT)),
        *((f"stride_{name}", _LONG) for name in ("a", "b", "d", "bias", "c", "aux")),
        ("ends", _POINTER),
    ]


class Answer(ctypes.Structure):
    """What a query answers."""

    _fields_ = [("kernel", ctypes.c_char_p), ("speedup", ctypes.c_double), ("workspace_bytes", _LONG)]


class Call(ctypes.Structure):
    """The matrices, operands and memory of a call."""

    _fields_ = [
        *((name, kind) for matrix in "abd" for name, kind in ((matrix, _POINTER), (f"ld{matrix}", _INT))),
        *(("operands", _POINTER), ("workspace", _POINTER), ("workspace_bytes", _LONG), ("stream", _POINTER)),
    ]


# The function that enqueues the vendor's product, and the types of A, B and D with their leading dimensions.
Vendor = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER)
MATRICES = (_POINTER, _INT) * 3


def interface(library: Path) -> ctypes.CDLL:
    """Loads the library of a pack and declares the types of its functions."""
    api = ctypes.CDLL(str(library))
    api.cudal2gen_last_error.restype = ctypes.c_char_p
    for name, arguments in {
        "pack_open": (ctypes.c_char_p, ctypes.c_char_p, _POINTER),
        "pack_close": (_POINTER,),
        "query": (_POINTER,) * 3,
        "matmul": (_POINTER, _POINTER, *MATRICES, _POINTER, _POINTER),
        "gemm": (_POINTER, _POINTER, *MATRICES, _POINTER, _POINTER, _POINTER),
        "plan_create": (_POINTER,) * 4,
        "plan_run": (_POINTER, *MATRICES, _POINTER, _POINTER, _POINTER),
        "plan_destroy": (_POINTER,),
        "plan_autotune": (*(_POINTER,) * 5, ctypes.c_double, _POINTER, _POINTER),
    }.items():
        getattr(api, f"cudal2gen_{name}").argtypes = arguments
    return api
