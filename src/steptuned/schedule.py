"""The step-size decay of Robbins and Monro as a learning-rate scheduler."""

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steptuned import rule
from steptuned.optim.arguments import DELTA, POSITIVE, check


class RobbinsMonroLR(LRScheduler):
    r"""Decay the learning rate as $\alpha / q^{1/2+\delta}$, with q = 1 + t // every.

    t is the number of calls of `step`. Called once per epoch, with ``every=1``, this is the
    schedule with which the paper trains its networks. Called once per iteration, it is the decay
    of the paper's algorithms.

    Args:
        optimizer: any torch optimizer. With `steptuned.StepTunedSGD`, leave ``decay_every`` at its
            default, None; with both, the step would decay twice.
        delta: in [0, 1/2). The paper uses 0.001.
        every: q grows by 1 after this many calls of `step`. Need not be an integer.
        last_epoch: the last t; -1 to start.

    Examples:
        >>> import torch
        >>> from steptuned import RobbinsMonroLR
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = RobbinsMonroLR(optimizer, delta=0.0)
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()
        [0.5]
    """

    def __init__(
        self, optimizer: Optimizer, delta: float = 0.001, every: float = 1, last_epoch: int = -1
    ) -> None:
        check({"delta": DELTA, "every": POSITIVE}, {"delta": delta, "every": every})
        self.delta = delta
        self.every = every
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        decay = rule.robbins_monro(float(self.last_epoch), self.delta, self.every)
        return [base_lr * decay for base_lr in self.base_lrs]
