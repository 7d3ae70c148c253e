"""Step-Tuned SGD for PyTorch: SGD with a step tuned by curvature.

A second pass over each mini-batch measures the curvature.
"""

from importlib.metadata import PackageNotFoundError, version

from steptuned.consistency import check
from steptuned.frozen import frozen_statistics
from steptuned.optim.armijo import ArmijoGD
from steptuned.optim.barzilai_borwein import BarzilaiBorweinGD
from steptuned.optim.gradient_variation import ExactGV, ExpectedGV, StochasticGV
from steptuned.optim.kernel import KernelStatus, kernel_status
from steptuned.optim.step_tuned import StepTuned
from steptuned.optim.step_tuned_gd import StepTunedGD
from steptuned.optim.step_tuned_sgd import StepTunedSGD
from steptuned.rng import replay
from steptuned.schedule import RobbinsMonroLR

try:
    __version__ = version("steptuned")
except PackageNotFoundError:  # imported from a folder on the path, not installed
    __version__ = "unknown"

__all__ = [
    "ArmijoGD",
    "BarzilaiBorweinGD",
    "ExactGV",
    "ExpectedGV",
    "KernelStatus",
    "RobbinsMonroLR",
    "StepTuned",
    "StepTunedGD",
    "StepTunedSGD",
    "StochasticGV",
    "check",
    "frozen_statistics",
    "kernel_status",
    "replay",
]
