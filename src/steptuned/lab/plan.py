"""What an experiment costs on this machine: runs, time, arithmetic and disk.

The estimate comes from a few steps and evaluations of each method.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from steptuned.lab.catalogue import Figures
from steptuned.lab.driver import Driver, no_advice
from steptuned.lab.engine import device_here, usable_device
from steptuned.lab.experiment import Budget, Experiment
from steptuned.lab.measures import COMPARED
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.run import execute, folder_of, synchronise
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Log, Store
from steptuned.lab.terminal import console, open_table


@dataclass
class Plan:
    """Upper bounds: stages share runs, and diverged runs are short."""

    runs: int = 0
    back_propagations: int = 0
    seconds: float = 0.0
    """With one job, including evaluations."""
    flop: float = 0.0
    """Floating-point operations of matrix products and convolutions, counted by torch."""
    log_bytes: float = 0.0
    """Of the logs. Checkpoints are deleted when their run ends."""

    def __add__(self, other: "Plan") -> "Plan":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Plan(*(a + b for a, b in pairs))


def table_of(figures: Figures, device: str) -> Table:
    """The cost of each experiment and of all together."""
    where = device if device == "auto" else usable_device(device)
    table = open_table()
    for column in ("experiment", "runs", "bp", "one job here", "PFLOP", "logs, MB"):
        justify: Any = "left" if column == "experiment" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    total = Plan()
    with console.status("") as status:
        for experiment in itertools.chain(*figures.values()):
            status.update(experiment.name)
            double = PROBLEMS[experiment.problem].double
            plan = estimate(experiment, device_here(where, double))
            table.add_row(experiment.name, *_cells(plan))
            total += plan
    table.add_row("all", *_cells(total))
    return table


def _cells(plan: Plan) -> list[str]:
    counts = [f"{plan.runs:,}", f"{plan.back_propagations:,}", duration(plan.seconds)]
    return [*counts, f"{plan.flop / 1e15:,.3g}", f"{plan.log_bytes / 1e6:,.3g}"]


@dataclass(frozen=True)
class Cost:
    """What a method costs per back-propagation, and the size of its records."""

    seconds: float
    flop: float
    record_bytes: int


@no_advice()
def estimate(experiment: Experiment, device: str) -> Plan:
    """Measure a few steps of each method and an evaluation, and multiply."""
    problem_class = PROBLEMS[experiment.problem]
    options = experiment.problem_options.as_dict()
    problem = problem_class.from_dict(options, 0, torch.device(device))
    costs: dict[str, Cost] = {}
    for entry in experiment.entries:
        if entry.method not in costs:
            driver = Driver(entry.method, problem, entry.grid()[0])
            seconds, flop = _seconds(driver.advance, 0.3, device), _flop(driver.advance)
            costs[entry.method] = Cost(seconds, flop, _record_bytes(driver))
    record, overhead = _record_and_overhead(experiment, options, problem, driver, device)
    plan = Plan()
    for entry in experiment.entries:
        cost = costs[entry.method]
        for count, spec in experiment.expected_runs(entry):
            records = _records(spec)
            seconds = overhead + spec.budget * cost.seconds + records * record
            flop = (spec.budget + records * _forward(problem)) * cost.flop
            one = Plan(1, spec.budget, seconds, flop, records * cost.record_bytes)
            plan += Plan(*(count * value for value in vars(one).values()))
    return plan


def _record_and_overhead(
    experiment: Experiment,
    options: dict[str, Any],
    problem: Problem,
    driver: Driver,
    device: str,
) -> tuple[float, float]:
    """Seconds of a record, and of a run apart from its steps and records."""
    part = _part(experiment.problem, options, problem)
    few = problem
    if part is not options:
        few = PROBLEMS[experiment.problem].from_dict(part, 0, torch.device(device))
    seconds = _record_seconds(few, driver, device)
    overhead = _overhead(experiment, part, seconds, device)
    return seconds * problem.evaluated / few.evaluated, overhead


def _records(spec: RunSpec) -> int:
    """The number of records in the log of a run."""
    done, records = 0, 1
    while done < spec.budget:
        done = min(spec.budget, spec.next_record(done))
        records += 1
    return records


def _forward(problem: Problem) -> float:
    """The cost of an evaluation in back-propagations: a forward pass is about a third of one."""
    return -(-problem.evaluated // problem.stream.batch) / 3


def _part(name: str, options: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """Options for a quick evaluation: about 16 mini-batches, with the same share of test rows.

    Only for images: other problems decide in another way which training rows they evaluate.
    """
    batch, evaluated = problem.stream.batch, problem.evaluated
    if evaluated <= 16 * batch or "eval_rows" not in options:
        return options
    rows = options["eval_rows"] or PROBLEMS[name].Options(**options).training_rows
    rows = min(rows, evaluated - 1)

    def shrunk(there: int) -> int:
        return min(there, max(1, round(16 * there / evaluated)) * batch)

    test_rows = shrunk(evaluated - rows)
    return {**options, "rows": shrunk(rows), "test_rows": test_rows, "eval_rows": 0}


def _record_seconds(problem: Problem, driver: Driver, device: str) -> float:
    """Seconds of a record: the evaluation and a line of the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder) / "log.jsonl")

        def record() -> None:
            log.append({**problem.evaluate(), **driver.diagnostics()})

        seconds = _seconds(record, 0.1, device)
        log.close()
    return seconds


def _overhead(experiment: Experiment, part: dict[str, Any], record: float, device: str) -> float:
    """Seconds of a run with almost no steps: for its folder, its problem and its files."""
    entry = experiment.entries[0]
    few = experiment.model_copy(update={"options": part})
    spec = few.spec(entry, entry.grid()[0], 0, 0, Budget(iterations=1))
    with tempfile.TemporaryDirectory() as folder:
        run = folder_of(Store(Path(folder)), spec)
        start = time.perf_counter()
        execute(run, {}, device)
        seconds = time.perf_counter() - start
    return max(0.0, seconds - 2 * record)


def _record_bytes(driver: Driver) -> int:
    """The approximate size of a record with all measures by which methods are compared."""
    counts = {"bp": 100000, "batches": 100000, "samples": 10000000, "seconds": 1000.123456}
    measures = [*(measure.key for measure in COMPARED), *driver.diagnostics()]
    return len(json.dumps({**counts, **dict.fromkeys(measures, 0.12345678901234567)})) + 1


def _flop(work: Callable[[], Any]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def _seconds(work: Callable[[], Any], at_least: float, device: str) -> float:
    """Mean seconds of a call, measured for at least this long after two calls to warm up.

    The number of calls is even, because the two passes of Step-Tuned SGD differ.
    """
    for _ in range(2):
        work()
    synchronise(torch.device(device))
    start, times = time.perf_counter(), 0
    while times < 4 or times % 2 or time.perf_counter() - start < at_least:
        work()
        synchronise(torch.device(device))
        times += 1
    return (time.perf_counter() - start) / times


def duration(seconds: float) -> str:
    """Seconds as text, in a unit that fits."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
