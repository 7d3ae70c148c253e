"""What a run logs, as one table. Figures, tables, the page and the plan read it from here.

To add a measure, log it (in a problem's ``evaluate`` or a method's diagnostics) and add one row to
:data:`MEASURES`. To change an axis everywhere, change its row.
"""

from dataclasses import dataclass
from typing import Literal

QUARTILES = ("low", "median", "high")
"""Suffixes of the keys of a measure that is logged as quartiles, such as ``gamma median``."""


@dataclass(frozen=True)
class Measure:
    """One measure of the log and how it is shown."""

    key: str
    """Its key in a log record."""
    label: str
    """Its name on axes."""
    axis: Literal["linear", "log", "share"] = "linear"
    """``share`` is linear, from 0 to 1."""
    better: Literal["min", "max"] | None = None
    """Whether a smaller or a larger value is better. None: methods are not compared by it."""
    format: str = ".4g"
    height: float = 0.0
    """Height of its row in figures, in inches. 0: figures do not draw it."""
    shown: bool = True
    """Whether the page draws it before the reader selects it."""
    replaced_by: str = ""
    """Figures draw the measure with this key in its row instead, if it was logged."""
    quartiles: bool = False
    """Whether it is logged as quartiles over the iterations since the last record."""
    short: str = ""

    @property
    def name(self) -> str:
        """Its name in tables and sentences."""
        return self.short or self.key

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a log record that hold it."""
        return tuple(f"{self.key} {part}" for part in QUARTILES) if self.quartiles else (self.key,)

    @property
    def middle(self) -> str:
        """The key of its value, or of its median."""
        return f"{self.key} median" if self.quartiles else self.key


MEASURES = (
    Measure("loss", "training loss J", "log", "min", height=3.0, short="J"),
    Measure("plain loss", "plain training loss", "log", "min", height=2.2),
    Measure("test loss", "test loss", "log", "min", height=2.0, replaced_by="accuracy"),
    Measure("accuracy", "test accuracy", "linear", "max", ".2%", height=2.0),
    Measure("gamma", "gamma", "log", height=1.5, quartiles=True),
    Measure("raw gamma", "raw gamma", "log", height=1.5, quartiles=True),
    Measure("negative curvature", "share of negative curvature", "share", shown=False),
    Measure("at lower", "share at the lower bound", "share", shown=False),
    Measure("at upper", "share at the upper bound", "share", shown=False),
    Measure("reference", "running reference of the raw gamma", "log", shown=False),
    Measure("effective lr", "effective lr", "log", shown=False),
    Measure("negative", "negative curvature", "share"),  # only in older logs
)
BY_KEY = {measure.key: measure for measure in MEASURES}
LOSS = BY_KEY["loss"]
COMPARED = tuple(measure for measure in MEASURES if measure.better is not None)
"""The measures by which methods are compared."""

DISTANCE = Measure("distance", "J - J*", "log", "min")
"""Computed from the loss, where the experiment has a J*."""
SMALLEST_GRADIENT = Measure("smallest", "min of the mean of |grad J|^2", "log", "min")
"""Computed from the gradients of all seeds, for the rate of convergence."""

COUNTS = {
    "bp": "back-propagations",
    "batches": "mini-batches",
    "samples": "samples",
    "seconds": "seconds of training",
    "evaluations": "evaluations of the loss",
}
"""What a record counts since the run began, with labels."""
X_AXES = {
    "bp": COUNTS["bp"],
    "epochs": "epochs (of back-propagations)",
    "samples": COUNTS["samples"],
    "seconds": COUNTS["seconds"],
}
"""What a curve can be drawn over. Epochs are computed from back-propagations."""


def logged(record: dict[str, object], measure: Measure) -> bool:
    """Whether a log record holds a measure, as quartiles or as a single value (older logs)."""
    return measure.key in record or measure.middle in record
