"""The table of measures: one row is enough to show a measure everywhere."""

import pytest

from made_up import put, records_of
from steptuned.lab import measures
from steptuned.lab.experiment import load_all
from steptuned.lab.measures import COMPARED, MEASURES, Measure
from steptuned.lab.report import figures, tables, view
from steptuned.lab.results import Results
from steptuned.lab.search import stages
from steptuned.lab.store import Store
from test_report import data_of, page_of

PERPLEXITY = Measure("perplexity", "test perplexity", "log", "max", ".1f", height=1.0)
EXPERIMENT = """
title = "a new measure"
figure = "loss, accuracy and gamma"
problem = "digits"
seeds = 3
budget = { epochs = 2 }
log_every = 23
[methods.sgd]
lr = 0.1
[methods.adam]
"""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """A store whose logs have a measure that the package does not know, and its row."""
    for module in (measures, figures, view):
        monkeypatch.setattr(module, "MEASURES", (*MEASURES, PERPLEXITY))
    for module in (tables, view, page_of.__globals__["writing"]):
        monkeypatch.setattr(module, "COMPARED", (*COMPARED, PERPLEXITY))
    path = tmp_path / "mine.toml"
    path.write_text(EXPERIMENT)
    (experiment,) = load_all(path, "paper")
    results = Results(Store(tmp_path))
    plan = stages(experiment, results)
    try:
        while True:
            for spec in next(plan)[1]:
                end = {"sgd": 8.0, "adam": 9.0}[spec.method] + spec.seed
                more = {"perplexity": lambda share, end=end: end + share}
                put(results.store, spec, records_of(spec, lambda s: 2 - s, 10, **more))
    except StopIteration as done:
        contents = [experiment.model_dump(mode="json")]
        results.store.remember("mine", "paper", contents, "steptuned run mine.toml")
        return done.value, results


def test_a_new_measure_is_a_new_axis_of_the_figure(outcome):
    drawn = figures.FIGURES["loss, accuracy and gamma"]("mine", [outcome[0]], outcome[1])
    axis = next(axis for axis in drawn.axes if axis.get_ylabel() == "test perplexity")
    assert axis.get_yscale() == "log"


def test_a_new_measure_is_a_new_column_of_the_table_and_part_of_the_ranking(outcome):
    (table,) = tables.summary(*outcome)
    column = table.columns.index("perplexity")
    assert [row[column] for row in table.rows] == ["11.0 (10.0 to 12.0)", "12.0 (11.0 to 13.0)"]
    assert "Highest perplexity: Adam; SGD" in tables.ranking(*outcome)


def test_a_new_measure_is_on_the_page_with_its_best_value(outcome, tmp_path):
    page = page_of(tmp_path)
    (panel,) = data_of(tmp_path)["panels"]
    row = next(row for row in panel["rows"] if row["key"] == "perplexity")
    assert (row["label"], row["axis"]) == ("test perplexity", "log")
    assert '<th scope="col">best perplexity</th>' in page
    assert '<data value="11.0">11.0</data> (10.0 to 12.0)' in page


def test_keys_and_labels_are_unique():
    assert len({measure.key for measure in MEASURES}) == len(MEASURES)
    assert len({measure.label for measure in MEASURES}) == len(MEASURES)
