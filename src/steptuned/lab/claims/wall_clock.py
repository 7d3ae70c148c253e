"""The judge of claim 15: time per epoch, as in Table 2."""

from collections.abc import Mapping

from steptuned.lab.claims.judging import TUNED, Compared, Finding, finding, judges
from steptuned.lab.paired_runs import MissingRuns, PairedRuns, Pairs
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.statistics import compare_ratios
from steptuned.lab.table2 import PAPER, Timings


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
    problems = f"{' '.join(f'({letter})' for letter in TABLE_1)} of six"
    return finding(near == len(TABLE_1), measured, compared, problems=problems)
