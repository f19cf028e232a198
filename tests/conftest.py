from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cudal2gen import places

# Compiled kernels outlive a clone: they are cached by content, outside of it, unless the caller says where.
os.environ.setdefault("CUDAL2GEN_BUILD_DIR", str(places.user_cache() / "test-build"))

# The same examples every time, so that a failure belongs to the change that brought it; "thorough" looks for new ones.
settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def checkout() -> Path:
    root = places.checkout()
    assert root is not None, "the tests run from a checkout"
    return root
