"""What a report shows, as plain data, from a store that may be unfinished or damaged."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from steptuned.lab.report.figures import label_of, per_epoch, size_of, style_of
from steptuned.lab.report.gamma import bounds_of, is_fixed
from steptuned.lab.report.measures import rate_of
from steptuned.lab.results import TolerantResults, outcome_of, sources
from steptuned.lab.search import Group, Outcome, Score
from steptuned.lab.store import COMPLETE, Run, Status, Store, final_of

POINTS = 40_000
"""Points of all the curves of a page together; a record has up to 18 numbers."""
LEAST, MOST = 60, 1_000
"""Points of one curve."""

AXES = (
    ("bp", "back-propagations"),
    ("epochs", "epochs (of back-propagations)"),
    ("samples", "samples"),
    ("seconds", "seconds of training"),
)


@dataclass(frozen=True)
class Measure:
    """A row of the plots: a key of the log and how it is drawn."""

    key: str
    title: str
    log: bool = False
    shown: bool = True
    """Whether it is drawn before the reader asks for it."""
    share: bool = False
    """From 0 to 1."""


MEASURES = (
    Measure("loss", "training loss J", log=True),
    Measure("plain loss", "plain training loss", log=True),
    Measure("accuracy", "test accuracy"),
    Measure("test loss", "test loss", log=True),
    Measure("gamma", "gamma", log=True),
    Measure("raw gamma", "raw gamma", log=True),
    Measure("negative curvature", "share of negative curvature", shown=False, share=True),
    Measure("at lower", "share at the lower bound", shown=False, share=True),
    Measure("at upper", "share at the upper bound", shown=False, share=True),
    Measure("effective lr", "effective lr", log=True, shown=False),
    Measure("negative", "negative curvature", share=True),  # only older logs have it
)
QUARTILES = ("low", "median", "high")
"""A measure with these parts is drawn as a line with a band."""
KEPT = ("loss", "plain loss", "accuracy", "test loss", "gamma", "gamma median")
"""Their extremes are drawn, however many records are left out."""


@dataclass
class Tried:
    """A point of the grid."""

    choice: str
    score: Score | None
    status: Status
    is_winner: bool


@dataclass
class Line:
    """A method on a panel: all its seeds, on the same records."""

    name: str
    label: str
    colour: str
    dash: str
    x: list[dict[str, list[float | None]]]
    """For each seed."""
    y: list[dict[str, list[float | None]]]
    seeds: list[int]
    note: str = ""
    """What is missing, if anything is."""
    bounds: tuple[float, float] | None = None
    """m and M, where gamma is tuned."""


@dataclass
class Panel:
    id: str
    title: str
    note: str
    size: str
    per_epoch: int
    axes: list[tuple[str, str]]
    rows: list[Measure]
    lines: list[Line]
    grids: dict[str, list[Tried]]
    finals: list[dict[str, Any]]
    warnings: list[str]
    options: dict[str, Any]
    thinned: str = ""


@dataclass
class Shown:
    """A figure of the report."""

    name: str
    scale: str
    command: str
    panels: list[Panel]
    outcomes: list[Outcome]


@dataclass
class View:
    figures: list[Shown] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """One sentence for each run that cannot be read."""
    environments: list[dict[str, Any]] = field(default_factory=list)


def view_of(folder: Path) -> View:
    found, damaged = sources(folder)
    view = View(damaged=damaged)
    results = TolerantResults(Store(folder), view.damaged)
    view.damaged += _unreadable(results.store)
    outcomes = [[outcome_of(experiment, results) for experiment in source.experiments] for source in found]
    curves = sum(len(g.specs) for panels in outcomes for outcome in panels for g in outcome.groups if g.instance == 0)
    points = max(LEAST, min(MOST, POINTS // max(1, curves)))
    for source, panels in zip(found, outcomes, strict=True):
        shown = [_panel(f"{outcome.experiment.name}-{source.scale}", outcome, results, points) for outcome in panels]
        view.figures.append(Shown(source.name, source.scale, source.command, shown, panels))
    view.environments = _environments(results.store)
    return view


def _unreadable(store: Store) -> list[str]:
    sentences = []
    for run in store.runs():
        try:
            spec = run.spec
        except (ValueError, OSError):
            sentences.append(f"{run.folder.name}: its spec.json cannot be read; delete the folder to run it again")
            continue
        if run.read("result.json") is not None and run.result() is None:
            sentences.append(f"{run.folder.name} ({spec.method}): its log is longer or shorter than it ended; it will be run again")
        elif run.result() is not None and not run.is_sound():
            sentences.append(
                f"{run.folder.name} ({spec.method}): its log is not the one it ended with; delete the folder to run it again"
            )
    return sentences


def _environments(store: Store) -> list[dict[str, Any]]:
    different = {json.dumps(e, sort_keys=True): e for e in (run.environment() for run in store.runs()) if isinstance(e, dict)}
    return list(different.values())


# ---------------------------------------------------------------------------------------------- a panel


def _panel(identity: str, outcome: Outcome, results: TolerantResults, points: int) -> Panel:
    experiment = outcome.experiment
    groups = [group for group in outcome.groups if group.instance == 0]
    epoch = per_epoch(outcome)
    if experiment.figure == "rate":
        lines, rows, axes = (
            _rate_lines(groups, results),
            [Measure("smallest", "min of the mean of |grad J|^2", log=True)],
            [("k", "iterations k")],
        )
        thinned = ""
    else:
        longest = 0
        lines = []
        for index, group in enumerate(groups):
            line, length = _line(index, group, outcome, results, points)
            lines.append(line)
            longest = max(longest, length)
        there = {key for line in lines for y in line.y for key in y}
        rows = [row for row in MEASURES if row.key in there or f"{row.key} median" in there]
        if outcome.star:
            distance = Measure("distance", "J - J*", log=True)
            rows = [distance, *(row for row in rows if row.key != "loss")]
        axes = list(AXES)
        kept = max((len(y["loss"]) for line in lines for y in line.y), default=0)
        thinned = (
            f"curves of up to {longest} records are drawn with up to {kept} of them, "
            "extremes kept of the losses, the accuracy and gamma"
            if longest > kept
            else ""
        )
    return Panel(
        id=identity,
        title=f"{experiment.name}: {experiment.title}",
        note=experiment.note,
        size=size_of(experiment),
        per_epoch=epoch,
        axes=axes,
        rows=rows,
        lines=lines,
        grids={label_of(group): _grid(group, results) for group in groups},
        finals=[_final(group, outcome, results) for group in groups],
        warnings=_warnings(outcome.groups, results, epoch),
        options={"problem": experiment.problem, **experiment.problem_options.as_dict()},
        thinned=thinned,
    )


def _line(index: int, group: Group, outcome: Outcome, results: TolerantResults, points: int) -> tuple[Line, int]:
    """The seeds of a group, thinned to the same records, and how many records there were."""
    colour, dash = style_of(group, index)
    logs = {seed: results.begun(spec) for seed, spec in group.specs.items()}
    logs = {seed: log for seed, log in logs.items() if log}
    longest = max(map(len, logs.values()), default=0)
    watched = [key for key in KEPT if any(key in log[-1] for log in logs.values())]
    kept = thin([[record.get(key) for record in log] for log in logs.values() for key in watched], longest, points)
    bounds = bounds_of(group)
    fixed = is_fixed(bounds)
    x, y = [], []
    for seed, log in logs.items():
        chosen = [log[i] if i < len(log) else {} for i in kept]
        x.append({key: [_number(record.get(key)) for record in chosen] for key in ("bp", "samples", "seconds")})
        keys = [key for key in _keys_of(chosen) if not (fixed and key.startswith("raw gamma"))]
        y.append({key: [_number(record.get(key)) for record in chosen] for key in keys})
        if outcome.star:
            star = outcome.star.get((group.instance, seed), math.nan)
            y[-1]["distance"] = [None if v is None else _number(max(v - star, 1e-9)) for v in y[-1]["loss"]]
    note = _missing(group, results)
    shown_bounds = None if fixed else bounds
    name, label = group.entry.name, label_of(group)
    line = Line(name, label, colour, dash, x, y, list(logs), note, shown_bounds)
    return line, longest


def _keys_of(records: list[dict[str, Any]]) -> list[str]:
    """What is drawn of these records: quartiles where there are any, else the value itself."""
    present = {key for record in records for key in record}
    keys: list[str] = []
    for measure in MEASURES:
        parts = [f"{measure.key} {part}" for part in QUARTILES]
        keys += [key for key in parts if key in present] or [measure.key]
    return [key for key in keys if key in present]


def _rate_lines(groups: list[Group], results: TolerantResults) -> list[Line]:
    lines = []
    for index, group in enumerate(groups):
        fit = rate_of(group, results)
        if fit is not None:
            colour = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")[index % 4]
            label = f"delta {fit.delta:g}: slope {fit.slope:.2f} ({fit.low:.2f} to {fit.high:.2f}), {fit.verdict}"
            lines.append(
                Line(group.entry.name, label, colour, "-", [{"k": fit.k.tolist()}], [{"smallest": fit.smallest.tolist()}], [0])
            )
    return lines


def thin(curves: list[list[float | None]], length: int, points: int) -> list[int]:
    """Which records to draw: all, or of every stretch those at which some curve is smallest or largest, and both ends."""
    if length <= points:
        return list(range(length))
    stretches = max(1, points // (2 * max(1, len(curves))))
    kept = {0, length - 1}
    for stretch in np.array_split(np.arange(length), stretches):
        for curve in curves:
            inside = [
                (curve[i], int(i)) for i in stretch if i < len(curve) and curve[i] is not None and math.isfinite(curve[i] or 0.0)
            ]
            if inside:
                kept |= {min(inside)[1], max(inside)[1]}
    return sorted(kept)


def _number(value: Any) -> float | None:
    """JSON has no infinities; seven digits are more than a screen shows."""
    return float(f"{value:.7g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _missing(group: Group, results: TolerantResults) -> str:
    done = sum(results.final(spec) is not None for spec in group.specs.values())
    return "" if group.specs and done == len(group.specs) else f"{done}/{max(1, len(group.specs))} seeds"


def _warnings(groups: list[Group], results: TolerantResults, epoch: int) -> list[str]:
    said = []
    for group in groups:
        label = label_of(group) + (f", instance {group.instance}" if group.instance else "")
        if group.winner is None:
            said.append(f"{group.entry.label}: no run of its grid is finished")
            continue
        statuses = {spec.identity: results.run(spec).status() for spec in group.specs.values()}
        complete = sum(status in COMPLETE for status in statuses.values())
        if complete < len(statuses):
            records = [results.begun(spec) for spec in group.specs.values() if statuses[spec.identity] not in COMPLETE]
            reached = min((log[-1]["bp"] if log else 0 for log in records), default=0)
            budget = next(iter(group.specs.values())).budget
            said.append(
                f"{label}: {complete}/{len(statuses)} seeds; the others {reached / epoch:.4g} of {budget / epoch:.4g} epochs"
            )
        diverged = sum(status == "diverged" for status in statuses.values())
        if diverged:
            said.append(f"{label}: {diverged} of {len(statuses)} seeds diverged")
        open_trials = [t for t in group.trials if results.run(t.spec).status() not in COMPLETE]
        if open_trials:
            said.append(f"{label}: {len(open_trials)} of {len(group.trials)} points of its grid are not finished")
        said += [f"{label}: the winner lies on the edge of the grid ({key}); it should be wider" for key in group.edges]
    return said


def _grid(group: Group, results: TolerantResults) -> list[Tried]:
    axes = [key for key, values in group.entry.axes.items() if len(values) > 1]
    return [
        Tried(
            ", ".join(f"{key} {trial.hyper[key]}" for key in axes),
            trial.score,
            results.run(trial.spec).status(),
            group.winner is not None and trial.hyper == group.winner.hyper,
        )
        for trial in group.trials
        if axes
    ]


def _final(group: Group, outcome: Outcome, results: TolerantResults) -> dict[str, Any]:
    """The last and the best values of the finished seeds."""
    runs: list[Run] = [results.run(spec) for spec in group.specs.values()]
    logs = [results.records(spec) for spec in group.specs.values() if results.final(spec) is not None]
    table: dict[str, Any] = {
        "label": label_of(group),
        "seeds": f"{len(logs)}/{outcome.experiment.seeds}",
        "diverged": sum(run.status() == "diverged" for run in runs),
    }
    measures: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
        ("loss", "best loss", min),
        ("accuracy", "best accuracy", max),
        ("test loss", "best test loss", min),
    )
    for key, best_key, best in measures:
        lasts = [log[key] for log in map(final_of, logs) if key in log]
        bests = [best([r[key] for r in log if math.isfinite(r[key])]) for log in logs if key in log[-1]]
        for name, values in ((key, lasts), (best_key, bests)):
            if values:
                table[name] = {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}
    return table
