"""The verbs ``explain`` and ``tune-model`` say which kernels ``cudal2gen.matmul`` runs, and which a model needs.

``explain`` says which kernel would run for a product, and why. ``tune-model`` runs a user's model without data and
lists the products that it computes, so that these can be measured and tuned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.measuring import measurements
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import FILTERS, SIZE_HELP, VARIANT_FIELDS, Selection
from cudal2gen.kernel.fusion import NONE, PLAIN
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.errors import MissingTool, installation
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.results.choice import Choice, Table


@verb(app, "explain")
def explain(
    selection: Annotated[
        Selection, Offer(only=("mnk", *FILTERS, *VARIANT_FIELDS, "products"), single=("mnk",), helps=SIZE_HELP)
    ],
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="A pack's folder to use instead of the installed pack, or files of measurements to use instead of the "
            "store's. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what cudal2gen.matmul would run, and why.

    Operands are assumed to be packed. The installed pack decides; without one, the catalog and stored measurements do.
    """
    folders = [path for path in sources or () if path.is_dir()]
    if len(folders) > 1:
        refuse(f"--from {folders[1]}: a second pack; name one")
    files = [path for path in sources or () if path not in folders]
    answer = explanation(selection, folders[0] if folders else None, files)
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    print(f"runs     {answer['runs']}\nbecause  {answer['why']}\nasked    {answer['source']}")
    if answer["runs"] != answer["kernel"]:
        print(f"instead  {answer['kernel']}, with CUDAL2GEN_PREFER=kernel")
    if answer["remark"]:
        note(answer["remark"])


def explanation(selection: Selection, directory: Path | None, result_files: Sequence[Path]) -> dict[str, str | None]:
    """The texts that ``explain`` prints.

    ``runs``: what would run. ``why``: the reason. ``kernel``: the kernel that would run if the user demanded one.
    ``source``: where the table of measurements comes from. ``remark``: a note for the user, or None.
    """
    from cudal2gen.kernel.launch import LaunchOperands
    from cudal2gen.kernel.serving import sizes_of
    from cudal2gen.results import rivals

    problem = selection.problem()
    table, source, remark = _table(selection, directory, result_files)
    operands = LaunchOperands.packed(problem.layout, sizes_of(problem), problem.fusion)
    vendor, *_ = rivals(problem)
    choice = table.choose(problem, operands, products=selection.products)
    kernel = _choice_in_words(table, table.choose(problem, operands, "kernel"), vendor)
    return {
        "runs": _choice_in_words(table, choice, vendor),
        "why": choice.reason,
        "kernel": kernel,
        "source": source,
        "remark": remark,
    }


def _choice_in_words(table: Table, choice: Choice, vendor: str) -> str:
    """A choice in words: its kernel and how that is launched, or the name of the ``vendor``'s function."""
    if choice.kernel is None or choice.use is None:
        return vendor
    record, use = table.kernels[choice.kernel].record, choice.use
    how = f"copies of {use.matrices}" if any(use.copied) else "no copies"
    return f"{record.name}, of {record.mnk}; launched as {use.launched.text}, {how}"


def _table(selection: Selection, directory: Path | None, result_files: Sequence[Path]) -> tuple[Table, str, str | None]:
    """The table that decides, where it comes from, and a remark for the user (or None)."""
    from cudal2gen import pack
    from cudal2gen.generation import answers
    from cudal2gen.results import choice

    measured = measurements(result_files)
    match = answers.answer(selection.problem(), measured)
    if directory is not None:
        opened = pack.open_pack(directory)
        if opened.gpu != selection.gpu:
            refuse(f"--from {directory}: is for {opened.gpu}, not {selection.gpu}")
        packs = {opened.gpu: opened}
    else:
        search = pack.search(() if result_files else pack.installed())
        packs = search.packs
        for reason in (*search.refused, *search.shadowed.get(selection.gpu, ())):
            note(reason)
    if selection.gpu in packs:
        packed = packs[selection.gpu]
        names = {kernel.record.name for kernel in packed.table.kernels}
        other = f"the catalog's kernel for it is {match.record.name}, which this pack does not have"
        return packed.table, f"the pack in {packed.directory}", other if match.record.name not in names else None
    records = {record.problem: record for record in answers.measured_records(match.record.problem, measured)}
    records[match.record.problem] = match.record
    if match.record.problem.suffix:
        # If the fused or batched problem was not measured, the choice falls back to its plain product's measurement and
        # to that kernel with the fusion or batch added, so the table needs both records.
        plain = selection.problem().revised(fusion=PLAIN, batch=NONE)
        plain_record = answers.answer(plain, measured).record
        variants, _ = choice.variants([plain_record], [str(match.record.fusion)], [match.record.batch])
        records |= {record.problem: record for record in [plain_record, *variants] if record.problem not in records}
    table = choice.tabulate(selection.gpu, list(records.values()), measured)
    return table, f"no pack; the catalog, {len(table.rows)} problems measured", match.note


@verb(app, "tune-model")
def list_products(
    selection: Annotated[Selection, Offer(only=("gpu", "acc"), defaults={"acc": "f32"})],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="module:callable or file.py:callable, which builds and runs a model.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The list to write, for --problems of other verbs; else it is printed."),
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="Run it on real tensors, not on tensors without data.")] = False,
    any_type: Annotated[
        bool, typer.Option("--any-type", help="Count products of other number types as if they were fp16.")
    ] = False,
) -> None:
    """List the products that a model computes, to measure and tune.

    Without --real the model runs on tensors without data, so neither its weights nor a GPU are needed.
    """
    if find_spec("torch") is None:
        raise MissingTool(f"torch is missing, which runs the model: {installation('gpu')}")
    from cudal2gen.operators import shapes

    products = shapes.collect(shapes.find_model(model), fake=not real, any_type=any_type)
    (acc,) = selection.accs
    rows = products.problems(selection.gpu, acc)
    for kind, count in sorted(products.others.items()):
        note(f"{count} products of {kind} are left out; --any-type takes them")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if out is None:
        print(text, end="")
    else:
        write(out, text)
        print(f"{len(rows)} problems, {sum(row['count'] for row in rows)} products, in {out}")
