"""Learns a correction of modelled speedups from published ones, by a Gaussian process over extents and model speedup.

The untrained timing model is compared with it. The correction is useful only if it predicts better than the untrained
model on problems that are larger than those from which it has learned.
"""

from __future__ import annotations

import numpy as np

from cudal2gen.timing.evidence.findings import Array

NOISE, LINEAR = 0.5, 0.3  # variances of the noise and of the linear part, relative to that of the process


def corrected(learned: Array, published: Array, queried: Array) -> Array:
    """Predicts the logarithm of the speedup for each row of ``queried``.

    Rows of ``learned`` and ``queried`` have m, n, k and the modelled speedup. ``published`` has the published speedup
    of each row of ``learned``.
    """
    points, queries = np.log2(learned), np.log2(queried)
    centre, scale = points.mean(0), points.std(0) + 1e-9
    points, queries = (points - centre) / scale, (queries - centre) / scale
    target = np.log(published)
    weights = np.linalg.solve(
        _covariance(points, points) + NOISE * np.eye(len(points)), (target - target.mean()) / (target.std() + 1e-9)
    )
    predicted: Array = _covariance(queries, points) @ weights * target.std() + target.mean()
    return predicted


def _covariance(first: Array, second: Array) -> Array:
    """The covariances (len(first), len(second)) of points: a Gaussian of their distance, plus a linear part."""
    columns = first.shape[1]
    squares = ((first[:, None] - second[None]) ** 2).sum(2)
    covariance: Array = np.exp(-squares / (2 * columns)) + LINEAR * first @ second.T / columns
    return covariance
