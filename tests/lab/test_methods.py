"""The methods of the package: one file each, found by name."""

import re
from pathlib import Path

import pytest
import torch

import steptuned.lab.methods
from steptuned.lab.driver import Driver
from steptuned.lab.extensions import extend
from steptuned.lab.methods import METHODS
from steptuned.lab.methods.stepping import LineSearch, SinglePass, TwoPasses
from steptuned.lab.problems import PROBLEMS

FOLDER = Path(steptuned.lab.methods.__file__).parent
SHARED = {"__init__", "base", "gradient_variation", "stepping", "tuned"}


def test_every_file_defines_the_method_of_its_name():
    files = {path.stem.replace("_", "-") for path in FOLDER.glob("*.py") if path.stem not in SHARED}
    assert files == METHODS.keys()
    assert all(method.name == name for name, method in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_label_a_colour_and_defaults_for_json(name):
    method = METHODS[name]
    assert method.label
    assert re.fullmatch("#[0-9A-F]{6}", method.colour)
    assert method().as_dict() == method.defaults
    assert method(**method.defaults) == method()


def test_how_methods_step():
    tuned = ("sgd", "variant", "momentum", "adamw")
    special = {f"step-tuned-{name}": TwoPasses for name in tuned} | {"armijo": LineSearch}
    assert all(method.stepping is special.get(name, SinglePass) for name, method in METHODS.items())
    assert [name for name, method in METHODS.items() if not method.stepping.works_on_ranks] == [
        "armijo"
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_steps_and_resumes_between_any_two_back_propagations(name):
    def driver():
        problem = PROBLEMS["regression"]
        return Driver(name, problem.from_dict({}, 0, torch.device("cpu")), METHODS[name].defaults)

    whole, first, second = driver(), driver(), driver()
    for _ in range(7):
        whole.advance()
    for _ in range(3):
        first.advance()
    second.problem.load_state_dict(first.problem.state_dict())
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        second.advance()
    assert torch.equal(second.problem.theta, whole.problem.theta)
    assert not torch.equal(whole.problem.theta, driver().problem.theta)
    assert second.state_dict()["batches"] == whole.state_dict()["batches"]


EXTENSION = """
from typing import ClassVar
import torch
from steptuned.lab.methods.base import Method
class Nesterov(Method):
    name: ClassVar[str] = "nesterov"
    label: ClassVar[str] = "Nesterov"
    lr: float = 0.1
    weight: float = 0.9
    def make_optimizer(self, problem):
        return torch.optim.SGD(problem.parameters, self.lr, momentum=self.weight, nesterov=True)
"""


def test_an_extension_file_adds_its_methods(tmp_path, monkeypatch):
    monkeypatch.setattr("steptuned.lab.extensions.METHODS", added := dict(METHODS))
    path = tmp_path / "nesterov.py"
    path.write_text(EXTENSION)
    extend([path])
    assert added.keys() - METHODS.keys() == {"nesterov"}
    assert added["nesterov"].defaults == {"lr": 0.1, "weight": 0.9}
    assert added["nesterov"].style("nesterov") is None
