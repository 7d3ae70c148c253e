"""Barzilai-Borwein with absolute values, which the paper compares with Algorithm 1."""

from torch.optim.optimizer import ParamsT

from steptuned.optim.gradient_variation import GradientVariation


class BarzilaiBorweinGD(GradientVariation):
    r"""Gradient descent with the Barzilai-Borwein step, in absolute value.

    The step is $\mathrm{lr}\,|\Delta\theta_k|^2 / |\langle \Delta g_k, \Delta\theta_k \rangle|$,
    neither clipped nor decayed, for exact gradients. If the curvature is exactly zero, the previous
    gamma is used again. One back-propagation per iteration.

    Args:
        params: parameters or parameter groups, which may have their own ``lr``.
        lr: the scaling factor alpha.
    """

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def _raw_gamma(self, square: float, curvature: float) -> float:
        return square / abs(curvature) if curvature else self.param_groups[0]["gamma"].item()
