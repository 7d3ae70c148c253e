"""Execute an experiment stage by stage with an engine, and show the progress."""

import statistics
import time
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path

import torch
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

from steptuned.lab.engine import Engine, WorkerConfig, device_here, ignore_interrupts, is_usable
from steptuned.lab.experiment import Experiment
from steptuned.lab.extensions import extend
from steptuned.lab.plan import Plan, duration, estimate
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.results import Results
from steptuned.lab.run import folder_of
from steptuned.lab.search import Outcome, stages
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Run, Store

SECONDS_PER_LINE = 60.0


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user stopped the sweep. Nothing that was computed is lost."""

    def __init__(self, done: int, total: int, remark: str) -> None:
        super().__init__(f"stopped with {done} of {total} runs of this stage done{remark}")


class Sweep:
    """Runs experiments in a folder. Runs that are complete are not executed again."""

    def __init__(self, folder: Path, engine: Engine, console: Console) -> None:
        self.folder = folder
        self.store = Store(folder)
        self.results = Results(self.store)
        self.engine, self.console = engine, console
        self.failed: list[Run] = []

    def run(self, experiment: Experiment) -> Outcome:
        """Execute the missing runs. Raises :class:`Interrupted` on Ctrl-C."""
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
        """Print the number of runs and an estimate of the time."""
        jobs, ranks = self.engine.jobs, self.engine.config.ranks
        plans = self.engine.measure(partial(_estimate, experiment))
        seconds = statistics.mean(plan.seconds for plan in plans)
        time = duration(seconds / jobs / ranks)
        of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
        self.console.print(
            f"[bold]{experiment.name}[/] ({experiment.scale}): {experiment.title}\n"
            f"  at most {plans[0].runs} runs, about {time} with {jobs} job{'s' * (jobs > 1)}"
            f"{of_ranks}; "
            "complete runs are not repeated"
        )

    def _stage(self, title: str, specs: list[RunSpec]) -> None:
        runs = {spec.identity: folder_of(self.store, spec) for spec in specs}
        missing = [run for run in runs.values() if run.result() is None]
        if not missing:
            return
        for run in missing:
            run.clear_failures()
        with self._progress() as progress:
            task = progress.add_task(
                title, total=len(runs), completed=len(runs) - len(missing), loss=""
            )
            said, lines = "", _Lines(self.console)
            try:
                for news in self.engine.process(list(missing)):
                    if isinstance(news, Run):
                        missing.remove(news)
                        self._judge(news)
                        progress.advance(task)
                        lines.tell(f"{title}: {len(runs) - len(missing)} of {len(runs)} runs")
                    elif news != said:
                        self.console.print(f"  [yellow]{news or 'continuing'}[/]")
                        said = news
                    progress.update(task, loss=self._losses(missing))
            except KeyboardInterrupt:
                ignore_interrupts()  # the user may press Ctrl-C twice
                remark = self.engine.stop()
                done = sum(run.result() is not None for run in runs.values())
                raise Interrupted(done, len(runs), remark) from None

    def _judge(self, run: Run) -> None:
        failure = None if run.result() else run.failure()
        if failure is not None:
            self.failed.append(run)
            self.console.print(f"[red]failed:[/] {run.folder.name}: {failure['reason']}")

    def _losses(self, runs: list[Run]) -> str:
        """The losses of the runs that are being executed."""
        records = islice((run.last_record() for run in runs if run.claimant()), self.engine.jobs)
        losses = [f"{record['loss']:.3g} at {record['bp']}" for record in records if record]
        return "loss " + ", ".join(losses) if losses else ""

    def _progress(self) -> Progress:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("runs"),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("[dim]{task.fields[loss]}"),
        )
        return Progress(*columns, console=self.console)


def _estimate(experiment: Experiment, config: WorkerConfig) -> Plan:
    """The estimate of a process with the threads and the device of a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    extend(config.extensions)
    device = device_here(config.device, PROBLEMS[experiment.problem].double)
    plan = estimate(experiment, device if is_usable(device) else "cpu")
    torch.set_num_threads(threads)
    return plan


class _Lines:
    """Progress as lines, at most one per minute, where a bar cannot be shown, as in a log file."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, time.monotonic()

    def tell(self, sentence: str) -> None:
        now = time.monotonic()
        if not self._console.is_interactive and now - self._last >= SECONDS_PER_LINE:
            self._last = now
            line = f"  {datetime.now():%Y-%m-%d %H:%M} {sentence}"
            self._console.print(line, markup=False, soft_wrap=True)


class _Rate(ProgressColumn):
    """Runs per second or per minute."""

    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{60 * speed:.1f}/min", style="dim")
