"""Makes records whose CUDA text has a planted fault. Each has a name of its own, so that many are compiled together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record
from cudal2gen.kernel.launch import Launch


@dataclass(frozen=True)
class Faulty:
    """A record for the compiler in whose text ``before`` is replaced by ``after``, wherever it occurs.

    It has the attributes of a ``Record`` that the compiler reads.
    """

    record: Record
    before: str
    after: str
    TEXTUAL = False  # as for a family whose text comes from templates

    @property
    def name(self) -> str:
        """The record's name and a digest of the fault."""
        return f"{self.record.name}_{hashlib.sha256(repr((self.before, self.after)).encode()).hexdigest()[:8]}"

    @property
    def arch(self) -> str:
        return self.record.arch

    @property
    def launch(self) -> Launch:
        """The record's launch, of the faulty kernel."""
        return self.record.launch.model_copy(update={"entry": self.name})

    @property
    def text(self) -> str:
        """The CUDA text with the fault. Fails if the right text has no place for it."""
        text = render(self.record)
        assert self.before in text, "the fault has a place"
        return text.replace(self.before, self.after).replace(self.record.name, self.name)

    def build(self) -> Artifact:
        """The compiled kernel. If it is in a module's ``BUILT_AHEAD``, it was compiled in a batch."""
        return build([self])[0]


def build(records: Sequence[Record | Faulty]) -> list[Artifact]:
    """Compiles kernels of records, of which some may be faulty."""
    with mock.patch.object(compiler, "render", _text):
        return compiler.build(records)  # type: ignore[arg-type]


def _text(record: Record | Faulty) -> str:
    """The text that the compiler compiles in place of what ``render`` returns."""
    return record.text if isinstance(record, Faulty) else render(record)
