"""The methods that are compared, one per file. Add a method by adding a file."""

from steptuned.lab.discovery import classes_in_package
from steptuned.lab.methods.base import Method

METHODS: dict[str, type[Method]] = classes_in_package(
    __name__,
    Method,  # type: ignore[type-abstract]
)
"""Every method by its name."""
