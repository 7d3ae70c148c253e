"""Claims 18 to 21, ours: what the variants are good for. Fixed before their experiments were run.

The runs of SGD and Step-Tuned SGD on (f), and a smaller run of text without variants, had been seen
by then; those of the variants had not.

They are judged by the plain loss only, because AdamW keeps weight decay out of the loss.
"""

from collections.abc import Mapping

from steptuned.lab.claims.criteria import Criterion
from steptuned.lab.claims.judging import (
    TUNED,
    Claim,
    Compared,
    Finding,
    all_hold,
    final_below,
    judges,
    problems_in,
    where_run,
)
from steptuned.lab.paired_runs import PairedRuns

EXPERIMENTS = ("beyond-a", "beyond-f", "text")
WHERE = "on each of beyond-a, beyond-f and text that has the runs"


def _claim(number: int, text: str, criterion: str, *tests: tuple[str, str]) -> Claim:
    """A claim that holds if the first entry of every test ends below the second."""
    names = tuple(dict.fromkeys(entry for test in tests for entry in test))

    def judge(runs: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
        def compare(name: str) -> list[Compared]:
            pairs = runs.pairs(names, name)
            return [final_below(runs, name, a, b, pairs, measure) for a, b in tests]

        found = where_run(EXPERIMENTS, compare)
        comparisons = [one for compared in found.values() for one in compared]
        return all_hold(comparisons, problems=problems_in(found, "three"))

    return judges(Criterion(number, text, criterion, {}), ("plain loss",))(judge)


fewer_measurements = _claim(
    18,
    "Ours: at equal back-propagations, measuring every fourth mini-batch is better than measuring "
    "every one.",
    f"The final plain loss of Step-Tuned SGD with T = 4 is below that with T = 1, {WHERE}.",
    ("every-4", TUNED),
)
relative_bounds = _claim(
    19,
    "Ours: relative bounds are better than absolute ones.",
    f"The final plain loss of Step-Tuned SGD with relative bounds is below that with absolute "
    f"bounds, both with T = 1, {WHERE}.",
    ("relative", TUNED),
)
beats_sgd = _claim(
    20,
    "Ours: with T = 4 and relative bounds, Step-Tuned SGD is better than SGD.",
    f"Its final plain loss is below SGD's, {WHERE}.",
    ("relative-4", "sgd"),
)
tuned_bases = _claim(
    21,
    "Ours: momentum and AdamW are better with a tuned step than without.",
    f"With StepTuned around them, T = 4 and relative bounds, the final plain loss of each is below "
    f"that without, {WHERE}.",
    ("step-tuned-momentum-4", "momentum"),
    ("step-tuned-adamw-4", "adamw"),
)
