"""How many kernels an iteration launches on an accelerator.

    python benchmarks/launches.py

Counts the operations that are dispatched on torch's meta device. An operation on a list of tensors
counts once; views and allocations do not count. (CUDA divides very long lists into several
launches.) On the meta device, reading a value, which would wait for the accelerator, is an error.
"""

import collections
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steptuned import StepTunedSGD

FREE = (
    "empty",
    "view",
    "detach",
    "alias",
    "select",
    "slice",
    "unbind",
    "expand",
    "unsqueeze",
    "lift_fresh",
    "as_strided",
    "split",
    "scalar_tensor",
    "record_function",
)
"""Operations that launch nothing: views, allocations, scalars on the host."""


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        made = func(*args, **(kwargs or {}))
        given = torch.utils._pytree.tree_leaves((args, kwargs, made))
        on_device = any(isinstance(t, torch.Tensor) and t.is_meta for t in given)
        if on_device and not name.lstrip("_").startswith(FREE):
            self.counts[name] += 1
        return made


SHAPES: list[tuple[int, ...]] = [(16, 16, 3, 3), (16,), (16,)] * 19 + [(10, 64), (10,)]
"""59 tensors, as in a ResNet-20."""


def launches(shapes: list[tuple[int, ...]], **options: Any) -> "collections.Counter[str]":
    """What the second iteration with a measurement launches. The first one creates the state."""
    params = [torch.empty(shape, device="meta").requires_grad_() for shape in shapes]
    opt = StepTunedSGD(params, lr=0.1, replay_rng=False, **options)
    for _ in range(opt.param_groups[0]["tune_every"] + 1):
        with Launches() as seen:
            for act in (opt.half_step, opt.step) if opt.needs_second_pass else (opt.step,):
                for p in params:
                    p.grad = torch.empty_like(p)
                act()
    return seen.counts


def main() -> None:
    choices: dict[str, dict[str, Any]] = {
        "default": {},
        "weight decay": {"weight_decay": 1e-4},
        "clipping": {"max_grad_norm": 1.0},
        "maximize": {"maximize": True},
        "decay_every": {"decay_every": 1},
        "tune_every=2": {"tune_every": 2},
        "relative": {"relative": True},
    }
    for name, options in choices.items():
        counts = launches(SHAPES, **options)
        each = ", ".join(f"{n} x {op}" for op, n in counts.most_common())
        print(f"{name:14}{counts.total():4}  {each}")


if __name__ == "__main__":
    main()
