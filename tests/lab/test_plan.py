"""The estimated cost of an experiment."""

import time

import pytest
import torch

from steptuned.lab import plan
from steptuned.lab.experiment import load, paper_experiments
from steptuned.lab.problems import PROBLEMS
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
    experiment = experiment_of(tmp_path, "digits")
    planned = plan.estimate(experiment, "cpu")
    assert (planned.runs, planned.back_propagations, planned.log_bytes) == run_all(
        experiment, tmp_path / "store"
    )


@pytest.mark.parametrize(
    ("problem", "options"),
    [("digits", ""), ("images", 'network = "lenet", rows = 256, eval_rows = 64, batch = 32')],
)
def test_the_planned_time_matches_the_runs(small, tmp_path, monkeypatch, problem, options):
    """Planned and real time differ by at most a factor of 1.6.

    CPU time is measured, since other processes disturb it less.
    """
    monkeypatch.setattr(plan.time, "perf_counter", time.process_time)
    experiment = experiment_of(tmp_path, problem, options)
    ratios = []
    for attempt in range(3):
        planned = plan.estimate(experiment, "cpu").seconds
        start = time.process_time()
        run_all(experiment, tmp_path / str(attempt))
        ratios.append(planned / (time.process_time() - start))
        if 1 / 1.6 < ratios[-1] < 1.6:
            return
    pytest.fail(f"planned over real: {ratios}")


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
