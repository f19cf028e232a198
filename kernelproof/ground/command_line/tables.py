"""Prints tables on stdout: wrapped to the width of a terminal, but not in a pipe, where a program reads them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from kernelproof.ground.pages import Section

UNBOUNDED = 100_000  # a width in columns that no table reaches


def number(value: float) -> str:
    """The text of a number: whole numbers in full, others with six significant digits."""
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def print_table(table: Table) -> None:
    """Prints a table. In a pipe each row is one line, and no cell is cut."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(table)
        return
    console = Console(highlight=False, markup=False, width=UNBOUNDED, color_system=None)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_section(section: Section) -> None:
    """Prints the title, texts and tables of a section. Charts are left out; only HTML pages show them."""
    from rich.table import Table

    print(section.title.upper())
    for text in (*section.paragraphs, *section.alerts, *section.notes):
        print(text)
    for part in section.tables:
        print(f"\n{part.caption}")
        table = Table(box=None, pad_edge=False, show_header=len(part.columns) > 2)
        for index, column in enumerate(part.columns):
            words = index == 0 or len(part.columns) == 2 or any(row[index][:1].isalpha() for row in part.rows)
            table.add_column(column, justify="left" if words else "right", overflow="fold")
        for row in part.rows:
            table.add_row(*row)
        print_table(table)
    print()
