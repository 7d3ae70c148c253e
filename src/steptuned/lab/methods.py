"""Who minimises: names, hyper-parameters and how a mini-batch is used. Adding a method is adding an entry to :data:`METHODS`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from steptuned import (
    ArmijoGD,
    BarzilaiBorweinGD,
    ExactGV,
    ExpectedGV,
    RobbinsMonroLR,
    StepTunedGD,
    StepTunedSGD,
    StochasticGV,
    replay,
)
from steptuned.lab.problems.base import Batch, Problem
from steptuned.optim.gradient_variation import GradientVariation
from steptuned.rng import Replay


@dataclass(frozen=True)
class Method:
    """A method of the comparison."""

    label: str
    """Its name in figures."""
    make: Callable[[Any, dict[str, Any]], Optimizer]
    """The optimizer, from the problem and the hyper-parameters."""
    defaults: dict[str, Any] = field(default_factory=dict)
    full_batch: bool = False


def _sgd(problem: Problem, hyper: dict[str, Any]) -> Optimizer:
    return torch.optim.SGD(problem.parameters, lr=hyper["lr"], weight_decay=problem.weight_decay)


def _momentum(problem: Problem, hyper: dict[str, Any]) -> Optimizer:
    return torch.optim.SGD(problem.parameters, hyper["lr"], hyper["momentum"], weight_decay=problem.weight_decay)


def _rmsprop(problem: Problem, hyper: dict[str, Any]) -> Optimizer:
    return torch.optim.RMSprop(problem.parameters, lr=hyper["lr"], weight_decay=problem.weight_decay)


def _adam(problem: Problem, hyper: dict[str, Any]) -> Optimizer:
    return torch.optim.Adam(problem.parameters, hyper["lr"], (hyper["beta1"], 0.999), weight_decay=problem.weight_decay)


def _adamw(problem: Problem, hyper: dict[str, Any]) -> Optimizer:
    """Its decay is not part of the gradient, and neither is then J's regularisation: lambda is added to its own decay."""
    decay = hyper["weight_decay"] + problem.weight_decay
    return torch.optim.AdamW(problem.parameters, hyper["lr"], (hyper["beta1"], 0.999), weight_decay=decay)


def _step_tuned_sgd(problem: Problem, hyper: dict[str, Any]) -> Optimizer:
    every = {"iteration": 1, "epoch": problem.stream.per_epoch / 2, "none": None}[hyper["decay"]]
    return StepTunedSGD(
        problem.parameters,
        hyper["lr"],
        nu=hyper["nu"],
        beta=hyper["beta"],
        bounds=widened(hyper),
        delta=hyper["delta"],
        decay_every=every,
        weight_decay=problem.weight_decay,
        replay_rng=problem.same_noise,
    )


def widened(hyper: dict[str, Any]) -> tuple[float, float]:
    """The bounds, M raised to nu where that lies above: Algorithm 2 would clip nu, its proof takes max(M, nu)."""
    m, M = hyper["bounds"]
    return m, max(M, hyper["nu"])


def _gv(cls: Any, ask: str | None) -> Callable[[Any, dict[str, Any]], Optimizer]:
    def make(problem: Any, hyper: dict[str, Any]) -> Optimizer:
        given = (getattr(problem, ask),) if ask else ()
        return cls(problem.parameters, *given, lr=hyper["lr"], nu=hyper["nu"], bounds=widened(hyper), delta=hyper["delta"])

    return make


_DECAYED = {"lr": 0.1, "delta": 0.001, "decay": "epoch"}
_TUNED = {"nu": 2.0, "bounds": [0.5, 2.0]}

METHODS: dict[str, Method] = {
    "sgd": Method("SGD", _sgd, {**_DECAYED, "uses": 1}),
    "momentum": Method("SGD with momentum", _momentum, {**_DECAYED, "momentum": 0.9, "uses": 1}),
    "rmsprop": Method("RMSprop", _rmsprop, {"lr": 0.001, "uses": 1}),
    "adam": Method("Adam", _adam, {"lr": 0.001, "beta1": 0.9, "uses": 1}),
    "adamw": Method("AdamW", _adamw, {**_DECAYED, "lr": 0.001, "beta1": 0.9, "weight_decay": 0.01, "uses": 1}),
    "step-tuned-sgd": Method("Step-Tuned SGD", _step_tuned_sgd, {**_DECAYED, **_TUNED, "beta": 0.9}),
    "stochastic-gv": Method("Stochastic-GV", _gv(StochasticGV, None), {"lr": 0.1, "delta": 0.001, **_TUNED}),
    "exact-gv": Method("Exact-GV", _gv(ExactGV, "full_gradient"), {"lr": 0.1, "delta": 0.001, **_TUNED}),
    "expected-gv": Method("Expected-GV", _gv(ExpectedGV, "expectation"), {"lr": 0.1, "delta": 0.001, **_TUNED}),
    "gd": Method("Gradient descent", _sgd, {"lr": 0.1}, full_batch=True),
    "step-tuned-gd": Method(
        "Algorithm 1", lambda p, h: StepTunedGD(p.parameters, h["lr"], h["nu"]), {"lr": 0.1, "nu": 2.0}, full_batch=True
    ),
    "barzilai-borwein": Method(
        "BB with absolute values", lambda p, h: BarzilaiBorweinGD(p.parameters, h["lr"]), {"lr": 0.1}, full_batch=True
    ),
    "armijo": Method(
        "Armijo",
        lambda p, h: ArmijoGD(p.parameters, h["lr"], h["slope"], h["shrink"]),
        {"lr": 1.0, "slope": 1e-4, "shrink": 0.5},
        full_batch=True,
    ),
}


class History:
    """What gamma did in the iterations since the last record, kept on the device until then."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []

    def add(self, optimizer: StepTunedSGD | GradientVariation) -> None:
        group = optimizer.param_groups[0]
        self._rows.append(torch.stack((group["gamma"], group["raw_gamma"], group["curvature"])))

    def summary(self, optimizer: StepTunedSGD | GradientVariation) -> dict[str, float]:
        """Quartiles and shares over these iterations, for the log; the next summary begins after them."""
        if not self._rows:
            return {}
        gamma, raw, curvature = torch.stack(self._rows).cpu().double().T
        self._rows.clear()
        measured = ~raw.isnan()
        found: dict[str, float] = {}
        for name, values in (("gamma", gamma), ("raw gamma", raw[measured])):
            if len(values):
                quartiles = values.quantile(torch.tensor((0.25, 0.5, 0.75), dtype=values.dtype)).tolist()
                found |= dict(zip((f"{name} low", f"{name} median", f"{name} high"), quartiles, strict=True))
        group, n = optimizer.param_groups[0], max(1, int(measured.sum()))
        found["negative curvature"] = (curvature <= 0).sum().item() / n
        if "bounds" in group:
            m, M = group["bounds"]
            found["at lower"], found["at upper"] = (raw <= m).sum().item() / n, (raw >= M).sum().item() / n
        found["effective lr"] = float(group["effective_lr"])
        return found

    def state_dict(self) -> torch.Tensor | None:
        return torch.stack(self._rows) if self._rows else None

    def load_state_dict(self, state: torch.Tensor | None) -> None:
        self._rows = [] if state is None else list(state)


class Driver:
    """A method at work on a problem, one back-propagation at a time."""

    def __init__(self, name: str, problem: Problem, hyper: dict[str, Any]) -> None:
        method = METHODS[name]
        self.problem = problem
        self.full_batch = method.full_batch
        self.optimizer = method.make(problem, hyper)
        self.two_passes = isinstance(self.optimizer, StepTunedSGD)
        self.uses = 2 if self.two_passes else hyper.get("uses", 1)
        self.scheduler = None
        if not self.two_passes and hyper.get("decay", "none") != "none":
            every = problem.stream.per_epoch if hyper["decay"] == "epoch" else 1
            self.scheduler = RobbinsMonroLR(self.optimizer, hyper["delta"], every)
        self._batch: Batch = None
        self._mine: tuple[Batch, float] = (None, 1.0)
        self._pass = 0
        self._noise: Replay | None = None
        self._history = History()
        self.batches = 0
        self.samples = 0

    def advance(self) -> None:
        """The next back-propagation and the update that follows from it."""
        if self._pass == 0:
            self._take(None if self.full_batch else self.problem.draw())
            self.batches += 1
        self.samples += self.problem.stream.rows if self._batch is None else len(self._batch)
        optimizer: Any = self.optimizer
        if self.two_passes:
            self._prepare_pass()
        if isinstance(optimizer, ArmijoGD):
            optimizer.step(self._closure, self._loss)
        else:
            self._closure()
            optimizer.half_step() if self.two_passes and self._pass == 0 else optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._pass = (self._pass + 1) % self.uses
        if isinstance(optimizer, StepTunedSGD | GradientVariation) and self._pass == 0:
            self._history.add(optimizer)

    def _prepare_pass(self) -> None:
        self.problem.second_pass(self._pass == 1)
        if self._pass == 0:
            self._noise = replay(self.optimizer) if self.problem.same_noise else None
        elif self._noise is not None:
            self._noise.rewind()

    def _take(self, batch: Batch) -> None:
        """Take a mini-batch, of which this rank's part is the same in all passes."""
        self._batch = batch
        ranks = self.problem.ranks
        rows = torch.arange(self.problem.stream.rows) if batch is None and ranks.number > 1 else batch
        self._mine = (None, 1.0) if rows is None else ranks.part(rows)

    def _loss(self) -> torch.Tensor:
        rows, weight = self._mine
        loss = self.problem.loss(rows)
        return loss if weight == 1 else weight * loss

    def _closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self._loss()
        loss.backward()
        return loss

    def diagnostics(self) -> dict[str, float]:
        """What the method tells of itself, for the log; of gamma, over the iterations since the last call."""
        told: dict[str, float] = {}
        if isinstance(self.optimizer, ArmijoGD):
            told["evaluations"] = self.optimizer.evaluations
        elif isinstance(self.optimizer, StepTunedSGD | GradientVariation):
            told["gamma"] = self.optimizer.gamma.item()
            told["curvature"] = self.optimizer.curvature.item()
            told |= self._history.summary(self.optimizer)
        return told

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "batch": self._batch,
            "pass": self._pass,
            "noise": None if self._noise is None else self._noise.state_dict(),
            "history": self._history.state_dict(),
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
        self._history.load_state_dict(state["history"])
        if state["noise"] is not None:
            self._noise = replay(self.optimizer)
            self._noise.load_state_dict(state["noise"])
