"""The rules and the criteria of the package, fixed before the runs that they judge.

``criteria_hash`` is stored in the environment of every run, so that a page can say which runs were
made under other criteria. The thresholds of claim 16 are explained in experiments/rate.toml.
"""

import functools
import hashlib
from dataclasses import asdict, dataclass

from steptuned.lab.spec import canonical


@dataclass(frozen=True)
class Criterion:
    """A claim and the condition under which it counts as reproduced."""

    number: int
    text: str
    criterion: str
    thresholds: dict[str, float]


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


@functools.cache
def criteria_hash() -> str:
    """A fingerprint of the rules, texts and thresholds by which the packaged claims are judged.

    It never changes: a claim that is added later brings its own criterion.
    """
    content = canonical([RULES, [asdict(criterion) for criterion in CRITERIA]])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def criterion(number: int) -> Criterion:
    """A criterion of the package."""
    for one in CRITERIA:
        if one.number == number:
            return one
    raise ValueError(f"there is no criterion {number} in CRITERIA; give a Criterion instead")
