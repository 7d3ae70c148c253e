"""Processes that share a run: each takes its shard of every mini-batch, DDP averages the gradients.

Rank 0, the lead, has the store, the log and the terminal. The other ranks follow it.
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
    """A single process."""

    world_size = 1
    index = 0

    def shard(self, rows: Tensor) -> tuple[Tensor, float]:
        """This rank's rows, and the weight of their mean loss.

        With these weights, DDP's average over the ranks is the mean over all rows.
        """
        return rows, 1.0

    def replica(self, model: nn.Module) -> nn.Module:
        """The network, wrapped so that its gradients are averaged over the ranks."""
        return model

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks."""
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the lead's values to all ranks."""

    def broadcast_bool(self, answer: bool) -> bool:
        """The lead's answer."""
        return answer

    def broadcast_object(self, value: Any) -> Any:
        """The lead's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks; only the lead gets them."""
        return [value]

    def close(self) -> None:
        """Leave the process group. Does not wait for the other ranks."""


class Torchrun(Ranks):
    """The processes started by torchrun."""

    def __init__(self, device: str) -> None:
        self.world_size, self.index = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.device = device
        if device.startswith("cuda"):
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        # DistributedDataParallel imports this module, whose default arguments hold the process
        # group of that moment. Imported before there is one, it does not keep the group alive.
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
        # The lead may wait for a lock or draw figures for a long time.
        self._control = dist.new_group(backend="gloo", timeout=FOR_EVER)

    def shard(self, rows: Tensor) -> tuple[Tensor, float]:
        mine = rows.tensor_split(self.world_size)[self.index]
        if not len(mine):  # fewer rows than ranks: every rank must run, but this one has no weight
            return rows[:1], 0.0
        return mine, len(mine) * self.world_size / len(rows)

    def replica(self, model: nn.Module) -> nn.Module:
        # With this argument, DDP does not reorder its sums after the first backward pass, so a
        # resumed run adds in the same order.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=self._control)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def broadcast_bool(self, answer: bool) -> bool:
        buffer = torch.tensor(answer)
        dist.broadcast(buffer, 0, self._control)
        return bool(buffer)

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0, self._control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.world_size if self.index == 0 else None
        dist.gather_object(value, values, 0, self._control)
        return values or []

    def close(self) -> None:
        self._control = None
        close_process_group()


def started_by_torchrun() -> bool:
    return (
        dist.is_available()
        and dist.is_torchelastic_launched()
        and int(os.environ["WORLD_SIZE"]) > 1
    )


def close_process_group() -> bool:
    """Destroy the process group, if there is one. Returns whether its threads have ended.

    They do not end while they wait for a rank that is gone, so the wait is bounded.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return True
    thread = threading.Thread(target=_destroy_process_group, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    return not thread.is_alive()


def _destroy_process_group() -> None:
    gc.collect()  # DistributedDataParallel is part of a cycle and would keep the group alive
    dist.destroy_process_group()


@contextmanager
def closing_process_group() -> Iterator[None]:
    """Leave no process group behind, however the block ends.

    Gloo threads that outlive the interpreter abort the process. After an error, frames of the
    traceback or pending collectives may keep these threads alive. In that case the process exits
    at once, without the interpreter's clean-up.
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
