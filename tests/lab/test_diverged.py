"""What the page of results and the figures say of seeds that diverged, and of runs not made."""

import numpy as np
import pytest
from matplotlib import pyplot as plt

from made_up import OnePointGrids, diverge, fill
from steptuned.lab import paired_runs
from steptuned.lab.claims.judging import TUNED
from steptuned.lab.paired_runs import PairedRuns
from steptuned.lab.report import figures, prose, tables
from steptuned.lab.report.axes import draw_seeds
from steptuned.lab.statistics import compare_ratios
from steptuned.lab.store import Store
from test_prose import tuned_records


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Figure 4 (d) with 5 seeds, of which two of Step-Tuned SGD diverge in mid-training."""
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))
    fill(tmp_path, "figure-4d", tuned_records, "short")
    for run in Store(tmp_path).runs():
        if run.spec.method == TUNED and run.spec.seed in (2, 4):
            # No measurement since the last record was finite: shares, but no quartiles.
            nothing = {"raw gamma median": None, "at lower": 0.0, "at upper": 0.0}
            diverge(tmp_path, run, at=0.6, **nothing)
    return PairedRuns(tmp_path, "short")


def test_the_table_and_the_sentences_name_them_and_do_not_rank_the_method(runs):
    outcome = runs.outcome("figure-4d")
    against, gamma, ends, diverged = prose.sentences(outcome, runs)
    assert "below SGD's in 3 of 5 seeds" in against
    assert "inside its bounds" in gamma
    assert "Step-Tuned SGD" not in ends, "the mean of the other seeds would flatter it"
    assert diverged == "Diverged, so not ranked: Step-Tuned SGD (2 of 5 seeds)."
    (table,) = tables.summary(outcome, runs.results)
    assert [row[2] for row in table.rows] == ["5/5", "5/5", "5/5", "3/5, 2 diverged"]
    assert "Step-Tuned SGD" not in tables.ranking(outcome, runs.results)


def test_a_share_of_iterations_does_not_count_a_record_without_measurements(runs):
    (group,) = (g for g in runs.outcome("figure-4d").groups if g.entry.name == TUNED)
    found = prose.tuning_of(group, runs.results)
    assert (found.early, found.late) == (4.0, 0.2)
    assert found.inside == pytest.approx(1 - found.at_lower)


def test_a_figure_draws_the_median_of_the_other_seeds_to_the_end(runs):
    outcome = runs.outcome("figure-4d")
    (series,) = (
        one for one in figures.series_of(outcome, runs.results.records) if one.name == TUNED
    )
    assert series.diverged == {2, 4}
    figure, axis = plt.subplots()
    draw_seeds(axis, series, series.values("loss"), lambda r: r["bp"], True, spread="lines")
    *_, median = axis.lines
    assert len(axis.lines) == 6, "five seeds and their median"
    assert max(median.get_xdata()) == outcome.groups[0].specs[1].budget
    assert median.get_label().endswith(", 2 diverged")
    plt.close(figure)


class TwoRates(OnePointGrids):
    """One point in every grid, and two learning rates for Adam."""

    def _one_point(self, entry):
        only = super()._one_point(entry)
        lr = entry.axes["lr"][:2] if entry.name == "adam" else only.axes["lr"]
        return only.model_copy(update={"axes": {**only.axes, "lr": lr}})


def test_a_method_whose_whole_grid_diverged_is_not_called_incomplete(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", TwoRates(seeds=3))
    fill(tmp_path, "figure-4d", tuned_records, "short")
    for run in Store(tmp_path).runs():
        if run.spec.method == "adam":
            diverge(tmp_path, run)
    runs = PairedRuns(tmp_path, "short")
    *_, last = prose.sentences(runs.outcome("figure-4d"), runs)
    assert last == "Diverged, so not ranked: Adam (all 2 points of its grid)."


def test_a_method_without_complete_runs_has_no_number_of_back_propagations(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=3))

    def records(spec):
        missing = spec.seed > 0 and (spec.method == "rmsprop" or spec.seed == 3)
        return None if missing else tuned_records(spec)

    fill(tmp_path, "figure-4d", records, "short")
    runs = PairedRuns(tmp_path, "short")
    (table,) = tables.summary(runs.outcome("figure-4d"), runs.results)
    rows = {row[0].split(" (")[0]: row for row in table.rows}
    assert [title for title in table.columns if " to J = " in title] == [table.columns[5]]
    assert (rows["RMSprop"][2], rows["RMSprop"][5]) == ("0/3, incomplete", "")
    assert rows["Adam"][2] == "2/3, incomplete"
    assert rows["Adam"][5].endswith("(2/2)")


def test_ties_are_not_wins():
    c = compare_ratios([1, 1, 1, 2, np.inf], [2, 2, 2, 1, np.inf])
    assert (c.wins, c.n, c.better) == (3, 5, 0.7)
