"""Many runs: grid first, then the winners; in parallel, skipping what is done, surviving workers that die."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from joblib.externals.loky import get_reusable_executor
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from steptuned.lab.experiment import Experiment, Outcome, stages
from steptuned.lab.methods import Driver
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.run import CHECKPOINT_SECONDS, environment_now, execute, folder_of, name_of
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import COMPLETE, Run, Status, Store


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The sweep was stopped by the user; nothing that was computed is lost."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"stopped with {done} of {total} runs of this stage done")


class Results:
    """The complete runs of a store, as far as they were asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._last: dict[str, dict[str, Any] | None] = {}

    def run(self, spec: RunSpec) -> Run:
        return self.store.find(spec, name_of(spec))

    def last(self, spec: RunSpec) -> dict[str, Any] | None:
        if spec.identity not in self._last:
            result = self.run(spec).result()
            finished = result is not None and result["status"] == "finished"
            if result is None:
                return None
            self._last[spec.identity] = result["last"] if finished else None
        return self._last[spec.identity]

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        run = self.run(spec)
        return run.records() if run.result() is not None else []


class Forgiving(Results):
    """Reads what can be read, and remembers what cannot."""

    def __init__(self, store: Store, damaged: list[str]) -> None:
        super().__init__(store)
        self.damaged = damaged
        self._begun: dict[str, list[dict[str, Any]]] = {}

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        return self.begun(spec) if self.run(spec).result() is not None else []

    def begun(self, spec: RunSpec) -> list[dict[str, Any]]:
        """The records so far, of unfinished runs too."""
        if spec.identity not in self._begun:
            try:
                records = self.run(spec).records()
                if not all(isinstance(record, dict) and {"bp", "loss"} <= record.keys() for record in records):
                    raise ValueError(f"{self.run(spec).log_path} has lines of another kind; delete its folder and run it again")
                self._begun[spec.identity] = records
            except (ValueError, OSError) as error:
                self.damaged.append(str(error))
                self._begun[spec.identity] = []
        return self._begun[spec.identity]


class Sweep:
    """Runs experiments on this machine."""

    def __init__(
        self,
        folder: Path,
        jobs: int,
        console: Console,
        device: str = "cpu",
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        tensorboard: Path | None = None,
    ) -> None:
        self.folder = folder
        self.store = Store(folder)
        self.results = Results(self.store)
        self.jobs, self.console, self.device = jobs, console, device
        self.checkpoint_seconds, self.tensorboard = checkpoint_seconds, tensorboard
        self.threads = max(1, (os.cpu_count() or 1) // jobs)
        self.environment = environment_now(device, self.threads)
        self.failed: list[Run] = []

    def run(self, experiment: Experiment) -> Outcome:
        """Run what is missing and say what came out. Raises :class:`Interrupted` on Ctrl-C."""
        plan = stages(experiment, self.results)
        name, specs = next(plan)
        while True:
            self._stage(f"{experiment.name}: {name}", specs)
            try:
                name, specs = next(plan)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome

    def announce(self, experiment: Experiment) -> None:
        """Print how many runs there are and about how long they take."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        runs, seconds = estimate(experiment, self.device)
        torch.set_num_threads(threads)
        self.console.print(
            f"[bold]{experiment.name}[/] ({experiment.scale}): {experiment.title}\n"
            f"  at most {runs} runs, about {duration(seconds / self.jobs)} with {self.jobs} job{'s' * (self.jobs > 1)}; "
            f"what is done already is not run again"
        )

    def _stage(self, title: str, specs: list[RunSpec]) -> None:
        runs = {spec.identity: folder_of(self.store, spec) for spec in specs}
        missing = [run for run in runs.values() if run.result() is None]
        if not missing:
            return
        for run in missing:
            if run.was_interrupted():
                (run.folder / "running.json").unlink(missing_ok=True)
        with self._progress() as progress:
            task = progress.add_task(title, total=len(runs), completed=len(runs) - len(missing), loss="")
            try:
                self._work(missing, progress, task)
            except KeyboardInterrupt:
                _ignore_interrupts()  # the user may press it twice
                self._executor(self.jobs).shutdown(wait=False, kill_workers=True)
                done = sum(run.result() is not None for run in runs.values())
                raise Interrupted(done, len(runs)) from None

    def _work(self, runs: list[Run], progress: Progress, task: Any) -> None:
        """Run them all. Those whose process died are tried once more, each alone; who dies again has failed."""
        before = progress.tasks[task].completed
        total = len(runs)
        while runs:
            suspects = self._pool(runs, self.jobs, progress, task)
            for run in suspects:
                if self._pool([run], 1, progress, task):
                    self._give_up(run, "its process died twice")
            runs = [run for run in runs if run.status() not in (*COMPLETE, "failed")]
            progress.update(task, completed=before + total - len(runs))

    def _pool(self, runs: list[Run], jobs: int, progress: Progress, task: Any) -> list[Run]:
        """Run in parallel until all is done or a process dies. Returns the runs that may have killed it."""
        executor = self._executor(jobs)
        arguments = (self.environment, self.device, self.threads, self.checkpoint_seconds, self.tensorboard)
        futures: dict[Future[tuple[Status, str]], Run] = {executor.submit(work, run.folder, *arguments): run for run in runs}
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    status, reason = future.result()
                    if status == "failed":
                        self._give_up(futures[future], reason)
                    progress.advance(task)
                self._show_losses([futures[future] for future in pending if future.running()], progress, task)
        except BrokenProcessPool:
            return [run for run in runs if run.was_interrupted()]
        return []

    def _executor(self, jobs: int) -> Any:
        return get_reusable_executor(max_workers=jobs, timeout=300, initializer=_ignore_interrupts)

    def _give_up(self, run: Run, reason: str) -> None:
        run.fail(reason)
        self.failed.append(run)
        self.console.print(f"[red]failed:[/] {run.folder.name}: {reason}")

    def _show_losses(self, runs: list[Run], progress: Progress, task: Any) -> None:
        records = [run.last_record() for run in runs[: self.jobs]]
        losses = [f"{record['loss']:.3g} at {record['bp']}" for record in records if record]
        progress.update(task, loss="loss " + ", ".join(losses) if losses else "")

    def _progress(self) -> Progress:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("runs"),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[loss]}"),
        )
        return Progress(*columns, console=self.console)


class _Rate(ProgressColumn):
    """Runs a second, or a minute."""

    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{60 * speed:.1f}/min", style="dim")


def work(
    folder: Path,
    environment: dict[str, Any],
    device: str,
    threads: int,
    checkpoint_seconds: float,
    tensorboard: Path | None = None,
) -> tuple[Status, str]:
    """What a worker does with one run."""
    torch.set_num_threads(threads)
    try:
        return execute(Run(folder), environment, device, checkpoint_seconds, tensorboard), ""
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def outcome_of(experiment: Experiment, results: Results) -> Outcome:
    """What an experiment came to, from a store, running nothing: what is not there is missing."""
    plan = stages(experiment, results)
    try:
        while True:
            next(plan)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def estimate(experiment: Experiment, device: str) -> tuple[int, float]:
    """How many runs an experiment has at most, and how many seconds of one job they take, from a few steps of each method."""
    options = {**PROBLEMS[experiment.problem].defaults, **experiment.options}
    problem = PROBLEMS[experiment.problem](options, 0, torch.device(device))
    log_every = experiment.spec(experiment.entries[0], experiment.entries[0].grid()[0], 0, 0, experiment.budget).log_every
    runs, seconds = 0, 0.0
    cost: dict[str, float] = {}
    evaluation: float | None = None
    for entry, (count, back_propagations) in zip(experiment.entries, _counts(experiment), strict=True):
        if entry.method not in cost:
            cost[entry.method] = _seconds(Driver(entry.method, problem, entry.grid()[0]).advance, 0.2)
            if evaluation is None:
                evaluation = _evaluation(problem, cost[entry.method])
        runs += count
        seconds += back_propagations * cost[entry.method] + (count + back_propagations / log_every) * (evaluation or 0.0)
    return runs, seconds


def _counts(experiment: Experiment) -> Iterator[tuple[int, int]]:
    yield from experiment.expected_back_propagations().values()


def _evaluation(problem: Problem, back_propagation: float) -> float:
    """How long an evaluation takes: measured where that is quick, else a third of a back-propagation a mini-batch."""
    if problem.stream.rows > 5_000:
        return problem.stream.per_epoch * back_propagation / 3
    start = time.perf_counter()
    problem.evaluate()
    return time.perf_counter() - start


def _seconds(work: Callable[[], Any], at_least: float) -> float:
    """How long it takes, the first time left out: a mean over so many seconds, and over two at least."""
    work()
    start, times = time.perf_counter(), 0
    while times < 2 or time.perf_counter() - start < at_least:
        work()
        times += 1
    return (time.perf_counter() - start) / times


def duration(seconds: float) -> str:
    """In words that fit the length."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
