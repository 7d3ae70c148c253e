"""Runs for the tests of the laboratory."""

import multiprocessing
import os

import pytest
import small_data
import torch

from steptuned.lab.data import SETS
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.spec import RunSpec


def make_spec(method="step-tuned-sgd", problem="regression", seed=0, budget=200, log_every=10, options=None, **hyper):
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


@pytest.fixture(scope="session")
def processes():
    """Real processes that start quickly: forked from a server that has the laboratory loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["steptuned.lab.run"])
    return context


@pytest.fixture(scope="session")
def _small_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return small_data.write(folder), folder


@pytest.fixture
def small(_small_files, monkeypatch):
    """The laboratory reads small data sets. Gives what a process of its own needs for that: see `small_data.use`."""
    sets, folder = _small_files
    for name, described in sets.items():
        monkeypatch.setitem(SETS, name, described)
    monkeypatch.setenv("STEPTUNED_DATA", str(folder))
    return sets, folder


on_real_data = pytest.mark.skipif("STEPTUNED_DATA" not in os.environ, reason="STEPTUNED_DATA is not set: no official data to read")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
