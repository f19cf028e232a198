"""Changes a CUDA text so that it compiles as on another machine, with other versions, files, dates and libraries.

A text can find out by the preprocessor on which machine it is compiled, and behave well only on the grader's. So a text
that can do this is compiled a second time with other macros and headers, and the kernels of both builds must give the
same results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelproof.checking.includes import joined_lines

INCLUDE = Path(__file__).parent / "include"  # headers with the names of torch's, which exist where extensions are built
# Preprocessor conditions, concatenated names, and the names of macros and features by which a compiler describes its
# machine.
_MACHINE_QUERIES = re.compile(
    r"(?:#|%:|\?\?=)\s*(?:el)?if|##|%:%:|\?\?=\?\?=|FILE|DATE|TIME|VER|GNUC|GLIBC|TORCH_|source_location|has_(?:include|embed)"
)
# The path and the macros are those of torch's builds of extensions (torch.utils.cpp_extension), the version is that of
# CUDA 12.8. The toolkit's headers come first, since they are made for their own version.
PATH = Path("/root/.cache/torch_extensions/py312_cu128/extension/cuda.cu")
_VERSIONS = {
    "__CUDACC_VER_MAJOR__": "12", "__CUDACC_VER_MINOR__": "8", "__CUDACC_VER_BUILD__": "93", "CUDART_VERSION": "12080",
    "CUDA_VERSION": "12080",
}  # fmt: skip
_MACROS = {
    "__BASE_FILE__": f'"{PATH}"', "__DATE__": '"Feb 17 2031"', "__TIME__": '"04:25:08"',
    "__TIMESTAMP__": '"Mon Feb 17 04:25:08 2031"', "__GNUC_MINOR__": "4", "__GNUC_PATCHLEVEL__": "7",
    "__GLIBC_MINOR__": "31",
}  # fmt: skip
_HEADERS = ("cuda.h", "cuda_runtime.h", "kernelproof_build.h")


def may_query_machine(text: str) -> bool:
    """Whether a CUDA text may query the compiler about its machine. Most texts of kernels do not."""
    return _MACHINE_QUERIES.search(joined_lines(text)) is not None


def variants(text: str) -> Iterator[tuple[str, Sequence[str], bool]]:
    """Yield variants of a text, each with further arguments of nvcc and whether CUTLASS is installed.

    The first variant that compiles counts. The later ones are for texts that need CUTLASS, or features that CUDA 12
    lacks.
    """
    for macros, has_cutlass in ((_MACROS | _VERSIONS, False), (_MACROS | _VERSIONS, True), (_MACROS, True)):
        lines = [f"#include <{name}>" for name in _HEADERS]
        lines += [f"#undef {name}\n#define {name} {value}" for name, value in macros.items()]
        yield "\n".join([*lines, f'#line 1 "{PATH}"', text]), (f"-I{INCLUDE}",), has_cutlass
