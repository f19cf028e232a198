"""An ensemble of small networks that orders the records of a problem: NumPy alone, trained in seconds on one core.

The networks predict the logarithm of time up to a constant of the problem: the loss compares each record with the
weighted mean of its problem, so nothing is learned from, or told about, a problem's own scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
HIDDEN = 48


class Samples(NamedTuple):
    """Rows by problem: ``inputs`` (rows, columns), ``target``, ``weight`` and ``problem`` (rows), ascending."""

    inputs: Floats
    target: Floats
    weight: Floats
    problem: Ints


class Ensemble:
    """Networks of two hidden layers, the first axis of every array: members."""

    def __init__(self, arrays: dict[str, Floats]) -> None:
        self.arrays = arrays

    @property
    def members(self) -> int:
        return len(self.arrays["w1"])

    def member(self, place: int) -> Ensemble:
        """One member, as an ensemble on the same memory."""
        own = ("w1", "b1", "w2", "b2", "w3")
        return Ensemble(self.arrays | {name: self.arrays[name][place : place + 1] for name in own})

    def predict(self, inputs: Floats) -> Floats:
        """Each member's output; shape (members, rows)."""
        return self._forward(self._scaled(inputs)[None])[0]

    def _scaled(self, inputs: Floats) -> Floats:
        scaled: Floats = (inputs - self.arrays["mean"]) / self.arrays["scale"]
        return np.clip(scaled, -6, 6)

    def _forward(self, inputs: Floats) -> tuple[Floats, tuple[Floats, ...]]:
        a = self.arrays
        first: Floats = inputs @ a["w1"]
        first += a["b1"]
        np.tanh(first, out=first)
        second: Floats = first @ a["w2"]
        second += a["b2"]
        np.tanh(second, out=second)
        output: Floats = (second @ a["w3"])[..., 0]
        return output, (first, second)

    def gradients(self, inputs: Floats, error: Floats, hidden: tuple[Floats, ...]) -> dict[str, Floats]:
        """Of the loss with respect to the arrays; ``error``: with respect to the outputs, (members, rows)."""
        first, second = hidden
        back = error[..., None]
        at_second = back * self.arrays["w3"].transpose(0, 2, 1)
        at_second *= _slope(second)
        at_first = at_second @ self.arrays["w2"].transpose(0, 2, 1)
        at_first *= _slope(first)
        return {
            "w3": second.transpose(0, 2, 1) @ back,
            "w2": first.transpose(0, 2, 1) @ at_second,
            "b2": at_second.sum(1, keepdims=True),
            "w1": inputs.transpose(0, 2, 1) @ at_first,
            "b1": at_first.sum(1, keepdims=True),
        }


def _slope(units: Floats) -> Floats:
    """The derivative of tanh where it has these values."""
    slope: Floats = units * units
    np.subtract(1, slope, out=slope)
    return slope


def fit(
    samples: Samples, members: int = 4, epochs: int = 40, batch: int = 24, rate: float = 4e-3, decay: float = 1e-3,
    seed: int = 0, hidden: int = HIDDEN,
) -> Ensemble:  # fmt: skip
    """Trains the members by Adam with a warm-up and a cosine; ``batch``: problems of a step.

    Members take a step one after the other: a core's cache holds the arrays of one, not those of all. Each member
    starts elsewhere and weighs problems by draws of its own, so that their spread says where data lack.
    """
    rng = np.random.default_rng(seed)
    ensemble = Ensemble(_start(samples.inputs, members, hidden, rng))
    inputs = ensemble._scaled(samples.inputs)
    _, starts = np.unique(samples.problem, return_index=True)
    slices = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(inputs)], strict=True)]
    shares = rng.exponential(1.0, (members, len(slices))).astype(np.float32) * 0.5 + 0.5
    names = ("w1", "b1", "w2", "b2", "w3")
    moments: dict[str, Any] = {name: [np.zeros_like(ensemble.arrays[name]) for _ in range(2)] for name in names}
    total = epochs * -(-len(slices) // batch)
    step = 0
    for _ in range(epochs):
        order = rng.permutation(len(slices))
        for start in range(0, len(order), batch):
            step += 1
            chosen = order[start : start + batch]
            rows = np.concatenate([np.arange(slices[place].start, slices[place].stop) for place in chosen])
            lengths = [slices[place].stop - slices[place].start for place in chosen]
            weight = samples.weight[rows] * np.repeat(shares[:, chosen], lengths, axis=1)
            block, target = inputs[rows][None], samples.target[rows]
            pace = rate * min(1.0, step / (0.1 * total)) * 0.5 * (1 + np.cos(np.pi * step / total))
            for place in range(members):
                network, own = ensemble.member(place), weight[place : place + 1]
                output, hidden_units = network._forward(block)
                error = _centred(output - target, own, lengths) * own / own.sum(1, keepdims=True)
                for name, gradient in network.gradients(block, error, hidden_units).items():
                    own_moments = [moment[place : place + 1] for moment in moments[name]]
                    _adam(network.arrays[name], gradient, own_moments, step, pace, decay)
    return ensemble


def _start(inputs: Floats, members: int, hidden: int, rng: np.random.Generator) -> dict[str, Floats]:
    width = inputs.shape[1]
    return {
        "mean": inputs.mean(0),
        "scale": np.maximum(inputs.std(0), 0.05),
        "w1": (rng.normal(0, 1, (members, width, hidden)) / width**0.5).astype(np.float32),
        "b1": np.zeros((members, 1, hidden), np.float32),
        "w2": (rng.normal(0, 1, (members, hidden, hidden)) / hidden**0.5).astype(np.float32),
        "b2": np.zeros((members, 1, hidden), np.float32),
        "w3": (rng.normal(0, 0.1, (members, hidden, 1)) / hidden**0.5).astype(np.float32),
    }


def _centred(difference: Floats, weight: Floats, lengths: list[int]) -> Floats:
    """Differences less the weighted mean of their problem."""
    starts = np.cumsum([0, *lengths[:-1]])
    means = np.add.reduceat(difference * weight, starts, axis=1) / np.add.reduceat(weight, starts, axis=1)
    return difference - np.repeat(means, lengths, axis=1)


def _adam(array: Floats, gradient: Floats, moments: list[Floats], step: int, rate: float, decay: float) -> None:
    first, second = moments
    first *= 0.9
    first += 0.1 * gradient
    second *= 0.99
    second += 0.01 * gradient**2
    update = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
    array -= (rate * (update + decay * array)).astype(np.float32)
