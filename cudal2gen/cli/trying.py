"""The verb ``try`` builds, checks and ranks the kernels of many edits of one record.

Builds and verdicts are cached, so the same command resumes after an interruption.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudal2gen.cli import spellings
from cudal2gen.cli.building import Compilation
from cudal2gen.cli.program import app
from cudal2gen.cli.records import own_record, put
from cudal2gen.cli.selection import FILTERS, GPU_HELP, SIZE_HELP, VARIANT_FIELDS, Selection
from cudal2gen.kernel import Difference, Record, fieldset, spell
from kernelproof.ground.command_line import progress, signals
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import EXIT_FAILED, note, refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.command_line.tables import print_table

if TYPE_CHECKING:
    from cudal2gen.bench import grid
    from cudal2gen.launch.gpu import Gpu

LIMIT = 100  # default number of edits; the verdict of each takes some seconds of processor time


@dataclass(frozen=True)
class Edits:
    """The options that say which edits to try."""

    settings: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set",
            metavar="FIELD=VALUES",
            help="Values to try for a field: bm=64,128, stages=2..5, bn=64..256..64, cluster=[1,2],[2,1], or a field "
            "several times. Every combination is an edit, whose other fields follow as with --fit.",
        ),
    ] = ()
    limit: Annotated[int, typer.Option(min=1, help="The most edits to try; more of them are refused.")] = LIMIT


@dataclass(frozen=True)
class OutputOptions:
    """The options that say what is printed and written."""

    best: Annotated[
        int | None, typer.Option("--best", min=1, help="Print this many of the right kernels, the fastest first.")
    ] = None
    write: Annotated[bool, typer.Option("--write", help="Put the fastest right kernel into the catalog.")] = False
    as_json: Json = False


@verb(app, "try")
def try_edits(
    selection: Annotated[
        Selection,
        Offer(
            only=("mnk", *FILTERS, *VARIANT_FIELDS),
            single=("mnk",),
            indexed=("gpu",),
            helps=SIZE_HELP | {"gpu": GPU_HELP},
        ),
    ],
    edits: Edits,
    compilation: Compilation,
    output: OutputOptions,
    measure: Annotated[
        bool,
        typer.Option("--time", help="Time the right kernels on the GPU, in turns; without it, times are modelled."),
    ] = False,
) -> None:
    """Try a grid of edits, and rank the kernels that are right.

    Each edit is fitted to the rules, built and executed in the emulator.

    Builds and verdicts are kept, so a second call goes on where an interrupted one ended.
    """
    if not edits.settings:
        refuse("nothing to try; give --set FIELD=VALUES, such as --set bm=64,128 --set stages=2..5")
    record = own_record(selection.problem()) if output.write else selection.record()
    variants = spellings.edits(record, edits.settings, edits.limit)
    card = _card(selection.device, record) if measure else None

    from cudal2gen.bench import grid

    with progress.bar("fitting") as report:
        kernels, refusals = grid.fitted(record, variants, report)
    if len(refusals) == len(variants):
        (spelling, reason), *others = refusals
        refuse(f"all {len(refusals)} edits are refused, {spelling} by: {reason}" if others else f"{spelling}: {reason}")
    rows = _rows(kernels, compilation, card, selection.device)
    winners = grid.best(rows, len(rows))
    printed = winners[: output.best] if output.best else grid.ranked(rows)
    written = _write(winners) if output.write else None
    if output.as_json:
        print(json.dumps(_document(record, printed, refusals, written), indent=1))
    else:
        names = dict.fromkeys(setting.partition("=")[0] for setting in edits.settings)
        _print_table(printed, _values_text(record, names))
        if output.best is None:
            _print_reasons(rows, refusals)
        print(_totals(rows, refusals))
        if written:
            print(written)
    if not winners or any(row.outcome in ("wrong result", "no verdict") for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _card(device: int, record: Record) -> Gpu:
    """The GPU. Raises GpuError if there is none, or if the record is for another model."""
    from cudal2gen.launch.gpu import connect

    card = connect(device)
    card.check(record)
    return card


def _rows(
    kernels: Sequence[grid.Candidate], compilation: Compilation, card: Gpu | None, device: int
) -> list[grid.TriedKernel]:
    """Builds and judges the kernels, and times them if there is a ``card``."""
    from cudal2gen.bench import grid
    from cudal2gen.launch.gpu import reserved_device

    with progress.bar("compiling") as report:
        rows = grid.built(kernels, compilation.toolchain(), compilation.jobs, report)
    library = compilation.launcher()
    try:
        with signals.exit_restored(), progress.bar("validating") as report:
            rows = grid.judged(rows, library, compilation.jobs or os.cpu_count() or 1, report)
    except (SystemExit, KeyboardInterrupt):
        note("verdicts so far are stored; the same command goes on from there")
        raise
    if card is None:
        return rows
    with reserved_device(device):
        return grid.timed(rows, card, library)


def _write(winners: Sequence[grid.TriedKernel]) -> str | None:
    """Writes the record of the best kernel and returns a sentence about it; None if nothing was written."""
    if not winners:
        return None
    from cudal2gen.timing.model import worth

    best = winners[0]
    origin = "measured" if best.timing else "modelled"
    if not best.timing and not worth.sorts(best.record.problem):
        note(f"nothing is written: times are modelled, and {worth.in_words(best.record.problem)}; --time measures them")
        return None
    if best.candidate.start:
        note(f"the record as it is has the best {origin} time: nothing is written")
        return None
    return f"{put(best.record)}: {best.candidate.edits[0]}, of the best {origin} time"


def _print_table(rows: Sequence[grid.TriedKernel], unedited_values: str) -> None:
    """Prints a row for each kernel. ``unedited_values``: the text that stands for the edit of the unedited record."""
    from rich.table import Table

    timed = any(row.timing for row in rows)
    table = Table(box=None, pad_edge=False)
    for name in ("edit", "follows"):
        table.add_column(name, overflow="fold")
    for name in ("registers", "spills", "smem", "CTAs/SM", "waves"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for name in ("modelled us", "measured us") if timed else ("modelled us",):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row, unedited_values, timed))
    print_table(table)


def _cells(row: grid.TriedKernel, unedited_values: str, timed: bool) -> list[str]:
    """The cells of a kernel in the printed table. ``timed``: whether there is a column of measured times."""
    ptxas = row.artifact.ptxas if row.artifact else None
    cells = [
        _edit_text(row.candidate, unedited_values),
        ", ".join(map(_difference_text, row.candidate.differences)),
        str(ptxas.registers) if ptxas else "",
        str(max(ptxas.spill_store_bytes, ptxas.spill_load_bytes)) if ptxas else "",
        str(row.record.smem_bytes),
        str(row.ctas_per_sm),
        f"{row.waves:.2f}",
        row.outcome,
        f"{row.modelled_us:.2f}",
    ]
    return [*cells, f"{row.timing.median_us:.2f}" if row.timing else ""] if timed else cells


def _print_reasons(rows: Sequence[grid.TriedKernel], refusals: Sequence[grid.Refusal]) -> None:
    """Prints one line for each failed kernel and each refused edit."""
    for row in rows:
        if row.reason:
            print(f"{row.outcome}: {_edit_text(row.candidate)}: {row.reason}")
    for refusal in refusals:
        print(f"refused: {refusal.edit}: {refusal.reason}")


def _edit_text(candidate: grid.Candidate, unedited_values: str = "") -> str:
    """The text of the first edit that leads to a kernel; for the unedited record ``unedited_values``."""
    return f"{unedited_values} (as it is)".strip() if candidate.start else candidate.edits[0]


def _values_text(record: Record, names: Iterable[str]) -> str:
    """The values of some fields of a record; fields that its family lacks are left out."""
    values = fieldset(type(record)).flat(record.model_dump(mode="json"))
    return " ".join(f"{name}={spell(values[name])}" for name in names if name in values)


def _difference_text(difference: Difference) -> str:
    """A field that had to follow an edit, without the rule that ``str`` would add."""
    return f"{difference.field} {spell(difference.before)} -> {spell(difference.after)}"


def _totals(rows: Sequence[grid.TriedKernel], refusals: Sequence[grid.Refusal]) -> str:
    """A line that counts edits, refusals and outcomes, and says where the times come from."""
    edits = sum(len(row.candidate.edits) for row in rows) + len(refusals)
    counts = Counter(row.outcome for row in rows)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    stored = sum(row.stored for row in rows)
    from cudal2gen.timing.model import worth

    modelled = f"modelled, not measured; {worth.in_words(rows[0].record.problem)}" if rows else ""
    times = "measured in turns" if any(row.timing for row in rows) else modelled
    return (
        f"{edits} edits, {len(refusals)} of them refused; {len(rows)} kernels with the record's own: {outcomes}; "
        f"{stored} had a verdict; times are {times}"
    )


def _document(
    record: Record, rows: Sequence[grid.TriedKernel], refusals: Sequence[grid.Refusal], written: str | None
) -> dict[str, Any]:
    """The answer for a program; docs/edit.md describes the keys."""
    return {
        "problem": record.problem.model_dump(mode="json"),
        "kernels": list(map(_kernel_entry, rows)),
        "refused": [refusal._asdict() for refusal in refusals],
        "written": written is not None,
    }


def _kernel_entry(row: grid.TriedKernel) -> dict[str, Any]:
    """The JSON object of a kernel."""
    ptxas = row.artifact.ptxas if row.artifact else None
    return {
        "edits": row.candidate.edits,
        "record": row.record.model_dump(mode="json"),
        "follows": [difference._asdict() for difference in row.candidate.differences],
        "name": row.record.name,
        "directory": str(row.artifact.directory) if row.artifact else None,
        "registers": ptxas.registers if ptxas else None,
        "spill_bytes": max(ptxas.spill_store_bytes, ptxas.spill_load_bytes) if ptxas else None,
        "smem_bytes": row.record.smem_bytes,
        "ctas_per_sm": row.ctas_per_sm,
        "waves": round(row.waves, 3),
        "outcome": row.outcome,
        "reason": row.reason,
        "modelled_us": round(row.modelled_us, 3),
        "measured_us": row.timing.median_us if row.timing else None,
    }
