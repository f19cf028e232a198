"""Plugins of vLLM and SGLang: their unquantised linear layers compute by the operator ``cudal2gen::linear``.

Both hosts find these functions by entry points, in every process, and may call them more than once. They do nothing
unless ``CUDAL2GEN_VLLM=1`` or ``CUDAL2GEN_SGLANG=1``. The operator is one node for torch.compile and CUDA graphs, and
runs a kernel where a pack says that it was measured faster, else ``torch.nn.functional.linear``, as the hosts do by
themselves. A host whose hook point is not as here is left alone, which one line of its log says.
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


class Unknown(Exception):
    """A hook point is missing or not as it is known here."""


@dataclass(frozen=True)
class Host:
    """A server of models. ``layers``: where it computes unquantised linear layers; ``parameters``: of that function."""

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
        """Of the installed package; empty where there is none."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    @property
    def logger(self) -> logging.Logger:
        """Below the host's own, so that its settings hold."""
        return logging.getLogger(f"{self.package}.cudal2gen")

    def check(self, function: Callable[..., Any]) -> None:
        """Raises Unknown for a function of other parameters."""
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != self.parameters:
            raise Unknown(f"{self.layers} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)})")

    def state(self) -> str:
        """What the plugin does on this machine, in words."""
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
    except (ImportError, AttributeError, Unknown) as error:
        host.logger.warning("cudal2gen leaves %s %s as it is: %s", host.name, host.version or "(no version)", error)
        return
    if replaced:
        host.logger.info("cudal2gen: %s computes by %s", host.layers, OPERATOR)


def _replace_in_vllm() -> bool:
    """Whether it was replaced now. Raises ImportError, AttributeError or Unknown where vLLM is not as known."""
    path, _, name = VLLM.layers.rpartition(".")
    layers = importlib.import_module(path)
    default = getattr(layers, name)
    if default is REPLACEMENTS.get(VLLM.name):
        return False
    VLLM.check(default)
    chosen = layers.dispatch_unquantized_gemm()
    if chosen is not default:
        raise Unknown(f"its layers compute by {getattr(chosen, '__name__', chosen)}")
    takes, linear = _takes(), _operator()

    @wraps(default)
    def gemm(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if takes(x, weight, bias):
            return linear(x, weight, bias)
        return default(layer, x, weight, bias)

    # dispatch_unquantized_gemm looks its answer up in its module, so all who imported it get this one.
    setattr(layers, name, gemm)
    REPLACEMENTS[VLLM.name] = gemm
    return True


def _hook_in_sglang() -> bool:
    """Whether it was hooked now. Raises ImportError, AttributeError or Unknown where SGLang is not as known."""
    import torch

    path, method_class, name = SGLANG.layers.rsplit(".", 2)
    apply = getattr(getattr(importlib.import_module(path), method_class), name)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if SGLANG.name in REPLACEMENTS:
        return False
    SGLANG.check(apply)
    if torch.version.hip is not None:
        raise Unknown("it runs on ROCm")
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
    """The operator itself: a graph has it as one node, with nothing of this package to trace."""
    import torch

    import cudal2gen.operators  # noqa: F401  # registers it

    operator: Callable[..., Any] = torch.ops.cudal2gen.linear.default
    return operator


def _takes() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], bool]:
    """Whether the operator takes x, weight and bias; of what torch.compile knows while it traces."""
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
