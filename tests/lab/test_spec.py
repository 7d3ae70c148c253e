"""The identity of a run and the seeds derived from it."""

from itertools import pairwise

import pytest

from specs import make_spec
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.spec import canonical, derive_seed


def test_the_identity_depends_on_values_and_not_on_their_notation():
    a, b = make_spec(lr=1, bounds=[0.5, 2]), make_spec(lr=1.0, bounds=(0.5, 2.0))
    assert a.identity == b.identity
    assert canonical({"b": 1, "a": [2.0]}) == canonical({"a": (2,), "b": 1.0})


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.2},
        {"seed": 1},
        {"budget": 300},
        {"options": {"instance": 3}},
        {"method": "exact-gv"},
    ],
)
def test_whatever_changes_the_numbers_changes_the_identity(change):
    assert make_spec(**change).identity != make_spec().identity


def test_a_folder_name_says_what_differs_from_the_defaults():
    spec = make_spec(lr=3.0, options={"instance": 4})
    name = spec.name(PROBLEMS["regression"].defaults, METHODS["step-tuned-sgd"].defaults)
    assert name == f"step-tuned-sgd_instance=4_lr=3_seed=0_bp=200_{spec.identity}"


def test_a_name_is_always_a_valid_folder_name():
    spec = make_spec(decay="../../<script>" + "x" * 300)
    name = spec.name({}, {})
    assert "/" not in name
    assert "<" not in name
    assert len(name) < 200


def test_a_spec_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        make_spec().seed = 3


def test_seeds_of_different_purposes_are_different_and_stable():
    seeds = {
        derive_seed(purpose, "regression", i)
        for purpose in ("instance", "initial point", "data order")
        for i in range(50)
    }
    assert len(seeds) == 150
    assert derive_seed("initial point", "regression", 30, 0) == derive_seed(
        "initial point", "regression", 30, 0
    )
    assert all(0 <= seed < 2**63 for seed in seeds)


def steps(spec):
    """The steps of all records, as the run loop makes them."""
    found = [0]
    while found[-1] < spec.budget:
        found.append(min(spec.budget, spec.next_record(found[-1])))
    return found


def test_without_early_records_the_log_is_evenly_spaced():
    assert steps(make_spec(budget=55, log_every=10)) == [0, 10, 20, 30, 40, 50, 55]


@pytest.mark.parametrize("budget", [1, 7, 100, 11_730, 195_500])
def test_early_records_are_log_spaced_in_the_first_tenth_and_even_afterwards(budget):
    every = max(1, budget // 100)
    spec = make_spec(budget=budget, log_every=every).model_copy(update={"log_early": 15})
    found = steps(spec)
    assert found == sorted(set(found))
    assert found[-1] == budget
    if budget > 10_000:
        early = [step for step in found if 0 < step <= budget / 10]
        assert len(early) == 15
        assert early[-1] == round(budget / 10)
        ratio = (budget / 10) ** (1 / 15)
        assert all(b == pytest.approx(a * ratio, rel=0.3) for a, b in pairwise(early[2:]))
        later = found[found.index(early[-1]) : -1]
        assert {b - a for a, b in pairwise(later)} == {every}
        assert len(found) > 100


def test_the_next_record_depends_only_on_the_step():
    spec = make_spec(budget=5_000, log_every=50).model_copy(update={"log_early": 15})
    found = steps(spec)
    for step in range(5_000):
        assert min(5_000, spec.next_record(step)) > step
    for a, b in pairwise(found):
        assert min(5_000, spec.next_record(a)) == b


def test_early_records_change_the_identity():
    spec = make_spec()
    assert spec.model_copy(update={"log_early": 0}).identity == spec.identity
    other = type(spec)(**{**spec.model_dump(), "log_early": 15})
    assert other.identity != spec.identity
