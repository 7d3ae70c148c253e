"""The `steptuned` command: arguments in, one call out."""

import functools
import gc
import inspect
import os
import shlex
import webbrowser
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steptuned.lab.data import commands
from steptuned.lab.ranks import started_by_torchrun
from steptuned.lab.run import CHECKPOINT_SECONDS
from steptuned.lab.terminal import PLAIN, RequestError, console, errors, print_rows, stop


class Commands(TyperGroup):
    """The command and its subcommands. A user's mistake ends it with a one-sentence message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__module__.startswith("steptuned.") and isinstance(error, _explained()):
                stop(str(error))
            raise


def _explained() -> tuple[type[Exception], ...]:
    """The errors whose message is one sentence for the user."""
    from steptuned.lab.data.sets import DataError
    from steptuned.lab.engine import EngineError
    from steptuned.lab.evidence import EvidenceError
    from steptuned.lab.experiment import ExperimentError
    from steptuned.lab.extensions import ExtensionError

    return RequestError, DataError, EngineError, EvidenceError, ExperimentError, ExtensionError


app = typer.Typer(
    cls=Commands,
    help="Re-run, check and extend the experiments of the Step-Tuned SGD paper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(commands.app, name="data")
packed = typer.Typer(
    help="The raw logs behind published numbers, packed for a repository.",
    no_args_is_help=True,
)
app.add_typer(packed, name="evidence")


class Scale(str, Enum):
    demo = "demo"
    small = "small"
    short = "short"
    paper = "paper"


SCALES = (
    "demo: minutes; small, of problems with images: a tenth of the images, all epochs; "
    "short: all images, a tenth of the epochs; paper: the sizes of the paper."
)
JOBS = "Runs at the same time, sharing torch's threads. Default: one run per core, or one on a GPU."
DASK = (
    "Run on the Dask cluster of this scheduler. Its workers need access to the folder "
    "[bold]--out[/] and one thread each. [bold]local:N[/]: N workers on this machine."
)
OUT = "Folder of runs and figures. Runs that are complete in it are not repeated."
TENSORBOARD = "Also write the records to this folder, as TensorBoard scalars."
REPORT = "Folder of the report; by default [bold]report[/] in the folder of the runs, or here."
STORE = "The folder given as --out, or one made by [bold]steptuned evidence pack[/]."

Names = Annotated[
    list[str],
    typer.Argument(help="Names of experiments, or [bold]all[/]; see [bold]steptuned list[/]."),
]
ScaleOption = Annotated[Scale, typer.Option(help=SCALES)]
DeviceOption = Annotated[
    str,
    typer.Option(help="cpu, cuda, mps, or auto: an accelerator if there is one."),
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="Folder of data sets, instead of STEPTUNED_DATA; see `steptuned data`."),
]
PackedArgument = Annotated[
    Path,
    typer.Argument(help="A folder made by [bold]steptuned evidence pack[/]."),
]


def _open(context: typer.Context, folder: Path) -> Path:
    """A folder of runs. A packed folder is unpacked for as long as the command runs."""
    if not (folder / "MANIFEST.json").exists():
        return folder  # without the import of pyarrow, which takes a while
    from steptuned.lab.evidence import opened

    return context.with_resource(opened(folder))


StoreArgument = Annotated[Path, typer.Argument(help=STORE, callback=_open)]


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise RequestError(f"there is no folder {folder}; give the one that was given as --out")
    return folder


@app.callback()
def _begin(
    context: typer.Context,
    with_: Annotated[
        list[Path],
        typer.Option(
            "--with",
            metavar="FILE",
            help="A Python file that adds problems, methods, figures or claims.",
        ),
    ] = [],  # noqa: B006 - typer makes a new list
) -> None:
    from steptuned.lab.extensions import extend

    gc.freeze()  # modules stay in memory, so the garbage collector need not look at them again
    if started_by_torchrun():
        console.quiet = os.environ["RANK"] != "0"
        errors.quiet = os.environ["LOCAL_RANK"] != "0"  # one process per machine reports errors
    context.obj = tuple(path.absolute() for path in with_)
    extend(context.obj)


# -------------------------------------------------------------------------- running experiments


def _run_options(
    context: typer.Context,
    jobs: Annotated[int | None, typer.Option(min=1, help=JOBS)] = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help=DASK)] = None,
    device: DeviceOption = "auto",
    out: Annotated[Path, typer.Option(help=OUT)] = Path("results"),
    data: DataOption = None,
    autocast: Annotated[
        bool,
        typer.Option(
            "--bf16", help="Networks compute in bfloat16 (autocast), unlike in the paper."
        ),
    ] = False,
    checkpoint_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds between two checkpoints of a run."),
    ] = CHECKPOINT_SECONDS,
    tensorboard: Annotated[Path | None, typer.Option(help=TENSORBOARD)] = None,
) -> Any:
    from steptuned.lab.reproduction import RunOptions

    _use_data(data)
    return RunOptions(
        out=out,
        jobs=jobs,
        dask=dask,
        device=device,
        autocast=autocast,
        checkpoint_seconds=checkpoint_seconds,
        tensorboard=tensorboard,
        extensions=context.obj,
    )


def _use_data(folder: Path | None) -> None:
    """Set the folder of data sets, for this process and its workers."""
    if folder is not None:
        os.environ["STEPTUNED_DATA"] = str(folder.absolute())


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :func:`_run_options`, as its parameter ``options``."""
    shared = inspect.signature(_run_options).parameters
    own = dict(inspect.signature(command).parameters)
    del own["options"]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        options = _run_options(**{name: given.pop(name) for name in shared})
        command(**given, options=options)

    both = [*own.values(), *shared.values()]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in both]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


@app.command()
@with_run_options
def reproduce(names: Names, options: Any, scale: ScaleOption = Scale.small) -> None:
    """Run experiments of the paper and draw their figures.

    You can stop it at any moment, even with kill -9. The same command continues where it stopped
    and ends with the same numbers.

    Example: [bold]steptuned reproduce figure-2 figure-3 --scale demo[/]
    """
    from steptuned.lab import reproduction

    reproduction.reproduce(names, scale.value, options)


@app.command()
@with_run_options
def run(
    files: Annotated[list[Path], typer.Argument(help="Experiment files (TOML).")],
    options: Any,
    scale: ScaleOption = Scale.paper,
) -> None:
    """Run your own experiments, each defined in a TOML file, and draw their figures."""
    from steptuned.lab import reproduction

    reproduction.run_files(files, scale.value, options)


@app.command()
def plan(
    names: Names,
    scale: ScaleOption = Scale.paper,
    device: DeviceOption = "auto",
    data: DataOption = None,
) -> None:
    """Estimate what experiments cost on this machine.

    Measures a few steps of each method. Nothing is run or written.
    """
    from steptuned.lab.catalogue import experiments_named
    from steptuned.lab.plan import table_of

    _use_data(data)
    console.print(table_of(experiments_named(names, scale.value), device))


@app.command("list")
def list_() -> None:
    """List problems, methods and experiments."""
    from steptuned.lab import catalogue

    for table in catalogue.tables():
        console.print(table, "")


# ------------------------------------------------------------------------------- reading a folder


@app.command()
def show(folder: StoreArgument) -> None:
    """List the runs in a folder: how they ended, their loss, their hyper-parameters.

    Incomplete seed sets are highlighted.
    """
    from steptuned.lab.report.listing import COLUMNS, listing_of

    listing = listing_of(_existing(folder))
    for path in listing.damaged:
        advice = "its spec.json cannot be read; delete the folder to run it again"
        console.print(f"[red]CORRUPT[/] {path}: {advice}")
    print_rows(COLUMNS, listing.rows)
    counted = f"{listing.runs} runs, at most {listing.widest} with the same settings"
    console.print(counted if listing.runs else f"no runs in {folder}")


@app.command()
def export(
    folder: StoreArgument,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write all records as CSV."),
    ] = None,
    parquet_file: Annotated[
        Path | None,
        typer.Option("--parquet", help="Write all records as Parquet."),
    ] = None,
) -> None:
    """Write all records of all runs as one table, with one line per record."""
    from steptuned.lab.export import export

    if csv_file is None and parquet_file is None:
        raise RequestError("nothing to write: give --csv FILE or --parquet FILE")
    for sentence in export(_existing(folder), csv_file, parquet_file):
        console.print(sentence)


@app.command()
def report(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help=STORE)],
    to: Annotated[
        Path | None,
        typer.Option(help=REPORT),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    watch: Annotated[
        int,
        typer.Option(min=0, help="Rewrite the page every N seconds, until Ctrl-C."),
    ] = 0,
) -> None:
    """Write an interactive page to explore and share.

    It has figures, curves, the grids, and a verdict on every claim of the paper.
    """
    from steptuned.lab.report import writing

    store = _existing(_open(context, folder))
    chosen = [] if to is None else ["--to", str(to)]
    command = shlex.join(["steptuned", "report", folder.resolve().name, *chosen])
    where = to or (folder / "report" if store == folder else Path("report"))
    try:
        page = writing.write(store, where, command, watch)
        console.print(str(page), soft_wrap=True, highlight=False)
        if open_:
            webbrowser.open(page.resolve().as_uri())
        if watch:
            writing.keep_writing(store, where, command, watch)
    except OSError as error:
        reason = f"the report cannot be written to {where}: {error.strerror}"
        raise RequestError(f"{reason}; choose another folder with --to") from None


@app.command()
def claims(
    folder: StoreArgument,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the verdicts and all comparisons as JSON."),
    ] = None,
    markdown_file: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write the tables as Markdown."),
    ] = None,
) -> None:
    """Judge every claim of the paper, and those given as --with, by the runs in a folder.

    With 5 seeds or 20 instances a claim is reproduced or not reproduced, with 3 or 4 seeds it is
    consistent or inconsistent. It is mixed if scales or measures disagree. If runs are missing, it
    is not run.
    """
    from steptuned.lab.claims.verdicts import judge
    from steptuned.lab.report import results, tables, writing

    judged = judge(_existing(folder))
    for claim, judgement in judged:
        block = tables.claim_block(claim, judgement, console.width)
        console.print(block, "", sep="\n", markup=False, **PLAIN)
    console.print(results.tally(judged), results.LEGEND, sep="\n", highlight=False)
    console.print("The criteria and all comparisons: --markdown FILE.", highlight=False)
    writing.write_claims(judged, json_file, markdown_file)


@app.command()
def results(
    folder: StoreArgument,
    page: Annotated[
        Path,
        typer.Option("--to", help="The page to write; its figures go into a folder beside it."),
    ],
    readme: Annotated[
        Path | None,
        typer.Option(help="Also update the table of verdicts in this page."),
    ] = None,
    verdicts: Annotated[
        Path | None,
        typer.Option(
            help="Also write the verdicts that ship with the package, as JSON, to this file."
        ),
    ] = None,
) -> None:
    """Write a Markdown page with all experiments that have runs in a folder."""
    from steptuned.lab.report.results import write

    command = ["steptuned", "results", folder.resolve().name, "--to", str(page)]
    written = write(_existing(folder), page, shlex.join(command), readme, verdicts)
    console.print(*map(str, written), sep="\n", soft_wrap=True)


# ------------------------------------------------------------------------------- packed evidence


@packed.command()
def pack(
    folder: StoreArgument,
    to: Annotated[Path, typer.Option(help="The folder to pack into.")] = Path("evidence"),
) -> None:
    """Pack all complete runs: one Parquet file per experiment, and a manifest with checksums."""
    from steptuned.lab import evidence

    for name, entry in evidence.pack(folder, to)["files"].items():
        thinned = f"{entry.get('runs')} runs, {entry.get('thinned runs')} of them thinned"
        said = thinned if "runs" in entry else "timings"
        console.print(f"{to / name}: {said}", soft_wrap=True, highlight=False)


@packed.command()
def unpack(
    folder: PackedArgument,
    to: Annotated[
        Path,
        typer.Option(help="The folder of runs to make or to add to."),
    ] = Path("results"),
) -> None:
    """Make a folder of runs from a packed one.

    `steptuned reproduce --out` continues from there and repeats no run.
    """
    from steptuned.lab import evidence

    console.print(
        f"unpacked {evidence.unpack(folder, to)} runs into {to}", soft_wrap=True, highlight=False
    )


@packed.command("verify")
def verify_(folder: PackedArgument) -> None:
    """Check that no file of a packed folder has changed."""
    from steptuned.lab import evidence

    console.print(
        f"{len(evidence.verify(folder)['files'])} files, all unchanged since they were packed"
    )
