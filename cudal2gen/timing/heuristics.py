"""Asks nvidia-matmul-heuristics, NVIDIA's own model of its kernels, which needs no GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from cudal2gen.kernel import Problem
from kernelproof.ground.chips import GPUS
from kernelproof.ground.element import F16
from kernelproof.ground.errors import MissingLibrary

RATED = 16  # choices whose least modelled time stands for that of a library's kernel


class RatedConfiguration(NamedTuple):
    """A configuration of CUTLASS, as the library's own object, and its modelled time in microseconds."""

    configuration: Any
    us: float


class MatmulHeuristics:
    """The library, which is under NVIDIA's licence. Raises MissingLibrary if it is not installed."""

    def __init__(self) -> None:
        try:
            import nvMatmulHeuristics as library
        except ImportError:
            raise MissingLibrary(
                "proposer heuristics needs nvidia-matmul-heuristics, under NVIDIA's licence: "
                "pip install nvidia-matmul-heuristics"
            ) from None
        self._library = library
        self._interfaces: dict[tuple[str, str, str], Any] = {}

    def answers(self, problem: Problem, most: int) -> list[RatedConfiguration]:
        """The library's choices for a problem, best first, at most ``most``."""
        letter = problem.element.heuristics
        precision = f"{letter}{'S' if problem.acc == 'f32' else F16.heuristics}{problem.output.heuristics}"
        # The library's name of a layout has A's letter before B's; ours has B's first. In its terms matrices are
        # row-major, and B is transposed if it is stored (n, k).
        layout = self._library.NvMatmulHeuristicsMatmulLayout[f"{problem.layout[::-1].upper()}_ROW_MAJOR"]
        interface = self._interface(problem.gpu, precision, problem.layout, layout)
        description = interface.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout)
        results = interface.get(description, most, precision)
        return [RatedConfiguration(result["kernel"], result["runtime"] * 1e6) for result in results]

    def least_us(self, problem: Problem) -> float:
        """The least modelled time of the library's first ``RATED`` choices, in microseconds."""
        return min(answer.us for answer in self.answers(problem, RATED))

    def _interface(self, gpu: str, precision: str, name: str, layout: Any) -> Any:
        """The library's object for a GPU, precision and layout, made once. ``name``: our name of the ``layout``."""
        key = (gpu, precision, name)
        if key not in self._interfaces:
            chip = GPUS[gpu]
            self._interfaces[key] = self._library.NvMatmulHeuristicsInterfaceEx(
                backend=self._library.NvMatmulHeuristicsTarget["CUTLASS3" if chip.capability.has_wgmma else "CUTLASS"],
                gpu=self._library.NvMatmulHeuristicsNvidiaGpu[chip.heuristics],
            )
            self._interfaces[key].loadInternalDiscoverySet(layout, precision=precision)
        return self._interfaces[key]
