"""The algorithms of the paper once more: NumPy, float64, line by line as printed, sharing nothing with the package.

Every function yields, so that a test can compare the iterates one by one. ``gradient(k, theta)`` is the gradient on the
mini-batch of iteration k. ``alpha`` may be a vector: that is what parameter groups with different learning rates are.
"""

import numpy as np


def step_tuned_sgd(
    theta, gradient, *, alpha, nu=2.0, beta=0.9, m=0.5, M=2.0, delta=0.001, decay_every=1, decay=0.0, sign=1.0, clip=np.inf
):
    """Algorithm 2. Yields (theta_{k+1/2}, theta_{k+1}, gamma_{k+1}, curvature).

    ``decay`` is the weight decay lambda, which may be a vector; ``sign`` is -1 to maximise; ``clip`` bounds the norm that a
    gradient has in an update.
    """

    def of_J(k, theta):
        return sign * gradient(k, theta) + decay * theta

    def clipped(g):
        return g * min(1.0, clip / (np.linalg.norm(g) + 1e-6))

    G = np.zeros_like(theta)
    gamma = 1.0
    k = 0
    while True:
        factor = 1.0 if decay_every is None else (1 + k // decay_every) ** (1 / 2 + delta)
        g0 = of_J(k, theta)
        theta_half = theta - alpha / factor * gamma * clipped(g0)
        g1 = of_J(k, theta_half)
        theta_next = theta_half - alpha / factor * gamma * clipped(g1)
        dtheta = theta_half - theta
        dg = g1 - g0
        G = beta * G + (1 - beta) * dg
        G_hat = G / (1 - beta ** (k + 1))
        curvature = G_hat @ dtheta
        gamma = dtheta @ dtheta / curvature if curvature > 0 else nu
        gamma = min(max(gamma, m), M)
        theta = theta_next
        yield theta_half, theta_next, gamma, curvature
        k += 1


def step_tuned_gd(theta, gradient, *, alpha, nu):
    """Algorithm 1. Yields (theta_{k+1}, gamma_k)."""
    before, theta = theta, theta - alpha * gradient(0, theta)
    yield theta, 1.0
    k = 1
    while True:
        dg = gradient(k, theta) - gradient(k - 1, before)
        dtheta = theta - before
        gamma = dtheta @ dtheta / (dg @ dtheta) if dg @ dtheta > 0 else nu
        before, theta = theta, theta - alpha * gamma * gradient(k, theta)
        yield theta, gamma
        k += 1


def barzilai_borwein(theta, gradient, *, alpha):
    """Algorithm 1 with absolute values. Yields (theta_{k+1}, gamma_k)."""
    before, theta = theta, theta - alpha * gradient(0, theta)
    yield theta, 1.0
    k = 1
    while True:
        dg = gradient(k, theta) - gradient(k - 1, before)
        dtheta = theta - before
        gamma = dtheta @ dtheta / abs(dg @ dtheta)
        before, theta = theta, theta - alpha * gamma * gradient(k, theta)
        yield theta, gamma
        k += 1


def armijo(theta, J, gradient, *, alpha, slope, shrink, max_backtracks):
    """Gradient descent with backtracking. Yields (theta_{k+1}, t, evaluations of J so far)."""
    evaluations = 0
    k = 0
    while True:
        g = gradient(k, theta)
        start = J(theta)
        evaluations += 1
        t = alpha
        for _ in range(max_backtracks + 1):
            evaluations += 1
            if J(theta - t * g) <= start - slope * t * (g @ g):
                theta = theta - t * g
                break
            t *= shrink
        else:
            t = 0.0
        yield theta, t, evaluations
        k += 1


def gradient_variation(theta, gradient, variation, *, alpha, nu, m, M, delta):
    """What Algorithms 3 to 5 have in common. ``variation(k, theta_k, theta_{k-1}, step)`` is G_k, with ``step`` the one that
    led from theta_{k-1} to theta_k. Yields (theta_{k+1}, gamma_k)."""
    gamma, step = 1.0, alpha * 1.0
    before, theta = theta, theta - step * gradient(0, theta)
    yield theta, gamma
    k = 1
    while True:
        dtheta = theta - before
        G = variation(k, theta, before, step)
        gamma = dtheta @ dtheta / (G @ dtheta) if G @ dtheta > 0 else nu
        gamma = min(max(gamma, m), M)
        step = alpha / (k + 1) ** (1 / 2 + delta) * gamma
        before, theta = theta, theta - step * gradient(k, theta)
        yield theta, gamma
        k += 1


def stochastic_gv(theta, gradient, **options):
    """Algorithm 3."""
    return gradient_variation(
        theta, gradient, lambda k, theta, before, step: gradient(k, theta) - gradient(k - 1, before), **options
    )


def exact_gv(theta, gradient, full_gradient, **options):
    """Algorithm 4."""
    return gradient_variation(
        theta, gradient, lambda k, theta, before, step: full_gradient(theta) - full_gradient(before), **options
    )


def expected_gv(theta, gradient, expectation, **options):
    """Algorithm 5."""
    return gradient_variation(theta, gradient, lambda k, theta, before, step: -step * expectation(before), **options)
