"""The house: imports go strictly down, torch is imported late, documents name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cudal2gen import cli, kernel

FLOORS = {
    "places": 0,
    "ptx_split": 0,
    "ratios": 0,
    "chips": 0,
    "kernel": 1,
    "catalog": 2,
    "correctness": 2,
    "model": 2,
    "renderer": 2,
    "launcher": 2,
    "toolchain": 0,
    "build_folder": 0,
    "compiler": 3,
    "emulator": 3,
    "gpu": 3,
    "triton_matmul": 3,
    "results": 2,
    "rounding": 3,
    "validator": 4,
    "baselines": 4,
    "bench": 5,
    "choice": 4,
    "pack": 5,
    "report": 6,
    "tuner": 6,
    "operators": 6,
    "cli": 7,
    "__main__": 8,
    "__init__": 8,
}
TORCH = {"correctness", "validator", "gpu", "baselines", "bench", "operators", "tuner"}


def room(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def sources(checkout: Path) -> list[Path]:
    return sorted((checkout / "cudal2gen").rglob("*.py"))


def imported(tree: ast.AST) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether at module level."""
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "cudal2gen" else [node.module]
            )
        found += [(name, id(node) in top) for name in names]
    return found


def test_imports_go_strictly_down(checkout: Path) -> None:
    package = checkout / "cudal2gen"
    for path in sources(checkout):
        own = room(path, package)
        for name, _ in imported(ast.parse(path.read_text())):
            parts = name.split(".")
            if parts[0] != "cudal2gen" or len(parts) == 1 or parts[1] in (own, "__version__"):
                continue
            assert FLOORS[parts[1]] < FLOORS[own], f"{path.name} imports {name}"


def test_torch_is_imported_late_and_only_where_it_may_be(checkout: Path) -> None:
    for path in sources(checkout):
        for name, at_top in imported(ast.parse(path.read_text())):
            if name.split(".")[0] in ("torch", "nvmath"):
                assert room(path, checkout / "cudal2gen") in TORCH, path
                assert not at_top, path


def test_the_emulator_knows_nothing_of_records(checkout: Path) -> None:
    for path in sorted((checkout / "cudal2gen" / "emulator").rglob("*.py")):
        for name, _ in imported(ast.parse(path.read_text())):
            root = name.split(".")[0]
            assert root in sys.stdlib_module_names | {"numpy", "__future__"} or name.startswith("cudal2gen.emulator"), (
                name
            )


def test_rendering_and_building_import_neither_torch_nor_the_emulator() -> None:
    program = (
        "import sys, cudal2gen.cli, cudal2gen.compiler; "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_its_own_module_names_a_family(checkout: Path) -> None:
    """In code, strings and prose. Exempt: the listing in ``kernel/__init__.py``, and the family's own page."""
    package, templates = checkout / "cudal2gen", checkout / "templates"
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".md", ".cpp", ".h", ".c")]
    for path in [*files, *templates.rglob("*.j2")]:
        if path == package / "kernel" / "__init__.py":
            continue
        text = path.read_text()
        for name, family in kernel.FAMILIES.items():
            if path in (package / "kernel" / f"{name}.py", templates / f"{name}.cu.j2"):
                continue
            assert not re.search(rf"\b({name}|{family.__name__})\b", text), f"{path} names {name}"


def test_no_room_for_leftovers(checkout: Path) -> None:
    forbidden = {"util", "utils", "common", "core", "helper", "helpers", "manager", "misc"}
    for path in sources(checkout):
        assert not forbidden & set(path.stem.split("_")), path


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_documents_name_commands_and_rooms_that_exist(checkout: Path, name: str) -> None:
    text = (checkout / name).read_text()
    assert len(text.splitlines()) <= 140
    commands = set(re.findall(r"^cudal2gen ([\w-]+)", text, re.MULTILINE)) | set(
        re.findall(r"`cudal2gen ([\w-]+)", text)
    )
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    assert commands <= known
    assert name != "README.md" or commands == known, "the README shows every command"
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (checkout / "Makefile").read_text(), re.MULTILINE)
    for mentioned in re.findall(r"`((?:tests|scripts|configs|templates)/[\w./]+)`", text):
        assert (checkout / mentioned).exists(), mentioned
    for path in sources(checkout):
        own = room(path, checkout / "cudal2gen")
        if name == "ARCHITECTURE.md" and not own.startswith("_"):
            assert own in text, f"{own} is not in {name}"
