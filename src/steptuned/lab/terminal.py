"""How the command speaks."""

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)


def say(sentence: str) -> None:
    """A sentence about what went wrong."""
    errors.print(f"[red]steptuned:[/] {escape(sentence)}", soft_wrap=True, highlight=False)


def stop(sentence: str, code: int = 1) -> NoReturn:
    say(sentence)
    raise typer.Exit(code)
