"""The order of the test files, and what holds for all of them."""

import os
import sys

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
