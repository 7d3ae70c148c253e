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

PAPER: dict[str, dict[str, float]] = {
    "adam": dict(zip("abcdef", (1.13, 1.13, 1.03, 1.18, 1.04, 1.00), strict=True)),
    "rmsprop": dict(zip("abcdef", (1.06, 1.08, 1.02, 1.13, 1.00, 1.01), strict=True)),
    "step-tuned-sgd": dict(zip("abcdef", (1.67, 1.71, 1.20, 1.47, 0.71, 0.88), strict=True)),
}
"""The paper's Table 2."""


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
        order = SCALES[::-1]
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
            timing.problem in TABLE_1 and timing.scale in SCALES and all(timing.seconds[n] and timing.optimizer[n] for n in TIMED)
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return timing if sound else None
