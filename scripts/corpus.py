"""Counts how many kernels of public programs the emulator translates.

    python scripts/corpus.py FOLDER

It prints the share of entries that translate and, for each refused one, the reason with opcode, PTX line and CUDA line.

``scripts/corpus.jsonl`` lists the sources: repository, commit, path, target of the PTX, and entries. The list was drawn
before any of them was translated: every n-th source of a repository in the order of paths, if it compiles without
further libraries, with its first 20 entries. Sources and PTX are not part of this repository. Compile the sources that
you want with ``nvcc -lineinfo -ptx``, at the commit and for the target of the list, into
``FOLDER/OWNER+NAME/PATH.TARGET.ptx``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import PtxError
from kernelproof.emulator.frontend.translate import translate
from kernelproof.emulator.state.reports import EmulatorError

MANIFEST = Path(__file__).with_name("corpus.jsonl")
# Constructs that the emulator refuses by design, as its messages name them.
REFUSED = (
    "textures and surfaces",
    "device malloc",
    "recursive call",
    "dynamic parallelism",
    "conditional nodes of graphs",
)
# The opcode in a refusal of the emulator, which cites the instruction.
_OPCODE = re.compile(r": ([\w.:]+) in `")


class Outcome(NamedTuple):
    """The result for an entry; ``message`` is empty if it translates."""

    repository: str
    path: str
    entry: str
    message: str

    @property
    def opcode(self) -> str:
        """The refused instruction, or the reason that the message gives."""
        match = _OPCODE.search(self.message)
        return match[1] if match else re.sub(r"^(PTX )?line \d+: ", "", self.message)[:60]

    @property
    def on_purpose(self) -> bool:
        """Whether the entry was refused because of one of the constructs ``REFUSED``."""
        return any(construct in self.message for construct in REFUSED)


def sources(manifest: Path) -> Iterator[dict[str, Any]]:
    """The sources that a manifest lists: ``repository``, ``commit``, ``path``, ``target`` and ``entries`` of each."""
    for line in manifest.read_text().splitlines():
        yield json.loads(line)


def ptx_of(folder: Path, source: dict[str, Any]) -> Path:
    """The path of a source's PTX."""
    return folder / source["repository"].replace("/", "+") / f"{source['path']}.{source['target']}.ptx"


def outcomes(source: dict[str, Any], ptx: Path) -> list[Outcome]:
    """Translates the entries of one source."""
    messages = {}
    try:
        module = parse(ptx.read_text())
    except PtxError as error:
        messages = dict.fromkeys(source["entries"], str(error))
    else:
        for entry in source["entries"]:
            try:
                translate(module, entry)
                messages[entry] = ""
            except (PtxError, EmulatorError) as error:
                messages[entry] = str(error)
            except Exception as error:  # a defect of the emulator: it counts as refused
                messages[entry] = f"internal error, {type(error).__name__}: {error}"
    return [Outcome(source["repository"], source["path"], entry, message) for entry, message in messages.items()]


def summary(results: list[Outcome]) -> str:
    """Text: the share of entries that translate, the counts of refused opcodes, and a line for each refused entry."""
    translated = [r for r in results if not r.message]
    on_purpose = [r for r in results if r.on_purpose]
    refused = [r for r in results if r.message and not r.on_purpose]
    lines = [
        f"{len(results)} entries of {len({r.repository for r in results})} repositories: {len(translated)} translate, "
        f"{len(on_purpose)} use what is refused on purpose, {len(refused)} are refused",
        f"{len(translated)} of {len(results) - len(on_purpose)} = "
        f"{100 * len(translated) / max(1, len(results) - len(on_purpose)):.1f} % of those that use nothing refused on "
        "purpose",
    ]
    for opcode, count in Counter(r.opcode for r in refused).most_common():
        lines.append(f"{count:5d}  {opcode}")
    lines += [f"{r.repository} {r.path} {r.entry}: {r.message}" for r in [*refused, *on_purpose]]
    return "\n".join(lines)


def main(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="PTX files, as OWNER+NAME/PATH.TARGET.ptx")],
    manifest: Annotated[Path, typer.Option(metavar="FILE", help="list of sources")] = MANIFEST,
    jobs: Annotated[int, typer.Option(help="processes", min=1)] = 1,
) -> None:
    """Translates the corpus. The exit code is 1 if PTX of the list is missing."""
    listed = list(sources(manifest))
    compiled = [source for source in listed if ptx_of(folder, source).exists()]
    with ProcessPoolExecutor(jobs) as pool:
        parts = pool.map(outcomes, compiled, [ptx_of(folder, source) for source in compiled])
        print(summary([outcome for part in parts for outcome in part]))
    if len(compiled) < len(listed):
        print(f"{len(listed) - len(compiled)} of {len(listed)} sources have no PTX in {folder}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
