"""The two modes in which a network is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steptuned.lab.spec import derive_seed


@contextmanager
def as_trained(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate the function that training minimises, in training mode.

    BatchNorm uses the statistics of each mini-batch. Dropout has the same masks at every
    evaluation, so that J is one function. Running statistics and random states do not change.
    """
    norms = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
    ):
        torch.manual_seed(derive_seed("masks of the evaluation"))
        for norm in norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True


@contextmanager
def as_used(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: BatchNorm uses its running statistics, and there is no dropout."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
