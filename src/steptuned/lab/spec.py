"""What a run is: a small frozen value, whose hash is its identity."""

import hashlib
import json
import math
import re
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

ADDED_FIELDS = {"ranks": 1, "log_early": 0}
"""Fields that a spec got after runs had been made, with their defaults: see :data:`ADDED_OPTIONS`."""
ADDED_OPTIONS: dict[str, dict[str, Any]] = {
    "images": {"size": 32, "eval_rows": 0},
    "autoencoder": {"eval_rows": 0},
}
"""Options that a problem got after runs of it had been made, with their defaults.

At its default such an option is not part of a run's identity, so older runs keep theirs.
"""


class RunSpec(BaseModel):
    """All that determines the numbers of a run, but for the machine and the versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: str
    options: dict[str, Any]
    """Of the problem: its size, the instance, ..."""
    method: str
    hyper: dict[str, Any]
    """The method's hyper-parameters, all of them."""
    seed: int
    scale: str
    budget: int
    """Back-propagations."""
    log_every: int
    """Back-propagations from one record of the log to the next, at least."""
    log_growth: float = 1.0
    """The factor from one record to the next, at least: above 1 the log is even on a logarithmic axis."""
    ranks: int = 1
    """Processes that make the run together. With several, sums are rounded otherwise and each has its BatchNorm statistics."""

    log_early: int = 0
    """About how many log-spaced records there are in the first tenth of the budget.

    0: that tenth is logged like the rest of the run.
    """

    def next_record(self, done: int) -> int:
        """The step of the next log record after step ``done``."""
        for i in range(1, self.log_early + 1):
            early = round((self.budget / 10) ** (i / self.log_early))
            if early > done:
                return early
        return max(done + self.log_every, math.ceil(done * self.log_growth))

    @cached_property
    def identity(self) -> str:
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def canonical(self) -> str:
        fields = {key: value for key, value in self if value != ADDED_FIELDS.get(key)}
        added = ADDED_OPTIONS.get(self.problem, {})
        fields["options"] = {key: value for key, value in self.options.items() if key not in added or value != added[key]}
        return canonical(fields)

    def name(self, default_options: dict[str, Any], default_hyper: dict[str, Any]) -> str:
        """A readable folder name: what differs from the defaults, and enough of the identity to be unique."""
        differs = [
            f"{key}={_short(value)}"
            for values, defaults in ((self.options, default_options), (self.hyper, default_hyper))
            for key, value in sorted(values.items())
            if value != defaults.get(key)
        ]
        words = [
            self.method,
            *differs,
            f"seed={self.seed}",
            f"bp={self.budget}",
            *([f"ranks={self.ranks}"] if self.ranks > 1 else []),
        ]
        readable = re.sub(r"[^A-Za-z0-9=.,_+-]+", "-", "_".join(words))[:140]
        return f"{readable}_{self.identity}"


def canonical(value: Any) -> str:
    """One string for one value: JSON with sorted keys, in which 1 and 1.0 are the same."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def derive_seed(purpose: str, *parts: Any) -> int:
    """A seed for one purpose of a run (its data, its initial point, its mini-batches), by hashing: seeds are never added up."""
    digest = hashlib.sha256(canonical([purpose, *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_short, value))
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
