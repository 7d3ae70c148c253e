"""What a figure shows, in two or three sentences, computed from the runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptuned.lab.claims.judging import TUNED
from steptuned.lab.paired_runs import MissingRuns, PairedRuns
from steptuned.lab.report.gamma import bounds_of, is_fixed
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome
from steptuned.lab.statistics import Comparison, compare_ratios

WORDS = {"plain loss": "plain training loss", "loss": "J"}
TENTH = 0.1


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
    found = [_tuning_of_run(records) for records in logs if records and "at lower" in records[-1]]
    if not found:
        return None
    shares = np.mean([shares for shares, _ in found], axis=0)
    early, late = np.median([ends for _, ends in found], axis=0)
    return Tuning(bounds, *map(float, (*shares, early, late)))


def _tuning_of_run(records: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Shares at the bounds and of negative curvature, and the raw gamma early and late."""
    told = [record for record in records if "at lower" in record]
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
    """Step-Tuned SGD against SGD, and what gamma did."""
    if outcome.experiment.figure == "rate":
        return []
    measure = measure_of(outcome, runs.results)
    said = [against_sgd(outcome, runs, measure)]
    if outcome.experiment.instances == 1:
        said += [gamma_of(group, runs.results) for group in outcome.groups]
    return [sentence for sentence in said if sentence]


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
    lower = round(c.better * c.n)
    wins = f"Step-Tuned SGD is below SGD in {lower} of {c.n} {pairs.kind}"
    return f"By final {WORDS[measure]}, {wins}: {ratio(c)}."


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
        f"{tuning.inside:.0%} of the iterations, at the lower one in {tuning.at_lower:.0%} and at "
        f"the upper one in {tuning.at_upper:.0%}; the median raw gamma was {tuning.early:.3g} in "
        f"the first tenth of the run and {tuning.late:.3g} in the last."
    )


def few_and_many(found: Sequence[tuple[str, str, Tuning]]) -> list[str]:
    """For each experiment that ran with all images and with a tenth of them: how gamma differs."""
    at = {(name, scale): tuning for name, scale, tuning in found}
    said = []
    for name in dict.fromkeys(name for name, _, _ in found):
        many, few = at.get((name, "short")), at.get((name, "small"))
        if many and few:
            said.append(
                f"{name}: with all images and a tenth of the epochs gamma is inside its bounds in "
                f"{many.inside:.0%} of the iterations, and the raw gamma ends at {many.late:.3g}; "
                f"with a tenth of the images and all epochs in {few.inside:.0%}, "
                f"and it ends at {few.late:.3g}."
            )
    return said
