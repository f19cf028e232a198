"""Lets unquantised linear layers of vLLM and SGLang use our kernels where these were measured faster.

The layers then call the operator ``cudal2gen::linear``, and the host's own function everywhere else. Both hosts find
the plugins by entry points in every process, and may call them more than once. A plugin does nothing unless
``CUDAL2GEN_VLLM=1`` or ``CUDAL2GEN_SGLANG=1`` is set.

- If our kernels won for no number of rows of a layer's weight, the host computes the layer, also in compiled graphs.
- For other layers, each call looks up the plan of its sizes. In a compiled graph the operator is one node. At sizes
  where no kernel won, the operator runs ``torch.nn.functional.linear``, as the host's function does.
- If the host's function may do something else than torch, the host computes the layer, because kernels were measured
  against torch. That is the case in batch-invariant modes, and for bf16 if SGLang has chosen kernels of its own
  (cutedsl, gemv, split-k). vLLM with a ``--linear-backend`` does not call the function that is replaced.

If a host's hook point is not as known here, the host is left unchanged, and its log says so.
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
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPERATOR = "cudal2gen::linear"
SCOPE = "where a kernel was measured faster"  # in messages: the layers for which OPERATOR is used
TORCH_BACKENDS = ("AUTO", "TORCH")  # backends of SGLang by which it computes bf16 layers as torch does
SGLANG_HOOK = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


class UnknownHook(Exception):
    """A hook point is missing, or not as it is known here."""


@dataclass(frozen=True)
class Host:
    """A server of models that has a plugin.

    ``variable``: the environment variable that turns the plugin on. ``function``: the dotted path of the function that
    computes unquantised linear layers; ``parameters``: the names of its parameters. ``exceptions``: for the host's log,
    what the host still computes itself.
    """

    name: str
    package: str
    variable: str
    function: str
    parameters: tuple[str, ...]
    exceptions: str = ""

    @property
    def enabled(self) -> bool:
        """Whether the variable turns the plugin on."""
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
        """A child of the host's logger, so that the host's settings of logging apply."""
        return logging.getLogger(f"{self.package}.cudal2gen")

    def check(self, function: Callable[..., Any]) -> None:
        """Raises UnknownHook if the function has other parameters than those known here."""
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != self.parameters:
            raise UnknownHook(f"{self.function} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)})")

    def state(self) -> str:
        """What the plugin does on this machine, in a sentence."""
        installed = f"{self.name} {self.version}" if self.version else f"{self.name} is not installed"
        if self.enabled:
            return f"{installed}; its plugin is on: {self.function} computes by {OPERATOR} {SCOPE}"
        return f"{installed}; its plugin is off, {self.variable}=1 turns it on"


# Checked with vLLM 0.33.0, where the function is the same since 0.10, and with SGLang 0.5.23.
VLLM = Host(
    "vLLM", "vllm", "CUDAL2GEN_VLLM", "vllm.model_executor.layers.utils.default_unquantized_gemm",
    ("layer", "x", "weight", "bias"),
)  # fmt: skip
SGLANG = Host(
    "SGLang", "sglang", "CUDAL2GEN_SGLANG", SGLANG_HOOK, ("self", "layer", "x", "bias"),
    "; apply_into, and additions within a product (apply_with_addend), stay SGLang's",
)  # fmt: skip
HOSTS = (VLLM, SGLANG)
REPLACEMENTS: dict[str, Callable[..., Any]] = {}  # host's name -> the function that this process has put in place


def vllm() -> None:
    """The plugin of vLLM, an entry point of ``vllm.general_plugins``: replaces what ``dispatch_unquantized_gemm()``
    returns on a CUDA GPU."""
    _register(VLLM, _replace_in_vllm)


def sglang() -> None:
    """The plugin of SGLang, an entry point of ``sglang.srt.plugins``: hooks ``UnquantizedLinearMethod.apply``."""
    _register(SGLANG, _hook_in_sglang)


def _register(host: Host, replace: Callable[[], bool]) -> None:
    """Replaces the host's function if the plugin is on, and writes into the host's log what was done."""
    if not host.enabled:
        return
    try:
        replaced = replace()
    except (ImportError, AttributeError, UnknownHook) as error:
        host.logger.warning("cudal2gen leaves %s %s as it is: %s", host.name, host.version or "(no version)", error)
        return
    if replaced:
        host.logger.info("cudal2gen: %s computes by %s %s%s", host.function, OPERATOR, SCOPE, host.exceptions)


def _replace_in_vllm() -> bool:
    """Replaces vLLM's function. Returns False if it was replaced before.

    Raises ImportError, AttributeError or UnknownHook if vLLM is not as known here.
    """
    path, _, name = VLLM.function.rpartition(".")
    layers = importlib.import_module(path)
    default = getattr(layers, name)
    if default is REPLACEMENTS.get(VLLM.name):
        return False
    VLLM.check(default)
    chosen = layers.dispatch_unquantized_gemm()
    if chosen is not default:
        raise UnknownHook(f"its layers compute by {getattr(chosen, '__name__', chosen)}")
    settings = getattr(layers, "envs", None)
    compute = _OurLayers(lambda _: bool(getattr(settings, "VLLM_BATCH_INVARIANT", False)))

    @wraps(default)
    def gemm(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        d = compute(x, weight, bias)
        return default(layer, x, weight, bias) if d is None else d

    # dispatch_unquantized_gemm looks up the function in its module at each call, so all its callers get this one.
    setattr(layers, name, gemm)
    REPLACEMENTS[VLLM.name] = gemm
    return True


def _hook_in_sglang() -> bool:
    """Hooks SGLang's function. Returns False if it was hooked before.

    Raises ImportError, AttributeError or UnknownHook if SGLang is not as known here.
    """
    import torch

    from kernelproof.ground.element import BF16

    path, method_class, name = SGLANG.function.rsplit(".", 2)
    layers = importlib.import_module(path)
    apply = getattr(getattr(layers, method_class), name)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if SGLANG.name in REPLACEMENTS:
        return False
    SGLANG.check(apply)
    if torch.version.hip is not None:
        raise UnknownHook("it runs on ROCm")
    compute = _OurLayers(lambda dtype: _sglang_defers(layers, dtype == BF16.torch_dtype))

    def apply_or_ours(
        original: Callable[..., Any], method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        packed = getattr(layer, "use_intel_amx_backend", False)  # the weight is stored in another order
        d = None if packed else compute(x, layer.weight, bias)
        return original(method, layer, x, bias) if d is None else d

    hooks.HookRegistry.register(SGLANG.function, apply_or_ours, hooks.HookType.AROUND)
    REPLACEMENTS[SGLANG.name] = apply_or_ours
    return True


def _sglang_defers(layers: ModuleType, bf16: bool) -> bool:
    """Whether SGLang's function may compute by something else than torch's linear layer.

    It does so in its batch-invariant mode, and for bf16 if it has chosen other kernels. Versions of SGLang without such
    choices compute by torch. ``layers``: SGLang's module of unquantised layers. ``bf16``: whether operands are bf16.
    """
    batch_invariant = getattr(layers, "is_batch_invariant_mode_enabled", None)
    if batch_invariant is not None and batch_invariant():
        return True
    backend = getattr(layers, "get_bf16_gemm_backend", None)
    chosen = backend is not None and backend().name not in TORCH_BACKENDS
    return bf16 and (chosen or bool(getattr(layers, "_enable_bf16_splitk_gemm", False)))


class _OurLayers:
    """Computes linear layers in place of a host. A call with x (..., k), weight (n,k) and bias (n,) or None returns
    the result (..., n), or None if the host has to compute the layer itself.

    ``defers`` says for a type of operands whether the host may compute by something else than torch's linear layer; the
    host then computes such layers.
    """

    def __init__(self, defers: Callable[[torch.dtype], bool]) -> None:
        import torch
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        from cudal2gen.operators import hosted

        # torch.compile treats the results as constants, so it traces neither this package nor the host's settings.
        constant = torch.compiler.assume_constant_result
        self._may_win, self._defers = constant(hosted.may_win), constant(defers)
        self._by_kernel, self._is_wrapper = hosted.by_kernel, is_traceable_wrapper_subclass
        self._operator: Callable[..., Any] = torch.ops.cudal2gen.linear.default
        self._compiling = torch.compiler.is_compiling

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        # Tensor subclasses of quantised weights bring their own product.
        if weight.dim() != 2 or x.dtype != weight.dtype or x.device.type not in ("cuda", "cpu"):
            return None
        n, k = weight.shape
        # What our operator refuses, such as a bias that is broadcast, is the host's to compute or to refuse.
        if (bias is not None and (bias.dtype != x.dtype or bias.shape != (n,))) or self._is_wrapper(weight):
            return None
        if x.shape[-1:] != (k,):
            return None
        device = weight.device
        if not self._may_win(n, k, x.dtype, device.type, device.index, bias is not None) or self._defers(x.dtype):
            return None
        # The operator itself, so that a graph has it as one node and nothing of this package is traced.
        return self._operator(x, weight, bias) if self._compiling() else self._by_kernel(x, weight, bias)
