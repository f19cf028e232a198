"""Validates requests to the tools check and count: kernels, launches, a device and limits.

A client is not trusted: it may name only files below the server's folders, and only options of nvcc that concern device
code.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from kernelproof.checking.plan import LaunchEntry
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.toolchain import unread_by_shells

# The options of nvcc that a client may pass. Others could name programs to run or files to read and write.
_OPTION = re.compile(
    r"-[DU].+|-I[^,]+|-O[0-3]|-std=c\+\+\d\d|--?use_fast_math|--?(fmad|ftz|prec-div|prec-sqrt)=(true|false)"
    r"|--?maxrregcount=\d+|-(arch=|gencode=arch=)\w+(,code=\w+)?|--extended-lambda|--expt-(extended-lambda|relaxed-constexpr)"
)


class Request(BaseModel):
    """Kernels, their launches, and how to run them. Only device code is compiled and run.

    ``device``: a name as in ``checking.devices``; by default it follows from the kernels' architecture. ``adverse``,
    ``counters`` and ``sample``: as in ``CheckPlan``. ``seconds`` and ``gib`` limit the run.
    """

    model_config = ConfigDict(extra="forbid")
    source: Annotated[str, Field(description="CUDA C++ text, or PTX text.")] = ""
    path: Annotated[str, Field(description="In place of source: a .cu or .ptx file.")] = ""
    launches: Annotated[list[LaunchEntry], Field(min_length=1)]
    buffers: dict[str, str] = {}
    device: str = ""
    nvcc_args: str = ""
    adverse: bool = False
    counters: bool = False
    sample: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(gt=0)]
    gib: Annotated[float, Field(gt=0)]
    roots: Annotated[list[Path], Field(description="Folders that files are read from, absolute.")] = []

    def allowed_path(self, name: str) -> Path:
        """The path of a file or folder below the roots, with links resolved. Raises WrongInput for any other.

        Links are followed before the comparison, so that a link below a root cannot lead out of it.
        """
        try:
            path = Path(name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or "no path"
            # Outside of the roots, the answer must not even reveal whether such a file exists. So the reason why it
            # cannot be read is given only for a path below the roots.
            path, missing = Path(os.path.normpath(Path.cwd() / name)), f"cannot read {name}: {reason}"
        else:
            missing = ""
        if not any(path.is_relative_to(root) for root in self.roots):
            folders = ", ".join(map(str, self.roots)) or "none"
            raise WrongInput(f"{name} is not below the folders that this server reads: {folders} (its option --root)")
        if missing:
            raise WrongInput(missing)
        return path

    def options(self) -> str:
        """The arguments for nvcc. Raises WrongInput for an option that is not allowed or a folder outside the roots."""
        try:
            words = shlex.split(self.nvcc_args)
        except ValueError as error:
            raise WrongInput(f"nvcc_args {self.nvcc_args!r}: {error}") from None
        for word in words:
            if not _OPTION.fullmatch(word):
                raise WrongInput(
                    f"nvcc_args: {word!r} is not allowed here; write -DNAME=VALUE, -IFOLDER (below the server's), "
                    "-std=c++20, -O3"
                )
        words = [f"-I{self.allowed_path(word[2:])}" if word.startswith("-I") else word for word in words]
        return shlex.join(unread_by_shells(words))
