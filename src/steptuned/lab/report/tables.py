"""Tables, for the terminal and for Markdown."""

import textwrap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table as RichTable

from steptuned.lab.claims.criteria import criteria_hash
from steptuned.lab.claims.judging import OTHERS, TUNED, Claim
from steptuned.lab.claims.networks import SIX
from steptuned.lab.claims.verdicts import JUDGED, Judgement, Verdict
from steptuned.lab.measures import COMPARED, COUNTS, LOSS, Measure
from steptuned.lab.methods import METHODS
from steptuned.lab.paired_runs import FEWEST, MissingRuns, PairedAtScales, PairedRuns
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.rate import rate_of
from steptuned.lab.report.figures import first_instance, label_of
from steptuned.lab.report.instances import back_propagations_to_level, compare, ends, never
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome, first_below
from steptuned.lab.statistics import Comparison, compare_ratios, performance_profiles
from steptuned.lab.table2 import PAPER, TIMED, Timing
from steptuned.lab.terminal import open_table

FACTORS = (1.0, 1.1, 1.5, 2.0, 5.0)
"""The columns of a performance profile."""
QUARTERS = (0.25, 0.5, 0.75)
SYMBOLS: dict[Verdict, str] = {
    "reproduced": "✔",
    "not reproduced": "✘",
    "consistent": "(✔)",
    "inconsistent": "(✘)",
    "mixed": "±",
    "not run": "·",
}


@dataclass
class Table:
    """A table of plain text, which can be shown anywhere."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def for_terminal(self) -> RichTable:
        table = open_table(title=escape(self.title), title_justify="left")
        for column in self.columns:
            table.add_column(escape(column))
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        rows = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
        heading = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*heading, *(f"| {row} |" for row in rows)])


def summary(outcome: Outcome, results: Results) -> list[Table]:
    """What each method reached, and after how many back-propagations."""
    experiment = outcome.experiment
    is_rate = experiment.figure == "rate"
    tables = [_rates(outcome, results) if is_rate else _methods(outcome, results)]
    if experiment.instances > 1:
        tables.append(_instances(outcome, results))
    return tables


def _methods(outcome: Outcome, results: Results) -> Table:
    """One row per method, on the first instance."""
    groups = first_instance(outcome)
    finals = {group.entry.name: finals_of(group, results) for group in groups}
    everyone = [record for records in finals.values() for record in records]
    level = Level.of(outcome, everyone)
    others = [m for m in COMPARED if m is not LOSS and any(m.key in r for r in everyone)]
    columns = ["method and choice", "grid", "seeds", COUNTS["bp"]]
    columns += [f"final {LOSS.name}: mean (min to max)", level.title, *(m.name for m in others)]
    table = Table(_title(outcome), columns)
    for group in groups:
        records = finals[group.entry.name]
        row = [
            label_of(group),
            _grid(group, outcome.experiment.selection.rule, results),
            _seeds(len(records), outcome.experiment.seeds, len(diverged_seeds(group, results))),
        ]
        row += [str(records[0]["bp"]) if records else "", _spread(records, LOSS)]
        row += [level.reached(group, results), *(_spread(records, m) for m in others)]
        table.rows.append(row)
    return table


@dataclass(frozen=True)
class Level:
    """The loss that methods should reach: near J*, or 10 % above the smallest final loss."""

    title: str
    loss: dict[int, float]
    """For each seed; empty if it is the same for all seeds."""
    default: float = 0.0

    @classmethod
    def of(cls, outcome: Outcome, finals: list[dict[str, Any]]) -> "Level":
        if not outcome.star:
            loss = 1.1 * min((record["loss"] for record in finals), default=0.0)
            what = f"{COUNTS['bp']} to {LOSS.name} = {loss:.3g} (1.1 x the lowest final value)"
            return cls(what, {}, loss)
        within = outcome.experiment.selection.within
        stars = {seed: star for (instance, seed), star in outcome.star.items() if instance == 0}
        losses = {seed: star + within for seed, star in stars.items()}
        return cls(f"{COUNTS['bp']} to J* + {within:g}", losses)

    def reached(self, group: Group, results: Results) -> str:
        """The median number of back-propagations to the level, and how many seeds reach it."""
        levels = {seed: self.loss[seed] if self.loss else self.default for seed in group.specs}
        complete = {s: spec for s, spec in group.specs.items() if results.is_complete(spec)}
        logs = {seed: results.records(spec) for seed, spec in complete.items()}
        times = [first_below(log, levels[seed]) for seed, log in logs.items()]
        there = [time for time in times if time is not None]
        never = "never" if times else ""
        return f"{np.median(there):g} ({len(there)}/{len(times)})" if there else never


def ranking(outcome: Outcome, results: Results) -> str:
    """The order at the end of the methods with enough seeds, in words, if there is one instance.

    A method of which a seed diverged is not ranked: the mean of the others would flatter it.
    """
    if outcome.experiment.instances > 1 or outcome.experiment.figure == "rate":
        return ""
    steady = [group for group in outcome.groups if not diverged_seeds(group, results)]
    finals = {group.entry.label: finals_of(group, results) for group in steady}
    finals = {label: ends for label, ends in finals.items() if len(ends) >= FEWEST["seeds"]}
    orders = []
    for measure in COMPARED:
        means = {
            label: float(np.mean([record[measure.key] for record in records]))
            for label, records in finals.items()
            if measure.key in records[0]
        }
        highest = measure.better == "max"
        order = sorted(means, key=means.__getitem__, reverse=highest)
        if len(order) > 1:
            words = f"{'Highest' if highest else 'Lowest'} {measure.name}"
            orders.append(f"{words}: {'; '.join(order)}.")
    start = "From best to worst at the end, by the mean of the seeds."
    return f"{start} {' '.join(orders)}" if orders else ""


def finals_of(group: Group, results: Results) -> list[dict[str, Any]]:
    """The final values of the finished seeds."""
    finals = [results.final(spec) for spec in group.specs.values()]
    return [final for final in finals if final is not None]


def diverged_seeds(group: Group, results: Results) -> list[int]:
    """The seeds whose runs diverged."""
    specs = group.specs.items()
    return [s for s, spec in specs if results.is_complete(spec) and results.final(spec) is None]


def has_diverged(group: Group, results: Results) -> bool:
    """Whether the whole grid was tried and no point has a score, so that there is no winner."""
    tried = all(results.is_complete(trial.spec) for trial in group.trials)
    return bool(group.trials) and group.winner is None and tried


def _title(outcome: Outcome) -> str:
    experiment = outcome.experiment
    first = "; the first instance" if experiment.instances > 1 else ""
    return f"{experiment.name} ({experiment.scale}): {experiment.title}{first}"


def _seeds(finished: int, asked: int, diverged: int) -> str:
    missing = "" if finished + diverged == asked else ", incomplete"
    return f"{finished}/{asked}{missing}{f', {diverged} diverged' if diverged else ''}"


def _grid(group: Group, rule: str, results: Results) -> str:
    """How many points of the grid were tried, how many did not work, and where the winner is."""
    points = len(group.trials)
    done = [trial for trial in group.trials if results.is_complete(trial.spec)]
    without = sum(trial.score is None for trial in done)
    tried = f"{len(done)} tried" if len(done) == points else f"{len(done)} of {points} tried"
    notes = [tried] if points > 1 else []
    score = group.winner.score if group.winner else None
    by_time = score is not None and score.unit == "back-propagations"
    if without and notes:
        notes.append(f"{without} {'never near J*' if by_time else 'diverged'}")
    if notes and rule == "soonest" and score is not None and not by_time:
        notes.append(f"none near J*, best by {score}")
    notes += [f"winner at the edge of the grid: {', '.join(group.edges)}"] if group.edges else []
    return ", ".join(notes)


def _instances(outcome: Outcome, results: Results) -> Table:
    """Quartiles over the instances, and on how many each method beats the first one."""
    soonest = outcome.experiment.selection.rule == "soonest"
    numbers = (back_propagations_to_level if soonest else ends)(outcome, results)
    level = f"back-propagations to J* + {outcome.experiment.selection.within:g}"
    level += f" (never: {never(outcome):g}, as in claim 1, so the medians are larger than above)"
    what = level if soonest else f"{LOSS.name} at the end"
    base = "sgd" if "sgd" in numbers else next(iter(numbers))
    columns = ["method", "reached" if soonest else "finished", "median (quartiles)"]
    labels = {group.entry.name: group.entry.label for group in outcome.groups}
    columns += [f"smaller than {labels[base]} on", "95 % interval of that share", "median ratio"]
    table = Table(f"{what}, over {len(numbers[base])} instances", columns)
    for name, of_method in numbers.items():
        values = [v for v in of_method if v is not None]
        low, middle, high = np.quantile(values, QUARTERS) if values else [np.nan] * 3
        arrived = [v for v in values if not soonest or v < never(outcome)]
        row = [labels[name], f"{len(arrived)}/{len(of_method)}"]
        row.append(f"{middle:.4g} ({low:.4g} to {high:.4g})")
        if name != base:
            c = compare(numbers, name, base)
            row += [f"{c.wins}/{c.instances}", f"{c.low:.0%} to {c.high:.0%}"]
            row.append(f"{c.median_ratio:.3g}")
        table.rows.append(row + [""] * (len(columns) - len(row)))
    return table


def _rates(outcome: Outcome, results: Results) -> Table:
    columns = ["delta", "seeds", "k up to", "slope (95 % interval)", "theorem: at most", "verdict"]
    table = Table(_title(outcome), columns)
    for group in outcome.groups:
        fit = rate_of(group, results)
        if fit is not None:
            slope = f"{fit.slope:.3f} ({fit.low:.3f} to {fit.high:.3f})"
            row = [f"{fit.delta:g}", str(len(finals_of(group, results))), f"{fit.k[-1]:.0f}", slope]
            table.rows.append([*row, f"{fit.bound:.3f}", fit.verdict])
    return table


def claim_block(claim: Claim, j: Judgement, width: int) -> str:
    """A claim for the terminal: its verdict, its text and what was measured, wrapped."""
    scale = f"scale {', '.join(j.scales)}" if j.scales else ""
    verdict = ", ".join(filter(None, (j.verdict, j.problems, j.size, scale)))
    indent = " " * 8
    details = [
        textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
        for text in (claim.text, _measured(j))
    ]
    return "\n".join([f"{SYMBOLS[j.verdict]:>3} {claim.number:2}. {verdict}", *details])


def claims(judged: list[tuple[Claim, Judgement]]) -> list[Table]:
    """Every claim with its verdict, then the criteria, then the comparisons behind the verdicts."""
    criteria = Table(_criteria_title(judged), ["#", "reproduced if"])
    criteria.rows = [[str(claim.number), claim.criterion.criterion] for claim, _ in judged]
    compared = _comparisons(judged)
    return [_verdicts(judged), criteria, *([compared] if compared.rows else [])]


def _criteria_title(judged: list[tuple[Claim, Judgement]]) -> str:
    added = added_claims(judged)
    hashed = f"{criteria_hash()}, which does not cover {added}" if added else criteria_hash()
    return f"the criteria, fixed before the runs ({hashed})"


def added_claims(judged: list[tuple[Claim, Judgement]]) -> str:
    """The numbers of the claims whose criteria the hash does not cover; empty without any."""
    return ", ".join(str(claim.number) for claim, _ in judged if not claim.is_hashed)


def _verdicts(judged: list[tuple[Claim, Judgement]]) -> Table:
    columns = ["#", "verdict", "claim", "problems", "n", "comparison with the largest p"]
    table = Table("the claims, judged by these runs", [*columns, "scale", "measured"])
    for claim, j in judged:
        row = [str(claim.number), j.verdict, claim.text, j.problems, j.size, str(j.weakest or "")]
        table.rows.append([*row, ", ".join(j.scales), _measured(j)])
    return table


def _measured(judgement: Judgement) -> str:
    other = other_criteria(judgement.other_criteria)
    return ". ".join(filter(None, (judgement.measured, other)))


def _comparisons(judged: list[tuple[Claim, Judgement]]) -> Table:
    columns = ["#", "compared", "scale", "by", "n", "median [95 % interval]", "p"]
    title = "the comparisons: A / B or A - B, pair by pair; p: sign-flip test that A is below B; "
    title += "below: p <= 0.05, or with 3 or 4 pairs that A is below B in every pair"
    table = Table(title, [*columns, "better in (ties: half)", "below"])
    for claim, j in judged:
        for one in j.comparisons:
            c = one.result
            row = [str(claim.number), one.what, one.scale, one.measure, f"{c.n} {one.pairs.kind}"]
            test = [f"{c.p:.2g}", f"{c.better:.0%}", "yes" if one.below else "no"]
            table.rows.append([*row, interval(c), *(test if one.is_test else [""] * 3)])
    return table


def profiles(at: PairedAtScales) -> list[Table]:
    """How often each method's final plain loss is within a factor of the best, for each scale."""
    methods = (*OTHERS, TUNED)
    tables = []
    for scale in JUDGED:
        means = {name: _final_means(at[scale], name, methods) for name in SIX}
        finals = {name: values for name, values in means.items() if values is not None}
        if len(finals) < 2:
            continue
        costs = {method: [values[method] for values in finals.values()] for method in methods}
        problems = " ".join(f"({name[-1]})" for name in finals)
        what = "share with a final plain loss within a factor of the best"
        title = f"performance profile ({scale}), problems {problems}: {what}"
        table = Table(title, ["method", *(f"{factor:g}" for factor in FACTORS)])
        for method, shares in performance_profiles(costs, FACTORS).items():
            table.rows.append([METHODS[method].label, *(f"{share:.0%}" for share in shares)])
        tables.append(table)
    return tables


def _final_means(
    runs: PairedRuns,
    name: str,
    methods: tuple[str, ...],
) -> dict[str, float] | None:
    """The mean final plain loss of each method over the same seeds; None if runs are missing."""
    try:
        pairs = runs.pairs(methods, name)
        finals = {method: runs.finals(name, method, pairs, "plain loss") for method in methods}
    except MissingRuns:
        return None
    return {method: float(values.mean()) for method, values in finals.items()}


def against_sgd(outcome: Outcome, runs: PairedRuns, measure: Measure) -> list[Table]:
    """The final values of all entries relative to SGD's, paired by seed or instance.

    Empty if no other entry can be compared with SGD.
    """
    name, base = outcome.experiment.name, "sgd"
    mean = f"final {measure.label}, mean"
    columns = ["method", "pairs", mean, "relative to SGD [95 % interval]", "p", "below SGD in"]
    table = Table(f"{name} ({outcome.experiment.scale}), at equal back-propagations", columns)
    for entry, group in {group.entry.name: group for group in outcome.groups[::-1]}.items():
        try:
            pairs = runs.pairs((entry, base), name)
            values, sgd = (runs.finals(name, one, pairs, measure.key) for one in (entry, base))
        except MissingRuns:
            continue
        row = [label_of(group), str(pairs.n), f"{values.mean():.4g}"]
        if entry == base:
            table.rows.insert(0, [*row, "1", "", ""])
            continue
        c = compare_ratios(values, sgd)
        told = [interval(c), f"{c.p:.2g}", f"{c.wins} of {c.n}"]
        table.rows.insert(0, [*row, *told])
    return [table] if len(table.rows) > 1 else []


def base_of(method: str) -> str:
    """The method that a method with a tuned step is a variant of; empty if there is none."""
    named = [str(vars(cls)["name"]) for cls in METHODS[method].__mro__[1:] if "name" in vars(cls)]
    return named[0] if named and METHODS[method].logs_gamma else ""


def against_base(outcome: Outcome, runs: PairedRuns, measure: Measure) -> list[Table]:
    """The final values of each variant relative to the method it is a variant of.

    A method with a tuned step is compared with the same method without, a variant of Step-Tuned SGD
    with Step-Tuned SGD. Empty if there is nothing to compare.
    """
    name = outcome.experiment.name
    columns = ["A / B", "pairs", "median [95 % interval]", "p", "A below B in"]
    title = f"{name} ({outcome.experiment.scale}): variants against their base, by final"
    table = Table(f"{title} {measure.label}", columns)
    entries = {group.entry.name: group.entry for group in outcome.groups}
    for entry in entries.values():
        base = base_of(entry.method)
        if base not in entries or entry.name == base:
            continue
        try:
            pairs = runs.pairs((entry.name, base), name)
            values = [runs.finals(name, one, pairs, measure.key) for one in (entry.name, base)]
        except MissingRuns:
            continue
        c = compare_ratios(*values)
        row = [f"{entry.label} / {entries[base].label}", str(pairs.n), interval(c), f"{c.p:.2g}"]
        table.rows.append([*row, f"{c.wins} of {c.n}"])
    return [table] if table.rows else []


def interval(c: Comparison) -> str:
    return f"{c.median:.3g} [{c.low:.3g}, {c.high:.3g}]"


def other_criteria(n: int) -> str:
    """A note on this many runs that were made under other criteria; empty without any."""
    return f"made under other criteria: {n} run{'s' * (n > 1)}" if n else ""


def wall_clock(timings: list[Timing]) -> list[Table]:
    """Table 2: the ratios next to the paper's, and where the time goes."""
    return [_ratios(timings), _profile(timings)]


def _ratios(timings: list[Timing]) -> Table:
    compared = [name for name in TIMED if name != "sgd"]
    columns = ["problem", *(f"{METHODS[name].label} [paper]" for name in compared)]
    what = "time per epoch relative to SGD, median (quartiles) of the ratio [the paper's]"
    columns += ["rounds", "back-propagations per round"]
    table = Table(f"table-2 ({timings[0].scale}): {what}", columns)
    for timing in timings:
        row = [_problem(timing)]
        for name in compared:
            middle, low, high = timing.ratio(name)
            paper = PAPER[name][timing.problem]
            row.append(f"{middle:.3f} ({low:.3f} to {high:.3f}) [{paper:.2f}]")
        row += [str(len(timing.seconds["sgd"])), str(timing.back_propagations)]
        table.rows.append(row)
    return table


def _profile(timings: list[Timing]) -> Table:
    columns = ["problem", "mini-batch", *(f"{METHODS[n].label}: all / optimizer" for n in TIMED)]
    title = "where the time goes, milliseconds per back-propagation (medians)"
    table = Table(title, columns)
    for timing in timings:
        row = [_problem(timing), f"{_milliseconds(timing.batch):.2f}"]
        for name in TIMED:
            optimizer = _milliseconds(timing.optimizer[name])
            row.append(f"{timing.milliseconds(name):.2f} / {optimizer:.2f}")
        table.rows.append(row)
    return table


def _problem(timing: Timing) -> str:
    return f"({timing.problem}) {TABLE_1[timing.problem]['title']}"


def _milliseconds(seconds: list[float]) -> float:
    return 1e3 * float(np.median(seconds))


def _spread(records: list[dict[str, Any]], measure: Measure) -> str:
    """Mean, smallest and largest value."""
    values = [record[measure.key] for record in records if measure.key in record]
    if not values:
        return ""
    form = measure.format
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
