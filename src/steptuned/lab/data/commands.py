"""`steptuned data`: lists the data sets and downloads missing ones."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from steptuned.lab.data.fetching import fetch
from steptuned.lab.data.reading import MISSING, fault, folder
from steptuned.lab.data.sets import SETS, DataError, DataSet
from steptuned.lab.terminal import console, open_table, say, stop

app = typer.Typer(help="List the data sets and download missing ones.", no_args_is_help=True)

Where = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder of data sets. Default: STEPTUNED_DATA, or a cache.",
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(help="Names of data sets, or [bold]all[/]; see [bold]steptuned data status[/]."),
]
ONE_LINE: dict[str, Any] = {"soft_wrap": True, "highlight": False}


@app.command()
def status(data: Where = None) -> None:
    """List the data sets. Every file is checked by its checksum."""
    where = data or folder()
    table = open_table()
    for column in ("data set", "images", "size", "download", "state"):
        justify: Any = "left" if column in ("data set", "state") else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for name, entry in SETS.items():
        images, size = entry.train_rows + entry.test_rows, sum(file.size for file in entry.files)
        download = sum(download.file.size for download in entry.downloads)
        table.add_row(name, f"{images:,}", _mb(size), _mb(download), _state(entry, where))
    console.print(table)
    console.print(f"folder: {escape(str(where))}", **ONE_LINE)


@app.command()
def get(names: Names, data: Where = None) -> None:
    """Download data sets. Intact ones are not downloaded again; damaged ones are replaced.

    Example: [bold]steptuned data get cifar-10 mnist[/]
    """
    for name in names:
        if name not in [*SETS, "all"]:
            stop(f"there is no data set {name!r}; valid: all, {', '.join(SETS)}")
    chosen = list(SETS) if "all" in names else list(dict.fromkeys(names))
    done = [_get(name, data or folder()) for name in chosen]  # continues after a failure
    if not all(done):
        raise typer.Exit(1)


def _get(name: str, where: Path) -> bool:
    try:
        fetched = fetch(name, where, progress=sys.stderr.isatty())
    except DataError as error:
        say(str(error))
        return False
    except KeyboardInterrupt:
        advice = "complete files are kept, and the same command downloads the rest"
        stop(f"stopped; {advice}", code=130)
    home = escape(str(where / SETS[name].folder))
    console.print(f"{name}: {'downloaded' if fetched else 'already present'}, {home}", **ONE_LINE)
    return True


def _state(entry: DataSet, where: Path) -> str:
    faults = {file.name: fault(where / entry.folder / file.name, file) for file in entry.files}
    if not any(faults.values()):
        return "[green]present[/]"
    if all(reason == MISSING for reason in faults.values()):
        return "missing"
    reasons = "; ".join(f"{name} {reason}" for name, reason in faults.items() if reason)
    return f"[red]damaged:[/] {escape(reasons)}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
