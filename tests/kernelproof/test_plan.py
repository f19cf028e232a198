"""Proves that arguments and targets of a check are read as they are written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.checking.plan import DTYPES, BufferSpec, argument, buffer, target_of
from kernelproof.ground.errors import WrongInput

INTEGERS = st.integers(-(1 << 31), (1 << 31) - 1)
SPELLINGS = st.sampled_from([str, hex, oct])
FLOATS = st.floats(-1e30, 1e30)
TAILS = st.text("0159.eExXbnf_+-", max_size=6)
TYPED = st.builds("{}:{}".format, st.sampled_from([*DTYPES, "in", "f8"]), TAILS)


@given(st.sampled_from(sorted(DTYPES)), st.integers(0, 127), SPELLINGS, FLOATS)
def test_a_typed_number_has_its_type_and_value(name: str, integer: int, spelling: type[str], number: float) -> None:
    kind = np.dtype(DTYPES[name])
    written = repr(number) if kind.kind == "f" else spelling(integer)
    value = argument(f"{name}:{written}", {})
    assert isinstance(value, np.generic)
    assert value.dtype == kind
    with np.errstate(over="ignore"):
        assert value == kind.type(number if kind.kind == "f" else integer)


@given(INTEGERS, SPELLINGS, FLOATS, st.sampled_from(["", "f"]))
def test_a_number_without_a_type(integer: int, spelling: type[str], number: float, suffix: str) -> None:
    assert argument(spelling(integer), {}) == integer
    assert type(argument(spelling(integer), {})) is int
    assert argument(repr(number) + suffix, {}) == number
    assert type(argument(repr(number) + suffix, {})) is float
    assert argument(integer, {}) == integer
    assert argument("a", {"a": buffer("in:f32[1]")}) == "a"


@given(TAILS | TYPED | st.text("0123456789abefinoutx:[],.=-+_ sf", max_size=14))
def test_any_other_text_is_wrong_input(text: str) -> None:
    with suppress(WrongInput):
        assert isinstance(argument(text, {}), BufferSpec | int | float | np.generic)


@pytest.mark.parametrize(("targets", "newest"), [
    ([], None), (["sm_80"], "sm_80"), (["sm_90a", "sm_100"], "sm_100"), (["sm_120a", "sm_90"], "sm_120a"),
    (["sm_90", "sm_90a"], "sm_90a"), (["sm_80", "sm_86", "sm_89"], "sm_89"),
])  # fmt: skip
def test_the_newest_target_counts(tmp_path: Path, targets: list[str], newest: str | None) -> None:
    files = [tmp_path / f"{number}.ptx" for number in range(len(targets))]
    for file, target in zip(files, targets, strict=True):
        file.write_text(f".version 8.0\n.target {target}\n")
    assert target_of(files) == newest
    assert target_of(files[::-1]) == newest
