"""The verb ``profile`` predicts from machine code where a kernel spends its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import FILTERS, SIZE_HELP, VARIANT_FIELDS, Selection
from kernelproof.cli.profiling import ProfileOutput, print_comparison, profile_of_file
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import refuse

if TYPE_CHECKING:
    from kernelproof.profile import Profile

SELECTION_FIELDS = (*FILTERS, *VARIANT_FIELDS)
COMPARE = {"compare": "Compare two: 'M_N_K FIELD=VALUE ...' in quotes, a cubin, or a profile that --json saved."}


@verb(app, "profile")
def profile_record(
    selection: Annotated[Selection, Offer(only=("mnk", *SELECTION_FIELDS, "changes", "fit"), helps=SIZE_HELP)],
    compilation: Compilation,
    output: Annotated[ProfileOutput, Offer(only=("html", "compare", "as_json"), helps=COMPARE)],
) -> None:
    """Predict where a kernel's time goes, from its machine code.

    Builds the kernel if it is not built, and prints the main loop, what its warps wait for, and which changes would
    help. Cubins of other projects are profiled by 'kernelproof profile'.
    """
    names = output.names(bool(selection.mnk), "--mnk M_N_K")
    if names:
        first, second = (_profile_of_operand(name, selection, compilation) for name in names)
        print_comparison(first, second)
    else:
        output.show(_profile_of_record(selection, compilation))


def _profile_of_record(selection: Selection, compilation: Compilation) -> Profile:
    """The profile of the selected record, whose kernel is built first."""
    from cudal2gen.timing import profile

    if len(selection.mnk) != 1:
        refuse("profile takes one --mnk; --compare takes two kernels")
    record = selection.record()
    (artifact,) = compilation.build([record])
    return profile.of_record(record, artifact.cubin, artifact.source)


def _profile_of_operand(name: str, selection: Selection, compilation: Compilation) -> Profile:
    """The profile of one operand of ``--compare``: a file, or a problem size followed by settings such as bm=64."""
    if Path(name).suffix in (".json", ".cubin"):
        return profile_of_file(Path(name), selection.gpu)
    if not name.strip():
        refuse("--compare: a name is empty; give 'M_N_K FIELD=VALUE ...', a cubin, or a profile that --json saved")
    mnk, *settings = name.split()
    pairs = [setting.partition("=") for setting in settings]
    operand_fields = {field: value for field, _, value in pairs if field in SELECTION_FIELDS}
    # If the operand gives its own types, the accumulator follows from them, and --acc of the command line is dropped.
    kept = [field for field in SELECTION_FIELDS if field != "acc" or not {"ab", "d"} & operand_fields.keys()]
    changes = tuple(
        setting for setting, (field, *_) in zip(settings, pairs, strict=True) if field not in SELECTION_FIELDS
    )
    options: dict[str, Any] = {field: getattr(selection, field) for field in kept} | operand_fields
    operand = Selection((mnk,), fit=selection.fit, **options)
    operand.problem()  # exits with an error if the settings do not describe a problem
    return _profile_of_record(replace(operand, changes=(*selection.changes, *changes)), compilation)
