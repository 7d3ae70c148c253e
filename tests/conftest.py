"""The order of the test files, and what holds for all of them."""

import multiprocessing
import os
import sys

import pytest
import torch

# The tests start many processes that import the package: let them keep its compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The size of the terminal in which the tests are started must not change what they see.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Also in the processes that the tests start. With more, tiny networks are several times slower.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

LONGEST = (
    "test_torchrun",
    "test_resume",
    "test_documents",
    "test_ranks",
    "test_torture",
    "test_cluster",
    "test_cli",
    "test_evidence",
    "test_report",
    "test_published",
)
"""The files that take longest. They start first, so that no process works alone at the end."""


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))


PRELOADED = ("steptuned.lab.run", "torch._dynamo", "sklearn.datasets", "pytest")
"""What takes long to import in the processes that tests start."""


@pytest.fixture(scope="session")
def processes():
    """Processes that start quickly: they are forked from a server that has imported the lab.

    Their environment is the server's, so variables set later are not in it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


@pytest.fixture(autouse=True)
def _one_thread():
    """Undo what a test may have changed."""
    yield
    torch.set_num_threads(1)
