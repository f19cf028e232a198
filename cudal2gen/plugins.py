"""Plugins for vLLM and SGLang: their unquantised linear layers compute by the operator ``cudal2gen::linear``.

Both hosts find these functions by entry points in every process, and may call them more than once. A plugin does
nothing unless ``CUDAL2GEN_VLLM=1`` or ``CUDAL2GEN_SGLANG=1`` is set. For torch.compile and CUDA graphs the operator is
one node. It runs a kernel if a pack says that it was measured faster, else ``torch.nn.functional.linear``, as the hosts
do by themselves. If a host's hook point is not as known here, the host is left unchanged, and its log says so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPERATOR = "cudal2gen::linear"
SGLANG_HOOK = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


class UnknownHook(Exception):
    """A hook point is missing, or not as it is known here."""


@dataclass(frozen=True)
class Host:
    """A server of models. ``variable``: turns the plugin on; ``layers``: the function that computes unquantised linear
    layers; ``parameters``: those of that function."""

    name: str
    package: str
    variable: str
    layers: str
    parameters: tuple[str, ...]

    @property
    def enabled(self) -> bool:
        return os.environ.get(self.variable) == "1"

    @property
    def version(self) -> str:
        """The version of the installed package; empty if it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    @property
    def logger(self) -> logging.Logger:
        """A logger below the host's own, so that the host's settings hold."""
        return logging.getLogger(f"{self.package}.cudal2gen")

    def check(self, function: Callable[..., Any]) -> None:
        """Raises UnknownHook for a function of other parameters."""
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != self.parameters:
            raise UnknownHook(f"{self.layers} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)})")

    def state(self) -> str:
        """What the plugin does on this machine, in a sentence."""
        installed = f"{self.name} {self.version}" if self.version else f"{self.name} is not installed"
        if self.enabled:
            return f"{installed}; its plugin is on: {self.layers} computes by {OPERATOR}"
        return f"{installed}; its plugin is off, {self.variable}=1 turns it on"


# Hook points of vLLM at 9c9de631 (since 0.10) and of SGLang at 0038b2b5 (its hooks at 106f37ce).
VLLM = Host(
    "vLLM", "vllm", "CUDAL2GEN_VLLM", "vllm.model_executor.layers.utils.default_unquantized_gemm",
    ("layer", "x", "weight", "bias"),
)  # fmt: skip
SGLANG = Host("SGLang", "sglang", "CUDAL2GEN_SGLANG", SGLANG_HOOK, ("self", "layer", "x", "bias"))
HOSTS = (VLLM, SGLANG)
REPLACEMENTS: dict[str, Callable[..., Any]] = {}  # replacements that this process has installed, by host


def vllm() -> None:
    """The plugin of vLLM, group ``vllm.general_plugins``: replaces what ``dispatch_unquantized_gemm()`` returns on a
    CUDA GPU."""
    _register(VLLM, _replace_in_vllm)


def sglang() -> None:
    """The plugin of SGLang, group ``sglang.srt.plugins``: a hook around ``UnquantizedLinearMethod.apply``."""
    _register(SGLANG, _hook_in_sglang)


def _register(host: Host, replace: Callable[[], bool]) -> None:
    if not host.enabled:
        return
    try:
        replaced = replace()
    except (ImportError, AttributeError, UnknownHook) as error:
        host.logger.warning("cudal2gen leaves %s %s as it is: %s", host.name, host.version or "(no version)", error)
        return
    if replaced:
        host.logger.info("cudal2gen: %s computes by %s", host.layers, OPERATOR)


def _replace_in_vllm() -> bool:
    """Replaces vLLM's function; returns whether that was done now rather than before. Raises ImportError,
    AttributeError or UnknownHook if vLLM is not as known here."""
    path, _, name = VLLM.layers.rpartition(".")
    layers = importlib.import_module(path)
    default = getattr(layers, name)
    if default is REPLACEMENTS.get(VLLM.name):
        return False
    VLLM.check(default)
    chosen = layers.dispatch_unquantized_gemm()
    if chosen is not default:
        raise UnknownHook(f"its layers compute by {getattr(chosen, '__name__', chosen)}")
    takes, linear = _takes(), _operator()

    @wraps(default)
    def gemm(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if takes(x, weight, bias):
            return linear(x, weight, bias)
        return default(layer, x, weight, bias)

    # dispatch_unquantized_gemm looks its result up in its module at each call, so every importer of it gets this one.
    setattr(layers, name, gemm)
    REPLACEMENTS[VLLM.name] = gemm
    return True


def _hook_in_sglang() -> bool:
    """Hooks SGLang's function; returns whether that was done now rather than before. Raises ImportError,
    AttributeError or UnknownHook if SGLang is not as known here."""
    import torch

    path, method_class, name = SGLANG.layers.rsplit(".", 2)
    apply = getattr(getattr(importlib.import_module(path), method_class), name)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if SGLANG.name in REPLACEMENTS:
        return False
    SGLANG.check(apply)
    if torch.version.hip is not None:
        raise UnknownHook("it runs on ROCm")
    takes, linear = _takes(), _operator()

    def around(
        original: Callable[..., Any], method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        if takes(x, layer.weight, bias) and not getattr(layer, "use_intel_amx_backend", False):
            return linear(x, layer.weight, bias)
        return original(method, layer, x, bias)

    hooks.HookRegistry.register(SGLANG.layers, around, hooks.HookType.AROUND)
    REPLACEMENTS[SGLANG.name] = around
    return True


def _operator() -> Callable[..., Any]:
    """The operator itself, so that a graph has it as one node and nothing of this package is traced."""
    import torch

    import cudal2gen.operators  # noqa: F401  # registers it

    operator: Callable[..., Any] = torch.ops.cudal2gen.linear.default
    return operator


def _takes() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], bool]:
    """A function that tells whether the operator takes x, weight and bias, by facts that torch.compile knows while it
    traces."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    from kernelproof.ground.element import ELEMENTS

    types = tuple(element.torch_dtype for element in ELEMENTS.values())

    def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        # Tensor subclasses of quantised weights bring their own product.
        return (
            x.dtype in types
            and x.dtype == weight.dtype
            and (bias is None or bias.dtype == x.dtype)
            and weight.dim() == 2
            and x.device.type in ("cuda", "cpu")
            and not is_traceable_wrapper_subclass(weight)
        )

    return takes
