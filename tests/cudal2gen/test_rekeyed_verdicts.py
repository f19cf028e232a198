"""Proves that stored verdicts and proofs get new digests after a change of comments, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudal2gen.generation import catalog
from cudal2gen.generation.renderer import render
from kernelproof.ground import toolchain
from scripts import rekey_verdicts
from scripts.rekey_verdicts import Difference, Pair
from tests.cudal2gen.strategies import direct, multistage

# A record, its text, and the same text with comments.
RECORD = multistage()
TEXT = render(RECORD)
COMMENTED = TEXT.replace("\nnamespace", "\n\n// A line.\n/* Two\nlines. */\nnamespace", 1)


def test_comments_and_blank_lines_do_not_count() -> None:
    rekey_verdicts.check_texts([Pair(RECORD, TEXT, COMMENTED)])
    quoted = 'asm("// {\\" } /* ");  // comment'
    assert rekey_verdicts.without_comments(quoted) == 'asm("// {\\" } /* ");'


@pytest.mark.parametrize(("before", "after"), [("kBM = 128", "kBM = 64"), ('"r"', '"l"'), ("__syncthreads();", "")])
def test_a_change_of_code_is_refused(before: str, after: str) -> None:
    assert before in TEXT
    with pytest.raises(Difference):
        rekey_verdicts.check_texts([Pair(RECORD, TEXT, COMMENTED.replace(before, after))])


@pytest.mark.thorough
@pytest.mark.slow
def test_unused_code_is_told_from_code_by_its_ptx() -> None:
    constant = TEXT.replace("constexpr int kBM", "constexpr int kNothing = 1, kBM", 1)
    assert rekey_verdicts.with_other_code([Pair(RECORD, TEXT, COMMENTED), Pair(RECORD, TEXT, constant)]) == [
        Pair(RECORD, TEXT, constant)
    ]
    rekey_verdicts.check_ptx([Pair(RECORD, TEXT, constant)], toolchain.discover())
    with pytest.raises(Difference):
        rekey_verdicts.check_ptx([Pair(RECORD, TEXT, TEXT.replace("__syncthreads();", ""))], toolchain.discover())


def test_lines_keep_all_but_their_digests() -> None:
    new_digest = rekey_verdicts.digests([Pair(RECORD, TEXT, COMMENTED)], toolchain.discover())
    (old, new), *_ = new_digest.items()
    line = '{"record":"a","digest":"%s","on":"emulator","cases":[]}\n'
    assert old != new
    assert rekey_verdicts.rekey([line % old], new_digest) == [line % new]
    assert rekey_verdicts.rekey([line % new], new_digest) == [line % new]
    assert rekey_verdicts.same_families([Pair(RECORD, TEXT, COMMENTED), Pair(direct(), TEXT, TEXT)]) == {"sm80_direct"}
    other = (line % "none").replace('"a"', '"hgemm_sm80_direct_f16"')
    assert rekey_verdicts.rekey([other, line % old], new_digest, {"sm80_direct"}) == [other, line % new]
    with pytest.raises(Difference):
        rekey_verdicts.rekey([line % old, line % "none"], new_digest)


def test_texts_without_a_line_to_renew_are_not_compiled() -> None:
    before = ['{"record":"a","digest":"1"}\n', '{"record":"b","digest":"2"}\n']
    assert rekey_verdicts.names_to_renew(before, [before[0], before[1].replace("2", "3")]) == {"b"}


@pytest.mark.parametrize("path", rekey_verdicts.STORED, ids=lambda path: path.stem)
def test_a_stored_line_changes_in_its_digest_only(path: Path) -> None:
    with path.open() as file:
        line = file.readline()
    before = json.loads(line)
    (after,) = map(json.loads, rekey_verdicts.rekey([line], {before["digest"]: "0" * 32}))
    assert after == before | {"digest": "0" * 32}


def test_records_that_have_left_the_catalog_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "load", lambda path: [])
    monkeypatch.setattr(catalog, "library", lambda *words, **fields: [])
    (tmp_path / "records.jsonl").write_text(catalog.dump(RECORD) + "\n")
    assert rekey_verdicts.verdict_records() == []
    assert rekey_verdicts.verdict_records(tmp_path / "records.jsonl") == [RECORD]
