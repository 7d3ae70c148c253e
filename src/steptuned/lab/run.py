"""One run, from its spec to its log.

A run that is killed at any moment and started again ends with the same numbers.
"""

import contextlib
import functools
import hashlib
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import steptuned
from steptuned.lab.claims.criteria import criteria_hash
from steptuned.lab.driver import Driver, no_advice
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
    """The folder of a run, created if it does not exist."""
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
    """Execute a run to its end, from its checkpoint if there is one. Returns how it ended.

    With several ranks, only the lead calls this; the others call :func:`follow`.

    ``is_abandoned`` is called before every back-propagation. Once it returns True, a checkpoint is
    saved and :class:`Abandoned` is raised.
    """
    with run.claim(environment | PROBLEMS[run.spec.problem].environment()):
        status = run.status()
        if status in COMPLETE:
            return status
        spec = run.spec
        if ranks.world_size > 1:
            _refuse_division(spec)
        ranks.broadcast_object(spec)
        recorder = _Recorder(run, checkpoint_seconds, tensorboard, is_abandoned)
        return _train(spec, torch.device(device), ranks, recorder)


class Abandoned(BaseException):
    """The run was stopped on request, with a checkpoint from which it can be resumed."""


class IndivisibleError(ValueError):
    """A run that ranks cannot share."""


def _refuse_division(spec: RunSpec) -> None:
    if not issubclass(PROBLEMS[spec.problem], NetworkProblem):
        raise IndivisibleError(
            f"{spec.problem} has no network, so it cannot be divided among ranks: "
            "run it without torchrun"
        )
    if not METHODS[spec.method].stepping.works_on_ranks:
        raise IndivisibleError(
            f"{spec.method} compares losses, of which every rank has its own: "
            "run it without torchrun"
        )


def follow(ranks: Ranks, device: str) -> None:
    """Take part in every run that the lead executes, until there are no more."""
    while (spec := ranks.broadcast_object(None)) is not None:
        _train(spec, torch.device(device), ranks, None)


def _train(
    spec: RunSpec,
    device: torch.device,
    ranks: Ranks,
    recorder: "_Recorder | None",
) -> Status:
    index = [ranks.index] if ranks.index else []
    torch.manual_seed(derive_seed("noise", spec.problem, spec.seed, *index))
    problem = PROBLEMS[spec.problem].from_dict(spec.options, spec.seed, device)
    if ranks.world_size > 1 and isinstance(problem, NetworkProblem):
        problem.divide(ranks)
    training = _Training(spec, Driver(spec.method, problem, spec.hyper), device, ranks, recorder)
    checkpoint = ranks.broadcast_object(recorder.begin() if recorder else None)
    if checkpoint is not None:
        training.load_state_dict(checkpoint)
    closing = contextlib.closing(recorder) if recorder else contextlib.nullcontext()
    with closing, no_advice():
        return training.run()


class _Training:
    """The training loop of a run."""

    def __init__(
        self,
        spec: RunSpec,
        driver: Driver,
        device: torch.device,
        ranks: Ranks,
        recorder: "_Recorder | None",
    ) -> None:
        self._spec, self._driver, self._problem = spec, driver, driver.problem
        self._device, self._ranks, self._recorder = device, ranks, recorder
        self._done, self._seconds, self._next_record = 0, 0.0, 0

    def run(self) -> Status:
        """Train until the budget is used up or the loss is not finite."""
        ranks, recorder = self._ranks, self._recorder
        self._start_clock()
        while True:
            if self._done >= self._next_record or self._done == self._spec.budget:
                record = self._record()
                finite = math.isfinite(record["loss"])
                if ranks.broadcast_bool(self._done == self._spec.budget or not finite):
                    break
                self._start_clock()
            if ranks.broadcast_bool(recorder is not None and recorder.is_due()):
                self._stop_clock()
                state = self.state_dict()
                if recorder:
                    recorder.save(state)
                self._start_clock()
            self._driver.advance()
            self._done += 1
        status: Status = "finished" if finite else "diverged"
        if recorder:
            recorder.finish(status, record)
        return status

    def _record(self) -> dict[str, Any]:
        self._stop_clock()
        record = {
            "bp": self._done,
            "batches": self._driver.batches,
            "samples": self._driver.samples,
            "seconds": round(self._seconds, 6),
            **self._problem.evaluate(),
            **self._driver.diagnostics(),
        }
        if self._recorder:
            self._recorder.record(record)
        self._next_record = self._spec.next_record(self._done)
        return record

    def _start_clock(self) -> None:
        self._started = time.monotonic()

    def _stop_clock(self) -> None:
        synchronise(self._device)
        self._seconds += time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs, with the random states of all ranks. Called by every rank."""
        driver = self._driver.state_dict()
        mine = {"rng": Replay([self._device]).state_dict(), "noise": driver["noise"]}
        return {
            "problem": self._problem.state_dict(),
            "driver": driver,
            "ranks": self._ranks.gather(mine),
            "done": self._done,
            "seconds": self._seconds,
            "next record": self._next_record,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = state["ranks"][self._ranks.index]
        self._problem.load_state_dict(state["problem"])
        self._driver.load_state_dict({**state["driver"], "noise": mine["noise"]})
        noise = Replay([self._device])
        noise.load_state_dict(mine["rng"])
        noise.rewind()
        self._done, self._seconds = state["done"], state["seconds"]
        self._next_record = state["next record"]


class _Recorder:
    """Writes the log and the checkpoints of a run, and scalars for TensorBoard."""

    def __init__(
        self,
        run: Run,
        checkpoint_seconds: float,
        tensorboard: Path | None,
        is_abandoned: Callable[[], bool],
    ) -> None:
        self._run, self._seconds, self._tensorboard = run, checkpoint_seconds, tensorboard
        self._is_abandoned = is_abandoned
        self._scalars: _Scalars | None = None

    def begin(self) -> dict[str, Any] | None:
        """Open the log. Returns the checkpoint to resume from."""
        checkpoint = self._run.load_checkpoint()
        self._begun = int(checkpoint["done"]) if checkpoint else 0
        self._log = Log(self._run.log_path)
        if self._tensorboard is not None:
            begins_at = checkpoint["next record"] if checkpoint else 0
            self._scalars = _Scalars(self._tensorboard / self._run.folder.name, begins_at)
        self._saved = time.monotonic()
        return checkpoint

    def record(self, record: dict[str, Any]) -> None:
        self._log.append(record)
        if self._scalars is not None:
            self._scalars.add(record)

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
        if self._scalars is not None:
            self._scalars.writer.close()


class _Scalars:
    """The records as scalars for TensorBoard. Those after the checkpoint are written again."""

    def __init__(self, folder: Path, begins_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=begins_at)

    def add(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "bp":
                self.writer.add_scalar(name.replace(" ", "_"), value, record["bp"])
        self.writer.flush()


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator to finish its work, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def environment_now(device: str, threads: int) -> dict[str, Any]:
    """The versions, the machine and the criteria of the claims, stored with every run."""

    return {
        "steptuned": steptuned.__version__,
        "commit": _commit(),
        "sources": _sources(),
        "criteria": criteria_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": device,
        "threads": threads,
        "kernel": steptuned.kernel_status().active,
    }


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that contains the package, if there is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def _sources() -> str:
    """A hash of the package's own source files: it tells apart what no commit does."""
    package = Path(steptuned.__file__).parent
    found = hashlib.sha256()
    for path in sorted(p for kind in ("*.py", "*.c") for p in package.rglob(kind)):
        found.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


@functools.cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
