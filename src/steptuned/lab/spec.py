"""A run as a small frozen value. Its hash is its identity."""

import hashlib
import json
import math
import re
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

ADDED_FIELDS = {"ranks": 1, "log_early": 0}
"""Fields added to a spec after runs had been made, with defaults; see :data:`ADDED_OPTIONS`."""
ADDED_OPTIONS: dict[str, dict[str, Any]] = {
    "images": {"size": 32, "eval_rows": 0},
    "autoencoder": {"eval_rows": 0},
}
"""Options added to a problem after runs of it had been made, with their defaults.

An option with its default value is left out of the identity, so older runs keep theirs.
"""


class RunSpec(BaseModel):
    """Everything that determines the numbers of a run, except for the machine and the versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: str
    options: dict[str, Any]
    """The options of the problem, all of them."""
    method: str
    hyper: dict[str, Any]
    """The method's hyper-parameters, all of them."""
    seed: int
    scale: str
    budget: int
    """Back-propagations."""
    log_every: int
    """The smallest number of back-propagations between two log records."""
    log_growth: float = 1.0
    """The smallest ratio of the steps of two log records.

    Above 1, the records are evenly spaced on a logarithmic axis.
    """
    ranks: int = 1
    """Processes that share the run.

    With several, sums are rounded differently and each rank has its own BatchNorm statistics.
    """
    log_early: int = 0
    """About how many log-spaced records there are in the first tenth of the budget.

    0: the first tenth is logged like the rest of the run.
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
        fields["options"] = {
            key: value
            for key, value in self.options.items()
            if key not in added or value != added[key]
        }
        return canonical(fields)

    def name(self, default_options: dict[str, Any], default_hyper: dict[str, Any]) -> str:
        """A readable folder name: what differs from the defaults, and the identity."""
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
    """The value as JSON with sorted keys, in which 1 and 1.0 are the same."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def derive_seed(purpose: str, *parts: Any) -> int:
    """A seed for one purpose of a run: its data, its initial point, its mini-batches.

    It is a hash, so that seeds of different purposes are never related.
    """
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
    return (
        f"{value:g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else str(value)
    )
