"""Proves that the documentation builds without a warning, names only existing commands and options, and that its Python
runs.
"""

from __future__ import annotations

import ast
import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cudal2gen import cli
from cudal2gen.kernel import FAMILIES, Problem
from kernelproof.ground.command_line.program import USAGE_ERROR
from tests.commands import run


def pages(checkout: Path) -> list[Path]:
    """The Markdown files of the documentation, and those of the checkout that are shown with it."""
    return [*sorted((checkout / "docs").rglob("*.md")), checkout / "CONTRIBUTING.md", checkout / "CHANGELOG.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built documentation. A warning fails the build."""
    target = tmp_path_factory.mktemp("site")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(target)]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return target


@pytest.mark.slow
def test_the_reference_has_what_users_call(site: Path) -> None:
    for page, name in (
        ("operators", "operators.matmul"),
        ("operators", "operators.patch"),
        ("kernel", "kernel.Sm90Wgmma"),
        ("building", "generation.compiler.build"),
        ("grid", "bench.grid.fit"),
        ("measurements", "bench.protocols.measure"),
    ):
        text = (site / "reference" / page / "index.html").read_text()
        assert f'id="cudal2gen.{name}"' in text, name


@pytest.mark.slow
def test_every_command_has_a_section_with_its_options(site: Path) -> None:
    """A row of a section has four cells; the first has the spellings of an option, and the last its meaning."""
    page = (site / "commands" / "index.html").read_text()
    for verb, options in commands().items():
        (section,) = re.findall(rf'<h2 id="{verb}">(.*?)(?:<h2|</article>)', page, re.DOTALL)
        rows = re.findall(
            r"<td>((?:<code>[^<]+</code>(?:, )?)+)</td>\s*<td>.*?</td>\s*<td>.*?</td>\s*<td>(.*?)</td>", section
        )
        documented = {name for names, _ in rows for name in re.findall(r"<code>(.*?)</code>", names)}
        assert documented == options - {"--help", "-h"}, verb
        assert all(meaning for _, meaning in rows), verb
    (section,) = re.findall(r'<h2 id="defaults-that-differ">(.*?)</article>', page, re.DOTALL)
    text = " ".join(re.sub("<.*?>", " ", section).split())
    assert "--acc f32 tune-model" in text
    assert "--gpu any list, bench, report" in text


def test_the_first_diagram_is_not_cut(checkout: Path) -> None:
    text = (checkout / "docs" / "index.md").read_text()
    (first,) = re.findall(r"^```\n(record .*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert 40 < max(map(len, first.splitlines())) <= 60, (
        "columns that fit next to the navigation, and on a phone by one swipe"
    )


@pytest.mark.slow
def test_every_field_of_a_record_has_a_row_with_its_description(site: Path) -> None:
    page = (site / "records" / "index.html").read_text()
    models = {"problem": Problem, **FAMILIES}
    for name, model in models.items():
        (section,) = re.findall(rf'<h2 id="{name}">(.*?)(?:<h2|</article>)', page, re.DOTALL)
        rows = re.findall(r"<td><code>(\w+)</code></td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", section)
        descriptions = {field: html.unescape(text) for field, _, text in rows}
        assert descriptions == {
            field: info.description
            for field, info in model.model_fields.items()
            if field not in ("problem", "family", "origin")
        }
        assert all(descriptions.values()), name
        assert all(values for _, values, _ in rows), name


@pytest.mark.slow
def test_pictures_have_words(site: Path) -> None:
    page = (site / "hopper" / "index.html").read_text()
    (picture,) = re.findall(r'<img alt="([^"]+)" src="\.\./ring\.svg"', page)
    assert "TMA" in picture
    assert (site / "ring.svg").is_file()


@pytest.mark.slow
def test_every_block_of_code_is_one(site: Path) -> None:
    """Markdown treats a block as text if its first line has more than a language, and prints the fence."""
    assert [path for path in site.rglob("*.html") if "```" in path.read_text()] == []


def commands() -> dict[str, set[str]]:
    """The options and arguments of each command, from its help."""
    group = typer.main.get_command(cli.app)
    options_by_command = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        options_by_command[name] = {
            name
            for parameter in command.params
            for name in (
                (*parameter.opts, *parameter.secondary_opts)
                if parameter.opts[0].startswith("-")
                else (parameter.metavar,)
            )
        } | {field.spelling for field in getattr(command, "shared_fields", ())}
    return options_by_command


def command_lines(text: str) -> list[list[str]]:
    """The words of each command in a page's code blocks."""
    blocks = re.findall(r"^ *```.*\n((?:.*\n)*?) *```$", text, re.MULTILINE)
    lines = re.findall(r"^ *(?:\$ )?(cudal2gen [a-z].*)$", "".join(blocks), re.MULTILINE)
    commands = [part for line in lines for part in re.sub(r"\s+#.*", "", line).split("; ")]
    return [shlex.split(command)[1:] for command in commands]


def test_command_lines_of_readme_and_docs_parse(checkout: Path) -> None:
    """Each verb's own parser checks options, values and the number of arguments.

    ``contribute`` and ``grade`` need no command line in a code block.
    """
    group = typer.main.get_command(cli.app)
    verbs = set()
    for path in [checkout / "README.md", *pages(checkout)]:
        for verb, *words in command_lines(path.read_text()):
            if "|" in " ".join(words):
                continue  # a summary of alternatives
            command = group.commands[verb]  # type: ignore[attr-defined]
            try:
                command.make_context(verb, list(words))
            except USAGE_ERROR as error:
                pytest.fail(f"{path.name}: {verb} {shlex.join(words)}: {error.format_message()}")  # type: ignore[attr-defined]
            verbs.add(verb)
    assert verbs >= set(commands()) - {"contribute", "grade"}, "every other verb has a line to copy"


def test_commands_within_sentences_exist(checkout: Path) -> None:
    options_by_command = commands()
    mentioned = set()
    for path in [checkout / "README.md", *pages(checkout)]:
        if path.name == "CHANGELOG.md":
            continue  # it names things of earlier versions
        for verb, rest in re.findall(r"`cudal2gen ([a-z][a-z-]*)([^`]*)`", path.read_text()):
            assert verb in options_by_command, f"{path.name}: {verb}"
            words = shlex.split(rest.split(" -- ")[0])
            for option in (word.split("=")[0] for word in words if re.match("--[a-z]", word)):
                assert option in options_by_command[verb], f"{path.name}: {verb} {option}"
            mentioned.add(verb)
    assert {"render", "validate", "pack"} <= mentioned


def variables_in_the_code(checkout: Path) -> set[str]:
    """Our environment variables: a name in the code is always a whole string."""
    texts = [path.read_text() for name in ("cudal2gen", "kernelproof") for path in (checkout / name).rglob("*.py")]
    constants = {
        node.value
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in constants if re.fullmatch("(CUDAL2GEN|KERNELPROOF)_[A-Z_]+", text)}


@pytest.mark.slow
def test_the_page_of_variables_has_a_row_for_each_that_the_code_reads(checkout: Path) -> None:
    page = (checkout / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `((?:CUDAL2GEN|KERNELPROOF)_[A-Z_]+)` \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(variables_in_the_code(checkout))


def test_files_that_are_named_exist(checkout: Path) -> None:
    for path in pages(checkout):
        text = path.read_text()
        if path.name == "CHANGELOG.md":
            continue  # it names things of earlier versions
        for name in re.findall(
            r"`((?:cudal2gen|kernelproof|tests|scripts|configs|templates|examples|docs)/[\w./]+)`", text
        ):
            assert (checkout / name).exists(), f"{path.name}: {name}"
        for link in re.findall(r"\]\(([\w./]+\.(?:md|svg))\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.slow
def test_the_python_of_the_guide_runs(checkout: Path, tmp_path: Path) -> None:
    """The program in docs/edit.md prints two lines that end with True: two comparisons hold."""
    (program,) = re.findall(r"```python\n(.*?)```", (checkout / "docs" / "edit.md").read_text(), re.DOTALL)
    variables = os.environ | {"CUDAL2GEN_RESULTS": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=variables)
    assert [line.split()[-1] for line in process.stdout.splitlines()] == ["True", "True"]


def test_the_error_of_the_guide_is_the_error(checkout: Path) -> None:
    (message,) = re.findall(r"^error: (.*)$", (checkout / "docs" / "edit.md").read_text(), re.MULTILINE)
    process = run("show", "--mnk", "4096_4096_64", "--set", "bn=96")
    assert process.stderr.strip() == f"error: {message}"


@pytest.mark.slow
def test_the_notes_of_the_guide_are_the_notes(checkout: Path) -> None:
    blocks = re.findall(r"```\n(\$ .*?)```", (checkout / "docs" / "edit.md").read_text(), re.DOTALL)
    commands = [part for block in blocks for part in re.split(r"^\$ cudal2gen ", block, flags=re.MULTILINE)]
    examples = [part for part in commands if "note:" in part]
    assert len(examples) == 4
    for part in examples:
        command, notes = part.split("\n", 1)
        _, *options = command.split()
        process = run("show", *options)  # notes do not depend on the verb
        assert process.stderr.split() == notes.split(), command
