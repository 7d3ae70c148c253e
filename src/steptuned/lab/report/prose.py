"""What a figure shows, in two or three sentences, computed from the runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.claims.judging import TUNED
from steptuned.lab.paired_runs import FEWEST, MissingRuns, PairedAtScales, PairedRuns, Pairs
from steptuned.lab.rate import rate_of
from steptuned.lab.report.figures import first_instance, size_of
from steptuned.lab.report.gamma import bounds_of, is_fixed
from steptuned.lab.report.instances import Table as Numbers
from steptuned.lab.report.instances import back_propagations_to_level, compare, ends, never
from steptuned.lab.report.tables import diverged_seeds, finals_of, has_diverged
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome, first_below
from steptuned.lab.statistics import Comparison, compare_ratios
from steptuned.lab.table2 import PAPER, Timing

WORDS = {"plain loss": "plain training loss", "loss": "J"}
Array = NDArray[np.float64]
TENTH = 0.1
NOTABLE = 0.9
"""A ratio of losses below this is worth a remark."""
ALGORITHM_1 = "step-tuned-gd"


@dataclass(frozen=True)
class Tuning:
    """What gamma did over whole runs: shares of iterations, and the raw gamma early and late."""

    bounds: tuple[float, float]
    at_lower: float
    at_upper: float
    negative: float
    early: float
    """The median raw gamma over the first tenth of a run, as the median over the seeds."""
    late: float
    """The same over the last tenth."""

    @property
    def inside(self) -> float:
        return 1 - self.at_lower - self.at_upper


def tuning_of(group: Group, results: Results) -> Tuning | None:
    """What gamma did. None if nothing was tuned or the logs do not contain it."""
    bounds = bounds_of(group)
    if bounds is None or is_fixed(bounds):
        return None
    logs = [results.records(spec) for spec in group.specs.values()]
    found = [told for records in logs if (told := _tuning_of_run(records)) is not None]
    if not found:
        return None
    shares = np.mean([shares for shares, _ in found], axis=0)
    early, late = np.median([ends for _, ends in found], axis=0)
    return Tuning(bounds, *map(float, (*shares, early, late)))


def _tuning_of_run(records: list[dict[str, Any]]) -> tuple[list[float], list[float]] | None:
    """Shares at the bounds and of negative curvature, and the raw gamma early and late.

    Records are not evenly spaced, so each counts for the iterations since the one before. The last
    record of a run that diverged may be without any measurement, and so without raw gamma.
    """
    told = [record for record in records if {"at lower", "raw gamma median"} <= record.keys()]
    if not told:
        return None
    bp = np.array([record["bp"] for record in told], dtype=float)
    weights = np.diff(bp, prepend=0.0)
    keys = ("at lower", "at upper", "negative curvature")
    shares = [float(np.average([record[key] for record in told], weights=weights)) for key in keys]
    raw = np.array([record["raw gamma median"] for record in told], dtype=float)
    early, late = bp <= max(TENTH * bp[-1], bp[0]), bp >= (1 - TENTH) * bp[-1]
    return shares, [weighted_median(raw[part], weights[part]) for part in (early, late)]


def weighted_median(values: Array, weights: Array) -> float:
    """The smallest value that, with all smaller ones, has half of the weight. NaN is left out."""
    known = ~np.isnan(values)
    values, weights = values[known], weights[known]
    if not len(values):
        return math.nan
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def sentences(outcome: Outcome, runs: PairedRuns) -> list[str]:
    """What the runs of an experiment show, in plain words."""
    results, experiment = runs.results, outcome.experiment
    if experiment.figure == "rate":
        said = _rates(outcome, results)
    elif experiment.selection.rule == "soonest":
        said = [_near_star(outcome, results), _sooner(outcome, results)]
        said += [_ends(outcome, results, "loss")] if experiment.instances == 1 else []
    else:
        measure = measure_of(outcome, results)
        against = against_sgd(outcome, runs, measure)
        tuned = [group for group in outcome.groups if group.entry.name == TUNED]
        said = [against]
        said += [gamma_of(group, results) for group in tuned if experiment.instances == 1]
        if not against or len({group.entry.name for group in outcome.groups}) > 2:
            said.append(_ends(outcome, results, measure))
        said.append(_after_the_last_batch(outcome, results, measure))
    said += [_diverged(outcome, results), _unfinished(outcome, results)]
    return [sentence for sentence in said if sentence]


def _ends(outcome: Outcome, results: Results, measure: str) -> str:
    """Which method ends lowest and which highest, of those with enough seeds.

    By the mean of the seeds, as in the tables. The thick lines of the figures are medians, so if
    those have another order, they are told too.
    """
    middles = ["median"] if outcome.experiment.instances > 1 else ["mean", "median"]
    values = _end_values(outcome, results, measure)
    if len(values) < 2:
        return ""
    labels = {group.entry.name: group.entry.label for group in outcome.groups}
    said: dict[tuple[str, str], str] = {}
    for middle in middles:
        at = {name: float(getattr(np, middle)(of)) for name, of in values.items()}
        low, high = min(at, key=at.__getitem__), max(at, key=at.__getitem__)
        told = f"{labels[low]} has the lowest {middle}"
        told += f" {WORDS[measure]} at the end ({at[low]:.4g})" if not said else f" ({at[low]:.4g})"
        said.setdefault((low, high), f"{told}, and {labels[high]} the highest ({at[high]:.4g}).")
    return " ".join(said.values())


def _end_values(outcome: Outcome, results: Results, measure: str) -> dict[str, list[float]]:
    """The final values of each method that can be ranked, over instances or seeds."""
    if outcome.experiment.instances > 1:
        found = {n: [v for v in of if v is not None] for n, of in ends(outcome, results).items()}
        return {name: of for name, of in found.items() if of}
    finals = {group.entry.name: finals_of(group, results) for group in outcome.groups}
    diverged = {g.entry.name for g in outcome.groups if diverged_seeds(g, results)}
    return {
        name: [final[measure] for final in of]
        for name, of in finals.items()
        if len(of) >= FEWEST["seeds"] and measure in of[0] and name not in diverged
    }


def _after_the_last_batch(outcome: Outcome, results: Results, measure: str) -> str:
    """Where records were taken, if the last mini-batch of a pass is less than half as large.

    The gradient of such a mini-batch is noisy, and so are the statistics that BatchNorm takes from
    it. A method that uses each mini-batch twice does not reach it at the same records as others.
    """
    options = outcome.experiment.problem_options
    last = (options.training_rows - 1) % options.batch + 1
    if measure != "plain loss" or last >= options.batch / 2:
        return ""
    always, told = [], []
    for group in outcome.groups:
        label, logs = group.entry.label, map(results.records, group.specs.values())
        late = [r for records in logs for r in records[len(records) // 2 :] if measure in r]
        after = [r[measure] for r in late if r["batches"] % options.per_epoch == 0]
        other = [r[measure] for r in late if r["batches"] % options.per_epoch]
        if after and other:
            high, low = float(np.median(after)), float(np.median(other))
            favored = f", which favors {label}" if low < NOTABLE * high else ""
            told.append(
                f"{len(after) / len(late):.0%} of those of {label}, whose median "
                f"{WORDS[measure]} is {high:.3g} there and {low:.3g} elsewhere{favored}"
            )
        elif after:
            always.append(label)
    if not (always and told):
        return ""
    return (
        f"In the second half of the run, all records of {listed(always)} were taken right after "
        f"the last mini-batch of a pass, which has only {last} images instead of {options.batch}; "
        f"so were {listed(told)}."
    )


def _diverged(outcome: Outcome, results: Results) -> str:
    """The methods of which a whole grid or some seeds diverged. They are not ranked."""
    told = []
    for group in first_instance(outcome):
        seeds = len(diverged_seeds(group, results))
        if has_diverged(group, results):
            told.append(f"{group.entry.label} (all {len(group.trials)} points of its grid)")
        elif seeds:
            told.append(f"{group.entry.label} ({seeds} of {len(group.specs)} seeds)")
    return f"Diverged, so not ranked: {'; '.join(told)}." if told else ""


def _unfinished(outcome: Outcome, results: Results) -> str:
    """The methods that lack seeds."""
    asked, lacking, absent = outcome.experiment.seeds, [], []
    for group in first_instance(outcome):
        done = sum(results.is_complete(spec) for spec in group.specs.values())
        if done < asked and not has_diverged(group, results):
            if done:
                lacking.append(f"{group.entry.label} ({done} of {asked} seeds)")
            else:
                absent.append(group.entry.label)
    told = [f"Incomplete: {'; '.join(lacking)}."] if lacking else []
    told += (
        [f"Without a complete seed after the grid search: {'; '.join(absent)}."] if absent else []
    )
    return " ".join(told)


def _near_star(outcome: Outcome, results: Results) -> str:
    """How often and how soon each method comes near J*, the most frequent one first."""
    kind, times, limit = "seeds", _seeds_to_level(outcome, results), math.inf
    if outcome.experiment.instances > 1:
        kind, times, limit = (
            "instances",
            back_propagations_to_level(outcome, results),
            never(outcome),
        )
    reached = {name: [t for t in of if t is not None and t < limit] for name, of in times.items()}
    labels = {group.entry.name: group.entry.label for group in outcome.groups}

    def order(name: str) -> tuple[float, float]:
        there = reached[name]
        return -len(there), float(np.median(there)) if there else math.inf

    told: list[str] = []
    for name in sorted((name for name in reached if times[name]), key=order):
        words = (kind, "median ", " back-propagations") if not told else ("", "", "")
        after = f" ({words[1]}{np.median(reached[name]):g}{words[2]})" if reached[name] else ""
        share = f"{len(reached[name])} of {len(times[name])} {words[0]}".rstrip()
        told.append(f"in {share} with {labels[name]}{after}")
    incomplete = any(len(reached[name]) < len(times[name]) for name in times)
    over = f"; the medians cover only the {kind} that reach it" if incomplete else ""
    within = f"J comes within {outcome.experiment.selection.within:g} of J*"
    return f"{within} {listed(told)}{over}."


def listed(items: Sequence[str]) -> str:
    """Items with commas, and "and" before the last one."""
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last


def _seeds_to_level(outcome: Outcome, results: Results) -> Numbers:
    """Back-propagations until the loss is near J*, for each complete seed; None if it never is."""
    within = outcome.experiment.selection.within
    times: Numbers = {}
    for group in outcome.groups:
        levels = {seed: outcome.star.get((group.instance, seed), -math.inf) for seed in group.specs}
        times[group.entry.name] = [
            first_below(results.records(spec), levels[seed] + within)
            for seed, spec in group.specs.items()
            if results.is_complete(spec)
        ]
    return times


def _sooner(outcome: Outcome, results: Results) -> str:
    """On how many instances Algorithm 1 is sooner than each of the others."""
    names = [entry.name for entry in outcome.experiment.entries]
    if outcome.experiment.instances == 1 or ALGORITHM_1 not in names:
        return ""
    numbers = back_propagations_to_level(outcome, results)
    labels = {group.entry.name: group.entry.label for group in outcome.groups}
    others = [other for other in names if other != ALGORITHM_1]
    counts = [(other, compare(numbers, ALGORITHM_1, other)) for other in others]
    told = [f"than {labels[other]} on {c.wins} of {c.instances}" for other, c in counts]
    told[0] += " instances"
    return (
        f"{labels[ALGORITHM_1]} gets there sooner {listed(told)}. Instances on which neither "
        "gets there do not count as sooner."
    )


def _rates(outcome: Outcome, results: Results) -> list[str]:
    """How fast the smallest gradient falls, and whether the theorem's rate holds."""
    found = [rate_of(group, results) for group in outcome.groups]
    fits = [fit for fit in found if fit is not None]
    if not fits:
        return []
    slopes = "; ".join(
        f"k^{fit.slope:.2f} for delta {fit.delta:g} (the theorem: k^{fit.bound:.2f})"
        for fit in fits
    )
    supported = sum(fit.verdict == "supported" for fit in fits)
    return [
        f"Over the last decade of k, the smallest mean square of the gradient falls as {slopes}.",
        "The theorem is an upper bound, so a steeper slope agrees with it. The lower end of the "
        f"slope's 95 % interval is at most the theorem's exponent for {supported} of {len(fits)} "
        "values of delta; where the upper end is above that exponent, the runs neither confirm nor "
        "contradict the theorem.",
    ]


def time_per_epoch(timings: Sequence[Timing]) -> str:
    """How long an epoch of Step-Tuned SGD takes relative to one of SGD, here and in the paper."""
    here = [timing.ratio(TUNED)[0] for timing in timings]
    paper = [PAPER[TUNED][timing.problem] for timing in timings]
    return (
        f"An epoch of Step-Tuned SGD takes {min(here):.2f} to {max(here):.2f} times as long as one "
        f"of SGD; in the paper, {min(paper):.2f} to {max(paper):.2f} times."
    )


def measure_of(outcome: Outcome, results: Results) -> str:
    """The plain loss where it was logged, else J."""
    lasts = [results.final(spec) for group in outcome.groups for spec in group.specs.values()]
    return "plain loss" if any(last and "plain loss" in last for last in lasts) else "loss"


def against_sgd(outcome: Outcome, runs: PairedRuns, measure: str) -> str:
    """Step-Tuned SGD against SGD, pair by pair."""
    try:
        c, pairs = _relative_to_sgd(outcome, runs, measure)
    except MissingRuns:
        return ""
    where = "on" if pairs.kind == "instances" else "in"
    which = {c.n: f"all {c.n}", 0: f"none of the {c.n}"}.get(c.wins, f"{c.wins} of {c.n}")
    return (
        f"The final {WORDS[measure]} of Step-Tuned SGD is below SGD's {where} {which} "
        f"{pairs.kind} ({ratio(c)})."
    )


def _relative_to_sgd(outcome: Outcome, runs: PairedRuns, measure: str) -> tuple[Comparison, Pairs]:
    """The final values of Step-Tuned SGD relative to SGD's, pair by pair."""
    name = outcome.experiment.name
    pairs = runs.pairs((TUNED, "sgd"), name)
    tuned, sgd = (runs.finals(name, entry, pairs, measure) for entry in (TUNED, "sgd"))
    return compare_ratios(tuned, sgd), pairs


def ratio(c: Comparison) -> str:
    """The paired ratio with its interval and p."""
    return f"median ratio {c.median:.3g} [{c.low:.3g}, {c.high:.3g}], p = {c.p:.2g}"


def gamma_of(group: Group, results: Results) -> str:
    """A sentence on where gamma was, and how the raw gamma changed."""
    tuning = tuning_of(group, results)
    return f"Gamma of {group.entry.label} {_where(tuning)}." if tuning else ""


def _where(tuning: Tuning) -> str:
    m, M = tuning.bounds
    return (
        f"was inside its bounds [{m:g}, {M:g}] in {tuning.inside:.0%} of the iterations, at the "
        f"lower bound in {tuning.at_lower:.0%} and at the upper bound in {tuning.at_upper:.0%}; "
        f"the median raw gamma was {tuning.early:.3g} in the first tenth of the run and "
        f"{tuning.late:.3g} in the last"
    )


def few_and_many(found: Iterable[tuple[Outcome, Tuning]], at: PairedAtScales) -> list[str]:
    """For each problem that ran with all images and with a tenth of them: what is different."""
    known = {(o.experiment.name, o.experiment.scale): (o, tuning) for o, tuning in found}
    said = []
    for name in dict.fromkeys(name for name, _ in known):
        both = [known[name, scale] for scale in ("short", "small") if (name, scale) in known]
        if len(both) == 2:
            told = [f"With {size_of(o.experiment)}, gamma {_where(tuning)}." for o, tuning in both]
            said.append(f"**{name}.** {' '.join([*told, _which_is_lower(both, at)])}".strip())
    return said


def _which_is_lower(both: Sequence[tuple[Outcome, Tuning]], at: PairedAtScales) -> str:
    """The final losses of Step-Tuned SGD and SGD at two scales, and which of them is lower."""
    runs = [(outcome, at[outcome.experiment.scale]) for outcome, _ in both]
    measures = {measure_of(outcome, of_scale.results) for outcome, of_scale in runs}
    if len(measures) > 1:
        return ""
    (measure,) = measures
    try:
        found = [_relative_to_sgd(outcome, of_scale, measure)[0] for outcome, of_scale in runs]
    except MissingRuns:
        return ""
    many, few = found
    first, second = ("lower" if c.median < 1 else "higher" for c in found)
    side = f"{first} with both" if first == second else f"{first} with many and {second} with few"
    return (
        f"The final {WORDS[measure]} of Step-Tuned SGD relative to SGD's: {ratio(many)} with many "
        f"images, and {ratio(few)} with few. By the median it is {side}."
    )
