"""The report: one folder with a page, its figures and all files that it needs.

It can be read from a disk or put on a web server.
"""

import json
import shutil
import struct
import time
from collections import Counter
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import jinja2

from steptuned.lab.claims.criteria import criteria_hash
from steptuned.lab.claims.judging import Claim
from steptuned.lab.claims.verdicts import Judgement, Verdict, as_data, judge
from steptuned.lab.measures import COMPARED
from steptuned.lab.paired_runs import PairedAtScales
from steptuned.lab.report import figures, provenance, tables
from steptuned.lab.report.results import published, tally_of
from steptuned.lab.report.view import Panel, Shown, View, columns_of, view_of
from steptuned.lab.results import TolerantResults
from steptuned.lab.store import COMPLETE, Store
from steptuned.lab.table2 import Timings

VERDICTS = get_args(Verdict)
HEIGHT = {"page": 220, "row": 150}
"""Pixels of a plot: without its rows, and per row."""
ROW = ("key", "label", "axis", "shown", "format")
"""What the script needs to know about a measure."""


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
    paired = PairedAtScales(folder, results)
    judged = judge(folder, runs=paired)
    runs, measured = results.store.runs(), Timings(folder).sets().values()
    page = _template().render(
        name=folder.resolve().name,
        command=command,
        refresh=refresh,
        runs=len(runs),
        unfinished=sum(run.status() not in COMPLETE for run in runs),
        damaged=list(dict.fromkeys(view.damaged)),
        profiles=tables.profiles(paired),
        figures=shown,
        illustration=_illustration(folder, report),
        timings=[table for timings in measured for table in tables.wall_clock(timings)],
        environments=_environments(view, folder),
        **_claims(judged),
    )
    _copy_files(report)
    data = {"height": HEIGHT, "panels": [_curves(panel) for panel in panels]}
    content = json.dumps(data, separators=(",", ":"), allow_nan=False)
    (report / "data.js").write_text(f"window.STEPTUNED = {content};\n")
    write_claims(judged, report / "claims.json", report / "claims.md")
    path = report / "index.html"
    path.with_suffix(".tmp").write_text(page)
    path.with_suffix(".tmp").replace(path)  # a reader sees the old page or the new one
    return path


def keep_writing(folder: Path, report: Path, command: str, seconds: int) -> None:
    """Write the report at this interval until Ctrl-C. The last page does not reload itself."""
    try:
        while True:
            time.sleep(seconds)
            write(folder, report, command, seconds)
    except KeyboardInterrupt:
        write(folder, report, command)


def write_claims(
    judged: list[tuple[Claim, Judgement]],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Write the judgements as JSON and as tables in Markdown."""
    if json_file is not None:
        json_file.write_text(json.dumps(as_data(judged), indent=1) + "\n")
    if markdown_file is not None:
        text = "\n\n".join(table.markdown() for table in tables.claims(judged))
        markdown_file.write_text(f"{text}\n")


def _claims(judged: list[tuple[Claim, Judgement]]) -> dict[str, Any]:
    """What the page says about the claims."""
    counts = Counter(judgement.verdict for _, judgement in judged)
    packaged = {
        one["number"]: one | {"other": tables.other_criteria(one["other_criteria"])}
        for one in published()
    }
    rows = [
        {
            **data,
            "weakest": str(judgement.weakest or ""),
            "other": tables.other_criteria(judgement.other_criteria),
            "packaged": packaged.get(data["number"]),
        }
        for data, (_, judgement) in zip(as_data(judged), judged, strict=True)
    ]
    return {
        "claims": rows,
        "packaged": tally_of({number: one["verdict"] for number, one in packaged.items()}),
        "symbols": tables.SYMBOLS,
        "comparisons": tables.claims(judged)[2:],
        "criteria": criteria_hash(),
        "added": tables.added_claims(judged),
        "verdicts": [(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]],
    }


def _template() -> jinja2.Template:
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=strict)
    environment.filters["short"] = lambda value: f"{value:.4g}"
    return environment.from_string((_pieces() / "index.html").read_text())


def _pieces() -> Path:
    return Path(str(resources.files("steptuned.lab.report") / "page"))


def _copy_files(report: Path) -> None:
    import plotly

    for name in ("report.css", "report.js"):
        shutil.copyfile(_pieces() / name, report / name)
    plot_library = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    shutil.copyfile(plot_library, report / "plotly.min.js")


def _curves(panel: Panel) -> dict[str, Any]:
    """What the script draws."""
    return {
        "id": panel.id,
        "per_epoch": panel.per_epoch,
        "axes": panel.axes,
        "rows": [{key: getattr(row, key) for key in ROW} for row in panel.rows],
        "lines": [asdict(line) for line in panel.lines],
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
        "other": provenance.other_criteria(provenance.environments_of(figure.outcomes, results)),
        "panels": panels,
        "still": bool(several),
        "tables": [table for outcome in several for table in tables.summary(outcome, results)[1:]],
        "alt": " ".join(panel["alt"] for panel in panels),
    }


def _shown(panel: Panel) -> dict[str, Any]:
    losses = [f"{row['label']} {row['loss']['mean']}" for row in panel.finals if "loss" in row]
    words = f"Curves of {', '.join(row.label for row in panel.rows)}." if panel.rows else ""
    columns = [column for measure in COMPARED for column in columns_of(measure)]
    return {
        **vars(panel),
        "anchor": figures.safe_name(panel.id),
        "has_quartiles": any(b.quartiles for line in panel.lines for b in line.bands.values()),
        "has_curves": any(line.y for line in panel.lines),
        "height": HEIGHT["page"] + HEIGHT["row"] * sum(row.shown for row in panel.rows),
        "columns": [column for column in columns if any(column in row for row in panel.finals)],
        "alt": f"{panel.title}. {words} Mean loss at the end: {', '.join(losses) or 'none yet'}.",
    }


def _illustration(folder: Path, report: Path) -> tuple[int, int] | None:
    """Copy Figure 1, which needs no runs, if it was drawn. Returns its width and height."""
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
    timed = [t.environment for timings in Timings(folder).sets().values() for t in timings]
    return provenance.sentences([*view.environments, *timed])
