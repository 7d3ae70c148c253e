"""The paper's claims, judged from a store of runs and from nothing else.

Each claim says which experiments it needs and by which criterion it is judged: at the largest scale at which all the runs that it
needs are complete. Where there is none it is "not run". One seed is never enough for more than "partly".
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.experiment import SCALES, Experiment, Outcome, first_below, load, load_all, panels_of, paper_experiments
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report.measures import compare, instances_to_level, rate_of
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Store
from steptuned.lab.sweep import Forgiving, outcome_of
from steptuned.lab.timing import PAPER, Timings

Verdict = Literal["reproduced", "partly", "not reproduced", "not run"]
Records = list[dict[str, Any]]

TUNED = "step-tuned-sgd"
OTHERS = ("sgd", "rmsprop", "adam")


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    measured: str
    """The numbers, in words."""
    scale: str = ""
    seeds: int = 0
    instances: int = 0


@dataclass(frozen=True)
class Claim:
    number: int
    text: str
    criterion: str
    """When it counts as reproduced."""
    needs: tuple[str, ...]
    """Experiments and panels, all of whose runs must be complete."""
    judge: Callable[["Evidence"], Judgement]


class Lacking(Exception):  # noqa: N818 - it is no error
    """There are not enough runs, and this is what is missing."""


class Evidence:
    """What a store has at one scale."""

    def __init__(self, folder: Path, scale: str) -> None:
        self.scale = scale
        self.folder = folder
        self.results = Forgiving(Store(folder), [])
        self._present = self.results.store.present()
        self._outcomes: dict[str, Outcome] = {}

    def outcome(self, name: str) -> Outcome:
        """An experiment of which every run is complete; :class:`Lacking` where one is not."""
        if name not in self._outcomes:
            experiment = _experiment(name, self.scale)
            if (experiment.problem, self.scale) not in self._present:
                raise Lacking(f"{name} at scale {self.scale} has no runs")
            outcome = outcome_of(experiment, self.results)
            specs = [*outcome.star_specs, *(trial.spec for group in outcome.groups for trial in group.trials)]
            specs += [spec for group in outcome.groups for spec in group.specs.values()]
            done = sum(self.results.run(spec).is_sound() for spec in specs)
            if done < len(specs) or any(group.winner is None for group in outcome.groups):
                expected = sum(runs for runs, _ in outcome.experiment.expected_back_propagations().values())
                raise Lacking(f"{name} at scale {self.scale} has {done} of at most {expected} runs that can be trusted")
            self._outcomes[name] = outcome
        return self._outcomes[name]

    def has(self, name: str) -> bool:
        try:
            self.outcome(name)
        except Lacking:
            return False
        return True

    def specs(self, name: str, entry: str) -> dict[int, RunSpec]:
        """The winner's run for each seed."""
        return next(group.specs for group in self.outcome(name).groups if group.entry.name == entry)

    def records(self, name: str, entry: str) -> dict[int, Records]:
        return {seed: self.results.records(spec) for seed, spec in self.specs(name, entry).items()}

    def finals(self, name: str, entry: str) -> list[float]:
        """The last loss of each seed; infinite where the run diverged."""
        lasts = [self.results.last(spec) for spec in self.specs(name, entry).values()]
        return [math.inf if last is None else last["loss"] for last in lasts]

    def seeds(self, name: str) -> int:
        return self.outcome(name).experiment.seeds

    def per_epoch(self, name: str) -> int:
        spec = self.specs(name, self.outcome(name).groups[0].entry.name)[0]
        return -(-PROBLEMS[spec.problem].rows_of(spec.options) // spec.options["batch"])


def _experiment(name: str, scale: str) -> Experiment:
    files = paper_experiments()
    if name in files:
        (experiment,) = load_all(files[name], scale)
        return experiment
    path, panel = next((path, panel) for path in files.values() for panel in panels_of(path) if path.stem + panel == name)
    return load(path, scale, panel)


# ---------------------------------------------------------------------------------------------- how verdicts are made


def below(a: list[float], b: list[float]) -> Verdict:
    """Whether a is smaller than b: in every seed of both, in the mean only, or not. What is not finite is never smaller."""
    if not all(map(math.isfinite, a)):
        return "not reproduced"
    if not any(map(math.isnan, b)) and max(a) < min(b):
        return "reproduced"
    return "not reproduced" if np.mean(a) >= np.mean(b) else "partly"


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """All of them, none of them, or something between."""
    kinds = set(verdicts)
    return kinds.pop() if len(kinds) == 1 else "partly"


def enough(share: float, most: float, some: float) -> Verdict:
    return "reproduced" if share >= most else "partly" if share >= some else "not reproduced"


def _judged(evidence: Evidence, verdict: Verdict, measured: str, name: str, instances: int = 1) -> Judgement:
    seeds = evidence.seeds(name)
    if seeds * instances < 2:
        verdict, measured = "partly", f"{measured} ({verdict}, but one seed is not enough)"
    return Judgement(verdict, measured, evidence.scale, seeds, instances)


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _losses(records: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Back-propagations and log10 of the loss."""
    return np.array([r["bp"] for r in records]), np.log10(np.maximum([r["loss"] for r in records], 1e-300))


def _when(records: Records, level: float) -> float:
    """After how many back-propagations the loss is below the level; infinitely many if never."""
    found = first_below(records, level)
    return math.inf if found is None else found


def _at(records: Records, bp: float) -> float:
    """The loss after so many back-propagations."""
    return next((r["loss"] for r in reversed(records) if r["bp"] <= bp), math.inf)


# ---------------------------------------------------------------------------------------------- regression


ENOUGH_INSTANCES = 4
"""With fewer, no share has an interval on one side of a half."""


def soonest(e: Evidence) -> Judgement:
    """1: Algorithm 1 against BB-abs and Armijo."""
    mine, others = "step-tuned-gd", ("barzilai-borwein", "armijo")
    if e.has("figure-2-instances") and e.outcome("figure-2-instances").experiment.instances >= ENOUGH_INSTANCES:
        outcome = e.outcome("figure-2-instances")
        table = instances_to_level(outcome, e.results)
        compared = {other: compare(table, mine, other) for other in others}
        verdicts: list[Verdict] = [enough(float(c.low > 0.5) + float(c.high > 0.5), 2, 1) for c in compared.values()]
        told = [
            f"sooner than {METHODS[o].label} on {c.wins} of {c.instances} instances (share {c.low:.0%} to {c.high:.0%})"
            for o, c in compared.items()
        ]
        return _judged(e, together(verdicts), "; ".join(told), "figure-2-instances", outcome.experiment.instances)
    outcome = e.outcome("figure-2")
    times = {
        name: [
            _when(records, outcome.star[0, seed] + outcome.experiment.selection.within)
            for seed, records in e.records("figure-2", name).items()
        ]
        for name in (mine, *others)
    }
    wins = sum(all(t < times[o][i] for o in others) for i, t in enumerate(times[mine]))
    told = [f"{METHODS[name].label} {np.median(values):.0f}" for name, values in times.items()]
    share = wins / len(times[mine])
    measured = f"iterations to J* + 0.1, median: {', '.join(told)}; sooner than both in {wins} of {len(times[mine])} seeds"
    return _judged(e, enough(share, 1, 0.5), measured, "figure-2")


HALF_OF_THE_BEGINNING = 75
BEGINNING = 150
"""Epochs of Figure 3 that the paper speaks of."""


def faster_at_first(e: Evidence) -> Judgement:
    """2: how much longer SGD needs for what Exact-GV has after 75 epochs."""
    early = HALF_OF_THE_BEGINNING * e.per_epoch("figure-3")
    sgd, exact = e.records("figure-3", "sgd"), e.records("figure-3", "exact-gv")
    ratios = [_when(sgd[seed], _at(exact[seed], early)) / early for seed in sgd]
    verdict: Verdict = "reproduced" if min(ratios) >= 1.25 else "partly" if np.mean(ratios) > 1 else "not reproduced"
    told = f"SGD takes {np.median(ratios):.2f} (smallest {min(ratios):.2f}) times as long to J of Exact-GV at epoch 75"
    return _judged(e, verdict, told, "figure-3")


def loses_most(e: Evidence) -> Judgement:
    """3: how much of Exact-GV's advantage Stochastic-GV has."""
    early = HALF_OF_THE_BEGINNING * e.per_epoch("figure-3")
    at = {n: [_at(r, early) for r in e.records("figure-3", n).values()] for n in ("sgd", "exact-gv", "stochastic-gv")}
    gain = float(np.mean(at["sgd"]) - np.mean(at["exact-gv"]))
    left = float(np.mean(at["sgd"]) - np.mean(at["stochastic-gv"]))
    told = f"J at epoch 75: {', '.join(f'{METHODS[n].label} {_mean(v)}' for n, v in at.items())}"
    if gain <= 0:
        return _judged(e, "not reproduced", f"{told}; Exact-GV has no advantage to lose", "figure-3")
    verdict: Verdict = "reproduced" if left < 0.5 * gain else "partly" if left < gain else "not reproduced"
    return _judged(e, verdict, f"{told}; Stochastic-GV keeps {left / gain:.0%} of the advantage", "figure-3")


def _beginning(e: Evidence, entry: str) -> list[NDArray[np.float64]]:
    last = BEGINNING * e.per_epoch("figure-3")
    return [logs[bp <= last] for bp, logs in map(_losses, e.records("figure-3", entry).values())]


def as_good(e: Evidence) -> Judgement:
    """4: Expected-GV and Exact-GV, in the mean of log J over the first 150 epochs."""
    expected, exact = ([float(logs.mean()) for logs in _beginning(e, name)] for name in ("expected-gv", "exact-gv"))
    share = float(np.mean([a <= b + 0.005 for a, b in zip(expected, exact, strict=True)]))
    told = f"mean of log10 J over 150 epochs: Expected-GV {_mean(expected)}, Exact-GV {_mean(exact)}"
    return _judged(e, enough(share, 1, 0.5), told, "figure-3")


def very_close(e: Evidence) -> Judgement:
    """5: the distance of Step-Tuned SGD from Expected-GV, beside that of SGD."""
    tuned, expected, sgd = (_beginning(e, name) for name in (TUNED, "expected-gv", "sgd"))

    def distance(a: list[NDArray[np.float64]]) -> float:
        return float(np.mean([np.abs(x - y).mean() for x, y in zip(a, expected, strict=True)]))

    mine, base = distance(tuned), distance(sgd)
    told = f"mean distance of log10 J from Expected-GV over 150 epochs: Step-Tuned {mine:.4f}, SGD {base:.4f}"
    return _judged(e, "reproduced" if mine <= 0.25 * base else "partly" if mine < base else "not reproduced", told, "figure-3")


def lower_in_the_end(e: Evidence) -> Judgement:
    """6: SGD's end of Figure 3 against the fast methods', and Step-Tuned SGD with more epochs."""
    sgd = e.finals("figure-3", "sgd")
    fast = {name: e.finals("figure-3", name) for name in ("exact-gv", "expected-gv", TUNED)}
    first = together(below(sgd, values) for values in fast.values())
    epoch = e.per_epoch("figure-3-longer")
    level = [_at(r, 250 * epoch) for r in e.records("figure-3-longer", "sgd").values()]
    longer = e.records("figure-3-longer", TUNED)
    when = [first_below(r, max(level) + 1e-12) for r in longer.values()]
    reached = [w for w in when if w is not None]
    second = enough(len(reached) / len(when), 1, 0.5)
    ends = ", ".join(f"{METHODS[name].label} {_mean(values)}" for name, values in fast.items())
    epochs = f"after {np.median(reached) / epoch:.0f} epochs" if reached else "never"
    there = f"Step-Tuned reaches SGD's {max(level):.4g} {epochs} ({len(reached)}/{len(when)} seeds)"
    told = f"J at the end: SGD {_mean(sgd)}, {ends}; {there}"
    return _judged(e, together((first, second)), told, "figure-3")


def rate_holds(e: Evidence) -> Judgement:
    """16: the theorem."""
    fits = [fit for fit in (rate_of(group, e.results) for group in e.outcome("rate").groups) if fit is not None]
    told = "; ".join(f"delta {f.delta:g}: slope {f.slope:.2f} ({f.low:.2f} to {f.high:.2f}), {f.verdict}" for f in fits)
    kinds: dict[str, Verdict] = {"supported": "reproduced", "not supported": "not reproduced"}
    if any(fit.verdict not in kinds for fit in fits):
        raise Lacking(f"rate at scale {e.scale} is too short: {told}")
    return _judged(e, together(kinds[fit.verdict] for fit in fits), told, "rate")


# ---------------------------------------------------------------------------------------------- networks


def _ends(e: Evidence, name: str, entries: Iterable[str] = (*OTHERS, TUNED)) -> str:
    return f"{name}: " + ", ".join(f"{METHODS[entry].label} {_mean(e.finals(name, entry))}" for entry in entries)


def lowest(e: Evidence) -> Judgement:
    """7: Step-Tuned SGD on (a) and (b)."""
    names = ("figure-4a", "figure-4b")
    verdict = together(below(e.finals(name, TUNED), e.finals(name, other)) for name in names for other in OTHERS)
    return _judged(e, verdict, "final J: " + "; ".join(_ends(e, name) for name in names), names[0])


SIX = ("figure-4a", "figure-4b", "figure-4c", "figure-4d", "figure-6e", "figure-6f")


def beats_sgd(e: Evidence) -> Judgement:
    """8: on how many of the six problems."""
    lower = [name for name in SIX if np.mean(e.finals(name, TUNED)) < np.mean(e.finals(name, "sgd"))]
    told = f"lower mean of the final J on {len(lower)} of 6 ({', '.join(lower)}); " + "; ".join(
        _ends(e, n, ("sgd", TUNED)) for n in SIX
    )
    return _judged(e, enough(len(lower), 5, 3), told, SIX[0])


def adaptive_win(e: Evidence) -> Judgement:
    """9: on (d)."""
    verdict = together(
        below(e.finals("figure-4d", a), e.finals("figure-4d", b)) for a in ("adam", "rmsprop") for b in ("sgd", TUNED)
    )
    return _judged(e, verdict, f"final J: {_ends(e, 'figure-4d')}", "figure-4d")


@dataclass(frozen=True)
class Drop:
    """The largest fall of the loss within a fiftieth of the run, between its first and its last tenth."""

    at: float
    """Share of the budget at which it begins."""
    fall: float
    """In log10 J."""
    typical: float
    gamma: tuple[float, float]
    """Mean before and after, each over a twentieth of the run."""
    accuracy: tuple[float, float]

    @property
    def is_sudden(self) -> bool:
        return self.fall >= 0.1 and self.fall >= 4 * self.typical

    @property
    def has_cause(self) -> bool:
        before, after = self.gamma
        return abs(after - before) >= 0.25 * before

    @property
    def lifts_accuracy(self) -> bool:
        return self.accuracy[1] - self.accuracy[0] >= 0.02


def drop_of(records: Records) -> Drop | None:
    """None where the log is too short to have a middle."""
    bp, logs = _losses(records)
    budget = bp[-1]
    window = round(0.02 * (len(bp) - 1))
    if window < 1:
        return None
    starts = [i for i in range(len(bp) - window) if 0.1 * budget <= bp[i] and bp[i + window] <= 0.9 * budget]
    if len(starts) < 10:
        return None
    falls = np.array([logs[i] - logs[i + window] for i in starts])
    start = starts[int(falls.argmax())]
    side = max(1, round(0.05 * (len(bp) - 1)))

    def mean(key: str, part: Records) -> float:
        return float(np.mean([r.get(key, math.nan) for r in part]))

    before, after = records[max(0, start - side) : start + 1], records[start + window : start + window + side + 1]
    pairs = {key: (mean(key, before), mean(key, after)) for key in ("gamma", "accuracy")}
    return Drop(float(bp[start] / budget), float(falls.max()), float(np.median(np.abs(falls))), pairs["gamma"], pairs["accuracy"])


def _drops(e: Evidence, entry: str) -> list[Drop]:
    drops = [drop_of(records) for name in ("figure-4a", "figure-4b") for records in e.records(name, entry).values()]
    if any(drop is None for drop in drops):
        raise Lacking(f"figure-4 at scale {e.scale} has too few records to look for a drop in the middle")
    return [drop for drop in drops if drop is not None]


def sudden_drop(e: Evidence) -> Judgement:
    """10: on (a) and (b), with a change of gamma."""
    mine, sgd = _drops(e, TUNED), _drops(e, "sgd")
    sudden = [d for d in mine if d.is_sudden]
    caused = [d for d in sudden if d.has_cause]
    told = (
        f"a sudden drop in {len(sudden)} of {len(mine)} runs of Step-Tuned SGD, with a change of gamma in {len(caused)}; "
        f"in {sum(d.is_sudden for d in sgd)} of {len(sgd)} runs of SGD; "
        f"largest falls in log10 J: {', '.join(f'{d.fall:.2f}' for d in mine)}"
    )
    alone = not any(d.is_sudden for d in sgd)  # SGD has the same schedule
    verdict: Verdict = "reproduced" if len(caused) == len(mine) and alone else "partly" if sudden else "not reproduced"
    return _judged(e, verdict, told, "figure-4a")


def accuracy_rises(e: Evidence) -> Judgement:
    """11: with that drop."""
    sudden = [d for d in _drops(e, TUNED) if d.is_sudden]
    if not sudden:
        return _judged(e, "not reproduced", "no sudden drop was seen, so nothing could rise with it", "figure-4a")
    rising = sum(d.lifts_accuracy for d in sudden)
    told = f"accuracy rises by 2 points or more with {rising} of {len(sudden)} sudden drops"
    return _judged(e, enough(rising / len(sudden), 1, 0.5), told, "figure-4a")


def twice_is_worse(e: Evidence) -> Judgement:
    """12: Figure 5 against Figure 4."""
    held, told = 0, []
    for letter in "abcd":
        for entry in OTHERS:
            once, twice = e.finals(f"figure-4{letter}", entry), e.finals(f"figure-5{letter}", entry)
            worse = float(np.mean(twice)) > float(np.mean(once))
            known = math.isfinite(np.mean(once)) or math.isfinite(np.mean(twice))
            held += known and worse != (letter == "c" and entry != "sgd")
            told.append(f"({letter}) {METHODS[entry].label} {np.mean(once):.4g} to {np.mean(twice):.4g}")
    measured = f"as the paper says in {held} of 12 cases; mean final J with one use and with two: {', '.join(told)}"
    return _judged(e, enough(held, 11, 7), measured, "figure-4a")


def batchnorm_helps(e: Evidence) -> Judgement:
    """13: the ratio of Step-Tuned SGD's loss to SGD's, with BatchNorm and without."""
    ratios = {
        name: [a / b for a, b in zip(e.finals(name, TUNED), e.finals(name, "sgd"), strict=True)]
        for name in ("figure-6e", "figure-6f")
    }
    told = "final J of Step-Tuned SGD over SGD's: " + ", ".join(
        f"{'without' if name.endswith('e') else 'with'} BatchNorm {_mean(values)}" for name, values in ratios.items()
    )
    return _judged(e, below(ratios["figure-6f"], ratios["figure-6e"]), told, "figure-6e")


def activations_alike(e: Evidence) -> Judgement:
    """14: whether Step-Tuned SGD is on the same side of SGD with all three."""
    names = [f"activations-{kind}" for kind in ("relu", "elu", "silu")]
    pairs = [(e.finals(name, TUNED), e.finals(name, "sgd")) for name in names]
    lower = {bool(np.mean(tuned) < np.mean(sgd)) for tuned, sgd in pairs}
    overlap = any(below(a, b) == "partly" or below(b, a) == "partly" for a, b in pairs)
    told = "final J: " + "; ".join(_ends(e, name, ("sgd", TUNED)) for name in names)
    verdict: Verdict = "reproduced" if len(lower) == 1 else "partly" if overlap else "not reproduced"
    return _judged(e, verdict, told, names[0])


def wall_clock(e: Evidence) -> Judgement:
    """15: Table 2."""
    sets = [timings for (scale, _), timings in Timings(e.folder).sets().items() if scale == e.scale]
    timings = max(sets, key=len, default=[])
    if len(timings) < len(TABLE_1):
        raise Lacking(f"table-2 at scale {e.scale} has {len(timings)} of {len(TABLE_1)} problems")
    near, told = 0, []
    for timing in timings:
        middle, low, high = timing.ratio(TUNED)
        paper = PAPER[TUNED][timing.problem]
        near += abs(middle - paper) <= 0.1
        told.append(f"({timing.problem}) {middle:.2f} [{low:.2f}, {high:.2f}], paper {paper:.2f}")
    rounds = len(timings[0].seconds["sgd"])
    measured = f"Step-Tuned SGD on {timings[0].where}, median [quartiles] of {rounds} rounds: {'; '.join(told)}"
    return Judgement(enough(near, len(TABLE_1), 3), measured, e.scale)


# ---------------------------------------------------------------------------------------------- the claims

CLAIMS: tuple[Claim, ...] = (
    Claim(
        1,
        "Algorithm 1 comes within 0.1 of J* sooner than Barzilai-Borwein with absolute values and Armijo (Figure 2).",
        "sooner than both in every seed; over instances: the 95 % interval of the share lies above a half for both",
        ("figure-2",),
        soonest,
    ),
    Claim(
        2,
        "Exact-GV is much faster than SGD in about the first 150 epochs (Figure 3).",
        "in every seed SGD takes 1.25 times as long or longer to the J that Exact-GV has at epoch 75",
        ("figure-3",),
        faster_at_first,
    ),
    Claim(
        3,
        "Stochastic-GV loses most of that advantage (Figure 3).",
        "at epoch 75 it has less than half of Exact-GV's advantage in J over SGD",
        ("figure-3",),
        loses_most,
    ),
    Claim(
        4,
        "Expected-GV is at least as good as Exact-GV (Figure 3).",
        "its mean of log10 J over the first 150 epochs is not above Exact-GV's by more than 0.005 in any seed",
        ("figure-3",),
        as_good,
    ),
    Claim(
        5,
        "Step-Tuned SGD is very close to Expected-GV (Figure 3).",
        "its mean distance in log10 J over the first 150 epochs is at most a quarter of SGD's",
        ("figure-3",),
        very_close,
    ),
    Claim(
        6,
        "SGD ends lower than the fast methods, and Step-Tuned SGD reaches that level with more epochs (Figure 3).",
        "SGD's largest final J is below every other's smallest, and every seed of Step-Tuned SGD gets there in 2,500 epochs",
        ("figure-3", "figure-3-longer"),
        lower_in_the_end,
    ),
    Claim(
        7,
        "Step-Tuned SGD has the lowest training loss of all on (a) and (b) (Figure 4).",
        "its largest final J is below every other method's smallest, on both",
        ("figure-4a", "figure-4b"),
        lowest,
    ),
    Claim(
        8,
        "Step-Tuned SGD beats SGD in training loss on five of the six problems.",
        "its mean final J is smaller on five or six",
        SIX,
        beats_sgd,
    ),
    Claim(
        9,
        "Adam and RMSprop beat SGD and Step-Tuned SGD on (d) (Figure 4).",
        "the largest final J of each is below the smallest of the other two",
        ("figure-4d",),
        adaptive_win,
    ),
    Claim(
        10,
        "On residual networks the loss drops suddenly in mid-training, by gamma and not by the schedule (Figure 4).",
        "in every run of (a) and (b): within a fiftieth of the run log10 J falls by 0.1 and four times as much as usual, and gamma "
        "changes by a quarter; SGD, which has the same schedule, has no such drop",
        ("figure-4a", "figure-4b"),
        sudden_drop,
    ),
    Claim(
        11,
        "Test accuracy rises with that drop (Figure 4).",
        "by two points or more, with every sudden drop",
        ("figure-4a", "figure-4b"),
        accuracy_rises,
    ),
    Claim(
        12,
        "Using each mini-batch twice makes SGD, Adam and RMSprop worse, but on (c) it helps Adam and RMSprop (Figure 5).",
        "the mean final J agrees in 11 of the 12 cases",
        tuple(f"figure-{n}{letter}" for n in (4, 5) for letter in "abcd"),
        twice_is_worse,
    ),
    Claim(
        13,
        "BatchNorm helps Step-Tuned SGD: (f) against (e) (Figure 6).",
        "the ratio of its final J to SGD's is smaller with BatchNorm, the largest below the smallest without",
        ("figure-6e", "figure-6f"),
        batchnorm_helps,
    ),
    Claim(
        14,
        "Smooth activations and ReLU make no qualitative difference.",
        "the mean final J of Step-Tuned SGD is on the same side of SGD's with ReLU, ELU and SiLU",
        ("activations-relu", "activations-elu", "activations-silu"),
        activations_alike,
    ),
    Claim(
        15,
        "Wall-clock per epoch relative to SGD is that of Table 2.",
        "the median ratio of Step-Tuned SGD is within 0.1 of the paper's on all six problems",
        (),
        wall_clock,
    ),
    Claim(
        16,
        "The smallest mean square of the gradient falls as k^-(1/2 - delta), or faster.",
        "the fitted slope is at most -(1/2 - delta) within its 95 % interval, for every delta",
        ("rate",),
        rate_holds,
    ),
)


def judge(folder: Path, claims: Iterable[Claim] = CLAIMS) -> list[tuple[Claim, Judgement]]:
    """Every claim with its judgement, at the largest scale that has the runs."""
    evidence = [Evidence(folder, scale) for scale in reversed(SCALES)]
    return [(claim, _judge(claim, evidence)) for claim in claims]


def _judge(claim: Claim, evidence: list[Evidence]) -> Judgement:
    tried = [_judge_at(claim, at_scale) for at_scale in evidence]
    judgements = [judgement for judgement in tried if isinstance(judgement, Judgement)]
    return judgements[0] if judgements else Judgement("not run", f"not enough runs: {'; '.join(map(str, tried))}")


def _judge_at(claim: Claim, evidence: Evidence) -> Judgement | Lacking:
    try:
        for name in claim.needs:
            evidence.outcome(name)
        return claim.judge(evidence)
    except Lacking as missing:
        return missing


def as_data(judged: list[tuple[Claim, Judgement]]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {"number": claim.number, "claim": claim.text, "criterion": claim.criterion, "needs": list(claim.needs), **asdict(judgement)}
        for claim, judgement in judged
    ]
