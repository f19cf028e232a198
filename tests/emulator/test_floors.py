"""The emulator's rooms stand on floors: imports go strictly down, also late ones and those for types only."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

# From the lowest up, as the docstring of ``cudal2gen.emulator`` has them.
FLOORS = ["state", "arithmetic", "memory", "machine", "hopper", "frontend", "host"]
PREFIX = "cudal2gen.emulator."


def modules(checkout: Path) -> dict[str, ast.Module]:
    """Every module below the package, by its name without ``cudal2gen.emulator.``."""
    root = checkout / "cudal2gen" / "emulator"
    paths = [path for path in sorted(root.rglob("*.py")) if path.parent != root]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in paths
    }


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The emulator's modules that a module names in any import, at its top, in a function or for types."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)} & known


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a room on a higher floor."""
    floor = {name: FLOORS.index(name.split(".")[0]) for name in graph}
    return [f"{name} imports {other}" for name in graph for other in graph[name] if floor[other] > floor[name]]


def test_imports_go_down_and_never_round(checkout: Path) -> None:
    trees = modules(checkout)
    graph = {name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}
    assert len(graph) > 50
    assert upward(graph) == []
    # Raises CycleError, which names the modules, where they import each other.
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "text",
    [
        "from cudal2gen.emulator.host import session",
        "import cudal2gen.emulator.host.session",
        "def f():\n    from cudal2gen.emulator.host.session import Session",
        "if TYPE_CHECKING:\n    from cudal2gen.emulator.host.session import Session",
    ],
)
def test_every_kind_of_import_is_seen(text: str) -> None:
    graph = {"memory.shared": imports(ast.parse(text), {"host.session"}), "host.session": set()}
    assert upward(graph) == ["memory.shared imports host.session"]


def test_every_room_has_a_floor_and_the_docstring_tells_the_order(checkout: Path) -> None:
    rooms = {name.split(".")[0] for name in modules(checkout)}
    assert rooms == set(FLOORS)
    text = (checkout / "cudal2gen" / "emulator" / "__init__.py").read_text()
    assert " < ".join(f"``{floor}``" for floor in FLOORS) in " ".join(text.split())


def test_nothing_is_hidden_from_the_type_checker(checkout: Path) -> None:
    for path in sorted((checkout / "cudal2gen" / "emulator").rglob("*.py")):
        text = path.read_text()
        assert "type: ignore" not in text, path
        assert "TYPE_CHECKING" not in text, path
        assert len(text.splitlines()) <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}: {node.name}"
