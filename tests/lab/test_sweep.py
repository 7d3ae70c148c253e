"""Sweeps are parallel, resumable, and survive a run that kills its worker."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from rich.console import Console

from processes import PATIENCE
from specs import make_spec
from steptuned.lab import sweep as sweep_module
from steptuned.lab.engine import LocalEngine, WorkerConfig, share
from steptuned.lab.experiment import load
from steptuned.lab.plan import duration, estimate
from steptuned.lab.problems.regression import Regression
from steptuned.lab.results import outcome_of
from steptuned.lab.run import execute, folder_of
from steptuned.lab.store import Store
from steptuned.lab.sweep import Sweep
from test_store import numbers

EXPERIMENT = """
title = "a small sweep"
figure = "loss"
problem = "regression"
seeds = 2
budget = { epochs = 10 }
log_every = 10
[selection]
after = { epochs = 4 }
[methods.sgd]
decay = "iteration"
lr = [1.0, 10.0, 100.0]
[methods.step-tuned-sgd]
decay = "iteration"
lr = [1.0, 10.0]
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    return load(path, "paper")


@pytest.fixture
def sweep(tmp_path):
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    sweep = Sweep(tmp_path / "out", LocalEngine(2, WorkerConfig()), console)
    yield sweep
    sweep.console.file.close()


@pytest.fixture(scope="module", autouse=True)
def _workers():
    """The sweeps of this file share their workers, which are slow to start."""
    yield
    LocalEngine(2, WorkerConfig()).stop()


def test_a_sweep_writes_its_progress_to_a_log_file(experiment, sweep, monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_module, "SECONDS_PER_LINE", 0.0)
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sweep, "console", Console(file=log, force_terminal=False))
        sweep.run(experiment)
    monkeypatch.undo()
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if " of 5 runs" in line]
    expected = [f"small: grid: {done} of 5 runs" for done in range(1, 6)]
    assert [line[line.index("small") :] for line in lines] == expected


@pytest.mark.parametrize(
    ("allowed", "jobs", "expected"), [(8, 1, 8), (8, 2, 4), (8, 16, 1), (3, 1, 3), (3, 4, 2)]
)
def test_runs_share_the_cores_within_the_threads_allowed(allowed, jobs, expected, monkeypatch):
    """OMP_NUM_THREADS is what torch allows."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    torch.set_num_threads(allowed)
    assert share(jobs) == expected


def test_a_sweep_runs_everything_once_and_nothing_the_second_time(experiment, sweep):
    outcome = sweep.run(experiment)
    runs = sweep.store.runs()
    assert {run.status() for run in runs} == {"finished"}
    assert len(runs) == 5 + 4, (
        "the winners are longer than the grid's runs, so they are runs of their own"
    )
    assert all(len(group.specs) == 2 for group in outcome.groups)
    assert runs[0].environment()["threads"] == 1, "as in this process"
    before = {run.folder: run.log_path.stat().st_mtime_ns for run in runs}
    again = sweep.run(experiment)
    assert {run.folder: run.log_path.stat().st_mtime_ns for run in sweep.store.runs()} == before
    assert [g.winner.hyper for g in again.groups] == [g.winner.hyper for g in outcome.groups]
    stored = outcome_of(experiment, sweep.results)
    assert [g.winner.hyper for g in stored.groups] == [g.winner.hyper for g in outcome.groups]


def test_a_changed_file_runs_only_what_is_new(experiment, sweep, tmp_path):
    sweep.run(experiment)
    before = {run.folder for run in sweep.store.runs()}
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT.replace("lr = [1.0, 10.0]\n", "lr = [1.0, 10.0, 0.001]\n"))
    sweep.run(load(path, "paper"))
    new = {run.folder for run in sweep.store.runs()} - before
    assert len(new) == 1
    assert "lr=0.001" in new.pop().name


def test_the_numbers_do_not_depend_on_the_number_of_jobs(experiment, sweep, tmp_path):
    sweep.run(experiment)
    for run in sweep.store.runs():
        alone = folder_of(Store(tmp_path / "alone"), run.spec)
        execute(alone, {})
        assert numbers(alone) == numbers(run)


class Deadly(Regression):
    """A problem that kills its process: always, or the first time."""

    def __init__(self, options, seed, device):
        super().__init__(options, seed, device)
        here = os.environ["STEPTUNED_TEST_FOLDER"]
        marker = os.path.join(here, "died once")
        if options.columns == 13 or (options.columns == 7 and not os.path.exists(marker)):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if options.columns == 5:
            raise ZeroDivisionError("an error of the problem's own")


@pytest.mark.parametrize("columns", [13, 7, 5], ids=["always", "once", "an exception"])
def test_the_run_of_a_dead_worker_is_retried_and_the_others_continue(sweep, monkeypatch, columns):
    monkeypatch.setattr("steptuned.lab.engine.work", deadly_work)
    specs = [make_spec(budget=100, seed=seed) for seed in range(4)]
    specs.insert(1, make_spec(budget=100, options={"columns": columns}))
    sweep._stage("test", specs)
    runs = [folder_of(sweep.store, spec) for spec in specs]
    expected = "finished" if columns == 7 else "failed"
    assert [run.status() for run in runs] == [
        "finished",
        expected,
        "finished",
        "finished",
        "finished",
    ]
    assert len(sweep.failed) == (expected == "failed")
    if expected == "failed":
        reason = runs[1].failure()["reason"]
        assert reason == (
            "its process died twice"
            if columns == 13
            else "ZeroDivisionError: an error of the problem's own"
        )
        sweep.failed.clear()
        sweep._stage("test", specs)  # the next sweep tries a failed run again
        assert len(sweep.failed) == 1


def deadly_work(folder, config):
    from steptuned.lab import problems
    from steptuned.lab.engine import work

    os.environ["STEPTUNED_TEST_FOLDER"] = str(folder.parents[3])  # that of the test
    kept = problems.PROBLEMS["regression"]
    problems.PROBLEMS["regression"] = Deadly
    try:
        return work(folder, config)
    finally:  # the next test has the same workers
        problems.PROBLEMS["regression"] = kept


def meet(folder, config):
    """Wait until another process is here too. Returns the threads of the worker."""
    (folder / f"{os.getpid()}").touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return os.getpid(), config.threads


def test_the_time_of_runs_is_measured_by_all_workers_at_once(sweep, tmp_path):
    (tmp_path / "met").mkdir()
    met = sweep.engine.measure(partial(meet, tmp_path / "met"))
    assert len({pid for pid, _ in met} - {os.getpid()}) == 2
    assert {threads for _, threads in met} == {1}


def test_the_estimate_has_the_right_order_of_magnitude(experiment):
    plan = estimate(experiment, "cpu")
    runs, seconds = plan.runs, plan.seconds
    assert runs == 5 + 4
    back_propagations = 5 * 40 + 4 * 100
    assert 1e-5 * back_propagations < seconds < 1e-1 * back_propagations
    assert [duration(s) for s in (0.2, 89, 600, 7200)] == ["1 s", "89 s", "10 min", "2.0 h"]
