"""What a method is: hyper-parameters, an optimizer, a style in figures, and a way to step."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch.optim import Optimizer

from steptuned import RobbinsMonroLR
from steptuned.lab.methods.stepping import SinglePass
from steptuned.lab.options import Options
from steptuned.lab.problems.base import Problem

Decay = Literal["epoch", "iteration", "none"]
"""How often the learning rate decays."""
Bounds = Annotated[tuple[float, float], Field(strict=False)]
"""m and M, between which gamma is clipped. TOML and JSON write them as a list."""


class Method(Options):
    """A method of the comparison. Its fields are the hyper-parameters.

    An experiment sets each hyper-parameter or searches it in a grid. Every class with a ``name``
    in this package, or in a file given as ``--with``, is a method.
    """

    name: ClassVar[str]
    """Its name in experiment files."""
    label: ClassVar[str]
    """Its name in figures and tables."""
    colour: ClassVar[str] = ""
    """Its colour in figures, different from all methods compared with it. Empty: a spare colour."""
    line: ClassVar[str] = "-"
    """Its line style in figures, as Matplotlib writes it."""
    variants: ClassVar[dict[str, tuple[str, str]]] = {}
    """Colours and lines of entries that run this method under another name."""
    family: ClassVar[str] = ""
    """The method it is a variant of, or its own name if it has variants. A figure with many
    methods has one column per family."""
    full_batch: ClassVar[bool] = False
    """Whether each step uses all of the data."""
    logs_gamma: ClassVar[bool] = False
    """Whether its optimizer measures gamma, which is then logged."""
    stepping: ClassVar[type[SinglePass]] = SinglePass
    """How it turns back-propagations into steps."""

    @abstractmethod
    def make_optimizer(self, problem: Problem) -> Optimizer: ...

    def make_scheduler(self, optimizer: Optimizer, problem: Problem) -> RobbinsMonroLR | None:
        """The learning-rate schedule, stepped after every back-propagation."""
        return None

    @property
    def uses_per_batch(self) -> int:
        """How many steps are made on each mini-batch: the hyper-parameter ``uses``, if any."""
        return getattr(self, "uses", 1)

    @classmethod
    def style(cls, entry: str) -> tuple[str, str] | None:
        """Colour and line of an entry of this method; None if none is defined."""
        if entry == cls.name and cls.colour:
            return cls.colour, cls.line
        return cls.variants.get(entry)


def robbins_monro(
    optimizer: Optimizer,
    problem: Problem,
    delta: float,
    decay: Decay,
) -> RobbinsMonroLR | None:
    """The paper's decay, for optimizers that do not have it built in."""
    if decay == "none":
        return None
    return RobbinsMonroLR(optimizer, delta, problem.stream.per_epoch if decay == "epoch" else 1)


def widened(bounds: Any, nu: float) -> tuple[float, float]:
    """The bounds, with M raised to nu if nu is larger.

    Algorithm 2 would clip nu; the proof of its convergence takes max(M, nu).
    """
    m, M = bounds
    return m, max(M, nu)
