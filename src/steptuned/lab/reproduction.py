"""From names or files of experiments to runs, figures and tables."""

import importlib.util
import itertools
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from steptuned.lab import timing
from steptuned.lab.catalogue import ILLUSTRATION, WALL_CLOCK, Figures, experiments_named, is_named
from steptuned.lab.engine import (
    Engine,
    EngineError,
    LocalEngine,
    TorchrunEngine,
    WorkerConfig,
    usable_device,
)
from steptuned.lab.experiment import Experiment, load_all
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.ranks import Torchrun, started_by_torchrun
from steptuned.lab.run import CHECKPOINT_SECONDS, follow
from steptuned.lab.search import Outcome
from steptuned.lab.sweep import Interrupted, Sweep
from steptuned.lab.terminal import RequestError, console, errors, stop

CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class RunOptions:
    """Where and how experiments are run."""

    out: Path = Path("results")
    jobs: int | None = None
    """Runs at the same time. None: one per core, or one on a GPU."""
    dask: str | None = None
    """The address of a Dask scheduler, or ``local:N``."""
    device: str = "auto"
    autocast: bool = False
    """Networks compute in bfloat16."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    tensorboard: Path | None = None
    extensions: tuple[Path, ...] = ()
    """Python files with problems, methods and figures of the user."""


def reproduce(names: list[str], scale: str, options: RunOptions) -> None:
    """Run experiments of the package by name."""
    figures = experiments_named(names, scale)
    sweep = run_figures(figures, options, illustration=is_named(ILLUSTRATION, names))
    if is_named(WALL_CLOCK, names):
        precision = "bfloat16" if options.autocast else "float32"
        time_methods(options.out, scale, sweep.engine.config.device, precision)


def run_files(files: list[Path], scale: str, options: RunOptions) -> None:
    """Run experiments that are defined in TOML files."""
    run_figures({path.stem: load_all(path, scale) for path in files}, options)


def run_figures(figures: Figures, options: RunOptions, illustration: bool = False) -> Sweep:
    """Run what is missing, draw the figures and print the tables."""
    sweep = Sweep(options.out, choose_engine(figures, options), console)
    figures = _changed(figures, options.autocast, sweep.engine.config.ranks)
    _make_folder(options.out)
    written = _illustrate(options.out) if illustration else []
    _announce(figures, sweep)
    outcomes = _sweep(figures, sweep, written)
    _summarise(outcomes, written, sweep)
    return sweep


def _changed(figures: Figures, autocast: bool, ranks: int) -> Figures:
    """The experiments with the options of the command line that change what is run."""

    def changed(experiment: Experiment) -> Experiment:
        update: dict[str, Any] = {}
        if autocast and "precision" in PROBLEMS[experiment.problem].defaults:
            update["options"] = {**experiment.options, "precision": "bfloat16"}
        if ranks > 1:
            update |= {"ranks": ranks, "title": f"{experiment.title}, on {ranks} ranks"}
        return experiment.model_copy(update=update) if update else experiment

    return {name: [changed(e) for e in experiments] for name, experiments in figures.items()}


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{out} cannot be made: {error.strerror}"
        raise RequestError(f"{reason}; choose another folder with --out") from None


def _illustrate(out: Path) -> list[Path]:
    from steptuned.lab.report.illustration import curvature_illustration

    return curvature_illustration(out / "figures")


def _announce(figures: Figures, sweep: Sweep) -> None:
    """Check that everything can be run and drawn, estimate the time, store the experiments."""
    from steptuned.lab.report.figures import FIGURES

    for experiment in itertools.chain(*figures.values()):
        if experiment.figure not in FIGURES:
            wrong = f"{experiment.name}: figure = {experiment.figure!r}"
            raise RequestError(f"{wrong} is not one of {', '.join(FIGURES)}")
        sweep.announce(experiment)
    for name, experiments in figures.items():
        contents = [experiment.model_dump(mode="json") for experiment in experiments]
        sweep.store.remember(name, experiments[0].scale, contents, shlex.join(command_line()))


def _sweep(figures: Figures, sweep: Sweep, written: list[Path]) -> list[Outcome]:
    """Run all experiments. Each figure is drawn again after each of its panels."""
    from steptuned.lab.report.figures import draw

    outcomes: list[Outcome] = []
    try:
        for name, experiments in figures.items():
            panels: list[Outcome] = []
            drawn: list[Path] = []
            for experiment in experiments:
                panels.append(sweep.run(experiment))
                drawn = draw(name, panels, sweep.results, sweep.folder / "figures")
            outcomes += panels
            written += drawn
    except (Interrupted, KeyboardInterrupt) as stopped:
        _say_continue(f"{str(stopped) or 'stopped'}; nothing is lost")
        sys.stdout.flush()
        os._exit(130)  # every run can be killed, so there is nothing to wait for
    except EngineError as error:
        stop(f"{error}. Nothing is lost; continue with: {shlex.join(command_line())}")
    sweep.engine.close()
    return outcomes


def _summarise(outcomes: list[Outcome], written: list[Path], sweep: Sweep) -> None:
    from steptuned.lab.report import tables

    for outcome in outcomes:
        summary = tables.summary(outcome, sweep.results)
        console.print(*(table.for_terminal() for table in summary), "")
    if written:
        pictures = [str(path) for path in written if path.suffix == ".png"]
        console.print("figures:", *pictures, sep="\n  ")
    if sweep.failed:
        where = f"see failed.json in their folders under {sweep.store.folder}"
        stop(f"{len(sweep.failed)} runs failed; {where}")


def time_methods(out: Path, scale: str, device: str, precision: str) -> None:
    """Measure Table 2 and print it."""
    from steptuned.lab.report import tables

    try:
        with console.status("") as status:
            timings = timing.measure_missing(out, scale, device, precision, status.update)
    except KeyboardInterrupt:
        _say_continue("stopped; finished measurements are kept")
        raise typer.Exit(130) from None
    for table in tables.wall_clock(timings):
        console.print(table.for_terminal(), "")


# -------------------------------------------------------------------------------- the engine


def choose_engine(figures: Figures, options: RunOptions) -> Engine:
    """Where runs are executed: processes of this machine, a Dask cluster, or torchrun's ranks."""
    device = _device(figures, options)
    _check_tensorboard(options.tensorboard)
    seconds, extensions = options.checkpoint_seconds, options.extensions
    config = WorkerConfig(device, seconds, options.tensorboard, extensions=extensions)
    jobs, dask = options.jobs, options.dask
    if started_by_torchrun():
        if jobs is not None or dask is not None:
            together = "under torchrun all processes work on one run at a time"
            raise RequestError(f"{together}: leave out --jobs and --dask")
        return _join_ranks(config)
    if dask is None:
        return LocalEngine(jobs or (CORES if device == "cpu" else 1), config)
    if jobs is not None:
        reason = "a cluster executes as many runs at the same time as it has workers"
        raise RequestError(f"--jobs and --dask cannot be given together: {reason}")
    from steptuned.lab import cluster

    return cluster.connect(dask, config)


def _device(figures: Figures, options: RunOptions) -> str:
    """The device to use; on a cluster, each worker chooses its own."""
    is_elsewhere = options.dask is not None and not options.dask.startswith("local:")
    device = options.device if is_elsewhere else usable_device(options.device)
    problems = {experiment.problem for experiment in itertools.chain(*figures.values())}
    double = sorted(problem for problem in problems if PROBLEMS[problem].double)
    if device != "mps" or not double:
        return device
    if options.device != "auto":
        reason = "double precision, which mps does not support"
        raise RequestError(f"{', '.join(double)} computes in {reason}; use --device cpu")
    return "cpu"


def _check_tensorboard(folder: Path | None) -> None:
    if folder is not None and importlib.util.find_spec("tensorboard") is None:
        install = "pip install 'steptuned[tensorboard]'"
        raise RequestError(f"--tensorboard needs the package tensorboard: {install}")


def _join_ranks(config: WorkerConfig) -> Engine:
    """The engine of the lead. The other ranks follow it here until its work is done."""
    ranks = Torchrun(config.device)
    config = replace(config, device=ranks.device)
    if not ranks.index:
        return TorchrunEngine(ranks, config)
    try:
        follow(ranks, config.device)
    except KeyboardInterrupt:
        ranks.close()
        os._exit(130)
    except Exception as error:
        errors.quiet = False
        stop(f"rank {ranks.index}: {type(error).__name__}: {error}")
    raise typer.Exit


# -------------------------------------------------------------------------------- the command


def command_line() -> list[str]:
    """This command, as the user typed it."""
    name = Path(sys.argv[0]).name
    start = [name] if name != "__main__.py" else ["python", "-m", "steptuned"]
    if started_by_torchrun():
        processes = os.environ["LOCAL_WORLD_SIZE"]
        start = ["torchrun", "--nproc-per-node", processes, "-m", "steptuned"]
    return [*start, *sys.argv[1:]]


def _say_continue(sentence: str) -> None:
    errors.print(f"[yellow]{sentence}. Continue with:[/] {shlex.join(command_line())}")
