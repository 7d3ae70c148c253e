"""The next character of a text: its windows, its transformer and its methods."""

import ast
import hashlib

import pytest
import torch

from specs import make_spec
from steptuned import RobbinsMonroLR
from steptuned.lab.data.sets import DataError
from steptuned.lab.driver import Driver
from steptuned.lab.experiment import SCALES, load, paper_experiments
from steptuned.lab.methods import METHODS
from steptuned.lab.options import OptionError
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.text import MODULES, SYMBOLS, Text, checksum, text
from steptuned.lab.run import execute, folder_of
from steptuned.lab.store import Store
from test_store import ENVIRONMENT, finished, interrupted, numbers

CPU = torch.device("cpu")
SMALL = {
    "rows": 50,
    "test_rows": 12,
    "context": 16,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "batch": 8,
}


def make(seed=0, **options):
    return Text.from_dict({**SMALL, **options}, seed, CPU)


def letters(codes):
    return "".join(SYMBOLS[code] for code in codes.flatten())


def test_the_text_is_the_documentation_of_the_modules_and_reproducible():
    assert len(MODULES.split()) == 56
    assert ast.__doc__.strip().splitlines()[0] in text()
    assert set(text()) == set(SYMBOLS), "and nothing else"
    assert len(SYMBOLS) == 96
    assert text.__wrapped__() == text()
    assert checksum() == hashlib.sha256(text().encode()).hexdigest()[:16]


def test_windows_are_consecutive_and_the_test_set_is_the_end_of_the_text():
    problem = make()
    (x, y), (x_test, y_test) = problem.train, problem.test
    assert x.shape == y.shape == (50, 16)
    assert letters(x) == text()[:800]
    assert letters(y) == text()[1:801]
    assert letters(x_test) + letters(y_test[-1, -1:]) == text()[-12 * 16 - 1 :]
    assert letters(y_test) == text()[-12 * 16 :]
    assert problem.judged.tolist() == sorted(set(problem.judged.tolist()))
    assert (len(problem.judged), problem.evaluated) == (12, 24)
    for other in (make(), make(seed=1)):
        assert torch.equal(other.train[0], x)
        assert torch.equal(other.test[0], x_test)


def test_every_scale_fits_into_the_text_of_every_python():
    shortest = 750_000  # that of Python 3.10 has a little more
    for scale in SCALES:
        options = load(paper_experiments()["text"], scale).problem_options
        assert (options.rows + options.test_rows) * options.context + 2 < shortest < len(text())
        assert options.training_rows == options.rows


def test_a_later_character_does_not_change_earlier_predictions():
    problem = make(dropout=0.0)
    x = problem.train[0][:2]
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % len(SYMBOLS)
    before, after = problem.model(x), problem.model(changed)
    assert before.shape == (2, 16, 96)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(2).any(), "but all from there on"


def test_the_logged_loss_is_that_of_the_evaluated_windows_with_regularisation():
    problem = make(dropout=0.0, weight_decay=0.5)
    record = problem.evaluate()
    with torch.no_grad():
        plain = problem.loss(problem.judged).item()
        scores = problem.model(problem.test[0])
    penalty = 0.25 * sum(p.square().sum().item() for p in problem.parameters)
    assert record["plain loss"] == pytest.approx(plain, rel=1e-5)
    assert record["loss"] == pytest.approx(plain + penalty, rel=1e-5)
    likelihood = torch.log_softmax(scores, 2).gather(2, problem.test[1][:, :, None])
    assert record["test loss"] == pytest.approx(-likelihood.mean().item(), rel=1e-5)
    assert record["accuracy"] == pytest.approx(
        (scores.argmax(2) == problem.test[1]).double().mean().item()
    )
    assert record["loss"] > 4, "about log 96 at the start"


def test_j_has_fixed_dropout_masks_and_the_test_loss_has_no_dropout():
    problem = make(dropout=0.5)
    assert problem.evaluate() == problem.evaluate()
    assert problem.loss(problem.judged) != problem.loss(problem.judged)
    assert problem.evaluate()["test loss"] == make(dropout=0.0).evaluate()["test loss"]


@pytest.mark.parametrize("after", [9, 10])
@pytest.mark.parametrize("method", ["step-tuned-sgd", "momentum", "adamw"])
def test_a_run_with_dropout_resumes_with_the_same_numbers(tmp_path, monkeypatch, method, after):
    spec = {
        "problem": "text",
        "method": method,
        "budget": 20,
        "log_every": 3,
        "options": {**SMALL, "dropout": 0.3},
    }
    expected = numbers(finished(Store(tmp_path / "undisturbed"), **spec))
    run = interrupted(Store(tmp_path / "disturbed"), monkeypatch, after, **spec)
    assert execute(run, ENVIRONMENT) == "finished"
    assert numbers(run) == expected


def test_a_run_stores_its_text_and_does_not_resume_with_another(tmp_path):
    run = folder_of(Store(tmp_path), make_spec(problem="text", budget=1, options=SMALL))
    execute(run, ENVIRONMENT)
    assert run.environment()["text"] == checksum()
    problem = make()
    state = problem.state_dict()
    problem.load_state_dict(state)
    with pytest.raises(
        DataError, match=rf"began with another text \(f00\) than this Python's \({checksum()}\)"
    ):
        problem.load_state_dict({**state, "text": "f00"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rows": 0}, "rows = 0, test_rows = 12: both must be at least 1"),
        ({"rows": 60_000}, "the number of windows of 16 characters in this Python's text"),
        ({"width": 15}, "width = 15: must be a multiple of heads = 2"),
        ({"dropout": 1.0}, "dropout = 1.0: must be at least 0 and less than 1"),
    ],
)
def test_an_invalid_option_is_reported_in_one_sentence(options, sentence):
    with pytest.raises((DataError, OptionError), match=sentence.replace("(", r"\(")):
        make(**options)


TORCH = {
    "momentum": lambda parameters, decay: torch.optim.SGD(
        parameters, 0.1, momentum=0.9, weight_decay=decay
    ),
    "adamw": lambda parameters, decay: torch.optim.AdamW(
        parameters, 0.001, weight_decay=0.01 + decay
    ),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", TORCH)
def test_momentum_and_adamw_are_torchs_with_sgds_decay(name, weight_decay):
    problem, other = make(weight_decay=weight_decay), make(weight_decay=weight_decay)
    driver = Driver(name, problem, METHODS[name].defaults)
    optimizer = TORCH[name](other.parameters, weight_decay)
    decay = RobbinsMonroLR(optimizer, 0.001, other.stream.per_epoch)
    torch.manual_seed(3)
    for _ in range(16):
        driver.advance()
    assert (driver.batches, driver.samples) == (16, 116), "two epochs and two mini-batches"
    torch.manual_seed(3)
    for _ in range(16):
        optimizer.zero_grad()
        other.loss(other.draw()).backward()
        optimizer.step()
        decay.step()
    assert optimizer.param_groups[0]["lr"] < METHODS[name].defaults["lr"]
    for a, b in zip(problem.parameters, other.parameters, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", SCALES)
def test_the_experiment_gives_every_method_the_same_back_propagations_and_decay(scale):
    experiment = load(paper_experiments()["text"], scale)
    assert [entry.name for entry in experiment.entries] == [
        "sgd",
        "momentum",
        "adamw",
        "step-tuned-sgd",
        "every-4",
        "every-16",
        "relative",
        "relative-4",
        "relative-16",
        *(
            f"step-tuned-{base}{bounds}-{T}"
            for base in ("momentum", "adamw")
            for bounds in ("", "-absolute")
            for T in (1, 4, 16)
        ),
    ]
    specs = [
        experiment.spec(entry, entry.grid()[0], 0, 0, experiment.budget)
        for entry in experiment.entries
    ]
    assert len({spec.budget for spec in specs}) == 1
    assert {spec.hyper["decay"] for spec in specs} == {"epoch"}
    assert {spec.options["weight_decay"] for spec in specs} == {0.0}, (
        "so AdamW minimises the same J"
    )
    assert PROBLEMS[experiment.problem] is Text
