"""Algorithm 2 of the paper: Step-Tuned SGD."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from steptuned.optim import sharded
from steptuned.optim.arguments import check
from steptuned.optim.halves import first_half, second_half, single_pass
from steptuned.optim.two_passes import TwoPasses


class StepTunedSGD(TwoPasses):
    r"""SGD with a step tuned by curvature, which a second pass over the same mini-batch shows.

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

    with $a_k = \mathrm{lr}$ by default, and $a_k = \mathrm{lr} / (1 + \lfloor k / \mathrm{decay\_every} \rfloor)^{1/2+\delta}$
    with ``decay_every``.

    Each iteration takes two back-propagations of one mini-batch; see ``tune_every`` for fewer.
    Three ways to give them, with the same result:

        loss = opt.step(closure)      # (1) the closure, which zeroes, computes and back-propagates, is called twice

        for _ in opt.passes():        # (2) the body runs twice
            opt.zero_grad()
            criterion(model(x), y).backward()

        opt.zero_grad()                           # (3) by hand
        criterion(model(x), y).backward()
        opt.half_step()
        criterion(model(x), y).backward()
        opt.step()

    Forms (1) and (2) make torch draw the same random numbers in both passes (dropout); in form (3)
    `steptuned.replay` does. One ``step()`` is one iteration in every form.

    Args:
        params: parameters or parameter groups. A group may have its own ``lr``, ``weight_decay``, ``maximize`` and ``foreach``.
            gamma is one number for all groups, unless ``per_group=True``.
        lr: the scaling factor alpha, at least 0; a float or a 0-d tensor.
        nu: gamma where the curvature is not positive, above 0. Beyond the bounds it is clipped to them, with a warning.
        beta: memory of the average G, in [0, 1).
        bounds: (m, M), 0 < m <= M, between which gamma is kept.
        delta: exponent of the decay beyond 1/2, in [0, 1/2).
        decay_every: ``None``, the default, leaves lr to you and to torch's schedulers. 1 is Algorithm 2 to the letter: a step that
            falls as 1/sqrt(k). ``len(loader) / 2`` is the schedule the paper trained its networks with, where an epoch is
            ``len(loader)`` back-propagations. Use either this or a scheduler, not both.
        weight_decay: lambda of the term lambda/2 |theta|^2 of J, at least 0. Its gradient is part of both passes, so its
            curvature is measured too.
        maximize: maximise J instead. lambda/2 |theta|^2 is minimised all the same, as torch's SGD has it.
        max_grad_norm: clip the update of each pass as if the gradient of J, weight decay included, had at most this norm.
            The curvature is measured with the gradients as they are and the displacement as it was.
        foreach: True works on lists of tensors at once, False on one after the other, None chooses by size and device.
        replay_rng: the same random numbers in both passes of forms (1) and (2).
        tune_every: T, at least 1. Only every T-th mini-batch is used twice and measured, beginning
            with the first. The others are used once, with the gamma there is: 1 + 1/T
            back-propagations per mini-batch. See *Fewer measurements* below.
        relative: divide the raw gamma by a running reference of it before it is clipped, so that
            ``bounds`` say how far the step may leave lr, whatever the curvature of the network. See
            *Relative gamma* below.
        per_group: one gamma for each parameter group, from sums over the group's parameters only.
            Then `gamma` and its like have one entry per group, `stats` takes the index of a group,
            and groups may have their own ``nu``, ``beta``, ``bounds`` and ``relative``. Clipping
            and the decay are common to all.

    **Fewer measurements** (``tune_every=T``, T > 1). Form (1) calls the closure once or twice, the
    body of form (2) runs once or twice, and by hand `needs_second_pass` tells:

        opt.zero_grad()
        criterion(model(x), y).backward()
        if opt.needs_second_pass:
            opt.half_step()
            criterion(model(x), y).backward()
        opt.step()

    k counts mini-batches, used once or twice, so ``decay_every`` and schedulers that step with
    every mini-batch mean the same for every T; the bias correction counts measurements. A schedule
    may change lr between two measurements, so each one is divided by the step $s$ it was made with
    before it is averaged: the n-th, on mini-batch k, has

    $$G_n = \beta G_{n-1} + (1-\beta)\,\Delta g / s_k, \qquad s_k = a_k \gamma_k, \qquad
    \hat G_n = s_k G_n / (1 - \beta^{n+1}).$$

    With clipping, $s_k$ is the step after it. A measurement lost to an overflow under a GradScaler
    is not repeated.

    **Relative gamma** (``relative=True``). The raw gamma is an inverse curvature, whose size
    depends on the network. The reference is its geometric mean over the measurements with positive
    curvature, the recent ones weighing most:

    $$L_n = .99\, L_{n-1} + .01 \log \gamma^{\mathrm{raw}}_n, \qquad
    \gamma_{k+1} = \gamma^{\mathrm{raw}}_n / \exp\bigl(L_n / (1 - .99^n)\bigr)
    \quad\text{clipped to } [m, M].$$

    So the first such measurement gives 1. Where the curvature is not positive, gamma is nu, and the
    reference stays.

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
        check(**defaults)
        sharded.refuse_private(type(self).__name__)
        defaults["bounds"] = tuple(bounds)
        self._start()
        super().__init__(params, defaults)

    _first_half, _second_half, _single_pass = first_half, second_half, single_pass
