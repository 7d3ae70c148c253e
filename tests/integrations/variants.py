"""The optimizers with which the frameworks are tested."""

import torch

from steptuned import StepTuned, StepTunedSGD


def plain(params):
    return StepTunedSGD(params, lr=0.3, bounds=(0.05, 20.0), max_grad_norm=0.5)


def every_second_relative(params):
    return StepTunedSGD(params, lr=0.1, tune_every=2, relative=True, max_grad_norm=0.5)


def per_group(params):
    first, *others = params
    groups = [{"params": [first]}, {"params": others, "lr": 0.1}]
    return StepTunedSGD(groups, lr=0.3, per_group=True, bounds=(0.05, 20.0))


def tuned_adamw(params):
    return StepTuned(torch.optim.AdamW(params, lr=0.01), tune_every=2, max_grad_norm=0.5)


VARIANTS = (plain, every_second_relative, per_group, tuned_adamw)
