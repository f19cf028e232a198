"""Computes the share of the FLOP in a Llama training step's linear layers that kernels of the catalog can serve.

    python scripts/training_step.py [--gpu h200] [--model 8b] [--tokens 8192]

The layers run on tensors without data, so no GPU is needed. A product is served if a record of the catalog becomes
legal for it that copies no operand. The last line compares kernels that read A (m,k) alone with those that read A (k,m)
too.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from cudal2gen.generation import catalog
from cudal2gen.kernel import GPUS, Problem, Record, serving
from cudal2gen.kernel.launch import LaunchOperands


class Llama(NamedTuple):
    """Sizes of a model of the Llama 3 family, by their published configurations; ``blocks``: number of layers."""

    width: int
    hidden: int
    key_width: int  # of keys and of values, which several heads share
    blocks: int
    vocabulary: int  # number of tokens

    @property
    def layers(self) -> list[tuple[int, int, int]]:
        """Inputs, outputs and number of each kind of linear layer."""
        width, hidden, blocks = self.width, self.hidden, self.blocks
        return [
            (width, width, 2 * blocks),  # query, out
            (width, self.key_width, 2 * blocks),  # key, value
            (width, hidden, 2 * blocks),  # gate, up
            (hidden, width, blocks),  # down
            (width, self.vocabulary, 1),
        ]


MODELS = {
    "1b": Llama(2048, 8192, 512, 16, 128256),
    "8b": Llama(4096, 14336, 1024, 32, 128256),
    "70b": Llama(8192, 28672, 1024, 80, 128256),
}
PASSES: dict[str, str] = {"tn": "forward", "nn": "gradient of x", "nt": "gradient of the weight"}  # by layout


def layer(inputs: int, outputs: int, tokens: int) -> None:
    """A linear layer, forward and backward."""
    import torch

    x, weight = (torch.empty(rows, inputs, dtype=torch.bfloat16, requires_grad=True) for rows in (tokens, outputs))
    with torch.enable_grad():
        torch.nn.functional.linear(x, weight).backward(torch.empty(tokens, outputs, dtype=torch.bfloat16))


def products(model: Llama, tokens: int, gpu: str) -> Iterator[tuple[Problem, int]]:
    """The products of a step, and how often each is computed."""
    from cudal2gen.operators import shapes

    for inputs, outputs, number in model.layers:
        collected = shapes.collect(partial(layer, inputs, outputs, tokens))
        for fields in collected.problems(gpu, "f32"):
            problem = {name: value for name, value in fields.items() if name in Problem.model_fields}
            yield Problem.model_validate(problem), number * int(fields["count"])


def serving_record(problem: Problem) -> Record | None:
    """The record that serves a problem without copies of operands; None if there is none."""
    try:
        record = catalog.find(problem).record
    except catalog.CatalogError:
        return None
    sizes = serving.sizes_of(problem)
    use = serving.own_use(record, sizes, LaunchOperands.packed(problem.layout, sizes, problem.fusion))
    return None if any(use.copied) else record


def shares(model: Llama, tokens: int, gpu: str) -> dict[str, tuple[float, float, set[str]]]:
    """For each pass: its FLOP, the FLOP that kernels serve, and the families of these kernels."""
    totals, served = Counter[str](), Counter[str]()
    families: dict[str, set[str]] = {}
    for problem, count in products(model, tokens, gpu):
        name, record = PASSES[problem.layout], serving_record(problem)
        totals[name] += count * problem.flops
        if record is not None:
            served[name] += count * problem.flops
            families.setdefault(name, set()).add(record.family)
    return {name: (totals[name], served[name], families.get(name, set())) for name in PASSES.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h200")
    parser.add_argument("--model", choices=tuple(MODELS), default="8b")
    parser.add_argument("--tokens", type=int, default=8192)
    chosen = parser.parse_args()
    passes = shares(MODELS[chosen.model], chosen.tokens, chosen.gpu)
    total = sum(flops for flops, _, _ in passes.values())
    title = f"Llama {chosen.model}, {chosen.tokens} tokens, bf16, {chosen.gpu}"
    print(f"{title}: {total / 1e12:.0f} TFLOP a step in linear layers")
    for name, (flops, served, families) in passes.items():
        by = f", by {', '.join(sorted(families))}" if families else ""
        print(f"  {name:24}{flops / total:6.1%} of them, {served / flops:.1%} served{by}")
    # Only the gradient of the weight has A (k,m).
    served_in_all = sum(served for _, served, _ in passes.values())
    served_by_rows = served_in_all - passes[PASSES["nt"]][1]
    print(f"served with A (m,k) alone: {served_by_rows / total:.1%}; with A (k,m) as well: {served_in_all / total:.1%}")


if __name__ == "__main__":
    main()
