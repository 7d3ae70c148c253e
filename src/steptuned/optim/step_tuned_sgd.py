"""Algorithm 2 of the paper: Step-Tuned SGD."""

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from steptuned.optim import sharded
from steptuned.optim.arguments import (
    DELTA,
    FLAG,
    FLAG_OR_NONE,
    LR,
    NON_NEGATIVE,
    POSITIVE,
    Option,
    Options,
    check,
)
from steptuned.optim.halves import first_half, second_half, single_pass
from steptuned.optim.two_passes import TwoPasses


class StepTunedSGD(TwoPasses):
    r"""SGD with a step tuned by curvature, measured by a second pass over the same mini-batch.

    For mini-batches $B_0, B_1, \dots$, from $G_{-1} = 0$ and $\gamma_0 = 1$, iteration k is

    $$\begin{align*}
    \theta_{k+1/2} &= \theta_k - a_k \gamma_k \nabla J_{B_k}(\theta_k), \qquad
    \theta_{k+1} = \theta_{k+1/2} - a_k \gamma_k \nabla J_{B_k}(\theta_{k+1/2}), \\
    \Delta\theta &= \theta_{k+1/2} - \theta_k, \qquad
    \Delta g = \nabla J_{B_k}(\theta_{k+1/2}) - \nabla J_{B_k}(\theta_k), \\
    G_k &= \beta G_{k-1} + (1-\beta) \Delta g, \qquad \hat G_k = G_k / (1 - \beta^{k+1}), \\
    \gamma_{k+1} &= \begin{cases} |\Delta\theta|^2 / \langle \hat G_k, \Delta\theta \rangle
    & \text{if } \langle \hat G_k, \Delta\theta \rangle > 0 \\ \nu & \text{otherwise} \end{cases}
    \quad\text{clipped to } [m, M],
    \end{align*}$$

    with $a_k = \mathrm{lr}$ by default, and with ``decay_every``
    $a_k = \mathrm{lr} / (1 + \lfloor k / \mathrm{decay\_every} \rfloor)^{1/2+\delta}$.

    Each iteration takes two back-propagations of one mini-batch; see ``tune_every`` for fewer.
    There are three call forms, with the same result:

        loss = opt.step(closure)      # (1) the closure is called twice

        for _ in opt.passes():        # (2) the body runs twice
            opt.zero_grad()
            criterion(model(x), y).backward()

        opt.zero_grad()                           # (3) by hand
        criterion(model(x), y).backward()
        opt.half_step()
        criterion(model(x), y).backward()
        opt.step()

    The closure zeroes the gradients, computes the loss, back-propagates and returns the loss.
    Forms (1) and (2) make torch draw the same random numbers in both passes, for example for
    dropout; in form (3), use `steptuned.replay`. One ``step()`` is one iteration in every form.

    Args:
        params: parameters or parameter groups. A group may have its own ``lr``, ``weight_decay``,
            ``maximize`` and ``foreach``. gamma is one number for all groups, unless
            ``per_group=True``.
        lr: the learning rate (the paper's scaling factor alpha), at least 0; a float or a 0-d
            tensor.
        nu: gamma where the curvature is not positive, above 0. Outside the bounds it is clipped to
            them, with a warning.
        beta: decay factor of the average G, in [0, 1).
        bounds: (m, M), 0 < m <= M; gamma is clipped to this interval.
        delta: exponent of the decay beyond 1/2, in [0, 1/2).
        decay_every: ``None``, the default, leaves lr to you and to torch's schedulers. 1 is exactly
            Algorithm 2: a step that decays as 1/sqrt(k). ``len(loader) / 2`` is the schedule with
            which the paper trained its networks, where an epoch is ``len(loader)``
            back-propagations. Use either this or a scheduler, not both.
        weight_decay: lambda of the term lambda/2 |theta|^2 of J, at least 0. Its gradient is part
            of both passes, so its curvature is measured too.
        maximize: maximize J instead. lambda/2 |theta|^2 is still minimized, as in torch's SGD.
        max_grad_norm: clip the update of each pass as if the gradient of J, weight decay included,
            had at most this norm. The curvature is measured with the unclipped gradients and the
            actual displacement.
        foreach: True works on lists of tensors, False on one tensor at a time, None chooses by size
            and device.
        replay_rng: draw the same random numbers in both passes of forms (1) and (2).
        tune_every: T, at least 1. Only every T-th mini-batch is used twice and measured, starting
            with the first. The others are used once, with the current gamma: 1 + 1/T
            back-propagations per mini-batch. See *Fewer measurements* below.
        relative: divide the raw gamma by its running reference before it is clipped, so that
            ``bounds`` limit how far the step may depart from lr, whatever the curvature of the
            network. See *Relative gamma* below.
        per_group: one gamma per parameter group, from sums over the group's parameters only. Then
            `gamma` and the other diagnostics have one entry per group, `stats` takes the index of a
            group, and groups may have their own ``nu``, ``beta``, ``bounds`` and ``relative``.
            Clipping and the decay are common to all groups.

    **Fewer measurements** (``tune_every=T``, T > 1). Form (1) calls the closure once or twice, the
    body of form (2) runs once or twice, and by hand you ask `needs_second_pass`:

        opt.zero_grad()
        criterion(model(x), y).backward()
        if opt.needs_second_pass:
            opt.half_step()
            criterion(model(x), y).backward()
        opt.step()

    k counts mini-batches, used once or twice, so ``decay_every`` and schedulers that step once per
    mini-batch mean the same for every T. The bias correction counts measurements. A schedule may
    change lr between two measurements, so each difference is divided by its step $s$ before it is
    averaged. The n-th measurement, on mini-batch k, has

    $$G_n = \beta G_{n-1} + (1-\beta)\,\Delta g / s_k, \qquad s_k = a_k \gamma_k, \qquad
    \hat G_n = s_k G_n / (1 - \beta^{n+1}).$$

    With clipping, $s_k$ is the clipped step. A measurement made with lr = 0, as at the start of a
    warm-up, is ignored. It is not repeated, and neither is one lost to an overflow under a
    GradScaler.

    **Relative gamma** (``relative=True``). The raw gamma is an inverse curvature, and its size
    depends on the network. The reference is its geometric mean over the measurements with positive
    curvature, weighted towards recent ones:

    $$L_n = .99\, L_{n-1} + .01 \log \gamma^{\mathrm{raw}}_n, \qquad
    \gamma_{k+1} = \gamma^{\mathrm{raw}}_n / \exp\bigl(L_n / (1 - .99^n)\bigr)
    \quad\text{clipped to } [m, M].$$

    So the first such measurement gives 1. If the curvature is not positive, gamma is nu, and the
    reference does not change.

    Examples:
        >>> import torch
        >>> from steptuned import StepTunedSGD
        >>> theta = torch.tensor([3.0, -2.0], requires_grad=True)
        >>> opt = StepTunedSGD([theta], lr=0.4)
        >>> for _ in range(50):
        ...     for _ in opt.passes():
        ...         opt.zero_grad()
        ...         (theta**2).sum().backward()
        >>> bool(theta.abs().max() < 1e-3)
        True
    """

    OPTIONS: ClassVar[Options] = {
        **TwoPasses.OPTIONS,
        "lr": LR,
        "delta": DELTA.per("optimizer"),
        "decay_every": Option(
            lambda v: v is None or POSITIVE.is_valid(v),
            "positive and finite, or None for no decay",
            "optimizer",
        ),
        "weight_decay": NON_NEGATIVE,
        "maximize": FLAG,
        "foreach": FLAG_OR_NONE,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        nu: float = 2.0,
        beta: float = 0.9,
        bounds: tuple[float, float] = (0.5, 2.0),
        delta: float = 0.001,
        decay_every: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        foreach: bool | None = None,
        replay_rng: bool = True,
        tune_every: int = 1,
        relative: bool = False,
        per_group: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "nu": nu,
            "beta": beta,
            "bounds": bounds,
            "delta": delta,
            "decay_every": decay_every,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "max_grad_norm": max_grad_norm,
            "foreach": foreach,
            "replay_rng": replay_rng,
            "tune_every": tune_every,
            "relative": relative,
            "per_group": per_group,
        }
        check(self.OPTIONS, defaults)
        sharded.refuse_private_optimizers(type(self).__name__)
        defaults["bounds"] = tuple(bounds)
        self._start()
        super().__init__(params, defaults)

    _first_half, _second_half, _single_pass = first_half, second_half, single_pass
