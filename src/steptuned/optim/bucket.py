"""Parameters that are worked on together, and what of their gradients enters the arithmetic."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steptuned.optim import flat, sharded
from steptuned.optim.kernel import Kernel, RawGradient, kernel_for
from steptuned.optim.notices import warn_low_precision
from steptuned.optim.scaling import Scaling
from steptuned.optim.sharded import Place, local

if TYPE_CHECKING:
    from steptuned.optim.step_tuned_sgd import StepTunedSGD

LARGE = 1 << 16
"""A tensor on the CPU with at least this many elements is worked on in chunks."""

FULL = 1 << 24
"""Lists of tensors are worked on about so many elements at a time, which bounds the memory for what is in between."""


PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device, precision and place, their gradients and, where they have one, their states.

    Of sharded parameters and gradients these are the parts that this rank has; ``owners`` are the parameters as the user has them.
    """

    group: dict[str, Any]
    in_chunks: bool
    kernel: Kernel | None = None
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
        return Bucket(self.group, self.in_chunks, self.kernel, self.place)

    def held(self, name: str) -> list[Tensor]:
        """G, g0 or the displacement, what this rank has of them."""
        if name == "g0":
            return [g0_of(state, p) for state, p in zip(self.states, self.params, strict=True)]
        return [local(state[name]) for state in self.states]

    @property
    def sign(self) -> float:
        """Of the gradient in that of J."""
        return -1.0 if self.group["maximize"] else 1.0

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


def gather(opt: "StepTunedSGD", scaling: Scaling | None) -> list[Bucket]:
    """The parameters that have a gradient, in lists of one group, device, precision and way to work."""
    full: list[Bucket] = []
    filling: dict[Any, Bucket] = {}
    for i, group in enumerate(opt.param_groups):
        any_way = scaling is None and group["foreach"] is not True
        for p in group["params"]:
            g = sharded.gradient(p)
            if g is None:
                continue
            if g.layout is not torch.strided:
                raise RuntimeError("StepTunedSGD does not support sparse gradients: make the layer's gradients dense")
            state = opt.state.get(p, {})
            kernel = kernel_for(p.dtype) if any_way and fits_kernel(p, g, state) else None
            key: Any
            if kernel is not None:
                in_chunks, place = False, sharded.place(p)
                key = (i, p.dtype, place, state["held"] if state else 0)
            else:
                if state:
                    keep_up(state, p)
                in_chunks = any_way and not group["maximize"] and fits_chunks(p, g, state)
                place = sharded.place(p)
                key = (i, p.device, p.dtype, in_chunks, place)
            bucket = filling.get(key)
            if bucket is None:
                bucket = filling[key] = Bucket(group, in_chunks, kernel, place)
            bucket.add(p, g, state)
            if kernel is None and (group["foreach"] is False or bucket.size >= FULL):
                full.append(filling.pop(key))
    buckets = [*full, *filling.values()]
    for bucket in buckets:
        if bucket.is_low_precision:
            warn_low_precision(opt, bucket.params[0].dtype)
    return buckets


def fits_chunks(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """Whether this parameter, or this rank's part of it, can be worked on in chunks of flat memory."""
    if p.numel() < LARGE or p.device.type != "cpu" or p.dtype != g.dtype or is_low_precision(p):
        return False
    parts = [sharded.local(t) for t in (p, g, *(state[name] for name in ("G", "g0") if state and state[name] is not None))]
    if type(parts[0]) not in (Tensor, torch.nn.Parameter):
        return False
    return parts[0].numel() >= LARGE and flat.same_layout(*parts)


def fits_kernel(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """Whether this parameter, or this rank's part of it, and all that goes with it can be worked on by the kernel."""
    dtype = p.dtype
    if kernel_for(dtype) is None or "displacement" in state:
        return False
    tensors: tuple[Tensor, ...] = (p, g)
    if state:
        tensors = (p, g, state["G"], state["g0"]) if state["held"] else (p, g, state["G"])
    if type(p) not in PLAIN:
        tensors = tuple(map(local, tensors))
    contiguous = True
    for t in tensors:
        if not (t.is_cpu and t.dtype is dtype and type(t) in PLAIN and t.layout is torch.strided) or t.is_neg():
            return False
        contiguous = contiguous and t.is_contiguous()
    return contiguous or flat.same_layout(*tensors)


def g0_of(state: dict[str, Any], p: Tensor) -> Tensor:
    """What this rank has of g0, with the weight decay and the sign that a gradient held as it is lacks."""
    g0, held = local(state["g0"]), state["held"]
    return held.g0(g0, local(p)) if isinstance(held, RawGradient) else g0


def keep_up(state: dict[str, Any], p: Tensor) -> None:
    """Let G follow a parameter that was moved to another device or made of another precision."""
    if state["held"] and (state["g0"].dtype != precision(p) or ("displacement" in state) != is_low_precision(p)):
        raise RuntimeError(
            f"a parameter was cast to {p.dtype} between the two passes, so its gradients cannot be compared: cast the model "
            "before the first pass, after opt.cancel()"
        )
    G = state["G"]
    if G.device != p.device or G.dtype != precision(p):
        state["G"] = G.to(p.device, precision(p))


def params_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters, group by group."""
    return [p for group in opt.param_groups for p in group["params"]]


def precision(p: Tensor) -> torch.dtype:
    """That of G and of inner products: float32 or better."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def is_low_precision(p: Tensor) -> bool:
    return p.dtype != precision(p)


def owns_memory(g: Tensor) -> bool:
    """Whether no one else writes where this gradient lies, as DDP does into its buckets, of which gradients can be views."""
    return not g._is_view() and g.untyped_storage().nbytes() == g.numel() * g.element_size()
