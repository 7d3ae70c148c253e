"""The runs of a store at one scale, as values paired by seed or by instance of the problem."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.curves import Curve, Records, curve_of
from steptuned.lab.experiment import (
    Experiment,
    ExperimentError,
    load,
    load_all,
    panels_of,
    paper_experiments,
)
from steptuned.lab.results import TolerantResults, outcome_of, stored
from steptuned.lab.search import Group, Outcome
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Store

Kind = Literal["seeds", "instances", "rounds"]


class MissingRuns(Exception):  # noqa: N818 - not an error: there is nothing to judge yet
    """There are not enough runs. The message says what is missing."""


@dataclass(frozen=True)
class Pairs:
    """The seeds or instances that are complete in everything that is compared."""

    kind: Kind
    keys: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.keys)

    @property
    def is_enough(self) -> bool:
        """Whether there are enough for a test, and so for more than 'consistent'."""
        return self.n >= ENOUGH[self.kind]


FEWEST: dict[Kind, int] = {"seeds": 3, "instances": 20}
"""With fewer pairs nothing is judged."""
ENOUGH: dict[Kind, int] = {"seeds": 5, "instances": 20, "rounds": 1}
"""With at least this many pairs, a claim is reproduced or not. Claim 15 limits the rounds."""


@functools.cache
def experiment_named(name: str, scale: str) -> Experiment:
    """An experiment of the package, or one panel of it; :class:`MissingRuns` if there is none."""
    files = paper_experiments()
    try:
        if name in files:
            (experiment,) = load_all(files[name], scale)
            return experiment
        for path in files.values():
            for panel in panels_of(path):
                if path.stem + panel == name:
                    return load(path, scale, panel)
    except ExperimentError as error:
        raise MissingRuns(f"{name} has no scale {scale}: {error}") from None
    raise MissingRuns(f"there is no experiment {name}")


class PairedRuns:
    """The complete runs of a store at one scale.

    A run counts if it is complete and its log is the one it ended with. ``used`` collects the
    environments of the runs that were used since it was last cleared.
    """

    def __init__(self, folder: Path, scale: str, results: TolerantResults | None = None) -> None:
        self.folder, self.scale = folder, scale
        self.results = TolerantResults(Store(folder), []) if results is None else results
        self.used: dict[str, Any] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._sound: dict[str, bool] = {}

    def outcome(self, name: str) -> Outcome:
        """The outcome of an experiment, as far as it is complete."""
        if name not in self._outcomes:
            experiment = stored(self.folder, name, self.scale) or experiment_named(name, self.scale)
            if (experiment.problem, self.scale) not in self.results.present:
                raise MissingRuns(f"{name} has no runs")
            self._outcomes[name] = outcome_of(experiment, self.results)
        return self._outcomes[name]

    def pairs(self, entries: Sequence[str], *names: str) -> Pairs:
        """The pairs that are complete in these entries of all these experiments."""
        several = [self.outcome(name).experiment.instances > 1 for name in names]
        kind: Kind = "instances" if all(several) else "seeds"
        complete = [set(self._complete(name, entries, kind)) for name in names]
        pairs = Pairs(kind, tuple(sorted(set.intersection(*complete))))
        if pairs.n < FEWEST[kind]:
            found = f"{pairs.n} of at least {FEWEST[kind]} {kind}"
            raise MissingRuns(f"{' and '.join(names)}: {found} of {', '.join(entries)} complete")
        for name in names:
            self._use(name, entries, pairs)
        return pairs

    def finals(self, name: str, entry: str, pairs: Pairs, measure: str) -> NDArray[np.float64]:
        """The final value for each pair; infinite where a run diverged."""

        def final(spec: RunSpec) -> float:
            values = self.results.final(spec)
            if values is None:
                return math.inf
            if measure not in values:
                raise MissingRuns(f"{name}: its runs have no {measure}")
            return float(values[measure]) if math.isfinite(values[measure]) else math.inf

        return self.values(name, (entry,), pairs, final)

    def values(
        self,
        name: str,
        entries: Sequence[str],
        pairs: Pairs,
        number: Callable[..., float],
    ) -> NDArray[np.float64]:
        """For each pair a number that is computed from one run of each entry.

        For an instance it is the mean over the reported seeds.
        """
        found = []
        for key in pairs.keys:
            instance = key if pairs.kind == "instances" else 0
            specs = [self._group(name, entry, instance).specs for entry in entries]
            seeds = [key] if pairs.kind == "seeds" else list(specs[0])
            found.append(float(np.mean([number(*(of[seed] for of in specs)) for seed in seeds])))
        return np.array(found)

    def records(self, name: str, entry: str, pairs: Pairs) -> list[Records]:
        """The log of each seed; empty where the run diverged."""
        specs = self._group(name, entry, 0).specs
        runs = [specs[seed] for seed in pairs.keys]
        return [[] if self.diverged(spec) else self.results.records(spec) for spec in runs]

    def curve(self, spec: RunSpec, key: str = "loss") -> Curve:
        """A measure of a run; infinite everywhere if the run diverged."""
        curve = curve_of(self.results.records(spec), key)
        return Curve(curve.bp, np.full_like(curve.bp, math.inf)) if self.diverged(spec) else curve

    def group(self, name: str, entry: str, pairs: Pairs) -> Group:
        """An entry with only the runs of these seeds."""
        group = self._group(name, entry, 0)
        specs = {seed: group.specs[seed] for seed in pairs.keys}
        return Group(group.entry, group.instance, group.trials, group.winner, specs)

    def diverged(self, spec: RunSpec) -> bool:
        return self.results.final(spec) is None

    def label(self, name: str, entry: str) -> str:
        return self._group(name, entry, 0).entry.label

    def per_epoch(self, name: str) -> int:
        """Back-propagations in an epoch."""
        return self.outcome(name).experiment.problem_options.per_epoch

    # ------------------------------------------------------------------ what is complete

    def _group(self, name: str, entry: str, instance: int) -> Group:
        for group in self.outcome(name).groups:
            if (group.entry.name, group.instance) == (entry, instance):
                return group
        raise MissingRuns(f"{name} has no entry {entry}")

    def _complete(self, name: str, entries: Sequence[str], kind: Kind) -> list[int]:
        experiment = self.outcome(name).experiment
        if kind == "seeds":
            groups = [self._group(name, entry, 0) for entry in entries]
            if not self._are_sound(self._chosen_by(name, entries, 0)):
                return []
            seeds = experiment.reported_seeds
            return [seed for seed in seeds if self._are_sound(g.specs.get(seed) for g in groups)]
        # An instance on which hyper-parameters were chosen for others is not among the pairs.
        first = 1 if experiment.tune == "first" else 0
        instances = range(first, experiment.instances)
        return [instance for instance in instances if self._is_complete(name, entries, instance)]

    def _is_complete(self, name: str, entries: Sequence[str], instance: int) -> bool:
        groups = [self._group(name, entry, instance) for entry in entries]
        seeds = self.outcome(name).experiment.reported_seeds
        specs = [group.specs.get(seed) for group in groups for seed in seeds]
        return self._are_sound([*self._chosen_by(name, entries, instance), *specs])

    def _chosen_by(self, name: str, entries: Sequence[str], instance: int) -> list[RunSpec]:
        """The runs by which the hyper-parameters of these entries were chosen.

        Where that is by the distance to J*, the best of all methods, they are those of every entry.
        """
        outcome = self.outcome(name)
        tuned_on = instance if outcome.experiment.tune == "each" else 0
        soonest = outcome.experiment.selection.rule == "soonest"
        specs = [
            trial.spec
            for group in outcome.groups
            if group.instance == tuned_on and (soonest or group.entry.name in entries)
            for trial in group.trials
        ]
        stars = [spec for spec in outcome.star_specs if spec.options.get("instance", 0) == tuned_on]
        return specs + stars

    def _are_sound(self, specs: Iterable[RunSpec | None]) -> bool:
        """Whether all of these runs are complete, with the logs they ended with."""
        for spec in specs:
            if spec is None:
                return False
            if spec.identity not in self._sound:
                self._sound[spec.identity] = self.results.run(spec).is_sound()
            if not self._sound[spec.identity]:
                return False
        return True

    def _use(self, name: str, entries: Sequence[str], pairs: Pairs) -> None:
        several = pairs.kind == "instances"
        for instance in pairs.keys if several else (0,):
            specs = self._chosen_by(name, entries, instance)
            for entry in entries:
                group = self._group(name, entry, instance)
                specs += [group.specs[s] for s in (group.specs if several else pairs.keys)]
            self.used |= {spec.identity: self.results.run(spec).environment() for spec in specs}


class PairedAtScales(dict[str, PairedRuns]):
    """The runs of a store at each scale. Their logs are parsed once."""

    def __init__(self, folder: Path, results: TolerantResults | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.results = TolerantResults(Store(folder), []) if results is None else results

    def __missing__(self, scale: str) -> PairedRuns:
        self[scale] = PairedRuns(self.folder, scale, self.results)
        return self[scale]
