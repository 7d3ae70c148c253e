"""The figures, from the outcome of an experiment, as PNG, SVG and PDF. A scale smaller than the paper's says so on the figure."""

import hashlib
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from steptuned import rule
from steptuned.lab.experiment import Experiment
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.report.gamma import Quartiles, bounds_of, is_fixed, limits, quartiles_of
from steptuned.lab.report.measures import ends, instances_to_level, rate_of
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

SPARE = ("#E69F00", "#56B4E9", "#CC79A7", "#F0E442")
"""Colours of entries without a style of their own. Like those of the methods, they are Okabe and
Ito's, which colour-blind readers can tell apart."""


def style_of(group: Group, index: int) -> tuple[str, str]:
    """Colour and line of an entry."""
    return METHODS[group.entry.method].style(group.entry.name) or (SPARE[index % len(SPARE)], "-.")


def save(figure: Figure, path: Path) -> list[Path]:
    """PNG, SVG and PDF, without dates, so that the same figure is the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "steptuned"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script that the font lacks
        for suffix, metadata in ((".png", None), (".svg", {"Date": None}), (".pdf", {"CreationDate": None})):
            written.append(path.parent / f"{path.name}{suffix}")
            figure.savefig(written[-1], dpi=150, metadata=metadata)
    plt.close(figure)
    return written


def draw(name: str, outcomes: list[Outcome], results: Results, folder: Path, stem: str | None = None) -> list[Path]:
    """The figure that the experiment's file asks for, with a panel for each outcome."""
    return save(FIGURES[outcomes[0].experiment.figure](name, outcomes, results), folder / (stem or safe_name(name)))


def brief(text: str, length: int = 70) -> str:
    """Short enough for a picture, and nothing in it taken for mathematics."""
    return (text if len(text) <= length else f"{text[: length - 1]}…").replace("$", r"\$")


def safe_name(name: str) -> str:
    """A name that is one of a file and of an anchor, whatever it was."""
    safe = re.sub(r"[^A-Za-z0-9=.,_+-]+", "-", name)[:120]
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def single(figure: Callable[[Outcome, Results], Figure]) -> Callable[[str, list[Outcome], Results], Figure]:
    """A figure that has no panels: it is of the last outcome."""

    def drawn(name: str, outcomes: list[Outcome], results: Results) -> Figure:
        picture = figure(outcomes[-1], results)
        headline(picture, f"{name}: {outcomes[-1].experiment.title}", outcomes)
        return picture

    return drawn


def headline(figure: Figure, title: str, outcomes: list[Outcome]) -> None:
    scale = outcomes[0].experiment.scale
    note = "" if scale == "paper" else f"   ({scale} scale: fewer data, a smaller grid or a smaller budget than scale paper)"
    if scale == "short":
        note = "   (short scale: networks learn images in fewer epochs than at scale paper)"
    figure.suptitle(f"{brief(title, 160)}{note}", fontsize=9, wrap=True)


def short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def label_of(group: Group) -> str:
    """The method and what was chosen for it."""
    if group.winner is None:
        return f"{group.entry.label}: no run finished"
    chosen = [
        f"{key} {','.join(map(short, value)) if isinstance(value, list) else short(value)}"
        for key, value in group.winner.hyper.items()
        if len(group.entry.axes[key]) > 1 or (key == "lr" and group.entry.follows)
    ]
    return f"{group.entry.label} ({', '.join(chosen)})" if chosen else group.entry.label


Value = Callable[[dict[str, Any], int], float | None]
X = Callable[[dict[str, Any]], float]


def curves(
    axis: Axes,
    outcome: Outcome,
    results: Results,
    value: Value,
    x: X,
    labelled: bool = True,
) -> None:
    """The curves of all methods on the first instance."""
    for index, group in enumerate(_first_instance(outcome)):
        curve(axis, index, group, outcome, results, value, x, labelled)


def curve(
    axis: Axes,
    index: int,
    group: Group,
    outcome: Outcome,
    results: Results,
    value: Value,
    x: X,
    labelled: bool,
) -> None:
    """A line for every seed, thin, with their mean and the band from smallest to largest."""
    colour, line = style_of(group, index)
    label, seeds = brief(label_of(group)), outcome.experiment.seeds
    runs = []
    for seed, spec in group.specs.items():
        points = [(x(record), value(record, seed)) for record in results.records(spec)]
        points = [(at, v) for at, v in points if v is not None and np.isfinite(v)]
        if points:
            runs.append(np.array(points).T)
    if not runs:
        axis.plot([], [], line, color=colour, label=f"{label}, 0/{seeds} seeds")
        return
    shortest = min(len(run[0]) for run in runs)
    at, values = runs[0][0][:shortest], np.array([run[1][:shortest] for run in runs])
    missing = "" if len(runs) == seeds else f", {len(runs)}/{seeds} SEEDS"
    for run in runs:
        axis.plot(*run, line, color=colour, linewidth=0.6, alpha=0.5)
    axis.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0)
    named = f"{label}{missing}" if labelled else None
    axis.plot(at, values.mean(0), line, color=colour, linewidth=1.6, label=named)


def gammas(axis: Axes, outcome: Outcome, results: Results, key: str, x: X) -> None:
    """Gamma or raw gamma of every tuned method: median, quartiles and bounds, on a log axis.

    Methods with a fixed gamma have a thin line, and no raw gamma: nothing follows from it. Logs
    without quartiles have gamma itself.
    """
    bands: list[Quartiles] = []
    bounds: list[tuple[str, tuple[float, float]]] = []
    for index, group in enumerate(_first_instance(outcome)):
        colour, line = style_of(group, index)
        name, clipped = group.entry.name, bounds_of(group)
        fixed = is_fixed(clipped)
        if fixed and key != "gamma":
            continue
        band = quartiles_of(group, results, key, x)
        if band is None and key != "gamma":
            continue
        if clipped is not None and not fixed:
            bounds.append((colour, clipped))
        if band is None:
            curve(axis, index, group, outcome, results, _recorded(key), x, labelled=False)
            continue
        bands.append(band)
        label = f"_{key} median {name}"
        if not band.varies:
            axis.plot(band.x, band.median, line, color=colour, linewidth=0.8, label=label)
            continue
        axis.fill_between(
            band.x,
            band.low,
            band.high,
            color=colour,
            alpha=0.25 if key == "gamma" else 0.15,
            linewidth=0,
            label=f"_{key} quartiles {name}",
        )
        axis.plot(band.x, band.median, line, color=colour, linewidth=1.6, label=label)
    logarithmic(axis)
    if bands and (shown := limits(bands, [pair for _, pair in bounds])):
        axis.set_ylim(shown)
        plain_ticks(axis)
    draw_bounds(axis, bounds)
    axis.set(ylabel=key)
    if bands:
        text = "line: median, band: quartiles between log records"
        more = "; nu at negative curvature" if key != "gamma" else ""
        axis.set_title(f"{text}{more}", fontsize=6, loc="left", pad=2)


def draw_bounds(axis: Axes, bounds: list[tuple[str, tuple[float, float]]]) -> None:
    """Dotted lines at m and M, each value once, in the colour of its method if it has only one."""
    for i, (letter, side) in enumerate((("m", "top"), ("M", "bottom"))):
        for value in sorted({pair[i] for _, pair in bounds}):
            colours = [colour for colour, pair in bounds if pair[i] == value]
            colour = colours[0] if len(colours) == 1 < len(bounds) else "0.35"
            text = f"{letter} = {value:g}"
            axis.axhline(value, color=colour, linewidth=0.8, linestyle=":", label=f"_{text}")
            axis.annotate(
                text,
                (1, value),
                xycoords=axis.get_yaxis_transform(),
                xytext=(3, 0),
                textcoords="offset points",
                va=side,
                fontsize=6,
                color=colour,
                annotation_clip=False,
            )


def plain_ticks(axis: Axes) -> None:
    """Numbers like 0.5 on a log axis; steps of 1, 2, 5 where it spans less than two decades."""
    low, high = axis.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _first_instance(outcome: Outcome) -> list[Group]:
    return [group for group in outcome.groups if group.instance == 0]


def logarithmic(axis: Axes) -> None:
    """Where there is something to draw: an empty axis cannot be."""
    if any(np.any(np.asarray(line.get_ydata(), dtype=float) > 0) for line in axis.lines):
        axis.set_yscale("log")


def per_epoch(outcome: Outcome) -> int:
    return outcome.experiment.problem_options.per_epoch


def distance_to_best(outcome: Outcome, results: Results) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    curves(axis, outcome, results, lambda r, seed: max(r["loss"] - outcome.star[0, seed], 1e-9), lambda r: r["bp"])
    axis.axhline(outcome.experiment.selection.within, color="0.6", linewidth=0.8, linestyle=":")
    after = outcome.experiment.selection.star_after
    logarithmic(axis)
    axis.set(xlabel="iterations (back-propagations)", ylabel="J - J*", ylim=(1e-4, 1.5))
    axis.set_title(f"J*: the best value of all methods after {after.iterations if after else 0:,} iterations", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    return figure


def loss(outcome: Outcome, results: Results) -> Figure:
    epoch = per_epoch(outcome)
    rows = ["loss", *_logged(("gamma", "raw gamma"), [outcome], results)]
    figure, axes = _rows(rows, 7.0, 1)
    _draw_rows(axes[:, 0], rows, outcome, results, lambda r: r["bp"] / epoch, legend_columns=2)
    axes[0, 0].set(ylabel="J")
    axes[-1, 0].set(xlabel=f"epochs (of {epoch} back-propagations)")
    return figure


def loss_test_gamma(name: str, outcomes: list[Outcome], results: Results) -> Figure:
    """A column per panel: training losses, performance on the test data, and gamma."""
    rows = ["loss", *_logged(("plain loss",), outcomes, results), "test"]
    rows += _logged(("gamma", "raw gamma"), outcomes, results)
    figure, grid = _rows(rows, 3.4 + 3.6 * len(outcomes), len(outcomes))
    for axes, outcome in zip(grid.T, outcomes, strict=True):
        experiment = outcome.experiment
        _draw_rows(axes, rows, outcome, results, lambda r: r["bp"])
        title = brief(f"{experiment.name}: {experiment.title}", 90)
        axes[0].set_title(f"{title}\n{size_of(experiment)}", fontsize=8)
        axes[-1].set(xlabel=f"back-propagations ({per_epoch(outcome)} per epoch)")
    headline(figure, name, outcomes)
    return figure


HEIGHTS = {"loss": 3.0, "plain loss": 2.2, "test": 2.0, "gamma": 1.5, "raw gamma": 1.5}
"""Of the rows of a figure, in inches."""


def _rows(rows: list[str], width: float, columns: int) -> tuple[Figure, Any]:
    heights = [HEIGHTS[row] for row in rows]
    size = (width, sum(heights) + 1.6)
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=size,
        squeeze=False,
        sharex="col",
        height_ratios=heights,
    )
    figure.set_layout_engine("constrained")
    return figure, grid


def _draw_rows(
    axes: Any,
    rows: list[str],
    outcome: Outcome,
    results: Results,
    x: X,
    legend_columns: int = 1,
) -> None:
    """One column of a figure, with its legend below."""
    for axis, row in zip(axes, rows, strict=True):
        if row in ("gamma", "raw gamma"):
            gammas(axis, outcome, results, row, x)
            continue
        has_accuracy = any("accuracy" in last for last in _lasts(outcome, results))
        key = row if row != "test" else "accuracy" if has_accuracy else "test loss"
        curves(axis, outcome, results, _recorded(key), x, labelled=row == "loss")
        axis.set(ylabel=TITLES[key])
        if key != "accuracy":
            logarithmic(axis)
    handles, labels = axes[0].get_legend_handles_labels()
    below = (0.5, -0.5 / HEIGHTS[rows[-1]])
    style: dict[str, Any] = {"fontsize": 6.5, "frameon": False, "loc": "upper center"}
    axes[-1].legend(handles, labels, bbox_to_anchor=below, ncols=legend_columns, **style)


TITLES = {
    "loss": "training loss J",
    "plain loss": "plain training loss",
    "accuracy": "test accuracy",
    "test loss": "test loss",
}


def _logged(keys: Sequence[str], outcomes: list[Outcome], results: Results) -> list[str]:
    """Those of the keys that some log has."""
    lasts = [last for outcome in outcomes for last in _lasts(outcome, results)]
    return [key for key in keys if any(key in last or f"{key} median" in last for last in lasts)]


def _recorded(key: str) -> Callable[[dict[str, Any], int], float | None]:
    return lambda record, _: record.get(key)


def _lasts(outcome: Outcome, results: Results) -> list[dict[str, Any]]:
    lasts = [results.final(spec) for group in outcome.groups for spec in group.specs.values()]
    return [last for last in lasts if last is not None]


def size_of(experiment: Experiment) -> str:
    """How large the problem is and how long a run."""
    problem, budget = PROBLEMS[experiment.problem], experiment.budget
    rows = experiment.problem_options.training_rows
    length = f"{budget.iterations:,} back-propagations" if budget.iterations else f"{budget.epochs:g} epochs"
    several = [f"{experiment.instances} instances"] if experiment.instances > 1 else []
    words = [f"{rows:,} {problem.things}", length, *several, f"{experiment.seeds} seed{'s' * (experiment.seeds > 1)}"]
    return ", ".join(words)


def instances(outcome: Outcome, results: Results) -> Figure:
    """How each method did on every instance."""
    soonest = outcome.experiment.selection.rule == "soonest"
    table = instances_to_level(outcome, results) if soonest else ends(outcome, results)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    names = list(table)
    for i, name in enumerate(names):
        group = next(group for group in outcome.groups if group.entry.name == name)
        values = np.array([v for v in table[name] if v is not None], dtype=float)
        jitter = np.random.default_rng(i).uniform(-0.15, 0.15, len(values))
        axis.scatter(values, i + jitter, s=14, color=style_of(group, i)[0], alpha=0.6)
        if len(values):
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            axis.plot([low, high], [i, i], color=style_of(group, i)[0], linewidth=3, alpha=0.5)
            axis.plot(middle, i, "|", color=style_of(group, i)[0], markersize=18, markeredgewidth=2)
    labels = {group.entry.name: group.entry.label for group in outcome.groups}
    counts = {name: sum(v is not None for v in table[name]) for name in names}
    axis.set_yticks(range(len(names)), [f"{brief(labels[n], 40)}\n{counts[n]} of {len(table[n])}" for n in names], fontsize=8)
    axis.invert_yaxis()
    within = outcome.experiment.selection.within
    axis.set(xscale="log", xlabel=f"iterations until J - J* < {within}" if soonest else "J at the end, mean of the seeds")
    axis.set_title("a point an instance; bar: quartiles, tick: median", fontsize=8)
    return figure


def rate(outcome: Outcome, results: Results) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for index, group in enumerate(outcome.groups):
        fit = rate_of(group, results)
        if fit is None:
            continue
        colour = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")[index % 4]
        text = f"δ = {fit.delta:g}: slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}], theorem ≤ {-(0.5 - fit.delta):.2f}"
        axis.loglog(fit.k, fit.smallest, color=colour, label=text)
        start = int((fit.k < fit.k[-1] / 10).sum())
        guide = fit.smallest[start] * (fit.k / fit.k[start]) ** -(0.5 - fit.delta)
        axis.loglog(fit.k[start:], guide[start:], ":", color=colour, linewidth=1)
    axis.set(xlabel="iterations k", ylabel="min over j < k of the mean of |∇J(θ_j)|²")
    axis.set_title(f"{outcome.experiment.seeds} seeds; dotted: the theorem's rate k^-(1/2-δ), an upper bound", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    return figure


FIGURES: dict[str, Callable[[str, list[Outcome], Results], Figure]] = {
    "distance to the best value": single(distance_to_best),
    "loss": single(loss),
    "loss, accuracy and gamma": loss_test_gamma,
    "instances": single(instances),
    "rate": single(rate),
}


def curvature_illustration(folder: Path) -> list[Path]:
    """Figure 1: a step where curvature is negative, then one where it is positive, by the library's own rule."""

    def J(t: Any) -> Any:
        return np.cos(1.2 * t) + 0.04 * (t - 1) ** 2

    def slope(t: float) -> float:
        return float(-1.2 * np.sin(1.2 * t) + 0.08 * (t - 1))

    def bend(t: float) -> float:
        return float(-1.44 * np.cos(1.2 * t) + 0.08)

    nu, points = 2.2, [0.45]
    for _ in range(2):
        t, g, h = points[-1], slope(points[-1]), bend(points[-1])
        # Along d = -g the model's curvature is h g^2 and |d|^2 = g^2: gamma = 1 / h where that is positive, nu elsewhere.
        gamma = rule.gamma(torch.tensor(g * g), torch.tensor(h * g * g), nu).item()
        points.append(t - gamma * g)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    grid = np.linspace(-0.6, 5, 400)
    axis.plot(grid, J(grid), color="black", label="J")
    names: Sequence[tuple[str, str]] = (("q⁻", "#D55E00"), ("q⁺", "#0072B2"))
    for i, (name, colour) in enumerate(names):
        t = points[i]
        near = np.linspace(t - 1.3, t + 1.6, 200)
        model = J(t) + slope(t) * (near - t) + bend(t) * (near - t) ** 2 / 2
        kind = "negative" if bend(t) < 0 else "positive"
        axis.plot(near, model, "--", color=colour, label=f"{name}: model at θ{'₀₁'[i]}, {kind} curvature")
        arrow = {"arrowstyle": "->", "color": colour, "connectionstyle": "arc3,rad=-0.3"}
        axis.annotate("", (points[i + 1], J(points[i + 1])), (t, J(t)), arrowprops=arrow)
    for i, t in enumerate(points):
        axis.plot(t, J(t), "o", color="black")
        axis.annotate(f"θ{'₀₁₂'[i]}", (t, J(t)), textcoords="offset points", xytext=(6, 8))
    axis.set(xlabel="θ", ylabel="J", ylim=(-1.5, 1.6))
    axis.legend(fontsize=8, frameon=False)
    figure.suptitle("figure-1: a large step where J is concave, the model's minimum where it is convex", fontsize=9)
    return save(figure, folder / "figure-1")
