"""Parameters that are sharded over several ranks (DTensor: FSDP2, tensor parallelism).

All arithmetic works on this rank's shard of a tensor. Only sums over all parameters involve the
other ranks: DTensor reduces them, once per mesh.
"""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PRIVATE_OPTIMIZERS = {
    "torch.distributed.optim.zero_redundancy_optimizer": "ZeroRedundancyOptimizer",
    "fairscale.optim.oss": "OSS",
}
"""Modules of wrappers that create a private optimizer on every rank, for some parameters only."""


class Place(NamedTuple):
    """How a tensor is sharded over the ranks."""

    mesh: Any
    sharded: tuple[bool, ...]
    """For each dimension of the mesh: True if its ranks have different shards, False if equal."""


PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_dtensor(t: Tensor) -> bool:
    return type(t) not in PLAIN and hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """This rank's shard of a tensor: the memory itself, not a copy."""
    if not is_dtensor(t):
        return t
    part = t.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # a collective may still be running


def shard_like(p: Tensor, part: Tensor) -> Tensor:
    """A tensor sharded like ``p``, whose shard on this rank is ``part``."""
    if not is_dtensor(p):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def gradient(p: Tensor) -> Tensor | None:
    """The gradient, sharded like its parameter. Tensor parallelism can leave partial sums."""
    g = p.grad
    if g is None or not is_dtensor(p):
        return g
    mesh, placements = _sharding(p)
    same = g.placements == placements  # type: ignore[attr-defined]
    return g if same else g.redistribute(mesh, placements)  # type: ignore[attr-defined]


def place(p: Tensor) -> Place | None:
    """How a parameter is sharded; None if this rank has all of it."""
    if not is_dtensor(p):
        return None
    mesh, placements = _sharding(p)
    found = Place(mesh, tuple(not each.is_replicate() for each in placements))
    return found if any(found.sharded) else None


def same_sharding(t: Tensor, p: Tensor) -> bool:
    """Whether both tensors are sharded in the same way."""
    if not (is_dtensor(t) or is_dtensor(p)):
        return True
    return is_dtensor(t) and is_dtensor(p) and _sharding(t) == _sharding(p)


def _sharding(t: Tensor) -> tuple[Any, Any]:
    """The mesh and the placements of a DTensor."""
    return t.device_mesh, t.placements  # type: ignore[attr-defined]


class Shares(dict[Place | None, Tensor]):
    """This rank's shares of sums over the parameters, by place."""

    def __init__(self, gamma: Tensor, *shape: int) -> None:
        """Shares of this shape, on gamma's device and in its precision."""
        self._gamma, self._shape = gamma, shape

    def add(self, place: Place | None, share: Tensor) -> None:
        share = share.to(self._gamma.device)
        self[place] = self[place] + share if place in self else share

    def zeros(self) -> Tensor:
        return self._gamma.new_zeros(self._shape)


def reduce(shares: Shares, params: Iterable[Tensor]) -> Tensor:
    """Sums over all parameters, from this rank's shares.

    This is one collective for each mesh on which any parameter is sharded, with or without a
    gradient, so that all ranks run the same collectives. If tensors are sharded along several
    dimensions of a mesh, there is one collective per dimension, unless these were flattened (a
    warning of DTensor says how). Along a dimension where some tensors are sharded and others
    replicated, only the first rank counts the replicated ones.
    """
    params = list(params)
    total = shares[None] if None in shares else shares.zeros()
    if PLAIN.issuperset(map(type, params)):
        return total
    along: dict[Any, list[bool]] = {}
    for p in params:
        found = place(p)
        if found is not None:
            before = along.get(found.mesh, [False] * len(found.sharded))
            along[found.mesh] = [a or b for a, b in zip(before, found.sharded, strict=True)]
    for mesh, dims in along.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mine = torch.zeros_like(total)
        for found, share in shares.items():
            if found is not None and found.mesh == mesh:
                spare = [d and not s for d, s in zip(dims, found.sharded, strict=True)]
                if not any(s and c for s, c in zip(spare, mesh.get_coordinate(), strict=True)):
                    mine += share
        placements = [Partial() if d else Replicate() for d in dims]
        total = total + DTensor.from_local(
            mine.to(mesh.device_type), mesh, placements, run_check=False
        ).full_tensor().to(total.device)
    return total


def refuse(params: Iterable[Tensor], name: str, sharded: bool = True) -> None:
    """Raise an error for parameters with which each rank would measure a different gamma.

    With ``sharded=False``, raise an error for all sharded parameters.
    """
    for p in params:
        if getattr(p, "_fsdp_flattened", False) or type(p).__name__ == "FlatParameter":
            raise ValueError(
                f"{name} does not support FullyShardedDataParallel (FSDP1), whose shards do not "
                "tell which part of a tensor they are: use fully_shard() instead"
            )
        if is_dtensor(p) and not sharded:
            raise ValueError(
                f"{name} does not support sharded parameters (DTensor, FSDP2); StepTunedSGD does"
            )
        if is_dtensor(p) and p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{name} got a parameter on a mesh that this rank is not in, so it would not know "
                "the curvature there: put all parameters on meshes of all ranks"
            )


def refuse_scaling(params: Iterable[Tensor]) -> None:
    """Raise an error if a GradScaler would not report an overflow to all ranks.

    It only considers the ranks on the mesh of the first gradient.
    """
    if len({place(p) for p in params}) > 1:
        raise RuntimeError(
            "a GradScaler sees an overflow only on the mesh of the first parameter, and these are "
            "on several meshes or sharded in several ways, so gamma would differ between ranks: "
            "use bfloat16, which needs no GradScaler"
        )


def refuse_private_optimizers(name: str) -> None:
    """Raise an error if a wrapper is creating an optimizer for some of the parameters only."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        wrapper = PRIVATE_OPTIMIZERS.get(frame.f_globals.get("__name__", ""))
        if wrapper is not None:
            raise ValueError(
                f"{name} does not support {wrapper}, which creates a private optimizer on every "
                "rank for some of the parameters, so gamma would differ between ranks: use "
                "fully_shard() instead, which shards the optimizer's state too"
            )
