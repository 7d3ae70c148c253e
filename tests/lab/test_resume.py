"""Processes killed at random moments end with the numbers of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid

import pytest
import torch

import small_data
from processes import MARK, PATIENCE, marked, wait_until_none, workers_of
from specs import make_spec, on_real_data
from steptuned.lab.run import execute, folder_of
from steptuned.lab.store import Died, Run, Store
from test_store import numbers


class Doomed(Run):
    """Execute a run until it has written some checkpoints, then kill its process.

    The kill comes before the next checkpoint, one back-propagation after the last, or after some
    more seconds of processor time, whatever the process is doing then.
    """

    def __init__(self, folder, checkpoints, seconds=0.0):
        super().__init__(folder)
        self.left, self.seconds = checkpoints, seconds

    def save_checkpoint(self, checkpoint, log):
        if self.left == 0:
            if not self.seconds:
                os.kill(os.getpid(), signal.SIGKILL)
            # The timer's signal ends the process as SIGKILL does: no code of ours sees it.
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, self.seconds)
        self.left -= 1
        super().save_checkpoint(checkpoint, log)


def _execute(folder, checkpoints, seconds):
    torch.set_num_threads(1)
    execute(Doomed(folder, checkpoints, seconds), {}, checkpoint_seconds=0.01)


@pytest.mark.parametrize(
    ("spec", "kills"),
    [
        ({"method": "step-tuned-sgd", "budget": 6000, "log_every": 7}, 6),
        ({"method": "sgd", "budget": 6000, "log_every": 50}, 3),
        ({"problem": "digits", "method": "step-tuned-sgd", "budget": 500, "log_every": 23}, 5),
    ],
    ids=["regression, two passes", "regression, one pass", "a network"],
)
def test_a_run_killed_repeatedly_ends_with_the_same_numbers(tmp_path, processes, spec, kills):
    undisturbed = folder_of(Store(tmp_path / "undisturbed"), make_spec(**spec))
    execute(undisturbed, {})
    run = folder_of(Store(tmp_path / "disturbed"), make_spec(**spec))
    chance = random.Random(0)
    for checkpoints in [2] * kills + [-1]:
        seconds = chance.uniform(0.001, 0.03)
        child = processes.Process(target=_execute, args=(run.folder, checkpoints, seconds))
        child.start()
        child.join()
        assert child.exitcode == (0 if checkpoints < 0 else -signal.SIGPROF)
    assert numbers(run) == numbers(undisturbed)
    assert run.is_sound()


def _execute_images(small, folder, checkpoints):
    if small is not None:
        small_data.use(*small, os.environ)
    torch.set_num_threads(1)
    execute(Doomed(folder, checkpoints), {}, checkpoint_seconds=0.0)


def _kill_until_done(run, processes, small, lives):
    """Kill a run after each of these numbers of checkpoints, then let it finish.

    Returns the pass over a mini-batch in which each kill happened.
    """
    passes = []
    for checkpoints in [*lives, -1]:
        child = processes.Process(target=_execute_images, args=(small, run.folder, checkpoints))
        child.start()
        child.join()
        assert child.exitcode == (0 if checkpoints < 0 else -signal.SIGKILL)
        if checkpoints >= 0:
            passes.append(
                torch.load(run.folder / "checkpoint.pt", weights_only=True)["driver"]["pass"]
            )
    return passes


IMAGES = {
    "problem": "images",
    "budget": 80,
    "log_every": 10,
    "options": {
        "network": "lenet-batchnorm",
        "rows": 100,
        "test_rows": 20,
        "batch": 32,
        "augmentation": "standard",
        "layout": "channels_last",
    },
}


def test_an_image_run_killed_repeatedly_even_between_passes_ends_with_the_same_numbers(
    tmp_path, small, processes
):
    undisturbed = folder_of(Store(tmp_path / "undisturbed"), make_spec(**IMAGES))
    execute(undisturbed, {})
    run = folder_of(Store(tmp_path / "disturbed"), make_spec(**IMAGES))
    passes = _kill_until_done(run, processes, small, lives=(1, 6, 12, 3, 8, 21))
    assert set(passes) == {0, 1}, "killed after the first pass and after the second"
    assert numbers(run) == numbers(undisturbed)
    assert run.is_sound()


@pytest.mark.parametrize(
    ("lives", "ends"),
    [((5, 1, 1), False), ((5, 2, 2, 2, 2), True)],
    ids=["no further", "one step further"],
)
def test_a_run_that_makes_no_progress_is_given_up_after_three_deaths(
    tmp_path, processes, lives, ends
):
    """A process first saves the checkpoint that it resumed from; only a later one is progress."""
    run = folder_of(Store(tmp_path), make_spec(budget=50))
    for checkpoints in lives:
        child = processes.Process(target=_execute_images, args=(None, run.folder, checkpoints))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    if ends:
        assert execute(run, {}) == "finished"
    else:
        with pytest.raises(Died, match="its process died 3 times"):
            execute(run, {})


@on_real_data
def test_a_run_on_real_cifar_10_killed_repeatedly_ends_with_the_same_numbers(tmp_path, processes):
    spec = make_spec(
        **{
            **IMAGES,
            "budget": 24,
            "options": {"network": "resnet-20", "rows": 100, "test_rows": 20, "batch": 16},
        }
    )
    undisturbed = folder_of(Store(tmp_path / "undisturbed"), spec)
    execute(undisturbed, {})
    run = folder_of(Store(tmp_path / "disturbed"), spec)
    assert set(_kill_until_done(run, processes, None, lives=(2, 5, 8))) == {0, 1}
    assert numbers(run) == numbers(undisturbed)


EXPERIMENT = """
title = "a small sweep"
figure = "loss"
problem = "regression"
seeds = 2
budget = { epochs = 300 }
log_every = 20
[selection]
after = { epochs = 100 }
[methods.sgd]
decay = "iteration"
lr = [1.0, 10.0]
[methods.step-tuned-sgd]
decay = "iteration"
lr = [1.0, 10.0]
"""


class Sweep:
    """The command, in a session of its own, so that it can be killed with its workers."""

    def __init__(self, path, out, checkpoint_seconds=0.05):
        options = ["--jobs", "2", "--out", out, "--checkpoint-seconds", str(checkpoint_seconds)]
        command = [sys.executable, "-m", "steptuned", "run", path, *options]
        self.said = path.parent / f"said-{time.monotonic_ns()}.txt"
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self, number):
        os.killpg(self.process.pid, number)
        return self.process.wait(300)


def checkpoints(folder):
    """A value that changes when any run makes progress."""
    return {
        path: path.stat().st_mtime_ns
        for path in folder.glob("runs/*/*/*")
        if path.name in ("checkpoint.pt", "result.json")
    }


def test_a_sweep_killed_repeatedly_ends_with_the_same_numbers(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    out = tmp_path / "out"
    chance = random.Random(1)
    killed = 0
    while True:
        sweep = Sweep(path, out)
        begun = checkpoints(out)
        while sweep.process.poll() is None and (killed == 2 or checkpoints(out) == begun):
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.2))
        if sweep.process.poll() is not None:
            break
        sweep.kill(signal.SIGKILL)
        killed += 1
    assert sweep.process.returncode == 0, sweep.said.read_text()
    assert killed == 2
    runs = Store(out).runs()
    assert len(runs) == 4 + 4, "grid and winners"
    for run in runs:
        undisturbed = folder_of(Store(tmp_path / "undisturbed"), run.spec)
        execute(undisturbed, {})
        assert numbers(run) == numbers(undisturbed)


def test_ctrl_c_stops_cleanly_and_prints_how_to_continue(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(
        EXPERIMENT.replace("epochs = 300", "epochs = 20_000").replace(
            "epochs = 100", "epochs = 10_000"
        )
    )
    sweep = Sweep(path, tmp_path / "out")
    logs = tmp_path / "out" / "runs"
    deadline = time.monotonic() + PATIENCE
    while (
        not any(run.last_record() for run in Store(tmp_path / "out").runs())
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    for _ in range(20):  # a busy machine may need it pressed again
        os.killpg(sweep.process.pid, signal.SIGINT)
        try:
            code = sweep.process.wait(15)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        sweep.kill(signal.SIGKILL)
        pytest.fail("Ctrl-C does not stop the sweep")
    output = sweep.said.read_text()
    assert code == 130, output
    assert "nothing is lost" in output
    assert "Traceback" not in output
    assert "--jobs 2" in output.replace("\n", " "), "the command to continue with"
    assert logs.exists()


LONG = """
title = "one run after the other, so that one of two workers is idle"
figure = "loss"
problem = "regression"
seeds = 1
budget = { epochs = 500 }
log_every = 20
[methods.step-tuned-sgd]
decay = "iteration"
lr = 1.0
"""


def test_workers_of_a_killed_sweep_exit_and_leave_their_runs_resumable(tmp_path, monkeypatch):
    """Only the parent is killed.

    One worker is executing a run that has no checkpoint yet, the other is idle.
    """
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    path, out = tmp_path / "experiment.toml", tmp_path / "out"
    path.write_text(LONG)
    sweep = Sweep(path, out, checkpoint_seconds=1000)
    try:
        deadline = time.monotonic() + PATIENCE
        while not any(run.last_record() for run in Store(out).runs()):
            assert sweep.process.poll() is None, sweep.said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = workers_of(sweep.process.pid, mark)
        sweep.process.kill()
        sweep.process.wait()
        assert len(workers) == 2
        assert wait_until_none(lambda: marked(mark)) == {}
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    (run,) = Store(out).runs()
    assert run.status() == "unfinished"
    assert run.claimant() is None, "it was stopped, and did not die"
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["done"] >= run.last_record()["bp"], "nothing that was computed is lost"
    assert execute(run, {}) == "finished"
    undisturbed = folder_of(Store(tmp_path / "undisturbed"), run.spec)
    execute(undisturbed, {})
    assert numbers(run) == numbers(undisturbed)
