"""Parameters that are worked on together, and what of their gradients enters the arithmetic."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steptuned.optim.scaling import Scaling
from steptuned.optim.sharded import Place, local


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device, precision and place, their gradients and, where they have one, their states.

    Of sharded parameters and gradients these are the parts that this rank has; ``owners`` are the parameters as the user has them.
    """

    group: dict[str, Any]
    in_chunks: bool
    place: Place | None = None
    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0

    def add(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        self.owners.append(p)
        self.params.append(local(p))
        self.grads.append(local(g))
        self.states.append(state)
        self.size += self.params[-1].numel()

    def split(self) -> tuple["Bucket", "Bucket"]:
        """The parameters that had a gradient in the first pass, and the others."""
        if all(state and state["held"] for state in self.states):
            return self, self._empty()
        parts = self._empty(), self._empty()
        for p, g, state in zip(self.owners, self.grads, self.states, strict=True):
            parts[0 if state and state["held"] else 1].add(p, g, state)
        return parts

    def _empty(self) -> "Bucket":
        return Bucket(self.group, self.in_chunks, self.place)

    def held(self, name: str) -> list[Tensor]:
        """G, g0 or the displacement, what this rank has of them."""
        return [local(state[name]) for state in self.states]

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def is_low_precision(self) -> bool:
        return is_low_precision(self.params[0])

    def gradient_of_J(self, scaling: Scaling | None) -> list[Tensor]:
        """The gradients unscaled, signed, with weight decay, zero in a pass that overflowed. Themselves, where nothing is to do."""
        group, params, grads = self.group, self.params, self.grads
        dtype = precision(params[0])
        if any(g.dtype != dtype for g in grads):
            grads = [g.to(dtype) for g in grads]
        if scaling is not None and scaling.inverse is not None:
            grads = list(torch._foreach_mul(grads, scaling.inverse.to(self.device, dtype)))
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if group["weight_decay"]:
            grads = [g.add(p, alpha=group["weight_decay"]) for g, p in zip(grads, params, strict=True)]
        if scaling is not None:
            overflow = scaling.found_inf.to(self.device) != 0
            grads = [torch.where(overflow, 0.0, g) for g in grads]
        return grads


def precision(p: Tensor) -> torch.dtype:
    """That of G and of inner products: float32 or better."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def is_low_precision(p: Tensor) -> bool:
    return p.dtype != precision(p)


def owns_memory(g: Tensor) -> bool:
    """Whether no one else writes where this gradient lies, as DDP does into its buckets, of which gradients can be views."""
    return not g._is_view() and g.untyped_storage().nbytes() == g.numel() * g.element_size()
