"""Mean and band of the seeds, which figures and the page share."""

import math

import numpy as np
import pytest

from made_up import put, records_of
from steptuned.lab.measures import BY_KEY, LOSS
from steptuned.lab.report.bands import BEYOND, band_of, over_seeds
from steptuned.lab.store import Store
from test_report import LAYOUT, PLOTTED, browser, data_of, fill_own, opened, page_of  # noqa: F401 - a fixture

GAMMA = BY_KEY["gamma"]


def test_the_band_of_seeds_is_their_median_between_smallest_and_largest():
    band = over_seeds([[1.0, 2.0, 3.0], [3.0, 4.0, 8.0], [1.5, 2.5, 3.5]])
    assert band.records.tolist() == [0, 1, 2]
    assert (band.low.tolist(), band.high.tolist()) == ([1, 2, 3], [3, 4, 8])
    assert band.middle.tolist() == [1.5, 2.5, 3.5]
    assert not band.quartiles


def test_a_band_has_the_records_where_every_seed_has_a_finite_value():
    band = over_seeds([[1.0, None, 3.0, math.nan, 5.0], [1.0, 2.0, 3.0, 4.0]])
    assert band.records.tolist() == [0, 2]
    assert over_seeds([]) is None
    assert over_seeds([[math.nan], [1.0]]) is None


def test_quartiles_are_medians_over_the_seeds_and_infinity_is_far_away():
    logs = [
        [{"gamma": 9.0}, {"gamma low": low, "gamma median": low + 1, "gamma high": high}]
        for low, high in ((1.0, math.inf), (2.0, math.inf), (9.0, 10.0))
    ]
    band = band_of(logs, GAMMA)
    assert band.records.tolist() == [1], "the first record has no quartiles yet"
    assert (band.low[0], band.middle[0], band.high[0]) == (2, 3, BEYOND)
    assert band.quartiles


def test_older_logs_have_the_band_of_gamma_itself():
    band = band_of([[{"gamma": 1.0}], [{"gamma": 3.0}], [{"loss": 0.0}]], GAMMA)
    assert (band.low[0], band.middle[0], band.high[0]) == (1, 2, 3)
    assert band_of([[{"gamma": 1.0}]], LOSS) is None


def test_the_page_has_the_median_and_the_range_of_the_seeds(tmp_path):
    fill_own(tmp_path)
    page_of(tmp_path)
    (panel,) = data_of(tmp_path)["panels"]
    for line in panel["lines"]:
        losses = np.array([y["loss"] for y in line["y"]])
        band = line["bands"]["loss"]
        assert band["middle"] == pytest.approx(np.median(losses, axis=0), rel=1e-6)
        assert band["low"] == pytest.approx(losses.min(0), rel=1e-6)
        assert band["high"] == pytest.approx(losses.max(0), rel=1e-6)
        assert line["mean_x"]["bp"] == line["x"][0]["bp"]


def test_the_page_draws_the_band_up_to_the_end_of_the_shortest_seed(browser, tmp_path):  # noqa: F811
    fill_own(tmp_path)
    run = next(r for r in Store(tmp_path).runs() if (r.spec.method, r.spec.seed) == ("sgd", 2))
    records = records_of(run.spec, lambda share: 3 - share, 30)
    put(Store(tmp_path), run.spec, [*records[:9], {**records[9], "loss": math.nan}], "diverged")
    page_of(tmp_path)
    (panel,) = data_of(tmp_path)["panels"]
    band = next(line for line in panel["lines"] if line["name"] == "sgd")["bands"]["loss"]
    assert band["middle"][8] is not None
    assert band["middle"][9:] == [None] * (len(band["middle"]) - 9)
    page = opened(browser, (tmp_path / "report" / "index.html").resolve().as_uri())
    lengths = [len(y) for y in page.evaluate(PLOTTED, "y")[:4]]
    assert lengths == [31, 9, 9, 9], "the longer seed, then low, high and median"
    assert page.evaluate(LAYOUT, "yaxis")["type"] == "log"
    assert page.troubles == []
    page.context.close()
