"""A small model in Llama's style, with random weights, whose linear layers run on cudal2gen's kernels.

    python examples/llama.py                            patches the model and compares its results before and after
    cudal2gen tune-model examples/llama.py --gpu h200   lists the products that main() computes, to measure them

Nothing is downloaded. On a GPU the first command also times each layer with and without its replacement.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from torch import nn

import cudal2gen


class Attention(nn.Module):
    """Causal self-attention with rotary positions. ``shared`` query heads use the same head of keys and values."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, heads // shared, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.value = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(batch, length, heads, self.size).transpose(1, 2)

        q, k = (rotated(split(y, n)) for y, n in ((self.query(x), self.heads), (self.key(x), self.kv_heads)))
        v = split(self.value(x), self.kv_heads)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attention.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x with rotary positions: each pair of features is rotated by an angle that grows with the position."""
    half = x.shape[-1] // 2
    speeds = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention, then a gated feed-forward network. The result of each on normalised input is added to the input."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, shared)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens (batch, length) to logits (batch, length, words)."""

    def __init__(self, words: int = 256, width: int = 64, heads: int = 4, shared: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, shared, 2 * width) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(batch: int = 1, length: int = 48, **sizes: int) -> torch.Tensor:
    """One forward pass of the model, which tune-model records."""
    model = Llama(**sizes).half().eval()
    return model(torch.zeros(batch, length, dtype=torch.long))


def layer_us(layer: nn.Module, x: torch.Tensor, calls: int = 20) -> float:
    """The median device time of a call in microseconds, from CUDA graphs of several calls."""
    graph = torch.cuda.CUDAGraph()
    layer(x)
    with torch.cuda.graph(graph):
        for _ in range(calls):
            layer(x)
    times = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return median(times)


def print_speedups(model: nn.Module, tokens: torch.Tensor) -> None:
    """Prints the time of each layer before and after the patch, on the input that it has in the model."""
    inputs: dict[str, torch.Tensor] = {}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [
        layer.register_forward_pre_hook(lambda _, arguments, name=name: inputs.update({name: arguments[0].detach()}))
        for name, layer in layers.items()
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    before = {name: layer_us(layer, inputs[name]) for name, layer in layers.items()}
    cudal2gen.patch(model)
    for name, layer in layers.items():
        after = layer_us(layer, inputs[name])
        print(f"{name:28} {before[name]:8.2f} us  {after:8.2f} us  {before[name] / after:5.3f}x")


def run(device: str, batch: int, length: int, **sizes: int) -> float:
    """Patches a model, compares it, and undoes the patch; returns the largest difference of logits."""
    torch.manual_seed(0)
    model = Llama(**sizes).half().eval().to(device)
    tokens = torch.randint(0, sizes["words"], (batch, length), device=device)
    with torch.inference_mode():
        before = model(tokens)
        print(cudal2gen.patch(model))
        difference = float((model(tokens) - before).abs().max())
        cudal2gen.unpatch(model)
        assert torch.equal(model(tokens), before), "unpatch restores the model"
        print(f"largest difference of {float(before.abs().max()):.3g}: {difference:.3g}")
        print(f"calls: {cudal2gen.stats()}")
        if device == "cuda":
            print_speedups(model, tokens)
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in {"batch": 1, "length": 48, "words": 256, "width": 64, "heads": 4, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    run(**vars(parser.parse_args()))
