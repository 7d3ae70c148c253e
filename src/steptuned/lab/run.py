"""One run, from its spec to its log. Killed at any moment and started again, it ends with the very same numbers."""

import contextlib
import functools
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import steptuned
from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import NetworkProblem
from steptuned.lab.ranks import Ranks
from steptuned.lab.results import name_of
from steptuned.lab.spec import RunSpec, derive_seed
from steptuned.lab.store import COMPLETE, Log, Run, Status, Store
from steptuned.rng import Replay

CHECKPOINT_SECONDS = 60.0


def folder_of(store: Store, spec: RunSpec) -> Run:
    return store.run(spec, name_of(spec))


def execute(
    run: Run,
    environment: dict[str, Any],
    device: str = "cpu",
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tensorboard: Path | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 - it has no state
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Status:
    """Run it to its end, from its checkpoint if there is one; with several ranks this is the lead. Returns how it ended.

    ``is_abandoned`` is asked before every back-propagation. Once it returns True, a checkpoint is
    saved and :class:`Abandoned` is raised.
    """
    with run.claim(environment | PROBLEMS[run.spec.problem].environment()):
        status = run.status()
        if status in COMPLETE:
            return status
        spec = run.spec
        if ranks.number > 1:
            _refuse_division(spec)
        ranks.hear(spec)
        book = _Book(run, checkpoint_seconds, tensorboard, is_abandoned)
        return _train(spec, torch.device(device), ranks, book)


class Abandoned(BaseException):
    """The run was stopped on request, with a checkpoint from which it can be resumed."""


class IndivisibleError(ValueError):
    """A run that one process has to make alone, in one sentence."""


def _refuse_division(spec: RunSpec) -> None:
    if not issubclass(PROBLEMS[spec.problem], NetworkProblem):
        raise IndivisibleError(f"{spec.problem} has no network, so it cannot be divided among ranks: run it without torchrun")
    if not METHODS[spec.method].stepping.works_on_ranks:
        raise IndivisibleError(f"{spec.method} compares losses, of which every rank has its own: run it without torchrun")


def follow(ranks: Ranks, device: str) -> None:
    """Make with the lead every run that it executes, until it has none any more."""
    while (spec := ranks.hear(None)) is not None:
        _train(spec, torch.device(device), ranks, None)


def _train(spec: RunSpec, device: torch.device, ranks: Ranks, book: "_Book | None") -> Status:
    torch.manual_seed(derive_seed("noise", spec.problem, spec.seed, *([ranks.index] if ranks.index else [])))
    problem = PROBLEMS[spec.problem].from_dict(spec.options, spec.seed, device)
    if ranks.number > 1 and isinstance(problem, NetworkProblem):
        problem.divide(ranks)
    driver = Driver(spec.method, problem, spec.hyper)
    done, seconds, next_record = 0, 0.0, 0
    checkpoint = ranks.hear(book.begin() if book else None)
    if checkpoint is not None:
        mine = checkpoint["ranks"][ranks.index]
        problem.load_state_dict(checkpoint["problem"])
        driver.load_state_dict({**checkpoint["driver"], "noise": mine["noise"]})
        noise = Replay([device])
        noise.load_state_dict(mine["rng"])
        noise.rewind()
        done, seconds, next_record = checkpoint["done"], checkpoint["seconds"], checkpoint["next record"]

    started = time.monotonic()
    record: dict[str, Any] = {}
    with contextlib.closing(book) if book else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gamma has been at")  # the log has every gamma
        while True:
            if done >= next_record or done == spec.budget:
                synchronise(device)
                seconds += time.monotonic() - started
                counts = {"bp": done, "batches": driver.batches, "samples": driver.samples, "seconds": round(seconds, 6)}
                record = {**counts, **problem.evaluate(), **driver.diagnostics()}
                if book:
                    book.record(record)
                next_record = spec.next_record(done)
                if ranks.agree(done == spec.budget or not math.isfinite(record["loss"])):
                    break
                started = time.monotonic()
            if ranks.agree(book is not None and book.is_due()):
                synchronise(device)
                now = time.monotonic()
                seconds += now - started
                driver_state = driver.state_dict()
                state = {
                    "problem": problem.state_dict(),
                    "driver": driver_state,
                    "ranks": ranks.gather({"rng": Replay([device]).state_dict(), "noise": driver_state["noise"]}),
                    "done": done,
                    "seconds": seconds,
                    "next record": next_record,
                }
                if book:
                    book.save(state)
                started = time.monotonic()
            driver.advance()
            done += 1
        status: Status = "finished" if math.isfinite(record["loss"]) else "diverged"
        if book:
            book.finish(status, record)
    return status


class _Book:
    """What is kept of a run while it goes on: its log, its checkpoint, and scalars for those who watch."""

    def __init__(
        self,
        run: Run,
        checkpoint_seconds: float,
        tensorboard: Path | None,
        is_abandoned: Callable[[], bool],
    ) -> None:
        self._run, self._seconds, self._tensorboard = run, checkpoint_seconds, tensorboard
        self._is_abandoned = is_abandoned
        self._live: _Live | None = None

    def begin(self) -> dict[str, Any] | None:
        """Open the book. Returns where to go on."""
        checkpoint = self._run.load_checkpoint()
        begins_at, self._begun = (checkpoint["next record"], int(checkpoint["done"])) if checkpoint else (0, 0)
        self._log = Log(self._run.log_path)
        if self._tensorboard is not None:
            self._live = _Live(self._tensorboard / self._run.folder.name, begins_at)
        self._saved = time.monotonic()
        return checkpoint

    def record(self, record: dict[str, Any]) -> None:
        self._log.append(record)
        if self._live is not None:
            self._live.show(record)

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._saved >= self._seconds or self._is_abandoned()

    def save(self, state: dict[str, Any]) -> None:
        self._run.save_checkpoint(state, self._log)
        if state["done"] > self._begun:
            self._run.forget_deaths()
        if self._is_abandoned():
            raise Abandoned
        self._saved = time.monotonic()

    def finish(self, status: Status, last: dict[str, Any]) -> None:
        self._run.finish(status, self._log, last)

    def close(self) -> None:
        self._log.close()
        if self._live is not None:
            self._live.writer.close()


class _Live:
    """The records as TensorBoard's scalars, for people who watch. What was written beyond a checkpoint is taken back."""

    def __init__(self, folder: Path, begins_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=begins_at)

    def show(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "bp":
                self.writer.add_scalar(name.replace(" ", "_"), value, record["bp"])
        self.writer.flush()


def synchronise(device: torch.device) -> None:
    """Wait until an accelerator has done what it was asked, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def environment_now(device: str, threads: int) -> dict[str, Any]:
    """With what, and on what, a run is made; and the criteria of the claims that were fixed by then."""
    from steptuned.lab.claims import criteria_hash  # which reads what is made here

    return {
        "steptuned": steptuned.__version__,
        "commit": _commit(),
        "criteria": criteria_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": device,
        "threads": threads,
    }


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that the package lies in, if it lies in one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
