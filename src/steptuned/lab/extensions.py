"""Files of one's own, with problems, methods and figures that the package does not have: they add them to its tables."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path


class ExtensionError(Exception):
    """A file that cannot be used, in one sentence."""


def extend(files: Iterable[Path]) -> None:
    """Execute these files, each once in a process."""
    for path in files:
        name = f"steptuned_with_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ExtensionError(f"--with {path}: there is no such Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ExtensionError(f"--with {path}: {type(error).__name__}: {error}") from error
