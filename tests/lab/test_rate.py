"""The rate of convergence."""

import numpy as np
import pytest

from steptuned.lab.experiment import Entry
from steptuned.lab.rate import rate_of
from steptuned.lab.search import Group, Trial


class Logs:
    def __init__(self, exponent, noise):
        self.exponent, self.noise = exponent, noise

    def records(self, seed):
        generator = np.random.default_rng(seed)
        ks = np.unique(np.geomspace(1, 1e5, 200).astype(int))
        values = ks**self.exponent * np.exp(self.noise * generator.standard_normal(len(ks)))
        return [{"batches": int(k), "gradient": float(v)} for k, v in zip(ks, values, strict=True)]


@pytest.mark.parametrize(
    ("exponent", "verdict"), [(-0.8, "supported"), (-0.5, "supported"), (-0.2, "not supported")]
)
def test_the_rate_is_found_and_judged_as_an_upper_bound(exponent, verdict):
    entry = Entry(name="a", method="step-tuned-sgd", label="a", axes={"delta": [0.001]})
    group = Group(entry, 0, [], Trial({"delta": 0.001}, None), dict(enumerate(range(20))))
    fit = rate_of(group, Logs(exponent, 0.05))
    assert fit.slope == pytest.approx(exponent, abs=0.05)
    assert fit.low <= fit.slope + 0.01
    assert fit.slope - 0.01 <= fit.high
    assert fit.verdict == verdict
    low, high = fit.band
    assert (low <= fit.smallest).mean() > 0.9
    assert (fit.smallest <= high).mean() > 0.9
    assert (low < high).all()


def test_a_rate_is_not_judged_before_the_gradient_has_decreased():
    entry = Entry(name="a", method="step-tuned-sgd", label="a", axes={"delta": [0.001]})
    group = Group(entry, 0, [], Trial({"delta": 0.001}, None), dict(enumerate(range(4))))
    assert rate_of(group, Logs(0.5, 0.0)).verdict.startswith("k too small")
