"""The `steptuned` command."""

import csv
import importlib.util
import itertools
import json
import os
import shlex
import sys
import time
import webbrowser
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from steptuned.lab.data import DataError, commands
from steptuned.lab.engine import Engine, EngineError, How, Local, Together, device_here, is_usable
from steptuned.lab.experiment import Experiment, ExperimentError, load, load_all, panels_of, paper_experiments
from steptuned.lab.extensions import ExtensionError, extend
from steptuned.lab.methods import METHODS
from steptuned.lab.plan import Plan, duration, estimate
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.ranks import Torchrun, started_by_torchrun
from steptuned.lab.run import CHECKPOINT_SECONDS, follow
from steptuned.lab.search import Outcome
from steptuned.lab.store import COMPLETE, Run, Store
from steptuned.lab.sweep import Interrupted, Sweep
from steptuned.lab.table2 import Timings
from steptuned.lab.terminal import console, errors, stop
from steptuned.lab.timing import measure

app = typer.Typer(
    help="Re-run, check and extend the experiments of the Step-Tuned SGD paper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(commands.app, name="data")
packed = typer.Typer(help="The raw logs behind published numbers, packed for a repository.", no_args_is_help=True)
app.add_typer(packed, name="evidence")

ILLUSTRATION = "figure-1"
WALL_CLOCK = "table-2"
CORES = os.cpu_count() or 1


class Scale(str, Enum):
    demo = "demo"
    small = "small"
    short = "short"
    paper = "paper"


ScaleOption = Annotated[
    Scale,
    typer.Option(
        help="demo: minutes; small: a tenth of the images, all epochs; short: all images, a tenth of the epochs; "
        "paper: the paper's own sizes."
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Runs at the same time; torch's threads are divided among them. By default a run a core, or one on a GPU."
    ),
]
DaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run on the Dask cluster of this scheduler, whose workers see the folder [bold]--out[/] and have one thread each; "
        "[bold]local:N[/]: on N workers here.",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, mps, or auto: an accelerator if there is one.")]
OutOption = Annotated[Path, typer.Option(help="Folder of the runs and figures. The same folder again: only what is new is run.")]
Names = Annotated[list[str], typer.Argument(help="Experiments by name, or [bold]all[/]; see [bold]steptuned list[/].")]
Files = Annotated[list[Path], typer.Argument(help="Experiment files of your own.")]
CheckpointOption = Annotated[float, typer.Option(min=0, help="Seconds from one checkpoint of a run to the next.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder of data sets, instead of STEPTUNED_DATA; see `steptuned data`.")]
AutocastOption = Annotated[bool, typer.Option("--bf16", help="Networks compute in bfloat16 (autocast), unlike the paper's.")]
TensorBoardOption = Annotated[Path | None, typer.Option(help="Write the records here too, as TensorBoard's scalars.")]
PackedArgument = Annotated[Path, typer.Argument(help="A folder made by [bold]steptuned evidence pack[/].")]


@contextmanager
def _trusted() -> Iterator[Any]:
    """The module of packed folders; what it cannot trust ends the command with one sentence."""
    from steptuned.lab import evidence

    try:
        yield evidence
    except evidence.EvidenceError as error:
        stop(str(error))


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """A folder of runs; of a packed one, a copy as a folder of runs for the time of this block."""
    with _trusted() as evidence, evidence.opened(folder) as store:
        yield store


def _open(context: typer.Context, folder: Path) -> Path:
    return context.with_resource(_opened(folder))


STORE = "The folder given as --out, or one made by [bold]steptuned evidence pack[/]."
StoreArgument = Annotated[Path, typer.Argument(help=STORE, callback=_open)]


@app.callback()
def _begin(
    context: typer.Context,
    with_: Annotated[
        list[Path], typer.Option("--with", metavar="FILE", help="A Python file with problems, methods or figures of your own.")
    ] = [],  # noqa: B006 - typer makes a new one
) -> None:
    if started_by_torchrun():
        console.quiet = os.environ["RANK"] != "0"  # the lead speaks for all
        errors.quiet = os.environ["LOCAL_RANK"] != "0"  # the first of each machine, of what is wrong there
    context.obj = tuple(path.absolute() for path in with_)
    try:
        extend(context.obj)
    except ExtensionError as error:
        stop(str(error))


@app.command()
def reproduce(
    context: typer.Context,
    names: Names,
    scale: ScaleOption = Scale.small,
    jobs: JobsOption = None,
    dask: DaskOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("results"),
    data: DataOption = None,
    autocast: AutocastOption = False,
    checkpoint_seconds: CheckpointOption = CHECKPOINT_SECONDS,
    tensorboard: TensorBoardOption = None,
) -> None:
    """Run experiments of the paper and draw their figures.

    Can be stopped at any moment, also by kill -9, and started again with the same command: it goes on where it was and ends with
    the same numbers.

    Example: [bold]steptuned reproduce figure-2 figure-3 --scale demo[/]
    """
    figures = _asked(names, scale)
    _find_data(data)
    sweep = Sweep(out, _engine(figures, jobs, dask, device, checkpoint_seconds, tensorboard, context.obj), console)
    _run(_with_ranks(_with_autocast(figures, autocast), sweep.engine.how.ranks), _is_asked(ILLUSTRATION, names), sweep)
    if _is_asked(WALL_CLOCK, names):
        _time(out, scale.value, sweep.engine.how.device, "bfloat16" if autocast else "float32")


@app.command()
def run(
    context: typer.Context,
    files: Files,
    scale: ScaleOption = Scale.paper,
    jobs: JobsOption = None,
    dask: DaskOption = None,
    device: DeviceOption = "auto",
    out: OutOption = Path("results"),
    data: DataOption = None,
    autocast: AutocastOption = False,
    checkpoint_seconds: CheckpointOption = CHECKPOINT_SECONDS,
    tensorboard: TensorBoardOption = None,
) -> None:
    """Run experiments of your own, each defined in a TOML file, and draw their figures."""
    figures = {path.stem: _load(path, scale) for path in files}
    _find_data(data)
    sweep = Sweep(out, _engine(figures, jobs, dask, device, checkpoint_seconds, tensorboard, context.obj), console)
    _run(_with_ranks(_with_autocast(figures, autocast), sweep.engine.how.ranks), False, sweep)


@app.command()
def plan(names: Names, scale: ScaleOption = Scale.paper, device: DeviceOption = "auto", data: DataOption = None) -> None:
    """What experiments would cost on this machine, from a few steps of each method; nothing is run or written."""
    _find_data(data)
    asked = _asked(names, scale)
    where = device if device == "auto" else _device(device)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("experiment", "runs", "bp", "one job here", "PFLOP", "logs, MB"):
        table.add_column(column, justify="left" if column == "experiment" else "right", no_wrap=True)
    total = Plan()

    def add(name: str, cost: Plan) -> None:
        numbers = f"{cost.runs:,}", f"{cost.back_propagations:,}", duration(cost.seconds)
        table.add_row(name, *numbers, f"{cost.flop / 1e15:,.3g}", f"{cost.log_bytes / 1e6:,.3g}")

    with console.status("") as status:
        for experiment in itertools.chain(*asked.values()):
            status.update(experiment.name)
            try:
                cost = estimate(experiment, device_here(where, PROBLEMS[experiment.problem].double))
            except DataError as error:
                stop(str(error))
            add(experiment.name, cost)
            total += cost
    add("all", total)
    console.print(table)


@app.command("list")
def list_() -> None:
    """The problems, methods and experiments there are."""
    for title, rows in (
        ("problems", [(name, cls.description, _pairs(cls.defaults)) for name, cls in PROBLEMS.items()]),
        ("methods", [(name, method.label, _pairs(method.defaults)) for name, method in METHODS.items()]),
        (
            "experiments",
            [(ILLUSTRATION, "a negative and a positive curvature step", "")]
            + [(name, _titles(path), "") for name, path in paper_experiments().items()]
            + [(WALL_CLOCK, "time per epoch relative to SGD, on problems (a) to (f)", "")],
        ),
    ):
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("name", "what", "options and defaults" if title != "experiments" else ""):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, "")


@app.command()
def show(folder: StoreArgument) -> None:
    """A table of the runs in a folder: how they ended, their loss, their hyper-parameters. Sets that lack seeds are shouted."""
    sets: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for stored in _runs(folder):
        try:
            spec = stored.spec
        except ValueError:
            console.print(f"[red]CORRUPT[/] {stored.folder}: its spec.json cannot be read; delete the folder to run it again")
            continue
        key = spec.model_copy(update={"seed": 0}).canonical()
        sets[spec.problem, spec.method, key].append(stored)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("problem", "method", "hyper-parameters", "bp", "seeds", "status", "best loss", "last loss"):
        table.add_column(column, justify="right" if column in ("bp", "best loss", "last loss") else "left")
    widest = max((len(runs) for runs in sets.values()), default=0)
    for (problem, method, _), runs in sorted(sets.items()):
        spec = runs[0].spec
        statuses = [r.status() for r in runs]
        complete = [r for r, status in zip(runs, statuses, strict=True) if status in COMPLETE]
        losses = [record["loss"] for r in complete for record in r.records()]
        lasts = [r.result()["last"]["loss"] for r in complete]  # type: ignore[index]
        differs = {k: v for k, v in spec.hyper.items() if v != METHODS[method].defaults.get(k)} if method in METHODS else spec.hyper
        instance = f" #{spec.options['instance']}" if spec.options.get("instance") else ""
        seeds = f"{len(complete)}/{len(runs)} seeds" if len(runs) > 1 else f"seed {spec.seed}"
        table.add_row(
            problem + instance,
            method,
            _pairs(differs),
            str(spec.budget),
            seeds if len(complete) == len(runs) else f"[bold red]{len(complete)}/{len(runs)} SEEDS[/]",
            ", ".join(f"[red]{s}[/]" if s not in COMPLETE else s for s in sorted(set(statuses))),
            f"{min(losses):.5g}" if losses else "",
            f"{sum(lasts) / len(lasts):.5g}" if lasts else "",
        )
    console.print(table)
    count = sum(map(len, sets.values()))
    console.print(f"{count} runs, {widest} at most in a set" if count else f"no runs in {folder}")


@app.command()
def export(
    folder: StoreArgument,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write all records as CSV.")] = None,
    parquet_file: Annotated[Path | None, typer.Option("--parquet", help="Write all records as Parquet.")] = None,
) -> None:
    """All records of all runs in one table, one line a record."""
    if csv_file is None and parquet_file is None:
        stop("say where to: --csv FILE or --parquet FILE")
    rows = []
    for stored in _runs(folder):
        spec, status = stored.spec, stored.status()
        about = {"run": spec.identity, "problem": spec.problem, "method": spec.method, "seed": spec.seed, "scale": spec.scale}
        about |= {"status": status, "options": json.dumps(spec.options), "hyper": json.dumps(spec.hyper)}
        rows += [{**about, **record} for record in stored.records()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if csv_file is not None:
        with open(csv_file, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        console.print(f"{len(rows)} records: {csv_file}")
    if parquet_file is not None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({c: [row.get(c) for row in rows] for c in columns}), parquet_file)
        console.print(f"{len(rows)} records: {parquet_file}")


@app.command()
def report(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help=STORE)],
    to: Annotated[
        Path | None, typer.Option(help="Folder of the report; by default [bold]report[/] in the folder of the runs, or here.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    watch: Annotated[int, typer.Option(min=0, help="Make it anew every so many seconds, while runs go on; Ctrl-C ends it.")] = 0,
) -> None:
    """A page to explore and share: figures, interactive curves, the grids, and a verdict on every claim of the paper."""
    from steptuned.lab.report import writing

    store = _open(context, folder)
    _runs(store)
    chosen = [] if to is None else ["--to", str(to)]
    command = shlex.join(["steptuned", "report", folder.resolve().name, *chosen])
    where = to or (folder / "report" if store == folder else Path("report"))
    try:
        page = writing.write(store, where, command, watch)
        console.print(str(page), soft_wrap=True, highlight=False)
        if open_:
            webbrowser.open(page.resolve().as_uri())
        while watch:
            time.sleep(watch)
            writing.write(store, where, command, watch)
    except OSError as error:
        stop(f"the report cannot be written to {where}: {error.strerror}; choose another folder with --to")
    except KeyboardInterrupt:
        writing.write(store, where, command)  # the last one does not refresh itself


@app.command()
def claims(
    folder: StoreArgument,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the judgements as JSON.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
) -> None:
    """Judge every claim of the paper by the runs in a folder.

    With 5 seeds or 20 instances a claim is reproduced or not reproduced, with 3 or 4 seeds consistent or inconsistent; mixed
    if scales or measures disagree; else not run.
    """
    from steptuned.lab import claims as paper
    from steptuned.lab.report import tables

    _runs(folder)
    judged = paper.judge(folder)
    shown = tables.claims(judged)
    for table in shown:
        console.print(table.for_terminal())
    markdown = "\n\n".join(table.markdown() for table in shown)
    for path, content in ((json_file, json.dumps(paper.as_data(judged), indent=1)), (markdown_file, markdown)):
        if path is not None:
            path.write_text(content + "\n")


@app.command()
def results(
    folder: StoreArgument,
    page: Annotated[Path, typer.Option("--to", help="The page to write; its figures go into a folder beside it.")],
) -> None:
    """A page in Markdown of all experiments of the paper that have runs in a folder: figures, tables, machine."""
    from steptuned.lab.report import results as report

    _runs(folder)
    written = report.write(folder, page, shlex.join(["steptuned", "results", folder.resolve().name, "--to", str(page)]))
    console.print(*map(str, written), sep="\n", soft_wrap=True)


@packed.command()
def pack(folder: StoreArgument, to: Annotated[Path, typer.Option(help="The folder to pack into.")] = Path("evidence")) -> None:
    """Pack all complete runs of a folder: one Parquet file per experiment, and a manifest with checksums."""
    with _trusted() as evidence:
        for name, entry in evidence.pack(folder, to)["files"].items():
            runs = f"{entry['runs']} runs, {entry['thinned runs']} of them thinned" if "runs" in entry else "timings"
            console.print(f"{to / name}: {runs}", soft_wrap=True, highlight=False)


@packed.command()
def unpack(
    folder: PackedArgument, to: Annotated[Path, typer.Option(help="The folder of runs to make or to add to.")] = Path("results")
) -> None:
    """Make a folder of runs from a packed one. `steptuned reproduce --out` goes on from there and runs nothing again."""
    with _trusted() as evidence:
        console.print(f"{evidence.unpack(folder, to)} runs: {to}", soft_wrap=True, highlight=False)


@packed.command("verify")
def verify_(folder: PackedArgument) -> None:
    """Check that every file of a packed folder is the one that was packed."""
    with _trusted() as evidence:
        console.print(f"{len(evidence.verify(folder)['files'])} files, all as they were packed")


# ---------------------------------------------------------------------------------------------- common


def _time(out: Path, scale: str, device: str, precision: str) -> None:
    """Measure what Table 2 is made of, problem by problem; what is measured already is not measured again."""
    from steptuned.lab.report import tables

    timings = Timings(out)
    where = device if precision == "float32" else f"{device}-{precision}"
    try:
        with console.status("") as status:
            for letter, setting in TABLE_1.items():
                if timings.load(letter, scale, where) is None:
                    status.update(f"{WALL_CLOCK}: ({letter}) {setting['title']}")
                    timings.save(measure(letter, scale, device, precision))
    except DataError as error:
        stop(str(error))
    except KeyboardInterrupt:
        errors.print(f"[yellow]stopped; what is measured is kept. Go on with:[/] {shlex.join(_command())}")
        raise typer.Exit(130) from None
    for table in tables.wall_clock(timings.sets()[scale, where]):
        console.print(table.for_terminal(), "")


def _run(asked: dict[str, list[Experiment]], illustration: bool, sweep: Sweep) -> None:
    """Run what was asked for: for each figure the experiments that are its panels."""
    from steptuned.lab.report import figures, tables
    from steptuned.lab.report.illustration import curvature_illustration

    out = sweep.folder
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"{out} cannot be made: {error.strerror}; choose another folder with --out")
    written: list[Path] = curvature_illustration(out / "figures") if illustration else []
    for experiment in itertools.chain(*asked.values()):
        if experiment.figure not in figures.FIGURES:
            stop(f"{experiment.name}: figure = {experiment.figure!r} is not one of {', '.join(figures.FIGURES)}")
        try:
            sweep.announce(experiment)
        except (DataError, EngineError) as error:
            stop(str(error))
    for name, experiments in asked.items():
        contents = [experiment.model_dump(mode="json") for experiment in experiments]
        sweep.store.remember(name, experiments[0].scale, contents, shlex.join(_command()))
    outcomes: list[Outcome] = []
    try:
        for name, experiments in asked.items():
            panels: list[Outcome] = []
            for experiment in experiments:
                panels.append(sweep.run(experiment))
                drawn = figures.draw(name, panels, sweep.results, out / "figures")
            outcomes += panels
            written += drawn
    except (Interrupted, KeyboardInterrupt) as stopped:
        errors.print(f"[yellow]{str(stopped) or 'stopped'}; nothing is lost. Go on with:[/] {shlex.join(_command())}")
        sys.stdout.flush()
        os._exit(130)  # every run can be killed, so there is nothing to wait for
    except EngineError as error:
        stop(f"{error}. Nothing is lost; go on with: {shlex.join(_command())}")
    sweep.engine.close()
    for outcome in outcomes:
        console.print(*(table.for_terminal() for table in tables.summary(outcome, sweep.results)), "")
    if written:
        console.print("figures:", *(str(path) for path in written if path.suffix == ".png"), sep="\n  ")
    if sweep.failed:
        stop(f"{len(sweep.failed)} runs failed; see failed.json in their folders under {sweep.store.folder}")


def _engine(
    asked: dict[str, list[Experiment]],
    jobs: int | None,
    dask: str | None,
    device: str,
    checkpoint_seconds: float,
    tensorboard: Path | None,
    extensions: tuple[Path, ...],
) -> Engine:
    elsewhere = dask is not None and not dask.startswith("local:")
    where = device if elsewhere else _device(device)
    double = {e.problem for experiments in asked.values() for e in experiments if PROBLEMS[e.problem].double}
    if where == "mps" and double:
        if device != "auto":
            stop(f"{', '.join(sorted(double))} computes in double precision, which mps has not; use --device cpu")
        where = "cpu"
    how = How(where, checkpoint_seconds, _tensorboard(tensorboard), extensions=extensions)
    if started_by_torchrun():
        if jobs is not None or dask is not None:
            stop("under torchrun its processes make one run after the other together: leave out --jobs and --dask")
        return _together(how)
    if dask is None:
        return Local(jobs or (CORES if where == "cpu" else 1), how)
    if jobs is not None:
        stop("--jobs and --dask cannot be given together: a cluster makes as many runs at the same time as it has workers")
    from steptuned.lab import cluster

    try:
        return cluster.connect(dask, how)
    except EngineError as error:
        stop(str(error))


def _together(how: How) -> Engine:
    """The lead's engine. The other processes stay here, and end with the lead's work."""
    ranks = Torchrun(how.device)
    how = replace(how, device=ranks.device)
    if ranks.index:
        try:
            follow(ranks, how.device)
        except KeyboardInterrupt:
            ranks.close()
            os._exit(130)
        except Exception as error:
            errors.quiet = False
            stop(f"rank {ranks.index}: {type(error).__name__}: {error}")
        raise typer.Exit
    return Together(ranks, how)


def _tensorboard(folder: Path | None) -> Path | None:
    if folder is not None and importlib.util.find_spec("tensorboard") is None:
        stop("--tensorboard needs the package tensorboard: pip install 'steptuned[tensorboard]'")
    return folder


def _asked(names: list[str], scale: Scale) -> dict[str, list[Experiment]]:
    """The experiments of the paper that are asked for: of each figure its panels."""
    files = paper_experiments()
    panels = {path.stem + panel: (path, panel) for path in files.values() for panel in panels_of(path)}
    known = [ILLUSTRATION, *files, WALL_CLOCK]
    for name in names:
        if name not in [*known, *panels, "all"]:
            stop(f"there is no experiment {name!r}; valid: all, {', '.join(known)}, or a panel such as {next(iter(panels))}")
    chosen = known if "all" in names else list(dict.fromkeys(names))
    return {
        name: [load(panels[name][0], scale.value, panels[name][1])] if name in panels else load_all(files[name], scale.value)
        for name in chosen
        if name not in (ILLUSTRATION, WALL_CLOCK)
    }


def _is_asked(name: str, names: list[str]) -> bool:
    return name in names or "all" in names


def _find_data(folder: Path | None) -> None:
    """Processes of the sweep inherit the variable."""
    if folder is not None:
        os.environ["STEPTUNED_DATA"] = str(folder.absolute())


def _with_autocast(asked: dict[str, list[Experiment]], autocast: bool) -> dict[str, list[Experiment]]:
    def changed(experiment: Experiment) -> Experiment:
        if "precision" not in PROBLEMS[experiment.problem].defaults:
            return experiment
        return experiment.model_copy(update={"options": {**experiment.options, "precision": "bfloat16"}})

    return {name: [changed(e) for e in experiments] for name, experiments in asked.items()} if autocast else asked


def _with_ranks(asked: dict[str, list[Experiment]], ranks: int) -> dict[str, list[Experiment]]:
    def changed(experiment: Experiment) -> Experiment:
        return experiment.model_copy(update={"ranks": ranks, "title": f"{experiment.title}, on {ranks} ranks"})

    return {name: [changed(e) for e in experiments] for name, experiments in asked.items()} if ranks > 1 else asked


def _titles(path: Path) -> str:
    return "; ".join(f"({panel}) {load(path, 'paper', panel).title}" for panel in panels_of(path)) or load(path, "paper").title


def _command() -> list[str]:
    """This command, as one would type it."""
    name = Path(sys.argv[0]).name
    start = [name] if name != "__main__.py" else ["python", "-m", "steptuned"]
    if started_by_torchrun():
        start = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "steptuned"]
    return [*start, *sys.argv[1:]]


def _load(path: Path, scale: Scale) -> list[Experiment]:
    try:
        return load_all(path, scale.value)
    except ExperimentError as error:
        stop(str(error))


def _device(name: str) -> str:
    name = device_here(name)
    if not is_usable(name):
        stop(f"device {name!r} cannot be used here; valid: cpu, or auto")
    return name


def _runs(folder: Path) -> list[Run]:
    if not folder.is_dir():
        stop(f"there is no folder {folder}; give the one that was given as --out")
    return Store(folder).runs()


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value) if isinstance(value, list) else value}" for key, value in values.items())
