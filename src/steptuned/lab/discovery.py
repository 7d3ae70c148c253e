"""Find what the files of a package, or an extension file, define."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def modules_of(package: str) -> Iterator[ModuleType]:
    """All files of a package, imported."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        yield importlib.import_module(f"{package}.{module.name}")


def classes_in_package(package: str, base: type[T]) -> dict[str, type[T]]:
    """The named subclasses of ``base`` in all files of a package."""
    found: dict[str, type[T]] = {}
    for module in modules_of(package):
        found |= classes_in_module(module, base)
    return found


def classes_in_module(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """The subclasses of ``base`` that a module defines and that have a ``name`` of their own."""
    classes = [item for item in vars(module).values() if isinstance(item, type)]
    own = [cls for cls in classes if cls.__module__ == module.__name__ and "name" in vars(cls)]
    return {vars(cls)["name"]: cls for cls in own if issubclass(cls, base)}
