"""Tables on stdout: fitted to a terminal, and as wide as their content in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

UNBOUNDED = 100_000  # columns


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
