"""Runs on a Dask cluster. Only here is `distributed` imported, so the rest works without it.

The scheduler hands runs to workers and hands them on when a worker dies; nothing else is trusted to it. Who may write a run is
settled by the lock in its folder, and how often its process died is counted there, so workers, schedulers and clients may come
and go.
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptuned.lab.engine import EngineError, How, share, work
from steptuned.lab.store import ENDED, TRIES, Run

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_SECONDS = 10
SHARED_SECONDS = 60.0


def connect(address: str, how: How) -> "Dask":
    """The cluster of the scheduler at an address, or one of `local:N` workers, which ends with this process."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise EngineError("--dask needs the package distributed: pip install 'steptuned[dask]'") from None
    for name in ("distributed", "distributed.client"):  # what matters is said in a sentence
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if address.startswith("local:"):
        if not re.fullmatch("local:[1-9][0-9]*", address):
            raise EngineError(f"--dask {address} must name a number of workers, such as local:2")
        workers = int(address.removeprefix("local:"))
        cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=0,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )
        return Dask(Client(cluster), cluster.scheduler_address, replace(how, threads=share(workers)), foreign=False)
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise EngineError(f"no Dask scheduler answers at {address} ({error}): start one with `dask scheduler`") from None
    engine = Dask(client, address, how, foreign=True)
    engine.refuse_threads()
    return engine


def one_thread(address: str, threads: int) -> EngineError:
    return EngineError(
        f"a worker of {address} has {threads} threads, but runs share the random state of their process, so that each needs one "
        f"of its own: start workers with `dask worker {address} --nthreads 1 --nworkers N`"
    )


@dataclass(frozen=True)
class Try:
    """A run that was handed to the scheduler."""

    run: Run
    future: "Future[None]"
    signs: list[Any]
    """What the store showed when the scheduler had given it up before."""
    barren: int = 0
    """How many times it was given up since, while no worker began any run."""


class Dask:
    """The workers of a scheduler."""

    def __init__(self, client: "Client", address: str, how: How, foreign: bool) -> None:
        self.client, self.address, self.foreign = client, address, foreign
        self.how = replace(how, tensorboard=how.tensorboard and how.tensorboard.absolute())

    @property
    def jobs(self) -> int:
        return max(1, len(self._threads()))

    def refuse_threads(self) -> None:
        threads = max(self._threads().values(), default=1)
        if threads > 1:
            raise one_thread(self.address, threads)

    def process(self, runs: list[Run]) -> Iterator[Run | str]:
        tries = [Try(run, self._submit(run), []) for run in runs]
        while tries:
            for tried in [tried for tried in tries if tried.future.done()]:
                if self._was_given_up(tried.future):
                    tries[tries.index(tried)] = self._again(tried, [len(tries), *(run.claimant() for run in runs)])
                else:
                    tries.remove(tried)
                    _wait_for(tried.run)
                    yield tried.run
            yield self._waits_for()
            time.sleep(0.2)

    def _submit(self, run: Run) -> "Future[None]":
        data = os.environ.get("STEPTUNED_DATA")
        where = data and str(Path(data).absolute())
        return self.client.submit(task, run.folder.absolute(), self.how, where, self.address, pure=False)

    def _was_given_up(self, future: "Future[None]") -> bool:
        """By the scheduler, because workers died that had it; which may have been another run's fault."""
        from distributed import KilledWorker

        if future.status == "cancelled":
            raise self._gone()
        error = future.exception()
        if isinstance(error, EngineError):
            raise error
        if error is not None and not isinstance(error, KilledWorker):
            raise EngineError(f"a worker of {self.address} cannot make runs ({type(error).__name__}: {error})")
        return error is not None

    def _again(self, tried: Try, signs: list[Any]) -> Try:
        """Hand a run over once more. The store counts the deaths of those who began it; here only who began nothing is counted."""
        barren = tried.barren + 1 if signs == tried.signs else 0
        if barren == TRIES:
            raise EngineError(f"the workers of {self.address} die before they begin a run: see what they say")
        return Try(tried.run, self._submit(tried.run), signs, barren)

    def _waits_for(self) -> str:
        return "" if self._threads() else f"there is no worker at {self.address}; waiting for one"

    def _threads(self) -> dict[str, int]:
        """Of each worker there is now."""
        try:
            return self.client.nthreads()
        except Exception:  # it depends on the moment which one
            raise self._gone() from None

    def _gone(self) -> EngineError:
        return EngineError(f"the Dask scheduler at {self.address} is gone")

    def stop(self) -> str:
        self.client.close(timeout=CONNECT_SECONDS)
        return "; what the cluster's workers are at goes to its end" if self.foreign else ""

    def close(self) -> None:
        self.client.close(timeout=CONNECT_SECONDS)


def task(folder: Path, how: How, data: str | None, address: str) -> None:
    """What a worker of the cluster does with one run."""
    from distributed import get_worker

    worker = get_worker()
    if worker.state.nthreads > 1:
        raise one_thread(address, worker.state.nthreads)
    if not (folder / "spec.json").exists():
        raise EngineError(f"the worker {worker.address} does not see {folder}: give a folder as --out that all workers share")
    with _data(data):
        work(folder, how)


@contextmanager
def _data(folder: str | None) -> Iterator[None]:
    """Where data sets are: where the worker says, or else where the client says."""
    if folder is None or "STEPTUNED_DATA" in os.environ:
        yield
        return
    os.environ["STEPTUNED_DATA"] = folder
    try:
        yield
    finally:
        del os.environ["STEPTUNED_DATA"]


def _wait_for(run: Run) -> None:
    """A network folder may show late what was written on another machine."""
    deadline = time.monotonic() + SHARED_SECONDS
    while run.status() not in ENDED:
        if time.monotonic() > deadline:
            raise EngineError(
                f"{run.folder.absolute()} has ended, but that is not seen here: give a folder as --out that all share"
            )
        os.listdir(run.folder)  # makes NFS look again
        time.sleep(0.1)
