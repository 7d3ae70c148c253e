"""The results page: its numbers are those of the store, and reading does not change the store."""

import re

import pytest
from rich.console import Console

from made_up import ENVIRONMENT, OnePointGrids, fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.engine import LocalEngine, WorkerConfig
from steptuned.lab.experiment import load_all
from steptuned.lab.methods import METHODS
from steptuned.lab.report import figures, provenance, results, tables, writing
from steptuned.lab.results import Results, outcome_of
from steptuned.lab.store import Run, Store, write_json
from steptuned.lab.sweep import Sweep
from steptuned.lab.table2 import Timings
from test_timing import made_up

PANELS = """
figure = "loss, accuracy and gamma"
seeds = 2
log_every = { epochs = 1 }
options = { batch = 32 }
[panels.e]
setting = "e"
[panels.d]
setting = "d"
[methods.sgd]
lr = [0.01, 0.1, 1.0]
[methods.step-tuned-sgd]
lr = 0.1
[scales.demo]
budget = { epochs = 2 }
selection = { after = { epochs = 1 } }
[scales.demo.panels.d]
seeds = 1
"""


@pytest.fixture
def experiments(small, tmp_path):
    path = tmp_path / "figure-9.toml"
    path.write_text(PANELS)
    return path


def run(path, out):
    """Run the command in this process, which knows the small data sets."""
    from steptuned.lab.run import environment_now, execute, folder_of
    from steptuned.lab.search import stages

    environment = environment_now("cpu", 1)
    for experiment in load_all(path, "demo"):
        found = Results(Store(out))
        plan = stages(experiment, found)
        try:
            while True:
                for spec in next(plan)[1]:
                    execute(folder_of(found.store, spec), environment)
        except StopIteration:
            continue


def test_the_page_has_every_figure_and_number_that_the_store_has(experiments, tmp_path):
    out, page = tmp_path / "out", tmp_path / "docs" / "results.md"
    run(experiments, out)
    Timings(out).save(made_up("a"))
    contents = [experiment.model_dump(mode="json") for experiment in load_all(experiments, "demo")]
    Store(out).remember("figure-9", "demo", contents, "steptuned run figure-9.toml --scale demo")
    before = sorted(path for path in out.rglob("*"))
    written = results.write(out, page, "steptuned results out --to docs/results.md")
    assert sorted(path for path in out.rglob("*")) == before, "reading a store changes nothing"
    text = page.read_text()
    assert "steptuned results out --to docs/results.md" in text
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (page.parent / picture).exists()
    assert {path.name for path in written} == {
        "results.md",
        "figure-9-demo.json",
        "figure-9-demo.png",
    }
    for run_ in Store(out).runs():
        if (
            run_.spec.method == "step-tuned-sgd"
            and run_.spec.problem == "autoencoder"
            and run_.spec.seed
        ):
            assert f"{run_.result()['final']['loss']:.4g}" in text
    assert "winner at the edge of the grid: lr" in text or "3 tried" in text
    assert "Not measured: (b), (c), (d), (e), (f)." in text
    assert ", scale paper" not in text, "there are no such runs"
    assert "Not judged (runs missing): 1, 2" in text


ENDS = {"sgd": 3.0, "momentum": 2.5, "adamw": 1.5, "step-tuned-sgd": 2.0}


def text_records(spec):
    if spec.method not in ENDS:
        return None
    end = ENDS[spec.method]
    measures = {"test loss": lambda share: 4 - end, "accuracy": lambda share: share / end}
    return records_of(spec, lambda share: 4 - (4 - end) * share, points=4, **measures)


def test_an_experiment_beyond_the_paper_shows_its_note_and_ranking(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", small := OnePointGrids(seeds=3))
    fill(tmp_path / "out", "text", text_records)
    contents = [small("text", "demo").model_dump(mode="json")]
    Store(tmp_path / "out").remember("text", "demo", contents, "steptuned reproduce text")
    results.write(tmp_path / "out", tmp_path / "text.md", "steptuned results out --to text.md")
    page = " ".join((tmp_path / "text.md").read_text().split())
    assert "Not an experiment of the paper" in page
    assert "smaller than scale paper" in page
    best = "AdamW; Step-Tuned SGD; SGD with momentum; SGD"
    worst = "SGD; SGD with momentum; Step-Tuned SGD; AdamW"
    said = f"Lowest J: {best}. Lowest test loss: {worst}. Highest accuracy: {best}."
    assert f"From best to worst at the end, by the mean of the seeds. {said}" in page
    assert "Not judged (runs missing): 1, 2" in page


def test_runs_under_other_criteria_are_named_even_if_nothing_is_judged(tmp_path):
    fill(tmp_path / "out", "text", text_records)
    page = tmp_path / "text.md"
    results.write(tmp_path / "out", page, "steptuned results out")
    assert "other criteria" not in page.read_text()
    runs = Store(tmp_path / "out").runs()
    write_json(runs[0].folder / "environment.json", {**ENVIRONMENT, "criteria": "another"})
    results.write(tmp_path / "out", page, "steptuned results out")
    said = f"Of its {len(runs)} runs, 1 was made under other criteria than those of this page"
    assert said in page.read_text()
    html = writing.write(tmp_path / "out", tmp_path / "report", "steptuned report").read_text()
    assert said in html


def test_a_page_parses_each_log_once_and_scans_the_store_once(tmp_path, monkeypatch):
    fill(tmp_path / "out", "text", text_records)
    parsed, scans = [], []
    records, present = Run.records, Store.present
    monkeypatch.setattr(Run, "records", lambda run: parsed.append(run.folder) or records(run))
    monkeypatch.setattr(Store, "present", lambda store: scans.append(1) or present(store))
    contents = [paired_runs.experiment_named("text", "demo").model_dump(mode="json")]
    Store(tmp_path / "out").remember("text", "demo", contents, "steptuned reproduce text")
    results.write(tmp_path / "out", tmp_path / "page.md", "steptuned results out")
    assert parsed
    assert len(parsed) == len(set(parsed))
    assert len(scans) == 1


def test_a_figure_comes_before_its_instances_and_continuations(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", small := OnePointGrids(seeds=3))
    names = ["figure-3-longer", "figure-3-instances", "figure-3"]
    for name in names:
        fill(tmp_path / "out", name, lambda spec: records_of(spec, lambda share: 1 - share / 2))
        contents = [small(name, "demo").model_dump(mode="json")]
        Store(tmp_path / "out").remember(name, "demo", contents, "steptuned reproduce")
    results.write(tmp_path / "out", tmp_path / "page.md", "steptuned results out")
    text = (tmp_path / "page.md").read_text()
    places = [text.index(f"### {name}, scale demo") for name in sorted(names)]
    assert places == sorted(places)
    assert "Hyper-parameters are chosen on the first instance; the other 20 are compared." in text
    assert "J at the end, over 20 instances" in text
    assert "| 20/20 |" in text
    assert "21/21" not in text


def test_environments_are_told_once_with_their_text_and_where_runs_were_resumed():
    (said,) = provenance.sentences([{"python": "3", "text": "abc"}] * 2)
    assert "Python 3, text with checksum abc, " in said
    (said,) = provenance.sentences([{"python": "3"}, {}])
    assert "text" not in said
    first = {"steptuned": "1", "commit": "a", "python": "3", "threads": 1}
    later = {**first, "commit": "b", "threads": 2}
    made, resumed = provenance.sentences([first, {**first, "commit": "c", "resumed in": [later]}])
    assert made == "Made with steptuned 1 (a), 1 (c); torch ?, Python 3, ?, ?, 1 thread."
    said = "steptuned 1 (b); torch ?, Python 3, ?, ?, 2 threads"
    assert resumed == f"Some of the runs were resumed with {said}."


def test_commits_outside_the_public_history_are_named_with_their_criteria():
    known, lost = {"commit": "abc", "criteria": "1"}, {"commit": provenance.REWRITTEN[0]}
    assert provenance.rewritten_history([known, {}]) == ""
    resumed = {**known, "resumed in": [{**lost, "criteria": "2"}]}
    said = provenance.rewritten_history([known, resumed])
    assert f"The commits `{provenance.REWRITTEN[0]}` are not in the public history" in said
    assert "(`2`) still shows" in said


def test_no_two_methods_on_mini_batches_look_the_same():
    names = [name for name, method in METHODS.items() if not method.full_batch]
    assert len({METHODS[name].style(name) for name in names}) == len(names)


def test_missing_runs_are_reported(experiments, tmp_path):
    out = tmp_path / "out"
    run(experiments, out)
    experiment = load_all(experiments, "demo")[0]
    runs = [run_ for run_ in Store(out).runs() if run_.spec.problem == experiment.problem]
    lost = next(r for r in runs if r.spec.seed == 1 and r.spec.method == "step-tuned-sgd")
    (lost.folder / "result.json").unlink()
    found = Results(Store(out))
    (table,) = tables.summary(outcome_of(experiment, found), found)
    row = next(row for row in table.rows if row[0].startswith("Step-Tuned"))
    assert row[2] == "1/2, incomplete"


def test_a_figure_has_one_column_per_panel_and_shows_scale_and_size(experiments, tmp_path):
    out = tmp_path / "out"
    run(experiments, out)
    found = Results(Store(out))
    outcomes = [outcome_of(experiment, found) for experiment in load_all(experiments, "demo")]
    figure = figures.FIGURES["loss, accuracy and gamma"]("figure-9", outcomes, found)
    assert len(figure.axes) == 10
    assert "demo scale" in figure.get_suptitle()
    titles = [axis.get_title() for axis in figure.axes]
    assert any("300 training images, 2 epochs, 2 seeds" in title for title in titles)
    assert any("1 seed" in title and "autoencoder" in title for title in titles)
    assert {axis.get_ylabel() for axis in figure.axes} == {
        "training loss J",
        "plain training loss",
        "test accuracy",
        "test loss",
        "gamma",
        "raw gamma",
    }
    gamma = [axis for axis in figure.axes if axis.get_ylabel() == "gamma"]
    assert all(axis.lines for axis in gamma), "gamma of Step-Tuned SGD"
    assert len(gamma) == 2


def test_a_sweep_estimates_the_time_of_each_problem(experiments, tmp_path):
    console = Console(record=True, width=200)
    sweep = Sweep(tmp_path / "out", LocalEngine(1, WorkerConfig()), console)
    for experiment in load_all(experiments, "demo"):
        sweep.announce(experiment)
    said = console.export_text()
    assert "figure-9e (demo): CIFAR-10, LeNet without BatchNorm" in said
    assert len(re.findall(r"at most \d+ runs, about [\d.]+ (s|min|h)", said)) == 2
    assert not (tmp_path / "out").exists(), "nothing is written by an estimate"


def test_a_table_is_plain_text_in_markdown_and_in_the_terminal():
    table = tables.Table("a [title]", ["x|y", "[bold]z"], [["1|2", "[red]no[/]"]])
    assert table.markdown().splitlines()[2:] == [
        r"| x\|y | [bold]z |",
        "| --- | --- |",
        r"| 1\|2 | [red]no[/] |",
    ]
    console = Console(record=True, width=100)
    console.print(table.for_terminal())
    assert "[red]no[/]" in console.export_text()
