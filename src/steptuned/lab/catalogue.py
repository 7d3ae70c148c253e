"""The experiments of the package by name, and what can be used in experiments."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from steptuned.lab.experiment import Experiment, load, load_all, panels_of, paper_experiments
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.terminal import RequestError, open_table

ILLUSTRATION = "figure-1"
WALL_CLOCK = "table-2"

Figures = dict[str, list[Experiment]]
"""By the name of a figure, the experiments that are its panels."""


def experiments_named(names: list[str], scale: str) -> Figures:
    """The experiments of the package with these names, of which ``all`` means every one."""
    files = paper_experiments()
    pairs_of = [(path, panel) for path in files.values() for panel in panels_of(path)]
    panels = {path.stem + panel: (path, panel) for path, panel in pairs_of}
    known = [ILLUSTRATION, *files, WALL_CLOCK]
    for name in names:
        if name not in [*known, *panels, "all"]:
            valid = f"all, {', '.join(known)}, or a panel such as {next(iter(panels))}"
            raise RequestError(f"there is no experiment {name!r}; valid: {valid}")
    figures: Figures = {}
    for name in known if "all" in names else names:
        if name in panels:
            path, panel = panels[name]
            figures[name] = [load(path, scale, panel)]
        elif name in files:
            figures[name] = load_all(files[name], scale)
    return figures


def is_named(name: str, names: list[str]) -> bool:
    return name in names or "all" in names


def tables() -> list[Table]:
    """The problems, methods and experiments of the package."""
    problems = [(name, cls.description, pairs(cls.defaults)) for name, cls in PROBLEMS.items()]
    methods = [(name, method.label, pairs(method.defaults)) for name, method in METHODS.items()]
    experiments = [
        (ILLUSTRATION, "a negative and a positive curvature step"),
        *((name, _title(path)) for name, path in paper_experiments().items()),
        (WALL_CLOCK, "time per epoch relative to SGD, on problems (a) to (f)"),
    ]
    options = "options and defaults"
    return [
        _table("problems", ("name", "what", options), problems),
        _table("methods", ("name", "what", options), methods),
        _table("experiments", ("name", "what"), experiments),
    ]


def pairs(values: dict[str, Any]) -> str:
    """Names and values in a line."""
    texts = {k: json.dumps(v) if isinstance(v, list) else v for k, v in values.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())


def _table(title: str, columns: tuple[str, ...], rows: list[Any]) -> Table:
    table = open_table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _title(path: Path) -> str:
    panels = [f"({panel}) {load(path, 'paper', panel).title}" for panel in panels_of(path)]
    return "; ".join(panels) or load(path, "paper").title
