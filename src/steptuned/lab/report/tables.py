"""Tables, for the terminal and for Markdown."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table as RichTable

from steptuned.lab.claims import JUDGED, OTHERS, SIX, TUNED, Claim, Judgement, criteria_hash
from steptuned.lab.methods import METHODS
from steptuned.lab.paired_runs import MissingRuns, PairedRuns
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report.figures import label_of
from steptuned.lab.report.measures import compare, ends, instances_to_level, rate_of
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome, first_below
from steptuned.lab.statistics import Comparison, performance_profiles
from steptuned.lab.table2 import PAPER, TIMED, Timing

FACTORS = (1.0, 1.1, 1.5, 2.0, 5.0)
"""Of the performance profiles."""


@dataclass
class Table:
    """Plain words, so that it can be shown anywhere."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def for_terminal(self) -> RichTable:
        table = RichTable(title=escape(self.title), title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in self.columns:
            table.add_column(escape(column))
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        heading = f"**{self.title}**\n\n" if self.title else ""
        return heading + "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def summary(outcome: Outcome, results: Results) -> list[Table]:
    """Who reached what, after how many back-propagations."""
    experiment = outcome.experiment
    tables = [_rates(outcome, results) if experiment.figure == "rate" else _methods(outcome, results)]
    if experiment.instances > 1:
        tables.append(_instances(outcome, results))
    return tables


def _methods(outcome: Outcome, results: Results) -> Table:
    experiment = outcome.experiment
    groups = [group for group in outcome.groups if group.instance == 0]
    lasts = {g.entry.name: [r for r in map(results.final, g.specs.values()) if r is not None] for g in groups}
    everyone = [record for records in lasts.values() for record in records]
    level = (
        outcome.star[0, 0] + experiment.selection.within if outcome.star else 1.1 * min((r["loss"] for r in everyone), default=0.0)
    )
    near = f"bp to J* + {experiment.selection.within:g}" if outcome.star else f"bp to J = {level:.3g}"
    tested = [key for key in ("accuracy", "test loss") if any(key in record for record in everyone)]
    columns = ["method and choice", "grid", "seeds", "bp", "final J: mean (min to max)", near, *tested]
    table = Table(f"{experiment.name} ({experiment.scale}): {experiment.title}", columns)
    for group in groups:
        records = lasts[group.entry.name]
        reached = [
            first_below(results.records(spec), outcome.star[0, seed] + experiment.selection.within if outcome.star else level)
            for seed, spec in group.specs.items()
        ]
        there = [r for r in reached if r is not None]
        row = [
            label_of(group),
            _grid(group, experiment.selection.rule),
            f"{len(records)}/{experiment.seeds}{'' if len(records) == experiment.seeds else ' SEEDS'}",
            str(records[0]["bp"]) if records else "",
            _spread([record["loss"] for record in records], ".4g"),
            f"{np.median(there):.0f} ({len(there)}/{len(reached)})" if there else "never",
        ]
        table.rows.append(row + [_spread([r[key] for r in records], ".2%" if key == "accuracy" else ".4g") for key in tested])
    return table


ORDERS = (
    ("plain loss", "lowest plain training loss", 1),
    ("loss", "lowest J", 1),
    ("test loss", "lowest test loss", 1),
    ("accuracy", "highest accuracy", -1),
)


def ranking(outcome: Outcome, results: Results) -> str:
    """Who ended best, in a sentence, where there is one instance."""
    if outcome.experiment.instances > 1 or outcome.experiment.figure == "rate":
        return ""
    lasts = {group.entry.label: [r for r in map(results.final, group.specs.values()) if r is not None] for group in outcome.groups}
    orders = []
    for key, words, sign in ORDERS:
        ends = {label: sign * np.mean([r[key] for r in rs]) for label, rs in lasts.items() if rs and key in rs[0]}
        orders += [f"{words}: {', '.join(sorted(ends, key=ends.__getitem__))}"] if len(ends) > 1 else []
    return f"From best to worst at the end, by the mean of the seeds, {'; '.join(orders)}." if orders else ""


def _grid(group: Group, rule: str) -> str:
    diverged = sum(trial.score is None for trial in group.trials)
    notes = [f"{len(group.trials)} tried"] if len(group.trials) > 1 else []
    notes += [f"{diverged} without score"] if diverged and notes else []
    score = group.winner.score if group.winner else None
    if notes and rule == "soonest" and score is not None and score.unit == "loss":
        notes.append(f"none near J*, best by {score}")
    notes += [f"winner on the EDGE: {', '.join(group.edges)}"] if group.edges else []
    return ", ".join(notes)


def _instances(outcome: Outcome, results: Results) -> Table:
    soonest = outcome.experiment.selection.rule == "soonest"
    numbers = instances_to_level(outcome, results) if soonest else ends(outcome, results)
    what = f"iterations to J* + {outcome.experiment.selection.within:g}" if soonest else "J at the end"
    names = list(numbers)
    base = "sgd" if "sgd" in names else names[0]
    columns = [
        "method",
        "reached" if soonest else "finished",
        "median (quartiles)",
        f"smaller than {base} on",
        "95 % interval",
        "median ratio",
    ]
    table = Table(f"{what}, over {outcome.experiment.instances} instances", columns)
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
        table.rows.append(row + [""] * (len(columns) - len(row)))
    return table


def _rates(outcome: Outcome, results: Results) -> Table:
    columns = ["delta", "seeds", "k up to", "slope (95 % interval)", "theorem: at most", "verdict"]
    table = Table(f"{outcome.experiment.name} ({outcome.experiment.scale}): {outcome.experiment.title}", columns)
    for group in outcome.groups:
        fit = rate_of(group, results)
        if fit is not None:
            slope = f"{fit.slope:.3f} ({fit.low:.3f} to {fit.high:.3f})"
            seeds = sum(results.final(spec) is not None for spec in group.specs.values())
            row = [f"{fit.delta:g}", str(seeds), f"{fit.k[-1]:.0f}", slope, f"{-(0.5 - fit.delta):.3f}", fit.verdict]
            table.rows.append(row)
    return table


def claims(judged: list[tuple[Claim, Judgement]]) -> list[Table]:
    """Every claim with its verdict, then the criteria, then the comparisons behind the verdicts."""
    columns = ["#", "verdict", "claim", "n", "weakest comparison [95 % interval]", "scale", "measured"]
    verdicts = Table("the paper's claims, judged by these runs", columns)
    criteria = Table(f"the criteria, fixed before the runs ({criteria_hash()})", ["#", "reproduced if"])
    columns = ["#", "compared", "scale", "by", "n", "median [95 % interval]", "p", "better in", "below"]
    compared = Table("the comparisons: A / B or A - B, pair by pair; p: sign-flip test that A is below B", columns)
    for claim, j in judged:
        number, weakest = str(claim.number), j.weakest
        numbers = "" if weakest is None else f"{interval(weakest.result)}, p = {weakest.result.p:.2g}"
        n = f"{j.n} {j.pairs}" if j.n else ""
        measured = ". ".join(filter(None, (j.measured, other_criteria(j))))
        verdicts.rows.append([number, j.verdict, claim.text, n, numbers, ", ".join(j.scales), measured])
        criteria.rows.append([number, claim.criterion.criterion])
        for one in j.comparisons:
            c = one.result
            row = [number, one.what, one.scale, one.measure, f"{c.n} {one.pairs.kind}", interval(c)]
            compared.rows.append([*row, f"{c.p:.2g}", f"{c.better:.0%}", "yes" if one.below else "no"])
    return [verdicts, criteria, *([compared] if compared.rows else [])]


def profiles(folder: Path) -> list[Table]:
    """How often each method is within a factor of the best final plain loss, for each scale with several problems."""
    methods = (*OTHERS, TUNED)
    tables = []
    for scale in JUDGED:
        runs = PairedRuns(folder, scale)
        finals = {name: values for name in SIX if (values := _final_means(runs, name, methods)) is not None}
        if len(finals) < 2:
            continue
        costs = {method: [values[method] for values in finals.values()] for method in methods}
        problems = " ".join(f"({name[-1]})" for name in finals)
        title = f"performance profile ({scale}), problems {problems}: share with a final plain loss within a factor of the best"
        table = Table(title, ["method", *(f"{factor:g}" for factor in FACTORS)])
        for method, shares in performance_profiles(costs, FACTORS).items():
            table.rows.append([METHODS[method].label, *(f"{share:.0%}" for share in shares)])
        tables.append(table)
    return tables


def _final_means(runs: PairedRuns, name: str, methods: tuple[str, ...]) -> dict[str, float] | None:
    """The mean final plain loss of each method over the same seeds; None where runs are missing."""
    try:
        pairs = runs.pairs(methods, name)
        return {method: float(runs.finals(name, method, pairs, "plain loss").mean()) for method in methods}
    except MissingRuns:
        return None


def interval(c: Comparison) -> str:
    return f"{c.median:.3g} [{c.low:.3g}, {c.high:.3g}]"


def other_criteria(judgement: Judgement) -> str:
    """A note on runs that were not made under the criteria they are judged by."""
    n = judgement.other_criteria
    return f"made under other criteria: {n} run{'s' * (n > 1)}" if n else ""


def wall_clock(timings: list[Timing]) -> list[Table]:
    """Table 2: the ratios beside the paper's, and where the time goes."""
    scale, compared = timings[0].scale, [name for name in TIMED if name != "sgd"]
    columns = ["problem", *(f"{METHODS[name].label} [paper]" for name in compared), "rounds", "bp a round"]
    ratios = Table(f"table-2 ({scale}): time per epoch relative to SGD, median (quartiles) of the ratio [the paper's]", columns)
    columns = ["problem", "a mini-batch", *(f"{METHODS[name].label}: all / optimizer" for name in TIMED)]
    profile = Table("where the time goes, milliseconds per back-propagation (medians)", columns)
    for timing in timings:
        problem = f"({timing.problem}) {TABLE_1[timing.problem]['title']}"
        cells = []
        for name in compared:
            middle, low, high = timing.ratio(name)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f}) [{PAPER[name][timing.problem]:.2f}]")
        ratios.rows.append([problem, *cells, str(len(timing.seconds["sgd"])), str(timing.back_propagations)])
        parts = [f"{timing.milliseconds(name):.2f} / {1e3 * float(np.median(timing.optimizer[name])):.2f}" for name in TIMED]
        profile.rows.append([problem, f"{1e3 * float(np.median(timing.batch)):.2f}", *parts])
    return [ratios, profile]


def _spread(values: list[float], form: str) -> str:
    if not values:
        return ""
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
