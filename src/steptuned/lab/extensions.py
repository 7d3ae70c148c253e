"""Problems, methods, figures and claims from files that are not part of the package."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from steptuned.lab.discovery import classes_in_module
from steptuned.lab.methods import METHODS
from steptuned.lab.methods.base import Method
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.base import Problem


class ExtensionError(Exception):
    """An extension file that cannot be used, in one sentence."""


def extend(files: Iterable[Path]) -> None:
    """Execute these files, each once per process, and add their problems, methods and claims."""
    for path in files:
        name = f"steptuned_with_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            continue
        module = _execute(path, name)
        try:
            _add_claims(module)
        except ValueError as error:
            del sys.modules[name]
            raise ExtensionError(f"--with {path}: {error}") from error
        PROBLEMS.update(classes_in_module(module, Problem))  # type: ignore[type-abstract]
        METHODS.update(classes_in_module(module, Method))  # type: ignore[type-abstract]


def _execute(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ExtensionError(f"--with {path}: there is no such Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ExtensionError(f"--with {path}: {type(error).__name__}: {error}") from error
    return module


def _add_claims(module: ModuleType) -> None:
    from steptuned.lab.claims.verdicts import add_claims  # takes a while: it imports SciPy

    add_claims(module)
