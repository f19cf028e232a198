"""The verb ``pack`` writes compiled kernels, the table that chooses among them, and the launcher.

A machine without a compiler can then use the kernels: a pack is a folder, a wheel, or a Hugging Face repository.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.measuring import ResultFiles, measurements
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import ANY, BATCHES, FILTERS, LAYOUTS, Selection
from cudal2gen.cli.validating import store_verdicts
from cudal2gen.kernel import Layout, Record
from cudal2gen.kernel import explain as explain_fault
from cudal2gen.kernel.fusion import Fusion
from cudal2gen.kernel.problem import Batch
from kernelproof.ground.command_line.groups import Offer, OneOf, verb
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.errors import Failure
from kernelproof.ground.pages import counted

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact
    from cudal2gen.results import Measurements, Verdict
    from cudal2gen.results.choice import Table
    from kernelproof.ground.workers import Lost

PackFormat = Literal["folder", "wheel", "hf"]
PTX = "ptx"  # the value of --also that packs PTX
PACK_FORMATS: tuple[PackFormat, ...] = ("folder", "wheel", "hf")


@dataclass(frozen=True)
class Additions:
    """The options for what a pack contains besides plain kernels: other layouts, fusions, batches, and PTX."""

    names: Annotated[
        tuple[str, ...],
        typer.Option(
            "--also",
            metavar="PARTS",
            help="Also pack each plain kernel with a fusion such as bias_n, or for batches: strided or grouped. nt or "
            "tt: for A (K,M), as gradients of weights have it. ptx: PTX beside the cubins, for the emulator. "
            "Repeatable.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        for fusion in self.fusions:
            try:
                Fusion.model_validate(fusion)
            except ValidationError as error:
                others = ", ".join((*BATCHES[1:], *LAYOUTS))
                refuse(f"--also {explain_fault(error)}; other values are {others} and {PTX}")

    @property
    def with_ptx(self) -> bool:
        """Whether the pack also contains PTX."""
        return PTX in self.names

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The kinds of batches with which every plain kernel is packed as well."""
        return tuple(batch for batch in BATCHES[1:] if batch in self.names)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts for which every plain kernel is packed as well."""
        return tuple(layout for layout in LAYOUTS if layout in self.names)

    @property
    def fusions(self) -> tuple[str, ...]:
        """The fusions with which every plain kernel is packed as well."""
        return tuple(name for name in self.names if name not in (PTX, *BATCHES[1:], *LAYOUTS))

    def added_to(self, records: list[Record]) -> list[Record]:
        """The records, followed by each plain one in every layout and with every fusion and batch that --also names.

        Combinations that break a rule are left out, and a note says how many.
        """
        from cudal2gen.results import choice

        plain = [record for record in records if not record.problem.suffix]
        variants, illegal = choice.variants(plain, self.fusions, self.batches, self.layouts)
        if illegal:
            note(f"{illegal} of {illegal + len(variants)} kernels of --also are not legal, and left out")
        existing = {(record.problem, record.name) for record in records}
        # Two records that differ only in layout become the same record in a layout of --also; it is packed once.
        distinct = {(record.problem, record.name): record for record in variants}
        return [*records, *(record for key, record in distinct.items() if key not in existing)]


PACK_SELECTION = Offer(
    only=("mnk", "everything", "size_class", "sample", "problem_file", *FILTERS),
    wildcards=FILTERS[1:],
    defaults=dict.fromkeys(FILTERS[1:], ANY),
    helps={
        "everything": "Every record; without an option that chooses sizes, those that measured faster, or --candidates."
    },
)


@verb(app, "pack")
def write_pack(
    selection: Annotated[Selection, PACK_SELECTION],
    added: Additions,
    compilation: Compilation,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write, or a wheel if it ends in .whl.")],
    measured_files: ResultFiles = None,
    candidates: Annotated[
        bool,
        typer.Option(
            "--candidates",
            help="Pack kernels for autotuning, with no claim that one is faster: all records of --gpu, and those used "
            "instead of missing ones for bf16 and for B (K,N).",
        ),
    ] = False,
    pack_format: Annotated[
        PackFormat | None,
        OneOf(PACK_FORMATS),
        typer.Option("--format", help="hf: a repository for Hugging Face kernels. By default what --out says."),
    ] = None,
) -> None:
    """Write what a machine without a compiler needs.

    That is: cubins, the table of choices, the launcher and a C header.

    A cubin is packed if its own machine code has a verdict that it is right. Kernels without one are executed first,
    which takes seconds for each; 'cudal2gen validate --on emulator:machine-code' does it beforehand.
    """
    from cudal2gen import pack
    from cudal2gen.pack.repository import repository

    pack_format = pack_format or ("wheel" if out.suffix == ".whl" else "folder")
    if pack_format != "wheel":
        pack.check_target(out)  # before anything is compiled
    measured = measurements(measured_files or ())
    if candidates:
        table, built = _candidate_table(added.added_to(selection.candidates()), compilation, measured)
    else:
        table, built = _measured_table(selection, added, compilation, measured)
    verdicts = _machine_code_verdicts(table, built, compilation)
    library, cuda = compilation.launcher(), compilation.toolchain().cuda
    files = pack.contents(table, built, library, cuda, added.with_ptx, verdicts)
    files = repository(files, table) if pack_format == "hf" else files
    target = pack.write_wheel(files, out) if pack_format == "wheel" else pack.write_folder(files, out)
    for line in table.notes:
        note(line)
    binaries = {kernel.digest for kernel in table.kernels}
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) if target.is_dir() else 0
    won = f"{sum(row.wins for row in table.rows)} of {len(table.rows)} measured problems won"
    print(
        f"{target}: {counted(len(table.kernels), 'kernel')}, "
        f"{len(binaries)} {'binary' if len(binaries) == 1 else 'binaries'}, "
        f"{(size or target.stat().st_size) >> 10} KiB; {'candidates, nothing claimed' if candidates else won}"
    )


def _measured_table(
    selection: Selection, added: Additions, compilation: Compilation, measured: Measurements
) -> tuple[Table, dict[str, Artifact]]:
    """The table of the selected records with their measurements, and the compiled kernels by digest."""
    from cudal2gen.results import choice

    records = selection.records_to_pack(measured.measurements)
    if not records:
        refuse(
            f"no measurements for {selection.gpu}: run 'cudal2gen bench' there, choose records by --mnk or --all, or "
            "pack --candidates"
        )
    records = added.added_to(records)
    artifacts = compilation.build(records)
    for record, artifact in zip(records, artifacts, strict=True):
        if artifact.ptxas.findings:
            raise Failure(f"{record.name} {artifact.ptxas.findings[0]}: no kernel for a pack")
    digests = {record.name: artifact.digest for record, artifact in zip(records, artifacts, strict=True)}
    table = choice.tabulate(selection.gpu, records, measured, lambda record: digests[record.name])
    table = table if selection.names_sizes else table.chosen()
    return table, {artifact.digest: artifact for artifact in artifacts}


def _candidate_table(
    records: Sequence[Record], compilation: Compilation, measured: Measurements
) -> tuple[Table, dict[str, Artifact]]:
    """A table of these records without measurements, and the compiled kernels by digest.

    Kernels that spill registers or have a stack frame are left out.
    """
    from cudal2gen.results import choice

    if not records:
        refuse("no records that are legal; see 'cudal2gen list'")
    pairs = compilation.attempt(records)
    sound = [(record, artifact) for record, artifact in pairs if not artifact.ptxas.findings]
    if unsound := len(pairs) - len(sound):
        note(f"{unsound} of {len(records)} kernels spill or have a stack frame, and are left out")
    digests = {record.name: artifact.digest for record, artifact in sound}
    # Candidates make no claim of speed, so the measurements are dropped. The environments are kept, because the card's
    # bandwidth is needed to estimate the time of copies.
    cards = measured._replace(measurements=[])
    table = choice.tabulate(records[0].gpu, [record for record, _ in sound], cards, lambda record: digests[record.name])
    return table, {artifact.digest: artifact for _, artifact in sound}


def _machine_code_verdicts(table: Table, built: dict[str, Artifact], compilation: Compilation) -> dict[str, str]:
    """The verdict on the machine code of each binary of a table, in words, by digest.

    Binaries without a verdict on their machine code are executed, and the verdicts are stored. Raises Failure if a
    binary is wrong, or if the process that executes it dies. Machine code that the emulator cannot execute yet is
    packed without a verdict, and a note counts such binaries.
    """
    from cudal2gen import results
    from cudal2gen.results.proofs import proofs
    from cudal2gen.validator.machine_code import Unexecuted, judge_all, stored_verdict

    records = {kernel.digest: kernel.record for kernel in table.kernels}
    stored = results.latest()
    verdicts = {digest: verdict for digest in records if (verdict := stored_verdict(built[digest], stored))}
    pending = [(record, built[digest]) for digest, record in records.items() if digest not in verdicts]
    unexecuted: dict[str, str] = {}

    def judgements() -> Iterator[Verdict | Lost]:
        processes = compilation.jobs or os.cpu_count() or 1
        with closing(judge_all(pending, compilation.launcher(), processes)) as answers:
            for answer in answers:
                if isinstance(answer, Unexecuted):
                    unexecuted[answer.digest] = answer.reason
                else:
                    yield answer

    if pending:
        note(f"{counted(len(pending), 'kernel')} without a verdict on the machine code: executed first")
        verdicts |= {verdict.digest: verdict for verdict in store_verdicts(judgements(), len(pending))}
    for digest, record in records.items():
        verdict = verdicts.get(digest)
        if verdict and not verdict.passed:
            raise Failure(f"{record.name}: its machine code is wrong ({verdict.findings[0]}): no kernel for a pack")
        if verdict is None and digest not in unexecuted:
            raise Failure(f"{record.name}: its machine code got no verdict: no kernel for a pack")
    if unexecuted:
        reasons = "; ".join(sorted(set(unexecuted.values()))[:3])
        note(f"the machine code of {counted(len(unexecuted), 'kernel')} is packed without a verdict: {reasons}")
    ptxas = compilation.toolchain().cuda  # for cubins of CUDA 12, which do not state the version of their ptxas
    certified = {digest for digest, proof in proofs().items() if proof.outcome == "certified"}
    return {
        digest: (
            f"right in {counted(len(verdict.cases), 'case')}, ptxas {verdict.machine_code.ptxas or ptxas}"
            if (verdict := verdicts.get(digest)) and verdict.machine_code
            else f"not executed: {unexecuted[digest]}"
        )
        + ("; PTX certified for every problem" if digest in certified else "")
        for digest in records
    }
