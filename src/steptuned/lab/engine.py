"""Engines execute many runs. A sweep submits the runs; how each ended is read from the store."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from joblib.externals.loky import get_reusable_executor

from steptuned.lab.extensions import extend
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.ranks import Ranks
from steptuned.lab.run import (
    CHECKPOINT_SECONDS,
    Abandoned,
    IndivisibleError,
    environment_now,
    execute,
)
from steptuned.lab.store import ENDED, TRIES, Died, Run, reason_of

T = TypeVar("T")
GRACE_SECONDS = 60.0
"""How long a worker whose parent is gone has to save a checkpoint."""


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker executes a run."""

    device: str = "cpu"
    """A name, or `auto`: the best device of the worker."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    tensorboard: Path | None = None
    threads: int | None = None
    """Threads of torch; None: the default of the worker."""
    ranks: int = 1
    """Processes that share each run."""
    extensions: tuple[Path, ...] = ()
    """Files with problems and methods that are not part of the package."""


class EngineError(Exception):
    """The engine cannot continue. What was computed is in the store."""


class Engine(Protocol):
    config: WorkerConfig

    @property
    def jobs(self) -> int:
        """How many runs are executed at the same time."""

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        """Execute the runs. Yields each run when it has ended.

        In between it yields what the engine is waiting for, or an empty string.
        """

    def measure(self, measured: Callable[[WorkerConfig], T]) -> list[T]:
        """Call a function that measures time, if possible where and as runs are executed."""

    def stop(self) -> str:
        """Start no more runs. Returns a remark about those that are still running."""

    def close(self) -> None:
        """Called after the last run."""


def device_here(name: str, double: bool = False) -> str:
    """The device of that name. `auto` is an accelerator if there is one.

    ``double``: it must support double precision.
    """
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
    """Threads of torch per run, if this many runs are executed at the same time.

    They share the cores. OMP_NUM_THREADS, which limits torch's threads, is respected.
    """
    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // jobs))


def work(folder: Path, config: WorkerConfig) -> None:
    """Execute one run in a worker."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = Run(folder)
    try:
        extend(config.extensions)
        device = device_here(config.device, PROBLEMS[run.spec.problem].double)
        environment = environment_now(device, torch.get_num_threads())
        with parent.working():
            execute(
                run,
                environment,
                device,
                config.checkpoint_seconds,
                config.tensorboard,
                is_abandoned=parent.is_gone,
            )
    except Exception as error:
        if run.failure() is None:  # otherwise the reason is stored already
            run.fail(reason_of(error))


class Parent:
    """The process that started this worker. The worker must not outlive it.

    A killed sweep cannot stop its workers. Therefore a run whose parent is gone saves a checkpoint
    before its next back-propagation, and its worker exits. An idle worker exits within a second.
    A worker that does not reach its next back-propagation in `GRACE_SECONDS` exits anyway. This
    does no harm: its run resumes from the last checkpoint. Windows does not report that a parent
    is gone.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._at_work = threading.Lock()

    def watch(self, pid: int) -> None:
        """Called when a worker starts."""
        self._pid = pid
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def is_gone(self) -> bool:
        return self._pid is not None and os.getppid() != self._pid

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep the worker alive during a run, so that the run can save a checkpoint."""
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
"""The parent of this process, if this is a worker of :class:`LocalEngine`."""


class LocalEngine:
    """Executes runs in worker processes on this machine."""

    def __init__(self, jobs: int, config: WorkerConfig) -> None:
        self.jobs = jobs
        self.config = replace(config, threads=share(jobs))

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        """Execute the runs. A run whose worker dies twice is marked as failed.

        When a worker dies, the pool ends with it. The runs that it may have been executing are
        tried again one at a time.
        """
        left = list(runs)
        fruitless = 0
        while left:
            before = len(left)
            suspects = yield from self._pool(left, self.jobs, left)
            for run in suspects:
                if (yield from self._pool([run], 1, left)):
                    run.fail("its process died twice")
            # Runs that ended although their worker did not report it.
            for run in [run for run in left if run.status() in ENDED]:
                left.remove(run)
                yield run
            fruitless = 0 if suspects or len(left) < before else fruitless + 1
            if fruitless == TRIES:
                raise EngineError(
                    "worker processes die before they start a run: "
                    "is there enough memory for so many jobs?"
                )

    def _pool(
        self, runs: list[Run], jobs: int, left: list[Run]
    ) -> Generator[Run | str, None, list[Run]]:
        """Run in parallel until all runs have ended or a worker dies.

        Returns the runs that the dead worker may have been executing.
        """
        executor = self._executor(jobs)
        futures: dict[Future[None], Run] = {
            executor.submit(work, run.folder, self.config): run for run in runs
        }
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

    def measure(self, measured: Callable[[WorkerConfig], T]) -> list[T]:
        """Call a function in all workers at the same time: they share caches and memory."""
        if self.jobs > 1:
            executor = self._executor(self.jobs)
            calls = [executor.submit(measured, self.config) for _ in range(self.jobs)]
            try:
                return [call.result() for call in calls]
            except BrokenProcessPool:
                pass  # `process` reports workers that die
        return [measured(self.config)]

    def stop(self) -> str:
        self._executor(self.jobs).shutdown(wait=False, kill_workers=True)
        return ""

    def close(self) -> None:
        """Idle workers end by themselves."""

    def _executor(self, jobs: int) -> Any:
        return get_reusable_executor(
            max_workers=jobs, timeout=300, initializer=begin_worker, initargs=(os.getpid(),)
        )


class TorchrunEngine:
    """The engine of the lead under torchrun: all ranks share one run after another."""

    jobs = 1

    def __init__(self, ranks: Ranks, config: WorkerConfig) -> None:
        self._ranks = ranks
        self.config = replace(config, ranks=ranks.world_size)

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        """Execute the runs. An error in the middle of a run ends all ranks."""
        config = self.config
        for run in runs:
            environment = environment_now(config.device, torch.get_num_threads())
            try:
                execute(
                    run,
                    environment | {"ranks": config.ranks},
                    config.device,
                    config.checkpoint_seconds,
                    config.tensorboard,
                    self._ranks,
                )
            except (Died, IndivisibleError):
                pass  # refused before the other ranks had started it
            except Exception as error:
                raise EngineError(f"{run.folder.name} failed: {reason_of(error)}") from error
            yield run

    def measure(self, measured: Callable[[WorkerConfig], T]) -> list[T]:
        return [measured(self.config)]

    def stop(self) -> str:
        self._ranks.close()
        return ""

    def close(self) -> None:
        """Tell the other ranks that there are no more runs."""
        self._ranks.broadcast_object(None)
        self._ranks.close()


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin_worker(pid: int) -> None:
    """Start a worker of the process ``pid``. Only that process handles Ctrl-C."""
    ignore_interrupts()
    parent.watch(pid)
