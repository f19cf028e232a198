"""Proves that a missing package skips tests on a developer's machine and fails them in CI."""

from __future__ import annotations

import pytest

from tests.packages import require


def test_a_missing_package_skips_a_test_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_package"):
        require("no_such_package")
    monkeypatch.setenv("CI", "1")
    # A skip is caught too, so that it fails this test instead of skipping it.
    with pytest.raises((ModuleNotFoundError, pytest.skip.Exception)) as raised:
        require("no_such_package")
    assert raised.type is ModuleNotFoundError
    assert require("json").loads("1") == 1
