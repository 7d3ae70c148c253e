"""The problems: gradients, mini-batch streams, and the same data for all methods of a seed."""

import copy

import numpy as np
import pytest
import torch

from problems import Regression as Twin
from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem, Stream
from steptuned.lab.problems.regression import Regression
from steptuned.lab.spec import derive_seed

CPU = torch.device("cpu")
MINI_BATCH = [name for name, method in METHODS.items() if not method.full_batch]


def make(name="regression", seed=0, **options):
    return PROBLEMS[name].from_dict(options, seed, CPU)


def test_the_regression_matches_its_twin():
    problem = make(rows=60, columns=8, batch=6)
    twin = Twin(n=60, p=8, batch=6)
    twin.A, twin.b = problem.A.numpy(), problem.b.numpy()
    theta = problem.theta.detach().numpy()
    np.testing.assert_allclose(problem.evaluate()["loss"], twin.value(theta), rtol=1e-12)
    np.testing.assert_allclose(problem.full_gradient()[0], twin.full_gradient(theta), rtol=1e-10)
    np.testing.assert_allclose(problem.expectation()[0], twin.expectation(theta), rtol=1e-10)
    (gradient,) = torch.autograd.grad(problem.loss(None), problem.theta)
    np.testing.assert_allclose(gradient, twin.full_gradient(theta), rtol=1e-10)


def test_the_regression_takes_the_rows_of_each_mini_batch():
    problem = make()
    for _ in range(3):
        batch = problem.draw()
        losses = [problem.loss(batch), problem.loss(batch), problem.loss(batch.clone())]
        square = (problem.A[batch] @ problem.theta - problem.b[batch]) ** 2
        assert all(loss == (square / (1 + square)).mean() for loss in losses)


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("batch", [None, 1, 7, 50])
def test_the_regression_back_propagates_the_bits_of_autograd(batch, weight):
    problem = make(batch=batch or 50)
    for scale in (1.0, 0.1, 300.0, 0.0):
        with torch.no_grad():
            problem.theta.mul_(scale)
        rows = None if batch is None else problem.draw()
        loss = Problem.backward(problem, rows, weight)
        gradient, problem.theta.grad = problem.theta.grad, None
        assert torch.equal(problem.backward(rows, weight), loss)
        assert torch.equal(problem.theta.grad, gradient)
        problem.theta.grad = None


def test_the_regression_has_the_sizes_and_distributions_of_the_paper():
    problem = make()
    assert problem.A.shape == (500, 30)
    assert abs(problem.A.mean()) < 0.03
    assert abs(problem.A.std() - 1) < 0.03
    large = make(rows=20000, columns=4)
    # b has variance 4 |A_n|^2 + 9 + 0.3 * 0.7 given z, and mean 0.3
    z = torch.linalg.lstsq(large.A, large.b - 0.3).solution
    residual = large.b - large.A @ z
    assert abs(residual.mean() - 0.3) < 0.1
    assert abs(residual.std() - (9 + 0.21) ** 0.5) < 0.1


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_method_of_a_seed_starts_at_the_same_point_and_sees_the_same_mini_batches(
    problem, small
):
    small_text = {"rows": 100, "test_rows": 10, "context": 8, "width": 8, "heads": 2}
    options = {
        "images": {"network": "lenet", "batch": 64},
        "autoencoder": {"batch": 64},
        "text": small_text,
    }.get(problem, {})
    seen = []
    for name in MINI_BATCH:
        if name.endswith("-gv") and problem != "regression":
            continue
        subject = make(problem, seed=7, **options)
        driver = Driver(name, subject, METHODS[name].defaults)
        start = torch.cat([p.detach().reshape(-1).clone() for p in subject.parameters])
        batches = []
        while len(batches) < 30:
            driver.advance()
            batches.append(driver._batch.tolist())
            if driver._pass == 1:
                driver.advance()
                assert driver._batch.tolist() == batches[-1], (
                    "both passes are on the same mini-batch"
                )
        seen.append((start, batches))
    for start, batches in seen[1:]:
        assert torch.equal(start, seen[0][0])
        assert batches == seen[0][1]


def test_another_seed_is_another_start_and_other_mini_batches():
    a, b = make(seed=0), make(seed=1)
    assert not torch.equal(a.theta, b.theta)
    assert torch.equal(a.A, b.A), "but the same problem"
    assert a.stream.next().tolist() != b.stream.next().tolist()
    assert not torch.equal(make(instance=1).A, a.A)
    assert torch.equal(make(instance=1).theta, a.theta)


def test_a_reshuffled_stream_goes_through_all_rows_and_keeps_the_last_short_batch():
    stream = Stream(10, 4, reshuffled=True, seed_parts=[1])
    assert stream.per_epoch == 3
    for _ in range(3):
        batches = [stream.next() for _ in range(3)]
        assert [len(b) for b in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))


def test_an_independent_stream_draws_subsets_without_repetition():
    stream = Stream(10, 4, reshuffled=False, seed_parts=[1])
    batches = [stream.next().tolist() for _ in range(200)]
    assert all(len(set(batch)) == 4 for batch in batches)
    counts = np.bincount(np.ravel(batches), minlength=10)
    assert counts.min() > 50


@pytest.mark.parametrize("batch", [4, 10, 25])
@pytest.mark.parametrize("reshuffled", [True, False])
def test_a_stream_draws_one_permutation_per_epoch_or_mini_batch(reshuffled, batch):
    """Runs must keep their numbers, so drawing ahead gives the mini-batches of this slow form."""
    stream = Stream(10, batch, reshuffled=reshuffled, seed_parts=[1])
    generator = torch.Generator().manual_seed(derive_seed("data order", 1))
    expected = []
    while len(expected) < 100:
        order = torch.randperm(10, generator=generator).tolist()
        starts = range(0, 10, batch) if reshuffled else [0]
        expected += [order[start : start + batch] for start in starts]
    assert [stream.next().tolist() for _ in expected] == expected


@pytest.mark.parametrize("batch", [4, 25])
@pytest.mark.parametrize("reshuffled", [True, False])
def test_a_stream_resumes_from_its_state(reshuffled, batch):
    stream = Stream(10, batch, reshuffled=reshuffled, seed_parts=[1])
    for _ in range(70):
        state = stream.state_dict()
        stream.next()
        expected = copy.deepcopy(stream)
        other = Stream(10, batch, reshuffled=reshuffled, seed_parts=[2])
        other.load_state_dict(state)
        other.next()
        for _ in range(40):
            assert other.next().tolist() == expected.next().tolist()


def test_an_independent_stream_resumes_from_a_state_without_mini_batches_drawn_ahead():
    """Such states are in checkpoints of earlier versions."""
    generator = torch.Generator().manual_seed(5)
    stream = Stream(10, 4, reshuffled=False, seed_parts=[1])
    stream.next()
    order = torch.empty(0, dtype=torch.int64)
    stream.load_state_dict({"generator": generator.get_state(), "order": order})
    expected = [torch.randperm(10, generator=generator)[:4].tolist() for _ in range(9)]
    assert [stream.next().tolist() for _ in range(9)] == expected


def test_the_epoch_decay_of_both_methods_is_by_back_propagations():
    """q = 1 + back-propagations so far // per epoch, taken at the start of an iteration."""
    problem = make("digits")
    per_epoch = problem.stream.per_epoch
    assert per_epoch == 23
    sgd = Driver("sgd", problem, {**METHODS["sgd"].defaults, "lr": 1.0, "delta": 0.0})
    tuned = Driver(
        "step-tuned-sgd",
        make("digits"),
        {
            **METHODS["step-tuned-sgd"].defaults,
            "lr": 1.0,
            "delta": 0.0,
            "bounds": [1.0, 1.0],
            "nu": 1.0,
        },
    )
    for done in range(80):
        q = 1 + done // per_epoch
        assert sgd.optimizer.param_groups[0]["lr"] == pytest.approx(q**-0.5)
        sgd.advance()
        tuned.advance()
        first = done - done % 2  # the iteration's first back-propagation
        assert tuned.optimizer.param_groups[0]["effective_lr"].item() == pytest.approx(
            (1 + first // per_epoch) ** -0.5
        )


def test_the_logged_loss_includes_the_regularisation():
    problem = make("digits", weight_decay=0.5)
    record = problem.evaluate()
    penalty = 0.25 * sum(p.square().sum().item() for p in problem.parameters)
    assert record["loss"] == pytest.approx(record["plain loss"] + penalty)
    assert 0 <= record["accuracy"] <= 1


def test_expected_gv_uses_the_expectation_of_the_problem(monkeypatch):
    problem = make()
    driver = Driver("expected-gv", problem, METHODS["expected-gv"].defaults)
    calls = []
    monkeypatch.setattr(
        Regression,
        "expectation",
        lambda self: calls.append(1) or [torch.ones(30, dtype=torch.float64)],
    )
    driver.optimizer._ask = problem.expectation
    driver.advance()
    assert calls
