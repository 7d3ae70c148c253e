"""How a network is evaluated: as it is trained, or as it is used."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steptuned.lab.spec import derive_seed


@contextmanager
def as_trained(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The function that training minimises: BatchNorm by each mini-batch's own statistics, dropout with masks drawn anew.

    The masks are the same at every evaluation, so that J is one function; running statistics and random states stay as they were.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    devices = [] if device.type == "cpu" else [device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
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
    """BatchNorm by its running statistics, no dropout."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
