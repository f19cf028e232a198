"""The verb ``model`` shows how well the timing model predicts measurements that others published."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.program import app
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import note
from kernelproof.ground.command_line.options import Json, Names, listed_names
from kernelproof.ground.command_line.tables import print_table

if TYPE_CHECKING:
    from cudal2gen.timing.evidence import Finding

CODE = "code"  # the part that takes speedups from built kernels' machine code
TABLES = "cuda_l2_*_speedup_*.csv"  # names of the files of CUDA-L2's speedup tables
PROBLEMS = 60  # how many problems of each published set are checked for the rank of the published choice


def _parts() -> tuple[str, ...]:
    """The names that ``--part`` takes."""
    from cudal2gen.timing.evidence.section import PARTS

    return (*PARTS, CODE)


@verb(app, "model")
def model(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDERS]",
            help="Measurements of others: AutoHeuristic's files (github.com/AlnisM/autoheuristic-datasets, unpacked) "
            "and CUDA-L2's speedup tables (eval_results of github.com/deepreinforce-ai/CUDA-L2).",
            show_default=False,
        ),
    ] = None,
    parts: Annotated[
        Names | None,
        listed_names(
            "--part",
            _parts,
            "Compare only these, separated by commas: speedups, choices and tiles, which were published; recorded and "
            "vendors, which are recorded choices and vendor times; code, speedups by built kernels' machine code.",
        ),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Use the half of the problems on which the model was not developed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Validate the timing model by published measurements. No GPU.

    The files of measurements are not included; without them, only facts about published kernels are compared.
    """
    from cudal2gen.timing import evidence
    from cudal2gen.timing.evidence.section import PARTS

    chosen = ["speedups" if part == CODE else part for part in parts or PARTS]
    tables = [folder for folder in folders or () if any(folder.glob(TABLES))]
    recordings = [folder for folder in folders or () if folder not in tables]
    findings: list[Finding] = []
    for part, measured, title, compare in (
        (
            "speedups",
            tables,
            "CUDA-L2's speedup tables",
            partial(evidence.published_speedups, code=CODE in (parts or ())),
        ),
        ("recorded", recordings, "AutoHeuristic's files", evidence.recorded_choices),
        ("vendors", recordings, "AutoHeuristic's files", evidence.recorded_vendors),
    ):
        if part in chosen and not measured:
            note(f"left out: {PARTS[part]}; name the folder of {title}")
        elif part in chosen:
            findings += [finding for folder in measured for finding in compare(folder, held_out)]
    if "choices" in chosen:
        findings += evidence.published_choices(PROBLEMS, held_out)
    if "tiles" in chosen:
        findings += evidence.published_tiles(held_out)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        _print(sorted(findings), held_out)


def _print(findings: list[Finding], held_out: bool) -> None:
    """Prints one table for each part of the comparison."""
    from rich.table import Table

    from cudal2gen.timing.evidence import section as validation

    print("problems that were held out" if held_out else "problems of development")
    for part in validation.tables(findings):
        table = Table(*part.columns, title=part.caption, title_justify="left", box=None)
        for row in part.rows:
            table.add_row(*row)
        print_table(table)
