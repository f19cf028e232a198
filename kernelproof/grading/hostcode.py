"""Searches the C++ text of a launcher for suspicious names: of libraries, streams, threads, caches and files.

The search is by regular expressions. It finds careless cheats and proves nothing about a text in which it finds none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelproof.grading.verdict import Finding

# The operations of torch that compute. Others only allocate, reshape or describe tensors and are allowed.
_OPERATIONS = """
    matmul mm bmm addmm baddbmm addmv mv dot einsum linear bilinear conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d convolution softmax log_softmax layer_norm rms_norm group_norm batch_norm
    instance_norm scaled_dot_product_attention multi_head_attention_forward gelu relu silu sigmoid tanh elu leaky_relu
    softplus hardtanh hardswish mish add sub mul div pow exp log sqrt rsqrt sin cos sum mean prod max min amax amin
    argmax argmin std var norm cumsum cumprod sort topk max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d
    avg_pool3d adaptive_avg_pool2d embedding cross_entropy mse_loss nll_loss kl_div smooth_l1_loss huber_loss
    triplet_margin_loss cosine_similarity clamp where index_select gather scatter tril triu outer chain_matmul
    multi_dot tensordot addcmul addcdiv lerp erf sign abs neg round floor
"""
COMPUTING = frozenset(_OPERATIONS.split())
_NAMES = "|".join(sorted(COMPUTING))
_PATTERNS = {
    "library-call": (
        r"\b(?:cublas|cudnn|cusparse|cusolver|cufft|nvjet|cutensor)\w*\s*\(",
        rf"\b(?:at|torch)::(?:\w+::)*(?:{_NAMES})(?:_out|_)?\s*\(",
        r"(?:\.|->)(?:matmul|mm|bmm|addmm|mv|softmax|log_softmax|sum|mean|einsum|conv2d)_?\s*\(",
        r"\bcutlass::gemm::device\b",
    ),
    "extra-stream": (
        r"\bcudaStreamCreate\w*\s*\(", r"\bgetStreamFromPool\s*\(", r"\bcuStreamCreate\w*\s*\(",
        r"\bcudaStreamBeginCapture\s*\(",
    ),
    "host-thread": (
        r"\bstd::(?:thread|jthread|async)\b", r"\bpthread_create\s*\(", r"\b(?:fork|system|popen|execv\w*)\s*\(",
        r"\bcudaLaunchHostFunc\s*\(",
    ),
    "result-cache": (
        r"\b(?:static|thread_local)\s+(?:inline\s+)?(?:const\s+)?(?:(?:torch|at)::Tensor|std::(?:unordered_)?map"
        r"|std::vector|std::optional|c10::optional|\w+\s*\*)(?![^;={]*\()",
    ),
    "grader-access": (
        r"\b(?:dlopen|dlsym|fopen|getenv|ptrace|mprotect|sigaction|signal|Py\w+_\w+)\s*\(",
        r"\bpy::module(?:_)?::import\b",
        r"\bstd::[io]?fstream\b",
    ),
    "timer-patch": (r"\bcudaEventElapsedTime\s*\(", r"\bcudaEventRecord\s*\("),
}  # fmt: skip
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)


def without_comments(text: str) -> str:
    """C++ text with comments and strings replaced by blanks, so that positions and line numbers stay the same."""
    return _COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def findings(text: str) -> Iterator[Finding]:
    """A finding for everything suspicious that host code does besides launching its own kernels."""
    plain = without_comments(text)
    for rule, patterns in _PATTERNS.items():
        for pattern in patterns:
            for match in re.finditer(pattern, plain):
                line = plain.count("\n", 0, match.start()) + 1
                words = " ".join(match[0].split())
                yield Finding.of(rule, f"host code, line {line}: {words}", line=line, text=words)
    for name, line in _globals(plain):
        yield Finding.of(
            "result-cache", f"host code, line {line}: a tensor {name} outside of functions", line=line, text=name
        )


def _globals(plain: str) -> Iterator[tuple[str, int]]:
    """The names and lines of tensors that are variables of the file, outside of all braces."""
    # A statement ends at ; { or } outside of braces, or at the { that leaves that level.
    depth, start = 0, 0
    for number, char in enumerate(plain):
        depth += (char == "{") - (char == "}")
        if char not in ";{}" or depth > (char == "{"):
            continue
        statement = plain[start:number]
        match = re.search(r"(?:torch|at)::Tensor\s*>?\s+(\w+)\s*(?:=.*)?$", statement, re.S)
        if match and char == ";" and "(" not in statement.partition("=")[0]:
            yield match[1], plain.count("\n", 0, start + match.start()) + 1
        start = number + 1
