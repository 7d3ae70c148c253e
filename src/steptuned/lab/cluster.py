"""Runs on a Dask cluster. Only this module imports `distributed`; everything else works without it.

The scheduler assigns runs to workers, and assigns them again when a worker dies. Everything else is
decided by the folder of the run: its lock says who may write, and it counts the workers that died.
So workers, schedulers and clients may come and go.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptuned.lab.engine import EngineError, T, WorkerConfig, share, work
from steptuned.lab.store import ENDED, TRIES, Run

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_SECONDS = 10
SHARED_SECONDS = 60.0


def connect(address: str, config: WorkerConfig) -> "DaskEngine":
    """Connect to the cluster of the scheduler at an address.

    `local:N` starts a cluster of N workers that ends with this process.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise EngineError(
            "--dask needs the package distributed: pip install 'steptuned[dask]'"
        ) from None
    for name in ("distributed", "distributed.client"):  # errors are reported in one sentence
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
        config = replace(config, threads=share(workers))
        return DaskEngine(Client(cluster), cluster.scheduler_address, config, foreign=False)
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"no Dask scheduler answers at {address} ({error}): start one with `dask scheduler`"
        ) from None
    engine = DaskEngine(client, address, config, foreign=True)
    engine.refuse_threads()
    return engine


def one_thread(address: str, threads: int) -> EngineError:
    return EngineError(
        f"a worker of {address} has {threads} threads, but each run needs its own process, "
        f"because threads share the random state: start workers with "
        f"`dask worker {address} --nthreads 1 --nworkers N`"
    )


@dataclass(frozen=True)
class Try:
    """A run that was submitted to the scheduler."""

    run: Run
    future: "Future[None]"
    state: list[Any]
    """The state of the store when the scheduler last gave the run up."""
    fruitless: int = 0
    """How often it was given up since then without any worker starting a run."""


class DaskEngine:
    """The workers of a Dask scheduler."""

    def __init__(self, client: "Client", address: str, config: WorkerConfig, foreign: bool) -> None:
        self.client, self.address, self.foreign = client, address, foreign
        tensorboard = config.tensorboard and config.tensorboard.absolute()
        self.config = replace(config, tensorboard=tensorboard)

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
                    tries[tries.index(tried)] = self._again(
                        tried, [len(tries), *(run.claimant() for run in runs)]
                    )
                else:
                    tries.remove(tried)
                    _wait_for(tried.run)
                    yield tried.run
            yield self._waits_for()
            time.sleep(0.2)

    def measure(self, measured: Callable[[WorkerConfig], T]) -> list[T]:
        return [measured(self.config)]

    def _submit(self, run: Run) -> "Future[None]":
        data = os.environ.get("STEPTUNED_DATA")
        where = data and str(Path(data).absolute())
        arguments = run.folder.absolute(), self.config, where, self.address
        return self.client.submit(task, *arguments, pure=False)

    def _was_given_up(self, future: "Future[None]") -> bool:
        """Whether the scheduler gave a run up because workers died during it.

        Another run may have killed these workers.
        """
        from distributed import KilledWorker

        if future.status == "cancelled":
            raise self._gone()
        error = future.exception()
        if isinstance(error, EngineError):
            raise error
        if error is not None and not isinstance(error, KilledWorker):
            raise EngineError(
                f"a worker of {self.address} cannot execute runs ({type(error).__name__}: {error})"
            )
        return error is not None

    def _again(self, tried: Try, state: list[Any]) -> Try:
        """Submit a run again.

        The store counts workers that died during the run. Only workers that died before they
        started any run are counted here.
        """
        fruitless = tried.fruitless + 1 if state == tried.state else 0
        if fruitless == TRIES:
            raise EngineError(
                f"the workers of {self.address} die before they start a run: see their output",
            )
        return Try(tried.run, self._submit(tried.run), state, fruitless)

    def _waits_for(self) -> str:
        return "" if self._threads() else f"there is no worker at {self.address}; waiting for one"

    def _threads(self) -> dict[str, int]:
        """The number of threads of each worker."""
        try:
            return self.client.nthreads()
        except Exception:  # the type of the exception depends on the moment
            raise self._gone() from None

    def _gone(self) -> EngineError:
        return EngineError(f"the Dask scheduler at {self.address} is gone")

    def stop(self) -> str:
        self.client.close(timeout=CONNECT_SECONDS)
        return "; the cluster's workers finish the runs they have started" if self.foreign else ""

    def close(self) -> None:
        self.client.close(timeout=CONNECT_SECONDS)


def task(folder: Path, config: WorkerConfig, data: str | None, address: str) -> None:
    """Execute one run in a worker of the cluster."""
    from distributed import get_worker

    worker = get_worker()
    if worker.state.nthreads > 1:
        raise one_thread(address, worker.state.nthreads)
    if not (folder / "spec.json").exists():
        raise EngineError(
            f"the worker {worker.address} does not see {folder}: "
            "give a folder as --out that all workers share"
        )
    with _data(data):
        work(folder, config)


@contextmanager
def _data(folder: str | None) -> Iterator[None]:
    """Set the folder of data sets to the client's, unless the worker has its own."""
    if folder is None or "STEPTUNED_DATA" in os.environ:
        yield
        return
    os.environ["STEPTUNED_DATA"] = folder
    try:
        yield
    finally:
        del os.environ["STEPTUNED_DATA"]


def _wait_for(run: Run) -> None:
    """Wait until the result is visible: network folders may lag behind."""
    deadline = time.monotonic() + SHARED_SECONDS
    while run.status() not in ENDED:
        if time.monotonic() > deadline:
            raise EngineError(
                f"{run.folder.absolute()} has ended, but this machine does not see it: "
                "give a folder as --out that all machines share"
            )
        os.listdir(run.folder)  # makes NFS refresh the folder
        time.sleep(0.1)
