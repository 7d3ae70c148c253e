"""The paper's claims, judged from a store of runs and from nothing else.

A claim has one :class:`Criterion`, fixed before the runs, and one function that applies it at one
scale. :func:`combine` combines the findings of all scales and of both measures of the training
loss. To add a claim, add a criterion and a function.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.curves import Drop, drop_of
from steptuned.lab.paired_runs import MissingRuns, PairedRuns, Pairs
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.rate import rate_of
from steptuned.lab.spec import RunSpec, canonical
from steptuned.lab.statistics import Comparison, compare_differences, compare_ratios
from steptuned.lab.table2 import PAPER, Timings

Verdict = Literal["reproduced", "not reproduced", "consistent", "inconsistent", "mixed", "not run"]
Array = NDArray[np.float64]

TUNED = "step-tuned-sgd"
OTHERS = ("sgd", "rmsprop", "adam")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Criterion:
    """A claim of the paper and the condition under which it counts as reproduced."""

    number: int
    text: str
    criterion: str
    thresholds: dict[str, float]


# ------------------------------------------------------------------------------------- the criteria
#
# Fixed before the runs that they judge. `criteria_hash` is stored in the environment of every run,
# so that a page can say which runs were made under other criteria. The thresholds of claim 16 are
# explained in experiments/rate.toml.

RULES: tuple[str, ...] = (
    "The final value of a run is the mean over the last 5 % of its records.",
    "Comparisons are paired: by seed, or by problem instance where an experiment has several. The "
    "seed (and, if hyper-parameters are chosen on the first instance only, the instance) on which "
    "hyper-parameters are chosen is not among the pairs.",
    "'A is below B' means: the exact one-sided sign-flip test on the logarithms of the paired "
    "ratios A / B gives p <= 0.05. A run that diverged is worse than every run that did not.",
    "Claims about the training loss are judged by the plain loss and by J. If the two verdicts "
    "differ, the claim is mixed.",
    "A claim is judged at each of the scales short, small and paper that has the runs. If two "
    "scales differ, it is mixed. Scale demo is never judged.",
    "A claim about several problems is judged on those that have the runs, and names them.",
    "reproduced, not reproduced: at least 5 seeds or 20 instances. consistent, inconsistent: 3 or "
    "4 seeds, where 'A is below B' means that it is below in every seed. Fewer seeds are not "
    "judged.",
)

CRITERIA: tuple[Criterion, ...] = (
    Criterion(
        1,
        "Algorithm 1 comes within 0.1 of J* sooner than Barzilai-Borwein with absolute values and "
        "Armijo (Figure 2).",
        "On the instances of figure-2-instances, its number of iterations to J < J* + 0.1 is "
        "below that of each of the two. A run that does not get there counts as twice the budget.",
        {"never, in budgets": 2.0},
    ),
    Criterion(
        2,
        "Exact-GV is much faster than SGD in about the first 150 epochs (Figure 3).",
        "On the instances of figure-3-instances, SGD takes at least 1.25 times as long to the J "
        "that Exact-GV has at epoch 75: 1.25 is below the paired ratio of times. Curves are "
        "smoothed by a running median over 5 records; a run of SGD that does not get there counts "
        "as the whole budget.",
        {"epoch": 75, "ratio": 1.25, "median over records": 5},
    ),
    Criterion(
        3,
        "Stochastic-GV loses most of that advantage (Figure 3).",
        "On the instances of figure-3-instances, in smoothed J at epoch 75: Exact-GV is below "
        "SGD, and the advantage of Stochastic-GV over SGD is less than half of Exact-GV's "
        "(sign-flip test on half of Exact-GV's advantage minus Stochastic-GV's, p <= 0.05).",
        {"epoch": 75, "share": 0.5, "median over records": 5},
    ),
    Criterion(
        4,
        "Expected-GV is at least as good as Exact-GV (Figure 3).",
        "On the instances of figure-3-instances, its mean of log10 J over the first 150 epochs is "
        "not higher by 0.005 or more (sign-flip test on Exact-GV's mean + 0.005 minus "
        "Expected-GV's, p <= 0.05).",
        {"epochs": 150, "margin": 0.005},
    ),
    Criterion(
        5,
        "Step-Tuned SGD is very close to Expected-GV (Figure 3).",
        "On the instances of figure-3-instances, its mean distance from Expected-GV in log10 J "
        "over the first 150 epochs is less than a quarter of SGD's (sign-flip test on a quarter "
        "of SGD's distance minus Step-Tuned SGD's, p <= 0.05).",
        {"epochs": 150, "share": 0.25},
    ),
    Criterion(
        6,
        "SGD ends lower than the fast methods, and Step-Tuned SGD reaches that level with more "
        "epochs (Figure 3).",
        "On the instances of figure-3-instances, the final J of SGD is below that of Exact-GV, "
        "Expected-GV and Step-Tuned SGD; and in every seed of figure-3-longer, the smoothed J of "
        "Step-Tuned SGD comes below the mean of SGD's records from epoch 237.5 to epoch 250 "
        "within 2,500 epochs.",
        {"from epoch": 237.5, "to epoch": 250, "median over records": 5},
    ),
    Criterion(
        7,
        "Step-Tuned SGD has the lowest training loss of all on (a) and (b) (Figure 4).",
        "On each, its final training loss is below that of SGD, of RMSprop and of Adam.",
        {},
    ),
    Criterion(
        8,
        "Step-Tuned SGD beats SGD in training loss on five of the six problems.",
        "Its final training loss is below SGD's on all but at most one of the problems; at least "
        "four of the six are needed for a verdict.",
        {"exceptions": 1, "problems": 4},
    ),
    Criterion(
        9,
        "Adam and RMSprop beat SGD and Step-Tuned SGD on (d) (Figure 4).",
        "The final training loss of each of the first two is below that of each of the last two.",
        {},
    ),
    Criterion(
        10,
        "On residual networks the loss drops suddenly in mid-training, by gamma and not by the "
        "schedule (Figure 4).",
        "The curve is log10 of the training loss, as a running median over 5 records and then its "
        "running minimum, so that the recovery from a spike is no drop. A drop is sudden if, "
        "between the first and the last tenth of the run, the curve falls within a fiftieth of "
        "the run by at least 0.1 and by at least four times the median fall in such a window; "
        "gamma causes it if the median gamma over the twentieth of the run before it and after it "
        "differ by a quarter or more. On (a) and on (b): all but at most one run of Step-Tuned "
        "SGD have a sudden drop caused by gamma, and at most one run of SGD, which has the same "
        "schedule, has a sudden drop.",
        {
            "median over records": 5,
            "window": 0.02,
            "first": 0.1,
            "last": 0.9,
            "fall": 0.1,
            "times the median": 4.0,
            "side": 0.05,
            "change of gamma": 0.25,
            "exceptions": 1,
        },
    ),
    Criterion(
        11,
        "Test accuracy rises with that drop (Figure 4).",
        "The mean accuracy over the twentieth of the run after the drop is at least 2 points "
        "above that before it, in all but at most one of the runs that have a sudden drop. "
        "Without any sudden drop the claim is not reproduced.",
        {"side": 0.05, "rise": 0.02, "exceptions": 1},
    ),
    Criterion(
        12,
        "Using each mini-batch twice makes SGD, Adam and RMSprop worse, but on (c) it helps Adam "
        "and RMSprop (Figure 5).",
        "A case is a method on a problem. In all but at most one case the final training loss "
        "with one use is below that with two; on (c), for Adam and RMSprop, that with two is "
        "below that with one. At least two of the four problems are needed for a verdict.",
        {"exceptions": 1, "problems": 2},
    ),
    Criterion(
        13,
        "BatchNorm helps Step-Tuned SGD: (f) against (e) (Figure 6).",
        "The ratio of its final training loss to SGD's on (f), with BatchNorm, is below that on "
        "(e), without.",
        {},
    ),
    Criterion(
        14,
        "Smooth activations and ReLU make no qualitative difference.",
        "On problem (a), the median paired ratio of Step-Tuned SGD's final training loss to SGD's "
        "is on the same side of 1 with ReLU, ELU and SiLU.",
        {},
    ),
    Criterion(
        15,
        "Wall-clock per epoch relative to SGD is that of Table 2.",
        "The median ratio of Step-Tuned SGD, over at least 15 interleaved rounds, is within 0.1 "
        "of the paper's on all six problems.",
        {"distance": 0.1, "rounds": 15},
    ),
    Criterion(
        16,
        "The smallest mean square of the gradient falls as k^-(1/2 - delta), or faster.",
        "For every delta, the slope of log min_j E|grad J(theta_j)|^2 against log k, fitted over "
        "the last decade of k, is at most -(1/2 - delta) within its 95 % bootstrap interval over "
        "at least 20 seeds: the lower end of the interval is at most that. Not judged if the "
        "smallest value at the end is more than half of the value at the start.",
        {"decades": 1, "fallen to": 0.5, "seeds": 20},
    ),
    Criterion(
        17,
        "Ours, not the paper's: the tuning, and not a constant, is what helps.",
        "On (f) and (a), the final plain loss of Step-Tuned SGD is below that of the best control "
        "of controls-f and controls-a: the one with the lowest mean final plain loss over the "
        "same seeds.",
        {},
    ),
)


def criteria_hash() -> str:
    """A fingerprint of the rules, texts and thresholds by which claims are judged."""
    content = canonical([RULES, [asdict(criterion) for criterion in CRITERIA]])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def criterion(number: int) -> Criterion:
    return next(criterion for criterion in CRITERIA if criterion.number == number)


# -------------------------------------------------------------------------- what a judgement is

ALPHA = 0.05
"""'A is below B' if p is at most this."""
JUDGED = ("small", "short", "paper")
"""The scales that are judged."""
J_ONLY = ("loss",)
TRAINING_LOSS = ("plain loss", "loss")
LABELS = {"loss": "J", "gradient": "|grad J|^2"}
"""Names of the measures whose key is not their name."""


@dataclass(frozen=True)
class Compared:
    """One comparison that a verdict is based on."""

    what: str
    """A / B for a ratio, A - B for a difference."""
    result: Comparison
    pairs: Pairs
    is_test: bool = True
    """Whether the criterion asks that A is below B."""
    scale: str = ""
    measure: str = ""

    @property
    def below(self) -> bool:
        """Whether A is below B: by the test, or in every pair if there are too few for a test."""
        return self.result.p <= ALPHA if self.pairs.is_enough else self.result.better == 1

    def __str__(self) -> str:
        c = self.result
        return f"{self.what} {c.median:.3g} [{c.low:.3g}, {c.high:.3g}], p = {c.p:.2g}"


@dataclass(frozen=True)
class Finding:
    """What the runs of one scale, by one measure, say about a claim."""

    holds: bool
    measured: str
    comparisons: tuple[Compared, ...]
    pairs: Pairs
    """The smallest set of pairs that it is based on."""
    scale: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, and what it is based on."""

    verdict: Verdict
    measured: str
    """The numbers, in words; or what is missing."""
    scales: tuple[str, ...] = ()
    """The scales that were judged."""
    n: int = 0
    """Number of pairs, at the scale that has the most."""
    pairs: str = ""
    """What the pairs are: seeds, instances or rounds."""
    comparisons: tuple[Compared, ...] = ()
    other_criteria: int = 0
    """Number of runs it is based on that were made under other criteria."""

    @property
    def size(self) -> str:
        """The number of pairs and what they are, such as "5 seeds"; empty without any."""
        return f"{self.n} {self.pairs}" if self.n else ""

    @property
    def weakest(self) -> Compared | None:
        """Of the comparisons that the criterion asks for, the one with the largest p."""
        tests = [compared for compared in self.comparisons if compared.is_test]
        return max(tests, key=lambda compared: compared.result.p, default=None)


Judge = Callable[[PairedRuns, Mapping[str, float], str], Finding]
"""Takes the runs of a scale, the thresholds of the criterion and a measure of the training loss."""


@dataclass(frozen=True)
class Claim:
    criterion: Criterion
    judge: Judge
    measures: tuple[str, ...]
    """The measures that it is judged by. If they disagree, the verdict is mixed."""

    @property
    def number(self) -> int:
        return self.criterion.number

    @property
    def text(self) -> str:
        return self.criterion.text


CLAIMS: list[Claim] = []


def judges(number: int, measures: tuple[str, ...] = J_ONLY) -> Callable[[Judge], Judge]:
    """Register a function as the judge of a claim."""

    def register(judge: Judge) -> Judge:
        CLAIMS.append(Claim(criterion(number), judge, measures))
        return judge

    return register


def judge(folder: Path, claims: Iterable[Claim] = CLAIMS) -> list[tuple[Claim, Judgement]]:
    """Every claim with its judgement."""
    scales = [PairedRuns(folder, scale) for scale in JUDGED]
    return [(claim, _judge(claim, scales)) for claim in claims]


def _judge(claim: Claim, scales: list[PairedRuns]) -> Judgement:
    findings: list[Finding] = []
    missing, other = [], 0
    limits = claim.criterion.thresholds
    for runs in scales:
        runs.used.clear()
        try:
            found = [claim.judge(runs, limits, measure) for measure in claim.measures]
        except MissingRuns as reason:
            missing.append(f"{runs.scale}: {reason}")
            continue
        for finding, measure in zip(found, claim.measures, strict=True):
            findings.append(
                replace(finding, scale=runs.scale, measure=LABELS.get(measure, measure))
            )
        other += sum(map(_is_of_other_criteria, runs.used.values()))
    if not findings:
        return Judgement("not run", f"runs missing ({'; '.join(missing)})")
    return replace(combine(findings), other_criteria=other)


def _is_of_other_criteria(environment: Any) -> bool:
    """Whether a run was started or resumed under other criteria than the current ones."""
    if not isinstance(environment, dict):
        return True
    made_in = [environment, *environment.get("resumed in", [])]
    return any(one.get("criteria") != criteria_hash() for one in made_in)


def combine(findings: Sequence[Finding]) -> Judgement:
    """One verdict from all scales and measures.

    It is mixed if any two findings disagree. Otherwise the scale with the most pairs decides how
    certain it is.
    """
    most = max(findings, key=lambda finding: (finding.pairs.is_enough, finding.pairs.n)).pairs
    holds = {finding.holds for finding in findings}
    verdict: Verdict
    if len(holds) > 1:
        verdict = "mixed"
    elif most.is_enough:
        verdict = "reproduced" if holds == {True} else "not reproduced"
    else:
        verdict = "consistent" if holds == {True} else "inconsistent"
    scales = tuple(dict.fromkeys(finding.scale for finding in findings))
    mixed = len(holds) > 1
    told = [_summary([f for f in findings if f.scale == scale], mixed) for scale in scales]
    comparisons: list[Compared] = []
    for one in findings:
        comparisons += [replace(c, scale=one.scale, measure=one.measure) for c in one.comparisons]
    return Judgement(verdict, "; ".join(told), scales, most.n, most.kind, tuple(comparisons))


def _summary(findings: list[Finding], is_mixed: bool) -> str:
    """What was measured at one scale. If the verdict is mixed, also which findings hold."""

    def words(finding: Finding) -> str:
        direction = "holds" if finding.holds else "does not hold"
        return f"{direction}, {finding.measured}" if is_mixed else finding.measured

    pairs = findings[0].pairs
    where = f"{findings[0].scale} ({pairs.n} {pairs.kind})"
    if len({words(finding) for finding in findings}) == 1:
        return f"{where}: {words(findings[0])}"
    return f"{where}: " + "; ".join(f"{finding.measure}: {words(finding)}" for finding in findings)


def as_data(judged: list[tuple[Claim, Judgement]]) -> list[dict[str, Any]]:
    """The judgements as data for JSON, which has no infinite numbers."""
    return [
        {
            "number": claim.number,
            "claim": claim.text,
            "criterion": claim.criterion.criterion,
            "thresholds": claim.criterion.thresholds,
            "verdict": judgement.verdict,
            "measured": judgement.measured,
            "scales": list(judgement.scales),
            "n": judgement.n,
            "pairs": judgement.pairs,
            "comparisons": [_plain(compared) for compared in judgement.comparisons],
            "criteria": criteria_hash(),
            "other_criteria": judgement.other_criteria,
        }
        for claim, judgement in judged
    ]


def _plain(compared: Compared) -> dict[str, Any]:
    numbers = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(compared.result).items()
    }
    where = {"scale": compared.scale, "measure": compared.measure, "pairs": compared.pairs.kind}
    return {"what": compared.what, **where, **numbers, "below": compared.below}


# -------------------------------------------------------------------------- parts of judges


def _finding(
    holds: bool,
    measured: str,
    comparisons: Sequence[Compared] = (),
    pairs: Sequence[Pairs] = (),
) -> Finding:
    """A finding. Its pairs are the smallest set among those it is based on."""
    all_pairs = [*(compared.pairs for compared in comparisons), *pairs]
    fewest = min(all_pairs, key=lambda pairs: (pairs.is_enough, pairs.n))
    return Finding(holds, measured, tuple(comparisons), fewest)


def _all_hold(comparisons: Sequence[Compared], where: str = "") -> Finding:
    """A finding that holds if all comparisons do. It lists those that do not."""
    failing = [compared for compared in comparisons if not compared.below]
    if failing:
        told = f"{len(failing)} of {len(comparisons)} fail: {'; '.join(map(str, failing))}"
    else:
        told = (
            f"all {len(comparisons)} hold, largest p = {max(c.result.p for c in comparisons):.2g}"
        )
    return _finding(not failing, f"{where}: {told}" if where else told, comparisons)


def _final_below(e: PairedRuns, name: str, a: str, b: str, pairs: Pairs, measure: str) -> Compared:
    """Compare the final values of two entries."""
    values = [e.finals(name, entry, pairs, measure) for entry in (a, b)]
    what = f"{_problem(name)}{e.label(name, a)} / {e.label(name, b)}"
    return Compared(what, compare_ratios(*values), pairs)


def _problem(name: str) -> str:
    """The letter of the problem in Table 1, or nothing if it is not in it."""
    is_network = name.startswith(("figure-4", "figure-5", "figure-6", "controls"))
    return f"({name[-1]}) " if is_network else ""


def _letters(names: Iterable[str]) -> str:
    return " ".join(_problem(name).strip() for name in names)


def _where_run(names: Iterable[str], look: Callable[[str], Found]) -> dict[str, Found]:
    """The result of ``look`` for every experiment that has the runs."""
    found, missing = {}, []
    for name in names:
        try:
            found[name] = look(name)
        except MissingRuns as reason:  # noqa: PERF203
            missing.append(str(reason))
    if not found:
        raise MissingRuns("; ".join(missing))
    return found


def _flat(found: Mapping[str, list[Compared]]) -> list[Compared]:
    return [compared for comparisons in found.values() for compared in comparisons]


# -------------------------------------------------------------------------- regression

INSTANCES_2, INSTANCES_3 = "figure-2-instances", "figure-3-instances"


@judges(1)
def soonest(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    mine, others = "step-tuned-gd", ("barzilai-borwein", "armijo")
    pairs = e.pairs((mine, *others), INSTANCES_2)
    outcome = e.outcome(INSTANCES_2)

    def time(spec: RunSpec) -> float:
        if e.diverged(spec):
            return math.inf
        star = outcome.star[spec.options["instance"], spec.seed]
        reached = e.curve(spec, measure).first_below(star + outcome.experiment.selection.within)
        return min(reached, limits["never, in budgets"] * spec.budget)

    times = {entry: e.values(INSTANCES_2, (entry,), pairs, time) for entry in (mine, *others)}
    labels = {entry: e.label(INSTANCES_2, entry) for entry in times}
    compared = []
    for other in others:
        result = compare_ratios(times[mine], times[other])
        compared.append(Compared(f"{labels[mine]} / {labels[other]}", result, pairs))
    return _all_hold(compared, "iterations to J* + 0.1")


@judges(2)
def faster_at_first(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    pairs = e.pairs(("sgd", "exact-gv"), INSTANCES_3)
    early = limits["epoch"] * e.per_epoch(INSTANCES_3)
    width = int(limits["median over records"])

    def ratio(sgd: RunSpec, exact: RunSpec) -> float:
        if e.diverged(sgd) and not e.diverged(exact):
            return math.inf
        level = e.curve(exact, measure).smoothed(width).at(early)
        reached = e.curve(sgd, measure).smoothed(width).first_below(level)
        return min(reached, sgd.budget) / early

    ratios = e.values(INSTANCES_3, ("sgd", "exact-gv"), pairs, ratio)
    against = np.full_like(ratios, limits["ratio"])
    what = f"{limits['ratio']} / (time of SGD / time of Exact-GV)"
    compared = Compared(what, compare_ratios(against, ratios), pairs)
    told = f"SGD takes a median of {np.median(ratios):.3g} times as long; {compared}"
    return _finding(compared.below, told, [compared])


@judges(3)
def loses_most(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = ("sgd", "exact-gv", "stochastic-gv")
    pairs = e.pairs(entries, INSTANCES_3)
    early = limits["epoch"] * e.per_epoch(INSTANCES_3)
    width = int(limits["median over records"])

    def at(entry: str) -> Array:
        def value(spec: RunSpec) -> float:
            return e.curve(spec, measure).smoothed(width).at(early)

        return e.values(INSTANCES_3, (entry,), pairs, value)

    sgd, exact, stochastic = map(at, entries)
    with np.errstate(invalid="ignore"):
        gain, left = sgd - exact, sgd - stochastic
    compared = [
        Compared("Exact-GV / SGD", compare_ratios(exact, sgd), pairs),
        Compared(
            f"advantage of Stochastic-GV - {limits['share']:g} x advantage of Exact-GV",
            compare_differences(left, limits["share"] * gain),
            pairs,
        ),
    ]
    return _all_hold(compared, f"J at epoch {limits['epoch']:g}")


def _start(e: PairedRuns, spec: RunSpec, epochs: float, measure: str) -> Array:
    """log10 of J over the first epochs."""
    values = e.curve(spec, measure).between(0, epochs * e.per_epoch(INSTANCES_3))
    return np.log10(np.maximum(values, 1e-300))


@judges(4)
def as_good(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = ("expected-gv", "exact-gv")
    pairs = e.pairs(entries, INSTANCES_3)

    def mean(spec: RunSpec) -> float:
        return float(_start(e, spec, limits["epochs"], measure).mean())

    expected, exact = (e.values(INSTANCES_3, (entry,), pairs, mean) for entry in entries)
    margin = limits["margin"]
    result = compare_differences(expected, exact + margin)
    compared = Compared(f"Expected-GV - (Exact-GV + {margin:g})", result, pairs)
    return _all_hold([compared], f"mean of log10 J over {limits['epochs']:g} epochs")


@judges(5)
def very_close(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = (TUNED, "sgd", "expected-gv")
    pairs = e.pairs(entries, INSTANCES_3)

    def distance(spec: RunSpec, expected: RunSpec) -> float:
        if e.diverged(spec) or e.diverged(expected):
            return math.inf
        logs = [_start(e, one, limits["epochs"], measure) for one in (spec, expected)]
        return float(np.abs(logs[0] - logs[1]).mean())

    base, share = entries[-1], limits["share"]
    tuned, sgd = (e.values(INSTANCES_3, (x, base), pairs, distance) for x in entries[:2])
    result = compare_differences(tuned, share * sgd)
    compared = Compared(f"Step-Tuned SGD - {share:g} x SGD", result, pairs)
    told = f"Step-Tuned SGD {tuned.mean():.3g}, SGD {sgd.mean():.3g}; {compared}"
    measured = f"mean distance of log10 J from Expected-GV: {told}"
    return _finding(compared.below, measured, [compared])


@judges(6)
def lower_in_the_end(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    fast = ("exact-gv", "expected-gv", TUNED)
    pairs = e.pairs(("sgd", *fast), INSTANCES_3)
    compared = [_final_below(e, INSTANCES_3, "sgd", other, pairs, measure) for other in fast]
    ends = _all_hold(compared, "final J")
    longer = "figure-3-longer"
    seeds = e.pairs(("sgd", TUNED), longer)
    epoch, width = e.per_epoch(longer), int(limits["median over records"])

    def epochs(sgd: RunSpec, tuned: RunSpec) -> float:
        stretch = limits["from epoch"] * epoch, limits["to epoch"] * epoch
        level = float(np.mean(e.curve(sgd, measure).between(*stretch)))
        return e.curve(tuned, measure).smoothed(width).first_below(level) / epoch

    reached = e.values(longer, ("sgd", TUNED), seeds, epochs)
    there = int(np.isfinite(reached).sum())
    when = f" after a median of {np.median(reached):.4g} epochs" if there == seeds.n else ""
    told = f"Step-Tuned SGD reaches SGD's level in {there} of {seeds.n} seeds{when}"
    holds = ends.holds and there == seeds.n
    return _finding(holds, f"{ends.measured}; {told}", compared, [seeds])


# -------------------------------------------------------------------------- networks

RESIDUAL = ("figure-4a", "figure-4b")
SIX = (*RESIDUAL, "figure-4c", "figure-4d", "figure-6e", "figure-6f")


@judges(7, TRAINING_LOSS)
def lowest(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(name: str) -> list[Compared]:
        pairs = e.pairs((TUNED, *OTHERS), name)
        return [_final_below(e, name, TUNED, other, pairs, measure) for other in OTHERS]

    found = _where_run(RESIDUAL, compare)
    return _all_hold(_flat(found), f"on {_letters(found)} of two")


@judges(8, TRAINING_LOSS)
def beats_sgd(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(name: str) -> list[Compared]:
        return [_final_below(e, name, TUNED, "sgd", e.pairs((TUNED, "sgd"), name), measure)]

    found = _where_run(SIX, compare)
    if len(found) < limits["problems"]:
        wanted = f"{limits['problems']:g} of the six problems are needed"
        raise MissingRuns(f"{_letters(found)} have the runs; {wanted}")
    lower = [name for name, comparisons in found.items() if comparisons[0].below]
    told = f"{_letters(found)} of six judged, below SGD on {_letters(lower) or 'none'}"
    return _finding(len(found) - len(lower) <= limits["exceptions"], told, _flat(found))


@judges(9, TRAINING_LOSS)
def adaptive_win(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    name, first, last = "figure-4d", ("adam", "rmsprop"), ("sgd", TUNED)
    pairs = e.pairs((*first, *last), name)
    return _all_hold([_final_below(e, name, a, b, pairs, measure) for a in first for b in last])


def _sudden_drops(
    e: PairedRuns,
    name: str,
    entry: str,
    pairs: Pairs,
    measure: str,
    side: float,
) -> list[Drop]:
    """The largest drop of each run, if it is sudden. A run that diverged has none."""
    limits = {**criterion(10).thresholds, "side": side}
    drops = []
    for records in e.records(name, entry, pairs):
        if records and measure not in records[-1]:
            raise MissingRuns(f"{name}: its runs have no {measure}")
        drop = drop_of(records, measure, limits) if records else None
        if records and drop is None:
            raise MissingRuns(f"{name}: its records are too far apart to look for a drop")
        if drop is not None and drop.is_sudden(limits):
            drops.append(drop)
    return drops


@judges(10, TRAINING_LOSS)
def sudden_drop(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def look(name: str) -> Finding:
        pairs = e.pairs((TUNED, "sgd"), name)
        side = limits["side"]
        tuned, sgd = (_sudden_drops(e, name, x, pairs, measure, side) for x in (TUNED, "sgd"))
        caused = sum(drop.is_caused_by_gamma(limits) for drop in tuned)
        exceptions = limits["exceptions"]
        told = (
            f"{_letters([name])} sudden drops in {len(tuned)} of {pairs.n} runs of Step-Tuned SGD, "
            f"{caused} with a change of gamma, and in {len(sgd)} of SGD"
        )
        holds = caused >= pairs.n - exceptions and len(sgd) <= exceptions
        return _finding(holds, told, pairs=[pairs])

    found = _where_run(RESIDUAL, look).values()
    told = "; ".join(one.measured for one in found)
    return _finding(all(one.holds for one in found), told, pairs=[one.pairs for one in found])


@judges(11, TRAINING_LOSS)
def accuracy_rises(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def look(name: str) -> tuple[Pairs, list[Drop]]:
        pairs = e.pairs((TUNED,), name)
        return pairs, _sudden_drops(e, name, TUNED, pairs, measure, limits["side"])

    found = _where_run(RESIDUAL, look)
    all_pairs = [pairs for pairs, _ in found.values()]
    rises = [drop.rise for _, drops in found.values() for drop in drops]
    if not rises:
        return _finding(False, f"{_letters(found)}: no run has a sudden drop", pairs=all_pairs)
    enough = sum(rise >= limits["rise"] for rise in rises)
    median = 100 * float(np.median(rises))
    told = f"{_letters(found)}: accuracy rises with {enough} of {len(rises)} sudden drops"
    told += f", by a median of {median:.2g} points"
    # A single drop without a rise does not count as an exception.
    holds = enough >= max(1, len(rises) - limits["exceptions"])
    return _finding(holds, told, pairs=all_pairs)


@judges(12, TRAINING_LOSS)
def twice_is_worse(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(once: str) -> list[Compared]:
        twice = once.replace("figure-4", "figure-5")
        pairs = e.pairs(OTHERS, once, twice)
        cases = []
        for entry in OTHERS:
            ends = [e.finals(name, entry, pairs, measure) for name in (once, twice)]
            uses = ["one use", "two uses"]
            if once.endswith("c") and entry != "sgd":
                ends, uses = ends[::-1], uses[::-1]
            what = f"{_problem(once)}{e.label(once, entry)}: {uses[0]} / {uses[1]}"
            cases.append(Compared(what, compare_ratios(*ends), pairs))
        return cases

    found = _where_run([f"figure-4{letter}" for letter in "abcd"], compare)
    if len(found) < limits["problems"]:
        wanted = f"{limits['problems']:g} of the four problems are needed"
        raise MissingRuns(f"{_letters(found)} has the runs; {wanted}")
    cases = _flat(found)
    failing = [case for case in cases if not case.below]
    held = f"as the paper says in {len(cases) - len(failing)} of {len(cases)} cases"
    told = f"{_letters(found)} of four judged: {held}"
    told += f"; not: {'; '.join(map(str, failing))}" if failing else ""
    return _finding(len(failing) <= limits["exceptions"], told, cases)


@judges(13, TRAINING_LOSS)
def batchnorm_helps(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    without, with_ = "figure-6e", "figure-6f"
    pairs = e.pairs((TUNED, "sgd"), without, with_)

    def ratio(name: str) -> Array:
        tuned, sgd = (e.finals(name, entry, pairs, measure) for entry in (TUNED, "sgd"))
        both_diverged = np.isinf(tuned) & np.isinf(sgd)
        return np.divide(tuned, sgd, out=np.ones_like(tuned), where=~both_diverged)

    ratios = {name: ratio(name) for name in (with_, without)}
    result = compare_ratios(ratios[with_], ratios[without])
    compared = Compared("(f) Step-Tuned SGD / SGD over the same of (e)", result, pairs)
    medians = [f"{_letters([name])} {np.median(values):.3g}" for name, values in ratios.items()]
    told = f"Step-Tuned SGD / SGD: {', '.join(medians)}; {compared}"
    return _finding(compared.below, told, [compared])


@judges(14, TRAINING_LOSS)
def activations_alike(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    kinds = {"relu": "ReLU", "elu": "ELU", "silu": "SiLU"}
    compared = []
    for kind, label in kinds.items():
        name = f"activations-{kind}"
        one = _final_below(e, name, TUNED, "sgd", e.pairs((TUNED, "sgd"), name), measure)
        compared.append(replace(one, what=f"{label}: {one.what}", is_test=False))
    sides = {float(np.sign(one.result.median - 1)) for one in compared}
    return _finding(len(sides) == 1, "; ".join(map(str, compared)), compared)


@judges(15, ("time",))
def wall_clock(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    sets = [timings for (scale, _), timings in Timings(e.folder).sets().items() if scale == e.scale]
    timings = max(sets, key=len, default=[])
    rounds = min((len(timing.seconds["sgd"]) for timing in timings), default=0)
    if len(timings) < len(TABLE_1) or rounds < limits["rounds"]:
        there = f"{len(timings)} of {len(TABLE_1)} problems"
        raise MissingRuns(f"table-2: {there}, {rounds} of at least {limits['rounds']:g} rounds")
    e.used |= {f"table-2 {timing.problem}": timing.environment for timing in timings}
    near, told, compared = 0, [], []
    for timing in timings:
        middle, paper = timing.ratio(TUNED)[0], PAPER[TUNED][timing.problem]
        near += abs(middle - paper) <= limits["distance"]
        told.append(f"({timing.problem}) {middle:.2f} [{paper:.2f}]")
        pairs = Pairs("rounds", tuple(range(len(timing.seconds["sgd"]))))
        result = compare_ratios(timing.seconds[TUNED], timing.seconds["sgd"])
        what = f"({timing.problem}) Step-Tuned SGD / SGD"
        compared.append(Compared(what, result, pairs, is_test=False))
    measured = f"Step-Tuned SGD on {timings[0].where}, median [the paper's]: {', '.join(told)}"
    return _finding(near == len(TABLE_1), measured, compared)


@judges(16, ("gradient",))
def rate_holds(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = [entry.name for entry in e.outcome("rate").experiment.entries]
    pairs = e.pairs(entries, "rate")
    if pairs.n < limits["seeds"]:
        raise MissingRuns(f"rate: {pairs.n} of at least {limits['seeds']:g} seeds complete")
    groups = [e.group("rate", entry, pairs) for entry in entries]
    diverged = sum(e.diverged(spec) for group in groups for spec in group.specs.values())
    if diverged:
        return _finding(False, f"{diverged} runs diverged", pairs=[pairs])
    rates = [rate_of(group, e.results, limits["decades"]) for group in groups]
    fits = [fit for fit in rates if fit is not None]
    if any(fit.remaining > limits["fallen to"] for fit in fits):
        raise MissingRuns("rate: too few iterations, the smallest gradient is that of the start")
    told = []
    for fit in fits:
        slope = f"{fit.slope:.3f} [{fit.low:.3f}, {fit.high:.3f}]"
        told.append(f"delta {fit.delta:g}: slope {slope}, at most {fit.bound:.3f}")
    return _finding(all(fit.low <= fit.bound for fit in fits), "; ".join(told), pairs=[pairs])


@judges(17, ("plain loss",))
def tuning_helps(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(name: str) -> list[Compared]:
        entries = [entry.name for entry in e.outcome(name).experiment.entries]
        pairs = e.pairs(entries, name)
        controls = [entry for entry in entries if entry != TUNED]
        best = min(controls, key=lambda entry: float(e.finals(name, entry, pairs, measure).mean()))
        return [_final_below(e, name, TUNED, best, pairs, measure)]

    found = _where_run(("controls-f", "controls-a"), compare)
    best = ", ".join(compared.what for compared in _flat(found))
    return _all_hold(_flat(found), f"on {_letters(found)} of two, against the best control: {best}")
