"""Stands in for SGLang's registry of hooks by the dotted path of a function. One call applies all, after the
plugins."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import Any


class HookType(Enum):
    """How a hook takes part: around the function, which it gets as its first argument."""

    AROUND = "around"


class HookRegistry:
    """All hooks of the process."""

    hooks: list[tuple[str, Callable[..., Any]]] = []

    @classmethod
    def reset(cls) -> None:
        """Forgets all hooks."""
        cls.hooks.clear()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        """Adds a hook for the function at a dotted path."""
        assert hook_type is HookType.AROUND
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        """Replaces each function by its hook."""
        for target, hook in cls.hooks:
            path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, _around(getattr(owner, name), hook))


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the hook with the original and the arguments."""

    @functools.wraps(original)
    def hooked(*words: Any, **named: Any) -> Any:
        return hook(original, *words, **named)

    return hooked
