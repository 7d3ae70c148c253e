"""What a figure shows, in two or three sentences, computed from the runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptuned.lab.claims.judging import TUNED
from steptuned.lab.paired_runs import FEWEST, MissingRuns, PairedRuns
from steptuned.lab.rate import rate_of
from steptuned.lab.report.figures import first_instance
from steptuned.lab.report.gamma import bounds_of, is_fixed
from steptuned.lab.report.instances import Table as Numbers
from steptuned.lab.report.instances import back_propagations_to_level, compare, ends, never
from steptuned.lab.report.tables import diverged_seeds, finals_of, has_diverged
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome, first_below
from steptuned.lab.statistics import Comparison, compare_ratios

WORDS = {"plain loss": "plain training loss", "loss": "J"}
TENTH = 0.1
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

    The last record of a run that diverged may be without any measurement, and so without raw gamma.
    """
    told = [record for record in records if {"at lower", "raw gamma median"} <= record.keys()]
    if not told:
        return None
    bp = np.array([record["bp"] for record in told], dtype=float)
    # Records are not evenly spaced, so each counts for the iterations since the one before.
    weights = np.diff(bp, prepend=0.0)
    keys = ("at lower", "at upper", "negative curvature")
    shares = [float(np.average([record[key] for record in told], weights=weights)) for key in keys]
    raw = np.array([record["raw gamma median"] for record in told], dtype=float)
    early = raw[bp <= max(TENTH * bp[-1], bp[0])]
    late = raw[bp >= (1 - TENTH) * bp[-1]]
    return shares, [float(np.nanmedian(early)), float(np.nanmedian(late))]


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
        if not against or len(experiment.entries) > 2:
            said.append(_ends(outcome, results, measure))
    said += [_diverged(outcome, results), _unfinished(outcome, results)]
    return [sentence for sentence in said if sentence]


def _ends(outcome: Outcome, results: Results, measure: str) -> str:
    """Which method ends lowest and which highest, of those with enough seeds."""
    if outcome.experiment.instances > 1:
        middle, numbers = "median", ends(outcome, results)
        values = {name: [v for v in of if v is not None] for name, of in numbers.items()}
        means = {name: float(np.median(of)) for name, of in values.items() if of}
    else:
        middle = "mean"
        finals = {group.entry.name: finals_of(group, results) for group in outcome.groups}
        diverged = {g.entry.name for g in outcome.groups if diverged_seeds(g, results)}
        means = {
            name: float(np.mean([final[measure] for final in of]))
            for name, of in finals.items()
            if len(of) >= FEWEST["seeds"] and measure in of[0] and name not in diverged
        }
    if len(means) < 2:
        return ""
    labels = {group.entry.name: group.entry.label for group in outcome.groups}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return (
        f"{labels[low]} has the lowest {middle} {WORDS[measure]} at the end ({means[low]:.4g}), "
        f"and {labels[high]} the highest ({means[high]:.4g})."
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
    told += [f"Not run: {'; '.join(absent)}."] if absent else []
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
    return f"J comes within {outcome.experiment.selection.within:g} of J* {', '.join(told)}{over}."


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
        f"{labels[ALGORITHM_1]} gets there sooner {', '.join(told)}. Instances on which neither "
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
        "The theorem is an upper bound, so a steeper slope agrees with it. Within its 95 % "
        f"interval, the slope is at most the theorem's for {supported} of {len(fits)} values of "
        "delta.",
    ]


def measure_of(outcome: Outcome, results: Results) -> str:
    """The plain loss where it was logged, else J."""
    lasts = [results.final(spec) for group in outcome.groups for spec in group.specs.values()]
    return "plain loss" if any(last and "plain loss" in last for last in lasts) else "loss"


def against_sgd(outcome: Outcome, runs: PairedRuns, measure: str) -> str:
    """Step-Tuned SGD against SGD, pair by pair."""
    name = outcome.experiment.name
    try:
        pairs = runs.pairs((TUNED, "sgd"), name)
        tuned, sgd = (runs.finals(name, entry, pairs, measure) for entry in (TUNED, "sgd"))
    except MissingRuns:
        return ""
    c = compare_ratios(tuned, sgd)
    return (
        f"The final {WORDS[measure]} of Step-Tuned SGD is below SGD's in {c.wins} of {c.n} "
        f"{pairs.kind} ({ratio(c)})."
    )


def ratio(c: Comparison) -> str:
    """The paired ratio with its interval and p."""
    return f"median ratio {c.median:.3g} [{c.low:.3g}, {c.high:.3g}], p = {c.p:.2g}"


def gamma_of(group: Group, results: Results) -> str:
    """A sentence on where gamma was, and how the raw gamma changed."""
    tuning = tuning_of(group, results)
    if tuning is None:
        return ""
    m, M = tuning.bounds
    return (
        f"Gamma of {group.entry.label} was inside its bounds [{m:g}, {M:g}] in "
        f"{tuning.inside:.0%} of the iterations, at the lower bound in {tuning.at_lower:.0%} and "
        f"at the upper bound in {tuning.at_upper:.0%}; the median raw gamma was {tuning.early:.3g} "
        f"in the first tenth of the run and {tuning.late:.3g} in the last."
    )


def few_and_many(found: Sequence[tuple[str, str, Tuning]]) -> list[str]:
    """For each experiment that ran with all images and with a tenth of them: how gamma differs."""
    at = {(name, scale): tuning for name, scale, tuning in found}
    said = []
    for name in dict.fromkeys(name for name, _, _ in found):
        many, few = at.get((name, "short")), at.get((name, "small"))
        if many and few:
            said.append(
                f"{name}: with all images and a tenth of the epochs, gamma is inside its bounds in "
                f"{many.inside:.0%} of the iterations, and the raw gamma ends at {many.late:.3g}. "
                f"With a tenth of the images and all epochs, these are {few.inside:.0%} and "
                f"{few.late:.3g}."
            )
    return said
