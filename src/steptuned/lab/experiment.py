"""An experiment: one TOML file that says what is compared, on what, how hyper-parameters are chosen, and how long it takes."""

import itertools
import sys
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.spec import RunSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALES = ("demo", "small", "short", "paper")
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
    """What a reader of its results should know."""
    problem: str
    options: dict[str, Any]
    instances: int = Field(default=1, ge=1)
    """How many instances of the problem, where it has the option ``instance``."""
    tune: Literal["first", "each"] = "first"
    """On which instances the grid is searched."""
    seeds: int = Field(default=3, ge=1)
    """How many seeds are reported."""
    first_seed: int = Field(default=0, ge=0)
    """The first of them. Hyper-parameters are chosen on seed 0, which a file's experiment does not report: there it is 1."""
    budget: Budget
    log_every: Budget = Budget(iterations=1)
    log_growth: float = Field(default=1.0, ge=1.0)
    log_early: int = Field(default=0, ge=0)
    """About how many log-spaced records there are in the first tenth of each run."""
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
            log_early=self.log_early,
            ranks=self.ranks,
        )

    @property
    def reported_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def expected_runs(self, entry: Entry) -> list[tuple[int, RunSpec]]:
        """The runs of an entry, at most: a count and one spec for each length of run."""
        tuned = self.instances if self.tune == "each" else 1
        grid = entry.grid()
        runs = [(tuned * len(grid), self.selection.after or self.budget)] if len(grid) > 1 else []
        if self.selection.rule == "soonest" and entry.follows is None:
            runs.append((len({0, *self.reported_seeds}) * tuned, self.selection.star_after or self.budget))
        runs.append((self.seeds * self.instances, self.budget))
        return [(count, self.spec(entry, grid[0], 0, 0, budget)) for count, budget in runs]

    def expected_back_propagations(self) -> dict[tuple[str, str], tuple[int, int]]:
        """For each entry: how many runs the experiment has at most, and how many back-propagations they are."""
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for entry in self.entries:
            runs = self.expected_runs(entry)
            counts[entry.name, entry.method] = sum(n for n, _ in runs), sum(n * spec.budget for n, spec in runs)
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
    _check_follows(path, entries)
    if not entries:
        raise ExperimentError(f"{path}: methods: there are none; give at least one of {_list(METHODS)}")
    try:
        return Experiment(
            **{"name": path.stem + panel, "scale": scale, "options": {}, "first_seed": 1, **content, "entries": entries}
        )
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
    if wrong := problem.conflict({**problem.defaults, **options}):
        key, why = wrong
        raise ExperimentError(f"{path}: options.{key} = {options[key]!r}: {why}")


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
    follows = table.pop("follows", None)
    if follows is not None and "lr" in table:
        raise ExperimentError(f"{path}: methods.{name}.lr = {table['lr']!r}: its lr follows {follows}, so give none")
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
        if follows is not None and len(axes[key]) > 1:
            raise ExperimentError(f"{path}: methods.{name}.{key} = {value!r}: an entry that follows another has no grid")
    return Entry(name=name, method=method, label=label, axes=axes, follows=follows)


def _check_follows(path: Path, entries: list[Entry]) -> None:
    tuned = [entry.name for entry in entries if entry.follows is None and METHODS[entry.method].logs_gamma]
    for entry in entries:
        if entry.follows is not None and entry.follows not in tuned:
            told = _list(tuned) if tuned else "an entry whose method tunes gamma, and there is none"
            raise ExperimentError(f"{path}: methods.{entry.name}.follows = {entry.follows!r} is not one of {told}")


def _choose(path: Path, key: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise _mistake(path, key, value, choices)


def _mistake(path: Path, key: str, value: Any, choices: Any) -> ExperimentError:
    return ExperimentError(f"{path}: {key} = {value!r} is not one of {_list(choices)}")


def _list(names: Any) -> str:
    return ", ".join(sorted(map(str, names)))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def paper_experiments() -> dict[str, Path]:
    """The experiments that come with the package: name and file."""
    folder = resources.files("steptuned.lab") / "experiments"
    return {path.stem: path for path in sorted(Path(str(folder)).glob("*.toml"))}
