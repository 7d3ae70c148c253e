"""Specs of small runs, and the mark of tests that need the real images."""

import os

import pytest

from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.spec import RunSpec


def make_spec(
    method="step-tuned-sgd",
    problem="regression",
    seed=0,
    budget=200,
    log_every=10,
    options=None,
    **hyper,
):
    return RunSpec(
        problem=problem,
        options={**PROBLEMS[problem].defaults, **(options or {})},
        method=method,
        hyper={**METHODS[method].defaults, **hyper},
        seed=seed,
        scale="test",
        budget=budget,
        log_every=log_every,
    )


on_real_data = pytest.mark.skipif(
    "STEPTUNED_DATA" not in os.environ, reason="STEPTUNED_DATA is not set: no official data to read"
)
