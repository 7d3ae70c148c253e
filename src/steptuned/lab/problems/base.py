"""What a problem provides to the run loop."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from steptuned.lab.options import Count, Options
from steptuned.lab.ranks import Ranks
from steptuned.lab.spec import derive_seed

Batch = Tensor | None
"""The rows of a mini-batch; None for all of them."""


class ProblemOptions(Options):
    """The options of a problem."""

    batch: Count = 64
    """Rows per mini-batch."""

    @property
    @abstractmethod
    def training_rows(self) -> int:
        """N, the number of terms of the sum J."""

    @property
    def per_epoch(self) -> int:
        """Mini-batches per epoch."""
        return -(-self.training_rows // self.batch)


class Problem(ABC):
    """A finite sum J to minimise, with its current point and its stream of mini-batches.

    Every class with a ``name`` in this package, or in a file given as ``--with``, is a problem.
    """

    name: ClassVar[str]
    """Its name in experiment files."""
    description: ClassVar[str]
    Options: ClassVar[type[ProblemOptions]]
    """Its options, which an experiment sets."""
    defaults: ClassVar[dict[str, Any]]
    """The default values of the options."""
    things: ClassVar[str] = "training images"
    """What J is a sum over."""
    double: ClassVar[bool] = False
    """Whether it computes in double precision."""
    weight_decay: float = 0.0
    """lambda of the regularisation, which the method adds to the gradient and :meth:`evaluate` to
    the loss."""
    same_noise: bool = True
    """Whether both passes of Step-Tuned SGD over a mini-batch draw the same random numbers."""
    parameters: list[Tensor]
    stream: "Stream"
    ranks = Ranks()
    """The processes that share the run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Options" in vars(cls):
            cls.defaults = cls.Options.defaults

    @abstractmethod
    def __init__(self, options: Any, seed: int, device: torch.device) -> None:
        """``options`` are those of the class attribute ``Options``."""

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], seed: int, device: torch.device) -> Self:
        """The problem with these options; the others have their defaults."""
        return cls(cls.Options(**options), seed, device)

    @staticmethod
    def environment() -> dict[str, Any]:
        """What its numbers depend on, apart from the options; stored with every run."""
        return {}

    @property
    def evaluated(self) -> int:
        """About how many rows :meth:`evaluate` goes through."""
        return self.stream.rows

    def draw(self) -> Tensor:
        """The next mini-batch: one row per sample, with all that :meth:`loss` needs."""
        return self.stream.next()

    def second_pass(self, second: bool) -> None:  # noqa: B027 - most problems ignore it
        """Called before each pass of Step-Tuned SGD, which is the first or the second."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The loss of a mini-batch at the current point, to be back-propagated."""

    def backward(self, batch: Batch, weight: float = 1.0) -> Tensor:
        """Back-propagate the loss of a mini-batch times a weight. There are no gradients before."""
        loss = self.loss(batch)
        weighted = loss if weight == 1 else weight * loss
        weighted.backward()
        return weighted

    def full_gradient(self) -> list[Tensor]:
        """The gradient of J at the current point, for Exact-GV. Most problems do not have it."""
        raise NotImplementedError(f"{self.name} has no full_gradient, which exact-gv needs")

    def expectation(self) -> list[Tensor]:
        """E[H_S g_S] over mini-batches S, for Expected-GV. Most problems do not have it."""
        raise NotImplementedError(f"{self.name} has no expectation, which expected-gv needs")

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """What is logged: ``loss``, the J that is minimised, and others such as ``accuracy``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NetworkProblem(Problem):
    """A problem whose parameters are those of a network."""

    model: nn.Module
    replica: nn.Module
    """The network to call for a loss that is back-propagated; for anything else call ``model``."""

    def set_model(self, model: nn.Module) -> None:
        """Train the parameters of this network. Call it in the constructor."""
        self.model = self.replica = model
        self.parameters = list(model.parameters())

    def divide(self, ranks: Ranks) -> None:
        """Share the problem among ranks, each with its shard of every mini-batch."""
        self.ranks, self.replica = ranks, ranks.replica(self.model)

    def _means(
        self, rows: Tensor, measured: Callable[[Tensor], dict[str, Tensor]]
    ) -> dict[str, float]:
        """Means of what is measured, over all these rows. Each rank takes some of the mini-batches.

        The sums are in double precision on the CPU, since not every device has it.
        """
        means: dict[str, list[Tensor]] = defaultdict(list)
        parts = rows.split(self.stream.batch)
        mine, weight = self.ranks.shard(torch.arange(len(parts)))
        for i in mine:
            for name, mean in measured(parts[i]).items():
                means[name].append(mean)
        sizes = torch.tensor([len(parts[i]) * (weight > 0) for i in mine], dtype=torch.float64)
        sums = self.ranks.sum(
            torch.stack([torch.stack(each).cpu().double() @ sizes for each in means.values()])
        )
        return dict(zip(means, (sums / len(rows)).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.stream.load_state_dict(state["stream"])


AHEAD = 32
"""Independent mini-batches that a stream draws at once."""


class Stream:
    """Mini-batches drawn from N rows. The same seed gives every method the same ones."""

    def __init__(self, rows: int, batch: int, *, reshuffled: bool, seed_parts: list[Any]) -> None:
        self.rows, self.batch, self.reshuffled = rows, batch, reshuffled
        self.per_epoch = -(-rows // batch)
        self._generator = torch.Generator().manual_seed(derive_seed("data order", *seed_parts))
        self._upcoming: list[Tensor] = []
        """Mini-batches that are drawn but not used yet, the next one last."""

    def next(self) -> Tensor:
        """The rows of the next mini-batch.

        Reshuffled: all rows once per epoch, the last mini-batch may be shorter. Otherwise each
        mini-batch is drawn independently.
        """
        if not self._upcoming:
            self._upcoming = self._drawn()[::-1]
        return self._upcoming.pop()

    def _drawn(self) -> list[Tensor]:
        """The next mini-batches: an epoch, or a few, because one at a time takes longer."""

        def permutation() -> Tensor:
            return torch.randperm(self.rows, generator=self._generator)

        if self.reshuffled:
            return list(permutation().split(self.batch))
        return [permutation()[: self.batch] for _ in range(AHEAD)]

    def state_dict(self) -> dict[str, Tensor]:
        none = torch.empty(0, dtype=torch.int64)
        order = torch.cat((none, *self._upcoming[::-1]))
        return {"generator": self._generator.get_state(), "order": order}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])
        order = state["order"].clone()
        size = min(self.batch, self.rows)
        self._upcoming = list(order.split(size))[::-1] if len(order) else []
