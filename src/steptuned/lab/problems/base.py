"""What the run loop asks of a problem."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from steptuned.lab.ranks import Ranks
from steptuned.lab.spec import derive_seed

Batch = Tensor | None
"""The rows of a mini-batch; None for all of them."""


class Problem(ABC):
    """A finite sum J to minimise, at a point that is its own, on a stream of mini-batches."""

    defaults: ClassVar[dict[str, Any]]
    """The options and their default values."""
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The valid values of the options that have only some."""
    description: ClassVar[str]
    things: ClassVar[str] = "training images"
    """Of what J is a sum."""
    double: ClassVar[bool] = False
    """Whether it computes in double precision."""
    weight_decay: float = 0.0
    """lambda of the regularisation that the method adds to the gradient and :meth:`evaluate` to the loss."""
    same_noise: bool = True
    """Whether dropout and the like are the same in both passes of Step-Tuned SGD over a mini-batch."""
    parameters: list[Tensor]
    stream: "Stream"
    ranks = Ranks()
    """Who minimises it together."""

    @abstractmethod
    def __init__(self, options: dict[str, Any], seed: int, device: torch.device) -> None: ...

    @staticmethod
    @abstractmethod
    def rows_of(options: dict[str, Any]) -> int:
        """N: of how many terms the sum is."""

    @staticmethod
    def conflict(options: dict[str, Any]) -> tuple[str, str] | None:
        """An option whose value does not go with the other options, and why; None if there is none."""
        return None

    @staticmethod
    def environment() -> dict[str, Any]:
        """What its numbers depend on beside the options, where it comes with the machine: kept with every run."""
        return {}

    @property
    def evaluated(self) -> int:
        """About how many rows :meth:`evaluate` goes through."""
        return self.stream.rows

    def draw(self) -> Tensor:
        """The next mini-batch: as many rows as it has, with all that :meth:`loss` needs to know of them."""
        return self.stream.next()

    def second_pass(self, second: bool) -> None:  # noqa: B027 - most problems need not know
        """Told by Step-Tuned SGD before each pass: whether it is the second one over its mini-batch."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The loss of a mini-batch at the current point, to be back-propagated."""

    def full_gradient(self) -> list[Tensor]:
        """The gradient of J at the current point, for Exact-GV. Most problems do not have it."""
        raise NotImplementedError(f"{type(self).__name__} has no full_gradient, which exact-gv needs")

    def expectation(self) -> list[Tensor]:
        """E[H_S g_S] over mini-batches S, for Expected-GV. Most problems do not have it."""
        raise NotImplementedError(f"{type(self).__name__} has no expectation, which expected-gv needs")

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """What is logged: ``loss``, the J that is minimised, and whatever else there is, such as ``accuracy``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NetworkProblem(Problem):
    """A problem whose point is a network's."""

    model: nn.Module
    replica: nn.Module
    """The network as it is to be called for a loss that is back-propagated; for anything else the model is."""

    def _train(self, model: nn.Module) -> None:
        self.model = self.replica = model
        self.parameters = list(model.parameters())

    def divide(self, ranks: Ranks) -> None:
        """Let several ranks minimise it together, each with its rows of every mini-batch."""
        self.ranks, self.replica = ranks, ranks.replica(self.model)

    def _means(self, rows: Tensor, measured: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, float]:
        """What is measured of mini-batches, as means over all these rows. Each rank takes some of the mini-batches.

        The means are added up in double precision on the host: not every device has it.
        """
        means: dict[str, list[Tensor]] = defaultdict(list)
        parts = rows.split(self.stream.batch)
        mine, weight = self.ranks.part(torch.arange(len(parts)))
        for i in mine:
            for name, mean in measured(parts[i]).items():
                means[name].append(mean)
        sizes = torch.tensor([len(parts[i]) * (weight > 0) for i in mine], dtype=torch.float64)
        sums = self.ranks.sum(torch.stack([torch.stack(each).cpu().double() @ sizes for each in means.values()]))
        return dict(zip(means, (sums / len(rows)).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.stream.load_state_dict(state["stream"])


class Stream:
    """Mini-batches drawn from N rows. The same seed gives the same ones, whoever asks."""

    def __init__(self, rows: int, batch: int, *, reshuffled: bool, seed_parts: list[Any]) -> None:
        self.rows, self.batch, self.reshuffled = rows, batch, reshuffled
        self.per_epoch = -(-rows // batch)
        self._generator = torch.Generator().manual_seed(derive_seed("data order", *seed_parts))
        self._order = torch.empty(0, dtype=torch.int64)

    def next(self) -> Tensor:
        """Reshuffled: go through all rows, the last short mini-batch included, then reshuffle. Else: any rows, independently."""
        if not self.reshuffled:
            return torch.randperm(self.rows, generator=self._generator)[: self.batch]
        if not len(self._order):
            self._order = torch.randperm(self.rows, generator=self._generator)
        rows, self._order = self._order[: self.batch], self._order[self.batch :]
        return rows

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state(), "order": self._order.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])
        self._order = state["order"].clone()
