"""The identity of a run and the seeds derived from it."""

import pytest
from conftest import make_spec

from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.spec import canonical, derive_seed


def test_the_identity_is_that_of_the_values_not_of_their_writing():
    a, b = make_spec(lr=1, bounds=[0.5, 2]), make_spec(lr=1.0, bounds=(0.5, 2.0))
    assert a.identity == b.identity
    assert canonical({"b": 1, "a": [2.0]}) == canonical({"a": (2,), "b": 1.0})


@pytest.mark.parametrize(
    "change", [{"lr": 0.2}, {"seed": 1}, {"budget": 300}, {"options": {"instance": 3}}, {"method": "exact-gv"}]
)
def test_whatever_changes_the_numbers_changes_the_identity(change):
    assert make_spec(**change).identity != make_spec().identity


def test_a_folder_name_says_what_differs_from_the_defaults():
    spec = make_spec(lr=3.0, options={"instance": 4})
    name = spec.name(PROBLEMS["regression"].defaults, METHODS["step-tuned-sgd"].defaults)
    assert name == f"step-tuned-sgd_instance=4_lr=3_seed=0_bp=200_{spec.identity}"


def test_a_name_is_always_one_folder():
    spec = make_spec(decay="../../<script>" + "x" * 300)
    name = spec.name({}, {})
    assert "/" not in name
    assert "<" not in name
    assert len(name) < 200


def test_a_spec_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        make_spec().seed = 3


def test_seeds_of_different_purposes_are_different_and_stable():
    seeds = {derive_seed(purpose, "regression", i) for purpose in ("instance", "initial point", "data order") for i in range(50)}
    assert len(seeds) == 150
    assert derive_seed("initial point", "regression", 30, 0) == derive_seed("initial point", "regression", 30, 0)
    assert all(0 <= seed < 2**63 for seed in seeds)
