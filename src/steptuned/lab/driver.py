"""Runs a method on a problem, one back-propagation at a time."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from steptuned.lab.methods import METHODS
from steptuned.lab.problems.base import Batch, Problem
from steptuned.optim.record import last_row, read


@contextmanager
def no_advice() -> Iterator[None]:
    """Silence the optimizer's advice on a gamma that stays at a bound: the log has every gamma."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gamma has been at")
        yield


class Driver:
    """Draws mini-batches from a problem and lets a method step on them."""

    def __init__(self, name: str, problem: Problem, hyper: Mapping[str, Any]) -> None:
        method = METHODS[name](**hyper)
        self.problem = problem
        self.full_batch = method.full_batch
        self.optimizer = method.make_optimizer(problem)
        self.scheduler = method.make_scheduler(self.optimizer, problem)
        self._stepping = method.stepping(self.optimizer, problem, method.uses_per_batch)
        self._history = GammaHistory(self.optimizer) if method.logs_gamma else None
        self._batch: Batch = None
        self._shard: tuple[Batch, float] = (None, 1.0)
        self._pass = 0
        self.batches = 0
        self.samples = 0

    def advance(self) -> None:
        """Make the next back-propagation and the update that follows from it."""
        if self._pass == 0:
            self._take(None if self.full_batch else self.problem.draw())
            self.batches += 1
        self.samples += self.problem.stream.rows if self._batch is None else len(self._batch)
        is_last = self._stepping.advance(self._pass, self._backward, self._loss)
        if self.scheduler is not None:
            for _ in range(self._stepping.scheduler_steps(self._pass, is_last)):
                self.scheduler.step()
        self._pass = 0 if is_last else self._pass + 1
        if self._history is not None and self._pass == 0:
            self._history.add()

    def _take(self, batch: Batch) -> None:
        """Take a mini-batch. This rank's shard of it is the same in all passes."""
        self._batch = batch
        ranks = self.problem.ranks
        whole = batch is None and ranks.world_size > 1
        rows = torch.arange(self.problem.stream.rows) if whole else batch
        self._shard = (None, 1.0) if rows is None else ranks.shard(rows)

    def _loss(self) -> torch.Tensor:
        rows, weight = self._shard
        loss = self.problem.loss(rows)
        return loss if weight == 1 else weight * loss

    def _backward(self) -> torch.Tensor:
        for p in self.problem.parameters:  # on small problems, zero_grad() takes time that shows
            p.grad = None
        return self.problem.backward(*self._shard)

    def diagnostics(self) -> dict[str, float]:
        """What the method logs about itself. Gamma is summarised since the last call."""
        gamma = {} if self._history is None else self._history.summary()
        return {**self._stepping.diagnostics(), **gamma}

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "batch": self._batch,
            "pass": self._pass,
            "noise": self._stepping.state_dict(),
            "history": None if self._history is None else self._history.state_dict(),
            "batches": self.batches,
            "samples": self.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._take(state["batch"])
        self._pass = state["pass"]
        self.batches, self.samples = state["batches"], state["samples"]
        if self._history is not None:
            self._history.load_state_dict(state["history"])
        self._stepping.load_state_dict(state["noise"])


class GammaHistory:
    """Gamma of the iterations since the last log record, kept on the device until then."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rows: list[torch.Tensor] = []
        """For each iteration: gamma, the raw gamma, the curvature and the effective lr."""
        self._unread: list[torch.Tensor] = []
        """For later iterations: the row of the last measurement, gamma and the effective lr."""

    def add(self) -> None:
        """Remember the iteration that was just made."""
        opt: Any = self._optimizer
        group = opt.param_groups[0]
        step = torch.as_tensor(group["effective_lr"])
        if "measured" in group:  # all rows are read together, which takes less time
            used = group["gamma"].reshape(1), step.reshape(1)
            self._unread.append(torch.cat((last_row(group), *used)))
        else:
            self._rows.append(torch.stack((opt.gamma, opt.raw_gamma, opt.curvature, step)))

    def _read(self) -> list[torch.Tensor]:
        """The rows of all iterations."""
        if self._unread:
            rows = torch.stack(self._unread)
            found = read(self._optimizer.param_groups[0], rows[:, :3])
            self._rows += torch.stack((rows[:, 3], found.raw_gamma, found.curvature, rows[:, 4]), 1)
            self._unread.clear()
        return self._rows

    def summary(self) -> dict[str, float]:
        """The last values; since the last summary, quartiles, shares and the median step."""
        group = self._optimizer.param_groups[0]
        opt: Any = self._optimizer
        found = {"gamma": opt.gamma.item(), "curvature": opt.curvature.item()}
        rows = self._read()
        if not rows:
            return found
        gamma, raw, curvature, steps = torch.stack(rows).cpu().double().T.tolist()
        rows.clear()
        measured = [value for value in raw if not math.isnan(value)]
        for name, values in (("gamma", gamma), ("raw gamma", measured)):
            if values:
                names = (f"{name} low", f"{name} median", f"{name} high")
                found |= dict(zip(names, quartiles(values), strict=True))
        n = max(1, len(measured))
        found["negative curvature"] = sum(value <= 0 for value in curvature) / n
        if "bounds" in group:
            m, M = group["bounds"]
            clipped = measured
            if group.get("relative"):  # relative bounds do not clip the raw gamma itself
                pairs = zip(gamma, raw, strict=True)
                clipped = [value for value, before in pairs if not math.isnan(before)]
            found["at lower"] = sum(value <= m for value in clipped) / n
            found["at upper"] = sum(value >= M for value in clipped) / n
        if group.get("relative"):
            found["reference"] = opt.reference.item()
        found["effective lr"] = quartiles(steps)[1]
        return found

    def state_dict(self) -> torch.Tensor | None:
        rows = self._read()
        return torch.stack(rows) if rows else None

    def load_state_dict(self, state: torch.Tensor | None) -> None:
        # Older versions kept three columns.
        self._rows = list(state) if state is not None and state.shape[1] == 4 else []
        self._unread.clear()


def quartiles(values: list[float]) -> list[float]:
    """The quartiles by linear interpolation, as `torch.quantile` computes them, bit for bit.

    On the few values of a record, `torch.quantile` itself takes many times longer.
    """
    ordered, found = sorted(values), []
    for level in (0.25, 0.5, 0.75):
        rank = level * (len(ordered) - 1)
        below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        weight, distance = rank - math.floor(rank), above - below
        near_below = weight < 0.5
        found.append(below + weight * distance if near_below else above - distance * (1 - weight))
    return found
