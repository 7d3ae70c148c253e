"""The traffic and the share of time of an optimizer, by number of ranks.

    python benchmarks/distributed.py [--ranks 1 2 4] [--rounds 15]

Starts torchrun (gloo, one thread per rank) for every number of ranks. Traffic is counted, not
estimated: every collective that torch dispatches, with the bytes of its largest tensor, per
back-propagation. (An iteration of Step-Tuned SGD has two.) Times are those of the first rank. In
every round, each method does two back-propagations in turn; the figures are medians and quartiles
over the rounds. With more ranks than cores, the ranks wait for each other, and this dominates the
times.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steptuned import StepTunedSGD

METHODS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-3),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-4),
    "StepTunedSGD": lambda ps: StepTunedSGD(ps, lr=1e-3),
    "StepTunedSGD, clipped": lambda ps: StepTunedSGD(ps, lr=1e-3, max_grad_norm=1.0),
}
WRAPPERS = ("DDP", "FSDP2")
WIDTH, LAYERS, ROWS = 768, 4, 32


class Traffic(TorchDispatchMode):
    """Counts collectives and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives, self.bytes = 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional") and not op.__name__.startswith(
            ("wait_tensor", "_wrap")
        ):
            self.collectives += 1
            self.bytes += max(
                (t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)), default=0
            )
        return op(*args, **(kwargs or {}))


def network(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    if wrapper == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Case:
    """A method, and a network in its wrapper."""

    def __init__(self, wrapper: str, name: str) -> None:
        self.model = network(wrapper)
        self.optimizer: Any = METHODS[name](self.model.parameters())
        self.x = torch.randn(ROWS, WIDTH)

    def two_back_propagations(self) -> tuple[float, float]:
        """Seconds in total, and in the optimizer."""
        begun, inside = time.perf_counter(), 0.0
        tuned = isinstance(self.optimizer, StepTunedSGD)
        for update in (
            self.optimizer.half_step if tuned else self.optimizer.step,
            self.optimizer.step,
        ):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            start = time.perf_counter()
            update()
            inside += time.perf_counter() - start
        return time.perf_counter() - begun, inside


def work(rounds: int, to: Path) -> None:
    """The work of one rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for wrapper in WRAPPERS:
        cases = {name: Case(wrapper, name) for name in METHODS}
        for case in cases.values():
            case.two_back_propagations()
        for name, case in cases.items():
            with Traffic() as traffic:
                case.two_back_propagations()
            found[f"{wrapper}/{name}"] = {
                "collectives": traffic.collectives / 2,
                "bytes": traffic.bytes / 2,
                "total": [],
                "inside": [],
            }
        for _ in range(rounds):
            for name, case in cases.items():
                dist.barrier()
                total, inside = case.two_back_propagations()
                found[f"{wrapper}/{name}"]["total"].append(total / 2)
                found[f"{wrapper}/{name}"]["inside"].append(inside / 2)
    if dist.get_rank() == 0:
        to.write_text(json.dumps(found))
    dist.destroy_process_group()


def spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Traffic and time of optimizers on several ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.rounds, arguments.work)
        return
    parameters = LAYERS * (WIDTH * WIDTH + WIDTH)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; "
        f"{parameters:,} parameters, {ROWS} rows per rank"
    )
    print("per back-propagation; quartiles in brackets\n")
    columns = [
        f"{'ranks':>5}",
        f"{'with':5}",
        f"{'method':22}",
        f"{'collectives':>11}",
        f"{'bytes':>12}",
        f"{'beyond SGD':>10}",
    ]
    print("  ".join([*columns, f"{'ms':>22}", f"{'optimizer, %':>20}"]))
    for ranks in arguments.ranks:
        show(ranks, measure(ranks, arguments.rounds))


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """Start the ranks, and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__]
        command += ["--rounds", str(rounds), "--work", str(to)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(to.read_text())


def show(ranks: int, found: dict[str, Any]) -> None:
    """Print one row per wrapper and method."""
    for key, each in found.items():
        wrapper, name = key.split("/")
        more = each["bytes"] - found[f"{wrapper}/SGD"]["bytes"]
        share = [100 * i / t for i, t in zip(each["inside"], each["total"], strict=True)]
        ms = [1000 * t for t in each["total"]]
        print(
            f"{ranks:>5}  {wrapper:5}  {name:22}  {each['collectives']:>11.1f}  "
            f"{each['bytes']:>12,.0f}  {more:>+10,.0f}  "
            f"{spread(ms, 1):>22}  {spread(share, 1):>20}"
        )


if __name__ == "__main__":
    main()
