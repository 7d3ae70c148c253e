"""What the ranks do. Started by torchrun: ranks.py FOLDER SCENARIO...

The scenarios run one after another, and every rank saves its results. Each rank works on its rows
of every mini-batch. The problem is defined here too, for the single process that the ranks are
compared with.
"""

import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steptuned import ArmijoGD, StepTuned, StepTunedGD, StepTunedSGD

ROWS = 16
STEEP = 5.0
"""Makes the loss steeper, so that gamma changes. With more, the trajectory would be chaotic."""
OPTIONS = {"lr": 0.1, "nu": 2.5, "bounds": (0.02, 10.0), "decay_every": 5}


class Network(nn.Sequential):
    """Layers of sizes that 2 and 4 divide, and of sizes that they do not."""

    def __init__(self, sizes=(6, 8, 7, 3), dtype=torch.float64):
        torch.manual_seed(3)
        layers = [nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes)]
        super().__init__(*(each for layer in layers for each in (layer, nn.Tanh())))


def make_optimizer(model, **options):
    """Two groups with options of their own."""
    weights = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01}
    biases = {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.05}
    return StepTunedSGD([weights, biases], **{**OPTIONS, **options})


def mini_batch(k, inputs=6, outputs=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(k)
    x, y = (
        torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (inputs, outputs)
    )
    return x.to(dtype), y.to(dtype)


def mine(tensor, part=None):
    """The rows of this rank, or of part i of n."""
    if part is None:
        part = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    i, n = part
    return tensor[i::n]


def back_propagate(model, k, part=None, between=lambda: None, **kind):
    x, y = (mine(t, part) for t in mini_batch(k, **kind))
    (STEEP * nn.functional.mse_loss(model(x), y)).backward()
    between()


def theta(model):
    """The full parameters, on every rank."""
    with torch.no_grad():
        return torch.cat(
            [
                (p.full_tensor() if isinstance(p, DTensor) else p).reshape(-1).clone()
                for p in model.parameters()
            ]
        )


def walk(model, opt, iterations, part=None, between=lambda: None, start=0, **kind):
    """Passes by hand. Returns points, gammas and the number of collectives in each half step."""
    found = {"theta": [], "gamma": [], "curvature": [], "collectives": []}
    for k in range(start, start + iterations):
        counts = []
        for half in (opt.half_step, opt.step) if opt.needs_second_pass else (opt.step,):
            opt.zero_grad()
            back_propagate(model, k, part, between, **kind)
            with CommDebugMode() as communication:
                half()
            counts.append(communication.get_total_counts())
        found["theta"].append(theta(model))
        found["gamma"].append(opt.gamma)
        found["curvature"].append(opt.curvature)
        found["collectives"].append(counts)
    return found | {name: torch.stack(found[name]) for name in ("theta", "gamma", "curvature")}


def averaged(tensors, group=None):
    """Returns a function that averages the gradients, as DDP does, for unwrapped parameters.

    It is called between the backward pass and the optimizer.
    """
    tensors = list(tensors)

    def average():
        for p in tensors:
            g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(g, group=group)
            g /= dist.get_world_size(group)

    return average


# ---------------------------------------------------------------------------------------------- DDP


def ddp(folder, iterations=200, **wrapping):
    model = DistributedDataParallel(Network(), **wrapping)
    opt = make_optimizer(model)
    found = {"theta": [], "gamma": []}
    for k in range(iterations):

        def closure(k=k):
            opt.zero_grad()
            back_propagate(model, k)

        opt.step(closure)
        found["theta"].append(theta(model))
        found["gamma"].append(opt.gamma)
    return {name: torch.stack(values) for name, values in found.items()}


def ddp_with_views(folder):
    return ddp(folder, 20, gradient_as_bucket_view=True)


def ddp_clipped(folder):
    model = DistributedDataParallel(Network())
    return walk(model, make_optimizer(model, max_grad_norm=0.3), 10)


def accumulated(folder):
    """Gradient accumulation: only the last micro-batch of a pass synchronises."""
    model = DistributedDataParallel(Network())
    opt = make_optimizer(model)
    found = []
    for k in range(10):
        x, y = (mine(t).chunk(2) for t in mini_batch(k))
        for _ in opt.passes():
            opt.zero_grad()
            for i in range(2):
                with contextlib.nullcontext() if i == 1 else model.no_sync():
                    (STEEP * nn.functional.mse_loss(model(x[i]), y[i]) / 2).backward()
        found.append(theta(model))
    return {"theta": torch.stack(found)}


# --------------------------------------------------------------------- FSDP2 and tensor parallelism


def sharded(model, mesh):
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square():
    return init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )


def fsdp(folder):
    model = sharded(Network(), line())
    return walk(model, make_optimizer(model), 15)


def fsdp_clipped(folder):
    model = sharded(Network(), line())
    return walk(model, make_optimizer(model, max_grad_norm=0.3), 10)


def fsdp_replicated(folder):
    model = sharded(Network(), square())
    return walk(model, make_optimizer(model), 15)


def fsdp_mixed(folder):
    """Three layers: on a mesh of all ranks, on a group of ranks, and not sharded.

    The second is replicated between the groups.
    """
    model, mesh = Network(), square()
    fully_shard(model[0], mesh=line())
    fully_shard(model[2], mesh=mesh["shard"])
    by_hand = averaged(model[2].parameters(), mesh.get_group("replicate"))
    whole = averaged(model[4].parameters())
    return walk(model, make_optimizer(model), 15, between=lambda: (by_hand(), whole()))


def fsdp_wide(folder):
    """Shards that are large enough to be worked on in chunks."""
    model = sharded(Network((300, 900, 3)), line())
    return walk(model, make_optimizer(model, lr=0.02), 4, inputs=300)


def fsdp_low_precision(folder):
    """The same rows on every rank, so that averaging rounds nothing."""
    model = sharded(Network(dtype=torch.bfloat16), line())
    return walk(model, make_optimizer(model), 10, part=(0, 1), dtype=torch.bfloat16)


class WithExtra(nn.Module):
    """A layer that takes part in some passes only."""

    def __init__(self):
        super().__init__()
        self.first, self.extra = Network((6, 3)), Network((3, 3))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        x = self.first(x)
        return self.extra(x) if self.passes % 3 else x


def fsdp_holes(folder):
    model = WithExtra()
    fully_shard(model.extra, mesh=line())
    fully_shard(model, mesh=line())
    return walk(model, make_optimizer(model), 12)


def scaled(model, part=None):
    """Training with a GradScaler, which overflows in the second pass of iteration 3.

    Only some ranks have the rows that overflow.
    """
    opt, scaler = make_optimizer(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = {"theta": [], "gamma": [], "scale": []}
    for k in range(8):
        x, y = mini_batch(k)
        for half, view in enumerate((opt.first_pass, opt)):
            spoilt = y.clone()
            if (k, half) == (3, 1):
                spoilt[1] = torch.inf
            opt.zero_grad()
            scaler.scale(
                STEEP * nn.functional.mse_loss(model(mine(x, part)), mine(spoilt, part))
            ).backward()
            scaler.step(view)
        scaler.update()
        found["theta"].append(theta(model))
        found["gamma"].append(opt.gamma)
        found["scale"].append(torch.tensor(scaler.get_scale()))
    return {name: torch.stack(values) for name, values in found.items()}


def fsdp_scaled(folder):
    return scaled(sharded(Network(), line()))


def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor(folder):
    """Every rank has all rows, a shard of the first two layers, and the whole last layer."""
    model = tensor_parallel(Network((6, 8, 8, 3)), line())
    return walk(model, make_optimizer(model), 15, part=(0, 1))


def tensor_and_fsdp(folder):
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
    )
    mesh._flatten()  # as DTensor advises: sums over both dimensions are one collective then
    model = sharded(tensor_parallel(Network((6, 8, 8, 3)), mesh["tensor"]), mesh["data"])
    return walk(model, make_optimizer(model), 15, part=(mesh.get_local_rank("data"), mesh.size(0)))


# ----------------------------------------------------------------------------------------- variants

VARIANTS = {
    "every third": {"tune_every": 3},
    "relative, every other": {"relative": True, "tune_every": 2},
    "per group": {"per_group": True},
    "AdamW": {"base": torch.optim.AdamW, "lr": 0.01, "tune_every": 3},
    "momentum": {
        "base": torch.optim.SGD,
        "momentum": 0.9,
        "lr": 0.01,
        "tune_every": 2,
        "per_group": True,
    },
}


def ddp_variants(folder):
    return {
        name: walk(*pair(DistributedDataParallel(Network()), options), 20)
        for name, options in VARIANTS.items()
    }


def fsdp_variants(folder):
    return {
        name: walk(*pair(sharded(Network(), line()), options), 20)
        for name, options in VARIANTS.items()
    }


BETWEEN = 13
"""So many passes end between the two of an iteration for T = 1, 2 and 3: cycles of 2, 3 and 4."""
MOMENTS = (BETWEEN - 1, BETWEEN, BETWEEN + 1)


def fsdp_variants_resumed(folder):
    """Saved before, between and after the two passes of an iteration, for every variant."""
    found = {}
    for name, options in VARIANTS.items():
        for moment in MOMENTS:
            model, opt = pair(sharded(Network(), line()), options)
            k = advance(model, opt, 0, moment)
            assert opt.pending == (moment == BETWEEN)
            where = folder / f"{name}-{moment}"
            save(model, opt, where)
            other, resumed = pair(
                sharded(Network(), line()), options | {"lr": 0.7}
            )  # what is loaded counts
            load(other, resumed, where)
            advance(other, resumed, k, PASSES - moment)
            found[name, moment] = {"theta": theta(other), "gamma": resumed.gamma}
    return found


def pair(model, options):
    if "base" not in options:
        return model, make_optimizer(model, **options)
    of_base = {name: options[name] for name in ("lr", "momentum") if name in options}
    rest = {name: value for name, value in options.items() if name not in ("base", *of_base)}
    weights, biases = (
        [p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False)
    )
    groups = [
        {"params": weights, "weight_decay": 0.01},
        {"params": biases, "lr": of_base["lr"] / 2},
    ]
    return model, StepTuned(options["base"](groups, **of_base), max_grad_norm=0.5, **rest)


def advance(model, opt, k, passes):
    """Make some passes from mini-batch k, whose first pass may be done. Returns the next k."""
    for _ in range(passes):
        opt.zero_grad()
        back_propagate(model, k)
        if opt.needs_second_pass and not opt.pending:
            opt.half_step()
        else:
            opt.step()
            k += 1
    return k


# -------------------------------------------------------------------------------------- checkpoints

PASSES = 26


def go_on(model, opt, begin, end=PASSES, **more):
    """From one back-propagation to another; odd ones are second passes."""
    for i in range(begin, end):
        if i % 2 == 0:
            opt.zero_grad()
        back_propagate(model, i // 2, **more)
        opt.half_step() if i % 2 == 0 else opt.step()


def save(model, opt, folder):
    model_state, opt_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optimizer": opt_state}, checkpoint_id=folder)


def load(model, opt, folder):
    model_state, opt_state = get_state_dict(model, opt)
    state = {"model": model_state, "optimizer": opt_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def checkpointed(folder):
    """Saved after 8 passes, and after 9: between the two of an iteration."""
    model = sharded(Network(), line())
    opt = make_optimizer(model)
    for begin, end in ((0, 8), (8, 9), (9, PASSES)):
        go_on(model, opt, begin, end)
        if end < PASSES:
            save(model, opt, folder / f"after-{end}")
    return {"theta": theta(model), "gamma": opt.gamma}


def resumed(folder):
    found = {}
    for begin in (8, 9):
        model = sharded(Network(), line())
        opt = make_optimizer(model, lr=0.7)  # what is loaded counts
        load(model, opt, folder / f"after-{begin}")
        go_on(model, opt, begin)
        found[begin] = {"theta": theta(model), "gamma": opt.gamma}
    return found


# -------------------------------------------------------------------------------------- a rank dies


def killed(folder):
    """Start or resume. A rank kills itself during a backward pass, unless it did so before."""
    model = sharded(Network(), line())
    opt = make_optimizer(model)
    saved = sorted(folder.glob("saved-*"))
    begin = int(saved[-1].name.split("-")[1]) if saved else 0
    if saved:
        load(model, opt, saved[-1])
    for i in range(begin, PASSES):
        if i == 17 and dist.get_rank() == 1 and not saved:
            model[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        go_on(model, opt, i, i + 1)
        if i % 5 == 3:
            save(model, opt, folder / f"saved-{i + 1:02d}")
    return {"theta": theta(model), "gamma": opt.gamma}


# ---------------------------------------------------------------------------------- what is refused


def half_scaled():
    """The first of two parameters, whose mesh a scaler uses, is not sharded."""
    kinds = [Replicate()], [Shard(0)]
    params = [nn.Parameter(distribute_tensor(torch.ones(4), line(), kind)) for kind in kinds]
    for p in params:
        p.grad = p.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    opt = StepTunedSGD(params)
    scaler.step(opt.first_pass)


def refusals(folder):
    """The error message of each case."""
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )  # here, because it warns of itself when it is imported

    def said(work):
        try:
            work()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    elsewhere = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])
    model = sharded(Network(), line())
    opt = make_optimizer(model)
    walk(model, opt, 1)
    single = Network()
    plain = make_optimizer(single)
    walk(single, plain, 1)
    return {
        "ZeRO": said(
            lambda: ZeroRedundancyOptimizer(
                Network().parameters(), optimizer_class=StepTunedSGD, lr=0.1
            )
        ),
        "FSDP1": said(
            lambda: StepTunedSGD(FullyShardedDataParallel(Network(), device_id="cpu").parameters())
        ),
        "FSDP1, its parameters": said(
            lambda: StepTunedSGD(
                FullyShardedDataParallel(
                    Network(), device_id="cpu", use_orig_params=True
                ).parameters()
            )
        ),
        "elsewhere": said(lambda: StepTunedSGD([nn.Parameter(elsewhere)])),
        "another way": said(lambda: opt.load_state_dict(plain.state_dict())),
        "and back": said(lambda: plain.load_state_dict(opt.state_dict())),
        "several places": said(half_scaled),
        "Algorithm 1": said(lambda: StepTunedGD(model.parameters())),
        "Armijo": said(lambda: ArmijoGD(model.parameters())),
        "untouched": theta(model),
    }


if __name__ == "__main__":
    where = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        result = globals()[name](where)
        torch.save(result, where / f"{name}-{dist.get_world_size()}-{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()
