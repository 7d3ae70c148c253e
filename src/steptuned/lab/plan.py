"""What an experiment will cost, from a few steps made here: runs, time, arithmetic and disk."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from steptuned.lab.experiment import Experiment
from steptuned.lab.methods import Driver
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.run import synchronise
from steptuned.lab.spec import RunSpec


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
    """Measure a few steps of each method, and count."""
    options = {**PROBLEMS[experiment.problem].defaults, **experiment.options}
    problem = PROBLEMS[experiment.problem](options, 0, torch.device(device))
    spec = experiment.spec(experiment.entries[0], experiment.entries[0].grid()[0], 0, 0, experiment.budget)
    plan = Plan()
    cost: dict[str, float] = {}
    evaluation: float | None = None
    flop: dict[str, float] = {}
    for entry, (count, back_propagations) in zip(experiment.entries, experiment.expected_back_propagations().values(), strict=True):
        driver = Driver(entry.method, problem, entry.grid()[0])
        if entry.method not in cost:
            cost[entry.method] = _seconds(driver.advance, 0.2, device)
            flop[entry.method] = _flop(driver.advance)
            if evaluation is None:
                evaluation = _evaluation(problem, cost[entry.method])
        records = count * _records(back_propagations // count, spec)
        evaluations = records * (evaluation or 0.0)
        forward = records * _forward(problem)
        plan += Plan(
            count,
            back_propagations,
            back_propagations * cost[entry.method] + evaluations,
            flop[entry.method] * (back_propagations + forward),
            records * _record_bytes(driver),
        )
    return plan


def _records(budget: int, spec: RunSpec) -> int:
    """How many there are in the log of a run of such a length."""
    done, records = 0, 1
    while done < budget:
        done = min(budget, spec.next_record(done))
        records += 1
    return records


def _forward(problem: Problem) -> float:
    """An evaluation in back-propagations: it is a forward pass, a third of one, over each of its mini-batches."""
    return -(-problem.evaluated // problem.stream.batch) / 3


def _evaluation(problem: Problem, back_propagation: float) -> float:
    """How long an evaluation takes: measured where that is quick, else a third of a back-propagation a mini-batch."""
    if problem.evaluated > 5_000:
        return _forward(problem) * back_propagation
    start = time.perf_counter()
    problem.evaluate()
    return time.perf_counter() - start


def _record_bytes(driver: Driver) -> int:
    """About: with numbers of twenty digits, and as many measures as most problems have."""
    measures = dict.fromkeys(("loss", "plain loss", "test loss", "accuracy"), 0.12345678901234567)
    counts = {"bp": 100000, "batches": 100000, "samples": 10000000, "seconds": 1000.123456}
    return len(json.dumps({**counts, **measures, **dict.fromkeys(driver.diagnostics(), 0.12345678901234567)})) + 1


def _flop(work: Callable[[], Any]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def _seconds(work: Callable[[], Any], at_least: float, device: str) -> float:
    """How long it takes, the first time left out: a mean over so many seconds, and over two at least."""
    work()
    synchronise(torch.device(device))
    start, times = time.perf_counter(), 0
    while times < 2 or time.perf_counter() - start < at_least:
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
