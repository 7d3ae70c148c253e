"""Processes that make one run together: each takes its rows of every mini-batch, and DDP averages the gradients.

The first of them, the lead, has the store, the log and the terminal; the others follow it.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FOR_EVER = timedelta(days=365)


class Ranks:
    """This process alone."""

    number = 1
    index = 0

    def part(self, rows: Tensor) -> tuple[Tensor, float]:
        """This rank's rows, and the weight of their mean loss that makes DDP's average that over all rows."""
        return rows, 1.0

    def replica(self, model: nn.Module) -> nn.Module:
        """The network, with gradients that are averaged over the ranks."""
        return model

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks."""
        return values

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the lead's values."""

    def agree(self, answer: bool) -> bool:
        """The lead's answer."""
        return answer

    def hear(self, value: Any) -> Any:
        """The lead's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, for the lead."""
        return [value]


class Torchrun(Ranks):
    """The processes that torchrun has started."""

    def __init__(self, device: str) -> None:
        self.number, self.index = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.device = device
        if device.startswith("cuda"):
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
        self._talk = dist.new_group(backend="gloo", timeout=FOR_EVER)  # the lead may wait for a lock, or draw

    def part(self, rows: Tensor) -> tuple[Tensor, float]:
        mine = rows.tensor_split(self.number)[self.index]
        if not len(mine):  # fewer rows than ranks: one that does not count, as every rank must take part
            return rows[:1], 0.0
        return mine, len(mine) * self.number / len(rows)

    def replica(self, model: nn.Module) -> nn.Module:
        # Told so, DDP does not change the order of its sums after its first backward, so that a resumed run has the same one.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=self._talk)
        return values

    def same(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def agree(self, answer: bool) -> bool:
        said = torch.tensor(answer)
        dist.broadcast(said, 0, self._talk)
        return bool(said)

    def hear(self, value: Any) -> Any:
        said = [value]
        dist.broadcast_object_list(said, 0, self._talk)
        return said[0]

    def gather(self, value: Any) -> list[Any]:
        said = [None] * self.number if self.index == 0 else None
        dist.gather_object(value, said, 0, self._talk)
        return said or []


def started_by_torchrun() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
