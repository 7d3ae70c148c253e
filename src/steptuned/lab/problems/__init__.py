"""What is minimised. One problem a file; :data:`PROBLEMS` names them."""

from steptuned.lab.problems.autoencoder import Autoencoder
from steptuned.lab.problems.base import Problem
from steptuned.lab.problems.digits import Digits
from steptuned.lab.problems.images import Images
from steptuned.lab.problems.regression import Regression
from steptuned.lab.problems.text import Text

PROBLEMS: dict[str, type[Problem]] = {
    "regression": Regression,
    "digits": Digits,
    "text": Text,
    "images": Images,
    "autoencoder": Autoencoder,
}
