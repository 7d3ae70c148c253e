"""The figures, from the outcome of an experiment, as PNG, SVG and PDF.

A figure of a smaller scale than the paper's says so in its title. To add a figure, add a function
to :data:`FIGURES`.
"""

import hashlib
import re
import textwrap
import warnings
from collections.abc import Callable, Collection
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
    Series,
    X,
    brief,
    draw_quartiles,
    draw_seeds,
    plain_ticks,
    set_scale,
)
from steptuned.lab.report.gamma import bounds_of
from steptuned.lab.report.instances import ends, instances_to_level
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

SPARE = ("#E69F00", "#56B4E9", "#CC79A7", "#F0E442")
"""Colours of entries without a style of their own. Like those of the methods, they are Okabe and
Ito's, which colour-blind readers can tell apart."""


def style_of(group: Group, index: int) -> tuple[str, str]:
    """Colour and line of an entry. No two of eight entries without a style look the same."""
    again, spare = divmod(index, len(SPARE))
    own = METHODS[group.entry.method].style(group.entry.name)
    return own or (SPARE[spare], ("-.", ":")[again % 2])


RATE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""One for each delta: they are all the same method."""

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
    """The labelled lines of each axis as numbers, to four digits; all lines if none is labelled."""
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
        found.append({"axis": axis.get_ylabel(), "lines": lines})
    return found


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


def headline(figure: Figure, title: str, outcomes: list[Outcome]) -> None:
    """The title of the whole figure, with its scale if that is smaller than the paper's."""
    notes = {
        "paper": "",
        "short": " (short scale: networks learn images in fewer epochs than at scale paper)",
    }
    scale = outcomes[0].experiment.scale
    smaller = f" ({scale} scale: fewer data, a smaller grid or a smaller budget than scale paper)"
    text = f"{brief(title, 160)}{notes.get(scale, smaller)}"
    width = int(15 * figure.get_figwidth())  # characters of this size per inch
    figure.suptitle("\n".join(textwrap.wrap(text, width)), fontsize=9)


def label_of(group: Group) -> str:
    """The label of a method with the hyper-parameters that were chosen for it."""
    if group.winner is None:
        return f"{group.entry.label}: no run finished"
    chosen = [
        f"{key} {','.join(map(_short, value)) if isinstance(value, list) else _short(value)}"
        for key, value in group.winner.hyper.items()
        if len(group.entry.axes[key]) > 1 or (key == "lr" and group.entry.follows)
    ]
    return f"{group.entry.label} ({', '.join(chosen)})" if chosen else group.entry.label


def _short(value: Any) -> str:
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
        found.append(Series(group.entry.name, label, colour, line, logs, seeds, bounds))
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
    return ", ".join([f"{rows:,} {problem.things}", length, *instances, seeds])


# ------------------------------------------------------------------------- curves over the budget


def distance_to_best(outcome: Outcome, results: Results) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for series in series_of(outcome, results.records):
        losses = series.values("loss").items()
        curves = {seed: distances(values, outcome.star[0, seed]) for seed, values in losses}
        draw_seeds(axis, series, curves, lambda r: r["bp"], labelled=True)
    axis.axhline(outcome.experiment.selection.within, color="0.6", linewidth=0.8, linestyle=":")
    set_scale(axis, DISTANCE)
    axis.set(xlabel="iterations (back-propagations)", ylabel=DISTANCE.label, ylim=(1e-4, 1.5))
    after = outcome.experiment.selection.star_after
    iterations = f"{after.iterations if after else 0:,} iterations"
    axis.set_title(f"J*: the best value of all methods after {iterations}", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
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
    _draw_column(axes[:, 0], rows, outcome, results, lambda r: r["bp"] / epoch, legend_columns=2)
    axes[0, 0].set(ylabel=LOSS.name)
    axes[-1, 0].set(xlabel=f"epochs (of {epoch} back-propagations)")
    return figure


def loss_test_gamma(name: str, outcomes: list[Outcome], results: Results) -> Figure:
    """One column per panel: training losses, performance on the test data, and gamma."""
    rows = _rows(outcomes, results) or [[LOSS]]
    figure, grid = _grid(rows, 3.4 + 3.6 * len(outcomes), len(outcomes))
    for axes, outcome in zip(grid.T, outcomes, strict=True):
        experiment = outcome.experiment
        _draw_column(axes, rows, outcome, results, lambda r: r["bp"])
        title = brief(f"{experiment.name}: {experiment.title}", 90)
        axes[0].set_title(f"{title}\n{size_of(experiment)}", fontsize=8)
        axes[-1].set(xlabel=f"back-propagations ({per_epoch(outcome)} per epoch)")
    headline(figure, name, outcomes)
    return figure


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
) -> None:
    """One column of a figure, with its legend below."""
    methods = series_of(outcome, results.records)
    for axis, row in zip(axes, rows, strict=True):
        measure = next((m for m in row if _logged(m, [outcome], results)), row[0])
        if measure.quartiles:
            draw_quartiles(axis, methods, measure, x)
        else:
            for series in methods:
                draw_seeds(axis, series, series.values(measure.key), x, labelled=measure is LOSS)
            set_scale(axis, measure)
        axis.set(ylabel=measure.label)
    handles, labels = axes[0].get_legend_handles_labels()
    below = (0.5, -0.5 / rows[-1][0].height)
    style: dict[str, Any] = {"fontsize": 6.5, "frameon": False, "loc": "upper center"}
    axes[-1].legend(handles, labels, bbox_to_anchor=below, ncols=legend_columns, **style)


# ------------------------------------------------------------------------------- numbers of runs


def instances(outcome: Outcome, results: Results) -> Figure:
    """One point per instance, for each method."""
    soonest = outcome.experiment.selection.rule == "soonest"
    table = instances_to_level(outcome, results) if soonest else ends(outcome, results)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    labels = []
    for i, group in enumerate(first_instance(outcome)):
        numbers = table[group.entry.name]
        values = np.array([v for v in numbers if v is not None], dtype=float)
        labels.append(f"{brief(group.entry.label, 40)}\n{len(values)} of {len(numbers)}")
        colour = style_of(group, i)[0]
        jitter = np.random.default_rng(i).uniform(-0.15, 0.15, len(values))
        axis.scatter(values, i + jitter, s=14, color=colour, alpha=0.6)
        if len(values):
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            axis.plot([low, high], [i, i], color=colour, linewidth=3, alpha=0.5)
            axis.plot(middle, i, "|", color=colour, markersize=18, markeredgewidth=2)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    to_level = f"iterations until J - J* < {outcome.experiment.selection.within}"
    at_end = f"{LOSS.name} at the end, mean of the seeds"
    axis.set(xscale="log", xlabel=to_level if soonest else at_end)
    plain_ticks(axis, "x")
    axis.set_title("one point per instance; bar: quartiles, tick: median", fontsize=8)
    return figure


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
        axis.loglog(fit.k, fit.smallest, color=colour, label=text)
        start = int((fit.k < fit.k[-1] / 10).sum())
        guide = fit.smallest[start] * (fit.k / fit.k[start]) ** fit.bound
        axis.loglog(fit.k[start:], guide[start:], ":", color=colour, linewidth=1)
    axis.set(xlabel="iterations k", ylabel="min over j < k of the mean of |∇J(θ_j)|²")
    bound = "dotted: the theorem's rate k^-(1/2-δ), an upper bound"
    axis.set_title(f"{outcome.experiment.seeds} seeds; {bound}", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    return figure


FIGURES: dict[str, Draw] = {
    "distance to the best value": single(distance_to_best),
    "loss": single(loss),
    "loss, accuracy and gamma": loss_test_gamma,
    "instances": single(instances),
    "rate": single(rate),
}
"""By the name that an experiment file gives as ``figure``."""
