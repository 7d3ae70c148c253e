"""Kills processes at random moments and calls the optimizer in random ways (`make torture`).

It kills single runs, sweeps and their workers, Dask workers and clients, and ranks of torchrun.
Whatever the moment, the same command started again must end with the numbers of an undisturbed
run. Random call sequences of the optimizer must agree with its twin. The outcome is a page.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from processes import MARK, marked, workers_of
from sequences import BATCH, STEPS, fuzz
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.run import _cpu, execute, folder_of
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import ENDED, Run, Store

PATIENCE = 600
"""A process that has not ended after this many seconds counts as a difference."""

SWEEP = """
title = "a sweep to be killed"
figure = "loss"
problem = "regression"
seeds = 2
budget = {{ epochs = {epochs} }}
log_every = 20
[methods.sgd]
decay = "iteration"
lr = [{lr}, 10.0]
[methods.step-tuned-sgd]
decay = "iteration"
lr = {lr}
"""

TORCHRUN_EXPERIMENT = """
title = "runs to be killed, on several ranks"
figure = "loss"
problem = "digits"
seeds = 1
budget = { iterations = 40 }
log_every = 7
[options]
batch = 32
[methods.step-tuned-sgd]
lr = 0.05
"""

RUNS = (
    {"problem": "regression", "method": "step-tuned-sgd", "budget": 6000, "log_every": 7},
    {"problem": "regression", "method": "sgd", "budget": 6000, "log_every": 50},
    {"problem": "digits", "method": "step-tuned-sgd", "budget": 400, "log_every": 23},
    {"problem": "digits", "method": "momentum", "budget": 400, "log_every": 40},
)


@dataclass
class Outcome:
    """The results of one kind of kills."""

    kills: int = 0
    runs: int = 0
    failed: bool = False
    """Whether a run failed because its workers were killed again and again without progress."""
    differences: list[str] = field(default_factory=list)

    def __iadd__(self, other):
        self.kills += other.kills
        self.runs += other.runs
        self.differences += other.differences
        return self


class Processes:
    """Commands in sessions of their own, found again and ended by a mark in their environment."""

    def __init__(self, folder: Path):
        self.folder, self.mark, self.started = folder, uuid.uuid4().hex, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in marked(self.mark):
            _kill(pid)
        for process in self.started:
            process.wait()

    def start(self, *command):
        said = self.folder / f"said-{len(self.started)}.txt"
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with said.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        process.said = said.read_text
        self.started.append(process)
        return process


# ---------------------------------------------------------------------------- single runs


def kill_runs(folder: Path, kills: int, chance: random.Random) -> Outcome:
    """One run, whose process is killed again and again."""
    what = chance.choice(RUNS)
    problem, method = PROBLEMS[what["problem"]], METHODS[what["method"]]
    spec = RunSpec(
        options=problem.defaults,
        hyper=method.defaults,
        seed=chance.randrange(1000),
        scale="torture",
        **what,
    )
    run = folder_of(Store(folder / "out"), spec)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["steptuned.lab.run", "torch._dynamo", "sklearn.datasets"])
    outcome = Outcome()
    deadline = time.monotonic() + PATIENCE
    while run.result() is None and time.monotonic() < deadline:
        run.clear_failures()  # as the command does
        child = context.Process(target=_execute, args=(run.folder,))
        child.start()
        if outcome.kills < kills:
            _wait_for_progress(folder / "out", child.is_alive, chance)
            if child.is_alive():
                child.kill()
                outcome.kills += 1
        child.join(PATIENCE)
    return _compared(outcome, folder / "out", folder / "undisturbed")


def _execute(folder: Path) -> None:
    torch.set_num_threads(1)
    execute(Run(folder), {}, checkpoint_seconds=0.02)


# ---------------------------------------------------------------------------- sweeps


def kill_sweeps(folder: Path, kills: int, chance: random.Random) -> Outcome:
    """A sweep on two workers. Its workers, the command alone, or all of them are killed."""
    out = folder / "out"
    path = folder / "sweep.toml"
    path.write_text(SWEEP.format(epochs=100, lr=round(chance.uniform(0.5, 2.0), 3)))
    command = ("steptuned", "run", path, "--jobs", 2, "--out", out, "--checkpoint-seconds", 0.05)
    outcome = Outcome()
    with Processes(folder) as processes:

        def kill(sweep):
            workers = workers_of(sweep.pid, processes.mark)
            victims = chance.choice([[sweep.pid], workers[:1], workers[1:2], [sweep.pid, *workers]])
            for pid in victims:
                _kill(pid)
            if sweep.pid in victims:
                sweep.wait()
            return len(victims)

        _until_done(lambda: processes.start(*command), kill, out, kills, chance, outcome)
    return _compared(outcome, out, folder / "undisturbed", expected=4 + 2)


# ---------------------------------------------------------------------------- Dask


def kill_dask(folder: Path, kills: int, chance: random.Random) -> Outcome:
    """A sweep on a Dask cluster. Its workers, which are replaced, or the client are killed."""
    out = folder / "out"
    path = folder / "sweep.toml"
    path.write_text(SWEEP.format(epochs=100, lr=round(chance.uniform(0.5, 2.0), 3)))
    outcome = Outcome()
    with Processes(folder) as processes:
        about = folder / "scheduler.json"
        local = ("--no-dashboard", "--host", "127.0.0.1", "--port", "0")
        processes.start("distributed.cli.dask_scheduler", *local, "--scheduler-file", about)
        while not (about.exists() and about.read_text().endswith("}")):
            time.sleep(0.05)
        address = json.loads(about.read_text())["address"]
        worker = (
            "distributed.cli.dask_worker",
            address,
            "--nthreads",
            1,
            "--no-nanny",
            "--no-dashboard",
        )
        workers = [processes.start(*worker) for _ in range(2)]

        def kill(client):
            number = chance.randrange(5)
            if number == 4:
                client.kill()
                client.wait()
                return 1
            victim = workers.pop(number % 2)
            victim.kill()
            victim.wait()
            workers.append(processes.start(*worker))
            return 1

        command = (
            "steptuned",
            "run",
            path,
            "--dask",
            address,
            "--out",
            out,
            "--checkpoint-seconds",
            0.05,
        )
        _until_done(lambda: processes.start(*command), kill, out, kills, chance, outcome)
    return _compared(outcome, out, folder / "undisturbed", expected=4 + 2)


# ---------------------------------------------------------------------------- torchrun


def kill_ranks(folder: Path, kills: int, chance: random.Random) -> Outcome:
    """Runs on two ranks. One of them, or torchrun and both, are killed."""
    path = folder / "torchrun.toml"
    path.write_text(TORCHRUN_EXPERIMENT)
    launcher = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "-m",
        "steptuned",
        "run",
        path,
    )
    outcome = Outcome()
    with Processes(folder) as processes:

        def kill(agent):
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
            ranks = [int(pid) for pid in children.read_text().split()] if children.exists() else []
            victims = chance.choice([ranks[:1], ranks[1:2], [agent.pid, *ranks]])
            for pid in victims:
                _kill(pid)
            if victims:
                agent.wait(PATIENCE)
            return len(victims)

        out, undisturbed = folder / "out", folder / "undisturbed"
        command = (*launcher, "--out", out, "--checkpoint-seconds", 0.05)
        _until_done(lambda: processes.start(*command), kill, out, kills, chance, outcome)
        alone = processes.start(*launcher, "--out", undisturbed)
        if alone.wait(PATIENCE) != 0:
            outcome.differences.append(f"the undisturbed run failed: {alone.said()}")
    return _compared(outcome, out, undisturbed, expected=1)


# ---------------------------------------------------------------------------- common


def _until_done(
    start: Callable, kill: Callable, out: Path, kills: int, chance: random.Random, outcome: Outcome
) -> None:
    """Start a command, kill processes, and restart it if a kill ended it, until it is done."""
    command = start()
    deadline = time.monotonic() + PATIENCE
    while True:
        if outcome.kills < kills:
            _wait_for_progress(out, lambda process=command: process.poll() is None, chance)
            if command.poll() is None:
                outcome.kills += kill(command)
                deadline = time.monotonic() + PATIENCE
        elif command.poll() is None:
            time.sleep(0.05)
        if command.poll() == 0:
            return
        if time.monotonic() > deadline:
            outcome.differences.append(f"the command did not come to its end: {command.said()}")
            return
        if command.poll() is not None:
            outcome.failed = outcome.failed or "failed:" in command.said()
            command = start()


def _wait_for_progress(out: Path, is_alive: Callable[[], bool], chance: random.Random) -> None:
    """Wait for a checkpoint and then a random time; sometimes for a random time only."""
    begun = _progress(out)
    if chance.random() < 0.8:
        while is_alive() and _progress(out) == begun:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
    else:
        time.sleep(chance.uniform(0, 2.0))


def _progress(out: Path) -> dict[Path, int]:
    """A value that changes when any run makes progress."""
    found = {}
    for path in out.glob("runs/*/*/*"):
        if path.name in ("checkpoint.pt", "result.json"):
            try:
                found[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
    return found


def _compared(outcome: Outcome, out: Path, undisturbed: Path, expected: int = 1) -> Outcome:
    """Compare all that was logged, except seconds, with undisturbed runs."""
    runs = Store(out).runs()
    # Without a trial that failed, a sweep has another winner, whose runs stay in the store.
    if len(runs) < expected or (len(runs) > expected and not outcome.failed):
        outcome.differences.append(
            f"the store has {len(runs)} runs; an undisturbed one has {expected}"
        )
    for run in runs:
        alone = folder_of(Store(undisturbed), run.spec)
        if alone.status() not in ENDED and run.spec.ranks == 1:
            execute(alone, {})
        outcome.runs += 1
        if not (run.result() and run.is_sound()):
            outcome.differences.append(f"{run.folder.name} is {run.status()}: {run.failure()}")
        elif _numbers(run) != _numbers(alone):
            outcome.differences.append(
                f"{run.folder.name} has other numbers than an undisturbed run"
            )
    return outcome


def _numbers(run: Run) -> list[dict[str, float]]:
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for record in run.records()
    ]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------- the whole


KINDS = {
    "single runs": (kill_runs, 8),
    "sweeps and their workers": (kill_sweeps, 5),
    "Dask workers and clients": (kill_dask, 5),
    "ranks of torchrun": (kill_ranks, 3),
}
"""What is killed, and how often before the runs are compared."""


@dataclass
class Report:
    seed: int
    kinds: dict[str, Outcome] = field(default_factory=lambda: {name: Outcome() for name in KINDS})
    sequences: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(outcome.kills for outcome in self.kinds.values())

    @property
    def differences(self) -> list[str]:
        return [
            *self.different,
            *(text for outcome in self.kinds.values() for text in outcome.differences),
        ]

    def page(self, command: str) -> str:
        rows = [
            f"| {name} | {o.kills} | {o.runs} | {len(o.differences)} |"
            for name, o in self.kinds.items()
        ]
        runs = sum(o.runs for o in self.kinds.values())
        total = f"| **all** | **{self.kills}** | **{runs}** | **{self._lost()}** |"
        return PAGE.format(
            command=command,
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            minutes=f"{self.seconds / 60:.0f}",
            cores=os.cpu_count(),
            cpu=_cpu(),
            torch=torch.__version__,
            python=platform.python_version(),
            kills="\n".join([*rows, total]),
            sequences=f"{self.sequences:,}",
            steps=STEPS,
            different=len(self.different),
            seed=self.seed,
            found="\n## All differences\n" * bool(self.differences)
            + "".join(f"\n```text\n{text}\n```\n" for text in self.differences),
        )

    def _lost(self) -> int:
        return sum(len(outcome.differences) for outcome in self.kinds.values())


PAGE = """# Reliability

Two promises are tested here by brute force: a run that is killed at any moment and started again
ends with the numbers of an undisturbed run, and Step-Tuned SGD follows the paper's algorithm in
whatever order its methods are called.

Generated by `{command}` on {date}, in {minutes} minutes on {cores} cores ({cpu}), with torch
{torch}, Python {python} and seed {seed}. `make torture` generates it again,
with its default limits.

## Kills

Processes are killed by `SIGKILL`, most of them at a random moment after a checkpoint, some while
they start. The same command is started again until it is done. Then every run must be complete, and
everything it logged must be equal, to the last bit, to the log of an undisturbed run. There must be
no other runs, with one exception: if a run fails because its workers are killed too often without
progress, the sweep may choose a different winner in the meantime. The runs of that winner stay in
the store and are compared too.

| killed | kills | runs compared | differences |
|---|---:|---:|---:|
{kills}

## Call sequences

{sequences} random sequences of up to {steps} calls: the three forms, `cancel()`, `reset()`,
`state_dict()` and `load_state_dict()` also between the passes, changes of `lr`, added groups, a
`GradScaler` with overflows, gradients that are missing, nan, infinite or enormous, exceptions in
the closure, and calls at the wrong moment; in double, single and bfloat16 precision. After every
pass, parameters, G, gamma and the counts are compared with a second implementation in NumPy
(`tests/reference.py`).

Differences in call sequences: {different}
{found}"""


def torture(
    kills: int, sequences: int, seconds: float, seed: int, say: Callable[[str], None]
) -> Report:
    """Kill this many processes and try this many sequences, or as many as the time allows."""
    started = time.monotonic()
    report = Report(seed)

    def left(share: float) -> bool:
        return time.monotonic() - started < share * seconds

    batch = 0
    while report.sequences < sequences and left(0.4):
        count, different = fuzz(min(BATCH, sequences - report.sequences), seed + batch)
        report.sequences += count
        report.different += different
        batch += 1
        say(f"{report.sequences} sequences, {len(report.different)} differences")
    chance = random.Random(seed)
    kinds = list(KINDS) if kills else []
    while report.kills < kills and left(1.0):
        for name in kinds:
            kill, many = KINDS[name]
            if report.kills >= kills or not left(1.0):
                break
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                report.kinds[name] += kill(Path(folder), min(many, kills - report.kills), chance)
            kind = report.kinds[name]
            say(f"{name}: {kind.kills} kills, {len(kind.differences)} differences")
    report.seconds = time.monotonic() - started
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=120, help="processes to kill (default: %(default)s)"
    )
    parser.add_argument(
        "--sequences", type=int, default=5000, help="sequences of calls (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30,
        help="stop after about this many minutes (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of moments and sequences (default: %(default)s)"
    )
    parser.add_argument("--to", type=Path, help="write the page here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    report = torture(
        asked.kills,
        asked.sequences,
        60 * asked.minutes,
        asked.seed,
        lambda line: print(line, flush=True),
    )
    for text in report.differences:
        print(text)
    print(
        f"{report.kills} kills, {report.sequences} sequences, "
        f"{len(report.differences)} differences found, {report.seconds:.0f} seconds"
    )
    if asked.to is not None:
        asked.to.write_text(report.page(shlex.join(["python", "tests/torture.py", *sys.argv[1:]])))
    return int(bool(report.differences))


if __name__ == "__main__":
    sys.exit(main())
