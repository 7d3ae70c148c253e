"""SGD with momentum with a tuned step. Not the paper's."""

from typing import ClassVar

from steptuned.lab.methods.momentum import Momentum
from steptuned.lab.methods.tuned import Tuned


class StepTunedMomentum(Tuned, Momentum):
    name: ClassVar[str] = "step-tuned-momentum"
    label: ClassVar[str] = "SGD with momentum, step-tuned"
    colour: ClassVar[str] = "#E69F00"
