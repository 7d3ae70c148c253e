"""The paper's synthetic problem: non-convex regression (Carmon et al., 2017)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from steptuned.lab.options import Count, Whole
from steptuned.lab.problems.base import Batch, Problem, ProblemOptions, Stream
from steptuned.lab.spec import derive_seed


class Regression(Problem):
    """J(theta) = mean of phi(A_n theta - b_n), phi(t) = t^2 / (1 + t^2).

    A_n ~ N(0, I_P), z ~ N(0, 4 I_P), b = A z + 3 nu_1 + nu_2 with nu_1 ~ N(0, I_N) and
    nu_2 ~ Bernoulli(0.3). Float64. The instance determines A and b; the seed determines
    theta_0 ~ N(0, I_P) and the mini-batches.
    """

    class Options(ProblemOptions):
        rows: Count = 500
        columns: Count = 30
        batch: Count = 50
        instance: Whole = 0

        @property
        def training_rows(self) -> int:
            return self.rows

    name: ClassVar[str] = "regression"
    description: ClassVar[str] = "non-convex regression (Figures 2 and 3)"
    things: ClassVar[str] = "rows"
    double: ClassVar[bool] = True
    same_noise = False  # its loss draws no random numbers, so there are none to repeat

    def __init__(self, options: Options, seed: int, device: torch.device) -> None:
        rows, columns, batch = options.rows, options.columns, options.batch
        instance = derive_seed("instance", "regression", rows, columns, options.instance)
        generator = torch.Generator().manual_seed(instance)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        A, z = normal(rows, columns), 2 * normal(columns)
        b = A @ z + 3 * normal(rows) + (torch.rand(rows, generator=generator) < 0.3)
        self.A, self.b = A.to(device), b.to(device)
        self._squares = self.A.square().sum(1)
        self._gathered: tuple[Tensor, Tensor, Tensor] | None = None
        start = torch.Generator().manual_seed(
            derive_seed("initial point", "regression", columns, seed)
        )
        self.theta = (
            torch.randn(columns, generator=start, dtype=torch.float64).to(device).requires_grad_()
        )
        self.parameters = [self.theta]
        self.batch = batch
        self.stream = Stream(
            rows, batch, reshuffled=False, seed_parts=["regression", rows, batch, seed]
        )

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows of a mini-batch, gathered once for both passes over it."""
        if batch is None:
            return self.A, self.b
        if self._gathered is None or self._gathered[0] is not batch:
            rows = batch.to(self.A.device)
            self._gathered = batch, self.A.index_select(0, rows), self.b.index_select(0, rows)
        return self._gathered[1:]

    def loss(self, batch: Batch) -> Tensor:
        A, b = self._rows(batch)
        square = (A @ self.theta - b) ** 2
        return (square / (1 + square)).mean()

    @torch.no_grad()
    def backward(self, batch: Batch, weight: float = 1.0) -> Tensor:
        """What autograd computes, bit for bit, in about half the time on so few rows."""
        A, b = self._rows(batch)
        t = A @ self.theta - b
        square = t**2
        divisor = 1 + square
        phi = square / divisor
        each = torch.full_like(phi[0], weight) / len(t)
        self.theta.grad = A.T @ ((each / divisor - each * (phi / divisor)) * (2 * t))
        return phi.mean() if weight == 1 else weight * phi.mean()

    def full_gradient(self) -> list[Tensor]:
        t = self.A @ self.theta.detach() - self.b
        return [self.A.T @ (2 * t / (1 + t**2) ** 2) / len(t)]

    def expectation(self) -> list[Tensor]:
        """E[H_S g_S] over mini-batches S: the closed form for drawing without replacement."""
        t = self.A @ self.theta.detach() - self.b
        square = t**2
        divisor = 1 + square
        first, second = 2 * t / divisor**2, 2 * (1 - 3 * square) / divisor**3
        N, b = len(t), self.batch
        each = self.A.T @ (second * first * self._squares) / N
        whole = self.A.T @ (second * (self.A @ (self.A.T @ first / N))) / N
        return [(1 - (b - 1) / (N - 1)) / b * each + (b - 1) * N / (b * (N - 1)) * whole]

    def evaluate(self) -> dict[str, float]:
        with torch.no_grad():
            loss = self.loss(None).item()
            return {"loss": loss, "gradient": self.full_gradient()[0].square().sum().item()}

    def state_dict(self) -> dict[str, Any]:
        return {"theta": self.theta.detach().clone(), "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.theta.copy_(state["theta"])
        self.stream.load_state_dict(state["stream"])
