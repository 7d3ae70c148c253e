"""AdamW with a tuned step. Not the paper's."""

from typing import ClassVar

from steptuned.lab.methods.adamw import AdamW
from steptuned.lab.methods.tuned import Tuned


class StepTunedAdamW(Tuned, AdamW):
    name: ClassVar[str] = "step-tuned-adamw"
    label: ClassVar[str] = "AdamW, step-tuned"
    colour: ClassVar[str] = "#CC79A7"
