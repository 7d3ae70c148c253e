"""Grid search, winners and seeds: which runs an experiment needs next, and its outcome."""

import math
import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from steptuned.lab.experiment import Entry, Experiment
from steptuned.lab.spec import RunSpec, canonical


@dataclass(frozen=True)
class Score:
    """How a trial did. Smaller is better, and only scores of the same unit can be compared."""

    value: float
    unit: Literal["loss", "back-propagations"]
    """The loss at the end, or the back-propagations until the loss came near J*."""

    def __lt__(self, other: "Score") -> bool:
        if self.unit != other.unit:
            raise TypeError(f"scores in {self.unit} and {other.unit} cannot be compared")
        return self.value < other.value

    def __str__(self) -> str:
        return f"loss {self.value:.4g}" if self.unit == "loss" else f"{self.value:g} {self.unit}"


@dataclass(frozen=True)
class Trial:
    """A point of the grid and how it did."""

    hyper: dict[str, Any]
    spec: RunSpec
    score: Score | None = None
    """None: its run diverged or failed, is not complete, or never came near J*."""


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
        """The axes on whose edge the winner lies, where the grid should be wider."""
        if self.winner is None:
            return []
        edges = []
        for key, values in self.entry.axes.items():
            numbers = [v for v in values if isinstance(v, int | float)]
            if len(numbers) > 2 and self.winner.hyper[key] in (min(numbers), max(numbers)):
                edges.append(key)
        return edges


Star = dict[tuple[int, int], float]
"""J* for each instance and seed."""


@dataclass
class Outcome:
    """The outcome of an experiment: everything that figures and tables need."""

    experiment: Experiment
    groups: list[Group]
    star: Star = field(default_factory=dict)
    """Empty unless the selection needs J*."""
    star_specs: list[RunSpec] = field(default_factory=list)
    """The long runs that J* comes from."""


class Reader(Protocol):
    """Reads the logs of complete runs."""

    def final(self, spec: RunSpec) -> dict[str, Any] | None:
        """Final values of the run, means over its last 5 %; None if not complete or diverged."""
        ...

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        """All records of the run; none if it is not complete."""
        ...


def stages(
    experiment: Experiment,
    reader: Reader,
) -> Generator[tuple[str, list[RunSpec]], None, Outcome]:
    """The runs of an experiment, stage by stage.

    When the next stage is requested, the reader must know the runs of the stages before it.
    """
    tuned = range(experiment.instances if experiment.tune == "each" else 1)
    groups = [_group(experiment, entry, i) for i in tuned for entry in experiment.entries]
    yield "grid", _trial_specs(groups)

    star: Star = {}
    star_specs: list[RunSpec] = []
    if experiment.selection.rule == "soonest":
        star_specs = _star_specs(experiment, groups, reader)
        yield "J*", star_specs
        _lower(star, [*star_specs, *_trial_specs(groups)], reader)
        for group in groups:
            _choose_soonest(group, star, experiment.selection.within, reader)
    else:
        for group in groups:
            _choose_smallest(group, reader)

    chosen = {group.entry.name: group.winner for group in groups if group.instance == 0}
    for instance in range(len(tuned), experiment.instances):
        groups += [Group(e, instance, [], chosen[e.name]) for e in experiment.entries]
    for group in groups:
        if group.winner is not None:
            group.specs = _seeded(experiment, group, group.winner.hyper)
    yield "winners", _winner_specs(groups)

    if followers := [group for group in groups if group.entry.follows is not None]:
        _choose_followers(experiment, groups, reader)
        yield "controls", _winner_specs(followers)
    if star:
        _lower(star, _winner_specs(groups), reader)
    return Outcome(experiment, groups, star, star_specs)


def _trial_specs(groups: list[Group]) -> list[RunSpec]:
    return [trial.spec for group in groups for trial in group.trials]


def _winner_specs(groups: list[Group]) -> list[RunSpec]:
    return [spec for group in groups for spec in group.specs.values()]


def _seeded(experiment: Experiment, group: Group, hyper: dict[str, Any]) -> dict[int, RunSpec]:
    """The run of each reported seed."""
    entry, instance, budget = group.entry, group.instance, experiment.budget
    seeds = experiment.reported_seeds
    return {seed: experiment.spec(entry, hyper, seed, instance, budget) for seed in seeds}


def _group(experiment: Experiment, entry: Entry, instance: int) -> Group:
    """An entry before its search. A grid of one point has won without trials.

    The only exception is an experiment that reports seed 0, on which grids are searched.
    """
    if entry.follows is not None:
        return Group(entry, instance, [])
    grid = entry.grid()
    shorter = experiment.selection.after if len(grid) > 1 else None
    budget = shorter or experiment.budget
    trials = [Trial(hyper, experiment.spec(entry, hyper, 0, instance, budget)) for hyper in grid]
    if len(grid) == 1 and 0 not in experiment.reported_seeds:
        return Group(entry, instance, [], trials[0])
    return Group(entry, instance, trials)


# ---------------------------------------------------------------------- choosing winners


def _star_specs(experiment: Experiment, groups: list[Group], reader: Reader) -> list[RunSpec]:
    """Long runs of the best trial of each group, from which J* is taken."""
    budget = experiment.selection.star_after or experiment.budget
    specs = []
    for group in groups:
        best = group.winner or _best(_scored(group.trials, _loss_score(reader)), reader)
        if best is not None:
            specs += [
                experiment.spec(group.entry, best.hyper, seed, group.instance, budget)
                for seed in sorted({0, *experiment.reported_seeds})
            ]
    return specs


def _choose_smallest(group: Group, reader: Reader) -> None:
    """The winner has the smallest final loss."""
    if group.winner is None:
        group.trials = _scored(group.trials, _loss_score(reader))
        group.winner = _best(group.trials, reader)


def _choose_soonest(group: Group, star: Star, within: float, reader: Reader) -> None:
    """The winner is the first to come close to J*; if none does, the smallest final loss wins."""

    def score(spec: RunSpec) -> Score | None:
        reached = first_below(reader.records(spec), star[group.instance, 0] + within)
        return None if reached is None else Score(reached, "back-propagations")

    if group.winner is None:
        group.trials = _scored(group.trials, score)
        group.winner = _best(group.trials, reader)
    _choose_smallest(group, reader)


def _loss_score(reader: Reader) -> Callable[[RunSpec], Score | None]:
    def score(spec: RunSpec) -> Score | None:
        last = reader.final(spec)
        return None if last is None else Score(last["loss"], "loss")

    return score


def _scored(trials: list[Trial], score: Callable[[RunSpec], Score | None]) -> list[Trial]:
    return [replace(trial, score=score(trial.spec)) for trial in trials]


def _best(trials: list[Trial], reader: Reader) -> Trial | None:
    """The trial with the smallest score; of equal ones, the one with the smallest final loss."""

    def order(trial: Trial) -> tuple[Score | None, float, str]:
        last = reader.final(trial.spec)
        return trial.score, math.inf if last is None else last["loss"], canonical(trial.hyper)

    return min((trial for trial in trials if trial.score is not None), key=order, default=None)


def first_below(records: list[dict[str, Any]], level: float) -> int | None:
    """The number of back-propagations after which the loss is first below the level."""
    return next((record["bp"] for record in records if record["loss"] < level), None)


def _lower(star: Star, specs: list[RunSpec], reader: Reader) -> None:
    """Lower J* of each instance and seed to the smallest loss of any of these runs."""
    for spec in specs:
        key = spec.options.get("instance", 0), spec.seed
        losses = [r["loss"] for r in reader.records(spec) if math.isfinite(r["loss"])]
        star[key] = min([star.get(key, math.inf), *losses])


# ---------------------------------------------------------------------- entries that follow others


def _choose_followers(experiment: Experiment, groups: list[Group], reader: Reader) -> None:
    """Set the lr of each entry that follows another, once the other's runs are complete."""
    leaders = {(group.entry.name, group.instance): group for group in groups}
    for group in groups:
        if group.entry.follows is None:
            continue
        lr = _followed_lr(leaders[group.entry.follows, group.instance], reader)
        if lr is not None:
            hyper = {**group.entry.grid()[0], "lr": lr}
            group.specs = _seeded(experiment, group, hyper)
            group.winner = Trial(hyper, next(iter(group.specs.values())))


def _followed_lr(leader: Group, reader: Reader) -> float | None:
    """The winner's lr times the median gamma of its runs, rounded to 3 significant digits.

    None until all of its runs are complete; otherwise the result would change with every seed.
    """
    if leader.winner is None:
        return None
    gammas = []
    for spec in leader.specs.values():
        records = reader.records(spec)
        if not records:
            return None
        gammas += [record.get("gamma median", record.get("gamma")) for record in records[1:]]
    finite = [gamma for gamma in gammas if gamma is not None and math.isfinite(gamma)]
    return float(f"{leader.winner.hyper['lr'] * statistics.median(finite):.3g}") if finite else None
