"""Keep running statistics unchanged in the second pass over a mini-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


@contextmanager
def frozen_statistics(model: nn.Module | None) -> Iterator[None]:
    """Within this block, forward passes of the model do not update its running statistics.

    By default, both passes over a mini-batch update the statistics of BatchNorm and InstanceNorm
    and the power iteration of spectral norm. With the second pass in this block, only the first
    pass updates them, and spectral norm is the same function in both passes. The outputs of the
    layers in training mode do not change. Only torch's own layers are supported, not layers of
    other libraries that keep statistics in buffers.

    ``opt.passes(freeze=model)`` and ``opt.step(closure, freeze=model)`` do this for you.

    Args:
        model: the model; None does nothing.

    Examples:
        >>> import torch, steptuned
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with steptuned.frozen_statistics(norm):
        ...     out = norm(torch.randn(8, 2))
        >>> norm.running_mean.tolist(), norm.num_batches_tracked.item()
        ([0.0, 0.0], 0)
    """
    changed: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in _switches(model) if model is not None else ():
            changed.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def _switches(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Objects, attributes, and the values that turn updates off."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            yield module, "track_running_stats", False
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            yield module, "momentum", 0.0
        elif isinstance(module, _SpectralNorm):
            yield module, "n_power_iterations", 0
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield hook, "n_power_iterations", 0
