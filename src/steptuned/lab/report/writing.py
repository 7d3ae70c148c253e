"""The report: one folder with a page, its figures and all it needs, to be read from a disk or put on a web server."""

import json
import shutil
import struct
from collections import Counter
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import jinja2

from steptuned.lab import claims
from steptuned.lab.report import figures, tables
from steptuned.lab.report.results import environment_sentence
from steptuned.lab.report.view import Panel, Shown, View, view_of
from steptuned.lab.results import TolerantResults
from steptuned.lab.store import COMPLETE, Store
from steptuned.lab.table2 import Timings

VERDICTS = get_args(claims.Verdict)


def write(folder: Path, report: Path, command: str, refresh: int = 0) -> Path:
    """Write the report of a store. Returns the page."""
    view = view_of(folder)
    results = TolerantResults(Store(folder), [])
    report.mkdir(parents=True, exist_ok=True)
    shown = [_figure(figure, results, report) for figure in view.figures]
    panels = [panel for figure in view.figures for panel in figure.panels]
    index = {panel.id: i for i, panel in enumerate(panels)}
    for figure in shown:
        for panel in figure["panels"]:
            panel["index"] = index[panel["id"]]
    judgements = claims.judge(folder)
    judged = claims.as_data(judgements)
    counts = Counter(claim["verdict"] for claim in judged)
    runs = results.store.runs()
    page = _template().render(
        name=folder.resolve().name,
        command=command,
        refresh=refresh,
        runs=len(runs),
        unfinished=sum(run.status() not in COMPLETE for run in runs),
        damaged=list(dict.fromkeys(view.damaged)),
        claims=[_claim(data, judgement) for data, (_, judgement) in zip(judged, judgements, strict=True)],
        comparisons=tables.claims(judgements)[2:],
        profiles=tables.profiles(folder),
        criteria=claims.criteria_hash(),
        verdicts=[(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]],
        figures=shown,
        illustration=_illustration(folder, report),
        timings=[table for timings in Timings(folder).sets().values() for table in tables.wall_clock(timings)],
        environments=_environments(view, folder),
    )
    _files(report)
    content = {"panels": [_curves(panel) for panel in panels]}
    (report / "data.js").write_text(f"window.STEPTUNED = {json.dumps(content, separators=(',', ':'), allow_nan=False)};\n")
    (report / "claims.json").write_text(json.dumps(judged, indent=1) + "\n")
    (report / "claims.md").write_text("\n\n".join(t.markdown() for t in tables.claims(judgements)) + "\n")
    path = report / "index.html"
    path.with_suffix(".tmp").write_text(page)
    path.with_suffix(".tmp").replace(path)  # whoever reloads it meanwhile sees the old one or the new one
    return path


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["short"] = lambda value: f"{value:.4g}"
    return environment.from_string((_pieces() / "index.html").read_text())


def _pieces() -> Path:
    return Path(str(resources.files("steptuned.lab.report") / "page"))


def _files(report: Path) -> None:
    import plotly

    for name in ("report.css", "report.js"):
        shutil.copyfile(_pieces() / name, report / name)
    shutil.copyfile(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", report / "plotly.min.js")


def _claim(data: dict[str, Any], judgement: claims.Judgement) -> dict[str, Any]:
    """A row of the table of claims."""
    return {**data, "weakest": str(judgement.weakest or ""), "other": tables.other_criteria(judgement)}


def _curves(panel: Panel) -> dict[str, Any]:
    """What the script needs."""
    lines = [asdict(line) for line in panel.lines]
    rows = [asdict(row) for row in panel.rows]
    return {
        "id": panel.id,
        "per_epoch": panel.per_epoch,
        "axes": panel.axes,
        "rows": rows,
        "lines": lines,
    }


def _figure(figure: Shown, results: TolerantResults, report: Path) -> dict[str, Any]:
    stem = figures.safe_name(f"{figure.name}-{figure.scale}")
    written = figures.draw(figure.name, figure.outcomes, results, report / "figures", stem)
    width, height = _size(next(p for p in written if p.suffix == ".png"))
    several = [outcome for outcome in figure.outcomes if outcome.experiment.instances > 1]
    panels = [_shown(panel) for panel in figure.panels]
    return {
        "name": figure.name,
        "scale": figure.scale,
        "anchor": stem,
        "file": stem,
        "width": width,
        "height": height,
        "command": figure.command,
        "panels": panels,
        "still": bool(several),
        "tables": [table for outcome in several for table in tables.summary(outcome, results)[1:]],
        "alt": " ".join(panel["alt"] for panel in panels),
    }


def _shown(panel: Panel) -> dict[str, Any]:
    named = (
        "loss",
        "best loss",
        "accuracy",
        "best accuracy",
        "test loss",
        "best test loss",
    )
    ends = [f"{row['label']} {row['loss']['mean']:.4g}" for row in panel.finals if "loss" in row]
    words = f"Curves of {', '.join(row.title for row in panel.rows)}." if panel.rows else ""
    return {
        **vars(panel),
        "anchor": figures.safe_name(panel.id),
        "has_quartiles": any("gamma median" in y for line in panel.lines for y in line.y),
        "has_curves": any(line.y for line in panel.lines),
        "height": 220 + 130 * sum(row.shown for row in panel.rows),
        "columns": [key for key in named if any(key in row for row in panel.finals)],
        "alt": f"{panel.title}. {words} Mean loss at the end: {', '.join(ends) or 'none yet'}.",
    }


def _illustration(folder: Path, report: Path) -> tuple[int, int] | None:
    """Figure 1 needs no runs: it is taken over as it was drawn. Its width and height."""
    drawn = folder / "figures" / "figure-1.png"
    if not drawn.is_file():
        return None
    for suffix in (".png", ".svg", ".pdf"):
        if drawn.with_suffix(suffix).is_file():
            (report / "figures").mkdir(exist_ok=True)
            shutil.copyfile(drawn.with_suffix(suffix), report / "figures" / f"figure-1{suffix}")
    return _size(drawn)


def _size(png: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


def _environments(view: View, folder: Path) -> list[str]:
    timed = [timing.environment for timings in Timings(folder).sets().values() for timing in timings]
    return list(dict.fromkeys(environment_sentence(e) for e in [*view.environments, *timed]))
