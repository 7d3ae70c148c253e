"""Processes that make one run together: each takes its rows of every mini-batch, and DDP averages the gradients.

The first of them, the lead, has the store, the log and the terminal; the others follow it.
"""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

FOR_EVER = timedelta(days=365)
CLOSE_SECONDS = 5.0
"""How long a rank waits for its process group to end before it exits without it."""


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

    def close(self) -> None:
        """Leave the other ranks. Does not wait for them."""


class Torchrun(Ranks):
    """The processes that torchrun has started."""

    def __init__(self, device: str) -> None:
        self.number, self.index = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.device = device
        if device.startswith("cuda"):
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        # The defaults of its functions are what the world is when it is imported, which
        # DistributedDataParallel does: imported now, they do not keep the process group alive.
        importlib.import_module("torch.distributed.nn.functional")
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

    def close(self) -> None:
        self._talk = None
        close_process_group()


def started_by_torchrun() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def close_process_group() -> bool:
    """Destroy the process group, if there is one. Returns whether its threads have ended.

    While another rank is waited for in vain, they do not end; so the wait is bounded.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return True
    thread = threading.Thread(target=_destroy_process_group, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    return not thread.is_alive()


def _destroy_process_group() -> None:
    gc.collect()  # a DistributedDataParallel, which is part of a cycle, would keep the group alive
    dist.destroy_process_group()


@contextmanager
def closing_process_group() -> Iterator[None]:
    """Leave no process group behind, whichever way the block is left.

    Threads of gloo that outlive the interpreter abort the process. After an error, frames of the
    traceback or pending collectives may keep the threads alive: then the process exits at once,
    without the clean-up of the interpreter.
    """
    try:
        yield
    except BaseException as error:
        if not (dist.is_available() and dist.is_initialized()):
            raise
        succeeded = isinstance(error, SystemExit) and not error.code
        if close_process_group() and succeeded:
            raise
        _exit(error)
    if not close_process_group():
        os._exit(0)


def _exit(error: BaseException) -> NoReturn:
    """Exit at once, with the message and the code of an uncaught exception."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
