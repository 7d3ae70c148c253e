"""Experiments in TOML: what they expand to, and the error messages for mistakes."""

import statistics
from itertools import pairwise

import pytest
import torch

from steptuned.lab.claims.criteria import criterion
from steptuned.lab.driver import Driver
from steptuned.lab.experiment import (
    SCALES,
    ExperimentError,
    load,
    load_all,
    panels_of,
    paper_experiments,
)
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.report import tables
from steptuned.lab.report.figures import FIGURES, label_of
from steptuned.lab.results import Results
from steptuned.lab.run import execute, folder_of
from steptuned.lab.search import Score, first_below, stages
from steptuned.lab.store import Store

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
    """A reader whose runs end with the given losses."""

    def __init__(self, loss):
        self.loss = loss

    def is_complete(self, spec):
        return True

    def final(self, spec):
        value = self.loss(spec)
        return None if value is None else {"bp": spec.budget, "loss": value}

    def records(self, spec):
        value = self.loss(spec)
        return (
            []
            if value is None
            else [{"bp": 0, "loss": 1.0}, {"bp": round(100 * value), "loss": value}]
        )


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
    seen, outcome = play(
        experiment, Invented(lambda s: abs(s.hyper["lr"] - 2.2) + s.hyper.get("bounds", [0])[0])
    )
    assert [len(specs) for specs in seen.values()] == [2 + 6, 2 * 2]
    assert {spec.budget for spec in seen["grid"]} == {50}
    assert {spec.seed for spec in seen["grid"]} == {0}
    assert {spec.budget for spec in seen["winners"]} == {200}
    assert {spec.seed for spec in seen["winners"]} == {1, 2}
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
    _, outcome = play(
        experiment, Invented(lambda s: None if s.hyper["lr"] in (1.0, 2.0) else s.hyper["lr"])
    )
    assert [group.winner.hyper["lr"] for group in outcome.groups] == [10.0, 3.0]
    _, outcome = play(experiment, Invented(lambda s: None))
    assert [group.winner for group in outcome.groups] == [None, None]
    assert [group.specs for group in outcome.groups] == [{}, {}]


def test_a_winner_on_the_edge_of_its_grid_is_detected(file):
    experiment = load(file(GOOD), "paper")
    _, outcome = play(experiment, Invented(lambda s: s.hyper["lr"]))
    assert outcome.groups[1].edges == ["lr"]


def test_soonest_chooses_the_first_trial_to_come_close_to_j_star(file):
    text = GOOD.replace(
        "[selection]",
        '[selection]\nrule = "soonest"\nwithin = 0.1\nstar_after = { iterations = 1000 }',
    )
    experiment = load(file(text), "paper")

    class Racing(Invented):
        def records(self, spec):
            if spec.budget == 1000:
                return [{"bp": 1000, "loss": 0.2}]
            return [
                {"bp": 0, "loss": 1.0},
                {"bp": round(100 / spec.hyper["lr"]), "loss": 0.25},
                {"bp": 500, "loss": 0.24},
            ]

    seen, outcome = play(experiment, Racing(lambda s: 0.3 + s.hyper["lr"]))
    assert list(seen) == ["grid", "J*", "winners"]
    assert {spec.budget for spec in seen["J*"]} == {1000}
    assert outcome.star == {(0, 0): 0.2, (0, 1): 0.2, (0, 2): 0.2}, (
        "seed 0 chooses, 1 and 2 are reported"
    )
    assert [group.winner.hyper["lr"] for group in outcome.groups] == [10.0, 3.0]
    scores = [group.winner.score for group in outcome.groups]
    assert scores == [Score(10, "back-propagations"), Score(33, "back-propagations")]
    assert first_below([{"bp": 0, "loss": 1.0}], 0.3) is None


def test_scores_keep_their_unit_if_no_trial_comes_close_to_j_star(file):
    text = GOOD.replace("[selection]", '[selection]\nrule = "soonest"\nwithin = 0.1')
    experiment = load(file(text), "paper")

    class Racing(Invented):
        """SGD comes close to J* = 0.2 with both learning rates, the other entry with none."""

        def records(self, spec):
            end = 0.2 if spec.method == "sgd" else 0.5
            return [{"bp": 0, "loss": 1.0}, {"bp": round(100 / spec.hyper["lr"]), "loss": end}]

        def is_complete(self, spec):
            """Whether the table may count the run as tried."""
            return (spec.method, spec.hyper["lr"]) != ("sgd", 10.0)

    _, outcome = play(
        experiment, Racing(lambda s: None if s.hyper["lr"] == 3.0 else 0.3 + s.hyper["lr"])
    )
    near, far = outcome.groups
    assert [trial.score for trial in near.trials] == [
        Score(100, "back-propagations"),
        Score(10, "back-propagations"),
    ]
    assert {trial.score for trial in far.trials} == {Score(1.3, "loss"), Score(2.3, "loss"), None}
    assert (near.winner.score, far.winner.score) == (
        Score(10, "back-propagations"),
        Score(1.3, "loss"),
    )
    assert [str(group.winner.score) for group in outcome.groups] == [
        "10 back-propagations",
        "loss 1.3",
    ]
    with pytest.raises(TypeError, match="scores in back-propagations and loss cannot be compared"):
        sorted([far.winner.score, near.winner.score])
    with pytest.raises(AttributeError, match="cannot assign"):
        near.winner.score.unit = "loss"
    grids = [row[1] for row in tables.summary(outcome, Racing(lambda s: None))[0].rows]
    assert grids == [
        "1 of 2 tried",
        "6 tried, 2 diverged, none near J*, best by loss 1.3, winner at the edge of the grid: lr",
    ]


def test_the_grid_is_searched_on_each_instance_or_on_the_first(file):
    for tune, grid in (("first", 8), ("each", 24)):
        experiment = load(file(f'instances = 3\ntune = "{tune}"\n' + GOOD), "paper")
        seen, outcome = play(
            experiment,
            Invented(lambda s: s.hyper["lr"] if s.options["instance"] == 0 else -s.hyper["lr"]),
        )
        assert len(seen["grid"]) == grid
        assert len(seen["winners"]) == 2 * 3 * 2
        chosen = {
            group.instance: group.winner.hyper["lr"]
            for group in outcome.groups
            if group.entry.name == "sgd"
        }
        assert chosen == (
            {0: 1.0, 1: 1.0, 2: 1.0} if tune == "first" else {0: 1.0, 1: 10.0, 2: 10.0}
        )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ('problem = "regression"', 'problem = "regresion"'),
            "problem = 'regresion' is not one of autoencoder, digits",
        ),
        (
            ("[methods.sgd]", "[methods.sdg]"),
            "methods.sdg = 'sdg' is not one of adam, adamw, armijo",
        ),
        (
            ("lr = [1.0, 10.0]", "learning_rate = 1"),
            "methods.sgd.learning_rate is not an option; the options are decay, delta, lr, uses",
        ),
        (("lr = [1.0, 10.0]", "lr = []"), "methods.sgd.lr = []: give at least one value"),
        (
            ("lr = [1.0, 10.0]", 'decay = "weekly"'),
            "methods.sgd.decay = 'weekly' is not one of epoch, iteration, none",
        ),
        (
            ("[0.1, 10.0]]", "[0.1]]"),
            "methods.mine.bounds = [0.1]: must have the same type as the default, [0.5, 2.0]",
        ),
        (
            ("lr = [1.0, 10.0]", 'lr = ["fast"]'),
            "methods.sgd.lr = 'fast': must have the same type as the default, 0.1",
        ),
        (("seeds = 2", "seeds = 0"), "seeds = 0: Input should be greater than or equal to 1"),
        (
            ("seeds = 2", "first_seed = 0"),
            "first_seed = 0: must be at least 1, because hyper-parameters are chosen on seed 0",
        ),
        (
            ("seeds = 2", "sedes = 2"),
            "sedes = 2: Extra inputs are not permitted; valid: budget, figure",
        ),
        (
            ("after = {", 'rule = "best"\nafter = {'),
            "selection.rule = 'best': Input should be 'smallest loss' or 'soonest'",
        ),
        (
            ("[scales.demo]", "[scales.tiny]"),
            "scales.tiny = 'tiny' is not one of demo, paper, short, small",
        ),
        (
            ("seeds = 2", "options = { colums = 3 }"),
            "options.colums is not an option; the options are batch, columns, instance, rows",
        ),
        (('title = "a test"', "title ="), "is not TOML"),
        (
            ('method = "step-tuned-sgd"', 'method = "lion"'),
            "methods.mine.method = 'lion' is not one of adam",
        ),
    ],
)
def test_a_mistake_gives_one_sentence_with_file_key_value_and_choices(file, change, sentence):
    path = file(GOOD.replace(*change, 1))
    with pytest.raises(ExperimentError) as error:
        load(path, "paper")
    assert str(error.value).startswith(f"{path}: {sentence}")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ExperimentError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml", "paper")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", paper_experiments())
def test_every_experiment_of_the_package_is_valid_at_every_scale(name, scale):
    for experiment in load_all(paper_experiments()[name], scale):
        assert experiment.figure in FIGURES
        seen, outcome = play(experiment, WithGamma(lambda s: 0.5))
        assert all(group.winner is not None for group in outcome.groups)
        expected = sum(runs for runs, _ in experiment.expected_back_propagations().values())
        assert sum(map(len, seen.values())) <= expected + len(seen["grid"])


def test_figures_2_and_3_have_the_sizes_of_the_paper():
    two, three = (load(paper_experiments()[name], "paper") for name in ("figure-2", "figure-3"))
    assert two.budget.iterations == 250
    assert (two.selection.rule, two.selection.within, two.selection.star_after.iterations) == (
        "soonest",
        0.1,
        100_000,
    )
    assert (three.budget.epochs, three.selection.after.epochs, three.seeds) == (250, 50, 5)
    spec = three.spec(three.entries[0], three.entries[0].grid()[0], 0, 0, three.budget)
    assert spec.budget == 2500
    assert spec.options == {"rows": 500, "columns": 30, "batch": 50, "instance": 0}


@pytest.mark.parametrize(
    ("name", "letters"), [("figure-4", "abcd"), ("figure-5", "abcd"), ("figure-6", "ef")]
)
def test_the_deep_learning_figures_match_the_paper(name, letters):
    path = paper_experiments()[name]
    assert panels_of(path) == list(letters)
    epochs = {"a": 500, "b": 500, "c": 300, "d": 500, "e": 300, "f": 300}
    for letter, experiment in zip(letters, load_all(path, "paper"), strict=True):
        assert experiment.name == name + letter
        assert (experiment.budget.epochs, experiment.selection.after.epochs) == (
            epochs[letter],
            epochs[letter] // 10,
        )
        assert (experiment.seeds, experiment.selection.rule) == (3, "smallest loss")
        grids = {entry.name: entry.axes for entry in experiment.entries}
        assert list(grids) == ["sgd", "rmsprop", "adam", "step-tuned-sgd"]
        assert all(axes["lr"] == [1e-4, 1e-3, 1e-2, 1e-1, 1.0] for axes in grids.values())
        assert grids["adam"]["beta1"] == [0.1, 0.5, 0.9, 0.99]
        assert grids["step-tuned-sgd"]["nu"] == [1.0, 2.0, 5.0]
        assert grids["sgd"]["decay"] == grids["step-tuned-sgd"]["decay"] == ["epoch"]
        uses = [grids[other]["uses"] for other in ("sgd", "rmsprop", "adam")]
        assert uses == [[2 if name == "figure-5" else 1]] * 3
        spec = experiment.spec(
            experiment.entries[0], experiment.entries[0].grid()[0], 0, 0, experiment.budget
        )
        per_epoch = 469 if letter == "d" else 391
        assert (spec.budget, spec.log_every) == (epochs[letter] * per_epoch, 3 * per_epoch)
        assert len(records_of(spec)) > 100
        assert (spec.options["rows"], spec.options["augmentation"]) == (0, "none")


def records_of(spec):
    """The steps of the records of a run."""
    steps = [0]
    while steps[-1] < spec.budget:
        steps.append(min(spec.budget, spec.next_record(steps[-1])))
    return steps


SHORT_EPOCHS = {"a": 50, "b": 50, "c": 30, "d": 50, "e": 30, "f": 30}
SMALL_ROWS = {"a": 5_000, "b": 5_000, "c": 2_500, "d": 6_000, "e": 5_000, "f": 5_000}
SEEDS = {"figure-4d": 5, "figure-6e": 5, "figure-6f": 5}


@pytest.mark.parametrize("scale", ["short", "small"])
@pytest.mark.parametrize("name", ["figure-4", "figure-5", "figure-6", "activations"])
def test_the_scales_between_demo_and_paper_keep_the_grids_and_shorten_one_thing(name, scale):
    for experiment in load_all(paper_experiments()[name], scale):
        letter = "a" if name == "activations" else experiment.name[-1]
        paper = load(paper_experiments()[name], "paper", experiment.name.removeprefix(name))
        assert experiment.entries == paper.entries, "the whole grid"
        assert experiment.seeds == SEEDS.get(experiment.name, 3)
        options = experiment.problem_options.as_dict()
        epochs = SHORT_EPOCHS[letter] * (1 if scale == "short" else 10)
        assert (experiment.budget.epochs, experiment.selection.after.epochs) == (
            epochs,
            epochs // 10,
        )
        assert options["rows"] == (0 if scale == "short" else SMALL_ROWS[letter])
        assert options.get("size", 32) == (16 if letter in "abc" else 32)
        assert options["eval_rows"] % 128 == 0
        assert 0 < options["eval_rows"] <= experiment.problem_options.training_rows
        spec = experiment.spec(
            experiment.entries[0], experiment.entries[0].grid()[0], 0, 0, experiment.budget
        )
        steps = records_of(spec)
        assert 100 <= len(steps) <= 130
        assert steps[-1] == spec.budget
        early = [step for step in steps if 0 < step <= spec.budget / 10]
        assert len(early) >= 13
        assert early[0] <= 2
        assert early[len(early) // 2] < spec.budget / 100, "even on a logarithmic axis"
        later = steps[len(early) + 1 : -1]
        assert {b - a for a, b in pairwise(later)} == {spec.log_every}


@pytest.mark.parametrize("scale", ["short", "small", "paper"])
@pytest.mark.parametrize("panel", ["a", "b"])
def test_the_window_of_claim_10_holds_at_least_two_records(panel, scale):
    experiment = load(paper_experiments()["figure-4"], scale, panel)
    entry = experiment.entries[0]
    spec = experiment.spec(entry, entry.grid()[0], 1, 0, experiment.budget)
    window = criterion(10).thresholds["window"] * spec.budget
    assert 2 * spec.log_every <= window


@pytest.mark.parametrize("name", ["figure-4", "figure-5", "activations"])
def test_the_demo_has_small_images_too(name):
    for experiment in load_all(paper_experiments()[name], "demo"):
        assert experiment.options.get("size") == (
            None if experiment.problem == "autoencoder" else 16
        )
        assert experiment.seeds == 1


@pytest.mark.parametrize("name", ["figure-2", "figure-3", "rate", "digits"])
def test_without_its_own_section_scale_short_is_the_base_of_the_file(name):
    short, paper = (load(paper_experiments()[name], scale) for scale in ("short", "paper"))
    assert short.model_copy(update={"scale": "paper"}) == paper
    assert short.scale == "short"


def test_text_at_scale_short_is_text_at_scale_small():
    short, small = (load(paper_experiments()["text"], scale) for scale in ("short", "small"))
    assert short.model_copy(update={"scale": "small"}) == small


def test_step_tuned_sgd_has_the_same_runs_in_figures_4_and_5():
    four, five = (
        load(paper_experiments()[name], "paper", "a") for name in ("figure-4", "figure-5")
    )
    entries = [
        next(e for e in figure.entries if e.name == "step-tuned-sgd") for figure in (four, five)
    ]
    specs = [
        f.spec(e, e.grid()[0], 0, 0, f.budget) for f, e in zip((four, five), entries, strict=True)
    ]
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


def test_scales_override_panels_and_panels_override_the_file_and_table_1(file):
    x, y = load_all(file(PANELS), "paper")
    assert (x.name, y.name) == ("minex", "miney")
    assert (x.title, y.title) == ("CIFAR-10, LeNet without BatchNorm", "mine")
    assert (x.budget.epochs, y.budget.epochs) == (300, 7)
    assert x.options == {
        "data": "cifar-10",
        "network": "lenet",
        "activation": "elu",
        "layout": "channels_last",
        "batch": 64,
    }
    assert (x.seeds, y.seeds) == (4, 4)
    x, y = load_all(file(PANELS), "demo")
    assert (x.seeds, y.seeds) == (1, 2)
    assert (x.budget.epochs, y.budget.epochs) == (300, 3)
    _, y = load_all(
        file(
            PANELS.replace("[scales.demo]", "[scales.demo]\nbudget = { epochs = 5 }").replace(
                "budget = { epochs = 3 }", ""
            )
        ),
        "demo",
    )
    assert y.budget.epochs == 5, "the scale, not the panel's own 7"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('setting = "e"', 'setting = "z"'), "setting = 'z' is not one of a, b, c, d, e, f"),
        (("batch = 64", "bach = 64"), "options.bach is not an option; the options are"),
        (
            ("batch = 64", 'layout = "sideways"'),
            "options.layout = 'sideways' is not one of channels_last, contiguous",
        ),
        (
            ("batch = 64", 'batch = "64"'),
            "options.batch = '64': must have the same type as the default, 128",
        ),
        (
            ("batch = 64", "batch = true"),
            "options.batch = True: must have the same type as the default, 128",
        ),
        (
            ("batch = 64", "size = 16"),
            "options.size = 16: network lenet takes images of 32x32 pixels only",
        ),
        (("batch = 64", "size = 24"), "options.size = 24 is not one of 16, 32"),
        (
            ("batch = 64", 'data = "imagenet"'),
            "options.data = 'imagenet' is not one of cifar-10, cifar-100, mnist",
        ),
        (
            ("lr = 0.1", "uses = 2.5"),
            "methods.sgd.uses = 2.5: must have the same type as the default, 1",
        ),
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


# ----------------------------------------------------------------------- entries that follow others

FOLLOWING = GOOD.replace(
    "[scales.demo]",
    """
[methods.twice]
method = "sgd"
label = "Twice"
uses = 2
follows = "mine"
[scales.demo]
""",
    1,
)


class WithGamma(Invented):
    """Its runs have gammas of 9 (not counted), 0.5, 0.6 + seed / 100 and 2."""

    def records(self, spec):
        gammas = (9.0, 0.5, 0.6 + spec.seed / 100, 2.0)
        return (
            [{"bp": i, "loss": 0.5, "gamma": gamma} for i, gamma in enumerate(gammas)]
            if self.loss(spec)
            else []
        )


def test_an_entry_that_follows_another_gets_its_lr_from_the_winners_runs(file):
    experiment = load(file(FOLLOWING), "paper")
    seen, outcome = play(experiment, WithGamma(lambda s: 1 + abs(s.hyper["lr"] - 2.2)))
    assert list(seen) == ["grid", "winners", "controls"]
    assert len(seen["grid"]) == 2 + 6, "no trials of its own"
    assert {spec.hyper["lr"] for spec in seen["controls"]} == {1.23}, (
        "2 x 0.615, the median of .5 .61 2 .5 .62 2"
    )
    assert {spec.seed for spec in seen["controls"]} == {spec.seed for spec in seen["winners"]}
    assert {(spec.method, spec.hyper["uses"], spec.budget) for spec in seen["controls"]} == {
        ("sgd", 2, 200)
    }
    group = next(group for group in outcome.groups if group.entry.name == "twice")
    assert list(group.specs.values()) == seen["controls"]
    assert label_of(group) == "Twice (lr 1.23)"
    assert experiment.expected_back_propagations()["twice", "sgd"] == (2, 400)


def test_the_logged_median_gamma_is_preferred_to_the_last_gamma(file):
    class Median(WithGamma):
        def records(self, spec):
            return [{**record, "gamma median": 0.25} for record in super().records(spec)]

    seen, _ = play(load(file(FOLLOWING), "paper"), Median(lambda s: 1 + s.hyper["lr"]))
    assert {spec.hyper["lr"] for spec in seen["controls"]} == {0.25}


def test_an_entry_has_no_runs_until_the_runs_it_follows_are_complete(file):
    experiment = load(file(FOLLOWING), "paper")
    for loss in (lambda s: None, lambda s: 1.0 if s.budget == 50 or s.seed == 0 else None):
        seen, outcome = play(experiment, WithGamma(loss))
        assert seen["controls"] == []
        group = next(group for group in outcome.groups if group.entry.name == "twice")
        assert (group.winner, group.specs) == (None, {})


def test_every_instance_follows_its_own_winner(file):
    experiment = load(file('instances = 3\ntune = "first"\n' + FOLLOWING), "paper")
    seen, _ = play(experiment, WithGamma(lambda s: 1.0))
    assert sorted(spec.options["instance"] for spec in seen["controls"]) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ('follows = "mine"', 'follows = "sgd"'),
            "methods.twice.follows = 'sgd' is not one of mine",
        ),
        (('follows = "mine"', 'follows = "me"'), "methods.twice.follows = 'me' is not one of mine"),
        (("uses = 2", "lr = 0.1"), "methods.twice.lr = 0.1: its lr follows mine, so give none"),
        (
            ("uses = 2", "uses = [1, 2]"),
            "methods.twice.uses = [1, 2]: an entry that follows another has no grid",
        ),
    ],
)
def test_a_mistake_in_what_an_entry_follows_is_one_sentence(file, change, sentence):
    path = file(FOLLOWING.replace(*change))
    with pytest.raises(ExperimentError) as error:
        load(path, "paper")
    assert str(error.value) == f"{path}: {sentence}"


def test_a_control_is_run_at_the_median_gamma_of_real_runs(file, tmp_path):
    text = FOLLOWING.replace(
        "lr = [1.0, 2.0, 3.0]\nbounds = [[0.5, 2.0], [0.1, 10.0]]", "lr = [1.0, 3.0]"
    )
    experiment = load(file(text), "demo").model_copy(update={"seeds": 2})
    results = Results(Store(tmp_path / "store"))
    plan = stages(experiment, results)
    made = {}
    try:
        while True:
            name, specs = next(plan)
            made[name] = [folder_of(results.store, spec) for spec in specs]
            assert {execute(run, {}) for run in made[name]} == {"finished"}
    except StopIteration as end:
        outcome = end.value
    tuned, twice = (
        next(g for g in outcome.groups if g.entry.name == name) for name in ("mine", "twice")
    )
    gammas = [
        r.get("gamma median", r.get("gamma"))
        for s in tuned.specs.values()
        for r in results.records(s)[1:]
    ]
    assert twice.winner.hyper["lr"] == pytest.approx(
        tuned.winner.hyper["lr"] * statistics.median(gammas), rel=5e-3
    )
    assert [results.final(spec)["bp"] for spec in twice.specs.values()] == [100, 100]
    assert len(made["controls"]) == 2


@pytest.mark.parametrize("scale", ["short", "small", "demo"])
@pytest.mark.parametrize(
    ("controls", "figure", "panel"),
    [("controls-f", "figure-6", "f"), ("controls-a", "figure-4", "a")],
)
def test_controls_share_runs_with_their_figure(controls, figure, panel, scale):
    mine, theirs = (
        load(paper_experiments()[controls], scale),
        load(paper_experiments()[figure], scale, panel),
    )
    assert mine.seeds == theirs.seeds
    for name in ("sgd", "step-tuned-sgd"):
        assert grid_identities(mine, name) == grid_identities(theirs, name)


def grid_identities(experiment, name):
    """The identities of all runs of an entry's grid, short and long."""
    entry = next(entry for entry in experiment.entries if entry.name == name)
    return [
        experiment.spec(entry, hyper, 1, 0, budget).identity
        for hyper in entry.grid()
        for budget in (experiment.budget, experiment.selection.after)
    ]


@pytest.mark.parametrize("name", ["controls-a", "controls-f"])
def test_controls_are_three_constants_a_finer_grid_and_each_mini_batch_twice(name):
    experiment = load(paper_experiments()[name], "short")
    entries = {entry.name: entry for entry in experiment.entries}
    assert list(entries) == [
        "sgd",
        "step-tuned-sgd",
        "constant-05",
        "constant-1",
        "constant-2",
        "finer",
        "twice",
    ]
    for constant, gamma in (("constant-05", 0.5), ("constant-1", 1.0), ("constant-2", 2.0)):
        axes = entries[constant].axes
        assert (axes["bounds"], axes["nu"]) == ([[gamma, gamma]], [gamma])
        assert axes["lr"] == entries["step-tuned-sgd"].axes["lr"]
        problem = PROBLEMS["regression"].from_dict({}, 0, torch.device("cpu"))
        driver = Driver("step-tuned-sgd", problem, entries[constant].grid()[0])
        for _ in range(6):
            driver.advance()
        assert driver.optimizer.gamma.item() == gamma
    finer = entries["finer"].axes["lr"]
    assert len(finer) == len(entries["finer"].grid()) == len(entries["step-tuned-sgd"].grid()) == 15
    assert (finer[0], finer[-1]) == (1e-4, 1.0)
    assert all(1.8 < b / a < 2.1 for a, b in pairwise(finer))
    assert (entries["twice"].follows, entries["twice"].axes["uses"]) == ("step-tuned-sgd", [2])
    assert len({entry.label for entry in experiment.entries}) == 7


@pytest.mark.parametrize("scale", ["short", "small"])
@pytest.mark.parametrize(
    ("variants", "figure", "panel"),
    [("beyond-f", "figure-6", "f"), ("beyond-a", "figure-4", "a")],
)
def test_variants_share_runs_with_their_figure(variants, figure, panel, scale):
    mine = load(paper_experiments()[variants], scale)
    theirs = load(paper_experiments()[figure], scale, panel)
    assert mine.reported_seeds == theirs.reported_seeds
    for name in ("sgd", "step-tuned-sgd"):
        assert grid_identities(mine, name) == grid_identities(theirs, name)


BASES = {"momentum", "adamw"}


@pytest.mark.parametrize("name", ["beyond-f", "beyond-a", "text"])
def test_every_variant_is_compared_with_and_without_relative_bounds(name):
    experiment = load(paper_experiments()[name], "short")
    entries = {entry.name: entry for entry in experiment.entries}
    assert {"sgd", "step-tuned-sgd", *BASES} <= entries.keys()
    axes = [
        (e.method, e.axes["tune_every"], e.axes["relative"], e.axes["nu"])
        for e in entries.values()
        if "relative" in e.axes
    ]
    found = {(method, every[0], relative[0]) for method, every, relative, _ in axes}
    all_T = {("step-tuned-variant", T, r) for T in (4, 16) for r in (False, True)}
    assert all_T | {("step-tuned-variant", 1, True)} <= found
    for base in BASES:
        wanted = (4,) if name == "beyond-a" else (1, 4, 16)
        assert {(f"step-tuned-{base}", T, r) for T in wanted for r in (False, True)} <= found
        tuned = [e for e in entries.values() if e.method == f"step-tuned-{base}"]
        assert {tuple(e.axes["lr"]) for e in tuned} == {tuple(entries[base].axes["lr"])}
    assert all(max(nu) <= 2 for _, _, relative, nu in axes if relative[0]), "M is not raised"
    assert len({entry.label for entry in experiment.entries}) == len(entries)


def test_calibration_has_the_settings_of_the_external_result():
    experiment = load(paper_experiments()["calibration"], "paper")
    (entry,) = experiment.entries
    assert (entry.method, entry.grid()) == ("adam", [{"lr": 1e-3, "beta1": 0.9, "uses": 1}])
    options = experiment.problem_options.as_dict()
    wanted = {
        "network": "resnet-20",
        "size": 32,
        "batch": 128,
        "augmentation": "standard",
        "weight_decay": 0,
        "rows": 0,
    }
    assert wanted.items() <= options.items()
    assert options["test_rows"] == 0
    assert (experiment.budget.epochs, experiment.seeds) == (50, 3)
    assert load(paper_experiments()["calibration"], "short").budget == experiment.budget
