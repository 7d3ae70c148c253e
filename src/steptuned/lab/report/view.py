"""What a report shows, as plain data, from a store that may be unfinished or damaged."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from steptuned.lab.curves import Records
from steptuned.lab.measures import (
    COMPARED,
    DISTANCE,
    LOSS,
    MEASURES,
    SMALLEST_GRADIENT,
    X_AXES,
    Measure,
    logged,
)
from steptuned.lab.rate import rate_of
from steptuned.lab.report.axes import LEFT_OUT, Series
from steptuned.lab.report.bands import Array, Band, Values, band_of, curves_of, over_seeds
from steptuned.lab.report.figures import (
    RATE_COLOURS,
    distances,
    first_instance,
    label_of,
    per_epoch,
    series_of,
    size_of,
)
from steptuned.lab.report.gamma import Bounds, extent
from steptuned.lab.results import TolerantResults, outcome_of, sources
from steptuned.lab.search import Group, Outcome, Score
from steptuned.lab.store import COMPLETE, Status, Store, final_of

POINTS = 40_000
"""Points of all curves of a page together; a record has up to 18 numbers."""
LEAST, MOST = 60, 1_000
"""Points of one curve."""
COUNTED = ("bp", "samples", "seconds")
"""What the page can draw curves over. It computes epochs from back-propagations."""
WATCHED = {key for m in MEASURES if m.height for key in (m.key, m.middle)}
"""The extremes of these are always drawn, even if most records are left out."""

Numbers = list[float | None]


@dataclass
class Tried:
    """A point of the grid."""

    choice: str
    score: Score | None
    status: Status
    is_winner: bool


@dataclass
class PageBand:
    """A curve with its band, at the records of a line; None where some seed has no value."""

    low: Numbers
    middle: Numbers
    high: Numbers
    quartiles: bool
    extent: Bounds | None
    """What the axis shows of quartiles."""


@dataclass
class Line:
    """A method on a panel: all its seeds, at the same records."""

    name: str
    label: str
    colour: str
    dash: str
    x: list[dict[str, Numbers]]
    """For each seed."""
    y: list[dict[str, Numbers]]
    seeds: list[int]
    note: str = ""
    """What is missing, if anything is."""
    bounds: Bounds | None = None
    """m and M, where gamma is tuned."""
    mean_x: dict[str, Numbers] = field(default_factory=dict)
    bands: dict[str, PageBand] = field(default_factory=dict)
    """By the key of the measure. There is none for a single seed without quartiles."""


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
    outcomes = [[outcome_of(e, results) for e in source.experiments] for source in found]
    groups = [g for panels in outcomes for outcome in panels for g in first_instance(outcome)]
    curves = sum(len(group.specs) for group in groups)
    points = max(LEAST, min(MOST, POINTS // max(1, curves)))
    for source, of_figure in zip(found, outcomes, strict=True):
        panels = [_panel(source.scale, outcome, results, points) for outcome in of_figure]
        view.figures.append(Shown(source.name, source.scale, source.command, panels, of_figure))
    view.environments = _environments(results.store)
    return view


def _unreadable(store: Store) -> list[str]:
    sentences = []
    for run in store.runs():
        try:
            named = f"{run.folder.name} ({run.spec.method})"
        except (ValueError, OSError):
            problem = "its spec.json cannot be read; delete the folder to run it again"
            sentences.append(f"{run.folder.name}: {problem}")
            continue
        if run.read("result.json") is not None and run.result() is None:
            problem = "the length of its log has changed since it ended; it will be run again"
            sentences.append(f"{named}: {problem}")
        elif run.result() is not None and not run.is_sound():
            problem = "its log has changed since the run ended; delete the folder to run it again"
            sentences.append(f"{named}: {problem}")
    return sentences


def _environments(store: Store) -> list[dict[str, Any]]:
    found = [run.environment() for run in store.runs()]
    different = {json.dumps(e, sort_keys=True): e for e in found if isinstance(e, dict)}
    return list(different.values())


# --------------------------------------------------------------------------------------- a panel


def _panel(scale: str, outcome: Outcome, results: TolerantResults, points: int) -> Panel:
    experiment = outcome.experiment
    groups = first_instance(outcome)
    epoch = per_epoch(outcome)
    is_rate = experiment.figure == "rate"
    if is_rate:
        lines, thinned = _rate_lines(groups, results), ""
    else:
        lines, thinned = _lines(outcome, results, points)
    return Panel(
        id=f"{experiment.name}-{scale}",
        title=f"{experiment.name}: {experiment.title}",
        note=experiment.note,
        size=size_of(experiment),
        per_epoch=epoch,
        axes=[("k", "iterations k")] if is_rate else list(X_AXES.items()),
        rows=[SMALLEST_GRADIENT] if is_rate else _rows(outcome, lines),
        lines=lines,
        grids={label_of(group): _grid(group, results) for group in groups},
        finals=[_final(group, outcome, results) for group in groups],
        warnings=_warnings(outcome.groups, results, epoch),
        options={"problem": experiment.problem, **experiment.problem_options.as_dict()},
        thinned=thinned,
    )


def _rows(outcome: Outcome, lines: list[Line]) -> list[Measure]:
    """The measures of a panel. Where there is a J*, the distance to it replaces the loss."""
    there: dict[str, object] = {key: None for line in lines for y in line.y for key in y}
    rows = [measure for measure in MEASURES if logged(there, measure)]
    return [DISTANCE, *(row for row in rows if row is not LOSS)] if outcome.star else rows


def _lines(outcome: Outcome, results: TolerantResults, points: int) -> tuple[list[Line], str]:
    """The methods of a panel, and a note on records that were left out."""
    lines, longest = [], 0
    methods = series_of(outcome, results.begun)
    for series, group in zip(methods, first_instance(outcome), strict=True):
        lines.append(_line(series, group, outcome, points))
        lines[-1].note = _missing(group, results)
        longest = max(longest, *map(len, series.logs.values()), 0)
    kept = max((len(y["loss"]) for line in lines for y in line.y), default=0)
    if longest <= kept:
        return lines, ""
    drawn = f"curves of up to {longest} records are drawn with up to {kept} of them"
    return lines, f"{drawn}, extremes kept of the losses, the accuracy and gamma"


def _line(series: Series, group: Group, outcome: Outcome, points: int) -> Line:
    """The seeds of a method, thinned to the same records."""
    logs = list(series.logs.values())
    curves = [[r.get(key) for r in log] for log in logs for key in WATCHED if key in log[-1]]
    kept = thin(curves, max(map(len, logs), default=0), points)
    stars = {seed: outcome.star.get((group.instance, seed), math.nan) for seed in series.logs}
    x, y = [], []
    for seed, log in series.logs.items():
        chosen = [log[i] if i < len(log) else {} for i in kept]
        x.append({key: _numbers([r.get(key) for r in chosen]) for key in COUNTED})
        y.append({key: _numbers([r.get(key) for r in chosen]) for key in _keys(series, chosen)})
        if outcome.star:
            y[-1]["distance"] = _numbers(distances(y[-1]["loss"], stars[seed]))
    line = Line(series.name, series.label, series.colour, series.line, x, y, list(series.logs))
    line.bounds = series.tuned_bounds
    line.mean_x = _mean_x(logs, kept)
    line.bands = _bands(series, outcome, stars, kept)
    return line


def _keys(series: Series, records: Records) -> list[str]:
    """The keys that are drawn: quartiles if there are any, otherwise the value itself."""
    present = {key for record in records for key in record}
    keys: list[str] = []
    for measure in MEASURES:
        if series.has(measure):
            keys += [key for key in measure.keys if key in present] or [measure.key]
    return [key for key in keys if key in present]


def _mean_x(logs: Sequence[Records], kept: list[int]) -> dict[str, Numbers]:
    """Mean over the seeds of each x at each record, up to the end of the shortest log."""
    shortest = min(map(len, logs), default=0)
    means: dict[str, Numbers] = {}
    for key in COUNTED:
        values = np.array(curves_of([log[:shortest] for log in logs], key), dtype=float)
        mean = values.mean(0) if len(logs) else values
        means[key] = _numbers([float(mean[i]) if i < shortest else None for i in kept])
    return means


def _bands(
    series: Series,
    outcome: Outcome,
    stars: dict[int, float],
    kept: list[int],
) -> dict[str, PageBand]:
    logs = list(series.logs.values())
    bands = {m.key: band_of(logs, m) for m in MEASURES if series.has(m)}
    if outcome.star:
        losses = series.values("loss")
        bands["distance"] = over_seeds([distances(losses[seed], stars[seed]) for seed in losses])
    return {
        key: _page_band(band, logs, key, kept)
        for key, band in bands.items()
        if band is not None and (band.quartiles or len(logs) > 1)
    }


def _page_band(band: Band, logs: Sequence[Records], key: str, kept: list[int]) -> PageBand:
    at = {int(record): i for i, record in enumerate(band.records)}
    chosen = [at.get(record) for record in kept]

    def at_records(curve: Array) -> Numbers:
        return _numbers([None if i is None else float(curve[i]) for i in chosen])

    low, middle, high = map(at_records, (band.low, band.middle, band.high))
    shown = _extent(logs, key) if band.quartiles else None
    return PageBand(low, middle, high, band.quartiles, shown)


def _extent(logs: Sequence[Records], key: str) -> Bounds | None:
    """The range of the quartiles of all seeds, without the start and without outliers."""
    logs = [[r for r in log if r["bp"] >= LEFT_OUT["log"] * log[-1]["bp"]] for log in logs]
    lows, highs = (curves_of(logs, f"{key} {part}") for part in ("low", "high"))
    low, high = (np.array([v for c in curves for v in c], dtype=float) for curves in (lows, highs))
    return extent(low[np.isfinite(low)], high[np.isfinite(high)])


def _rate_lines(groups: list[Group], results: TolerantResults) -> list[Line]:
    lines = []
    for index, group in enumerate(groups):
        fit = rate_of(group, results)
        if fit is not None:
            colour = RATE_COLOURS[index % len(RATE_COLOURS)]
            slope = f"slope {fit.slope:.2f} ({fit.low:.2f} to {fit.high:.2f})"
            label = f"delta {fit.delta:g}: {slope}, {fit.verdict}"
            x, y = {"k": fit.k.tolist()}, {SMALLEST_GRADIENT.key: fit.smallest.tolist()}
            lines.append(Line(group.entry.name, label, colour, "-", [x], [y], [0]))
    return lines


def thin(curves: Sequence[Values], length: int, points: int) -> list[int]:
    """Which records to draw: all, or both ends and the extremes of every curve in each stretch."""
    if length <= points:
        return list(range(length))
    stretches = max(1, points // (2 * max(1, len(curves))))
    kept = {0, length - 1}
    for stretch in np.array_split(np.arange(length), stretches):
        for curve in curves:
            inside = [(curve[i], int(i)) for i in stretch if i < len(curve)]
            inside = [(v, i) for v, i in inside if v is not None and math.isfinite(v)]
            if inside:
                kept |= {min(inside)[1], max(inside)[1]}
    return sorted(kept)


def _numbers(values: Sequence[Any]) -> Numbers:
    """Numbers for JSON, which has no infinities. Seven digits are more than a screen shows."""
    return [float(f"{v:.7g}") if _is_finite(v) else None for v in values]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _missing(group: Group, results: TolerantResults) -> str:
    done = sum(results.final(spec) is not None for spec in group.specs.values())
    complete = bool(group.specs) and done == len(group.specs)
    return "" if complete else f"{done}/{max(1, len(group.specs))} seeds"


# ------------------------------------------------------------------------------ text of a panel


def _warnings(groups: list[Group], results: TolerantResults, epoch: int) -> list[str]:
    return [sentence for group in groups for sentence in _warnings_of(group, results, epoch)]


def _warnings_of(group: Group, results: TolerantResults, epoch: int) -> list[str]:
    if group.winner is None:
        return [f"{group.entry.label}: no run of its grid is finished"]
    label = label_of(group) + (f", instance {group.instance}" if group.instance else "")
    statuses = {seed: results.run(spec).status() for seed, spec in group.specs.items()}
    open_runs = [group.specs[seed] for seed in statuses if statuses[seed] not in COMPLETE]
    said = []
    if open_runs:
        logs = [results.begun(spec) for spec in open_runs]
        reached = min(log[-1]["bp"] if log else 0 for log in logs) / epoch
        progress = f"{reached:.4g} of {open_runs[0].budget / epoch:.4g} epochs"
        complete = f"{len(statuses) - len(open_runs)}/{len(statuses)} seeds"
        said.append(f"{label}: {complete}; the slowest of the others is at {progress}")
    diverged = sum(status == "diverged" for status in statuses.values())
    if diverged:
        said.append(f"{label}: {diverged} of {len(statuses)} seeds diverged")
    trials = [results.run(trial.spec).status() for trial in group.trials]
    open_trials = sum(status not in COMPLETE for status in trials)
    if open_trials:
        points = f"{open_trials} of {len(trials)} points of its grid"
        said.append(f"{label}: {points} are not finished")
    edge = "the winner lies on the edge of the grid"
    edges = group.edges if group.trials else []  # others have the winner of the first instance
    return said + [f"{label}: {edge} ({key}); it should be wider" for key in edges]


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
    """The final and the best values of the finished seeds, by the names of the columns."""
    specs = group.specs.values()
    logs = [results.records(spec) for spec in specs if results.final(spec) is not None]
    row: dict[str, Any] = {
        "label": label_of(group),
        "seeds": f"{len(logs)}/{outcome.experiment.seeds}",
        "diverged": sum(results.run(spec).status() == "diverged" for spec in specs),
    }
    for measure in COMPARED:
        key, best = measure.key, min if measure.better == "min" else max
        having = [log for log in logs if key in log[-1]]
        finals = [final_of(log)[key] for log in having]
        bests = [best(v for r in log if math.isfinite(v := r.get(key, math.nan))) for log in having]
        for name, values in zip(columns_of(measure), (finals, bests), strict=True):
            if values:
                row[name] = _spread(values, measure)
    return row


def columns_of(measure: Measure) -> tuple[str, str]:
    """The columns of the table of final values that show a measure: at the end, and its best."""
    return measure.key, f"best {measure.key}"


def _spread(values: list[float], measure: Measure) -> dict[str, Any]:
    mean = float(np.mean(values))
    text = [f"{value:{measure.format}}" for value in (mean, min(values), max(values))]
    return {"value": mean, "mean": text[0], "min": text[1], "max": text[2]}
