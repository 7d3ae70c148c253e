"""SGD with momentum with a tuned step. Not the paper's."""

from typing import ClassVar

from steptuned.lab.methods.momentum import Momentum
from steptuned.lab.methods.tuned import Tuned


class StepTunedMomentum(Tuned, Momentum):
    name: ClassVar[str] = "step-tuned-momentum"
    label: ClassVar[str] = "SGD with momentum, step-tuned"
    colour: ClassVar[str] = "#E69F00"
    variants: ClassVar[dict[str, tuple[str, str]]] = {
        "step-tuned-momentum-1": ("#A6611A", "-"),
        "step-tuned-momentum-4": ("#A6611A", "--"),
        "step-tuned-momentum-16": ("#A6611A", ":"),
        "step-tuned-momentum-absolute-1": ("#117733", "-"),
        "step-tuned-momentum-absolute-4": ("#117733", "--"),
        "step-tuned-momentum-absolute-16": ("#117733", ":"),
    }
