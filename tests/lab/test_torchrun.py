"""Runs that several ranks share, started by torchrun."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from processes import PATIENCE
from specs import make_spec
from steptuned.lab import terminal
from steptuned.lab.driver import Driver
from steptuned.lab.engine import TorchrunEngine, WorkerConfig
from steptuned.lab.experiment import load
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.ranks import Ranks, Torchrun
from steptuned.lab.run import folder_of
from steptuned.lab.store import Store
from test_cli import inside
from test_store import numbers

HERE = Path(__file__).parent

EXPERIMENT = """
title = "a large run"
figure = "loss"
problem = "images"
seeds = 1
budget = {{ iterations = {budget} }}
log_every = 6
[options]
network = "{network}"
size = {size}
rows = {rows}
test_rows = 20
batch = {batch}
augmentation = "standard"
[methods.step-tuned-sgd]
lr = 0.05
"""


class Started:
    """The command on ranks, in its own session."""

    def __init__(self, folder, small, *arguments, script="on_ranks.py", ranks=3):
        pickled = folder / "small"
        pickled.write_bytes(pickle.dumps(small))
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command = [*launcher, HERE / script, pickled, *arguments]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:  # the ranks have sessions of their own
            for pid in [*self.ranks(), self.process.pid]:
                os.kill(pid, signal.SIGKILL)
            self.process.communicate()

    def end(self):
        said, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said

    def rank(self, index):
        """The process of a rank."""
        (found,) = [
            pid
            for pid in self.ranks()
            if f"\0RANK={index}\0" in Path(f"/proc/{pid}/environ").read_text()
        ]
        return found

    def ranks(self):
        return [
            int(pid)
            for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text()
            .split()
        ]


def all_numbers(folder):
    return {run.spec.identity: numbers(run) for run in Store(folder).runs()}


@pytest.fixture
def files(tmp_path):
    """A network without noise, and one with dropout, on mini-batches of which the last is short."""
    sizes = {"plain": ("lenet", 32, 67, 32, 12), "noisy": ("nin", 16, 60, 16, 14)}
    for name, (network, size, rows, batch, budget) in sizes.items():
        (tmp_path / f"{name}.toml").write_text(
            EXPERIMENT.format(network=network, size=size, rows=rows, batch=batch, budget=budget)
        )
    return [tmp_path / f"{name}.toml" for name in sizes]


def assert_like_one_process(store, path):
    """One process on the joined mini-batches has the same trajectory up to float32 rounding."""
    experiment = load(path, "paper")
    spec = experiment.spec(
        experiment.entries[0], experiment.entries[0].grid()[0], 1, 0, experiment.budget
    )
    problem = PROBLEMS[spec.problem].from_dict(spec.options, spec.seed, torch.device("cpu"))
    driver = Driver(spec.method, problem, spec.hyper)
    (together,) = [
        r for r in store.runs() if r.spec.options["network"] == "lenet" and r.spec.seed == spec.seed
    ]
    for record in together.records():
        while driver.batches * 2 < record["bp"] or driver._pass:
            driver.advance()
        alone = {**problem.evaluate(), **driver.diagnostics()}
        assert record["samples"] == driver.samples
        for name, within in {
            "loss": 1e-4,
            "plain loss": 1e-4,
            "test loss": 1e-4,
            "gamma": 1e-2,
        }.items():
            assert record[name] == pytest.approx(alone[name], rel=within), name


def test_three_ranks_give_the_run_of_one_process_even_if_killed(tmp_path, small, files):
    out = tmp_path / "undisturbed"
    options = ("--out", out, "--checkpoint-seconds", "1000")
    arguments = (tmp_path, "well", "run", *files, *options)
    with Started(tmp_path, small, *arguments, script="ending_on_ranks.py") as started:
        code, said = started.end()
    assert code == 0, said
    assert said.count("a large run, on 3 ranks") >= 2
    # A thread of the process group that outlived the work might abort the process.
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(3)] == ["", "", ""]
    undisturbed = Store(tmp_path / "undisturbed")
    assert {run.spec.ranks for run in undisturbed.runs()} == {3}
    assert [run.status() for run in undisturbed.runs()] == ["finished"] * 2
    assert all(run.environment()["ranks"] == 3 for run in undisturbed.runs())

    assert_like_one_process(undisturbed, files[0])

    # A rank is killed in the middle of the second run; the same command continues.
    disturbed = ["run", *files, "--out", tmp_path / "disturbed", "--checkpoint-seconds", "0"]
    with Started(tmp_path, small, *disturbed) as started:
        deadline = time.monotonic() + PATIENCE
        while not list((tmp_path / "disturbed").glob("runs/*/*nin*/checkpoint.pt")):
            assert time.monotonic() < deadline
            assert started.process.poll() is None, started.end()
            time.sleep(0.02)
        os.kill(started.rank(1), signal.SIGKILL)
        code, said = started.end()
    assert code == 1
    assert "Signal 9 (SIGKILL)" in said
    assert "finished" in {run.status() for run in Store(tmp_path / "disturbed").runs()}
    with Started(tmp_path, small, *disturbed) as started:
        code, said = started.end()
    assert code == 0, said
    assert all_numbers(tmp_path / "disturbed") == all_numbers(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("error", "rank 1: ArithmeticError: made up by the test"),
        ("error of 0", "failed: ArithmeticError: made up by the test. Nothing is lost"),
        ("interrupt", "exitcode  : 130"),
    ],
)
def test_a_rank_that_fails_waits_for_no_other_rank(tmp_path, small, files, how, sentence):
    arguments = (
        tmp_path,
        how,
        "run",
        files[0],
        "--out",
        tmp_path / "out",
        "--checkpoint-seconds",
        "0",
    )
    with Started(tmp_path, small, *arguments, script="ending_on_ranks.py", ranks=2) as started:
        code, said = started.end()
    assert code == 1, said
    assert sentence in " ".join(said.split()).replace("exitcode :", "exitcode  :"), said
    assert "terminate called" not in said


def test_the_evaluated_network_is_the_same_on_all_ranks(tmp_path, small):
    """BatchNorm has the statistics of each rank's rows; the lead's are used."""
    with Started(
        tmp_path, small, tmp_path / "said.json", script="evaluation_on_ranks.py"
    ) as started:
        code, said = started.end()
    assert code == 0, said
    values = json.loads((tmp_path / "said.json").read_text())
    together, alone = values[0]
    for name in ("loss", "test loss", "accuracy"):
        assert together[name] == pytest.approx(alone[name], rel=1e-6), name
        assert all(each[name] == together[name] for each, _ in values)
        assert all(each[name] == pytest.approx(alone[name], rel=1e-6) for _, each in values)


def test_options_that_conflict_with_torchrun_are_refused_by_the_lead_only(
    tmp_path, files, monkeypatch
):
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for console in (terminal.console, terminal.errors):
        monkeypatch.setattr(console, "quiet", console.quiet)
    said = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        done = inside("run", files[0], "--jobs", "2", "--out", tmp_path / "out")
        assert done.returncode == 1
        said.append(done.stderr)
    assert "leave out --jobs and --dask" in " ".join(said[0].split())
    assert said[1] == "", "the lead speaks for all"


def ranks_of(number):
    """Ranks that can divide rows, without the processes."""
    made = []
    for index in range(number):
        rank = Torchrun.__new__(Torchrun)
        rank.world_size, rank.index = number, index
        made.append(rank)
    return made


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 128])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_weighted_shards_average_to_the_whole_batch(rows, number):
    losses = torch.randn(rows, dtype=torch.float64)
    parts = [rank.shard(torch.arange(rows)) for rank in ranks_of(number)]
    averaged = sum(losses[mine].mean() * weight for mine, weight in parts) / number
    torch.testing.assert_close(averaged, losses.mean())
    assert sorted(row for mine, weight in parts if weight for row in mine.tolist()) == list(
        range(rows)
    )
    assert torch.equal(Ranks().shard(torch.arange(rows))[0], torch.arange(rows))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (("armijo", "digits"), "armijo compares losses, of which every rank has its own"),
        (("sgd", "regression"), "regression has no network, so it cannot be divided among ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_other_ranks_start(tmp_path, spec, reason):
    run = folder_of(Store(tmp_path), make_spec(*spec))
    engine = TorchrunEngine(ranks_of(2)[0], WorkerConfig())
    assert list(engine.process([run])) == [run]
    assert run.failure()["reason"].startswith(f"IndivisibleError: {reason}")


def test_the_number_of_ranks_is_part_of_the_identity_where_there_are_several(files):
    one = load(files[0], "paper")
    two = one.model_copy(update={"ranks": 2})
    entry = one.entries[0]
    a, b = (e.spec(entry, entry.grid()[0], 0, 0, e.budget) for e in (one, two))
    assert a.identity != b.identity
    assert "ranks" not in json.loads(a.canonical())
    assert "ranks=2" in b.name(b.options, b.hyper)
