"""Step-Tuned SGD under Lightning's Trainer gives the numbers of a plain loop.

Options with which Lightning would change them are refused.
"""

import csv
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steptuned
from compare import same
from steptuned import StepTunedSGD
from steptuned.integrations.lightning import StepTuned, StepTunedMixedPrecision

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "lightning.md"

pytestmark = [
    pytest.mark.filterwarnings(warning)
    for warning in (
        "ignore:.*does not have many workers",
        "ignore:.*The `srun` command is available",
        "ignore:.*LeafSpec",
        "ignore:.*torch.jit.script",
        "ignore:.*Checkpoint directory .* exists and is not empty",
        "ignore:The dirpath has changed from",
        "ignore:Precision 16-mixed is not supported by the model summary",
        "ignore:Experiment logs directory .* exists and is not empty",
        "ignore:.*The number of training batches .* is smaller than the logging interval",
        "ignore:`training_step` returned `None`",
    )
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def data(shuffle=False):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=shuffle)


def make_optimizer(model, base=None, two_groups=False, **options):
    params, lr = list(model.parameters()), 0.3 if base is None else 0.01
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": lr / 3}]
    if base is not None:
        return steptuned.StepTuned(base(groups if two_groups else params, lr=lr), **options)
    return StepTunedSGD(groups if two_groups else params, lr=lr, bounds=(0.05, 20.0), **options)


class Module(pl.LightningModule):
    """A user's module. Its noise depends on the mini-batch only, so a plain loop can repeat it."""

    def __init__(self, **options):
        super().__init__()
        self.net = network()
        self.options = options

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(batch_idx)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        opt = make_optimizer(self, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer_of(tmp_path, *callbacks, **options):
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(
            isinstance(callback, ModelCheckpoint) for callback in callbacks
        ),
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(callbacks=list(callbacks), **settings | options)


def plain(epochs=2, double=False, **options):
    """The same training as a loop: the network, the optimizer, and what there was to log."""
    net = network().double() if double else network()
    opt = make_optimizer(net, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    log = []
    for _ in range(epochs):
        for i, (x, y) in enumerate(data()):
            torch.manual_seed(i)
            losses = []
            for _ in opt.passes():
                opt.zero_grad()
                losses.append(nn.functional.cross_entropy(net(x.double() if double else x), y))
                losses[-1].backward()
            scheduler.step()
            log.append(
                {
                    "loss": losses[0].item(),
                    "gamma": opt.gamma.sum().item(),
                    "curvature": opt.curvature.sum().item(),
                }
            )
    return net, opt, log


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_run(trainer, module, net, opt):
    ours = trainer.optimizers[0]
    return (
        torch.equal(flat(module), flat(net))
        and torch.equal(ours.gamma, opt.gamma)
        and same(ours.curvature, opt.curvature)
        and [ours.stats(i) for i, _ in enumerate(ours.param_groups)]
        == [opt.stats(i) for i, _ in enumerate(opt.param_groups)]
    )


# --------------------------------------------------------------------------- automatic optimisation


def test_a_trainer_gives_the_numbers_of_a_plain_loop_and_counts_iterations(tmp_path):
    module = Module(weight_decay=0.01)
    trainer = trainer_of(tmp_path, StepTuned())
    trainer.fit(module, data())
    net, opt, _ = plain(weight_decay=0.01)
    assert same_run(trainer, module, net, opt)
    assert trainer.global_step == 10
    assert trainer.optimizers[0].param_groups[0]["lr"] == opt.param_groups[0]["lr"]


VARIANTS = {
    "every third": {"tune_every": 3},
    "relative, every other": {"relative": True, "tune_every": 2},
    "per group": {"per_group": True, "two_groups": True},
    "AdamW": {"base": torch.optim.AdamW, "tune_every": 3},
    "AdamW per group": {
        "base": torch.optim.AdamW,
        "tune_every": 2,
        "per_group": True,
        "two_groups": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_under_the_trainer_equals_a_plain_loop(tmp_path, variant):
    module = Module(**VARIANTS[variant])
    trainer = trainer_of(tmp_path, StepTuned(), gradient_clip_val=0.5)
    trainer.fit(module, data())
    net, opt, _ = plain(**VARIANTS[variant], max_grad_norm=0.5)
    assert same_run(trainer, module, net, opt)
    assert trainer.global_step == 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_resumes_from_a_checkpoint_of_the_trainer(tmp_path, variant):
    module, resumed = (Module(**VARIANTS[variant]) for _ in range(2))
    trainer_of(tmp_path, StepTuned(), every_epoch(tmp_path)).fit(module, data())
    trainer = trainer_of(tmp_path, StepTuned(), every_epoch(tmp_path))
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=False)
    assert trainer.global_step == 10
    assert torch.equal(flat(module), flat(resumed))


def every_epoch(folder):
    return ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_in_fp16_equals_a_plain_loop_with_a_scaler(tmp_path, variant):
    """The scale starts too high, so that some passes overflow."""
    module = Module(**VARIANTS[variant])
    plugin = StepTunedMixedPrecision("16-mixed", "cpu", scaler())
    trainer = trainer_of(
        tmp_path, StepTuned(), plugins=[plugin], gradient_clip_val=0.5, max_epochs=6
    )
    trainer.fit(module, data())
    net, opt, theirs = plain_fp16(6, **VARIANTS[variant], max_grad_norm=0.5)
    assert 0 < opt.stats().iterations < trainer.global_step == 30
    assert same_run(trainer, module, net, opt)
    assert plugin.scaler.get_scale() == theirs.get_scale()


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_of_lightning_work_in_both_passes(tmp_path, precision):
    module = Module()
    trainer = trainer_of(tmp_path, StepTuned(), precision=precision)
    trainer.fit(module, data())
    assert trainer.optimizers[0].stats().iterations == trainer.global_step == 10
    if precision == "64-true":
        net, opt, _ = plain(double=True)
        assert same_run(trainer, module, net, opt)


def test_the_trainers_clipping_is_done_by_the_optimizer(tmp_path):
    module = Module()
    trainer = trainer_of(tmp_path, StepTuned(), gradient_clip_val=0.05)
    trainer.fit(module, data())
    net, opt, _ = plain(max_grad_norm=0.05)
    assert same_run(trainer, module, net, opt)
    assert trainer.gradient_clip_val == 0.05


def test_without_the_callback_lightning_clips_what_is_measured(tmp_path):
    """This is why the callback exists."""
    module = Module()
    trainer = trainer_of(tmp_path, gradient_clip_val=0.05)
    trainer.fit(module, data())
    net, opt, _ = plain(max_grad_norm=0.05)
    assert not same_run(trainer, module, net, opt)


def test_the_log_is_that_of_the_first_pass_with_gamma_and_stats(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = trainer_of(tmp_path, StepTuned(), logger=logger, log_every_n_steps=1)
    trainer.fit(Module(), data())
    _, opt, expected = plain()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    steps = [row for row in rows if row["loss_step"]]
    assert [int(row["step"]) for row in steps] == list(range(10))
    for row, was in zip(steps, expected, strict=True):
        assert float(row["loss_step"]) == pytest.approx(was["loss"], rel=1e-6)
        assert float(row["step_tuned/gamma"]) == pytest.approx(was["gamma"], rel=1e-6)
        assert float(row["step_tuned/curvature"]) == pytest.approx(was["curvature"], rel=1e-6)
    epochs = [row for row in rows if row["loss_epoch"]]
    for row, part in zip(epochs, (expected[:5], expected[5:]), strict=True):
        assert float(row["loss_epoch"]) == pytest.approx(
            sum(was["loss"] for was in part) / 5, rel=1e-5
        )
    for name in ("negative", "at_lower", "at_upper", "ignored", "skipped"):
        for row in (epochs[-1], steps[-1]):
            assert float(row[f"step_tuned/{name}"]) == pytest.approx(getattr(opt.stats(), name))
    for row in (epochs[-1], steps[-1]):
        assert float(row["step_tuned/raw_gamma"]) == pytest.approx(opt.stats().raw_gamma[1])


def test_the_log_shows_the_effective_learning_rate_of_each_group(tmp_path):
    """The learning-rate monitor shows lr only."""

    class Groups(Module):
        def configure_optimizers(self):
            first, last = self.net[0], self.net[3]
            groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.1}]
            return StepTunedSGD(groups, lr=0.3, bounds=(0.05, 20.0))

    logger = CSVLogger(tmp_path)
    callbacks = (StepTuned(), LearningRateMonitor("step"))
    trainer = trainer_of(tmp_path, *callbacks, logger=logger, log_every_n_steps=5)
    trainer.fit(Groups(), data())
    rows = metrics(logger)
    last = [row for row in rows if row["step_tuned/gamma"]][-1]
    expected = [group["effective_lr"].item() for group in trainer.optimizers[0].param_groups]
    logged = [float(last[f"step_tuned/effective_lr/pg{i}"]) for i in (1, 2)]
    assert logged == pytest.approx(expected, rel=1e-6)
    assert logged[0] == pytest.approx(3 * logged[1], rel=1e-6)
    assert not {0.3, 0.1} & set(logged)
    assert {row["lr-StepTunedSGD/pg1"] for row in rows} == {"", "0.3"}


def test_the_log_shows_the_gamma_of_each_group(tmp_path):
    class Groups(Module):
        def configure_optimizers(self):
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[3].parameters()}]
            return StepTunedSGD(groups, lr=0.3, bounds=(0.05, 20.0), per_group=True)

    logger = CSVLogger(tmp_path)
    trainer = trainer_of(tmp_path, StepTuned(), logger=logger, log_every_n_steps=5)
    trainer.fit(Groups(), data())
    opt = trainer.optimizers[0]
    last = [row for row in metrics(logger) if row["step_tuned/gamma/pg1"]][-1]
    for i in range(2):
        assert float(last[f"step_tuned/gamma/pg{i + 1}"]) == pytest.approx(
            opt.gamma[i].item(), rel=1e-6
        )
        assert float(last[f"step_tuned/raw_gamma/pg{i + 1}"]) == pytest.approx(
            opt.stats(i).raw_gamma[1]
        )


def test_after_100_iterations_the_log_shows_the_bound_that_gamma_is_at(tmp_path, monkeypatch):
    """The shares need a synchronisation, so they are read at the logging interval only."""
    calls, stats = [], StepTunedSGD.stats
    monkeypatch.setattr(StepTunedSGD, "stats", lambda opt: calls.append(opt) or stats(opt))

    class Slow(Module):
        def configure_optimizers(self):
            return StepTunedSGD(self.parameters(), lr=1e-4)

    logger = CSVLogger(tmp_path)
    trainer = trainer_of(tmp_path, StepTuned(), logger=logger, log_every_n_steps=50, max_epochs=24)
    with pytest.warns(UserWarning, match="at its upper bound 2.0 for 100 iterations"):
        trainer.fit(Slow(), data())
    assert len(calls) == 24 + 120 // 50
    row = next(row for row in metrics(logger) if row["step"] == "99" and row["step_tuned/gamma"])
    assert float(row["step_tuned/at_upper"]) > 0.9
    assert float(row["step_tuned/at_lower"]) < 0.1
    assert float(row["step_tuned/raw_gamma"]) >= 2.0
    assert float(row["step_tuned/effective_lr"]) == pytest.approx(2e-4)


def metrics(logger):
    return list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))


# ----------------------------------------------------------------------------- skipped mini-batches


class Skipping(Module):
    """Returns None for a mini-batch; keeps zeros for gradients if asked to."""

    def __init__(self, keep_zeros=False, passes=(0, 1)):
        super().__init__()
        self.keep_zeros, self.passes, self.seen = keep_zeros, passes, []

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=not self.keep_zeros)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        loss = super().training_step(batch, batch_idx)
        which = 1 if self.seen[-2:] == [batch_idx] * 2 else 0
        return None if batch_idx == 2 and which in self.passes else loss


def plain_skipping(half=False):
    """The same as a loop: the third mini-batch makes no step, or only its first half."""
    net = network()
    opt = StepTunedSGD(net.parameters(), lr=0.3, bounds=(0.05, 20.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for _ in range(2):
        for i, (x, y) in enumerate(data()):
            torch.manual_seed(i)
            with opt.passes() as passes:
                for _ in passes if i != 2 else range(half):
                    opt.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
            if i == 2 and half:
                opt.half_step()
                opt.cancel()
            scheduler.step()
    return net, opt


@pytest.mark.parametrize("keep_zeros", [False, True])
def test_training_step_may_return_none_to_skip_a_mini_batch(tmp_path, keep_zeros):
    module = Skipping(keep_zeros)
    trainer = trainer_of(tmp_path, StepTuned())
    trainer.fit(module, data())
    net, opt = plain_skipping()
    assert torch.equal(flat(module), flat(net))
    assert trainer.optimizers[0].stats() == opt.stats()._replace(skipped=2)
    assert module.seen.count(2) == 2  # once per epoch: there is no second pass
    assert trainer.callback_metrics["step_tuned/skipped"] == 2


def test_none_in_the_second_pass_only_keeps_the_first_half_step(tmp_path):
    """For instance if the first half of the step makes the loss nan."""
    module = Skipping(passes=(1,))
    trainer = trainer_of(tmp_path, StepTuned())
    trainer.fit(module, data())
    net, opt = plain_skipping(half=True)
    assert torch.equal(flat(module), flat(net))
    assert trainer.optimizers[0].stats() == opt.stats()


@pytest.mark.parametrize("passes", [(0, 1), (1,)], ids=["both passes", "second pass only"])
@pytest.mark.parametrize("callback", [True, False])
def test_fp16_skips_mini_batches_too(tmp_path, passes, callback):
    module, theirs = Skipping(passes=passes), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    plugin = StepTunedMixedPrecision("16-mixed", "cpu", theirs)
    trainer = trainer_of(tmp_path, *[StepTuned()] * callback, plugins=[plugin])
    trainer.fit(module, data())
    stats = trainer.optimizers[0].stats()
    assert (stats.iterations, stats.skipped, stats.ignored) == (8, 2 * (0 in passes), 0)


def test_other_errors_of_a_step_are_not_swallowed(tmp_path):
    class Breaks(Module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer_of(tmp_path, StepTuned()).fit(Breaks(), data())


# ---------------------------------------------------------------------------------------- BatchNorm


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Normalised(Module):
    def __init__(self):
        super().__init__()
        self.net = normalised()

    def configure_optimizers(self):
        return StepTunedSGD(self.parameters(), lr=0.3, bounds=(0.05, 20.0))


class NormalisedByHand(Normalised):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def closure():
            opt.zero_grad()
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        opt.step(closure)


@pytest.mark.parametrize("module", [Normalised, NormalisedByHand])
@pytest.mark.parametrize("freeze", [False, True])
def test_the_second_pass_can_leave_the_statistics_of_batchnorm_alone(tmp_path, module, freeze):
    mine = module()
    trainer = trainer_of(tmp_path, StepTuned(freeze_statistics=freeze))
    trainer.fit(mine, data())
    net = normalised()
    opt = StepTunedSGD(net.parameters(), lr=0.3, bounds=(0.05, 20.0))
    for _ in range(2):
        for x, y in data():
            for _ in opt.passes(freeze=net if freeze else None):
                opt.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
    assert torch.equal(flat(mine), flat(net))
    for ours, theirs in zip(mine.net.buffers(), net.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert mine.net[1].num_batches_tracked == (10 if freeze else 20)
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_fp16_can_leave_the_statistics_of_batchnorm_alone(tmp_path):
    mine = Normalised()
    plugin = StepTunedMixedPrecision("16-mixed", "cpu", scaler())
    trainer_of(tmp_path, StepTuned(freeze_statistics=True), plugins=[plugin]).fit(mine, data())
    assert mine.net[1].num_batches_tracked == 10


@pytest.mark.parametrize("freeze", [False, True])
def test_stochastic_weight_averaging_updates_the_statistics_of_batchnorm(tmp_path, freeze):
    """It does so by an epoch of forward passes, which must not step or repeat a mini-batch."""
    mine, averaging = Normalised(), StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=2)
    callbacks = (StepTuned(freeze_statistics=freeze), averaging)
    trainer = trainer_of(tmp_path, *callbacks, max_epochs=4)
    trainer.fit(mine, data())
    stats = trainer.optimizers[0].stats()
    assert (stats.iterations, stats.skipped) == (20, 0)
    assert (trainer.accumulate_grad_batches, trainer.max_epochs) == (1, 4)
    assert torch.equal(flat(mine), flat(averaging._average_model))
    assert mine.net[1].num_batches_tracked == 5
    means = torch.stack([mine.net[0](x).mean(0) for x, _ in data()])
    torch.testing.assert_close(mine.net[1].running_mean, means.mean(0))


# --------------------------------------------------------------------------------------- schedulers


def test_two_schedules_give_a_warning(tmp_path):
    """Lightning attaches the scheduler; the optimizer notices."""
    advice = "use decay_every=None to leave it to the scheduler, or do without the scheduler"
    with pytest.warns(UserWarning, match=f"decay_every=5 and a learning-rate scheduler .*{advice}"):
        trainer_of(tmp_path, StepTuned()).fit(Module(decay_every=5), data())


# ------------------------------------------------------------------------------------ both packages


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_works_with_both_packages_of_lightning(tmp_path, package):
    framework = importlib.import_module(package)

    class Mine(framework.LightningModule):
        on_train_batch_start, training_step = Module.on_train_batch_start, Module.training_step
        configure_optimizers = Module.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net, self.options = network(), {}

    module = Mine()
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = framework.Trainer(
        max_epochs=2, accelerator="cpu", gradient_clip_val=0.05, callbacks=[StepTuned()], **options
    )
    trainer.fit(module, data())
    net, opt, _ = plain(max_grad_norm=0.05)
    assert same_run(trainer, module, net, opt)


# -------------------------------------------------------------------------------------- checkpoints


class Resumable:
    """A loader that can resume in the middle of an epoch."""

    def __init__(self):
        self.loader, self.done, self.start = data(), 0, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        batches = list(self.loader)
        start, self.start = self.start, 0
        for self.done in range(start + 1, len(batches) + 1):
            yield batches[self.done - 1]

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.start = state["done"] % len(self.loader)


class Noisy(Module):
    """Its dropout continues with the random numbers of the run."""

    on_train_batch_start = pl.LightningModule.on_train_batch_start


class Validated(Noisy):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize(
    ("module", "loader", "checkpoint"),
    [
        (Noisy, lambda: data(shuffle=True), {"save_on_train_epoch_end": True}),
        (Validated, lambda: data(shuffle=True), {}),
        (Noisy, Resumable, {"every_n_train_steps": 3}),
        (Noisy, Resumable, {"every_n_train_steps": 5}),
        (Noisy, Resumable, {"every_n_train_steps": 8}),
    ],
    ids=[
        "end of epoch",
        "after validation",
        "middle",
        "last step of an epoch",
        "middle of a later epoch",
    ],
)
def test_a_resumed_run_is_bit_identical_with_dropout_and_shuffling(
    tmp_path, module, loader, checkpoint
):
    def fit(folder, epochs=4, ckpt_path=None):
        mine = module()
        options = {
            "dirpath": tmp_path / folder,
            "filename": "{step}",
            "save_top_k": -1,
        } | checkpoint
        trainer = trainer_of(
            tmp_path,
            StepTuned(),
            ModelCheckpoint(**options),
            max_epochs=epochs,
            gradient_clip_val=0.5,
        )
        torch.manual_seed(7 if ckpt_path is None else 8)
        trainer.fit(mine, loader(), *([data()] if module is Validated else []), ckpt_path=ckpt_path)
        return trainer, mine

    through, expected = fit("through")
    saved = min(
        (tmp_path / "through").glob("*.ckpt"),
        key=lambda path: int(re.findall(r"\d+", path.name)[0]),
    )
    trainer, mine = fit("resumed", ckpt_path=saved)
    assert trainer.global_step == through.global_step == 20
    assert same_run(trainer, mine, expected, through.optimizers[0])
    assert (
        trainer.optimizers[0].param_groups[0]["lr"] == through.optimizers[0].param_groups[0]["lr"]
    )


# --------------------------------------------------------------------------------------------- fp16


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)


def plain_fp16(epochs, **options):
    """The same training as a loop with a GradScaler."""
    net, theirs = network(), scaler()
    opt = make_optimizer(net, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for _ in range(epochs):
        for i, (x, y) in enumerate(data()):
            for half in (opt.first_pass, opt) if opt.needs_second_pass else (opt,):
                torch.manual_seed(i)
                opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                    loss = nn.functional.cross_entropy(net(x), y)
                theirs.scale(loss).backward()
                theirs.step(half)
            theirs.update()
            scheduler.step()
    return net, opt, theirs


def test_fp16_scales_both_passes(tmp_path):
    """The scale starts too high, so that some passes overflow."""
    module = Module()
    plugin = StepTunedMixedPrecision("16-mixed", "cpu", scaler())
    trainer = trainer_of(
        tmp_path, StepTuned(), plugins=[plugin], gradient_clip_val=0.5, max_epochs=6
    )
    trainer.fit(module, data())
    net, opt, theirs = plain_fp16(6, max_grad_norm=0.5)
    assert 0 < opt.stats().iterations < trainer.global_step == 30
    assert same_run(trainer, module, net, opt)
    assert plugin.scaler.get_scale() == theirs.get_scale()


# ----------------------------------------------------------------------------------------- refusals


class Clipping(Module):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        pass


class Other(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "message"),
    [
        (
            Module,
            [],
            lambda: {"accumulate_grad_batches": 2},
            "accumulate_grad_batches=2 would take only the last",
        ),
        (
            Module,
            [GradientAccumulationScheduler({1: 4})],
            dict,
            "accumulate_grad_batches=4 would take only the last",
        ),
        (
            Module,
            [],
            lambda: {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "use 'norm'",
        ),
        (
            Module,
            [],
            lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", scaler())]},
            "StepTunedMixedPrecision",
        ),
        (Clipping, [], dict, "give StepTunedSGD max_grad_norm"),
        (Other, [], dict, "return one from configure_optimizers"),
    ],
    ids=[
        "accumulation",
        "accumulation later",
        "by value",
        "fp16",
        "own clipping",
        "another optimizer",
    ],
)
def test_options_that_spoil_the_measurement_are_refused_in_one_sentence(
    tmp_path, module, callbacks, options, message
):
    trainer, mine = trainer_of(tmp_path, StepTuned(), *callbacks, **options()), module()
    with pytest.raises(ValueError, match=message) as error:
        trainer.fit(mine, data())
    assert "\n" not in str(error.value)
    assert not {"log", "optimizer_step"} & vars(mine).keys()


def test_an_aborted_run_leaves_trainer_and_module_unchanged(tmp_path):
    class Breaks(Module):
        def on_train_batch_end(self, *args):
            raise ArithmeticError

    module, callback = Breaks(), StepTuned()
    trainer = trainer_of(tmp_path, callback, gradient_clip_val=0.05)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, data())
    assert trainer.gradient_clip_val == 0.05
    assert not {"log", "optimizer_step"} & vars(module).keys()


# ------------------------------------------------------------------------------ manual optimisation


def test_manual_optimisation_with_two_optimizers_works_with_closures(tmp_path):
    def two(nets):
        return [
            StepTunedSGD(net.parameters(), lr=lr, bounds=(0.05, 20.0))
            for net, lr in zip(nets, (0.3, 0.1), strict=True)
        ]

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleList([network(), network()])

        def configure_optimizers(self):
            return [
                StepTunedSGD(net.parameters(), lr=lr, bounds=(0.05, 20.0))
                for net, lr in zip(self.nets, (0.3, 0.1), strict=True)
            ]

        def training_step(self, batch, batch_idx):
            x, y = batch
            torch.manual_seed(batch_idx)
            for net, opt in zip(self.nets, self.optimizers(), strict=True):

                def closure(net=net, opt=opt):
                    opt.zero_grad()
                    loss = nn.functional.cross_entropy(net(x), y)
                    self.manual_backward(loss)
                    return loss

                self.log("loss", opt.step(closure))

    module = Manual()
    trainer = trainer_of(tmp_path, StepTuned())
    trainer.fit(module, data())
    assert trainer.global_step == 20  # Lightning counts every step of every optimizer
    assert {"step_tuned_0/gamma", "step_tuned_1/gamma"} < trainer.callback_metrics.keys()

    nets = [network(), network()]
    opts = two(nets)
    for _ in range(2):
        for i, (x, y) in enumerate(data()):
            torch.manual_seed(i)
            for net, opt in zip(nets, opts, strict=True):
                for _ in opt.passes():
                    opt.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
    assert torch.equal(flat(module.nets), flat(nn.ModuleList(nets)))


def test_the_form_by_hand_on_lightnings_wrapper_is_an_error(tmp_path):
    """The wrapper gives ``step()`` a closure that does nothing.

    So the forms without a closure need the optimizer itself.
    """

    class Manual(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            for _ in self.optimizers(use_pl_optimizer=not self.options["itself"]).passes():
                self.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self.net(x), y))

        def configure_optimizers(self):
            return StepTunedSGD(self.parameters(), lr=0.3)

    for itself in (True, False):
        module = Manual(itself=itself)
        module.automatic_optimization = False
        trainer = trainer_of(tmp_path, StepTuned(), max_epochs=1)
        if itself:
            trainer.fit(module, data())
            assert trainer.optimizers[0].stats().iterations == 5
        else:
            with pytest.raises(RuntimeError, match="in the middle of an iteration"):
                trainer.fit(module, data())


# ------------------------------------------------------------------------------------ two processes


def test_two_processes_give_the_numbers_of_one_and_resume_with_their_own_noise(tmp_path):
    script = Path(__file__).parent / "lightning_on_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, script, tmp_path], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    joined, through, resumed = (
        torch.load(tmp_path / f"{name}.pt") for name in ("joined", "through", "resumed")
    )
    torch.testing.assert_close(through["steady"], joined, rtol=0, atol=1e-10)
    assert torch.equal(resumed["noisy"], through["noisy"])
    assert torch.equal(resumed["gamma"], through["gamma"])


# ----------------------------------------------------------------------------------------- the page


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["trainer"].optimizers[0].stats().iterations > 0
