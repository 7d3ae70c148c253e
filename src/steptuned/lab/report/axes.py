"""Drawing on one axis of a figure: curves of seeds with their spread, gamma with its bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from steptuned.lab.curves import Records
from steptuned.lab.measures import Measure
from steptuned.lab.report.bands import Array, Band, Values, band_of, over_seeds
from steptuned.lab.report.gamma import Bounds, is_fixed, limits

X = Callable[[dict[str, Any]], float]
"""The position of a log record on the x axis."""
Spread = Literal["band", "lines", "none"]
"""What is drawn of the seeds besides their median."""
FEW = 4
"""Up to so many methods, bands do not hide the curves of others."""
THIN = 1.0
"""Lines of single seeds are thinner than this."""
SPIKES = 0.01
"""The share of the values of single seeds that may leave the axis at either end."""
LEFT_OUT = {"log": 0.02, "linear": 0.1}
"""The first part of a run, which may leave the axis: it would stretch it. A linear axis has even
less room for a steep start."""


@dataclass(frozen=True)
class Series:
    """One method on one panel: how it is drawn, and the logs of its seeds."""

    name: str
    label: str
    colour: str
    line: str
    """A line style of matplotlib."""
    logs: dict[int, Records]
    """The log of each seed that has any records."""
    seeds: int
    """How many seeds the experiment asks for."""
    bounds: Bounds | None = None
    """m and M of the chosen hyper-parameters, for methods that have them."""
    is_variant: bool = False
    """Whether the entry runs a method under another name."""
    is_relative: bool = False
    """Whether the raw gamma is divided by its running reference before it is clipped."""

    @property
    def tuned_bounds(self) -> Bounds | None:
        """The bounds, where gamma is tuned between them."""
        return None if is_fixed(self.bounds) else self.bounds

    def bounds_on(self, measure: Measure) -> Bounds | None:
        """The bounds that limit a measure. Relative bounds do not limit the raw gamma."""
        if self.is_relative and measure.key == "raw gamma":
            return None
        return self.tuned_bounds

    def has(self, measure: Measure) -> bool:
        """Whether a measure is drawn. Raw gamma has no effect where gamma is fixed."""
        return not (measure.key == "raw gamma" and is_fixed(self.bounds))

    @property
    def diverged(self) -> set[int]:
        """The seeds whose logs end with a loss that is not finite."""
        return {seed for seed, log in self.logs.items() if not _finite(log[-1].get("loss"))}

    @property
    def steady(self) -> dict[int, Records]:
        """The logs that medians and bands are drawn of: if possible, those that did not diverge."""
        return {s: log for s, log in self.logs.items() if s not in self.diverged} or self.logs

    def values(self, key: str) -> dict[int, Values]:
        """The values of a key for each seed, record by record."""
        return {seed: [record.get(key) for record in log] for seed, log in self.logs.items()}


def spread_of(series: Series, methods: Sequence[Series]) -> Spread:
    """What is drawn of the spread of a method next to other methods."""
    if len(methods) <= FEW:
        return "band"
    return "none" if series.is_variant else "lines"


def draw_seeds(
    axis: Axes,
    series: Series,
    curves: Mapping[int, Values],
    x: X,
    labelled: bool,
    spread: Spread = "band",
) -> None:
    """The median of the seeds, over thin lines of the seeds and a band from smallest to largest.

    A seed that diverged is a thin line only: its short log would end the median of all.
    """
    curves = {seed: curve for seed, curve in curves.items() if any(map(_finite, curve))}
    label = _legend_label(series, len(curves)) if labelled else None
    style: dict[str, Any] = {"color": series.colour, "linestyle": series.line}
    thin: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.4, "zorder": 2}
    for seed, curve in curves.items() if spread != "none" else ():
        points = [(x(r), v) for r, v in zip(series.logs[seed], curve, strict=True) if _finite(v)]
        axis.plot(*np.array(points).reshape(-1, 2).T, **style, **thin)
    steady = {seed: curve for seed, curve in curves.items() if seed in series.steady}
    band = over_seeds(list(steady.values()))
    if band is None:
        axis.plot([], [], **style, label=label)
        return
    at = _positions(series, list(steady), band, x)
    if spread == "band":
        axis.fill_between(at, band.low, band.high, color=series.colour, alpha=0.1, linewidth=0)
    axis.plot(at, band.middle, **style, linewidth=1.6, label=label, zorder=_order(series))


def draw_quartiles(axis: Axes, series: Sequence[Series], measure: Measure, x: X) -> None:
    """Gamma or raw gamma of every tuned method: median, quartiles and bounds.

    Next to many methods, a variant has no quartiles. A constant gamma is a thin line. Older logs,
    which have no quartiles, show gamma itself.
    """
    bands: list[Band] = []
    bounds: list[tuple[str, Bounds]] = []
    for one in series:
        band = band_of(list(one.steady.values()), measure) if one.has(measure) else None
        if band is None:
            continue
        if (limiting := one.bounds_on(measure)) is not None:
            bounds.append((one.colour, limiting))
        if band.quartiles:
            filled = spread_of(one, series) != "none"
            bands.append(_draw_band(axis, one, measure, band, x, filled))
        else:
            draw_seeds(axis, one, one.values(measure.key), x, labelled=False)
    set_scale(axis, measure)
    if bands and (shown := limits(bands, [pair for _, pair in bounds])):
        axis.set_ylim(shown)
        plain_ticks(axis)
    draw_bounds(axis, bounds)
    if bands:
        note = "median and quartiles" if len(axis.collections) else "median"
        note += " since the last record"
        negative = "; nu where the curvature is negative" if measure.key == "raw gamma" else ""
        axis.set_title(f"{note}{negative}", fontsize=6, loc="left", pad=2)


def _draw_band(
    axis: Axes,
    series: Series,
    measure: Measure,
    band: Band,
    x: X,
    filled: bool,
) -> Band:
    """Draw quartiles. Returns what the axis has to show of them."""
    seeds = [seed for seed, log in series.steady.items() if any(measure.middle in r for r in log)]
    at = _positions(series, seeds, band, x)
    colour, name = series.colour, f"{measure.key} {{}} {series.name}"
    if band.varies and filled:
        alpha = 0.25 if measure.key == "gamma" else 0.15
        label = f"_{name.format('quartiles')}"
        style: dict[str, Any] = {"color": colour, "alpha": alpha, "linewidth": 0}
        axis.fill_between(at, band.low, band.high, label=label, **style)
    style = {"color": colour, "linewidth": 1.6 if band.varies else 1.0, "zorder": _order(series)}
    axis.plot(at, band.middle, series.line, label=f"_{name.format('median')}", **style)
    return band.where(np.array(at) >= LEFT_OUT["log"] * max(at, default=0))


def _order(series: Series) -> float:
    """Broken lines lie over solid ones, which they would otherwise disappear under."""
    return 3 if series.line == "-" else 3.5


def draw_bounds(axis: Axes, bounds: Sequence[tuple[str, Bounds]]) -> None:
    """Dotted lines at m and M, each value once, in the colour of its method if it has only one."""
    for i, (letter, side) in enumerate((("m", "top"), ("M", "bottom"))):
        for value in sorted({pair[i] for _, pair in bounds}):
            colours = [colour for colour, pair in bounds if pair[i] == value]
            colour = colours[0] if len(colours) == 1 < len(bounds) else "0.35"
            text = f"{letter} = {value:g}"
            style: dict[str, Any] = {"linewidth": 0.8, "linestyle": ":", "zorder": 1}
            axis.axhline(value, color=colour, label=f"_{text}", **style)
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


def set_scale(axis: Axes, measure: Measure) -> None:
    """The scale and the limits of the y axis, from the lines drawn so far.

    An axis without a positive value cannot be logarithmic. A short spike of a single seed, which
    is a thin line, may leave the axis.
    """
    x, y = _drawn(axis, lambda width: True)
    if not len(x):
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "no finished runs", transform=axis.transAxes, ha="center", color="0.4")
        return
    if measure.axis == "share":
        axis.set_ylim(-0.03, 1.03)
        return
    logarithmic = measure.axis == "log" and bool((y > 0).any())
    axis.set_yscale("log" if logarithmic else "linear")
    start = LEFT_OUT["log" if logarithmic else "linear"] * x.max()
    thick, thin = (
        y[(x >= start) & ((y > 0) | (not logarithmic))]
        for x, y in (_drawn(axis, lambda w: w >= THIN), _drawn(axis, lambda w: w < THIN))
    )
    if len(thick) and len(thin):
        thin = np.quantile(thin, (SPIKES, 1 - SPIKES))
    _show(axis, np.concatenate([thick, thin]))
    low, high = axis.get_ylim()
    if logarithmic and high / low < 100:
        plain_ticks(axis)


def _drawn(axis: Axes, chosen: Callable[[float], bool]) -> Array:
    """The points of the lines whose width is chosen: a row of x and a row of y."""
    lines = [line for line in axis.lines if chosen(line.get_linewidth())]
    return np.concatenate(
        [np.zeros((2, 0)), *(np.array(line.get_data(), dtype=float) for line in lines)], axis=1
    )


def _show(axis: Axes, values: Array) -> None:
    """Limits around these values, with a margin."""
    if len(values) and values.min() < values.max():
        transform = axis.yaxis.get_transform()
        low, high = transform.transform(np.array([values.min(), values.max()]))
        margin = 0.05 * (high - low)
        axis.set_ylim(*transform.inverted().transform(np.array([low - margin, high + margin])))


def share_limits(axes: Sequence[Axes]) -> None:
    """Give axes the same limits, those that show what each of them shows."""
    axes = [axis for axis in axes if any(np.size(line.get_xdata()) for line in axis.lines)]
    if len(axes) < 2:
        return
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, high)
        if axis.get_yscale() == "log" and high / low < 100:
            plain_ticks(axis)


def plain_ticks(axis: Axes, which: str = "y") -> None:
    """Numbers like 0.5 on a log axis, closer together the less it spans."""
    low, high = axis.get_ylim() if which == "y" else axis.get_xlim()
    ticks = axis.yaxis if which == "y" else axis.xaxis
    closer = (1.0, 2.0, 3.0, 5.0, 7.0) if high / low < 12 else (1.0, 2.0, 5.0)
    subs = closer if high / low < 100 else (1.0,)
    narrow = high / low < 4
    ticks.set_major_locator(
        MaxNLocator(6, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=subs)
    )
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ticks.set_minor_formatter(NullFormatter())


def _positions(series: Series, seeds: Sequence[int], band: Band, x: X) -> list[float]:
    """Of the records of a band. All seeds log at the same back-propagations."""
    log = series.logs[seeds[0]]
    return [x(log[i]) for i in band.records]


def brief(text: str, length: int = 70) -> str:
    """Text that fits into a figure, with nothing in it read as mathematics."""
    return (text if len(text) <= length else f"{text[: length - 1]}…").replace("$", r"\$")


def _legend_label(series: Series, found: int) -> str:
    label, seeds = brief(series.label), series.seeds
    if found == 0:
        return f"{label}, 0/{seeds} seeds"
    label = label if found == seeds else f"{label}, {found}/{seeds} seeds"
    diverged = len(series.diverged)
    return f"{label}, {diverged} diverged" if diverged else label


def _finite(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))
