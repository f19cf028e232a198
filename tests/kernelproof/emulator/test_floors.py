"""Proves that a folder of the emulator imports only itself and folders of lower layers.

Imports in functions, and those for types only, count too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import house

# Each folder is one layer. From the lowest up, as in the docstring of ``kernelproof.emulator``.
LAYERS = ["state", "arithmetic", "memory", "machine", "hopper", "blackwell", "frontend", "machine_code", "host"]
# What names of the emulator's modules begin with.
PREFIX = "kernelproof.emulator."


def upward(graph: dict[str, set[str]]) -> list[str]:
    """The imports of modules on a higher layer than the module that imports them."""
    layer = {name: LAYERS.index(name.split(".")[0]) for name in graph}
    return [f"{name} imports {other}" for name in graph for other in graph[name] if layer[other] > layer[name]]


def graph_of(package: Path) -> house.Graph:
    """The imports between modules of the emulator's folders, by names without ``kernelproof.emulator.``."""
    return {
        name.removeprefix(PREFIX): {other.removeprefix(PREFIX) for other in imports if other.startswith(PREFIX)}
        for name, imports in house.import_graph(package).items()
        if name.startswith(PREFIX)
    }


@pytest.mark.slow
def test_every_folder_is_a_layer_and_imports_go_down(checkout: Path) -> None:
    graph = graph_of(checkout / "kernelproof")
    assert len(graph) > 50
    assert upward(graph) == []
    assert {name.split(".")[0] for name in graph} == set(LAYERS)


@pytest.mark.parametrize(
    "text",
    [
        "from kernelproof.emulator.host import session",
        "import kernelproof.emulator.host.session",
        "def f():\n    from kernelproof.emulator.host.session import Session",
        "if TYPE_CHECKING:\n    from kernelproof.emulator.host.session import Session",
    ],
)
def test_every_kind_of_import_is_counted(text: str) -> None:
    name, session = f"{PREFIX}memory.shared", f"{PREFIX}host.session"
    assert session in house.imports(name, ast.parse(text), {session})
    assert upward({"memory.shared": {"host.session"}, "host.session": set()}) == ["memory.shared imports host.session"]


def test_the_docstring_tells_the_order(checkout: Path) -> None:
    text = (checkout / "kernelproof" / "emulator" / "__init__.py").read_text()
    assert " < ".join(f"``{layer}``" for layer in LAYERS) in " ".join(text.split())


def test_nothing_is_hidden_from_the_type_checker(checkout: Path) -> None:
    for path in sorted((checkout / "kernelproof" / "emulator").rglob("*.py")):
        text = path.read_text()
        assert "type: ignore" not in text, path
        assert "TYPE_CHECKING" not in text, path
