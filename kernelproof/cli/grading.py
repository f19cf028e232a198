"""The verb ``grade`` compares kernels with a reference and looks for cheating, such as stale or hard-coded results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelproof.cli.program import app
from kernelproof.ground import files
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    from kernelproof.grading.graded import GradedSet

# The exit code of each outcome.
CODES = {"right": EXIT_DONE, "wrong": EXIT_FAILED, "not checked": EXIT_USAGE}


@verb(app, "grade")
def grade(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="x.py or x.json, as check_source; with --reference, a solution or a folder of them."
        ),
    ],
    source: Annotated[
        Path | None, typer.Argument(metavar="[SOURCE]", help="Grade these kernels instead of the ones in FILE.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference", help="FILE is a solution of a public benchmark, such as KernelBench; this is its reference."
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", help="With --reference: also write a page there, .html or .md, or .json.")
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
        from kernelproof.grading.graded import GradedSet, GradedSolution

        if source is not None:
            raise WrongInput("with --reference, FILE is the solution: leave SOURCE out")
        if file.is_dir():
            raise typer.Exit(_grade_set(file, reference, seed or 0, page, as_json))
        verdict = check_solution(file, reference, limits=Limits(seed=seed or 0))
        if page is not None:
            _write(GradedSet(entries=[GradedSolution(name=file.name, verdict=verdict)]), page)
    else:
        arguments = description.arguments(file, source)
        if seed is not None:
            arguments["limits"] = replace(arguments.get("limits") or Limits(), seed=seed)
        verdict = check_source(**arguments)
    print(verdict.model_dump_json(indent=1) if as_json else verdict)
    raise typer.Exit(CODES[verdict.outcome])


def _grade_set(solutions: Path, references: Path, seed: int, page: Path | None, as_json: bool) -> int:
    """Grade all solutions of a folder that have a reference, one line each; returns the exit code."""
    from kernelproof.grading import Limits
    from kernelproof.grading.benchmarks.judgement import check_solution
    from kernelproof.grading.graded import GradedSet, GradedSolution, exit_outcome, pairs

    found = pairs(solutions, references)
    if not found:
        raise WrongInput(f"{solutions}: no solution there has a reference of its name in {references}")
    graded = GradedSet()
    for solution, reference in found:
        verdict = check_solution(solution, reference, limits=Limits(seed=seed))
        graded.entries.append(GradedSolution(name=solution.name, verdict=verdict))
        if not as_json:
            print(f"{solution.name}: {verdict}", flush=True)
    if as_json:
        print(graded.model_dump_json(indent=1))
    if page is not None:
        _write(graded, page)
    return CODES[exit_outcome([entry.verdict.outcome for entry in graded.entries])]


def _write(graded: GradedSet, page: Path) -> None:
    """Write the page of a set as Markdown, JSON or HTML, by the suffix of its file."""
    text = {".md": graded.markdown, ".json": graded.model_dump_json}.get(page.suffix, graded.html)()
    files.write(page, text)
