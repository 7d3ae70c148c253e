"""Every claim with its verdict: the findings of all scales and measures, combined."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from steptuned.lab.claims.criteria import criteria_hash
from steptuned.lab.claims.judging import Claim, Compared, Finding, TooFewProblems
from steptuned.lab.discovery import modules_of
from steptuned.lab.paired_runs import MissingRuns, PairedAtScales, PairedRuns

Verdict = Literal["reproduced", "not reproduced", "consistent", "inconsistent", "mixed", "not run"]

JUDGED = ("small", "short", "paper")
"""The scales that are judged."""
LABELS = {"loss": "J", "gradient": "|grad J|^2"}
"""Names of the measures whose key is not their name."""


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
    problems: str = ""
    """For a claim about several problems, which of them are in, such as "(a) of two"."""
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


CLAIMS: dict[int, Claim] = {}
"""Every claim of the package, and of files given as ``--with``, by its number."""
OWN = 101
"""The first number for claims of one's own. The package uses smaller ones."""


def add_claims(module: ModuleType) -> None:
    """Add the claims in a module, or none of them if a number is taken."""
    known = dict(CLAIMS)
    for claim in vars(module).values():
        if not isinstance(claim, Claim):
            continue
        other = known.setdefault(claim.number, claim)
        if other is not claim:
            taken = f"there is a claim {claim.number} already ({other.text!r})"
            raise ValueError(f"{taken}; choose another number, such as {_free(known)}")
    CLAIMS.update(known)


def _free(taken: Iterable[int]) -> int:
    return max(OWN, *(number + 1 for number in taken))


def judge(
    folder: Path,
    claims: Iterable[Claim] | None = None,
    runs: PairedAtScales | None = None,
) -> list[tuple[Claim, Judgement]]:
    """Claims with their judgements.

    Args:
        folder: the folder of runs.
        claims: the claims to judge; by default all, in the order of their numbers.
        runs: the runs of the folder, if they are read for other purposes too.
    """
    at = PairedAtScales(folder) if runs is None else runs
    scales = [at[scale] for scale in JUDGED]
    if claims is None:
        claims = [CLAIMS[number] for number in sorted(CLAIMS)]
    return [(claim, _judge(claim, scales)) for claim in claims]


def _judge(claim: Claim, scales: list[PairedRuns]) -> Judgement:
    findings: list[Finding] = []
    missing, too_few, other = [], [], 0
    limits = claim.criterion.thresholds
    for runs in scales:
        runs.used.clear()
        try:
            found = [claim.judge(runs, limits, measure) for measure in claim.measures]
        except MissingRuns as reason:
            missing.append(f"{runs.scale}: {reason}")
            if isinstance(reason, TooFewProblems):
                too_few.append(f"{runs.scale}: not judged, {reason}")
            continue
        for finding, measure in zip(found, claim.measures, strict=True):
            findings.append(
                replace(finding, scale=runs.scale, measure=LABELS.get(measure, measure))
            )
        other += sum(map(is_of_other_criteria, runs.used.values()))
    if not findings:
        return Judgement("not run", f"runs missing ({'; '.join(missing)})")
    judgement = combine(findings)
    measured = "; ".join([judgement.measured, *too_few])
    return replace(judgement, measured=measured, other_criteria=other)


def is_of_other_criteria(environment: Any) -> bool:
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
    measured, problems = "; ".join(told), _problems(findings)
    return Judgement(verdict, measured, scales, most.n, most.kind, problems, tuple(comparisons))


def _problems(findings: Sequence[Finding]) -> str:
    """The problems that are in. If the scales differ, those of each scale."""
    at = {finding.scale: finding.problems for finding in findings if finding.problems}
    if len(set(at.values())) == 1:
        return next(iter(at.values()))
    return ", ".join(f"{problems} ({scale})" for scale, problems in at.items())


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
            "problems": judgement.problems,
            "comparisons": [_plain(compared) for compared in judgement.comparisons],
            "criteria": criteria_hash() if claim.is_hashed else None,
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


for _module in modules_of("steptuned.lab.claims"):
    add_claims(_module)
