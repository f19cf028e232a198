"""States how well the timing model orders the kernels of a problem, so that they are sorted only where that is useful.

The figures come from ``cudal2gen model --part recorded --held-out`` (docs/timing-evidence.md). They are mean rank
correlations of modelled with recorded times of Triton's tiles: of all tiles, and of those within 1.3 of the best.
"""

from __future__ import annotations

from typing import NamedTuple

from cudal2gen.kernel import Problem

# The least rank correlation near the best with which an order is useful. The limit is a choice: only short k on A100
# (0.21) is below it.
MIN_CORRELATION = 0.3
SHORT_K = 128  # up to this k the main loop has few steps, and prologue and epilogue take most of the time
RECORDED_GPUS = {"a100": "a100", "h100": "h100", "h200": "h100"}  # GPU -> the GPU whose recordings are used for it


class Worth(NamedTuple):
    """How well modelled times order tiles: their rank correlation with recorded times.

    ``all_tiles`` is over all tiles of a problem, ``near_best`` over those within 1.3 of the best. ``recorded`` is the
    GPU on which the times were recorded.
    """

    recorded: str
    all_tiles: float
    near_best: float

    @property
    def orders(self) -> bool:
        """Whether the order of the fastest kernels is useful."""
        return self.near_best >= MIN_CORRELATION


# (GPU of the recordings, whether k is at most SHORT_K) -> worth
WORTHS = {
    ("a100", True): Worth("a100", 0.36, 0.21),
    ("a100", False): Worth("a100", 0.94, 0.62),
    ("h100", True): Worth("h100", 0.55, 0.41),
    ("h100", False): Worth("h100", 0.91, 0.62),
}


def worth(problem: Problem) -> Worth | None:
    """How well the model orders kernels for problems of this kind; None if there are no recordings for the GPU."""
    gpu = RECORDED_GPUS.get(problem.gpu)
    return WORTHS[gpu, problem.k <= SHORT_K] if gpu else None


def sorts(problem: Problem) -> bool:
    """Whether kernels may be sorted by their modelled times: not if recordings show that this order is useless."""
    known = worth(problem)
    return known is None or known.orders


def in_words(problem: Problem) -> str:
    """The worth in words, as part of a sentence."""
    known = worth(problem)
    if known is None:
        return f"no recorded timing tells what their order is worth on {problem.gpu}"
    kind = f"with k {'<=' if problem.k <= SHORT_K else '>'} {SHORT_K}"
    figure = f"rank correlation {known.near_best:.2f} near the best, on recordings of {known.recorded} {kind}"
    return f"their order is worth little ({figure}), so rows are not sorted by it" if not known.orders else figure
