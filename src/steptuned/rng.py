"""The same random numbers in both passes over a mini-batch.

Step-Tuned SGD takes the difference of two gradients of one function. Dropout and noise layers make
it a different function in every forward pass, unless both passes draw the same random numbers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Replay:
    """A snapshot of torch's random states; `rewind` restores them.

    Covered: torch's default generators on the CPU and on the given devices. Not covered: Python's
    ``random``, NumPy, and generators that you created yourself (``torch.Generator()``).
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._states: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
        for device in devices:
            if device.type not in ("cpu", "meta"):
                self._states[str(device)] = torch.get_device_module(device).get_rng_state(device)

    @classmethod
    def of_nothing(cls) -> "Replay":
        """An empty snapshot, whose `rewind` does nothing."""
        nothing = cls([])
        nothing._states.clear()
        return nothing

    def rewind(self) -> None:
        """Restore the random states to what they were when this object was created."""
        for name, state in self._states.items():
            if name == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(torch.device(name)).set_rng_state(state, torch.device(name))

    def is_current(self) -> bool:
        """Whether torch's random states now equal those of the snapshot."""
        now = Replay([torch.device(name) for name in self._states])
        return all(torch.equal(state, now._states[name]) for name, state in self._states.items())

    def state_dict(self) -> dict[str, Tensor]:
        """The states in the snapshot, for a checkpoint saved between the two passes."""
        return dict(self._states)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Replace the snapshot by the states of such a checkpoint."""
        self._states = {name: state.cpu() for name, state in state_dict.items()}


def replay(optimizer: torch.optim.Optimizer | None = None) -> Replay:
    """Take a snapshot of the random states before the first pass, for the manual form.

    With an optimizer, the snapshot covers the CPU and every device that its parameters are on, or
    nothing if the optimizer was created with ``replay_rng=False``. Without one, it covers the CPU
    and the current accelerator, if there is one.

    Examples:
        >>> import torch, steptuned
        >>> noise = steptuned.replay()
        >>> first = torch.rand(3)
        >>> noise.rewind()
        >>> bool((torch.rand(3) == first).all())
        True
    """
    if optimizer is not None:
        if not optimizer.param_groups[0].get("replay_rng", True):
            return Replay.of_nothing()
        return Replay({p.device for group in optimizer.param_groups for p in group["params"]})
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            return Replay([torch.device(kind.type, torch.accelerator.current_device_index())])
    return Replay([])
