"""What the command prints."""

from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()
errors = Console(stderr=True)


class RequestError(Exception):
    """What the user asked for is not possible. The message is one sentence."""


def open_table(**options: Any) -> Table:
    """A table without lines, in the style of all tables of the command."""
    return Table(box=None, padding=(0, 2, 0, 0), **options)


def say(sentence: str) -> None:
    """Print a sentence about what went wrong."""
    errors.print(f"[red]steptuned:[/] {escape(sentence)}", soft_wrap=True, highlight=False)


def stop(sentence: str, code: int = 1) -> NoReturn:
    """Print a sentence about what went wrong and end the command."""
    say(sentence)
    raise typer.Exit(code)
