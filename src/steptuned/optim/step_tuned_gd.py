"""Algorithm 1 of the paper: full-batch gradient descent with a tuned step."""

from torch.optim.optimizer import ParamsT

from steptuned.optim.gradient_variation import GradientVariation


class StepTunedGD(GradientVariation):
    r"""Algorithm 1: gradient descent with the step $\mathrm{lr}\,\gamma_k$, for exact gradients.

    $\gamma_k = |\Delta\theta_k|^2 / \langle \Delta g_k, \Delta\theta_k \rangle$ where that is
    positive, and nu otherwise; neither clipped nor decayed. One back-propagation per iteration.

    Args:
        params: parameters or parameter groups, which may have their own ``lr``.
        lr: the scaling factor alpha.
        nu: gamma where the curvature is not positive.
    """

    def __init__(self, params: ParamsT, lr: float = 0.1, nu: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "nu": nu})
