"""The order of the test files, and what holds for all of them."""

import multiprocessing
import os
import sys

import pytest

# The tests start many processes that import the package: let them keep its compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The size of the terminal in which the tests are started must not change what they see.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

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
