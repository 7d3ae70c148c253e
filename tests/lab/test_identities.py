"""Identities of runs that exist already: new options and fields must not change them."""

import pytest

from specs import make_spec
from steptuned.lab.experiment import Budget, load, paper_experiments
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.spec import ADDED_OPTIONS

PACKAGED = {
    ("figure-2", "", "paper", "step-tuned-gd"): "250d477b6b061824",
    ("figure-2", "", "demo", "armijo"): "dc21848d001d0477",
    ("figure-3", "", "paper", "sgd"): "d0b5517a8060fc05",
    ("figure-3", "", "paper", "step-tuned-sgd"): "039d511868c9c83d",
    ("rate", "", "paper", "delta-01"): "5ac9a2d32aab60af",
    ("digits", "", "paper", "adam"): "3e1452156c26d9cc",
    ("digits-without-batchnorm", "", "demo", "rmsprop"): "3dcb2a860a7974e6",
    ("text", "", "paper", "adamw"): "e08bbe13b24494a8",
    ("text", "", "demo", "step-tuned-sgd"): "0893bdce8fc120b3",
    ("figure-4", "a", "paper", "step-tuned-sgd"): "f0c4cd95ef303d3c",
    ("figure-4", "c", "paper", "adam"): "e43d0bbe3fcffc98",
    ("figure-4", "d", "paper", "rmsprop"): "e34a51066ff35a48",
    ("figure-5", "b", "paper", "sgd"): "266c43c2f5b0ea8f",
    ("activations", "-silu", "paper", "sgd"): "1a852174f48e2009",
}

LOGGED_EVERY_EPOCH = ("figure-4", "figure-5", "activations")
"""At scale paper, when these runs were made. The records are fewer now."""

BY_HAND = {
    ("images", "step-tuned-sgd", ()): "881cc7102929f23c",
    ("images", "sgd", (("network", "lenet-batchnorm"), ("activation", "elu"))): "71f44a87f759c2ec",
    (
        "images",
        "adam",
        (("rows", 5_000), ("test_rows", 1_000), ("layout", "channels_last")),
    ): "e24f4a874ed241b2",
    ("autoencoder", "sgd", ()): "4cce909f0aca0e90",
    ("autoencoder", "step-tuned-sgd", (("rows", 4_000), ("test_rows", 500))): "0ad5c12bf70de007",
}


@pytest.mark.parametrize("key", PACKAGED, ids=lambda key: "-".join(key))
def test_a_run_of_a_packaged_experiment_keeps_its_identity(key):
    name, panel, scale, entry_name = key
    experiment = load(paper_experiments()[name], scale, panel)
    if name in LOGGED_EVERY_EPOCH:
        experiment = experiment.model_copy(update={"log_every": Budget(epochs=1), "log_early": 0})
    entry = next(entry for entry in experiment.entries if entry.name == entry_name)
    assert (
        experiment.spec(entry, entry.grid()[0], 1, 0, experiment.budget).identity == PACKAGED[key]
    )


@pytest.mark.parametrize("key", BY_HAND, ids=str)
def test_a_run_with_options_by_hand_keeps_its_identity(key):
    problem, method, options = key
    assert make_spec(method, problem, options=dict(options)).identity == BY_HAND[key]


@pytest.mark.parametrize(
    ("problem", "option"),
    [("images", {"size": 16}), ("images", {"eval_rows": 128}), ("autoencoder", {"eval_rows": 128})],
)
def test_a_later_option_changes_the_identity_unless_it_has_its_default(problem, option):
    assert (
        make_spec(problem=problem, options=option).identity != make_spec(problem=problem).identity
    )


def test_the_defaults_left_out_of_the_identity_are_those_of_the_problems():
    for problem, added in ADDED_OPTIONS.items():
        assert added.items() <= PROBLEMS[problem].defaults.items()
