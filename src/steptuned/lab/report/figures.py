"""The figures, from the outcome of an experiment, as PNG, SVG and PDF.

A figure of a smaller scale than the paper's says so in its title. To add a figure, add a function
to :data:`FIGURES`.
"""

import hashlib
import re
import textwrap
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from steptuned.lab.curves import Records
from steptuned.lab.experiment import Experiment
from steptuned.lab.measures import DISTANCE, LOSS, MEASURES, Measure, logged
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.rate import rate_of
from steptuned.lab.report.axes import (
    FEW,
    Series,
    X,
    brief,
    draw_quartiles,
    draw_seeds,
    plain_ticks,
    set_scale,
    share_limits,
    spread_of,
)
from steptuned.lab.report.bands import Array
from steptuned.lab.report.gamma import bounds_of, has_relative_bounds
from steptuned.lab.report.instances import back_propagations_to_level, ends, never
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

SPARE = ("#882255", "#117733", "#999933", "#AA4499", "#CC6677", "#3A9C8C")
"""Colours of entries without a style of their own, after Tol's "muted". The colours of the methods
are Okabe and Ito's. Colour-blind readers can tell both apart."""


def style_of(group: Group, index: int) -> tuple[str, str]:
    """Colour and line of an entry. No two of 18 entries without a style look the same."""
    again, spare = divmod(index, len(SPARE))
    own = METHODS[group.entry.method].style(group.entry.name)
    return own or (SPARE[spare], ("-.", ":", "--")[again % 3])


RATE_COLOURS = ("#6A3D9A", "#B0357E", "#E8625A", "#999933")
"""One for each delta, from dark to light. They are all the same method, so none is a method's."""
MANY = 8
"""Up to so many methods are in one column."""
LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 3.5}

Draw = Callable[[str, list[Outcome], Results], Figure]


FORMATS: dict[str, Any] = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The files of a figure, with metadata that leave out the date."""


def save(figure: Figure, path: Path, formats: Collection[str] = tuple(FORMATS)) -> list[Path]:
    """Write a figure in these formats, without dates: the same figure gives the same files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "steptuned"}):
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # scripts that the font does not have
        for suffix in formats:
            written.append(path.parent / f"{path.name}{suffix}")
            figure.savefig(written[-1], dpi=150, metadata=FORMATS[suffix])
    plt.close(figure)
    return written


def draw(
    name: str,
    outcomes: list[Outcome],
    results: Results,
    folder: Path,
    stem: str | None = None,
) -> list[Path]:
    """Draw the figure that the experiment asks for, with one panel per outcome, and save it."""
    return save(make(name, outcomes, results), folder / (stem or safe_name(name)))


def make(name: str, outcomes: list[Outcome], results: Results) -> Figure:
    """The figure that the experiment asks for, with one panel per outcome."""
    return FIGURES[outcomes[0].experiment.figure](name, outcomes, results)


def data_of(figure: Figure) -> list[dict[str, Any]]:
    """The labelled lines of each axis as numbers, to four digits; all lines if none is labelled.

    Bands and points are there too, each as about 50 of its corners.
    """
    found = []
    for axis in figure.axes:
        named = [line for line in axis.lines if not str(line.get_label()).startswith("_child")]
        lines = [
            {
                "label": str(line.get_label()).lstrip("_"),
                "x": _digits(line.get_xdata()),
                "y": _digits(line.get_ydata()),
            }
            for line in named or axis.lines
        ]
        areas = [
            {"x": _digits(corners[:, 0]), "y": _digits(corners[:, 1])}
            for corners in map(_corners, axis.collections)
        ]
        found.append({"axis": axis.get_ylabel(), "lines": lines, "areas": areas})
    return found


def _corners(drawn: Any) -> Any:
    """The points of a scatter plot, or some corners of a band."""
    if isinstance(drawn, PathCollection):
        return np.asarray(drawn.get_offsets())
    corners = np.concatenate([path.vertices for path in drawn.get_paths()] or [np.zeros((0, 2))])
    return corners[:: max(1, len(corners) // 50)]


def _digits(values: Any) -> list[float | None]:
    numbers = np.asarray(values, dtype=float).ravel().tolist()
    return [float(f"{number:.4g}") if np.isfinite(number) else None for number in numbers]


def safe_name(name: str) -> str:
    """A name that is safe for files and anchors. Different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9=.,_+-]+", "-", name)[:120]
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def single(figure: Callable[[Outcome, Results], Figure]) -> Draw:
    """A figure without panels: it shows the last outcome."""

    def drawn(name: str, outcomes: list[Outcome], results: Results) -> Figure:
        picture = figure(outcomes[-1], results)
        headline(picture, f"{name}: {outcomes[-1].experiment.title}", outcomes)
        return picture

    return drawn


MATHEMATICS = {"grad J": "∇J", "theta_j": "θⱼ", "^2": "²"}
"""How a figure writes what a title has in plain text."""


def headline(figure: Figure, title: str, outcomes: list[Outcome]) -> None:
    """The title of the whole figure, with its scale if that is smaller than the paper's."""
    scale = outcomes[0].experiment.scale
    notes = {"paper": ""}
    if all(PROBLEMS[o.experiment.problem].things == "training images" for o in outcomes):
        notes |= {
            "short": " (short scale: all images, a tenth of the epochs of scale paper)",
            "small": " (small scale: a part of the images, all epochs of scale paper)",
        }
    smaller = f" ({scale} scale: fewer data, a smaller grid or a smaller budget than scale paper)"
    for plain, symbol in MATHEMATICS.items():
        title = title.replace(plain, symbol)
    text = f"{brief(title, 160)}{notes.get(scale, smaller)}"
    width = int(15 * figure.get_figwidth())  # characters of this size per inch
    figure.suptitle("\n".join(textwrap.wrap(text, width)), fontsize=9)


def label_of(group: Group) -> str:
    """The label of a method with the hyper-parameters that were chosen for it."""
    if group.winner is None:
        return f"{group.entry.label}: no run finished"
    bounds = bounds_of(group)  # as they were used: M is at least nu
    chosen = [
        f"{key} {bounds[0]:g} to {bounds[1]:g}"
        if key == "bounds" and bounds
        else f"{key} {_short(value)}"
        for key, value in group.winner.hyper.items()
        if len(group.entry.axes[key]) > 1 or (key == "lr" and group.entry.follows)
    ]
    return f"{group.entry.label} ({', '.join(chosen)})" if chosen else group.entry.label


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_short, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)


def series_of(outcome: Outcome, records: Callable[[Any], Records]) -> list[Series]:
    """The methods on the first instance, as they are drawn. ``records`` reads the log of a spec."""
    found = []
    for index, group in enumerate(first_instance(outcome)):
        colour, line = style_of(group, index)
        logs = {seed: log for seed, spec in group.specs.items() if (log := records(spec))}
        seeds, bounds = outcome.experiment.seeds, bounds_of(group)
        label = label_of(group)
        name, is_variant = group.entry.name, group.entry.name != group.entry.method
        is_relative = has_relative_bounds(group)
        found.append(
            Series(name, label, colour, line, logs, seeds, bounds, is_variant, is_relative)
        )
    return found


def first_instance(outcome: Outcome) -> list[Group]:
    return [group for group in outcome.groups if group.instance == 0]


def per_epoch(outcome: Outcome) -> int:
    """Mini-batches per epoch."""
    return outcome.experiment.problem_options.per_epoch


def size_of(experiment: Experiment) -> str:
    """The size of the problem and the length of a run, in words."""
    problem, budget = PROBLEMS[experiment.problem], experiment.budget
    rows = experiment.problem_options.training_rows
    iterations = f"{budget.iterations:,} back-propagations" if budget.iterations else ""
    instances = [f"{experiment.instances} instances"] if experiment.instances > 1 else []
    seeds = f"{experiment.seeds} seed{'s' * (experiment.seeds > 1)}"
    length = iterations or f"{budget.epochs:g} epochs"
    size = experiment.options.get("size", 32)
    pixels = [f"{size}x{size} pixels"] if size != 32 else []
    return ", ".join([f"{rows:,} {problem.things}", *pixels, length, *instances, seeds])


# ------------------------------------------------------------------------- curves over the budget


def distance_to_best(outcome: Outcome, results: Results) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for series in series_of(outcome, results.records):
        losses = series.values("loss").items()
        curves = {seed: distances(values, outcome.star[0, seed]) for seed, values in losses}
        draw_seeds(axis, series, curves, lambda r: r["bp"], labelled=True, spread="lines")
    within = outcome.experiment.selection.within
    axis.axhline(within, color="0.6", linewidth=0.8, linestyle=":", label=f"J* + {within:g}")
    set_scale(axis, DISTANCE)
    axis.set(xlabel="iterations (back-propagations)", ylabel=DISTANCE.label, ylim=(1e-4, 1.5))
    after = outcome.experiment.selection.star_after
    iterations = f"{after.iterations if after else 0:,} iterations"
    star = f"J*: the best value of all methods after {iterations}"
    axis.set_title(f"{star}\nthick: median of the seeds, thin: each seed", fontsize=8)
    axis.legend(fontsize=7, **LEGEND)
    return figure


def distances(losses: Any, star: float) -> list[float | None]:
    """J - J*, at least 1e-9, so that it can be drawn on a log axis."""
    return [None if loss is None else max(loss - star, 1e-9) for loss in losses]


Row = list[Measure]
"""The measures that share a row of a figure: each panel draws the first one that it has."""


def loss(outcome: Outcome, results: Results) -> Figure:
    """The loss, with gamma and raw gamma below."""
    epoch = per_epoch(outcome)
    rows = [[LOSS], *(row for row in _rows([outcome], results) if row[0].quartiles)]
    figure, axes = _grid(rows, 7.0, 1)
    note = _draw_column(
        axes[:, 0], rows, outcome, results, lambda r: r["bp"] / epoch, legend_columns=2
    )
    axes[0, 0].set(ylabel=LOSS.name)
    axes[0, 0].set_title(note, fontsize=6, loc="left", pad=2)
    axes[-1, 0].set(xlabel=f"epochs (of {epoch} back-propagations)")
    return figure


def loss_test_gamma(name: str, outcomes: list[Outcome], results: Results) -> Figure:
    """One column per panel: training losses, performance on the test data, and gamma.

    A panel with many methods has one column per family.
    """
    rows = _rows(outcomes, results) or [[LOSS]]
    columns = [families(outcome) for outcome in outcomes]
    width = sum(map(len, columns))
    figure, grid = _grid(rows, 3.4 + 3.6 * width, width)
    left = iter(grid.T)
    for parts in columns:
        drawn = [next(left) for _ in parts]
        for axes, (family, part) in zip(drawn, parts.items(), strict=True):
            experiment = part.experiment
            note = _draw_column(axes, rows, part, results, lambda r: r["bp"])
            title = textwrap.wrap(brief(f"{experiment.name}: {experiment.title}", 90), 64)
            title += [size_of(experiment)]
            title += [f"{METHODS[family].label} and variants"] if family else []
            axes[0].set_title("\n".join([*title, *textwrap.wrap(note, 64)]), fontsize=8)
            axes[-1].set(xlabel=f"back-propagations ({per_epoch(part)} per epoch)")
        for same_row in zip(*drawn, strict=True):
            share_limits(same_row)
    headline(figure, name, outcomes)
    return figure


def families(outcome: Outcome) -> dict[str, Outcome]:
    """The outcome by families of methods, if it has too many methods for one column."""
    groups = first_instance(outcome)
    if len(groups) <= MANY:
        return {"": outcome}
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(METHODS[group.entry.method].family, []).append(group)
    return {family: replace(outcome, groups=members) for family, members in found.items()}


def _rows(outcomes: list[Outcome], results: Results) -> list[Row]:
    """The rows of a figure, for what was logged."""
    rows: dict[str, Row] = {}
    for measure in MEASURES:
        if measure.height and _logged(measure, outcomes, results):
            row = rows.setdefault(measure.replaced_by or measure.key, [])
            row.insert(len(row) if measure.replaced_by else 0, measure)
    return list(rows.values())


def _logged(measure: Measure, outcomes: list[Outcome], results: Results) -> bool:
    groups = [group for outcome in outcomes for group in outcome.groups]
    finals = [results.final(spec) for group in groups for spec in group.specs.values()]
    return any(final is not None and logged(final, measure) for final in finals)


def _grid(rows: list[Row], width: float, columns: int) -> tuple[Figure, Any]:
    heights = [row[0].height for row in rows]
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(width, sum(heights) + 1.6),
        squeeze=False,
        sharex="col",
        height_ratios=heights,
    )
    figure.set_layout_engine("constrained")
    return figure, grid


def _draw_column(
    axes: Any,
    rows: list[Row],
    outcome: Outcome,
    results: Results,
    x: X,
    legend_columns: int = 1,
) -> str:
    """One column of a figure, with its legend below. Returns what its lines show."""
    asked = series_of(outcome, results.records)
    methods = [series for series in asked if series.logs] or asked
    without = f"; not shown: {len(asked) - len(methods)} without runs" * (asked != methods)
    for axis, row in zip(axes, rows, strict=True):
        measure = next((m for m in row if _logged(m, [outcome], results)), row[0])
        if measure.quartiles:
            draw_quartiles(axis, methods, measure, x)
        else:
            for series in methods:
                values, spread = series.values(measure.key), spread_of(series, methods)
                draw_seeds(axis, series, values, x, measure is LOSS, spread)
            set_scale(axis, measure)
        axis.set(ylabel=measure.label)
    handles, labels = axes[0].get_legend_handles_labels()
    below = (0.5, -0.5 / rows[-1][0].height)
    style: dict[str, Any] = {**LEGEND, "fontsize": 6.5, "loc": "upper center"}
    axes[-1].legend(handles, labels, bbox_to_anchor=below, ncols=legend_columns, **style)
    if len(methods) <= FEW:
        return f"thick: median of the seeds, thin lines and band: each seed{without}"
    but = " (not of variants)" * any(series.is_variant for series in methods)
    return f"thick: median of the seeds, thin: each seed{but}{without}"


# ------------------------------------------------------------------------------- numbers of runs


def instances(outcome: Outcome, results: Results) -> Figure:
    """One point per instance, for each method. Runs that never arrive are hollow, at the edge."""
    soonest = outcome.experiment.selection.rule == "soonest"
    table = back_propagations_to_level(outcome, results) if soonest else ends(outcome, results)
    limit = never(outcome) if soonest else np.inf
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    labels = []
    for i, group in enumerate(first_instance(outcome)):
        numbers = table[group.entry.name]
        values = np.array([v for v in numbers if v is not None], dtype=float)
        arrived = f"{int((values < limit).sum())} of {len(numbers)}"
        labels.append(f"{brief(group.entry.label, 40)}\n{arrived}")
        _draw_instances(axis, i, style_of(group, i)[0], values, limit)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    to_level = f"iterations until J - J* < {outcome.experiment.selection.within}"
    at_end = f"{LOSS.name} at the end, mean of the seeds"
    axis.set(xscale="log", xlabel=to_level if soonest else at_end)
    plain_ticks(axis, "x")
    note = "one point per instance; bar: quartiles, tick: median"
    hollow = f"\nhollow: never, counted as {limit:g} iterations, as in claim 1" if soonest else ""
    axis.set_title(f"{note}{hollow}", fontsize=8)
    return figure


def _draw_instances(axis: Axes, row: int, colour: str, values: Array, limit: float) -> None:
    """The instances of a method, hollow from a limit on, with quartiles and median."""
    at = row + np.random.default_rng(row).uniform(-0.2, 0.2, len(values))
    for shown, fill in ((values < limit, colour), (values >= limit, "none")):
        axis.scatter(values[shown], at[shown], s=16, facecolors=fill, edgecolors=colour, alpha=0.7)
    if len(values):
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        axis.plot([low, high], [row, row], color=colour, linewidth=3, alpha=0.5)
        axis.plot(middle, row, "|", color=colour, markersize=18, markeredgewidth=2)


def rate(outcome: Outcome, results: Results) -> Figure:
    """The smallest gradient so far, with the rate of the theorem, for each delta."""
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for index, group in enumerate(outcome.groups):
        fit = rate_of(group, results)
        if fit is None:
            continue
        colour = RATE_COLOURS[index % len(RATE_COLOURS)]
        slope = f"slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}]"
        text = f"δ = {fit.delta:g}: {slope}, theorem ≤ {fit.bound:.2f}"
        axis.fill_between(fit.k, *fit.band, color=colour, alpha=0.12, linewidth=0)
        axis.loglog(fit.k, fit.smallest, color=colour, label=text)
        start = int((fit.k < fit.k[-1] / 10).sum())
        guide = fit.smallest[start] * (fit.k / fit.k[start]) ** fit.bound
        axis.loglog(fit.k[start:], guide[start:], ":", color=colour, linewidth=1.5)
    gradient = r"$\min_{j<k}$ of the mean of $|\nabla J(\theta_j)|^2$"
    axis.set(xlabel="iterations $k$", ylabel=gradient)
    bound = r"dotted: the theorem's rate $k^{-(1/2-\delta)}$, an upper bound"
    seeds = f"mean of {outcome.experiment.seeds} seeds, band: 95 % interval"
    axis.set_title(f"{seeds}; {bound}", fontsize=8)
    axis.legend(fontsize=8, **LEGEND)
    return figure


FIGURES: dict[str, Draw] = {
    "distance to the best value": single(distance_to_best),
    "loss": single(loss),
    "loss, accuracy and gamma": loss_test_gamma,
    "instances": single(instances),
    "rate": single(rate),
}
"""By the name that an experiment file gives as ``figure``."""
