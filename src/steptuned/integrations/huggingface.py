"""Step-Tuned SGD under the Trainer of Hugging Face's transformers."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SchedulerType, Trainer, TrainingArguments

from steptuned import StepTunedSGD, frozen_statistics, replay
from steptuned.integrations import diagnostics
from steptuned.optim.arguments import warn
from steptuned.optim.scaling import all_or_nothing
from steptuned.optim.two_passes import TwoPasses
from steptuned.rng import Replay


class StepTunedTrainer(Trainer):
    """A Trainer for `steptuned.StepTunedSGD`, or for a `steptuned.StepTuned` that you pass to it.

    Each update takes two passes over all of its micro-batches (``gradient_accumulation_steps``),
    with the same random numbers. With ``tune_every=T``, only every T-th update takes two passes. An
    update is one ``global_step`` and one step of the scheduler; tokens are counted once.

    The logged ``loss`` is from the first pass, ``grad_norm`` from the second. With them, at the
    Trainer's logging interval, come ``gamma``, ``curvature`` and ``effective_lr`` (the learning
    rate times gamma) of the last update, and ``raw_gamma`` (its median over the last 100 updates),
    ``negative``, ``at_lower``, ``at_upper``, ``ignored`` and ``skipped``, as in
    `steptuned.StepTunedSGD.stats`. With several parameter groups (the Trainer makes two, for weight
    decay) ``effective_lr`` becomes ``effective_lr/pg1``, ``effective_lr/pg2``, and so on.

    The optimizer takes ``learning_rate``, ``weight_decay`` and ``max_grad_norm`` from
    `transformers.TrainingArguments`; the Trainer itself does not clip. For other options, use
    ``optimizer_cls_and_kwargs=(StepTunedSGD, {...})`` or ``optimizers=(StepTunedSGD(...), None)``.
    An optimizer that has its own ``max_grad_norm`` keeps it.

    To combine with another Trainer, such as `transformers.Seq2SeqTrainer`, inherit from both, this
    class first.

    Not supported: fp16 (use bf16), DeepSpeed, FSDP 1, DataParallel (several GPUs in one process),
    context parallelism, and optimizers other than `StepTunedSGD` and
    `StepTuned`.

    Args:
        freeze_statistics: do not update the running statistics of BatchNorm and other layers in the
            second pass; see `steptuned.frozen_statistics`.
        *args: passed on to the Trainer, as are all other keyword arguments.
    """

    def __init__(self, *args: Any, freeze_statistics: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.freeze_statistics = freeze_statistics
        self._micro_batches: list[tuple[Replay, int, Any, Any]] = []
        if self.optimizer is not None:
            _inner(self.optimizer)

    # ----------------------------------------------------------------------- the optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        return StepTunedSGD, {"lr": args.learning_rate}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        for group in self._step_tuned.param_groups:
            if group["max_grad_norm"] is None and self.args.max_grad_norm:
                group["max_grad_norm"] = self.args.max_grad_norm
        return optimizer

    def create_scheduler(
        self,
        num_training_steps: int,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Any:
        is_given = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        opt = _inner(self.optimizer if optimizer is None else optimizer)
        decay_every = opt.param_groups[0].get("decay_every")
        if not is_given and decay_every is not None:
            # The optimizer warns of any scheduler, and the Trainer always creates one.
            opt._warned.add("schedule")
            name = SchedulerType(self.args.lr_scheduler_type).value
            if name not in ("constant", "constant_with_warmup"):
                warn(
                    f"decay_every={decay_every} and lr_scheduler_type={name!r} both lower the "
                    "step: leave decay_every out, or use lr_scheduler_type='constant'"
                )
        return scheduler

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = _norm

    @property
    def _step_tuned(self) -> TwoPasses:
        return _inner(self.optimizer)

    # ---------------------------------------------------------------------- the two passes

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._drop()
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a micro-batch of the first pass; after the last one, run the second pass."""
        opt = self._step_tuned
        if not opt.needs_second_pass:
            return super().training_step(model, inputs, num_items_in_batch)
        with all_or_nothing(self._drop):
            noise, steps = replay(opt), self.current_gradient_accumulation_steps
            self._micro_batches.append((noise, steps, inputs, num_items_in_batch))
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.accelerator.sync_gradients:
                opt.half_step()
                self._second_pass(model)
        return loss

    def _second_pass(self, model: nn.Module) -> None:
        micro_batches, self._micro_batches = self._micro_batches, []
        sync_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        frozen = model if self.freeze_statistics else None
        for i, (noise, steps, inputs, num_items_in_batch) in enumerate(micro_batches, start=1):
            alone = i < len(micro_batches) and not sync_each
            self.current_gradient_accumulation_steps = steps
            sync = self.accelerator.no_sync(model) if alone else contextlib.nullcontext()
            with sync, frozen_statistics(frozen):
                noise.rewind()
                super().training_step(model, inputs, num_items_in_batch)

    def _drop(self) -> None:
        """Drop an unfinished update."""
        self._micro_batches = []
        if self.optimizer is not None:
            self._step_tuned.cancel()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            values = diagnostics.measurements(self._step_tuned)
            logs |= {name: value.item() for name, value in values.items()}
            logs |= diagnostics.summary(self._step_tuned)
        super().log(logs, *args, **kwargs)


def _inner(optimizer: Any) -> TwoPasses:
    """The optimizer inside accelerate's wrapper."""
    opt = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(opt, TwoPasses):
        raise TypeError(
            f"StepTunedTrainer trains with StepTunedSGD or StepTuned, got {type(opt).__name__}: "
            "use transformers.Trainer for it, or wrap it in steptuned.StepTuned"
        )
    return opt


def _norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Replaces the Trainer's clipping: only computes the norm."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)


def _refuse(args: TrainingArguments) -> None:
    """Raise an error for options that do not allow two passes, or would distort the measurement."""
    if args.fp16:
        raise ValueError(
            "StepTunedTrainer does not support fp16, whose GradScaler expects one pass per step: "
            "use bf16=True instead"
        )
    if args.deepspeed:
        raise ValueError(
            "StepTunedTrainer does not support DeepSpeed, which performs the step itself: use "
            "FSDP 2 instead"
        )
    if (
        args.fsdp
        and isinstance(args.fsdp_config, dict)
        and int(args.fsdp_config.get("version", 2)) < 2
    ):
        raise ValueError(
            "StepTunedTrainer does not support FSDP 1, whose shards do not tell which part of a "
            "tensor they are: use FSDP 2"
        )
    if args.parallelism_config is not None and args.parallelism_config.cp_enabled:
        raise ValueError(
            "StepTunedTrainer does not support context parallelism, which splits up its inputs: "
            "use another parallelism"
        )
    if args.n_gpu > 1:
        raise ValueError(
            "StepTunedTrainer does not support several GPUs in one process: start one process per "
            "GPU with torchrun"
        )
    if args.optim != TrainingArguments.default_optim or args.optim_args:
        raise ValueError(
            f"StepTunedTrainer trains with StepTunedSGD, got optim={str(args.optim)!r}, "
            f"optim_args={args.optim_args!r}: leave both out and pass options by "
            "optimizer_cls_and_kwargs=(StepTunedSGD, {...})"
        )
