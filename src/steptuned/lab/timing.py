"""Table 2: wall-clock time per epoch relative to SGD, the methods interleaved in one process.

Machines are noisy, so every round times all methods one after the other, each round beginning with another one, and what counts
is the ratio to SGD within a round. Warm-up and evaluation are left out; an accelerator is waited for before the clock is read.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steptuned.lab.methods import METHODS, Driver
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.run import environment_now, synchronise
from steptuned.lab.table2 import TIMED, Timing, Timings, place

LR = 1e-3


@dataclass(frozen=True)
class Size:
    rounds: int
    seconds: float | None
    """How long a method is timed in a round, about; None: a whole epoch."""


SIZES = {"demo": Size(5, 0.5), "small": Size(15, 1.5), "short": Size(15, 1.5), "paper": Size(15, None)}


def measure_missing(
    out: Path,
    scale: str,
    device: str,
    precision: str,
    tell: Callable[[str], None],
) -> list[Timing]:
    """Measure the problems of Table 1 that are not yet measured in a folder. Returns all timings.

    ``tell`` is told what is being measured.
    """
    timings = Timings(out)
    where = place(device, precision)
    for letter, setting in TABLE_1.items():
        if timings.load(letter, scale, where) is None:
            tell(f"table-2: ({letter}) {setting['title']}")
            timings.save(measure(letter, scale, device, precision))
    return timings.sets()[scale, where]


def measure(letter: str, scale: str, device: str, precision: str = "float32") -> Timing:
    """Time the methods on a problem of Table 1."""
    setting = TABLE_1[letter]
    problem_class = PROBLEMS[setting["problem"]]
    options = {**problem_class.defaults, **setting["options"], "precision": precision}
    where = torch.device(device)
    drivers = {}
    for name in TIMED:
        drivers[name] = Driver(name, problem_class(options, 0, where), {**METHODS[name].defaults, "lr": LR})

    def timed(work: Callable[[], object]) -> float:
        synchronise(where)
        start = time.perf_counter()
        work()
        synchronise(where)
        return time.perf_counter() - start

    def advance(name: str, count: int) -> Callable[[], None]:
        def several() -> None:
            for _ in range(count):
                drivers[name].advance()

        return several

    for name in TIMED:
        advance(name, 4)()
    size = SIZES[scale]
    per_epoch = drivers["sgd"].problem.stream.per_epoch
    wanted = per_epoch if size.seconds is None else min(per_epoch, round(size.seconds / (timed(advance("sgd", 2)) / 2)))
    count = max(2, wanted + wanted % 2)  # whole iterations of Step-Tuned SGD
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    for name in _interleaved(size.rounds):
        seconds[name].append(timed(advance(name, count)))
    optimizer: dict[str, list[float]] = {name: [] for name in TIMED}
    for name in _interleaved(max(3, size.rounds // 3)):
        inside = _Clock(drivers[name].optimizer, timed)
        advance(name, min(count, 20))()
        optimizer[name].append(inside.stop() / min(count, 20))
    problem: Any = drivers["sgd"].problem
    batch = [timed(lambda: problem.inputs(problem.draw())) for _ in range(20)]
    environment = environment_now(device, torch.get_num_threads())
    return Timing(letter, scale, count, seconds, optimizer, batch, environment, precision)


def _interleaved(rounds: int) -> Iterator[str]:
    for i in range(rounds):
        for j in range(len(TIMED)):
            yield TIMED[(i + j) % len(TIMED)]


class _Clock:
    """Adds up the time inside an optimizer's own methods."""

    def __init__(self, optimizer: Any, timed: Callable[[Callable[[], object]], float]) -> None:
        self._optimizer, self._timed, self._seconds = optimizer, timed, 0.0
        self._names = [name for name in ("step", "half_step") if hasattr(optimizer, name)]
        self._before = {name: vars(optimizer).get(name) for name in self._names}
        for name in self._names:
            setattr(optimizer, name, self._counted(getattr(optimizer, name)))

    def _counted(self, method: Callable[[], object]) -> Callable[[], None]:
        def counted() -> None:
            self._seconds += self._timed(method)

        return counted

    def stop(self) -> float:
        for name, before in self._before.items():
            if before is None:
                delattr(self._optimizer, name)
            else:
                setattr(self._optimizer, name, before)
        return self._seconds
