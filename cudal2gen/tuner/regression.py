"""Trains an ensemble of small networks that orders the records of a problem. It needs only NumPy, and takes seconds.

The networks predict the logarithm of time up to a constant for each problem. The loss compares each record with the
weighted mean of its problem, so the networks neither learn nor predict the scale of a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
HIDDEN = 48  # units of each hidden layer
# Weights and biases, which training changes. "mean" and "scale" of the inputs are computed once from the training data.
TRAINED_ARRAYS = ("w1", "b1", "w2", "b2", "w3")
# Most rows of a matrix product. OpenBLAS would divide larger products among all cores, which took ten times as long on
# two busy cores and makes the sums depend on the number of cores.
ROWS = 96


class TrainingRows(NamedTuple):
    """Training data: ``inputs`` of shape (rows, columns); ``target``, ``weight`` and ``problem`` of shape (rows,).

    ``problem`` has the number of each row's problem, in ascending order.
    """

    inputs: Floats
    target: Floats
    weight: Floats
    problem: Ints


class Ensemble:
    """Networks of two hidden layers. The first axis of every trained array is that of the members."""

    def __init__(self, arrays: dict[str, Floats]) -> None:
        self.arrays = arrays

    @property
    def members(self) -> int:
        """The number of networks."""
        return len(self.arrays["w1"])

    def member(self, index: int) -> Ensemble:
        """One member as an ensemble that shares this one's memory."""
        return Ensemble(self.arrays | {name: self.arrays[name][index : index + 1] for name in TRAINED_ARRAYS})

    def left_out(self, samples: TrainingRows) -> Floats:
        """For each row the output of the member that was trained without the row's problem; shape (rows,)."""
        return self.predict(samples.inputs)[samples.problem % self.members, np.arange(len(samples.problem))]

    def predict(self, inputs: Floats) -> Floats:
        """Each member's output, of shape (members, rows)."""
        return self._forward(self._scaled(inputs)[None])[0]

    def _scaled(self, inputs: Floats) -> Floats:
        """Inputs in standard deviations from the training data's mean, clipped to 6 on either side."""
        scaled: Floats = (inputs - self.arrays["mean"]) / self.arrays["scale"]
        return np.clip(scaled, -6, 6)

    def _forward(self, inputs: Floats) -> tuple[Floats, tuple[Floats, ...]]:
        """The output of shape (members, rows), and the units of both hidden layers, of shape (members, rows, units)."""
        a = self.arrays
        first: Floats = product(inputs, a["w1"])
        first += a["b1"]
        np.tanh(first, out=first)
        second: Floats = product(first, a["w2"])
        second += a["b2"]
        np.tanh(second, out=second)
        output: Floats = product(second, a["w3"])[..., 0]
        return output, (first, second)

    def gradients(self, inputs: Floats, error: Floats, units: tuple[Floats, ...]) -> dict[str, Floats]:
        """The gradients of the loss with respect to the trained arrays, by backpropagation.

        ``error``: the gradient with respect to the outputs, of shape (members, rows). ``units``: those of both hidden
        layers, as ``_forward`` returns them.
        """
        first, second = units
        at_output = error[..., None]
        at_second = at_output * self.arrays["w3"].transpose(0, 2, 1)
        at_second *= _slope(second)
        at_first = product(at_second, self.arrays["w2"].transpose(0, 2, 1))
        at_first *= _slope(first)
        return {
            "w3": inner(second, at_output),
            "w2": inner(first, at_second),
            "b2": at_second.sum(1, keepdims=True),
            "w1": inner(inputs, at_first),
            "b1": at_first.sum(1, keepdims=True),
        }


def product(rows: Floats, matrices: Floats) -> Floats:
    """``rows @ matrices``; shapes (networks or 1, rows, columns) and (networks, columns, others)."""
    answer = np.empty((len(matrices), rows.shape[1], matrices.shape[2]), matrices.dtype)
    for index, matrix in enumerate(matrices):
        for result, part in zip(_parts(answer[index]), _parts(rows[index % len(rows)]), strict=True):
            np.matmul(part, matrix, out=result)
    return answer


def inner(rows: Floats, others: Floats) -> Floats:
    """``rows.T @ others``; shapes (networks or 1, rows, columns) and (networks, rows, others)."""
    answer = np.empty((len(others), rows.shape[2], others.shape[2]), others.dtype)
    for index, other in enumerate(others):
        pairs = zip(_parts(rows[index % len(rows)]), _parts(other), strict=True)
        (blocks, other_blocks), (rest, other_rest) = pairs
        answer[index] = (blocks.transpose(0, 2, 1) @ other_blocks).sum(0) + rest.T @ other_rest
    return answer


def _parts(rows: Floats) -> tuple[Floats, Floats]:
    """The rows as blocks of ``ROWS`` rows, of shape (blocks, ROWS, columns), and the remaining rows."""
    end = len(rows) - len(rows) % ROWS
    return rows[:end].reshape(-1, ROWS, rows.shape[1]), rows[end:]


def _slope(units: Floats) -> Floats:
    """The derivative of tanh, 1 - tanh^2, at the points where tanh has the values ``units``."""
    slope: Floats = units * units
    np.subtract(1, slope, out=slope)
    return slope


def fit(
    samples: TrainingRows, members: int = 4, epochs: int = 40, batch: int = 24, rate: float = 4e-3, decay: float = 1e-3,
    seed: int = 0, hidden: int = HIDDEN,
) -> Ensemble:  # fmt: skip
    """Trains the members by Adam, with a warm-up and a cosine schedule. ``batch``: number of problems of a step.
    ``rate`` and ``decay``: the largest step and the weight decay of Adam. ``hidden``: units of each hidden layer.

    Members have different initial weights and random weights of problems, and member i is not trained on the problems
    whose number modulo ``members`` is i. So the spread of their predictions is large where data are scarce, and each
    problem can be predicted by a member that was not trained on it (``left_out``). Problems must be numbered from 0
    without a gap. Raises ValueError for a single problem.
    """
    rng = np.random.default_rng(seed)
    ensemble = Ensemble(_start(samples.inputs, members, hidden, rng))
    inputs = ensemble._scaled(samples.inputs)
    numbers, starts = np.unique(samples.problem, return_index=True)
    if len(numbers) < 2:
        raise ValueError("networks learn from two problems at least")
    problem_weights = rng.exponential(1.0, (members, len(starts))).astype(np.float32) * 0.5 + 0.5
    for index in range(members):
        own = numbers[numbers % members != index]
        steps = _steps(samples.problem, starts, [rng.permutation(own) for _ in range(epochs)], batch)
        _train(ensemble.member(index), inputs, samples, problem_weights[index], steps, rate, decay)
    return ensemble


class Minibatch(NamedTuple):
    """The data of one step: the indices of its rows, the number of rows of each problem, and the problems' numbers."""

    rows: Ints
    lengths: Ints
    problems: Ints


def _steps(problem: Ints, starts: Ints, orders: Sequence[Ints], batch: int) -> list[Minibatch]:
    """The steps of all epochs. ``orders``: the order of the problems in each epoch."""
    lengths = np.diff([*starts, len(problem)])
    steps = []
    for order in orders:
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            rows = np.concatenate([np.arange(starts[place], starts[place] + lengths[place]) for place in chosen])
            steps.append(Minibatch(rows, lengths[chosen], chosen))
    return steps


def _train(
    network: Ensemble, inputs: Floats, samples: TrainingRows, problem_weights: Floats, steps: Sequence[Minibatch],
    rate: float, decay: float,
) -> None:  # fmt: skip
    """Trains one network in place. ``problem_weights``: the weight of each problem in its loss."""
    moments = {name: [np.zeros_like(network.arrays[name]) for _ in range(2)] for name in TRAINED_ARRAYS}
    for number, step in enumerate(steps, 1):
        weight = (samples.weight[step.rows] * np.repeat(problem_weights[step.problems], step.lengths))[None]
        # The rate rises linearly over the first tenth of the steps, while a cosine lowers it to 0 at the end.
        step_rate = rate * min(1.0, number / (0.1 * len(steps))) * 0.5 * (1 + np.cos(np.pi * number / len(steps)))
        block = inputs[step.rows][None]
        output, units = network._forward(block)
        # The loss is half the weighted mean of the squared centred differences, and this is its gradient.
        error = centred(output - samples.target[step.rows], weight, step.lengths) * weight / weight.sum()
        for name, gradient in network.gradients(block, error, units).items():
            _adam(network.arrays[name], gradient, moments[name], number, step_rate, decay)


def _start(inputs: Floats, members: int, hidden: int, rng: np.random.Generator) -> dict[str, Floats]:
    """The arrays before training.

    Weights are drawn from a normal distribution, whose variance is 1 divided by the number of the layer's inputs. Those
    of the output layer are a tenth as large, so that all predictions begin near 0.
    """
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


def centred(difference: Floats, weight: Floats, lengths: Ints) -> Floats:
    """The differences minus the weighted mean of their problem; shape (networks, rows).

    ``lengths``: the number of rows of each problem, whose rows are adjacent.
    """
    starts = np.cumsum(lengths) - lengths
    means = np.add.reduceat(difference * weight, starts, axis=1) / np.add.reduceat(weight, starts, axis=1)
    return difference - np.repeat(means, lengths, axis=1)


def _adam(array: Floats, gradient: Floats, moments: list[Floats], step: int, rate: float, decay: float) -> None:
    """One step of Adam with weight decay, in place. ``step`` counts from 1."""
    # The first moment is a mean over about 10 steps, the second one over about 100.
    first, second = moments
    first *= 0.9
    first += 0.1 * gradient
    second *= 0.99
    second += 0.01 * gradient**2
    update = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
    array -= (rate * (update + decay * array)).astype(np.float32)
