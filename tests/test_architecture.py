"""The house: imports go strictly down, modules and functions are small, names are nouns, documents name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cudal2gen import cli, kernel
from tests import house

FLOORS = {
    "errors": 0,
    "late_import": 0,
    "places": 0,
    "version": 0,
    "ptx_split": 0,
    "ratios": 1,
    "chips": 0,
    "element": 0,
    "kernel": 1,
    "catalog": 2,
    "correctness": 2,
    "fused": 3,
    "pages": 2,
    "model": 3,
    "profile": 4,
    "renderer": 2,
    "launcher": 2,
    "toolchain": 1,
    "sass": 2,
    "build_folder": 1,
    "files": 1,
    "process_tree": 0,
    "workers": 0,
    "compiler": 3,
    "emulator": 3,
    "gpu": 3,
    "operands": 2,
    "triton_emulation": 5,
    "triton_matmul": 3,
    "results": 2,
    "rounding": 3,
    "checking": 4,
    "grading": 5,
    "validator": 4,
    "baselines": 4,
    "bench": 5,
    "testing": 6,
    "mcp_server": 5,
    "choice": 4,
    "recordings": 4,
    "pack": 5,
    "report": 6,
    "grid": 6,
    "tuner": 6,
    "operators": 6,
    "plugins": 7,
    "evidence": 7,
    "cli": 8,
    "__main__": 9,
    "__init__": 9,
}
# Parts of a sentence, which do not say what a name holds.
NO_NAMES = frozenset(
    ("one", "found", "told", "said", "wanted", "known", "given", "asked", "held", "made", "taken", "shown", "seen",
     "these", "fitting", "theirs", "ours", "mine", "bed", "met", "gone", "twin", "knows", "meant", "does", "did",
     "gave", "so_far", "something", "them", "they", "came", "went", "instead", "stands")
)  # fmt: skip
TORCH = {
    "element", "fused", "grading", "correctness", "validator", "gpu", "operands", "baselines", "bench", "operators",
    "plugins", "triton_emulation", "tuner",
}  # fmt: skip


def room(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def sources(checkout: Path) -> list[Path]:
    return sorted((checkout / "cudal2gen").rglob("*.py"))


def imported(tree: ast.AST) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether at module level."""
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    modules = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "cudal2gen" else [node.module]
            )
        modules += [(name, id(node) in top) for name in names]
    return modules


def test_imports_go_strictly_down(checkout: Path) -> None:
    package = checkout / "cudal2gen"
    for path in sources(checkout):
        own = room(path, package)
        for name, _ in imported(ast.parse(path.read_text())):
            parts = name.split(".")
            if parts[0] != "cudal2gen" or len(parts) == 1 or parts[1] == own:
                continue
            assert FLOORS[parts[1]] < FLOORS[own], f"{path.name} imports {name}"


def test_no_file_imports_itself_by_way_of_others(checkout: Path) -> None:
    graph = house.import_graph(checkout / "cudal2gen")
    assert sum(map(len, graph.values())) > 800, "imports are counted"
    # Raises CycleError, which names the modules, where they import each other.
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


def test_modules_and_functions_are_small(checkout: Path) -> None:
    for path in sources(checkout):
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


MAX_POSITIONAL = 8
# Functions whose arguments another program lays down: BLAS's order of a product, Triton's kernels and launch hook, the
# tools of the MCP server. Options of the command line are verbs' arguments.
FOREIGN_SIGNATURES = {
    "launcher.py: launch", "launcher.py: bound", "triton_matmul.py: persistent_matmul", "backend.py: __call__",
    "server.py: check",
}  # fmt: skip


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a caller may pass by position, but for an object's own."""
    arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(arguments) - (arguments[:1] in (["self"], ["cls"]))


def is_verb(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("verb(") for decorator in function.decorator_list)


def test_functions_take_few_arguments_by_position(checkout: Path) -> None:
    """Further ones are named at the call, or travel together in a class that says what they are."""
    foreign = set()
    for path in sources(checkout):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_verb(node):
                continue
            if (count := positional(node)) > MAX_POSITIONAL:
                foreign.add(name := f"{path.name}: {node.name}")
                assert name in FOREIGN_SIGNATURES, f"{path}: {node.name} takes {count} arguments by position"
    assert foreign == FOREIGN_SIGNATURES


def names(tree: ast.AST) -> set[str]:
    """What a file names: variables, arguments, attributes, functions, classes; without underscores at the ends."""
    names: list[str | None] = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                names.append(node.id)
            case ast.arg():
                names.append(node.arg)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                names.append(node.name)
            case ast.MatchAs() | ast.MatchStar():
                names.append(node.name)
            case ast.Attribute(ctx=ast.Store()):
                names.append(node.attr)
            case ast.alias():
                names.append(node.asname)
    return {name.strip("_").lower() for name in names if name}


@pytest.mark.parametrize("folder", ["cudal2gen", "scripts", "examples", "tests"])
def test_names_are_nouns(checkout: Path, folder: str) -> None:
    for path in sorted((checkout / folder).rglob("*.py")):
        assert not names(ast.parse(path.read_text())) & NO_NAMES, path


# Modules that write files: into scratch folders, lock files, caches by a rename of their own, and rows at a file's end.
WRITERS = {
    "build_folder.py", "catalog.py", "compiler.py", "emulator/host/standin.py", "files.py", "gpu.py", "pack/writing.py",
    "ptx_split.py", "tuner/memory.py", "tuner/ray_executor.py", "workers.py",
}  # fmt: skip


def opens_for_writing(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="write_text" | "write_bytes" | "mkstemp" | "fdopen")):
            return True
        case ast.Call(func=ast.Attribute(attr="open") | ast.Name(id="open")):
            modes = [argument.value for argument in ast.walk(node) if isinstance(argument, ast.Constant)]
            return any(isinstance(mode, str) and re.fullmatch(r"[rbt]*[wax+][rbt+]*", mode) for mode in modes)
    return False


def test_files_that_users_name_are_written_by_one_room(checkout: Path) -> None:
    """``files``; the command line itself writes nothing."""
    package = checkout / "cudal2gen"
    writers = {
        path.relative_to(package).as_posix()
        for path in sources(checkout)
        if any(map(opens_for_writing, ast.walk(ast.parse(path.read_text()))))
    }
    assert writers == WRITERS
    for text in ('path.open("w")', "open(name, mode='ab')", 'path.write_text("x")', 'file.open("r+")'):
        assert any(map(opens_for_writing, ast.walk(ast.parse(text)))), text
    assert not any(map(opens_for_writing, ast.walk(ast.parse("path.open(); path.open('rb'); kernel.open(device)"))))


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
            own = name == "cudal2gen.chips" or name.startswith("cudal2gen.emulator")
            assert own or root in sys.stdlib_module_names | {"numpy", "__future__"}, name


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
    registered = {
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    }
    assert commands <= registered
    assert name != "README.md" or commands == registered, "the README shows every command"
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (checkout / "Makefile").read_text(), re.MULTILINE)
    for mentioned in re.findall(r"`((?:tests|scripts|configs|templates)/[\w./]+)`", text):
        assert (checkout / mentioned).exists(), mentioned
    for mentioned in re.findall(r"`([\w/]+\.(?:py|cpp|h|c))`", text):
        places = (checkout, checkout / "cudal2gen", checkout / "cudal2gen" / "emulator")
        assert any((place / mentioned).exists() for place in places), mentioned
    for path in sources(checkout):
        own = room(path, checkout / "cudal2gen")
        if name == "ARCHITECTURE.md" and not own.startswith("_"):
            assert own in text, f"{own} is not in {name}"
