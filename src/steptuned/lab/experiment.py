"""An experiment: a TOML file with a problem, methods, their grids and budgets."""

import itertools
import sys
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptuned.lab.methods import METHODS
from steptuned.lab.options import OptionError, Options, listed
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import ProblemOptions
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.spec import RunSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALES = ("demo", "small", "short", "paper")


class ExperimentError(ValueError):
    """A mistake in an experiment file, in one sentence."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Strict):
    """The length of a run, in iterations (back-propagations) or in epochs of ceil(N / batch)."""

    epochs: float | None = Field(default=None, gt=0)
    iterations: int | None = Field(default=None, gt=0)

    def back_propagations(self, per_epoch: int) -> int:
        return (
            self.iterations
            if self.iterations is not None
            else round((self.epochs or 1) * per_epoch)
        )


class Selection(_Strict):
    """How the winner of the grid is chosen."""

    rule: Literal["smallest loss", "soonest"] = "smallest loss"
    after: Budget | None = None
    """The budget of the grid search; by default that of the experiment."""
    within: float = Field(default=0.1, gt=0)
    """soonest: how close to J* a run must come."""
    star_after: Budget | None = None
    """soonest: J* is the best loss of all methods after this budget."""


class Entry(_Strict):
    """A method in the comparison, with the axes of its grid."""

    name: str
    method: str
    label: str
    axes: dict[str, list[Any]]
    follows: str | None = None
    """The entry whose winner sets the learning rate: its lr times the median gamma of its runs."""

    def grid(self) -> list[dict[str, Any]]:
        values = itertools.product(*self.axes.values())
        return [dict(zip(self.axes, combination, strict=True)) for combination in values]


class Experiment(_Strict):
    name: str
    scale: str
    title: str
    figure: str
    note: str = ""
    """What readers of the results should know."""
    problem: str
    options: dict[str, Any]
    instances: int = Field(default=1, ge=1)
    """The number of instances, for problems with the option ``instance``."""
    tune: Literal["first", "each"] = "first"
    """The instances on which the grid is searched."""
    seeds: int = Field(default=3, ge=1)
    """The number of reported seeds."""
    first_seed: int = Field(default=0, ge=0)
    """The first reported seed.

    Hyper-parameters are chosen on seed 0, so experiments from files report seeds from 1 on.
    """
    budget: Budget
    log_every: Budget = Budget(iterations=1)
    log_growth: float = Field(default=1.0, ge=1.0)
    log_early: int = Field(default=0, ge=0)
    """About how many log-spaced records there are in the first tenth of each run."""
    selection: Selection = Selection()
    entries: list[Entry]
    ranks: int = 1
    """Processes that share each run: as many as torchrun has started."""

    def spec(
        self, entry: Entry, hyper: dict[str, Any], seed: int, instance: int, budget: Budget
    ) -> RunSpec:
        options = self.problem_options
        if "instance" in type(options).model_fields:
            options = options.model_copy(update={"instance": instance})
        log_every = self.log_every.back_propagations(options.per_epoch)
        return RunSpec(
            problem=self.problem,
            options=options.as_dict(),
            method=entry.method,
            hyper=hyper,
            seed=seed,
            scale=self.scale,
            budget=budget.back_propagations(options.per_epoch),
            log_every=max(1, log_every),
            log_growth=self.log_growth,
            log_early=self.log_early,
            ranks=self.ranks,
        )

    @property
    def problem_options(self) -> ProblemOptions:
        """The options of the problem. Those that the file does not set have their defaults."""
        return PROBLEMS[self.problem].Options(**self.options)

    @property
    def reported_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def expected_runs(self, entry: Entry) -> list[tuple[int, RunSpec]]:
        """An upper limit of an entry's runs: a count and an example for each length of run."""
        tuned = self.instances if self.tune == "each" else 1
        grid = entry.grid()
        runs = [(tuned * len(grid), self.selection.after or self.budget)] if len(grid) > 1 else []
        if self.selection.rule == "soonest" and entry.follows is None:
            runs.append(
                (len({0, *self.reported_seeds}) * tuned, self.selection.star_after or self.budget)
            )
        runs.append((self.seeds * self.instances, self.budget))
        return [(count, self.spec(entry, grid[0], 0, 0, budget)) for count, budget in runs]

    def expected_back_propagations(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Upper limits for each entry: the number of runs and of their back-propagations."""
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for entry in self.entries:
            runs = self.expected_runs(entry)
            counts[entry.name, entry.method] = (
                sum(n for n, _ in runs),
                sum(n * spec.budget for n, spec in runs),
            )
        return counts


def load_all(path: Path, scale: str) -> list[Experiment]:
    """Read a file: one experiment, or one per panel."""
    return [load(path, scale, panel) for panel in panels_of(path)] or [load(path, scale)]


def panels_of(path: Path) -> list[str]:
    """The names of the panels of a figure, if it has several."""
    return list(_read(path).get("panels", {}))


def load(path: Path, scale: str, panel: str = "") -> Experiment:
    """Read a file. A mistake in it raises :class:`ExperimentError` with file, key and value.

    A scale overrides a panel, a panel overrides the rest of the file, and the file overrides its
    setting from Table 1.
    """
    content = _layered(path, scale, panel)
    _choose(path, "problem", content.get("problem"), PROBLEMS)
    _check(path, "options", PROBLEMS[content["problem"]].Options, content.get("options", {}))
    methods = content.pop("methods", {})
    entries = [_entry(path, name, dict(table)) for name, table in methods.items()]
    _check_follows(path, entries)
    if not entries:
        choices = f"give at least one of {listed(METHODS)}"
        raise ExperimentError(f"{path}: methods: there are none; {choices}")
    if content.get("first_seed") == 0 and any(len(entry.grid()) > 1 for entry in entries):
        raise ExperimentError(
            f"{path}: first_seed = 0: must be at least 1, because hyper-parameters are chosen on "
            "seed 0"
        )
    defaults = {"name": path.stem + panel, "scale": scale, "options": {}, "first_seed": 1}
    try:
        return Experiment(**{**defaults, **content, "entries": entries})
    except ValidationError as error:
        first = error.errors()[0]
        key, message = ".".join(map(str, first["loc"])), first["msg"]
        if "extra" in first["type"]:
            fields = Experiment.model_fields.keys() - {"entries", "name", "scale", "ranks"}
            message += f"; valid: {listed(fields)}"
        raise ExperimentError(f"{path}: {key} = {first['input']!r}: {message}") from None


def _layered(path: Path, scale: str, panel: str) -> dict[str, Any]:
    """The content of a file with the overrides of a scale and a panel."""
    content = _read(path)
    scales = content.pop("scales", {})
    for name in scales:
        _choose(path, f"scales.{name}", name, SCALES)
    at_scale = dict(scales.get(scale, {}))
    for layer in (
        content.pop("panels", {}).get(panel, {}),
        at_scale,
        at_scale.pop("panels", {}).get(panel, {}),
    ):
        content = _merge(content, layer)
    if "setting" in content:
        _choose(path, "setting", content["setting"], TABLE_1)
        content = _merge(TABLE_1[content.pop("setting")], content)
    if isinstance(content.get("log_every"), int):
        content["log_every"] = {"iterations": content["log_every"]}
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path}: is not TOML: {error}") from None


def _check(path: Path, table: str, options: type[Options], values: dict[str, Any]) -> None:
    """Refuse values that are not valid as these options."""
    try:
        options(**values)
    except OptionError as error:
        raise ExperimentError(f"{path}: {table}.{error}") from None


def _entry(path: Path, name: str, table: dict[str, Any]) -> Entry:
    where = f"methods.{name}"
    method = table.pop("method", name)
    _choose(path, f"{where}.method" if method != name else where, method, METHODS)
    options = METHODS[method]
    label = table.pop("label", options.label)
    follows = table.pop("follows", None)
    if follows is not None and "lr" in table:
        raise ExperimentError(
            f"{path}: {where}.lr = {table['lr']!r}: its lr follows {follows}, so give none"
        )
    defaults = options.defaults
    unknown = {key: value for key, value in table.items() if key not in defaults}
    _check(path, where, options, unknown)
    axes = {key: _axis(table.get(key, default), default) for key, default in defaults.items()}
    for key, values in axes.items():
        told = f"{path}: {where}.{key} = {table.get(key)!r}"
        if not values:
            raise ExperimentError(f"{told}: give at least one value")
        if follows is not None and len(values) > 1:
            raise ExperimentError(f"{told}: an entry that follows another has no grid")
    entry = Entry(name=name, method=method, label=label, axes=axes, follows=follows)
    for point in entry.grid():
        _check(path, where, options, point)
    return entry


def _axis(value: Any, default: Any) -> list[Any]:
    """The values of an axis of the grid: a list is an axis, unless the option is a list itself."""
    if isinstance(default, list):
        return (
            value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        )
    return value if isinstance(value, list) else [value]


def _check_follows(path: Path, entries: list[Entry]) -> None:
    tuned = [
        entry.name
        for entry in entries
        if entry.follows is None and METHODS[entry.method].logs_gamma
    ]
    for entry in entries:
        if entry.follows is not None and entry.follows not in tuned:
            told = (
                listed(tuned) if tuned else "the entries whose method tunes gamma (there are none)"
            )
            raise ExperimentError(
                f"{path}: methods.{entry.name}.follows = {entry.follows!r} is not one of {told}"
            )


def _choose(path: Path, key: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ExperimentError(f"{path}: {key} = {value!r} is not one of {listed(choices)}")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = (
            _merge(merged[key], value)
            if isinstance(value, dict) and isinstance(merged.get(key), dict)
            else value
        )
    return merged


def paper_experiments() -> dict[str, Path]:
    """The experiment files of the package by name."""
    folder = resources.files("steptuned.lab") / "experiments"
    return {path.stem: path for path in sorted(Path(str(folder)).glob("*.toml"))}
