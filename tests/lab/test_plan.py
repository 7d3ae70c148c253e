"""The estimated cost of an experiment."""

import pytest
import torch

from steptuned.lab import plan
from steptuned.lab.driver import Driver
from steptuned.lab.experiment import load, paper_experiments
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import NetworkProblem
from steptuned.lab.results import Results
from steptuned.lab.run import execute, folder_of
from steptuned.lab.search import stages
from steptuned.lab.store import Store

FILE = """
title = "a test"
figure = "loss"
problem = "{problem}"
seeds = 2
budget = {{ epochs = 6 }}
log_every = {{ epochs = 2 }}
log_early = 4
options = {{ {options} }}
[selection]
after = {{ epochs = 2 }}
[methods.sgd]
lr = [0.01, 0.02]
[methods.step-tuned-sgd]
lr = [0.01, 0.02]
[methods.twice]
method = "sgd"
uses = 2
follows = "step-tuned-sgd"
"""


def experiment_of(tmp_path, problem, options=""):
    path = tmp_path / "mine.toml"
    path.write_text(FILE.format(problem=problem, options=options))
    return load(path, "paper")


def run_all(experiment, folder):
    """Execute all stages here. Returns the numbers of runs, back-propagations and records."""
    results = Results(Store(folder))
    made = []
    todo = stages(experiment, results)
    try:
        while True:
            for spec in next(todo)[1]:
                run = folder_of(results.store, spec)
                assert run.result() is None
                assert execute(run, {}) == "finished"
                made.append(run.records())
    except StopIteration:
        return len(made), sum(records[-1]["bp"] for records in made), sum(map(len, made))


def test_a_plan_counts_every_run_record_and_control(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_record_bytes", lambda driver: 1)
    experiment = experiment_of(tmp_path, "regression")
    planned = plan.estimate(experiment, "cpu")
    assert (planned.runs, planned.back_propagations, planned.log_bytes) == run_all(
        experiment, tmp_path / "store"
    )


class Clock:
    """A clock that only moves when it is told to, so that the test does not depend on timing."""

    def __init__(self):
        self.now = 0.0

    def moved_by(self, seconds, method):
        """The method, which from now on also takes this many seconds of the clock."""

        def slow(*args, **kwargs):
            self.now += seconds(*args, **kwargs)
            return method(*args, **kwargs)

        return slow


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        ("images", 'network = "lenet", rows = 120, test_rows = 40, eval_rows = 80, batch = 4'),
        ("text", "rows = 100, test_rows = 40, batch = 4, context = 8, width = 8, depth = 1"),
    ],
)
def test_the_planned_time_is_that_of_the_runs(small, tmp_path, monkeypatch, problem, options):
    """A step takes 1 s, each mini-batch of an evaluation 0.5 s. The clock counts nothing else."""
    clock = Clock()
    monkeypatch.setattr(plan.time, "perf_counter", lambda: clock.now)
    advance = clock.moved_by(lambda driver: 1.0, Driver.advance)
    monkeypatch.setattr(Driver, "advance", advance)

    def evaluation(problem, rows, measured):
        return 0.5 * len(rows.split(problem.stream.batch))

    means = clock.moved_by(evaluation, NetworkProblem._means)
    monkeypatch.setattr(NetworkProblem, "_means", means)
    experiment = experiment_of(tmp_path, problem, options)
    planned = plan.estimate(experiment, "cpu")
    start = clock.now
    run_all(experiment, tmp_path / "store")
    # The plan takes the step of its one-step run for a part of the set-up of every run.
    assert planned.seconds - planned.runs == pytest.approx(clock.now - start, rel=0.02)


def test_a_long_evaluation_is_timed_on_a_subset_of_the_rows(small):
    experiment = load(paper_experiments()["figure-6"], "paper", "f")
    options = {**experiment.problem_options.as_dict(), "batch": 2}
    problem = PROBLEMS["images"].from_dict(options, 0, torch.device("cpu"))
    part = plan._part("images", options, problem)
    few = PROBLEMS["images"].from_dict(part, 0, torch.device("cpu"))
    assert problem.evaluated == 360
    assert few.evaluated == 32
    assert len(few.train) / len(few.test) == pytest.approx(300 / 60, rel=0.4)
    quick = {**options, "batch": 32}
    assert (
        plan._part("images", quick, PROBLEMS["images"].from_dict(quick, 0, torch.device("cpu")))
        is quick
    )
    fewer = {**options, "eval_rows": 60, "batch": 4}
    part = plan._part("images", fewer, PROBLEMS["images"].from_dict(fewer, 0, torch.device("cpu")))
    assert (part["rows"], part["test_rows"], part["eval_rows"]) == (32, 32, 0)
