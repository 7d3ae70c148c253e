"""Measures Table 2: wall-clock time per epoch relative to SGD, with interleaved methods.

Machines are noisy. So every round times all methods one after the other, each round starts with a
different method, and only ratios to SGD within a round count. Warm-up and evaluation are not timed,
and the clock waits for an accelerator to finish.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from steptuned.lab.driver import Driver, no_advice
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.run import environment_now, synchronise
from steptuned.lab.table2 import SIZES, TIMED, Timing, Timings, place

LR = 1e-3
UPDATES = 20
"""Back-propagations that are timed in a row, at most."""
BATCHES = 20


def measure_missing(
    out: Path,
    scale: str,
    device: str,
    precision: str,
    tell: Callable[[str], None],
) -> list[Timing]:
    """Measure the problems of Table 1 that are not yet measured in a folder. Returns all timings.

    ``tell`` is called with what is being measured.
    """
    timings = Timings(out)
    where = place(device, precision)
    for letter, setting in TABLE_1.items():
        if timings.load(letter, scale, where) is None:
            tell(f"table-2: ({letter}) {setting['title']}")
            timings.save(measure(letter, scale, device, precision))
    return timings.sets()[scale, where]


@no_advice()
def measure(letter: str, scale: str, device: str, precision: str = "float32") -> Timing:
    """Time the methods on a problem of Table 1."""
    setting, where, size = TABLE_1[letter], torch.device(device), SIZES[scale]
    problem_class = PROBLEMS[setting["problem"]]
    options = {**setting["options"], "precision": precision}
    clock = Clock(where)
    hyper = {name: {**METHODS[name].defaults, "lr": LR} for name in TIMED}
    drivers = {
        name: Driver(name, problem_class.from_dict(options, 0, where), hyper[name])
        for name in TIMED
    }
    for driver in drivers.values():
        _advance(driver, 4)
    count = _count(drivers["sgd"], size.seconds, clock)
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    for name in _interleaved(size.rounds):
        seconds[name].append(clock.time(partial(_advance, drivers[name], count)))
    optimizer: dict[str, list[float]] = {name: [] for name in TIMED}
    for name in _interleaved(max(3, size.rounds // 3)):
        optimizer[name].append(update_seconds(drivers[name], min(count, UPDATES), clock))
    problem: Any = drivers["sgd"].problem
    batch = [clock.time(lambda: problem.inputs(problem.draw())) for _ in range(BATCHES)]
    environment = environment_now(device, torch.get_num_threads())
    return Timing(letter, scale, count, seconds, optimizer, batch, environment, precision)


@dataclass(frozen=True)
class Clock:
    device: torch.device

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that some work takes, including work on the device."""
        synchronise(self.device)
        start = time.perf_counter()
        work()
        synchronise(self.device)
        return time.perf_counter() - start


def update_seconds(driver: Driver, back_propagations: int, clock: Clock) -> float:
    """Seconds per back-propagation in the optimizer alone.

    The optimizer gets a closure that measures itself. The rest of the step is the optimizer.
    """
    passes: list[float] = []
    total = 0.0
    while len(passes) < back_propagations:
        closure = _measured_closure(driver, passes, clock)
        total += clock.time(partial(driver.optimizer.step, closure))
    return (total - sum(passes)) / len(passes)


def _measured_closure(driver: Driver, seconds: list[float], clock: Clock) -> Callable[[], Any]:
    """Back-propagates the loss of a new mini-batch and appends the seconds that takes."""
    batch = driver.problem.draw()

    def back_propagate() -> None:
        driver.optimizer.zero_grad()
        driver.problem.loss(batch).backward()

    return lambda: seconds.append(clock.time(back_propagate))


def _count(sgd: Driver, seconds: float | None, clock: Clock) -> int:
    """Back-propagations per round: an even number, for whole iterations of Step-Tuned SGD."""
    wanted = sgd.problem.stream.per_epoch
    if seconds is not None:
        one = clock.time(lambda: _advance(sgd, 2)) / 2
        wanted = min(wanted, round(seconds / one))
    return max(2, wanted + wanted % 2)


def _advance(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.advance()


def _interleaved(rounds: int) -> Iterator[str]:
    """The methods of all rounds. Each round starts with a different method."""
    for i in range(rounds):
        for j in range(len(TIMED)):
            yield TIMED[(i + j) % len(TIMED)]
