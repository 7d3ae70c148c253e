"""The docstrings of Python's standard library, character by character. Needs no download."""

import ast
import functools
import hashlib
import string
import sysconfig
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor, nn
from typing_extensions import Self

from steptuned.lab.data.sets import DataError
from steptuned.lab.networks.transformer import Transformer
from steptuned.lab.options import Count, Whole, conflict
from steptuned.lab.problems.base import Batch, NetworkProblem, ProblemOptions, Stream
from steptuned.lab.problems.mode import as_trained, as_used
from steptuned.lab.spec import derive_seed

# Modules that exist in Python 3.10 to 3.13.
MODULES = """
_pydecimal _pyio argparse ast asyncio/events asyncio/tasks codecs collections/__init__
configparser contextlib difflib doctest email/_header_value_parser email/message enum fractions
ftplib functools http/client http/cookiejar http/server imaplib inspect ipaddress json/__init__
logging/__init__ logging/handlers mailbox optparse os pdb pickletools platform pydoc random shutil
smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading traceback
typing unittest/case unittest/mock urllib/parse urllib/request uuid xml/etree/ElementTree
xml/sax/handler xmlrpc/server
"""
SYMBOLS = "\n" + string.printable[: string.printable.index(" ") + 1]
"""Letters, digits, punctuation, space and newline. All other characters are left out."""


class Text(NetworkProblem):
    """J = mean cross-entropy of the next character, by a small transformer, + lambda/2 |theta|^2.

    A row is a window of ``context`` characters. The first ``rows`` windows of the text are the
    training set, the last ``test_rows`` the test set. J is logged over as many training windows as
    there are test windows, evenly spaced and always the same, with the same dropout masks at every
    evaluation. Other versions of Python have another text: a run's environment has the checksum of
    the text, and a run can only be resumed with the same text.
    """

    class Options(ProblemOptions):
        rows: Whole = 10_000
        test_rows: Whole = 512
        context: Count = 64
        width: Count = 64
        depth: Count = 2
        heads: Count = 4
        dropout: float = 0.1
        batch: Count = 16
        weight_decay: float = 0.0

        @model_validator(mode="after")
        def _check(self) -> Self:
            if self.width % self.heads:
                raise conflict("width", f"must be a multiple of heads = {self.heads}")
            if not 0 <= self.dropout < 1:
                raise conflict("dropout", "must be at least 0 and less than 1")
            return self

        @property
        def training_rows(self) -> int:
            return self.rows

    name: ClassVar[str] = "text"
    description: ClassVar[str] = (
        "the next character of Python's own documentation, a small transformer"
    )
    things: ClassVar[str] = "training windows"

    def __init__(self, options: Options, seed: int, device: torch.device) -> None:
        rows, test_rows, context = options.rows, options.test_rows, options.context
        codes = _codes()
        # In both sets, the last target comes after the last window.
        needed = (rows + test_rows) * context + 2
        if min(rows, test_rows) < 1 or needed > len(codes):
            raise DataError(
                f"rows = {rows}, test_rows = {test_rows}: both must be at least 1, and together at "
                f"most {(len(codes) - 2) // context}, the number of windows of {context} "
                "characters in this Python's text"
            )
        self.train = _windows(codes[: rows * context + 1], context, device)
        self.test = _windows(codes[-test_rows * context - 1 :], context, device)
        self.judged = torch.arange(min(rows, test_rows)) * rows // min(rows, test_rows)
        self.weight_decay, self.device = options.weight_decay, device
        shape = options.model_dump(include={"context", "width", "depth", "heads"})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("initial point", "text", shape, seed))
            self.set_model(Transformer(len(SYMBOLS), **shape, dropout=options.dropout).to(device))
        parts = ["text", rows, options.batch, seed]
        self.stream = Stream(rows, options.batch, reshuffled=True, seed_parts=parts)

    @staticmethod
    def environment() -> dict[str, Any]:
        return {"text": checksum()}

    @property
    def evaluated(self) -> int:
        return len(self.judged) + len(self.test[0])

    def loss(self, batch: Batch) -> Tensor:
        x, y = self.train if batch is None else (part[batch] for part in self.train)
        return _criterion(self.replica(x), y)

    def evaluate(self) -> dict[str, float]:
        with as_trained(self.model, self.device):
            plain = self._means(self.judged, lambda rows: self._measured(self.train, rows))["loss"]
            penalty = self.weight_decay / 2 * sum(p.square().sum().item() for p in self.parameters)
        with as_used(self.model):
            test = self._means(
                torch.arange(len(self.test[0])), lambda rows: self._measured(self.test, rows)
            )
        return {
            "loss": plain + penalty,
            "plain loss": plain,
            "test loss": test["loss"],
            "accuracy": test["accuracy"],
        }

    def _measured(self, part: tuple[Tensor, Tensor], rows: Tensor) -> dict[str, Tensor]:
        x, y = part[0][rows], part[1][rows]
        scores = self.model(x)
        return {"loss": _criterion(scores, y), "accuracy": (scores.argmax(2) == y).float().mean()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"text": checksum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["text"] != checksum():
            texts = f"another text ({state['text']}) than this Python's ({checksum()})"
            raise DataError(f"the run began with {texts}: resume it with its own Python")
        super().load_state_dict(state)


def _criterion(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def _windows(codes: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Consecutive windows, and the next character for each of their characters."""
    return codes[:-1].view(-1, context).to(device), codes[1:].view(-1, context).to(device)


@functools.cache
def text() -> str:
    """The docstrings of the modules. Their source is parsed, not executed."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for module in MODULES.split():
        path = folder / f"{module}.py"
        try:
            tree = ast.parse(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror}; "
                "use a Python that has the source files of its standard library"
            ) from None
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found += [
            ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
        ]
    known = set(SYMBOLS)
    return "".join(
        character for character in "\n\n".join(filter(None, found)) if character in known
    )


@functools.cache
def _codes() -> Tensor:
    return torch.tensor([SYMBOLS.index(character) for character in text()])


@functools.cache
def checksum() -> str:
    """The first 16 digits of the SHA-256 of the text."""
    return hashlib.sha256(text().encode()).hexdigest()[:16]
