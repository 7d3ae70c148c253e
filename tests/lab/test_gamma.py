"""What gamma does, as figures and the page show it: quartiles, bounds, constants, older logs."""

import numpy as np
import pytest

from made_up import put, records_of
from steptuned.lab.experiment import load_all
from steptuned.lab.methods import METHODS
from steptuned.lab.report import figures
from steptuned.lab.report.bands import Band
from steptuned.lab.report.gamma import limits
from steptuned.lab.results import Results
from steptuned.lab.search import stages
from steptuned.lab.store import Store
from test_report import LAYOUT, PLOTTED, browser, data_of, opened, page_of  # noqa: F401 - a fixture

DIGITS = """
title = "gamma"
figure = "loss, accuracy and gamma"
problem = "digits"
seeds = 3
budget = { epochs = 3 }
log_every = 23
[selection]
after = { epochs = 1 }
[methods.sgd]
lr = 0.1
[methods.step-tuned-sgd]
nu = 5.0
[methods.constant]
method = "step-tuned-sgd"
label = "gamma = 1"
nu = 1.0
bounds = [1.0, 1.0]
"""
REGRESSION = """
title = "gamma"
figure = "loss"
problem = "regression"
seeds = 2
budget = { epochs = 3 }
log_every = 1
[selection]
after = { epochs = 1 }
[methods.sgd]
[methods.step-tuned-sgd]
[methods.exact-gv]
bounds = [0.1, 10.0]
"""
SHARES = ("negative curvature", "at lower", "at upper")


def new_records(spec):
    """Quartiles with medians 1, 2, 4 for seeds 1, 2, 3, and one outlier of the raw gamma."""
    records = records_of(spec, lambda s: 2 - s, 50, accuracy=lambda s: s / 2)
    for record in records:
        record["plain loss"] = record["loss"] / 10
    if spec.method == "sgd":
        return records
    middle = 2.0 ** (spec.seed - 1)
    for i, record in enumerate(records):
        record["gamma"] = 0.7
        if i == 0:
            continue  # no iteration yet
        quartiles = (1.0, 1.0, 1.0) if "constant" in spec_name(spec) else (0.5, middle, 5.0)
        for part, value in zip(("low", "median", "high"), quartiles, strict=True):
            record[f"gamma {part}"] = value
            record[f"raw gamma {part}"] = 10 * value if i != 25 else 1e20
        record |= dict.fromkeys(SHARES, 0.25) | {"effective lr": 0.1 / i}
    return records


def spec_name(spec):
    return "constant" if spec.hyper["bounds"] == [1.0, 1.0] else "tuned"


def old_records(spec):
    more = {"gamma": lambda s: 0.5 + s, "negative": lambda s: 0.0}
    more = more if spec.method != "sgd" else {}
    return records_of(spec, lambda s: 2 - s, 30, accuracy=lambda s: s / 2, **more)


def store(folder, text, records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.toml").write_text(text)
    (experiment,) = load_all(folder / "mine.toml", "paper")
    results = Results(Store(folder))
    plan = stages(experiment, results)
    try:
        while True:
            for spec in next(plan)[1]:
                put(results.store, spec, records(spec))
    except StopIteration as end:
        content = [experiment.model_dump(mode="json")]
        results.store.remember("mine", "paper", content, "steptuned run mine.toml")
        return end.value, results


def drawn(outcome, results):
    """The axes of the figure by the label of their y axis."""
    figure = figures.FIGURES[outcome.experiment.figure]("mine", [outcome], results)
    figure.canvas.draw()
    return {axis.get_ylabel(): axis for axis in figure.axes}


def lines_of(axis):
    return {line.get_label(): line for line in axis.lines}


def bands_of(axis):
    return {band.get_label(): band for band in axis.collections}


@pytest.fixture
def new(tmp_path):
    return store(tmp_path / "out", DIGITS, new_records)


def test_the_rows_are_losses_accuracy_gamma_and_raw_gamma(new):
    axes = drawn(*new)
    wanted = ["training loss J", "plain training loss", "test accuracy", "gamma", "raw gamma"]
    assert list(axes) == wanted
    scales = ["log", "log", "linear", "log", "log"]
    assert [axis.get_yscale() for axis in axes.values()] == scales
    assert axes["plain training loss"].lines[0].get_ydata()[0] == pytest.approx(0.2)


@pytest.mark.parametrize(("key", "factor"), [("gamma", 1), ("raw gamma", 10)])
def test_a_tuned_method_has_its_median_and_its_quartiles_over_the_seeds(new, key, factor):
    axis = drawn(*new)[key]
    line = lines_of(axis)[f"_{key} median step-tuned-sgd"]
    assert len(line.get_xdata()) == 50, "the first record has no quartiles"
    assert np.median(line.get_ydata()) == 2 * factor, "of the medians 1, 2 and 4 of the seeds"
    (path,) = bands_of(axis)[f"_{key} quartiles step-tuned-sgd"].get_paths()
    assert {0.5 * factor, 5.0 * factor} <= set(path.vertices[:, 1])
    assert line.get_color() == METHODS["step-tuned-sgd"].colour
    assert line.get_linewidth() > 1


@pytest.mark.parametrize("key", ["gamma", "raw gamma"])
def test_the_bounds_are_labelled_dotted_lines_and_M_is_at_least_nu(new, key):
    axis = drawn(*new)[key]
    bounds = {name: line for name, line in lines_of(axis).items() if "=" in name}
    assert {name: line.get_ydata()[0] for name, line in bounds.items()} == {
        "_m = 0.5": 0.5,
        "_M = 5": 5.0,
    }
    assert {line.get_linestyle() for line in bounds.values()} == {":"}
    assert {text.get_text() for text in axis.texts} == {"m = 0.5", "M = 5"}


def test_a_constant_gamma_is_a_thin_line_without_band_bounds_or_raw_gamma(new):
    axes = drawn(*new)
    line = lines_of(axes["gamma"])["_gamma median constant"]
    assert set(line.get_ydata()) == {1.0}
    tuned = lines_of(axes["gamma"])["_gamma median step-tuned-sgd"]
    assert line.get_linewidth() < tuned.get_linewidth()
    assert not any("constant" in name for name in bands_of(axes["gamma"]))
    raw = {**lines_of(axes["raw gamma"]), **bands_of(axes["raw gamma"])}
    assert not any("constant" in name for name in raw)


def test_an_outlier_does_not_stretch_the_axis_and_the_bounds_are_inside(new):
    low, high = drawn(*new)["raw gamma"].get_ylim()
    assert 0.1 < low < 0.5
    assert 50 < high < 200, "and not 1e20"


def test_limits_show_the_bounds_and_all_but_the_outermost_records():
    curve = np.ones(100)
    band = Band(curve, np.r_[1e-9, curve[1:]], curve, np.r_[np.full(99, 3.0), 1e30])
    low, high = limits([band], [(0.5, 2.0)])
    assert 0.25 < low < 0.5
    assert 3 < high < 6
    near = Band(curve, np.r_[0.2, curve[1:]], curve, np.r_[np.full(99, 3.0), 20])
    low, high = limits([near], [(0.5, 2.0)])
    assert low < 0.2, "no outlier"
    assert high > 20
    assert limits([], []) is None


def test_logs_without_quartiles_have_the_line_of_gamma(tmp_path):
    axes = drawn(*store(tmp_path / "out", DIGITS, old_records))
    assert list(axes) == ["training loss J", "test accuracy", "gamma"]
    axis = axes["gamma"]
    wanted = pytest.approx([0.5 + i / 30 for i in range(31)])
    assert any(list(line.get_ydata()) == wanted for line in axis.lines if line.get_linewidth() > 1)
    assert axis.get_yscale() == "log"
    assert "_M = 5" in lines_of(axis)


def test_the_regression_has_gamma_below_its_loss(tmp_path):
    axes = drawn(*store(tmp_path / "new", REGRESSION, new_records))
    assert list(axes) == ["J", "gamma", "raw gamma"]
    axis = axes["gamma"]
    names = {"_gamma quartiles step-tuned-sgd", "_gamma quartiles exact-gv"}
    assert names == set(bands_of(axis))
    colours = {name: line.get_color() for name, line in lines_of(axis).items() if "=" in name}
    of = {name: method.colour for name, method in METHODS.items()}
    assert colours == {
        "_m = 0.1": of["exact-gv"],
        "_m = 0.5": of["step-tuned-sgd"],
        "_M = 2": of["step-tuned-sgd"],
        "_M = 10": of["exact-gv"],
    }
    plain = store(tmp_path / "plain", REGRESSION, lambda spec: records_of(spec, lambda s: 2 - s))
    assert list(drawn(*plain)) == ["J"]


def test_the_page_has_the_measures_the_quartiles_and_the_bounds(new, tmp_path):
    page = page_of(tmp_path / "out")
    (panel,) = data_of(tmp_path / "out")["panels"]
    rows = {row["key"]: row for row in panel["rows"]}
    shown = ["loss", "plain loss", "accuracy", "gamma", "raw gamma"]
    assert list(rows) == [*shown, *SHARES, "effective lr"]
    assert [key for key, row in rows.items() if row["shown"]] == shown
    assert [key for key, row in rows.items() if row["axis"] == "log"] == [
        "loss",
        "plain loss",
        "gamma",
        "raw gamma",
        "effective lr",
    ]
    for key in rows:
        assert f'name="measure" value="{key}"' in page
    lines = {line["name"]: line for line in panel["lines"]}
    assert {name: line["bounds"] for name, line in lines.items()} == {
        "sgd": None,
        "step-tuned-sgd": [0.5, 5.0],
        "constant": None,
    }
    first = lines["step-tuned-sgd"]["y"][0]
    assert first["gamma median"] == [None] + [1.0] * 50
    assert first["raw gamma high"][1] == 50
    assert "gamma" not in first, "its quartiles say more"
    assert set(lines["sgd"]["y"][0]) == {"loss", "plain loss", "accuracy"}, "no empty keys"
    assert not any(key.startswith("raw") for key in lines["constant"]["y"][0])


def test_the_page_of_older_logs_has_gamma_itself(tmp_path):
    store(tmp_path / "out", DIGITS, old_records)
    page_of(tmp_path / "out")
    (panel,) = data_of(tmp_path / "out")["panels"]
    assert [row["key"] for row in panel["rows"]] == ["loss", "accuracy", "gamma", "negative"]
    tuned = next(line for line in panel["lines"] if line["name"] == "step-tuned-sgd")
    assert set(tuned["y"][0]) == {"loss", "accuracy", "gamma", "negative"}
    assert tuned["y"][0]["gamma"][0] == 0.5


def test_the_page_draws_quartiles_bounds_and_the_selected_measures(browser, new, tmp_path):  # noqa: F811
    page_of(tmp_path / "out")
    page = opened(browser, (tmp_path / "out" / "report" / "index.html").resolve().as_uri())
    layout = "document.querySelector('.plot').layout"
    axes = f"Object.keys({layout}).filter((k) => k.startsWith('yaxis')).length"
    assert page.evaluate(axes) == 5
    gamma = page.evaluate(LAYOUT, "yaxis4")
    assert (gamma["title"]["text"], gamma["type"]) == ("gamma", "log")
    drawn_on = zip(page.evaluate(PLOTTED, "y"), page.evaluate(PLOTTED, "yaxis"), strict=True)
    on_gamma = [set(y) for y, axis in drawn_on if axis == "y4"]
    assert on_gamma == [{0.5}, {5}, {2}, {1}, {1}, {1}], "low, high and median of two methods"
    raw = page.evaluate(LAYOUT, "yaxis5")
    assert raw["range"][1] < 3, "in powers of ten: the outlier is outside"
    shapes = page.evaluate(LAYOUT, "shapes")
    assert sorted((s["yref"], s["name"], s["y0"]) for s in shapes) == [
        ("y4", "M = 5", 5),
        ("y4", "m = 0.5", 0.5),
        ("y5", "M = 5", 5),
        ("y5", "m = 0.5", 0.5),
    ]
    height = page.locator(".plot").bounding_box()["height"]
    page.locator("[name=measure][value='at lower']").check()
    assert page.evaluate(axes) == 6
    assert page.evaluate(LAYOUT, "yaxis6")["title"]["text"] == "share at the<br>lower bound"
    assert page.locator(".plot").bounding_box()["height"] > height
    while page.locator("[name=measure]:checked").count():
        page.locator("[name=measure]:checked").first.uncheck()
    assert page.evaluate(axes) == 1, "the first measure remains"
    assert page.troubles == []
    page.reload()
    page.wait_for_selector(".plot .main-svg")
    assert page.locator("[name=measure]:checked").count() == 0, "as it was left"
    page.context.close()
