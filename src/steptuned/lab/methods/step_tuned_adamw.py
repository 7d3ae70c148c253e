"""AdamW with a tuned step. Not the paper's."""

from typing import ClassVar

from steptuned.lab.methods.adamw import AdamW
from steptuned.lab.methods.tuned import Tuned


class StepTunedAdamW(Tuned, AdamW):
    name: ClassVar[str] = "step-tuned-adamw"
    label: ClassVar[str] = "AdamW, step-tuned"
    colour: ClassVar[str] = "#CC79A7"
    variants: ClassVar[dict[str, tuple[str, str]]] = {
        "step-tuned-adamw-1": ("#762A83", "-"),
        "step-tuned-adamw-4": ("#762A83", "--"),
        "step-tuned-adamw-16": ("#762A83", ":"),
        "step-tuned-adamw-absolute-1": ("#117733", "-"),
        "step-tuned-adamw-absolute-4": ("#117733", "--"),
        "step-tuned-adamw-absolute-16": ("#117733", ":"),
    }
