"""Calls a function after a module has been imported, without importing the module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[Any], None]


def after_import(name: str, callback: Callback) -> None:
    """Calls ``callback(module)``: immediately if the module is imported already, otherwise after its import.

    If the module's import has begun and not ended, the callback is not called.
    """
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, callback))
    elif not getattr(module.__spec__, "_initializing", False):
        callback(module)


class _Finder:
    """Finds a module by the other finders, and wraps its loader so that the callback runs after the import."""

    def __init__(self, name: str, callback: Callback) -> None:
        self.name, self.callback = name, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if fullname != self.name:
            return None
        for finder in list(sys.meta_path):
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(self, spec.loader)  # type: ignore[assignment]  # any object with its methods
                return spec
        return None


class _Loader:
    """A module's loader, wrapped until the module is imported."""

    def __init__(self, finder: _Finder, loader: Any) -> None:
        self._finder, self._loader = finder, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``importlib.abc.Loader``."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader``."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            self._finder.callback(module)
