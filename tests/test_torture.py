"""A short `make torture`: a few kills of each kind, a few sequences of calls."""

import random

import pytest

import torture
from sequences import fuzz
from steptuned import rule


@pytest.mark.parametrize(
    ("kill", "kills"),
    [
        (torture.kill_runs, 2),
        (torture.kill_sweeps, 2),
        (torture.kill_dask, 1),
        (torture.kill_ranks, 1),
    ],
    ids=lambda what: getattr(what, "__name__", ""),
)
def test_kills_at_random_moments_change_no_number(tmp_path, kill, kills):
    outcome = kill(tmp_path, kills, random.Random())
    assert outcome.differences == []
    assert outcome.runs > 0


def test_no_sequence_of_calls_deviates_from_the_twin():
    sequences, differences = fuzz(100, seed=0)
    assert not differences, "\n".join(differences)
    assert sequences == 100


def test_a_wrong_optimizer_is_detected(monkeypatch):
    """gamma that is not clipped."""
    monkeypatch.setattr(rule, "clip", lambda value, bounds: value)
    _, differences = fuzz(50, seed=0, shrink=False)
    assert any("gamma" in text for text in differences)


def test_the_page_reports_what_was_found():
    report = torture.Report(
        seed=7, sequences=1234, different=["DifferenceError: made up"], seconds=600
    )
    report.kinds["single runs"] += torture.Outcome(5, 2, differences=["lost"])
    page = report.page("python tests/torture.py")
    for part in (
        "| single runs | 5 | 2 | 1 |",
        "1,234 random sequences",
        "DifferenceError: made up",
        "lost",
        "in 10 minutes",
    ):
        assert part in page
