"""Lists of parameters that are updated together, and the gradients used for the update."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from steptuned.optim import flat, sharded
from steptuned.optim.kernel import RawGradient, Workspace, kernel_for, places
from steptuned.optim.notices import warn_low_precision
from steptuned.optim.scaling import Scaling
from steptuned.optim.sharded import PLAIN, Place, local

if TYPE_CHECKING:
    from steptuned.optim.two_passes import TwoPasses

LARGE = 1 << 16
"""A tensor on the CPU with at least this many elements is updated in chunks."""

FULL = 1 << 24
"""Lists of tensors hold about this many elements, which limits the memory for temporaries."""


def layout_of(tensors: Sequence[Tensor]) -> Any:
    """Types, dtypes, shapes, strides and dispatch keys of tensors.

    Its ``check(*tensors)`` compares all of them with those of other tensors in one call.
    """
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def has_layouts() -> bool:
    """Whether this version of torch can compare layouts. Otherwise every pass gathers anew."""
    probe = torch.empty(1, device="cpu")
    try:
        return bool(layout_of([probe]).check(probe))
    except Exception:
        return False


HAS_LAYOUTS = has_layouts()


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device, precision and place, with their gradients and states.

    For sharded parameters, ``params`` and ``grads`` are this rank's shards; ``owners`` are the
    user's parameters.
    """

    group: dict[str, Any]
    in_chunks: bool
    by_kernel: bool = False
    place: Place | None = None
    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    workspace: Workspace | None = None
    unscale: float = 1.0
    G: list[Tensor] | None = None
    """G of all parameters, if this bucket is cached."""
    G_places: list[int] | None = None
    g0: list[Tensor] | None = None
    """g0 of all parameters, if this bucket is cached and has one."""
    layout: Any = None
    """`layout_of` the parameters and their gradients, if this bucket is cached."""
    layout_of_g0: Any = None
    """`layout_of` g0, if this bucket was cached in a second pass."""

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
        return Bucket(self.group, self.in_chunks, self.by_kernel, self.place)

    @property
    def is_paired(self) -> bool:
        """Whether this bucket is cached and its parameters had a gradient in the first pass."""
        return self.G is not None and bool(self.states[0]["held"])

    def release(self) -> None:
        """Drop the gradients, whose memory the caller may want to free."""
        self.grads, self.g0 = [], None

    def held(self, name: str) -> list[Tensor]:
        """This rank's shards of G, g0 or the displacement."""
        if self.G is not None and name == "G":
            return self.G
        if self.g0 is not None and name == "g0":
            return self.g0
        if name == "g0" and not self.by_kernel:
            return [g0_of(state, p) for state, p in zip(self.states, self.params, strict=True)]
        if PLAIN.issuperset(map(type, self.owners)):
            return [state[name] for state in self.states]
        return [local(state[name]) for state in self.states]

    @property
    def sign(self) -> float:
        """The factor of the gradient in the gradient of J: its sign, and what unscales it."""
        return -self.unscale if self.group["maximize"] else self.unscale

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def is_low_precision(self) -> bool:
        return is_low_precision(self.params[0])

    def gradient_of_J(self, scaling: Scaling | None) -> list[Tensor]:
        """The gradients unscaled, signed and with weight decay; zero in a pass that overflowed.

        Where nothing changes, these are the gradients themselves, not copies.
        """
        group, params, grads = self.group, self.params, self.grads
        dtype = precision(params[0])
        if any(g.dtype != dtype for g in grads):
            grads = [g.to(dtype) for g in grads]
        if scaling is not None and scaling.inverse is not None:
            grads = list(torch._foreach_mul(grads, scaling.inverse.to(self.device, dtype)))
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        if scaling is not None:
            overflow = scaling.found_inf.to(self.device) != 0
            grads = [torch.where(overflow, 0.0, g) for g in grads]
        return grads


def gather(opt: "TwoPasses", scaling: Scaling | None) -> list[Bucket]:
    """The parameters with a gradient, in lists of one group, device, precision and code path."""
    if scaling is None:
        known = _gather_cached(opt)
        if known:
            return known
    full: list[Bucket] = []
    filling: dict[Any, Bucket] = {}
    for i, group in enumerate(opt.param_groups):
        plain = scaling is None and group["foreach"] is not True
        for_kernel = group["foreach"] is not True and (scaling is None or is_sound(opt, scaling))
        for p, g in gradients_of(group, type(opt).__name__):
            state = opt.state.get(p, {})
            if "held" in state:
                follow_parameter(state, p)
            else:  # at most entries of other programs
                state = {}
            by_kernel = for_kernel and fits_kernel(p, g, state)
            in_chunks = (
                plain and not by_kernel and not group["maximize"] and fits_chunks(p, g, state)
            )
            place = sharded.place(p)
            held = state["held"] if state and by_kernel else 0
            key = (i, p.device, p.dtype, by_kernel, in_chunks, place, held)
            if key not in filling:
                filling[key] = Bucket(group, in_chunks, by_kernel, place)
            bucket = filling[key]
            bucket.add(p, g, state)
            if not by_kernel and (group["foreach"] is False or bucket.size >= FULL):
                full.append(filling.pop(key))
    buckets = [*full, *filling.values()]
    for bucket in buckets:
        if bucket.is_low_precision:
            warn_low_precision(opt, bucket.params[0].dtype)
        if bucket.by_kernel:
            kernel = kernel_for(bucket.params[0].dtype)
            assert kernel is not None
            bucket.workspace = Workspace(kernel, bucket.params)
            bucket.unscale = (
                1.0 if scaling is None or scaling.inverse is None else scaling.inverse.item()
            )
    if scaling is None:
        _cache_buckets(opt, buckets)
    return buckets


def gradients_of(group: dict[str, Any], name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of a group that have a gradient, each with its gradient."""
    for p in group["params"]:
        g = sharded.gradient(p)
        if g is None:
            continue
        if g.layout is not torch.strided:
            raise RuntimeError(
                f"{name} does not support sparse gradients: make the layer's gradients dense"
            )
        yield p, g


def is_sound(opt: "TwoPasses", scaling: Scaling) -> bool:
    """Whether the host knows, without synchronizing, that this iteration has not overflowed."""
    found_inf, first = scaling.found_inf, opt.param_groups[0]
    if not (found_inf.is_cpu and first["sound"].is_cpu):
        return False
    return not found_inf.item() and (not first["pending"] or first["sound"].item())


# --------------------------------------------------------------- the same parameters as before


class CachedBuckets(NamedTuple):
    """The last buckets for the kernel. Only their gradients are new in every pass."""

    groups: list[tuple[dict[str, Any], list[Tensor]]]
    """Each parameter group, with its parameters."""
    states: list[dict[str, Any]]
    buckets: list[Bucket]


_cached: WeakKeyDictionary[torch.optim.Optimizer, CachedBuckets] = WeakKeyDictionary()

GRAD = vars(torch._C.TensorBase)["grad"].__get__


def _cache_buckets(opt: "TwoPasses", buckets: list[Bucket]) -> None:
    """Keep the buckets if they hold all parameters in order, as plain tensors with a state."""
    params = params_of(opt)
    if (
        HAS_LAYOUTS
        and _are_same(params, [p for b in buckets for p in b.owners])
        and _are_same(params, list(opt.state))
        and all(b.by_kernel and all(b.states) for b in buckets)
        and PLAIN.issuperset(map(type, params))
    ):
        for bucket in buckets:
            assert bucket.workspace is not None
            bucket.layout = layout_of([*bucket.params, *bucket.grads])
            if bucket.states[0]["held"]:
                bucket.layout_of_g0 = layout_of([state["g0"] for state in bucket.states])
            bucket.G = [state["G"] for state in bucket.states]
            bucket.G_places = places(bucket.G)
            bucket.workspace.remember(bucket.G, bucket.G_places)
        groups = [(group, list(group["params"])) for group in opt.param_groups]
        _cached[opt] = CachedBuckets(groups, list(opt.state.values()), buckets)
    else:
        _cached.pop(opt, None)


def _gather_cached(opt: "TwoPasses") -> list[Bucket]:
    """The buckets of the last pass with new gradients, or none if anything else has changed.

    With many small tensors, gathering costs more than the arithmetic, so this checks as little as
    possible per tensor.
    """
    known = _cached.get(opt)
    if (
        known is None
        or len(known.groups) != len(opt.param_groups)
        or any(
            group is not kept or not _are_same(params, group["params"])
            for group, (kept, params) in zip(opt.param_groups, known.groups, strict=True)
        )
        or not _are_same(known.states, opt.state.values())
    ):
        return []
    for bucket in known.buckets:
        bucket.grads = [*map(GRAD, bucket.params)]
        if bucket.group["foreach"] is True or not _is_as_before(bucket):
            return []
    return known.buckets


def _are_same(known: list[Any], found: Collection[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(known) == len(found) and all(map(is_, known, found))


def _is_as_before(bucket: Bucket) -> bool:
    """Whether the kernel supports the new gradients, and parameters and states have not changed.

    A tensor that is still at its address still has the memory that it had there.
    """
    grads, states, workspace = bucket.grads, bucket.states, bucket.workspace
    assert workspace is not None
    assert bucket.G is not None
    held = [state.get("held", 1) for state in states]  # without one, the user has cleared it
    if not (
        workspace.is_current()
        and bucket.layout.check(*bucket.params, *grads)
        and held[0] != 1  # a g0 that the kernel did not store
        and held.count(held[0]) == len(held)
    ):
        return False
    if not held[0]:
        return True
    return (
        _are_same(bucket.G, [state["G"] for state in states])
        and places(bucket.G) == bucket.G_places
        and _has_g0(bucket, workspace)
    )


def _has_g0(bucket: Bucket, workspace: Workspace) -> bool:
    """Whether the kernel can read g0: its own, or one as before. Sets ``bucket.g0``."""
    g0, own = [state["g0"] for state in bucket.states], workspace.own_g0
    if own is not None and _are_same(own, g0):
        bucket.g0 = own
        return True
    bucket.g0 = g0
    return bucket.layout_of_g0 is not None and bool(bucket.layout_of_g0.check(*g0))


def fits_chunks(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """Whether this parameter, or this rank's shard, can be updated in chunks of flat memory."""
    if p.numel() < LARGE or p.device.type != "cpu" or p.dtype != g.dtype or is_low_precision(p):
        return False
    parts = [
        sharded.local(t)
        for t in (p, g, *(state[name] for name in ("G", "g0") if state and state[name] is not None))
    ]
    if type(parts[0]) not in (Tensor, torch.nn.Parameter):
        return False
    return parts[0].numel() >= LARGE and flat.same_layout(*parts)


def fits_kernel(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """Whether the kernel can update this parameter, or this rank's shard, with all its tensors."""
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
        if (
            not (t.is_cpu and t.dtype is dtype and type(t) in PLAIN and t.layout is torch.strided)
            or t.shape != tensors[0].shape
            or t.is_neg()
            or t._is_zerotensor()
        ):
            return False
        contiguous = contiguous and t.is_contiguous()
    return contiguous or flat.same_layout(*tensors)


def g0_of(state: dict[str, Any], p: Tensor) -> Tensor:
    """This rank's shard of g0. A raw gradient gets its sign and weight decay here."""
    g0, held = local(state["g0"]), state["held"]
    return held.g0(g0, local(p)) if isinstance(held, RawGradient) else g0


def follow_parameter(state: dict[str, Any], p: Tensor) -> None:
    """Move G along with a parameter whose device or precision has changed."""
    if state["held"] and (
        state["g0"].dtype != precision(p) or ("displacement" in state) != is_low_precision(p)
    ):
        raise RuntimeError(
            f"a parameter was cast to {p.dtype} between the two passes, so its gradients cannot be "
            "compared: cast the model before the first pass, after opt.cancel()"
        )
    if "displacement" in state and not is_low_precision(p):
        del state["displacement"]  # it was in low precision before
    G = state["G"]
    if G.device != p.device or G.dtype != precision(p):
        state["G"] = G.to(p.device, precision(p))


def params_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters, in the order of their groups."""
    return [p for group in opt.param_groups for p in group["params"]]


def precision(p: Tensor) -> torch.dtype:
    """The precision of G and of inner products: float32 or better."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def is_low_precision(p: Tensor) -> bool:
    return p.dtype != precision(p)


def owns_memory(g: Tensor) -> bool:
    """Whether this gradient has its own memory. Under DDP it can be a view of a bucket."""
    return not g._is_view() and g.untyped_storage().nbytes() == g.numel() * g.element_size()
