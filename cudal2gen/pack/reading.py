"""Finds and opens packs, folders of built kernels with the table that chooses among them.

Every file must have the digest that the pack states, and the pack must fit this version and machine.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cudal2gen import torch_range
from cudal2gen.kernel import spelled
from cudal2gen.launch.launcher import TORCH_LIBRARY
from cudal2gen.pack.abi import FORMAT, obstacle
from cudal2gen.pack.facts import ENTRY_POINTS, LIBRARY, PackError, as_json, sha256
from cudal2gen.results.choice import Table
from kernelproof.ground.chips import CardFacts
from kernelproof.ground.errors import WrongInput, parse_json, reading
from kernelproof.ground.version import __version__

PACKS_VARIABLE = "CUDAL2GEN_PACK"  # the environment variable that names folders of packs
FILE_NAME = re.compile(r"(?!.*\.\.)\w[\w./-]{0,200}", re.ASCII)  # names of files within the folder


@dataclass(frozen=True)
class Pack:
    """A pack whose files were checked when it was opened. ``card``: the card that it serves, if that is of another
    model than the pack's."""

    directory: Path
    facts: dict[str, Any]
    card: CardFacts | None = None

    @property
    def gpu(self) -> str:
        """The GPU for which the kernels were chosen, such as a100."""
        return str(self.facts["gpu"])

    @property
    def cuda(self) -> int:
        """The major version of the CUDA toolkit that made the pack's machine code."""
        return torch_range.major(str(self.facts.get("cuda", torch_range.CUDA)))

    @property
    def library(self) -> Path:
        """The path of the shared library."""
        return self.directory / LIBRARY

    @property
    def torch_library(self) -> Path | None:
        """The launcher for torch; None in a pack that was made without g++ or by a version that had none."""
        return self.directory / TORCH_LIBRARY if TORCH_LIBRARY in self.facts["files"] else None

    @cached_property
    def table(self) -> Table:
        """Kernels and rows. Raises WrongInput for a table of another version."""
        path = self.directory / "table.json"
        table = Table.load(_read_json(path), str(path))
        return table if self.card is None else table.on(self.card)

    def kernel(self, digest: str) -> Path:
        """The folder of a built kernel."""
        return self.directory / "kernels" / digest


def serving(packs: Mapping[str, Pack], card: CardFacts) -> Pack | None:
    """The pack that serves a card, or None. ``packs``: by GPU model.

    The pack of the card's own model comes first, then the nearest one with a kernel that runs on the card. Such a pack
    has no measurements, because those of another model say nothing about this card. Raises WrongInput for a table of
    another version.
    """
    for model in card.stand_ins(packs):
        if model == card.model:
            return packs[model]
        pack = replace(packs[model], card=card)
        if pack.table.kernels:
            return pack
    return None


def open_pack(directory: Path) -> Pack:
    """Opens a pack after checking every file. Raises PackError, which names the file that is missing or was altered."""
    directory = Path(directory).resolve()
    if directory.suffix == ".whl" and directory.is_file():
        raise PackError(f"{directory} is a wheel: install it with pip, or unpack it")
    if not directory.is_dir():
        raise PackError(f"no pack at {directory}")
    facts = _intact_facts(directory / "pack.json")
    if why := obstacle(facts):
        raise PackError(f"{directory} {why}")
    if facts["machine"] != platform.machine() or sys.platform != "linux":
        raise PackError(
            f"{directory} is for Linux on {facts['machine']}, this is {sys.platform} on {platform.machine()}"
        )
    for name, digest in facts["files"].items():
        if not FILE_NAME.fullmatch(name):
            raise PackError(f"{directory / 'pack.json'}: files: {spelled(name)} is no file of a pack")
        if not (directory / name).is_file():
            raise PackError(f"{directory / name}: no such file; the pack is incomplete")
        with reading(directory / name):
            content = (directory / name).read_bytes()
        if sha256(content) != digest:
            raise PackError(f"{directory / name} is truncated or was altered: its digest is not the pack's")
    if "table.json" not in facts["files"]:
        raise PackError(f"{directory / 'pack.json'}: files: table.json is missing; make the pack anew")
    return Pack(directory, facts)


def _intact_facts(path: Path) -> dict[str, Any]:
    """The facts of a ``pack.json``. Raises PackError if its own digest or its format is wrong, or facts are missing."""
    facts = _read_json(path)
    # The digest covers all facts but itself, in the spelling of ``as_json``.
    digest = facts.pop("sha256", None)
    try:
        intact = digest == sha256(as_json(facts))
    except RecursionError:
        intact = False
    if not intact:
        raise PackError(f"{path} was altered: its digest is not its own")
    if facts.get("format") != FORMAT:
        raise PackError(
            f"{path} has format {spelled(facts.get('format'))}, this cudal2gen {__version__} reads {FORMAT}: "
            "install a newer cudal2gen, or make the pack anew with this version"
        )
    for name, kind in (("gpu", str), ("version", str), ("machine", str), ("files", dict)):
        if not isinstance(facts.get(name), kind):
            raise PackError(f"{path}: {name}={spelled(facts.get(name))}: is no {kind.__name__}; make the pack anew")
    return facts


def installed() -> Iterator[Path]:
    """Folders of packs: those in ``CUDAL2GEN_PACK``, separated by colons, then those of installed wheels.

    An installed package that fails to name its folder is passed over: it is not a pack of ours.
    """
    yield from (Path(name) for name in os.environ.get(PACKS_VARIABLE, "").split(os.pathsep) if name)
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            yield Path(entry.load()())
        except Exception:
            continue


class PackSearch(NamedTuple):
    """The result of a search. ``packs``: the first usable pack of each GPU model; ``refused``: why others cannot be
    used; ``shadowed``: by GPU model, which usable packs come after the first and are therefore not used."""

    packs: dict[str, Pack]
    refused: list[str]
    shadowed: dict[str, list[str]]

    @property
    def notes(self) -> list[str]:
        """Every pack that is not used and the reason, one text each."""
        return [*self.refused, *(reason for reasons in self.shadowed.values() for reason in reasons)]


def search(folders: Iterable[Path]) -> PackSearch:
    """Opens the packs in these folders, in order. A folder that is named twice counts once. A pack that cannot be used
    raises nothing; ``refused`` has the reason."""
    result = PackSearch({}, [], {})
    for directory in folders:
        try:
            pack = open_pack(directory)
        except PackError as error:
            result.refused.append(str(error))
            continue
        except (OSError, RuntimeError) as error:  # an unreadable folder, or a loop of links
            result.refused.append(f"{directory}: {error}")
            continue
        first = result.packs.setdefault(pack.gpu, pack)
        if first.directory != pack.directory:
            result.shadowed.setdefault(pack.gpu, []).append(
                f"{pack.directory} is not used: for {pack.gpu} the first pack counts, {first.directory}; those in "
                f"{PACKS_VARIABLE} come before installed ones"
            )
    return result


def _read_json(path: Path) -> dict[str, Any]:
    """The object of a pack's JSON file. Raises PackError."""
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}; the pack is incomplete") from None
    except WrongInput as error:
        raise PackError(f"{path} is truncated or was altered: {error}") from None
    if not isinstance(values, dict):
        raise PackError(f"{path} was altered: it is no JSON object")
    return values
