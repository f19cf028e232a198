"""Defines options that several verbs of ``cudal2gen`` share."""

from __future__ import annotations

from typing import Annotated

import typer

from kernelproof.ground.command_line.options import seconds

Duration = Annotated[
    float | None, typer.Option("--budget", metavar="DURATION", parser=seconds, help="Stop after, e.g., 8m or 90s.")
]
