"""Table 2: wall-clock time per epoch relative to SGD, the methods interleaved in one process.

Machines are noisy, so every round times all methods one after the other, each round beginning with another one, and what counts
is the ratio to SGD within a round. Warm-up and evaluation are left out; an accelerator is waited for before the clock is read.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steptuned.lab.methods import METHODS, Driver
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.run import environment_now, synchronise
from steptuned.lab.store import write_json

TIMED = ("sgd", "adam", "rmsprop", "step-tuned-sgd")
LR = 1e-3

PAPER: dict[str, dict[str, float]] = {
    "adam": dict(zip("abcdef", (1.13, 1.13, 1.03, 1.18, 1.04, 1.00), strict=True)),
    "rmsprop": dict(zip("abcdef", (1.06, 1.08, 1.02, 1.13, 1.00, 1.01), strict=True)),
    "step-tuned-sgd": dict(zip("abcdef", (1.67, 1.71, 1.20, 1.47, 0.71, 0.88), strict=True)),
}
"""The paper's Table 2."""


@dataclass(frozen=True)
class Size:
    rounds: int
    seconds: float | None
    """How long a method is timed in a round, about; None: a whole epoch."""


SIZES = {"demo": Size(5, 0.5), "small": Size(15, 1.5), "paper": Size(10, None)}


@dataclass(frozen=True)
class Timing:
    """What was measured on one problem."""

    problem: str
    scale: str
    back_propagations: int
    """Of one method in one round."""
    seconds: dict[str, list[float]]
    """Of each method, round by round."""
    optimizer: dict[str, list[float]]
    """Seconds a back-propagation in the optimizer alone, measured in rounds of their own."""
    batch: list[float]
    """Seconds to make one mini-batch."""
    environment: dict[str, Any]
    precision: str = "float32"

    @property
    def where(self) -> str:
        """The device, and the arithmetic if it is not the usual one."""
        device = str(self.environment.get("device", "cpu"))
        return device if self.precision == "float32" else f"{device}-{self.precision}"

    def ratio(self, method: str) -> tuple[float, float, float]:
        """Median and quartiles of the time relative to SGD's in the same round."""
        low, middle, high = np.quantile(np.divide(self.seconds[method], self.seconds["sgd"]), (0.25, 0.5, 0.75))
        return float(middle), float(low), float(high)

    def milliseconds(self, method: str) -> float:
        """A back-propagation with all that belongs to it."""
        return 1e3 * float(np.median(self.seconds[method])) / self.back_propagations


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


class Timings:
    """The measurements of a folder, one file a problem, scale and device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "table-2"

    def save(self, timing: Timing) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(timing.problem, timing.scale, timing.where), vars(timing))

    def load(self, letter: str, scale: str, where: str = "cpu") -> Timing | None:
        return _timing(self._path(letter, scale, where))

    def sets(self) -> dict[tuple[str, str], list[Timing]]:
        """All there are, by scale, the largest first, and device; each in the order of Table 1."""
        found: dict[tuple[str, str], list[Timing]] = {}
        timings = [timing for timing in map(_timing, self.folder.glob("*.json")) if timing is not None]
        order = list(SIZES)[::-1]
        for timing in sorted(timings, key=lambda t: (order.index(t.scale), t.where, t.problem)):
            found.setdefault((timing.scale, timing.where), []).append(timing)
        return found

    def _path(self, letter: str, scale: str, where: str) -> Path:
        return self.folder / f"{letter}-{scale}-{where}.json"


def _timing(path: Path) -> Timing | None:
    """None where it is not there, or of another origin: it is measured again."""
    try:
        timing = Timing(**json.loads(path.read_text()))
        sound = (
            timing.problem in TABLE_1 and timing.scale in SIZES and all(timing.seconds[n] and timing.optimizer[n] for n in TIMED)
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return timing if sound else None
