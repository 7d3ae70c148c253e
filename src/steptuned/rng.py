"""The same random numbers in both passes over a mini-batch.

Step-Tuned SGD takes the difference of two gradients of one function. Dropout, noise layers and the
like make it a new function at every forward pass, unless both passes draw the same numbers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Replay:
    """Remembers torch's random states; `rewind` puts them back.

    Covered: torch's default generator on the CPU and on the given devices. Not covered: Python's
    ``random``, NumPy, and generators made by hand (``torch.Generator()``), which no one but their owner can find.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._states: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
        for device in devices:
            if device.type not in ("cpu", "meta"):
                self._states[str(device)] = torch.get_device_module(device).get_rng_state(device)

    @classmethod
    def of_nothing(cls) -> "Replay":
        """One that remembers no state, so that `rewind` does nothing."""
        nothing = cls([])
        nothing._states.clear()
        return nothing

    def rewind(self) -> None:
        """Put the random states back to where they were when this object was made."""
        for name, state in self._states.items():
            if name == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(torch.device(name)).set_rng_state(state, torch.device(name))

    def is_current(self) -> bool:
        """Whether the random states are those that are remembered: as many numbers were drawn since as were rewound."""
        now = Replay([torch.device(name) for name in self._states])
        return all(torch.equal(state, now._states[name]) for name, state in self._states.items())

    def state_dict(self) -> dict[str, Tensor]:
        """The remembered states, for a checkpoint taken between the two passes."""
        return dict(self._states)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Remember the states of such a checkpoint instead."""
        self._states = {name: state.cpu() for name, state in state_dict.items()}


def replay(optimizer: torch.optim.Optimizer | None = None) -> Replay:
    """Remember the random states before the first pass, for the by-hand form of Step-Tuned SGD.

    With an optimizer: those of the CPU and of every device its parameters are on; nothing if it was made with
    ``replay_rng=False``. Without: those of the CPU and, where there is one, of the current accelerator.

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
