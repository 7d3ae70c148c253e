"""Where runs come from: versions, machines, commits, and the criteria of their time."""

from collections.abc import Iterable
from typing import Any

from steptuned.lab.claims.criteria import criteria_hash
from steptuned.lab.claims.verdicts import is_of_other_criteria
from steptuned.lab.results import Results
from steptuned.lab.search import Outcome
from steptuned.lab.spec import RunSpec

Environment = dict[str, Any]
REWRITTEN = ("a74104a5e648", "bc5da248564e", "cd33769821de")
"""Commits of runs in ``evidence/`` that are not in the public history, which was rewritten."""


def environments_of(outcomes: Iterable[Outcome], results: Results) -> list[Environment]:
    """The environment of every run of these experiments, those of the grids included.

    Empty for a run without one.
    """
    specs = {spec.identity: spec for outcome in outcomes for spec in _specs(outcome)}
    runs = [results.run(spec) for spec in specs.values()]
    found = [run.environment() for run in runs if run.folder.exists()]
    return [environment if isinstance(environment, dict) else {} for environment in found]


def _specs(outcome: Outcome) -> list[RunSpec]:
    trials = [trial.spec for group in outcome.groups for trial in group.trials]
    reported = [spec for group in outcome.groups for spec in group.specs.values()]
    return [*reported, *trials, *outcome.star_specs]


def sentences(environments: Iterable[Environment]) -> list[str]:
    """In which environments runs were made, and in which they were resumed."""
    known = [environment for environment in environments if environment]
    resumed = [later for one in known for later in one.get("resumed in", [])]
    made = [f"Made with {one}." for one in _grouped(known)]
    return made + [f"Some of the runs were resumed with {one}." for one in _grouped(resumed)]


def _grouped(environments: Iterable[Environment]) -> list[str]:
    """Different environments in words. Those that differ in their commits only share their words.

    Missing values are shown as question marks.
    """
    commits: dict[str, dict[str, None]] = {}
    for e in environments:
        keys = ("torch", "python", "cpu", "device", "threads")
        torch, python, cpu, device, threads = (e.get(key, "?") for key in keys)
        text = f", text with checksum {e['text']}" if "text" in e else ""
        thread = f"{threads} thread{'s' * (threads != 1)}"
        rest = f"torch {torch}, Python {python}{text}, {cpu}, {device}, {thread}"
        commits.setdefault(rest, {})[f"{e.get('steptuned', '?')} ({e.get('commit', '?')})"] = None
    return [f"steptuned {', '.join(sorted(found))}; {rest}" for rest, found in commits.items()]


def other_criteria(environments: list[Environment]) -> str:
    """A sentence on the runs that were made under other criteria; empty without any."""
    n = sum(map(is_of_other_criteria, environments))
    if not n:
        return ""
    were = "was" if n == 1 else "were"
    return (
        f"Of its {len(environments)} runs, {n} {were} made under other criteria than those of "
        f"this page ({criteria_hash()})."
    )


def rewritten_history(environments: Iterable[Environment]) -> str:
    """A sentence on the commits that are not in the public history; empty without any."""
    made_in = [later for one in environments for later in (one, *one.get("resumed in", []))]
    lost = [one for one in made_in if one.get("commit") in REWRITTEN]
    if not lost:
        return ""
    commits = ", ".join(f"`{commit}`" for commit in sorted({one["commit"] for one in lost}))
    hashes = ", ".join(f"`{h}`" for h in sorted({str(one.get("criteria")) for one in lost}))
    return (
        f"The commits {commits} are not in the public history: runs were made with them before it "
        "was rewritten. The hash of the criteria in the environment of each of these runs "
        f"({hashes}) still shows by which criteria they were made."
    )
