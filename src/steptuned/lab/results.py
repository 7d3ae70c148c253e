"""Reading a store: experiments, records, final values and outcomes. Nothing here executes runs."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steptuned.lab.experiment import SCALES, Experiment, load_all, paper_experiments
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.search import Outcome, stages
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Run, Store, final_of


def name_of(spec: RunSpec) -> str:
    """The name of a run's folder."""
    return spec.name(PROBLEMS[spec.problem].defaults, METHODS[spec.method].defaults)


class Results:
    """Reads the complete runs of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._final: dict[str, dict[str, Any] | None] = {}

    @functools.cached_property
    def present(self) -> set[tuple[str, str]]:
        """The problems and scales that had runs when this was first read."""
        return self.store.present()

    def run(self, spec: RunSpec) -> Run:
        return self.store.find(spec, name_of(spec))

    def is_complete(self, spec: RunSpec) -> bool:
        """Whether the run finished or diverged."""
        return self.run(spec).result() is not None

    def final(self, spec: RunSpec) -> dict[str, Any] | None:
        if spec.identity not in self._final:
            result = self.run(spec).result()
            if result is None:
                return None
            finished = result["status"] == "finished"
            # Results of older versions have no final values.
            self._final[spec.identity] = (
                (result.get("final") or final_of(self.records(spec))) if finished else None
            )
        return self._final[spec.identity]

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        return self.run(spec).records() if self.is_complete(spec) else []


class TolerantResults(Results):
    """Skips runs that cannot be read, and lists them in ``damaged``."""

    def __init__(self, store: Store, damaged: list[str]) -> None:
        super().__init__(store)
        self.damaged = damaged
        self._begun: dict[str, list[dict[str, Any]]] = {}

    def records(self, spec: RunSpec) -> list[dict[str, Any]]:
        return self.begun(spec) if self.is_complete(spec) else []

    def begun(self, spec: RunSpec) -> list[dict[str, Any]]:
        """The records of a run that may be unfinished."""
        if spec.identity not in self._begun:
            try:
                records = self.run(spec).records()
                if not all(
                    isinstance(record, dict) and {"bp", "loss"} <= record.keys()
                    for record in records
                ):
                    raise ValueError(
                        f"{self.run(spec).log_path} has lines of another kind; "
                        "delete its folder and run it again"
                    )
                self._begun[spec.identity] = records
            except (ValueError, OSError) as error:
                self.damaged.append(str(error))
                self._begun[spec.identity] = []
        return self._begun[spec.identity]


def outcome_of(experiment: Experiment, results: Results) -> Outcome:
    """The outcome of an experiment from the runs of a store. Missing runs are left out."""
    plan = stages(experiment, results)
    try:
        while True:
            next(plan)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


@dataclass
class Source:
    """The experiments of a figure at one scale, as they were run."""

    name: str
    scale: str
    experiments: list[Experiment]
    command: str


def sources(folder: Path) -> tuple[list[Source], list[str]]:
    """The figures that were run in this folder, and what could not be read.

    If none are stored: the experiments of the package that have runs there.
    """
    found: list[Source] = []
    damaged: list[str] = []
    for path in sorted(Store(folder).experiment_files()):
        source = _source(path)
        if isinstance(source, Source):
            found.append(source)
        else:
            damaged.append(source)
    if found or damaged:
        return found, damaged
    results = TolerantResults(Store(folder), damaged)
    present = results.present
    for name, path in paper_experiments().items():
        for scale in SCALES:
            new = [e for e in load_all(path, scale) if (e.problem, scale) in present]
            new = [
                e
                for e in new
                if any(results.run(spec).log_path.exists() for spec in _specs(e, results))
            ]
            if new:
                found.append(
                    Source(name, scale, new, f"steptuned reproduce {name} --scale {scale}")
                )
    return found, damaged


def stored(folder: Path, name: str, scale: str) -> Experiment | None:
    """The newest experiment of this name that was run in this folder; None if there is none."""
    found = [
        source
        for source in map(_source, Store(folder).experiment_files())
        if isinstance(source, Source)
    ]
    named = [
        e for source in found for e in source.experiments if (e.name, e.scale) == (name, scale)
    ]
    return named[-1] if named else None


def _source(path: Path) -> Source | str:
    try:
        kept = json.loads(path.read_text())
        experiments = [Experiment.model_validate(content) for content in kept["experiments"]]
        return Source(kept["figure"], kept["scale"], experiments, kept["command"])
    except (ValueError, KeyError, TypeError, OSError, ValidationError) as error:
        reason = f"{path.name} cannot be read ({type(error).__name__})"
        return f"{reason}: delete it and run the command again"


def _specs(experiment: Experiment, results: TolerantResults) -> list[RunSpec]:
    """The runs of the grid and of the winners that are known."""
    groups = outcome_of(experiment, results).groups
    return [
        *(trial.spec for group in groups for trial in group.trials),
        *(s for group in groups for s in group.specs.values()),
    ]
