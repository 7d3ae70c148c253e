"""Figures are readable: styles, limits, many methods, seeds and runs that never arrive."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from made_up import fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.methods import METHODS
from steptuned.lab.report import figures, results
from steptuned.lab.report.figures import RATE_COLOURS, SPARE, label_of, style_of
from steptuned.lab.report.instances import back_propagations_to_level, never
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Trial
from steptuned.lab.store import Store
from test_gamma import DIGITS, drawn, lines_of, store

GAMMAS = ("gamma", "raw gamma")


def steep_records(spec):
    """Start at 1000 times the final loss, with all but no accuracy, and settle at once."""
    start = 0.01 + 0.001 * spec.seed
    more = {"accuracy": lambda s: 0.6 + s / 10 if s > 0.05 else 0.01}
    if spec.method != "sgd":
        for part in ("low", "median", "high"):
            factor = {"low": 0.9, "median": 1.0, "high": 1.1}[part]
            value = partial(lambda f, s: f * (1 - s / 4) if s > start else 0.03, factor)
            more |= dict.fromkeys((f"{key} {part}" for key in GAMMAS), value)
    return records_of(spec, lambda s: 2 - s if s > start else 1000.0, 100, **more)


def contrast(colour):
    """WCAG's contrast ratio of a colour on white."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05)


def test_all_colours_are_visible_on_white():
    styles = [style for method in METHODS.values() for style in method.variants.values()]
    colours = {*SPARE, *RATE_COLOURS, *(colour for colour, _ in styles)}
    colours |= {method.colour for method in METHODS.values()}
    assert min(map(contrast, colours)) > 1.9


def test_the_deltas_of_the_rate_have_no_colours_of_methods():
    assert not {method.colour for method in METHODS.values()} & set(RATE_COLOURS)


@pytest.mark.parametrize("name", ["controls-a", "controls-f"])
def test_every_control_has_its_own_colour(name):
    experiment = paired_runs.experiment_named(name, "short")
    styles = [METHODS[entry.method].style(entry.name) for entry in experiment.entries]
    assert len({colour for colour, _ in styles}) == len(styles)


def test_no_two_of_many_entries_without_a_style_look_the_same():
    entry = paired_runs.experiment_named("figure-3", "demo").entries[0]
    groups = [Group(entry.model_copy(update={"name": f"mine-{i}"}), 0, []) for i in range(18)]
    assert len({style_of(group, i) for i, group in enumerate(groups)}) == 18


def test_a_label_has_the_bounds_as_they_were_used():
    entry = paired_runs.experiment_named("figure-3", "paper").entries[2]
    hyper = {"lr": 3.0, "nu": 20.0, "bounds": [0.1, 10.0]}
    group = Group(entry, 0, [], Trial(hyper, None))
    assert label_of(group) == "Exact-GV (lr 3, nu 20, bounds 0.1 to 20)"


def test_the_start_of_a_run_does_not_stretch_the_axes(tmp_path):
    axes = drawn(*store(tmp_path, DIGITS, steep_records))
    assert axes["training loss J"].get_ylim() == pytest.approx((1, 2), rel=0.1)
    assert axes["test accuracy"].get_ylim() == pytest.approx((0.61, 0.7), rel=0.02)
    for key in GAMMAS:
        low, high = axes[key].get_ylim()
        assert 0.3 < low < 0.5, "m is shown, and not the 0.03 of the start"
        assert 5 < high < 8, "M is shown"


def test_a_spike_of_one_seed_does_not_stretch_the_axes(tmp_path):
    def records(spec):
        found = records_of(spec, lambda s: 2 - s, 100, accuracy=lambda s: 0.5 + s / 10)
        if spec.method == "sgd" and spec.seed == 2:
            found[50] |= {"loss": 1000.0, "accuracy": 0.0}
        return found

    axes = drawn(*store(tmp_path, DIGITS, records))
    assert axes["training loss J"].get_ylim() == pytest.approx((1, 2), rel=0.1)
    assert axes["test accuracy"].get_ylim()[0] > 0.45


def test_relative_bounds_do_not_limit_the_raw_gamma(tmp_path):
    text = DIGITS.replace(
        "[methods.step-tuned-sgd]\nnu = 5.0",
        '[methods.mine]\nmethod = "step-tuned-variant"\nlabel = "mine"\nrelative = true',
    )
    axes = drawn(*store(tmp_path, text, steep_records))
    marked = {key: {text.get_text() for text in axes[key].texts} for key in GAMMAS}
    assert marked == {"gamma": {"m = 0.5", "M = 2"}, "raw gamma": set()}


def test_entries_without_runs_are_not_in_the_legend_and_hide_no_bands(tmp_path):
    outcome, found = store(tmp_path, MANY, steep_records)
    few = replace(outcome, groups=outcome.groups[:6])
    for group in few.groups[3:]:
        group.specs.clear()
    axes = drawn(few, found)
    assert len(axes["raw gamma"].get_legend().texts) == 3
    assert "not shown: 3 without runs" in " ".join(axes["training loss J"].get_title().split())
    assert axes["training loss J"].collections, "bands, as for three methods"


MANY = DIGITS + "".join(
    f"""
[methods.{name}-{i}]
method = "{method}"
label = "{name} {i}"
"""
    for name, method in (("quick", "step-tuned-momentum"), ("slow", "momentum"))
    for i in range(3)
)


def test_a_figure_with_many_methods_has_one_column_per_family(tmp_path):
    outcome, found = store(tmp_path, MANY, steep_records)
    figure = figures.make("mine", [outcome], found)
    columns = np.array(figure.axes).reshape(-1, 2)
    names = [figure.axes[i].get_title().split("\n")[2] for i in (0, 1)]
    assert names == ["SGD and variants", "SGD with momentum and variants"]
    legends = [[text.get_text() for text in axis.get_legend().texts] for axis in columns[-1]]
    assert legends[0][0].startswith("SGD")
    assert len(legends[0]) == 3
    assert sorted(legends[1]) == ["quick 0", "quick 1", "quick 2", "slow 0", "slow 1", "slow 2"]
    for left, right in columns:
        assert left.get_ylim() == right.get_ylim(), "columns can be compared"


def test_curves_of_variants_have_no_seeds_where_there_are_many(tmp_path):
    outcome, found = store(tmp_path, MANY, steep_records)
    few = replace(outcome, groups=outcome.groups[:4])
    several = replace(outcome, groups=outcome.groups[:6])
    for shown, bands, thin in ((few, 4, 12), (several, 0, 6)):
        axes = drawn(shown, found)
        quartiles = [band.get_label().split()[-1] for band in axes["raw gamma"].collections]
        assert quartiles == ["step-tuned-sgd", "quick-0"][: 2 if shown is few else 1]
        axis = axes["training loss J"]
        assert len(axis.collections) == bands
        assert sum(line.get_linewidth() < 1 for line in axis.lines) == thin
        assert sum(line.get_linewidth() > 1 for line in axis.lines) == len(shown.groups)


def test_broken_lines_are_drawn_over_solid_ones_and_over_the_bounds(tmp_path):
    axis = drawn(*store(tmp_path, DIGITS, steep_records))["gamma"]
    lines = lines_of(axis)
    constant, tuned = (lines[f"_gamma median {name}"] for name in ("constant", "step-tuned-sgd"))
    assert constant.get_linestyle() != "-"
    assert constant.get_zorder() > tuned.get_zorder() > lines["_M = 5"].get_zorder()


@pytest.fixture
def instances(tmp_path, monkeypatch):
    """Runs of which Armijo's never come near J* on two of three instances."""

    def few(name, scale, named=paired_runs.experiment_named):
        entries = [
            e.model_copy(update={"axes": {k: v[:1] for k, v in e.axes.items()}})
            for e in named(name, scale).entries
        ]
        return named(name, scale).model_copy(update={"instances": 3, "entries": entries})

    monkeypatch.setattr(paired_runs, "experiment_named", few)

    def records(spec):
        stuck = spec.method == "armijo" and spec.options["instance"] > 0
        return records_of(spec, lambda s: 1.0 if stuck else 1 - s)

    outcome = fill(tmp_path, "figure-2-instances", records)
    return outcome, Results(Store(tmp_path))


def test_runs_that_never_arrive_are_hollow_at_the_edge_and_in_the_median(instances):
    outcome, found = instances
    limit = never(outcome)
    numbers = back_propagations_to_level(outcome, found)
    assert numbers["armijo"][1:] == [limit, limit]
    assert numbers["armijo"][0] < limit / 2
    figure = figures.make("mine", [outcome], found)
    (axis,) = figure.axes
    row = list(numbers).index("armijo")
    assert axis.get_yticklabels()[row].get_text().endswith("1 of 3")
    full, hollow = axis.collections[2 * row : 2 * row + 2]
    assert len(full.get_offsets()) == 1
    assert hollow.get_offsets()[:, 0].tolist() == [limit, limit]
    assert not len(hollow.get_facecolors())
    median = next(
        line for line in axis.lines if line.get_marker() == "|" and line.get_ydata()[0] == row
    )
    assert median.get_xdata()[0] == limit
    assert "claim 1" in axis.get_title()


def test_an_instance_without_runs_is_not_one_that_never_arrives(instances):
    outcome, found = instances
    group = next(g for g in outcome.groups if (g.entry.name, g.instance) == ("armijo", 2))
    (found.run(group.specs[1]).folder / "result.json").unlink()
    numbers = back_propagations_to_level(outcome, Results(found.store))
    assert numbers["armijo"][2] is None


def test_the_data_of_a_figure_have_its_lines_bands_and_points(instances):
    outcome, found = instances
    figure = figures.make("mine", [outcome], found)
    (axis,) = figures.data_of(figure)
    assert [len(area["x"]) for area in axis["areas"]][-2:] == [1, 2], "points of Armijo"
    figure, axis = plt.subplots()
    axis.fill_between(range(500), 0, 1)
    (only,) = figures.data_of(figure)
    assert set(only["areas"][0]["y"]) == {0, 1}
    assert len(only["areas"][0]["x"]) < 60
    plt.close(figure)


def test_the_figure_of_gamma_shows_sgd_and_step_tuned_where_controls_have_no_runs(tmp_path):
    def records(spec):
        more = dict.fromkeys(("plain loss", "accuracy"), lambda s: 0.5)
        if spec.method == "step-tuned-sgd":
            quartiles = [f"{key} {part}" for key in GAMMAS for part in ("low", "median", "high")]
            more |= dict.fromkeys((*quartiles, "at lower", "at upper"), lambda s: 0.7)
            more["negative curvature"] = lambda s: 0.1
        return records_of(spec, lambda s: 2 - s, 4, **more)

    outcome = fill(tmp_path / "out", "figure-4a", records, "short")
    content = [outcome.experiment.model_dump(mode="json")]
    Store(tmp_path / "out").remember("figure-4a", "short", content, "steptuned reproduce figure-4a")
    page = tmp_path / "results.md"
    results.write(tmp_path / "out", page, "steptuned results out --to results.md")
    text = page.read_text()
    assert "![gamma at scale short](figures/gamma-short.png)" in text
    assert "(the controls of figure-4a have not been run)" in text
    assert "constant gammas" not in text
    data = (tmp_path / "figures" / "gamma-short.json").read_text()
    assert "Step-Tuned SGD (lr" in data
    assert "Adam" not in data


def test_titles_have_symbols_instead_of_plain_text(tmp_path):
    outcome, found = store(tmp_path, DIGITS, steep_records)
    figure = figures.make("E|grad J(theta_j)|^2", [outcome], found)
    assert figure.get_suptitle() == "E|∇J(θⱼ)|²"
