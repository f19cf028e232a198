"""The verb ``mcp`` serves the checks as tools to language models, over the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelproof.cli.program import app
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.errors import MissingTool, installation


@verb(app, "mcp")
def mcp(
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Seconds that a call may run.")] = 60.0,
    memory: Annotated[float, typer.Option("--memory", min=0.1, help="GiB that a call's run may need.")] = 4.0,
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", metavar="FOLDER", help="Files below it may be named; may be repeated; default: here."),
    ] = None,
    guide: Annotated[bool, typer.Option("--skill", help="Print the guide for models, a SKILL.md, and end.")] = False,
) -> None:
    """Serve check, explain and count to a language model, by MCP.

    It uses standard input and output, and compiles and runs device code only. --skill prints a guide for models.
    """
    from kernelproof.mcp_server import pages

    if guide:
        print(pages.guide(), end="")
        return
    try:
        from kernelproof.mcp_server import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise MissingTool(f"the SDK of the protocol is missing; {installation('mcp')}") from None
    server.serve(seconds, memory, root or [Path.cwd()])
