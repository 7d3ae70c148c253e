"""The state of StepTunedSGD between iterations: how it is created, saved and restored."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from steptuned.optim import flat, sharded
from steptuned.optim.bucket import g0_of, is_low_precision, precision
from steptuned.optim.kernel import RawGradient
from steptuned.optim.record import RECENT

if TYPE_CHECKING:
    from steptuned.optim.two_passes import TwoPasses

EMPTY = "empty"
"""The value of ``pending`` after a first pass without any gradient."""


class Measurement(NamedTuple):
    """A measurement of the step-size rule, as 0-d tensors."""

    raw_gamma: Tensor
    """The inverse of the curvature, or nu."""
    is_positive: Tensor
    """Whether the curvature is positive."""
    is_finite: Tensor
    """Whether the measurement counts. Otherwise gamma stays as it is."""


# -------------------------------------------------------------------------------- the tables


def fresh_scalars(device: torch.device) -> dict[str, Tensor]:
    """The scalars of the iteration. All parameter groups share them.

    With per_group every group has its own.
    """
    one = torch.ones((), dtype=flat.scalar_dtype(device), device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    return {
        "gamma": one,
        # A ring buffer of measurements, the n-th in row n % RECENT: <G, dtheta>, |dtheta|^2 and the
        # gamma that followed; nan if the measurement was ignored. In StepTuned the slope
        # -s <g, dtheta> takes the place of |dtheta|^2, and both are divided by |dtheta|^2.
        "measured": one.new_full((RECENT, 3), torch.nan),
        "log_mean": torch.zeros_like(one),  # running mean of log raw gamma, for relative=True
        "positives": none.clone(),  # number of measurements in log_mean
        "sound": torch.ones_like(one, dtype=torch.bool),
        # Iterations with two passes and with one that were lost to an overflow.
        "overflows": none.repeat(2),
        "still": none.clone(),  # measurements ignored because the step was zero
        # Measurements with negative curvature, at the lower bound, at the upper bound, ignored.
        "tally": none.repeat(4),
    }


SCALARS = tuple(fresh_scalars(torch.device("cpu")))


def fresh_group(scalars: dict[str, Tensor], tune_every: int) -> dict[str, Any]:
    """The entries of a parameter group besides its options and the scalars."""
    zero = torch.zeros_like(scalars["gamma"])
    return {
        "k": 0,  # iterations, including those that were lost to an overflow
        "single": 0,  # those of one pass; the others have measured
        "counted": 0,  # measurements in the tally
        "pending": "",
        "skipped": 0,
        "countdown": 0,  # mini-batches to use once before the next one is used twice
        "divided": tune_every > 1,  # whether G averages dg / step, instead of dg
        "effective_lr": zero,
        "moved": zero.clone(),
    }


PARAMETER_STATE = ("G", "g0", "held", "displacement")


def fresh_state(p: Tensor, displaced: bool | None = None) -> dict[str, Any]:
    """The state of a parameter. None stands for what only exists between the two passes.

    The displacement is stored if ``displaced``. By default, this is the case in low precision,
    where rounding makes the displacement differ from -step g0.
    """
    state: dict[str, Any] = {
        "G": torch.zeros_like(p, dtype=precision(p), requires_grad=False),
        "g0": None,
        "held": 0,
    }
    displaced = is_low_precision(p) if displaced is None else displaced
    return state | {"displacement": None} if displaced else state


# --------------------------------------------------------------------------- during training


def share(opt: "TwoPasses") -> None:
    """Make all groups share the scalars of the first or, with per_group, have their own copy."""
    first, *others = opt.param_groups
    for group in others:
        if not first["per_group"]:
            group.update({name: first[name] for name in SCALARS})
        elif group["gamma"] is first["gamma"]:
            group.update({name: first[name].clone() for name in SCALARS})


def scalar_device(opt: "TwoPasses") -> torch.device:
    """The device of the first parameter, where the scalars are."""
    return next(
        (p.device for group in opt.param_groups for p in group["params"]), torch.device("cpu")
    )


def place_scalars(opt: "TwoPasses") -> None:
    """Move the scalars to the first parameter's device, and share them as per_group says."""
    device = scalar_device(opt)
    if opt.param_groups[0]["gamma"].device != device:
        for group in opt.param_groups:
            group.update(
                {name: group[name].to(device) for name in (*SCALARS, "effective_lr", "moved")}
            )
    share(opt)


def clear_pending(opt: "TwoPasses") -> None:
    """Drop what only exists between the two passes."""
    for state in opt.state.values():
        if "held" in state:
            state["g0"], state["held"] = None, 0
            if "displacement" in state:
                state["displacement"] = None
    for group in opt.param_groups:
        group["pending"] = ""


# ---------------------------------------------------------------------- saving and restoring


@contextmanager
def filled(opt: "TwoPasses") -> Iterator[None]:
    """Within this block, zeros replace every None of the state.

    So the keys and shapes are the same at any time.
    """
    compact = opt.state
    opt.state = defaultdict(dict)
    for group in opt.param_groups:
        for p in group["params"]:
            state = compact.get(p, {})
            if "held" not in state:  # at most entries of other programs
                state = opt._default_state(p) | state
            if state:
                opt.state[p] = {
                    name: torch.zeros_like(p, dtype=precision(p), requires_grad=False)
                    if value is None and name in PARAMETER_STATE
                    else value
                    for name, value in state.items()
                }
                if isinstance(opt.state[p].get("held"), RawGradient):
                    opt.state[p].update(g0=sharded.shard_like(p, g0_of(opt.state[p], p)), held=1)
    try:
        yield
    finally:
        opt.state = compact


def upgrade(opt: "TwoPasses") -> None:
    """Complete a state of an older version, and make the groups share their scalars again."""
    for group in opt.param_groups:
        _upgrade_measurements(group)
        for name, value in fresh_scalars(group["gamma"].device).items():
            group.setdefault(name, value)
        for name in ("skipped", "countdown", "divided"):
            group.setdefault(name, 0 if name != "divided" else False)
        if "step" in group:
            group["effective_lr"] = group.pop("step")
        for name in opt.defaults.keys() & opt.OPTIONS.keys():
            group.setdefault(name, opt.defaults[name])  # options newer than the state
    share(opt)
    overflows = [group["overflows"] for group in opt.param_groups]
    opt._is_scaled = any(not each.is_meta and bool(each.any()) for each in overflows)


def _upgrade_measurements(group: dict[str, Any]) -> None:
    """Restore the counts, which are tensors in a saved state, and what older versions recorded."""
    group["k"], group["single"] = int(group["k"]), int(group.get("single", 0))
    group["counted"] = n = group["k"] - group["single"]
    raw, curvature = group.pop("recent", None), group.pop("curvature", None)
    for name in ("raw_gamma", "streak"):
        group.pop(name, None)
    if raw is None or "measured" in group:
        return
    gamma = raw.clamp(*group["bounds"])
    group["measured"] = torch.stack((torch.ones_like(raw), raw, gamma), 1)
    group["measured"][raw.isnan()] = torch.nan
    if n and not curvature > 0:
        group["measured"][(n - 1) % RECENT, :2] = torch.stack(
            (curvature, torch.ones_like(curvature))
        )


def check_fits(opt: "TwoPasses", state_dict: dict[str, Any]) -> None:
    """Raise an error for a state of another optimizer, or one with different sharding."""
    if any("gamma" not in group or "tally" not in group for group in state_dict["param_groups"]):
        raise ValueError(
            f"this state_dict is not one of {type(opt).__name__}: its parameter groups have no "
            f"gamma{opt._load_hint}"
        )
    has_delta = "delta" in opt.param_groups[0]  # an option of StepTunedSGD, not of StepTuned
    if any(("delta" in group) != has_delta for group in state_dict["param_groups"]):
        other = "StepTuned" if has_delta else "StepTunedSGD"
        raise ValueError(f"this state_dict is one of {other}, not of {type(opt).__name__}")
    # Not strict: torch raises an error if the groups do not match.
    for saved, group in zip(state_dict["param_groups"], opt.param_groups, strict=False):
        for key, p in zip(saved["params"], group["params"], strict=False):
            state = state_dict["state"].get(key, {})
            tensors = [
                state[name] for name in PARAMETER_STATE if isinstance(state.get(name), Tensor)
            ]
            if not all(sharded.same_sharding(tensor, p) for tensor in tensors):
                raise ValueError(
                    "this state_dict is sharded differently from the parameters: save and load "
                    "it with torch.distributed.checkpoint, which reshards it"
                )
            if not is_lazy(p) and any(tensor.shape != p.shape for tensor in tensors):
                shapes = f"{tuple(tensors[0].shape)}, and the parameter has {tuple(p.shape)}"
                raise ValueError(
                    f"this state_dict is of a different network: its G has the shape {shapes}"
                )


def restore(opt: "TwoPasses", saved: dict[str, Any]) -> None:
    """Restore a state in its own precision, after torch has cast it to the parameters'."""
    for saved_group, group in zip(saved["param_groups"], opt.param_groups, strict=True):
        for key, p in zip(saved_group["params"], group["params"], strict=True):
            state = saved["state"].get(key, {})
            for name in [name for name in PARAMETER_STATE if name in state]:
                value = state[name]
                if isinstance(value, Tensor):
                    value = (
                        value.detach().to(p.device, copy=True)
                        if name == "G" or state["held"]
                        else None
                    )
                opt.state[p][name] = value
