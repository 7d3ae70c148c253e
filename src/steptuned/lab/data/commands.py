"""`steptuned data`: list and download the data sets."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from steptuned.lab.data.fetching import fetch
from steptuned.lab.data.reading import MISSING, fault, folder
from steptuned.lab.data.sets import SETS, DataError, DataSet
from steptuned.lab.terminal import console, say, stop

app = typer.Typer(help="List and download the data sets.", no_args_is_help=True)

Where = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Folder of data sets; default: STEPTUNED_DATA or a cache.")
]
Names = Annotated[list[str], typer.Argument(help="Data sets by name, or [bold]all[/]; see [bold]steptuned data status[/].")]


@app.command()
def status(data: Where = None) -> None:
    """List the data sets. The checksum of every file is verified."""
    where = data or folder()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("data set", "images", "size", "download", "state"):
        table.add_column(column, justify="left" if column in ("data set", "state") else "right", overflow="fold")
    for name, entry in SETS.items():
        rows, size = entry.train_rows + entry.test_rows, sum(file.size for file in entry.files)
        download = sum(download.file.size for download in entry.downloads)
        table.add_row(name, f"{rows:,}", _mb(size), _mb(download), _state(entry, where))
    console.print(table)
    console.print(f"folder: {escape(str(where))}", soft_wrap=True, highlight=False)


@app.command()
def get(names: Names, data: Where = None) -> None:
    """Download data sets. Existing files are kept if their checksum is right, and replaced if not.

    Example: [bold]steptuned data get cifar-10 mnist[/]
    """
    for name in names:
        if name not in [*SETS, "all"]:
            stop(f"there is no data set {name!r}; valid: all, {', '.join(SETS)}")
    chosen = list(SETS) if "all" in names else list(dict.fromkeys(names))
    # If one fails, the others are still downloaded.
    done = [_get(name, data or folder()) for name in chosen]
    if not all(done):
        raise typer.Exit(1)


def _get(name: str, where: Path) -> bool:
    try:
        fetched = fetch(name, where, progress=sys.stderr.isatty())
    except DataError as error:
        say(str(error))
        return False
    except KeyboardInterrupt:
        stop("stopped; what is there is whole, and the same command again fetches the rest", code=130)
    home = escape(str(where / SETS[name].folder))
    console.print(f"{name}: {'fetched' if fetched else 'there already'}, {home}", soft_wrap=True, highlight=False)
    return True


def _state(entry: DataSet, where: Path) -> str:
    wrong = {file.name: fault(where / entry.folder / file.name, file) for file in entry.files}
    if not any(wrong.values()):
        return "[green]there[/]"
    if all(reason == MISSING for reason in wrong.values()):
        return "not there"
    return "[red]damaged:[/] " + escape("; ".join(f"{name} {reason}" for name, reason in wrong.items() if reason))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
