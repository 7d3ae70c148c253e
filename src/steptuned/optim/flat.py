"""The arithmetic of one iteration of Step-Tuned SGD, on flat lists of tensors.

``first_pass`` and ``second_pass`` are the plain form. They take lists of tensors and 0-d tensors,
change them in place and never branch on a value, so they do not synchronize on an accelerator and
each compiles to one graph. The ``..._in_chunks`` versions compute the same for large tensors on the
CPU, where memory traffic dominates: they finish each chunk while it is in the cache. Reading a
value is free there, so they branch on values.
"""

import functools
import math

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

CHUNK = 1 << 18
"""Elements per chunk: large enough to occupy two threads, small enough for the cache."""


def first_pass(params: Tensors, grads: Tensors, step: Tensor) -> None:
    """theta_{k+1/2} = theta_k - step g0."""
    subtract_scaled(params, grads, step)


def second_pass(
    params: Tensors,
    grads: Tensors,
    g0: Tensors,
    G: Tensors,
    direction: Tensors,
    step: Tensor,
    beta: float,
    valid: Tensor | None,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """theta_{k+1} = theta_{k+1/2} - step g1 and G_k = beta G_{k-1} + (1 - beta) scale (g1 - g0).

    Returns <G_k, direction> and |direction|^2. If the square of scale (g1 - g0) is not finite, the
    difference counts as zero in G, and the inner product is nan. If ``valid``, a 0-d boolean
    tensor, is given and false, G does not change.
    """
    dg: Tensors = torch._foreach_sub(grads, g0)
    subtract_scaled(params, grads, step)
    if isinstance(scale, Tensor):
        torch._foreach_mul_(dg, scale.to(dg[0].dtype))
    if not is_on_host(dg):
        return _average_on_device(dg, G, direction, beta, valid)
    finite = torch.isfinite(square(dg).to(dg[0].dtype))
    if not finite:
        torch._foreach_zero_(dg)
    if valid is None:
        torch._foreach_lerp_(G, dg, 1 - beta)
    else:
        share = valid.to(G[0].dtype) * (1 - beta)
        torch._foreach_lerp_(G, dg, [share] * len(G))
    return torch.stack((torch.where(finite, inner(G, direction), torch.nan), square(direction)))


def _average_on_device(
    dg: Tensors, G: Tensors, direction: Tensors, beta: float, valid: Tensor | None
) -> Tensor:
    """The second half of `second_pass`, in as few operations as possible.

    On an accelerator, starting an operation costs more than the operation itself if the tensors
    are small.
    """
    joined = _joined(dg)
    size = torch.dot(joined, joined)
    # Multiplying by zero is not enough: nan times zero is nan.
    cleaned = torch.where(size < torch.inf, joined, 0.0).split([x.numel() for x in dg])
    dg = [part.as_strided(x.shape, x.stride()) for part, x in zip(cleaned, dg, strict=True)]
    if valid is None:
        torch._foreach_lerp_(G, dg, 1 - beta)
    else:
        torch._foreach_sub_(dg, G)
        torch._foreach_mul_(dg, valid.to(G[0].dtype) * (1 - beta))
        torch._foreach_add_(G, dg)
    products = torch._foreach_mul([*G, *direction], [*direction, *direction])
    sums = _joined(products).view(2, -1).sum(1, dtype=scalar_dtype(joined.device))
    return torch.add(sums, size, alpha=0)  # nan if the size is not finite


def first_pass_in_chunks(
    params: Tensors, grads: Tensors, g0: Tensors, step: Tensor, weight_decay: float
) -> None:
    """`first_pass` with g0 = gradient + weight_decay theta_k.

    It is written into ``g0``, unless that is the gradient itself.
    """
    alpha = -step.item()
    for p, grad, held in zip(params, grads, g0, strict=True):
        for p_, grad_, g0_ in zip(*(_chunks(t) for t in (p, grad, held)), strict=True):
            if held is not grad:
                torch.add(grad_, p_, alpha=weight_decay, out=g0_)
            p_.add_(g0_, alpha=alpha)


def second_pass_in_chunks(
    params: Tensors,
    grads: Tensors,
    g0: Tensors,
    G: Tensors,
    step: Tensor,
    beta: float,
    weight_decay: float,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """`second_pass` along g0, with g1 = gradient + weight_decay theta_{k+1/2}."""
    alpha, factor = -step.item(), float(scale)
    along = square = 0.0
    scratch = torch.empty(2, CHUNK, dtype=G[0].dtype, device=G[0].device)
    for tensors in zip(params, grads, g0, G, strict=True):
        for p_, g1_, g0_, G_ in zip(*(_chunks(t) for t in tensors), strict=True):
            if weight_decay:
                g1_ = torch.add(g1_, p_, alpha=weight_decay, out=scratch[0, : len(p_)])
            dg = torch.sub(g1_, g0_, out=scratch[1, : len(p_)])
            p_.add_(g1_, alpha=alpha)
            if factor != 1.0:
                dg.mul_(factor)
            if not math.isfinite(torch.dot(dg, dg).item()):
                dg.zero_()
                along = math.nan
            along += torch.dot(G_.lerp_(dg, 1 - beta), g0_).item()
            square += torch.dot(g0_, g0_).item()
    return torch.tensor((along, square), dtype=torch.float64, device=G[0].device)


def subtract_scaled(xs: Tensors, ys: Tensors, factor: Tensor) -> None:
    """x -= factor y, where the factor may be on an accelerator."""
    if is_on_host(xs):
        torch._foreach_add_(xs, ys, alpha=-factor.item())
    else:
        torch._foreach_sub_(xs, torch._foreach_mul(ys, factor.to(ys[0].dtype)))


def fade(G: Tensor, beta: float, valid: Tensor | None) -> None:
    """G_k = beta G_{k-1}: what `second_pass` does for a parameter without a gradient."""
    if valid is None:
        G.mul_(beta)
    else:
        G.mul_(torch.where(valid, torch.full_like(valid, beta, dtype=G.dtype), 1.0))


def square(xs: Tensors) -> Tensor:
    """|x|^2 over a list, summed in double precision if the device supports it."""
    return torch.stack(torch._foreach_norm(xs)).to(scalar_dtype(xs[0].device)).square().sum()


def inner(xs: Tensors, ys: Tensors) -> Tensor:
    """<x, y> over two lists, summed in the same way."""
    dtype = scalar_dtype(xs[0].device)
    if is_on_host(xs):  # one product at a time, in memory that is used again
        return torch.stack([(x * y).sum() for x, y in zip(xs, ys, strict=True)]).to(dtype).sum()
    return _joined(torch._foreach_mul(xs, ys)).sum(dtype=dtype)  # one reduction for all tensors


def powers(step: Tensor, exponents: tuple[int, int]) -> Tensor:
    """The step to two powers, as a vector."""
    if is_on_host([step]):
        return torch.stack([step**n for n in exponents])
    return step.pow(constant(exponents, step.device, step.dtype))


def add_product(sums: Tensor, factors: Tensor) -> Tensor:
    """sums * factors. A tiny first sum replaces zero, so that the quotient of two zeros is zero."""
    if is_on_host([sums]):
        return sums * factors
    tiny = constant((torch.finfo(sums.dtype).tiny, 0.0), sums.device, sums.dtype)
    return torch.addcmul(tiny, sums, factors)


@functools.cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A vector that is made once: copying it to an accelerator takes time."""
    return torch.tensor(values, device=device, dtype=dtype)


def _joined(xs: Tensors) -> Tensor:
    """The elements of freshly computed (so dense) tensors, in the order of their memory."""
    return torch.cat([x.as_strided((x.numel(),), (1,)) for x in xs])


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The precision of gamma and of sums: double, except on MPS, which does not support it."""
    return torch.float32 if device.type == "mps" else torch.float64


def same_layout(*tensors: Tensor) -> bool:
    """Whether the tensors are dense in memory and in the same order, so that flat views match."""
    return any(
        all(t.is_contiguous(memory_format=order) for t in tensors)
        for order in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        if order is torch.contiguous_format
        or tensors[0].dim() == (4 if order is torch.channels_last else 5)
    )


def is_on_host(tensors: Tensors) -> bool:
    """Whether reading a value is free: it neither waits for an accelerator nor breaks a graph."""
    return tensors[0].device.type == "cpu" and not torch.compiler.is_compiling()


def _chunks(t: Tensor) -> tuple[Tensor, ...]:
    return torch.split(t.as_strided((t.numel(),), (1,), t.storage_offset()), CHUNK)
