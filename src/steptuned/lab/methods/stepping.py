"""How methods step: after every back-propagation, in two passes, or by a line search."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from steptuned import replay
from steptuned.lab.problems.base import Problem
from steptuned.rng import Replay

Closure = Callable[[], Tensor]


class SinglePass:
    """Every back-propagation is followed by a step."""

    works_on_ranks: ClassVar[bool] = True
    """Whether several ranks can share a run."""

    def __init__(self, optimizer: Any, problem: Problem, uses: int) -> None:
        self.optimizer, self.problem = optimizer, problem
        self.passes = uses
        """Back-propagations of a mini-batch, at most."""

    def advance(self, index: int, backward: Closure, loss: Closure) -> bool:
        """Make back-propagation ``index`` of a mini-batch and the step that follows it.

        ``backward`` computes the gradients of the mini-batch, ``loss`` its loss alone. Returns
        whether this was the last back-propagation of the mini-batch.
        """
        backward()
        self.optimizer.step()
        return index + 1 == self.passes

    def scheduler_steps(self, index: int, is_last: bool) -> int:
        """How often a scheduler, which counts back-propagations, steps after this one."""
        return 1

    def diagnostics(self) -> dict[str, float]:
        """What is logged about the steps."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """What a run needs to resume between two back-propagations of a mini-batch."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned."""


class TwoPasses(SinglePass):
    """Step-Tuned SGD: two back-propagations of a mini-batch make one iteration.

    With ``tune_every`` above 1, only every T-th mini-batch is used twice.
    """

    def __init__(self, optimizer: Any, problem: Problem, uses: int) -> None:
        super().__init__(optimizer, problem, uses=2)
        self._noise: Replay | None = None

    def advance(self, index: int, backward: Closure, loss: Closure) -> bool:
        self.problem.second_pass(index == 1)
        if index == 0:
            self._noise = replay(self.optimizer) if self.problem.same_noise else None
        elif self._noise is not None:
            self._noise.rewind()
        backward()
        is_last = index == 1 or not self.optimizer.needs_second_pass
        if is_last:
            self.optimizer.step()
        else:
            self.optimizer.half_step()
        return is_last

    def scheduler_steps(self, index: int, is_last: bool) -> int:
        return index + 1 if is_last else 0  # both passes have the same learning rate

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._noise is None else self._noise.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._noise = replay(self.optimizer)
            self._noise.load_state_dict(state)


class LineSearch(SinglePass):
    """A back-propagation, then losses at smaller and smaller steps until one is accepted."""

    works_on_ranks = False

    def advance(self, index: int, backward: Closure, loss: Closure) -> bool:
        self.optimizer.step(backward, loss)
        return True

    def diagnostics(self) -> dict[str, float]:
        return {"evaluations": self.optimizer.evaluations}
