"""The import graph of a package: the modules that each file imports, at its top, in a function or for types."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

Graph = dict[str, set[str]]  # a module's name, and the modules it imports


def modules(package: Path) -> dict[str, ast.Module]:
    """Every file of a package, parsed, by its module's dotted name."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in sorted(package.rglob("*.py"))
    }


def imports(name: str, tree: ast.Module, modules: Collection[str]) -> set[str]:
    """The modules that the module ``name`` imports by any statement.

    ``from a import b`` is an import of the module a.b where there is one, else of a. Both run the packages above them,
    which count unless they contain the importer.
    """
    targets: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{name} has a relative import"
            assert node.level == 0, f"{name} has a relative import"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= {part if part in modules else node.module for part in parts}
    above = {part for target in targets for part in packages(target) if not name.startswith(f"{part}.")}
    return (targets | above) & set(modules) - {name}


def packages(name: str) -> list[str]:
    """The packages that contain a module, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def import_graph(package: Path) -> Graph:
    """The modules of a package that each of its modules imports."""
    trees = modules(package)
    return {name: imports(name, tree, trees) for name, tree in trees.items()}
