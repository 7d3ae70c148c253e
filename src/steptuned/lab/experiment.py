"""An experiment: one TOML file that says what is compared, on what, how hyper-parameters are chosen, and how long it takes."""

import itertools
import math
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.spec import RunSpec, canonical

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALES = ("demo", "small", "paper")
COUNTS = ("batch", "columns", "uses", "context", "width", "depth", "heads")
"""Whole numbers of which there must be one at least."""


class ExperimentError(ValueError):
    """A mistake in an experiment's file, in one sentence."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Strict):
    """How long a run is: in back-propagations, or in epochs of ceil(N / batch) back-propagations."""

    epochs: float | None = Field(default=None, gt=0)
    iterations: int | None = Field(default=None, gt=0)

    def back_propagations(self, per_epoch: int) -> int:
        return self.iterations if self.iterations is not None else round((self.epochs or 1) * per_epoch)


class Selection(_Strict):
    """How the winner of the grid is chosen."""

    rule: Literal["smallest loss", "soonest"] = "smallest loss"
    after: Budget | None = None
    """Budget of the grid search; by default the whole."""
    within: float = Field(default=0.1, gt=0)
    """soonest: the first to come so near to J*."""
    star_after: Budget | None = None
    """soonest: J* is the best loss of all methods after so long."""


class Entry(_Strict):
    """A method in the comparison. Lists are axes of its grid."""

    name: str
    method: str
    label: str
    axes: dict[str, list[Any]]

    def grid(self) -> list[dict[str, Any]]:
        values = itertools.product(*self.axes.values())
        return [dict(zip(self.axes, combination, strict=True)) for combination in values]


class Experiment(_Strict):
    name: str
    scale: str
    title: str
    figure: str
    note: str = ""
    """What a reader of its results should know."""
    problem: str
    options: dict[str, Any]
    instances: int = Field(default=1, ge=1)
    """How many instances of the problem, where it has the option ``instance``."""
    tune: Literal["first", "each"] = "first"
    """On which instances the grid is searched."""
    seeds: int = Field(default=3, ge=1)
    budget: Budget
    log_every: Budget = Budget(iterations=1)
    log_growth: float = Field(default=1.0, ge=1.0)
    selection: Selection = Selection()
    entries: list[Entry]
    ranks: int = 1
    """Processes that make each run together: as many as torchrun has started."""

    def spec(self, entry: Entry, hyper: dict[str, Any], seed: int, instance: int, budget: Budget) -> RunSpec:
        options = {**PROBLEMS[self.problem].defaults, **self.options}
        if "instance" in options:
            options["instance"] = instance
        per_epoch = -(-PROBLEMS[self.problem].rows_of(options) // options["batch"])
        log_every = self.log_every.back_propagations(per_epoch)
        return RunSpec(
            problem=self.problem,
            options=options,
            method=entry.method,
            hyper=hyper,
            seed=seed,
            scale=self.scale,
            budget=budget.back_propagations(per_epoch),
            log_every=max(1, log_every),
            log_growth=self.log_growth,
            ranks=self.ranks,
        )

    def expected_back_propagations(self) -> dict[tuple[str, str], tuple[int, int]]:
        """For each entry: how many runs the experiment has at most, and how many back-propagations they are."""
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        tuned = self.instances if self.tune == "each" else 1
        for entry in self.entries:
            grid = entry.grid()

            def length(budget: Budget, entry: Entry = entry, grid: list[dict[str, Any]] = grid) -> int:
                return self.spec(entry, grid[0], 0, 0, budget).budget

            runs = [(tuned * len(grid), self.selection.after or self.budget)] if len(grid) > 1 else []
            if self.selection.rule == "soonest":
                runs.append((self.seeds * tuned, self.selection.star_after or self.budget))
            runs.append((self.seeds * self.instances, self.budget))
            counts[entry.name, entry.method] = sum(n for n, _ in runs), sum(n * length(budget) for n, budget in runs)
        return counts


def load_all(path: Path, scale: str) -> list[Experiment]:
    """Read a file: one experiment, or one for each of its panels."""
    return [load(path, scale, panel) for panel in panels_of(path)] or [load(path, scale)]


def panels_of(path: Path) -> list[str]:
    """The names of the panels of a figure, where it has several."""
    return list(_read(path).get("panels", {}))


def load(path: Path, scale: str, panel: str = "") -> Experiment:
    """Read a file. A mistake in it is an :class:`ExperimentError`: one sentence with file, key, value and what is valid.

    What a panel says comes before what the file says for all its panels, a scale before both, and Table 1's setting comes last.
    """
    content = _read(path)
    scales = content.pop("scales", {})
    for name in scales:
        if name not in SCALES:
            raise _mistake(path, f"scales.{name}", name, SCALES)
    at_scale = dict(scales.get(scale, {}))
    for layer in (content.pop("panels", {}).get(panel, {}), at_scale, at_scale.pop("panels", {}).get(panel, {})):
        content = _merge(content, layer)
    if "setting" in content:
        _choose(path, "setting", content["setting"], TABLE_1)
        content = _merge(TABLE_1[content.pop("setting")], content)
    if isinstance(content.get("log_every"), int):
        content["log_every"] = {"iterations": content["log_every"]}
    _choose(path, "problem", content.get("problem"), PROBLEMS)
    _check_options(path, PROBLEMS[content["problem"]], content.get("options", {}))
    entries = [_entry(path, name, dict(table)) for name, table in content.pop("methods", {}).items()]
    if not entries:
        raise ExperimentError(f"{path}: methods: there are none; give at least one of {_list(METHODS)}")
    try:
        return Experiment(**{"name": path.stem + panel, "scale": scale, "options": {}, **content, "entries": entries})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        valid = (
            f"; valid: {_list(Experiment.model_fields.keys() - {'entries', 'name', 'scale', 'ranks'})}"
            if "extra" in first["type"]
            else ""
        )
        raise ExperimentError(f"{path}: {key} = {first['input']!r}: {first['msg']}{valid}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path}: is not TOML: {error}") from None


def _check_options(path: Path, problem: type[Problem], options: dict[str, Any]) -> None:
    for key, value in options.items():
        _choose(path, f"options.{key}", key, problem.defaults)
        if key in problem.choices:
            _choose(path, f"options.{key}", value, problem.choices[key])
        else:
            _check_kind(path, f"options.{key}", value, problem.defaults[key])


def _check_kind(path: Path, key: str, value: Any, like: Any) -> None:
    wanted = (int, float) if isinstance(like, float) else type(like)
    if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(like, bool):
        raise ExperimentError(f"{path}: {key} = {value!r}: not of the kind of {like!r}")
    least = 1 if key.rsplit(".", 1)[-1] in COUNTS else 0
    if isinstance(like, int) and not isinstance(like, bool) and value < least:
        raise ExperimentError(f"{path}: {key} = {value!r}: must be at least {least}")


def _entry(path: Path, name: str, table: dict[str, Any]) -> Entry:
    method = table.pop("method", name)
    _choose(path, f"methods.{name}.method" if method != name else f"methods.{name}", method, METHODS)
    label = table.pop("label", METHODS[method].label)
    defaults = METHODS[method].defaults
    for key in table:
        _choose(path, f"methods.{name}.{key}", key, defaults)
    axes = {}
    for key, default in defaults.items():
        value = table.get(key, default)
        is_axis = isinstance(value, list) and (not isinstance(default, list) or (bool(value) and isinstance(value[0], list)))
        axes[key] = value if is_axis else [value]
        for item in axes[key]:
            _check_kind(path, f"methods.{name}.{key}", item, default)
    return Entry(name=name, method=method, label=label, axes=axes)


def _choose(path: Path, key: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise _mistake(path, key, value, choices)


def _mistake(path: Path, key: str, value: Any, choices: Any) -> ExperimentError:
    return ExperimentError(f"{path}: {key} = {value!r} is not one of {_list(choices)}")


def _list(names: Any) -> str:
    return ", ".join(sorted(names))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def paper_experiments() -> dict[str, Path]:
    """The experiments that come with the package: name and file."""
    folder = resources.files("steptuned.lab") / "experiments"
    return {path.stem: path for path in sorted(Path(str(folder)).glob("*.toml"))}


# ---------------------------------------------------------------------------------------------- what is to be run


@dataclass
class Trial:
    """A point of the grid and how it did."""

    hyper: dict[str, Any]
    spec: RunSpec
    score: float | None = None
    """What is minimised: a loss, or back-propagations until near J*. None: diverged, failed or never near."""


@dataclass
class Group:
    """One entry on one instance: its grid, its winner, its runs."""

    entry: Entry
    instance: int
    trials: list[Trial]
    winner: Trial | None = None
    specs: dict[int, RunSpec] = field(default_factory=dict)
    """The winner's run for each seed."""

    @property
    def edges(self) -> list[str]:
        """The axes on whose edge the winner lies: the grid should be wider there."""
        if self.winner is None:
            return []
        edges = []
        for key, values in self.entry.axes.items():
            numbers = [v for v in values if isinstance(v, int | float)]
            if len(numbers) > 2 and self.winner.hyper[key] in (min(numbers), max(numbers)):
                edges.append(key)
        return edges


@dataclass
class Outcome:
    """What an experiment came to: all that figures need."""

    experiment: Experiment
    groups: list[Group]
    star: dict[tuple[int, int], float] = field(default_factory=dict)
    """J* for each instance and seed, where the selection asks for it."""
    star_specs: list[RunSpec] = field(default_factory=list)
    """The long runs that J* comes from."""


class Reader(Protocol):
    """Who knows the logs of complete runs."""

    def last(self, spec: RunSpec) -> dict[str, Any] | None:
        """The last record of the run; None where it is not complete or diverged."""
        ...

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        """All records of the run; none where it is not complete."""
        ...


def stages(experiment: Experiment, reader: Reader) -> Generator[tuple[str, list[RunSpec]], None, Outcome]:
    """The runs of an experiment, stage by stage. When a stage is asked for, the reader must know those of the stages before."""
    selection = experiment.selection
    tuned = range(experiment.instances if experiment.tune == "each" else 1)
    seeds = range(experiment.seeds)
    groups = []
    for instance in tuned:
        for entry in experiment.entries:
            grid = entry.grid()
            budget = (selection.after or experiment.budget) if len(grid) > 1 else experiment.budget
            trials = [Trial(hyper, experiment.spec(entry, hyper, 0, instance, budget)) for hyper in grid]
            groups.append(Group(entry, instance, trials))
    yield "grid", [trial.spec for group in groups for trial in group.trials]

    star: dict[tuple[int, int], float] = {}
    star_specs: list[RunSpec] = []
    if selection.rule == "soonest":
        for group in groups:
            best = _smallest(group.trials, reader)
            if best is not None:
                budget = selection.star_after or experiment.budget
                star_specs += [experiment.spec(group.entry, best.hyper, seed, group.instance, budget) for seed in seeds]
        yield "J*", star_specs
        _lower(star, [*star_specs, *(trial.spec for group in groups for trial in group.trials)], reader)
        for group in groups:
            for trial in group.trials:
                level = star[group.instance, 0] + selection.within
                trial.score = first_below(reader.records(trial.spec), level)
            # Of those that come near at the same time, the one with the smaller loss.
            group.winner = _best(group.trials, reader) or _smallest(group.trials, reader)
    else:
        for group in groups:
            group.winner = _smallest(group.trials, reader)

    winners = {(group.entry.name, group.instance): group for group in groups}
    for instance in range(len(tuned), experiment.instances):
        for entry in experiment.entries:
            first = winners[entry.name, 0]
            groups.append(Group(entry, instance, [], first.winner))
    for group in groups:
        if group.winner is not None:
            for seed in seeds:
                group.specs[seed] = experiment.spec(group.entry, group.winner.hyper, seed, group.instance, experiment.budget)
    yield "winners", [spec for group in groups for spec in group.specs.values()]
    if star:
        _lower(star, [spec for group in groups for spec in group.specs.values()], reader)
    return Outcome(experiment, groups, star, star_specs)


def first_below(records: list[dict[str, Any]], level: float) -> int | None:
    """After how many back-propagations the loss was first below the level."""
    return next((record["bp"] for record in records if record["loss"] < level), None)


def _lower(star: dict[tuple[int, int], float], specs: list[RunSpec], reader: Reader) -> None:
    """Let J* of each instance and seed be the smallest loss that any of these runs has seen, if that is smaller."""
    for spec in specs:
        key = spec.options.get("instance", 0), spec.seed
        losses = [record["loss"] for record in reader.records(spec) if math.isfinite(record["loss"])]
        star[key] = min([star.get(key, math.inf), *losses])


def _smallest(trials: list[Trial], reader: Reader) -> Trial | None:
    for trial in trials:
        last = reader.last(trial.spec)
        trial.score = None if last is None else last["loss"]
    return _best(trials, reader)


def _best(trials: list[Trial], reader: Reader) -> Trial | None:
    """The smallest score; of equal ones the smallest last loss."""

    def order(trial: Trial) -> tuple[float, float, str]:
        last = reader.last(trial.spec)
        return trial.score or 0.0, math.inf if last is None else last["loss"], canonical(trial.hyper)

    return min((trial for trial in trials if trial.score is not None), key=order, default=None)
