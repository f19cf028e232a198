"""The verb on the timing model: how well it predicts what GPUs measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.program import app
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.command_line.tables import print_table

if TYPE_CHECKING:
    from cudal2gen.timing.evidence import Finding


@verb(app, "model")
def model(
    validate: Annotated[bool, typer.Option("--validate", help="Compare with published measurements.")] = False,
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="[a|b|c|d]", help="Only this: speedups, choices, recordings, H100 tiles."),
    ] = None,
    recordings: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="AutoHeuristic's files: github.com/AlnisM/autoheuristic-datasets, unpacked."),
    ] = None,
    speedups: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="CUDA-L2's speedup tables: eval_results of github.com/deepreinforce-ai/CUDA-L2."
        ),
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Of each set, for the rank of published choices.")] = 60,
    code: Annotated[
        bool, typer.Option("--code", help="Speedups by the machine code of kernels that are built, half a second each.")
    ] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="The half of the problems that development of the model left alone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Validate the timing model by measurements of others. No GPU.

    Files of measurements are the user's: without them, only what facts about published kernels tell is compared.
    """
    if not validate:
        refuse("nothing to do: add --validate, and --recordings DIR and --speedups DIR for all of its parts")
    from cudal2gen.timing import evidence
    from cudal2gen.timing.evidence.section import PARTS

    chosen = parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        refuse(f"--part {min(unknown)}: must be one of {', '.join(PARTS)}")
    findings: list[Finding] = []
    for part, option, folder, compare in (
        ("a", "--speedups", speedups, partial(evidence.published_speedups, code=code)),
        ("c", "--recordings", recordings, evidence.recorded_choices),
    ):
        if part in chosen and folder is None:
            note(f"left out, without {option} DIR: {PARTS[part]}")
        elif part in chosen and folder is not None:
            findings += compare(folder, held_out)
    if "b" in chosen:
        findings += evidence.published_choices(problems, held_out)
    if "d" in chosen:
        findings += evidence.published_tiles(held_out)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        _print(sorted(findings), held_out)


def _print(findings: list[Finding], held_out: bool) -> None:
    """A table for each part."""
    from rich.table import Table

    from cudal2gen.timing.evidence import section as validation

    print("problems that were held out" if held_out else "problems of development")
    for part in validation.tables(findings):
        table = Table(*part.columns, title=part.caption, title_justify="left", box=None)
        for row in part.rows:
            table.add_row(*row)
        print_table(table)
