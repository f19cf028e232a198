"""The verbs ``list``, ``show``, ``render`` and ``edit`` print and change records of the catalog."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.program import app
from cudal2gen.cli.selection import ANY, FILTER, OneRecord, Selection, SeveralRecords
from cudal2gen.generation import catalog
from cudal2gen.kernel import FAMILIES, STRUCTURES, Problem, Record
from kernelproof.ground.chips import distance
from kernelproof.ground.command_line.groups import OneOf, Shared, verb
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.command_line.tables import number, print_table
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact
    from cudal2gen.results import Verdict

MEANINGS = {  # the meaning of each fact that ``show`` prints; families add facts of their own
    "threads": "threads of a CTA",
    "smem_bytes": "shared memory of a CTA, bytes",
    "smem_limit_bytes": "the most that a CTA has on this GPU, bytes",
    "registers_estimated": "registers of a thread, from the tile",
    "registers": "registers of a thread, by ptxas; null until 'cudal2gen build'",
    "ctas": "tiles of D, counted once for each slice of k",
    "ctas_per_sm": "CTAs that an SM holds at a time",
    "waves": "ctas over those that the GPU holds at a time",
    "padding_waste": "work on padding over the useful work",
    "accumulator_registers": "registers of a thread that hold sums",
    "entry_registers": "registers of a thread as the kernel starts, before warpgroups share them out",
    "cluster_ctas": "CTAs of a cluster",
    "tensor_memory_columns": "columns of tensor memory that a CTA allocates, of 512",
}
Fact = str | int | float | bool | list[str] | None


@dataclass(frozen=True)
class Design:
    """The options that choose records by their family and origin."""

    family: Annotated[str | None, OneOf(tuple(FAMILIES)), Shared("family", "only records of this family")] = None
    structure: Annotated[str | None, OneOf(STRUCTURES), Shared("structure", "only records of this origin")] = None


@verb(app, "list")
def list_records(
    selection: Annotated[Selection, replace(FILTER, only=(*FILTER.only, "origin"))],
    design: Design,
    as_json: Json = False,
) -> None:
    """List the records of the catalog, one line each."""
    family, structure = design.family, design.structure
    records = [
        record
        for record in selection.stock()
        if selection.selects(record)
        and family in (None, record.family)
        and structure in (None, record.origin.structure)
    ]
    for record in records:
        print(catalog.dump(record) if as_json else _line(record))
    if not records:
        note(f"no record matches{_available_records(selection.gpu, catalog.load())}")


def _available_records(gpu: str, stored: Sequence[Record]) -> str:
    """The end of the note "no record matches": which records the GPU has, or which GPU's records it uses instead."""
    if not stored:
        return f": {catalog.no_records()}"
    lenders = {record.gpu for record in stored}
    if gpu != ANY and gpu not in lenders:
        nearest = min(lenders, key=lambda other: (distance(gpu, other), other))
        return f": {gpu} has none of its own; those of {nearest} stand in, see 'cudal2gen list --gpu {nearest}'"
    own = [record for record in stored if gpu in (ANY, record.gpu)]
    kinds = dict.fromkeys(f"{record.problem.types} {record.layout}" for record in own)
    families = dict.fromkeys(record.family for record in own)
    owner = "the catalog" if gpu == ANY else gpu
    return f": {owner} has {len(own)}, {', '.join(kinds)}, of {', '.join(families)}" if own else ""


def _line(record: Record) -> str:
    """A record in a line of a list."""
    tile = f"{record.bm}x{record.bn}x{record.k_step}" if record.ring_steps > 1 else f"{record.bm}x{record.bn}"
    return (
        f"{record.gpu:8} {record.problem.types} {record.layout} {record.mnk:18} {record.family:16} {tile:12} "
        f"{record.threads:4} threads  {record.smem_bytes:6} B  {record.origin.structure}{record.problem.suffix}"
    )


@verb(app, "show")
def show(selection: OneRecord, as_json: Json = False) -> None:
    """Show a record, what its fields mean, and what follows.

    From a record follow threads, shared memory, registers, CTAs per SM and waves. A built kernel also has its verdict,
    proof and counters.
    """
    record = selection.record()
    facts = _facts(record, _built_kernel(record))
    for remark in record.remarks:
        note(remark)
    if as_json:
        print(json.dumps({"record": record.model_dump(mode="json"), "derived": facts}, indent=1))
        return
    from rich.table import Table

    derived = [(name, value, MEANINGS.get(name)) for name, value in facts.items()]
    for title, rows in (
        ("record", _fields(record)),
        ("follows from it", [row for row in derived if row[2]]),
        ("kernel", [row for row in derived if not row[2]]),
    ):
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, value, meaning in rows:
            text = number(value) if isinstance(value, float) else json.dumps(value)
            table.add_row(name, value if isinstance(value, str) else text, meaning)
        print_table(table)
    print("next")
    for command, meaning in _next_steps(selection).items():
        print(f"{command}  # {meaning}")


def _next_steps(selection: Selection) -> dict[str, str]:
    """The commands that a reader of ``show`` may want next, for the same record, and what each does."""
    steps = {
        f"cudal2gen validate {selection.options}": "is it right? executes it in the emulator and stores the verdict"
    }
    if not selection.changes:
        return {f"cudal2gen render {selection.options}": "its CuTe source"} | steps
    new = "" if catalog.own(selection.problem()) else " --new"
    return steps | {f"cudal2gen edit{new} {selection.options}": "writes the changed record to the catalog"}


def _fields(record: Record) -> list[tuple[str, object, str | None]]:
    """Name, value and meaning of each field of the record. Parts of a field are named as in ``--set``."""
    rows: list[tuple[str, object, str | None]] = []
    described = record.line_fields()
    for name, value in record.model_dump(mode="json").items():
        if isinstance(value, dict):
            parts = type(getattr(record, name)).model_fields
            rows += [(f"{name}.{part}", inner, parts[part].description) for part, inner in value.items()]
        else:
            rows.append((name, value, described[name].description))
    return rows


def _built_kernel(record: Record) -> Artifact | None:
    """The record's compiled kernel, or None if it is not built or there is no compiler."""
    from cudal2gen.generation import compiler
    from kernelproof.ground import toolchain

    try:
        return compiler.find(record)
    except toolchain.ToolchainError:
        return None


def _facts(record: Record, artifact: Artifact | None) -> dict[str, Fact]:
    """The facts that follow from a record. A built kernel also has its registers, verdict and modelled times."""
    registers = artifact.ptxas.registers if artifact else record.estimated_registers
    facts: dict[str, Fact] = {
        "name": record.name,
        "threads": record.threads,
        "smem_bytes": record.smem_bytes,
        "smem_limit_bytes": record.target.capability.smem_block_bytes,
        "registers_estimated": record.estimated_registers,
        "registers": artifact.ptxas.registers if artifact else None,
        "ctas": record.ctas,
        "ctas_per_sm": record.ctas_per_sm(registers),
        "waves": round(record.waves(registers), 2),
        "padding_waste": round(record.padding_waste, 4),
        **record.facts,
        "remarks": record.remarks,
    }
    if artifact:
        from cudal2gen import results
        from cudal2gen.results.proofs import in_words, proofs

        verdicts = [results.verdict(artifact.digest, on) for on in (results.IN_PTX, results.IN_MACHINE_CODE)]
        facts |= _verdict_facts([verdict for verdict in verdicts if verdict])
        facts["certified"] = in_words(proofs().get(artifact.digest))
        facts |= _modelled_facts(record, artifact)
        facts |= {"directory": str(artifact.directory), "findings": artifact.ptxas.findings}
    return facts


def _verdict_facts(verdicts: Sequence[Verdict]) -> dict[str, Fact]:
    """The common outcome of the verdicts on a built kernel, the forms that were executed, and the first's counters."""
    from cudal2gen import results

    if not verdicts:
        return {"verdict": None}
    forms = [
        results.executed_in(verdict.on) + (f" of ptxas {verdict.machine_code.ptxas}" if verdict.machine_code else "")
        for verdict in verdicts
    ]
    outcome = "right" if all(verdict.passed for verdict in verdicts) else "wrong"
    return {"verdict": outcome, "executed": " and ".join(forms), **results.executed(verdicts[0].counters)}


def _modelled_facts(record: Record, artifact: Artifact) -> dict[str, str]:
    """The timing model's predictions from the machine code of a built kernel; empty without a disassembler."""
    from cudal2gen.timing import profile
    from kernelproof import sass
    from kernelproof.ground import toolchain

    try:
        return profile.brief(record, artifact.cubin)
    except (toolchain.ToolchainError, sass.DisassemblyError):
        return {}


@verb(app, "render")
def render_source(
    selection: SeveralRecords,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; for other options than --mnk a folder, with one file per text."),
    ] = None,
) -> None:
    """Print the CuTe source of a record's kernel. Highlighted on a terminal, plain in a pipe."""
    from cudal2gen.generation.renderer import render

    records = selection.records()
    if len(records) > 1 or not selection.mnk:
        _write_sources(records, out)
        return
    text = render(records[0])
    for warning in records[0].warnings:
        note(warning)
    if out is not None:
        write(out, text)
        return
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "cuda", word_wrap=True))


def _write_sources(records: list[Record], out: Path | None) -> None:
    """Writes the text of each record into the folder ``out``, once for records of one text."""
    from cudal2gen.generation.renderer import render

    if out is None:
        refuse("several records need --out DIR")
    texts = {record.name: render(record) for record in records}
    for name, text in texts.items():
        write(out / f"{name}.cu", text)
    print(f"{len(texts)} distinct texts in {out}", file=sys.stderr)


@verb(app, "edit")
def edit_record(
    selection: OneRecord,
    new: Annotated[
        bool, typer.Option("--new", help="Add a record for a problem that has none, made from the nearest one.")
    ] = False,
) -> None:
    """Write a changed record to the catalog, if it is legal."""
    if not selection.changes and not new:
        refuse("nothing to change; give --set FIELD=VALUE")
    problem = selection.problem()
    if new:
        if catalog.own(problem):
            refuse(f"--new: {problem.mnk} has a record for {selection.target}; change it with --set FIELD=VALUE")
        record = selection.record()
    else:
        record = selection.changed(own_record(problem))
    if record.key != problem.key:
        refuse(
            "a record's problem does not change; name the other problem by --mnk, --gpu, --acc, --layout and --where"
        )
    print(put(record))


def own_record(problem: Problem) -> Record:
    """The catalog's own record of this problem, to be changed. Raises WrongInput if there is none."""
    record = catalog.own(problem)
    if record is None:
        refuse(f"no record for {problem.title}; 'cudal2gen edit --new' adds one, made from the nearest record")
    return record


def put(record: Record) -> str:
    """Writes a record to the catalog, and returns a sentence that says so."""
    return f"{record.problem.title} written to {catalog.put(record)}"
