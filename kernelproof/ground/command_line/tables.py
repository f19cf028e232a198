"""Tables on stdout: they fit a terminal, and in a pipe they are as wide as their cells."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from kernelproof.ground.pages import Section

UNBOUNDED = 100_000  # columns


def number(value: float) -> str:
    """A count in full, another figure by six digits."""
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def print_table(table: Table) -> None:
    """Prints a table. A program that reads it gets whole cells, a line for each row."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(table)
        return
    console = Console(highlight=False, markup=False, width=UNBOUNDED, color_system=None)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_section(section: Section) -> None:
    """Prints the title, the words and the tables of a section; its charts are a page's."""
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
