"""What Algorithms 3 to 5 of the paper share: their hyper-parameters."""

from typing import Any, ClassVar

from steptuned.lab.methods.base import Bounds, Method, widened


class GradientVariationMethod(Method):
    """A method that measures gamma from one back-propagation per iteration."""

    logs_gamma: ClassVar[bool] = True

    lr: float = 0.1
    delta: float = 0.001
    nu: float = 2.0
    bounds: Bounds = (0.5, 2.0)

    def options(self) -> dict[str, Any]:
        """The options of the optimizer."""
        bounds = widened(self.bounds, self.nu)
        return {"lr": self.lr, "nu": self.nu, "bounds": bounds, "delta": self.delta}
