"""Step-Tuned SGD under Lightning's Trainer.

Return `steptuned.StepTunedSGD` from ``configure_optimizers`` and give the Trainer the callback:

    trainer = Trainer(callbacks=[StepTuned()], gradient_clip_val=1.0)

Lightning hands the optimizer a closure, and the optimizer calls it twice. One mini-batch is one ``global_step`` and one step of a
scheduler. What runs inside the closure runs twice: ``training_step``, ``on_before_zero_grad``, ``on_before_backward``,
``on_after_backward``, ``on_before_optimizer_step``. So BatchNorm sees each mini-batch twice, and so does a torchmetrics object that
``training_step`` updates; dropout draws the same masks in both passes. The ``outputs`` of ``on_train_batch_end`` are those of the
second pass. ``training_step`` may not return None to skip a mini-batch.

The callback works in a Trainer of ``lightning.pytorch`` and in one of ``pytorch_lightning``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from steptuned import StepTunedSGD, replay
from steptuned.optim.scaling import all_or_nothing


class StepTuned(Callback):
    """Makes the Trainer's options right for Step-Tuned SGD, refuses those that cannot be, and logs gamma.

    - ``gradient_clip_val`` becomes the optimizer's ``max_grad_norm``. Clipping by Lightning would change the gradients that the
      curvature is measured with.
    - ``self.log`` in the second pass does nothing: what is logged was measured at theta_k, once per mini-batch.
    - ``gamma`` and ``curvature`` are logged at every step, ``negative``, ``at_lower``, ``at_upper`` and ``ignored`` (see
      `steptuned.StepTunedSGD.stats`) at the end of every epoch, all under ``step_tuned/``; with several optimizers, under
      ``step_tuned_0/``, ``step_tuned_1/``, ...
    - Checkpoints hold torch's random states, which Lightning leaves out, so that a run with dropout goes on with the same numbers.
    - Refused: ``accumulate_grad_batches`` above 1, clipping by value, and fp16 without `StepTunedMixedPrecision`.
    """

    def __init__(self) -> None:
        self._optimizers: list[StepTunedSGD] = []
        self._noise: list[dict[str, Tensor]] | None = None
        self._clip_val: Any = None

    # ------------------------------------------------------------------------------------------ what is made right

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._optimizers = [opt for opt in trainer.optimizers if _is_ours(opt)]
        if not self._optimizers:
            raise ValueError(
                "the callback StepTuned found no StepTunedSGD: return one from configure_optimizers(), or leave it out"
            )
        self._refuse(trainer, pl_module)
        pl_module.log = partial(self._log_first_pass, pl_module.log)  # type: ignore[method-assign]
        self._restore_noise()  # the order of the next epoch is drawn from it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        if self._clip_val:
            for opt in self._optimizers:
                for group in opt.param_groups:
                    group["max_grad_norm"] = float(self._clip_val)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(trainer, pl_module)

    def _leave(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vars(pl_module).pop("log", None)
        if self._clip_val is not None:
            trainer.gradient_clip_val, self._clip_val = self._clip_val, None
        self._optimizers, self._noise = [], None

    def _log_first_pass(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not any(opt.param_groups[0]["pending"] for opt in self._optimizers):
            log(*args, **kwargs)

    def _refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            return
        if getattr(trainer.precision_plugin, "scaler", None) and not isinstance(trainer.precision_plugin, StepTunedMixedPrecision):
            raise ValueError(
                "precision='16-mixed' takes one pass per step: use 'bf16-mixed', or "
                "Trainer(plugins=[StepTunedMixedPrecision('16-mixed', device)]) from steptuned.integrations.lightning"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise ValueError("gradient_clip_algorithm='value' would change the measured curvature: use 'norm'")
        if type(pl_module).configure_gradient_clipping.__qualname__ != "LightningModule.configure_gradient_clipping":
            raise ValueError(
                "configure_gradient_clipping() would change the measured curvature: remove it and give StepTunedSGD max_grad_norm"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.accumulate_grad_batches != 1 and pl_module.automatic_optimization:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} would take only the last mini-batch twice: use a "
                "larger batch size, or manual optimisation with a closure over all of them"
            )
        if batch_idx > 0:
            self._restore_noise()  # a loader made anew in the middle of an epoch has drawn numbers that were drawn before
        self._noise = None

    # ------------------------------------------------------------------------------------------ what is logged

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for prefix, opt in self._named():
            pl_module.log_dict({f"{prefix}/gamma": opt.gamma, f"{prefix}/curvature": opt.curvature})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for prefix, opt in self._named():
            stats = opt.stats()._asdict()
            del stats["iterations"]
            pl_module.log_dict({f"{prefix}/{name}": float(value) for name, value in stats.items()})

    def _named(self) -> list[tuple[str, StepTunedSGD]]:
        if len(self._optimizers) == 1:
            return [("step_tuned", self._optimizers[0])]
        return [(f"step_tuned_{i}", opt) for i, opt in enumerate(self._optimizers)]

    # ------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The random states of all ranks; all of them must be here."""
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
    """fp16 with a GradScaler, for ``Trainer(plugins=[StepTunedMixedPrecision("16-mixed", "cuda")])``.

    Both passes of an iteration go through the scaler, and one ``scaler.update()`` ends it.
    """

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        if self.scaler is None or not _is_ours(optimizer):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        rewind = optimizer._remember_noise()
        loss = self._one_pass(optimizer, model, closure, optimizer.half)
        with all_or_nothing(optimizer.cancel):
            rewind()
            self._one_pass(optimizer, model, closure, optimizer)
        self.scaler.update()
        return loss

    def _one_pass(self, optimizer: StepTunedSGD, model: LightningModule, closure: Callable[[], Any], half: Any) -> Any:
        assert self.scaler is not None
        loss = closure()
        self._after_closure(model, optimizer)
        self.scaler.step(half)
        return loss


def _is_ours(optimizer: Any) -> TypeGuard[StepTunedSGD]:
    return isinstance(optimizer, StepTunedSGD)


def _rank_and_ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
