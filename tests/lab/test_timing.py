"""Table 2: what is measured, and how it is stored."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from steptuned.lab import timing
from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report.prose import time_per_epoch
from steptuned.lab.report.tables import wall_clock
from steptuned.lab.table2 import PAPER, TIMED, Size, Timing, Timings
from steptuned.lab.timing import Clock, measure


@pytest.fixture
def quick(small, monkeypatch):
    monkeypatch.setitem(timing.SIZES, "demo", Size(4, 0.01))
    monkeypatch.setitem(
        TABLE_1, "e", {**TABLE_1["e"], "options": {**TABLE_1["e"]["options"], "batch": 8}}
    )


def made_up(letter="a", sgd=(1.0, 2.0, 4.0), tuned=(1.1, 2.0, 3.6)):
    seconds = {name: list(sgd) for name in TIMED} | {"step-tuned-sgd": list(tuned)}
    return Timing(
        letter, "small", 10, seconds, {name: [0.001] for name in TIMED}, [0.0005], {"threads": 1}
    )


def test_every_method_is_timed_in_every_round_in_whole_iterations(quick):
    measured = measure("e", "demo", "cpu")
    assert set(measured.seconds) == {"sgd", "adam", "rmsprop", "step-tuned-sgd"}
    assert {len(rounds) for rounds in measured.seconds.values()} == {4}
    assert measured.back_propagations % 2 == 0
    assert measured.ratio("sgd") == (1.0, 1.0, 1.0)
    for name in TIMED:
        assert (
            0
            < np.median(measured.optimizer[name])
            < np.median(measured.seconds[name]) / measured.back_propagations
        )
    assert measured.environment["torch"] == torch.__version__


def test_a_whole_epoch_is_timed_at_scale_paper(quick, monkeypatch):
    monkeypatch.setitem(timing.SIZES, "paper", Size(1, None))
    assert measure("e", "paper", "cpu").back_propagations == 38, "300 images in mini-batches of 8"


def test_rounds_are_interleaved_and_start_with_different_methods():
    order = list(timing._interleaved(5))
    rounds = [order[i : i + 4] for i in range(0, 20, 4)]
    assert all(sorted(r) == sorted(TIMED) for r in rounds)
    assert [r[0] for r in rounds] == [*TIMED, TIMED[0]]


@pytest.mark.parametrize("name", TIMED)
def test_optimizer_time_excludes_back_propagations(small, name, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    options = {"network": "lenet", "batch": 8}
    problem = PROBLEMS["images"].from_dict(options, 0, torch.device("cpu"))
    loss, back_propagations = problem.loss, []

    def slow_loss(batch):
        now[0] += 100
        back_propagations.append(batch)
        return loss(batch)

    def slow_hook(*_):
        now[0] += 1

    monkeypatch.setattr(problem, "loss", slow_loss)
    driver = Driver(name, problem, METHODS[name].defaults)
    driver.advance()
    driver.advance()
    driver.optimizer.register_step_pre_hook(slow_hook)
    driver.optimizer.register_step_post_hook(slow_hook)
    back_propagations.clear()
    before = dict(vars(driver.optimizer))
    seconds = timing.update_seconds(driver, 4, Clock(torch.device("cpu")))
    assert len(back_propagations) == 4
    steps = 2 if name == "step-tuned-sgd" else 4
    assert seconds == 2 * steps / 4, "the hooks are inside a step, the losses are not counted"
    assert vars(driver.optimizer).keys() == before.keys()
    driver.advance()


def test_the_ratio_is_taken_round_by_round():
    middle, low, high = made_up().ratio("step-tuned-sgd")
    assert middle == pytest.approx(1.0)
    assert (low, high) == (pytest.approx(0.95), pytest.approx(1.05))
    assert made_up().milliseconds("sgd") == pytest.approx(200)


def test_measurements_are_kept_and_a_damaged_one_is_measured_again(tmp_path):
    timings = Timings(tmp_path)
    timings.save(made_up("a"))
    timings.save(made_up("c"))
    timings.save(replace(made_up("a"), environment={"device": "cuda"}, precision="bfloat16"))
    assert timings.load("a", "small") == made_up("a")
    assert timings.load("a", "demo") is None
    found = {key: [t.problem for t in some] for key, some in timings.sets().items()}
    assert found == {("small", "cpu"): ["a", "c"], ("small", "cuda-bfloat16"): ["a"]}
    for content in ("{", "[]", json.dumps({**vars(made_up("a")), "seconds": {}})):
        (tmp_path / "table-2" / "a-small-cpu.json").write_text(content)
        assert timings.load("a", "small") is None


def test_the_table_shows_the_papers_values_next_to_ours():
    assert PAPER["step-tuned-sgd"] == {
        "a": 1.67,
        "b": 1.71,
        "c": 1.20,
        "d": 1.47,
        "e": 0.71,
        "f": 0.88,
    }
    ratios, profile = wall_clock([made_up("a"), made_up("e", tuned=(0.5, 1.0, 2.0))])
    assert ratios.columns[-3] == "Step-Tuned SGD [paper]"
    assert ratios.rows[0][-3] == "1.000 (0.950 to 1.050) [1.67]"
    assert ratios.rows[1][-3] == "0.500 (0.500 to 0.500) [0.71]"
    assert profile.rows[0][1:3] == ["0.50", "200.00 / 1.00"]
    assert time_per_epoch([made_up("a"), made_up("e", tuned=(0.5, 1.0, 2.0))]) == (
        "An epoch of Step-Tuned SGD takes 0.50 to 1.00 times as long as one of SGD; in the paper, "
        "0.71 to 1.67 times."
    )
