"""Calls the C interface of a pack with drawn arguments, right and wrong ones, on a runtime that launches nothing.

    python -m tests.cudal2gen.fuzzed_c LIBRARY PACK RUNTIME COUNT SEED

Prints how often each code came back. A code that differs from what cudal2gen.h says ends it with an error.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cudal2gen.c_interface import Answer, Call, Fusion, Operands, Problem, interface

# Extents and leading dimensions: limits of an int, sizes that tiles of kernels divide or do not, and usual ones twice.
SIZES = (-(2**31), -1, 0, 1, 8, 32, 33, 64, 64, 64, 96, 128, 128, 256, 4096, 1 << 24, (1 << 24) + 1, 2**31 - 1)
# Elements from one matrix of a batch to the next: limits of 64 bits, and strides beyond any memory.
STRIDES = (-(2**63), -1, 0, 8, 64 * 64, 64 * 128, 2**47, 2**62, 2**63 - 1)
# Null, addresses aligned to 256 bytes, and two that are aligned to 2 and to 8 bytes alone. None is ever read.
ADDRESSES = (None, 256, 1 << 20, 1 << 20, 1 << 20, 0x7F0002, 0x7F0008)
# How many values each enum of a problem has in cudal2gen.h; they are 0 to count - 1.
ENUM_SIZES = {"acc": 2, "layout": 4, "prefer": 3, "ab": 2, "d": 2, "batch": 3}
# Codes of cudaError and of cudal2gen.h. INVALID is cudaErrorInvalidValue, 716 cudaErrorMisalignedAddress.
OK, INVALID, VENDOR, BAD_PACK, MISALIGNED = 0, 1, -1, -2, 716
# The functions of the interface that are drawn.
NAMES = (
    "query",
    "matmul",
    "gemm",
    "plan_create",
    "plan_run",
    "plan_autotune",
    "pack_open",
    "pack_close",
    "plan_destroy",
)


class Fuzzer:
    """Opens a pack and draws calls of its C interface.

    ``plans`` has the open plans, each with its problem. ``dead`` has pointers that are no open pack or plan.
    """

    def __init__(self, library: Path, folder: Path, runtime: Path, seed: int) -> None:
        self.api, self.random = interface(library), random.Random(seed)
        self.folder, self.runtime = os.fsencode(folder), os.fsencode(runtime)
        self.pack = ctypes.c_void_p()
        assert self.api.cudal2gen_pack_open(self.folder, self.runtime, ctypes.byref(self.pack)) == OK
        self.plans: list[tuple[Any, Problem]] = []
        # Destroyed plans, closed packs, plans of closed packs, and an address that never was a handle.
        self.dead: list[Any] = [ctypes.c_void_p(ctypes.addressof(self.pack))]

    def one_of(self, *values: Any) -> Any:
        """A drawn one of these values. A value that is repeated is drawn more often."""
        return self.random.choice(values)

    def rarely(self, other: Any, usual: Any) -> Any:
        """The other value in 8 % of draws. An argument is usually right, or most calls would end at the first check."""
        return other if self.random.random() < 0.08 else usual

    def a_pack(self) -> tuple[Any, bool]:
        """A pack's handle, and whether it is open."""
        pack = self.rarely(self.one_of(None, *self.dead), self.pack)
        return pack, pack is self.pack

    def problem(self) -> Problem:
        """A problem that the pack's kernels usually serve, with drawn values in place of some members."""
        sizes = {name: self.rarely(self.one_of(*SIZES), usual) for name, usual in (("m", 64), ("n", 64), ("k", 128))}
        enums = {name: self.one_of(*range(count)) for name, count in ENUM_SIZES.items()}
        if self.random.random() < 0.6:  # types and layout of kernels that the pack has
            enums |= {"acc": 1, "layout": 0, "ab": 0, "d": 0, "prefer": 1}
        if self.random.random() < 0.1:  # a value that the header's enum does not have
            name = self.one_of(*ENUM_SIZES)
            enums[name] = self.one_of(-1, ENUM_SIZES[name], 99)
        fusion = Fusion(bias=self.one_of(0, 1), activation=self.one_of(0, 1))
        if self.random.random() < 0.4:
            fusion = Fusion(**{name: self.one_of(0, 0, 0, 1, 2, self.rarely(-5, 0)) for name, _ in Fusion._fields_})
        products = self.one_of(0, 1, 3, 3, 65536, self.rarely(self.one_of(*SIZES), 2))
        return Problem(fusion=self.one_of(Fusion(), fusion), products=products, **sizes, **enums)

    def operands(self) -> Operands | None:
        """Drawn operands beside the matrices; None for a null pointer."""
        if self.random.random() < 0.3:
            return None
        strides = {f"stride_{name}": self.one_of(*STRIDES) for name in ("a", "b", "d", "bias", "c", "aux")}
        addresses = {name: self.one_of(*ADDRESSES) for name in ("bias", "c", "aux", "ends")}
        numbers = {"alpha": self.one_of(0.0, 1.0, float("nan")), "beta": float("inf")}
        return Operands(ldc=self.one_of(*SIZES), ldaux=self.one_of(*SIZES), **strides, **addresses, **numbers)

    def matrices(self) -> list[Any]:
        """The addresses of A, B and D, each followed by its leading dimension."""
        usual = ((1 << 20, 128), (1 << 21, 128), (1 << 22, 64))
        return [
            value
            for address, ld in usual
            for value in (self.rarely(self.one_of(*ADDRESSES), address), self.rarely(self.one_of(*SIZES), ld))
        ]

    def reference(self, value: Any) -> Any:
        """A pointer to a structure; None, which is null, for None."""
        return None if value is None else ctypes.byref(value)

    def call(self) -> int:
        """Makes one call and checks its code. Returns the code."""
        name = self.one_of(*NAMES)
        return int(getattr(self, f"_{name}")())

    def _query(self) -> int:
        """Asks for the answer to a drawn problem."""
        (pack, is_open), problem, answer = self.a_pack(), self.rarely(None, self.problem()), self.rarely(None, Answer())
        code = self.api.cudal2gen_query(pack, self.reference(problem), self.reference(answer))
        self._agrees(code, not is_open or None in (problem, answer), problem)
        if code == OK and answer is not None:
            assert answer.workspace_bytes >= 0
            assert answer.kernel is not None
        return int(code)

    def _gemm(self, plain: bool = False) -> int:
        """Computes a drawn problem; ``plain``: by the function without operands beside the matrices."""
        (pack, is_open), problem, operands = self.a_pack(), self.rarely(None, self.problem()), self.operands()
        matrices, workspace = self.matrices(), self.one_of(*ADDRESSES)
        more = () if plain else (self.reference(operands),)
        call = self.api.cudal2gen_matmul if plain else self.api.cudal2gen_gemm
        code = call(pack, self.reference(problem), *matrices, *more, workspace, None)
        self._agrees(code, not is_open or problem is None, problem, matrices)
        return int(code)

    def _matmul(self) -> int:
        return self._gemm(plain=True)

    def _plan_create(self) -> int:
        """Makes a plan, and keeps it if the call returns one."""
        (pack, is_open), problem, plan = self.a_pack(), self.rarely(None, self.problem()), ctypes.c_void_p()
        out = self.rarely(None, ctypes.byref(plan))
        code = self.api.cudal2gen_plan_create(
            pack, self.reference(problem), self.one_of(None, ctypes.byref(Answer())), out
        )
        self._agrees(code, not is_open or None in (problem, out), problem)
        return self._keep(code, plan, problem)

    def _plan_autotune(self) -> int:
        """Makes a plan by a race, of a duration that is often no positive number."""
        (pack, is_open), problem, plan = self.a_pack(), self.rarely(None, self.problem()), ctypes.c_void_p()
        matrices = self.matrices()
        workspace, operands = (self.one_of(*ADDRESSES), self.one_of(*STRIDES)), self.operands()
        call = Call(*matrices, ctypes.cast(self.reference(operands), ctypes.c_void_p) if operands else None, *workspace)
        milliseconds = self.one_of(0.01, 0.01, 0.01, 0.0, -1.0, float("nan"), float("inf"))
        given = self.rarely(None, call)
        code = self.api.cudal2gen_plan_autotune(
            pack, self.reference(problem), self.reference(given), None, None, milliseconds, None, ctypes.byref(plan)
        )
        self._agrees(code, not is_open or None in (problem, given) or milliseconds != 0.01, problem)
        return self._keep(code, plan, problem)

    def _keep(self, code: int, plan: Any, problem: Problem | None) -> int:
        """Keeps a plan that was made, for later calls. Returns the code."""
        assert bool(plan) == (code == OK)
        if plan and problem is not None:
            self.plans.append((plan, problem))
        return code

    def _plan_run(self) -> int:
        """Runs an open plan, a closed one, or none."""
        plan, problem = self.one_of(*self.plans, (None, None), (self.one_of(*self.dead), None))
        matrices = self.matrices()
        code = self.api.cudal2gen_plan_run(
            plan, *matrices, self.reference(self.operands()), self.one_of(*ADDRESSES), None
        )
        self._agrees(code, problem is None, problem, matrices)
        assert code != VENDOR, "the kernel was chosen when the plan was made"
        return int(code)

    def _plan_destroy(self) -> int:
        """Destroys one of more than 20 open plans; before that, only calls that are refused."""
        if len(self.plans) <= 20:
            return self._pass_dead_handle("plan_destroy")
        plan, _ = self.plans.pop(self.random.randrange(len(self.plans)))
        self.dead.append(plan)
        return int(self.api.cudal2gen_plan_destroy(plan))

    def _pass_dead_handle(self, name: str) -> int:
        """Passes null or a dead handle to a destroy or close function, which returns OK for null, else INVALID."""
        handle = self.one_of(None, *self.dead)
        code = getattr(self.api, f"cudal2gen_{name}")(handle)
        assert code == (OK if handle is None else INVALID)
        return int(code)

    def _pack_open(self) -> int:
        """Opens a folder that has no pack."""
        directory, runtime, out = (
            self.one_of(None, b"/nowhere", b""),
            self.one_of(None, self.runtime),
            ctypes.c_void_p(),
        )
        given = self.rarely(None, ctypes.byref(out))
        code = self.api.cudal2gen_pack_open(directory, runtime, given)
        assert code == (INVALID if directory is None or given is None else BAD_PACK)
        assert not out
        return int(code)

    def _pack_close(self) -> int:
        """In a tenth of calls: closes a pack that has a plan, whose run is then refused. In others: a refused call."""
        if self.random.random() > 0.1:
            return self._pass_dead_handle("pack_close")
        pack, plan = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.api.cudal2gen_pack_open(self.folder, self.runtime, ctypes.byref(pack)) == OK
        problem = Problem(acc=1, m=64, n=64, k=128, prefer=1)
        assert self.api.cudal2gen_plan_create(pack, ctypes.byref(problem), None, ctypes.byref(plan)) == OK
        code = self.api.cudal2gen_pack_close(pack)
        assert self.api.cudal2gen_plan_run(plan, *self.matrices(), None, None, None) == INVALID
        assert self.api.cudal2gen_plan_destroy(plan) == OK, "also after its pack is closed"
        self.dead += [pack, plan]
        return int(code)

    def _agrees(self, code: int, invalid: bool, problem: Problem | None, matrices: list[Any] | None = None) -> None:
        """Checks that cudal2gen.h allows the code. ``invalid``: whether an argument is missing, closed or out
        of range, apart from the problem's members and the matrices."""
        words = self.api.cudal2gen_last_error()
        assert (code == OK) == (words == b""), (code, words)
        if invalid or problem is None or self._out_of_range(problem):
            assert code == INVALID, (code, words)
            return
        products = problem.products if problem.batch else 1
        if 0 in (problem.m, problem.n, products):
            assert code == OK, (code, words)
        elif problem.k == 0 and matrices is not None and code != VENDOR:
            d, ldd = matrices[4:]
            assert code == (OK if d and ldd >= problem.n else INVALID), (code, words)
        elif matrices is not None and code != VENDOR and None in matrices[::2]:
            assert code == INVALID, (code, words)
        else:
            assert code in (OK, INVALID, VENDOR, MISALIGNED), (code, words)

    @staticmethod
    def _out_of_range(problem: Problem) -> bool:
        """Whether a member of the problem has a value that the header does not allow."""
        enums = any(not 0 <= getattr(problem, name) < count for name, count in ENUM_SIZES.items())
        fusion = not (0 <= problem.fusion.bias < 3 and 0 <= problem.fusion.activation < 5)
        return (
            enums or fusion or min(problem.m, problem.n, problem.k) < 0 or (problem.batch > 0 and problem.products < 0)
        )


def main(library: str, folder: str, runtime: str, count: str, seed: str) -> None:
    """Makes ``count`` drawn calls, closes what is open, and prints the number of times that each code was returned."""
    fuzzer = Fuzzer(Path(library), Path(folder), Path(runtime), int(seed))
    codes = Counter(fuzzer.call() for _ in range(int(count)))
    for plan, _ in fuzzer.plans:
        fuzzer.api.cudal2gen_plan_destroy(plan)
    assert fuzzer.api.cudal2gen_pack_close(fuzzer.pack) == OK
    print(" ".join(f"{code}:{times}" for code, times in sorted(codes.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
