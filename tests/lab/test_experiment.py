"""Experiments in TOML: what they expand to, and what a mistake in one says."""

import pytest

from steptuned.lab.experiment import (
    SCALES,
    ExperimentError,
    first_below,
    load,
    load_all,
    panels_of,
    paper_experiments,
    stages,
)
from steptuned.lab.report.figures import FIGURES

GOOD = """
title = "a test"
figure = "loss"
problem = "regression"
seeds = 2
budget = { epochs = 20 }
log_every = 10
[selection]
after = { epochs = 5 }
[methods.sgd]
lr = [1.0, 10.0]
[methods.mine]
method = "step-tuned-sgd"
label = "Mine"
lr = [1.0, 2.0, 3.0]
bounds = [[0.5, 2.0], [0.1, 10.0]]
[scales.demo]
seeds = 1
budget = { epochs = 10 }
methods.sgd = { lr = [5.0] }
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


class Invented:
    """A reader whose runs end with the losses it is told."""

    def __init__(self, loss):
        self.loss = loss

    def last(self, spec):
        value = self.loss(spec)
        return None if value is None else {"bp": spec.budget, "loss": value}

    def records(self, spec):
        value = self.loss(spec)
        return [] if value is None else [{"bp": 0, "loss": 1.0}, {"bp": round(100 * value), "loss": value}]


def play(experiment, reader):
    seen, plan = {}, stages(experiment, reader)
    while True:
        try:
            name, specs = next(plan)
        except StopIteration as end:
            return seen, end.value
        seen[name] = specs


def test_a_file_expands_to_its_grid_and_then_the_winners_with_all_seeds(file):
    experiment = load(file(GOOD), "paper")
    seen, outcome = play(experiment, Invented(lambda s: abs(s.hyper["lr"] - 2.2) + s.hyper.get("bounds", [0])[0]))
    assert [len(specs) for specs in seen.values()] == [2 + 6, 2 * 2]
    assert {spec.budget for spec in seen["grid"]} == {50}
    assert {spec.seed for spec in seen["grid"]} == {0}
    assert {spec.budget for spec in seen["winners"]} == {200}
    assert {spec.seed for spec in seen["winners"]} == {0, 1}
    winners = {group.entry.name: group.winner.hyper for group in outcome.groups}
    assert winners["sgd"]["lr"] == 1.0
    assert (winners["mine"]["lr"], winners["mine"]["bounds"]) == (2.0, [0.1, 10.0])
    assert outcome.groups[1].entry.label == "Mine"
    assert outcome.groups[1].edges == []


def test_a_scale_changes_what_it_names_and_nothing_else(file):
    paper, demo = load(file(GOOD), "paper"), load(file(GOOD), "demo")
    assert (demo.seeds, demo.budget.epochs, demo.entries[0].axes["lr"]) == (1, 10, [5.0])
    assert demo.entries[1] == paper.entries[1]
    assert load(file(GOOD), "small").seeds == 2


def test_runs_that_diverged_or_failed_do_not_win(file):
    experiment = load(file(GOOD), "paper")
    _, outcome = play(experiment, Invented(lambda s: None if s.hyper["lr"] in (1.0, 2.0) else s.hyper["lr"]))
    assert [group.winner.hyper["lr"] for group in outcome.groups] == [10.0, 3.0]
    _, outcome = play(experiment, Invented(lambda s: None))
    assert [group.winner for group in outcome.groups] == [None, None]
    assert [group.specs for group in outcome.groups] == [{}, {}]


def test_a_winner_on_the_edge_of_its_grid_is_noticed(file):
    experiment = load(file(GOOD), "paper")
    _, outcome = play(experiment, Invented(lambda s: s.hyper["lr"]))
    assert outcome.groups[1].edges == ["lr"]


def test_soonest_is_the_first_to_come_near_the_best_of_all(file):
    text = GOOD.replace("[selection]", '[selection]\nrule = "soonest"\nwithin = 0.1\nstar_after = { iterations = 1000 }')
    experiment = load(file(text), "paper")

    class Racing(Invented):
        def records(self, spec):
            if spec.budget == 1000:
                return [{"bp": 1000, "loss": 0.2}]
            return [{"bp": 0, "loss": 1.0}, {"bp": round(100 / spec.hyper["lr"]), "loss": 0.25}, {"bp": 500, "loss": 0.24}]

    seen, outcome = play(experiment, Racing(lambda s: 0.3 + s.hyper["lr"]))
    assert list(seen) == ["grid", "J*", "winners"]
    assert {spec.budget for spec in seen["J*"]} == {1000}
    assert outcome.star == {(0, 0): 0.2, (0, 1): 0.2}
    assert [group.winner.hyper["lr"] for group in outcome.groups] == [10.0, 3.0]
    assert [group.winner.score for group in outcome.groups] == [10, 33]
    assert first_below([{"bp": 0, "loss": 1.0}], 0.3) is None


def test_instances_are_tuned_each_or_on_the_first(file):
    for tune, grid in (("first", 8), ("each", 24)):
        experiment = load(file(f'instances = 3\ntune = "{tune}"\n' + GOOD), "paper")
        seen, outcome = play(experiment, Invented(lambda s: s.hyper["lr"] if s.options["instance"] == 0 else -s.hyper["lr"]))
        assert len(seen["grid"]) == grid
        assert len(seen["winners"]) == 2 * 3 * 2
        chosen = {group.instance: group.winner.hyper["lr"] for group in outcome.groups if group.entry.name == "sgd"}
        assert chosen == ({0: 1.0, 1: 1.0, 2: 1.0} if tune == "first" else {0: 1.0, 1: 10.0, 2: 10.0})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('problem = "regression"', 'problem = "regresion"'), "problem = 'regresion' is not one of autoencoder, digits"),
        (("[methods.sgd]", "[methods.sdg]"), "methods.sdg = 'sdg' is not one of adam, adamw, armijo"),
        (
            ("lr = [1.0, 10.0]", "learning_rate = 1"),
            "methods.sgd.learning_rate = 'learning_rate' is not one of decay, delta, lr, uses",
        ),
        (("lr = [1.0, 10.0]", 'lr = ["fast"]'), "methods.sgd.lr = 'fast': not of the kind of 0.1"),
        (("seeds = 2", "seeds = 0"), "seeds = 0: Input should be greater than or equal to 1"),
        (("seeds = 2", "sedes = 2"), "sedes = 2: Extra inputs are not permitted; valid: budget, figure"),
        (("after = {", 'rule = "best"\nafter = {'), "selection.rule = 'best': Input should be 'smallest loss' or 'soonest'"),
        (("[scales.demo]", "[scales.tiny]"), "scales.tiny = 'tiny' is not one of demo, paper, small"),
        (("seeds = 2", "options = { colums = 3 }"), "options.colums = 'colums' is not one of batch, columns, instance, rows"),
        (('title = "a test"', "title ="), "is not TOML"),
        (('method = "step-tuned-sgd"', 'method = "lion"'), "methods.mine.method = 'lion' is not one of adam"),
    ],
)
def test_a_mistake_gives_one_sentence_with_file_key_value_and_choices(file, change, sentence):
    path = file(GOOD.replace(*change, 1))
    with pytest.raises(ExperimentError) as error:
        load(path, "paper")
    assert str(error.value).startswith(f"{path}: {sentence}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(ExperimentError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml", "paper")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", paper_experiments())
def test_every_experiment_of_the_package_is_valid_at_every_scale(name, scale):
    for experiment in load_all(paper_experiments()[name], scale):
        assert experiment.figure in FIGURES
        seen, outcome = play(experiment, Invented(lambda s: 0.5))
        assert all(group.winner is not None for group in outcome.groups)
        expected = sum(runs for runs, _ in experiment.expected_back_propagations().values())
        assert sum(map(len, seen.values())) <= expected + len(seen["grid"])


def test_figures_2_and_3_have_the_sizes_of_the_paper():
    two, three = (load(paper_experiments()[name], "paper") for name in ("figure-2", "figure-3"))
    assert two.budget.iterations == 250
    assert (two.selection.rule, two.selection.within, two.selection.star_after.iterations) == ("soonest", 0.1, 100_000)
    assert (three.budget.epochs, three.selection.after.epochs, three.seeds) == (250, 50, 3)
    spec = three.spec(three.entries[0], three.entries[0].grid()[0], 0, 0, three.budget)
    assert spec.budget == 2500
    assert spec.options == {"rows": 500, "columns": 30, "batch": 50, "instance": 0}


@pytest.mark.parametrize(("name", "letters"), [("figure-4", "abcd"), ("figure-5", "abcd"), ("figure-6", "ef")])
def test_the_figures_of_deep_learning_are_the_papers(name, letters):
    path = paper_experiments()[name]
    assert panels_of(path) == list(letters)
    epochs = {"a": 500, "b": 500, "c": 300, "d": 500, "e": 300, "f": 300}
    for letter, experiment in zip(letters, load_all(path, "paper"), strict=True):
        assert experiment.name == name + letter
        assert (experiment.budget.epochs, experiment.selection.after.epochs) == (epochs[letter], epochs[letter] // 10)
        assert (experiment.seeds, experiment.selection.rule) == (3, "smallest loss")
        grids = {entry.name: entry.axes for entry in experiment.entries}
        assert list(grids) == ["sgd", "rmsprop", "adam", "step-tuned-sgd"]
        assert all(axes["lr"] == [1e-4, 1e-3, 1e-2, 1e-1, 1.0] for axes in grids.values())
        assert grids["adam"]["beta1"] == [0.1, 0.5, 0.9, 0.99]
        assert grids["step-tuned-sgd"]["nu"] == [1.0, 2.0, 5.0]
        assert grids["sgd"]["decay"] == grids["step-tuned-sgd"]["decay"] == ["epoch"]
        uses = [grids[other]["uses"] for other in ("sgd", "rmsprop", "adam")]
        assert uses == [[2 if name == "figure-5" else 1]] * 3
        spec = experiment.spec(experiment.entries[0], experiment.entries[0].grid()[0], 0, 0, experiment.budget)
        per_epoch = 469 if letter == "d" else 391
        assert (spec.budget, spec.log_every) == (epochs[letter] * per_epoch, per_epoch)
        assert (spec.options["rows"], spec.options["augmentation"]) == (0, "none")


def test_step_tuned_sgd_has_the_same_runs_in_figures_4_and_5():
    four, five = (load(paper_experiments()[name], "paper", "a") for name in ("figure-4", "figure-5"))
    entries = [next(e for e in figure.entries if e.name == "step-tuned-sgd") for figure in (four, five)]
    specs = [f.spec(e, e.grid()[0], 0, 0, f.budget) for f, e in zip((four, five), entries, strict=True)]
    assert specs[0].identity == specs[1].identity


PANELS = """
figure = "loss"
seeds = 4
options = { batch = 64 }
[panels.x]
setting = "e"
[panels.y]
setting = "d"
title = "mine"
budget = { epochs = 7 }
[methods.sgd]
lr = 0.1
[scales.demo]
seeds = 1
[scales.demo.panels.y]
seeds = 2
budget = { epochs = 3 }
"""


def test_a_panel_says_more_than_its_file_a_scale_more_than_both_and_table_1_the_rest(file):
    x, y = load_all(file(PANELS), "paper")
    assert (x.name, y.name) == ("minex", "miney")
    assert (x.title, y.title) == ("CIFAR-10, LeNet without BatchNorm", "mine")
    assert (x.budget.epochs, y.budget.epochs) == (300, 7)
    assert x.options == {"data": "cifar-10", "network": "lenet", "activation": "elu", "batch": 64}
    assert (x.seeds, y.seeds) == (4, 4)
    x, y = load_all(file(PANELS), "demo")
    assert (x.seeds, y.seeds) == (1, 2)
    assert (x.budget.epochs, y.budget.epochs) == (300, 3)
    _, y = load_all(
        file(PANELS.replace("[scales.demo]", "[scales.demo]\nbudget = { epochs = 5 }").replace("budget = { epochs = 3 }", "")),
        "demo",
    )
    assert y.budget.epochs == 5, "the scale, not the panel's own 7"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('setting = "e"', 'setting = "z"'), "setting = 'z' is not one of a, b, c, d, e, f"),
        (("batch = 64", "bach = 64"), "options.bach = 'bach' is not one of"),
        (("batch = 64", 'layout = "sideways"'), "options.layout = 'sideways' is not one of channels_last, contiguous"),
        (("batch = 64", 'batch = "64"'), "options.batch = '64': not of the kind of 128"),
        (("batch = 64", "batch = true"), "options.batch = True: not of the kind of 128"),
        (("batch = 64", 'data = "imagenet"'), "options.data = 'imagenet' is not one of cifar-10, cifar-100, mnist"),
        (("lr = 0.1", "uses = 2.5"), "methods.sgd.uses = 2.5: not of the kind of 1"),
        (("lr = 0.1", "uses = 0"), "methods.sgd.uses = 0: must be at least 1"),
        (("batch = 64", "batch = 0"), "options.batch = 0: must be at least 1"),
        (("batch = 64", "rows = -5"), "options.rows = -5: must be at least 0"),
    ],
)
def test_a_mistake_in_a_panel_is_one_sentence(file, change, sentence):
    path = file(PANELS.replace(*change))
    with pytest.raises(ExperimentError) as error:
        load_all(path, "paper")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
