"""Step-Tuned SGD under the Trainer of Hugging Face's transformers."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from steptuned import StepTunedSGD
from steptuned.optim.scaling import all_or_nothing


class StepTunedTrainer(Trainer):
    """A Trainer whose optimizer is `steptuned.StepTunedSGD`.

    Each update takes two passes over its micro-batches, all ``gradient_accumulation_steps`` of them, with the same random numbers.
    An update is one ``global_step`` and one step of the scheduler; tokens are counted once. The loss that is logged is the one of
    the first pass, ``grad_norm`` the one of the second; ``gamma`` and ``curvature`` are logged beside them.

    From `transformers.TrainingArguments` the optimizer takes ``learning_rate``, ``weight_decay`` and ``max_grad_norm``; the
    Trainer itself clips nothing. Decay is left to the Trainer's scheduler. Other options: ``optimizer_cls_and_kwargs=(StepTunedSGD,
    {...})`` or ``optimizers=(StepTunedSGD(...), scheduler)``. Where such an optimizer has a ``max_grad_norm`` of its own, that one
    counts.

    Refused: fp16 (bf16 is fine), DeepSpeed, FSDP 1, DataParallel (several GPUs in one process), context parallelism, another
    optimizer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._micro_batches: list[tuple[Callable[[], None], int, Any, Any]] = []
        if self.optimizer is not None:
            _inner(self.optimizer)

    # ------------------------------------------------------------------------------------------ the optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        return StepTunedSGD, {"lr": args.learning_rate, "decay_every": None}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        for group in self._step_tuned.param_groups:
            if group["max_grad_norm"] is None and self.args.max_grad_norm:
                group["max_grad_norm"] = self.args.max_grad_norm
        return optimizer

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = _norm

    @property
    def _step_tuned(self) -> StepTunedSGD:
        return _inner(self.optimizer)

    # ------------------------------------------------------------------------------------------ the two passes

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._drop()
        return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """A micro-batch of the first pass; the last one is followed by all of the second pass."""
        opt = self._step_tuned
        with all_or_nothing(self._drop):
            rewind, steps = opt._remember_noise(), self.current_gradient_accumulation_steps
            self._micro_batches.append((rewind, steps, inputs, num_items_in_batch))
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.accelerator.sync_gradients:
                opt.half_step()
                self._second_pass(model)
        return loss

    def _second_pass(self, model: nn.Module) -> None:
        micro_batches, self._micro_batches = self._micro_batches, []
        sync_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for i, (rewind, steps, inputs, num_items_in_batch) in enumerate(micro_batches, start=1):
            alone = i < len(micro_batches) and not sync_each
            self.current_gradient_accumulation_steps = steps
            with self.accelerator.no_sync(model) if alone else contextlib.nullcontext():
                rewind()
                super().training_step(model, inputs, num_items_in_batch)

    def _drop(self) -> None:
        """Forget an update that was broken off."""
        self._micro_batches = []
        if self.optimizer is not None:
            self._step_tuned.cancel()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= {"gamma": self._step_tuned.gamma.item(), "curvature": self._step_tuned.curvature.item()}
        super().log(logs, *args, **kwargs)


def _inner(optimizer: Any) -> StepTunedSGD:
    """The optimizer inside of what accelerate made of it."""
    opt = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(opt, StepTunedSGD):
        raise TypeError(f"StepTunedTrainer trains with StepTunedSGD, got {type(opt).__name__}: use transformers.Trainer for it")
    return opt


def _norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """In place of the Trainer's clipping: only the norm it asks for."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)


def _refuse(args: TrainingArguments) -> None:
    """Raise an error for what cannot take two passes, or would measure wrongly."""
    if args.fp16:
        raise ValueError("StepTunedTrainer does not support fp16, whose GradScaler knows one pass per step: use bf16=True instead")
    if args.deepspeed:
        raise ValueError("StepTunedTrainer does not support DeepSpeed, which steps by itself: use FSDP 2 instead")
    if args.fsdp and isinstance(args.fsdp_config, dict) and int(args.fsdp_config.get("version", 2)) < 2:
        raise ValueError("StepTunedTrainer does not support FSDP 1, whose shards do not tell of what they are part: use FSDP 2")
    if args.parallelism_config is not None and args.parallelism_config.cp_enabled:
        raise ValueError("StepTunedTrainer does not support context parallelism, which cuts up its inputs: use another parallelism")
    if args.n_gpu > 1:
        raise ValueError("StepTunedTrainer does not support several GPUs in one process: start one process per GPU with torchrun")
    if args.optim != TrainingArguments.default_optim or args.optim_args:
        raise ValueError(
            f"StepTunedTrainer trains with StepTunedSGD, got optim={str(args.optim)!r}, optim_args={args.optim_args!r}: leave both "
            "out and give options by optimizer_cls_and_kwargs=(StepTunedSGD, {...})"
        )
