"""The split of a vector into tensors and groups, and their memory layout, must not matter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from steptuned import StepTunedSGD

pytestmark = pytest.mark.usefixtures("path")

SIZE = 24
ITERATIONS = 40
_rng = np.random.default_rng(0)
MATRICES = _rng.standard_normal((ITERATIONS, SIZE, SIZE)) / SIZE**0.5
TARGETS = _rng.standard_normal((ITERATIONS, SIZE))
START = _rng.standard_normal(SIZE)


def gradient(k, theta):
    """The gradient of the sum of phi(A_k theta - c_k), with phi(t) = t^2 / (1 + t^2).

    Like the paper's regression, it has curvature of both signs.
    """
    t = MATRICES[k] @ theta - TARGETS[k]
    return MATRICES[k].T @ (2 * t / (1 + t**2) ** 2)


OPTIONS = {"lr": 0.1, "bounds": (0.2, 8.0), "nu": 5.0, "weight_decay": 0.01, "decay_every": 3}


def expected():
    twin = reference.step_tuned_sgd(
        START, gradient, alpha=0.1, m=0.2, M=8.0, nu=5.0, decay=0.01, decay_every=3
    )
    return [next(twin) for _ in range(ITERATIONS)]


EXPECTED = expected()


def assert_follows_the_twin(params, opt, order=None, start=0):
    """Drive the optimizer with the hand-written gradient of the joined vector.

    ``order`` has the positions of the elements of ``params`` in that vector.
    """
    order = np.arange(SIZE) if order is None else order

    def theta():
        vector = np.empty(SIZE)
        vector[order] = np.concatenate([p.detach().reshape(-1).numpy() for p in params])
        return vector

    def backward(k):
        parts = np.split(gradient(k, theta())[order], np.cumsum([p.numel() for p in params])[:-1])
        for p, part in zip(params, parts, strict=True):
            p.grad = torch.empty_like(p).copy_(torch.from_numpy(part).reshape(p.shape))

    for k in range(start, ITERATIONS):
        half, whole, gamma, *_ = EXPECTED[k]
        backward(k)
        opt.half_step()
        np.testing.assert_allclose(theta(), half, rtol=1e-10, atol=1e-11)
        backward(k)
        opt.step()
        np.testing.assert_allclose(theta(), whole, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(opt.gamma.item(), gamma, rtol=1e-10)


def tensor(values, shape=None):
    return torch.tensor(values).reshape(shape if shape is not None else (-1,)).requires_grad_()


def test_the_twin_has_both_signs_of_curvature_and_gammas_inside_the_bounds():
    gammas = np.array([gamma for _, _, gamma, *_ in EXPECTED])
    curvatures = np.array([curvature for *_, curvature in EXPECTED])
    assert (curvatures <= 0).any()
    assert (curvatures > 0).any()
    assert ((gammas > 0.2) & (gammas < 8.0) & (gammas != 5.0)).any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_into_tensors_groups_and_orders_gives_the_same(data):
    cuts = sorted(
        data.draw(st.lists(st.integers(0, SIZE), max_size=6))
    )  # a repeated cut makes an empty tensor
    parts = np.split(START, cuts)
    foreach = data.draw(st.sampled_from([None, True, False]))
    params = [tensor(part) for part in parts]
    ends = data.draw(
        st.lists(st.integers(1, len(params)), max_size=2).map(
            lambda ends: sorted({*ends, len(params)})
        )
    )
    groups = [{"params": params[a:b]} for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert_follows_the_twin(params, StepTunedSGD(groups, foreach=foreach, **OPTIONS))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("large", [1, 1 << 16])
def test_scalars_empty_and_shaped_tensors_give_the_same(foreach, large, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
    monkeypatch.setattr("steptuned.optim.flat.CHUNK", 5)
    params = [
        tensor(START[:1], ()),
        tensor(START[1:1], (0, 3)),
        tensor(START[1:13], (3, 4)),
        tensor(START[13:], (11, 1)),
    ]
    assert_follows_the_twin(params, StepTunedSGD(params, foreach=foreach, **OPTIONS))


def noncontiguous(values, kind):
    if kind == "channels_last":
        return (
            torch.tensor(values)
            .reshape(2, 3, 2, 2)
            .to(memory_format=torch.channels_last)
            .requires_grad_()
        )
    if kind == "channels_last_3d":
        return (
            torch.tensor(values)
            .reshape(1, 3, 2, 2, 2)
            .to(memory_format=torch.channels_last_3d)
            .requires_grad_()
        )
    if kind == "transposed":
        return torch.tensor(values).reshape(4, 6).t().contiguous().t().requires_grad_()
    wide = torch.zeros(SIZE, 2, dtype=torch.float64)
    wide[:, 0] = torch.tensor(values)
    return wide[:, 0].requires_grad_()


@pytest.mark.parametrize(
    "kind", ["channels_last", "channels_last_3d", "transposed", "strided with holes"]
)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("large", [1, 1 << 16])
@pytest.mark.parametrize("gradient_layout", ["as the parameter", "contiguous"])
def test_memory_layout_gives_the_same(kind, foreach, large, gradient_layout, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
    monkeypatch.setattr("steptuned.optim.flat.CHUNK", 5)
    p = noncontiguous(START, kind)
    opt = StepTunedSGD([p], foreach=foreach, **OPTIONS)
    for k in range(ITERATIONS):
        half, whole, gamma, *_ = EXPECTED[k]
        for i, target in enumerate((half, whole)):
            g = torch.from_numpy(gradient(k, p.detach().reshape(-1).numpy())).reshape(p.shape)
            p.grad = (
                torch.empty_like(p).copy_(g)
                if gradient_layout == "as the parameter"
                else g.contiguous()
            )
            opt.step() if i else opt.half_step()
            np.testing.assert_allclose(
                p.detach().reshape(-1).numpy(), target, rtol=1e-10, atol=1e-11
            )
        np.testing.assert_allclose(opt.gamma.item(), gamma, rtol=1e-10)


def test_frozen_parameters_beside_the_others_change_nothing():
    frozen, unused = (
        torch.ones(5, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64, requires_grad=True),
    )
    params = [tensor(START[:9]), tensor(START[9:])]
    opt = StepTunedSGD([params[0], frozen, unused, params[1]], **OPTIONS)
    assert_follows_the_twin(params, opt)
    assert torch.equal(frozen, torch.ones(5, dtype=torch.float64))
    assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
    assert frozen not in opt.state
    assert unused not in opt.state


@pytest.mark.parametrize("large", [1, 1 << 16])
def test_a_group_added_later_begins_with_G_zero(large, monkeypatch):
    """As if it had been there from the start with no gradient."""
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
    a, b = tensor(START[:16]), tensor(START[16:])

    def backward():
        theta = np.concatenate([a.detach().numpy(), b.detach().numpy()])
        g = gradient(len(history) // 2, theta)
        a.grad = torch.from_numpy(g[:16].copy())
        b.grad = torch.from_numpy(g[16:].copy()) if len(history) >= 20 else None

    trajectories = []
    for late in (False, True):
        a, b, history = tensor(START[:16]), tensor(START[16:]), []
        opt = StepTunedSGD(
            [a] if late else [{"params": [a]}, {"params": [b], "lr": 0.2}], **OPTIONS
        )
        for k in range(ITERATIONS):
            if late and k == 10:
                opt.add_param_group({"params": [b], "lr": 0.2})
            backward()
            opt.half_step()
            history.append(np.concatenate([a.detach().numpy(), b.detach().numpy()]))
            backward()
            opt.step()
            history.append(np.concatenate([a.detach().numpy(), b.detach().numpy()]))
        trajectories.append((np.array(history), opt.gamma.item()))
    np.testing.assert_allclose(trajectories[1][0], trajectories[0][0], rtol=1e-10)
    np.testing.assert_allclose(trajectories[1][1], trajectories[0][1], rtol=1e-10)


# Which parameters have a gradient in the first and in the second pass of each iteration.
PRESENCE = [
    ("abcd", "abcd"),
    ("abc", "abd"),
    ("ac", "ab"),
    ("abcd", "abcd"),
    ("ad", "ad"),
    ("abcd", "abcd"),
]


@pytest.mark.parametrize("large", [1, 1 << 16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_parameter_without_a_gradient_in_a_pass_counts_as_dg_zero(
    large, weight_decay, monkeypatch
):
    """Without both gradients, a parameter is neither moved nor decayed.

    Without one of them, only the other pass moves it. Its part of G fades in either case.
    """
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
    rng = np.random.default_rng(3)
    theta = {name: rng.standard_normal(4) for name in "abcd"}
    G = {name: np.zeros(4) for name in "abcd"}
    params = {name: tensor(value) for name, value in theta.items()}
    opt = StepTunedSGD(
        params.values(),
        lr=0.1,
        beta=0.6,
        bounds=(1e-3, 1e3),
        decay_every=None,
        weight_decay=weight_decay,
    )
    gamma = 1.0
    for k, (first, second) in enumerate(PRESENCE):
        raw = [{name: rng.standard_normal(4) for name in names} for names in (first, second)]
        used: list[dict] = [{}, {}]
        start = dict(theta)
        for i in (0, 1):
            for name, p in params.items():
                p.grad = torch.tensor(raw[i][name]) if name in raw[i] else None
                if name in raw[i]:
                    used[i][name] = raw[i][name] + weight_decay * theta[name]
                    theta[name] = theta[name] - 0.1 * gamma * used[i][name]
            if i == 0:
                opt.half_step()
                moved = {name: theta[name] - start[name] for name in theta}
            else:
                opt.step()
            for name, p in params.items():
                np.testing.assert_allclose(p.detach().numpy(), theta[name], rtol=1e-12, atol=1e-14)
        for name in theta:
            both = name in used[0] and name in used[1]
            G[name] = 0.6 * G[name] + 0.4 * (used[1][name] - used[0][name] if both else 0)
        curvature = sum(G[name] @ moved[name] for name in theta) / (1 - 0.6 ** (k + 1))
        square = sum(d @ d for d in moved.values())
        gamma = min(max(square / curvature if curvature > 0 else 2.0, 1e-3), 1e3)
        np.testing.assert_allclose(opt.curvature.item(), curvature / square, rtol=1e-10)
        np.testing.assert_allclose(opt.gamma.item(), gamma, rtol=1e-10)


def test_sparse_and_complex_gradients_are_refused_in_one_sentence():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    opt = StepTunedSGD(embedding.parameters(), lr=0.1)
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.half_step()
    assert torch.equal(embedding.weight, before)

    with pytest.raises(ValueError, match="StepTunedSGD does not support complex"):
        StepTunedSGD([torch.ones(3, dtype=torch.complex64, requires_grad=True)], lr=0.1)


@settings(max_examples=40, deadline=None)
@given(
    m=st.floats(0.01, 5.0),
    ratio=st.floats(1.0, 100.0),
    nu=st.floats(0.01, 100.0),
    beta=st.floats(0.0, 0.999),
    seed=st.integers(0, 2**16),
)
@pytest.mark.filterwarnings("ignore:nu=")
def test_gamma_stays_within_its_bounds(m, ratio, nu, beta, seed):
    torch.manual_seed(seed)
    theta = torch.randn(6, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, nu=nu, beta=beta, bounds=(m, m * ratio))
    for _ in range(15):
        for _ in opt.passes():
            theta.grad = torch.randn(6)
        assert m <= opt.gamma.item() <= m * ratio


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(1e-3, 1e3))
def test_gamma_does_not_depend_on_the_mini_batch_it_is_used_on(seed, scale):
    """The gamma of iteration k is known before its mini-batch.

    With another mini-batch, both half steps still use the same gamma.
    """
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(8, 2, 5, generator=generator, dtype=torch.float64)
    gammas = []
    for factor in (1.0, scale):
        theta = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        opt = StepTunedSGD([theta], lr=0.1, decay_every=None, bounds=(1e-6, 1e6), nu=3.0)
        for k in range(8):
            if k == 7:
                gamma = opt.gamma.item()
            for i in opt.passes():
                before = theta.detach().clone()
                theta.grad = gradients[k, i] * (factor if k == 7 else 1.0)
                if i == 1:
                    half = theta.detach().clone()
            if k == 7:
                step = 0.1 * gamma * factor * gradients[k, 1]
                rounding = 1e-15 * max(before.abs().max(), step.abs().max())
                torch.testing.assert_close(before - theta.detach(), step, rtol=0, atol=rounding)
                gammas.append(gamma)
                assert torch.equal(before, half)
    assert gammas[0] == gammas[1]
