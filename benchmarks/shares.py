"""Where the processor time of a run goes: its parts as shares of the run.

    python benchmarks/shares.py

One run each of the regression of Figure 3 by all its methods, and of LeNet (setting e, without and
with augmentation) and the autoencoder (setting d) by SGD and Step-Tuned SGD. The runs on images
need STEPTUNED_DATA and are left out without it.

Records are evaluations and lines of the log; their share is that of the whole run, and all others
are shares of the run without records. Overhead is all that is neither forward, backward, optimizer
nor records. The regression computes its loss and gradient together, which counts as backward. The
set-up is that of a later run in a process, for which the data are in memory. The times are
processor times of one thread, without those of the stopwatch itself.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from steptuned import RobbinsMonroLR
from steptuned.lab import run as run_module
from steptuned.lab.data.sets import DataError
from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Store

WORK = ("forward", "backward", "optimizer")
OVERHEAD = ("mini-batches", "set-up", "the rest")
RECORDS = "records"
CALIBRATION = 2000
Seconds = dict[str, float]
"""Processor time by part of a run."""


class Stopwatch:
    """Processor time by part. A part within another one counts alone, except within records."""

    def __init__(self) -> None:
        self.seconds: Seconds = defaultdict(float)
        self._parts = ["the rest"]
        self._own = 0.0
        nothing = self.timed("nothing", lambda: None)
        self._since = time.thread_time()
        for _ in range(CALIBRATION):
            nothing()
        # What the stopwatch itself takes, per part that begins or ends.
        self._own = sum(self.seconds.values()) / (2 * CALIBRATION)
        self.seconds.clear()
        self._since = time.thread_time()

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return work(*args, **kwargs)
            finally:
                self.leave()

        return call

    def _enter(self, part: str) -> None:
        self._count()
        self._parts.append(RECORDS if self._parts[-1] == RECORDS else part)

    def leave(self) -> None:
        """End the current part."""
        self._count()
        self._parts.pop()

    def _count(self) -> None:
        now = time.thread_time()
        self.seconds[self._parts[-1]] += now - self._since - self._own
        self._since = now


@contextlib.contextmanager
def watched(watch: Stopwatch) -> Iterator[None]:
    """Time the parts of all runs."""

    def watch_problem(problem: Any) -> None:
        prepared = "inputs" if hasattr(problem, "inputs") else "_rows"
        parts = {"draw": "mini-batches", prepared: "mini-batches"}
        for name, part in {**parts, "loss": "forward", "backward": "backward"}.items():
            setattr(problem, name, watch.timed(part, getattr(problem, name)))

    def watch_optimizer(optimizer: Any) -> None:
        for name in ("step", "half_step"):
            if hasattr(optimizer, name):
                setattr(optimizer, name, watch.timed("optimizer", getattr(optimizer, name)))

    class WatchedDriver(Driver):
        def __init__(self, name: str, problem: Problem, hyper: dict[str, Any]) -> None:
            super().__init__(name, problem, hyper)
            watch_problem(problem)
            watch_optimizer(self.optimizer)

    make = watch.timed("set-up", Problem.from_dict.__func__)  # type: ignore[attr-defined]
    decay = watch.timed("optimizer", RobbinsMonroLR.step)
    record = watch.timed(RECORDS, run_module._Training._record)
    with (
        mock.patch.object(Problem, "from_dict", classmethod(make)),
        mock.patch.object(run_module, "Driver", WatchedDriver),
        mock.patch.object(RobbinsMonroLR, "step", lambda self: decay(self)),
        mock.patch.object(run_module._Training, "_record", lambda self: record(self)),
    ):
        yield


def parts_of(spec: RunSpec) -> Seconds:
    """Seconds of processor time that each part of a run takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_module.folder_of(Store(Path(folder)), spec)
        watch = Stopwatch()
        with watched(watch):
            run_module.execute(run, {})
        watch.leave()
    return watch.seconds


def specs() -> dict[str, RunSpec]:
    def make(
        problem: str,
        options: dict[str, Any],
        method: str,
        budget: int,
        log_every: int,
        **hyper: Any,
    ) -> RunSpec:
        return RunSpec(
            problem=problem,
            options={**PROBLEMS[problem].defaults, **options},
            method=method,
            hyper={**METHODS[method].defaults, **hyper},
            seed=0,
            scale="bench",
            budget=budget,
            log_every=log_every,
        )

    methods = ("sgd", "stochastic-gv", "exact-gv", "expected-gv", "step-tuned-sgd")
    found = {f"regression, {m}": make("regression", {}, m, 2500, 10, lr=1.0) for m in methods}
    evaluated = {"eval_rows": 1_536, "test_rows": 1_536}  # as at the scale short
    lenet = {**TABLE_1["e"]["options"], **evaluated}
    augmented = {**lenet, "augmentation": "standard"}
    autoencoder = {**TABLE_1["d"]["options"], **evaluated}
    for method in ("sgd", "step-tuned-sgd"):
        found |= {
            f"LeNet, {method}": make("images", lenet, method, 468, 117),
            f"LeNet, augmented, {method}": make("images", augmented, method, 468, 117),
            f"autoencoder, {method}": make("autoencoder", autoencoder, method, 564, 141),
        }
    return found


def line(label: str, runs: list[Seconds]) -> str:
    """The medians of the shares over several runs."""

    def median(share: Callable[[Seconds], float]) -> float:
        return statistics.median(map(share, runs))

    def of_training(*parts: str) -> float:
        return median(lambda s: sum(s[p] for p in parts) / sum(s[p] for p in WORK + OVERHEAD))

    shares = [of_training(part) for part in WORK + OVERHEAD]
    shares += [of_training(*OVERHEAD), median(lambda s: s[RECORDS] / sum(s.values()))]
    seconds = median(lambda s: sum(s.values()))
    return f"{label:33}" + "".join(f"{share:13.1%}" for share in shares) + f"{seconds:9.2f}"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only runs whose label contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step")  # it is timed
    print(f"shares of processor time, median of n = {arguments.rounds} runs")
    columns = (*WORK, *OVERHEAD, "overhead", RECORDS)
    print(f"{'':33}" + "".join(f"{c:>13}" for c in columns) + f"{'seconds':>9}")
    for label, spec in specs().items():
        if arguments.only in label:
            try:
                parts_of(spec.model_copy(update={"budget": 10}))  # warm up, and load the data
            except DataError as error:
                print(f"{label}: left out, {error}")
                continue
            runs = [parts_of(spec) for _ in range(arguments.rounds)]
            print(line(label, runs), flush=True)


if __name__ == "__main__":
    main()
