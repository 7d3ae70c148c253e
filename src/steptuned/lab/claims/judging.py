"""What a judge is made of: pairs of runs are compared, and the comparisons become a finding.

A judge is a function that applies a criterion to the runs of one scale, by one measure. With the
decorator :func:`judges` it becomes a claim. If runs are missing, it raises ``MissingRuns``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from steptuned.lab.claims.criteria import CRITERIA, Criterion, criterion
from steptuned.lab.paired_runs import MissingRuns, PairedRuns, Pairs
from steptuned.lab.statistics import Comparison, compare_ratios

TUNED = "step-tuned-sgd"
OTHERS = ("sgd", "rmsprop", "adam")
PAPERS = 16
"""The paper's claims have the numbers up to this one."""
ALPHA = 0.05
"""'A is below B' if p is at most this."""
J_ONLY = ("loss",)
TRAINING_LOSS = ("plain loss", "loss")
T = TypeVar("T")


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
        return f"{self.what}: {c.median:.3g} [{c.low:.3g}, {c.high:.3g}], p = {c.p:.2g}"


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
    problems: str = ""
    """For a claim about several problems, those it was judged on, such as "(a) of two"."""


class TooFewProblems(MissingRuns):
    """Some of the problems that a claim is about have their runs, but not enough of them."""


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

    @property
    def is_hashed(self) -> bool:
        """Whether ``criteria_hash`` covers its criterion, as it does for those in ``CRITERIA``."""
        return self.criterion in CRITERIA


def judges(
    claim: int | Criterion,
    measures: tuple[str, ...] = J_ONLY,
) -> Callable[[Judge], Claim]:
    """Make a claim of the function that judges it.

    Args:
        claim: the number of a criterion in ``CRITERIA``, or a criterion of your own.
        measures: the measures that it is judged by, one at a time.
    """
    applied = claim if isinstance(claim, Criterion) else criterion(claim)
    return lambda judge: Claim(applied, judge, measures)


# -------------------------------------------------------------------------- parts of judges


def finding(
    holds: bool,
    measured: str,
    comparisons: Sequence[Compared] = (),
    pairs: Sequence[Pairs] = (),
    problems: str = "",
) -> Finding:
    """A finding. Its pairs are the smallest set among those it is based on."""
    all_pairs = [*(compared.pairs for compared in comparisons), *pairs]
    fewest = min(all_pairs, key=lambda pairs: (pairs.is_enough, pairs.n))
    return Finding(holds, measured, tuple(comparisons), fewest, problems=problems)


def all_hold(
    comparisons: Sequence[Compared],
    where: str = "",
    problems: str = "",
) -> Finding:
    """A finding that holds if all comparisons do. Of several, it lists those that do not."""
    failing = [compared for compared in comparisons if not compared.below]
    if len(comparisons) == 1:
        told = str(comparisons[0])
    elif failing:
        told = f"{len(failing)} of {len(comparisons)} fail: {'; '.join(map(str, failing))}"
    else:
        told = (
            f"all {len(comparisons)} hold, largest p = {max(c.result.p for c in comparisons):.2g}"
        )
    measured = f"{where}: {told}" if where else told
    return finding(not failing, measured, comparisons, problems=problems)


def final_below(
    runs: PairedRuns,
    name: str,
    a: str,
    b: str,
    pairs: Pairs,
    measure: str,
) -> Compared:
    """Compare the final values of two entries of an experiment: is a below b?"""
    values = [runs.finals(name, entry, pairs, measure) for entry in (a, b)]
    what = f"{runs.label(name, a)} / {runs.label(name, b)}"
    return Compared(f"{problem_letter(name)} {what}".lstrip(), compare_ratios(*values), pairs)


def problem_letter(name: str) -> str:
    """The letter in Table 1 of an experiment's problem, such as "(a)"; "text"; else empty."""
    found = re.fullmatch(r"(?:figure-[456]|controls-|beyond-)([a-f])", name)
    if found:
        return f"({found[1]})"
    return name if name == "text" else ""


def problems_in(names: Iterable[str], of: str) -> str:
    """Which problems of a claim about several are in, such as "(a) (d) (e) (f) of six"."""
    return f"{' '.join(map(problem_letter, names))} of {of}"


def where_run(names: Iterable[str], look: Callable[[str], T]) -> dict[str, T]:
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
