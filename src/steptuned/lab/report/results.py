"""A page of results in Markdown, from a store and nothing else."""

from pathlib import Path

from steptuned.lab import claims
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report import figures, tables
from steptuned.lab.results import Results, TolerantResults, outcome_of, sources
from steptuned.lab.search import Outcome
from steptuned.lab.store import Store
from steptuned.lab.table2 import Timings

SIZES = {
    "paper": "the paper's own sizes, where it is an experiment of the paper",
    "short": "fewer epochs than scale paper where networks learn images: see the sizes on the figures",
    "small": "smaller than scale paper: see the sizes on the figures",
    "demo": "much smaller than scale paper: see the sizes on the figures",
}


def write(store: Path, page: Path, command: str) -> list[Path]:
    """Write the page, and its figures beside it. Returns what was written."""
    results = TolerantResults(Store(store), [])
    pictures = page.parent / "figures"
    written = [page]
    parts = [f"# Results\n\nMade by `{command}` from the runs it names; nothing here is written by hand."]
    for source in sources(store)[0]:
        panels = [outcome_of(experiment, results) for experiment in source.experiments]
        panels = [outcome for outcome in panels if has_runs(outcome, results)]
        if not panels:
            continue
        name, scale = source.name, source.scale
        stem = figures.safe_name(f"{name}-{scale}")
        written += figures.draw(name, panels, results, pictures, stem)
        parts.append(f"## {name}, scale {scale}\n\n{SIZES[scale].capitalize()}. {_machine(panels, results)}")
        parts.append(f"![{name} at scale {scale}](figures/{stem}.png)")
        for outcome in panels:
            parts += [outcome.experiment.note] if outcome.experiment.note else []
            parts += [table.markdown() for table in tables.summary(outcome, results)]
            parts += [sentence] if (sentence := tables.ranking(outcome, results)) else []
    for (scale, where), timings in Timings(store).sets().items():
        missing = [letter for letter in TABLE_1 if letter not in {timing.problem for timing in timings}]
        note = f" Not measured: {', '.join(f'({letter})' for letter in missing)}." if missing else ""
        parts.append(f"## table-2, scale {scale}, {where}\n\n{environment_sentence(timings[0].environment)}{note}")
        parts += [table.markdown() for table in tables.wall_clock(timings)]
    judged = claims.judge(store)
    known = [(claim, judgement) for claim, judgement in judged if judgement.verdict != "not run"]
    open_ = ", ".join(str(claim.number) for claim, judgement in judged if judgement.verdict == "not run")
    parts.append("## The paper's claims, as far as these runs go")
    parts += [table.markdown() for table in tables.claims(known)] if known else []
    parts += [table.markdown() for table in tables.profiles(store)]
    parts.append(f"Not judged (runs missing): {open_ or 'none'}.")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n")
    return written


def has_runs(outcome: Outcome, results: Results) -> bool:
    return any(results.final(spec) is not None for group in outcome.groups for spec in group.specs.values())


def _machine(panels: list[Outcome], results: Results) -> str:
    """With what the runs were made: all the different environments."""
    specs = [spec for outcome in panels for group in outcome.groups for spec in group.specs.values()]
    environments = [results.run(spec).environment() for spec in specs]
    return " ".join(dict.fromkeys(environment_sentence(e) for e in environments if e))


def environment_sentence(e: dict[str, object]) -> str:
    """With what, and on what; a run of another origin may not say all of it."""
    said = {key: e.get(key, "?") for key in ("steptuned", "commit", "torch", "python", "cpu", "device", "threads")}
    text = f" with the text {e['text']}" if "text" in e else ""
    versions = f"steptuned {said['steptuned']} ({said['commit']}), torch {said['torch']}, Python {said['python']}{text}"
    return f"{versions}, {said['cpu']}, {said['device']}, {said['threads']} thread{'s' * (said['threads'] != 1)}."
