"""What is done when a module is imported, at the earliest: nothing here imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Then = Callable[[Any], None]


def after_import(name: str, then: Then) -> None:
    """Calls ``then(module)`` now where the module is imported, else as soon as it is."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, then))
    elif not getattr(module.__spec__, "_initializing", False):
        then(module)


class _Finder:
    """Finds a module as all other finders do; what loads it tells."""

    def __init__(self, name: str, then: Then) -> None:
        self.name, self.then = name, then

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
    """Another loader, in whose place it stands until the module is imported."""

    def __init__(self, finder: _Finder, own: Any) -> None:
        self._finder, self._own = finder, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``importlib.abc.Loader``."""
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader``."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            self._finder.then(module)
