"""What makes many runs. A sweep hands them over; how each of them ended is in the store, whatever engine made it."""

import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from joblib.externals.loky import get_reusable_executor

from steptuned.lab.extensions import extend
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.ranks import Ranks
from steptuned.lab.run import CHECKPOINT_SECONDS, Abandoned, IndivisibleError, environment_now, execute
from steptuned.lab.store import ENDED, TRIES, Died, Run, why

GRACE_SECONDS = 60.0
"""How long a worker whose parent is gone has to save a checkpoint."""


@dataclass(frozen=True)
class How:
    """How a worker makes a run."""

    device: str = "cpu"
    """By name, or `auto`: what the worker has."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    tensorboard: Path | None = None
    threads: int | None = None
    """Of torch; None: as many as the worker has."""
    ranks: int = 1
    """Processes that make each run together."""
    extensions: tuple[Path, ...] = ()
    """Files of problems and methods that the package does not have."""


class EngineError(Exception):
    """The engine cannot go on; what was computed is in the store."""


class Engine(Protocol):
    how: How

    @property
    def jobs(self) -> int:
        """How many runs it makes at the same time."""

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        """Make them all. Gives each run when it has ended, and now and then what it waits for, empty if for nothing else."""

    def stop(self) -> str:
        """Begin no run any more. Returns what is to be said about those that are under way."""

    def close(self) -> None:
        """All runs are made."""


def device_here(name: str, double: bool = False) -> str:
    """The device of that name; of `auto` an accelerator, if this machine has one, and one with double precision if need be."""
    if name != "auto":
        return name
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None or (double and found.type == "mps") else found.type


def is_usable(device: str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True


def usable_device(name: str) -> str:
    """The device of that name on this machine. Raises :class:`EngineError` if it cannot be used."""
    device = device_here(name)
    if not is_usable(device):
        raise EngineError(f"device {device!r} cannot be used here; valid: cpu, or auto")
    return device


def share(jobs: int) -> int:
    """Torch's threads for each of so many runs at the same time."""
    return max(1, (os.cpu_count() or 1) // jobs)


def work(folder: Path, how: How) -> None:
    """What a worker does with one run."""
    if how.threads is not None:
        torch.set_num_threads(how.threads)
    run = Run(folder)
    try:
        extend(how.extensions)
        device = device_here(how.device, PROBLEMS[run.spec.problem].double)
        environment = environment_now(device, torch.get_num_threads())
        with parent.working():
            execute(run, environment, device, how.checkpoint_seconds, how.tensorboard, is_abandoned=parent.is_gone)
    except Exception as error:
        if run.failure() is None:  # whoever had claimed it has written why
            run.fail(why(error))


class Parent:
    """The process that started this worker and that it must not outlive.

    A sweep that is killed cannot stop its workers. So a run whose parent is gone saves a checkpoint
    before its next back-propagation, and its worker exits; an idle worker exits within a second.
    A worker that does not come to its next back-propagation in `GRACE_SECONDS` exits anyway: a run
    survives that at any moment. Windows does not report that a parent is gone.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._at_work = threading.Lock()

    def watch(self, pid: int) -> None:
        """Called in a worker, at its start."""
        self._pid = pid
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def is_gone(self) -> bool:
        return self._pid is not None and os.getppid() != self._pid

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a run is executed, which is given the chance to save a checkpoint."""
        with self._at_work:
            try:
                yield
            except Abandoned:
                os._exit(0)

    def _end_when_idle(self) -> None:
        while not self.is_gone():
            time.sleep(1)
        self._at_work.acquire(timeout=GRACE_SECONDS)
        os._exit(0)


parent = Parent()
"""The parent of this process, if that is a worker of :class:`Local`."""


class Local:
    """Processes of this machine."""

    def __init__(self, jobs: int, how: How) -> None:
        self.jobs = jobs
        self.how = replace(how, threads=share(jobs))

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        """Those whose process died are tried once more, each alone: a death takes the others with it. Who dies again has failed."""
        left = list(runs)
        barren = 0
        while left:
            before = len(left)
            suspects = yield from self._pool(left, self.jobs, left)
            for run in suspects:
                if (yield from self._pool([run], 1, left)):
                    run.fail("its process died twice")
            for run in [run for run in left if run.status() in ENDED]:  # those that were not heard of
                left.remove(run)
                yield run
            barren = 0 if suspects or len(left) < before else barren + 1
            if barren == TRIES:
                raise EngineError("processes of this machine die before they begin a run: is there enough memory for so many jobs?")

    def _pool(self, runs: list[Run], jobs: int, left: list[Run]) -> Generator[Run | str, None, list[Run]]:
        """Run in parallel until all is done or a process dies. Returns the runs that may have killed it."""
        executor = self._executor(jobs)
        futures: dict[Future[None], Run] = {executor.submit(work, run.folder, self.how): run for run in runs}
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    left.remove(futures[future])
                    yield futures[future]
                yield ""
        except BrokenProcessPool:
            return [run for run in futures.values() if run.was_interrupted()]
        return []

    def stop(self) -> str:
        self._executor(self.jobs).shutdown(wait=False, kill_workers=True)
        return ""

    def close(self) -> None:
        """The processes end by themselves when there is nothing to do."""

    def _executor(self, jobs: int) -> Any:
        return get_reusable_executor(max_workers=jobs, timeout=300, initializer=begin_worker, initargs=(os.getpid(),))


class Together:
    """The processes that torchrun has started, which make one run after the other together. This one is the lead."""

    jobs = 1

    def __init__(self, ranks: Ranks, how: How) -> None:
        self._ranks = ranks
        self.how = replace(how, ranks=ranks.number)

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        """A run that fails in its middle ends them all: the others may be anywhere in it."""
        how = self.how
        for run in runs:
            environment = environment_now(how.device, torch.get_num_threads()) | {"ranks": how.ranks}
            try:
                execute(run, environment, how.device, how.checkpoint_seconds, how.tensorboard, self._ranks)
            except (Died, IndivisibleError):
                pass  # before any other rank knew of it
            except Exception as error:
                raise EngineError(f"{run.folder.name} failed: {why(error)}") from error
            yield run

    def stop(self) -> str:
        self._ranks.close()
        return ""

    def close(self) -> None:
        """Let the others go."""
        self._ranks.hear(None)
        self._ranks.close()


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin_worker(pid: int) -> None:
    """Start a worker of the process ``pid``, which alone decides what Ctrl-C does."""
    ignore_interrupts()
    parent.watch(pid)
