"""Sweeps on Dask clusters of real processes, which are killed and replaced."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import Client

from processes import PATIENCE
from specs import make_spec
from steptuned.lab.cluster import DaskEngine, _data
from steptuned.lab.engine import EngineError, WorkerConfig, share
from steptuned.lab.run import execute, folder_of
from steptuned.lab.store import Run, Store
from test_cli import inside
from test_store import numbers

EXPERIMENT = """
title = "a small sweep"
figure = "loss"
problem = "regression"
seeds = 2
budget = { epochs = 120 }
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

SHORT = """
title = "a shorter one"
figure = "loss"
problem = "regression"
seeds = 3
budget = { epochs = 20 }
log_every = 20
[methods.sgd]
decay = "iteration"
lr = 1.0
"""


class Processes:
    """Starts commands, each in its own session, and stops them all when the test ends."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        self.environment = {**os.environ, "STEPTUNED_TEST_FOLDER": str(folder), "COLUMNS": "200"}

    def start(self, *command, **environment):
        said = self.folder / f"said-{len(self.started)}"
        with said.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**self.environment, **environment},
            )
        process.said = said.read_text
        self.started.append(process)
        return process

    def scheduler(self, **environment):
        """Returns its address and its process."""
        about = self.folder / f"scheduler-{len(self.started)}.json"
        options = (
            "--no-dashboard",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--scheduler-file",
            about,
        )
        process = self.start("distributed.cli.dask_scheduler", *options, **environment)
        wait_until(lambda: about.exists() and about.read_text().endswith("}"), process)
        return json.loads(about.read_text())["address"], process

    def worker(self, address, *options, threads=1):
        """Start a worker: one process, which can be killed, unless other options are given."""
        chosen = options or ("--no-nanny",)
        telling = ("--no-dashboard", "--preload", Path(__file__).parent / "on_workers.py")
        return self.start(
            "distributed.cli.dask_worker", address, "--nthreads", threads, *chosen, *telling
        )

    def sweep(self, address, out, experiment=EXPERIMENT):
        path = self.folder / "small.toml"
        path.write_text(experiment)
        options = ("--out", out, "--checkpoint-seconds", "0.05")
        return self.start("steptuned", "run", path, "--dask", address, *options)

    def kill_all(self):
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


@pytest.fixture
def processes_of(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    processes.kill_all()


def wait_until(what, *processes):
    """Wait for a condition that must become true while these processes are alive."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        for process in processes:
            assert process.poll() is None, process.said()
        assert time.monotonic() < deadline, "\n".join(process.said() for process in processes)
        time.sleep(0.02)
    return found


def runs_of(process, out):
    """The runs that a worker is executing."""
    return [
        run
        for run in Store(out).runs()
        if is_by(process, run) and (run.folder / "checkpoint.pt").exists()
    ]


def is_by(process, run):
    return (run.claimant() or {}).get("pid") == process.pid and run.result() is None


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def assert_same_as_undisturbed(out, folder):
    for run in Store(out).runs():
        alone = folder_of(Store(folder / "undisturbed"), run.spec)
        execute(alone, {})
        assert numbers(run) == numbers(alone)
        assert run.is_sound()


def assert_never_two_at_a_run(folder):
    trails = [path.read_text().split() for path in folder.glob("steps-*")]
    for trail in trails:
        blocks = [pid for pid, _ in itertools.groupby(trail)]
        assert len(blocks) == len(set(blocks)), "one process went on after another had begun"
    return trails


def test_killed_workers_and_client_are_replaced_and_give_the_same_numbers(processes_of, tmp_path):
    """A second cluster and client take over while a worker of the first still executes a run."""
    out = tmp_path / "out"
    address, _ = processes_of.scheduler()
    first, second = processes_of.worker(address), processes_of.worker(address)
    brake = tmp_path / f"brake-{second.pid}"
    brake.touch()
    client = processes_of.sweep(address, out)
    wait_until(lambda: runs_of(first, out), client, first)
    kill(first)
    third = processes_of.worker(address)
    wait_until(lambda: f" {third.pid}\n" in (tmp_path / "asked").read_text(), client, second, third)
    (held,) = wait_until(
        lambda: [run.spec.identity for run in Store(out).runs() if is_by(second, run)],
        client,
        second,
    )
    kill(client)

    address, _ = processes_of.scheduler()
    client = processes_of.sweep(address, out)
    wait_until(lambda: "there is no worker" in client.said(), client)
    last = processes_of.worker(address)
    wait_until(
        lambda: f"{held} {last.pid}\n" in (tmp_path / "asked").read_text(), client, second, last
    )
    brake.unlink()
    assert client.wait(PATIENCE) == 0, client.said()
    assert second.poll() is None, "it was never disturbed"

    trails = assert_never_two_at_a_run(tmp_path)
    pids = {int(pid) for trail in trails for pid in trail}
    assert pids == {first.pid, second.pid, third.pid, last.pid}
    assert any(len(set(trail)) > 1 for trail in trails), "a run was handed on in its middle"
    assert set((tmp_path / f"steps-{held}").read_text().split()) == {str(second.pid)}, (
        "who asked meanwhile had nothing left to do"
    )
    assert len(Store(out).runs()) == 4 + 4, "grid and winners"
    assert_same_as_undisturbed(out, tmp_path)


def test_a_run_that_always_kills_its_worker_is_given_up_and_the_cluster_survives(
    processes_of, tmp_path
):
    out = tmp_path / "out"
    (tmp_path / "deadly-1").touch()
    address, _ = processes_of.scheduler(DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="0")
    processes_of.worker(address, "--nworkers", "2")
    client = processes_of.sweep(address, out, SHORT)
    assert client.wait(PATIENCE) == 1, client.said()
    assert client.said().count("its process died 3 times") == 1, client.said()
    assert "1 runs failed" in client.said()
    assert len(Store(out).runs()) == 3
    for run in Store(out).runs():
        deaths = (tmp_path / f"steps-{run.spec.identity}").read_text().split()
        if run.spec.seed == 1:
            assert run.status() == "failed"
            assert len(set(deaths)) == len(deaths) == 3
        else:
            assert run.status() == "finished"
    with Client(address) as watching:
        watching.wait_for_workers(2, timeout=PATIENCE)


def test_ctrl_c_drops_waiting_runs_and_a_dead_scheduler_is_reported(processes_of, tmp_path):
    out = tmp_path / "out"
    address, scheduler = processes_of.scheduler()
    worker = processes_of.worker(address)
    client = processes_of.sweep(address, out)
    (run,) = wait_until(lambda: runs_of(worker, out), client, worker)
    brake = tmp_path / f"brake-{worker.pid}"
    brake.touch()
    client.send_signal(signal.SIGINT)
    assert client.wait(PATIENCE) == 130, client.said()
    brake.unlink()
    assert "finish the runs they have started; nothing is lost. Continue with:" in client.said()
    assert "Traceback" not in client.said()
    wait_until(run.result, worker)
    with Client(address) as watching:
        assert watching.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0
    assert (tmp_path / "asked").read_text() == f"{run.spec.identity} {worker.pid}\n"

    client = processes_of.sweep(address, out)
    wait_until(lambda: runs_of(worker, out), client, worker)
    kill(scheduler)
    assert client.wait(PATIENCE) == 1
    assert (
        f"the Dask scheduler at {address} is gone. Nothing is lost; continue with: "
        in client.said()
    )
    assert "Traceback" not in client.said()


def test_local_workers_stop_with_ctrl_c_and_resume_with_the_same_numbers(processes_of, tmp_path):
    out = tmp_path / "out"
    experiment = SHORT.replace("epochs = 20", "epochs = 100")
    client = processes_of.sweep("local:2", out, experiment)
    wait_until(lambda: list(out.glob("runs/*/*/checkpoint.pt")), client)
    os.killpg(client.pid, signal.SIGINT)  # as a terminal does
    assert client.wait(PATIENCE) == 130, client.said()
    assert "Traceback" not in client.said()
    wait_until(lambda: not any(run.is_locked() for run in Store(out).runs()))

    client = processes_of.sweep("local:2", out, experiment)
    assert client.wait(PATIENCE) == 0, client.said()
    assert "with 2 jobs" in client.said()
    assert "Traceback" not in client.said()
    assert [run.environment()["threads"] for run in Store(out).runs()] == [share(2)] * 3
    assert_same_as_undisturbed(out, tmp_path)

    before = {run.folder: run.log_path.stat().st_mtime_ns for run in Store(out).runs()}
    assert inside("run", tmp_path / "small.toml", "--jobs", 1, "--out", out).returncode == 0
    assert {run.folder: run.log_path.stat().st_mtime_ns for run in Store(out).runs()} == before, (
        "another engine, and all is done"
    )


def test_workers_that_cannot_execute_runs_are_refused(processes_of, tmp_path):
    """Workers with several threads, even if they join later, and workers without the folder."""
    address, _ = processes_of.scheduler()
    worker = processes_of.worker(address, threads=2)
    run = folder_of(Store(tmp_path / "out"), make_spec())
    with Client(address) as client:
        engine = DaskEngine(client, address, WorkerConfig(), foreign=True)
        with pytest.raises(
            EngineError, match=f"has 2 threads.* `dask worker {address} --nthreads 1 --nworkers N`"
        ):
            list(engine.process([run]))
        (tmp_path / "small.toml").write_text(SHORT)
        done = inside("run", tmp_path / "small.toml", "--dask", address, "--out", tmp_path / "out")
        assert done.returncode == 1
        assert "--nthreads 1" in done.stderr
        kill(worker)
        processes_of.worker(address)
        absent = Run(tmp_path / "absent")
        with pytest.raises(
            EngineError,
            match=r"does not see .*absent: give a folder as --out that all workers share",
        ):
            list(engine.process([absent]))
        assert not absent.folder.exists()
        assert engine.jobs == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--dask", "local:2", "--jobs", "2"), "--jobs and --dask cannot be given together"),
        (("--dask", "local:0"), "--dask local:0 must name a number of workers, such as local:2"),
        (("--dask", "local:two"), "--dask local:two must name a number of workers"),
        (("--dask", "tcp://127.0.0.1:1"), "no Dask scheduler answers at tcp://127.0.0.1:1"),
        (("--dask", "carrier-pigeon://x"), "no Dask scheduler answers at carrier-pigeon://x"),
    ],
)
def test_an_invalid_cluster_is_reported_in_one_sentence(tmp_path, monkeypatch, options, sentence):
    monkeypatch.setattr("steptuned.lab.cluster.CONNECT_SECONDS", 1)
    (tmp_path / "small.toml").write_text(SHORT)
    done = inside("run", tmp_path / "small.toml", *options, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_without_distributed_the_command_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    (tmp_path / "small.toml").write_text(SHORT)
    done = inside("run", tmp_path / "small.toml", "--dask", "local:2", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "--dask needs the package distributed: pip install 'steptuned[dask]'" in done.stderr


@pytest.mark.parametrize(("own", "seen"), [(None, "the client's"), ("its own", "its own")])
def test_the_data_folder_is_the_workers_or_else_the_clients(monkeypatch, own, seen):
    monkeypatch.delenv("STEPTUNED_DATA", raising=False)
    if own:
        monkeypatch.setenv("STEPTUNED_DATA", own)
    with _data("the client's"):
        assert os.environ["STEPTUNED_DATA"] == seen
    assert os.environ.get("STEPTUNED_DATA") == own


SLURM = Path(__file__).parents[2] / "examples" / "slurm_sweep.py"


def slurm_sweep(folder, *arguments):
    """Jobs write their output to the folder that they were submitted from."""
    return subprocess.run(
        [sys.executable, SLURM, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_job_script_for_slurm_starts_one_worker_with_one_thread(tmp_path):
    done = slurm_sweep(
        tmp_path,
        "--job-script",
        "--cores",
        3,
        "--memory",
        "2GB",
        "--walltime",
        "01:00:00",
        "--partition",
        "gpu",
        "--account",
        "me",
    )
    assert done.returncode == 0, done.stderr
    asked = {
        line.removeprefix("#SBATCH ")
        for line in done.stdout.splitlines()
        if line.startswith("#SBATCH")
    }
    assert {"-p gpu", "-A me", "-n 1", "--cpus-per-task=3", "--mem=2G", "-t 01:00:00"} <= asked
    (worker,) = [line for line in done.stdout.splitlines() if "dask_worker" in line]
    assert worker.startswith(sys.executable)
    assert "--nthreads 1 " in worker
    assert "--nworkers" not in worker
    assert "export OMP_NUM_THREADS=3 MKL_NUM_THREADS=3" in done.stdout


@pytest.mark.skipif(shutil.which("sinfo") is None, reason="there is no SLURM here")
def test_a_sweep_on_slurm(tmp_path):
    if subprocess.run(["sinfo"], capture_output=True, check=False).returncode != 0:
        pytest.skip("SLURM does not run here")
    (tmp_path / "small.toml").write_text(SHORT)
    done = slurm_sweep(
        tmp_path,
        "--workers",
        2,
        "--memory",
        "1GB",
        "--",
        "run",
        tmp_path / "small.toml",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(Store(tmp_path / "out").runs()) == 3
    assert_same_as_undisturbed(tmp_path / "out", tmp_path)
