"""The verb ``grade`` compares kernels with a reference and looks for cheating, such as stale or hard-coded results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kernelproof.cli.program import app
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.errors import WrongInput

CODES = {"right": EXIT_DONE, "wrong": EXIT_FAILED, "not checked": EXIT_USAGE}


@verb(app, "grade")
def grade(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="x.py or x.json: reference, shapes, buffers, launches, as check_source."),
    ],
    source: Annotated[Path | None, typer.Argument(metavar="[SOURCE]", help="Kernels to grade, not FILE's.")] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference", help="FILE is a solution of KernelBench, GPU MODE or robust-kbench; this is its reference."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed to use instead of FILE's.")] = None,
    as_json: Json = False,
) -> None:
    """Grade kernels without a GPU, by a reference in Python. It also looks for cheating.

    A FILE.py is executed as you, but with --reference both files are executed in a sandbox. Exit codes: 0 right, 1
    wrong, 2 wrong input or what cannot be checked, 3 a missing tool. docs/kernelproof/grading.md has more.
    """
    from kernelproof.grading import Limits, check_source, description

    if reference is not None:
        from kernelproof.grading.benchmarks.judgement import check_solution

        if source is not None:
            raise WrongInput("with --reference, FILE is the solution: leave SOURCE out")
        verdict = check_solution(file, reference, limits=Limits(seed=seed or 0))
    else:
        arguments = description.arguments(file, source)
        if seed is not None:
            arguments["limits"] = replace(arguments.get("limits") or Limits(), seed=seed)
        verdict = check_source(**arguments)
    print(verdict.model_dump_json(indent=1) if as_json else verdict)
    raise typer.Exit(CODES[verdict.outcome])
