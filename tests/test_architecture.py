"""Proves that imports go strictly down the layers without circles, and that each package works without the others'
dependencies.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import house

# The folders of each package from the lowest layer up. A folder imports only folders before it.
KERNELPROOF = (
    "ground", "sass", "emulator", "certificates", "profile", "checking", "triton_emulation", "testing", "grading",
    "mcp_server", "cli", "__main__", "__init__",
)  # fmt: skip
CUDAL2GEN = (
    "places", "torch_range", "kernel", "results", "launch", "generation", "timing", "validator", "bench", "report",
    "tuner", "pack", "operators", "plugins", "cli", "__main__", "__init__",
)  # fmt: skip
FLOORS = {"kernelproof": KERNELPROOF, "cudal2gen": CUDAL2GEN}


def room(module: str) -> str:
    """The folder, or the loose module, of a package that holds a module; ``__init__`` is the package's own file."""
    return [*module.split("."), "__init__"][1]


@pytest.mark.slow
@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_strictly_down_and_in_no_circle(checkout: Path, package: str) -> None:
    graph = house.import_graph(checkout / package)
    assert {room(name) for name in graph} == set(FLOORS[package])
    floor = FLOORS[package].index
    upward = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if other != package and room(other) != room(name) and floor(room(other)) > floor(room(name))
    ]
    assert upward == []
    assert sum(map(len, graph.values())) > 400, "imports are counted"
    # Raises CycleError with the modules' names if they import each other.
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "statement",
    [
        "from a import upper",
        "import a.upper",
        "from a.upper import name",
        "def f():\n    from a.upper import name",
        "if TYPE_CHECKING:\n    from a.upper import name",
        "from a import reexported",
    ],
)
def test_every_kind_of_import_closes_a_circle(tmp_path: Path, statement: str) -> None:
    (tmp_path / "a" / "rooms").mkdir(parents=True)
    (tmp_path / "a" / "__init__.py").write_text("from a.upper import name as reexported")
    (tmp_path / "a" / "upper.py").write_text("from a.rooms.lower import name")
    (tmp_path / "a" / "rooms" / "__init__.py").write_text("")
    lower = tmp_path / "a" / "rooms" / "lower.py"
    lower.write_text("name = 1")
    tuple(TopologicalSorter(house.import_graph(tmp_path / "a")).static_order())
    lower.write_text(statement)
    with pytest.raises(CycleError, match="lower"):
        tuple(TopologicalSorter(house.import_graph(tmp_path / "a")).static_order())


# Folders of ``kernelproof`` that have documented names.
ROOMS = ["certificates", "emulator", "grading", "profile", "sass"]


@pytest.mark.parametrize("room", [f"kernelproof.{room}" for room in ROOMS])
def test_cudal2gen_uses_a_room_by_its_documented_names(room: str, checkout: Path) -> None:
    """Like any user, it uses names of the package itself and of none of its modules."""
    documented = {room, *(f"{room}.{name}" for name in importlib.import_module(room).__all__)}
    for path in sorted((checkout / "cudal2gen").rglob("*.py")):
        names = {name for name in imported_modules(ast.parse(path.read_text())) if name.startswith(room)}
        assert names <= documented, f"{path}: {names - documented}"


@pytest.mark.slow
def test_kernelproof_imports_nothing_of_cudal2gen(checkout: Path) -> None:
    for folder in ("kernelproof", "tests/kernelproof"):
        for path in sorted((checkout / folder).rglob("*.py")):
            for name in imported_modules(ast.parse(path.read_text())):
                assert name.split(".")[0] != "cudal2gen", path
                assert not name.startswith("tests.cudal2gen"), path


def imported_modules(tree: ast.AST) -> list[str]:
    """Modules that a file imports anywhere."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def modules_after(statement: str, checkout: Path) -> set[str]:
    """The top-level modules that a new process of a checkout has imported after a statement."""
    program = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name, it in sys.modules.items() if it}})"
    variables = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=variables, cwd=checkout
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "needed_by"),
    [
        ((), ()),
        (
            ("typer", "click", "rich", "jinja2", "ninja", "ml_dtypes"),
            ("kernelproof.cli", "kernelproof.ground.command_line"),
        ),
    ],
    ids=["with its commands", "as a library"],
)
def test_kernelproof_stands_alone(
    missing: tuple[str, ...], needed_by: tuple[str, ...], checkout: Path, tmp_path: Path
) -> None:
    """Its modules can be imported without ``cudal2gen``, except for those that need an optional package. All but the
    command line can be imported with only NumPy and pydantic installed."""
    shutil.copytree(checkout / "kernelproof", tmp_path / "kernelproof", ignore=shutil.ignore_patterns("__pycache__"))
    statement = (
        "import importlib, pkgutil, sys, kernelproof\n"
        f"sys.modules |= dict.fromkeys({('cudal2gen', *missing)})\n"
        "optional = 'kernelproof.mcp_server', 'kernelproof.triton_emulation.backend', 'kernelproof.__main__'\n"
        f"optional += {needed_by}\n"
        "for module in pkgutil.walk_packages(kernelproof.__path__, 'kernelproof.'):\n"
        "    if not module.name.startswith(optional):\n"
        "        importlib.import_module(module.name)\n"
        f"assert kernelproof.__file__.startswith({str(tmp_path)!r}), kernelproof.__file__"
    )
    assert "cudal2gen" not in modules_after(statement, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import cudal2gen.cli, cudal2gen.generation.compiler", {"torch", "numpy"}),
        (
            "import cudal2gen, cudal2gen.results.choice, cudal2gen.validator, cudal2gen.bench, cudal2gen.tuner",
            {"torch"},
        ),
        ("import cudal2gen.report, cudal2gen.pack, cudal2gen.plugins, cudal2gen.launch.gpu", {"torch"}),
        ("import kernelproof.cli", {"torch", "numpy"}),
        ("import kernelproof.checking.supervision, kernelproof.grading, kernelproof.testing.emulation", {"torch"}),
    ],
)
def test_what_needs_no_torch_imports_none(checkout: Path, statement: str, absent: set[str]) -> None:
    assert not modules_after(statement, checkout) & absent


def test_only_the_ground_machine_code_and_numpy_are_below_the_emulator(checkout: Path) -> None:
    for path in sorted((checkout / "kernelproof" / "emulator").rglob("*.py")):
        for name in imported_modules(ast.parse(path.read_text())):
            own = name.startswith(("kernelproof.emulator", "kernelproof.ground", "kernelproof.sass"))
            assert own or name.split(".")[0] in sys.stdlib_module_names | {"numpy", "__future__"}, f"{path}: {name}"


def test_nvcc_is_run_by_the_door_alone(checkout: Path) -> None:
    """Only one module may compose a command of nvcc, so that its arguments are checked in one place."""
    lines = {
        (path.name, line.strip())
        for package in FLOORS
        for path in (checkout / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"tools\.nvcc\b|paths\['nvcc'\]", line)
    }
    assert {name for name, line in lines if "nvcc_command(tools.nvcc, " not in line} == {
        "machine.py",  # shows the path
        "toolchain.py",  # lists what a sandbox shows
        "compiler.py",  # ninja's line of constants, whose words the same test has checked
    }


@pytest.mark.slow
def test_only_its_own_module_names_a_family(checkout: Path) -> None:
    """This holds for code, strings and prose. Exempt are the listing in ``kernel/__init__.py`` and the family's own
    page."""
    from cudal2gen import kernel

    package, templates = checkout / "cudal2gen", checkout / "templates"
    files = [path for folder in (package, checkout / "kernelproof") for path in folder.rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".md", ".cpp", ".h", ".c")]
    for path in [*files, *templates.rglob("*.j2")]:
        if path == package / "kernel" / "__init__.py":
            continue
        text = path.read_text()
        for name, family in kernel.FAMILIES.items():
            if path in (package / "kernel" / f"{name}.py", templates / f"{name}.cu.j2"):
                continue
            assert not re.search(rf"\b({name}|{family.__name__})\b", text), f"{path} names {name}"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_documents_name_what_exists(checkout: Path, name: str) -> None:
    from cudal2gen import cli as maker
    from kernelproof import cli as prover

    text = (checkout / name).read_text()
    for program, app in (("cudal2gen", maker.app), ("kernelproof", prover.app)):
        verbs = {command.name for command in app.registered_commands}
        named = set(re.findall(rf"(?:^\$ |`){program} ([a-z][\w-]*)", text, re.MULTILINE))
        assert named <= verbs, f"{name}: {program} has no {named - verbs}"
    for target in re.findall(r"(?:^|`)make ([\w-]+)(?=`| *#|$)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (checkout / "Makefile").read_text(), re.MULTILINE), target
    for path in re.findall(r"`((?:tests|scripts|configs|templates|docs|cudal2gen|kernelproof)/[\w./]+)`", text):
        assert (checkout / path).exists(), path
    for path in re.findall(r"`([\w/]+\.(?:py|cpp|h|c))`", text):
        roots = (checkout, checkout / "cudal2gen", checkout / "kernelproof", checkout / "kernelproof" / "emulator")
        assert any((root / path).exists() for root in roots), path
