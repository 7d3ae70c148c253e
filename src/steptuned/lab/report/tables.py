"""Tables for the terminal."""

from typing import Any

import numpy as np
from rich.console import Group as Together
from rich.table import Table

from steptuned.lab.experiment import Group, Outcome, first_below
from steptuned.lab.report.figures import label_of
from steptuned.lab.report.measures import compare, ends, instances_to_level, rate_of
from steptuned.lab.sweep import Results


def summary(outcome: Outcome, results: Results) -> Any:
    """Who reached what, after how many back-propagations."""
    experiment = outcome.experiment
    tables = [_rates(outcome, results) if experiment.figure == "rate" else _methods(outcome, results)]
    if experiment.instances > 1:
        tables.append(_instances(outcome, results))
    return Together(*tables, "")


def _methods(outcome: Outcome, results: Results) -> Table:
    experiment = outcome.experiment
    groups = [group for group in outcome.groups if group.instance == 0]
    lasts = {g.entry.name: [r for r in map(results.last, g.specs.values()) if r is not None] for g in groups}
    everyone = [record["loss"] for records in lasts.values() for record in records]
    level = outcome.star[0, 0] + experiment.selection.within if outcome.star else 1.1 * min(everyone, default=0.0)
    table = _new(f"{experiment.name} ({experiment.scale}): {experiment.title}")
    accuracy = any("accuracy" in record for records in lasts.values() for record in records)
    near = f"bp to J* + {experiment.selection.within:g}" if outcome.star else f"bp to J = {level:.3g}"
    for column in (
        "method and choice",
        "grid",
        "seeds",
        "bp",
        "final J: mean (min to max)",
        near,
        *(["accuracy"] if accuracy else []),
    ):
        table.add_column(column)
    for group in groups:
        records = lasts[group.entry.name]
        reached = [
            first_below(results.records(spec), outcome.star[0, seed] + experiment.selection.within if outcome.star else level)
            for seed, spec in group.specs.items()
        ]
        there = [r for r in reached if r is not None]
        row = [
            label_of(group),
            _grid(group),
            f"{len(records)}/{experiment.seeds}"
            if len(records) == experiment.seeds
            else f"[red]{len(records)}/{experiment.seeds}[/]",
            str(records[0]["bp"]) if records else "",
            _spread([record["loss"] for record in records], ".4g"),
            f"{np.median(there):.0f} ({len(there)}/{len(reached)})" if there else "never",
        ]
        table.add_row(*row, *([_spread([record["accuracy"] for record in records], ".2%")] if accuracy else []))
    return table


def _grid(group: Group) -> str:
    diverged = sum(trial.score is None for trial in group.trials)
    notes = [f"{len(group.trials)} tried"] if len(group.trials) > 1 else []
    notes += [f"{diverged} without score"] if diverged and notes else []
    notes += [f"[yellow]winner on the edge: {', '.join(group.edges)}[/]"] if group.edges else []
    return ", ".join(notes)


def _instances(outcome: Outcome, results: Results) -> Table:
    soonest = outcome.experiment.selection.rule == "soonest"
    numbers = instances_to_level(outcome, results) if soonest else ends(outcome, results)
    what = f"iterations to J* + {outcome.experiment.selection.within:g}" if soonest else "J at the end"
    table = _new(f"{what}, over {outcome.experiment.instances} instances")
    names = list(numbers)
    base = "sgd" if "sgd" in names else names[0]
    columns = (
        "method",
        "reached" if soonest else "finished",
        "median (quartiles)",
        f"smaller than {base} on",
        "95 % interval",
        "median ratio",
    )
    for column in columns:
        table.add_column(column)
    labels = {group.entry.name: group.entry.label for group in outcome.groups}
    for name in names:
        values = [v for v in numbers[name] if v is not None]
        quartiles = np.quantile(values, (0.25, 0.5, 0.75)) if values else [np.nan] * 3
        row = [
            labels[name],
            f"{len(values)}/{len(numbers[name])}",
            f"{quartiles[1]:.4g} ({quartiles[0]:.4g} to {quartiles[2]:.4g})",
        ]
        if name != base:
            c = compare(numbers, name, base)
            row += [f"{c.wins}/{c.instances}", f"{c.low:.0%} to {c.high:.0%}", f"{c.median_ratio:.3g}"]
        table.add_row(*row)
    return table


def _rates(outcome: Outcome, results: Results) -> Table:
    table = _new(f"{outcome.experiment.name} ({outcome.experiment.scale}): {outcome.experiment.title}")
    for column in ("delta", "seeds", "k up to", "slope (95 % interval)", "theorem: at most", "verdict"):
        table.add_column(column)
    for group in outcome.groups:
        fit = rate_of(group, results)
        if fit is not None:
            slope = f"{fit.slope:.3f} ({fit.low:.3f} to {fit.high:.3f})"
            seeds = sum(results.last(spec) is not None for spec in group.specs.values())
            table.add_row(f"{fit.delta:g}", str(seeds), f"{fit.k[-1]:.0f}", slope, f"{-(0.5 - fit.delta):.3f}", fit.verdict)
    return table


def _new(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def _spread(values: list[float], form: str) -> str:
    if not values:
        return ""
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
