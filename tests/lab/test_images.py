"""The image problems: what a mini-batch is, what J is, what both passes share."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from small_data import TRAIN
from specs import make_spec, on_real_data
from steptuned.lab.data import reading
from steptuned.lab.data.batches import Batches, halved, mean_and_deviation
from steptuned.lab.data.reading import load
from steptuned.lab.data.sets import DataError
from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.run import execute, folder_of
from steptuned.lab.store import Store

CPU = torch.device("cpu")


def make(problem="images", seed=0, **options):
    small = {"network": "lenet-batchnorm"} if problem == "images" else {}
    return PROBLEMS[problem].from_dict({**small, "batch": 16, **options}, seed, CPU)


def driver_of(name, problem, **hyper):
    return Driver(name, problem, {**METHODS[name].defaults, **hyper})


# ------------------------------------------------------------------------------------- mini-batches


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_mini_batch_is_those_images_standardised_by_the_training_set(small, layout):
    images = load("cifar-10")
    problem = make(layout=layout)
    rows = torch.tensor([5, 0, 299, 5])
    x, y = problem.inputs(rows)
    train = images.train.double() / 255
    mean, deviation = (
        train.mean((0, 2, 3), keepdim=True),
        train.std((0, 2, 3), keepdim=True, correction=0),
    )
    torch.testing.assert_close(x.double(), (train[rows] - mean) / deviation, rtol=0, atol=1e-5)
    assert torch.equal(y, images.train_labels[rows])
    assert x.is_contiguous(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    test_x, _ = problem.test.rows(torch.arange(4))
    torch.testing.assert_close(
        test_x.double(), (images.test[:4].double() / 255 - mean) / deviation, rtol=0, atol=1e-5
    )


def test_without_normalisation_pixels_are_from_0_to_1(small):
    x, _ = make("autoencoder").inputs(torch.arange(20))
    torch.testing.assert_close(x, load("mnist").train[:20].float() / 255)


def test_mean_and_deviation_are_exact_and_constant_channels_are_safe():
    images = torch.randint(
        0, 256, (50, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images[:, 2] = 7
    mean, deviation = mean_and_deviation(images)
    values = images.double() / 255
    torch.testing.assert_close(mean.double(), values.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        deviation[:2].double(), values.std((0, 2, 3), correction=0)[:2], rtol=1e-6, atol=0
    )
    labels, standard = torch.zeros(50, dtype=torch.int64), (mean, deviation)
    x, _ = Batches(images, labels, CPU, False, standard).rows(torch.arange(50))
    assert torch.isfinite(x).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_augmentation_pads_by_four_crops_and_flips(channels_last):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 3, 32, 32)).astype(np.uint8)
    batches = Batches(torch.tensor(images), torch.arange(12), CPU, channels_last, None)
    rows, down, right = rng.integers(0, 12, 30), rng.integers(0, 9, 30), rng.integers(0, 9, 30)
    flip = rng.integers(0, 2, 30)
    x, y = batches.augmented(*map(torch.tensor, (rows, down, right, flip)))
    for i in range(30):
        padded = np.pad(images[rows[i]], ((0, 0), (4, 4), (4, 4)))
        expected = padded[:, down[i] : down[i] + 32, right[i] : right[i] + 32]
        expected = expected[:, :, ::-1] if flip[i] else expected
        np.testing.assert_allclose(x[i], expected / 255, rtol=1e-6)
        assert y[i] == rows[i]
    assert x.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )


@pytest.mark.parametrize("size", [32, 16])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("channels_last", [False, True])
def test_mini_batches_equal_a_literal_slow_form_bit_for_bit(channels_last, channels, size):
    """Runs must keep their numbers, so a faster way to make a mini-batch gives the same bits."""
    generator = torch.Generator().manual_seed(0)

    def random(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    images, pad = random(256, 60, channels, 32, 32).to(torch.uint8), 4
    if size == 16:
        images, pad = halved(images), 2
    standard = mean_and_deviation(images)
    batches = Batches(images, torch.arange(60), CPU, channels_last, standard, pad)
    rows, down, right = random(60, 90), random(2 * pad + 1, 90), random(2 * pad + 1, 90)
    flip = random(2, 90)
    mean, deviation = (t.view(1, -1, 1, 1) for t in standard)

    def literal(row, down, right, flip):
        padded = torch.nn.functional.pad(images[row : row + 1].float(), (pad,) * 4)
        crop = padded[:, :, down : down + size, right : right + size]
        if flip:
            crop = crop.flip(3)
        return torch.addcmul(-mean / deviation, crop, 1 / (255 * deviation))

    x, y = batches.augmented(rows, down, right, flip)
    changes = torch.stack((rows, down, right, flip), 1).tolist()
    assert torch.equal(x, torch.cat([literal(*change) for change in changes]))
    assert torch.equal(y, rows)
    x, y = batches.rows(rows)
    assert torch.equal(x, torch.cat([literal(row, pad, pad, 0) for row in rows.tolist()]))
    assert torch.equal(y, rows)


def test_augmentation_is_drawn_once_per_mini_batch_and_shared_by_both_passes(small):
    problem = make(augmentation="standard")
    driver = driver_of("step-tuned-sgd", problem)
    seen = []
    problem.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    for _ in range(6):
        driver.advance()
    for first, second in ((0, 1), (2, 3), (4, 5)):
        assert torch.equal(seen[first], seen[second])
    assert not torch.equal(seen[0], seen[2])
    plain, augmented = make(), make(augmentation="standard")
    rows = [plain.draw() for _ in range(3)]
    drawn = [augmented.draw() for _ in range(3)]
    assert all(torch.equal(a, b[:, 0]) for a, b in zip(rows, drawn, strict=True)), (
        "the same images as without"
    )
    shifts = torch.cat(drawn)[:, 1:]
    assert shifts.min() == 0
    assert shifts[:, :2].max() == 8
    assert set(shifts[:, 2].tolist()) == {0, 1}


def test_runs_of_one_process_share_images_if_they_have_the_same_options_and_data(
    small, monkeypatch
):
    one, other = make(), make(seed=1)
    assert other.train is one.train
    assert other.test is one.test
    assert make(rows=50).train is not one.train
    assert len(make().train) == TRAIN
    images = load("cifar-10")
    darker = replace(images, train=images.train // 2)
    before = make(normalisation="none").train
    monkeypatch.setattr(reading, "load", lambda name: darker)
    x, _ = make(normalisation="none").train.rows(torch.arange(4))
    torch.testing.assert_close(x, darker.train[:4].float() / 255)
    assert not torch.equal(x, before.rows(torch.arange(4))[0])


def test_a_subset_of_rows_is_the_same_for_every_seed(small):
    a, b = make(rows=50, test_rows=20), make(rows=50, test_rows=20, seed=1)
    assert len(a.train) == a.stream.rows == a.options.training_rows == 50
    assert len(a.test) == 20
    everything = torch.arange(50)
    assert torch.equal(a.train.rows(everything)[0], b.train.rows(everything)[0])
    assert not torch.equal(a.train.labels, load("cifar-10").train_labels[:50]), (
        "not just the first ones"
    )
    assert a.options.model_copy(update={"rows": 0}).training_rows == TRAIN
    with pytest.raises(DataError, match="test_rows = 61: cifar-10 has 60 such images"):
        make(test_rows=61)


# -------------------------------------------------------------------------- images of half the size


def halves(images):
    values = images.double()
    return (
        values[:, :, ::2, ::2]
        + values[:, :, 1::2, ::2]
        + values[:, :, ::2, 1::2]
        + values[:, :, 1::2, 1::2]
    ) / 4


def test_halved_images_are_exact_means_of_four_pixels():
    images = torch.randint(
        0, 256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images[0] = 255
    small_images = halved(images)
    assert small_images.dtype == torch.float32
    assert torch.equal(small_images.double(), halves(images))
    mean, deviation = mean_and_deviation(small_images)
    values = halves(images) / 255
    torch.testing.assert_close(mean.double(), values.mean((0, 2, 3)), rtol=1e-7, atol=0)
    torch.testing.assert_close(
        deviation.double(), values.std((0, 2, 3), correction=0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_at_size_16_a_mini_batch_is_the_halved_images_standardised_by_their_own_statistics(
    small, layout
):
    images = load("cifar-10")
    problem = make(network="resnet-20", size=16, layout=layout, rows=100)
    train = halves(images.train) / 255
    labels, rows = problem.train.labels, torch.tensor([5, 0, 99, 5])
    x, y = problem.inputs(rows)
    kept = torch.stack(_kept(problem, images))
    mean = train[kept].mean((0, 2, 3), keepdim=True)
    deviation = train[kept].std((0, 2, 3), keepdim=True, correction=0)
    torch.testing.assert_close(
        x.double(), (train[kept][rows] - mean) / deviation, rtol=0, atol=1e-5
    )
    assert torch.equal(y, labels[rows])
    test_x, _ = problem.test.rows(torch.arange(4))
    torch.testing.assert_close(
        test_x.double(), (halves(images.test[:4]) / 255 - mean) / deviation, rtol=0, atol=1e-5
    )


def _kept(problem, images):
    """Which images the problem trains on, found by comparing them at 32x32."""
    large = make(network="resnet-20", rows=len(problem.train), normalisation="none")
    everything = (large.train.rows(torch.arange(len(large.train)))[0] * 255).round().to(torch.uint8)
    return [(images.train == image).all((1, 2, 3)).nonzero()[0, 0] for image in everything]


@pytest.mark.parametrize("network", ["resnet-20", "nin"])
@pytest.mark.parametrize("augmentation", ["none", "standard"])
def test_networks_learn_images_of_size_16(small, network, augmentation):
    problem = make(
        network=network, size=16, augmentation=augmentation, rows=64, layout="channels_last"
    )
    driver = driver_of("step-tuned-sgd", problem, lr=0.05)
    shapes = set()
    problem.model.register_forward_pre_hook(lambda _, args: shapes.add(tuple(args[0].shape[1:])))
    before = problem.evaluate()["loss"]
    for _ in range(16):
        driver.advance()
    assert problem.evaluate()["loss"] < before
    assert shapes == {(3, 16, 16)}


def test_augmentation_at_size_16_pads_by_two(small):
    problem = make(network="resnet-20", size=16, augmentation="standard", normalisation="none")
    drawn = torch.cat([problem.draw() for _ in range(10)])
    assert (drawn[:, 1:3].min(), drawn[:, 1:3].max()) == (0, 4)
    rows, down, right, flip = drawn[:30].T
    x, _ = problem.train.augmented(rows, down, right, flip)
    for i in range(30):
        padded = nn.functional.pad(
            halves(load("cifar-10").train[rows[i : i + 1]])[0] / 255, (2, 2, 2, 2)
        )
        expected = padded[:, down[i] : down[i] + 16, right[i] : right[i] + 16]
        torch.testing.assert_close(
            x[i].double(), expected.flip(2) if flip[i] else expected, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("network", ["lenet", "lenet-batchnorm", "nin-author"])
def test_a_network_for_32x32_images_refuses_others(small, network):
    with pytest.raises(
        ValueError, match=f"^size = 16: network {network} takes images of 32x32 pixels only$"
    ):
        make(network=network, size=16)


def test_only_cifar_has_images_of_size_16(small):
    with pytest.raises(
        ValueError, match=r"^size = 16: only the 32x32 images of CIFAR can be made 16x16"
    ):
        make(network="resnet-20", data="mnist", size=16)
    assert "size" not in PROBLEMS["autoencoder"].defaults


# --------------------------------------------------------------------- what is minimised and logged


@pytest.mark.parametrize("problem_name", ["images", "autoencoder"])
def test_the_logged_loss_can_use_a_fixed_subset_of_the_training_images(small, problem_name):
    part, other = (make(problem_name, eval_rows=40, rows=100, seed=seed) for seed in (0, 1))
    everything = make(problem_name, rows=100)
    assert torch.equal(part._logged, other._logged)
    assert len(part._logged.unique()) == 40
    assert not torch.equal(part._logged.sort().values, torch.arange(40)), "not just the first ones"
    assert (part.evaluated, everything.evaluated) == (40 + 60, 100 + 60)
    record, whole = part.evaluate(), everything.evaluate()
    with torch.no_grad():
        batches = [part.train.rows(rows) for rows in part._logged.split(16)]
        losses = [part._criterion(part.model(x), x, y).double() * len(y) for x, y in batches]
    assert record["plain loss"] == pytest.approx((sum(losses) / 40).item(), rel=1e-5)
    assert record["plain loss"] != whole["plain loss"]
    assert record["test loss"] == whole["test loss"]
    assert torch.equal(part.draw(), everything.draw()), "training is the same"
    with pytest.raises(DataError, match="eval_rows = 101: there are 100 training images"):
        make(problem_name, eval_rows=101, rows=100)


def test_options_missing_from_an_older_spec_have_their_defaults(small):
    options = {
        key: value
        for key, value in make().options.as_dict().items()
        if key not in ("size", "eval_rows")
    }
    problem = PROBLEMS["images"].from_dict(options, 0, CPU)
    assert problem.evaluate() == make().evaluate()


@pytest.mark.parametrize("network", ["lenet", "lenet-batchnorm", "resnet-20"])
def test_the_logged_j_is_what_training_minimises_and_tests_use_evaluation_mode(small, network):
    problem = make(network=network, weight_decay=0.01)
    driver = driver_of("step-tuned-sgd", problem, lr=0.05)
    for _ in range(5):
        driver.advance()
    state = copy.deepcopy(problem.state_dict())
    record = problem.evaluate()
    assert problem.model.training
    with torch.no_grad():
        batches = [problem.train.rows(rows) for rows in torch.arange(TRAIN).split(16)]
        plain = (
            sum(
                nn.functional.cross_entropy(problem.model(x), y, reduction="sum").item()
                for x, y in batches
            )
            / TRAIN
        )
    problem.load_state_dict(state)
    problem.model.eval()
    with torch.no_grad():
        x, y = problem.test.rows(torch.arange(60))
        output = problem.model(x)
    penalty = 0.005 * sum(p.double().square().sum().item() for p in problem.parameters)
    assert record["plain loss"] == pytest.approx(plain, rel=1e-5)
    assert record["loss"] == pytest.approx(plain + penalty, rel=1e-5)
    assert record["accuracy"] == pytest.approx((output.argmax(1) == y).double().mean().item())
    assert record["test loss"] == pytest.approx(
        nn.functional.cross_entropy(output, y).item(), rel=1e-5
    )


@pytest.mark.parametrize("network", ["lenet-batchnorm", "nin"])
def test_evaluation_changes_nothing_and_is_repeatable(small, network):
    problem = make(network=network, rows=20, test_rows=4)
    state = {name: value.clone() for name, value in problem.model.state_dict().items()}
    noise = torch.get_rng_state()
    record = problem.evaluate()
    torch.rand(3)
    assert problem.evaluate() == record, "the same masks every time"
    torch.set_rng_state(noise)
    problem.evaluate()
    assert all(
        torch.equal(value, state[name]) for name, value in problem.model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(
        m.track_running_stats for m in problem.model.modules() if isinstance(m, nn.BatchNorm2d)
    )


def test_every_methods_gradient_includes_the_regularisation(small):
    """Steps of SGD from the same point with and without lambda differ by lr * lambda * theta."""
    moved = {}
    for decay in (0.0, 0.1):
        problem = make(weight_decay=decay)
        start = [p.detach().clone() for p in problem.parameters]
        driver_of("sgd", problem, lr=0.1).advance()
        moved[decay] = [p.detach() for p in problem.parameters]
    for theta, without, given in zip(start, moved[0.0], moved[0.1], strict=True):
        torch.testing.assert_close(without - given, 0.1 * 0.1 * theta, rtol=1e-4, atol=1e-6)


def test_the_autoencoder_is_evaluated_by_its_mean_squared_error(small):
    problem = make("autoencoder", weight_decay=0.0)
    record = problem.evaluate()
    with torch.no_grad():
        for name, images in (("loss", load("mnist").train), ("test loss", load("mnist").test)):
            pixels = images.double().flatten(1) / 255
            assert record[name] == pytest.approx(
                (problem.model(pixels.float()) - pixels).square().mean().item(), rel=1e-5
            )
    assert "accuracy" not in record
    driver = driver_of("adam", problem)
    for _ in range(60):
        driver.advance()
    assert problem.evaluate()["loss"] < 0.8 * record["loss"]


def test_bfloat16_affects_only_the_network(small):
    problem = make(precision="bfloat16")
    kinds = []
    problem.model[-1].register_forward_hook(lambda _, __, output: kinds.append(output.dtype))
    driver = driver_of("step-tuned-sgd", problem)
    for _ in range(4):
        driver.advance()
    assert set(kinds) == {torch.bfloat16}
    assert {p.dtype for p in problem.parameters} == {torch.float32}
    assert math.isfinite(problem.evaluate()["loss"])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_every_method_learns(small, layout):
    for name in ("sgd", "rmsprop", "adam", "step-tuned-sgd"):
        problem = make(layout=layout)
        driver = driver_of(name, problem, lr=0.05 if "sgd" in name else 0.001)
        before = problem.evaluate()["loss"]
        for _ in range(40):
            driver.advance()
        assert problem.evaluate()["loss"] < 0.9 * before


# --------------------------------------------------------------------------- what both passes share


def dropped(problem):
    """The elements that dropout sets to zero in each pass."""
    seen = []
    layers = [m for m in problem.model.modules() if isinstance(m, nn.Dropout)]
    layers[0].register_forward_hook(lambda _, __, output: seen.append(output == 0))
    return seen


def test_dropout_is_the_same_in_both_passes_and_new_in_the_next_iteration(small):
    torch.manual_seed(0)
    problem = make(network="nin", batch=2)
    seen = dropped(problem)
    driver = driver_of("step-tuned-sgd", problem, lr=1e-6)
    for _ in range(4):
        driver.advance()
    assert seen[0].any()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_dropout_is_fresh_in_both_passes_if_requested(small):
    torch.manual_seed(0)
    problem = make(network="nin", batch=2, masks="fresh")
    seen = dropped(problem)
    driver = driver_of("step-tuned-sgd", problem, lr=1e-6)
    for _ in range(2):
        driver.advance()
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(("statistics", "changes"), [("both", True), ("first", False)])
def test_batchnorm_statistics_are_updated_in_both_passes_or_in_the_first(
    small, statistics, changes
):
    problem = make(statistics=statistics)
    driver = driver_of("step-tuned-sgd", problem)
    norm = next(m for m in problem.model.modules() if isinstance(m, nn.BatchNorm2d))
    for _ in range(3):
        start = norm.running_mean.clone()
        driver.advance()
        first = norm.running_mean.clone()
        driver.advance()
        assert not torch.equal(first, start)
        assert torch.equal(norm.running_mean, first) != changes


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adam"])
def test_any_method_can_use_each_mini_batch_for_two_consecutive_steps(small, name):
    problem = make(rows=64)
    driver = driver_of(name, problem, uses=2)
    labels, points = [], []
    problem.model.register_forward_pre_hook(lambda _, args: labels.append(args[0].clone()))
    for _ in range(8):
        driver.advance()
        points.append(problem.parameters[0].detach().clone())
    for k in range(0, 8, 2):
        assert torch.equal(labels[k], labels[k + 1])
        assert not torch.equal(points[k], points[k + 1]), "a step after each"
    assert not torch.equal(labels[0], labels[2])
    assert driver.batches == 4


# ----------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("passes", [2, 3], ids=["at a boundary", "between the passes"])
def test_a_problem_resumes_from_a_checkpoint_with_the_same_numbers(small, passes, tmp_path):
    options = {"network": "nin", "batch": 2, "augmentation": "standard", "layout": "channels_last"}

    def states(problem, driver):
        return {
            "problem": problem.state_dict(),
            "driver": driver.state_dict(),
            "rng": torch.get_rng_state(),
        }

    torch.manual_seed(3)
    problem = make(**options)
    driver = driver_of("step-tuned-sgd", problem)
    for _ in range(passes):
        driver.advance()
    torch.save(states(problem, driver), tmp_path / "c.pt")
    for _ in range(3):
        driver.advance()
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    other = make(**options)
    again = driver_of("step-tuned-sgd", other)
    other.load_state_dict(saved["problem"])
    again.load_state_dict(saved["driver"])
    torch.set_rng_state(saved["rng"])
    for _ in range(3):
        again.advance()
    assert all(torch.equal(a, b) for a, b in zip(problem.parameters, other.parameters, strict=True))


def test_a_diverging_run_ends_with_that_status(small, tmp_path):
    options = {"network": "lenet", "batch": 16}
    run = folder_of(
        Store(tmp_path), make_spec("sgd", "images", budget=60, log_every=5, options=options, lr=1e9)
    )
    assert execute(run, {}) == "diverged"
    assert not math.isfinite(run.records()[-1]["loss"])


# ------------------------------------------------------------------------------------------ Table 1


def test_table_1_matches_the_paper():
    data = {
        "a": "cifar-10",
        "b": "cifar-100",
        "c": "cifar-10",
        "d": "mnist",
        "e": "cifar-10",
        "f": "cifar-10",
    }
    epochs = {"a": 500, "b": 500, "c": 300, "d": 500, "e": 300, "f": 300}
    activations = {"a": "relu", "b": "relu", "c": "elu", "d": "silu", "e": "elu", "f": "elu"}
    for letter, setting in TABLE_1.items():
        problem = PROBLEMS[setting["problem"]]
        options = problem.Options(**setting["options"])
        assert options.data == data[letter]
        assert options.activation == activations[letter]
        assert options.batch == 128
        assert options.weight_decay == 1e-4
        assert setting["budget"] == {"epochs": epochs[letter]}
        assert setting["selection"]["after"] == {"epochs": epochs[letter] // 10}
        assert options.per_epoch == (469 if letter == "d" else 391)
    assert list(TABLE_1) == list("abcdef")


@on_real_data
@pytest.mark.parametrize("letter", "abdef")
def test_a_problem_of_table_1_learns_the_real_data(letter):
    setting = TABLE_1[letter]
    problem = PROBLEMS[setting["problem"]]
    options = {**setting["options"], "rows": 256, "test_rows": 128, "batch": 32}
    subject = problem.from_dict(options, 0, CPU)
    before = subject.evaluate()
    driver = (
        driver_of("adam", subject)
        if letter == "d"
        else driver_of("step-tuned-sgd", subject, lr=0.05)
    )
    for _ in range(24):
        driver.advance()
    assert subject.evaluate()["plain loss"] < 0.98 * before["plain loss"]
