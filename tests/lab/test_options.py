"""Options with their types, limits and choices."""

from typing import Annotated, Literal

import pytest
from pydantic import model_validator

from steptuned.lab.methods import METHODS
from steptuned.lab.methods.base import Bounds
from steptuned.lab.options import Count, OptionError, Options, Whole, conflict, one_of
from steptuned.lab.problems import PROBLEMS

TABLE = {"x": 1, "y": 2}


class Some(Options):
    size: float = 1.0
    heads: Count = 2
    rows: Whole = 0
    on: bool = True
    layout: Literal["rows", "columns"] = "rows"
    data: Annotated[str, one_of(TABLE)] = "x"
    bounds: Bounds = (0.5, 2.0)

    @model_validator(mode="after")
    def _check(self):
        if self.layout == "columns" and not self.on:
            raise conflict("layout", "needs on = true")
        return self


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": "1"}, "size = '1': must have the same type as the default, 1.0"),
        ({"size": True}, "size = True: must have the same type as the default, 1.0"),
        ({"heads": 2.0}, "heads = 2.0: must have the same type as the default, 2"),
        ({"heads": True}, "heads = True: must have the same type as the default, 2"),
        ({"heads": 0}, "heads = 0: must be at least 1"),
        ({"rows": -1}, "rows = -1: must be at least 0"),
        ({"on": 1}, "on = 1: must have the same type as the default, True"),
        ({"layout": "diagonal"}, "layout = 'diagonal' is not one of columns, rows"),
        ({"data": "z"}, "data = 'z' is not one of x, y"),
        ({"data": ["x"]}, "data = ['x'] is not one of x, y"),
        ({"bounds": [1.0]}, "bounds = [1.0]: must have the same type as the default, [0.5, 2.0]"),
        (
            {"bounds": [1.0, "2"]},
            "bounds = [1.0, '2']: must have the same type as the default, [0.5, 2.0]",
        ),
        (
            {"colour": 3},
            "colour is not an option; the options are bounds, data, heads, layout, on, rows, size",
        ),
        (
            {"self": 3},
            "self is not an option; the options are bounds, data, heads, layout, on, rows, size",
        ),
        ({"layout": "columns", "on": False}, "layout = 'columns': needs on = true"),
    ],
)
def test_a_mistake_is_one_sentence_with_name_value_and_what_is_valid(values, sentence):
    with pytest.raises(OptionError) as error:
        Some(**values)
    assert str(error.value) == sentence


def test_integers_are_taken_as_floats_and_lists_as_pairs():
    some = Some(size=3, bounds=[1, 2])
    assert (some.size, some.bounds) == (3.0, (1.0, 2.0))
    assert some.as_dict()["bounds"] == [1.0, 2.0]
    assert Some.defaults == Some().as_dict()


def test_options_are_frozen_and_each_needs_a_default():
    with pytest.raises(ValueError, match="frozen"):
        Some().size = 2.0
    with pytest.raises(TypeError, match=r"Without\.size needs a default value"):

        class Without(Options):
            size: float


def test_choices_may_be_added_later(monkeypatch):
    monkeypatch.setitem(TABLE, "z", 3)
    assert Some(data="z").data == "z"


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_options_of_a_problem_have_its_defaults(name):
    problem = PROBLEMS[name]
    assert problem.name == name
    assert problem.Options().as_dict() == problem.defaults
    assert problem.Options(**problem.defaults) == problem.Options()
    assert problem.Options().per_epoch >= 1


def test_a_new_hyper_parameter_is_checked_like_any_other():
    with pytest.raises(
        OptionError, match=r"^decay = 'weekly' is not one of epoch, iteration, none$"
    ):
        METHODS["sgd"](decay="weekly")
