"""The read side imports nothing that runs experiments."""

import ast
from pathlib import Path

import pytest

import steptuned.lab

LAB = Path(steptuned.lab.__file__).parent
EXECUTE = {"driver", "run", "engine", "cluster", "ranks", "sweep", "plan", "timing"}
READ = [
    "results",
    "statistics",
    "paired_runs",
    "curves",
    "measures",
    "rate",
    "table2",
    *(f"claims.{p.stem}" for p in LAB.glob("claims/*.py")),
    "evidence",
    *(f"report.{p.stem}" for p in LAB.glob("report/*.py")),
]
PURE = [
    "spec",
    "options",
    "experiment",
    "search",
    "store",
    *(f"methods.{p.stem}" for p in LAB.glob("methods/*.py")),
]
LIBRARY = [p for p in LAB.parent.rglob("*.py") if LAB not in p.parents]


def imported(path):
    """The modules that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def path_of(name):
    return LAB / f"{name.replace('.', '/')}.py"


@pytest.mark.parametrize("name", READ + PURE)
def test_reading_does_not_import_running(name):
    path = path_of(name)
    forbidden = {f"steptuned.lab.{module}" for module in EXECUTE}
    assert forbidden.isdisjoint(imported(path)), forbidden & set(imported(path))


@pytest.mark.parametrize("name", PURE)
def test_what_both_sides_share_does_not_import_the_read_side(name):
    found = set(imported(path_of(name)))
    assert not {
        module
        for module in found
        if module.startswith(
            ("steptuned.lab.report", "steptuned.lab.claims", "steptuned.lab.results")
        )
    }


def test_a_run_stores_the_hash_of_the_criteria_without_importing_a_judge():
    criteria = {m for m in imported(path_of("claims.criteria")) if m.startswith("steptuned.")}
    assert criteria == {"steptuned.lab.spec", "steptuned.lab.spec.canonical"}
    assert not list(imported(path_of("claims.__init__")))
    in_run = {m for m in imported(path_of("run")) if m.startswith("steptuned.lab.claims")}
    assert in_run == {
        "steptuned.lab.claims.criteria",
        "steptuned.lab.claims.criteria.criteria_hash",
    }


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(LAB.parent)))
def test_the_library_does_not_import_the_laboratory(path):
    if path.name != "__main__.py":  # the command
        assert not [module for module in imported(path) if module.startswith("steptuned.lab")]


@pytest.mark.parametrize(
    "path", [p for p in LIBRARY if "integrations" not in p.parts], ids=lambda path: path.name
)
def test_the_library_needs_torch_only(path):
    known = {"torch", "steptuned"}
    standard = __import__("sys").stdlib_module_names
    assert {module.split(".")[0] for module in imported(path)} <= known | standard
