"""Runs for the tests of the laboratory."""

import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

import small_data

sys.path.append(str(Path(__file__).parents[1]))  # for other processes that import this file
from processes import MARK, left_behind, wait_until_none
from steptuned.lab.data.sets import SETS

# A shell that starts the tests in the background makes them, and all their child processes,
# ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind():
    """Check that no process started by a test outlives the last test."""
    if not Path("/proc/self/environ").exists():
        yield
        return
    os.environ[MARK] = mark = uuid.uuid4().hex
    yield
    assert wait_until_none(lambda: left_behind(mark)) == {}


@pytest.fixture(scope="session")
def _small_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return small_data.write(folder), folder


@pytest.fixture
def small(_small_files, monkeypatch):
    """Let the laboratory read small data sets.

    Returns what another process needs for the same: see `small_data.use`.
    """
    sets, folder = _small_files
    for name, described in sets.items():
        monkeypatch.setitem(SETS, name, described)
    monkeypatch.setenv("STEPTUNED_DATA", str(folder))
    return sets, folder


@pytest.fixture(autouse=True)
def _no_open_figures():
    """matplotlib warns when a process has many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
