"""Table 2 as it was measured: wall-clock time per epoch relative to SGD."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steptuned.lab.experiment import SCALES
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.store import write_json

TIMED = ("sgd", "adam", "rmsprop", "step-tuned-sgd")


@dataclass(frozen=True)
class Size:
    rounds: int
    seconds: float | None
    """About how long a method is timed in a round. None: a whole epoch."""


SIZES = {
    "demo": Size(5, 0.5),
    "small": Size(15, 1.5),
    "short": Size(15, 1.5),
    "paper": Size(15, None),
}

PAPER: dict[str, dict[str, float]] = {
    "adam": dict(zip("abcdef", (1.13, 1.13, 1.03, 1.18, 1.04, 1.00), strict=True)),
    "rmsprop": dict(zip("abcdef", (1.06, 1.08, 1.02, 1.13, 1.00, 1.01), strict=True)),
    "step-tuned-sgd": dict(zip("abcdef", (1.67, 1.71, 1.20, 1.47, 0.71, 0.88), strict=True)),
}
"""The paper's Table 2."""


def place(device: str, precision: str) -> str:
    """The device, with the precision if it is not the usual one."""
    return device if precision == "float32" else f"{device}-{precision}"


@dataclass(frozen=True)
class Timing:
    """The measurements on one problem."""

    problem: str
    scale: str
    back_propagations: int
    """Per method and round."""
    seconds: dict[str, list[float]]
    """For each method, one number per round."""
    optimizer: dict[str, list[float]]
    """Seconds per back-propagation in the optimizer alone, measured in separate rounds."""
    batch: list[float]
    """Seconds to make one mini-batch."""
    environment: dict[str, Any]
    precision: str = "float32"

    @property
    def where(self) -> str:
        return place(str(self.environment.get("device", "cpu")), self.precision)

    def ratio(self, method: str) -> tuple[float, float, float]:
        """Median and quartiles of the time relative to SGD in the same round."""
        ratios = np.divide(self.seconds[method], self.seconds["sgd"])
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        return float(middle), float(low), float(high)

    def milliseconds(self, method: str) -> float:
        """Per back-propagation, with the mini-batch and the update."""
        return 1e3 * float(np.median(self.seconds[method])) / self.back_propagations


class Timings:
    """The measurements of a folder: one file per problem, scale and device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "table-2"

    def save(self, timing: Timing) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(timing.problem, timing.scale, timing.where), vars(timing))

    def load(self, letter: str, scale: str, where: str = "cpu") -> Timing | None:
        return _timing(self._path(letter, scale, where))

    def sets(self) -> dict[tuple[str, str], list[Timing]]:
        """All timings by scale and device, the largest scale first, in the order of Table 1."""
        found: dict[tuple[str, str], list[Timing]] = {}
        read = map(_timing, self.folder.glob("*.json"))
        timings = [timing for timing in read if timing is not None]
        order = SCALES[::-1]
        for timing in sorted(timings, key=lambda t: (order.index(t.scale), t.where, t.problem)):
            found.setdefault((timing.scale, timing.where), []).append(timing)
        return found

    def _path(self, letter: str, scale: str, where: str) -> Path:
        return self.folder / f"{letter}-{scale}-{where}.json"


def _timing(path: Path) -> Timing | None:
    """None if the file is missing or is not a timing: then it is measured again."""
    try:
        timing = Timing(**json.loads(path.read_text()))
        measured = all(timing.seconds[name] and timing.optimizer[name] for name in TIMED)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    known = timing.problem in TABLE_1 and timing.scale in SCALES
    return timing if known and measured else None
