"""Runs the MCP server, which offers the tools check, count and explain on standard input and output."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field, ValidationError

from kernelproof.checking.plan import FORM, LaunchEntry
from kernelproof.ground.errors import UserError, WrongInput
from kernelproof.ground.version import __version__
from kernelproof.mcp_server import answers, pages
from kernelproof.mcp_server.requests import Request

INSTRUCTIONS = (
    "Checks CUDA kernels without a GPU: launches run as PTX on an emulated device, which finds races, wrong addresses, "
    "uninitialised reads, missing fences and deadlocks. Device code only: host code is neither compiled nor run. "
    "Call check after each change of a kernel; call explain on what it finds; correct it; check again, also with "
    "adverse=true. A clean check says nothing about values: compare outputs elsewhere."
)
Source = Annotated[str, Field(description="CUDA C++ text, or PTX text. Instantiate templates explicitly.")]
File = Annotated[str, Field(description="In place of source: a .cu or .ptx file below the server's folders.")]
Launches = Annotated[list[LaunchEntry], Field(description="Launches, in order, on the same memory.", min_length=1)]
Buffers = Annotated[
    dict[str, str], Field(description=f"Arrays that several launches share, by name. {FORM.partition('or ')[2]}.")
]
Device = Annotated[str, Field(description="sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120, or a GPU such as h200.")]
Flags = Annotated[
    str, Field(description="-DNAME=VALUE, -IFOLDER (below the server's folders), -std=c++20, --use_fast_math, ...")
]
Adverse = Annotated[bool, Field(description="Run in another order of events that hardware may choose.")]
Sample = Annotated[int, Field(description="How many CTAs of a grid run (0: all). Counters cover only these.", ge=0)]
Seconds = Annotated[float | None, Field(description="Limit of the run in seconds, at most the server's.", gt=0)]
_READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)


def serve(seconds: float, gib: float, roots: Sequence[Path]) -> None:
    """Answer calls until standard input ends.

    Each call is limited to ``seconds`` and ``gib`` of memory, and may name only files below the folders ``roots``.
    """
    server(seconds, gib, roots).run("stdio")


def server(seconds: float, gib: float, roots: Sequence[Path]) -> MCPServer:
    """Make the server with its tools. Raises WrongInput for a root that is no folder."""
    mcp = MCPServer("kernelproof", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for root in roots:
        if not root.is_dir():
            raise WrongInput(f"--root {root}: no such folder")
    tools = _Tools(seconds, gib, [root.resolve() for root in roots])
    for tool in (tools.check, tools.explain, tools.count):
        mcp.tool(description=cleandoc(tool.__doc__ or ""), annotations=_READ_ONLY)(tool)
    return mcp


class _Tools:
    """The tools. Their docstrings are the descriptions that clients read."""

    def __init__(self, seconds: float, gib: float, roots: Sequence[Path]) -> None:
        self.seconds, self.gib, self.roots = seconds, gib, list(roots)

    def check(
        self, launches: Launches, source: Source = "", path: File = "", buffers: Buffers = {}, device: Device = "",  # noqa: B006
        nvcc_args: Flags = "", adverse: Adverse = False, sample: Sample = 0, seconds: Seconds = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Run kernels on an emulated GPU and report races, wrong addresses, uninitialised reads, missing fences and
        deadlocks. In the answer, the field `outcome` is clean, errors or not checked. Each finding has a `rule`, a
        `message`, a `hint`, the source line (`access.home`), the other side of a race (`other.home`), and the buffer
        and index (`place`). The field `ending` says why the run stopped early, for example at the limit of time, and
        `output` is what the kernels printed."""
        return self._answer(
            seconds, launches=launches, source=source, path=path, buffers=buffers, device=device, nvcc_args=nvcc_args,
            adverse=adverse, sample=sample,
        )  # fmt: skip

    def count(
        self, launches: Launches, source: Source = "", path: File = "", buffers: Buffers = {}, device: Device = "",  # noqa: B006
        nvcc_args: Flags = "", sample: Sample = 0, seconds: Seconds = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Count what launches execute, for each kernel: instructions (per warp), mma and wgmma, bytes, 32-byte sectors
        and the fewest that the same bytes could need, bank conflicts, and barriers. These are counts of an emulator,
        not measured times."""
        document = self._answer(
            seconds, launches=launches, source=source, path=path, buffers=buffers, device=device, nvcc_args=nvcc_args,
            sample=sample, counters=True,
        )  # fmt: skip
        kernels = [
            {key: kernel[key] for key in ("name", "launches", "ctas", "grids", "counters")}
            for kernel in document["kernels"]
        ]
        rules = sorted({finding["rule"] for finding in document["findings"]})
        keys = ("device", "outcome", "ending", "not_checked")
        return {**{key: document[key] for key in keys}, "rules": rules, "kernels": kernels}

    def explain(
        self,
        subject: Annotated[str, Field(description="The id of a rule, or a report: text or JSON with findings.")],
    ) -> str:
        """Explain what findings mean: for each rule a small wrong program, the right one, and how to correct it."""
        try:
            return pages.pages(subject)
        except UserError as error:
            raise ToolError(str(error)) from None

    def _answer(self, seconds: float | None, **fields: Any) -> dict[str, Any]:
        """Answer a request with these fields. The client's limit of time is at most the server's. Raises ToolError."""
        try:
            limit = min(seconds or self.seconds, self.seconds)
            return answers.answer(Request(**fields, gib=self.gib, seconds=limit, roots=self.roots))
        except (UserError, ValidationError) as error:
            raise ToolError(str(error)) from None
