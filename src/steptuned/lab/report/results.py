"""A page of results in Markdown, from a store and nothing else."""

from pathlib import Path

from steptuned.lab import claims
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report import figures, tables
from steptuned.lab.results import Results, Source, TolerantResults, outcome_of, sources
from steptuned.lab.search import Outcome
from steptuned.lab.store import Store
from steptuned.lab.table2 import Timings

SEE = "see the sizes on the figures"
SIZES = {
    "paper": "the paper's own sizes, where it is an experiment of the paper",
    "short": f"fewer epochs than scale paper where networks learn images: {SEE}",
    "small": f"smaller than scale paper: {SEE}",
    "demo": f"much smaller than scale paper: {SEE}",
}
VERSIONS = ("steptuned", "commit", "torch", "python", "cpu", "device", "threads")


def write(store: Path, page: Path, command: str) -> list[Path]:
    """Write the page, and its figures beside it. Returns the paths that were written."""
    results = TolerantResults(Store(store), [])
    origin = f"Made by `{command}` from the runs it names; nothing here is written by hand."
    parts, written = [f"# Results\n\n{origin}"], [page]
    for source in sources(store)[0]:
        section, pictures = _figure(source, results, page.parent / "figures")
        parts += section
        written += pictures
    parts += [*_timings(store), *_claims(store)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n")
    return written


def _figure(source: Source, results: Results, folder: Path) -> tuple[list[str], list[Path]]:
    """The section of a figure, and its files; nothing if it has no finished runs."""
    outcomes = [outcome_of(experiment, results) for experiment in source.experiments]
    outcomes = [outcome for outcome in outcomes if has_runs(outcome, results)]
    if not outcomes:
        return [], []
    name, scale = source.name, source.scale
    stem = figures.safe_name(f"{name}-{scale}")
    size = f"{SIZES[scale].capitalize()}. {_machine(outcomes, results)}"
    parts = [f"## {name}, scale {scale}\n\n{size}"]
    parts.append(f"![{name} at scale {scale}](figures/{stem}.png)")
    for outcome in outcomes:
        parts += [outcome.experiment.note] if outcome.experiment.note else []
        parts += [table.markdown() for table in tables.summary(outcome, results)]
        parts += [sentence] if (sentence := tables.ranking(outcome, results)) else []
    return parts, figures.draw(name, outcomes, results, folder, stem)


def _timings(store: Path) -> list[str]:
    parts = []
    for (scale, where), timings in Timings(store).sets().items():
        measured = {timing.problem for timing in timings}
        missing = ", ".join(f"({letter})" for letter in TABLE_1 if letter not in measured)
        note = f" Not measured: {missing}." if missing else ""
        machine = environment_sentence(timings[0].environment)
        parts.append(f"## table-2, scale {scale}, {where}\n\n{machine}{note}")
        parts += [table.markdown() for table in tables.wall_clock(timings)]
    return parts


def _claims(store: Path) -> list[str]:
    judged = claims.judge(store)
    known = [(claim, j) for claim, j in judged if j.verdict != "not run"]
    missing = ", ".join(str(claim.number) for claim, j in judged if j.verdict == "not run")
    parts = ["## The paper's claims, as far as these runs go"]
    parts += [table.markdown() for table in tables.claims(known)] if known else []
    parts += [table.markdown() for table in tables.profiles(store)]
    return [*parts, f"Not judged (runs missing): {missing or 'none'}."]


def has_runs(outcome: Outcome, results: Results) -> bool:
    """Whether any run of a winner is finished."""
    return any(results.final(s) is not None for g in outcome.groups for s in g.specs.values())


def _machine(outcomes: list[Outcome], results: Results) -> str:
    """All the different environments that the runs were made in."""
    groups = [group for outcome in outcomes for group in outcome.groups]
    specs = [spec for group in groups for spec in group.specs.values()]
    environments = [results.run(spec).environment() for spec in specs]
    return " ".join(dict.fromkeys(environment_sentence(e) for e in environments if e))


def environment_sentence(environment: dict[str, object]) -> str:
    """Versions and machine in a sentence; runs that were made elsewhere may not have them all."""
    e = {key: environment.get(key, "?") for key in VERSIONS}
    text = f" with the text {environment['text']}" if "text" in environment else ""
    package = f"steptuned {e['steptuned']} ({e['commit']})"
    versions = f"{package}, torch {e['torch']}, Python {e['python']}{text}"
    threads = f"{e['threads']} thread{'s' * (e['threads'] != 1)}"
    return f"{versions}, {e['cpu']}, {e['device']}, {threads}."
