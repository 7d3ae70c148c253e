"""The gamma diagnostics of a record against the twin.

They are quartiles and shares over the iterations since the last record.
"""

from itertools import islice

import numpy as np
import pytest
import torch

import reference
from steptuned.lab.driver import Driver, quartiles
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS

METHODS_WITH_T = ("step-tuned-variant", "step-tuned-momentum")
BOUNDS = (0.05, 8.0)
NU = 5.0


def regression():
    problem = PROBLEMS["regression"]
    return problem.from_dict({}, 3, torch.device("cpu"))


def driver_of(method):
    problem = regression()
    hyper = {**METHODS[method].defaults, "lr": 0.3, "nu": NU, "bounds": list(BOUNDS)}
    return Driver(method, problem, hyper | ({"decay": "iteration"} if "decay" in hyper else {}))


def gradient_of(problem, iterations):
    """The gradient of mini-batch k at theta, by autograd of a loss that is written here."""
    rows = [problem.draw() for _ in range(iterations)]

    def gradient(k, theta):
        A, b = problem.A[rows[k]].numpy(), problem.b[rows[k]].numpy()
        t = A @ theta - b
        return A.T @ (2 * t / (1 + t**2) ** 2) / len(b)

    return gradient


def expected(values, m=BOUNDS[0], M=BOUNDS[1]):
    step, raw, curvature, gamma = (np.array(column) for column in zip(*values, strict=True))
    quartiles = {
        f"{name} {word}": value
        for name, column in (("gamma", gamma), ("raw gamma", raw))
        for word, value in zip(
            ("low", "median", "high"), np.quantile(column, (0.25, 0.5, 0.75)), strict=True
        )
    }
    shares = {
        "negative curvature": np.mean(curvature <= 0),
        "at lower": np.mean(raw <= m),
        "at upper": np.mean(raw >= M),
    }
    return {
        **quartiles,
        **shares,
        "effective lr": np.median(step),
        "gamma": gamma[-1],
        "curvature": curvature[-1],
    }


@pytest.mark.parametrize("resumed", [False, True])
def test_the_diagnostics_of_a_record_match_the_twin(resumed):
    driver = driver_of("step-tuned-sgd")
    other = regression()
    start = other.theta.detach().numpy().copy()
    twin = reference.step_tuned_sgd(
        start, gradient_of(other, 90), alpha=0.3, nu=NU, m=BOUNDS[0], M=BOUNDS[1]
    )
    values = [
        (step, raw, curvature, gamma) for _, _, gamma, step, raw, curvature in islice(twin, 90)
    ]
    assert driver.diagnostics().keys() == {"gamma", "curvature"}, "nothing was measured yet"
    for begin, end in ((0, 1), (1, 40), (40, 90)):
        for i in range(2 * begin, 2 * end):
            if resumed and i == begin + end:  # in the middle, between two records
                state, problem_state = driver.state_dict(), driver.problem.state_dict()
                driver = driver_of("step-tuned-sgd")
                driver.problem.load_state_dict(problem_state)
                driver.load_state_dict(state)
            driver.advance()
        found = driver.diagnostics()
        wanted = expected(values[begin:end])
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    assert 0 < found["negative curvature"] < 1


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("method", METHODS_WITH_T)
def test_the_history_of_a_variant_has_what_the_optimizer_shows_after_each_iteration(
    method, resumed
):
    hyper = {**METHODS[method].defaults, "lr": 0.3, "tune_every": 3}
    hyper |= {"relative": True} if "relative" in hyper else {}
    driver, seen = Driver(method, regression(), hyper), []
    for _ in range(40):
        before = driver.batches
        driver.advance()
        if driver.batches > before and seen and resumed:
            state, problem_state = driver.state_dict(), driver.problem.state_dict()
            driver = Driver(method, regression(), hyper)
            driver.problem.load_state_dict(problem_state)
            driver.load_state_dict(state)
        if not driver.optimizer.pending:
            opt = driver.optimizer
            step = opt.param_groups[0]["effective_lr"]
            seen.append([float(x) for x in (opt.gamma, opt.raw_gamma, opt.curvature, step)])
    gamma, raw, curvature, steps = zip(*seen, strict=True)
    found = driver.diagnostics()
    words = ("low", "median", "high")
    assert [found[f"gamma {word}"] for word in words] == quartiles(list(gamma))
    assert [found[f"raw gamma {word}"] for word in words] == quartiles(list(raw))
    assert found["negative curvature"] == np.mean([value <= 0 for value in curvature])
    assert found["effective lr"] == quartiles(list(steps))[1]
    assert found["reference"] == driver.optimizer.reference.item()
    assert len({*gamma}) > 3, "gamma has moved"


def test_the_gradient_variation_methods_have_the_same_diagnostics():
    driver = driver_of("stochastic-gv")
    other = regression()
    options = {"alpha": 0.3, "nu": NU, "m": BOUNDS[0], "M": BOUNDS[1], "delta": 0.001}
    twin = reference.stochastic_gv(
        other.theta.detach().numpy().copy(), gradient_of(other, 50), **options
    )
    values = [(step, raw, curvature, gamma) for _, gamma, step, raw, curvature in islice(twin, 50)]
    driver.advance()
    first = driver.diagnostics()
    assert "raw gamma median" not in first, "the first iteration measures nothing"
    assert (first["gamma"], first["gamma median"], first["at upper"]) == (1.0, 1.0, 0.0)
    for _ in range(49):
        driver.advance()
    found = driver.diagnostics()
    for key, value in expected(values[1:]).items():
        assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


def test_methods_without_bounds_log_no_shares_at_bounds():
    problem = regression()
    driver = Driver("step-tuned-gd", problem, dict(METHODS["step-tuned-gd"].defaults))
    for _ in range(5):
        driver.advance()
    found = driver.diagnostics()
    assert "raw gamma median" in found
    assert "at lower" not in found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10, 57, 400])
def test_quartiles_have_the_bits_of_torch(size):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(100, size, generator=generator, dtype=torch.float64).exp()
    values[90:, -1] = torch.inf
    levels = torch.tensor((0.25, 0.5, 0.75), dtype=torch.float64)
    found = torch.tensor([quartiles(row.tolist()) for row in values], dtype=torch.float64)
    torch.testing.assert_close(
        found, values.quantile(levels, dim=1).T, rtol=0, atol=0, equal_nan=True
    )
