"""The problems that are minimised, one per file. Add a problem by adding a file."""

from steptuned.lab.discovery import classes_in_package
from steptuned.lab.problems.base import Problem

PROBLEMS: dict[str, type[Problem]] = classes_in_package(
    __name__,
    Problem,  # type: ignore[type-abstract]
)
"""Every problem by its name."""
