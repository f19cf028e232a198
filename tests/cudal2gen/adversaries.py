"""Contenders with faults that a lenient check would miss. Each wraps a right contender.

They are written in torch alone, so that they run on a GPU and on the emulated device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Call, Contender
from cudal2gen.launch.operands import Operands

if TYPE_CHECKING:
    import torch


class Adversary:
    """Wraps the calls of a right contender with a fault. ``empty`` allocates tensors on the contender's device."""

    def __init__(self, right: Contender, empty: Callable[..., torch.Tensor]) -> None:
        self.right, self.empty = right, empty

    @property
    def name(self) -> str:
        """The class's name."""
        return type(self).__name__

    detail = ""

    def prepare(self, problem: Problem, race: Any) -> None: ...

    def close(self) -> None:
        """Closes the right contender."""
        self.right.close()  # type: ignore[attr-defined]

    def bind(self, operands: Operands) -> Call:
        """The faulty call; each subclass has its own."""
        raise NotImplementedError


def with_new_d(operands: Operands, empty: Callable[..., torch.Tensor]) -> Operands:
    """The same inputs, and a new D with the same leading dimension."""
    d = operands.d
    other = empty(d.shape[0] * d.stride(0)).unflatten(0, (d.shape[0], d.stride(0)))[:, : d.shape[1]]
    return Operands(operands.a, operands.b, operands.b_nn, other)


class CachesByShape(Adversary):
    """Computes each size once, and returns that result in later calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.results: dict[Any, torch.Tensor] = {}

    def bind(self, operands: Operands) -> Call:
        run, key = self.right.bind(operands), (operands.a.shape, operands.d.shape)

        def call() -> None:
            if key in self.results:
                operands.d.copy_(self.results[key])
            else:
                run()
                self.results[key] = operands.d.clone()

        return call


class CachesByAddress(Adversary):
    """Computes each set of addresses once, and returns that result in later calls."""

    def bind(self, operands: Operands) -> Call:
        run, results = self.right.bind(operands), []

        def call() -> None:
            if results:
                operands.d.copy_(results[0])
            else:
                run()
                results.append(operands.d.clone())

        return call


class ChangesItsInput(Adversary):
    """Stores a right D, and then changes an element of A."""

    def bind(self, operands: Operands) -> Call:
        run = self.right.bind(operands)

        def call() -> None:
            run()
            operands.a[-1, -1] = 0.015625

        return call


class WritesPartOfD(Adversary):
    """Does not write the last row of D."""

    def bind(self, operands: Operands) -> Call:
        whole = with_new_d(operands, self.empty)
        run = self.right.bind(whole)

        def call() -> None:
            run()
            operands.d[:-1].copy_(whole.d[:-1])

        return call


class WritesPartOfDUnlessItIsNaN(Adversary):
    """Does not write the last row of D if it holds finite numbers."""

    def bind(self, operands: Operands) -> Call:
        whole = with_new_d(operands, self.empty)
        run = self.right.bind(whole)

        def call() -> None:
            run()
            rows = -1 if bool(operands.d[-1].isfinite().all()) else len(operands.d)
            operands.d[:rows].copy_(whole.d[:rows])

        return call


class WritesPastItsRows(Adversary):
    """Writes one element past the end of a row, like a vector store that is too wide."""

    def bind(self, operands: Operands) -> Call:
        run, d = self.right.bind(operands), operands.d
        beyond = d.as_strided((1,), (1,), d.storage_offset() + d.shape[1])

        def call() -> None:
            run()
            beyond.fill_(0.0)

        return call


class WritesPastD(Adversary):
    """Writes one row past the end of D."""

    def bind(self, operands: Operands) -> Call:
        run, d = self.right.bind(operands), operands.d
        beyond = d.as_strided((d.shape[1],), (1,), d.storage_offset() + d.shape[0] * d.stride(0))

        def call() -> None:
            run()
            beyond.fill_(0.0)

        return call


class SkipsATileWhenLaunchedAgain(Adversary):
    """Is right at the first launch only, like a kernel whose counters are not reset."""

    def bind(self, operands: Operands) -> Call:
        whole = with_new_d(operands, self.empty)
        run, launches = self.right.bind(whole), [0]

        def call() -> None:
            run()
            left_out = 8 if launches[0] else 0
            operands.d[left_out:].copy_(whole.d[left_out:])
            operands.d[:left_out, 8:].copy_(whole.d[:left_out, 8:])
            launches[0] += 1

        return call


class AddsToAStaleWorkspace(Adversary):
    """Adds to a workspace that is zero only at the first launch."""

    def bind(self, operands: Operands) -> Call:
        whole = with_new_d(operands, self.empty)
        run, workspace = self.right.bind(whole), self.empty(*operands.d.shape).zero_()

        def call() -> None:
            run()
            workspace.add_(whole.d)
            operands.d.copy_(workspace)

        return call


class AccumulatesInHalf(Adversary):
    """Sums in fp16, whatever accumulator the problem asks for."""

    def bind(self, operands: Operands) -> Call:
        def call() -> None:
            total = operands.d.new_zeros(operands.d.shape)
            for start in range(0, operands.a.shape[1], 16):
                step = slice(start, start + 16)
                total += operands.a[:, step] @ operands.b[:, step].T
            operands.d.copy_(total)

        return call


class ReadsPastItsRows(Adversary):
    """Reads past the ends of A's rows, and adds zero times what it reads."""

    def bind(self, operands: Operands) -> Call:
        run, a = self.right.bind(operands), operands.a
        beyond = a.as_strided((a.shape[0], 1), (a.stride(0), 1), a.storage_offset() + a.shape[1])

        def call() -> None:
            run()
            operands.d[:, :1].add_(0 * beyond)

        return call


# The finding that each fault must have. Faults of stream order have an adversary for each kind of device elsewhere.
FINDINGS: dict[type[Adversary], str] = {
    CachesByShape: "launched again: stale-result: new numbers in A and B gave the earlier D",
    CachesByAddress: "launched again: stale-result: new numbers in A and B gave the earlier D",
    ChangesItsInput: "input-changed: 1 of",
    WritesPartOfD: "unwritten-output: ",
    WritesPartOfDUnlessItIsNaN: "in other memory: wrong-value: ",
    WritesPastItsRows: "written-outside: 1 of",
    WritesPastD: "written-outside: ",
    SkipsATileWhenLaunchedAgain: "launched again: unwritten-output: ",
    AddsToAStaleWorkspace: "launched again: wrong-value: ",
    AccumulatesInHalf: "wrong-value: ",
    ReadsPastItsRows: "wrong-value: ",
}
