"""What StepTunedSGD carries on from one iteration to the next, how it is saved and how it is restored."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from steptuned.optim import flat, sharded
from steptuned.optim.arguments import VALID
from steptuned.optim.bucket import g0_of, is_low_precision, precision
from steptuned.optim.kernel import RawGradient

if TYPE_CHECKING:
    from steptuned.optim.step_tuned_sgd import StepTunedSGD

RECENT = 100
"""How many raw gammas are remembered for `StepTunedSGD.stats`."""

EMPTY = "empty"
"""What is pending after a first pass without any gradient."""


class Stats(NamedTuple):
    """What the measurements of a run were like."""

    iterations: int
    """Iterations finished."""
    negative: float
    """Share of iterations that measured no positive curvature, so that gamma was nu."""
    at_lower: float
    """Share of iterations that left gamma at its lower bound."""
    at_upper: float
    """Share of iterations that left gamma at its upper bound (nu included, where nu is not below it)."""
    ignored: int
    """Measurements ignored because a gradient was not finite."""
    raw_gamma: tuple[float, float, float]
    """Lower quartile, median and upper quartile of gamma before clipping, over the last 100 iterations; nan before the first."""
    skipped: int
    """Iterations in which no parameter had a gradient in either pass: nothing was done."""


# ---------------------------------------------------------------------------------------------- the tables


def fresh_scalars(device: torch.device) -> dict[str, Tensor]:
    """What the iteration carries on, as tensors that all parameter groups share. A new one is one row here."""
    one = torch.ones((), dtype=flat.scalar_dtype(device), device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    return {
        "k": none,
        "gamma": one,
        "raw_gamma": torch.full_like(one, torch.nan),
        "curvature": torch.full_like(one, torch.nan),
        "recent": one.new_full((RECENT,), torch.nan),  # a ring of raw gammas, the one of iteration k at k % RECENT
        "sound": torch.ones_like(one, dtype=torch.bool),
        "tally": none.repeat(4),  # iterations with negative curvature, at the lower bound, at the upper bound, ignored
        "streak": none.clone(),  # iterations in a row at the upper bound; negative: at the lower bound
    }


SCALARS = tuple(fresh_scalars(torch.device("cpu")))


def fresh_group(scalars: dict[str, Tensor]) -> dict[str, Any]:
    """What every parameter group has besides its options and the shared scalars."""
    zero = torch.zeros_like(scalars["gamma"])
    return {"pending": "", "skipped": 0, "effective_lr": zero, "moved": zero.clone()}


def fresh_state(p: Tensor) -> dict[str, Any]:
    """What every parameter has. None stands for what is only there between the two passes."""
    state: dict[str, Any] = {"G": torch.zeros_like(p, dtype=precision(p), requires_grad=False), "g0": None, "held": 0}
    return state | {"displacement": None} if is_low_precision(p) else state


# ---------------------------------------------------------------------------------------------- during training


def home_of(opt: "StepTunedSGD") -> torch.device:
    """The device of the first parameter, where the scalars are."""
    return next((p.device for group in opt.param_groups for p in group["params"]), torch.device("cpu"))


def settle(opt: "StepTunedSGD") -> None:
    """Bring the scalars to the first parameter's device, should the model have been moved."""
    first, home = opt.param_groups[0], home_of(opt)
    if first["gamma"].device != home:
        scalars = {name: first[name].to(home) for name in SCALARS}
        for group in opt.param_groups:
            group.update(scalars, effective_lr=group["effective_lr"].to(home), moved=group["moved"].to(home))


def clear_pending(opt: "StepTunedSGD") -> None:
    """Forget what is only there between the two passes."""
    for state in opt.state.values():
        if state:
            state["g0"], state["held"] = None, 0
            if "displacement" in state:
                state["displacement"] = None
    for group in opt.param_groups:
        group["pending"] = ""


def stats_of(group: dict[str, Any]) -> Stats:
    k = int(group["k"])
    negative, lower, upper, ignored = group["tally"].tolist()
    n = max(k, 1)
    quarters = torch.tensor((0.25, 0.5, 0.75), dtype=torch.float64)
    low, middle, high = group["recent"].cpu().double().nanquantile(quarters).tolist()
    return Stats(k, negative / n, lower / n, upper / n, ignored, (low, middle, high), group["skipped"])


# ---------------------------------------------------------------------------------------------- saving and restoring


@contextmanager
def filled(opt: "StepTunedSGD") -> Iterator[None]:
    """Within this block the state has the same keys and shapes as at every other moment: zeros stand for what is None."""
    lean = opt.state
    opt.state = defaultdict(dict)
    for group in opt.param_groups:
        for p in group["params"]:
            if (p.requires_grad or p in lean) and not is_lazy(p):
                opt.state[p] = {
                    name: torch.zeros_like(p, dtype=precision(p), requires_grad=False) if value is None else value
                    for name, value in (lean.get(p) or fresh_state(p)).items()
                }
                if isinstance(opt.state[p]["held"], RawGradient):
                    opt.state[p].update(g0=sharded.as_part_of(p, g0_of(opt.state[p], p)), held=1)
    try:
        yield
    finally:
        opt.state = lean


def upgrade(opt: "StepTunedSGD") -> None:
    """Let the groups share their scalars again, and give a state of an older version what it lacks."""
    first = opt.param_groups[0]
    if "raw_gamma" not in first:  # a version that had neither these two nor the curvature in this unit
        fresh = fresh_scalars(first["gamma"].device)
        first.update({name: fresh[name] for name in ("raw_gamma", "recent", "curvature")})
    for group in opt.param_groups:
        group.update({name: first[name] for name in SCALARS})
        group.setdefault("skipped", 0)
        if "step" in group:
            group["effective_lr"] = group.pop("step")
        for name in opt.defaults.keys() & VALID.keys():
            group.setdefault(name, opt.defaults[name])  # an option that is newer than the state


def check_fits(opt: "StepTunedSGD", state_dict: dict[str, Any]) -> None:
    """Refuse a state of another optimizer, or one whose shards are not those of the parameters."""
    if any("gamma" not in group or "tally" not in group for group in state_dict["param_groups"]):
        raise ValueError("this state_dict is not one of StepTunedSGD: its parameter groups have no gamma")
    for saved, group in zip(state_dict["param_groups"], opt.param_groups, strict=False):  # torch says if they do not match
        for key, p in zip(saved["params"], group["params"], strict=False):
            tensors = [v for v in state_dict["state"].get(key, {}).values() if isinstance(v, Tensor)]
            if not all(sharded.spread_alike(tensor, p) for tensor in tensors):
                raise ValueError(
                    "this state_dict is spread over ranks in another way than the parameters: save and load it with "
                    "torch.distributed.checkpoint, which reshards it"
                )


def restore(opt: "StepTunedSGD", saved: dict[str, Any]) -> None:
    """Take a state once more, after torch has cast it to the precision of the parameters, in its own precision."""
    for saved_group, group in zip(saved["param_groups"], opt.param_groups, strict=True):
        for key, p in zip(saved_group["params"], group["params"], strict=True):
            state = saved["state"].get(key, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value = value.detach().to(p.device, copy=True) if name == "G" or state["held"] else None
                opt.state[p][name] = value
