"""What an experiment will cost, from a few steps and evaluations made here: runs, time, arithmetic and disk."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from steptuned.lab.experiment import Budget, Experiment
from steptuned.lab.measures import COMPARED
from steptuned.lab.methods import Driver
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.run import execute, folder_of, synchronise
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Log, Store


@dataclass
class Plan:
    """Upper limits: stages share runs, and diverged ones are short."""

    runs: int = 0
    back_propagations: int = 0
    seconds: float = 0.0
    """Of one job, evaluations included."""
    flop: float = 0.0
    """Floating-point operations of the networks, as torch counts them: matrix products and convolutions."""
    log_bytes: float = 0.0
    """Of the logs, which are what stays; a checkpoint goes when its run has ended."""

    def __add__(self, other: "Plan") -> "Plan":
        return Plan(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def estimate(experiment: Experiment, device: str) -> Plan:
    """Measure a few steps and an evaluation of each method, and count."""
    options = {**PROBLEMS[experiment.problem].defaults, **experiment.options}
    problem = PROBLEMS[experiment.problem](options, 0, torch.device(device))
    plan = Plan()
    cost: dict[str, float] = {}
    flop: dict[str, float] = {}
    record = overhead = None
    for entry in experiment.entries:
        driver = Driver(entry.method, problem, entry.grid()[0])
        if entry.method not in cost:
            cost[entry.method] = _seconds(driver.advance, 0.3, device)
            flop[entry.method] = _flop(driver.advance)
        if record is None or overhead is None:
            part = _part(experiment.problem, options, problem)
            few = problem if part is options else PROBLEMS[experiment.problem](part, 0, torch.device(device))
            seconds = _record_seconds(few, driver, device)
            overhead = _overhead(experiment, part, seconds, device)
            record = seconds * problem.evaluated / few.evaluated
        for count, spec in experiment.expected_runs(entry):
            records = _records(spec)
            seconds = overhead + spec.budget * cost[entry.method] + records * record
            back_propagations = spec.budget + records * _forward(problem)
            plan += Plan(
                count,
                count * spec.budget,
                count * seconds,
                count * back_propagations * flop[entry.method],
                count * records * _record_bytes(driver),
            )
    return plan


def _records(spec: RunSpec) -> int:
    """How many there are in the log of a run."""
    done, records = 0, 1
    while done < spec.budget:
        done = min(spec.budget, spec.next_record(done))
        records += 1
    return records


def _forward(problem: Problem) -> float:
    """An evaluation in back-propagations: it is a forward pass, a third of one, over each of its mini-batches."""
    return -(-problem.evaluated // problem.stream.batch) / 3


def _part(name: str, options: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """Options that make an evaluation quick: about 16 mini-batches, the same share of test rows."""
    batch, evaluated = problem.stream.batch, problem.evaluated
    if evaluated <= 16 * batch or "test_rows" not in options:
        return options
    rows = options.get("eval_rows") or PROBLEMS[name].rows_of(options)
    rows = min(rows, evaluated - 1)

    def shrunk(there: int) -> int:
        return min(there, max(1, round(16 * there / evaluated)) * batch)

    part = {**options, "rows": shrunk(rows), "test_rows": shrunk(evaluated - rows)}
    return part | ({"eval_rows": 0} if "eval_rows" in options else {})


def _record_seconds(problem: Problem, driver: Driver, device: str) -> float:
    """How long a record takes: the evaluation and a line of the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder) / "log.jsonl")
        seconds = _seconds(lambda: log.append({**problem.evaluate(), **driver.diagnostics()}), 0.1, device)
        log.close()
    return seconds


def _overhead(experiment: Experiment, part: dict[str, Any], record: float, device: str) -> float:
    """How long a run takes that does next to nothing: its folder, its problem, its files."""
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
    """About the size of a record, with all measures by which methods are compared."""
    counts = {"bp": 100000, "batches": 100000, "samples": 10000000, "seconds": 1000.123456}
    measures = [*(measure.key for measure in COMPARED), *driver.diagnostics()]
    return len(json.dumps({**counts, **dict.fromkeys(measures, 0.12345678901234567)})) + 1


def _flop(work: Callable[[], Any]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def _seconds(work: Callable[[], Any], at_least: float, device: str) -> float:
    """Mean duration of a call, measured for at least this long after two calls to warm up.

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
    """In words that fit the length."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
