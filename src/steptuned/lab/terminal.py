"""What the command prints."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()
errors = Console(stderr=True)


LONG = 200
"""Rows of a table that is not laid out by rich."""
MARKUP = re.compile(r"\[/?[a-z ]*\]")
PLAIN: dict[str, Any] = {"soft_wrap": True, "highlight": False, "emoji": False}


class RequestError(Exception):
    """What the user asked for is not possible. The message is one sentence."""


def open_table(**options: Any) -> Table:
    """A table without lines, in the style of all tables of the command."""
    return Table(box=None, padding=(0, 2, 0, 0), **options)


def print_rows(columns: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of cells with markup; ``columns`` has the alignment of each column.

    A long table is printed line by line: rich takes seconds to lay out thousands of rows.
    """
    if len(rows) <= LONG:
        table = open_table()
        for column, justify in columns.items():
            table.add_column(column, justify=justify)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    lines = [list(columns), *rows]
    widths = [max(len(MARKUP.sub("", line[i])) for line in lines) for i in range(len(columns))]
    aligned = list(zip(widths, columns.values(), strict=True))
    console.print("\n".join(_aligned(line, aligned) for line in lines), **PLAIN)


def _aligned(cells: Sequence[str], columns: Sequence[tuple[int, str]]) -> str:
    padded = []
    for cell, (width, justify) in zip(cells, columns, strict=True):
        space = " " * (width - len(MARKUP.sub("", cell)))
        padded.append(space + cell if justify == "right" else cell + space)
    return "  ".join(padded).rstrip()


def say(sentence: str) -> None:
    """Print a sentence about what went wrong."""
    errors.print(f"[red]steptuned:[/] {escape(sentence)}", soft_wrap=True, highlight=False)


def stop(sentence: str, code: int = 1) -> NoReturn:
    """Print a sentence about what went wrong and end the command."""
    say(sentence)
    raise typer.Exit(code)
