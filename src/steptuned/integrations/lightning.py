"""Step-Tuned SGD under Lightning's Trainer.

Return `steptuned.StepTunedSGD` or `steptuned.StepTuned` from ``configure_optimizers`` and give the
Trainer the callback:

    trainer = Trainer(callbacks=[StepTuned()], gradient_clip_val=1.0)

Lightning passes the optimizer a closure, and the optimizer calls it twice (with ``tune_every=T``,
twice for every T-th mini-batch and once for the others). One mini-batch is one ``global_step`` and
one step of a scheduler. Whatever runs inside the closure runs twice:
``training_step``, ``on_before_zero_grad``, ``on_before_backward``, ``on_after_backward`` and
``on_before_optimizer_step``. So a torchmetrics object that ``training_step`` updates sees each
mini-batch twice, and so does BatchNorm unless the callback has ``freeze_statistics=True``. Dropout
draws the same masks in both passes. The ``outputs`` of ``on_train_batch_end`` are those of the
second pass.

``training_step`` may return None to skip a mini-batch. The first pass decides: if it returns None,
there is no second pass, and the mini-batch is counted as ``skipped``. If only the second pass
returns None, the parameters keep the first half of the step, nothing is measured, and gamma stays
as it was.

The callback works in a Trainer of ``lightning.pytorch`` and in one of ``pytorch_lightning``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from steptuned import frozen_statistics, replay
from steptuned.integrations import diagnostics
from steptuned.optim.scaling import all_or_nothing
from steptuned.optim.two_passes import TwoPasses


class StepTuned(Callback):
    """Adapts the Trainer to Step-Tuned SGD, refuses options that cannot work, and logs diagnostics.

    - ``gradient_clip_val`` becomes the optimizer's ``max_grad_norm``. Clipping by Lightning would
      change the gradients that the curvature is measured with.
    - ``self.log`` does nothing in the second pass: what is logged was measured at theta_k, once per
      mini-batch.
    - Logged every ``log_every_n_steps`` steps: ``gamma``, ``curvature`` and ``effective_lr`` (the
      learning rate times gamma, which learning-rate monitors do not show) of the last iteration;
      ``raw_gamma`` (its median over the last 100 iterations), ``negative``, ``at_lower``,
      ``at_upper``, ``ignored`` and ``skipped``, as in `steptuned.StepTunedSGD.stats`. These six are
      also logged at the end of every epoch. Steps in between do not synchronize with the device.
    - All names start with ``step_tuned/``; with several optimizers, with ``step_tuned_0/``,
      ``step_tuned_1/``, and so on. With several parameter groups, ``effective_lr`` becomes
      ``effective_lr/pg1``, ``effective_lr/pg2``, and so on.
    - Checkpoints contain torch's random states, which Lightning leaves out, so a resumed run with
      dropout continues with the same numbers.
    - Refused: ``accumulate_grad_batches`` above 1, clipping by value, a
      ``configure_gradient_clipping`` of your own, and fp16 without `StepTunedMixedPrecision`.

    Args:
        freeze_statistics: do not update the running statistics of BatchNorm and other layers in the
            second pass; see `steptuned.frozen_statistics`. Applies to automatic optimization and to
            ``step(closure)`` in manual optimization. For ``passes()``, use ``passes(freeze=self)``.
    """

    def __init__(self, *, freeze_statistics: bool = False) -> None:
        self.freeze_statistics = freeze_statistics
        self._optimizers: list[TwoPasses] = []
        self._hooks: list[RemovableHandle] = []
        self._noise: list[dict[str, Tensor]] | None = None
        self._clip_val: Any = None

    # ----------------------------------------------------------------- adapting the Trainer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._optimizers = [opt for opt in trainer.optimizers if _is_ours(opt)]
        if not self._optimizers:
            raise ValueError(
                "the callback StepTuned found no StepTunedSGD and no steptuned.StepTuned: return "
                "one from configure_optimizers(), or remove the callback"
            )
        self._refuse(trainer, pl_module)
        if self.freeze_statistics:
            freeze = partial(_freeze, pl_module)
            self._hooks = [opt.register_step_pre_hook(freeze) for opt in self._optimizers]
        pl_module.log = partial(self._log_first_pass, pl_module.log)  # type: ignore[method-assign]
        self._restore_noise()  # determines the order of the next epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        if self._clip_val:
            for opt in self._optimizers:
                for group in opt.param_groups:
                    group["max_grad_norm"] = float(self._clip_val)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier: at the start of training Lightning checks which hooks the user overrides.
        if "optimizer_step" not in vars(pl_module):
            pl_module.optimizer_step = partial(  # type: ignore[method-assign]
                self._optimizer_step, trainer, pl_module.optimizer_step
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._leave(trainer, pl_module)

    def _leave(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in ("log", "optimizer_step"):
            vars(pl_module).pop(name, None)
        for hook in self._hooks:
            hook.remove()
        if self._clip_val is not None:
            trainer.gradient_clip_val, self._clip_val = self._clip_val, None
        self._optimizers, self._hooks, self._noise = [], [], None

    def _log_first_pass(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not any(opt.param_groups[0]["pending"] for opt in self._optimizers):
            log(*args, **kwargs)

    def _optimizer_step(
        self,
        trainer: Trainer,
        step: Callable[..., None],
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any],
    ) -> None:
        """Replaces ``LightningModule.optimizer_step``, to support steps without a backward."""
        if trainer.fit_loop._skip_backward:
            optimizer_closure()  # a forward pass of StochasticWeightAveraging, see below
            return
        closure = _SkippableClosure(optimizer_closure, self._optimizers[0])
        try:
            step(epoch, batch_idx, optimizer, closure)
        except RuntimeError:
            if not closure.skipped_second_pass:
                raise

    def _refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            return
        if getattr(trainer.precision_plugin, "scaler", None) and not isinstance(
            trainer.precision_plugin, StepTunedMixedPrecision
        ):
            raise ValueError(
                "precision='16-mixed' takes one pass per step: use 'bf16-mixed', or "
                "Trainer(plugins=[StepTunedMixedPrecision('16-mixed', device)]) from "
                "steptuned.integrations.lightning"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise ValueError(
                "gradient_clip_algorithm='value' would change the measured curvature: use 'norm'"
            )
        if (
            type(pl_module).configure_gradient_clipping.__qualname__
            != "LightningModule.configure_gradient_clipping"
        ):
            raise ValueError(
                "configure_gradient_clipping() would change the measured curvature: remove it and "
                "give StepTunedSGD max_grad_norm"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # After the last epoch, StochasticWeightAveraging updates the statistics of BatchNorm by
        # forward passes over all mini-batches, and sets accumulate_grad_batches to avoid steps.
        averages = trainer.fit_loop._skip_backward
        accumulates = trainer.accumulate_grad_batches != 1 and not averages
        if accumulates and pl_module.automatic_optimization:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} would take only the "
                "last mini-batch twice: use a larger batch size, or manual optimization with a "
                "closure over all of them"
            )
        if batch_idx > 0:
            # A loader that was created in the middle of an epoch has drawn random numbers again.
            self._restore_noise()
        self._noise = None

    # -------------------------------------------------------------------------------- logging

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        is_logged = trainer._logger_connector.should_update_logs
        for prefix, opt in self._named():
            values: dict[str, Any] = dict(diagnostics.measurements(opt))
            if is_logged:
                values |= diagnostics.summary(opt)
            pl_module.log_dict({f"{prefix}/{name}": value for name, value in values.items()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for prefix, opt in self._named():
            values = diagnostics.summary(opt)
            pl_module.log_dict({f"{prefix}/{name}": value for name, value in values.items()})

    def _named(self) -> list[tuple[str, TwoPasses]]:
        if len(self._optimizers) == 1:
            return [("step_tuned", self._optimizers[0])]
        return [(f"step_tuned_{i}", opt) for i, opt in enumerate(self._optimizers)]

    # ---------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The random states of all ranks. All ranks must call this together."""
        if not self._optimizers:
            return {}
        mine = replay(self._optimizers[0]).state_dict()
        _, ranks = _rank_and_ranks()
        everyone = [mine] * ranks
        if ranks > 1:
            dist.all_gather_object(everyone, mine)
        return {"noise": everyone}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._noise = state_dict.get("noise")

    def _restore_noise(self) -> None:
        if self._noise is None:
            return
        rank, ranks = _rank_and_ranks()
        if len(self._noise) == ranks:
            noise = replay(self._optimizers[0])
            noise.load_state_dict(self._noise[rank])
            noise.rewind()


class StepTunedMixedPrecision(MixedPrecision):
    """fp16 with a GradScaler: ``Trainer(plugins=[StepTunedMixedPrecision("16-mixed", "cuda")])``.

    Both passes of an iteration use the scaler, and one ``scaler.update()`` ends the iteration.
    """

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None or not _is_ours(optimizer):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        noise = replay(optimizer)
        loss = closure()
        self._after_closure(model, optimizer)
        if loss is None and model.automatic_optimization:
            optimizer.zero_grad()
            if optimizer.needs_second_pass:
                optimizer.half_step()
            optimizer.step()  # without gradients: counted as skipped
            return None
        if not optimizer.needs_second_pass:
            self.scaler.step(optimizer)
            self.scaler.update()
            return loss
        self.scaler.step(optimizer.first_pass)
        with all_or_nothing(optimizer.cancel):
            noise.rewind()
            with frozen_statistics(model if _freezes_statistics(model.trainer) else None):
                second = closure()
            self._after_closure(model, optimizer)
            if second is None and model.automatic_optimization:
                optimizer.cancel()
            else:
                self.scaler.step(optimizer)
        self.scaler.update()
        return loss


class _SkippableClosure:
    """Lightning's closure, where ``training_step`` may return None to skip the mini-batch."""

    def __init__(self, closure: Callable[[], Any], optimizer: TwoPasses) -> None:
        self._closure = closure
        self._optimizer = optimizer
        self._losses: list[Any] = []

    def __call__(self) -> Any:
        if self._losses and self._losses[0] is None:
            return None  # the first pass was skipped, and so is the second
        loss = self._closure()
        self._losses.append(loss)
        if loss is None:
            self._optimizer.zero_grad()  # to None, also if the module keeps zeros instead
        return loss

    @property
    def skipped_second_pass(self) -> bool:
        return len(self._losses) == 2 and self._losses[1] is None


def _freeze(
    pl_module: LightningModule, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that adds ``freeze=pl_module`` to the arguments of ``step``."""
    return args, {"freeze": pl_module} | kwargs


def _freezes_statistics(trainer: Trainer) -> bool:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(call, StepTuned) and call.freeze_statistics for call in callbacks)


def _is_ours(optimizer: Any) -> TypeGuard[TwoPasses]:
    return isinstance(optimizer, TwoPasses)


def _rank_and_ranks() -> tuple[int, int]:
    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else (0, 1)
    )
