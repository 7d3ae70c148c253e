"""Small problems with hand-written gradients in NumPy, and the same in torch with autograd."""

from itertools import combinations

import numpy as np
import torch


class Regression:
    """The paper's non-convex regression: mean of phi(A_n theta - b_n), phi(t) = t^2 / (1 + t^2)."""

    def __init__(self, n=500, p=30, batch=50, seed=0, iterations=400):
        rng = np.random.default_rng(seed)
        self.A = rng.standard_normal((n, p))
        z = 2 * rng.standard_normal(p)
        self.b = self.A @ z + 3 * rng.standard_normal(n) + (rng.random(n) < 0.3)
        self.start = rng.standard_normal(p)
        self.rows = [rng.choice(n, batch, replace=False) for _ in range(iterations)]
        self.batch = batch
        self.torch_A, self.torch_b = torch.from_numpy(self.A), torch.from_numpy(self.b)

    def gradient(self, k, theta):
        return self.mean_gradient(theta, self.rows[k])

    def full_gradient(self, theta):
        return self.mean_gradient(theta, np.arange(len(self.b)))

    def mean_gradient(self, theta, rows):
        A, t = self.A[rows], self.A[rows] @ theta - self.b[rows]
        return A.T @ (2 * t / (1 + t**2) ** 2) / len(rows)

    def value(self, theta):
        t = self.A @ theta - self.b
        return np.mean(t**2 / (1 + t**2))

    def curvature_vector(self, theta, rows):
        """C of one mini-batch: its Hessian times its gradient."""
        A, t = self.A[rows], self.A[rows] @ theta - self.b[rows]
        second = 2 * (1 - 3 * t**2) / (1 + t**2) ** 3
        return A.T @ (second * (A @ self.mean_gradient(theta, rows))) / len(rows)

    def expectation(self, theta):
        """E[C] over mini-batches drawn without replacement, by the closed form."""
        n, b = len(self.b), self.batch
        each = np.mean([self.curvature_vector(theta, [i]) for i in range(n)], axis=0)
        whole = self.curvature_vector(theta, np.arange(n))
        return (1 - (b - 1) / (n - 1)) / b * each + (b - 1) * n / (b * (n - 1)) * whole

    def expectation_by_counting(self, theta):
        """The same by summing over all mini-batches; for tiny problems only."""
        rows = combinations(range(len(self.b)), self.batch)
        return np.mean([self.curvature_vector(theta, list(r)) for r in rows], axis=0)

    def torch_loss(self, k, theta):
        rows = slice(None) if k is None else self.rows[k]
        t = self.torch_A[rows] @ theta - self.torch_b[rows]
        return (t**2 / (1 + t**2)).mean()


class Network:
    """Two layers with tanh between them and the mean squared error.

    theta is (W1, b1, W2, b2), flattened and joined.
    """

    shapes = ((8, 5), (8,), (3, 8), (3,))

    def __init__(self, batch=16, seed=1, iterations=400):
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((iterations, batch, 5))
        self.y = np.sin(self.x @ rng.standard_normal((5, 3))) + 0.1 * rng.standard_normal(
            (iterations, batch, 3)
        )
        self.start = 0.5 * rng.standard_normal(sum(int(np.prod(s)) for s in self.shapes))

    def split(self, theta):
        ends = np.cumsum([int(np.prod(s)) for s in self.shapes])[:-1]
        return [part.reshape(s) for part, s in zip(np.split(theta, ends), self.shapes, strict=True)]

    def gradient(self, k, theta):
        W1, b1, W2, b2 = self.split(theta)
        hidden = np.tanh(self.x[k] @ W1.T + b1)
        error = 2 * (hidden @ W2.T + b2 - self.y[k]) / self.y[k].size
        back = (error @ W2) * (1 - hidden**2)
        parts = back.T @ self.x[k], back.sum(0), error.T @ hidden, error.sum(0)
        return np.concatenate([part.ravel() for part in parts])

    def torch_loss(self, k, W1, b1, W2, b2):
        x, y = torch.from_numpy(self.x[k]), torch.from_numpy(self.y[k])
        return ((torch.tanh(x @ W1.T + b1) @ W2.T + b2 - y) ** 2).mean()
