"""Grid search, winners and seeds: which runs an experiment needs next, and what came out."""

import math
import statistics
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

from steptuned.lab.experiment import Entry, Experiment
from steptuned.lab.spec import RunSpec, canonical


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

    def final(self, spec: RunSpec) -> dict[str, Any] | None:
        """The final values of the run, means over its last 5 %; None where it is not complete or diverged."""
        ...

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        """All records of the run; none where it is not complete."""
        ...


def stages(experiment: Experiment, reader: Reader) -> Generator[tuple[str, list[RunSpec]], None, Outcome]:
    """The runs of an experiment, stage by stage. When a stage is asked for, the reader must know those of the stages before."""
    selection = experiment.selection
    tuned = range(experiment.instances if experiment.tune == "each" else 1)
    seeds = experiment.reported_seeds
    groups = [_group(experiment, entry, instance) for instance in tuned for entry in experiment.entries]
    yield "grid", [trial.spec for group in groups for trial in group.trials]

    star: dict[tuple[int, int], float] = {}
    star_specs: list[RunSpec] = []
    if selection.rule == "soonest":
        for group in groups:
            best = group.winner or _smallest(group.trials, reader)
            if best is not None:
                budget = selection.star_after or experiment.budget
                long = [experiment.spec(group.entry, best.hyper, seed, group.instance, budget) for seed in sorted({0, *seeds})]
                star_specs += long
        yield "J*", star_specs
        _lower(star, [*star_specs, *(trial.spec for group in groups for trial in group.trials)], reader)
        for group in groups:
            for trial in group.trials:
                level = star[group.instance, 0] + selection.within
                trial.score = first_below(reader.records(trial.spec), level)
            # Of those that come near at the same time, the one with the smaller loss.
            group.winner = group.winner or _best(group.trials, reader) or _smallest(group.trials, reader)
    else:
        for group in groups:
            group.winner = group.winner or _smallest(group.trials, reader)

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
    if followers := [group for group in groups if group.entry.follows is not None]:
        leaders = {(group.entry.name, group.instance): group for group in groups}
        for group in followers:
            lr = _followed_lr(leaders[str(group.entry.follows), group.instance], reader)
            if lr is not None:
                hyper = {**group.entry.grid()[0], "lr": lr}
                for seed in seeds:
                    group.specs[seed] = experiment.spec(group.entry, hyper, seed, group.instance, experiment.budget)
                group.winner = Trial(hyper, next(iter(group.specs.values())))
        yield "controls", [spec for group in followers for spec in group.specs.values()]
    if star:
        _lower(star, [spec for group in groups for spec in group.specs.values()], reader)
    return Outcome(experiment, groups, star, star_specs)


def _group(experiment: Experiment, entry: Entry, instance: int) -> Group:
    """An entry before its search. Without a choice there is nothing to try on a seed that is not reported: it has won."""
    if entry.follows is not None:
        return Group(entry, instance, [])
    grid = entry.grid()
    budget = (experiment.selection.after or experiment.budget) if len(grid) > 1 else experiment.budget
    trials = [Trial(hyper, experiment.spec(entry, hyper, 0, instance, budget)) for hyper in grid]
    if len(grid) == 1 and 0 not in experiment.reported_seeds:
        return Group(entry, instance, [], trials[0])
    return Group(entry, instance, trials)


def first_below(records: list[dict[str, Any]], level: float) -> int | None:
    """After how many back-propagations the loss was first below the level."""
    return next((record["bp"] for record in records if record["loss"] < level), None)


def _followed_lr(leader: Group, reader: Reader) -> float | None:
    """The winner's lr times the median gamma of its runs, rounded to 3 significant digits.

    None until all of its runs are complete: otherwise the result would change as seeds come in.
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


def _lower(star: dict[tuple[int, int], float], specs: list[RunSpec], reader: Reader) -> None:
    """Let J* of each instance and seed be the smallest loss that any of these runs has seen, if that is smaller."""
    for spec in specs:
        key = spec.options.get("instance", 0), spec.seed
        losses = [record["loss"] for record in reader.records(spec) if math.isfinite(record["loss"])]
        star[key] = min([star.get(key, math.inf), *losses])


def _smallest(trials: list[Trial], reader: Reader) -> Trial | None:
    for trial in trials:
        last = reader.final(trial.spec)
        trial.score = None if last is None else last["loss"]
    return _best(trials, reader)


def _best(trials: list[Trial], reader: Reader) -> Trial | None:
    """The smallest score; of equal ones the smallest last loss."""

    def order(trial: Trial) -> tuple[float, float, str]:
        last = reader.final(trial.spec)
        return trial.score or 0.0, math.inf if last is None else last["loss"], canonical(trial.hyper)

    return min((trial for trial in trials if trial.score is not None), key=order, default=None)
