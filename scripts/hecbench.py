"""Checks the CUDA programs of HeCBench (zjin-lcf/HeCBench) and reports the result of each.

    python -m scripts.hecbench run CHECKOUT RESULTS.jsonl [NAME ...]     NAME as in src/NAME-cuda; all without one
    python -m scripts.hecbench table RESULTS.jsonl

``run`` reads sources, flags and the arguments of ``make run`` from each Makefile (``make --dry-run``), makes the
arguments smaller by the rules of ``scripts/hecbench_programs.py``, and runs ``kernelproof check``. One line of JSON per
program is appended to RESULTS. Programs that are in it already are not checked again, unless they are named; the last
line of a program counts.

With ``--machine-code`` kernels are executed from cubins of sm_80, and without NAME the programs of
``scripts/machine_code_programs.txt`` are run: every n-th of those that had run from PTX when the list was made.

``table`` compares the errors with the judgements in ``scripts/hecbench.json``. The exit code is 1 in three cases: an
error has no judgement; its judgement says that it is false; or a program without errors says that its results are
wrong, and the file does not explain why.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from scripts.hecbench_programs import DATA, NotRunnable, Run, runs_of

MACHINE_CODE = Path(__file__).with_name("machine_code_programs.txt")
# Words by which programs report that their results differ from their reference.
COMPLAINT = re.compile(r"\b(?:FAIL\w*|[Ff]ailed|(?i:mismatch\w*|incorrect))\b(?!.*: 0$)")
# Categories of reasons why a program was not checked, by a pattern in the reason. The first match counts.
OBSTACLES = {
    "did not end within": "limit of time",
    r"fatal error: \S+: No such file": "a header is not installed",
    "finds no file|cannot find -l": "a library is not installed",
    r"no file|No such file|[Oo]pen|failed to read": "a data file is not in the repository",
    "started by|compiles nothing|no Makefile|make:": "it is not built by nvcc and run by itself",
    "the program": "the program gives up",
    "nvcc failed|: error|undefined": "it does not compile",
    "machine code": "its machine code is not modelled",
    "": "the emulator refuses it",
}
KEPT_OUTPUT = 2000  # how many of the last characters of a program's output are kept


class Row(NamedTuple):
    """The result for a program. ``state``: clean, true (a real error), false, not judged, or not checked. ``why``
    explains it."""

    program: str
    state: str
    why: str


app = typer.Typer(add_completion=False)


@app.command()
def run(
    checkout: Annotated[Path, typer.Argument(help="folder of HeCBench")],
    results: Annotated[Path, typer.Argument(help="file to append to")],
    names: Annotated[list[str] | None, typer.Argument(help="programs")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", help="programs at a time", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="limit of a run, without compilation", min=1)] = 40,
    machine_code: Annotated[bool, typer.Option("--machine-code", help="execute cubins in place of PTX")] = False,
) -> None:
    """Check programs, and append a line for each."""
    known = set() if names else set(_results(results))
    listed = MACHINE_CODE.read_text().split() if machine_code else None
    programs = (
        names or listed or sorted(folder.name.removesuffix("-cuda") for folder in (checkout / "src").glob("*-cuda"))
    )
    form_options = ["--machine-code"] if machine_code else []
    writing = threading.Lock()

    def check(program: str) -> None:
        outcomes = _outcomes(checkout.resolve(), program, seconds, form_options)
        with writing, results.open("a") as file:
            file.write(json.dumps({"program": program, "runs": outcomes}) + "\n")
        print(program, *(f"[{item['outcome']} {item['reason'][:100]}]" for item in outcomes), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(check, (program for program in programs if program not in known)))


def _results(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each program, by its last line in a file that need not exist."""
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else iter(())
    return {line["program"]: line["runs"] for line in lines}


def _outcomes(checkout: Path, program: str, seconds: float, form_options: list[str]) -> list[dict[str, Any]]:
    """The results of a program's runs. If it cannot be run, there is a single result with the reason."""
    unchecked = {"arguments": [], "outcome": "not checked", "findings": []}
    try:
        with runs_of(checkout, program) as runs:
            return [
                {**unchecked, "arguments": item.arguments, **_outcome(item, seconds, form_options)} for item in runs
            ]
    except NotRunnable as error:
        return [{**unchecked, "reason": str(error)}]


def _outcome(item: Run, seconds: float, form_options: list[str]) -> dict[str, Any]:
    """The keys of a result that a check determines. ``form_options``: options that choose the form of the kernels.

    A program that only reports wrong results (``COMPLAINT``) and exits with an error counts as checked. One that exits
    with an error for another reason does not.
    """
    command = [sys.executable, "-m", "kernelproof", "check", *map(str, item.sources), *form_options]
    command += ["--json", "--memory", "4"]
    command += ["--timeout", str(seconds), "--nvcc-args", item.flags, "--", *item.arguments]
    process = subprocess.run(command, capture_output=True, check=False, cwd=item.folder)
    printed = process.stderr.decode(errors="replace")
    try:
        result = json.loads(process.stdout)
    except ValueError:
        return {"reason": _compiler_error(printed)}
    findings = [
        finding for entry in result["findings"] if entry["severity"] == "error" for finding in _cause_findings(entry)
    ]
    reasons = [str(entry["reason"]) for entry in result["not_checked"]]
    complaints = [line.strip() for line in printed.splitlines() if COMPLAINT.search(line)]
    launches = sum(kernel["launches"] for kernel in result["kernels"])
    by_comparison = bool(complaints) and launches > 0 and result["ending"].startswith("ended with exit code")
    if not reasons and result["program_exit_code"] != 0 and not findings and not by_comparison:
        missing = [word for word in item.arguments if re.search(r"[/.]\D", word) and not (item.folder / word).exists()]
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        reasons = [f"the program {result['ending']}: {f'no file {missing[0]}' if missing else last.strip()}"]
    return {
        "outcome": "errors" if findings else "not checked" if reasons else "clean",
        "reason": reasons[0] if reasons else "",
        "findings": findings,
        "launches": launches,
        "unsupported": result["unsupported"],
        "seconds": result["seconds"],
        "exit_code": result["program_exit_code"],
        "complaints": complaints[:5],
        "printed": printed[-KEPT_OUTPUT:],
    }


def _compiler_error(printed: str) -> str:
    """The first line that says why there is no result."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    faults = [line for line in lines if re.search(r"fatal error|: error|undefined|finds no file", line)]
    return (faults or lines or ["no result"])[0]


def _cause_findings(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The findings of one cause, each with its rule and the user's lines as FILE:LINE."""
    homes = [access and access["home"] for access in (entry["access"], entry["other"])]
    yield {"rule": entry["rule"], "lines": _places(homes), "count": entry["count"], "text": entry["text"]}
    for also in entry["also"]:
        lines = _places([also["access"], also["other"]])
        yield {"rule": also["rule"], "lines": lines, "count": also["count"], "text": also["message"]}


def _places(homes: list[dict[str, Any] | None]) -> list[str]:
    """The file names and lines of accesses, in order and without repetition."""
    return sorted({f"{Path(home['file']).name}:{home['line']}" for home in homes if home and home["file"]})


@app.command()
def table(
    results: Annotated[Path, typer.Argument(help="file that run has written")],
    every: Annotated[bool, typer.Option("--all", help="also the clean programs")] = False,
) -> None:
    """Print the state of each program, and how many programs are in each state."""
    data = json.loads(DATA.read_text())
    rows = [
        row for program, runs in sorted(_results(results).items())
        for row in _rows(program, runs, data["judgements"].get(program, []), data["complaints"].get(program))
    ]  # fmt: skip
    for row in rows:
        if every or row.state != "clean":
            print(f"| {row.program} | {row.state} | {row.why} |")
    counts = Counter(state for _, state in {(row.program, row.state) for row in rows})
    print(", ".join(f"{count} programs {state}" for state, count in counts.most_common()))
    obstacles = Counter(_obstacle(row.why) for row in rows if row.state == "not checked")
    print("not checked:", ", ".join(f"{obstacle}: {count}" for obstacle, count in obstacles.most_common()))
    if any(row.state in ("false", "not judged") for row in rows):
        raise typer.Exit(1)


def _rows(
    program: str, runs: list[dict[str, Any]], judgements: list[dict[str, Any]], complaint: str | None
) -> list[Row]:
    """One row per judgement; or one that says that the program is clean, or why it was not checked.

    ``complaint`` explains why the program says that its results are wrong.
    """
    rows = {}
    for finding in (finding for item in runs for finding in item["findings"]):
        judgement = _judgement(finding, judgements)
        if judgement is None:
            why = f"{finding['rule']} {' '.join(finding['lines'])}"
            rows[why] = Row(program, "not judged", why)
        else:
            why = f"`{judgement['rule']}` {', '.join(judgement['lines'])}: {judgement['reason']}"
            rows[why] = Row(program, judgement["verdict"], why)
    if rows:
        return list(rows.values())
    clean = [item for item in runs if item["outcome"] == "clean"]
    if complaints := [line for item in clean for line in item["complaints"] if COMPLAINT.search(line)]:
        return [Row(program, "clean" if complaint else "not judged", complaint or f"says {complaints[0]}")]
    if clean:
        return [Row(program, "clean", f"{sum(item['launches'] for item in clean)} launches")]
    return [Row(program, "not checked", runs[0]["reason"].replace("|", "/"))]


def _obstacle(reason: str) -> str:
    """The category of the reason for which a program was not checked."""
    return next(obstacle for pattern, obstacle in OBSTACLES.items() if re.search(pattern, reason))


def _judgement(finding: dict[str, Any], judgements: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The judgement of a finding's rule that names all of its lines."""
    for judgement in judgements:
        if judgement["rule"] == finding["rule"] and set(finding["lines"]) <= set(judgement["lines"]):
            return judgement
    return None


if __name__ == "__main__":
    app()
