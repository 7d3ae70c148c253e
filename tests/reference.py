"""Literal twins of the paper's algorithms: NumPy, float64, line by line as printed.

They share no code with the package. Every function is a generator, so that a test can compare the
iterates one by one. ``gradient(k, theta)`` is the gradient on the mini-batch of iteration k.
``alpha`` may be a vector: it then stands for parameter groups with different learning rates.
"""

import numpy as np


def step_tuned_sgd(
    theta,
    gradient,
    *,
    alpha,
    nu=2.0,
    beta=0.9,
    m=0.5,
    M=2.0,
    delta=0.001,
    decay_every=1,
    decay=0.0,
    sign=1.0,
    clip=np.inf,
):
    """Algorithm 2.

    Yields (theta_{k+1/2}, theta_{k+1}, gamma_{k+1}, step_k, raw gamma_{k+1}, curvature). The raw
    gamma is the one before clipping; the curvature is <G, dtheta> / |dtheta|^2.

    ``decay`` is the weight decay lambda, which may be a vector; ``sign`` is -1 to maximise;
    ``clip`` bounds the norm of a gradient in an update.
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
        step = alpha / factor * gamma
        theta_half = theta - step * clipped(g0)
        g1 = of_J(k, theta_half)
        theta_next = theta_half - step * clipped(g1)
        dtheta = theta_half - theta
        dg = g1 - g0
        G = beta * G + (1 - beta) * dg
        G_hat = G / (1 - beta ** (k + 1))
        curvature = G_hat @ dtheta
        raw = dtheta @ dtheta / curvature if curvature > 0 else nu
        gamma = min(max(raw, m), M)
        theta = theta_next
        yield theta_half, theta_next, gamma, step, raw, curvature / (dtheta @ dtheta)
        k += 1


class StepTunedSGDByPass:
    """Algorithm 2 one pass at a time, on several tensors, with what can go wrong in between.

    A tensor may lack a gradient in either pass: then its part of dg is zero. Gradients may be
    non-finite: the update is that of SGD, and gamma stays. A pass may overflow under a gradient
    scaler: then it moves nothing, and the iteration measures nothing and is not counted.
    """

    def __init__(self, *, nu, beta, m, M, delta, decay_every, clip=np.inf):
        self.nu, self.beta, self.m, self.M, self.delta, self.decay_every, self.clip = (
            nu,
            beta,
            m,
            M,
            delta,
            decay_every,
            clip,
        )
        self.alpha, self.decay, self.sign = [], [], []  # one for each group
        self.group, self.theta, self.G = [], [], []  # one for each tensor
        self.k, self.gamma, self.ignored, self.negative = 0, 1.0, 0, 0
        self.cancel()

    def add_group(self, thetas, *, alpha, decay=0.0, sign=1.0):
        self.group += [len(self.alpha)] * len(thetas)
        self.alpha.append(alpha)
        self.decay.append(decay)
        self.sign.append(sign)
        self.theta += thetas
        self.G += [np.zeros_like(theta) for theta in thetas]

    def cancel(self):
        """Forget the first pass. Its update of the parameters stays."""
        self.g0, self.dtheta, self.sound = {}, {}, True

    def first(self, gradients, overflow=False):
        """theta_k to theta_{k+1/2}. ``gradients`` has the gradients by index of their tensor."""
        factor = (
            1.0
            if self.decay_every is None
            else (1 + self.k // self.decay_every) ** (1 / 2 + self.delta)
        )
        self.step = [alpha / factor * self.gamma for alpha in self.alpha]
        self.sound = not overflow
        self.g0 = self._of_J(gradients, overflow)
        self.dtheta = self._move(self.g0)

    def second(self, gradients, overflow=False):
        """Update theta_{k+1/2} to theta_{k+1}, G and k. The caller sets gamma and handles rounding.

        Returns None after an overflow, else dg by the index of its tensor, <G_hat, dtheta> and
        |dtheta|^2.
        """
        g1 = self._of_J(gradients, overflow)
        self._move(g1)
        if overflow or not self.sound:
            return None
        dg = {i: g1[i] - self.g0[i] for i in self.g0.keys() & g1.keys()}
        for i, G in enumerate(self.G):
            self.G[i] = self.beta * G + (1 - self.beta) * dg.get(i, 0.0)
        G_hat = [G / (1 - self.beta ** (self.k + 1)) for G in self.G]
        self.k += 1
        curvature = sum(np.sum(G_hat[i] * d) for i, d in self.dtheta.items())
        return dg, curvature, sum(np.sum(d * d) for d in self.dtheta.values())

    def clipped(self, gamma):
        return min(max(gamma, self.m), self.M)

    def _of_J(self, gradients, overflow):
        """The gradients of the function that is minimised."""
        return {
            i: np.zeros_like(g) if overflow else self._with_decay(i, g)
            for i, g in gradients.items()
        }

    def _with_decay(self, i, g):
        decay = self.decay[self.group[i]]
        return self.sign[self.group[i]] * g + (
            decay * self.theta[i] if decay else 0.0
        )  # not 0 times infinity

    def _move(self, gradients):
        norm = np.sqrt(sum(np.sum(g * g) for g in gradients.values()))
        shorter = np.minimum(1.0, self.clip / (norm + 1e-6)) if np.isfinite(self.clip) else 1.0
        moved = {i: -self.step[self.group[i]] * shorter * g for i, g in gradients.items()}
        for i, move in moved.items():
            self.theta[i] = self.theta[i] + move
        return moved


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
    """What Algorithms 3 to 5 have in common.

    ``variation(k, theta_k, theta_{k-1}, step)`` is G_k, where ``step`` led from theta_{k-1} to
    theta_k. Yields (theta_{k+1}, gamma_k, step_k, raw gamma_k, curvature).
    """
    gamma, step = 1.0, alpha * 1.0
    before, theta = theta, theta - step * gradient(0, theta)
    yield theta, gamma, step, np.nan, np.nan
    k = 1
    while True:
        dtheta = theta - before
        G = variation(k, theta, before, step)
        raw = dtheta @ dtheta / (G @ dtheta) if G @ dtheta > 0 else nu
        gamma = min(max(raw, m), M)
        step = alpha / (k + 1) ** (1 / 2 + delta) * gamma
        before, theta = theta, theta - step * gradient(k, theta)
        yield theta, gamma, step, raw, G @ dtheta / (dtheta @ dtheta)
        k += 1


def stochastic_gv(theta, gradient, **options):
    """Algorithm 3."""
    return gradient_variation(
        theta,
        gradient,
        lambda k, theta, before, step: gradient(k, theta) - gradient(k - 1, before),
        **options,
    )


def exact_gv(theta, gradient, full_gradient, **options):
    """Algorithm 4."""
    return gradient_variation(
        theta,
        gradient,
        lambda k, theta, before, step: full_gradient(theta) - full_gradient(before),
        **options,
    )


def expected_gv(theta, gradient, expectation, **options):
    """Algorithm 5."""
    return gradient_variation(
        theta, gradient, lambda k, theta, before, step: -step * expectation(before), **options
    )


def variant(
    theta,
    gradient,
    *,
    alpha,
    T=1,
    relative=False,
    groups=None,
    divide=None,
    nu=2.0,
    beta=0.9,
    m=0.5,
    M=2.0,
    delta=0.001,
    decay_every=None,
    decay=0.0,
    clip=np.inf,
):
    """Algorithm 2 with its variants.

    Yields (theta_{k+1/2} or None, theta_{k+1}, gammas, raw gammas).

    ``T``: every T-th mini-batch is used twice and measured, the others once. For T > 1 each
    difference is divided by its step before it is averaged; ``divide`` overrides that. Where the
    step is zero, G stays as it is; a gamma whose steps are all zero is not measured.
    ``relative``: gamma is the raw gamma over its running geometric mean.
    ``groups``: lists of indices, each with a gamma of its own; one list with all of them if None.
    ``alpha`` may be a function of k: a schedule.
    """
    divide = T > 1 if divide is None else divide
    groups = [np.arange(len(theta))] if groups is None else groups
    G = np.zeros_like(theta)
    gamma, raw = np.ones(len(groups)), np.full(len(groups), np.nan)
    log_mean, positive = np.zeros(len(groups)), np.zeros(len(groups), int)
    k, n = 0, np.zeros(len(groups), int)
    while True:
        factor = 1.0 if decay_every is None else (1 + k // decay_every) ** (1 / 2 + delta)
        step = np.zeros_like(theta) + (alpha(k) if callable(alpha) else alpha) / factor
        for i, group in enumerate(groups):
            step[group] *= gamma[i]
        g0 = gradient(k, theta) + decay * theta
        s0 = step * min(1.0, clip / (np.linalg.norm(g0) + 1e-6))
        if k % T != 0:
            theta = theta - s0 * g0
            yield None, theta, gamma.copy(), raw.copy()
            k += 1
            continue
        theta_half = theta - s0 * g0
        g1 = gradient(k, theta_half) + decay * theta_half
        s1 = step * min(1.0, clip / (np.linalg.norm(g1) + 1e-6))
        dtheta, dg = theta_half - theta, g1 - g0
        theta = theta_half - s1 * g1
        unit = s0 if divide else np.ones_like(theta)
        still = unit == 0
        G[~still] = beta * G[~still] + (1 - beta) * (dg[~still] / unit[~still])
        for i, group in enumerate(groups):
            if still[group].all():
                raw[i] = np.nan
                continue
            G_hat = unit * G / (1 - beta ** (n[i] + 1))
            n[i] += 1
            curvature = G_hat[group] @ dtheta[group]
            raw[i] = tuned = dtheta[group] @ dtheta[group] / curvature if curvature > 0 else nu
            if relative and curvature > 0:
                log_mean[i] = 0.99 * log_mean[i] + 0.01 * np.log(raw[i])
                positive[i] += 1
                tuned = raw[i] / np.exp(log_mean[i] / (1 - 0.99 ** positive[i]))
            gamma[i] = min(max(tuned, m), M)
        yield theta_half, theta, gamma.copy(), raw.copy()
        k += 1


def step_tuned(
    theta,
    gradient,
    base,
    *,
    alpha,
    T=8,
    relative=True,
    groups=None,
    nu=2.0,
    beta=0.9,
    m=0.5,
    M=2.0,
    decay=0.0,
    sign=1.0,
    clip=np.inf,
):
    """Any optimizer with a tuned step.

    Yields (theta_{k+1/2} or None, theta_{k+1}, gammas, raw gammas).

    ``base(theta, g)`` is the base's update u per unit of learning rate, at theta with the gradient
    g of the loss; it changes its own state. ``decay`` is the weight decay that belongs to J, so not
    a decoupled one; ``sign`` is -1 to maximise. Where the step is zero and T > 1, G stays as it is;
    a gamma whose steps are all zero is not measured.
    """
    groups = [np.arange(len(theta))] if groups is None else groups
    G = np.zeros_like(theta)
    gamma, raw = np.ones(len(groups)), np.full(len(groups), np.nan)
    log_mean, positive = np.zeros(len(groups)), np.zeros(len(groups), int)
    k, n = 0, np.zeros(len(groups), int)

    def update(g, theta):
        shorter = min(1.0, clip / (np.linalg.norm(g) + 1e-6))
        return base(theta, shorter * g), shorter

    while True:
        s = np.zeros_like(theta) + (alpha(k) if callable(alpha) else alpha)
        for i, group in enumerate(groups):
            s[group] *= gamma[i]
        g = gradient(k, theta)
        u, shorter = update(g, theta)
        if k % T != 0:
            theta = theta + s * u
            yield None, theta, gamma.copy(), raw.copy()
            k += 1
            continue
        g0 = sign * g + decay * theta
        theta_half = theta + s * u
        g = gradient(k, theta_half)
        g1 = sign * g + decay * theta_half
        dtheta, dg = theta_half - theta, g1 - g0
        theta = theta_half + s * update(g, theta_half)[0]
        unit = s if T > 1 else np.ones_like(theta)
        still = unit == 0
        G[~still] = beta * G[~still] + (1 - beta) * (dg[~still] / unit[~still])
        for i, group in enumerate(groups):
            if still[group].all():
                raw[i] = np.nan
                continue
            G_hat = unit * G / (1 - beta ** (n[i] + 1))
            n[i] += 1
            curvature = G_hat[group] @ dtheta[group]
            slope = -(s * shorter * g0)[group] @ dtheta[group]
            raw[i] = tuned = slope / curvature if curvature > 0 else nu
            if relative and curvature > 0:
                if raw[i] > 0:
                    log_mean[i] = 0.99 * log_mean[i] + 0.01 * np.log(raw[i])
                    positive[i] += 1
                reference = np.exp(log_mean[i] / (1 - 0.99 ** positive[i])) if positive[i] else 1.0
                tuned = raw[i] / reference
            gamma[i] = min(max(tuned, m), M)
        yield theta_half, theta, gamma.copy(), raw.copy()
        k += 1


class Momentum:
    """torch's SGD: weight decay in the gradient, a buffer that begins with the first gradient."""

    def __init__(self, mu=0.0, decay=0.0, nesterov=False, sign=1.0):
        self.mu, self.decay, self.nesterov, self.sign, self.buffer = mu, decay, nesterov, sign, None

    def __call__(self, theta, g):
        g = self.sign * g + self.decay * theta
        self.buffer = g if self.buffer is None else self.mu * self.buffer + g
        return -(g + self.mu * self.buffer if self.nesterov else self.buffer)


class Adam:
    """Adam; ``decoupled`` makes it AdamW."""

    def __init__(self, b1=0.9, b2=0.999, eps=1e-8, decay=0.0, decoupled=False):
        self.b1, self.b2, self.eps, self.decay, self.decoupled = b1, b2, eps, decay, decoupled
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, theta, g):
        if not self.decoupled:
            g = g + self.decay * theta
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        m_hat, v_hat = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return -m_hat / (np.sqrt(v_hat) + self.eps) - (
            self.decay * theta if self.decoupled else 0.0
        )
