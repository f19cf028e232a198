"""The verb profile: what a profiler would show of a kernel, predicted from its machine code."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import FILTERS, LATER, SIZE, Selection
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.command_line.tables import print_section
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.timing.profile import LaunchFacts, Profile

SELECTED = (*FILTERS, *LATER)


@verb(app, "profile")
def profile_kernel(
    selection: Annotated[Selection, Offer(only=("mnk", *SELECTED, "changes", "fit"), helps=SIZE)],
    compilation: Compilation,
    cubin: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A cubin of any kernel with MMAs, in place of --mnk.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="NAME", help="The cubin's function whose name has this.")
    ] = None,
    launch: Annotated[
        Path | None,
        typer.Option("--launch", metavar="FILE", help="How the cubin is launched: JSON, see docs/profile.md."),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", min=0, help="Instructions to print: those before which warps wait the most.")
    ] = 16,
    html: Annotated[
        Path | None, typer.Option("--html", help="Page to write: one HTML file that needs no network.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare", metavar="A B", help="Two of: a cubin, a file of --json, or 'M_N_K FIELD=VALUE ...' in quotes."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict where a kernel's time goes, from its machine code.

    The main loop, its stalls, and what would help.
    """
    from cudal2gen.timing import profile

    facts = profile.LaunchFacts.load(launch) if launch else None
    if (launch and selection.mnk) or (kernel and (selection.mnk or compare)):
        refuse("--launch and --kernel are of a cubin: leave them out, or give FILE in place of --mnk and --compare")
    if compare is not None:
        if cubin or selection.mnk or html or as_json:
            refuse("--compare names both kernels, and prints tables only: leave out FILE, --mnk, --html and --json")
        for section in profile.compare(*(_named(text, selection, compilation, facts) for text in compare)):
            print_section(section)
        return
    if (cubin is None) == (not selection.mnk):
        refuse("give one of --mnk M_N_K, FILE and --compare A B")
    content = _of_file(cubin, selection, kernel, facts) if cubin else _of_record(selection, compilation)
    if html is not None:
        write(html, profile.html(content))
        print(f"written to {html}", file=sys.stderr)
    if as_json:
        print(content.model_dump_json())
    elif html is None:
        for section in profile.sections(content, lines):
            print_section(section)


def _of_record(selection: Selection, compilation: Compilation) -> Profile:
    """Builds the record's kernel where it is not built."""
    from cudal2gen.timing import profile

    if len(selection.mnk) != 1:
        refuse("profile takes one --mnk; --compare takes two kernels")
    record = selection.record()
    (artifact,) = compilation.build([record])
    return profile.of_record(record, artifact.cubin, artifact.source)


def _of_file(path: Path, selection: Selection, kernel: str | None, launch: LaunchFacts | None) -> Profile:
    """Of a cubin, at the rates of --gpu; or of saved JSON."""
    from cudal2gen.timing import profile

    if path.suffix == ".json":
        return profile.load(path)
    if not path.is_file():
        refuse(f"no file at {path}; give a cubin, or choose a record with --mnk")
    return profile.of_cubin(path, selection.gpu, kernel, launch)


def _named(text: str, selection: Selection, compilation: Compilation, launch: LaunchFacts | None) -> Profile:
    """What --compare names: a file, or a size with settings, among them gpu=, ab=, acc= and layout=."""
    if Path(text).suffix in (".json", ".cubin"):
        return _of_file(Path(text), selection, None, launch)
    if not text.strip():
        refuse("--compare: a name is empty; give a cubin, a file of --json, or 'M_N_K FIELD=VALUE ...'")
    mnk, *settings = text.split()
    pairs = [setting.partition("=") for setting in settings]
    target = {name: value for name, _, value in pairs if name in SELECTED}
    # Other types have their own accumulator.
    kept = [name for name in SELECTED if name != "acc" or not {"ab", "d"} & target.keys()]
    changes = tuple(setting for setting, (name, *_) in zip(settings, pairs, strict=True) if name not in SELECTED)
    options: dict[str, Any] = {name: getattr(selection, name) for name in kept} | target
    own = Selection((mnk,), fit=selection.fit, **options)
    own.problem()  # ends the command where the settings pose none
    return _of_record(replace(own, changes=(*selection.changes, *changes)), compilation)
