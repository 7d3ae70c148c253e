"""Step tuning for any optimizer: the paper's rule along the direction of a base optimizer."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from steptuned.optim import sharded
from steptuned.optim.arguments import (
    FLAG,
    FLAG_OR_NONE,
    LR,
    NON_NEGATIVE,
    Options,
    check,
    tuned_groups,
)
from steptuned.optim.bucket import params_of
from steptuned.optim.record import count_recent, last_row
from steptuned.optim.scaling import all_or_nothing
from steptuned.optim.state import (
    PARAMETER_STATE,
    SCALARS,
    fresh_group,
    fresh_scalars,
    fresh_state,
    upgrade,
)
from steptuned.optim.two_passes import TwoPasses
from steptuned.optim.wrapped import first_half, second_half, single_pass


class StepTuned(TwoPasses):
    r"""Any torch optimizer, with a step tuned by the curvature along its direction.

    Let u be the base's update per unit of learning rate: $u = -g$ for SGD, the negative momentum
    buffer for SGD with momentum, $-\hat m / (\sqrt{\hat v} + \epsilon)$ for Adam. Along u the best
    step is $\gamma^* = -\langle g, u \rangle / \langle H u, u \rangle$, and the step taken is
    $\mathrm{lr}\,\gamma\,u$. H u comes from the gradients of one mini-batch at both ends of a step.
    Every T-th mini-batch (``tune_every``) is used twice and measured; the n-th measurement, on
    mini-batch k, is

    $$\begin{align*}
    \theta_{k+1/2} &= \theta_k + s\,u_k, \qquad \theta_{k+1} = \theta_{k+1/2} + s\,u_{k+1/2}, \qquad
    s = \mathrm{lr}_k \gamma_k, \\
    \Delta\theta &= \theta_{k+1/2} - \theta_k, \qquad
    \Delta g = \nabla J_{B_k}(\theta_{k+1/2}) - \nabla J_{B_k}(\theta_k), \\
    G_n &= \beta G_{n-1} + (1-\beta)\,\Delta g / s, \qquad \hat G_n = s\,G_n / (1 - \beta^{n+1}), \\
    \gamma^{\mathrm{raw}} &= \begin{cases}
    -\langle s\,\nabla J_{B_k}(\theta_k), \Delta\theta \rangle
    / \langle \hat G_n, \Delta\theta \rangle
    & \text{if } \langle \hat G_n, \Delta\theta \rangle > 0 \\ \nu & \text{otherwise,} \end{cases}
    \end{align*}$$

    then divided by its running reference if ``relative``, and clipped to [m, M]. With T = 1 the
    differences are averaged undivided, as in Algorithm 2. Groups may have their own learning rates:
    s is the step of the parameter's group. If u is not a descent direction on this mini-batch but
    the curvature is positive, the raw gamma is not positive, gamma is m, and the reference does not
    change.

    **How the base steps.** On a mini-batch that is used twice, the base steps in both passes, with
    the gradient of each, so its momentum and its step count advance by two; $u_{k+1/2}$ is its
    second update. On other mini-batches it steps once. A base of torch whose update is proportional
    to its learning rate steps with lr times gamma on the CPU. In all other cases the base steps
    with its own learning rate, and the parameters are then set to
    $\theta + \gamma\,(\theta' - \theta)$, where $\theta'$ is where the base moved them. So any base
    works that keeps no copy of the parameters in its state.

    **Weight decay.** u contains it, coupled or decoupled. J contains $\lambda/2\,|\theta|^2$ if the
    base adds its gradient to g: for torch's SGD, Adam, NAdam, RAdam, RMSprop, Adagrad, Adadelta,
    Adamax and ASGD. The decoupled decay of AdamW is not a gradient: J is the loss alone, and
    $u = -\hat m / (\sqrt{\hat v} + \epsilon) - \lambda\theta$. Any other base counts as decoupled.

    The three call forms are those of `steptuned.StepTunedSGD`. ``param_groups`` and ``state`` are
    those of the base, with entries added here, so a scheduler created for either acts on both, and
    ``state_dict`` holds the state of both. Save and load it with this optimizer, not with the base.
    With a GradScaler, each pass checks whether the gradients overflowed. This waits for the device,
    as a GradScaler does with most optimizers.

    Args:
        base: the optimizer. Its ``step`` must work without a closure.
        tune_every: T, at least 1. Every T-th mini-batch is used twice, starting with the first:
            1 + 1/T back-propagations per mini-batch.
        relative: divide the raw gamma by its running reference, as in `steptuned.StepTunedSGD`.
            Default: True, unless the base is torch's SGD without momentum. Along other directions
            the raw gamma has a different natural size.
        per_group: one gamma per parameter group.
        nu: gamma where the curvature is not positive.
        beta: decay factor of the average G.
        bounds: (m, M); gamma is clipped to this interval.
        max_grad_norm: clip the gradients that the base sees to this norm, as
            ``torch.nn.utils.clip_grad_norm_`` does. The curvature is measured with the unclipped
            gradients, and the slope with the clipped ones, so gamma does not undo the clipping.
        replay_rng: draw the same random numbers in both passes of forms (1) and (2).

    Examples:
        >>> import torch, steptuned
        >>> theta = torch.tensor([3.0, -2.0], requires_grad=True)
        >>> opt = steptuned.StepTuned(torch.optim.AdamW([theta], lr=0.1), tune_every=4)
        >>> for _ in range(100):
        ...     for _ in opt.passes():
        ...         opt.zero_grad()
        ...         (theta**2).sum().backward()
        >>> bool(theta.abs().max() < 0.1)
        True
    """

    OPTIONS: ClassVar[Options] = {
        **TwoPasses.OPTIONS,
        # Options of the base.
        "lr": LR,
        "weight_decay": NON_NEGATIVE,
        "maximize": FLAG,
        "foreach": FLAG_OR_NONE,
    }
    _load_hint = "; load a base's own state with opt.base.load_state_dict(), before it is wrapped"

    def __init__(
        self,
        base: Optimizer,
        *,
        tune_every: int = 8,
        relative: bool | None = None,
        per_group: bool = False,
        nu: float = 2.0,
        beta: float = 0.9,
        bounds: tuple[float, float] = (0.5, 2.0),
        max_grad_norm: float | None = None,
        replay_rng: bool = True,
    ) -> None:
        own: dict[str, Any] = {
            "tune_every": tune_every,
            "relative": not _is_plain_sgd(base) if relative is None else relative,
            "per_group": per_group,
            "nu": nu,
            "beta": beta,
            "bounds": bounds,
            "max_grad_norm": max_grad_norm,
            "replay_rng": replay_rng,
        }
        check(self.OPTIONS, own)
        own["bounds"] = tuple(bounds)
        _refuse(base, own)
        sharded.refuse_private_optimizers(type(self).__name__)
        self.base = base
        groups, state = base.param_groups, base.state
        self._start()
        with all_or_nothing(lambda: base.__dict__.update(param_groups=groups, state=state)):
            super().__init__([dict(group) for group in groups], base.defaults | own)
        self.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the base."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the base, which holds this optimizer's state too."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    _first_half, _second_half, _single_pass = first_half, second_half, single_pass

    @property
    def _steps_as(self) -> str:  # type: ignore[override]
        return type(self.base).__name__

    @property
    def curvature(self) -> Tensor:
        """The curvature of the loss along the last measured step, <G, dtheta> / |dtheta|^2.

        A 0-d tensor; nan before the first measurement and if the last one was ignored. The raw
        gamma is not its inverse, unless the base is SGD without momentum.
        """
        return self._per_gamma([last_row(group)[0].clone() for group in tuned_groups(self)])

    # ------------------------------------------------------------------------------- state

    def _initialize(self) -> None:
        self.base.step()
        for p in params_of(self):
            if p.requires_grad:
                self.state[p].update(fresh_state(p, displaced=True))

    def _default_state(self, p: Tensor) -> dict[str, Any]:
        return {}  # a base may mistake a non-empty state for its own

    def _clear_state(self) -> None:
        for state in self.state.values():
            for name in PARAMETER_STATE:
                state.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        count_recent(self)
        return {"defaults": self.defaults, "base": self.base}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base" in state:  # otherwise torch is loading a state_dict: see _restore
            super().__setstate__(state)

    def _restore(self, saved: dict[str, Any]) -> None:
        self.base.load_state_dict(saved)
        upgrade(self)
        super()._restore(saved)


def _is_plain_sgd(base: Any) -> bool:
    return type(base) is torch.optim.SGD and all(
        group["momentum"] == 0 for group in base.param_groups
    )


def _refuse(base: Any, own: dict[str, Any]) -> None:
    """Raise an error for an unsupported base."""
    name = type(base).__name__
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"StepTuned tunes a torch optimizer, got {name}: create one first, such as "
            "torch.optim.AdamW(params)"
        )
    if isinstance(base, TwoPasses | torch.optim.LBFGS):
        raise ValueError(
            f"StepTuned does not support {name}, which uses mini-batches in its own way"
        )
    if any("lr" not in group for group in base.param_groups):
        raise ValueError(f"StepTuned does not support {name}, whose parameter groups have no lr")
    zero = fresh_scalars(torch.device("cpu"))
    taken = {*own, *SCALARS, *fresh_group(zero, 1)} & {
        name for group in base.param_groups for name in group
    }
    if taken:
        raise ValueError(
            f"the parameter groups of {name} already have {', '.join(sorted(taken))}, which "
            "StepTuned would overwrite: create a new base, and wrap it only once"
        )
